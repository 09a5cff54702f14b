/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.c: the table behind codec.h.  Not the arithmetic: that is kernels.inc.  Pure; any thread. */
#include "codec/codec.h"

#include <string.h>

static const struct {
    const char *name;
    uint8_t block, scale_bytes, bits; /* bits of a code */
} codecs[GB_CODEC_COUNT] = {
    [GB_CODEC_NONE] = {"none", 1, 0, 32},          [GB_CODEC_BF16] = {"bf16", 1, 0, 16},
    [GB_CODEC_FP16] = {"fp16", 1, 0, 16},          [GB_CODEC_FP8_E4M3] = {"fp8_e4m3", 128, 1, 8},
    [GB_CODEC_FP8_E5M2] = {"fp8_e5m2", 128, 1, 8}, [GB_CODEC_INT8] = {"int8", 128, 4, 8},
    [GB_CODEC_MXFP4] = {"mxfp4", 32, 1, 4},
};

static int is_codec(int codec)
{
    return codec >= 0 && codec < GB_CODEC_COUNT;
}

const char *gb_codec_name(int codec)
{
    return is_codec(codec) ? codecs[codec].name : "?";
}

int gb_codec_find(const char *name)
{
    for (int i = 0; i < GB_CODEC_COUNT; i++)
        if (strcmp(codecs[i].name, name) == 0) return i;
    return -1;
}

uint32_t gb_codec_block(int codec)
{
    return is_codec(codec) ? codecs[codec].block : 0;
}

uint32_t gb_codec_scale_bytes(int codec)
{
    return is_codec(codec) ? codecs[codec].scale_bytes : 0;
}

static uint64_t up_to_16(uint64_t bytes)
{
    return (bytes + 15) & ~(uint64_t)15;
}

uint64_t gb_codec_bytes(int codec, uint64_t count)
{
    if (!is_codec(codec)) return 0;
    if (codec == GB_CODEC_NONE) return 4 * count;
    const uint64_t blocks = count / codecs[codec].block + (count % codecs[codec].block != 0);
    const uint64_t codes = codecs[codec].bits == 4 ? count / 2 + count % 2 : count * (codecs[codec].bits / 8);
    return up_to_16(blocks * codecs[codec].scale_bytes) + up_to_16(codes);
}

uint64_t gb_codec_seed(uint64_t seed, uint64_t n)
{
    uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
