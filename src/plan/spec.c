/* SPDX-License-Identifier: Apache-2.0
 * What a specification means before any step exists: sizes, cuts on the grid, the choice of form, checks, the hash. All
 * of it follows from agreed facts.  Pure; any thread. */
#include "plan/build.h"

#include <xxhash.h>

#define MAX_ELEMENTS (1ull << 42)

static uint64_t units(uint64_t n)
{
    return (n + GB_GRID - 1) / GB_GRID;
}

struct gb_range gb_cut(uint64_t n, uint32_t parts, uint32_t k)
{
    uint64_t u = units(n), lo = k * u / parts * GB_GRID, hi = (k + 1ull) * u / parts * GB_GRID;
    if (hi > n) hi = n;
    return (struct gb_range){lo, hi > lo ? hi - lo : 0};
}

uint32_t gb_cut_find(uint64_t n, uint32_t parts, uint64_t at)
{
    return (uint32_t)(((at / GB_GRID + 1) * parts - 1) / units(n));
}

uint64_t gb_segment_end(const struct gb_topo *topo, uint64_t n, uint64_t at, uint32_t except)
{
    uint64_t end = n;
    for (uint32_t i = 0; i < topo->nislands; i++) {
        uint32_t size = topo->island_first[i + 1] - topo->island_first[i];
        struct gb_range r = gb_cut(n, size, gb_cut_find(n, size, at));
        if (i != except && r.lo + r.n < end) end = r.lo + r.n;
    }
    return end;
}

uint64_t gb_chunks(uint64_t n, uint64_t chunk)
{
    return (n + chunk - 1) / chunk;
}

struct gb_range gb_chunk(uint64_t n, uint64_t chunk, uint64_t c)
{
    uint64_t chunks = gb_chunks(n, chunk);
    if (c >= chunks) return (struct gb_range){0, 0};
    uint64_t u = units(n), lo = c * u / chunks * GB_GRID, hi = (c + 1) * u / chunks * GB_GRID;
    if (hi > n) hi = n;
    return (struct gb_range){lo, hi - lo};
}

int gb_spec_reduces(const struct gb_plan_spec *spec)
{
    return spec->op == GPUBRIDGE_ALL_REDUCE || spec->op == GPUBRIDGE_REDUCE || spec->op == GPUBRIDGE_REDUCE_SCATTER;
}

static int has_root(const struct gb_plan_spec *spec)
{
    return spec->op == GPUBRIDGE_BROADCAST || spec->op == GPUBRIDGE_REDUCE || spec->op == GPUBRIDGE_GATHER ||
           spec->op == GPUBRIDGE_SCATTER;
}

static int is_by_pairs(const struct gb_plan_spec *spec)
{
    return spec->op == GPUBRIDGE_GATHER || spec->op == GPUBRIDGE_SCATTER || spec->op == GPUBRIDGE_ALL_TO_ALL;
}

static uint64_t sum(const uint64_t *counts, uint32_t n, uint64_t each)
{
    uint64_t total = counts ? 0 : n * each;
    if (counts)
        for (uint32_t r = 0; r < n; r++) total += counts[r];
    return total;
}

static uint64_t largest_island(const struct gb_topo *topo)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < topo->nislands; i++)
        if (topo->island_first[i + 1] - topo->island_first[i] > most)
            most = topo->island_first[i + 1] - topo->island_first[i];
    return most;
}

static int is_any_staged(const struct gb_topo *topo)
{
    int any = 0;
    for (uint32_t r = 0; r < topo->nranks; r++) any |= topo->staged[r];
    return any;
}

/* Between two islands a direct exchange is one hop; folding once is two, but moves fewer bytes where partials are wider
 * than results, and halves the arithmetic, which counts on CPUs.  With enough chunks in flight the hop costs nothing.
 */
int gb_folds_once(const struct gb_topo *topo, const struct gb_plan_spec *spec)
{
    if (topo->nislands != 2) return topo->nislands > 2;
    /* A result would have to be encoded once more for the second hop: more error, for no fewer bytes. */
    if (gb_spec_codec(topo, spec) != GB_CODEC_NONE) return 0;
    int is_wide = gb_acc_bytes(spec->dtype) > gb_dtype_bytes(spec->dtype) &&
                  (topo->nranks > 2 || spec->reduce_op == GPUBRIDGE_PREMUL_SUM);
    return spec->count / largest_island(topo) >= 4 * spec->chunk_bytes / gb_acc_bytes(spec->dtype) &&
           (is_wide || !is_any_staged(topo));
}

static uint64_t largest_block(const struct gb_topo *topo, const struct gb_plan_spec *spec)
{
    if (!spec->counts) return spec->count;
    uint64_t most = 0;
    for (uint32_t r = 0; r < topo->nranks; r++)
        if (spec->counts[r] > most) most = spec->counts[r];
    return most;
}

/* Encoded messages are small, and a message costs the same whatever its size: chunks are larger by the power of two
 * that the codec saves, as long as there are enough of them to overlap. */
static uint64_t grow_encoded(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint64_t bytes,
                             uint64_t width)
{
    static const uint8_t saves[GB_CODEC_COUNT] = {1, 2, 2, 4, 4, 4, 8};
    const uint64_t all = largest_block(topo, spec) * width;
    uint64_t grown = bytes;
    while (grown < bytes * saves[gb_spec_codec(topo, spec)] && 32 * grown <= all) grown *= 2;
    return grown;
}

uint64_t gb_chunk_elements(const struct gb_topo *topo, const struct gb_plan_spec *spec)
{
    uint64_t width = gb_spec_reduces(spec) ? gb_acc_bytes(spec->dtype) : gb_dtype_bytes(spec->dtype);
    uint64_t pieces = largest_island(topo), bytes = spec->chunk_bytes;
    /* A chunk is cut into about `pieces` messages of chunk_bytes each, */
    if (is_by_pairs(spec)) pieces = 1;
    if (spec->op == GPUBRIDGE_ALL_REDUCE && gb_folds_once(topo, spec) && topo->nislands > pieces)
        pieces = topo->nislands;
    bytes *= pieces < 8 ? pieces : 8;
    /* and what a rank stages for all others at once stays bounded. */
    uint64_t most = spec->chunk_bytes * (is_by_pairs(spec) ? 8 : 32) / topo->nranks;
    if (spec->op != GPUBRIDGE_ALL_REDUCE && spec->op != GPUBRIDGE_BROADCAST && bytes > most) bytes = most;
    uint64_t elements = grow_encoded(topo, spec, bytes, width) / width / GB_GRID * GB_GRID;
    return elements ? elements : GB_GRID;
}

int gb_spec_is_flat(const struct gb_topo *topo, const struct gb_plan_spec *spec)
{
    if (spec->op == GPUBRIDGE_BARRIER || topo->nranks == 1) return 1;
    /* The rows of an ALL_TO_ALL are known to their own rank only. */
    if (spec->op == GPUBRIDGE_ALL_TO_ALL) return 0;
    if (gb_spec_codec(topo, spec) != GB_CODEC_NONE) return 0;
    return largest_block(topo, spec) * gb_dtype_bytes(spec->dtype) <= spec->flat_bytes;
}

int gb_spec_can_compress(const struct gb_plan_spec *spec)
{
    int is_float = spec->dtype == GPUBRIDGE_F32 || spec->dtype == GPUBRIDGE_F16 || spec->dtype == GPUBRIDGE_BF16;
    int is_sum =
        spec->reduce_op == GPUBRIDGE_SUM || spec->reduce_op == GPUBRIDGE_AVG || spec->reduce_op == GPUBRIDGE_PREMUL_SUM;
    int spreads = spec->op == GPUBRIDGE_ALL_GATHER || spec->op == GPUBRIDGE_BROADCAST;
    return is_float && (gb_spec_reduces(spec) ? is_sum : spreads);
}

int gb_spec_codec(const struct gb_topo *topo, const struct gb_plan_spec *spec)
{
    if (spec->codec == GB_CODEC_NONE || topo->nislands < 2 || !gb_spec_can_compress(spec)) return GB_CODEC_NONE;
    if (!gb_spec_reduces(spec) && !spec->codec_spreads) return GB_CODEC_NONE;
    if (spec->codec_skips == (spec->dtype == GPUBRIDGE_F32 ? GB_SKIP_F32 : GB_SKIP_HALF)) return GB_CODEC_NONE;
    int has_blocks = spec->op == GPUBRIDGE_ALL_GATHER || spec->op == GPUBRIDGE_REDUCE_SCATTER;
    uint64_t elements = has_blocks ? sum(spec->counts, topo->nranks, spec->count) : spec->count;
    return elements * gb_dtype_bytes(spec->dtype) < spec->codec_min_bytes ? GB_CODEC_NONE : spec->codec;
}

uint64_t gb_block(const struct gb_builder *b, uint32_t d)
{
    if (b->blocks) return b->blocks[d + 1] - b->blocks[d];
    return b->spec->op == GPUBRIDGE_ALL_REDUCE || d == b->spec->root ? b->spec->count : 0;
}

uint64_t gb_block_at(const struct gb_builder *b, uint32_t d)
{
    return b->blocks ? b->blocks[d] : 0;
}

void gb_plan_user_bytes(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank, uint64_t *in_bytes,
                        uint64_t *out_bytes)
{
    uint64_t es = gb_dtype_bytes(spec->dtype), in = spec->count, out = spec->count;
    uint64_t flat = sum(spec->counts, topo->nranks, spec->count), own = spec->counts ? spec->counts[rank] : spec->count;
    int is_root = rank == spec->root;
    switch (spec->op) {
    case GPUBRIDGE_BROADCAST:
        in = is_root ? in : 0;
        break;
    case GPUBRIDGE_REDUCE:
        out = is_root ? out : 0;
        break;
    case GPUBRIDGE_ALL_GATHER:
        in = own, out = flat;
        break;
    case GPUBRIDGE_REDUCE_SCATTER:
        in = flat, out = own;
        break;
    case GPUBRIDGE_GATHER:
        out = is_root ? out * topo->nranks : 0;
        break;
    case GPUBRIDGE_SCATTER:
        in = is_root ? in * topo->nranks : 0;
        break;
    case GPUBRIDGE_ALL_TO_ALL:
        in = sum(spec->send_counts, topo->nranks, spec->count);
        out = sum(spec->recv_counts, topo->nranks, spec->count);
        break;
    case GPUBRIDGE_BARRIER:
        in = out = 0;
        break;
    default:
        break;
    }
    *in_bytes = in * es;
    *out_bytes = out * es;
}

void gb_spec_bases(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank, uint64_t *in_base,
                   uint64_t *out_base)
{
    uint64_t es = gb_dtype_bytes(spec->dtype), before = sum(spec->counts, spec->counts ? rank : 0, 0);
    if (!spec->counts) before = rank * spec->count;
    *in_base = *out_base = 0;
    switch (spec->op) {
    case GPUBRIDGE_ALL_GATHER:
        *in_base = before * es;
        break;
    case GPUBRIDGE_REDUCE_SCATTER:
        *out_base = before * es;
        break;
    case GPUBRIDGE_GATHER:
        *in_base = rank == spec->root ? before * es : 0;
        break;
    case GPUBRIDGE_SCATTER:
        *out_base = rank == spec->root ? before * es : 0;
        break;
    case GPUBRIDGE_ALL_TO_ALL:
        *out_base = GB_SEPARATE;
        break;
    default:
        break;
    }
}

static int check_counts(const char *what, const uint64_t *counts, uint32_t nranks)
{
    uint64_t total = 0;
    for (uint32_t r = 0; counts && r < nranks; r++) {
        if (counts[r] > MAX_ELEMENTS || (total += counts[r]) > MAX_ELEMENTS)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s[%u] = %llu: the counts add up to more than %llu elements", what,
                           r, (unsigned long long)counts[r], MAX_ELEMENTS);
    }
    return 0;
}

/* What a rank sends to itself is what it receives from itself. */
static int check_own_row(const struct gb_plan_spec *spec, uint32_t rank)
{
    uint64_t sent = spec->send_counts ? spec->send_counts[rank] : spec->count;
    uint64_t received = spec->recv_counts ? spec->recv_counts[rank] : spec->count;
    if (spec->op != GPUBRIDGE_ALL_TO_ALL || sent == received) return 0;
    return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                   "rank %u sends itself %llu elements (send_counts[%u]) and receives %llu (recv_counts[%u])", rank,
                   (unsigned long long)sent, rank, (unsigned long long)received, rank);
}

int gb_spec_check(const struct gb_topo *topo, const struct gb_plan_spec *spec, uint32_t rank)
{
    if (rank >= topo->nranks)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "rank %u is outside the group of %u", rank, topo->nranks);
    if (spec->op < 0 || spec->op > GPUBRIDGE_BARRIER || spec->op == GPUBRIDGE_SEND || spec->op == GPUBRIDGE_RECV)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "operation %d is no collective", spec->op);
    if (spec->op == GPUBRIDGE_BARRIER) return 0;
    if (gb_dtype_bytes(spec->dtype) == 0) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "dtype %d does not exist", spec->dtype);
    if (gb_spec_reduces(spec) && !gb_reduce_supported(spec->dtype, spec->reduce_op))
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "reduce op %s is not defined for dtype %s",
                       gb_reduce_op_name(spec->reduce_op), gb_dtype_name(spec->dtype));
    if (has_root(spec) && spec->root >= topo->nranks)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "root %u is outside the group of %u ranks", spec->root, topo->nranks);
    if (spec->count > MAX_ELEMENTS / topo->nranks)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "count %llu is too large for %u ranks: %llu elements in all are possible",
                       (unsigned long long)spec->count, topo->nranks, MAX_ELEMENTS);
    if (spec->counts && spec->op != GPUBRIDGE_ALL_GATHER && spec->op != GPUBRIDGE_REDUCE_SCATTER)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "counts per rank belong to all_gather and reduce_scatter only");
    if (spec->chunk_bytes == 0 || spec->chunk_bytes > 1ull << 36 || spec->depth < 2)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "chunk of %llu bytes, depth %u: at least 1 byte (at most 64 GiB) and 2",
                       (unsigned long long)spec->chunk_bytes, spec->depth);
    if (spec->codec < 0 || spec->codec >= GB_CODEC_COUNT)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "codec %d does not exist", spec->codec);
    GB_TRY(check_counts("counts", spec->counts, topo->nranks));
    GB_TRY(check_counts("send_counts", spec->send_counts, topo->nranks));
    GB_TRY(check_counts("recv_counts", spec->recv_counts, topo->nranks));
    return check_own_row(spec, rank);
}

uint32_t gb_spec_hash(const struct gb_topo *topo, const struct gb_plan_spec *spec)
{
    int is_moved = spec->op != GPUBRIDGE_BARRIER;
    /* In one round it does not matter whose memory is a device's, so ranks may differ in it (an object collective on
     * hosts among ranks with and without a device). */
    int is_flat = gb_spec_is_flat(topo, spec);
    /* An ALL_TO_ALL may be even on one rank and uneven on another: its sizes are checked message by message. */
    int has_count = is_moved && spec->op != GPUBRIDGE_ALL_TO_ALL && !spec->counts;
    uint64_t facts[] = {(uint64_t)spec->op,
                        is_moved ? (uint64_t)spec->dtype : 0,
                        gb_spec_reduces(spec) ? (uint64_t)spec->reduce_op : 0,
                        has_root(spec) ? spec->root : 0,
                        has_count ? spec->count : 0,
                        is_moved ? spec->chunk_bytes : 0,
                        is_moved ? spec->flat_bytes : 0,
                        topo->nranks,
                        (uint64_t)gb_spec_codec(topo, spec),
                        is_flat ? 0 : (uint64_t)is_any_staged(topo)};
    XXH64_hash_t h = XXH3_64bits_withSeed(facts, sizeof facts, spec->counts != NULL);
    if (spec->counts) h = XXH3_64bits_withSeed(spec->counts, topo->nranks * sizeof *spec->counts, h);
    h = XXH3_64bits_withSeed(topo->island, topo->nranks * sizeof *topo->island, h);
    if (!is_flat) h = XXH3_64bits_withSeed(topo->vendor, topo->nislands * sizeof *topo->vendor, h);
    return (uint32_t)(h ^ h >> 32);
}
