/* SPDX-License-Identifier: Apache-2.0
 * Compressed operations by value between islands of processes: every rank has the same bits, and they are those of a
 * reference that knows the codecs from docs/wire-format.md alone; the same data inside a larger tensor gives the same
 * bits; NaN and infinity arrive everywhere and name their sender; the kernel's own counters of the sockets say how many
 * bytes crossed.  `compress_test emulated` puts every rank on an emulated GPU.  GB_TEST_FULL=1: all codecs x sizes. */
#include "codec_ref.h"
#include "coded.h"
#include "ranks.h"
#include "sanitized.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/tcp.h>
#include <math.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <xxhash.h>

static const struct ref_layout layouts[] = {
    {"1+1", 2, {"a", "b"}},
    {"2+2", 4, {"a", "a", "b", "b"}},
    {"3+1", 4, {"a", "a", "a", "b"}},
    {"1+4", 5, {"a", "b", "b", "b", "b"}},
    {"interleaved", 4, {"n", "a", "n", "a"}},
    {"three islands", 5, {"c", "b", "c", "a", "b"}},
};
static const uint64_t sizes[] = {1, 7, 127, 128, 129, 255, 257, 5000, 1000003};
static const char *const codec_names[] = {"", "none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "mxfp4"};

static const struct ref_layout *layout;
static int full, emulated;

/* ---- running ---- */

struct run {
    struct rank *rank;
    gpubridge_comm *comm;
    int kind, dtype, op, codec;
    uint64_t count;
};

static void same_everywhere(const struct run *r, const void *out, uint64_t bytes)
{
    uint64_t *words = rank_words(r->rank);
    words[r->rank->rank] = XXH3_64bits(out, bytes);
    rank_meet(r->rank);
    for (int q = 0; q < layout->size; q++)
        EXPECT(words[q] == words[r->rank->rank], "%s: %s x %llu: ranks %d and %d differ", layout->name,
               codec_names[r->codec], (unsigned long long)r->count, q, r->rank->rank);
    rank_meet(r->rank);
}

static void equal(const struct run *r, const void *got, const void *wanted, uint64_t count)
{
    for (uint64_t e = 0; e < count; e++) {
        if (memcmp((const char *)got + e * coded_width(r->dtype), (const char *)wanted + e * coded_width(r->dtype),
                   coded_width(r->dtype)) == 0)
            continue;
        EXPECT(0, "%s: rank %d: kind %d op %d dtype %d %s x %llu: element %llu is %a, expected %a", layout->name,
               r->rank->rank, r->kind, r->op, r->dtype, codec_names[r->codec], (unsigned long long)r->count,
               (unsigned long long)e, (double)coded_load(r->dtype, got, e), (double)coded_load(r->dtype, wanted, e));
    }
}

static void submit(const struct run *r, const void *send, void *recv, uint64_t count, int root)
{
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = r->kind,
                              .dtype = r->dtype,
                              .reduce_op = r->op,
                              .root = root,
                              .send = send,
                              .recv = recv,
                              .count = count,
                              .factor = 0.3,
                              .codec = r->codec};
    EXPECT_OK(gpubridge_run(r->comm, &op));
}

static void **make_inputs(const struct run *r, uint64_t seed, uint64_t count)
{
    void **inputs = calloc((size_t)layout->size, sizeof *inputs);
    for (int q = 0; q < layout->size; q++) {
        inputs[q] = calloc(count + 1, coded_width(r->dtype));
        coded_fill(r->dtype, seed, q, count, inputs[q]);
    }
    return inputs;
}

static void free_inputs(void **inputs)
{
    for (int q = 0; q < layout->size; q++) free(inputs[q]);
    free(inputs);
}

/* ALL_REDUCE alone, in place, and inside a larger tensor; REDUCE; REDUCE_SCATTER. */
static void reduce_case(struct run r, uint64_t seed)
{
    size_t w = coded_width(r.dtype);
    int me = r.rank->rank, root = (int)(seed % (uint64_t)layout->size);
    void **inputs = make_inputs(&r, seed, r.count);
    char *out = calloc(r.count + 1, w), *wanted = calloc(r.count + 1, w);
    const struct coded_sum sum = {
        .kind = r.kind, .dtype = r.dtype, .op = r.op, .codec = r.codec - GPUBRIDGE_CODEC_NONE, .factor = 0.3f};
    coded_want(layout, &sum, inputs, r.count, wanted);
    if (r.kind == GPUBRIDGE_ALL_REDUCE) {
        memcpy(out, inputs[me], r.count * w);
        submit(&r, out, out, r.count, 0);
        same_everywhere(&r, out, r.count * w);
        equal(&r, out, wanted, r.count);
        uint64_t before = 2048, whole = before + r.count + 3000; /* zeros around it */
        char *bucket = calloc(whole, w);
        memcpy(bucket + before * w, inputs[me], r.count * w);
        submit(&r, bucket, bucket, whole, 0);
        equal(&r, bucket + before * w, wanted, r.count);
        free(bucket);
    } else if (r.kind == GPUBRIDGE_REDUCE) {
        submit(&r, inputs[me], me == root ? out : NULL, r.count, root);
        if (me == root) equal(&r, out, wanted, r.count);
    } else {
        uint64_t blocks[REF_MAX_RANKS], first = 0;
        for (int q = 0; q < layout->size; q++) /* multiples of every codec's block, but for the last */
            blocks[q] = r.count / (uint64_t)layout->size / 128 * 128;
        blocks[layout->size - 1] = r.count - blocks[0] * (uint64_t)(layout->size - 1);
        first = blocks[0] * (uint64_t)me;
        struct gpubridge_op op = {.struct_size = sizeof op,
                                  .kind = r.kind,
                                  .dtype = r.dtype,
                                  .reduce_op = r.op,
                                  .send = inputs[me],
                                  .recv = out,
                                  .send_counts = blocks,
                                  .factor = 0.3,
                                  .codec = r.codec};
        EXPECT_OK(gpubridge_run(r.comm, &op));
        equal(&r, out, wanted + first * w, blocks[me]);
    }
    free(out);
    free(wanted);
    free_inputs(inputs);
}

/* ALL_GATHER and BROADCAST: everybody has what was decoded, the owner too. */
static void spread_case(struct run r, uint64_t seed)
{
    size_t w = coded_width(r.dtype);
    uint64_t n = (uint64_t)layout->size, bytes = r.count * w;
    void **inputs = make_inputs(&r, seed, r.count);
    char *out = calloc(n * r.count + 1, w), *wanted = calloc(n * r.count + 1, w);
    float *x = calloc(r.count + 1, sizeof *x);
    for (uint64_t q = 0; q < n; q++) {
        for (uint64_t e = 0; e < r.count; e++) x[e] = coded_load(r.dtype, inputs[q], e);
        ref_quantise(r.codec - GPUBRIDGE_CODEC_NONE, x, r.count);
        for (uint64_t e = 0; e < r.count; e++) coded_store(r.dtype, x[e], wanted + q * bytes, e);
    }
    int root = (int)(seed % n);
    if (r.kind == GPUBRIDGE_ALL_GATHER) {
        submit(&r, inputs[r.rank->rank], out, r.count, 0);
        equal(&r, out, wanted, n * r.count);
    } else {
        submit(&r, r.rank->rank == root ? inputs[root] : NULL, out, r.count, root);
        equal(&r, out, wanted + (uint64_t)root * bytes, r.count);
    }
    free(x);
    free(out);
    free(wanted);
    free_inputs(inputs);
}

/* Every codec and size by ALL_REDUCE, and of the other kinds one, another with each third case; dtype and sum change
 * with the case.  `full`: everything with everything. */
static void all_cases(struct rank *rank, gpubridge_comm *comm)
{
    static const int kinds[] = {GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_REDUCE, GPUBRIDGE_REDUCE_SCATTER, GPUBRIDGE_ALL_GATHER,
                                GPUBRIDGE_BROADCAST};
    static const int ops[] = {GPUBRIDGE_SUM, GPUBRIDGE_AVG, GPUBRIDGE_PREMUL_SUM};
    const uint64_t ncodecs = GPUBRIDGE_CODEC_COUNT - GPUBRIDGE_CODEC_BF16, nsizes = sizeof sizes / sizeof *sizes;
    for (uint64_t n = 0; n < ncodecs * nsizes * 30; n++) {
        uint64_t c = n / 30, k = n % 5, op = n / 5 % 3, half = n / 15 % 2; /* the case: codec and size */
        uint64_t chosen = k == 0 || (c % 3 == 0 && k == 1 + c / 3 % 4);
        if (!full && (!chosen || op != c % 3 || half != (c % 4 == 3))) continue;
        if (SANITIZED && !full && c % 5) continue;
        if (emulated && !full && c % nsizes == nsizes - 1 && c / nsizes % 3 != 2)
            continue; /* the large one: two codecs */
        struct run r = {rank,
                        comm,
                        kinds[k],
                        half ? GPUBRIDGE_BF16 : GPUBRIDGE_F32,
                        ops[op],
                        GPUBRIDGE_CODEC_BF16 + (int)(c / nsizes),
                        sizes[c % nsizes]};
        if (r.kind == GPUBRIDGE_ALL_GATHER || r.kind == GPUBRIDGE_BROADCAST)
            spread_case(r, n);
        else
            reduce_case(r, n);
    }
}

static void same_hash_twenty_times(struct rank *rank, gpubridge_comm *comm)
{
    struct run r = {rank, comm, GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_F32, GPUBRIDGE_SUM, GPUBRIDGE_CODEC_FP8_E4M3, 300001};
    void **inputs = make_inputs(&r, 77, r.count);
    char *out = calloc(r.count, 4);
    uint64_t first = 0;
    for (int i = 0; i < 20; i++) {
        submit(&r, inputs[rank->rank], out, r.count, 0);
        uint64_t hash = XXH3_64bits(out, r.count * 4);
        if (i == 0) first = hash;
        EXPECT(hash == first, "run %d gave other bits", i);
    }
    free(out);
    free_inputs(inputs);
}

/* The news of who sent the first NaN travels beside the operation, so it is awaited: all ranks come to name the same
 * rank, which is of the island of `sender`. */
static void same_culprit(struct rank *rank, gpubridge_comm *comm, int codec, int sender)
{
    struct gpubridge_codec_stats stats = {.struct_size = sizeof stats};
    uint64_t *words = rank_words(rank);
    int agreed = 0;
    for (double end = now_s() + 10; !agreed && now_s() < end;) {
        EXPECT_OK(gpubridge_comm_codec_stats(comm, GPUBRIDGE_ALL_REDUCE, codec, &stats));
        words[rank->rank] = (uint64_t)(stats.not_finite_rank + 1);
        rank_meet(rank);
        agreed = words[0] > 0;
        for (int q = 1; q < layout->size; q++) agreed &= words[q] == words[0];
        rank_meet(rank); /* nobody writes before all have read, so all go on or leave together */
    }
    EXPECT(agreed, "%s: rank %d says that rank %d sent it, others differ", codec_names[codec], rank->rank,
           stats.not_finite_rank);
    EXPECT(strcmp(layout->islands[stats.not_finite_rank], layout->islands[sender]) == 0, "%s: rank %d was named",
           codec_names[codec], stats.not_finite_rank);
}

/* One rank has a NaN and an infinity. */
static void wild_values(struct rank *rank, gpubridge_comm *comm)
{
    const uint64_t n = 100000, at[] = {4711, 66000};
    const int sender = layout->size - 1;
    float *in = calloc(n, 4), *out = calloc(n, 4);
    for (int codec = GPUBRIDGE_CODEC_BF16; codec <= GPUBRIDGE_CODEC_MXFP4; codec++) {
        struct run r = {rank, comm, GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_F32, GPUBRIDGE_SUM, codec, n};
        coded_fill(GPUBRIDGE_F32, 5, rank->rank, n, in);
        if (rank->rank == sender) in[at[0]] = NAN, in[at[1]] = -INFINITY;
        submit(&r, in, out, n, 0);
        same_everywhere(&r, out, n * 4);
        uint64_t wild = 0;
        for (uint64_t e = 0; e < n; e++) wild += !isfinite(out[e]);
        EXPECT(!isfinite(out[at[0]]) && !isfinite(out[at[1]]), "%s turned NaN or infinity into a number",
               codec_names[codec]);
        EXPECT(wild == (codec == GPUBRIDGE_CODEC_MXFP4 ? 64u : 2u), "%s: %llu values are not finite",
               codec_names[codec], (unsigned long long)wild);
        struct gpubridge_codec_stats stats = {.struct_size = sizeof stats};
        EXPECT_OK(gpubridge_comm_codec_stats(comm, GPUBRIDGE_ALL_REDUCE, codec, &stats));
        EXPECT(stats.ops && stats.blocks && stats.wire_bytes && stats.in_bytes > stats.wire_bytes,
               "nothing was counted");
        same_culprit(rank, comm, codec, sender);
    }
    free(in);
    free(out);
}

/* The first operation of a group and codec is sampled, on CPUs and on devices: of two ranks each encodes its input, so
 * the error of the first 1,024 values is known. */
static void sampled_error(struct rank *rank)
{
    enum { N = 100000, SAMPLE = 1024 };
    gpubridge_comm *comm = rank_comm(rank, "sampled", NULL, 0);
    float *in = calloc(N, 4), *out = calloc(N, 4), left[SAMPLE];
    for (int codec = GPUBRIDGE_CODEC_BF16; codec <= GPUBRIDGE_CODEC_MXFP4; codec++) {
        struct run r = {rank, comm, GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_F32, GPUBRIDGE_AVG, codec, N};
        struct gpubridge_codec_stats stats = {.struct_size = sizeof stats};
        double signal = 0, noise = 0, least = codec == GPUBRIDGE_CODEC_MXFP4 ? 12 : 20; /* dB */
        coded_fill(GPUBRIDGE_F32, 6, rank->rank, N, in);
        submit(&r, in, out, N, 0);
        EXPECT_OK(gpubridge_comm_codec_stats(comm, GPUBRIDGE_ALL_REDUCE, codec, &stats));
        EXPECT(stats.sampled_values > 0 && stats.signal > 0, "%s: no error was sampled", codec_names[codec]);
        EXPECT(10 * log10(stats.signal / stats.noise) > least, "%s: signal %g, noise %g", codec_names[codec],
               stats.signal, stats.noise);
        if (layout->size > 2) continue;
        memcpy(left, in, sizeof left);
        ref_quantise(codec - GPUBRIDGE_CODEC_NONE, left, SAMPLE);
        for (int e = 0; e < SAMPLE; e++) {
            signal += (double)in[e] * (double)in[e];
            noise += ((double)left[e] - (double)in[e]) * ((double)left[e] - (double)in[e]);
        }
        EXPECT(stats.sampled_values == SAMPLE && fabs(stats.signal / signal - 1) < 1e-9 &&
                   fabs(stats.noise / noise - 1) < 1e-9,
               "%s: signal %g, noise %g of %llu values, expected %g and %g", codec_names[codec], stats.signal,
               stats.noise, (unsigned long long)stats.sampled_values, signal, noise);
    }
    free(in);
    free(out);
    gpubridge_comm_destroy(comm);
}

/* Bytes that left through this process's TCP sockets, by the kernel's own count. */
static uint64_t socket_bytes(void)
{
    uint64_t total = 0;
    DIR *dir = opendir("/proc/self/fd");
    for (struct dirent *e; dir && (e = readdir(dir));) {
        struct tcp_info info = {0};
        socklen_t bytes = sizeof info;
        if (getsockopt(atoi(e->d_name), IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0)
            total += info.tcpi_bytes_sent - info.tcpi_bytes_retrans;
    }
    if (dir) closedir(dir);
    return total;
}

static void wire_bytes(struct rank *rank, gpubridge_comm *comm)
{
    const uint64_t n = 4000000;
    static const double most[] = {0, 1.01, 0.505, 0.505, 0.27, 0.27, 0.27, 0.14};
    float *x = calloc(n, 4);
    double plain = 0;
    coded_fill(GPUBRIDGE_F32, 9, rank->rank, n, x);
    for (int codec = GPUBRIDGE_CODEC_NONE; codec <= GPUBRIDGE_CODEC_MXFP4; codec++) {
        struct run r = {rank, comm, GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_F32, GPUBRIDGE_SUM, codec, n};
        rank_meet(rank);
        uint64_t before = socket_bytes();
        submit(&r, x, x, n, 0);
        EXPECT_OK(gpubridge_barrier(comm, 0)); /* the other rank has everything, so all of it was sent */
        double sent = (double)(socket_bytes() - before);
        if (codec == GPUBRIDGE_CODEC_NONE) plain = sent;
        EXPECT(plain > 4.0 * (double)n, "%.0f bytes crossed uncompressed", plain);
        if (rank->rank == 0)
            printf("%-9s %.0f bytes at the socket, %.4f of f32\n", codec_names[codec], sent, sent / plain);
        EXPECT(sent <= most[codec] * plain, "%s: %.0f of %.0f bytes", codec_names[codec], sent, plain);
    }
    free(x);
}

static void body(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "compress", NULL, 0);
    double start = now_s();
    all_cases(rank, comm);
    if (layout == &layouts[1] || full) same_hash_twenty_times(rank, comm);
    wild_values(rank, comm);
    sampled_error(rank);
    if (layout == &layouts[0] && !emulated) wire_bytes(rank, comm);
    if (rank->rank == 0) printf("%s: %.1f s\n", layout->name, now_s() - start);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

/* An op with another codec on one rank raises on all, naming both. */
static void disagreeing(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "disagree", NULL, 0);
    float *x = calloc(100000, 4);
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_ALL_REDUCE,
                              .dtype = GPUBRIDGE_F32,
                              .send = x,
                              .recv = x,
                              .count = 100000,
                              .codec = rank->rank ? GPUBRIDGE_CODEC_FP8_E4M3 : GPUBRIDGE_CODEC_MXFP4};
    int rc = gpubridge_run(comm, &op);
    const char *text = gpubridge_last_error();
    EXPECT(rc == GPUBRIDGE_ERR_MISMATCH || rc == GPUBRIDGE_ERR_ABORTED, "%d", rc);
    EXPECT(strstr(text, "fp8_e4m3") && strstr(text, "mxfp4"), "%s", text);
    free(x);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

/* So does another setting, when the group is made. */
static void other_settings(struct rank *rank)
{
    rank->settings = rank->rank ? "GPUBRIDGE_COMPRESSION=fp8\n" : "GPUBRIDGE_COMPRESSION=mxfp4\n";
    rank_open(rank);
    gpubridge_comm *comm = NULL;
    int rc = rank_try_comm(rank, "other", NULL, 0, &comm);
    const char *text = gpubridge_last_error();
    EXPECT(rc == GPUBRIDGE_ERR_MISMATCH, "%d", rc);
    EXPECT(strstr(text, "GPUBRIDGE_COMPRESSION is") && strstr(text, "fp8") && strstr(text, "mxfp4"), "%s", text);
    gpubridge_context_destroy(rank->context);
}

int main(int argc, char **argv)
{
    int failed = 0;
    full = getenv("GB_TEST_FULL") != NULL;
    emulated = argc > 1 && strcmp(argv[1], "emulated") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        char settings[256] = "GPUBRIDGE_CHUNK_BYTES=65536\n";
        if (!emulated) strcat(settings, "GPUBRIDGE_TRANSPORT=tcp\n"); /* whose bytes the kernel counts */
        size_t at = strlen(settings);
        layout = &layouts[i];
        if (getenv("GB_TEST_ONLY") && strcmp(getenv("GB_TEST_ONLY"), layout->name) != 0) continue;
        for (int r = 0; r < layout->size && emulated; r++) /* islands of letters beside each other: two vendors */
            at += (size_t)snprintf(settings + at, sizeof settings - at, "%s%s",
                                   r ? "," : "GPUBRIDGE_EMULATE=", layout->islands[r][0] % 2 ? "cuda" : "hip");
        snprintf(settings + at, sizeof settings - at, "\n");
        failed += ranks_run(layout->size, layout->islands, settings, full ? 900 : 120, body, layout->name);
    }
    layout = &layouts[2];
    if (!emulated) failed += ranks_run(layout->size, layout->islands, NULL, 60, disagreeing, "disagreeing");
    if (!emulated) failed += ranks_run(layout->size, layout->islands, NULL, 60, other_settings, "other settings");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
