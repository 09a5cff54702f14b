/* SPDX-License-Identifier: Apache-2.0
 *
 * build.h: what the algorithms build plans with (private to src/plan).
 *
 * An algorithm is written as one sequential program of the whole group, of which each rank emits the steps that concern
 * it. That is what makes plans free of deadlock: every rank's array order is the restriction of one global order, so
 * the globally first unfinished step can always run.  Dependencies are not written down by the algorithms but follow
 * from the memory that steps touch (hazard.c), with input and output taken to be one buffer where the operation allows
 * that.
 *
 * A failed allocation is remembered (`failed`) and makes all further calls harmless; gb_plan_build reports it.
 */
#ifndef GB_PLAN_BUILD_H
#define GB_PLAN_BUILD_H

#include "plan/plan.h"

#define GB_GRID       1024u /* elements: shares, segments and chunks are cut on multiples of this */
#define GB_SLOT_SHIFT 44
#define GB_STAGES     4u              /* at most so many chunks are between their first and their last stage */
#define GB_NOW        (2 * GB_STAGES) /* list of landings: those inside the same stage */
#define GB_SEPARATE   (1ull << 60)    /* out_base of operations whose buffers are never shared */

struct gb_span {
    uint64_t lo, hi;
    uint32_t writer;  /* step + 1; 0: none */
    uint32_t readers; /* node + 1; 0: none since the last write */
};

struct gb_track {
    struct gb_span *span;
    uint32_t n, cap;
};

struct gb_reader {
    uint32_t step, next;
};

/* How the values of a fold's source or result are stored. */
enum gb_store { GB_STORE_RAW, GB_STORE_ACC, GB_STORE_ENC };

struct gb_fold_src {
    struct gb_ref ref;
    uint8_t store; /* enum gb_store */
    uint32_t from; /* ENC: the rank that encoded it */
};

struct gb_refs {
    struct gb_ref *v;
    uint32_t n, cap, pos; /* pos: read cursor */
};

/* A received piece that still has to be copied from staging to where it belongs. */
struct gb_landing {
    struct gb_ref from, to;
    uint64_t bytes;
};

struct gb_landings {
    struct gb_landing *v;
    uint32_t n, cap;
};

struct gb_builder {
    const struct gb_topo *topo;
    const struct gb_plan_spec *spec;
    struct gb_plan *plan;
    uint32_t step_cap, dep_cap, part_cap;
    uint32_t me, isl, loc, nloc; /* rank, island, local index, ranks in the island */
    const uint32_t *mates;       /* [nloc] group ranks of the island */
    uint32_t es, as;             /* bytes of an element, of an accumulator */
    uint8_t staged, vendor;      /* vendor: this island has several ranks and exchanges by VENDOR steps in this plan */
    uint8_t premul, folds_once, failed;
    uint8_t codec;                 /* enum gb_codec: of everything that crosses */
    uint8_t feedback;              /* partials are encoded with the residual */
    uint32_t *send_xid, *recv_xid; /* [nranks] */
    uint32_t *mark;                /* [step_cap] dependency already recorded for step mark - 1 */

    /* Scratch.  While building, an offset is slot << GB_SLOT_SHIFT | offset inside the slot. */
    uint32_t depth, slot, nslots; /* nslots: used so far */
    uint64_t *bump[2];            /* [depth] next free byte in DEV, HOST */
    uint64_t peak[2];

    /* Hazards. */
    struct gb_track *user;      /* [nzones] */
    const uint64_t *zone_first; /* [nzones] bytes, ascending */
    uint32_t nzones;
    uint64_t in_base, out_base; /* where IN and OUT begin in the common address space of the zones */
    struct gb_track scratch[2]; /* DEV, HOST */
    struct gb_track residual;
    struct gb_reader *node;
    uint32_t nnodes, node_cap;

    /* Kept between the stages of a chunk. */
    struct gb_refs kept[GB_STAGES];
    struct gb_landings land[2 * GB_STAGES + 1];
    struct gb_fold_src *fold;
    uint32_t nfold, fold_cap;
    struct gb_part *call; /* parts of the vendor call being gathered */
    uint32_t ncall, call_cap;
    struct gb_ref last_from, last_staged; /* stage_out of the same bytes twice in a row copies once */
    uint64_t last_bytes;
    uint64_t *blocks; /* [nranks + 1] element offsets of blocks, or NULL */
};

/* hazard.c: the last step reads or writes [lo, hi) */
void gb_track_access(struct gb_builder *b, struct gb_track *t, uint64_t lo, uint64_t hi, int is_write);

/* Lists of landings: what a chunk's first stage receives, what a later one does. */
static inline uint32_t gb_first(uint64_t chunk)
{
    return (uint32_t)(chunk % GB_STAGES);
}
static inline uint32_t gb_later(uint64_t chunk)
{
    return GB_STAGES + (uint32_t)(chunk % GB_STAGES);
}

/* build.c */
int gb_grow(struct gb_builder *b, void **array, uint32_t *cap, uint32_t need, size_t size);
void gb_b_dep(struct gb_builder *b, uint32_t step); /* of the last step */
uint32_t gb_b_send(struct gb_builder *b, uint32_t peer, struct gb_ref src, uint64_t bytes);
/* A message of `count` values that gb_b_encode made.  `final`: they are a result, not a partial or an input. */
void gb_b_send_encoded(struct gb_builder *b, uint32_t peer, struct gb_ref message, uint64_t count, int final);
/* Receives one into scratch memory (staged: when gb_b_land(list) is emitted).  Returns where it will be. */
struct gb_ref gb_b_recv_encoded(struct gb_builder *b, uint32_t list, uint32_t peer, uint64_t count, int final);
uint32_t gb_b_recv(struct gb_builder *b, uint32_t peer, struct gb_ref dst, uint64_t bytes);
void gb_b_copy(struct gb_builder *b, uint32_t queue, struct gb_ref src, struct gb_ref dst, uint64_t bytes);
/* Opens the scratch of chunk `chunk`: what the slot held before is given up. */
void gb_b_open_slot(struct gb_builder *b, uint64_t chunk);
/* Goes on in the scratch of a chunk that is open. */
void gb_b_use_slot(struct gb_builder *b, uint64_t chunk);
/* Memory for arithmetic (device memory on a staged rank) / for messages (always host memory). */
struct gb_ref gb_b_scratch(struct gb_builder *b, uint64_t bytes);
struct gb_ref gb_b_staging(struct gb_builder *b, uint64_t bytes);
/* The bytes where a message can be sent from: on a staged rank a copy. */
struct gb_ref gb_b_stage_out(struct gb_builder *b, struct gb_ref from, uint64_t bytes);
/* Receives into dst; on a staged rank the copy from staging is emitted by gb_b_land(list).  Returns where the message
 * is. */
struct gb_ref gb_b_recv_to(struct gb_builder *b, uint32_t list, uint32_t peer, struct gb_ref dst, uint64_t bytes);
void gb_b_land(struct gb_builder *b, uint32_t list);
/* Inside the island, to or from group rank `mate`: a part of the vendor call, or a message. */
void gb_b_give(struct gb_builder *b, uint32_t mate, struct gb_ref src, uint64_t bytes);
void gb_b_take(struct gb_builder *b, uint32_t list, uint32_t mate, struct gb_ref dst, uint64_t bytes);
/* Emits the vendor call that give and take gathered, in vendor islands also when this rank has no part in it. */
void gb_b_call(struct gb_builder *b);
void gb_b_add(struct gb_builder *b, struct gb_ref ref, int is_acc);            /* a source of the next fold */
void gb_b_add_encoded(struct gb_builder *b, struct gb_ref ref, uint32_t from); /* one that rank `from` encoded */
/* Folds the gathered sources in their order, in as many REDUCE steps as it takes. */
void gb_b_fold(struct gb_builder *b, uint32_t queue, struct gb_ref dst, uint64_t count, int dst_store, int final);
/* Folds the gathered sources and encodes the result, which begins at element `at` of the tensor (of this rank's block,
 * where blocks are spread), into scratch memory.  Returns where it is. */
struct gb_ref gb_b_encode(struct gb_builder *b, uint32_t queue, uint64_t at, uint64_t count, int final);
/* The same for a partial; with error feedback the residual there is added, and then what encoding lost takes its place.
 */
struct gb_ref gb_b_encode_partial(struct gb_builder *b, uint32_t queue, uint64_t at, uint64_t count);
/* The same for the result of an ALL_REDUCE; with error feedback what encoding lost is added to the residual there. */
struct gb_ref gb_b_encode_result(struct gb_builder *b, uint64_t at, uint64_t count);
/* The values of a message that rank `from` encoded, rounded to the dtype. */
void gb_b_decode(struct gb_builder *b, struct gb_ref ref, uint32_t from, struct gb_ref dst, uint64_t count);
void gb_b_keep(struct gb_builder *b, uint64_t chunk, struct gb_ref ref);
struct gb_ref gb_b_kept(struct gb_builder *b, uint64_t chunk);
static inline struct gb_ref gb_at(uint32_t buf, uint64_t off)
{
    return (struct gb_ref){off, buf};
}
static inline struct gb_ref gb_plus(struct gb_ref ref, uint64_t bytes)
{
    return (struct gb_ref){ref.off + bytes, ref.buf};
}

/* spec.c: sizes, cuts, checks */
struct gb_range {
    uint64_t lo, n; /* elements */
};
/* Part k of `parts` equal parts of n elements, on the grid. */
struct gb_range gb_cut(uint64_t n, uint32_t parts, uint32_t k);
/* Which of `parts` parts of n elements holds element `at`. */
uint32_t gb_cut_find(uint64_t n, uint32_t parts, uint64_t at);
/* Where the segment of n elements that begins at `at` ends: where the share changes in some island but `except`. */
uint64_t gb_segment_end(const struct gb_topo *topo, uint64_t n, uint64_t at, uint32_t except);
#define GB_NO_ISLAND UINT32_MAX
/* Chunks of n elements, and chunk c of them; n = 0 beyond the last. */
uint64_t gb_chunks(uint64_t n, uint64_t chunk);
struct gb_range gb_chunk(uint64_t n, uint64_t chunk, uint64_t c);
/* ALL_REDUCE: 1 when each part of a segment is folded by one owner, who spreads the result; 0 when two islands exchange
 * their partials and both fold. */
int gb_folds_once(const struct gb_topo *topo, const struct gb_plan_spec *spec);
/* Elements per chunk of the large forms, from agreed facts alone. */
uint64_t gb_chunk_elements(const struct gb_topo *topo, const struct gb_plan_spec *spec);
/* 1 when the operation takes the one-round form. */
int gb_spec_is_flat(const struct gb_topo *topo, const struct gb_plan_spec *spec);
int gb_spec_reduces(const struct gb_plan_spec *spec);
/* Elements of block d, the block's place in the input (operations that reduce) or output (that spread). */
uint64_t gb_block(const struct gb_builder *b, uint32_t d);
uint64_t gb_block_at(const struct gb_builder *b, uint32_t d);
int gb_spec_check(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank) GB_NODISCARD;
uint32_t gb_spec_hash(const struct gb_topo *topo, const struct gb_plan_spec *spec);
/* Where IN and OUT lie in one address space when they are one buffer, for operations that allow it; GB_SEPARATE else.
 */
void gb_spec_bases(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank, uint64_t *in_base,
                   uint64_t *out_base);
/* 1 when the partial of an island is stored as accumulator. */
static inline int gb_partial_is_acc(const struct gb_builder *b, uint32_t island)
{
    return b->premul || b->topo->island_first[island + 1] - b->topo->island_first[island] > 1;
}

/* The algorithms. */
void gb_flat_reduce(struct gb_builder *b);
void gb_flat_spread(struct gb_builder *b);
void gb_barrier(struct gb_builder *b);
void gb_all_reduce(struct gb_builder *b);
void gb_reduce_blocks(struct gb_builder *b);
void gb_spread_blocks(struct gb_builder *b);
void gb_direct(struct gb_builder *b);

#endif
