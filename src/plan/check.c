/* SPDX-License-Identifier: Apache-2.0
 * Structure check of one rank's plan: that steps are well formed and in order, that ranges lie inside their buffers,
 * and that two steps touching the same bytes, one of them writing, are ordered by dependencies alone.  It knows nothing
 * of how plans are built.  For tests and debug builds: time and memory grow with the square of the steps. */
#include "plan/plan.h"

#include <stdlib.h>

#define MAX_PAIRWISE 8192u /* steps: the reachability matrix takes 8 MiB */

/* One range touched by one step, in the address space where input and output overlap as in the in-place form. */
struct use {
    uint64_t lo, hi;
    uint32_t step;
    uint8_t space, is_write; /* 0 user, 1 device scratch, 2 staging, 3 residual */
};

struct check {
    const struct gb_topo *topo;
    const struct gb_plan_spec *spec;
    const struct gb_plan *plan;
    uint32_t rank;
    uint64_t size[GB_BUF_COUNT]; /* of enum gb_buf */
    uint64_t in_at, out_at;
    struct use *uses;
    uint32_t nuses;
};

static int fail(uint32_t step, const char *what)
{
    return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "plan step %u: %s", step, what);
}

static int use(struct check *k, uint32_t i, struct gb_ref ref, uint64_t bytes, int is_write)
{
    if (ref.buf >= GB_BUF_COUNT || ref.off > k->size[ref.buf] || bytes > k->size[ref.buf] - ref.off)
        return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "plan step %u: bytes %llu + %llu are outside buffer %u of %llu", i,
                       (unsigned long long)ref.off, (unsigned long long)bytes, ref.buf,
                       (unsigned long long)k->size[ref.buf]);
    if (bytes == 0) return 0;
    uint64_t base = ref.buf == GB_BUF_IN ? k->in_at : ref.buf == GB_BUF_OUT ? k->out_at : 0;
    static const uint8_t spaces[GB_BUF_COUNT] = {[GB_BUF_DEV] = 1, [GB_BUF_HOST] = 2, [GB_BUF_RESIDUAL] = 3};
    uint8_t space = spaces[ref.buf];
    k->uses[k->nuses++] = (struct use){base + ref.off, base + ref.off + bytes, i, space, (uint8_t)is_write};
    return 0;
}

static int check_message(struct check *k, uint32_t i, uint32_t *next)
{
    const struct gb_step *s = k->plan->steps + i;
    int is_send = s->kind == GB_STEP_SEND;
    if (s->peer >= k->topo->nranks || s->peer == k->rank) return fail(i, "no such peer");
    if (s->crosses != (k->topo->island[s->peer] != k->topo->island[k->rank])) return fail(i, "`crosses` is wrong");
    if (s->queue != GB_QUEUE_NET) return fail(i, "a message belongs to the network's queue");
    if (s->xid != next[2 * s->peer + is_send]++) return fail(i, "messages of a pair are not numbered in order");
    struct gb_ref ref = is_send ? s->src : s->dst;
    if (k->topo->staged[k->rank] && ref.buf != GB_BUF_HOST) return fail(i, "a message outside the staging");
    return use(k, i, ref, s->bytes, !is_send);
}

static int is_device_ref(const struct check *k, struct gb_ref ref)
{
    return !k->topo->staged[k->rank] || ref.buf != GB_BUF_HOST;
}

/* Bytes of what a fold reads or writes. */
static uint64_t fold_bytes(const struct check *k, uint64_t count, int is_acc, int is_enc)
{
    if (is_enc) return gb_codec_bytes(k->plan->codec, count);
    return count * (is_acc ? gb_acc_bytes(k->spec->dtype) : gb_dtype_bytes(k->spec->dtype));
}

static int check_parts(struct check *k, uint32_t i)
{
    const struct gb_step *s = k->plan->steps + i;
    uint32_t island = k->topo->island[k->rank];
    uint32_t mates = k->topo->island_first[island + 1] - k->topo->island_first[island];
    if (s->part > k->plan->nparts || s->nparts > k->plan->nparts - s->part) return fail(i, "parts out of range");
    if (s->kind == GB_STEP_REDUCE && (s->nparts == 0 || s->nparts > GB_REDUCE_MAX_SRC || s->count == 0))
        return fail(i, "a fold without or with too many sources");
    if (s->kind == GB_STEP_VENDOR && (!k->topo->vendor[island] || s->queue != GB_QUEUE_VENDOR))
        return fail(i, "a vendor call outside a vendor island or its queue");
    if (s->negate && (s->kind != GB_STEP_REDUCE || s->negate >> s->nparts || !s->dst_is_acc))
        return fail(i, "a sign for no source");
    if (!s->negate != !s->times) return fail(i, "subtracted sources, or how often, without the other");
    if (s->dst_is_enc && (s->dst_is_acc || k->plan->codec == GB_CODEC_NONE)) return fail(i, "no codec to encode with");
    for (uint32_t p = s->part; p < s->part + s->nparts; p++) {
        const struct gb_part *part = k->plan->parts + p;
        if (!is_device_ref(k, part->ref)) return fail(i, "a part outside device memory");
        if (s->kind == GB_STEP_VENDOR && (part->peer >= mates || part->peer == k->topo->local[k->rank]))
            return fail(i, "no such mate");
        if (s->negate && s->negate >> (p - s->part) & 1 && !part->is_acc)
            return fail(i, "a sign for a source that has none");
        if (part->is_enc && (part->is_acc || part->premul || part->peer >= k->topo->nranks))
            return fail(i, "an encoded source that is something else, too");
        uint64_t bytes = part->bytes;
        if (s->kind == GB_STEP_REDUCE) bytes = fold_bytes(k, s->count, part->is_acc, part->is_enc);
        GB_TRY(use(k, i, part->ref, bytes, s->kind == GB_STEP_VENDOR && part->is_recv));
    }
    if (s->kind == GB_STEP_VENDOR) return 0;
    if (!is_device_ref(k, s->dst)) return fail(i, "a fold into host memory of a staged rank");
    return use(k, i, s->dst, fold_bytes(k, s->count, s->dst_is_acc, s->dst_is_enc), 1);
}

static int check_step(struct check *k, uint32_t i, uint32_t *next)
{
    const struct gb_step *s = k->plan->steps + i;
    if (s->dep > k->plan->ndeps || s->ndep > k->plan->ndeps - s->dep) return fail(i, "dependencies out of range");
    for (uint32_t d = s->dep; d < s->dep + s->ndep; d++)
        if (k->plan->deps[d] >= i) return fail(i, "a dependency on a later step");
    if (s->kind == GB_STEP_SEND || s->kind == GB_STEP_RECV) return check_message(k, i, next);
    if (s->queue == GB_QUEUE_NET) return fail(i, "only messages belong to the network's queue");
    if (s->kind != GB_STEP_COPY) return check_parts(k, i);
    GB_TRY(use(k, i, s->src, s->bytes, 0));
    return use(k, i, s->dst, s->bytes, 1);
}

static int by_place(const void *a, const void *b)
{
    const struct use *x = a, *y = b;
    if (x->space != y->space) return x->space < y->space ? -1 : 1;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* before[i]: bit set of the steps that step i waits for, directly or not. */
static void fill_before(const struct gb_plan *plan, uint64_t *before, size_t words)
{
    for (uint32_t i = 0; i < plan->nsteps; i++) {
        uint64_t *row = before + i * words;
        for (uint32_t d = plan->steps[i].dep; d < plan->steps[i].dep + plan->steps[i].ndep; d++) {
            uint32_t s = plan->deps[d];
            for (size_t w = 0; w <= s / 64; w++) row[w] |= before[s * words + w];
            row[s / 64] |= 1ull << s % 64;
        }
    }
}

static int conflict(const struct check *k, const struct use *x, const struct use *y, const uint64_t *before,
                    size_t words)
{
    if (!x->is_write && !y->is_write) return 0;
    if (x->step == y->step) {
        /* A fold or copy may write exactly what it reads; a vendor call may not touch its own output twice. */
        int is_same = x->lo == y->lo && x->hi == y->hi && !(x->is_write && y->is_write);
        return k->plan->steps[x->step].kind == GB_STEP_VENDOR || !is_same;
    }
    uint32_t first = x->step < y->step ? x->step : y->step, last = x->step ^ y->step ^ first;
    return !(before[last * words + first / 64] >> first % 64 & 1);
}

static int check_races(struct check *k)
{
    size_t words = ((size_t)k->plan->nsteps + 63) / 64;
    uint64_t *before = calloc(k->plan->nsteps * words + 1, sizeof *before);
    if (!before) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to check %u steps", k->plan->nsteps);
    fill_before(k->plan, before, words);
    qsort(k->uses, k->nuses, sizeof *k->uses, by_place);
    int rc = 0;
    for (uint32_t i = 0; i < k->nuses && !rc; i++) {
        const struct use *x = k->uses + i;
        for (uint32_t j = i + 1; j < k->nuses && !rc; j++) {
            const struct use *y = k->uses + j;
            if (y->space != x->space || y->lo >= x->hi) break;
            if (conflict(k, x, y, before, words))
                rc =
                    GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "plan steps %u and %u touch bytes %llu.. of space %u without order",
                            x->step, y->step, (unsigned long long)y->lo, y->space);
        }
    }
    free(before);
    return rc;
}

/* Where input and output lie when the caller uses one buffer for both, as gpubridge.h allows per operation. */
static void place_user(struct check *k)
{
    const struct gb_plan_spec *s = k->spec;
    uint64_t before = 0, es = gb_dtype_bytes(s->dtype);
    for (uint32_t r = 0; r < k->rank; r++) before += s->counts ? s->counts[r] : s->count;
    if (s->op == GPUBRIDGE_ALL_GATHER || (s->op == GPUBRIDGE_GATHER && k->rank == s->root)) k->in_at = before * es;
    if (s->op == GPUBRIDGE_REDUCE_SCATTER || (s->op == GPUBRIDGE_SCATTER && k->rank == s->root))
        k->out_at = before * es;
    if (s->op == GPUBRIDGE_ALL_TO_ALL) k->out_at = k->size[GB_BUF_IN];
}

int gb_plan_check(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank,
                  const struct gb_plan *plan)
{
    struct check k = {.topo = topo, .spec = spec, .plan = plan, .rank = rank};
    gb_plan_user_bytes(topo, spec, rank, &k.size[GB_BUF_IN], &k.size[GB_BUF_OUT]);
    k.size[GB_BUF_DEV] = plan->dev_bytes;
    k.size[GB_BUF_HOST] = plan->host_bytes;
    if (spec->feedback && plan->codec)
        k.size[GB_BUF_RESIDUAL] = k.size[GB_BUF_IN] / gb_dtype_bytes(spec->dtype) * sizeof(float);
    place_user(&k);
    k.uses = malloc((2 * (size_t)plan->nsteps + plan->nparts + 1) * sizeof *k.uses);
    uint32_t *next = calloc(2 * (size_t)topo->nranks, sizeof *next);
    if (!k.uses || !next) {
        free(k.uses);
        free(next);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to check %u steps", plan->nsteps);
    }
    int rc = 0;
    for (uint32_t i = 0; i < plan->nsteps && !rc; i++) rc = check_step(&k, i, next);
    if (!rc && !topo->staged[rank] && plan->dev_bytes) rc = fail(0, "device scratch on a CPU rank");
    if (!rc && plan->nsteps <= MAX_PAIRWISE) rc = check_races(&k);
    free(k.uses);
    free(next);
    return rc;
}
