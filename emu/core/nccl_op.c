/* SPDX-License-Identifier: Apache-2.0
 * Collectives and point-to-point of emulated NCCL in terms of nccl_move: batches, their order on a communicator, lazy
 * connection.  run_* functions run on stream workers, the rest on the calling thread.  */
#include "nccl_move.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct batch {
    struct nccl_comm *c; /* a reference */
    uint64_t index;
    struct nccl_call *calls;
    int count;
};

struct run {
    struct nccl_comm *c;
    const struct nccl_call *call;
    uint64_t batch;
    size_t size; /* of an element */
    char *in, *out;
};

static void *room(size_t n)
{
    void *p = malloc(n ? n : 1);
    if (!p) abort();
    return p;
}

static struct nccl_xfer xfer(const struct run *r, int peer, bool is_send, char *data, size_t bytes, unsigned phase)
{
    const struct nccl_call *k = r->call;
    return (struct nccl_xfer){.peer = peer,
                              .is_send = is_send,
                              .data = data,
                              .msg = {.kind = k->kind,
                                      .dtype = (uint32_t)k->dtype,
                                      .op = (uint32_t)(k->op < NCCL_BUILTIN_OPS ? k->op : NCCL_BUILTIN_OPS),
                                      .root = (uint32_t)k->root,
                                      .phase = phase,
                                      .count = k->count,
                                      .bytes = bytes,
                                      .collective = k->collective}};
}

/* The input as it enters the sum: scaled for AVG of floats and PreMulSum.  A copy then; else the input itself. */
static char *scaled_input(const struct run *r, size_t count)
{
    const struct nccl_call *k = r->call;
    bool is_float = k->dtype >= NCCL_F16 && k->dtype <= NCCL_BF16;
    double factor = 1.0 / r->c->nranks;
    if (k->op < NCCL_AVG || (k->op == NCCL_AVG && !is_float)) return r->in;
    if (k->op > NCCL_AVG) {
        const void *bits = k->dyn.on_device ? emu_mem_view(k->dyn.on_device, r->size, k->api) : &k->dyn.scalar;
        factor = bits ? nccl_scalar(k->dtype, bits) : 0;
    }
    char *copy = room(count * r->size);
    memcpy(copy, r->in, count * r->size);
    nccl_scale(copy, count, k->dtype, factor);
    return copy;
}

/* Parts are folded in ring order, so that the rounding depends on the position, as in the real library. */
static void fold_parts(const struct run *r, char *acc, char *const *parts, size_t count)
{
    int n = r->c->nranks, first = (r->c->rank + 1) % n;
    memcpy(acc, parts[first], count * r->size);
    for (int k = 1; k < n; k++) nccl_fold(acc, parts[(first + k) % n], count, r->call->dtype, r->call->op);
    if (r->call->op == NCCL_AVG) nccl_divide(acc, count, r->call->dtype, n);
}

/* Everybody's part `me` comes here and is folded into `out`; parts start every `stride` elements, the last is short. */
static bool reduce_scatter(const struct run *r, char *out, size_t stride, size_t total)
{
    int n = r->c->nranks, me = r->c->rank, x = 0;
    size_t mine = 0;
    char *src = scaled_input(r, total), *scratch = NULL;
    char **parts = room((size_t)n * sizeof *parts);
    struct nccl_xfer *xs = room(2 * (size_t)n * sizeof *xs);
    for (int j = 0; j < n; j++) {
        size_t at = (size_t)j * stride < total ? (size_t)j * stride : total;
        size_t count = total - at < stride ? total - at : stride;
        if (j == me) {
            mine = count;
            parts[me] = src + at * r->size;
        } else {
            xs[x++] = xfer(r, j, true, src + at * r->size, count * r->size, 1);
        }
    }
    scratch = room((size_t)n * mine * r->size);
    for (int j = 0; j < n; j++)
        if (j != me) {
            parts[j] = scratch + (size_t)j * mine * r->size;
            xs[x++] = xfer(r, j, false, parts[j], mine * r->size, 1);
        }
    bool ok = nccl_move(r->c, r->batch, xs, x);
    if (ok) {
        /* Not folded in place: `out` may be one of the inputs. */
        char *acc = room(mine * r->size);
        fold_parts(r, acc, parts, mine);
        memcpy(out, acc, mine * r->size);
        free(acc);
    }
    free(scratch);
    free(parts);
    free(xs);
    if (src != r->in) free(src);
    return ok;
}

/* Part j of `out` (every `stride` bytes, the last short) comes from rank j. */
static bool gather_parts(const struct run *r, char *out, size_t stride, size_t total)
{
    int n = r->c->nranks, me = r->c->rank, x = 0;
    struct nccl_xfer *xs = room(2 * (size_t)n * sizeof *xs);
    for (int pass = 0; pass < 2; pass++)
        for (int j = 0; j < n; j++) {
            int part = pass ? j : me;
            size_t at = (size_t)part * stride < total ? (size_t)part * stride : total;
            size_t bytes = total - at < stride ? total - at : stride;
            if (j != me) xs[x++] = xfer(r, j, !pass, out + at, bytes, 2);
        }
    bool ok = nccl_move(r->c, r->batch, xs, x);
    free(xs);
    return ok;
}

static bool run_all_reduce(const struct run *r)
{
    size_t count = r->call->count, n = (size_t)r->c->nranks, stride = (count + n - 1) / n;
    size_t at = (size_t)r->c->rank * stride < count ? (size_t)r->c->rank * stride : count;
    return reduce_scatter(r, r->out + at * r->size, stride, count) &&
           gather_parts(r, r->out, stride * r->size, count * r->size);
}

static bool run_reduce_scatter(const struct run *r)
{
    return reduce_scatter(r, r->out, r->call->count, r->call->count * (size_t)r->c->nranks);
}

static bool run_all_gather(const struct run *r)
{
    size_t bytes = r->call->count * r->size;
    char *own = r->out + (size_t)r->c->rank * bytes;
    if (own != r->in) memmove(own, r->in, bytes);
    return gather_parts(r, r->out, bytes, bytes * (size_t)r->c->nranks);
}

static bool run_broadcast(const struct run *r)
{
    size_t bytes = r->call->count * r->size;
    int n = r->c->nranks, x = 0;
    bool is_root = r->call->root == r->c->rank;
    struct nccl_xfer *xs = room((size_t)n * sizeof *xs);
    if (is_root && r->in != r->out) memmove(r->out, r->in, bytes);
    for (int j = 0; j < n; j++)
        if (is_root ? j != r->c->rank : j == r->call->root)
            xs[x++] = xfer(r, j, is_root, is_root ? r->in : r->out, bytes, 1);
    bool ok = nccl_move(r->c, r->batch, xs, x);
    free(xs);
    return ok;
}

static bool run_reduce(const struct run *r)
{
    size_t bytes = r->call->count * r->size;
    int n = r->c->nranks, x = 0, root = r->call->root;
    char *src = scaled_input(r, r->call->count), *scratch = room((size_t)n * bytes);
    char **parts = room((size_t)n * sizeof *parts);
    struct nccl_xfer *xs = room((size_t)n * sizeof *xs);
    for (int j = 0; j < n; j++) {
        parts[j] = j == r->c->rank ? src : scratch + (size_t)j * bytes;
        if (r->c->rank != root && j == root) xs[x++] = xfer(r, root, true, src, bytes, 1);
        if (r->c->rank == root && j != root) xs[x++] = xfer(r, j, false, parts[j], bytes, 1);
    }
    bool ok = nccl_move(r->c, r->batch, xs, x);
    if (ok && r->c->rank == root) {
        char *acc = room(bytes);
        fold_parts(r, acc, parts, r->call->count);
        memcpy(r->out, acc, bytes);
        free(acc);
    }
    free(scratch);
    free(parts);
    free(xs);
    if (src != r->in) free(src);
    return ok;
}

/* Elements behind the send and the receive pointer. */
static void extents(const struct nccl_call *k, int rank, int n, size_t *send, size_t *recv)
{
    size_t many = k->count * (size_t)n;
    *send = k->kind == NCCL_RECV ? 0 : k->kind == NCCL_REDUCE_SCATTER ? many : k->count;
    *recv = k->kind == NCCL_SEND ? 0 : k->kind == NCCL_ALL_GATHER ? many : k->count;
    if (k->kind == NCCL_BROADCAST && rank != k->root) *send = 0;
    if (k->kind == NCCL_REDUCE && rank != k->root) *recv = 0;
}

static bool view_buffers(struct run *r)
{
    size_t send, recv;
    extents(r->call, r->c->rank, r->c->nranks, &send, &recv);
    r->size = nccl_dtype_bytes(r->call->dtype);
    r->in = emu_mem_view(r->call->send, send * r->size, r->call->api);
    r->out = emu_mem_view(r->call->recv, recv * r->size, r->call->api);
    if (r->in && r->out) return true;
    emu_dev_fail(r->c->obj.dev, EMU_ILLEGAL_ADDRESS);
    return false;
}

static bool run_collective(struct nccl_comm *c, uint64_t batch, const struct nccl_call *k)
{
    struct run r = {.c = c, .call = k, .batch = batch};
    if (!view_buffers(&r)) return false;
    switch (k->kind) {
    case NCCL_ALL_REDUCE:
        return run_all_reduce(&r);
    case NCCL_REDUCE_SCATTER:
        return run_reduce_scatter(&r);
    case NCCL_ALL_GATHER:
        return run_all_gather(&r);
    case NCCL_BROADCAST:
        return run_broadcast(&r);
    case NCCL_REDUCE:
        return run_reduce(&r);
    default:
        return false;
    }
}

/* All sends and receives of a group move together. */
static bool run_p2p(struct nccl_comm *c, const struct batch *b)
{
    struct nccl_xfer *xs = room((size_t)b->count * sizeof *xs);
    int x = 0;
    bool ok = true;
    for (int i = 0; i < b->count && ok; i++) {
        struct run r = {.c = c, .call = &b->calls[i], .batch = b->index};
        if (b->calls[i].kind > NCCL_RECV) continue;
        bool is_send = b->calls[i].kind == NCCL_SEND;
        ok = view_buffers(&r);
        if (ok) xs[x++] = xfer(&r, b->calls[i].root, is_send, is_send ? r.in : r.out, b->calls[i].count * r.size, 0);
    }
    if (ok && x) ok = nccl_move(c, b->index, xs, x);
    free(xs);
    return ok;
}

/* Batches of one communicator run in the order of issue, on whatever streams they are. */
static bool await_turn(struct nccl_comm *c, uint64_t index)
{
    pthread_mutex_lock(&c->mu);
    while (c->done + 1 < index && !atomic_load(&c->abort) && !atomic_load(&c->obj.dev->sticky)) {
        struct timespec ts;
        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_nsec += 20 * 1000 * 1000;
        ts.tv_sec += ts.tv_nsec / 1000000000;
        ts.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&c->cv, &c->mu, &ts);
    }
    bool go = !atomic_load(&c->abort);
    c->running = go;
    pthread_mutex_unlock(&c->mu);
    return go;
}

static void run_batch(struct emu_stream *s, const char *api, void *arg)
{
    struct batch *b = arg;
    struct nccl_comm *c = b->c;
    if (!await_turn(c, b->index)) return;
    bool ok = true;
    for (int i = 0; i < b->count && ok; i++)
        if (b->calls[i].kind > NCCL_RECV) ok = run_collective(c, b->index, &b->calls[i]);
    if (ok) run_p2p(c, b);
    pthread_mutex_lock(&c->mu);
    c->running = false;
    pthread_cond_broadcast(&c->cv);
    pthread_mutex_unlock(&c->mu);
}

void nccl_drop_calls(struct nccl_call *calls, int count)
{
    for (int i = 0; i < count; i++) {
        if (calls[i].stream) emu_obj_put(calls[i].stream);
        emu_obj_put(calls[i].comm);
    }
    free(calls);
}

static void drop_batch(void *arg)
{
    struct batch *b = arg;
    struct nccl_comm *c = b->c;
    pthread_mutex_lock(&c->mu);
    if (c->done < b->index) c->done = b->index;
    pthread_cond_broadcast(&c->cv);
    pthread_mutex_unlock(&c->mu);
    nccl_drop_calls(b->calls, b->count);
    emu_obj_put(c);
}

int nccl_submit(struct nccl_comm *c, struct nccl_call *calls, int count)
{
    struct batch b = {.c = c, .calls = calls, .count = count};
    struct emu_stream *s = calls[0].stream;
    emu_obj_ref(c);
    emu_obj_ref(s);
    /* Several streams in a group: all of them stand before and after the whole. */
    for (int i = 1; i < count; i++)
        if (calls[i].stream != s) emu_post_wait(s, calls[i].stream, emu_stream_last(calls[i].stream));
    pthread_mutex_lock(&c->mu);
    b.index = ++c->issued;
    for (int i = 0; i < count; i++) calls[i].collective = calls[i].kind > NCCL_RECV ? c->collectives++ : c->collectives;
    pthread_mutex_unlock(&c->mu);
    struct emu_stream **others = room((size_t)count * sizeof(struct emu_stream *));
    int n = 0;
    for (int i = 1; i < count; i++)
        if (calls[i].stream != s) {
            emu_obj_ref(calls[i].stream);
            others[n++] = calls[i].stream;
        }
    uint64_t seq = 0;
    int rc = emu_post(s, run_batch, drop_batch, &b, sizeof b, &seq);
    for (int i = 0; i < n; i++) {
        if (!rc) emu_post_wait(others[i], s, seq);
        emu_obj_put(others[i]);
    }
    free(others);
    emu_obj_put(s);
    return rc ? nccl_error(NCCL_CUDA_ERROR, "cannot queue on the stream: status %d", rc) : NCCL_OK;
}

/* ---- lazy connection ---- */
static bool *connected(struct nccl_comm *c, const struct nccl_call *k)
{
    return k->kind == NCCL_SEND ? &c->sends_to[k->root] : k->kind == NCCL_RECV ? &c->receives_from[k->root] : NULL;
}

bool nccl_needs_connection(struct nccl_comm *c, const struct nccl_call *calls, int count)
{
    bool needs = false;
    pthread_mutex_lock(&c->mu);
    for (int i = 0; i < count; i++) {
        bool *at = connected(c, &calls[i]);
        if (at && !*at && calls[i].root != c->rank) needs = true;
    }
    pthread_mutex_unlock(&c->mu);
    return needs;
}

static _Atomic uint32_t *ready_flag(struct nccl_comm *c, const struct nccl_call *k, bool ours)
{
    if (k->kind == NCCL_SEND) {
        struct nccl_pair *p = nccl_pair(&c->map, c->rank, k->root);
        return ours ? &p->from_ready : &p->to_ready;
    }
    struct nccl_pair *p = nccl_pair(&c->map, k->root, c->rank);
    return ours ? &p->to_ready : &p->from_ready;
}

int nccl_connect_begin(struct nccl_comm *c, const struct nccl_call *calls, int count)
{
    emu_drain(c->obj.dev, &c->abort);
    for (int i = 0; i < count; i++)
        if (connected(c, &calls[i]) && calls[i].root != c->rank) {
            atomic_store(ready_flag(c, &calls[i], true), 1);
            nccl_ring_bell(&c->map.slots[calls[i].root]);
        }
    return NCCL_OK;
}

int nccl_connect_wait(struct nccl_comm *c, const struct nccl_call *calls, int count)
{
    struct nccl_slot *slot = &c->map.slots[c->rank];
    for (int i = 0; i < count; i++) {
        bool *at = connected(c, &calls[i]);
        if (!at || calls[i].root == c->rank) continue;
        for (;;) {
            uint32_t seen = atomic_load(&slot->bell);
            if (atomic_load(ready_flag(c, &calls[i], false))) break;
            if (atomic_load(&c->abort)) return nccl_error(NCCL_INTERNAL_ERROR, "aborted while connecting");
            nccl_await_bell(slot, seen, 20);
            nccl_check_peers(c);
        }
        pthread_mutex_lock(&c->mu);
        *at = true;
        pthread_mutex_unlock(&c->mu);
    }
    return NCCL_OK;
}
