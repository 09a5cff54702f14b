/* SPDX-License-Identifier: Apache-2.0
 * Shadows: operations of device buffers that run on copies in host memory.  The device side is two copies, out before
 * the operation and in after it; between them the host's plan runs, as for CPU tensors, with the same sums.  Small
 * operations do so for their latency, and all sums of a group one of whose members cannot compile kernels.
 *
 *   one stream   wait ready -- copy out -- write flag 0 ..... wait flag 1 -- copy in -- done event -- write end
 *   engine                          the plan on host memory ...../
 *
 * Not the kernels' path: that is launch_step.c with plans for staged ranks. */
#include "base/clock.h"
#include "engine/internal.h"

#include <string.h>

#define ALIGNMENT   256u
#define TINY_BYTES  (128u << 10)
#define SMALL_BYTES (2u << 20) /* of one reduction that the engine role does by itself */

enum { STEP_OUT, STEP_NET, STEP_IN, STEPS };

struct gb_shadow {
    struct gb_plan plan; /* of the device side */
    struct gb_step step[STEPS];
    uint32_t dep[2];
    void *mem; /* pinned: input, then output */
    void *out;
    uint64_t in_bytes, out_bytes;
    uint8_t has_begun, is_open; /* [E] */
};

static uint64_t sum(const uint64_t *counts, uint64_t each, uint32_t n)
{
    uint64_t total = 0;
    for (uint32_t r = 0; r < n; r++) total += counts ? counts[r] : each;
    return total;
}

/* The larger of input and output, over all ranks: from what they agree on.  0 where they do not. */
static uint64_t agreed_bytes(const struct gb_group *group, const struct gpubridge_op *d)
{
    uint64_t count = d->count;
    if (d->kind == GPUBRIDGE_ALL_GATHER) count = sum(d->recv_counts, d->count, group->size);
    if (d->kind == GPUBRIDGE_REDUCE_SCATTER) count = sum(d->send_counts, d->count, group->size);
    if (d->kind == GPUBRIDGE_GATHER || d->kind == GPUBRIDGE_SCATTER) count *= group->size;
    if (d->kind == GPUBRIDGE_ALL_TO_ALL || d->kind == GPUBRIDGE_BARRIER) count = 0; /* rows are each rank's own */
    return count * gb_dtype_bytes(d->dtype);
}

/* May the messages be encoded?  That is work for the device, at any size. */
static int may_encode(const struct gb_group *group, const struct gpubridge_op *d, uint64_t bytes)
{
    if (d->codec != GPUBRIDGE_CODEC_DEFAULT) return d->codec != GPUBRIDGE_CODEC_NONE;
    return group->codec != GB_CODEC_NONE && bytes >= group->codec_min_bytes;
}

int gb_shadow_wanted(const struct gb_group *group, const struct gpubridge_op *d)
{
    if (!group->any_staged || d->kind == GPUBRIDGE_BARRIER) return 0;
    if (group->host_bytes == UINT64_MAX) return 1;
    const uint64_t bytes = agreed_bytes(group, d);
    return group->size > 1 && bytes > 0 && bytes <= group->host_bytes && !may_encode(group, d, bytes);
}

static void plan_device(struct gb_shadow *s, int is_alone)
{
    const uint64_t out_at = (uint64_t)((char *)s->out - (char *)s->mem);
    /* One stream while nothing else is under way; else the copy out need not wait for the operation before it. */
    s->step[STEP_OUT] = (struct gb_step){.kind = GB_STEP_COPY,
                                         .queue = is_alone ? GB_QUEUE_IN : GB_QUEUE_OUT,
                                         .bytes = s->in_bytes,
                                         .src = {0, GB_BUF_IN},
                                         .dst = {0, GB_BUF_HOST}};
    s->dep[0] = STEP_OUT;
    s->dep[1] = STEP_NET;
    s->step[STEP_NET] = (struct gb_step){.kind = GB_STEP_RECV, .dep = 0, .ndep = 1};
    s->step[STEP_IN] = (struct gb_step){.kind = GB_STEP_COPY,
                                        .queue = GB_QUEUE_IN,
                                        .dep = 1,
                                        .ndep = 1,
                                        .bytes = s->out_bytes,
                                        .src = {out_at, GB_BUF_HOST},
                                        .dst = {0, GB_BUF_OUT}};
    s->plan = (struct gb_plan){
        .steps = s->step, .deps = s->dep, .nsteps = s->out_bytes ? STEPS : STEP_IN, .ndeps = s->out_bytes ? 2 : 1};
}

/* After the plan's own memory was got: the plan works on the shadows, the device on the caller's buffers. */
int gb_shadow_prepare(struct gb_op *op, uint64_t in, uint64_t out)
{
    struct gb_launcher *launcher = op->engine->config.launcher;
    struct gb_pool *pool = op->engine->config.pool;
    const uint64_t out_at = (in + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    op->dev = gb_pool_get(pool, sizeof *op->dev);
    op->shadow = gb_pool_get(pool, sizeof *op->shadow);
    if (op->dev) memset(op->dev, 0, sizeof *op->dev);
    if (op->shadow) memset(op->shadow, 0, sizeof *op->shadow);
    if (!op->dev || !op->shadow) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for an operation");
    struct gb_shadow *s = op->shadow;
    s->in_bytes = in;
    s->out_bytes = out;
    s->mem = gb_launcher_host(launcher, out_at + out);
    op->dev->flags = gb_launcher_host(launcher, (STEPS + 1) * sizeof(uint32_t));
    if (!s->mem || !op->dev->flags) return GPUBRIDGE_ERR_NO_MEMORY;
    for (int i = 0; i <= STEPS; i++) atomic_store_explicit(&op->dev->flags[i], 0, memory_order_relaxed);
    s->out = (char *)s->mem + out_at;
    plan_device(s, atomic_load_explicit(&op->group->nops, memory_order_relaxed) == 0);
    op->dev->plan = &s->plan;
    op->dev->poison_is_host = 1;
    memcpy(op->dev->buf, op->buf, sizeof op->dev->buf);
    op->dev->buf[GB_BUF_HOST] = s->mem;
    op->buf[GB_BUF_IN] = s->mem;
    op->buf[GB_BUF_OUT] = s->out;
    return 0;
}

int gb_shadow_begins(struct gb_op *op)
{
    struct gb_shadow *s = op->shadow;
    if (s->has_begun || op->is_aborting) return 0;
    if (s->in_bytes && !atomic_load_explicit(&op->dev->flags[STEP_OUT], memory_order_acquire)) return 0;
    s->has_begun = 1;
    op->begun_ns = gb_now_ns();
    return 1;
}

void gb_shadow_settle(struct gb_op *op)
{
    struct gb_shadow *s = op->shadow;
    const uint32_t device = op->on_device && op->staged_next != op; /* its end is one of op->left */
    if (s->is_open || op->started || !device) return;
    if (op->is_aborting) {
        /* All ones are NaN in every floating-point type.  Nobody writes the shadow any more. */
        if (s->out_bytes) memset(s->out, 0xff, s->out_bytes);
        s->is_open = 1;
        gb_launcher_abort(op->engine->config.launcher, op->dev);
        return;
    }
    if (!s->has_begun || op->left > device) return;
    s->is_open = 1;
    op->opened_ns = gb_now_ns();
    atomic_store_explicit(&op->dev->flags[STEP_NET], 1, memory_order_release);
    gb_launcher_kick(op->engine->config.launcher);
}

int gb_shadow_is_small(const struct gb_op *op)
{
    return op->shadow && op->shadow->in_bytes + op->shadow->out_bytes <= SMALL_BYTES;
}

int gb_shadow_is_tiny(const struct gb_op *op)
{
    return op->shadow && op->shadow->in_bytes + op->shadow->out_bytes <= TINY_BYTES;
}

void gb_shadow_free(struct gb_op *op)
{
    if (!op->shadow) return;
    gb_launcher_host_free(op->engine->config.launcher, op->shadow->mem);
    op->shadow->mem = NULL;
}
