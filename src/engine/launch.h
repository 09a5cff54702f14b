/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.h: the inside of the launcher: pools, events, stream sets, jobs.  Private to launcher.c, launch_pool.c,
 * launch_event.c, launch_job.c and launch_step.c.
 *
 * A *job* is the launcher's view of an operation.  Cursors walk its device steps; a step is *issued* when its work and
 * its waits are put into the stream of its queue.
 *
 * Fields marked [L] are guarded by launcher->issuing, which the launcher thread holds while it works and a submitting
 * thread while it issues an operation of its own; [G] by launcher->lock, which is taken second.
 */
#ifndef GB_ENGINE_LAUNCH_H
#define GB_ENGINE_LAUNCH_H

#include "ccl/ccl.h"
#include "codec/reduce.h"
#include "device/device.h"
#include "engine/launcher.h"
#include "transport/net.h"

#include <pthread.h>

enum { QUEUE_OUT, QUEUE_IN, QUEUE_VENDOR, QUEUES }; /* enum gb_queue without the network */

/* Entries behind a closed flag block the thread that adds more near 1,019 (measured); the ends of operations add a few
 * beyond the window. */
#define WINDOW_ENTRIES 900u
/* A stream tells how far it has come every so many entries. */
#define MARK_ENTRIES 64u

struct pool_block;
struct pool_slab;

enum gb_pool_kind { GB_POOL_DEVICE, GB_POOL_HOST, GB_POOL_STAGE /* pinned, and what messages are sent from */ };

struct gb_launch_pool {
    struct gb_device *device;
    enum gb_pool_kind kind;
    struct pool_slab *slabs; /* guarded by lock */
    struct gb_net *net;      /* guarded by lock; STAGE: new slabs are offered to its peers; NULL: they are not */
    pthread_mutex_t lock;
};

/* Streams of one set, made at its first operation. */
struct gb_set {
    struct gb_set *next; /* [L] */
    uint32_t id;
    void *stream[QUEUES];
    uint32_t issued[QUEUES], marked[QUEUES]; /* [L] entries so far, and at the last mark */
    _Atomic uint32_t *retired;               /* [QUEUES] pinned: written by the streams (gate on) */
};

enum job_state { JOB_RUNNING, JOB_ISSUED, JOB_DONE };
enum step_info { STEP_FLAG = 1, STEP_EVENT = 2, STEP_WAITED = 4 /* << queue: this queue has waited for the flag */ };

struct gb_job {
    struct gb_job *next, *free_next; /* [G] started jobs in order; unused ones */
    struct gb_dev_op *op;
    struct gb_set *set;
    _Atomic int given_up;
    int state, is_released, is_pinned; /* [G] pinned: the launcher thread is at it */
    uint32_t set_id;
    _Atomic(_Atomic uint32_t *) poison; /* pinned, kept with the job: 1 makes the last kernel write NaN */
    void *ready, *done;
    uint32_t nsteps;
    void *joined[QUEUES]; /* ends of the other queues, which the last one waits for */
    void **event;         /* [nsteps] NULL where none */
    uint8_t *info;        /* [nsteps] enum step_info */
    uint32_t capacity;    /* steps that the arrays hold */
    void *arrays;
    uint32_t cursor[QUEUES];            /* [L] next step to look at; everything of the queue below is issued */
    uint32_t left[QUEUES];              /* [L] steps not issued */
    uint32_t seen[QUEUES][QUEUES];      /* [L] steps of the second queue that the first one has waited for */
    uint32_t watch[QUEUES];             /* [L] gate off: next step to look for a passed event */
    uint8_t begun[QUEUES], is_prepared; /* [L] */
    uintptr_t in_low, in_high, out_low, out_high;
};

struct gb_command {
    struct gb_command *next;
    struct gb_job *job; /* start, or */
    void (*fn)(void *arg);
    void *arg;
};

struct gb_launcher {
    struct gb_device *device;
    int gated;
    void (*wake)(void *arg);
    void *wake_arg;
    struct gb_launch_pool mem, host, stage;
    _Atomic uint64_t pool_bytes, pool_used, pool_limit, pool_wait_ns; /* of all pools: reserved, in use, soft limit */
    struct gb_module *module;
    void *reduce[GB_REDUCE_WAYS], *poison; /* kernels */
    struct gb_module *fetch_module;
    void *fetch;     /* kernel; NULL: none */
    void **borrowed; /* launcher thread: memory of peers that is registered here */
    uint32_t nborrowed, borrowed_capacity;
    int told_foreign; /* launcher thread: that a peer's memory cannot be registered */
    int is_shared;    /* guarded by stage.lock: gb_launcher_share was called */
    void *zeros;      /* pinned: what the counters of an operation begin with */
    pthread_t thread;
    pthread_mutex_t issuing;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    struct gb_command *commands, **commands_tail; /* [G] */
    struct gb_command *spare_commands;            /* [G] */
    struct gb_job *jobs, *spare_jobs;             /* [G] */
    struct gb_job *held;                          /* [G] started while `holding` */
    void **events;                                /* [G] unused ones */
    uint32_t nevents, events_capacity;            /* [G] */
    struct gb_set *sets;                          /* [L] */
    struct gb_job **active;                       /* [L] jobs of this pass */
    uint32_t active_capacity;
    struct gb_ccl_part *parts; /* [L] scratch of vendor steps */
    uint32_t parts_capacity;
    _Atomic uint32_t kicks;
    _Atomic int sleeping;
    int holding, stopping, opened, open_status, has_kernels; /* [G]; the last one constant once opened */
    char open_text[512];
};

/* launch_pool.c */
void gb_launch_pool_init(struct gb_launch_pool *pool, struct gb_device *device, enum gb_pool_kind kind);
void gb_launch_pool_fini(struct gb_launch_pool *pool);
/* Pinned memory of the launcher itself: kept until it closes, and not counted as in use. */
void *gb_launch_keep(struct gb_launcher *launcher, uint64_t bytes);
void gb_launch_unkeep(struct gb_launcher *launcher, void *mem, uint64_t bytes);

/* launch_share.c: memory of STAGE slabs.  make: registered with the device and offered to the peers. */
int gb_launch_region_make(struct gb_launch_pool *pool, struct gb_net *net, uint64_t bytes,
                          struct gb_region *region) GB_NODISCARD;
void gb_launch_region_free(struct gb_launch_pool *pool, struct gb_region *region);
/* Launcher thread: lets go of the peers' memory. */
void gb_launch_share_fini(struct gb_launcher *launcher);
extern const char gb_fetch_source[];

/* launch_event.c: events are kept and used again; gb_launch_event_put is no driver call. */
int gb_launch_event_get(struct gb_launcher *launcher, void **event) GB_NODISCARD;
void gb_launch_event_put(struct gb_launcher *launcher, void *event); /* caller holds the lock; NULL is fine */
void gb_launch_events_fini(struct gb_launcher *launcher);

/* launch_job.c */
struct gb_job *gb_job_get(struct gb_launcher *launcher, struct gb_dev_op *op);
void gb_job_put(struct gb_launcher *launcher, struct gb_job *job); /* caller holds the lock */
void gb_job_free(struct gb_job *job);
int gb_job_prepare(struct gb_launcher *launcher, struct gb_job *job) GB_NODISCARD; /* [L] */
void gb_job_give_up(struct gb_job *job);
void gb_job_fail(struct gb_launcher *launcher, struct gb_job *job, int status);
int gb_job_conflicts(const struct gb_job *a, const struct gb_job *b);

/* launch_step.c [L]: moves a job on.  Returns 1 when something was issued or has finished. */
int gb_job_advance(struct gb_launcher *launcher, struct gb_job *job);
/* Something may change without a kick: events to poll, or a window to fill. */
int gb_job_needs_polling(const struct gb_launcher *launcher, const struct gb_job *job);
/* Looks whether the device has failed since the job was issued; it would never finish then. */
void gb_job_check(struct gb_launcher *launcher, struct gb_job *job);
int gb_set_get(struct gb_launcher *launcher, uint32_t id, struct gb_set **set) GB_NODISCARD;
void gb_set_destroy(struct gb_launcher *launcher, struct gb_set *set);

static inline int gb_launch_queue(const struct gb_step *step)
{
    return (int)step->queue - GB_QUEUE_OUT;
}

static inline int gb_launch_is_net(const struct gb_step *step)
{
    return step->kind == GB_STEP_SEND || step->kind == GB_STEP_RECV;
}

#endif
