/* SPDX-License-Identifier: Apache-2.0
 * Every collective by value between islands of CPU ranks, in every layout; and once more with chunks so small that the
 * pipelines of large messages run at small counts.  GB_TEST_FULL=1 (make values) runs every case instead of a sample,
 * GB_TEST_ONLY one layout. */
#include "values.h"

#include "sanitized.h"

#include <string.h>

static const struct ref_layout layouts[] = {
    {"1+1", 2, {"a", "b"}},
    {"2+2", 4, {"a", "a", "b", "b"}},
    {"3+1", 4, {"a", "a", "a", "b"}},
    {"1+4", 5, {"a", "b", "b", "b", "b"}},
    {"interleaved", 4, {"n", "a", "n", "a"}},
    {"three islands", 5, {"c", "b", "c", "a", "b"}},
    {"one island", 3, {"a", "a", "a"}},
    {"alone", 1, {"a"}},
};

static const struct ref_layout *layout;
static struct values_plan plan;

static void body(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "values", NULL, 0);
    plan.layout = layout;
    uint64_t ran = values_run(rank, comm, &plan);
    if (rank->rank == 0) {
        printf("%s: %llu cases\n", layout->name, (unsigned long long)ran);
        values_print_distances(layout->name);
    }
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

static int run(const struct values_plan *sample, const char *settings)
{
    int failed = 0, full = getenv("GB_TEST_FULL") != NULL;
    const char *only = getenv("GB_TEST_ONLY");
    plan = *sample;
    if (full) plan.stride = plan.large_stride = 1;
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        layout = &layouts[i];
        if (only && !strstr(layout->name, only)) continue;
        double start = now_s();
        failed += ranks_run(layout->size, layout->islands, settings, full ? 3600 : 120, body, layout->name);
        printf("%s: %.1f s\n", layout->name, now_s() - start);
    }
    return failed;
}

int main(void)
{
    static const uint64_t counts[] = {0, 1, 7, 127, 128, 129, 1000};
    static const uint64_t chunked[] = {1, 1023, 1024, 1025, 5000, 10007};
    const struct values_plan whole = {.counts = counts,
                                      .ncounts = sizeof counts / sizeof *counts,
                                      .stride = 23 * SANITIZED_FACTOR,
                                      .large = 1000003,
                                      .large_stride = 41 * SANITIZED_FACTOR};
    const struct values_plan pipelined = {
        .counts = chunked, .ncounts = sizeof chunked / sizeof *chunked, .stride = 47 * SANITIZED_FACTOR};
    int failed = run(&whole, NULL);
    failed += run(&pipelined, "GPUBRIDGE_FLAT_BYTES=0\nGPUBRIDGE_CHUNK_BYTES=4096\n");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
