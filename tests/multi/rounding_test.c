/* SPDX-License-Identifier: Apache-2.0
 * Stochastic rounding in compressed operations (GPUBRIDGE_COMPRESSION_SEED), between CPU ranks and between emulated
 * vendors: the bits are those of a reference that draws its words as docs/wire-format.md section 8 says, equal on all
 * ranks and again in a second group with the same seed; the mean over many operations comes to the true sum where
 * rounding to nearest stays off; ranks with different seeds raise everywhere. */
#include "codec_ref.h"
#include "coded.h"
#include "ranks.h"
#include "sanitized.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

#define SEED  4242u
#define COUNT 5003u /* no multiple of a block */

static const struct ref_layout layouts[] = {
    {"2+2", 4, {"a", "a", "b", "b"}},
    {"three islands", 5, {"c", "b", "c", "a", "b"}},
};
static const char *const codec_names[] = {"", "none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "mxfp4"};

static const struct ref_layout *layout;
static int rounds; /* of the mean */

/* A comm whose operations are counted: the number is part of each one's seed. */
struct run {
    struct rank *rank;
    gpubridge_comm *comm;
    uint64_t seq;
};

static uint64_t run(struct run *r, struct gpubridge_op op)
{
    op.struct_size = sizeof op;
    EXPECT_OK(gpubridge_run(r->comm, &op));
    return ref_random(SEED, r->seq++);
}

static void equal(const struct run *r, const struct gpubridge_op *op, const void *got, const void *wanted,
                  uint64_t count)
{
    const size_t w = coded_width(op->dtype);
    for (uint64_t e = 0; e < count; e++)
        EXPECT(memcmp((const char *)got + e * w, (const char *)wanted + e * w, w) == 0,
               "%s: rank %d: kind %d op %d dtype %d %s: element %llu is %a, expected %a", layout->name, r->rank->rank,
               op->kind, op->reduce_op, op->dtype, codec_names[op->codec], (unsigned long long)e,
               (double)coded_load(op->dtype, got, e), (double)coded_load(op->dtype, wanted, e));
}

/* ALL_REDUCE, REDUCE and REDUCE_SCATTER by value. */
static void sum_case(struct run *r, int kind, int dtype, int reduce_op, int codec)
{
    const size_t w = coded_width(dtype);
    const int me = r->rank->rank, root = layout->size - 1;
    void *inputs[REF_MAX_RANKS];
    char *out = calloc(COUNT, w), *wanted = calloc(COUNT, w);
    uint64_t blocks[REF_MAX_RANKS];
    for (int q = 0; q < layout->size; q++) {
        inputs[q] = calloc(COUNT, w);
        coded_fill(dtype, (uint64_t)codec, q, COUNT, inputs[q]);
        blocks[q] =
            COUNT / (uint64_t)layout->size / 128 * 128; /* whole blocks of every codec, but for the last rank's */
    }
    blocks[layout->size - 1] = COUNT - blocks[0] * (uint64_t)(layout->size - 1);
    const struct gpubridge_op op = {.kind = kind,
                                    .dtype = dtype,
                                    .reduce_op = reduce_op,
                                    .root = root,
                                    .send = inputs[me],
                                    .recv = out,
                                    .count = COUNT,
                                    .send_counts = kind == GPUBRIDGE_REDUCE_SCATTER ? blocks : NULL,
                                    .factor = 0.3,
                                    .codec = codec};
    const uint64_t seed = run(r, op);
    const struct coded_sum sum = {kind, dtype, reduce_op, codec - GPUBRIDGE_CODEC_NONE, 0.3f, &seed};
    coded_want(layout, &sum, inputs, COUNT, wanted);
    if (kind == GPUBRIDGE_REDUCE_SCATTER)
        equal(r, &op, out, wanted + blocks[0] * w * (uint64_t)me, blocks[me]);
    else if (kind == GPUBRIDGE_ALL_REDUCE || me == root)
        equal(r, &op, out, wanted, COUNT);
    for (int q = 0; q < layout->size; q++) free(inputs[q]);
    free(out);
    free(wanted);
}

static void gather_case(struct run *r, int codec)
{
    const uint64_t n = (uint64_t)layout->size;
    float *in = calloc(COUNT, 4), *out = calloc(n * COUNT, 4), *wanted = calloc(n * COUNT, 4);
    coded_fill(GPUBRIDGE_F32, 3, r->rank->rank, COUNT, in);
    const struct gpubridge_op op = {
        .kind = GPUBRIDGE_ALL_GATHER, .dtype = GPUBRIDGE_F32, .send = in, .recv = out, .count = COUNT, .codec = codec};
    const uint64_t seed = run(r, op);
    for (uint64_t q = 0; q < n; q++) {
        coded_fill(GPUBRIDGE_F32, 3, (int)q, COUNT, wanted + q * COUNT);
        ref_quantise_random(codec - GPUBRIDGE_CODEC_NONE, wanted + q * COUNT, COUNT, ref_random(seed, q), 0);
    }
    equal(r, &op, out, wanted, n * COUNT);
    free(in);
    free(out);
    free(wanted);
}

static void all_cases(struct run *r)
{
    static const int ops[] = {GPUBRIDGE_SUM, GPUBRIDGE_AVG, GPUBRIDGE_PREMUL_SUM};
    for (int codec = GPUBRIDGE_CODEC_BF16; codec <= GPUBRIDGE_CODEC_MXFP4; codec++) {
        int op = ops[codec % 3], other = ops[(codec + 1) % 3];
        sum_case(r, GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_F32, op, codec);
        sum_case(r, GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_BF16, other, codec);
        sum_case(r, GPUBRIDGE_REDUCE, GPUBRIDGE_F32, other, codec);
        sum_case(r, GPUBRIDGE_REDUCE_SCATTER, GPUBRIDGE_F32, op, codec);
        gather_case(r, codec);
    }
}

/* Hash of several ALL_REDUCEs of the same values, which must not be one and the same. */
static uint64_t history(struct run *r)
{
    const int me = r->rank->rank;
    float *in = calloc(COUNT, 4), *out = calloc(COUNT, 4);
    uint64_t all = 0, last = 0;
    coded_fill(GPUBRIDGE_F32, 8, me, COUNT, in);
    for (int i = 0; i < 5; i++) {
        (void)run(
            r, (struct gpubridge_op){
                   .dtype = GPUBRIDGE_F32, .send = in, .recv = out, .count = COUNT, .codec = GPUBRIDGE_CODEC_FP8_E4M3});
        uint64_t hash = XXH3_64bits(out, COUNT * 4);
        EXPECT(hash != last, "two operations drew the same words");
        last = hash;
        all = XXH3_64bits_withSeed(&hash, sizeof hash, all);
    }
    uint64_t *words = rank_words(r->rank);
    words[me] = all;
    rank_meet(r->rank);
    for (int q = 0; q < layout->size; q++) EXPECT(words[q] == all, "%s: ranks %d and %d differ", layout->name, q, me);
    rank_meet(r->rank);
    free(in);
    free(out);
    return all;
}

/* Mean error over many operations, in units of what one operation is off by; rounding to nearest gives 1. */
static double bias(struct run *r, int codec, int n)
{
    enum { N = 1024 };
    static float in[N], out[N];
    static double total[N], squares[N];
    double off = 0, spread = 0;
    for (int e = 0; e < N; e++) in[e] = e % 32 ? 0.3f + (float)(e % 7) * 0.013f : 1.0f; /* rounded down, or all up */
    memset(total, 0, sizeof total);
    memset(squares, 0, sizeof squares);
    for (int i = 0; i < n; i++) {
        (void)run(r,
                  (struct gpubridge_op){.dtype = GPUBRIDGE_F32, .send = in, .recv = out, .count = N, .codec = codec});
        for (int e = 0; e < N; e++) {
            double error = (double)out[e] - (double)in[e] * layout->size;
            total[e] += error;
            squares[e] += error * error;
        }
    }
    for (int e = 0; e < N; e++) {
        off += pow(total[e] / n, 2);
        spread += squares[e] / n;
    }
    return sqrt(off / spread);
}

static void body(struct rank *rank)
{
    double start = now_s();
    rank_open(rank);
    struct run first = {rank, rank_comm(rank, "first", NULL, 0), 0}, again = {rank, NULL, 0};
    all_cases(&first);
    again.comm = rank_comm(rank, "again", NULL, 0);
    first.comm = (gpubridge_comm_destroy(first.comm), rank_comm(rank, "a third", NULL, 0));
    EXPECT(history(&first) == history(&again), "the same seed and operations gave other bits");
    for (int codec = GPUBRIDGE_CODEC_FP8_E4M3; codec <= GPUBRIDGE_CODEC_MXFP4; codec++) {
        /* The mean of n errors that are 0 on average is 1 / sqrt(n) of their size; over 1,024 values it is so closely.
         */
        double left = bias(&first, codec, rounds);
        EXPECT(left < 1.3 / sqrt(rounds), "%s: %g of the error is left in the mean", codec_names[codec], left);
        if (rank->rank == 0)
            printf("%s: %s: %.4f of the error is left in the mean\n", layout->name, codec_names[codec], left);
    }
    gpubridge_comm_destroy(again.comm);
    gpubridge_comm_destroy(first.comm);
    gpubridge_context_destroy(rank->context);
    if (rank->rank == 0) printf("%s: %.1f s\n", layout->name, now_s() - start);
}

/* Without a seed all of the error stays: what the mean above is worth. */
static void to_nearest(struct rank *rank)
{
    rank_open(rank);
    struct run r = {rank, rank_comm(rank, "nearest", NULL, 0), 0};
    for (int codec = GPUBRIDGE_CODEC_FP8_E4M3; codec <= GPUBRIDGE_CODEC_MXFP4; codec++) {
        double left = bias(&r, codec, 3);
        EXPECT(left > 0.999, "%s: %g of the error is left in the mean", codec_names[codec], left);
    }
    gpubridge_comm_destroy(r.comm);
    gpubridge_context_destroy(rank->context);
}

static void other_seed(struct rank *rank)
{
    rank->settings = rank->rank == 1 ? "GPUBRIDGE_COMPRESSION_SEED=7\n" : "GPUBRIDGE_COMPRESSION_SEED=8\n";
    rank_open(rank);
    gpubridge_comm *comm = NULL;
    int rc = rank_try_comm(rank, "other", NULL, 0, &comm);
    const char *text = gpubridge_last_error();
    EXPECT(rc == GPUBRIDGE_ERR_MISMATCH, "%d", rc);
    EXPECT(strstr(text, "GPUBRIDGE_COMPRESSION_SEED is") && strstr(text, " 7 ") && strstr(text, " 8 "), "%s", text);
    gpubridge_context_destroy(rank->context);
}

int main(int argc, char **argv)
{
    const int emulated = argc > 1 && strcmp(argv[1], "emulated") == 0;
    int failed = 0;
    rounds = emulated || SANITIZED ? 100 : 1000;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        char settings[256] = "GPUBRIDGE_CHUNK_BYTES=4096\n", seeded[300];
        size_t at = strlen(settings);
        layout = &layouts[i];
        for (int r = 0; r < layout->size && emulated; r++) /* islands of letters beside each other: two vendors */
            at += (size_t)snprintf(settings + at, sizeof settings - at, "%s%s",
                                   r ? "," : "GPUBRIDGE_EMULATE=", layout->islands[r][0] % 2 ? "cuda" : "hip");
        snprintf(settings + at, sizeof settings - at, "\n");
        snprintf(seeded, sizeof seeded, "%sGPUBRIDGE_COMPRESSION_SEED=%u\n", settings, SEED);
        failed += ranks_run(layout->size, layout->islands, seeded, 120, body, layout->name);
        failed += ranks_run(layout->size, layout->islands, settings, 60, to_nearest, "to nearest");
    }
    if (!emulated) failed += ranks_run(layout->size, layout->islands, NULL, 60, other_seed, "other seed");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
