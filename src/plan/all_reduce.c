/* SPDX-License-Identifier: Apache-2.0
 * The hierarchical all_reduce of large messages (docs/algorithms.md): reduce-scatter inside the island, exchange of
 * partials between the owners of a segment, all-gather inside the island, chunk by chunk.  A chunk's later stages are
 * emitted after the first stages of the chunks that follow it: while some cross the bridge the next is being made, and
 * every rank of the group has the same order. */
#include "plan/build.h"

struct chunk {
    uint64_t c, lo, n;     /* index, first element and length in the tensor */
    struct gb_range share; /* mine, in the chunk */
};

static struct chunk get_chunk(const struct gb_builder *b, uint64_t size, uint64_t c)
{
    struct gb_range r = gb_chunk(b->spec->count, size, c);
    return (struct chunk){.c = c, .lo = r.lo, .n = r.n, .share = gb_cut(r.n, b->nloc, b->loc)};
}

static struct gb_ref user(const struct gb_builder *b, uint32_t buf, const struct chunk *k, uint64_t at)
{
    return gb_at(buf, (k->lo + at) * b->es);
}

static uint32_t island_size(const struct gb_builder *b, uint32_t island)
{
    return b->topo->island_first[island + 1] - b->topo->island_first[island];
}

/* The segment of my share that begins at `at`: up to where the owner changes in some island. */
static struct gb_range segment(const struct gb_builder *b, const struct chunk *k, uint64_t at)
{
    uint64_t end = k->share.lo + k->share.n;
    for (uint32_t i = 0; i < b->topo->nislands; i++) {
        uint32_t size = island_size(b, i);
        struct gb_range r = gb_cut(k->n, size, gb_cut_find(k->n, size, at));
        if (r.lo + r.n < end) end = r.lo + r.n;
    }
    return (struct gb_range){at, end - at};
}

static uint32_t owner(const struct gb_builder *b, const struct chunk *k, uint32_t island, uint64_t at)
{
    return b->topo->members[b->topo->island_first[island] + gb_cut_find(k->n, island_size(b, island), at)];
}

static uint64_t width(const struct gb_builder *b, uint32_t island)
{
    return gb_partial_is_acc(b, island) ? b->as : b->es;
}

/* Gives every mate its share of my input, takes mine from them and folds it.  Returns where my share's partial lies. */
static struct gb_ref island_partial(struct gb_builder *b, const struct chunk *k)
{
    struct gb_ref own = user(b, GB_BUF_IN, k, k->share.lo);
    if (!gb_partial_is_acc(b, b->isl) && b->topo->nislands > 1) return own;
    for (uint32_t m = 1; m < b->nloc; m++) {
        uint32_t j = (b->loc + m) % b->nloc;
        struct gb_range r = gb_cut(k->n, b->nloc, j);
        gb_b_give(b, b->mates[j], user(b, GB_BUF_IN, k, r.lo), r.n * b->es);
    }
    for (uint32_t j = 0; j < b->nloc && k->share.n > 0; j++) {
        struct gb_ref from = j == b->loc ? own : gb_b_scratch(b, k->share.n * b->es);
        if (j != b->loc) gb_b_take(b, GB_NOW, b->mates[j], from, k->share.n * b->es);
        gb_b_add(b, from, 0);
    }
    if (b->nloc > 1) gb_b_call(b);
    gb_b_land(b, GB_NOW);
    if (b->topo->nislands == 1) {
        gb_b_fold(b, GB_QUEUE_OUT, user(b, GB_BUF_OUT, k, k->share.lo), k->share.n, 0, 1);
        return own;
    }
    struct gb_ref partial = gb_b_scratch(b, k->share.n * b->as);
    gb_b_fold(b, GB_QUEUE_OUT, partial, k->share.n, 1, 0);
    return partial;
}

/* The part of a segment that island i's owner folds: all of it where both owners fold. */
static struct gb_range part_of(const struct gb_builder *b, struct gb_range seg, uint32_t i)
{
    if (!b->folds_once) return seg;
    struct gb_range r = gb_cut(seg.n, b->topo->nislands, i);
    return (struct gb_range){seg.lo + r.lo, r.n};
}

/* Stage 1: the partials leave; room for those of the other islands is posted. */
static void depart(struct gb_builder *b, const struct chunk *k)
{
    uint32_t nislands = b->topo->nislands;
    gb_b_open_slot(b, k->c);
    struct gb_ref mine = island_partial(b, k);
    if (nislands == 1) return;
    gb_b_keep(b, k->c, mine);
    uint64_t w = width(b, b->isl);
    struct gb_ref whole = mine; /* both fold: one copy to the staging for the whole share */
    if (!b->folds_once) whole = gb_b_stage_out(b, mine, k->share.n * w);
    for (uint64_t at = k->share.lo; at < k->share.lo + k->share.n;) {
        struct gb_range seg = segment(b, k, at);
        for (uint32_t m = 1; m < nislands; m++) {
            uint32_t i = (b->isl + m) % nislands;
            struct gb_range r = part_of(b, seg, i);
            struct gb_ref from = gb_plus(whole, (r.lo - k->share.lo) * w);
            if (b->folds_once) from = gb_b_stage_out(b, from, r.n * w);
            if (r.n > 0) gb_b_send(b, owner(b, k, i, at), from, r.n * w);
        }
        struct gb_range r = part_of(b, seg, b->isl);
        for (uint32_t i = 0; i < nislands && r.n > 0; i++) {
            if (i == b->isl) continue;
            struct gb_ref to = gb_b_scratch(b, r.n * width(b, i));
            gb_b_recv_to(b, gb_first(k->c), owner(b, k, i, at), to, r.n * width(b, i));
            gb_b_keep(b, k->c, to);
        }
        at += seg.n;
    }
}

/* My part of a segment is final; its other owners get it, and I get theirs. */
static void share_final(struct gb_builder *b, const struct chunk *k, struct gb_range seg)
{
    uint32_t nislands = b->topo->nislands;
    struct gb_range own = part_of(b, seg, b->isl);
    struct gb_ref from = gb_b_stage_out(b, user(b, GB_BUF_OUT, k, own.lo), own.n * b->es);
    for (uint32_t m = 1; m < nislands; m++) {
        uint32_t i = (b->isl + m) % nislands;
        if (own.n > 0) gb_b_send(b, owner(b, k, i, seg.lo), from, own.n * b->es);
    }
    for (uint32_t i = 0; i < nislands; i++) {
        struct gb_range r = part_of(b, seg, i);
        if (i != b->isl && r.n > 0)
            gb_b_recv_to(b, gb_later(k->c), owner(b, k, i, seg.lo), user(b, GB_BUF_OUT, k, r.lo), r.n * b->es);
    }
}

/* Stage 2: partials have arrived; fold them in island order, and spread the result to the segment's owners. */
static void arrive(struct gb_builder *b, const struct chunk *k)
{
    if (b->topo->nislands == 1) return;
    gb_b_land(b, gb_first(k->c));
    struct gb_ref mine = gb_b_kept(b, k->c);
    for (uint64_t at = k->share.lo; at < k->share.lo + k->share.n;) {
        struct gb_range seg = segment(b, k, at), r = part_of(b, seg, b->isl);
        for (uint32_t i = 0; i < b->topo->nislands && r.n > 0; i++) {
            struct gb_ref own = gb_plus(mine, (r.lo - k->share.lo) * width(b, b->isl));
            gb_b_add(b, i == b->isl ? own : gb_b_kept(b, k->c), gb_partial_is_acc(b, i));
        }
        gb_b_fold(b, GB_QUEUE_IN, user(b, GB_BUF_OUT, k, r.lo), r.n, 0, 1);
        if (b->folds_once) share_final(b, k, seg);
        at += seg.n;
    }
}

/* Stage 3: what others folded has arrived; every mate gets my share of the result. */
static void gather(struct gb_builder *b, const struct chunk *k)
{
    gb_b_land(b, gb_later(k->c));
    if (b->nloc == 1) return;
    for (uint32_t m = 1; m < b->nloc; m++)
        gb_b_give(b, b->mates[(b->loc + m) % b->nloc], user(b, GB_BUF_OUT, k, k->share.lo), k->share.n * b->es);
    for (uint32_t j = 0; j < b->nloc; j++) {
        struct gb_range r = gb_cut(k->n, b->nloc, j);
        if (j != b->loc) gb_b_take(b, GB_NOW, b->mates[j], user(b, GB_BUF_OUT, k, r.lo), r.n * b->es);
    }
    gb_b_call(b);
    gb_b_land(b, GB_NOW);
}

void gb_all_reduce(struct gb_builder *b)
{
    b->folds_once = (uint8_t)gb_folds_once(b->topo, b->spec);
    uint64_t size = gb_chunk_elements(b->topo, b->spec), nchunks = gb_chunks(b->spec->count, size);
    /* Two chunks cross the bridge while a third is made; with the result's own hop in between, the last stage is later.
     */
    uint64_t arrives = b->topo->nislands > 1 ? 2 : 1, gathers = arrives + b->folds_once;
    for (uint64_t t = 0; t < nchunks + gathers && !b->failed; t++) {
        if (t < nchunks) {
            struct chunk k = get_chunk(b, size, t);
            depart(b, &k);
        }
        if (t >= arrives && t - arrives < nchunks) {
            struct chunk k = get_chunk(b, size, t - arrives);
            gb_b_use_slot(b, k.c);
            arrive(b, &k);
        }
        if (t >= gathers) {
            struct chunk k = get_chunk(b, size, t - gathers);
            gb_b_use_slot(b, k.c);
            gather(b, &k);
        }
    }
}
