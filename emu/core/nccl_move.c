/* SPDX-License-Identifier: Apache-2.0
 * Rings between ranks and the loop that fills and empties them.  Runs on stream workers.  It sleeps on the rank's bell
 * in shared memory, and looks for dead peers and for ranks that wait for each other only when nothing moves.  */
#include "nccl_move.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IDLE_MS 20

_Static_assert(sizeof(struct nccl_msg) == 64, "the header is part of the ring format");

static const char *const kind_name[] = {
    "nothing", "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
};

static void describe(char *out, size_t size, const struct nccl_msg *m, bool is_send)
{
    unsigned kind = m->kind <= NCCL_REDUCE ? m->kind : 0;
    if (kind <= NCCL_RECV)
        snprintf(out, size, "%s of %llu bytes after %llu collectives", is_send ? "send" : "recv",
                 (unsigned long long)m->bytes, (unsigned long long)m->collective);
    else
        snprintf(out, size, "%s #%llu (count %llu, dtype %u, op %u, root %d)", kind_name[kind],
                 (unsigned long long)m->collective, (unsigned long long)m->count, m->dtype, m->op, (int)m->root);
}

static bool matches(const struct nccl_msg *want, const struct nccl_msg *got)
{
    bool p2p = want->kind <= NCCL_RECV;
    if (p2p != (got->kind <= NCCL_RECV) || want->collective != got->collective || want->bytes != got->bytes)
        return false;
    return p2p || (want->kind == got->kind && want->dtype == got->dtype && want->op == got->op &&
                   want->root == got->root && want->count == got->count && want->phase == got->phase);
}

static void mismatch(struct nccl_comm *c, int peer, const struct nccl_msg *mine, bool mine_is_send, const char *theirs)
{
    char here[160];
    describe(here, sizeof here, mine, mine_is_send);
    atomic_store(&c->map.head->error, 1);
    nccl_fail(c, NCCL_INVALID_USAGE, "order mismatch: rank %d is at %s, but rank %d is at %s", c->rank, here, peer,
              theirs);
    for (int r = 0; r < c->nranks; r++) nccl_ring_bell(&c->map.slots[r]);
}

/* Copies into the ring at absolute position `at`. */
static void ring_put(struct nccl_pair *p, uint64_t at, const void *from, size_t n)
{
    size_t i = at % NCCL_RING, first = n < NCCL_RING - i ? n : NCCL_RING - i;
    memcpy(p->ring + i, from, first);
    memcpy(p->ring, (const char *)from + first, n - first);
}

static void ring_take(const struct nccl_pair *p, uint64_t at, void *to, size_t n)
{
    size_t i = at % NCCL_RING, first = n < NCCL_RING - i ? n : NCCL_RING - i;
    memcpy(to, p->ring + i, first);
    memcpy((char *)to + first, p->ring, n - first);
}

/* Bytes moved. */
static size_t push_send(struct nccl_pair *p, struct nccl_xfer *x)
{
    uint64_t head = atomic_load(&p->head);
    size_t room = NCCL_RING - (size_t)(head - atomic_load(&p->tail)), total = sizeof x->msg + x->msg.bytes, n = 0;
    if (x->moved == total) return 0;
    if (x->moved == 0) {
        if (room < sizeof x->msg) return 0;
        ring_put(p, head, &x->msg, sizeof x->msg);
        x->moved = n = sizeof x->msg;
        room -= n;
    }
    size_t left = total - x->moved, m = left < room ? left : room;
    if (m) ring_put(p, head + n, x->data + (x->moved - sizeof x->msg), m);
    x->moved += m;
    atomic_store(&p->head, head + n + m);
    if (x->moved == total) x->end = head + n + m;
    return n + m;
}

/* Bytes moved; 0 with `bad` set when the message is not the expected one. */
static size_t pull_recv(struct nccl_pair *p, struct nccl_xfer *x, struct nccl_msg *got, bool *bad)
{
    uint64_t tail = atomic_load(&p->tail);
    size_t ready = (size_t)(atomic_load(&p->head) - tail), total = sizeof x->msg + x->msg.bytes, n = 0;
    if (x->moved == 0) {
        if (ready < sizeof *got) return 0;
        ring_take(p, tail, got, sizeof *got);
        *bad = !matches(&x->msg, got);
        if (*bad) return 0;
        x->moved = n = sizeof *got;
        ready -= n;
    }
    size_t left = total - x->moved, m = left < ready ? left : ready;
    if (m) ring_take(p, tail + n, x->data + (x->moved - sizeof x->msg), m);
    x->moved += m;
    x->done = x->moved == total;
    atomic_store(&p->tail, tail + n + m);
    return n + m;
}

struct mover {
    struct nccl_comm *c;
    uint64_t batch;
    struct nccl_xfer *x;
    int count, left;
    bool bad;
    bool *busy; /* [2][nranks]: an earlier transfer of that peer and direction is not through yet */
};

static bool step(struct mover *m, struct nccl_xfer *x)
{
    struct nccl_comm *c = m->c;
    bool *busy = &m->busy[(x->is_send ? c->nranks : 0) + x->peer];
    size_t moved = 0;
    if (!*busy && x->is_send) {
        struct nccl_pair *p = nccl_pair(&c->map, c->rank, x->peer);
        moved = push_send(p, x);
        bool in = x->moved == sizeof x->msg + x->msg.bytes;
        x->done = in && atomic_load(&p->tail) >= x->end;
        *busy = !in;
    } else if (!*busy) {
        struct nccl_msg got;
        moved = pull_recv(nccl_pair(&c->map, x->peer, c->rank), x, &got, &m->bad);
        if (m->bad) {
            char theirs[160];
            describe(theirs, sizeof theirs, &got, true);
            mismatch(c, x->peer, &x->msg, false, theirs);
        }
        *busy = !x->done;
    }
    if (moved) nccl_ring_bell(&c->map.slots[x->peer]);
    if (x->done) m->left--;
    return moved || x->done;
}

static bool step_all(struct mover *m)
{
    bool any = false;
    memset(m->busy, 0, 2 * (size_t)m->c->nranks);
    for (int i = 0; i < m->count && !m->bad; i++)
        if (!m->x[i].done && step(m, &m->x[i])) any = true;
    return any;
}

/* Nothing moved for a while: tell every peer what is still open with it, and find a peer that has the same direction
 * open towards us and nothing in the other one.  Neither can ever go on. */
static void check_order(struct mover *m, uint64_t *before)
{
    struct nccl_comm *c = m->c;
    for (int r = 0; r < c->nranks && !m->bad; r++) {
        uint64_t open = 0;
        struct nccl_xfer *mine = NULL;
        for (int i = 0; i < m->count; i++)
            if (!m->x[i].done && m->x[i].peer == r) {
                open |= m->x[i].is_send ? 1 : 2;
                mine = &m->x[i];
            }
        if (r == c->rank || !mine) continue;
        atomic_store(&nccl_pair(&c->map, c->rank, r)->want, m->batch << 2 | open);
        uint64_t theirs = atomic_load(&nccl_pair(&c->map, r, c->rank)->want);
        if (open != 3 && (theirs & 3) == open && before[r] == theirs) {
            mismatch(c, r, &mine->msg, mine->is_send, open == 1 ? "a send to us too" : "a recv from us too");
            m->bad = true;
        }
        before[r] = theirs;
    }
}

static void clear_wants(struct mover *m)
{
    for (int r = 0; r < m->c->nranks; r++) atomic_store(&nccl_pair(&m->c->map, m->c->rank, r)->want, 0);
}

bool nccl_move(struct nccl_comm *c, uint64_t batch, struct nccl_xfer *x, int count)
{
    struct mover m = {.c = c, .batch = batch, .x = x, .count = count, .left = count};
    struct nccl_slot *slot = &c->map.slots[c->rank];
    uint64_t *before = calloc((size_t)c->nranks, sizeof *before);
    bool idle = false;
    m.busy = calloc(2, (size_t)c->nranks);
    if (!before || !m.busy) abort();
    while (m.left && !atomic_load(&c->abort) && !atomic_load(&c->obj.dev->sticky)) {
        uint32_t seen = atomic_load(&slot->bell);
        if (!m.bad && step_all(&m)) {
            if (idle) clear_wants(&m);
            idle = false;
            memset(before, 0, (size_t)c->nranks * sizeof *before);
            continue;
        }
        uint64_t start = emu_now_ns();
        nccl_await_bell(slot, seen, IDLE_MS);
        if (emu_now_ns() - start < IDLE_MS * 900000ull) continue;
        idle = true;
        nccl_check_peers(c);
        if (!m.bad) check_order(&m, before);
    }
    if (idle) clear_wants(&m);
    free(before);
    free(m.busy);
    return m.left == 0;
}
