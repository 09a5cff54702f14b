/* SPDX-License-Identifier: Apache-2.0
 * The launcher's memory: device scratch and pinned host memory, cut from slabs that stay until the launcher closes, or
 * the limit is reached, since freeing device memory waits for the whole device.  First fit, neighbours joined again.
 * Any thread.  Staging that is shared comes from regions (launch_share.c). */
#include "base/clock.h"
#include "engine/launch.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ALIGNMENT      256u
#define DEVICE_SLAB    (32u << 20)
#define HOST_SLAB      (8u << 20)
#define ROUND_UP(n, a) (((n) + (a) - 1) / (a) * (a))

struct pool_block {
    struct pool_block *next; /* by offset; blocks tile the slab */
    uint64_t offset, bytes;
    uint32_t uses; /* its owner, and peers that may still read it; 0: free */
};

struct pool_slab {
    struct pool_slab *next;
    char *base;
    uint64_t bytes;
    struct pool_block *blocks;
    struct gb_region region; /* base NULL: the device's own allocation */
};

void gb_launch_pool_init(struct gb_launch_pool *pool, struct gb_device *device, enum gb_pool_kind kind)
{
    pool->device = device;
    pool->kind = kind;
    pool->slabs = NULL;
    pool->net = NULL;
    pthread_mutex_init(&pool->lock, NULL);
}

static void slab_free_memory(struct gb_launch_pool *pool, struct pool_slab *slab)
{
    if (slab->region.base)
        gb_launch_region_free(pool, &slab->region);
    else if (pool->kind != GB_POOL_DEVICE)
        gb_device_host_free(pool->device, slab->base);
    else
        gb_device_free(pool->device, slab->base);
}

void gb_launch_pool_fini(struct gb_launch_pool *pool)
{
    struct gb_device_saved saved;
    int entered = pool->slabs && gb_device_enter(pool->device, &saved) == 0;
    while (pool->slabs) {
        struct pool_slab *slab = pool->slabs;
        pool->slabs = slab->next;
        while (slab->blocks) {
            struct pool_block *block = slab->blocks;
            slab->blocks = block->next;
            free(block);
        }
        if (entered) slab_free_memory(pool, slab);
        free(slab);
    }
    if (entered) gb_device_leave(pool->device, &saved);
    pthread_mutex_destroy(&pool->lock);
}

/* Cuts `bytes` from a free block.  NULL when no block is large enough, or the rest cannot be described. */
static void *take(struct pool_slab *slab, uint64_t bytes)
{
    for (struct pool_block *b = slab->blocks; b; b = b->next) {
        if (b->uses || b->bytes < bytes) continue;
        if (b->bytes > bytes) {
            struct pool_block *rest = malloc(sizeof *rest);
            if (!rest) return NULL;
            *rest = (struct pool_block){b->next, b->offset + bytes, b->bytes - bytes, 0};
            b->next = rest;
            b->bytes = bytes;
        }
        b->uses = 1;
        return slab->base + b->offset;
    }
    return NULL;
}

/* Memory that cannot be shared does as well, with copies. */
static int slab_memory(struct gb_launch_pool *pool, struct gb_net *net, uint64_t bytes, struct pool_slab *slab)
{
    struct gb_device_saved saved;
    void *base = NULL;
    GB_TRY(gb_device_enter(pool->device, &saved));
    int rc = net ? gb_launch_region_make(pool, net, bytes, &slab->region) : GPUBRIDGE_ERR_UNSUPPORTED;
    if (!rc)
        base = slab->region.base;
    else if (pool->kind != GB_POOL_DEVICE)
        rc = gb_device_host_alloc(pool->device, bytes, &base);
    else
        rc = gb_device_alloc(pool->device, bytes, &base);
    gb_device_leave(pool->device, &saved);
    slab->base = base;
    return rc;
}

/* The lock is held, but not meanwhile: a driver call can be held off for long, and the engine gives memory back. */
static int add_slab(struct gb_launch_pool *pool, uint64_t bytes)
{
    struct gb_net *net = pool->net;
    struct pool_slab *slab = calloc(1, sizeof *slab);
    struct pool_block *all = calloc(1, sizeof *all);
    int rc = slab && all ? 0 : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to describe a slab");
    pthread_mutex_unlock(&pool->lock);
    if (!rc) rc = slab_memory(pool, net, bytes, slab);
    pthread_mutex_lock(&pool->lock);
    if (rc) {
        free(slab);
        free(all);
        return rc;
    }
    *all = (struct pool_block){NULL, 0, bytes, 0};
    slab->next = pool->slabs;
    slab->bytes = bytes;
    slab->blocks = all;
    pool->slabs = slab;
    return 0;
}

/* Gives back what lies unused, but for regions, which peers have mapped.  Freeing waits for the device: only where
 * there is no other way to stay within the limit. */
static void trim(struct gb_launcher *launcher, struct gb_launch_pool *pool)
{
    struct gb_device_saved saved;
    struct pool_slab *unused = NULL;
    pthread_mutex_lock(&pool->lock);
    for (struct pool_slab **at = &pool->slabs; *at;) {
        struct pool_slab *slab = *at;
        if (slab->region.base || slab->blocks->uses || slab->blocks->next) {
            at = &slab->next;
            continue;
        }
        *at = slab->next;
        slab->next = unused;
        unused = slab;
        atomic_fetch_sub(&launcher->pool_bytes, slab->bytes);
    }
    pthread_mutex_unlock(&pool->lock);
    int entered = unused && gb_device_enter(pool->device, &saved) == 0;
    while (unused) {
        struct pool_slab *slab = unused;
        unused = slab->next;
        if (entered) slab_free_memory(pool, slab);
        free(slab->blocks);
        free(slab);
    }
    if (entered) gb_device_leave(pool->device, &saved);
}

/* May the pools grow by a slab?  They always may when nobody else uses any, so that a single operation is never
 * refused. */
static int has_room(const struct gb_launcher *launcher, uint64_t slab, uint64_t beside)
{
    uint64_t limit = atomic_load(&launcher->pool_limit);
    return !limit || atomic_load(&launcher->pool_bytes) + slab <= limit || atomic_load(&launcher->pool_used) <= beside;
}

static void *take_any(struct gb_launch_pool *pool, uint64_t bytes)
{
    void *mem = NULL;
    for (struct pool_slab *s = pool->slabs; s && !mem; s = s->next)
        if (!pool->net || s->region.base) mem = take(s, bytes);
    return mem;
}

/* Lock held. */
static void *grow(struct gb_launcher *launcher, struct gb_launch_pool *pool, uint64_t bytes, uint64_t slab)
{
    void *mem = NULL;
    if (add_slab(pool, slab)) return NULL;
    atomic_fetch_add(&launcher->pool_bytes, slab);
    for (struct pool_slab *s = pool->slabs; s && !mem; s = s->next) mem = take(s, bytes);
    if (!mem) (void)GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to describe a block");
    return mem;
}

/* `beside`: what the caller has already.  Operations that end give memory back: worth a wait before an operation is
 * refused for want of it. */
static void *pool_get(struct gb_launcher *launcher, struct gb_launch_pool *pool, uint64_t bytes, uint64_t beside)
{
    const struct timespec nap = {.tv_nsec = 200000};
    uint64_t give_up_ns = 0;
    bytes = ROUND_UP(bytes ? bytes : 1, ALIGNMENT);
    pthread_mutex_lock(&pool->lock);
    const uint64_t slab = ROUND_UP(bytes, pool->kind == GB_POOL_DEVICE || pool->net ? DEVICE_SLAB : HOST_SLAB);
    void *mem = take_any(pool, bytes);
    while (!mem && !has_room(launcher, slab, beside)) {
        const uint64_t now = gb_now_ns();
        if (!give_up_ns) give_up_ns = now + atomic_load(&launcher->pool_wait_ns);
        if (now > give_up_ns) break;
        pthread_mutex_unlock(&pool->lock);
        trim(launcher, &launcher->mem);
        trim(launcher, &launcher->host);
        trim(launcher, &launcher->stage);
        nanosleep(&nap, NULL);
        pthread_mutex_lock(&pool->lock);
        mem = take_any(pool, bytes);
    }
    if (!mem && has_room(launcher, slab, beside))
        mem = grow(launcher, pool, bytes, slab);
    else if (!mem)
        (void)GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY,
                      "%llu bytes of %s memory do not fit beside %llu in use, and %u s have brought none; raise "
                      "GPUBRIDGE_MEM_BYTES (%llu) or keep fewer operations in flight",
                      (unsigned long long)bytes, pool->kind == GB_POOL_DEVICE ? "device" : "pinned",
                      (unsigned long long)atomic_load(&launcher->pool_used),
                      (unsigned)(atomic_load(&launcher->pool_wait_ns) / 1000000000u),
                      (unsigned long long)atomic_load(&launcher->pool_limit));
    if (mem) atomic_fetch_add(&launcher->pool_used, bytes);
    pthread_mutex_unlock(&pool->lock);
    return mem;
}

static void join_next(struct pool_block *block)
{
    struct pool_block *next = block->next;
    if (!next || block->uses || next->uses) return;
    block->bytes += next->bytes;
    block->next = next->next;
    free(next);
}

/* Changes the uses of the block that holds `offset`.  Returns its bytes once it has none. */
static uint64_t slab_use(struct pool_slab *slab, uint64_t offset, int more)
{
    struct pool_block *before = NULL, *b = slab->blocks;
    while (b && b->offset + b->bytes <= offset) {
        before = b;
        b = b->next;
    }
    if (!b || !b->uses) return 0;
    uint64_t bytes = b->bytes;
    b->uses += (uint32_t)more;
    if (b->uses) return 0;
    join_next(b);
    if (before) join_next(before);
    return bytes;
}

static void pool_use(struct gb_launcher *launcher, struct gb_launch_pool *pool, const void *mem, int more)
{
    if (!mem) return;
    uintptr_t at = (uintptr_t)mem;
    pthread_mutex_lock(&pool->lock);
    for (struct pool_slab *s = pool->slabs; s; s = s->next) {
        uintptr_t base = (uintptr_t)s->base;
        if (at < base || at >= base + s->bytes) continue;
        atomic_fetch_sub(&launcher->pool_used, slab_use(s, at - base, more));
        break;
    }
    pthread_mutex_unlock(&pool->lock);
}

static void pool_put(struct gb_launcher *launcher, struct gb_launch_pool *pool, void *mem)
{
    pool_use(launcher, pool, mem, -1);
}

void gb_launcher_set_limit(struct gb_launcher *launcher, uint64_t bytes, uint64_t wait_ns)
{
    atomic_store(&launcher->pool_limit, bytes);
    atomic_store(&launcher->pool_wait_ns, wait_ns);
}

void *gb_launcher_mem(struct gb_launcher *launcher, uint64_t bytes, uint64_t beside)
{
    return pool_get(launcher, &launcher->mem, bytes, beside);
}

void gb_launcher_mem_free(struct gb_launcher *launcher, void *mem)
{
    pool_put(launcher, &launcher->mem, mem);
}

void *gb_launcher_host(struct gb_launcher *launcher, uint64_t bytes)
{
    return pool_get(launcher, &launcher->host, bytes, 0);
}

void gb_launcher_host_free(struct gb_launcher *launcher, void *mem)
{
    pool_put(launcher, &launcher->host, mem);
}

void *gb_launcher_stage(struct gb_launcher *launcher, uint64_t bytes, uint64_t beside)
{
    return pool_get(launcher, &launcher->stage, bytes, beside);
}

void gb_launcher_stage_free(struct gb_launcher *launcher, void *mem)
{
    pool_put(launcher, &launcher->stage, mem);
}

void gb_launcher_stage_keep(struct gb_launcher *launcher, const void *at)
{
    pool_use(launcher, &launcher->stage, at, 1);
}

void gb_launcher_stage_back(struct gb_launcher *launcher, const void *at)
{
    pool_use(launcher, &launcher->stage, at, -1);
}

void *gb_launch_keep(struct gb_launcher *launcher, uint64_t bytes)
{
    void *mem = pool_get(launcher, &launcher->host, bytes, 0);
    if (mem) atomic_fetch_sub(&launcher->pool_used, ROUND_UP(bytes, ALIGNMENT));
    return mem;
}

void gb_launch_unkeep(struct gb_launcher *launcher, void *mem, uint64_t bytes)
{
    if (mem) atomic_fetch_add(&launcher->pool_used, ROUND_UP(bytes, ALIGNMENT));
    pool_put(launcher, &launcher->host, mem);
}
