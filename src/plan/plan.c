/* SPDX-License-Identifier: Apache-2.0
 * Builds a plan: checks, chooses the algorithm, lets it emit, gives scratch its final addresses.  Pure; any thread. */
#include "plan/build.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64u

/* Element offsets of the ranks' blocks, for the operations that have some. */
static int make_blocks(struct gb_builder *b)
{
    const struct gb_plan_spec *s = b->spec;
    uint32_t n = b->topo->nranks;
    if (s->op != GPUBRIDGE_ALL_GATHER && s->op != GPUBRIDGE_REDUCE_SCATTER) return 1;
    b->blocks = calloc(n + 1, sizeof *b->blocks);
    for (uint32_t r = 0; b->blocks && r < n; r++)
        b->blocks[r + 1] = b->blocks[r] + (s->counts ? s->counts[r] : s->count);
    return b->blocks != NULL;
}

/* Input and output are tracked block by block, so that a block's chunks come in ascending order. */
static int make_zones(struct gb_builder *b, int flat, uint64_t **zones)
{
    const struct gb_plan_spec *s = b->spec;
    uint32_t n = b->topo->nranks;
    gb_spec_bases(b->topo, s, b->me, &b->in_base, &b->out_base);
    int has_blocks = b->blocks || s->op == GPUBRIDGE_GATHER || s->op == GPUBRIDGE_SCATTER;
    b->nzones = s->op == GPUBRIDGE_ALL_TO_ALL ? 2 * n : has_blocks && !flat ? n : 1;
    *zones = calloc(b->nzones, sizeof **zones);
    b->user = calloc(b->nzones, sizeof *b->user);
    if (!*zones || !b->user) return 0;
    b->zone_first = *zones;
    if (b->nzones == 1) return 1;
    uint64_t in = 0, out = GB_SEPARATE;
    for (uint32_t r = 0; r < n; r++) {
        (*zones)[r] = b->blocks ? b->blocks[r] * b->es : in;
        in += (s->send_counts ? s->send_counts[r] : s->count) * b->es;
        if (b->nzones == n) continue;
        (*zones)[n + r] = out;
        out += (s->recv_counts ? s->recv_counts[r] : s->count) * b->es;
    }
    return 1;
}

static int builder_init(struct gb_builder *b, int flat, uint64_t **zones)
{
    const struct gb_topo *t = b->topo;
    b->isl = t->island[b->me];
    b->loc = t->local[b->me];
    b->mates = t->members + t->island_first[b->isl];
    b->nloc = t->island_first[b->isl + 1] - t->island_first[b->isl];
    b->es = (uint32_t)gb_dtype_bytes(b->spec->dtype);
    b->as = (uint32_t)gb_acc_bytes(b->spec->dtype);
    b->codec = (uint8_t)gb_spec_codec(t, b->spec);
    b->feedback = b->codec && b->spec->feedback;
    b->staged = t->staged[b->me];
    b->vendor = t->vendor[b->isl] && b->nloc > 1 && !flat;
    b->premul = gb_spec_reduces(b->spec) && b->spec->reduce_op == GPUBRIDGE_PREMUL_SUM;
    uint32_t least = b->spec->op == GPUBRIDGE_ALL_REDUCE ? GB_STAGES : 2; /* slots between first and last stage */
    b->depth = b->spec->depth < least ? least : b->spec->depth < MAX_DEPTH ? b->spec->depth : MAX_DEPTH;
    b->plan = calloc(1, sizeof *b->plan);
    b->send_xid = calloc(2 * (size_t)t->nranks, sizeof *b->send_xid);
    b->bump[0] = calloc(2 * (size_t)b->depth, sizeof *b->bump[0]);
    if (!b->plan || !b->send_xid || !b->bump[0]) return 0;
    b->recv_xid = b->send_xid + t->nranks;
    b->bump[1] = b->bump[0] + b->depth;
    return make_blocks(b) && make_zones(b, flat, zones);
}

/* Everything but the plan. */
static void builder_fini(struct gb_builder *b, uint64_t *zones)
{
    free(zones);
    free(b->blocks);
    free(b->send_xid);
    free(b->mark);
    free(b->bump[0]);
    for (uint32_t z = 0; b->user && z < b->nzones; z++) free(b->user[z].span);
    free(b->user);
    free(b->residual.span);
    for (uint32_t i = 0; i < 2; i++) free(b->scratch[i].span);
    for (uint32_t i = 0; i < GB_STAGES; i++) free(b->kept[i].v);
    for (uint32_t i = 0; i <= GB_NOW; i++) free(b->land[i].v);
    free(b->node);
    free(b->fold);
    free(b->call);
}

static void emit(struct gb_builder *b, int flat)
{
    switch (b->spec->op) {
    case GPUBRIDGE_BARRIER:
        gb_barrier(b);
        break;
    case GPUBRIDGE_ALL_REDUCE:
        (flat ? gb_flat_reduce : gb_all_reduce)(b);
        break;
    case GPUBRIDGE_REDUCE:
    case GPUBRIDGE_REDUCE_SCATTER:
        (flat ? gb_flat_reduce : gb_reduce_blocks)(b);
        break;
    case GPUBRIDGE_BROADCAST:
    case GPUBRIDGE_ALL_GATHER:
        (flat ? gb_flat_spread : gb_spread_blocks)(b);
        break;
    default:
        gb_direct(b);
        break;
    }
}

static void relocate(struct gb_ref *ref, const uint64_t *stride)
{
    if (ref->buf != GB_BUF_DEV && ref->buf != GB_BUF_HOST) return;
    uint64_t slot = ref->off >> GB_SLOT_SHIFT;
    ref->off = (ref->off & ((1ull << GB_SLOT_SHIFT) - 1)) + slot * stride[ref->buf == GB_BUF_HOST];
}

/* Slots become neighbours, each as large as the fullest. */
static void place_scratch(struct gb_builder *b)
{
    struct gb_plan *p = b->plan;
    for (uint32_t i = 0; i < p->nsteps; i++) {
        relocate(&p->steps[i].src, b->peak);
        relocate(&p->steps[i].dst, b->peak);
    }
    for (uint32_t i = 0; i < p->nparts; i++) relocate(&p->parts[i].ref, b->peak);
    p->dev_bytes = b->peak[0] * b->nslots;
    p->host_bytes = b->peak[1] * b->nslots;
}

int gb_plan_build(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank, struct gb_plan **plan)
{
    GB_TRY(gb_spec_check(topo, spec, rank));
    struct gb_builder b = {.topo = topo, .spec = spec, .me = rank};
    int flat = gb_spec_is_flat(topo, spec);
    uint64_t *zones = NULL;
    if (!builder_init(&b, flat, &zones)) b.failed = 1;
    if (!b.failed) emit(&b, flat);
    builder_fini(&b, zones);
    if (b.failed) {
        uint32_t nsteps = b.plan ? b.plan->nsteps : 0;
        gb_plan_destroy(b.plan);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a plan (%u steps so far): use larger chunks", nsteps);
    }
    place_scratch(&b);
    b.plan->takes_turn = topo->vendor[b.isl] && !flat;
    b.plan->codec = b.codec;
    for (uint32_t i = 0; i < b.plan->nsteps; i++)
        b.plan->encodes_result |=
            b.plan->steps[i].kind == GB_STEP_REDUCE && b.plan->steps[i].dst_is_enc && b.plan->steps[i].final;
    b.plan->hash = gb_spec_hash(topo, spec);
    uint64_t in, out;
    gb_plan_user_bytes(topo, spec, rank, &in, &out);
    b.plan->flat = (uint8_t)(flat || (!b.plan->uses_vendor && in <= spec->flat_bytes && out <= spec->flat_bytes));
    *plan = b.plan;
    return 0;
}

void gb_plan_destroy(struct gb_plan *plan)
{
    if (!plan) return;
    free(plan->steps);
    free(plan->deps);
    free(plan->parts);
    free(plan);
}
