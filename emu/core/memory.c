/* SPDX-License-Identifier: Apache-2.0
 * Device, pinned and registered memory, all of it host memory.  Fresh and freed blocks hold NaN patterns; freed ones
 * stay in quarantine for a while, so that late users are caught or at least read NaN.  With GBEMU_GUARD=1 a device
 * block has two mappings of one memfd: the address handed out is PROT_NONE, only workers use the other one.  */
#include "emu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define POISON_ALLOC 0x7FFBu /* NaN as f16, bf16, and twice as f32 */
#define POISON_FREE  0xFFFDu
#define CANARY       64 /* bytes after each block, checked when it is freed */
#define CANARY_BYTE  0xA5

struct block {
    char *base, *view; /* what the caller holds, what workers use */
    size_t size, mapped;
    enum emu_mem kind;
    int device;
    unsigned flags;
    unsigned busy; /* REGISTERED: copies that are queued or running */
    bool freed;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
/* Sorted by base, never overlapping; all guarded by mu. */
static struct block *blocks;
static size_t block_count, block_room;
static size_t quarantine_bytes;
/* Bases of freed blocks, oldest first. */
static char **freed;
static size_t freed_count, freed_room;

static void *grow(void *p, size_t *room, size_t need, size_t item)
{
    if (need <= *room) return p;
    *room = *room ? *room * 2 : 64;
    p = realloc(p, *room * item);
    if (!p) abort();
    return p;
}

/* Index of the last block whose base is <= p; SIZE_MAX when none. */
static size_t below(const char *p)
{
    size_t lo = 0, hi = block_count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (blocks[mid].base <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo - 1;
}

static struct block *holder(const char *p)
{
    size_t i = below(p);
    if (i == SIZE_MAX) return NULL;
    struct block *b = &blocks[i];
    return p < b->base + b->size || (p == b->base && b->size == 0) ? b : NULL;
}

static void insert(struct block b)
{
    size_t at = below(b.base) + 1;
    blocks = grow(blocks, &block_room, block_count + 1, sizeof *blocks);
    memmove(&blocks[at + 1], &blocks[at], (block_count - at) * sizeof *blocks);
    blocks[at] = b;
    block_count++;
}

static void erase(struct block *b)
{
    size_t at = (size_t)(b - blocks);
    memmove(b, b + 1, (block_count - at - 1) * sizeof *blocks);
    block_count--;
}

static void poison(char *p, size_t size, unsigned pattern)
{
    for (size_t i = 0; i < size; i++) p[i] = (char)(pattern >> (8 * (i & 1)));
}

static bool is_poison(const char *p, size_t size, unsigned pattern)
{
    for (size_t i = 0; i < size; i++)
        if (p[i] != (char)(pattern >> (8 * (i & 1)))) return false;
    return true;
}

static bool map_guarded(struct block *b)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    b->mapped = (b->size + CANARY + page - 1) / page * page;
    int fd = memfd_create("gbemu-device", MFD_CLOEXEC);
    if (fd < 0) return false;
    b->view = MAP_FAILED;
    b->base = MAP_FAILED;
    if (ftruncate(fd, (off_t)b->mapped) == 0) {
        b->view = mmap(NULL, b->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        b->base = mmap(NULL, b->mapped, PROT_NONE, MAP_SHARED, fd, 0);
    }
    close(fd);
    if (b->view != MAP_FAILED && b->base != MAP_FAILED) return true;
    if (b->view != MAP_FAILED) munmap(b->view, b->mapped);
    if (b->base != MAP_FAILED) munmap(b->base, b->mapped);
    return false;
}

static void unmap(struct block *b)
{
    if (b->mapped) {
        munmap(b->view, b->mapped);
        munmap(b->base, b->mapped);
    } else {
        free(b->base);
    }
}

int emu_mem_alloc(struct emu_dev *dev, enum emu_mem kind, size_t size, unsigned flags, void **out)
{
    struct block b = {.size = size, .kind = kind, .device = dev->index, .flags = flags};
    if (size == 0 || size > SIZE_MAX / 2) return EMU_INVALID;
    if (kind == EMU_MEM_DEVICE && emu_conf()->guard) {
        if (!map_guarded(&b)) return EMU_OOM;
    } else {
        void *p = NULL;
        if (posix_memalign(&p, 512, (size + CANARY + 511) / 512 * 512)) return EMU_OOM;
        b.base = b.view = p;
    }
    poison(b.view, size, POISON_ALLOC);
    memset(b.view + size, CANARY_BYTE, CANARY);
    pthread_mutex_lock(&mu);
    insert(b);
    pthread_mutex_unlock(&mu);
    *out = b.base;
    return EMU_OK;
}

/* Called with mu held: really frees the oldest blocks until the quarantine fits. */
static void shrink_quarantine(void)
{
    while (freed_count && quarantine_bytes > emu_conf()->quarantine_bytes) {
        struct block *b = holder(freed[0]);
        memmove(freed, freed + 1, --freed_count * sizeof *freed);
        quarantine_bytes -= b->size;
        if (!is_poison(b->view, b->size, POISON_FREE))
            emu_complain("block %p (%zu bytes) was written after it was freed", (void *)b->base, b->size);
        unmap(b);
        erase(b);
    }
}

/* Called with mu held. */
static struct block *find_exact(void *p, enum emu_mem kind)
{
    struct block *b = holder(p);
    if (b && b->base == (char *)p && b->kind == kind && !b->freed) return b;
    if (b && b->freed)
        emu_complain("double free of %p", p);
    else if (b)
        emu_complain("%p is %s", p, b->base != (char *)p ? "inside a block, not its start" : "memory of another kind");
    else
        emu_complain("%p was not allocated here", p);
    return NULL;
}

int emu_mem_free(struct emu_dev *dev, enum emu_mem kind, void *p)
{
    if (!p) return EMU_OK;
    pthread_mutex_lock(&mu);
    struct block *b = find_exact(p, kind);
    pthread_mutex_unlock(&mu);
    if (!b) return EMU_INVALID;
    emu_exclusive_begin(dev);
    pthread_mutex_lock(&mu);
    b = find_exact(p, kind); /* another thread may have freed it meanwhile */
    int rc = b ? EMU_OK : EMU_INVALID;
    if (b) {
        for (size_t i = 0; i < CANARY; i++)
            if (b->view[b->size + i] != (char)CANARY_BYTE) {
                emu_complain("block %p (%zu bytes) was written past its end", p, b->size);
                break;
            }
        b->freed = true;
        poison(b->view, b->size, POISON_FREE);
        quarantine_bytes += b->size;
        freed = grow(freed, &freed_room, freed_count + 1, sizeof *freed);
        freed[freed_count++] = b->base;
        shrink_quarantine();
    }
    pthread_mutex_unlock(&mu);
    emu_exclusive_end(dev);
    return rc;
}

int emu_mem_register(struct emu_dev *dev, void *p, size_t size, unsigned flags)
{
    if (!p || !size) return EMU_INVALID;
    struct block b = {
        .base = p, .view = p, .size = size, .kind = EMU_MEM_REGISTERED, .device = dev->index, .flags = flags};
    pthread_mutex_lock(&mu);
    size_t i = below(b.base + size - 1);
    int rc = i != SIZE_MAX && blocks[i].base + blocks[i].size > b.base ? EMU_ALREADY_REGISTERED : EMU_OK;
    if (!rc) insert(b);
    pthread_mutex_unlock(&mu);
    return rc;
}

int emu_mem_unregister(void *p)
{
    pthread_mutex_lock(&mu);
    struct block *b = holder(p);
    bool found = b && b->base == (char *)p && b->kind == EMU_MEM_REGISTERED;
    unsigned busy = found ? b->busy : 0;
    if (found && !busy) erase(b);
    pthread_mutex_unlock(&mu);
    if (busy) {
        emu_complain("%p is unregistered under %u copies that are queued or running", p, busy);
        return EMU_NOT_PERMITTED;
    }
    if (!found) emu_complain("%p is not the start of registered memory", p);
    return found ? EMU_OK : EMU_NOT_REGISTERED;
}

void emu_mem_hold(const void *p, bool begins)
{
    pthread_mutex_lock(&mu);
    struct block *b = holder(p);
    if (b && b->kind == EMU_MEM_REGISTERED) b->busy += begins ? 1 : -1u;
    pthread_mutex_unlock(&mu);
}

bool emu_mem_query(const void *p, struct emu_mem_info *out)
{
    pthread_mutex_lock(&mu);
    struct block *b = holder(p);
    bool found = b && !b->freed;
    if (found)
        *out = (struct emu_mem_info){
            .kind = b->kind, .device = b->device, .base = b->base, .size = b->size, .flags = b->flags};
    pthread_mutex_unlock(&mu);
    return found;
}

void *emu_mem_view(const void *p, size_t size, const char *api)
{
    const char *c = p;
    void *view = (void *)(uintptr_t)p;
    const char *wrong = NULL;
    if (size == 0) return view ? view : &emu_thread;
    if (!p) {
        wrong = "is NULL";
    } else {
        pthread_mutex_lock(&mu);
        size_t i = below(c + size - 1);
        struct block *b = i == SIZE_MAX ? NULL : &blocks[i];
        if (b && b->base + b->size > c) {
            if (b->freed)
                wrong = "was freed";
            else if (b->kind != EMU_MEM_REGISTERED && (c < b->base || c + size > b->base + b->size))
                wrong = "is out of the bounds of its allocation";
            else
                view = b->view + (c - b->base);
        }
        pthread_mutex_unlock(&mu);
    }
    if (!wrong) return view;
    emu_thread.api = api;
    emu_complain("%p (%zu bytes) %s", p, size, wrong);
    return NULL;
}

void *emu_mem_alias(const void *p)
{
    pthread_mutex_lock(&mu);
    struct block *b = holder(p);
    char *view = b ? b->view + ((const char *)p - b->base) : (char *)(uintptr_t)p;
    pthread_mutex_unlock(&mu);
    return view;
}

void emu_mem_count(int out[3])
{
    memset(out, 0, 3 * sizeof *out);
    pthread_mutex_lock(&mu);
    for (size_t i = 0; i < block_count; i++)
        if (!blocks[i].freed) out[blocks[i].kind]++;
    pthread_mutex_unlock(&mu);
}
