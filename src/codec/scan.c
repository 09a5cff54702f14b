/* SPDX-License-Identifier: Apache-2.0
 * Counts codes of NaN and infinity, in loops that the compiler vectorises. */
#ifdef __GNUC__
#ifndef __clang__
#pragma GCC optimize("O3") /* as in reduce.c */
#endif
#endif

#include "codec/scan.h"

#include "codec/codec.h"

#include <string.h>

#define STRETCH 128u /* codes counted in a number as wide as a code: less than 256 */

/* Bytes b with (b ^ flip) & mask >= low. */
static uint64_t count_bytes(const unsigned char *p, uint64_t n, unsigned char flip, unsigned char mask,
                            unsigned char low)
{
    uint64_t total = 0;
    for (uint64_t at = 0; at < n; at += STRETCH) {
        uint64_t len = n - at < STRETCH ? n - at : STRETCH;
        unsigned char found = 0;
        for (uint64_t i = 0; i < len; i++) found = (unsigned char)(found + (((p[at + i] ^ flip) & mask) >= low));
        total += found;
    }
    return total;
}

static uint64_t count_halves(const unsigned char *p, uint64_t n, uint16_t infinity)
{
    uint64_t total = 0;
    for (uint64_t at = 0; at < n; at += STRETCH) {
        uint64_t len = n - at < STRETCH ? n - at : STRETCH;
        uint16_t found = 0;
        for (uint64_t i = at; i < at + len; i++) {
            uint16_t code;
            memcpy(&code, p + 2 * i, sizeof code);
            found = (uint16_t)(found + ((code & 0x7fffu) >= infinity));
        }
        total += found;
    }
    return total;
}

/* Blocks whose scale is the NaN of its format have nothing but NaNs. */
static uint64_t count_blocks(const unsigned char *scales, uint64_t count, uint32_t block)
{
    uint64_t total = 0;
    if (!memchr(scales, 255, (size_t)((count + block - 1) / block))) return 0;
    for (uint64_t at = 0; at < count; at += block)
        if (scales[at / block] == 255) total += count - at < block ? count - at : block;
    return total;
}

uint64_t gb_codec_not_finite(int codec, const void *message, uint64_t count)
{
    const unsigned char *p = message;
    const uint32_t block = gb_codec_block(codec);
    if (count == 0) return 0;
    const uint64_t scales = (count + block - 1) / block * gb_codec_scale_bytes(codec);
    const unsigned char *codes = p + ((scales + 15) & ~(uint64_t)15);
    switch (codec) {
    case GB_CODEC_BF16:
        return count_halves(p, count, 0x7f80);
    case GB_CODEC_FP16:
        return count_halves(p, count, 0x7c00);
    case GB_CODEC_FP8_E4M3:
        return count_bytes(codes, count, 0, 0x7f, 0x7f);
    case GB_CODEC_FP8_E5M2:
        return count_bytes(codes, count, 0, 0x7f, 0x7c);
    case GB_CODEC_INT8: /* 0x80 is its NaN */
        return count_bytes(codes, count, 0x7f, 0xff, 0xff);
    case GB_CODEC_MXFP4:
        return count_blocks(p, count, block);
    default:
        return 0;
    }
}
