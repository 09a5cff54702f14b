/* SPDX-License-Identifier: Apache-2.0
 * Emulated NCCL/RCCL: types shared by the files nccl_*.c.  Ranks are processes (or threads) that map one memfd; each
 * ordered pair of ranks has a ring of bytes in it.  Data moves on stream workers only.  */
#ifndef EMU_NCCL_H
#define EMU_NCCL_H

#include "emu.h"

enum nccl_result {
    NCCL_OK = 0,
    NCCL_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
};
enum nccl_dtype {
    NCCL_I8,
    NCCL_U8,
    NCCL_I32,
    NCCL_U32,
    NCCL_I64,
    NCCL_U64,
    NCCL_F16,
    NCCL_F32,
    NCCL_F64,
    NCCL_BF16,
    NCCL_E4M3,
    NCCL_E5M2,
    NCCL_DTYPES
};
enum nccl_redop { NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG, NCCL_BUILTIN_OPS };
enum nccl_kind {
    NCCL_SEND = 1,
    NCCL_RECV,
    NCCL_ALL_REDUCE,
    NCCL_REDUCE_SCATTER,
    NCCL_ALL_GATHER,
    NCCL_BROADCAST,
    NCCL_REDUCE
};

#define NCCL_RING      (256u << 10)
#define NCCL_MAX_RANKS 256
#define NCCL_DYN_OPS   32

struct nccl_id {
    unsigned char bytes[128];
};

/* ---- the shared segment ---- */
enum nccl_state { NCCL_ABSENT, NCCL_JOINED, NCCL_LEFT, NCCL_ABORTED };
struct nccl_slot { /* one per rank; written by that rank, but for `bell` */
    _Atomic uint32_t state;
    _Atomic uint32_t bell; /* bumped by whoever changed something this rank may wait for (a futex) */
    _Atomic uint32_t sleeping;
    int32_t pid, device, version;
    uint64_t host;
    char vendor[8];
    /* ncclCommSplit: published as number `split_seq`, read by all before the next one. */
    _Atomic uint64_t split_seq, split_read;
    int32_t color, key;
    _Atomic uint64_t split_id_seq;
    struct nccl_id split_id;
};
struct nccl_pair {                         /* [from][to] */
    _Alignas(64) _Atomic uint64_t head;    /* bytes put by `from` */
    _Alignas(64) _Atomic uint64_t tail;    /* bytes taken by `to` */
    _Atomic uint32_t from_ready, to_ready; /* lazy connection */
    /* What `from` still waits for with `to` in its running batch: batch number << 2 | 2 * receives | sends. */
    _Atomic uint64_t want;
    unsigned char ring[NCCL_RING];
};
struct nccl_head {
    uint64_t nonce;
    _Atomic uint32_t nranks;
    _Atomic uint32_t error; /* a rank saw an order mismatch */
};
struct nccl_map {
    struct nccl_head *head;
    struct nccl_slot *slots;
    char *pairs;
    size_t size;
    int nranks;
};
struct nccl_pair *nccl_pair(const struct nccl_map *m, int from, int to);
int nccl_id_make(struct nccl_id *out);
/* Closes what nccl_id_make opened, once all ranks have joined. */
void nccl_id_close(const struct nccl_id *id);
/* Maps the segment of `id`; an enum nccl_result. */
int nccl_map_open(struct nccl_map *m, const struct nccl_id *id, int nranks);
void nccl_map_close(struct nccl_map *m);
/* Wakes `rank`. */
void nccl_ring_bell(struct nccl_slot *slot);
/* Sleeps until the bell moves from `seen`, at most `ms`. */
void nccl_await_bell(struct nccl_slot *slot, uint32_t seen, int ms);

/* ---- communicators ---- */
struct nccl_dyn {
    bool used;
    int dtype;
    uint64_t scalar; /* bits of the dtype */
    const void *on_device;
};
struct nccl_comm {
    struct emu_obj obj;
    struct nccl_map map;
    struct nccl_id id;
    int rank, nranks;
    bool blocking;
    int *pidfds;       /* per rank; -1: this process */
    _Atomic int state; /* NCCL_IN_PROGRESS while a background step runs, else its result */
    _Atomic int async; /* first asynchronous error */
    _Atomic int abort;
    _Atomic bool finalized;
    pthread_mutex_t mu;
    pthread_cond_t cv;
    uint64_t issued, done;             /* batches; guarded by mu */
    bool running;                      /* a worker is inside a batch; guarded by mu */
    uint64_t collectives;              /* issued so far; guarded by mu */
    uint64_t splits;                   /* guarded by mu */
    uint64_t rng;                      /* guarded by mu */
    struct nccl_dyn dyn[NCCL_DYN_OPS]; /* guarded by mu */
    bool *sends_to, *receives_from;    /* connected pairs; guarded by mu */
};

/* One call as the caller made it. */
struct nccl_call {
    struct nccl_comm *comm; /* a reference */
    enum nccl_kind kind;
    const void *send;
    void *recv;
    size_t count;
    int dtype, op, root;       /* root: also the peer of send and recv */
    struct emu_stream *stream; /* a reference */
    uint64_t collective;       /* number among the communicator's collectives */
    struct nccl_dyn dyn;
    const char *api;
};

size_t nccl_dtype_bytes(int dtype);
bool nccl_can_reduce(int dtype);
/* acc = acc op in; AVG and dynamic ops sum. */
void nccl_fold(void *acc, const void *in, size_t count, int dtype, int op);
/* x *= factor, in the type's own arithmetic. */
void nccl_scale(void *x, size_t count, int dtype, double factor);
/* Integers only: x /= n, toward zero. */
void nccl_divide(void *x, size_t count, int dtype, int n);
double nccl_scalar(int dtype, const void *bits);

/* Queues a batch (one communicator's calls of one group) on its stream; owns `calls` from now on. */
int nccl_submit(struct nccl_comm *c, struct nccl_call *calls, int count);
/* Lazy connection of the pairs that `calls` need: drains the device, says "here", waits for the peers. */
bool nccl_needs_connection(struct nccl_comm *c, const struct nccl_call *calls, int count);
int nccl_connect_begin(struct nccl_comm *c, const struct nccl_call *calls, int count);
int nccl_connect_wait(struct nccl_comm *c, const struct nccl_call *calls, int count);
void nccl_drop_calls(struct nccl_call *calls, int count);
/* Sets the first asynchronous error and says why. */
void nccl_fail(struct nccl_comm *c, int result, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Peers that died or aborted: sets the asynchronous error. */
void nccl_check_peers(struct nccl_comm *c);
/* ncclGetLastError. */
const char *nccl_last_error(void);
int nccl_error(int result, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

int nccl_comm_create(struct nccl_comm **out, int nranks, const struct nccl_id *id, int rank, bool blocking,
                     struct emu_dev *dev);
/* The blocking part of creation; may run on a thread of its own. */
int nccl_comm_join(struct nccl_comm *c);
/* Runs fn(arg) on a detached thread; the communicator says ncclInProgress until it returns. */
int nccl_background(struct nccl_comm *c, int (*fn)(struct nccl_comm *c, void *arg), void *arg);
/* Whether this call on a non-blocking communicator shall be queued by a thread of its own, so that callers who do not
 * wait for the end of ncclInProgress are caught: one in eight, unless delays are off. */
bool nccl_dawdles(struct nccl_comm *c);
/* Waits for all issued batches, or an abort. */
void nccl_comm_quiesce(struct nccl_comm *c);
void nccl_comm_abort(struct nccl_comm *c);
/* Says to the others that this rank ended the communicator properly. */
void nccl_comm_leave(struct nccl_comm *c);
int nccl_comm_split(struct nccl_comm *c, int color, int key, struct nccl_comm **out);

#endif
