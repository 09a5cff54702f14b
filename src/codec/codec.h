/* SPDX-License-Identifier: Apache-2.0
 *
 * codec.h: the wire codecs: names and sizes of encoded messages.  The format is docs/wire-format.md section 8; encoding
 * and decoding are reduce.h's one operation.  Pure; any thread.
 *
 * A message of `count` floats: scales of all blocks, zeros up to a multiple of 16 bytes, codes, zeros up to a multiple
 * of 16 bytes.  It needs nothing but the codec and the count to be read, and whatever its bytes are they decode.
 */
#ifndef GB_CODEC_CODEC_H
#define GB_CODEC_CODEC_H

#include <stdint.h>

enum gb_codec {
    GB_CODEC_NONE,
    GB_CODEC_BF16,
    GB_CODEC_FP16,
    GB_CODEC_FP8_E4M3,
    GB_CODEC_FP8_E5M2,
    GB_CODEC_INT8,
    GB_CODEC_MXFP4,
    GB_CODEC_COUNT
};

const char *gb_codec_name(int codec);     /* "fp8_e4m3"; "?" for a value that is no codec */
int gb_codec_find(const char *name);      /* enum gb_codec, or -1 */
uint32_t gb_codec_block(int codec);       /* values that share a scale; 1 for those without; 0 for no codec */
uint32_t gb_codec_scale_bytes(int codec); /* bytes of a scale; 0 for those without */
/* Bytes of a message of `count` floats; 0 of none.  GB_CODEC_NONE: 4 * count, the floats themselves. */
uint64_t gb_codec_bytes(int codec, uint64_t count);
/* Seed `n` of those that follow from `seed`, for stochastic rounding: word n of its generator. */
uint64_t gb_codec_seed(uint64_t seed, uint64_t n);

#endif
