/* SPDX-License-Identifier: Apache-2.0
 * Measures the bridge and the codecs of a new group and chooses a codec; see tune.h.  All operations are on host
 * memory: the wire is the same, and it is the wire that decides.  The user thread that makes a comm. */
#include "comm/tune.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALL_FLOATS 1u
#define FIRST_FLOATS (64u << 10)
#define MOST_FLOATS  (2u << 20)
#define AIM_S        0.05        /* a measured all_reduce takes about this long */
#define CODE_FLOATS  (64u << 10) /* stays in the second-level cache, as a chunk on its way does */
#define REPEATS      3

static const int candidates[] = {GB_CODEC_NONE, GB_CODEC_BF16, GB_CODEC_FP8_E4M3, GB_CODEC_INT8};
#define NCANDIDATES (sizeof candidates / sizeof *candidates)

static double model(const struct gb_tune_facts *facts, int codec, uint64_t chunk_bytes)
{
    const double chunk = (double)chunk_bytes / sizeof(float), n = GB_TUNE_FLOATS;
    const double share = (double)gb_codec_bytes(codec, GB_TUNE_FLOATS) / (n * sizeof(float));
    const double wire = facts->wire_s * share, code = facts->code_s[codec], pace = facts->round_s / 2 / chunk;
    double slowest = wire > code ? wire : code;
    if (pace > slowest) slowest = pace;
    return facts->round_s + n * slowest + chunk * (wire + code);
}

void gb_tune_choose(const struct gb_tune_facts *facts, uint64_t fixed_chunk, struct gb_tune_choice *choice)
{
    memset(choice, 0, sizeof *choice);
    for (size_t i = 0; i < NCANDIDATES; i++) {
        int codec = candidates[i];
        uint64_t first = fixed_chunk ? fixed_chunk : 256u << 10, last = fixed_chunk ? fixed_chunk : 8u << 20, best = 0;
        for (uint64_t chunk = first; chunk <= last; chunk *= 2) {
            double seconds = model(facts, codec, chunk);
            if (best && seconds >= choice->seconds[codec]) continue;
            choice->seconds[codec] = seconds;
            best = chunk;
        }
        if (i > 0 && choice->seconds[codec] > GB_TUNE_GAIN * choice->seconds[choice->codec]) continue;
        choice->codec = codec;
        choice->chunk_bytes = best;
    }
}

/* ---- measuring ---- */

static int all_reduce(gpubridge_comm *comm, void *data, uint64_t count, int dtype, int reduce_op)
{
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_ALL_REDUCE,
                              .dtype = dtype,
                              .reduce_op = reduce_op,
                              .flags = GPUBRIDGE_OP_HOST_BUFFERS,
                              .send = data,
                              .recv = data,
                              .count = count,
                              .codec = GPUBRIDGE_CODEC_NONE};
    return gpubridge_run(comm, &op);
}

/* Seconds of the fastest of some all_reduces on the slowest rank: equal on all ranks. */
static int time_all_reduce(gpubridge_comm *comm, float *data, uint64_t count, double *seconds)
{
    double best = 0;
    for (int i = 0; i < REPEATS; i++) {
        uint64_t start = gb_now_ns();
        GB_TRY(all_reduce(comm, data, count, GPUBRIDGE_F32, GPUBRIDGE_SUM));
        double took = (double)(gb_now_ns() - start) * 1e-9;
        if (i == 0 || took < best) best = took;
    }
    GB_TRY(all_reduce(comm, &best, 1, GPUBRIDGE_F64, GPUBRIDGE_MAX));
    *seconds = best;
    return 0;
}

/* Seconds per float of what a rank computes for its share of a tensor: one encoding, and the fold of all islands'
 * messages. */
static double time_codec(int codec, int is_random, uint32_t nislands, float *data, void *message)
{
    struct gb_reduce_args encode = {.dst = message,
                                    .src = {data},
                                    .count = CODE_FLOATS,
                                    .nsrc = 1,
                                    .dtype = GPUBRIDGE_F32,
                                    .op = GPUBRIDGE_SUM,
                                    .flags = is_random ? GB_REDUCE_STOCHASTIC : 0,
                                    .codec = (uint8_t)codec,
                                    .dst_is_enc = 1};
    struct gb_reduce_args fold = {
        .dst = data, .count = CODE_FLOATS, .dtype = GPUBRIDGE_F32, .op = GPUBRIDGE_SUM, .codec = (uint8_t)codec};
    fold.nsrc = (uint8_t)(nislands < GB_REDUCE_MAX_SRC ? nislands : GB_REDUCE_MAX_SRC);
    for (uint32_t i = 0; i < fold.nsrc; i++) {
        fold.src[i] = message;
        fold.enc_mask |= 1u << i;
    }
    double best = 0;
    for (int i = 0; i < REPEATS; i++) {
        for (uint32_t k = 0; k < CODE_FLOATS; k++) data[k] = (float)(k % 1021) - 510.0f;
        uint64_t start = gb_now_ns();
        gb_reduce_host(&encode);
        gb_reduce_host(&fold);
        double took = (double)(gb_now_ns() - start) * 1e-9;
        if (i == 0 || took < best) best = took;
    }
    return best / CODE_FLOATS;
}

/* A real GPU's kernels are not measured: they are orders of magnitude faster than any bridge. */
static int measure_codecs(gpubridge_comm *comm, float *data, struct gb_tune_facts *facts)
{
    const struct gb_topo *topo = comm->group.topo;
    uint32_t island = topo->island[comm->group.rank];
    uint32_t mates = topo->island_first[island + 1] - topo->island_first[island];
    int is_gpu = comm->context->launcher && !comm->context->emulated;
    void *message = aligned_alloc(64, (gb_codec_bytes(GB_CODEC_NONE, CODE_FLOATS) + 127) & ~(uint64_t)63);
    if (!message) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to measure codecs");
    for (size_t i = 1; i < NCANDIDATES && !is_gpu; i++)
        facts->code_s[candidates[i]] =
            time_codec(candidates[i], comm->group.codec_is_random, topo->nislands, data, message) / mates;
    free(message);
    return all_reduce(comm, facts->code_s, GB_CODEC_COUNT, GPUBRIDGE_F64, GPUBRIDGE_MAX);
}

static int measure(gpubridge_comm *comm, float *data, struct gb_tune_facts *facts)
{
    double first = 0, large = 0;
    GB_TRY(time_all_reduce(comm, data, SMALL_FLOATS, &facts->round_s));
    GB_TRY(time_all_reduce(comm, data, FIRST_FLOATS, &first));
    double fits = AIM_S / first * FIRST_FLOATS;
    uint64_t count = fits < FIRST_FLOATS ? FIRST_FLOATS : fits > MOST_FLOATS ? MOST_FLOATS : (uint64_t)fits;
    GB_TRY(time_all_reduce(comm, data, count, &large));
    double alone = large > facts->round_s ? large - facts->round_s : large;
    facts->wire_s = alone / (double)count;
    return measure_codecs(comm, data, facts);
}

static void tell(const gpubridge_comm *comm, const struct gb_tune_facts *facts, const struct gb_tune_choice *choice)
{
    char times[256] = "";
    for (size_t i = 0, at = 0; i < NCANDIDATES && at < sizeof times; i++)
        at += (size_t)snprintf(times + at, sizeof times - at, "%s%s %.1f ms", i ? ", " : "",
                               gb_codec_name(candidates[i]), 1e3 * choice->seconds[candidates[i]]);
    GB_INFO(
        "group %s: compression auto: %s in chunks of %llu KiB; modelled for 25 MiB: %s (measured: uncompressed float32 "
        "%.0f MB/s, a round %.0f us, coding %.0f to %.0f MB/s)",
        comm->group.name, gb_codec_name(choice->codec), (unsigned long long)choice->chunk_bytes >> 10, times,
        4e-6 / facts->wire_s, 1e6 * facts->round_s, 4e-6 / (facts->code_s[GB_CODEC_INT8] + 1e-15),
        4e-6 / (facts->code_s[GB_CODEC_BF16] + 1e-15));
}

/* By how much plans cut chunks larger than their setting for a codec. */
static uint64_t saves(int codec)
{
    const uint64_t plain = sizeof(float) * GB_TUNE_FLOATS, coded = gb_codec_bytes(codec, GB_TUNE_FLOATS);
    return (plain + coded / 2) / coded;
}

int gb_comm_tune(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    struct gb_tune_facts facts = {0};
    struct gb_tune_choice choice;
    if (group->topo->nislands < 2) return 0; /* nothing crosses */
    float *data = calloc(MOST_FLOATS, sizeof *data);
    if (!data) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to measure the bridge");
    int rc = measure(comm, data, &facts);
    free(data);
    if (rc) return rc;
    gb_tune_choose(&facts, group->chunk_bytes, &choice);
    pthread_mutex_lock(&group->submit_lock);
    group->codec = choice.codec;
    if (choice.codec != GB_CODEC_NONE && !group->chunk_bytes)
        group->chunk_bytes = choice.chunk_bytes / saves(choice.codec);
    gb_group_flush_plans(group); /* they were built for other chunks */
    pthread_mutex_unlock(&group->submit_lock);
    tell(comm, &facts, &choice);
    return 0;
}
