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

/* The segment of my share that begins at `at`. */
static struct gb_range segment(const struct gb_builder *b, const struct chunk *k, uint64_t at)
{
    return (struct gb_range){at, gb_segment_end(b->topo, k->n, at, GB_NO_ISLAND) - at};
}

static uint32_t owner(const struct gb_builder *b, const struct chunk *k, uint32_t island, uint64_t at)
{
    return b->topo->members[b->topo->island_first[island] + gb_cut_find(k->n, island_size(b, island), at)];
}

static uint64_t width(const struct gb_builder *b, uint32_t island)
{
    return gb_partial_is_acc(b, island) ? b->as : b->es;
}

/* My share of every mate's input: my own where it is, theirs in scratch side by side in local order. */
struct inputs {
    struct gb_ref own, area;
    uint64_t stride;
};

/* Gives every mate its share of my input and takes mine from them. */
static struct inputs collect(struct gb_builder *b, const struct chunk *k)
{
    uint64_t bytes = k->share.n * b->es;
    struct inputs in = {.own = user(b, GB_BUF_IN, k, k->share.lo), .stride = (bytes + 255) & ~(uint64_t)255};
    if (b->nloc == 1) return in;
    for (uint32_t m = 1; m < b->nloc; m++) {
        uint32_t j = (b->loc + m) % b->nloc;
        struct gb_range r = gb_cut(k->n, b->nloc, j);
        gb_b_give(b, b->mates[j], user(b, GB_BUF_IN, k, r.lo), r.n * b->es);
    }
    if (bytes > 0) in.area = gb_b_scratch(b, in.stride * (b->nloc - 1));
    for (uint32_t j = 0; j < b->nloc; j++)
        if (j != b->loc) gb_b_take(b, GB_NOW, b->mates[j], gb_plus(in.area, in.stride * (j - (j > b->loc))), bytes);
    gb_b_call(b);
    gb_b_land(b, GB_NOW);
    return in;
}

/* Adds the inputs from element `at` of my share on to the next fold. */
static void add_inputs(struct gb_builder *b, const struct inputs *in, uint64_t at)
{
    for (uint32_t j = 0; j < b->nloc; j++) {
        struct gb_ref from = j == b->loc ? in->own : gb_plus(in->area, in->stride * (j - (j > b->loc)));
        gb_b_add(b, gb_plus(from, at * b->es), 0);
    }
}

/* Returns where my share's partial lies: the input itself when it is the partial. */
static struct gb_ref island_partial(struct gb_builder *b, const struct chunk *k)
{
    struct inputs in = collect(b, k);
    if (k->share.n == 0 || (!gb_partial_is_acc(b, b->isl) && b->topo->nislands > 1)) return in.own;
    add_inputs(b, &in, 0);
    if (b->topo->nislands == 1) {
        gb_b_fold(b, GB_QUEUE_OUT, user(b, GB_BUF_OUT, k, k->share.lo), k->share.n, GB_STORE_RAW, 1);
        return in.own;
    }
    struct gb_ref partial = gb_b_scratch(b, k->share.n * b->as);
    gb_b_fold(b, GB_QUEUE_OUT, partial, k->share.n, GB_STORE_ACC, 0);
    return partial;
}

/* The part of a segment that island i's owner folds: all of it where both owners fold. */
static struct gb_range part_of(const struct gb_builder *b, struct gb_range seg, uint32_t i)
{
    if (!b->folds_once) return seg;
    struct gb_range r = gb_cut(seg.n, b->topo->nislands, i);
    return (struct gb_range){seg.lo + r.lo, r.n};
}

/* My partial of a segment leaves; `whole` is where my share's lies. */
static void send_partial(struct gb_builder *b, const struct chunk *k, struct gb_range seg, struct gb_ref whole)
{
    uint32_t nislands = b->topo->nislands;
    uint64_t w = width(b, b->isl);
    for (uint32_t m = 1; m < nislands; m++) {
        uint32_t i = (b->isl + m) % nislands;
        struct gb_range r = part_of(b, seg, i);
        struct gb_ref from = gb_plus(whole, (r.lo - k->share.lo) * w);
        if (b->folds_once) from = gb_b_stage_out(b, from, r.n * w);
        if (r.n > 0) gb_b_send(b, owner(b, k, i, seg.lo), from, r.n * w);
    }
}

/* The same, encoded message by message.  What I fold myself is encoded too, and kept: nobody's result depends on who
 * folds. */
static void send_encoded(struct gb_builder *b, const struct chunk *k, struct gb_range seg, const struct inputs *in)
{
    uint32_t nislands = b->topo->nislands;
    struct gb_ref message = gb_at(GB_BUF_HOST, 0);
    for (uint32_t m = 1; m <= nislands; m++) {
        uint32_t i = (b->isl + m) % nislands;
        struct gb_range r = part_of(b, seg, i);
        if (r.n == 0) continue;
        if (b->folds_once || m == 1) { /* in an exchange all owners have the same part, all of it */
            add_inputs(b, in, r.lo - k->share.lo);
            message = gb_b_encode_partial(b, GB_QUEUE_OUT, k->lo + r.lo, r.n);
        }
        if (i == b->isl)
            gb_b_keep(b, k->c, message);
        else
            gb_b_send_encoded(b, owner(b, k, i, seg.lo), message, r.n, 0);
    }
}

/* Posts room for the other islands' partials of what I fold of a segment. */
static void await_partials(struct gb_builder *b, const struct chunk *k, struct gb_range seg)
{
    struct gb_range r = part_of(b, seg, b->isl);
    for (uint32_t i = 0; i < b->topo->nislands && r.n > 0; i++) {
        if (i == b->isl) continue;
        uint32_t from = owner(b, k, i, seg.lo);
        if (b->codec) {
            gb_b_keep(b, k->c, gb_b_recv_encoded(b, gb_first(k->c), from, r.n, 0));
            continue;
        }
        struct gb_ref to = gb_b_scratch(b, r.n * width(b, i));
        gb_b_recv_to(b, gb_first(k->c), from, to, r.n * width(b, i));
        gb_b_keep(b, k->c, to);
    }
}

/* Stage 1: the partials leave; room for those of the other islands is posted. */
static void depart(struct gb_builder *b, const struct chunk *k)
{
    struct inputs in = {0};
    struct gb_ref whole = gb_at(GB_BUF_HOST, 0);
    gb_b_open_slot(b, k->c);
    if (b->codec) {
        in = collect(b, k);
    } else {
        whole = island_partial(b, k);
        if (b->topo->nislands == 1) return;
        gb_b_keep(b, k->c, whole);
        /* Both fold: one copy to the staging for the whole share. */
        if (!b->folds_once) whole = gb_b_stage_out(b, whole, k->share.n * width(b, b->isl));
    }
    for (uint64_t at = k->share.lo; at < k->share.lo + k->share.n;) {
        struct gb_range seg = segment(b, k, at);
        if (b->codec)
            send_encoded(b, k, seg, &in);
        else
            send_partial(b, k, seg, whole);
        await_partials(b, k, seg);
        at += seg.n;
    }
}

/* My part of a segment is final; its other owners get it, and I get theirs.  Encoded, everybody has what a message
 * holds: I decode mine, and the others' when they are there. */
static void share_final(struct gb_builder *b, const struct chunk *k, struct gb_range seg, struct gb_ref final)
{
    uint32_t nislands = b->topo->nislands;
    struct gb_range own = part_of(b, seg, b->isl);
    uint64_t bytes = own.n * b->es;
    struct gb_ref staged = b->codec ? final : gb_b_stage_out(b, final, bytes);
    for (uint32_t m = 1; m < nislands && own.n > 0; m++) {
        uint32_t to = owner(b, k, (b->isl + m) % nislands, seg.lo);
        if (b->codec)
            gb_b_send_encoded(b, to, final, own.n, 1);
        else
            gb_b_send(b, to, staged, bytes);
    }
    if (b->codec && own.n > 0) gb_b_decode(b, final, b->me, user(b, GB_BUF_OUT, k, own.lo), own.n);
    for (uint32_t i = 0; i < nislands; i++) {
        struct gb_range r = part_of(b, seg, i);
        if (i == b->isl || r.n == 0) continue;
        uint32_t from = owner(b, k, i, seg.lo);
        if (b->codec)
            gb_b_keep(b, k->c, gb_b_recv_encoded(b, gb_later(k->c), from, r.n, 1));
        else
            gb_b_recv_to(b, gb_later(k->c), from, user(b, GB_BUF_OUT, k, r.lo), r.n * b->es);
    }
}

/* Stage 2: partials have arrived; fold them in island order, and spread the result to the segment's owners. */
static void arrive(struct gb_builder *b, const struct chunk *k)
{
    struct gb_ref mine = gb_at(GB_BUF_HOST, 0);
    if (b->topo->nislands == 1) return;
    gb_b_land(b, gb_first(k->c));
    if (!b->codec) mine = gb_b_kept(b, k->c);
    for (uint64_t at = k->share.lo; at < k->share.lo + k->share.n;) {
        struct gb_range seg = segment(b, k, at), r = part_of(b, seg, b->isl);
        struct gb_ref own = gb_plus(mine, (r.lo - k->share.lo) * width(b, b->isl));
        struct gb_ref final = user(b, GB_BUF_OUT, k, r.lo);
        if (b->codec && r.n > 0) own = gb_b_kept(b, k->c);
        for (uint32_t i = 0; i < b->topo->nislands && r.n > 0; i++) {
            struct gb_ref ref = i == b->isl ? own : gb_b_kept(b, k->c);
            if (b->codec)
                gb_b_add_encoded(b, ref, owner(b, k, i, at));
            else
                gb_b_add(b, ref, gb_partial_is_acc(b, i));
        }
        if (b->codec && b->folds_once && r.n > 0)
            final = gb_b_encode_result(b, k->lo + r.lo, r.n);
        else
            gb_b_fold(b, GB_QUEUE_IN, final, r.n, GB_STORE_RAW, 1);
        if (b->folds_once) share_final(b, k, seg, final);
        at += seg.n;
    }
}

/* Stage 3: what others folded has arrived. */
static void receive_final(struct gb_builder *b, const struct chunk *k)
{
    gb_b_land(b, gb_later(k->c));
    for (uint64_t at = k->share.lo; at < k->share.lo + k->share.n && b->codec && b->folds_once;) {
        struct gb_range seg = segment(b, k, at);
        for (uint32_t i = 0; i < b->topo->nislands; i++) {
            struct gb_range r = part_of(b, seg, i);
            if (i == b->isl || r.n == 0) continue;
            gb_b_decode(b, gb_b_kept(b, k->c), owner(b, k, i, at), user(b, GB_BUF_OUT, k, r.lo), r.n);
        }
        at += seg.n;
    }
}

/* And every mate gets my share of the result. */
static void gather(struct gb_builder *b, const struct chunk *k)
{
    receive_final(b, k);
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
