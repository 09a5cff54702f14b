/* SPDX-License-Identifier: Apache-2.0
 * Random worlds: layouts, groups, operations, and every rank's plan, checked by gb_plan_check where it is small. */
#include "sim.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define CHECKED_STEPS 1500u /* the race check is quadratic */

int sim_fail(struct sim_world *world, const char *fmt, ...)
{
    va_list ap;
    if (world->text[0]) return -1; /* the first cause stays */
    va_start(ap, fmt);
    vsnprintf(world->text, sizeof world->text, fmt, ap);
    va_end(ap);
    return -1;
}

/* ---- layout ---- */

/* Letters name islands; named layouts come as often as random ones. */
static void choose_letters(struct sim_world *w, char *letters)
{
    static const char *const named[] = {"A",    "AB",   "AABB",   "AAAB",   "ABBBB",    "ABAB",           "AAA",
                                        "ABC",  "AABC", "AABBCC", "ABCABC", "ABCDEFGH", "AABBBBCCDDDDDD", "AAAAAAAB",
                                        "BAAB", "ABBA"};
    static const char *const large[] = {"AAAAAAAAAAAAAAAAAAAB", "ABCDEFGHIJKLMNOPQRSTU",
                                        "AAAAAAAAAAAAAAAAAABBBBBBBBBBBBBBBBBBB"};
    uint32_t kind = sim_below(&w->rng, 64);
    if (kind == 0) {
        strcpy(letters, large[sim_below(&w->rng, 3)]);
    } else if (kind < 32) {
        strcpy(letters, named[sim_below(&w->rng, sizeof named / sizeof *named)]);
    } else {
        uint32_t n = 1 + sim_below(&w->rng, 10), islands = 1 + sim_below(&w->rng, 4);
        for (uint32_t r = 0; r < n; r++) letters[r] = (char)('A' + sim_below(&w->rng, islands));
        letters[n] = 0;
    }
}

/* Per island: a vendor library on devices, the same on host memory, messages between CPUs, devices or both. */
static void choose_ranks(struct sim_world *w)
{
    char letters[SIM_MAX_RANKS];
    uint8_t kind[26];
    choose_letters(w, letters);
    w->nranks = (uint32_t)strlen(letters);
    int all_cpu = sim_below(&w->rng, 4) == 0;
    for (uint32_t i = 0; i < 26; i++) {
        uint32_t k = sim_below(&w->rng, 16);
        kind[i] = all_cpu ? 2 : k < 9 ? 0 : k < 10 ? 1 : k < 13 ? 2 : k < 15 ? 3 : 4;
    }
    int gate = (int)sim_below(&w->rng, 3);
    for (uint32_t r = 0; r < w->nranks; r++) {
        uint32_t k = kind[letters[r] - 'A'];
        w->keys[r][0] = letters[r];
        w->vendor[r] = k < 2;
        w->staged[r] = k == 0 || k == 3 || (k == 4 && sim_below(&w->rng, 2));
        w->gate[r] = (uint8_t)(gate == 2 ? letters[r] & 1 : gate); /* a CUDA island and a HIP island, or all alike */
    }
}

static int make_group(struct sim_world *w, uint32_t index)
{
    struct sim_group *g = w->groups + index;
    uint32_t order[SIM_MAX_RANKS], nranks = w->nranks;
    for (uint32_t r = 0; r < nranks; r++) order[r] = r;
    if (index > 0 || sim_below(&w->rng, 4) == 0) {
        for (uint32_t r = nranks; r > 1; r--) { /* any order, and but for the first group any subset */
            uint32_t k = sim_below(&w->rng, r), t = order[r - 1];
            order[r - 1] = order[k];
            order[k] = t;
        }
        if (index > 0) nranks = 1 + sim_below(&w->rng, nranks);
    }
    const char *keys[SIM_MAX_RANKS];
    uint8_t vendor[SIM_MAX_RANKS], staged[SIM_MAX_RANKS];
    for (uint32_t r = 0; r < nranks; r++) {
        g->world_rank[r] = order[r];
        g->depth[r] = 2 + sim_below(&w->rng, 3);
        keys[r] = w->keys[order[r]];
        vendor[r] = w->vendor[order[r]];
        staged[r] = w->staged[order[r]];
    }
    static const uint64_t chunks[] = {1, 4096, 8192, 16384, 65536, 1 << 20}, flats[] = {0, 0, 64, 4096, 65536};
    g->index = index;
    g->nranks = nranks;
    g->chunk_bytes = chunks[sim_below(&w->rng, 6)];
    g->flat_bytes = flats[sim_below(&w->rng, 5)];
    if (sim_below(&w->rng, 2)) g->codec = (int32_t)sim_below(&w->rng, GB_CODEC_COUNT);
    g->codec_min_bytes = sim_below(&w->rng, 2) ? 4096 : 0;
    g->codec_spreads = sim_below(&w->rng, 2) != 0;
    if (sim_below(&w->rng, 3) == 0) g->codec_skips = (uint8_t)sim_below(&w->rng, 3);
    return gb_topo_create(nranks, keys, vendor, staged, &g->topo) ? sim_fail(w, "topo: %s", gb_err_text()) : 0;
}

/* ---- operations ---- */

static uint64_t some_count(struct sim_world *w, uint32_t nranks)
{
    static const uint64_t fixed[] = {0, 1, 7, 127, 128, 129, 1000, 1023, 1024, 1025};
    uint32_t most = 40000 / nranks + 10;
    switch (sim_below(&w->rng, 4)) {
    case 0:
        return fixed[sim_below(&w->rng, 10)];
    case 1:
        return sim_below(&w->rng, 300);
    default:
        return sim_below(&w->rng, most);
    }
}

static void choose_uneven(struct sim_world *w, struct sim_op *op)
{
    uint32_t n = op->group->nranks, idle = sim_below(&w->rng, n), zeros = sim_below(&w->rng, 3);
    for (uint32_t r = 0; r < n; r++) op->counts[r] = sim_below(&w->rng, 4) ? some_count(w, n) : 0;
    for (uint32_t a = 0; a < n; a++) {
        for (uint32_t d = 0; d < n; d++) {
            uint64_t count = sim_below(&w->rng, 3) ? some_count(w, n) / 4 : 0;
            if ((zeros == 1 && a == idle) || (zeros == 2 && d == idle)) count = 0; /* an idle row or column */
            op->rows[a * n + d] = op->columns[d * n + a] = count;
        }
    }
}

static void choose_op(struct sim_world *w, uint32_t index)
{
    static const uint8_t kinds[] = {GPUBRIDGE_ALL_REDUCE,     GPUBRIDGE_ALL_REDUCE,     GPUBRIDGE_ALL_REDUCE,
                                    GPUBRIDGE_BROADCAST,      GPUBRIDGE_REDUCE,         GPUBRIDGE_ALL_GATHER,
                                    GPUBRIDGE_ALL_GATHER,     GPUBRIDGE_REDUCE_SCATTER, GPUBRIDGE_GATHER,
                                    GPUBRIDGE_REDUCE_SCATTER, GPUBRIDGE_ALL_TO_ALL,     GPUBRIDGE_ALL_TO_ALL,
                                    GPUBRIDGE_SCATTER,        GPUBRIDGE_BARRIER};
    struct sim_op *op = w->ops + index;
    struct sim_group *g = w->groups + (index < w->ngroups ? index : sim_below(&w->rng, w->ngroups));
    struct gb_plan_spec *s = &op->spec;
    op->group = g;
    op->index = index;
    g->ops[g->nops++] = index;
    s->op = kinds[sim_below(&w->rng, sizeof kinds)];
    int reduces = s->op == GPUBRIDGE_ALL_REDUCE || s->op == GPUBRIDGE_REDUCE || s->op == GPUBRIDGE_REDUCE_SCATTER;
    do {
        s->dtype = (int32_t)sim_below(&w->rng, GPUBRIDGE_DTYPE_COUNT);
        s->reduce_op = (int32_t)sim_below(&w->rng, GPUBRIDGE_REDUCE_OP_COUNT);
    } while (reduces && !gb_reduce_supported(s->dtype, s->reduce_op));
    s->count = some_count(w, g->nranks);
    s->root = sim_below(&w->rng, g->nranks);
    s->chunk_bytes = g->chunk_bytes;
    s->flat_bytes = g->flat_bytes;
    s->codec = g->codec;
    s->codec_min_bytes = g->codec_min_bytes;
    s->codec_spreads = g->codec_spreads;
    s->codec_skips = g->codec_skips;
    if (s->codec != GB_CODEC_NONE && sim_below(&w->rng, 2)) { /* what codecs are for */
        s->dtype = sim_below(&w->rng, 2) ? GPUBRIDGE_F32 : sim_below(&w->rng, 2) ? GPUBRIDGE_BF16 : GPUBRIDGE_F16;
        s->reduce_op = sim_below(&w->rng, 2)   ? GPUBRIDGE_SUM
                       : sim_below(&w->rng, 2) ? GPUBRIDGE_AVG
                                               : GPUBRIDGE_PREMUL_SUM;
    }
    op->factor = ((int)sim_below(&w->rng, 2000) - 1000) / 700.0;
    int can_feed = s->op == GPUBRIDGE_ALL_REDUCE || s->op == GPUBRIDGE_REDUCE_SCATTER;
    uint32_t all = sim_below(&w->rng, 4) == 0;
    for (uint32_t i = 0; i < g->topo->nislands && can_feed; i++) op->feedback[i] = all || sim_below(&w->rng, 4) == 0;
    op->in_place = sim_below(&w->rng, 2) && s->op != GPUBRIDGE_ALL_TO_ALL;
    op->has_specials = sim_below(&w->rng, 4) == 0;
    int can = s->op == GPUBRIDGE_ALL_GATHER || s->op == GPUBRIDGE_REDUCE_SCATTER || s->op == GPUBRIDGE_ALL_TO_ALL;
    op->is_uneven = can && sim_below(&w->rng, 2);
    if (op->is_uneven) choose_uneven(w, op);
    if (op->is_uneven && s->op != GPUBRIDGE_ALL_TO_ALL) s->counts = op->counts;
}

struct gb_plan_spec sim_spec_of(const struct sim_op *op, uint32_t rank)
{
    struct gb_plan_spec s = op->spec;
    s.depth = op->group->depth[rank];
    s.feedback = op->feedback[op->group->topo->island[rank]];
    if (op->is_uneven && s.op == GPUBRIDGE_ALL_TO_ALL) {
        s.send_counts = op->rows + rank * op->group->nranks;
        s.recv_counts = op->columns + rank * op->group->nranks;
        s.count = 0;
    }
    return s;
}

/* ---- instances ---- */

static unsigned char *noise(struct sim_world *w, uint64_t bytes)
{
    unsigned char *p = malloc(bytes + 8);
    uint64_t word = sim_next(&w->rng);
    for (uint64_t i = 0; p && i < bytes; i += 8, word = word * 6364136223846793005u + 1) memcpy(p + i, &word, 8);
    return p;
}

/* Where input and output lie in one buffer: as gpubridge.h allows per operation. */
static void place_user(struct sim_world *w, struct sim_inst *in)
{
    const struct gb_plan_spec *s = &in->op->spec;
    uint64_t before = 0, es = gb_dtype_bytes(s->dtype), in_at = 0, out_at = 0;
    for (uint32_t r = 0; r < in->rank; r++) before += (s->counts ? s->counts[r] : s->count) * es;
    if (s->op == GPUBRIDGE_ALL_GATHER || (s->op == GPUBRIDGE_GATHER && in->rank == s->root)) in_at = before;
    if (s->op == GPUBRIDGE_REDUCE_SCATTER || (s->op == GPUBRIDGE_SCATTER && in->rank == s->root)) out_at = before;
    if (in->op->in_place) {
        in->mem[0] = noise(w, in->in_bytes + in->out_bytes);
        in->buf[GB_BUF_IN] = in->mem[0] + in_at;
        in->buf[GB_BUF_OUT] = in->mem[0] + out_at;
    } else {
        in->buf[GB_BUF_IN] = in->mem[0] = noise(w, in->in_bytes);
        in->buf[GB_BUF_OUT] = in->mem[1] = noise(w, in->out_bytes);
    }
}

/* All ranks of an island have the same one: the first's. */
static void make_residual(struct sim_world *w, struct sim_inst *in, uint64_t count)
{
    const struct gb_topo *t = in->op->group->topo;
    const struct sim_inst *first = in->op->inst + t->members[t->island_first[t->island[in->rank]]];
    in->residual = malloc(count * sizeof(float) + 1);
    in->buf[GB_BUF_RESIDUAL] = in->mem[4] = malloc(count * sizeof(float) + 1);
    if (first == in)
        sim_fill(&w->rng, GPUBRIDGE_F32, 0, in->residual, count);
    else
        memcpy(in->residual, first->residual, count * sizeof(float));
    memcpy(in->mem[4], in->residual, count * sizeof(float));
}

static int make_memory(struct sim_world *w, struct sim_inst *in)
{
    const struct gb_plan_spec s = sim_spec_of(in->op, in->rank);
    gb_plan_user_bytes(in->op->group->topo, &s, in->rank, &in->in_bytes, &in->out_bytes);
    place_user(w, in);
    in->buf[GB_BUF_DEV] = in->mem[2] = noise(w, in->plan->dev_bytes);
    in->buf[GB_BUF_HOST] = in->mem[3] = noise(w, in->plan->host_bytes);
    uint64_t es = gb_dtype_bytes(s.dtype);
    sim_fill(&w->rng, s.dtype, in->op->has_specials, in->buf[GB_BUF_IN], es ? in->in_bytes / es : 0);
    in->input = malloc(in->in_bytes + 1);
    memcpy(in->input, in->buf[GB_BUF_IN], in->in_bytes);
    if (s.feedback) make_residual(w, in, es ? in->in_bytes / es : 0);
    return 0;
}

static int make_plan(struct sim_world *w, struct sim_op *op, uint32_t rank)
{
    struct sim_inst *in = op->inst + rank;
    const struct gb_plan_spec s = sim_spec_of(op, rank);
    const struct gb_topo *t = op->group->topo;
    in->op = op;
    in->rank = rank;
    if (gb_plan_build(t, &s, rank, &in->plan))
        return sim_fail(w, "op %u rank %u: no plan: %s", op->index, rank, gb_err_text());
    if (in->plan->hash != op->inst[0].plan->hash) return sim_fail(w, "op %u rank %u: another hash", op->index, rank);
    if (in->plan->nsteps <= CHECKED_STEPS && gb_plan_check(t, &s, rank, in->plan))
        return sim_fail(w, "op %u rank %u: %s", op->index, rank, gb_err_text());
    w->nsteps += in->plan->nsteps;
    return make_memory(w, in);
}

int sim_world_init(struct sim_world *w, uint64_t seed)
{
    static const uint64_t credits[] = {0, 4096, 1 << 20};
    memset(w, 0, sizeof *w);
    w->rng.state = seed;
    choose_ranks(w);
    w->ngroups = 1 + (sim_below(&w->rng, 3) == 0) * (1 + sim_below(&w->rng, 2));
    w->nops = w->ngroups + sim_below(&w->rng, w->ngroups > 1 ? 5 : 3);
    w->one_vendor_queue = sim_below(&w->rng, 2);
    w->credit = credits[sim_below(&w->rng, 3)];
    w->lends = (uint8_t)(2 * sim_below(&w->rng, 3));
    for (uint32_t g = 0; g < w->ngroups; g++)
        if (make_group(w, g)) return -1;
    for (uint32_t i = 0; i < w->nops; i++) {
        choose_op(w, i);
        for (uint32_t r = 0; r < w->ops[i].group->nranks; r++)
            if (make_plan(w, w->ops + i, r)) return -1;
    }
    return 0;
}

void sim_world_fini(struct sim_world *w)
{
    for (uint32_t i = 0; i < w->nops; i++) {
        for (uint32_t r = 0; w->ops[i].group && r < w->ops[i].group->nranks; r++) {
            struct sim_inst *in = w->ops[i].inst + r;
            gb_plan_destroy(in->plan);
            for (int m = 0; m < 5; m++) free(in->mem[m]);
            free(in->residual), free(in->input), free(in->left), free(in->net_left), free(in->message);
            free(in->lent);
            free(in->succ_first), free(in->succ), free(in->done);
        }
    }
    for (uint32_t g = 0; g < w->ngroups; g++) gb_topo_destroy(w->groups[g].topo);
}

void sim_world_print(const struct sim_world *w, FILE *f)
{
    fprintf(f, "  ranks:");
    for (uint32_t r = 0; r < w->nranks; r++)
        fprintf(f, " %s%s%s%s", w->keys[r], w->vendor[r] ? "v" : "", w->staged[r] ? "s" : "", w->gate[r] ? "g" : "");
    fprintf(f, "  (v vendor, s staged, g gate)  credit %" PRIu64 ", %u of 4 lent%s\n", w->credit, w->lends,
            w->one_vendor_queue ? "  one vendor queue" : "");
    for (uint32_t i = 0; i < w->nops; i++) {
        const struct sim_op *op = w->ops + i;
        fprintf(f, "  op %u group %u [", i, op->group->index);
        for (uint32_t r = 0; r < op->group->nranks; r++) fprintf(f, "%s%u", r ? "," : "", op->group->world_rank[r]);
        fprintf(f, "] %s kind %d %s %s count %" PRIu64 "%s root %u chunk %" PRIu64 " flat %" PRIu64 "%s\n",
                gb_codec_name(op->spec.codec), op->spec.op, gb_dtype_name(op->spec.dtype),
                gb_reduce_op_name(op->spec.reduce_op), op->spec.count, op->is_uneven ? " uneven" : "", op->spec.root,
                op->spec.chunk_bytes, op->spec.flat_bytes, op->in_place ? " in place" : "");
    }
}
