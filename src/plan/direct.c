/* SPDX-License-Identifier: Apache-2.0
 * ALL_TO_ALL, GATHER, SCATTER: every pair of ranks exchanges its block directly; inside a vendor island by one vendor
 * call, else by messages in pieces.  A rank knows its own rows of an uneven ALL_TO_ALL only, so nothing here may depend
 * on more. */
#include "plan/build.h"

#include <stdlib.h>

/* A block of the input that goes to a rank, or of the output that comes from it; elements. */
struct leg {
    uint32_t rank;
    struct gb_range at;
};

struct legs {
    struct leg *v;
    uint32_t n;
    uint64_t longest;
};

/* The block between me and rank r: its length, and where it lies when all blocks have `count` elements. */
static struct gb_range even_block(const struct gb_builder *b, uint32_t r, int is_recv)
{
    const struct gb_plan_spec *s = b->spec;
    uint32_t from = is_recv ? r : b->me, to = is_recv ? b->me : r;
    switch (s->op) {
    case GPUBRIDGE_GATHER:
        return (struct gb_range){is_recv ? r * s->count : 0, to == s->root ? s->count : 0};
    case GPUBRIDGE_SCATTER:
        return (struct gb_range){is_recv ? 0 : r * s->count, from == s->root ? s->count : 0};
    default:
        return (struct gb_range){r * s->count, s->count};
    }
}

/* Fills all[r] with every block, and legs with those that move as messages, nearest rank first (so that not all begin
 * with rank 0). */
static void list_legs(const struct gb_builder *b, int is_recv, struct legs *legs, struct gb_range *all)
{
    const uint64_t *counts = is_recv ? b->spec->recv_counts : b->spec->send_counts;
    uint32_t nranks = b->topo->nranks;
    uint64_t at = 0;
    for (uint32_t r = 0; r < nranks; r++) {
        all[r] = counts ? (struct gb_range){at, counts[r]} : even_block(b, r, is_recv);
        at += counts ? counts[r] : 0;
    }
    for (uint32_t m = 1; m < nranks; m++) {
        uint32_t r = (b->me + (is_recv ? nranks - m : m)) % nranks;
        if (all[r].n == 0 || (b->vendor && b->topo->island[r] == b->isl)) continue;
        legs->v[legs->n++] = (struct leg){r, all[r]};
        if (all[r].n > legs->longest) legs->longest = all[r].n;
    }
}

/* Copies the own block; in a vendor island the mates' blocks move, too. */
static void move_at_home(struct gb_builder *b, const struct gb_range *sends, const struct gb_range *recvs)
{
    const struct gb_plan_spec *s = b->spec;
    gb_b_copy(b, GB_QUEUE_OUT, gb_at(GB_BUF_IN, sends[b->me].lo * b->es), gb_at(GB_BUF_OUT, recvs[b->me].lo * b->es),
              sends[b->me].n * b->es);
    if (!b->vendor) return;
    for (uint32_t m = 1; m < b->nloc; m++) {
        uint32_t to = b->mates[(b->loc + m) % b->nloc], from = b->mates[(b->loc + b->nloc - m) % b->nloc];
        gb_b_give(b, to, gb_at(GB_BUF_IN, sends[to].lo * b->es), sends[to].n * b->es);
        gb_b_take(b, GB_NOW, from, gb_at(GB_BUF_OUT, recvs[from].lo * b->es), recvs[from].n * b->es);
    }
    if (s->op == GPUBRIDGE_ALL_TO_ALL || (b->topo->island[s->root] == b->isl && s->count > 0)) gb_b_call(b);
}

static void emit_round(struct gb_builder *b, uint64_t size, uint64_t c, const struct legs *sends,
                       const struct legs *recvs)
{
    gb_b_open_slot(b, c);
    for (uint32_t i = 0; i < sends->n; i++) {
        struct gb_range r = gb_chunk(sends->v[i].at.n, size, c);
        struct gb_ref from = gb_at(GB_BUF_IN, (sends->v[i].at.lo + r.lo) * b->es);
        if (r.n > 0) gb_b_send(b, sends->v[i].rank, gb_b_stage_out(b, from, r.n * b->es), r.n * b->es);
    }
    for (uint32_t i = 0; i < recvs->n; i++) {
        struct gb_range r = gb_chunk(recvs->v[i].at.n, size, c);
        struct gb_ref to = gb_at(GB_BUF_OUT, (recvs->v[i].at.lo + r.lo) * b->es);
        if (r.n > 0) gb_b_recv_to(b, gb_first(c), recvs->v[i].rank, to, r.n * b->es);
    }
}

static void emit_all(struct gb_builder *b, struct legs *sends, struct legs *recvs, struct gb_range *all)
{
    list_legs(b, 0, sends, all);
    list_legs(b, 1, recvs, all + b->topo->nranks);
    move_at_home(b, all, all + b->topo->nranks);
    uint64_t size = gb_chunk_elements(b->topo, b->spec);
    uint64_t rounds = gb_chunks(sends->longest > recvs->longest ? sends->longest : recvs->longest, size);
    for (uint64_t c = 0; c <= rounds && !b->failed; c++) {
        if (c < rounds) emit_round(b, size, c, sends, recvs);
        if (c > 0) gb_b_land(b, gb_first(c - 1));
    }
}

void gb_direct(struct gb_builder *b)
{
    uint32_t nranks = b->topo->nranks;
    struct legs sends = {.v = calloc(2 * (size_t)nranks, sizeof *sends.v)}, recvs = {.v = sends.v};
    struct gb_range *all = calloc(2 * (size_t)nranks, sizeof *all);
    if (sends.v && all) {
        recvs.v += nranks;
        emit_all(b, &sends, &recvs, all);
    } else {
        b->failed = 1;
    }
    free(sends.v);
    free(all);
}
