/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.h: what one rank does for one operation, as a graph of steps.  Pure: no I/O, no threads, no clock, no device.
 *
 * All ranks build their plans from equal facts (gb_plan_spec, gb_topo), so the messages of two plans match: the k-th
 * SEND from a to b meets the k-th RECV at b from a, with equal length; the k-th VENDOR step of an island's ranks is one
 * grouped call whose parts match pairwise.  `steps` is in topological order, and its order per queue is the static
 * order in which a queue executes: vendor calls of an island are issued in the same order everywhere, never by arrival.
 *
 * Memory is named, not addressed: user input, user output, device scratch, host staging.  Reuse of a scratch or staging
 * range is a dependency between steps, so finite buffers can neither overflow nor deadlock (tests/sim proves it).
 *
 * A rank whose buffers are device memory is *staged*: SEND and RECV touch host staging only, and COPY steps move
 * between it and the device.  A rank on a CPU sends from and receives into its buffers directly.
 */
#ifndef GB_PLAN_PLAN_H
#define GB_PLAN_PLAN_H

#include "base/err.h"
#include "codec/codec.h"
#include "codec/reduce.h"

#define GB_PLAN_MAX_RANKS 4096u /* per group */

/* Group layout, agreed in the hellos.  Islands are numbered by their lowest rank; ranks inside one by group rank. */
struct gb_topo {
    uint32_t nranks, nislands;
    const uint32_t *island;       /* [nranks] */
    const uint32_t *local;        /* [nranks] index inside the island */
    const uint32_t *island_first; /* [nislands + 1] offsets into members */
    const uint32_t *members;      /* [nranks] ranks by island, ascending */
    const uint8_t *vendor; /* [nislands] 1: its ranks exchange by the vendor library (VENDOR steps); 0: by messages */
    const uint8_t *staged; /* [nranks] 1: buffers are device memory */
};

/* Dtypes that cross as they are although a codec could apply. */
enum gb_codec_skips { GB_SKIP_NONE, GB_SKIP_HALF, GB_SKIP_F32 };

struct gb_plan_spec {
    int32_t op, dtype, reduce_op; /* enums of gpubridge.h; not SEND / RECV, which need no plan */
    uint32_t root;
    uint64_t count;         /* elements, as gpubridge.h defines it per operation */
    const uint64_t *counts; /* ALL_GATHER / REDUCE_SCATTER: [nranks] block sizes; NULL: count each */
    /* ALL_TO_ALL: the rank's own rows; only its own plan depends on them.  NULL: count each. */
    const uint64_t *send_counts, *recv_counts; /* [nranks] */
    uint64_t chunk_bytes;                      /* pipeline unit on the bridge, agreed */
    uint64_t flat_bytes; /* at most this many bytes per rank: everybody sends to everybody, one round, no vendor call */
    uint32_t depth;      /* chunks in flight per rank (>= 2) */
    /* Compression of what crosses islands, agreed; gb_spec_codec says which operations it applies to. */
    int32_t codec; /* enum gb_codec */
    uint64_t codec_min_bytes;
    uint8_t codec_spreads; /* ALL_GATHER and BROADCAST too */
    uint8_t codec_skips;   /* enum gb_codec_skips */
    uint8_t feedback;      /* ALL_REDUCE, REDUCE_SCATTER: this rank has a residual; a rank's own affair */
};

/* RESIDUAL: a float per element of the input, for error feedback. */
enum gb_buf { GB_BUF_IN, GB_BUF_OUT, GB_BUF_DEV, GB_BUF_HOST, GB_BUF_RESIDUAL, GB_BUF_COUNT };

struct gb_ref {
    uint64_t off; /* bytes */
    uint32_t buf; /* enum gb_buf */
};

enum gb_step_kind { GB_STEP_SEND, GB_STEP_RECV, GB_STEP_VENDOR, GB_STEP_REDUCE, GB_STEP_COPY };

/* Staged ranks map queues to streams; on a CPU dependencies alone order the steps. */
enum gb_queue { GB_QUEUE_NET, GB_QUEUE_OUT, GB_QUEUE_IN, GB_QUEUE_VENDOR };

/* One send or receive of a grouped vendor call, or one source of a REDUCE. */
struct gb_part {
    struct gb_ref ref;
    uint64_t bytes;  /* VENDOR */
    uint32_t peer;   /* VENDOR: local index in the island */
    uint8_t is_recv; /* VENDOR */
    uint8_t is_acc;  /* REDUCE: stored as accumulator */
    uint8_t is_enc;  /* REDUCE: an encoded message of step->count values; `peer`: the group rank that made it */
    uint8_t premul;  /* REDUCE: raw input of a PREMUL_SUM */
};

struct gb_step {
    uint8_t kind, queue;
    uint8_t dst_is_acc, dst_is_enc, final; /* REDUCE; final also of encoded SEND, RECV: values of a result */
    uint8_t negate; /* REDUCE: bit k: accumulator k enters times -`times`, in a sum whatever `op` is */
    uint32_t times;
    uint32_t draw;          /* REDUCE that encodes, rounding stochastically: which random words it draws, */
    uint64_t first;         /* from this element on (docs/wire-format.md section 8) */
    uint8_t crosses;        /* SEND / RECV: 1 when it leaves the island (the bridge) */
    uint32_t peer;          /* SEND / RECV: group rank */
    uint32_t xid;           /* SEND / RECV: ordinal between the pair, per direction */
    uint32_t dep, ndep;     /* plan->deps[dep ...]: steps (lower indices) that must be finished first */
    uint32_t part, nparts;  /* VENDOR, REDUCE: plan->parts[part ...] */
    struct gb_ref src, dst; /* SEND: src; RECV: dst; COPY: both; REDUCE: dst */
    uint64_t bytes;         /* SEND, RECV, COPY */
    uint64_t count;         /* REDUCE: elements; encoded SEND, RECV: values */
};

struct gb_plan {
    struct gb_step *steps;
    uint32_t *deps;
    struct gb_part *parts;
    uint32_t nsteps, ndeps, nparts;
    uint64_t dev_bytes, host_bytes; /* scratch and staging this plan needs */
    uint64_t bridge_send_bytes, island_send_bytes;
    uint64_t encoded_values; /* in encoded messages that this rank sends */
    uint32_t hash;           /* of spec and topology: equal on all ranks or the operation is refused */
    uint8_t codec;           /* enum gb_codec of all messages that cross islands */
    uint8_t flat;            /* the one-round form */
    uint8_t encodes_result;  /* this rank encodes sums that are final, of messages from three islands and more */
    uint8_t uses_vendor;     /* has VENDOR steps on this rank */
    uint8_t takes_turn;      /* not flat, on a rank of a vendor island: equal on all such ranks */
};

/* Refuses what the table in reduce.h does not hold, a root outside the group, counts that overflow. */
int gb_plan_build(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank,
                  struct gb_plan **plan) GB_NODISCARD;
void gb_plan_destroy(struct gb_plan *plan);
/* Structure check for tests and debug builds: order, ranges inside dev/host/user sizes, no unordered overlap of writes.
 */
int gb_plan_check(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank,
                  const struct gb_plan *plan) GB_NODISCARD;
/* The codec of an operation's messages between islands: spec->codec, or GB_CODEC_NONE for what is not compressed. */
int gb_spec_codec(const struct gb_topo *topo, const struct gb_plan_spec *spec);
/* 1 when a codec can apply to the operation at all: its kind, dtype and reduce operation. */
int gb_spec_can_compress(const struct gb_plan_spec *spec);
/* What a step that subtracts sources is as arithmetic; its accumulators are floats. */
static inline void gb_step_negate(const struct gb_step *step, struct gb_reduce_args *args)
{
    if (!step->negate) return;
    args->dtype = GPUBRIDGE_F32;
    args->op = GPUBRIDGE_PREMUL_SUM;
    args->factor = -(double)step->times;
    args->premul_mask = step->negate;
}
/* How a step that encodes rounds in an operation whose rounding is stochastic, with `seed`. */
static inline void gb_step_randomise(const struct gb_step *step, uint64_t seed, struct gb_reduce_args *args)
{
    if (!step->dst_is_enc) return;
    args->flags |= GB_REDUCE_STOCHASTIC;
    args->seed = gb_codec_seed(seed, step->draw);
    args->first_index = step->first;
}
/* Bytes of this rank's input and output for a spec. */
void gb_plan_user_bytes(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank, uint64_t *in_bytes,
                        uint64_t *out_bytes);

/* Owns copies of everything a gb_topo points to.  keys[r]: island key of rank r, equal keys share an island. */
int gb_topo_create(uint32_t nranks, const char *const *keys, const uint8_t *vendor_of_rank, const uint8_t *staged,
                   struct gb_topo **topo) GB_NODISCARD;
void gb_topo_destroy(struct gb_topo *topo);

#endif
