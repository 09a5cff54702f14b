/* SPDX-License-Identifier: Apache-2.0
 * The thinnest whole: a few ranks as islands, all_reduce by value at sizes that take every path, latency printed. */
#include "ranks.h"

#include <string.h>

static void check_all_reduce(struct rank *rank, gpubridge_comm *comm, uint64_t count)
{
    float *x = malloc((count + 1) * sizeof *x);
    for (uint64_t i = 0; i < count; i++) x[i] = (float)((i % 1021) + 1000 * (uint64_t)rank->rank);
    EXPECT_OK(gpubridge_all_reduce(comm, x, x, count, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL));
    int n = rank->size;
    for (uint64_t i = 0; i < count; i++) {
        float want = (float)((uint64_t)n * (i % 1021) + 1000 * (uint64_t)(n * (n - 1) / 2));
        EXPECT(x[i] == want, "element %llu of %llu is %g, not %g", (unsigned long long)i, (unsigned long long)count,
               (double)x[i], (double)want);
    }
    free(x);
}

static void body(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    const uint64_t counts[] = {0, 1, 7, 1000, 2048, 2049, 100003, 1000003, 4 << 20};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) check_all_reduce(rank, comm, counts[i]);
    EXPECT_OK(gpubridge_barrier(comm, 0));
    double start = now_s();
    const int rounds = 2000;
    for (int i = 0; i < rounds; i++) {
        double x = rank->rank;
        EXPECT_OK(gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_F64, GPUBRIDGE_SUM, NULL, NULL));
    }
    if (rank->rank == 0 && getenv("GB_TEST_TIMES"))
        printf("8-byte all_reduce: %.1f us\n", (now_s() - start) / rounds * 1e6);
    start = now_s();
    float *big = calloc(16 << 20, sizeof *big);
    for (int i = 0; i < 5; i++)
        EXPECT_OK(gpubridge_all_reduce(comm, big, big, 16 << 20, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL));
    if (rank->rank == 0 && getenv("GB_TEST_TIMES")) printf("64 MiB all_reduce: %.1f ms\n", (now_s() - start) / 5 * 1e3);
    free(big);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

int main(void)
{
    static const char *const ab[] = {"a", "b"};
    static const char *const aabb[] = {"a", "a", "b", "b"};
    static const char *const abab[] = {"a", "b", "a", "b"};
    static const char *const abc[] = {"a", "b", "c"};
    int failed = ranks_run(2, ab, NULL, 120, body, "1+1");
    failed += ranks_run(4, aabb, NULL, 120, body, "2+2");
    failed += ranks_run(4, abab, NULL, 120, body, "abab");
    failed += ranks_run(3, abc, NULL, 120, body, "three islands");
    failed += ranks_run(1, ab, NULL, 120, body, "single");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
