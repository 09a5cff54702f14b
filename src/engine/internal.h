/* SPDX-License-Identifier: Apache-2.0
 * internal.h: what the files of the engine share.  Everything here runs in the engine role unless it says otherwise. */
#ifndef GB_ENGINE_INTERNAL_H
#define GB_ENGINE_INTERNAL_H

#include "engine/engine.h"

/* A death is seen first by whoever talks to the dead, and what it does then may be seen by others before they hear why:
 * so long the news may take, before what looks like a consequence is told as a cause. */
#define GB_NEWS_NS 1000000000u

struct gb_call {
    void (*fn)(void *arg);
    void *arg;
    _Atomic uint32_t done;
    struct gb_call *next;
};

struct gb_notify {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    uint64_t *ring;                 /* guarded by lock */
    uint32_t head, count, capacity; /* guarded by lock */
    uint32_t urgent;                /* guarded by lock: of those in the ring, how many somebody waits for */
    uint64_t first_ns;              /* guarded by lock: when the ring was last empty no more */
    int stopped;                    /* guarded by lock */
};

struct gb_engine {
    struct gb_engine_config config;
    pthread_mutex_t role; /* held by the thread that plays the engine */
    pthread_t thread;
    _Atomic uint32_t kick; /* futex word: the engine thread should look */
    _Atomic int sleeping;  /* the role's holder is in (or about to enter) gb_net_wait */
    _Atomic int stop;
    _Atomic uint32_t inflight; /* operations submitted and not finished */
    pthread_mutex_t queue_lock;
    struct gb_op *queue_head, *queue_tail;   /* guarded by queue_lock */
    struct gb_call *calls_head, *calls_tail; /* guarded by queue_lock */
    _Atomic int queued;                      /* hint that a queue is not empty */
    /* engine role */
    struct gb_group *groups;
    struct gb_op *staged; /* staged operations in flight, by staged_next */
    uint32_t bulk;        /* messages in flight that I/O workers move */
    uint64_t tick_ns;
    struct gb_notify notify;
};

/* run.c: walking plans */
void gb_op_admit(struct gb_op *op);
void gb_op_message_done(struct gb_cell *cell, const struct gb_net_event *event);
/* Looks at the flags of staged operations; returns how many steps finished. */
int gb_engine_poll_staged(struct gb_engine *engine);
void gb_op_fail(struct gb_op *op, int status, const char *text);
/* Finishes `op` when nothing of it is in flight any more. */
void gb_op_settle(struct gb_op *op);
void gb_op_run_ready(struct gb_op *op);
/* The device does not read messages in their senders' memory any more. */
void gb_op_return_loans(struct gb_op *op);
void gb_op_push_ready(struct gb_op *op, struct gb_cell *cell);
/* Gives the device half of a staged operation to the launcher. */
void gb_op_start_device(struct gb_op *op);
void gb_group_start_heads(struct gb_group *group);

/* submit.c */
int gb_sig_codec(const struct gb_sig *sig); /* enum gb_codec, or 7: a peer's bytes may say so */
void gb_op_free_scratch(struct gb_op *op);

/* shadow.c */
int gb_shadow_wanted(const struct gb_group *group, const struct gpubridge_op *desc); /* any thread */
int gb_shadow_prepare(struct gb_op *op, uint64_t in, uint64_t out) GB_NODISCARD;     /* submitting thread */
/* May the steps of the plan start?  From then on, 1 once. */
int gb_shadow_begins(struct gb_op *op);
/* After each change of `op`: lets the result, or after a failure NaN, through to the device. */
void gb_shadow_settle(struct gb_op *op);
int gb_shadow_is_small(const struct gb_op *op); /* the engine role adds by itself */
int gb_shadow_is_tiny(const struct gb_op *op);  /* two thread switches are a good part of its time */
void gb_shadow_free(struct gb_op *op);

/* p2p.c */
/* The number of the next message of a pair and tag; 0 where nobody is named. */
uint32_t gb_p2p_next(struct gb_group *group, int kind, int32_t peer, int32_t tag);
void gb_p2p_admit(struct gb_op *op);
void gb_p2p_unexpected(struct gb_group *group, int32_t peer, const struct gb_net_event *event);
void gb_p2p_message_done(struct gb_op *op);
void gb_p2p_device_done(struct gb_op *op);
void gb_p2p_forget(struct gb_group *group);

/* engine.c */
struct gb_group *gb_engine_find_group(struct gb_engine *engine, uint64_t id);
void gb_engine_push(struct gb_engine *engine, struct gb_op *op, int run); /* any thread */
void gb_notify_push(struct gb_notify *notify, uint64_t user, int is_urgent);

/* xplan.c (any thread) */
int gb_xplan_get(struct gb_group *group, const struct gb_topo *topo, const struct gb_plan_spec *spec,
                 struct gb_xplan **xplan) GB_NODISCARD;
void gb_xplan_put(struct gb_xplan *xplan);

#endif
