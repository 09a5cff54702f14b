/* SPDX-License-Identifier: Apache-2.0
 * Every collective by value between emulated GPUs of two vendors, alone and mixed with each other in every layout, with
 * the device side enqueued in advance (gate on, CUDA) and launched when the network is ready (off).  The same cases and
 * the same reference as between CPUs: so the bits are the same too.  GB_TEST_FULL=1 (make values) runs every case
 * instead of a sample. */
#include "values.h"

#include "sanitized.h"

#include <string.h>

/* `vendors`: GPUBRIDGE_EMULATE by rank. */
struct mix {
    struct ref_layout layout;
    const char *vendors, *islands; /* islands NULL: one per vendor */
};

static const struct mix mixes[] = {
    {{"cuda 1 + hip 1", 2, {"c", "h"}}, "cuda,hip", NULL},
    {{"cuda 2 + hip 2", 4, {"c", "c", "h", "h"}}, "cuda,cuda,hip,hip", NULL},
    {{"cuda 3 + hip 1", 4, {"c", "c", "c", "h"}}, "cuda,cuda,cuda,hip", NULL},
    {{"hip 1 + cuda 4", 5, {"h", "c", "c", "c", "c"}}, "hip,cuda,cuda,cuda,cuda", NULL},
    {{"interleaved", 4, {"c", "h", "c", "h"}}, "cuda,hip,cuda,hip", NULL},
    {{"three islands", 5, {"x", "y", "x", "z", "y"}}, "cuda,hip,cuda,cuda,hip", "x,y,x,z,y"},
    {{"one cuda island", 3, {"c", "c", "c"}}, "cuda", NULL},
    {{"cuda 2 + cpu 1", 3, {"c", "c", "p"}}, "cuda,cuda,none", NULL},
};

static const struct mix *mix;
static struct values_plan plan;

static void body(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "values", NULL, 0);
    plan.layout = &mix->layout;
    uint64_t ran = values_run(rank, comm, &plan);
    if (rank->rank == 0) printf("%s: %llu cases\n", mix->layout.name, (unsigned long long)ran);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

/* Only CUDA streams can wait for flags safely, so a HIP rank knows no gate. */
static int run_mix(const char *gate, const char *more, int limit_s)
{
    char settings[600], what[100];
    if (strcmp(gate, "on") == 0 && strstr(mix->vendors, "hip")) gate = "auto";
    snprintf(settings, sizeof settings, "GPUBRIDGE_EMULATE=%s\nGPUBRIDGE_GATE=%s\n%s%s%s%s", mix->vendors, gate,
             mix->islands ? "GPUBRIDGE_ISLAND=" : "", mix->islands ? mix->islands : "", mix->islands ? "\n" : "", more);
    snprintf(what, sizeof what, "%s, gate %s", mix->layout.name, gate);
    double start = now_s();
    int failed = ranks_run(mix->layout.size, NULL, settings, limit_s, body, what);
    printf("%s: %.1f s\n", what, now_s() - start);
    return failed;
}

/* Mixes `first`, `first` + `step`, ... */
static int run(const struct values_plan *sample, const char *gate, const char *more, size_t first, size_t step)
{
    int failed = 0, full = getenv("GB_TEST_FULL") != NULL;
    const char *only = getenv("GB_TEST_ONLY");
    plan = *sample;
    if (full) plan.stride = plan.large_stride = 1;
    if (full) first = 0, step = 1;
    for (size_t i = first; i < sizeof mixes / sizeof *mixes; i += step) {
        mix = &mixes[i];
        if (!only || strstr(mix->layout.name, only)) failed += run_mix(gate, more, full ? 3600 : 120);
    }
    return failed;
}

int main(void)
{
    static const uint64_t counts[] = {0, 1, 7, 127, 128, 129, 1000};
    static const uint64_t chunked[] = {1, 1023, 1024, 1025, 5000, 10007};
    const struct values_plan whole = {.counts = counts,
                                      .ncounts = sizeof counts / sizeof *counts,
                                      .stride = 67 * SANITIZED_FACTOR,
                                      .large = 1000003,
                                      .large_stride = 101 * SANITIZED_FACTOR};
    const struct values_plan pipelined = {
        .counts = chunked, .ncounts = sizeof chunked / sizeof *chunked, .stride = 101 * SANITIZED_FACTOR};
    static const char small_chunks[] = "GPUBRIDGE_FLAT_BYTES=0\nGPUBRIDGE_CHUNK_BYTES=4096\n";
    /* Starting the ranks is most of the time: the chunks, and everything under a sanitizer, take one half of the mixes
     * with the gate and the other half without. */
    const size_t step = SANITIZED ? 2 : 1, chunks_step = SANITIZED ? 4 : 2;
    int failed = run(&whole, "on", "", 0, step) + run(&whole, "off", "", step - 1, step);
    failed += run(&pipelined, "on", small_chunks, chunks_step - 2, chunks_step);
    failed += run(&pipelined, "off", small_chunks, chunks_step - 1, chunks_step);
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
