/* SPDX-License-Identifier: Apache-2.0
 *
 * codec_ref.h: what is left of values that crossed as an encoded message, from docs/wire-format.md alone.  Written for
 * reading, not for speed; shares no code with the library. */
#ifndef GB_TESTS_CODEC_REF_H
#define GB_TESTS_CODEC_REF_H

#include <stdint.h>

/* Numbered as the wire numbers codecs. */
enum ref_codec { REF_NONE, REF_BF16, REF_FP16, REF_FP8_E4M3, REF_FP8_E5M2, REF_INT8, REF_MXFP4 };

/* x[0 .. n) as one message: encoded and decoded.  A NaN comes out as some NaN. */
void ref_quantise(int codec, float *x, uint64_t n);
/* The same rounded stochastically; x[0] is value `first` of those that `seed` is for. */
void ref_quantise_random(int codec, float *x, uint64_t n, uint64_t seed, uint64_t first);
/* Word n of the generator: also the seed of part n. */
uint64_t ref_random(uint64_t seed, uint64_t n);
/* Bytes of that message. */
uint64_t ref_encoded_bytes(int codec, uint64_t n);

#endif
