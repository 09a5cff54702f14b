/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.h: the progress engine of one context.  It takes operations, walks their plans, and finishes or fails them.
 *
 * The engine role is held by one thread at a time: a user thread inside gb_engine_wait while the role is free (so that
 * a short operation costs no thread switch), else the engine thread, which also takes over whatever is in flight when a
 * waiter leaves.  Hooks run in the role.  Nothing in the role blocks, calls a driver or takes a lock that is held for
 * long.
 */
#ifndef GB_ENGINE_ENGINE_H
#define GB_ENGINE_ENGINE_H

#include "base/pool.h"
#include "engine/op.h"

struct gb_engine_hooks {
    /* A control message arrived. */
    void (*ctrl)(void *arg, struct gb_link *link, const void *data, size_t bytes);
    /* The peer is gone: left (said goodbye) or lost.  Its messages have been failed by the network already. */
    void (*peer)(void *arg, struct gb_link *link, int left, int status, const char *text);
    /* A group failed; its operations are about to be.  `tell`: the members do not know yet. */
    void (*aborted)(void *arg, struct gb_group *group, int status, const char *text, int tell);
    /* `op` needs its turn among the operations of all groups; answer with gb_engine_ticket. */
    void (*announce)(void *arg, struct gb_op *op);
    /* Something on the device has ended. */
    void (*device_moved)(void *arg);
    /* `op` of `group` was the first of its kind and codec in which this rank sent NaN or infinity. */
    void (*wild)(void *arg, struct gb_group *group, uint32_t seq, const struct gb_sig *sig);
    /* About every 50 ms while anything is in flight, and at least every 200 ms. */
    void (*tick)(void *arg, uint64_t now_ns);
    void *arg;
};

struct gb_engine_config {
    struct gb_net *net;
    struct gb_launcher *launcher; /* NULL: host only */
    struct gb_pool *pool;
    struct gb_engine_hooks hooks;
    int64_t spin_ns;  /* how long to poll before sleeping */
    int emulated;     /* an emulated device: CPU tensors have no stream, waits hold the host */
    int inline_bytes; /* host arithmetic up to this size runs in the role, larger on I/O workers */
};

int gb_engine_open(const struct gb_engine_config *config, struct gb_engine **engine) GB_NODISCARD;
/* All groups must have been removed. */
void gb_engine_close(struct gb_engine *engine);

/* Lets the engine see a group / forget it.  remove fails what is pending with `status` and returns when the engine no
 * longer touches any buffer of it. */
void gb_engine_add(struct gb_engine *engine, struct gb_group *group);
void gb_engine_remove(struct gb_engine *engine, struct gb_group *group, int status, const char *text);

/* Checks, plans, numbers and queues one operation of `group` (engine/submit.c).  `run`: the caller waits at once, so
 * the engine thread need not be woken. */
struct gpubridge_op;
int gb_engine_submit(struct gb_group *group, const struct gpubridge_op *desc, int run, struct gb_op **op) GB_NODISCARD;
/* Waits until the operation finished: its status; GPUBRIDGE_AGAIN when the timeout (<= 0: none) passed first. */
int gb_engine_wait(struct gb_op *op, int64_t timeout_ns) GB_NODISCARD;
/* Makes `stream` wait for the result: as soon as the device side is enqueued (recorded); host operations:
 * gb_engine_wait. */
int gb_engine_wait_stream(struct gb_op *op, void *stream) GB_NODISCARD;
int gb_op_test(struct gb_op *op) GB_NODISCARD;
/* What an unfinished operation waits for; "" when it is finished.  User threads. */
void gb_engine_describe(struct gb_op *op, char *text, size_t capacity);
void gb_op_put(struct gb_op *op);

/* Runs fn(arg) in the role, as soon as it is free: now when this thread can take it. */
void gb_engine_call(struct gb_engine *engine, void (*fn)(void *arg), void *arg);

/* Frees the cached plans of a group that is not in the engine any more. */
void gb_group_flush_plans(struct gb_group *group);

/* In the role: fails everything of the group, first cause wins. */
void gb_group_abort(struct gb_group *group, int status, const char *text, int tell);
/* In the role: fails one operation, and with it its group: also for a P2P mismatch, since the sender of a small message
 * has no operation left that could fail. */
void gb_op_fail(struct gb_op *op, int status, const char *text);
/* In the role: the announced operation has its turn; operations start in the order of these calls. */
void gb_engine_ticket(struct gb_op *op);
struct gb_op *gb_group_find_op(struct gb_group *group, uint32_t seq);
/* In the role: 1 when the group admitted operation `seq` recently; its signature. */
int gb_group_history(struct gb_group *group, uint32_t seq, struct gb_sig *sig);
/* "op 17 ALL_REDUCE SUM f32 x 1000" */
void gb_sig_text(const struct gb_sig *sig, uint32_t seq, char *text, size_t capacity);

/* In the role: member `rank` says that it sent NaN or infinity in this operation, which nobody has checked. */
void gb_group_heard_wild(struct gb_group *group, uint32_t rank, uint32_t seq, const struct gb_sig *sig);

/* Finished operations flagged GPUBRIDGE_OP_NOTIFY. */
int gb_engine_completions(struct gb_engine *engine, uint64_t *users, int32_t capacity, int64_t timeout_ns,
                          int32_t *count) GB_NODISCARD;
void gb_engine_completions_stop(struct gb_engine *engine);

#endif
