/* SPDX-License-Identifier: Apache-2.0
 * Bytes that an operation moves, by the formulas of docs/algorithms.md.  Written from that text, not from the plans. */
#include "codec_ref.h"
#include "sim.h"

#include <string.h>

#define GRID 1024u

struct sizes {
    const struct sim_op *op;
    const struct gb_topo *t;
    uint64_t es, as, largest; /* largest: ranks of the largest island */
};

static uint64_t island_size(const struct sizes *z, uint32_t i)
{
    return z->t->island_first[i + 1] - z->t->island_first[i];
}

static uint64_t width(const struct sizes *z, uint32_t i)
{
    return island_size(z, i) > 1 || z->op->spec.reduce_op == GPUBRIDGE_PREMUL_SUM ? z->as : z->es;
}

static uint64_t block(const struct sizes *z, uint32_t r)
{
    const struct gb_plan_spec *s = &z->op->spec;
    if (s->counts) return s->counts[r];
    int one = s->op == GPUBRIDGE_BROADCAST || s->op == GPUBRIDGE_REDUCE;
    return one && r != s->root ? 0 : s->count;
}

/* The codec that applies: sums of short floats between islands, from some size on; the rest when asked. */
static int codec_of(const struct sizes *z)
{
    const struct gb_plan_spec *s = &z->op->spec;
    uint64_t all = 0;
    int spreads = s->op == GPUBRIDGE_ALL_GATHER || s->op == GPUBRIDGE_BROADCAST;
    int reduces = s->op == GPUBRIDGE_ALL_REDUCE || s->op == GPUBRIDGE_REDUCE_SCATTER || s->op == GPUBRIDGE_REDUCE;
    if (s->dtype != GPUBRIDGE_F32 && s->dtype != GPUBRIDGE_F16 && s->dtype != GPUBRIDGE_BF16) return GB_CODEC_NONE;
    if (s->codec_skips == GB_SKIP_F32 && s->dtype == GPUBRIDGE_F32) return GB_CODEC_NONE;
    if (s->codec_skips == GB_SKIP_HALF && s->dtype != GPUBRIDGE_F32) return GB_CODEC_NONE;
    if (z->t->nislands < 2 || (!reduces && !(spreads && s->codec_spreads))) return GB_CODEC_NONE;
    if (reduces && s->reduce_op != GPUBRIDGE_SUM && s->reduce_op != GPUBRIDGE_AVG &&
        s->reduce_op != GPUBRIDGE_PREMUL_SUM)
        return GB_CODEC_NONE;
    for (uint32_t r = 0; r < z->t->nranks; r++) all += block(z, r);
    if (s->op == GPUBRIDGE_ALL_REDUCE) all = s->count;
    return all * z->es < s->codec_min_bytes ? GB_CODEC_NONE : s->codec;
}

/* What rank a sends rank d when every pair is served directly. */
static uint64_t pair_elements(const struct sizes *z, uint32_t a, uint32_t d)
{
    const struct sim_op *op = z->op;
    switch (op->spec.op) {
    case GPUBRIDGE_ALL_REDUCE:
        return op->spec.count;
    case GPUBRIDGE_REDUCE:
    case GPUBRIDGE_REDUCE_SCATTER:
        return block(z, d);
    case GPUBRIDGE_BROADCAST:
    case GPUBRIDGE_ALL_GATHER:
        return block(z, a);
    case GPUBRIDGE_GATHER:
        return d == op->spec.root ? op->spec.count : 0;
    case GPUBRIDGE_SCATTER:
        return a == op->spec.root ? op->spec.count : 0;
    case GPUBRIDGE_ALL_TO_ALL:
        return op->is_uneven ? op->rows[a * z->t->nranks + d] : op->spec.count;
    default:
        return 0;
    }
}

static void direct(const struct sizes *z, uint64_t *bridge, uint64_t *island)
{
    for (uint32_t a = 0; a < z->t->nranks; a++)
        for (uint32_t d = 0; d < z->t->nranks; d++)
            if (a != d) *(z->t->island[a] == z->t->island[d] ? island : bridge) += pair_elements(z, a, d) * z->es;
}

/* The segment of `units` units that begins with unit `first` ends before the unit returned; islands but one count. */
static uint64_t segment_end(const struct sizes *z, uint64_t units, uint64_t first, uint32_t except)
{
    for (uint64_t u = first;; u++) {
        int ends = u + 1 == units;
        for (uint32_t i = 0; i < z->t->nislands && !ends; i++)
            for (uint64_t k = 1; k < island_size(z, i) && i != except; k++)
                ends |= k * units / island_size(z, i) == u + 1;
        if (ends) return u + 1;
    }
}

/* Of `n` elements on the grid, those that each island folds; returns the bytes of one encoded copy of all parts. */
static uint64_t count_folded(const struct sizes *z, uint64_t n, int codec, uint64_t *folded)
{
    uint64_t nislands = z->t->nislands, units = (n + GRID - 1) / GRID, bytes = 0;
    for (uint64_t first = 0, end; first < units; first = end) {
        end = segment_end(z, units, first, UINT32_MAX);
        for (uint64_t i = 0; i < nislands; i++) {
            uint64_t len = end - first;
            uint64_t lo = (first + i * len / nislands) * GRID, hi = (first + (i + 1) * len / nislands) * GRID;
            if (hi > n) hi = n;
            if (hi <= lo) continue;
            folded[i] += hi - lo;
            if (codec) bytes += ref_encoded_bytes(codec, hi - lo);
        }
    }
    return bytes;
}

/* Bytes of one encoded copy of `n` elements, cut into segments. */
static uint64_t encode_segments(const struct sizes *z, uint64_t n, int codec, uint32_t except)
{
    uint64_t units = (n + GRID - 1) / GRID, bytes = 0;
    for (uint64_t first = 0, end; first < units; first = end) {
        end = segment_end(z, units, first, except);
        bytes += ref_encoded_bytes(codec, (end * GRID < n ? end * GRID : n) - first * GRID);
    }
    return bytes;
}

/* Bytes of a chunk: of encoded ones more, but at least 16 chunks of the larger of two sizes. */
static uint64_t grown(uint64_t bytes, int codec, uint64_t all)
{
    uint64_t factor = codec == GB_CODEC_NONE                             ? 1
                      : codec == GB_CODEC_BF16 || codec == GB_CODEC_FP16 ? 2
                      : codec == GB_CODEC_MXFP4                          ? 8
                                                                         : 4;
    while (factor > 1 && all < 16 * factor * bytes) factor /= 2;
    return factor * bytes;
}

/* Two islands fold once when messages are long, and partials wider than results or no rank a device. */
static int folds_once(const struct sizes *z)
{
    int wide = 0, staged = 0;
    for (uint32_t i = 0; i < z->t->nislands; i++) wide |= width(z, i) > z->es;
    for (uint32_t r = 0; r < z->t->nranks; r++) staged |= z->t->staged[r];
    if (z->t->nislands != 2) return z->t->nislands > 2;
    if (codec_of(z)) return 0;
    return z->op->spec.count / z->largest >= 4 * z->op->spec.chunk_bytes / z->as && (wide || !staged);
}

static void all_reduce(const struct sizes *z, uint64_t *bridge, uint64_t *island)
{
    uint64_t n = z->op->spec.count, nislands = z->t->nislands, folded[SIM_MAX_RANKS] = {0};
    for (uint32_t i = 0; i < nislands; i++) *island += 2 * (island_size(z, i) - 1) * n * z->es;
    int codec = codec_of(z), once = folds_once(z);
    if (nislands == 1) return;
    if (!once && !codec) {
        *bridge += n * (width(z, 0) + width(z, 1));
        return;
    }
    uint64_t pieces = once && nislands > z->largest ? nislands : z->largest;
    uint64_t chunk = z->op->spec.chunk_bytes * (pieces < 8 ? pieces : 8);
    chunk = grown(chunk, codec, n * z->as) / z->as / GRID * GRID;
    if (chunk == 0) chunk = GRID;
    uint64_t chunks = (n + chunk - 1) / chunk, units = (n + GRID - 1) / GRID;
    for (uint64_t c = 0; c < chunks; c++) {
        uint64_t lo = c * units / chunks * GRID, hi = (c + 1) * units / chunks * GRID;
        uint64_t bytes = count_folded(z, (hi < n ? hi : n) - lo, codec, folded);
        /* Every part travels to who folds it from the other islands, and back; in an exchange both send all. */
        if (once && codec) *bridge += 2 * (nislands - 1) * bytes;
        if (!once) *bridge += 2 * encode_segments(z, (hi < n ? hi : n) - lo, codec, UINT32_MAX);
    }
    if (codec) return;
    for (uint32_t i = 0; i < nislands; i++)
        *bridge += (n - folded[i]) * width(z, i) + (nislands - 1) * folded[i] * z->es;
}

/* Rank r's block goes to, or comes from, every other island, in chunks and segments. */
static uint64_t encode_block(const struct sizes *z, uint32_t r, int reduces, int codec)
{
    uint64_t n = block(z, r), units = (n + GRID - 1) / GRID, bytes = 0, c = z->op->spec.chunk_bytes;
    uint64_t most = 32 * c / z->t->nranks;
    c *= z->largest < 8 ? z->largest : 8;
    if (c > most && z->op->spec.op != GPUBRIDGE_BROADCAST) c = most;
    uint64_t width = reduces ? z->as : z->es, largest = 0;
    for (uint32_t q = 0; q < z->t->nranks; q++) largest = block(z, q) > largest ? block(z, q) : largest;
    c = grown(c, codec, largest * width) / width / GRID * GRID;
    if (c == 0) c = GRID;
    for (uint64_t k = 0, chunks = (n + c - 1) / c; k < chunks; k++) {
        uint64_t lo = k * units / chunks * GRID, hi = (k + 1) * units / chunks * GRID;
        bytes += encode_segments(z, (hi < n ? hi : n) - lo, codec, z->t->island[r]);
    }
    return (z->t->nislands - 1) * bytes;
}

static void blocks(const struct sizes *z, int reduces, uint64_t *bridge, uint64_t *island)
{
    int codec = codec_of(z);
    for (uint32_t r = 0; r < z->t->nranks; r++) {
        if (codec) *bridge += encode_block(z, r, reduces, codec);
        for (uint32_t i = 0; i < z->t->nislands; i++) {
            *island += (island_size(z, i) - 1) * block(z, r) * z->es;
            if (i != z->t->island[r] && !codec) *bridge += block(z, r) * (reduces ? width(z, i) : z->es);
        }
    }
}

void sim_volume(const struct sim_op *op, uint64_t *bridge, uint64_t *island)
{
    struct sizes z = {op, op->group->topo, gb_dtype_bytes(op->spec.dtype), gb_acc_bytes(op->spec.dtype), 1};
    uint64_t most = 0;
    for (uint32_t i = 0; i < z.t->nislands; i++)
        if (island_size(&z, i) > z.largest) z.largest = island_size(&z, i);
    for (uint32_t r = 0; r < z.t->nranks; r++)
        if (block(&z, r) > most) most = block(&z, r);
    *bridge = *island = 0;
    int small = z.t->nranks == 1 || (most * z.es <= op->spec.flat_bytes && codec_of(&z) == GB_CODEC_NONE);
    switch (op->spec.op) {
    case GPUBRIDGE_ALL_REDUCE:
        (small ? direct : all_reduce)(&z, bridge, island);
        break;
    case GPUBRIDGE_REDUCE:
    case GPUBRIDGE_REDUCE_SCATTER:
        if (small)
            direct(&z, bridge, island);
        else
            blocks(&z, 1, bridge, island);
        break;
    case GPUBRIDGE_BROADCAST:
    case GPUBRIDGE_ALL_GATHER:
        if (small)
            direct(&z, bridge, island);
        else
            blocks(&z, 0, bridge, island);
        break;
    default:
        direct(&z, bridge, island);
        break;
    }
}
