/* SPDX-License-Identifier: Apache-2.0
 * The reference of reference.h: one element at a time.  Any thread. */
#include "reference.h"

#include <math.h>
#include <string.h>

enum family { OPAQUE, SIGNED, UNSIGNED, TRUTH, FLOAT32, FLOAT64 };

/* `exponent`, `mantissa`: bits of the format, for the inputs.  `parts`: 2 for complex. */
static const struct {
    const char *name;
    enum family family;
    int bytes, exponent, mantissa, parts;
} dtypes[GPUBRIDGE_DTYPE_COUNT] = {
    [GPUBRIDGE_I8] = {"i8", SIGNED, 1, 0, 0, 1},      [GPUBRIDGE_U8] = {"u8", UNSIGNED, 1, 0, 0, 1},
    [GPUBRIDGE_I16] = {"i16", SIGNED, 2, 0, 0, 1},    [GPUBRIDGE_I32] = {"i32", SIGNED, 4, 0, 0, 1},
    [GPUBRIDGE_I64] = {"i64", SIGNED, 8, 0, 0, 1},    [GPUBRIDGE_F16] = {"f16", FLOAT32, 2, 5, 10, 1},
    [GPUBRIDGE_BF16] = {"bf16", FLOAT32, 2, 8, 7, 1}, [GPUBRIDGE_F32] = {"f32", FLOAT32, 4, 8, 23, 1},
    [GPUBRIDGE_F64] = {"f64", FLOAT64, 8, 11, 52, 1}, [GPUBRIDGE_BOOL] = {"bool", TRUTH, 1, 0, 0, 1},
    [GPUBRIDGE_C64] = {"c64", FLOAT32, 4, 8, 23, 2},  [GPUBRIDGE_C128] = {"c128", FLOAT64, 8, 11, 52, 2},
    [GPUBRIDGE_U16] = {"u16", UNSIGNED, 2, 0, 0, 1},  [GPUBRIDGE_U32] = {"u32", UNSIGNED, 4, 0, 0, 1},
    [GPUBRIDGE_U64] = {"u64", UNSIGNED, 8, 0, 0, 1},  [GPUBRIDGE_BYTE] = {"byte", OPAQUE, 1, 0, 0, 1},
};

static const char *const op_names[GPUBRIDGE_REDUCE_OP_COUNT] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                                                "BAND", "BOR", "BXOR",    "PREMUL_SUM"};

size_t ref_dtype_bytes(int dtype)
{
    return (size_t)dtypes[dtype].bytes * (size_t)dtypes[dtype].parts;
}

const char *ref_dtype_name(int dtype)
{
    return dtypes[dtype].name;
}

const char *ref_op_name(int op)
{
    return op_names[op];
}

int ref_supported(int dtype, int op)
{
    enum family family = dtypes[dtype].family;
    int bitwise = op == GPUBRIDGE_BAND || op == GPUBRIDGE_BOR || op == GPUBRIDGE_BXOR;
    int is_float = family == FLOAT32 || family == FLOAT64;
    if (family == OPAQUE) return 0;
    if (dtypes[dtype].parts == 2) return op == GPUBRIDGE_SUM || op == GPUBRIDGE_AVG || op == GPUBRIDGE_PREMUL_SUM;
    if (op == GPUBRIDGE_PREMUL_SUM) return is_float;
    if (op == GPUBRIDGE_AVG) return family != TRUTH;
    return !bitwise || !is_float;
}

/* ---- inputs ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Bits of a float of the format; about one in ten is special. */
static uint64_t float_bits(uint64_t h, int exponent, int mantissa)
{
    uint64_t fraction = (h >> 12) & ((1ull << mantissa) - 1), top = (1ull << exponent) - 1, bias = top >> 1;
    uint64_t e = bias - 6 + (h >> 6 & 63) % 13; /* near one: additions round */
    switch (h & 63) {
    case 0: /* NaN, any payload, quiet or signalling */
        e = top;
        fraction |= 1;
        break;
    case 1:
        e = top, fraction = 0;
        break;
    case 2:
        e = 0, fraction = 0;
        break;
    case 3:
        e = 0; /* denormal */
        break;
    case 4:
    case 5: /* among the largest: sums overflow */
        e = top - 1;
        break;
    case 6:
        e = 1; /* among the smallest normal: products and means fall among the denormals */
        break;
    default:
        break;
    }
    return (h >> 5 & 1) << (exponent + mantissa) | e << mantissa | fraction;
}

static uint64_t input_bits(int dtype, uint64_t h)
{
    if (dtypes[dtype].exponent) return float_bits(h, dtypes[dtype].exponent, dtypes[dtype].mantissa);
    if (dtypes[dtype].family == TRUTH) return h & 1 ? 1 + (h >> 8) % 255 : 0; /* any byte but 0 is true */
    return h;
}

void ref_input(int dtype, uint64_t seed, int rank, uint64_t first, uint64_t count, void *out)
{
    size_t bytes = (size_t)dtypes[dtype].bytes;
    uint64_t parts = (uint64_t)dtypes[dtype].parts, salt = mix(seed * 64 + (uint64_t)rank + 1);
    for (uint64_t i = 0; i < count * parts; i++) {
        uint64_t bits = input_bits(dtype, mix(salt + 0x9e3779b97f4a7c15u * (first * parts + i + 1)));
        memcpy((char *)out + i * bytes, &bits, bytes); /* little-endian */
    }
}

/* ---- storage ---- */

static uint64_t load_bits(int dtype, const void *from, uint64_t i)
{
    uint64_t bits = 0;
    memcpy(&bits, (const char *)from + i * (uint64_t)dtypes[dtype].bytes, (size_t)dtypes[dtype].bytes);
    return bits;
}

static void store_bits(int dtype, void *to, uint64_t i, uint64_t bits)
{
    memcpy((char *)to + i * (uint64_t)dtypes[dtype].bytes, &bits, (size_t)dtypes[dtype].bytes);
}

static float load_float(int dtype, const void *from, uint64_t i)
{
    uint32_t bits = (uint32_t)load_bits(dtype, from, i);
    float value;
    if (dtypes[dtype].mantissa == 10) {
        __extension__ _Float16 half;
        uint16_t half_bits = (uint16_t)bits;
        memcpy(&half, &half_bits, sizeof half);
        return (float)half;
    }
    if (dtypes[dtype].mantissa == 7) bits <<= 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The two neighbours of `value` in bf16, and the rule: the nearer, at equal distance the even one. */
static uint16_t bf16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t below = bits >> 16, rest = bits & 0xffff;
    if (isinf(value)) return (uint16_t)below;
    if (rest > 0x8000 || (rest == 0x8000 && (below & 1))) below++; /* may carry into infinity, as it must */
    return (uint16_t)below;
}

static void store_float(int dtype, void *to, uint64_t i, float value)
{
    uint32_t bits;
    if (dtypes[dtype].mantissa == 10) {
        __extension__ _Float16 half = (_Float16)value;
        uint16_t half_bits;
        memcpy(&half_bits, &half, sizeof half_bits);
        bits = isnan(value) ? 0x7e00 : half_bits;
    } else if (dtypes[dtype].mantissa == 7) {
        bits = isnan(value) ? 0x7fc0 : bf16_of(value);
    } else {
        memcpy(&bits, &value, sizeof bits);
        if (isnan(value)) bits = 0x7fc00000;
    }
    store_bits(dtype, to, i, bits);
}

static double load_double(int dtype, const void *from, uint64_t i)
{
    if (dtypes[dtype].family == FLOAT32) return (double)load_float(dtype, from, i);
    uint64_t bits = load_bits(dtype, from, i);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void store_double(int dtype, void *to, uint64_t i, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    store_bits(dtype, to, i, isnan(value) ? 0x7ff8000000000000u : bits);
}

static int64_t load_int(int dtype, const void *from, uint64_t i)
{
    uint64_t bits = load_bits(dtype, from, i);
    int unused = 64 - 8 * dtypes[dtype].bytes;
    if (dtypes[dtype].family == TRUTH) return bits != 0;
    return dtypes[dtype].family == SIGNED ? (int64_t)(bits << unused) >> unused : (int64_t)bits;
}

/* ---- folds: each by the rules of its accumulator ---- */

static float fold_float(int op, float a, float b)
{
    switch (op) {
    case GPUBRIDGE_PRODUCT:
        return a * b;
    case GPUBRIDGE_MIN:
        return isnan(a) || isnan(b) ? NAN : b < a ? b : a;
    case GPUBRIDGE_MAX:
        return isnan(a) || isnan(b) ? NAN : b > a ? b : a;
    default:
        return a + b;
    }
}

static double fold_double(int op, double a, double b)
{
    switch (op) {
    case GPUBRIDGE_PRODUCT:
        return a * b;
    case GPUBRIDGE_MIN:
        return isnan(a) || isnan(b) ? (double)NAN : b < a ? b : a;
    case GPUBRIDGE_MAX:
        return isnan(a) || isnan(b) ? (double)NAN : b > a ? b : a;
    default:
        return a + b;
    }
}

/* On 64 bits: sums, products and logic are the same modulo 2^64 and then modulo 2^bits; order needs the narrow value.
 */
static int64_t fold_int(int dtype, int op, int64_t a, int64_t b)
{
    int less = dtypes[dtype].family == SIGNED ? b < a : (uint64_t)b < (uint64_t)a;
    int truth = dtypes[dtype].family == TRUTH;
    switch (op) {
    case GPUBRIDGE_PRODUCT:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    case GPUBRIDGE_MIN:
        return less ? b : a;
    case GPUBRIDGE_MAX:
        return less || a == b ? a : b;
    case GPUBRIDGE_BAND:
        return a & b;
    case GPUBRIDGE_BOR:
        return a | b;
    case GPUBRIDGE_BXOR:
        return a ^ b;
    default:
        return truth ? a | b : (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

static int64_t narrow(int dtype, int64_t value)
{
    unsigned char memory[8];
    store_bits(dtype, memory, 0, (uint64_t)value);
    return load_int(dtype, memory, 0);
}

static int64_t mean_int(int dtype, int64_t sum, int size)
{
    if (dtypes[dtype].family == SIGNED) return narrow(dtype, sum) / size;
    return (int64_t)((uint64_t)narrow(dtype, sum) / (uint64_t)size);
}

/* Ranks in the order of folding; starts[k]: rank order[k] begins a new island. */
struct order {
    int rank[REF_MAX_RANKS], starts[REF_MAX_RANKS];
};

static void order_of(const struct ref_layout *layout, struct order *order)
{
    int n = 0, done[REF_MAX_RANKS] = {0};
    for (int first = 0; first < layout->size; first++) {
        for (int r = first; r < layout->size && !done[first]; r++) {
            if (strcmp(layout->islands[r], layout->islands[first]) != 0) continue;
            order->starts[n] = r == first;
            order->rank[n++] = r;
        }
        for (int r = first; r < layout->size; r++)
            if (strcmp(layout->islands[r], layout->islands[first]) == 0) done[r] = 1;
    }
}

/* One element: `TYPE` total over islands of the fold of a partial over members. */
#define REDUCE_ELEMENT(TYPE, LOAD, FOLD)                                                                               \
    TYPE total = 0, partial = 0;                                                                                       \
    for (int k = 0, islands = 0; k < layout->size; k++) {                                                              \
        TYPE x = (LOAD);                                                                                               \
        partial = order.starts[k] ? x : FOLD(partial, x);                                                              \
        if (k + 1 < layout->size && !order.starts[k + 1]) continue;                                                    \
        total = islands++ ? FOLD(total, partial) : partial;                                                            \
    }

void ref_reduce(const struct ref_layout *layout, int dtype, int op, double factor, const void *const *inputs,
                uint64_t count, void *out)
{
    struct order order;
    order_of(layout, &order);
    const enum family family = dtypes[dtype].family;
    const int premul = op == GPUBRIDGE_PREMUL_SUM;
    for (uint64_t i = 0; i < count * (uint64_t)dtypes[dtype].parts; i++) {
        if (family == FLOAT32) {
#define LOAD_FLOAT       load_float(dtype, inputs[order.rank[k]], i) * (premul ? (float)factor : 1.0f)
#define FOLD_FLOAT(a, b) fold_float(op, a, b)
            REDUCE_ELEMENT(float, LOAD_FLOAT, FOLD_FLOAT)
            store_float(dtype, out, i, op == GPUBRIDGE_AVG ? total / (float)layout->size : total);
        } else if (family == FLOAT64) {
#define LOAD_DOUBLE       load_double(dtype, inputs[order.rank[k]], i) * (premul ? factor : 1.0)
#define FOLD_DOUBLE(a, b) fold_double(op, a, b)
            REDUCE_ELEMENT(double, LOAD_DOUBLE, FOLD_DOUBLE)
            store_double(dtype, out, i, op == GPUBRIDGE_AVG ? total / (double)layout->size : total);
        } else {
#define LOAD_INT       load_int(dtype, inputs[order.rank[k]], i)
#define FOLD_INT(a, b) narrow(dtype, fold_int(dtype, op, a, b))
            REDUCE_ELEMENT(int64_t, LOAD_INT, FOLD_INT)
            store_bits(dtype, out, i, (uint64_t)(op == GPUBRIDGE_AVG ? mean_int(dtype, total, layout->size) : total));
        }
    }
}

double ref_distance(const struct ref_layout *layout, int dtype, const void *const *inputs, uint64_t count,
                    const void *got)
{
    double worst = 0;
    if (!dtypes[dtype].exponent) return 0;
    for (uint64_t i = 0; i < count * (uint64_t)dtypes[dtype].parts; i++) {
        double sum = 0, size = 0, value = load_double(dtype, got, i);
        for (int r = 0; r < layout->size; r++) {
            double x = load_double(dtype, inputs[r], i);
            sum += x;
            size += fabs(x);
        }
        if (isfinite(value) && isfinite(size) && size > 0 && fabs(value - sum) / size > worst)
            worst = fabs(value - sum) / size;
    }
    return worst;
}
