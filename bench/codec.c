/* SPDX-License-Identifier: Apache-2.0
 * Speed of the codecs on one core, beside memcpy of the same input in the same run: encode, decode-add of a message to
 * floats, and encode with stochastic rounding.  CPU time, so that other processes do not count.  One JSON object to
 * stdout. usage: bench_codec [VALUES [ROUNDS]] */
#include "codec/codec.h"
#include "codec/message.h"
#include "codec/reduce.h"

#include <gpubridge/gpubridge.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_ROUNDS 101
#define CALLS      4

struct buffers {
    uint64_t values;
    float *x, *y;
    unsigned char *message;
};

static void encode_rounding(const struct buffers *b, int codec, int flags)
{
    const struct gb_reduce_args a = {.dst = b->message,
                                     .src = {b->x},
                                     .count = b->values,
                                     .nsrc = 1,
                                     .dtype = GPUBRIDGE_F32,
                                     .codec = (uint8_t)codec,
                                     .flags = (uint8_t)flags,
                                     .seed = 1,
                                     .dst_is_enc = 1};
    gb_reduce_host(&a);
}

static void encode(const struct buffers *b, int codec)
{
    encode_rounding(b, codec, 0);
}

static void encode_stochastic(const struct buffers *b, int codec)
{
    encode_rounding(b, codec, GB_REDUCE_STOCHASTIC);
}

static void decode_add(const struct buffers *b, int codec)
{
    const struct gb_reduce_args a = {.dst = b->y,
                                     .src = {b->y, b->message},
                                     .count = b->values,
                                     .nsrc = 2,
                                     .enc_mask = 2,
                                     .dtype = GPUBRIDGE_F32,
                                     .codec = (uint8_t)codec};
    gb_reduce_host(&a);
}

static void copy(const struct buffers *b, int codec)
{
    (void)codec;
    memcpy(b->y, b->x, b->values * sizeof *b->x);
    __asm__ volatile("" : : "r"(b->y) : "memory");
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median rates of the calls, taken in turns, in GB of floats per second. */
static void measure(const struct buffers *b, int codec, int rounds, double *rates)
{
    void (*const calls[CALLS])(const struct buffers *, int) = {copy, encode, decode_add, encode_stochastic};
    static double seconds[CALLS][MAX_ROUNDS];
    for (int r = -2; r < rounds; r++)
        for (int i = 0; i < CALLS; i++) {
            const double begin = cpu_seconds();
            calls[i](b, codec);
            if (r >= 0) seconds[i][r] = cpu_seconds() - begin;
        }
    for (int i = 0; i < CALLS; i++) {
        qsort(seconds[i], (size_t)rounds, sizeof seconds[i][0], by_value);
        rates[i] = (double)b->values * 4e-9 / seconds[i][rounds / 2];
    }
}

int main(int argc, char **argv)
{
    struct buffers b = {.values = argc > 1 ? strtoull(argv[1], NULL, 0) : 16u << 20};
    int rounds = argc > 2 ? atoi(argv[2]) : 15, way = 0;
    if (rounds < 1 || rounds > MAX_ROUNDS) rounds = 15;
    b.x = aligned_alloc(64, (b.values * 4 + 63) & ~(uint64_t)63);
    b.y = aligned_alloc(64, (b.values * 4 + 63) & ~(uint64_t)63);
    b.message = aligned_alloc(64, (b.values * 4 + 127) & ~(uint64_t)63);
    if (!b.x || !b.y || !b.message) return 1;
    uint64_t state = 1;
    for (uint64_t i = 0; i < b.values; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        b.x[i] = (float)(int32_t)(state >> 32) * 1e-9f;
    }
    while (gb_message_way(way + 1)) way++;
    printf("{\"what\": \"codecs on one core, GB/s of float32 input, medians\", \"vectors\": \"%s\", \"values\": %llu, "
           "\"rounds\": %d,\n"
           " \"rows\": [",
           gb_message_way(way), (unsigned long long)b.values, rounds);
    for (int c = GB_CODEC_BF16; c < GB_CODEC_COUNT; c++) {
        double rate[CALLS];
        measure(&b, c, rounds, rate);
        printf("%s\n  {\"codec\": \"%s\", \"memcpy\": %.2f, \"encode\": %.2f, \"decode_add\": %.2f, \"encode_share\": "
               "%.2f, "
               "\"decode_add_share\": %.2f, \"encode_stochastic\": %.2f}",
               c > GB_CODEC_BF16 ? "," : "", gb_codec_name(c), rate[0], rate[1], rate[2], rate[1] / rate[0],
               rate[2] / rate[0], rate[3]);
    }
    printf("]}\n");
    free(b.x);
    free(b.y);
    free(b.message);
    return 0;
}
