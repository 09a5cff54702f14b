/* SPDX-License-Identifier: Apache-2.0
 * gb_reduce_host and the kernel twin against a reference that shares no code with them: every step is done in a type
 * wide enough for the rounding to be exact (float through double, double through quad, integers through 128 bits). */
#include "codec/reduce.h"

#include "reduce_twin.h"

#include <gpubridge/gpubridge.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above first */
#include <cmocka.h>

__extension__ typedef __int128 int128;
__extension__ typedef unsigned __int128 uint128;
#ifdef __x86_64__
__extension__ typedef __float128 quad;
#else
typedef long double quad;
#endif

static uint64_t rng_state = 0x9e3779b97f4a7c15u;

static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state;
}

/* ---- reference: values as double (16-bit and f32 types), double, or 128-bit integers ---- */

/* Value of a float format with `e` exponent and `m` mantissa bits. */
static double small_value(unsigned bits, int e, int m)
{
    int bias = (1 << (e - 1)) - 1, expo = (int)(bits >> m) & ((1 << e) - 1);
    double frac = (double)(bits & ((1u << m) - 1)), sign = bits >> (e + m) & 1 ? -1.0 : 1.0;
    if (expo == (1 << e) - 1) return frac != 0.0 ? NAN : sign * INFINITY;
    if (expo == 0) return sign * ldexp(frac, 1 - bias - m);
    return sign * ldexp(1.0 + ldexp(frac, -m), expo - bias);
}

/* Nearest-even bits of `x`, which must be exact in double. */
static unsigned small_bits(double x, int e, int m)
{
    int bias = (1 << (e - 1)) - 1, expo;
    unsigned sign = signbit(x) ? 1u << (e + m) : 0, inf = ((1u << e) - 1) << m;
    if (isnan(x)) return inf | 1u << (m - 1);
    x = fabs(x);
    if (isinf(x)) return sign | inf;
    if (x == 0.0) return sign;
    (void)frexp(x, &expo);
    expo = expo - 1 < 1 - bias ? 1 - bias : expo - 1;
    double units = nearbyint(ldexp(x, m - expo)); /* in the default rounding: ties to even */
    unsigned bits = (unsigned)(expo + bias - 1) * (1u << m) + (unsigned)units;
    return sign | (bits >= inf ? inf : bits);
}

static float canon_f(float x)
{
    uint32_t nan_bits = 0x7fc00000u;
    if (isnan(x)) memcpy(&x, &nan_bits, 4);
    return x;
}

static double canon_d(double x)
{
    uint64_t nan_bits = 0x7ff8000000000000u;
    if (isnan(x)) memcpy(&x, &nan_bits, 8);
    return x;
}

static int is_float(int dtype)
{
    return dtype == GPUBRIDGE_F16 || dtype == GPUBRIDGE_BF16 || dtype == GPUBRIDGE_F32 || dtype == GPUBRIDGE_C64;
}

static int is_double(int dtype)
{
    return dtype == GPUBRIDGE_F64 || dtype == GPUBRIDGE_C128;
}

static int is_signed(int dtype)
{
    return dtype == GPUBRIDGE_I8 || dtype == GPUBRIDGE_I16 || dtype == GPUBRIDGE_I32 || dtype == GPUBRIDGE_I64;
}

/* Plain numbers per element: complex types hold two. */
static size_t unit_bytes(int dtype, int partial)
{
    size_t bytes = partial ? gb_acc_bytes(dtype) : gb_dtype_bytes(dtype);
    return dtype == GPUBRIDGE_C64 || dtype == GPUBRIDGE_C128 ? bytes / 2 : bytes;
}

static float ref_get_f(const void *p, size_t i, int dtype, int partial)
{
    uint16_t h;
    float f;
    if (!partial && (dtype == GPUBRIDGE_F16 || dtype == GPUBRIDGE_BF16)) {
        memcpy(&h, (const char *)p + 2 * i, 2);
        return (float)(dtype == GPUBRIDGE_F16 ? small_value(h, 5, 10) : small_value(h, 8, 7));
    }
    memcpy(&f, (const char *)p + 4 * i, 4);
    return f;
}

static double ref_op_d(int op, double a, double b)
{
    if (op == GPUBRIDGE_MIN || op == GPUBRIDGE_MAX) {
        if (isnan(a) || isnan(b)) return NAN;
        return op == GPUBRIDGE_MIN ? (b < a ? b : a) : (b > a ? b : a);
    }
    return op == GPUBRIDGE_PRODUCT ? (double)((quad)a * (quad)b) : (double)((quad)a + (quad)b);
}

static float ref_op_f(int op, float a, float b)
{
    if (op == GPUBRIDGE_MIN || op == GPUBRIDGE_MAX) return (float)ref_op_d(op, a, b);
    return op == GPUBRIDGE_PRODUCT ? (float)((double)a * (double)b) : (float)((double)a + (double)b);
}

static int128 ref_wrap(int128 x, int dtype)
{
    int bits = 8 * (int)gb_dtype_bytes(dtype);
    int128 span = (int128)1 << bits;
    x %= span;
    if (x < 0) x += span;
    return is_signed(dtype) && x >= span / 2 ? x - span : x;
}

static int128 ref_get_i(const void *p, size_t i, int dtype)
{
    uint64_t x = 0;
    memcpy(&x, (const char *)p + i * gb_dtype_bytes(dtype), gb_dtype_bytes(dtype)); /* little endian */
    if (dtype == GPUBRIDGE_BOOL) return x != 0;
    return ref_wrap((int128)x, dtype);
}

static int128 ref_op_i(int op, int dtype, int128 a, int128 b)
{
    if (dtype == GPUBRIDGE_BOOL) {
        if (op == GPUBRIDGE_SUM || op == GPUBRIDGE_MAX || op == GPUBRIDGE_BOR) return a || b;
        return op == GPUBRIDGE_BXOR ? a != b : (a && b);
    }
    switch (op) {
    case GPUBRIDGE_PRODUCT:
        return ref_wrap((int128)((uint128)a * (uint128)b), dtype);
    case GPUBRIDGE_MIN:
        return b < a ? b : a;
    case GPUBRIDGE_MAX:
        return b > a ? b : a;
    case GPUBRIDGE_BAND:
        return ref_wrap(a & b, dtype);
    case GPUBRIDGE_BOR:
        return ref_wrap(a | b, dtype);
    case GPUBRIDGE_BXOR:
        return ref_wrap(a ^ b, dtype);
    default:
        return ref_wrap(a + b, dtype);
    }
}

static void ref_unit(const struct gb_reduce_args *a, size_t i)
{
    const int mean = a->op == GPUBRIDGE_AVG && (a->flags & GB_REDUCE_FINAL), dtype = a->dtype;
    float f = 0;
    double d = 0;
    int128 n = 0;
    for (unsigned k = 0; k < a->nsrc; k++) {
        const int scale = a->premul_mask >> k & 1;
        if (is_float(dtype)) {
            float x = ref_get_f(a->src[k], i, dtype, a->acc_mask >> k & 1);
            if (scale) x = (float)((double)x * (double)(float)a->factor);
            f = k ? ref_op_f(a->op, f, x) : x;
        } else if (is_double(dtype)) {
            double x;
            memcpy(&x, (const char *)a->src[k] + 8 * i, 8);
            if (scale) x = (double)((quad)x * (quad)a->factor);
            d = k ? ref_op_d(a->op, d, x) : x;
        } else {
            int128 x = ref_get_i(a->src[k], i, dtype);
            n = k ? ref_op_i(a->op, dtype, n, x) : x;
        }
    }
    size_t bytes = unit_bytes(dtype, a->dst_is_acc);
    char *dst = (char *)a->dst + i * bytes;
    if (is_float(dtype)) {
        if (mean) f = (float)((double)f / (double)a->divisor);
        f = canon_f(f);
        uint16_t h = (uint16_t)(dtype == GPUBRIDGE_F16 ? small_bits(f, 5, 10) : small_bits(f, 8, 7));
        memcpy(dst, bytes == 2 ? (void *)&h : (void *)&f, bytes);
    } else if (is_double(dtype)) {
        if (mean) d = (double)((quad)d / (quad)a->divisor);
        d = canon_d(d);
        memcpy(dst, &d, bytes);
    } else {
        if (mean) n /= (int128)a->divisor; /* C truncates toward zero */
        uint64_t x = (uint64_t)n;
        memcpy(dst, &x, bytes);
    }
}

/* ---- inputs ---- */

static const uint16_t f16_specials[] = {0,      0x8000, 1,      0x8001, 0x3ff,  0x400,  0x7bff, 0xfbff,
                                        0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01, 0x3c00, 0xbc00, 0x3c01};
static const uint16_t bf16_specials[] = {0,      0x8000, 1,      0x8001, 0x7f,   0x80,   0x7f7f, 0xff7f,
                                         0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81, 0x3f80, 0x4380, 0x3f81};
static const uint32_t f32_specials[] = {0,          0x80000000, 1,          0x80000001, 0x7fffff,   0x800000,
                                        0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345,
                                        0x7f800001, 0x3f800000, 0x477ff000, 0x33000000};
static const uint64_t f64_specials[] = {0,
                                        0x8000000000000000,
                                        1,
                                        0x000fffffffffffff,
                                        0x0010000000000000,
                                        0x7fefffffffffffff,
                                        0x7ff0000000000000,
                                        0xfff0000000000000,
                                        0x7ff8000000000000,
                                        0xfff0000000000001,
                                        0x3ff0000000000000,
                                        0x4340000000000000,
                                        0x3ca0000000000000,
                                        0xbff0000000000000,
                                        0x7fe0000000000000,
                                        0x3ff0000000000001};

static void fill(void *buf, size_t units, int dtype, int partial)
{
    size_t bytes = unit_bytes(dtype, partial);
    for (size_t i = 0; i < units; i++) {
        uint64_t x = rng(), pick = rng() % 16;
        int special = rng() % 4 == 0;
        if (bytes == 2 && dtype == GPUBRIDGE_F16 && special) x = f16_specials[pick];
        if (bytes == 2 && dtype == GPUBRIDGE_BF16 && special) x = bf16_specials[pick];
        if (bytes == 4 && is_float(dtype) && special) x = f32_specials[pick];
        if (bytes == 4 && is_float(dtype) && !special && rng() % 2) { /* near each other: cancellation and ties */
            float f = (float)((double)(int64_t)(x % 8193) - 4096.0) / 1024.0f;
            memcpy(&x, &f, 4);
        }
        if (bytes == 8 && is_double(dtype) && special) x = f64_specials[pick];
        if (bytes == 1 && dtype == GPUBRIDGE_BOOL) x = rng() % 2 ? x : 0;
        memcpy((char *)buf + i * bytes, &x, bytes);
    }
}

static void compare(const struct gb_reduce_args *args, const void *want, const void *got, size_t bytes, const char *who)
{
    if (memcmp(want, got, bytes) == 0) return;
    size_t at = 0, unit = unit_bytes(args->dtype, args->dst_is_acc);
    while (((const uint8_t *)want)[at] == ((const uint8_t *)got)[at]) at++;
    uint64_t w = 0, g = 0;
    memcpy(&w, (const char *)want + at / unit * unit, unit);
    memcpy(&g, (const char *)got + at / unit * unit, unit);
    fail_msg("%s %s %s nsrc %u acc %x premul %x flags %u dst_is_acc %u: unit %zu is %llx, want %llx", who,
             gb_dtype_name(args->dtype), gb_reduce_op_name(args->op), args->nsrc, args->acc_mask, args->premul_mask,
             args->flags, args->dst_is_acc, at / unit, (unsigned long long)g, (unsigned long long)w);
}

#define MAX_COUNT 2600 /* several blocks and a rest */

/* One random configuration of (dtype, op): the host loops, in place and not, and the kernel twin give the same bytes.
 */
static void check_one(int dtype, int op, uint64_t count, size_t misalign)
{
    static char src[GB_REDUCE_MAX_SRC][MAX_COUNT * 16 + 64], want[MAX_COUNT * 16 + 64], got[MAX_COUNT * 16 + 64];
    struct gb_reduce_args a = {.count = count, .factor = 0.7, .dtype = (uint8_t)dtype, .op = (uint8_t)op};
    a.divisor = 1 + rng() % 9;
    a.nsrc = (uint8_t)(rng() % 8 == 0 ? 1 + rng() % GB_REDUCE_MAX_SRC : 1 + rng() % 3);
    a.dst_is_acc = rng() % 3 == 0;
    a.flags = op == GPUBRIDGE_AVG && rng() % 2 ? GB_REDUCE_FINAL : 0;
    a.acc_mask = rng() % 2 ? 0 : (uint32_t)rng() & 0xffff;
    a.premul_mask = op == GPUBRIDGE_PREMUL_SUM && rng() % 4 ? (uint32_t)rng() & 0xffff & ~a.acc_mask : 0;
    size_t units = (size_t)count * (gb_dtype_bytes(dtype) / unit_bytes(dtype, 0));
    for (unsigned k = 0; k < a.nsrc; k++) {
        a.src[k] = src[k] + misalign;
        fill(src[k] + misalign, units, dtype, a.acc_mask >> k & 1);
    }
    size_t bytes = units * unit_bytes(dtype, a.dst_is_acc);
    memset(want, 0xcc, sizeof want);
    memset(got, 0xcc, sizeof got);
    a.dst = want;
    for (size_t i = 0; i < units; i++) ref_unit(&a, i);
    a.dst = got + misalign;
    gb_reduce_host(&a);
    compare(&a, want, got + misalign, bytes, "host");
    assert_int_equal((uint8_t)got[misalign + bytes], 0xcc);
    memset(got, 0xcc, sizeof got);
    twin_reduce(GB_WAY_ANY, &a, 1 + (unsigned)(rng() % 3), 1 + (unsigned)(rng() % 40));
    compare(&a, want, got + misalign, bytes, "kernel");
    assert_int_equal((uint8_t)got[misalign + bytes], 0xcc);
    unsigned k = (unsigned)(rng() % a.nsrc); /* in place */
    if ((a.acc_mask >> k & 1) == a.dst_is_acc || gb_acc_bytes(dtype) == gb_dtype_bytes(dtype)) {
        a.dst = src[k] + misalign;
        gb_reduce_host(&a);
        compare(&a, want, src[k] + misalign, bytes, "host in place");
    }
}

static void test_every_dtype_and_op(void **state)
{
    (void)state;
    static const uint64_t counts[] = {0, 1, 3, 7, 16, 127, 128, 129, 1000, 1023, 1024, 1025, 2600};
    for (int dtype = 0; dtype < GPUBRIDGE_DTYPE_COUNT; dtype++)
        for (int op = 0; op < GPUBRIDGE_REDUCE_OP_COUNT; op++) {
            if (!gb_reduce_supported(dtype, op)) continue;
            for (unsigned round = 0; round < 40; round++)
                check_one(dtype, op, counts[rng() % 13], rng() % 2 ? 0 : unit_bytes(dtype, 1) * (rng() % 3));
        }
}

static void one_source(void *dst, const void *src, int dtype, int src_is_acc, int dst_is_acc, uint64_t count)
{
    struct gb_reduce_args a = {.dst = dst, .src = {src}, .count = count, .nsrc = 1, .dtype = (uint8_t)dtype};
    a.acc_mask = (uint32_t)src_is_acc;
    a.dst_is_acc = (uint8_t)dst_is_acc;
    gb_reduce_host(&a);
}

/* All 65536 patterns decode to their value, and encode back to themselves but for NaN, which becomes the canonical one.
 */
static void check_all_16_bit(int dtype, int e, int m)
{
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    for (unsigned i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    one_source(wide, all, dtype, 0, 1, 65536);
    one_source(back, wide, dtype, 1, 0, 65536);
    for (unsigned i = 0; i < 65536; i++) {
        float want = canon_f((float)small_value(i, e, m));
        assert_memory_equal(&wide[i], &want, 4);
        assert_int_equal(back[i], isnan(want) ? (((1u << e) - 1) << m | 1u << (m - 1)) : i);
    }
}

static void test_16_bit_patterns(void **state)
{
    (void)state;
    check_all_16_bit(GPUBRIDGE_F16, 5, 10);
    check_all_16_bit(GPUBRIDGE_BF16, 8, 7);
}

/* Floats around every value of the format and every tie between two, and random bit patterns. */
static void check_rounding(int dtype, int e, int m)
{
    enum { N = 65536 * 8 };
    float *in = malloc(N * sizeof *in);
    uint16_t *out = malloc(N * sizeof *out);
    assert_non_null(in);
    assert_non_null(out);
    for (unsigned i = 0; i < N; i++) {
        double a = small_value(i / 8, e, m), b = small_value(i / 8 + 1 < 65536 ? i / 8 + 1 : i / 8, e, m);
        float tie = (float)((a + b) / 2);
        uint32_t bits = (uint32_t)rng();
        memcpy(&in[i], &bits, 4);
        if (i % 8 < 3 && isfinite(tie)) in[i] = i % 8 == 0 ? tie : nextafterf(tie, i % 8 == 1 ? INFINITY : -INFINITY);
    }
    one_source(out, in, dtype, 1, 0, N);
    for (unsigned i = 0; i < N; i++) assert_int_equal(out[i], small_bits(in[i], e, m));
    free(in);
    free(out);
}

static void test_rounding_to_nearest_even(void **state)
{
    (void)state;
    check_rounding(GPUBRIDGE_F16, 5, 10);
    check_rounding(GPUBRIDGE_BF16, 8, 7);
}

static void fold3(int dtype, int op, int flags, int nsrc, const void *a, const void *b, const void *c, void *dst)
{
    struct gb_reduce_args args = {.dst = dst, .src = {a, b, c}, .count = 1, .divisor = (uint64_t)nsrc};
    args.nsrc = (uint8_t)nsrc;
    args.dtype = (uint8_t)dtype;
    args.op = (uint8_t)op;
    args.flags = (uint8_t)flags;
    gb_reduce_host(&args);
}

static void test_known_values(void **state)
{
    (void)state;
    uint16_t big = 0x7bff /* 65504 */, out16 = 0, k60 = 0x7b53 /* 60000 */, neg60 = 0xfb53;
    fold3(GPUBRIDGE_F16, GPUBRIDGE_SUM, 0, 2, &big, &big, NULL, &out16);
    assert_int_equal(out16, 0x7c00);
    fold3(GPUBRIDGE_F16, GPUBRIDGE_SUM, 0, 3, &k60, &k60, &neg60, &out16);
    assert_int_equal(out16, k60);
    uint16_t b256 = 0x4380, b1 = 0x3f80;
    fold3(GPUBRIDGE_BF16, GPUBRIDGE_SUM, 0, 3, &b256, &b1, &b1, &out16);
    assert_int_equal(out16, 0x4381); /* 258 */
    int32_t m3 = -3, m4 = -4, p3 = 3, p4 = 4, out32 = 0;
    fold3(GPUBRIDGE_I32, GPUBRIDGE_AVG, GB_REDUCE_FINAL, 2, &m3, &m4, NULL, &out32);
    assert_int_equal(out32, -3);
    fold3(GPUBRIDGE_I32, GPUBRIDGE_AVG, GB_REDUCE_FINAL, 2, &p3, &p4, NULL, &out32);
    assert_int_equal(out32, 3);
    int64_t odd = (int64_t)1 << 53 | 1, zero = 0, out64 = 0;
    fold3(GPUBRIDGE_I64, GPUBRIDGE_SUM, 0, 2, &odd, &zero, NULL, &out64);
    assert_true(out64 == odd);
    uint8_t t = 3, out8 = 9;
    fold3(GPUBRIDGE_BOOL, GPUBRIDGE_SUM, 0, 3, &t, &t, &t, &out8);
    assert_int_equal(out8, 1);
    int8_t a = 127, b = 1, s8 = 0;
    fold3(GPUBRIDGE_I8, GPUBRIDGE_SUM, 0, 2, &a, &b, NULL, &s8);
    assert_int_equal(s8, -128);
}

static void test_table(void **state)
{
    (void)state;
    assert_false(gb_reduce_supported(GPUBRIDGE_BOOL, GPUBRIDGE_AVG));
    assert_false(gb_reduce_supported(GPUBRIDGE_F32, GPUBRIDGE_BAND));
    assert_false(gb_reduce_supported(GPUBRIDGE_I32, GPUBRIDGE_PREMUL_SUM));
    assert_false(gb_reduce_supported(GPUBRIDGE_C64, GPUBRIDGE_PRODUCT));
    assert_true(gb_reduce_supported(GPUBRIDGE_C128, GPUBRIDGE_PREMUL_SUM));
    assert_true(gb_reduce_supported(GPUBRIDGE_U64, GPUBRIDGE_AVG));
    for (int op = -1; op <= GPUBRIDGE_REDUCE_OP_COUNT; op++) assert_false(gb_reduce_supported(GPUBRIDGE_BYTE, op));
    assert_int_equal(gb_dtype_bytes(-1), 0);
    assert_int_equal(gb_dtype_bytes(GPUBRIDGE_DTYPE_COUNT), 0);
    assert_int_equal(gb_acc_bytes(GPUBRIDGE_BF16), 4);
    assert_int_equal(gb_acc_bytes(GPUBRIDGE_C128), 16);
    assert_string_equal(gb_dtype_name(GPUBRIDGE_BF16), "bf16");
    assert_string_equal(gb_reduce_op_name(GPUBRIDGE_PREMUL_SUM), "PREMUL_SUM");
}

#ifdef __x86_64__
static void test_flush_to_zero_of_the_host_does_not_matter(void **state)
{
    (void)state;
    unsigned saved = __builtin_ia32_stmxcsr();
    uint32_t denormal = 3, two = 2, got = 0;
    uint16_t h = 1, wide = 0;
    float half = 0;
    __builtin_ia32_ldmxcsr(0x1f80 | 0x8040 | 0x6000); /* flush results and inputs, round toward zero */
    fold3(GPUBRIDGE_F32, GPUBRIDGE_SUM, 0, 2, &denormal, &two, NULL, &got);
    one_source(&half, &h, GPUBRIDGE_F16, 0, 1, 1);
    one_source(&wide, &half, GPUBRIDGE_F16, 1, 0, 1);
    unsigned kept = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(saved);
    assert_int_equal(kept & 0xffc0, 0x1f80 | 0x8040 | 0x6000);
    assert_int_equal(got, 5);
    assert_int_equal(wide, 1);
}
#endif

static void test_poison(void **state)
{
    (void)state;
    float f[5] = {1, 2, 3, 4, 5};
    uint32_t given_up = 0;
    twin_poison(f, 4 * sizeof *f, &given_up);
    assert_true(f[0] == 1 && f[3] == 4);
    given_up = 1;
    twin_poison(f, 4 * sizeof *f, &given_up);
    for (int i = 0; i < 4; i++) assert_true(isnan(f[i]));
    assert_true(f[4] == 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_known_values),
        cmocka_unit_test(test_16_bit_patterns),
        cmocka_unit_test(test_rounding_to_nearest_even),
        cmocka_unit_test(test_every_dtype_and_op),
#ifdef __x86_64__
        cmocka_unit_test(test_flush_to_zero_of_the_host_does_not_matter),
#endif
        cmocka_unit_test(test_poison),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
