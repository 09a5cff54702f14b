/* SPDX-License-Identifier: Apache-2.0
 * Every vector width of this machine against a plain loop over values, on random and adversarial floats: messages, and
 * what they decode to when added to something.  usage: codec_random [MILLIONS]: of values for each codec, 3 unless
 * given.  The last line is a JSON object. */
#include "codec/codec.h"
#include "codec/message.h"
#include "codec/reduce.h"

#include "codec/kernels.inc"

#include <gpubridge/gpubridge.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT 8093 /* blocks of every length, and a rest */
#define BYTES (2 * COUNT + 64)

static uint64_t rng_state = 0x2545f4914f6cdd1du;

static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state * 0x9e3779b97f4a7c15u;
}

/* ---- what is encoded ---- */

enum mood { BITS, ORDINARY, TIES, TINY, HUGE_ONES, SPECIALS, MOODS };

static uint32_t one_of(enum mood mood, uint64_t r)
{
    static const uint32_t specials[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff, 0x00800000,
                                        0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345,
                                        0x7f800001, 0x3f800000, 0x477ff000, 0x7f680000};
    const uint32_t bits = (uint32_t)(r >> 32);
    switch (mood) {
    case BITS:
        return bits;
    case TIES: /* few mantissa bits, a tie or next to one, within 16 powers of two */
        return (bits & 0x807e0000u) + ((uint32_t)(r & 15) << 23) + 0x38000000u + (uint32_t)(r >> 8 & 3) - 1u;
    case TINY:
        return bits & 0x81ffffffu;
    case HUGE_ONES:
        return (bits & 0x80ffffffu) | 0x7e000000u;
    case SPECIALS:
        return r & 0xe0 ? 0x3f000000u ^ (bits & 0x80ffffffu) : specials[r & 15];
    default:
        return (bits & 0x80ffffffu) | 0x3f000000u;
    }
}

static void fill(float *x, enum mood mood)
{
    for (int i = 0; i < COUNT; i++) {
        const uint32_t bits = one_of(mood, rng());
        memcpy(x + i, &bits, sizeof bits);
    }
}

/* ---- the plain loop ---- */

static void reference_block(int c, const float *x, int n, unsigned char *scale_to, unsigned char *codes)
{
    uint32_t greatest = 0, wild = 0, scale;
    for (int i = 0; i < n; i++) {
        greatest = gb_max(greatest, gb_finite(gb_bits_of(x[i]) & 0x7fffffffu, c));
        wild |= (gb_bits_of(x[i]) & 0x7fffffffu) >= GB_INF;
    }
    scale = gb_scale_code(greatest, c);
    if (c == GB_K_E2M1 && wild) scale = 255;
    memcpy(scale_to, &scale, GB_SCALE_SIZE(c));
    for (int i = 0; i < n; i++) {
        const uint32_t bits = gb_bits_of(x[i]), a = bits & 0x7fffffffu;
        const float in = gb_f32_of(a < GB_INF && a > GB_LIMIT(c) ? (bits & 0x80000000u) | GB_LIMIT(c) : bits);
        uint32_t code = gb_code(in * gb_scale_inverse(scale, c), c, 1, 0, 0);
        if (scale == 255 && c == GB_K_E2M1) code = 0;
        if (c == GB_K_E2M1)
            codes[i / 2] = (unsigned char)(i % 2 ? codes[i / 2] | code << 4 : code);
        else
            codes[i] = (unsigned char)code;
    }
}

static void reference_pack(int c, const float *x, unsigned char *message)
{
    memset(message, 0, gb_codec_bytes(c, COUNT));
    if (GB_IS_CAST(c)) {
        for (int i = 0; i < COUNT; i++) {
            uint32_t event;
            const uint16_t code = (uint16_t)gb_cast(x[i], c, 0, 0, &event);
            memcpy(message + 2 * i, &code, 2);
        }
        return;
    }
    const int block = GB_BLOCK(c);
    for (int at = 0; at < COUNT; at += block)
        reference_block(c, x + at, COUNT - at < block ? COUNT - at : block, message + at / block * GB_SCALE_SIZE(c),
                        message + gb_codes_at(COUNT, c) + (c == GB_K_E2M1 ? at / 2 : at));
}

static float reference_value(int c, const unsigned char *message, int i)
{
    const unsigned char *codes = message + gb_codes_at(COUNT, c);
    uint32_t scale = 0;
    uint16_t half;
    if (GB_IS_CAST(c)) {
        memcpy(&half, codes + 2 * i, 2);
        return gb_uncast(half, c);
    }
    memcpy(&scale, message + i / GB_BLOCK(c) * GB_SCALE_SIZE(c), GB_SCALE_SIZE(c));
    return gb_value(c == GB_K_E2M1 ? codes[i / 2] >> (i % 2 * 4) & 15u : codes[i], c) * gb_scale_value(scale, c);
}

/* ---- */

static uint64_t count_differing(const void *a, const void *b, size_t bytes)
{
    uint64_t differing = 0;
    if (memcmp(a, b, bytes) == 0) return 0;
    for (size_t i = 0; i < bytes; i++) differing += ((const uint8_t *)a)[i] != ((const uint8_t *)b)[i];
    return differing;
}

static uint64_t check(int c, enum mood mood)
{
    static _Alignas(64) float x[COUNT], y[COUNT], want[COUNT], got[COUNT];
    static _Alignas(64) unsigned char message[BYTES], packed[BYTES];
    uint64_t differing = 0;
    fill(x, mood);
    fill(y, ORDINARY);
    reference_pack(c, x, message);
    for (int i = 0; i < COUNT; i++) want[i] = gb_f32_of(gb_enc_f32(y[i] + reference_value(c, message, i)));
    struct gb_reduce_args pack = {.dst = packed, .src = {x}, .count = COUNT, .nsrc = 1, .dtype = GPUBRIDGE_F32};
    struct gb_reduce_args add = {.dst = got, .src = {y, message}, .count = COUNT, .nsrc = 2, .dtype = GPUBRIDGE_F32};
    pack.codec = add.codec = (uint8_t)c;
    pack.dst_is_enc = 1;
    add.enc_mask = 2;
    for (int way = 0; gb_message_way(way); way++) {
        gb_reduce_messages_by(way, &pack);
        differing += count_differing(message, packed, gb_codec_bytes(c, COUNT));
        gb_reduce_messages_by(way, &add);
        differing += count_differing(want, got, sizeof want);
    }
    return differing;
}

int main(int argc, char **argv)
{
    const uint64_t values = (argc > 1 ? strtoull(argv[1], NULL, 0) : 3) * 1000000;
    uint64_t all = 0;
    printf("{\"what\": \"vector widths against a plain loop: bytes that differ\", \"ways\": [");
    for (int way = 0; gb_message_way(way); way++) printf("%s\"%s\"", way ? ", " : "", gb_message_way(way));
    printf("], \"values_per_codec\": %" PRIu64 ", \"differ\": {", (values + COUNT - 1) / COUNT * COUNT);
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++) {
        uint64_t differing = 0, round = 0;
        for (uint64_t at = 0; at < values; at += COUNT) differing += check(c, (enum mood)(round++ % MOODS));
        printf("%s\"%s\": %" PRIu64, c > GB_CODEC_BF16 ? ", " : "", gb_codec_name(c), differing);
        all += differing;
    }
    printf("}}\n");
    return all != 0;
}
