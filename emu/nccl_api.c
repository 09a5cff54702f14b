/* SPDX-License-Identifier: Apache-2.0
 * NCCL's and RCCL's names (they are the same) over core/nccl_*.c: argument checks, groups, results.  A group belongs to
 * the thread that opened it.  */
#include "core/nccl.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INITS 64

typedef struct nccl_comm *comm_t;

/* The layout of 2.17 and 2.18; later ones append. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas;
    const char *net;
    int split_share;
};

/* The calling thread's open group. */
static _Thread_local struct {
    int depth, error;
    struct nccl_call *calls;
    int count, room;
    comm_t *inits[MAX_INITS];
    comm_t init[MAX_INITS];
    int init_count;
} group;

/* Results of the fault table are ncclResult_t already. */
static int enter(const char *api)
{
    int rc = emu_enter(api, NULL);
    return rc == EMU_NOT_PERMITTED ? NCCL_INVALID_USAGE : rc == EMU_NOT_INIT ? NCCL_CUDA_ERROR : rc;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int enter_rc = enter(__func__);                                                                                \
        if (enter_rc) return enter_rc;                                                                                 \
    } while (0)
/* And takes a reference on the communicator. */
#define ENTER_COMM(handle)                                                                                             \
    ENTER();                                                                                                           \
    comm_t c = emu_obj_get(EMU_COMM, handle);                                                                          \
    if (!c) return nccl_error(NCCL_INVALID_ARGUMENT, "bad communicator")

static int leave(comm_t c, int rc)
{
    emu_obj_put(c);
    return rc;
}

/* ---- the library ---- */
EMU_API int ncclGetVersion(int *version)
{
    ENTER();
    *version = emu_conf()->nccl_version;
    return NCCL_OK;
}

EMU_API const char *ncclGetErrorString(int result)
{
    static const char *const text[] = {
        "no error",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return result >= 0 && result <= NCCL_IN_PROGRESS ? text[result] : "unknown result code";
}

EMU_API const char *ncclGetLastError(comm_t comm)
{
    return nccl_last_error();
}

EMU_API int ncclGetUniqueId(struct nccl_id *id)
{
    ENTER();
    return id ? nccl_id_make(id) : NCCL_INVALID_ARGUMENT;
}

/* ---- creation ---- */
static int check_config(const struct config *cfg, bool *blocking)
{
    struct config c = {.blocking = 1, .cga = 4, .min_ctas = 1, .max_ctas = 32};
    if (!cfg) return NCCL_OK;
    if (cfg->magic != 0xcafebeef) return nccl_error(NCCL_INVALID_ARGUMENT, "ncclConfig_t: bad magic; not initialised");
    size_t least = cfg->version >= 21800 ? 44 : cfg->version >= 21700 ? 40 : 20;
    if (cfg->version < 21400 || cfg->size < least)
        return nccl_error(NCCL_INVALID_ARGUMENT, "ncclConfig_t: %zu bytes are too few for version %u", cfg->size,
                          cfg->version);
    if (cfg->blocking != INT_MIN) c.blocking = cfg->blocking;
    if (cfg->version >= 21700) {
        if (cfg->cga != INT_MIN) c.cga = cfg->cga;
        if (cfg->min_ctas != INT_MIN) c.min_ctas = cfg->min_ctas;
        /* As in the real library: an unset maximum below a set minimum is an error. */
        if (cfg->max_ctas != INT_MIN || cfg->min_ctas != INT_MIN) c.max_ctas = cfg->max_ctas;
    }
    if (c.blocking != 0 && c.blocking != 1)
        return nccl_error(NCCL_INVALID_ARGUMENT, "ncclConfig_t: blocking %d", c.blocking);
    if (c.cga < 0 || c.cga > 8 || c.min_ctas <= 0 || c.max_ctas <= 0 || c.min_ctas > c.max_ctas)
        return nccl_error(NCCL_INVALID_ARGUMENT, "ncclConfig_t: cga %d, minCTAs %d, maxCTAs %d", c.cga, c.min_ctas,
                          c.max_ctas);
    *blocking = c.blocking;
    return NCCL_OK;
}

static int join_job(comm_t c, void *arg)
{
    return nccl_comm_join(c);
}

/* Ends a communicator that never came to be. */
static int join_now(comm_t *out, comm_t c)
{
    int rc = nccl_comm_join(c);
    atomic_store(&c->state, NCCL_OK);
    if (rc) {
        emu_obj_end(c);
        return rc;
    }
    *out = c;
    return NCCL_OK;
}

static int init_rank(comm_t *out, int nranks, const struct nccl_id *id, int rank, const struct config *cfg)
{
    bool blocking = true;
    struct emu_dev *dev = NULL;
    comm_t c;
    if (!out) return nccl_error(NCCL_INVALID_ARGUMENT, "no place for the communicator");
    int rc = check_config(cfg, &blocking);
    if (rc) return rc;
    const char *api = emu_thread.api;
    /* Under another name, so that the fault table does not count the call twice. */
    if (emu_enter("device of the calling thread", &dev))
        return nccl_error(NCCL_CUDA_ERROR, "no usable device or context is current");
    emu_thread.api = api;
    rc = nccl_comm_create(&c, nranks, id, rank, blocking, dev);
    if (rc) return rc;
    if (!blocking) {
        *out = c;
        return nccl_background(c, join_job, NULL);
    }
    if (group.depth == 0) return join_now(out, c);
    if (group.init_count == MAX_INITS)
        return nccl_error(NCCL_INVALID_USAGE, "more than %d inits in a group", MAX_INITS);
    group.inits[group.init_count] = out;
    group.init[group.init_count++] = c;
    return NCCL_OK;
}

EMU_API int ncclCommInitRank(comm_t *out, int nranks, struct nccl_id id, int rank)
{
    ENTER();
    return init_rank(out, nranks, &id, rank, NULL);
}

EMU_API int ncclCommInitRankConfig(comm_t *out, int nranks, struct nccl_id id, int rank, const struct config *cfg)
{
    ENTER();
    return init_rank(out, nranks, &id, rank, cfg);
}

/* ---- the communicator ---- */
/* Not while an earlier call is still in progress: the next one would be undefined in the real library. */
static int ready(comm_t c)
{
    if (atomic_load(&c->state) == NCCL_IN_PROGRESS)
        return nccl_error(NCCL_INVALID_ARGUMENT, "the previous call on this communicator is still in progress");
    return atomic_load(&c->async);
}

EMU_API int ncclCommGetAsyncError(comm_t comm, int *result)
{
    ENTER_COMM(comm);
    int state = atomic_load(&c->state), async = atomic_load(&c->async);
    if (state == NCCL_OK && !async) {
        if (atomic_load(&c->obj.dev->sticky)) {
            async = NCCL_CUDA_ERROR;
        } else {
            if (c->map.head) nccl_check_peers(c);
            async = atomic_load(&c->async);
        }
    }
    *result = async ? async : state;
    return leave(c, NCCL_OK);
}

EMU_API int ncclCommCount(comm_t comm, int *out)
{
    ENTER_COMM(comm);
    *out = c->nranks;
    return leave(c, ready(c));
}

EMU_API int ncclCommUserRank(comm_t comm, int *out)
{
    ENTER_COMM(comm);
    *out = c->rank;
    return leave(c, ready(c));
}

EMU_API int ncclCommCuDevice(comm_t comm, int *out)
{
    ENTER_COMM(comm);
    *out = c->obj.dev->index;
    return leave(c, ready(c));
}

static int quiesce_job(comm_t c, void *arg)
{
    nccl_comm_quiesce(c);
    return NCCL_OK;
}

EMU_API int ncclCommFinalize(comm_t comm)
{
    ENTER_COMM(comm);
    int rc = ready(c);
    if (!rc && atomic_exchange(&c->finalized, true))
        rc = nccl_error(NCCL_INVALID_ARGUMENT, "the communicator was finalized already");
    if (!rc && !c->blocking) return leave(c, nccl_background(c, quiesce_job, NULL));
    if (!rc) nccl_comm_quiesce(c);
    return leave(c, rc);
}

EMU_API int ncclCommDestroy(comm_t comm)
{
    if (!comm) return NCCL_OK;
    ENTER_COMM(comm);
    while (atomic_load(&c->state) == NCCL_IN_PROGRESS) emu_sleep_us(200);
    nccl_comm_quiesce(c);
    nccl_comm_leave(c);
    emu_obj_end(c);
    return leave(c, NCCL_OK);
}

EMU_API int ncclCommAbort(comm_t comm)
{
    if (!comm) return NCCL_OK;
    ENTER_COMM(comm);
    if (group.depth) return leave(c, nccl_error(NCCL_INVALID_USAGE, "ncclCommAbort inside a group"));
    nccl_comm_abort(c);
    emu_obj_end(c);
    return leave(c, NCCL_OK);
}

EMU_API int ncclCommSplit(comm_t comm, int color, int key, comm_t *out, const struct config *cfg)
{
    bool blocking = true;
    ENTER_COMM(comm);
    int rc = ready(c);
    if (!rc) rc = check_config(cfg, &blocking);
    if (!rc) rc = color < -1 || !out ? nccl_error(NCCL_INVALID_ARGUMENT, "color %d", color) : NCCL_OK;
    if (!rc) rc = nccl_comm_split(c, color, key, out);
    return leave(c, rc);
}

/* ---- groups ---- */
static int compare_comms(const void *a, const void *b)
{
    const struct nccl_call *x = a, *y = b;
    return x->comm < y->comm ? -1 : x->comm > y->comm;
}

struct part {
    struct nccl_call *calls;
    int count;
};

static int connect_job(comm_t c, void *arg)
{
    struct part *p = arg;
    int rc = NCCL_OK;
    if (nccl_needs_connection(c, p->calls, p->count)) {
        rc = nccl_connect_begin(c, p->calls, p->count);
        if (!rc) rc = nccl_connect_wait(c, p->calls, p->count);
    } else {
        emu_sleep_us(emu_conf()->delay_us);
    }
    if (!rc)
        rc = nccl_submit(c, p->calls, p->count);
    else
        nccl_drop_calls(p->calls, p->count);
    free(p);
    return rc;
}

/* The calls of one communicator, copied out of the group in their order. */
static struct part *take_part(const struct nccl_call *calls, int count)
{
    struct part *p = malloc(sizeof *p);
    if (!p || !(p->calls = malloc((size_t)count * sizeof *calls))) abort();
    memcpy(p->calls, calls, (size_t)count * sizeof *calls);
    p->count = count;
    return p;
}

/* Parts of blocking communicators: all say "here" before any waits, so that ranks may list them in different orders. */
static int launch_blocking(struct part **parts, int n)
{
    int rc = NCCL_OK;
    for (int pass = 0; pass < 3; pass++)
        for (int i = 0; i < n; i++) {
            struct part *p = parts[i];
            comm_t c = p->calls[0].comm;
            if (pass < 2 && (rc || !nccl_needs_connection(c, p->calls, p->count))) continue;
            if (pass == 0) rc = nccl_connect_begin(c, p->calls, p->count);
            if (pass == 1) rc = nccl_connect_wait(c, p->calls, p->count);
            if (pass < 2) continue;
            if (rc)
                nccl_drop_calls(p->calls, p->count);
            else
                rc = nccl_submit(c, p->calls, p->count);
            free(p);
        }
    return rc;
}

static int launch(struct nccl_call *calls, int count)
{
    struct part **parts = malloc((size_t)count * sizeof *parts);
    int rc = NCCL_OK, n = 0;
    if (!parts) abort();
    /* mergesort in glibc, but no promise: equal communicators must keep their order. */
    for (int i = 1; i < count; i++)
        for (int j = i; j > 0 && compare_comms(&calls[j - 1], &calls[j]) > 0; j--) {
            struct nccl_call t = calls[j];
            calls[j] = calls[j - 1];
            calls[j - 1] = t;
        }
    bool in_progress = false;
    for (int i = 0, j; i < count; i = j) {
        comm_t c = calls[i].comm;
        for (j = i + 1; j < count && calls[j].comm == c; j++) continue;
        struct part *p = take_part(&calls[i], j - i);
        if (!c->blocking && (nccl_needs_connection(c, p->calls, p->count) || nccl_dawdles(c))) {
            int got = nccl_background(c, connect_job, p);
            in_progress = in_progress || got == NCCL_IN_PROGRESS;
        } else {
            parts[n++] = p;
        }
    }
    rc = launch_blocking(parts, n);
    free(parts);
    return rc ? rc : in_progress ? NCCL_IN_PROGRESS : NCCL_OK;
}

struct init_thread {
    comm_t c, *out;
    struct emu_thread as;
    int rc;
};

static void *run_init(void *arg)
{
    struct init_thread *t = arg;
    emu_thread = t->as;
    t->rc = join_now(t->out, t->c);
    return NULL;
}

/* Several ranks of one process: they wait for each other, so each needs a thread. */
static int run_inits(void)
{
    struct init_thread t[MAX_INITS];
    pthread_t id[MAX_INITS];
    int n = group.init_count, rc = NCCL_OK;
    group.init_count = 0;
    for (int i = 0; i < n; i++) {
        t[i] = (struct init_thread){group.init[i], group.inits[i], emu_thread, 0};
        if (pthread_create(&id[i], NULL, run_init, &t[i])) abort();
    }
    for (int i = 0; i < n; i++) {
        pthread_join(id[i], NULL);
        if (t[i].rc) rc = t[i].rc;
    }
    return rc;
}

EMU_API int ncclGroupStart(void)
{
    ENTER();
    group.depth++;
    return NCCL_OK;
}

EMU_API int ncclGroupEnd(void)
{
    ENTER();
    if (group.depth == 0) return nccl_error(NCCL_INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth) return NCCL_OK;
    int rc = group.error, count = group.count;
    struct nccl_call *calls = group.calls;
    group.error = group.count = group.room = 0;
    group.calls = NULL;
    if (!rc) rc = run_inits();
    if (rc || !count) {
        nccl_drop_calls(calls, count);
        return rc;
    }
    rc = launch(calls, count);
    free(calls); /* the parts own the references now */
    return rc;
}

/* ---- operations ---- */
static int check_call(comm_t c, struct nccl_call *k)
{
    bool reduces = k->kind == NCCL_ALL_REDUCE || k->kind == NCCL_REDUCE_SCATTER || k->kind == NCCL_REDUCE;
    if (!nccl_dtype_bytes(k->dtype)) return nccl_error(NCCL_INVALID_ARGUMENT, "dtype %d", k->dtype);
    if (k->root < 0 || k->root >= c->nranks)
        return nccl_error(NCCL_INVALID_ARGUMENT, "rank %d of %d", k->root, c->nranks);
    if (reduces && !nccl_can_reduce(k->dtype)) {
        emu_complain("a sum of 8-bit floats: gfx94x reads these bytes as FNUZ, everybody else as OCP");
        return nccl_error(NCCL_INVALID_ARGUMENT, "8-bit floats are moved, not reduced, here");
    }
    if (k->op < 0 || k->op >= NCCL_BUILTIN_OPS + NCCL_DYN_OPS) return nccl_error(NCCL_INVALID_ARGUMENT, "op %d", k->op);
    if (k->op >= NCCL_BUILTIN_OPS) {
        pthread_mutex_lock(&c->mu);
        k->dyn = c->dyn[k->op - NCCL_BUILTIN_OPS];
        pthread_mutex_unlock(&c->mu);
        if (!k->dyn.used || k->dyn.dtype != k->dtype)
            return nccl_error(NCCL_INVALID_ARGUMENT, "op %d is not made, or for another dtype", k->op);
    }
    bool no_send = !k->send && k->kind != NCCL_RECV && !(k->kind == NCCL_BROADCAST && k->root != c->rank);
    bool no_recv = !k->recv && k->kind != NCCL_SEND && !(k->kind == NCCL_REDUCE && k->root != c->rank);
    if (k->count && (no_send || no_recv)) return nccl_error(NCCL_INVALID_ARGUMENT, "NULL buffer");
    return NCCL_OK;
}

/* Into the open group, or alone. */
static int submit(struct nccl_call k, void *stream)
{
    if (group.depth == 0) {
        struct nccl_call *one = malloc(sizeof *one);
        if (!one) abort();
        *one = k;
        int rc = launch(one, 1);
        free(one);
        return rc;
    }
    if (group.count == group.room) {
        group.room = group.room ? group.room * 2 : 16;
        group.calls = realloc(group.calls, (size_t)group.room * sizeof *group.calls);
        if (!group.calls) abort();
    }
    group.calls[group.count++] = k;
    return NCCL_OK;
}

static int operation(comm_t handle, struct nccl_call k, void *stream)
{
    int rc = enter(k.api);
    if (rc) return rc;
    comm_t c = emu_obj_get(EMU_COMM, handle);
    if (!c) rc = nccl_error(NCCL_INVALID_ARGUMENT, "bad communicator");
    if (!rc) rc = ready(c);
    if (!rc && atomic_load(&c->finalized)) rc = nccl_error(NCCL_INVALID_USAGE, "after ncclCommFinalize");
    if (!rc) rc = check_call(c, &k);
    if (!rc && emu_gate(c->obj.dev)) rc = nccl_error(NCCL_CUDA_ERROR, "the device has failed");
    if (!rc) {
        k.comm = c;
        k.stream = emu_stream_get(c->obj.dev, stream);
        if (!k.stream) rc = nccl_error(NCCL_CUDA_ERROR, "bad stream");
    }
    if (!rc) return submit(k, stream);
    if (group.depth) group.error = rc;
    if (c) emu_obj_put(c);
    return rc;
}

EMU_API int ncclSend(const void *buffer, size_t count, int dtype, int peer, comm_t comm, void *stream)
{
    return operation(
        comm,
        (struct nccl_call){
            .kind = NCCL_SEND, .send = buffer, .count = count, .dtype = dtype, .root = peer, .api = __func__},
        stream);
}

EMU_API int ncclRecv(void *buffer, size_t count, int dtype, int peer, comm_t comm, void *stream)
{
    return operation(
        comm,
        (struct nccl_call){
            .kind = NCCL_RECV, .recv = buffer, .count = count, .dtype = dtype, .root = peer, .api = __func__},
        stream);
}

EMU_API int ncclAllReduce(const void *send, void *recv, size_t count, int dtype, int op, comm_t comm, void *stream)
{
    return operation(comm,
                     (struct nccl_call){.kind = NCCL_ALL_REDUCE,
                                        .send = send,
                                        .recv = recv,
                                        .count = count,
                                        .dtype = dtype,
                                        .op = op,
                                        .api = __func__},
                     stream);
}

EMU_API int ncclReduceScatter(const void *send, void *recv, size_t count, int dtype, int op, comm_t comm, void *stream)
{
    return operation(comm,
                     (struct nccl_call){.kind = NCCL_REDUCE_SCATTER,
                                        .send = send,
                                        .recv = recv,
                                        .count = count,
                                        .dtype = dtype,
                                        .op = op,
                                        .api = __func__},
                     stream);
}

EMU_API int ncclAllGather(const void *send, void *recv, size_t count, int dtype, comm_t comm, void *stream)
{
    return operation(
        comm,
        (struct nccl_call){
            .kind = NCCL_ALL_GATHER, .send = send, .recv = recv, .count = count, .dtype = dtype, .api = __func__},
        stream);
}

EMU_API int ncclBroadcast(const void *send, void *recv, size_t count, int dtype, int root, comm_t comm, void *stream)
{
    return operation(comm,
                     (struct nccl_call){.kind = NCCL_BROADCAST,
                                        .send = send,
                                        .recv = recv,
                                        .count = count,
                                        .dtype = dtype,
                                        .root = root,
                                        .api = __func__},
                     stream);
}

EMU_API int ncclReduce(const void *send, void *recv, size_t count, int dtype, int op, int root, comm_t comm,
                       void *stream)
{
    return operation(comm,
                     (struct nccl_call){.kind = NCCL_REDUCE,
                                        .send = send,
                                        .recv = recv,
                                        .count = count,
                                        .dtype = dtype,
                                        .op = op,
                                        .root = root,
                                        .api = __func__},
                     stream);
}

EMU_API int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, comm_t comm)
{
    ENTER_COMM(comm);
    int rc = ready(c), i = 0;
    if (!rc && (!scalar || !nccl_dtype_bytes(dtype) || !nccl_can_reduce(dtype) || residence < 0 || residence > 1))
        rc = nccl_error(NCCL_INVALID_ARGUMENT, "dtype %d, residence %d", dtype, residence);
    if (rc) return leave(c, rc);
    pthread_mutex_lock(&c->mu);
    while (i < NCCL_DYN_OPS && c->dyn[i].used) i++;
    if (i < NCCL_DYN_OPS) {
        c->dyn[i] = (struct nccl_dyn){.used = true, .dtype = dtype, .on_device = residence == 0 ? scalar : NULL};
        if (residence == 1) memcpy(&c->dyn[i].scalar, scalar, nccl_dtype_bytes(dtype));
    }
    pthread_mutex_unlock(&c->mu);
    if (i == NCCL_DYN_OPS) return leave(c, nccl_error(NCCL_INVALID_USAGE, "more than %d reduction ops", NCCL_DYN_OPS));
    *op = NCCL_BUILTIN_OPS + i;
    return leave(c, NCCL_OK);
}

EMU_API int ncclRedOpDestroy(int op, comm_t comm)
{
    ENTER_COMM(comm);
    int i = op - NCCL_BUILTIN_OPS;
    bool ok = false;
    pthread_mutex_lock(&c->mu);
    if (i >= 0 && i < NCCL_DYN_OPS) {
        ok = c->dyn[i].used;
        c->dyn[i].used = false;
    }
    pthread_mutex_unlock(&c->mu);
    return leave(c, ok ? NCCL_OK : nccl_error(NCCL_INVALID_ARGUMENT, "op %d is not one that was made", op));
}
