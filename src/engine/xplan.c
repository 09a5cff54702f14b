/* SPDX-License-Identifier: Apache-2.0
 * Plans made ready for execution, and a small cache of them per group.  Any thread; the cache is under the submit lock,
 * which the callers hold. */
#include "engine/internal.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static void xplan_destroy(struct gb_xplan *xplan)
{
    gb_plan_destroy(xplan->plan);
    free(xplan->succ_first);
    free(xplan->succ);
    free(xplan->watch);
    free(xplan->landing);
    free((void *)xplan->guess);
    free(xplan);
}

void gb_xplan_put(struct gb_xplan *xplan)
{
    if (xplan && atomic_fetch_sub_explicit(&xplan->refs, 1, memory_order_acq_rel) == 1) xplan_destroy(xplan);
}

/* Inverts the predecessor lists (a counting sort by predecessor). */
static int build_successors(struct gb_xplan *xplan)
{
    const struct gb_plan *plan = xplan->plan;
    xplan->succ_first = calloc((size_t)plan->nsteps + 2, sizeof *xplan->succ_first);
    xplan->succ = calloc((size_t)plan->ndeps + 1, sizeof *xplan->succ);
    if (!xplan->succ_first || !xplan->succ)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a plan of %u steps", plan->nsteps);
    uint32_t *first = xplan->succ_first;
    for (uint32_t i = 0; i < plan->nsteps; i++)
        for (uint32_t d = 0; d < plan->steps[i].ndep; d++) first[plan->deps[plan->steps[i].dep + d] + 2]++;
    for (uint32_t i = 2; i < plan->nsteps + 2; i++) first[i] += first[i - 1];
    for (uint32_t i = 0; i < plan->nsteps; i++)
        for (uint32_t d = 0; d < plan->steps[i].ndep; d++)
            xplan->succ[first[plan->deps[plan->steps[i].dep + d] + 1]++] = i;
    return 0;
}

static int is_net(const struct gb_step *step)
{
    return step->kind == GB_STEP_SEND || step->kind == GB_STEP_RECV;
}

static int reads(const struct gb_step *step, const struct gb_ref *at, uint64_t bytes)
{
    if (step->kind != GB_STEP_COPY && step->kind != GB_STEP_SEND) return 0;
    return step->src.buf == at->buf && step->src.off < at->off + bytes && at->off < step->src.off + step->bytes;
}

/* The copy that takes a message to the device, when nothing else reads it in the staging. */
static uint32_t landing_of(const struct gb_xplan *xplan, uint32_t recv)
{
    const struct gb_step *message = &xplan->plan->steps[recv];
    uint32_t found = GB_NO_STEP;
    for (uint32_t s = xplan->succ_first[recv]; s < xplan->succ_first[recv + 1]; s++) {
        const struct gb_step *step = &xplan->plan->steps[xplan->succ[s]];
        if (!reads(step, &message->dst, message->bytes)) continue;
        if (found != GB_NO_STEP || step->kind != GB_STEP_COPY || step->bytes != message->bytes ||
            step->src.off != message->dst.off)
            return GB_NO_STEP;
        found = xplan->succ[s];
    }
    return found;
}

/* Which messages may stay in their senders' memory until they go to the device. */
/* A message that is read where it lies takes a kernel that looks whether it lies where it was expected.  On a device
 * that the sender uses, too, each kernel waits for the other process's turn to end, which costs more than a copy of a
 * few megabytes: there 16 MiB in such messages took 7.5 ms on an H200 and 4.5 over loopback TCP, 64 MiB in larger
 * ones 9.5 and 10.0; on two devices 3.4 and 3.8, 5.3 and 13.0 (bench/results/gpu/all_reduce_shm_h200x2.json). */
static uint64_t least_loan(enum gb_lends how)
{
    if (how == GB_LENDS_NOTHING) return UINT64_MAX;
    return how == GB_LENDS_SAME_DEVICE ? (8u << 20) - 1 : GB_EAGER_BYTES;
}

static int build_landing(struct gb_xplan *xplan, const struct gb_group *group)
{
    const struct gb_plan *plan = xplan->plan;
    xplan->landing = malloc(((size_t)plan->nsteps + 1) * sizeof *xplan->landing);
    if (!xplan->landing) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a plan of %u steps", plan->nsteps);
    for (uint32_t i = 0; i <= plan->nsteps; i++) xplan->landing[i] = GB_NO_STEP;
    int any = 0;
    for (uint32_t i = 0; i < plan->nsteps; i++) {
        const struct gb_step *step = &plan->steps[i];
        if (step->kind != GB_STEP_RECV || step->bytes <= least_loan(group->lends[step->peer])) continue;
        uint32_t copy = landing_of(xplan, i);
        if (copy == GB_NO_STEP) continue;
        xplan->landing[i] = copy;
        xplan->landing[copy] = i;
        any = 1;
    }
    if (any) {
        xplan->guess = calloc((size_t)plan->nsteps * GB_GUESSES, sizeof *xplan->guess);
        return xplan->guess ? 0 : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a plan of %u steps", plan->nsteps);
    }
    free(xplan->landing);
    xplan->landing = NULL;
    return 0;
}

static int build_watch(struct gb_xplan *xplan)
{
    const struct gb_plan *plan = xplan->plan;
    xplan->watch = calloc((size_t)plan->nsteps + 1, sizeof *xplan->watch);
    if (!xplan->watch) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a plan of %u steps", plan->nsteps);
    for (uint32_t i = 0; i < plan->nsteps; i++) {
        if (is_net(&plan->steps[i])) {
            xplan->nnet++;
            continue;
        }
        int watched = xplan->landing && xplan->landing[i] != GB_NO_STEP;
        for (uint32_t s = xplan->succ_first[i]; s < xplan->succ_first[i + 1]; s++)
            watched |= is_net(&plan->steps[xplan->succ[s]]);
        if (watched) xplan->watch[xplan->nwatch++] = i;
    }
    return 0;
}

static int xplan_create(struct gb_group *group, const struct gb_topo *topo, const struct gb_plan_spec *spec,
                        struct gb_xplan **out)
{
    struct gb_xplan *xplan = calloc(1, sizeof *xplan);
    if (!xplan) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a plan");
    atomic_init(&xplan->refs, 1);
    int rc = gb_plan_build(topo, spec, group->rank, &xplan->plan);
    if (!rc) rc = build_successors(xplan);
    if (!rc && group->lends && topo->staged[group->rank]) rc = build_landing(xplan, group);
    if (!rc) rc = build_watch(xplan);
    if (rc) {
        xplan_destroy(xplan);
        return rc;
    }
    *out = xplan;
    return 0;
}

static void spec_hash(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint8_t out[16])
{
    struct {
        uint64_t topo, count;
        int32_t op, dtype, reduce_op, codec;
        uint32_t root, feedback;
        XXH128_hash_t lists[3]; /* of the counts; zero where there are none */
    } facts;
    memset(&facts, 0, sizeof facts);
    facts.topo = (uint64_t)(uintptr_t)topo;
    facts.count = spec->count;
    facts.op = spec->op;
    facts.dtype = spec->dtype;
    facts.reduce_op = spec->reduce_op;
    facts.root = spec->root;
    facts.codec = gb_spec_codec(topo, spec);
    facts.feedback = spec->feedback;
    const uint64_t *lists[] = {spec->counts, spec->send_counts, spec->recv_counts};
    for (int i = 0; i < 3; i++)
        if (lists[i]) facts.lists[i] = XXH3_128bits(lists[i], topo->nranks * sizeof *lists[i]);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(&facts, sizeof facts));
    memcpy(out, canonical.digest, 16);
}

int gb_xplan_get(struct gb_group *group, const struct gb_topo *topo, const struct gb_plan_spec *spec,
                 struct gb_xplan **out)
{
    uint8_t hash[16];
    spec_hash(topo, spec, hash);
    const size_t slots = sizeof group->cache / sizeof *group->cache;
    for (size_t i = 0; i < slots; i++) {
        struct gb_xplan *hit = group->cache[i];
        if (hit && memcmp(hit->hash, hash, sizeof hash) == 0) {
            atomic_fetch_add_explicit(&hit->refs, 1, memory_order_relaxed);
            *out = hit;
            return 0;
        }
    }
    struct gb_xplan *xplan = NULL;
    GB_TRY(xplan_create(group, topo, spec, &xplan));
    memcpy(xplan->hash, hash, sizeof hash);
    uint32_t slot = group->cache_pos++ % slots;
    gb_xplan_put(group->cache[slot]);
    group->cache[slot] = xplan;
    atomic_fetch_add_explicit(&xplan->refs, 1, memory_order_relaxed);
    *out = xplan;
    return 0;
}

void gb_group_flush_plans(struct gb_group *group)
{
    for (size_t i = 0; i < sizeof group->cache / sizeof *group->cache; i++) {
        gb_xplan_put(group->cache[i]);
        group->cache[i] = NULL;
    }
}
