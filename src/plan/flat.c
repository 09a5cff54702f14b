/* SPDX-License-Identifier: Apache-2.0
 * The one-round forms for small messages: every rank sends its raw input to every rank that needs it, and who needs it
 * folds it in the order of the large forms, so that the bits are equal.  And the barrier. */
#include "plan/build.h"

/* Where rank r's contribution to my block lies: my own input, or a slot of the area that held the messages. */
static struct gb_ref contribution(const struct gb_builder *b, struct gb_ref area, uint64_t stride, uint32_t r)
{
    if (r == b->me) return gb_at(GB_BUF_IN, gb_block_at(b, r) * b->es);
    return gb_plus(area, stride * (r - (r > b->me)));
}

/* Islands after the first whose partial is a sum of its own get it now; then everything is folded in island order.  The
 * first island's partial is where the fold begins, so it needs no step of its own. */
static void fold_all(struct gb_builder *b, struct gb_ref area, uint64_t stride, uint64_t n)
{
    const struct gb_topo *t = b->topo;
    for (uint32_t i = 1; i < t->nislands; i++) {
        if (t->island_first[i + 1] - t->island_first[i] == 1) continue;
        for (uint32_t m = t->island_first[i]; m < t->island_first[i + 1]; m++)
            gb_b_add(b, contribution(b, area, stride, t->members[m]), 0);
        struct gb_ref partial = gb_b_scratch(b, n * b->as);
        gb_b_fold(b, GB_QUEUE_IN, partial, n, 1, 0);
        gb_b_keep(b, 0, partial);
    }
    for (uint32_t i = 0; i < t->nislands; i++) {
        if (i > 0 && t->island_first[i + 1] - t->island_first[i] > 1) {
            gb_b_add(b, gb_b_kept(b, 0), 1);
            continue;
        }
        for (uint32_t m = t->island_first[i]; m < t->island_first[i + 1]; m++)
            gb_b_add(b, contribution(b, area, stride, t->members[m]), 0);
    }
    gb_b_fold(b, GB_QUEUE_IN, gb_at(GB_BUF_OUT, 0), n, 0, 1);
}

void gb_flat_reduce(struct gb_builder *b)
{
    uint32_t nranks = b->topo->nranks;
    uint64_t n = gb_block(b, b->me), bytes = n * b->es;
    uint64_t all = b->blocks ? b->blocks[nranks] : b->spec->count;
    int sends = nranks > 1 && (b->spec->op != GPUBRIDGE_REDUCE || b->me != b->spec->root);

    gb_b_open_slot(b, 0);
    struct gb_ref in = gb_at(GB_BUF_IN, 0);
    if (sends) in = gb_b_stage_out(b, in, all * b->es);
    for (uint32_t m = 1; m < nranks; m++) {
        uint32_t d = (b->me + m) % nranks;
        if (gb_block(b, d) > 0) gb_b_send(b, d, gb_plus(in, gb_block_at(b, d) * b->es), gb_block(b, d) * b->es);
    }
    if (n == 0) return;
    uint64_t stride = (bytes + 15) & ~(uint64_t)15, area_bytes = (nranks - 1) * stride;
    struct gb_ref host = gb_b_staging(b, area_bytes), area = host;
    for (uint32_t r = 0; r < nranks; r++)
        if (r != b->me) gb_b_recv(b, r, contribution(b, host, stride, r), bytes);
    if (b->staged && nranks > 1) {
        area = gb_b_scratch(b, area_bytes);
        gb_b_copy(b, GB_QUEUE_IN, host, area, area_bytes - stride + bytes);
    }
    fold_all(b, area, stride, n);
}

void gb_flat_spread(struct gb_builder *b)
{
    uint32_t nranks = b->topo->nranks;
    uint64_t own = gb_block(b, b->me) * b->es, at = gb_block_at(b, b->me) * b->es;
    struct gb_ref in = gb_at(GB_BUF_IN, 0);

    gb_b_open_slot(b, 0);
    if (own > 0) {
        struct gb_ref from = nranks > 1 ? gb_b_stage_out(b, in, own) : in;
        for (uint32_t m = 1; m < nranks; m++) gb_b_send(b, (b->me + m) % nranks, from, own);
        gb_b_copy(b, GB_QUEUE_OUT, in, gb_at(GB_BUF_OUT, at), own);
    }
    /* The staging is laid out like the output, so what comes from lower and from higher ranks is one copy each. */
    uint64_t total = b->blocks ? b->blocks[nranks] * b->es : b->spec->count * b->es;
    struct gb_ref host = b->staged ? gb_b_staging(b, total) : gb_at(GB_BUF_OUT, 0);
    for (uint32_t r = 0; r < nranks; r++)
        if (r != b->me && gb_block(b, r) > 0)
            gb_b_recv(b, r, gb_plus(host, gb_block_at(b, r) * b->es), gb_block(b, r) * b->es);
    if (!b->staged) return;
    if (!b->blocks) { /* one block in all */
        if (own == 0) gb_b_copy(b, GB_QUEUE_IN, host, gb_at(GB_BUF_OUT, 0), total);
        return;
    }
    gb_b_copy(b, GB_QUEUE_IN, host, gb_at(GB_BUF_OUT, 0), at);
    gb_b_copy(b, GB_QUEUE_IN, gb_plus(host, at + own), gb_at(GB_BUF_OUT, at + own), total - at - own);
}

#define BARRIER_FLAT 16u /* ranks; more: log2 rounds instead of all pairs */

void gb_barrier(struct gb_builder *b)
{
    uint32_t nranks = b->topo->nranks, nrecv = 0, recv[32];
    struct gb_ref none = gb_at(GB_BUF_HOST, 0);
    if (nranks <= BARRIER_FLAT) {
        for (uint32_t m = 1; m < nranks; m++) gb_b_send(b, (b->me + m) % nranks, none, 0);
        for (uint32_t m = 1; m < nranks; m++) gb_b_recv(b, (b->me + nranks - m) % nranks, none, 0);
        return;
    }
    /* Dissemination: what I send in a round says that all I heard in earlier rounds have arrived. */
    for (uint32_t step = 1; step < nranks; step *= 2) {
        gb_b_send(b, (b->me + step) % nranks, none, 0);
        for (uint32_t k = 0; k < nrecv; k++) gb_b_dep(b, recv[k]);
        recv[nrecv++] = gb_b_recv(b, (b->me + nranks - step) % nranks, none, 0);
    }
}
