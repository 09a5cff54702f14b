/* SPDX-License-Identifier: Apache-2.0
 *
 * message.c: the CPU loops around the wire codecs of kernels.inc, written so that the compiler vectorises them: chunks
 * of 1,024 values that stay in the first-level cache, constant codec and block length, and a second form of a block's
 * loop for what is rare (NaN, infinity, magnitudes at the end of the float range, stochastic rounding).  Any thread. */
#ifdef __GNUC__
#ifndef __clang__
#pragma GCC optimize("O3") /* as in reduce.c */
#endif
#endif

#include "codec/message.h"

#include "codec/codec.h"

#include <gpubridge/gpubridge.h>

#include <assert.h>
#include <string.h>

#include "codec/kernels.inc"

static_assert((int)GB_K_PLAIN == GB_CODEC_NONE && (int)GB_K_CBF16 == GB_CODEC_BF16 &&
                  (int)GB_K_CFP16 == GB_CODEC_FP16 && (int)GB_K_E4M3 == GB_CODEC_FP8_E4M3 &&
                  (int)GB_K_E5M2 == GB_CODEC_FP8_E5M2 && (int)GB_K_INT8 == GB_CODEC_INT8 &&
                  (int)GB_K_E2M1 == GB_CODEC_MXFP4,
              "kernels.inc numbers the codecs as codec.h does");
static_assert((int)GB_K_FINAL == GB_REDUCE_FINAL && (int)GB_K_STOCHASTIC == GB_REDUCE_STOCHASTIC,
              "kernels.inc numbers the flags as reduce.h does");

#define CHUNK 1024 /* values: a multiple of every block */

/* A message: where it begins, and how many values it holds. */
struct message {
    unsigned char *bytes;
    uint64_t count;
};

GB_FN uint16_t get16(const unsigned char *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}

GB_FN void put16(unsigned char *p, uint16_t bits)
{
    memcpy(p, &bits, sizeof bits);
}

/* CALL(codec, ...) with a constant codec. */
#define FOR_CODEC(codec, CALL, ...)                                                                                    \
    switch (codec) {                                                                                                   \
    case GB_K_CBF16:                                                                                                   \
        CALL(GB_K_CBF16, __VA_ARGS__);                                                                                 \
        break;                                                                                                         \
    case GB_K_CFP16:                                                                                                   \
        CALL(GB_K_CFP16, __VA_ARGS__);                                                                                 \
        break;                                                                                                         \
    case GB_K_E4M3:                                                                                                    \
        CALL(GB_K_E4M3, __VA_ARGS__);                                                                                  \
        break;                                                                                                         \
    case GB_K_E5M2:                                                                                                    \
        CALL(GB_K_E5M2, __VA_ARGS__);                                                                                  \
        break;                                                                                                         \
    case GB_K_INT8:                                                                                                    \
        CALL(GB_K_INT8, __VA_ARGS__);                                                                                  \
        break;                                                                                                         \
    case GB_K_E2M1:                                                                                                    \
        CALL(GB_K_E2M1, __VA_ARGS__);                                                                                  \
        break;                                                                                                         \
    default:                                                                                                           \
        assert(!"a codec");                                                                                            \
        break;                                                                                                         \
    }

/* ---- decoding ---- */

GB_FN void decode_block(const int c, float *restrict x, const size_t n, const unsigned char *restrict codes,
                        float scale)
{
    unsigned char wide[GB_BLOCK(GB_K_E2M1)] = {0}; /* mxfp4: a byte for each code, so that the loops are the same */
    if (c == GB_K_E2M1) {
        for (size_t i = 0; i < n / 2; i++) put16(wide + 2 * i, (uint16_t)((codes[i] & 15u) | (codes[i] & 0xf0u) << 4));
        if (n % 2) wide[n - 1] = codes[n / 2] & 15u;
        codes = wide;
    }
    for (size_t i = 0; i < n; i++) x[i] = gb_value(codes[i], c) * scale;
}

GB_FN float scale_at(const int c, const unsigned char *scales, uint64_t block)
{
    uint32_t bits = 0;
    memcpy(&bits, scales + block * GB_SCALE_SIZE(c), GB_SCALE_SIZE(c)); /* little endian */
    return gb_scale_value(bits, c);
}

/* Values [at, at + n) of a message; `at` is a multiple of CHUNK. */
GB_FN void decode(const int c, float *restrict x, struct message m, uint64_t at, size_t n)
{
    const unsigned char *codes = m.bytes + gb_codes_at(m.count, c);
    if (GB_IS_CAST(c)) {
        codes += 2 * at;
        for (size_t i = 0; i < n; i++) x[i] = gb_uncast(get16(codes + 2 * i), c);
        return;
    }
    for (size_t i = 0; i < n; i += GB_BLOCK(c)) {
        const float scale = scale_at(c, m.bytes, (at + i) / GB_BLOCK(c));
        const unsigned char *from = codes + (c == GB_K_E2M1 ? (at + i) / 2 : at + i);
        if (n - i >= GB_BLOCK(c))
            decode_block(c, x + i, GB_BLOCK(c), from, scale);
        else
            decode_block(c, x + i, n - i, from, scale);
    }
}

/* ---- encoding ---- */

/* What encoding is to do with a block beside its values. */
struct how {
    uint64_t seed, first; /* counter of the chunk's first value */
    uint64_t stats[GB_CODEC_STATS];
    int random;
};

GB_FN void encode_codes(const int c, const int any, const int random, unsigned char *restrict codes,
                        const float *restrict x, const size_t n, float inverse, const struct how *how, size_t at)
{
    unsigned char wide[GB_BLOCK(GB_K_E2M1)] = {0}, *to = c == GB_K_E2M1 ? wide : codes;
    for (size_t i = 0; i < n; i++)
        to[i] = (unsigned char)gb_code(x[i] * inverse, c, any, random,
                                       random ? gb_random(how->seed, how->first + at + i) : 0u);
    if (c == GB_K_E2M1) {
        for (size_t i = 0; i < n / 2; i++) codes[i] = (unsigned char)(get16(wide + 2 * i) | get16(wide + 2 * i) >> 4);
        if (n % 2) codes[n / 2] = wide[n - 1];
    }
}

/* A block with something rare in it.  `at` is its place in the chunk. */
GB_FN void encode_rare(const int c, unsigned char *codes, const float *x, const size_t n, uint32_t *scale,
                       struct how *how, size_t at)
{
    float limited[GB_BLOCK(GB_K_E4M3)] = {0}; /* the longest block */
    uint32_t greatest = 0, over = 0, wild = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = gb_bits_of(x[i]), a = bits & 0x7fffffffu;
        const int is_wild = a >= GB_INF, is_over = !is_wild && a > GB_LIMIT(c);
        greatest = gb_max(greatest, gb_finite(a, c));
        wild += (uint32_t)is_wild;
        over |= (uint32_t)is_over;
        limited[i] = gb_f32_of(is_over ? GB_LIMIT(c) | (bits & 0x80000000u) : bits);
    }
    how->stats[GB_CODEC_SATURATED] += over;
    how->stats[GB_CODEC_NOT_FINITE] += wild;
    *scale = gb_scale_code(greatest, c);
    if (c == GB_K_E2M1 && wild) { /* it has no code for them */
        *scale = 255;
        memset(codes, 0, (n + 1) / 2);
    } else if (how->random) {
        encode_codes(c, 1, 1, codes, limited, n, gb_scale_inverse(*scale, c), how, at);
    } else {
        encode_codes(c, 1, 0, codes, limited, n, gb_scale_inverse(*scale, c), how, at);
    }
}

GB_FN void encode_block(const int c, unsigned char *restrict codes, unsigned char *restrict scale_bytes,
                        const float *restrict x, const size_t n, struct how *how, size_t at)
{
    uint32_t greatest = 0, scale;
    for (size_t i = 0; i < n; i++) greatest = gb_max(greatest, gb_bits_of(x[i]) & 0x7fffffffu);
    if (greatest > GB_LIMIT(c) || how->random) {
        encode_rare(c, codes, x, n, &scale, how, at);
    } else {
        scale = gb_scale_code(greatest, c);
        encode_codes(c, 0, 0, codes, x, n, gb_scale_inverse(scale, c), how, at);
    }
    memcpy(scale_bytes, &scale, GB_SCALE_SIZE(c)); /* little endian */
}

GB_FN void encode_cast(const int c, const int random, unsigned char *restrict codes, const float *restrict x, size_t n,
                       struct how *how)
{
    uint32_t over = 0, wild = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t event, bits = random ? gb_random(how->seed, how->first + i) : 0;
        put16(codes + 2 * i, (uint16_t)gb_cast(x[i], c, random, bits, &event));
        over += event & 1;
        wild += event >> 1;
    }
    how->stats[GB_CODEC_SATURATED] += over;
    how->stats[GB_CODEC_NOT_FINITE] += wild;
}

GB_FN void encode(const int c, struct message m, const float *restrict x, uint64_t at, size_t n, struct how *how)
{
    unsigned char *codes = m.bytes + gb_codes_at(m.count, c);
    if (GB_IS_CAST(c)) {
        if (how->random)
            encode_cast(c, 1, codes + 2 * at, x, n, how);
        else
            encode_cast(c, 0, codes + 2 * at, x, n, how);
        return;
    }
    for (size_t i = 0; i < n; i += GB_BLOCK(c)) {
        unsigned char *scale = m.bytes + (at + i) / GB_BLOCK(c) * GB_SCALE_SIZE(c);
        unsigned char *to = codes + (c == GB_K_E2M1 ? (at + i) / 2 : at + i);
        if (n - i >= GB_BLOCK(c))
            encode_block(c, to, scale, x + i, GB_BLOCK(c), how, i);
        else
            encode_block(c, to, scale, x + i, n - i, how, i);
    }
}

/* The zeros behind the scales and behind the codes. */
static void pad(const struct gb_reduce_args *a, struct message m)
{
    const uint64_t blocks = (m.count + gb_codec_block(a->codec) - 1) / gb_codec_block(a->codec);
    const uint64_t scales = blocks * gb_codec_scale_bytes(a->codec), all = gb_codec_bytes(a->codec, m.count);
    const uint64_t begin = (scales + 15) & ~(uint64_t)15;
    const uint64_t bits = m.count * (a->codec == GB_CODEC_MXFP4 ? 4 : gb_codec_block(a->codec) > 1 ? 8 : 16);
    const uint64_t end = begin + (bits + 7) / 8;
    memset(m.bytes + scales, 0, (size_t)(begin - scales));
    memset(m.bytes + end, 0, (size_t)(all - end));
}

/* ---- the operation ---- */

GB_FN void read_plain(float *restrict x, size_t n, const void *src, uint64_t at, int dtype, int partial)
{
    const unsigned char *from = src;
    if (dtype == GB_K_BF16 && !partial)
        for (size_t i = 0; i < n; i++) x[i] = gb_dec_bf16(get16(from + 2 * (at + i)));
    else if (dtype == GB_K_F16 && !partial)
        for (size_t i = 0; i < n; i++) x[i] = gb_dec_f16(get16(from + 2 * (at + i)));
    else
        memcpy(x, from + 4 * at, n * sizeof *x);
}

GB_FN void write_plain(void *dst, uint64_t at, size_t n, const float *restrict x, int dtype, int partial)
{
    unsigned char *to = dst;
    if (dtype == GB_K_BF16 && !partial)
        for (size_t i = 0; i < n; i++) put16(to + 2 * (at + i), gb_enc_bf16(x[i]));
    else if (dtype == GB_K_F16 && !partial)
        for (size_t i = 0; i < n; i++) put16(to + 2 * (at + i), gb_enc_f16(x[i]));
    else
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = gb_enc_f32(x[i]);
            memcpy(to + 4 * (at + i), &bits, sizeof bits);
        }
}

GB_FN void fold(float *restrict acc, size_t n, const float *restrict x, const int op)
{
    for (size_t i = 0; i < n; i++) acc[i] = gb_fold_f32(op, acc[i], x[i]);
}

GB_FN void reduce_chunk(const struct gb_reduce_args *a, uint64_t count, uint64_t at, size_t n, float *acc, float *x,
                        struct how *how)
{
    for (uint32_t k = 0; k < a->nsrc; k++) {
        float *into = k ? x : acc;
        const struct message m = {(unsigned char *)a->src[k], count};
        if (a->enc_mask >> k & 1) {
            FOR_CODEC(a->codec, decode, into, m, at, n)
        } else {
            read_plain(into, n, a->src[k], at, a->dtype, a->acc_mask >> k & 1);
        }
        if (a->premul_mask >> k & 1)
            for (size_t i = 0; i < n; i++) into[i] = gb_scale_f32(into[i], a->factor);
        if (k == 0) continue;
#define FOLD(X, op, acc, n, x) fold(acc, n, x, op)
        GB_FLOAT_OPS(a->op, FOLD, f32, acc, n, x)
#undef FOLD
    }
    if (a->op == GB_K_AVG && (a->flags & GB_K_FINAL))
        for (size_t i = 0; i < n; i++) acc[i] = gb_mean_f32(acc[i], a->divisor);
    if (a->dst_is_enc) {
        const struct message m = {a->dst, count};
        FOR_CODEC(a->codec, encode, m, acc, at, n, how)
    } else {
        write_plain(a->dst, at, n, acc, a->dtype, a->dst_is_acc);
    }
}

GB_FN void reduce_all(const struct gb_reduce_args *a)
{
    const uint64_t count = a->count * (GB_IS_COMPLEX(a->dtype) ? 2 : 1);
    _Alignas(64) float acc[CHUNK] = {0}, x[CHUNK] = {0};
    struct how how = {.seed = a->seed, .random = (a->flags & GB_K_STOCHASTIC) != 0};
    for (uint64_t at = 0; at < count; at += CHUNK) {
        how.first = a->first_index + at;
        reduce_chunk(a, count, at, count - at < CHUNK ? (size_t)(count - at) : CHUNK, acc, x, &how);
    }
    if (!a->dst_is_enc) return;
    pad(a, (struct message){a->dst, count});
    if (!a->stats) return;
    a->stats[GB_CODEC_BLOCKS] += (count + gb_codec_block(a->codec) - 1) / gb_codec_block(a->codec);
    a->stats[GB_CODEC_SATURATED] += how.stats[GB_CODEC_SATURATED];
    a->stats[GB_CODEC_NOT_FINITE] += how.stats[GB_CODEC_NOT_FINITE];
}

static __attribute__((noinline)) void reduce_baseline(const struct gb_reduce_args *args)
{
    reduce_all(args);
}

#ifdef __x86_64__

/* Wider vectors, the same operations: contraction is off, so equal bits. */
static __attribute__((noinline, target("avx2"))) void reduce_avx2(const struct gb_reduce_args *args)
{
    reduce_all(args);
}

#ifdef __clang__
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl"
#else
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif

static __attribute__((noinline, target(AVX512))) void reduce_avx512(const struct gb_reduce_args *args)
{
    reduce_all(args);
}

const char *gb_message_way(int way)
{
    if (way == 0) return "baseline";
    if (way == 1 && __builtin_cpu_supports("avx2")) return "avx2";
    if (way == 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return "avx512";
    return NULL;
}

void gb_reduce_messages_by(int way, const struct gb_reduce_args *args)
{
    if (way == 2)
        reduce_avx512(args);
    else if (way == 1)
        reduce_avx2(args);
    else
        reduce_baseline(args);
}

#else

const char *gb_message_way(int way)
{
    return way == 0 ? "baseline" : NULL;
}

void gb_reduce_messages_by(int way, const struct gb_reduce_args *args)
{
    (void)way;
    reduce_baseline(args);
}

#endif

void gb_reduce_messages(const struct gb_reduce_args *args)
{
    int way = 0;
    while (gb_message_way(way + 1)) way++;
    gb_reduce_messages_by(way, args);
}
