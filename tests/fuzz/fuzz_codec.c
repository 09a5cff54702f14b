/* SPDX-License-Identifier: Apache-2.0
 * Fuzz target: messages of every codec.  Whatever their bytes are, they decode, the same with every vector width and on
 * the kernels' twin; finite values stay finite when they are encoded again, and do not change when that is repeated. */
#include "fuzz.h"

#include "codec/codec.h"
#include "codec/message.h"
#include "codec/reduce.h"

#include "../unit/reduce_twin.h"

#include <gpubridge/gpubridge.h>

#include <stdlib.h>
#include <string.h>

#define MAX_COUNT 1500

static void require(int condition)
{
    if (!condition) abort();
}

static struct gb_reduce_args base(int codec, uint64_t count)
{
    struct gb_reduce_args a = {.count = count, .divisor = 3, .factor = 0.5, .dtype = GPUBRIDGE_F32};
    a.codec = (uint8_t)codec;
    return a;
}

/* One message from the heap, of exactly its length, so that a sanitizer sees the first byte too many. */
static uint8_t *message_of(const uint8_t *data, size_t size, size_t bytes)
{
    uint8_t *message = aligned_alloc(16, bytes ? bytes : 16);
    require(message != NULL);
    for (size_t i = 0; i < bytes; i++) message[i] = size ? data[i % size] : 0;
    return message;
}

/* Decodes, adds to itself once more and keeps the mean, adds it to that: all widths and the twins agree. */
static void fold(int codec, int dtype, uint64_t count, const uint8_t *message)
{
    static _Alignas(64) uint8_t want[4 * MAX_COUNT], got[4 * MAX_COUNT], plain[4 * MAX_COUNT];
    struct gb_reduce_args a = base(codec, count);
    const size_t bytes = (size_t)count * gb_dtype_bytes(dtype);
    a.src[0] = a.src[1] = message;
    a.nsrc = 2;
    a.enc_mask = 3;
    a.dtype = (uint8_t)dtype;
    a.op = GPUBRIDGE_AVG;
    a.flags = GB_REDUCE_FINAL;
    a.dst = want;
    gb_reduce_messages_by(0, &a);
    a.dst = got;
    for (int way = 1; gb_message_way(way); way++) {
        gb_reduce_messages_by(way, &a);
        require(memcmp(want, got, bytes) == 0);
    }
    twin_reduce(GB_WAY_ANY, &a, 1, 32);
    require(memcmp(want, got, bytes) == 0);
    memcpy(plain, want, bytes);
    a.src[0] = plain;
    a.enc_mask = 2;
    a.divisor = 4;
    require(gb_reduce_way(&a) == GB_WAY_ADD);
    a.dst = want;
    gb_reduce_messages_by(0, &a);
    a.dst = got;
    twin_reduce(GB_WAY_ADD, &a, 1, 32);
    require(memcmp(want, got, bytes) == 0);
}

static void round_trip(int codec, uint64_t count, const uint8_t *message, size_t bytes)
{
    static _Alignas(64) float x[MAX_COUNT], y[MAX_COUNT];
    uint64_t stats[GB_CODEC_STATS] = {0};
    uint8_t *again = message_of(NULL, 0, bytes), *third = message_of(NULL, 0, bytes);
    struct gb_reduce_args decode = base(codec, count), encode = base(codec, count);
    decode.nsrc = encode.nsrc = 1;
    decode.enc_mask = 1;
    encode.dst_is_enc = 1;
    encode.stats = stats;
    decode.dst = x;
    decode.src[0] = message;
    gb_reduce_host(&decode);
    encode.dst = again;
    encode.src[0] = x;
    gb_reduce_host(&encode);
    decode.dst = y;
    decode.src[0] = again;
    gb_reduce_host(&decode);
    for (uint64_t i = 0; i < count; i++) require(stats[GB_CODEC_NOT_FINITE] || (y[i] - y[i] == 0 && x[i] - x[i] == 0));
    /* The scale may come out smaller where the greatest was rounded down; int8's is rounded itself. */
    encode.dst = third;
    encode.src[0] = y;
    gb_reduce_host(&encode);
    decode.dst = x;
    decode.src[0] = third;
    gb_reduce_host(&decode);
    if (codec != GB_CODEC_INT8) require(memcmp(x, y, (size_t)count * sizeof *x) == 0);
    free(again);
    free(third);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3) return 0;
    const int codec = 1 + data[0] % (GB_CODEC_COUNT - 1);
    const uint64_t count = ((uint64_t)data[1] | (uint64_t)data[2] << 8) % MAX_COUNT;
    const size_t bytes = (size_t)gb_codec_bytes(codec, count);
    uint8_t *message = message_of(data + 3, size - 3, bytes);
    fold(codec, GPUBRIDGE_F32, count, message);
    fold(codec, GPUBRIDGE_BF16, count, message);
    fold(codec, GPUBRIDGE_F16, count, message);
    round_trip(codec, count, message, bytes);
    free(message);
    return 0;
}
