/* SPDX-License-Identifier: Apache-2.0
 *
 * op.h: the objects of the engine.  A *group* is the engine's view of a communicator, an *op* one operation in flight.
 *
 * Ownership: fields marked [E] belong to the engine role (one thread at a time, holding engine->role); [S] to the
 * group's submit lock; the rest is constant after creation or atomic as stated.
 */
#ifndef GB_ENGINE_OP_H
#define GB_ENGINE_OP_H

#include "engine/launcher.h"
#include "plan/plan.h"
#include "transport/net.h"

#include <pthread.h>
#include <stdatomic.h>

struct gb_engine;
struct gb_group;
struct gb_op;

/* Operations with one plan that a sender has in flight take their staging in turn. */
#define GB_GUESSES 4u

/* A plan made ready for execution: successors instead of predecessors.  Shared by operations, counted. */
struct gb_xplan {
    struct gb_plan *plan;
    uint8_t hash[16]; /* of the specification: the cache key */
    _Atomic uint32_t refs;
    uint32_t *succ_first; /* [nsteps + 1] into succ */
    uint32_t *succ;
    uint32_t *watch;         /* staged: device steps that a network step or a lent message waits for, ascending */
    uint32_t *landing;       /* [nsteps] as in struct gb_dev_op; NULL: no message of the plan can be lent */
    _Atomic uint64_t *guess; /* [GB_GUESSES][nsteps] of messages that land: where they were; NULL without landing */
    _Atomic uint32_t turns;  /* operations so far */
    uint32_t nwatch;
    uint32_t nnet; /* network steps */
};

enum gb_cell_state { GB_CELL_WAITING, GB_CELL_STARTED, GB_CELL_DONE };

/* Execution state of one step; its address is the cookie of its network message or job. */
struct gb_cell {
    struct gb_op *op;
    struct gb_cell *next; /* ready list */
    void *loan;           /* RECV: the message, which lies in the sender's memory until the device has it; or NULL */
    uint32_t left;        /* unfinished predecessors */
    uint8_t state;        /* enum gb_cell_state */
};

enum gb_op_state { GB_OP_PENDING, GB_OP_FINISHED };

struct gb_op {
    _Atomic uint32_t state;    /* enum gb_op_state; release when the result is complete.  A futex word. */
    _Atomic uint32_t sleepers; /* threads in futex wait on state */
    _Atomic uint32_t refs;     /* engine 1, request 1 */
    struct gb_group *group;
    struct gb_engine *engine;
    struct gb_op *next;        /* submit queue, then [E] group list */
    struct gb_op *prev;        /* [E] */
    struct gb_op *staged_next; /* [E] engine list of staged operations in flight */
    struct gb_op *ticket_next; /* [E] comm's list of operations whose turn has come */
    struct gb_xplan *xplan;
    struct gb_cell *cells;                   /* [nsteps] */
    struct gb_cell *ready_head, *ready_tail; /* [E] */
    struct gb_key key;                       /* xid is filled per message */
    struct gb_sig sig;
    int32_t kind, dtype, reduce_op, root, tag;
    uint32_t flags;
    uint64_t user, count, payload_bytes;
    double factor;
    uint64_t seed;            /* of its encodings, */
    uint8_t is_random;        /* if they round stochastically */
    _Atomic uint8_t is_wild;  /* a NaN or an infinity was found in a message, and its sender noted */
    void *buf[GB_BUF_COUNT];  /* enum gb_buf */
    void *dev_mem, *host_mem; /* to give back */
    struct gb_dev_op *dev;    /* staged operations */
    struct gb_shadow *shadow; /* staged operations that run on copies of the buffers in host memory; else NULL */
    uint32_t watch_pos;       /* [E] first watched step not yet seen finished */
    uint32_t started, left;   /* [E] steps in flight; steps of the engine not finished */
    uint32_t loans;           /* [E] cells that hold one */
    uint8_t is_started, is_p2p, wants_turn, is_announced, has_ticket, is_aborting, is_any, is_posted; /* [E] */
    uint8_t on_device;    /* [E] the launcher has it: until staged_next marks the end */
    uint8_t is_emulated;  /* no stream of the caller's to order: waits hold the host */
    uint8_t is_claimed;   /* the submitting thread puts it into the streams */
    uint8_t is_unstarted; /* counted in group->unstarted */
    uint8_t is_held;      /* [E] a barrier that only waits for earlier operations, counted in group->held */
    int32_t source;       /* RECV: matched source, valid when finished */
    int64_t deadline_ns;  /* absolute */
    uint64_t submit_ns, start_ns, progress_ns;
    uint64_t begun_ns, opened_ns; /* [E] of shadows: copied out, may be copied in; 0: never */
    uint64_t fault_ns;            /* [E] when the device first reported an error; 0: never */
    uint64_t given_up_ns;         /* [E] when a member first stopped amid a message; 0: never */
    uint32_t given_up_by;         /* [E] that member */
    uint64_t first_bridge_ns, last_bridge_ns, first_island_ns, last_island_ns; /* [E] */
    _Atomic uint64_t compute_ns;
    int status; /* valid when finished */
    char *text; /* error text, NULL when none; freed with the op */
};

/* Counters: relaxed atomics, written by the engine role. */
struct gb_group_counters {
    _Atomic uint64_t ops, bridge_sent, bridge_recv, island_sent, payload, total_ns, island_ns, bridge_ns, wait_ns,
        compute_ns;
};

/* What one kind of operation did with one codec. */
struct gb_coded {
    uint64_t ops, in_bytes, wire_bytes; /* finished; values sent to other islands, as float32, and their messages */
    uint64_t messages, blocks, saturated, not_finite, samples;
    double signal, noise; /* sums of squares of the values and of their errors in samples */
    int32_t first_rank;   /* who sent the first NaN or infinity: of the earliest operation known, the lowest rank */
    uint32_t first_seq, own_seq;
    struct gb_sig own_sig;                        /* of the first operation in which this rank sent some, */
    uint8_t has_first, has_own, must_tell_others; /* who do not know yet */
};
#define GB_CODED_KINDS (GPUBRIDGE_REDUCE_SCATTER + 1) /* the kinds that codecs apply to come first */

struct gb_p2p_slot { /* counters of one (peer, tag) */
    int32_t peer, tag;
    uint32_t send_seq, recv_seq;
    struct gb_p2p_slot *next;
};

struct gb_p2p_seen { /* an announced message without a receive */
    int32_t peer, tag;
    uint32_t seq;
    struct gb_p2p_seen *next;
};

#define GB_HISTORY 256

enum gb_lends { GB_LENDS_NOTHING, GB_LENDS, GB_LENDS_SAME_DEVICE /* whose rank uses this very device */ };

struct gb_group {
    uint64_t id;
    char *name;
    uint32_t rank, size;
    struct gb_engine *engine;
    struct gb_link **links; /* [size]; own entry NULL */
    char **labels;          /* [size] "rank 3 (host-a)" */
    struct gb_topo *topo;
    struct gb_topo *host_topo; /* the same islands for operations on host buffers: no vendor library, nothing staged */
    int staged;                /* this rank's buffers are device memory */
    uint32_t stream_set;       /* of collectives; P2P operations use the next one */
    uint64_t chunk_bytes;      /* 0: by size and device (submit.c) */
    uint64_t flat_bytes;
    int32_t codec; /* enum gb_codec of messages between islands */
    uint64_t codec_min_bytes;
    int codec_spreads;   /* ALL_GATHER and BROADCAST too */
    int codec_is_random; /* encoding rounds stochastically, with */
    uint64_t codec_seed;
    uint8_t codec_skips;                                /* enum gb_codec_skips */
    uint32_t encodings[GB_CODED_KINDS][GB_CODEC_COUNT]; /* [S] operations of devices so far: one in many is sampled */
    /* Operations up to this size run on shadows (shadow.c); UINT64_MAX: all, since a member has no kernels. */
    uint64_t host_bytes;
    int is_one_host; /* all members are on one host and may use its shared memory */
    int any_staged;  /* the buffers of some member are device memory */
    uint8_t *lends;  /* [size] enum gb_lends: can this device read messages of that rank in its memory? NULL: of none */
    int takes_turns; /* operations of this rank's device memory start by tickets (config.hooks.announce) */
    uint32_t depth;
    int64_t timeout_ns; /* [S] */

    pthread_mutex_t submit_lock;
    uint32_t next_seq;           /* [S] */
    struct gb_p2p_slot *p2p[64]; /* [E] by hash of (peer, tag) */

    struct gb_xplan *cache[64]; /* [S] */
    uint32_t cache_pos;         /* [S] */

    struct gb_op *ops_head, *ops_tail;         /* [E] submitted and not finished, in order of submission */
    struct gb_p2p_seen *seen_head, *seen_tail; /* [E] */
    struct {
        uint32_t seq;
        struct gb_sig sig;
    } history[GB_HISTORY]; /* [E] signatures of recent operations */
    uint32_t last_seq;     /* [E] highest sequence number admitted + 1 */
    uint8_t *arrived;      /* [E][size] answers to probes about the oldest operation: 0 unknown, 1 has it, 2 behind */
    uint64_t left_ns;      /* [E] when a member destroyed the group; 0: none did */
    char left_text[320];   /* [E] who, and why */
    uint64_t probe_ns;     /* [E] last probe sent */

    _Atomic int status; /* release after status_text: the first abort */
    char status_text[512];
    _Atomic uint32_t nops;      /* operations not finished */
    _Atomic uint32_t unstarted; /* collectives of device buffers that the launcher does not have yet */
    struct gb_group_counters counters;
    pthread_mutex_t coded_lock;
    struct gb_coded coded[GB_CODED_KINDS][GB_CODEC_COUNT]; /* guarded by coded_lock */
    void *comm;                                            /* owner, for the hooks */
    struct gb_group *next;                                 /* [E] engine list */
    uint32_t held;                                         /* [E] barriers that wait for earlier operations */
    int needs_settle;        /* [E] some may finish now; the progress loop does it, they may be in use up the stack */
    struct gb_ccl_comm *ccl; /* [E] vendor communicator of this rank's island, NULL until made */
};

#endif
