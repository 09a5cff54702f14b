/* SPDX-License-Identifier: Apache-2.0
 * The bytes of the wire codecs, pinned: small messages in full (good: what floats become; bad: what an enemy's bytes
 * decode to), and hashes of long ones, compared with codec_bits.txt.  One file for every compiler, level and
 * architecture; needs nothing but the C library, so it is also cross-compiled.  usage: codec_bits FILE | --print */
#include "codec/codec.h"
#include "codec/reduce.h"

#include <gpubridge/gpubridge.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define COUNT 4133 /* no multiple of a block */

static char text[65536], *end = text;

__attribute__((format(printf, 1, 2))) static void put(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    end += vsnprintf(end, (size_t)(text + sizeof text - end), format, list);
    va_end(list);
}

static void put_bytes(const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) put("%02x", ((const uint8_t *)bytes)[i]);
}

static void pack(int codec, int dtype, uint64_t seed, void *message, const void *x, uint64_t count)
{
    struct gb_reduce_args a = {.dst = message, .src = {x}, .count = count, .nsrc = 1, .dst_is_enc = 1, .seed = seed};
    a.dtype = (uint8_t)dtype;
    a.codec = (uint8_t)codec;
    a.flags = seed ? GB_REDUCE_STOCHASTIC : 0;
    gb_reduce_host(&a);
}

static void unpack(int codec, uint32_t *bits, const void *message, uint64_t count)
{
    struct gb_reduce_args a = {.dst = bits, .src = {message}, .count = count, .nsrc = 1, .enc_mask = 1};
    a.dtype = GPUBRIDGE_F32;
    a.codec = (uint8_t)codec;
    gb_reduce_host(&a);
}

/* Float bits with something of everything: zeros, ties, denormals, the ends of the range. */
static const uint32_t good[][9] = {
    {0x3f800000, 0xbf800000, 0x40490fdb, 0x00000000, 0x80000000, 0x3c23d70a, 0xc2c80000, 0x42c7ffff, 0x3eaaaaab},
    {0x43e00000, 0x43e00001, 0xc3e80000, 0x3f880000, 0x3f980000, 0x3b000000, 0xbb000001, 0x3a800000, 0x43d80000},
    {0x7f7fffff, 0xff7fffff, 0x7f700000, 0x7f600001, 0x7f000000, 0xff400000, 0x7e800000, 0x00000001, 0x3f800000},
    {0x00000001, 0x80000001, 0x000116c2, 0x0082ab1e, 0x807fffff, 0x00400000, 0x00000000, 0x80000000, 0x00200000},
    {0x7f800000, 0x40e00000, 0xff800000, 0x40c00000, 0x7fc00000, 0xffffffff, 0x7f800001, 0xc0a00000, 0x3e800000},
};

/* Bytes that no encoder writes: NaN scales and codes, float scales that are not finite, paddings that are not zero. */
static const uint8_t bad[][48] = {
    {255, 255, 255, 255, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0x00, 0x80, 0x38, 0x7e, 0xff, 0x7c, 0xfd, 0x01},
    {254, 0, 128, 127, [16] = 0x7e, 0xfe, 0x77, 0x7b, 0x7f, 0x80, 0xff, 0x01, 0x7c, [31] = 0xaa},
    {0, 0, 128, 127, [16] = 0x01, 0x81, 0x7f, 0x80, 0x7b, 0x7c, 0xff, 0x00, 0xfc, [31] = 0x55},
    {1, 0, 0, 0, [16] = 0x01, 0x81, 0x7f, 0x80, 0x08, 0x88, 0xff, 0x00, 0x77, [31] = 0x55},
    {0, 0, 192, 255, [16] = 0x01, 0x80, 0x7f, 0x00, 0x77, 0xf7, 0x7d, 0x7c, 0xff, [31] = 0xff},
};

static void small_messages(int codec)
{
    uint8_t message[64];
    uint32_t bits[9];
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        pack(codec, GPUBRIDGE_F32, 0, message, good[i], 9);
        unpack(codec, bits, message, 9);
        put("good %s %zu ", gb_codec_name(codec), i);
        put_bytes(message, gb_codec_bytes(codec, 9));
        for (int k = 0; k < 9; k++) put(" %08x", bits[k]);
        put("\n");
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        unpack(codec, bits, bad[i], 9);
        put("bad %s %zu", gb_codec_name(codec), i);
        for (int k = 0; k < 9; k++) put(" %08x", bits[k]);
        put("\n");
    }
}

/* xorshift64*: the patterns must not depend on a C library. */
static uint64_t next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717u;
}

static uint64_t fnv(const uint8_t *bytes, size_t n)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

static void long_message(int codec, int dtype, int wild, uint64_t seed)
{
    static _Alignas(16) uint8_t message[4 * COUNT + 64];
    static uint8_t x[4 * COUNT];
    uint64_t state = (uint64_t)(codec * 100 + dtype * 10 + wild + 1) * 0x9e3779b97f4a7c15u;
    const size_t size = dtype == GPUBRIDGE_F32 ? 4 : 2;
    for (size_t i = 0; i < COUNT; i++) {
        uint32_t bits = (uint32_t)(next(&state) >> 32);
        if (!wild) bits = size == 4 ? (bits & 0x83ffffffu) | 0x3c000000u : (bits & 0x83ffu) | 0x3c00u;
        memcpy(x + i * size, &bits, size);
    }
    pack(codec, dtype, seed, message, x, COUNT);
    put("long %s %s %s %s %016" PRIx64 "\n", gb_codec_name(codec), gb_dtype_name(dtype), wild ? "any" : "ordinary",
        seed ? "stochastic" : "nearest", fnv(message, gb_codec_bytes(codec, COUNT)));
}

static int compare(const char *path)
{
    static char want[sizeof text];
    FILE *file = fopen(path, "r");
    int line = 1;
    if (!file) {
        perror(path);
        return 1;
    }
    want[fread(want, 1, sizeof want - 1, file)] = 0;
    fclose(file);
    if (strcmp(want, text) == 0) {
        puts("the same");
        return 0;
    }
    for (const char *a = want, *b = text; *a && *a == *b; a++, b++) line += *a == '\n';
    printf("%s:%d: differs; codec_bits --print shows what it is now\n", path, line);
    return 1;
}

int main(int argc, char **argv)
{
    for (int codec = GB_CODEC_BF16; codec < GB_CODEC_COUNT; codec++) {
        small_messages(codec);
        for (int wild = 0; wild < 2; wild++)
            for (uint64_t seed = 0; seed < 2; seed++) {
                long_message(codec, GPUBRIDGE_F32, wild, seed);
                long_message(codec, GPUBRIDGE_F16, wild, seed);
                long_message(codec, GPUBRIDGE_BF16, wild, seed);
            }
    }
    if (argc == 2 && strcmp(argv[1], "--print") != 0) return compare(argv[1]);
    fputs(text, stdout);
    return 0;
}
