/* SPDX-License-Identifier: Apache-2.0
 * One all_reduce over all ranks, checked: context, hello, exchange, comm, operation, and back.  How the ranks find each
 * other is in exchange_*.c; which ranks form an island is GPUBRIDGE_ISLAND (or, on GPUs, their vendor). */
#include "exchange.h"

#include <gpubridge/gpubridge.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_RANKS 64

_Static_assert(EXCHANGE_MAX >= GPUBRIDGE_HELLO_BYTES, "a hello must fit");

static int fail(const struct job *job, const char *what, int status)
{
    fprintf(stderr, "all_reduce: rank %d: %s: %s (%s)\n", job->rank, what, gpubridge_last_error(),
            gpubridge_strerror(status));
    return -1;
}

static int make_comm(struct job *job, gpubridge_context *context, gpubridge_comm **comm)
{
    static unsigned char hellos[MAX_RANKS][EXCHANGE_MAX];
    unsigned char mine[GPUBRIDGE_HELLO_BYTES];
    size_t bytes = sizeof mine, lengths[MAX_RANKS];
    const void *pointers[MAX_RANKS];
    struct gpubridge_comm_config config = {
        .struct_size = sizeof config, .name = "world", .rank = job->rank, .size = job->size};
    int rc = gpubridge_comm_hello(context, &config, mine, &bytes);
    if (rc) return fail(job, "hello", rc);
    if (exchange_all(job, 0, mine, bytes, hellos, lengths)) return -1;
    for (int i = 0; i < job->size; i++) pointers[i] = hellos[i];
    rc = gpubridge_comm_create(context, &config, pointers, lengths, comm);
    return rc ? fail(job, "making the group", rc) : 0;
}

static int reduce(const struct job *job, gpubridge_comm *comm, uint64_t count)
{
    double *x = malloc((size_t)(count ? count : 1) * sizeof *x);
    uint64_t wrong = 0;
    if (!x) return -1;
    for (uint64_t i = 0; i < count; i++) x[i] = (double)i + job->rank;
    int rc = gpubridge_all_reduce(comm, x, x, count, GPUBRIDGE_F64, GPUBRIDGE_SUM, NULL, NULL);
    if (rc) rc = fail(job, "all_reduce", rc);
    for (uint64_t i = 0; !rc && i < count; i++)
        wrong += x[i] != (double)i * job->size + job->size * (job->size - 1) / 2.0;
    free(x);
    if (rc) return rc;
    printf("rank %d of %d: %llu sums, %llu wrong\n", job->rank, job->size, (unsigned long long)count,
           (unsigned long long)wrong);
    return wrong ? -1 : 0;
}

static int run(struct job *job, uint64_t count)
{
    gpubridge_context *context = NULL;
    gpubridge_comm *comm = NULL;
    char text[4096];
    struct gpubridge_context_config config = {.struct_size = sizeof config,
                                              .device_kind = GPUBRIDGE_DEVICE_CPU,
                                              .global_rank = job->rank,
                                              .local_rank = job->local_rank,
                                              .secret = job->secret,
                                              .secret_bytes = sizeof job->secret};
    int rc = gpubridge_context_create(&config, &context);
    if (rc) return fail(job, "context", rc);
    rc = make_comm(job, context, &comm);
    if (!rc) rc = reduce(job, comm, count);
    if (!rc && job->rank == 0) {
        gpubridge_comm_describe(comm, text, sizeof text);
        fputs(text, stdout);
    }
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(context);
    return rc;
}

int main(int argc, char **argv)
{
    struct job job = {0};
    int rc = exchange_start(&job, &argc, &argv);
    if (!rc && (job.size < 1 || job.size > MAX_RANKS || job.rank < 0 || job.rank >= job.size)) {
        fprintf(stderr, "all_reduce: rank %d of %d: this program takes 1 to %d ranks\n", job.rank, job.size, MAX_RANKS);
        rc = -1;
    }
    if (!rc) rc = run(&job, argc > 1 ? strtoull(argv[1], NULL, 10) : 1000003);
    exchange_finish(&job);
    return rc ? 1 : 0;
}
