/* SPDX-License-Identifier: Apache-2.0
 * Who is to blame when a rank stops amid a message: what made it stop, or that it left, though that is heard later than
 * the stop; and nobody who comes out of a barrier stops what another rank still needs.  The fault transport makes the
 * order certain: a message takes 100 ms, a word on the control lane at least 250 ms. */
#include "ranks.h"

#include "comm/context.h"

#include <string.h>
#include <unistd.h>

#define FAULT "GPUBRIDGE_SELF_TEST=off\nGPUBRIDGE_LANES=1\nGPUBRIDGE_FAULT=bulk:short=4096;bulk:delay=10000"
#define COUNT 10000 /* of int64: two messages of 40,000 bytes in an all_reduce of two ranks, in pieces of 4,096 */

static enum gpubridge_op_kind kind;
static enum { ABORTS, DESTROYS, MUTE } way; /* rank 0 gives the group up, or destroys it; MUTE: the first, unheard */
static const int statuses[] = {GPUBRIDGE_ERR_ABORTED, GPUBRIDGE_ERR_PEER_LOST, GPUBRIDGE_ERR_PEER_LOST};
static const char *const reasons[] = {"given up by the test", "has destroyed the group", "did not say why"};

static uint64_t sent_bytes(gpubridge_comm *comm)
{
    struct gb_link_counters counters;
    gb_link_counters(comm->group.links[1], &counters);
    return counters.sent_bytes;
}

/* Returns amid a message to rank 1. */
static gpubridge_request *stop_amid(gpubridge_comm *comm, const struct gpubridge_op *op)
{
    for (;;) {
        gpubridge_request *request = NULL;
        const uint64_t before = sent_bytes(comm);
        EXPECT_OK(gpubridge_submit(comm, op, &request));
        int rc = GPUBRIDGE_AGAIN;
        while (rc == GPUBRIDGE_AGAIN && sent_bytes(comm) < before + 8192) {
            usleep(200);
            rc = gpubridge_request_test(request);
        }
        if (rc == GPUBRIDGE_AGAIN) return request;
        EXPECT_OK(rc); /* this thread was not scheduled meanwhile */
        gpubridge_request_free(request);
    }
}

static void stop_body(struct rank *rank)
{
    static int64_t x[COUNT];
    const int sends = kind == GPUBRIDGE_SEND;
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = sends && rank->rank ? GPUBRIDGE_RECV : kind,
                              .dtype = GPUBRIDGE_I64,
                              .reduce_op = GPUBRIDGE_SUM,
                              .root = sends ? !rank->rank : 0,
                              .send = x,
                              .recv = x,
                              .count = sends ? COUNT / 2 : COUNT};
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    if (rank->rank == 0) {
        gpubridge_request *request = stop_amid(comm, &op);
        if (way != DESTROYS) gpubridge_comm_abort(comm, "given up by the test");
        gpubridge_comm_destroy(comm);
        EXPECT(gpubridge_request_wait(request, 0) != 0, "what was given up succeeded");
        gpubridge_request_free(request);
    } else {
        int rc;
        do rc = gpubridge_run(comm, &op);
        while (rc == 0);
        const char *text = gpubridge_last_error();
        EXPECT(rc == statuses[way], "status %d", rc);
        EXPECT(strstr(text, "rank 0 ("), "rank 0 is not named");
        EXPECT(strstr(text, reasons[way]), "it should say '%s'", reasons[way]);
        EXPECT(strstr(text, sends ? "RECV" : "ALL_REDUCE"), "the operation is not named");
        gpubridge_comm_destroy(comm);
    }
    rank_meet(rank); /* a goodbye would tell, too */
    gpubridge_context_destroy(rank->context);
}

static void barrier_body(struct rank *rank)
{
    enum { N = 3 };
    static int64_t x[N][COUNT];
    gpubridge_request *requests[N];
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    for (int k = 0; k < N; k++) {
        for (int i = 0; i < COUNT; i++) x[k][i] = i + k + rank->rank;
        EXPECT_OK(gpubridge_all_reduce(comm, x[k], x[k], COUNT, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, &requests[k]));
    }
    EXPECT_OK(gpubridge_barrier(comm, 0));
    for (int k = 0; k < N; k++) {
        EXPECT_OK(gpubridge_request_test(requests[k]));
        gpubridge_request_free(requests[k]);
        for (int i = 0; i < COUNT; i++)
            EXPECT(x[k][i] == 2ll * (i + k) + 1, "element %d is %lld", i, (long long)x[k][i]);
    }
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

static int try_stop(enum gpubridge_op_kind how, int stop, const char *what)
{
    static const char *const ab[] = {"a", "b"};
    kind = how, way = stop;
    /* Heartbeats are unheard, too. */
    const char *settings =
        way == MUTE ? FAULT ";control:drop@0\nGPUBRIDGE_PEER_TIMEOUT_S=30\n" : FAULT ";control:late=250000\n";
    return ranks_run(2, ab, settings, 60, stop_body, what);
}

int main(void)
{
    static const char *const ab[] = {"a", "b"};
    int failed = try_stop(GPUBRIDGE_ALL_REDUCE, ABORTS, "abort amid an all_reduce");
    failed += try_stop(GPUBRIDGE_SEND, ABORTS, "abort amid a send");
    failed += try_stop(GPUBRIDGE_ALL_REDUCE, DESTROYS, "destroy amid an all_reduce");
    failed += try_stop(GPUBRIDGE_SEND, DESTROYS, "destroy amid a send");
    failed += try_stop(GPUBRIDGE_ALL_REDUCE, MUTE, "abort unheard");
    failed += ranks_run(2, ab, FAULT "\n", 60, barrier_body, "operations before a barrier");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
