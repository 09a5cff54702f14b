/* SPDX-License-Identifier: Apache-2.0
 * The wire codecs: values against a reference that goes through tables of a format's numbers, whole messages on the CPU
 * (each width of vectors that it has) against the kernels' twin, and the rules of docs/wire-format.md section 8. */
#include "codec/codec.h"
#include "codec/message.h"
#include "codec/reduce.h"

#include "reduce_twin.h"

#include <gpubridge/gpubridge.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above first */
#include <cmocka.h>

static uint64_t rng_state = 0x9e3779b97f4a7c15u;

static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state;
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* ---- running operations ---- */

static uint64_t stats[GB_CODEC_STATS];

static struct gb_reduce_args packing(int codec, void *message, const float *x, uint64_t count)
{
    memset(stats, 0, sizeof stats);
    return (struct gb_reduce_args){.dst = message,
                                   .src = {x},
                                   .count = count,
                                   .nsrc = 1,
                                   .dtype = GPUBRIDGE_F32,
                                   .codec = (uint8_t)codec,
                                   .dst_is_enc = 1,
                                   .stats = stats};
}

static void pack(int codec, void *message, const float *x, uint64_t count)
{
    struct gb_reduce_args a = packing(codec, message, x, count);
    gb_reduce_host(&a);
}

static void unpack(int codec, float *x, const void *message, uint64_t count)
{
    struct gb_reduce_args a = {.dst = x, .src = {message}, .count = count, .nsrc = 1, .dtype = GPUBRIDGE_F32};
    a.enc_mask = 1;
    a.codec = (uint8_t)codec;
    gb_reduce_host(&a);
}

/* Size of the step between neighbours at `x`, for a block whose greatest magnitude is `greatest`. */
static double step_of(int codec, double x, double greatest)
{
    static const struct {
        int mantissa, min_exp, max_exp;
    } format[GB_CODEC_COUNT] = {[GB_CODEC_BF16] = {7, -126, 127},
                                [GB_CODEC_FP16] = {10, -14, 15},
                                [GB_CODEC_FP8_E4M3] = {3, -6, 8},
                                [GB_CODEC_FP8_E5M2] = {2, -14, 15},
                                [GB_CODEC_MXFP4] = {1, 0, 2}};
    int e = 0, top = 0, scale = 0;
    if (codec == GB_CODEC_INT8) return fmax(greatest / 127, ldexp(1, -126));
    if (gb_codec_block(codec) > 1) {
        double m = frexp(greatest, &top);
        scale = top - 1 - format[codec].max_exp + (m > 0.875);
        if (greatest == 0 || scale < -127) scale = -127;
    }
    (void)frexp(fabs(x), &e);
    e = x == 0 || e - 1 < scale + format[codec].min_exp ? scale + format[codec].min_exp : e - 1;
    return ldexp(1, e - format[codec].mantissa);
}

/* Every value comes back within half a step (one at the end of the float range), with its sign, and finite. */
static void check_values(int codec, const float *x, uint64_t count)
{
    float *y = malloc((count + 1) * sizeof *y);
    void *message = malloc(gb_codec_bytes(codec, count) + 16);
    assert_non_null(y);
    assert_non_null(message);
    pack(codec, message, x, count);
    unpack(codec, y, message, count);
    const uint64_t block = gb_codec_block(codec);
    for (uint64_t b = 0; b < count; b += block) {
        uint64_t end = b + block < count ? b + block : count;
        double greatest = 0;
        for (uint64_t i = b; i < end; i++) greatest = fmax(greatest, fabs((double)x[i]));
        for (uint64_t i = b; i < end; i++) {
            double error = fabs((double)y[i] - (double)x[i]), step = step_of(codec, (double)x[i], greatest);
            double allowed = greatest > 0x1.4p127 ? step : step * 0.50002;
            if (codec == GB_CODEC_FP16 && fabs((double)x[i]) > 65504) allowed = fabs((double)x[i]) - 65504;
            if (!isfinite(y[i]) || error > allowed || (codec != GB_CODEC_INT8 && signbit(x[i]) != signbit(y[i])) ||
                (x[i] == 0 && y[i] != 0))
                fail_msg("%s, %llu values: value %llu of %.9g came back as %.9g, greatest %.9g, step %.9g",
                         gb_codec_name(codec), (unsigned long long)count, (unsigned long long)i, (double)x[i],
                         (double)y[i], greatest, step);
        }
    }
    free(message);
    free(y);
}

/* ---- tests ---- */

static void test_table(void **state)
{
    (void)state;
    assert_string_equal(gb_codec_name(GB_CODEC_FP8_E4M3), "fp8_e4m3");
    assert_string_equal(gb_codec_name(GB_CODEC_COUNT), "?");
    for (int c = 0; c < GB_CODEC_COUNT; c++) {
        assert_int_equal(gb_codec_find(gb_codec_name(c)), c);
        assert_int_equal(1024 % gb_codec_block(c), 0);
        assert_int_equal(gb_codec_bytes(c, 0), 0);
    }
    assert_int_equal(gb_codec_find("fp8"), -1);
    assert_int_equal(gb_codec_block(-1), 0);
    assert_int_equal(gb_codec_bytes(GB_CODEC_COUNT, 5), 0);
    assert_int_equal(gb_codec_bytes(GB_CODEC_NONE, 5), 20);
    assert_int_equal(gb_codec_bytes(GB_CODEC_BF16, 9), 32);
    assert_int_equal(gb_codec_bytes(GB_CODEC_FP8_E4M3, 1), 32);
    assert_int_equal(gb_codec_bytes(GB_CODEC_FP8_E4M3, 129), 16 + 144);
    assert_int_equal(gb_codec_bytes(GB_CODEC_INT8, 1024), 32 + 1024);
    assert_int_equal(gb_codec_bytes(GB_CODEC_MXFP4, 33), 16 + 32);
    /* At most 0.27 (fp8, int8) and 0.14 (mxfp4) of f32. */
    assert_true((double)gb_codec_bytes(GB_CODEC_INT8, 1 << 20) / (4 << 20) < 0.2579);
    assert_true((double)gb_codec_bytes(GB_CODEC_FP8_E4M3, 1 << 20) / (4 << 20) < 0.2521);
    assert_true((double)gb_codec_bytes(GB_CODEC_MXFP4, 1 << 20) / (4 << 20) < 0.1329);
}

static const uint64_t counts[] = {1, 7, 127, 128, 129, 255, 257, 1023, 1024, 1025, 4100};

static void test_values_come_back(void **state)
{
    (void)state;
    static const float greatest[] = {1e-45f, 1e-40f, 1.2e-38f, 1e-30f, 1.0f,    6.0f,    447.0f,  448.0f,       449.0f,
                                     464.0f, 480.0f, 1e5f,     1e30f,  2.9e38f, 3.1e38f, 3.3e38f, 3.4028235e38f};
    static float x[4100];
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++)
        for (size_t g = 0; g < sizeof greatest / sizeof *greatest; g++)
            for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
                for (uint64_t i = 0; i < counts[k]; i++) {
                    x[i] = (float)((double)greatest[g] * ((double)(int64_t)(rng() % 20001) / 10000.0 - 1.0));
                    if (rng() % 8 == 0) x[i] *= 1e-3f;
                    if (rng() % 16 == 0) x[i] = rng() % 2 ? 0.0f : -0.0f;
                }
                x[rng() % counts[k]] = rng() % 2 ? greatest[g] : -greatest[g];
                if (c == GB_CODEC_BF16 && greatest[g] > 3.39e38f) continue; /* test_casts_saturate */
                check_values(c, x, counts[k]);
            }
}

/* A value in every position among ordinary ones. */
static void test_what_is_not_finite(void **state)
{
    (void)state;
    static const uint32_t wild[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff};
    static float x[300], y[300];
    static _Alignas(16) uint8_t message[2048];
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++)
        for (uint64_t at = 0; at < 300; at += 1 + rng() % 5) {
            uint32_t bits = wild[rng() % 6];
            for (uint64_t i = 0; i < 300; i++) x[i] = (float)(int)(i % 17) - 8.0f;
            x[at] = float_of(bits);
            pack(c, message, x, 300);
            unpack(c, y, message, 300);
            assert_int_equal(stats[GB_CODEC_BLOCKS], (300 + gb_codec_block(c) - 1) / gb_codec_block(c));
            assert_int_equal(stats[GB_CODEC_NOT_FINITE], 1);
            assert_int_equal(stats[GB_CODEC_SATURATED], 0);
            const uint64_t block = c == GB_CODEC_MXFP4 ? 32 : 1;
            for (uint64_t i = 0; i < 300; i++) {
                const int keeps = c == GB_CODEC_BF16 || c == GB_CODEC_FP16 || c == GB_CODEC_FP8_E5M2;
                if (i / block != at / block)
                    assert_true(fabsf(y[i] - x[i]) <= 1.0f);
                else if (keeps && (bits & 0x7fffffff) == 0x7f800000)
                    assert_true(bits_of(y[i]) == bits);
                else
                    assert_true(bits_of(y[i]) == 0x7fc00000);
            }
        }
}

static void test_casts_saturate(void **state)
{
    (void)state;
    float x[6] = {3.4028235e38f, -3.4028235e38f, 65520.0f, -1e9f, 65519.0f, 1.0f}, y[6];
    _Alignas(16) uint8_t message[16];
    pack(GB_CODEC_BF16, message, x, 6);
    unpack(GB_CODEC_BF16, y, message, 6);
    assert_int_equal(stats[GB_CODEC_SATURATED], 2);
    assert_true(bits_of(y[0]) == 0x7f7f0000 && bits_of(y[1]) == 0xff7f0000);
    pack(GB_CODEC_FP16, message, x, 6);
    unpack(GB_CODEC_FP16, y, message, 6);
    assert_int_equal(stats[GB_CODEC_SATURATED], 4);
    assert_true(y[0] == 65504.0f && y[1] == -65504.0f && y[2] == 65504.0f && y[3] == -65504.0f && y[4] == 65504.0f);
    assert_true(y[5] == 1.0f);
}

static void test_zero_blocks(void **state)
{
    (void)state;
    static float x[384], y[384];
    static _Alignas(16) uint8_t message[2048];
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++) {
        for (int i = 0; i < 384; i++) x[i] = i / 128 == 1 ? (i % 2 ? -0.0f : 0.0f) : 1.0f;
        pack(c, message, x, 384);
        unpack(c, y, message, 384);
        for (int i = 0; i < 384; i++) {
            uint32_t want = c == GB_CODEC_INT8 && x[i] == 0 ? 0 : bits_of(x[i]);
            if (c == GB_CODEC_INT8 && x[i] != 0)
                assert_true(fabsf(y[i] - 1.0f) < 1e-6f);
            else
                assert_int_equal(bits_of(y[i]), want);
        }
        assert_int_equal(stats[GB_CODEC_SATURATED] + stats[GB_CODEC_NOT_FINITE], 0);
    }
}

/* ---- whole operations, on the CPU and on the twin ---- */

#define MAX_COUNT 2600

static uint32_t random_float(void)
{
    static const uint32_t specials[] = {0,          0x80000000, 1,          0x80000001, 0x7fffff,   0x800000,
                                        0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345,
                                        0x7f800001, 0x3f800000, 0x477ff000, 0x7f680000};
    static uint64_t mood;
    if (rng() % 700 == 0) mood = rng() % 4;
    if (mood == 0) return (uint32_t)rng();
    if (mood == 1 && rng() % 64 == 0) return specials[rng() % 16];
    return bits_of((float)((double)(int64_t)(rng() % 8193) - 4096.0) / 1024.0f);
}

static void fill_plain(void *to, uint64_t units, int bytes)
{
    const int is_tame = rng() % 2; /* every kernel's common way */
    for (uint64_t i = 0; i < units; i++) {
        float tame = (float)(int32_t)rng() * 0x1p-24f;
        uint32_t f = random_float();
        if (is_tame) memcpy(&f, &tame, 4);
        if (bytes == 2) f = rng() % 8 ? 0x3c00 + (uint32_t)(rng() & 0x81ff) : (uint32_t)rng();
        memcpy((char *)to + i * (uint64_t)bytes, &f, (size_t)bytes);
    }
}

/* A message of ordinary values, or bytes as an enemy would send them. */
static void fill_message(void *to, int codec, uint64_t units)
{
    static float x[MAX_COUNT * 2];
    if (rng() % 4) {
        for (uint64_t i = 0; i < units; i++) x[i] = float_of(random_float());
        pack(codec, to, x, units);
    } else {
        for (uint64_t i = 0; i < gb_codec_bytes(codec, units); i++) ((uint8_t *)to)[i] = (uint8_t)rng();
    }
}

static void check_same(const struct gb_reduce_args *a, const void *want, const void *got, size_t bytes, const char *who)
{
    size_t at = 0;
    if (memcmp(want, got, bytes) == 0) return;
    while (((const uint8_t *)want)[at] == ((const uint8_t *)got)[at]) at++;
    fail_msg("%s: %s %s %s count %llu nsrc %u enc %x acc %x dst_is_enc %u flags %u: byte %zu of %zu is %02x, want %02x",
             who, gb_codec_name(a->codec), gb_dtype_name(a->dtype), gb_reduce_op_name(a->op),
             (unsigned long long)a->count, a->nsrc, a->enc_mask, a->acc_mask, a->dst_is_enc, a->flags, at, bytes,
             ((const uint8_t *)got)[at], ((const uint8_t *)want)[at]);
}

static unsigned ways_seen[GB_REDUCE_WAYS];

static void check_operation(int codec, int dtype, uint64_t count, size_t misalign)
{
    static _Alignas(64) char src[GB_REDUCE_MAX_SRC][MAX_COUNT * 8 + 64], want[MAX_COUNT * 8 + 64],
        got[MAX_COUNT * 8 + 64];
    static const uint8_t ops[] = {GPUBRIDGE_SUM, GPUBRIDGE_AVG, GPUBRIDGE_PREMUL_SUM, GPUBRIDGE_MAX};
    const uint64_t units = dtype == GPUBRIDGE_C64 ? 2 * count : count;
    uint64_t host[GB_CODEC_STATS] = {0}, twin[GB_CODEC_STATS] = {0};
    struct gb_reduce_args a = {.count = count, .factor = 0.7, .divisor = 1 + rng() % 9, .codec = (uint8_t)codec};
    a.dtype = (uint8_t)dtype;
    a.op = ops[rng() % (dtype == GPUBRIDGE_C64 ? 3 : 4)];
    a.nsrc = (uint8_t)(rng() % 8 == 0 ? 1 + rng() % GB_REDUCE_MAX_SRC : 1 + rng() % 3);
    a.flags = (uint8_t)(rng() % 2 ? GB_REDUCE_FINAL : 0) | (rng() % 4 == 0 ? GB_REDUCE_STOCHASTIC : 0);
    a.enc_mask = (uint32_t)rng() & 0xffff;
    a.dst_is_enc = rng() % 2 || (a.enc_mask & ((1u << a.nsrc) - 1)) == 0;
    a.dst_is_acc = rng() % 2;
    a.acc_mask = (uint32_t)rng() & 0xffff & ~a.enc_mask;
    a.premul_mask = a.op == GPUBRIDGE_PREMUL_SUM ? (uint32_t)rng() & 0xffff & ~a.acc_mask & ~a.enc_mask : 0;
    a.seed = rng();
    a.first_index = rng() % 3 ? rng() >> 20 : UINT64_MAX - 5;
    for (unsigned k = 0; k < a.nsrc; k++) {
        const int bytes = a.acc_mask >> k & 1 || dtype == GPUBRIDGE_F32 || dtype == GPUBRIDGE_C64 ? 4 : 2;
        const size_t off = a.enc_mask >> k & 1 ? 0 : misalign * (size_t)bytes;
        a.src[k] = src[k] + off;
        if (a.enc_mask >> k & 1)
            fill_message(src[k], codec, units);
        else
            fill_plain(src[k] + off, units, bytes);
    }
    const int wide = a.dst_is_acc || dtype == GPUBRIDGE_F32 || dtype == GPUBRIDGE_C64;
    const size_t bytes = a.dst_is_enc ? gb_codec_bytes(codec, units) : units * (wide ? 4 : 2);
    const size_t off = a.dst_is_enc ? 0 : misalign * (wide ? 4 : 2);
    memset(want, 0xcc, sizeof want);
    a.dst = want + off;
    a.stats = rng() % 4 ? host : NULL;
    gb_reduce_messages_by(0, &a);
    const uint64_t seen[GB_CODEC_STATS] = {host[0], host[1], host[2]};
    a.dst = got + off;
    for (int way = 0; gb_message_way(way); way++) {
        memset(got, 0xcc, sizeof got);
        memset(host, 0, sizeof host);
        gb_reduce_messages_by(way, &a);
        check_same(&a, want, got, sizeof want, gb_message_way(way));
        assert_memory_equal(host, seen, sizeof seen);
    }
    if (a.stats) a.stats = twin;
    const int best = gb_reduce_way(&a);
    ways_seen[best]++;
    for (int way = GB_WAY_ANY; way <= best; way += best ? best : 1) {
        memset(got, 0xcc, sizeof got);
        memset(twin, 0, sizeof twin);
        twin_reduce(way, &a, 1 + (unsigned)(rng() % 3), 32 * (1 + (unsigned)(rng() % 2)));
        check_same(&a, want, got, sizeof want, way ? "common kernel" : "kernel");
        assert_memory_equal(twin, seen, sizeof seen);
    }
    for (unsigned k = 0; k < a.nsrc; k++) { /* in place */
        const int enc = a.enc_mask >> k & 1;
        if (enc != a.dst_is_enc ||
            (!enc && wide != (a.acc_mask >> k & 1 || dtype == GPUBRIDGE_F32 || dtype == GPUBRIDGE_C64)))
            continue;
        static char kept[MAX_COUNT * 8 + 64];
        memcpy(kept, src[k], sizeof kept);
        a.dst = (char *)a.src[k];
        gb_reduce_host(&a);
        check_same(&a, want + off, a.dst, bytes, "host in place");
        memcpy(src[k], kept, sizeof kept);
        twin_reduce(best, &a, 1 + (unsigned)(rng() % 3), 32);
        check_same(&a, want + off, a.dst, bytes, "kernel in place");
        break;
    }
}

static void test_operations(void **state)
{
    (void)state;
    static const uint8_t dtypes[] = {GPUBRIDGE_F32, GPUBRIDGE_F16, GPUBRIDGE_BF16, GPUBRIDGE_C64};
    static const uint64_t sizes[] = {0, 1, 3, 7, 16, 31, 32, 33, 127, 128, 129, 255, 257, 1000, 1023, 1024, 1025, 2600};
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++)
        for (int d = 0; d < 4; d++)
            for (int round = 0; round < 120; round++)
                check_operation(c, dtypes[d], sizes[rng() % 18] / (dtypes[d] == GPUBRIDGE_C64 ? 2 : 1),
                                rng() % 2 ? 0 : rng() % 4);
    for (int way = 0; way < GB_REDUCE_WAYS; way++) assert_true(ways_seen[way] > 50);
}

/* The same values alone and inside a longer message, at a multiple of 1,024, have the same codes and scales. */
static void test_place_does_not_matter(void **state)
{
    (void)state;
    static float x[4096];
    static _Alignas(16) uint8_t all[20000], part[20000];
    for (int i = 0; i < 4096; i++) x[i] = float_of(random_float());
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++) {
        float y[1024], z[4096];
        pack(c, all, x, 4096);
        pack(c, part, x + 2048, 1024);
        unpack(c, z, all, 4096);
        unpack(c, y, part, 1024);
        assert_memory_equal(z + 2048, y, sizeof y);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_values_come_back),
        cmocka_unit_test(test_what_is_not_finite),
        cmocka_unit_test(test_casts_saturate),
        cmocka_unit_test(test_zero_blocks),
        cmocka_unit_test(test_operations),
        cmocka_unit_test(test_place_does_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
