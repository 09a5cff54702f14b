/* SPDX-License-Identifier: Apache-2.0
 * The CPU's arithmetic as a shared library, for checks in Python: whole operations as the library does them, and single
 * codes without a block around them. */
#include "codec/codec.h"
#include "codec/message.h"
#include "codec/reduce.h"

#include "codec/kernels.inc"

#define EXPORT __attribute__((visibility("default")))

EXPORT uint64_t codec_bytes(int codec, uint64_t count);
EXPORT void codec_reduce(const struct gb_reduce_args *args);
EXPORT void codec_reduce_by(int way, const struct gb_reduce_args *args);
EXPORT const char *codec_way(int way);
EXPORT void codec_codes(int codec, const float *x, uint8_t *codes, uint64_t count);
EXPORT void codec_values(int codec, const uint8_t *codes, float *x, uint64_t count);
EXPORT void codec_casts(int codec, const float *x, uint16_t *codes, uint64_t count);

uint64_t codec_bytes(int codec, uint64_t count)
{
    return gb_codec_bytes(codec, count);
}

void codec_reduce(const struct gb_reduce_args *args)
{
    gb_reduce_host(args);
}

void codec_reduce_by(int way, const struct gb_reduce_args *args)
{
    gb_reduce_messages_by(way, args);
}

const char *codec_way(int way)
{
    return gb_message_way(way);
}

/* Codes of values that need no scale; mxfp4 takes a byte for each here. */
void codec_codes(int codec, const float *x, uint8_t *codes, uint64_t count)
{
    if (codec == GB_CODEC_FP8_E4M3)
        for (uint64_t i = 0; i < count; i++) codes[i] = (uint8_t)gb_code(x[i], GB_K_E4M3, 1, 0, 0);
    if (codec == GB_CODEC_FP8_E5M2)
        for (uint64_t i = 0; i < count; i++) codes[i] = (uint8_t)gb_code(x[i], GB_K_E5M2, 1, 0, 0);
    if (codec == GB_CODEC_MXFP4)
        for (uint64_t i = 0; i < count; i++) codes[i] = (uint8_t)gb_code(x[i], GB_K_E2M1, 1, 0, 0);
}

void codec_values(int codec, const uint8_t *codes, float *x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) x[i] = gb_value(codes[i], codec);
}

void codec_casts(int codec, const float *x, uint16_t *codes, uint64_t count)
{
    gb_u32 event;
    for (uint64_t i = 0; i < count; i++) codes[i] = (uint16_t)gb_cast(x[i], codec, 0, 0, &event);
}
