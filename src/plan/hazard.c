/* SPDX-License-Identifier: Apache-2.0
 * Who wrote and who read each byte range last, so that a step's dependencies follow from the memory it touches.  A
 * track is a sorted list of disjoint spans; ranges never touched have none.  Used only while a plan is built. */
#include "plan/build.h"

#include <stdlib.h>
#include <string.h>

static int reserve(struct gb_builder *b, struct gb_track *t, uint32_t more)
{
    return gb_grow(b, (void **)&t->span, &t->cap, t->n + more, sizeof *t->span);
}

/* First span that ends after `at`. */
static uint32_t find(const struct gb_track *t, uint64_t at)
{
    uint32_t lo = 0, hi = t->n;
    if (hi && t->span[hi - 1].hi <= at) return hi; /* the usual case: ranges come in ascending order */
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (t->span[mid].hi > at)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

static void insert(struct gb_track *t, uint32_t at, struct gb_span span)
{
    memmove(t->span + at + 1, t->span + at, (t->n - at) * sizeof span);
    t->span[at] = span;
    t->n++;
}

/* Makes `at` a boundary.  Returns the first span that begins at or after it. */
static uint32_t split(struct gb_track *t, uint64_t at)
{
    uint32_t i = find(t, at);
    if (i == t->n || t->span[i].lo >= at) return i;
    struct gb_span left = t->span[i];
    left.hi = at;
    t->span[i].lo = at;
    insert(t, i, left);
    return i + 1;
}

static void add_reader(struct gb_builder *b, struct gb_span *span, uint32_t step)
{
    if (span->readers && b->node[span->readers - 1].step == step) return;
    if (!gb_grow(b, (void **)&b->node, &b->node_cap, b->nnodes + 1, sizeof *b->node)) return;
    b->node[b->nnodes] = (struct gb_reader){step, span->readers};
    span->readers = ++b->nnodes;
}

static void track_read(struct gb_builder *b, struct gb_track *t, uint64_t lo, uint64_t hi, uint32_t step)
{
    uint32_t i = split(t, lo);
    split(t, hi);
    for (uint64_t at = lo; at < hi; i++) {
        if (i == t->n || t->span[i].lo > at) {
            uint64_t end = i == t->n || t->span[i].lo > hi ? hi : t->span[i].lo;
            if (!reserve(b, t, 1)) return;
            insert(t, i, (struct gb_span){at, end, 0, 0});
        }
        if (t->span[i].writer) gb_b_dep(b, t->span[i].writer - 1);
        add_reader(b, &t->span[i], step);
        at = t->span[i].hi;
    }
}

static void track_write(struct gb_builder *b, struct gb_track *t, uint64_t lo, uint64_t hi, uint32_t step)
{
    uint32_t first = split(t, lo), end = split(t, hi);
    for (uint32_t i = first; i < end; i++) {
        if (t->span[i].writer && !t->span[i].readers) gb_b_dep(b, t->span[i].writer - 1);
        for (uint32_t r = t->span[i].readers; r; r = b->node[r - 1].next) gb_b_dep(b, b->node[r - 1].step);
    }
    struct gb_span whole = {lo, hi, step + 1, 0};
    if (first == end) {
        insert(t, first, whole);
        return;
    }
    t->span[first] = whole;
    memmove(t->span + first + 1, t->span + end, (t->n - end) * sizeof whole);
    t->n -= end - first - 1;
}

void gb_track_access(struct gb_builder *b, struct gb_track *t, uint64_t lo, uint64_t hi, int is_write)
{
    if (b->failed || !reserve(b, t, 3)) return;
    uint32_t step = b->plan->nsteps - 1;
    if (is_write)
        track_write(b, t, lo, hi, step);
    else
        track_read(b, t, lo, hi, step);
}
