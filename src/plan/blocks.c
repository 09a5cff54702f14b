/* SPDX-License-Identifier: Apache-2.0
 * The large forms that move blocks (docs/algorithms.md): reduce_blocks sums block d to rank d (REDUCE_SCATTER, and
 * REDUCE, whose root has the only block), spread_blocks brings rank d's block to everybody (ALL_GATHER, and BROADCAST).
 * On foreign islands every rank carries a share of each block.  Round c moves chunk c of every block. */
#include "plan/build.h"

#include <stdlib.h>

static uint64_t count_rounds(const struct gb_builder *b, uint64_t size)
{
    uint64_t most = 0;
    for (uint32_t d = 0; d < b->topo->nranks; d++)
        if (gb_block(b, d) > most) most = gb_block(b, d);
    return gb_chunks(most, size);
}

/* Bytes [at, ...) of chunk c of block d, in a buffer whose blocks begin at `base` elements. */
static struct gb_ref in_block(const struct gb_builder *b, uint32_t buf, uint64_t base, struct gb_range chunk,
                              uint64_t at)
{
    return gb_at(buf, (base + chunk.lo + at) * b->es);
}

/* ---- reduce_blocks ---- */

/* Where the mates' contributions to a block lie: one slot per mate, in local order without me. */
struct inbox {
    struct gb_ref at;
    uint64_t stride;
};

static struct inbox take_from_mates(struct gb_builder *b, uint64_t n)
{
    struct inbox box = {.stride = (n * b->es + 15) & ~(uint64_t)15};
    if (n == 0 || b->nloc == 1) return box;
    box.at = gb_b_scratch(b, box.stride * (b->nloc - 1));
    for (uint32_t j = 0; j < b->nloc; j++)
        if (j != b->loc) gb_b_take(b, GB_NOW, b->mates[j], gb_plus(box.at, box.stride * (j - (j > b->loc))), n * b->es);
    return box;
}

/* From element `at` of the contributions on. */
static void add_mates(struct gb_builder *b, struct inbox box, struct gb_ref own, uint64_t at)
{
    for (uint32_t j = 0; j < b->nloc; j++) {
        struct gb_ref from = j == b->loc ? own : gb_plus(box.at, box.stride * (j - (j > b->loc)));
        gb_b_add(b, gb_plus(from, at * b->es), 0);
    }
}

/* What the island exchanges in a round: whole chunks of its own ranks' blocks, shares of the others'. */
static void exchange_inputs(struct gb_builder *b, uint64_t size, uint64_t c, struct inbox *box)
{
    for (uint32_t d = 0; d < b->topo->nranks; d++) {
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c);
        if (chunk.n == 0) continue;
        int is_home = b->topo->island[d] == b->isl;
        for (uint32_t m = 1; m < b->nloc; m++) {
            uint32_t j = (b->loc + m) % b->nloc;
            struct gb_range r = gb_cut(chunk.n, b->nloc, j);
            if (is_home) r = b->mates[j] == d ? (struct gb_range){0, chunk.n} : (struct gb_range){0, 0};
            gb_b_give(b, b->mates[j], in_block(b, GB_BUF_IN, gb_block_at(b, d), chunk, r.lo), r.n * b->es);
        }
        if (is_home)
            box[d] = take_from_mates(b, d == b->me ? chunk.n : 0);
        else
            box[d] = take_from_mates(b, gb_cut(chunk.n, b->nloc, b->loc).n);
    }
    if (b->nloc > 1) gb_b_call(b);
    gb_b_land(b, GB_NOW);
}

/* My share r of a chunk of foreign rank d's block leaves encoded, a message for each segment that the islands' shares
 * make. */
static void send_encoded(struct gb_builder *b, uint32_t d, struct gb_range chunk, struct gb_range r, struct inbox box,
                         struct gb_ref own)
{
    for (uint64_t at = r.lo, end; at < r.lo + r.n; at = end) {
        end = gb_segment_end(b->topo, chunk.n, at, b->topo->island[d]);
        add_mates(b, box, own, at - r.lo);
        struct gb_ref message = gb_b_encode_partial(b, GB_QUEUE_OUT, gb_block_at(b, d) + chunk.lo + at, end - at);
        gb_b_send_encoded(b, d, message, end - at, 0);
    }
}

/* My shares of foreign ranks' blocks, summed over the island, leave for them. */
static void send_partials(struct gb_builder *b, uint64_t size, uint64_t c, const struct inbox *box)
{
    for (uint32_t m = 1; m < b->topo->nranks; m++) {
        uint32_t d = (b->me + m) % b->topo->nranks;
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c);
        if (chunk.n == 0 || b->topo->island[d] == b->isl) continue;
        struct gb_range r = gb_cut(chunk.n, b->nloc, b->loc);
        if (r.n == 0) continue;
        struct gb_ref from = in_block(b, GB_BUF_IN, gb_block_at(b, d), chunk, r.lo);
        uint64_t bytes = r.n * b->es;
        if (b->codec) {
            send_encoded(b, d, chunk, r, box[d], from);
            continue;
        }
        if (gb_partial_is_acc(b, b->isl)) {
            add_mates(b, box[d], from, 0);
            from = gb_b_scratch(b, r.n * b->as);
            bytes = r.n * b->as;
            gb_b_fold(b, GB_QUEUE_OUT, from, r.n, 1, 0);
        }
        gb_b_send(b, d, gb_b_stage_out(b, from, bytes), bytes);
    }
}

/* The rank of island i that has element `at` of a chunk of n in its share. */
static uint32_t share_owner(const struct gb_builder *b, uint32_t i, uint64_t n, uint64_t at)
{
    const struct gb_topo *t = b->topo;
    return t->members[t->island_first[i] + gb_cut_find(n, t->island_first[i + 1] - t->island_first[i], at)];
}

/* Posts room for the foreign islands' partials of my chunk, segment by segment. */
static void await_encoded(struct gb_builder *b, struct gb_range chunk, uint64_t c)
{
    for (uint64_t at = 0, end; at < chunk.n; at = end) {
        end = gb_segment_end(b->topo, chunk.n, at, b->isl);
        for (uint32_t i = 0; i < b->topo->nislands; i++) {
            if (i == b->isl) continue;
            gb_b_keep(b, c, gb_b_recv_encoded(b, gb_first(c), share_owner(b, i, chunk.n, at), end - at, 0));
        }
    }
}

/* The same without a codec: an island's shares lie side by side. */
static void await_partials(struct gb_builder *b, struct gb_range chunk, uint64_t c)
{
    const struct gb_topo *t = b->topo;
    for (uint32_t i = 0; i < t->nislands && chunk.n > 0; i++) {
        if (i == b->isl) continue;
        uint32_t first = t->island_first[i], size = t->island_first[i + 1] - first;
        uint64_t w = gb_partial_is_acc(b, i) ? b->as : b->es;
        struct gb_ref to = gb_b_scratch(b, chunk.n * w);
        gb_b_keep(b, c, to);
        for (uint32_t j = 0; j < size; j++) {
            struct gb_range r = gb_cut(chunk.n, size, j);
            if (r.n > 0) gb_b_recv_to(b, gb_first(c), t->members[first + j], gb_plus(to, r.lo * w), r.n * w);
        }
    }
}

/* Folds my chunk in island order, segment by segment.  My own island's partial is encoded like the others: the result
 * does not depend on where it is needed. */
static void fold_encoded(struct gb_builder *b, struct gb_range chunk, uint64_t c)
{
    struct gb_ref own = in_block(b, GB_BUF_IN, gb_block_at(b, b->me), chunk, 0);
    struct inbox box = {.at = gb_b_kept(b, c), .stride = (chunk.n * b->es + 15) & ~(uint64_t)15};
    for (uint64_t at = 0, end; at < chunk.n; at = end) {
        end = gb_segment_end(b->topo, chunk.n, at, b->isl);
        add_mates(b, box, own, at);
        struct gb_ref partial = gb_b_encode_partial(b, GB_QUEUE_IN, gb_block_at(b, b->me) + chunk.lo + at, end - at);
        for (uint32_t i = 0; i < b->topo->nislands; i++) {
            int is_mine = i == b->isl;
            uint32_t from = is_mine ? b->me : share_owner(b, i, chunk.n, at);
            gb_b_add_encoded(b, is_mine ? partial : gb_b_kept(b, c), from);
        }
        gb_b_fold(b, GB_QUEUE_IN, gb_at(GB_BUF_OUT, (chunk.lo + at) * b->es), end - at, GB_STORE_RAW, 1);
    }
}

/* Folds my chunk in island order.  The own island's sum is a step of its own unless the fold begins with it. */
static void fold_chunk(struct gb_builder *b, struct gb_range chunk, uint64_t c)
{
    struct gb_ref own = in_block(b, GB_BUF_IN, gb_block_at(b, b->me), chunk, 0);
    struct inbox box = {.at = gb_b_kept(b, c), .stride = (chunk.n * b->es + 15) & ~(uint64_t)15};
    int is_single = b->isl == 0 || b->nloc == 1;
    struct gb_ref partial = own;
    if (!is_single) {
        add_mates(b, box, own, 0);
        partial = gb_b_scratch(b, chunk.n * b->as);
        gb_b_fold(b, GB_QUEUE_IN, partial, chunk.n, 1, 0);
    }
    for (uint32_t i = 0; i < b->topo->nislands; i++) {
        if (i != b->isl)
            gb_b_add(b, gb_b_kept(b, c), gb_partial_is_acc(b, i));
        else if (is_single)
            add_mates(b, box, own, 0);
        else
            gb_b_add(b, partial, 1);
    }
    gb_b_fold(b, GB_QUEUE_IN, gb_at(GB_BUF_OUT, chunk.lo * b->es), chunk.n, 0, 1);
}

void gb_reduce_blocks(struct gb_builder *b)
{
    uint64_t size = gb_chunk_elements(b->topo, b->spec), rounds = count_rounds(b, size);
    struct inbox *box = calloc(b->topo->nranks, sizeof *box);
    if (!box) b->failed = 1;
    for (uint64_t c = 0; c <= rounds && !b->failed; c++) {
        if (c < rounds) {
            gb_b_open_slot(b, c);
            exchange_inputs(b, size, c, box);
            gb_b_keep(b, c, box[b->me].at);
            send_partials(b, size, c, box);
            (b->codec ? await_encoded : await_partials)(b, gb_chunk(gb_block(b, b->me), size, c), c);
        }
        if (c > 0) {
            struct gb_range chunk = gb_chunk(gb_block(b, b->me), size, c - 1);
            gb_b_use_slot(b, c - 1);
            gb_b_land(b, gb_first(c - 1));
            if (chunk.n > 0) (b->codec ? fold_encoded : fold_chunk)(b, chunk, c - 1);
        }
    }
    free(box);
}

/* ---- spread_blocks ---- */

/* Encoded: chunk c of my block leaves segment by segment; what the messages hold is the result here, too. */
static void send_own_encoded(struct gb_builder *b, uint64_t size, uint64_t c)
{
    struct gb_range chunk = gb_chunk(gb_block(b, b->me), size, c);
    for (uint64_t at = 0, end; at < chunk.n; at = end) {
        end = gb_segment_end(b->topo, chunk.n, at, b->isl);
        gb_b_add(b, gb_at(GB_BUF_IN, (chunk.lo + at) * b->es), 0);
        struct gb_ref message = gb_b_encode(b, GB_QUEUE_OUT, chunk.lo + at, end - at, 0);
        for (uint32_t k = 1; k < b->topo->nislands; k++)
            gb_b_send_encoded(b, share_owner(b, (b->isl + k) % b->topo->nislands, chunk.n, at), message, end - at, 0);
        gb_b_decode(b, message, b->me, in_block(b, GB_BUF_OUT, gb_block_at(b, b->me), chunk, at), end - at);
    }
}

static void recv_blocks_encoded(struct gb_builder *b, uint64_t size, uint64_t c)
{
    for (uint32_t d = 0; d < b->topo->nranks; d++) {
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c), r = gb_cut(chunk.n, b->nloc, b->loc);
        if (b->topo->island[d] == b->isl) continue;
        for (uint64_t at = r.lo, end; at < r.lo + r.n; at = end) {
            end = gb_segment_end(b->topo, chunk.n, at, b->topo->island[d]);
            gb_b_keep(b, c, gb_b_recv_encoded(b, gb_first(c), d, end - at, 0));
        }
    }
}

/* My shares of chunk c of foreign blocks have arrived. */
static void decode_blocks(struct gb_builder *b, uint64_t size, uint64_t c)
{
    for (uint32_t d = 0; d < b->topo->nranks; d++) {
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c), r = gb_cut(chunk.n, b->nloc, b->loc);
        if (b->topo->island[d] == b->isl) continue;
        for (uint64_t at = r.lo, end; at < r.lo + r.n; at = end) {
            end = gb_segment_end(b->topo, chunk.n, at, b->topo->island[d]);
            gb_b_decode(b, gb_b_kept(b, c), d, in_block(b, GB_BUF_OUT, gb_block_at(b, d), chunk, at), end - at);
        }
    }
}

/* Inside the island: the mates get what was decoded here, shares of foreign blocks and my own chunk. */
static void exchange_decoded(struct gb_builder *b, uint64_t size, uint64_t c)
{
    int any = 0;
    for (uint32_t d = 0; d < b->topo->nranks && b->nloc > 1; d++) {
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c);
        int is_home = b->topo->island[d] == b->isl;
        any |= chunk.n > 0;
        for (uint32_t m = 0; m < b->nloc && chunk.n > 0; m++) {
            /* What local rank j has of it. */
            uint32_t j = (b->loc + m) % b->nloc;
            struct gb_range r = gb_cut(chunk.n, b->nloc, j);
            if (is_home) r = (struct gb_range){0, b->mates[j] == d ? chunk.n : 0};
            struct gb_ref at = in_block(b, GB_BUF_OUT, gb_block_at(b, d), chunk, r.lo);
            if (m > 0) gb_b_take(b, GB_NOW, b->mates[j], at, r.n * b->es);
            for (uint32_t to = 1; m == 0 && to < b->nloc; to++)
                gb_b_give(b, b->mates[(b->loc + to) % b->nloc], at, r.n * b->es);
        }
    }
    if (any) gb_b_call(b);
    gb_b_land(b, GB_NOW);
}

static void spread_encoded(struct gb_builder *b)
{
    uint64_t size = gb_chunk_elements(b->topo, b->spec), rounds = count_rounds(b, size);
    for (uint64_t c = 0; c <= rounds && !b->failed; c++) {
        if (c < rounds) {
            gb_b_open_slot(b, c);
            send_own_encoded(b, size, c);
            recv_blocks_encoded(b, size, c);
        }
        if (c > 0) {
            gb_b_use_slot(b, c - 1);
            gb_b_land(b, gb_first(c - 1));
            decode_blocks(b, size, c - 1);
            exchange_decoded(b, size, c - 1);
        }
    }
}

/* The own block, and in a vendor island the mates' blocks: straight from input to output, once. */
static void spread_at_home(struct gb_builder *b)
{
    uint64_t own = gb_block(b, b->me) * b->es, any = own;
    struct gb_ref in = gb_at(GB_BUF_IN, 0);
    gb_b_copy(b, GB_QUEUE_OUT, in, gb_at(GB_BUF_OUT, gb_block_at(b, b->me) * b->es), own);
    if (!b->vendor) return;
    for (uint32_t m = 1; m < b->nloc; m++) gb_b_give(b, b->mates[(b->loc + m) % b->nloc], in, own);
    for (uint32_t j = 0; j < b->nloc; j++) {
        uint32_t d = b->mates[j];
        any += gb_block(b, d) * b->es;
        if (d != b->me) gb_b_take(b, GB_NOW, d, gb_at(GB_BUF_OUT, gb_block_at(b, d) * b->es), gb_block(b, d) * b->es);
    }
    if (any > 0) gb_b_call(b);
}

/* Chunk c of my block leaves: a share to each member of the other islands, all of it to mates without a vendor library.
 */
static void send_own(struct gb_builder *b, uint64_t size, uint64_t c)
{
    const struct gb_topo *t = b->topo;
    struct gb_range chunk = gb_chunk(gb_block(b, b->me), size, c);
    if (chunk.n == 0 || t->nranks == (b->vendor ? b->nloc : 1)) return;
    struct gb_ref from = gb_b_stage_out(b, gb_at(GB_BUF_IN, chunk.lo * b->es), chunk.n * b->es);
    for (uint32_t k = 1; k < t->nislands; k++) {
        uint32_t i = (b->isl + k) % t->nislands, first = t->island_first[i], members = t->island_first[i + 1] - first;
        for (uint32_t j = 0; j < members; j++) {
            struct gb_range r = gb_cut(chunk.n, members, j);
            if (r.n > 0) gb_b_send(b, t->members[first + j], gb_plus(from, r.lo * b->es), r.n * b->es);
        }
    }
    for (uint32_t m = 1; m < b->nloc && !b->vendor; m++)
        gb_b_send(b, b->mates[(b->loc + m) % b->nloc], from, chunk.n * b->es);
}

static void recv_blocks(struct gb_builder *b, uint64_t size, uint64_t c)
{
    for (uint32_t d = 0; d < b->topo->nranks; d++) {
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c), r = gb_cut(chunk.n, b->nloc, b->loc);
        int is_home = b->topo->island[d] == b->isl;
        if (d == b->me || (is_home && b->vendor)) continue;
        if (is_home) r = (struct gb_range){0, chunk.n};
        if (r.n == 0) continue;
        struct gb_ref to = in_block(b, GB_BUF_OUT, gb_block_at(b, d), chunk, r.lo);
        struct gb_ref at = gb_b_recv_to(b, gb_first(c), d, to, r.n * b->es);
        if (!is_home) gb_b_keep(b, c, at);
    }
}

/* The shares of foreign blocks that arrived in the island go to the mates. */
static void exchange_shares(struct gb_builder *b, uint64_t size, uint64_t c)
{
    int any = 0;
    for (uint32_t d = 0; d < b->topo->nranks && b->nloc > 1; d++) {
        struct gb_range chunk = gb_chunk(gb_block(b, d), size, c), own = gb_cut(chunk.n, b->nloc, b->loc);
        if (chunk.n == 0 || b->topo->island[d] == b->isl) continue;
        any = 1;
        struct gb_ref at = own.n > 0 ? gb_b_kept(b, c) : gb_at(GB_BUF_OUT, 0);
        for (uint32_t m = 1; m < b->nloc && own.n > 0; m++) {
            uint32_t mate = b->mates[(b->loc + m) % b->nloc];
            if (b->vendor)
                gb_b_give(b, mate, in_block(b, GB_BUF_OUT, gb_block_at(b, d), chunk, own.lo), own.n * b->es);
            else
                gb_b_send(b, mate, at, own.n * b->es); /* from where it was received */
        }
        for (uint32_t j = 0; j < b->nloc; j++) {
            struct gb_range r = gb_cut(chunk.n, b->nloc, j);
            if (j != b->loc)
                gb_b_take(b, GB_NOW, b->mates[j], in_block(b, GB_BUF_OUT, gb_block_at(b, d), chunk, r.lo), r.n * b->es);
        }
    }
    if (any) gb_b_call(b);
    gb_b_land(b, GB_NOW);
}

void gb_spread_blocks(struct gb_builder *b)
{
    if (b->codec) {
        spread_encoded(b);
        return;
    }
    uint64_t size = gb_chunk_elements(b->topo, b->spec), rounds = count_rounds(b, size);
    spread_at_home(b);
    for (uint64_t c = 0; c <= rounds && !b->failed; c++) {
        if (c < rounds) {
            gb_b_open_slot(b, c);
            send_own(b, size, c);
            recv_blocks(b, size, c);
        }
        if (c > 0) {
            gb_b_use_slot(b, c - 1);
            gb_b_land(b, gb_first(c - 1));
            exchange_shares(b, size, c - 1);
        }
    }
}
