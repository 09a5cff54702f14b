/* SPDX-License-Identifier: Apache-2.0
 * Ranks that do not do the same: other operations, one too few, none at all, an abort on purpose.  Every rank raises in
 * time, with both signatures or all the missing ranks, and a new group works afterwards. */
#include "ranks.h"

#include <string.h>
#include <unistd.h>

#define S   1000000000ll
#define ODD 1 /* the rank that differs */

/* What the many and the odd one call, and words that must be in every rank's error. */
struct quarrel {
    struct gpubridge_op many, odd;
    const char *words[2];
};

#define OP(k, t, r, where, n)                                                                                          \
    {.struct_size = sizeof(struct gpubridge_op), .kind = k, .dtype = t, .reduce_op = r, .root = where, .count = n}
#define ALL_REDUCE(t, r, n) OP(GPUBRIDGE_ALL_REDUCE, t, r, 0, n)

static const struct quarrel quarrels[] = {
    {ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 1000),
     ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 1001),
     {"f32 x 1000", "f32 x 1001"}},
    {ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 1000),
     ALL_REDUCE(GPUBRIDGE_I32, GPUBRIDGE_SUM, 1000),
     {"SUM f32", "SUM i32"}},
    {ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 1000),
     ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_MAX, 1000),
     {"SUM f32", "MAX f32"}},
    {ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 300000),
     ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 300001),
     {"x 300000", "x 300001"}},
    {ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 1),
     ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 300000),
     {"f32 x 1", "f32 x 300000"}},
    {ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 1000), OP(GPUBRIDGE_BARRIER, 0, 0, 0, 0), {"ALL_REDUCE", "BARRIER"}},
    {OP(GPUBRIDGE_BARRIER, 0, 0, 0, 0), ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 300000), {"BARRIER", "ALL_REDUCE"}},
    {OP(GPUBRIDGE_BROADCAST, GPUBRIDGE_F32, 0, 0, 100),
     OP(GPUBRIDGE_BROADCAST, GPUBRIDGE_F32, 0, 0, 200),
     {"f32 x 100", "f32 x 200"}},
    {OP(GPUBRIDGE_BROADCAST, GPUBRIDGE_F32, 0, 0, 100),
     ALL_REDUCE(GPUBRIDGE_F32, GPUBRIDGE_SUM, 100),
     {"BROADCAST", "ALL_REDUCE"}},
    {OP(GPUBRIDGE_BROADCAST, GPUBRIDGE_F32, 0, 0, 100),
     OP(GPUBRIDGE_BROADCAST, GPUBRIDGE_F32, 0, ODD, 100),
     {"x 100, root 0", "x 100, root 1"}},
    {OP(GPUBRIDGE_ALL_GATHER, GPUBRIDGE_U8, 0, 0, 50000),
     OP(GPUBRIDGE_REDUCE_SCATTER, GPUBRIDGE_U8, 0, 0, 50000),
     {"ALL_GATHER", "REDUCE_SCATTER"}},
    {OP(GPUBRIDGE_REDUCE, GPUBRIDGE_F64, 0, ODD, 100),
     OP(GPUBRIDGE_REDUCE, GPUBRIDGE_F64, 0, 0, 100),
     {"REDUCE SUM f64 x 100, root 1", "REDUCE SUM f64 x 100, root 0"}},
};

static const struct quarrel *quarrel;

/* The odd rank has finished its part of some operations before the others refuse it; then the group tells it. */
static int until_failure(gpubridge_comm *comm, const struct gpubridge_op *op)
{
    double end = now_s() + 5;
    int rc = gpubridge_run(comm, op);
    while (!rc && now_s() < end) {
        usleep(1000);
        rc = gpubridge_comm_status(comm);
    }
    return rc;
}

static void use_again(struct rank *rank)
{
    int64_t x = 1;
    gpubridge_comm *comm = rank_comm(rank, "afterwards", NULL, 0);
    EXPECT_OK(gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL));
    EXPECT(x == rank->size, "the sum is %lld", (long long)x);
    rank_meet(rank);
    gpubridge_comm_destroy(comm);
}

static void quarrel_body(struct rank *rank)
{
    static char send[8 << 20], recv[8 << 20];
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    struct gpubridge_op op = rank->rank == ODD ? quarrel->odd : quarrel->many;
    op.send = send, op.recv = recv;
    EXPECT_OK(gpubridge_barrier(comm, 0));
    rank_meet(rank);
    double start = now_s();
    int rc = until_failure(comm, &op);
    EXPECT(rc == GPUBRIDGE_ERR_MISMATCH, "%s against %s gave %d", quarrel->words[0], quarrel->words[1], rc);
    EXPECT(now_s() - start < 5, "it took %.1f s", now_s() - start);
    for (int w = 0; w < 2; w++)
        EXPECT(strstr(gpubridge_last_error(), quarrel->words[w]), "'%s' should be named", quarrel->words[w]);
    gpubridge_comm_destroy(comm);
    use_again(rank);
    gpubridge_context_destroy(rank->context);
}

/* What an operation does not use may differ. */
static void unused_body(struct rank *rank)
{
    int64_t x = 1;
    struct gpubridge_op op = ALL_REDUCE(GPUBRIDGE_I64, GPUBRIDGE_SUM, 1);
    op.send = op.recv = &x, op.root = rank->rank, op.tag = rank->rank, op.factor = rank->rank;
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    EXPECT_OK(gpubridge_run(comm, &op));
    EXPECT(x == rank->size, "the sum is %lld", (long long)x);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

/* The odd rank leaves one operation out, where the next is another. */
static void skip_body(struct rank *rank)
{
    int64_t x = 1;
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    EXPECT_OK(gpubridge_barrier(comm, 0));
    rank_meet(rank);
    double start = now_s();
    int rc = 0;
    if (rank->rank != ODD) rc = gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL);
    if (!rc) rc = gpubridge_barrier(comm, 30 * S);
    EXPECT(rc == GPUBRIDGE_ERR_MISMATCH, "a skipped operation gave %d", rc);
    EXPECT(now_s() - start < 5, "it took %.1f s", now_s() - start);
    EXPECT(strstr(gpubridge_last_error(), "ALL_REDUCE") && strstr(gpubridge_last_error(), "BARRIER"),
           "both should be named");
    gpubridge_comm_destroy(comm);
    use_again(rank);
    gpubridge_context_destroy(rank->context);
}

/* Ranks 1 and 3 do not come; everybody's error names both and only them, theirs too once they come. */
static void missing_body(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    EXPECT_OK(gpubridge_barrier(comm, 0));
    rank_meet(rank);
    int is_late = rank->rank % 2;
    if (is_late) rank_meet(rank);
    double start = now_s();
    int rc = gpubridge_barrier(comm, S);
    if (!is_late) {
        EXPECT(now_s() - start > 0.9 && now_s() - start < 5, "it took %.1f s", now_s() - start);
        rank_meet(rank);
    }
    /* A late rank may find everybody's message before the news that they gave up: then the comm says so soon after. */
    while (is_late && rc == 0 && now_s() - start < 5) rc = gpubridge_comm_status(comm);
    EXPECT(rc == GPUBRIDGE_ERR_TIMEOUT || rc == GPUBRIDGE_ERR_ABORTED, "a barrier without two ranks gave %d", rc);
    const char *list = strstr(gpubridge_last_error(), "not arrived");
    EXPECT(list && strstr(list, "rank 1 (") && strstr(list, "rank 3 ("), "both missing ranks should be named");
    list = list ? list + strlen("not arrived there: ") : "";
    char missing[256];
    snprintf(missing, sizeof missing, "%.*s", (int)strcspn(list, "["), list);
    EXPECT(!strstr(missing, "rank 0 (") && !strstr(missing, "rank 2 ("), "only missing ranks should be named");
    gpubridge_comm_destroy(comm);
    use_again(rank);
    gpubridge_context_destroy(rank->context);
}

/* The reason given on one rank is what all the others raise, in operations that were under way and in later ones. */
static void abort_body(struct rank *rank)
{
    int64_t x = 1;
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    EXPECT_OK(gpubridge_barrier(comm, 0));
    rank_meet(rank);
    double start = now_s();
    if (rank->rank == ODD) gpubridge_comm_abort(comm, "the cat sat on the keyboard");
    for (int k = 0; k < 2; k++) {
        int rc = gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL);
        EXPECT(rc == GPUBRIDGE_ERR_ABORTED, "an aborted group gave %d", rc);
        EXPECT(strstr(gpubridge_last_error(), "the cat sat on the keyboard") &&
                   strstr(gpubridge_last_error(), "rank 1"),
               "the reason and the rank should be named");
        EXPECT(strstr(gpubridge_last_error(), "ALL_REDUCE"), "the operation should be named");
    }
    EXPECT(now_s() - start < 5, "it took %.1f s", now_s() - start);
    gpubridge_comm_destroy(comm);
    use_again(rank);
    gpubridge_context_destroy(rank->context);
}

int main(void)
{
    static const char *const islands[] = {"a", "a", "b", "b"};
    int failed = 0;
    for (size_t q = 0; q < sizeof quarrels / sizeof *quarrels; q++) {
        quarrel = &quarrels[q];
        failed += ranks_run(2, islands, NULL, 60, quarrel_body, "two that disagree, one island");
        failed += ranks_run(2, islands + 1, NULL, 60, quarrel_body, "two that disagree");
        failed += ranks_run(4, islands, NULL, 60, quarrel_body, "one of four disagrees");
    }
    failed += ranks_run(4, islands, NULL, 60, unused_body, "unused fields that differ");
    failed += ranks_run(4, islands, NULL, 60, skip_body, "a skipped operation");
    failed += ranks_run(4, islands, NULL, 60, missing_body, "missing ranks");
    failed += ranks_run(4, islands, NULL, 60, abort_body, "abort");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
