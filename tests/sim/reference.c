/* SPDX-License-Identifier: Apache-2.0
 * What operations must give, from their definition: element by element, in the specified order, with arithmetic of its
 * own. It shares nothing with the plans or with src/codec but the tables of element sizes. */
#include "codec_ref.h"
#include "sim.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

__extension__ typedef _Float16 half; /* the compiler's own conversions */

/* An accumulator: `d` for f64 parts, `f` for other floats, `i` for integers (sign extended or not as the type is). */
struct acc {
    double d;
    float f;
    uint64_t i;
};

static int is_double(int dtype)
{
    return dtype == GPUBRIDGE_F64 || dtype == GPUBRIDGE_C128;
}

static int is_float(int dtype)
{
    return dtype == GPUBRIDGE_F32 || dtype == GPUBRIDGE_F16 || dtype == GPUBRIDGE_BF16 || dtype == GPUBRIDGE_C64;
}

static int is_signed(int dtype)
{
    return dtype == GPUBRIDGE_I8 || dtype == GPUBRIDGE_I16 || dtype == GPUBRIDGE_I32 || dtype == GPUBRIDGE_I64;
}

/* Bytes of what is folded: half a complex number. */
static size_t part_bytes(int dtype)
{
    size_t bytes = gb_dtype_bytes(dtype);
    return dtype == GPUBRIDGE_C64 || dtype == GPUBRIDGE_C128 ? bytes / 2 : bytes;
}

static struct acc load(int dtype, const unsigned char *p)
{
    struct acc a = {0};
    uint16_t bits;
    if (is_double(dtype)) {
        memcpy(&a.d, p, 8);
    } else if (dtype == GPUBRIDGE_F16) {
        half h;
        memcpy(&h, p, 2);
        a.f = (float)h;
    } else if (dtype == GPUBRIDGE_BF16) {
        memcpy(&bits, p, 2);
        uint32_t wide = (uint32_t)bits << 16;
        memcpy(&a.f, &wide, 4);
    } else if (is_float(dtype)) {
        memcpy(&a.f, p, 4);
    } else if (dtype == GPUBRIDGE_BOOL) {
        a.i = *p != 0;
    } else {
        size_t bytes = gb_dtype_bytes(dtype);
        memcpy(&a.i, p, bytes); /* little endian */
        if (is_signed(dtype) && bytes < 8 && a.i >> (8 * bytes - 1)) a.i |= ~(uint64_t)0 << 8 * bytes;
    }
    return a;
}

/* The nearer of the two neighbours in bf16, the even one in the middle. */
static uint16_t to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t down = (uint16_t)(bits >> 16);
    if (isinf(f)) return down;
    uint32_t lo = (uint32_t)down << 16, hi = lo + 0x10000u;
    float below, above;
    memcpy(&below, &lo, 4);
    memcpy(&above, &hi, 4);
    double far = isinf(above) ? ldexp(1, 128) : fabs((double)above);
    double to_down = fabs((double)f) - fabs((double)below), to_up = far - fabs((double)f);
    if (to_down == to_up) return (uint16_t)(down + (down & 1));
    return (uint16_t)(down + (to_up < to_down));
}

static void store(int dtype, struct acc a, unsigned char *p)
{
    if (is_double(dtype)) {
        uint64_t nan = 0x7ff8000000000000u;
        memcpy(p, isnan(a.d) ? (void *)&nan : (void *)&a.d, 8);
    } else if (dtype == GPUBRIDGE_F16) {
        half h = (half)a.f;
        uint16_t nan = 0x7e00;
        memcpy(p, isnan(a.f) ? (void *)&nan : (void *)&h, 2);
    } else if (dtype == GPUBRIDGE_BF16) {
        uint16_t bits = isnan(a.f) ? 0x7fc0 : to_bf16(a.f);
        memcpy(p, &bits, 2);
    } else if (is_float(dtype)) {
        uint32_t nan = 0x7fc00000;
        memcpy(p, isnan(a.f) ? (void *)&nan : (void *)&a.f, 4);
    } else {
        memcpy(p, &a.i, gb_dtype_bytes(dtype));
    }
}

/* The same line for floats and doubles. */
#define FOLD_FLOAT(op, a, b)                                                                                           \
    ((op) == GPUBRIDGE_PRODUCT ? (a) * (b)                                                                             \
     : (op) == GPUBRIDGE_MIN   ? (isnan(a) || isnan(b) ? (a) + (b)                                                     \
                                  : (b) < (a)          ? (b)                                                           \
                                                       : (a))                                                                   \
     : (op) == GPUBRIDGE_MAX   ? (isnan(a) || isnan(b) ? (a) + (b)                                                     \
                                  : (b) > (a)          ? (b)                                                           \
                                                       : (a))                                                                   \
                               : (a) + (b))

static uint64_t fold_int(int dtype, int op, uint64_t a, uint64_t b)
{
    int less = is_signed(dtype) ? (int64_t)b < (int64_t)a : b < a;
    int more = is_signed(dtype) ? (int64_t)b > (int64_t)a : b > a;
    uint64_t r = a + b;
    if (op == GPUBRIDGE_PRODUCT) r = a * b;
    if (op == GPUBRIDGE_MIN) r = less ? b : a;
    if (op == GPUBRIDGE_MAX) r = more ? b : a;
    if (op == GPUBRIDGE_BAND) r = a & b;
    if (op == GPUBRIDGE_BOR) r = a | b;
    if (op == GPUBRIDGE_BXOR) r = a ^ b;
    unsigned char wrapped[8]; /* modular in the type itself */
    memcpy(wrapped, &r, 8);
    return load(dtype, wrapped).i;
}

static struct acc fold(int dtype, int op, struct acc a, struct acc b)
{
    struct acc r = {0};
    if (dtype == GPUBRIDGE_BOOL) {
        int is_and = op == GPUBRIDGE_PRODUCT || op == GPUBRIDGE_MIN || op == GPUBRIDGE_BAND;
        r.i = is_and ? a.i && b.i : op == GPUBRIDGE_BXOR ? a.i != b.i : a.i || b.i;
    } else if (is_double(dtype)) {
        r.d = FOLD_FLOAT(op, a.d, b.d);
    } else if (is_float(dtype)) {
        r.f = FOLD_FLOAT(op, a.f, b.f);
    } else {
        r.i = fold_int(dtype, op, a.i, b.i);
    }
    return r;
}

static struct acc mean(int dtype, struct acc a, uint32_t n)
{
    if (is_double(dtype))
        a.d /= (double)n;
    else if (is_float(dtype))
        a.f /= (float)n;
    else if (is_signed(dtype))
        a.i = (uint64_t)((int64_t)a.i / (int64_t)n);
    else
        a.i /= n;
    return a;
}

/* Element parts [first, first + count) of all inputs, folded: each island in local order, then the islands in order. */
static void reduce(const struct sim_op *op, uint64_t first, uint64_t count, unsigned char *out)
{
    const struct gb_topo *t = op->group->topo;
    int dtype = op->spec.dtype, rop = op->spec.reduce_op;
    size_t bytes = part_bytes(dtype);
    for (uint64_t e = 0; e < count; e++) {
        struct acc total = {0};
        for (uint32_t i = 0; i < t->nislands; i++) {
            struct acc partial = {0};
            for (uint32_t m = t->island_first[i]; m < t->island_first[i + 1]; m++) {
                struct acc x = load(dtype, op->inst[t->members[m]].input + (first + e) * bytes);
                if (rop == GPUBRIDGE_PREMUL_SUM) {
                    x.d *= op->factor;
                    x.f *= (float)op->factor;
                }
                partial = m == t->island_first[i] ? x : fold(dtype, rop, partial, x);
            }
            total = i == 0 ? partial : fold(dtype, rop, total, partial);
        }
        if (rop == GPUBRIDGE_AVG) total = mean(dtype, total, t->nranks);
        store(dtype, total, out + e * bytes);
    }
}

/* An element as it enters a fold. */
static struct acc read_input(const struct sim_op *op, uint32_t rank, uint64_t e)
{
    int dtype = op->spec.dtype;
    struct acc x = load(dtype, op->inst[rank].input + e * part_bytes(dtype));
    if (op->spec.reduce_op == GPUBRIDGE_PREMUL_SUM) {
        x.d *= op->factor;
        x.f *= (float)op->factor;
    }
    return x;
}

/* Island i's partial of `count` elements as it is encoded, with its residual where it has one; float accumulators. */
static void partial_of(const struct sim_op *op, uint32_t i, uint64_t first, uint64_t count, float *partial)
{
    const struct gb_topo *t = op->group->topo;
    const uint32_t *member = t->members + t->island_first[i];
    for (uint64_t e = 0; e < count; e++) {
        struct acc sum = read_input(op, member[0], first + e);
        for (uint32_t m = 1; m < t->island_first[i + 1] - t->island_first[i]; m++)
            sum = fold(op->spec.dtype, op->spec.reduce_op, sum, read_input(op, member[m], first + e));
        partial[e] = op->feedback[i] ? sum.f + op->inst[member[0]].residual[first + e] : sum.f;
    }
}

/* The sum of the islands' partials, each what is left of it after it crossed. */
static void total_of(const struct sim_op *op, int codec, uint64_t first, uint64_t count, float *total)
{
    float *partial = calloc(count + 1, sizeof *partial);
    for (uint32_t i = 0; i < op->group->topo->nislands; i++) {
        partial_of(op, i, first, count, partial);
        ref_quantise(codec, partial, count);
        for (uint64_t e = 0; e < count; e++) total[e] = i == 0 ? partial[e] : total[e] + partial[e];
    }
    free(partial);
}

/* The same with a codec between islands: a partial is what is left of it after it crossed, on all ranks alike, and with
 * three or more islands so is the result of an ALL_REDUCE. */
static void reduce_encoded(const struct sim_op *op, int codec, uint64_t first, uint64_t count, unsigned char *out)
{
    const struct gb_topo *t = op->group->topo;
    int dtype = op->spec.dtype, rop = op->spec.reduce_op;
    float *total = calloc(count + 1, sizeof *total);
    total_of(op, codec, first, count, total);
    if (rop == GPUBRIDGE_AVG)
        for (uint64_t e = 0; e < count; e++) total[e] /= (float)t->nranks;
    if (op->spec.op == GPUBRIDGE_ALL_REDUCE && t->nislands > 2) ref_quantise(codec, total, count);
    for (uint64_t e = 0; e < count; e++) store(dtype, (struct acc){.f = total[e]}, out + e * part_bytes(dtype));
    free(total);
}

static void reduce_some(const struct sim_op *op, uint64_t first, uint64_t count, unsigned char *out)
{
    int codec = op->inst[0].plan->codec;
    if (codec)
        reduce_encoded(op, codec, first, count, out);
    else
        reduce(op, first, count, out);
}

/* A block as every rank has it after it was spread. */
static void spread(const struct sim_op *op, uint32_t from, uint64_t count, unsigned char *out)
{
    int codec = op->inst[0].plan->codec, dtype = op->spec.dtype;
    memcpy(out, op->inst[from].input, count * gb_dtype_bytes(dtype));
    if (codec == REF_NONE) return;
    float *x = calloc(count + 1, sizeof *x);
    for (uint64_t e = 0; e < count; e++) x[e] = load(dtype, out + e * part_bytes(dtype)).f;
    ref_quantise(codec, x, count);
    for (uint64_t e = 0; e < count; e++) store(dtype, (struct acc){.f = x[e]}, out + e * part_bytes(dtype));
    free(x);
}

static uint64_t block(const struct sim_op *op, uint32_t r)
{
    return op->spec.counts ? op->spec.counts[r] : op->spec.count;
}

static uint64_t row(const struct sim_op *op, uint32_t from, uint32_t to)
{
    return op->is_uneven ? op->rows[from * op->group->nranks + to] : op->spec.count;
}

static void all_to_all(const struct sim_op *op, uint32_t rank, unsigned char *out)
{
    size_t es = gb_dtype_bytes(op->spec.dtype);
    for (uint32_t from = 0; from < op->group->nranks; from++) {
        uint64_t skip = 0, n = row(op, from, rank);
        for (uint32_t to = 0; to < rank; to++) skip += row(op, from, to);
        if (n > 0) memcpy(out, op->inst[from].input + skip * es, n * es);
        out += n * es;
    }
}

void sim_reference(const struct sim_op *op, uint32_t rank, unsigned char *out)
{
    const struct gb_plan_spec *s = &op->spec;
    size_t es = gb_dtype_bytes(s->dtype);
    uint64_t parts = es / part_bytes(s->dtype), before = 0, bytes = s->count * es;
    for (uint32_t r = 0; r < rank; r++) before += block(op, r);
    switch (s->op) {
    case GPUBRIDGE_ALL_REDUCE:
        reduce_some(op, 0, s->count * parts, out);
        break;
    case GPUBRIDGE_REDUCE:
        if (rank == s->root) reduce_some(op, 0, s->count * parts, out);
        break;
    case GPUBRIDGE_REDUCE_SCATTER:
        reduce_some(op, before * parts, block(op, rank) * parts, out);
        break;
    case GPUBRIDGE_BROADCAST:
        spread(op, s->root, s->count, out);
        break;
    case GPUBRIDGE_SCATTER:
        memcpy(out, op->inst[s->root].input + rank * bytes, bytes);
        break;
    case GPUBRIDGE_ALL_TO_ALL:
        all_to_all(op, rank, out);
        break;
    case GPUBRIDGE_GATHER:
        if (rank != s->root) break; /* fall through */
    case GPUBRIDGE_ALL_GATHER:
        for (uint32_t r = 0; r < op->group->nranks; r++) {
            spread(op, r, block(op, r), out);
            out += block(op, r) * es;
        }
        break;
    default:
        break;
    }
}

static int is_same(float a, float b)
{
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

/* What the second encoding of an ALL_REDUCE's result loses, as it counts in the sum; NULL where there is none. */
static void lost_again(const struct sim_op *op, uint64_t first, uint64_t count, float *sum, float *left)
{
    int codec = op->inst[0].plan->codec;
    float ranks = op->spec.reduce_op == GPUBRIDGE_AVG ? (float)op->group->nranks : 1;
    total_of(op, codec, first, count, sum);
    for (uint64_t e = 0; e < count; e++) left[e] = sum[e] / ranks;
    ref_quantise(codec, left, count);
    for (uint64_t e = 0; e < count; e++) left[e] = sum[e] + left[e] * -ranks;
}

/* What encoding elements [first, first + count) loses is on one rank of island i, the residual is as it was elsewhere.
 * `again` (or NULL): what the second encoding loses, which one island has to add; tellers[e] counts those that may
 * have.
 */
static int check_lost(struct sim_world *w, const struct sim_op *op, uint32_t i, uint64_t first, uint64_t count,
                      const float *again, uint8_t *tellers)
{
    const struct gb_topo *t = op->group->topo;
    int codec = op->inst[0].plan->codec, rc = 0;
    float *partial = calloc(count + 1, sizeof *partial), *kept = calloc(count + 1, sizeof *kept);
    partial_of(op, i, first, count, partial);
    memcpy(kept, partial, count * sizeof *kept);
    if (codec) ref_quantise(codec, kept, count);
    for (uint64_t e = 0; e < count && !rc; e++) {
        uint32_t changed = 0, m;
        float lost = -(kept[e] - partial[e]), more = again ? again[e] + lost : lost, old = 0, now, renewed = 0;
        for (m = t->island_first[i]; m < t->island_first[i + 1]; m++) {
            const struct sim_inst *in = op->inst + t->members[m];
            now = ((const float *)(const void *)in->buf[GB_BUF_RESIDUAL])[first + e];
            old = in->residual[first + e];
            if (!is_same(now, old)) changed++, renewed = now;
        }
        if (changed == 0) renewed = old; /* what was lost may be just what it was before */
        if (changed > 1 || (codec ? !is_same(renewed, lost) && !is_same(renewed, more) : changed > 0))
            rc = sim_fail(w, "op %u: residual %llu of island %u was changed by %u ranks, to %a", op->index,
                          (unsigned long long)(first + e), i, changed, (double)renewed);
        /* Where both are the same number, nobody can say whether it was added. */
        if (!again) continue;
        if (is_same(more, lost))
            tellers[e] |= 2;
        else if (is_same(renewed, more))
            tellers[e] = (uint8_t)(tellers[e] + 4);
    }
    free(partial);
    free(kept);
    return rc;
}

/* An ALL_REDUCE of three or more islands: one of them, if it has a residual, has the second loss too. */
static int check_lost_twice(struct sim_world *w, const struct sim_op *op)
{
    const uint64_t count = op->spec.count;
    const uint32_t nislands = op->group->topo->nislands;
    float *sum = calloc(count + 1, sizeof *sum), *again = calloc(count + 1, sizeof *again);
    uint8_t *tellers = calloc(count + 1, 1);
    int rc = 0, all = 1;
    lost_again(op, 0, count, sum, again);
    for (uint32_t i = 0; i < nislands && !rc; i++) {
        all &= op->feedback[i];
        if (op->feedback[i]) rc = check_lost(w, op, i, 0, count, again, tellers);
    }
    for (uint64_t e = 0; e < count && !rc; e++) {
        uint32_t added = tellers[e] / 4, unclear = tellers[e] & 2;
        if (added > 1 || (all && added == 0 && !unclear))
            rc = sim_fail(w, "op %u: the second loss of element %llu was added by %u islands", op->index,
                          (unsigned long long)e, added);
    }
    free(sum);
    free(again);
    free(tellers);
    return rc;
}

int sim_check_residuals(struct sim_world *w, const struct sim_op *op)
{
    int scatters = op->spec.op == GPUBRIDGE_REDUCE_SCATTER;
    uint32_t nblocks = scatters ? op->group->nranks : 1;
    const int encodes_twice = op->spec.op == GPUBRIDGE_ALL_REDUCE && op->group->topo->nislands > 2;
    if (op->inst[0].plan->codec && encodes_twice) return check_lost_twice(w, op);
    for (uint32_t i = 0; i < op->group->topo->nislands; i++) {
        uint64_t at = 0, n;
        for (uint32_t d = 0; d < nblocks && op->feedback[i]; d++, at += n) {
            n = scatters ? block(op, d) : op->spec.count;
            if (check_lost(w, op, i, at, n, NULL, NULL)) return -1;
        }
    }
    return 0;
}

/* Values whose sums depend on the order; now and then what breaks naive code. */
static float some_float(struct sim_rng *rng, int specials)
{
    static const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, -0.0f, 0.0f, 65504.0f, 1e-40f, -6e-8f, 3e38f};
    uint64_t u = sim_next(rng);
    if (specials && u % 16 == 0) return odd[(u >> 32) % (sizeof odd / sizeof *odd)];
    return ldexpf((float)(int32_t)(u >> 32) / 2147483648.0f, (int)(u % 9) - 4);
}

void sim_fill(struct sim_rng *rng, int dtype, int specials, void *data, uint64_t count)
{
    unsigned char *p = data;
    size_t bytes = part_bytes(dtype);
    count *= gb_dtype_bytes(dtype) / bytes;
    for (uint64_t i = 0; i < count; i++, p += bytes) {
        if (dtype == GPUBRIDGE_F16) {
            half h = (half)some_float(rng, specials);
            memcpy(p, &h, 2);
        } else if (dtype == GPUBRIDGE_BF16) {
            float f = some_float(rng, specials);
            memcpy(p, (unsigned char *)&f + 2, 2);
        } else if (is_double(dtype)) {
            double d = (double)some_float(rng, specials) * (1 + ldexp((double)(sim_next(rng) >> 40), -50));
            memcpy(p, &d, 8);
        } else if (is_float(dtype)) {
            float f = some_float(rng, specials);
            memcpy(p, &f, 4);
        } else {
            uint64_t u = sim_next(rng);
            memcpy(p, &u, bytes);
        }
        if (dtype == GPUBRIDGE_BOOL && sim_below(rng, 2)) *p = 0;
    }
}
