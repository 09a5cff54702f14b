/* SPDX-License-Identifier: Apache-2.0
 * Send and receive: sizes around every limit, tags, order, receives from anyone, messages to oneself, hundreds at once,
 * ends that disagree, ends that are missing. */
#include "ranks.h"

#include <string.h>
#include <unistd.h>

#define US 1000ll
#define S  1000000000ll

static gpubridge_request *post(gpubridge_comm *comm, int kind, int peer, int tag, void *buffer, uint64_t bytes)
{
    struct gpubridge_op op = {
        .struct_size = sizeof op, .kind = kind, .dtype = GPUBRIDGE_U8, .root = peer, .tag = tag, .count = bytes};
    if (kind == GPUBRIDGE_SEND)
        op.send = buffer;
    else
        op.recv = buffer;
    gpubridge_request *request = NULL;
    EXPECT_OK(gpubridge_submit(comm, &op, &request));
    return request;
}

static gpubridge_request *post_send(gpubridge_comm *comm, int to, int tag, const void *buffer, uint64_t bytes)
{
    return post(comm, GPUBRIDGE_SEND, to, tag, (void *)(uintptr_t)buffer, bytes);
}

static gpubridge_request *post_recv(gpubridge_comm *comm, int from, int tag, void *buffer, uint64_t bytes)
{
    return post(comm, GPUBRIDGE_RECV, from, tag, buffer, bytes);
}

static void finish(gpubridge_request *request)
{
    EXPECT_OK(gpubridge_request_wait(request, 0));
    gpubridge_request_free(request);
}

static int source_of(gpubridge_request *request)
{
    int32_t source = -2;
    EXPECT_OK(gpubridge_request_wait(request, 0));
    EXPECT_OK(gpubridge_request_source(request, &source));
    gpubridge_request_free(request);
    return source;
}

/* Every byte depends on who sends what to whom, and on its place. */
static void fill(uint8_t *p, uint64_t n, int from, int to, int tag)
{
    uint32_t x = (uint32_t)(from * 7919 + to * 104729 + tag * 1299709 + 1);
    for (uint64_t i = 0; i < n; i++) {
        x = x * 1664525u + 1013904223u;
        p[i] = (uint8_t)(x >> 24);
    }
}

static void check(const uint8_t *p, uint64_t n, int from, int to, int tag)
{
    uint8_t *want = malloc(n + 1);
    if (!want) abort();
    fill(want, n, from, to, tag);
    uint64_t i = 0;
    while (i < n && p[i] == want[i]) i++;
    EXPECT(i == n, "byte %llu of %llu from %d to %d with tag %d is %02x, not %02x", (unsigned long long)i,
           (unsigned long long)n, from, to, tag, p[i], want[i]);
    free(want);
}

/* Everybody to everybody, itself included, both directions at once; the receive comes first or last. */
static void sizes(struct rank *rank, gpubridge_comm *comm)
{
    static const uint64_t list[] = {0, 1, 7, 4096, 8191, 8192, 8193, 65537, 1 << 20, 5000011};
    int n = rank->size, me = rank->rank;
    for (size_t s = 0; s < sizeof list / sizeof *list; s++) {
        uint64_t bytes = list[s];
        uint8_t *out[16], *in[16];
        gpubridge_request *sends[16], *recvs[16];
        for (int r = 0; r < n; r++) {
            out[r] = malloc(bytes + 1), in[r] = calloc(bytes + 1, 1);
            if (!out[r] || !in[r]) abort();
            fill(out[r], bytes, me, r, (int)s);
        }
        for (int pass = 0; pass < 2; pass++)
            for (int r = 0; r < n; r++) {
                if (pass == (int)(s & 1))
                    sends[r] = post_send(comm, r, (int)s, out[r], bytes);
                else
                    recvs[r] = post_recv(comm, r, (int)s, in[r], bytes);
            }
        for (int r = 0; r < n; r++) {
            finish(sends[r]);
            EXPECT(source_of(recvs[r]) == r, "a receive from %d has another source", r);
            check(in[r], bytes, r, me, (int)s);
            EXPECT(in[r][bytes] == 0, "a message of %llu bytes wrote past its end", (unsigned long long)bytes);
            free(out[r]);
            free(in[r]);
        }
    }
}

/* Tags are matched whatever the order; equal tags in the order of submission. */
static void tags(struct rank *rank, gpubridge_comm *comm)
{
    enum { N = 24, BYTES = 20000 };
    static uint8_t buffers[N][BYTES];
    gpubridge_request *requests[N];
    if (rank->rank == 0) {
        for (int t = 0; t < N; t++) {
            fill(buffers[t], BYTES, 0, 1, t);
            requests[t] = post_send(comm, 1, t / 2, buffers[t], (uint64_t)(BYTES - t));
        }
        for (int t = 0; t < N; t++) finish(requests[t]);
    } else if (rank->rank == 1) {
        for (int pair = N / 2 - 1; pair >= 0; pair--)
            for (int k = 0; k < 2; k++)
                requests[2 * pair + k] =
                    post_recv(comm, 0, pair, buffers[2 * pair + k], (uint64_t)(BYTES - 2 * pair - k));
        for (int t = 0; t < N; t++) {
            finish(requests[t]);
            check(buffers[t], (uint64_t)(BYTES - t), 0, 1, t);
        }
    }
}

/* Rank 0 hears from everybody, itself too; the messages of one sender come in their order. */
static void anyone(struct rank *rank, gpubridge_comm *comm, int tag, uint64_t bytes)
{
    enum { EACH = 10 };
    int n = rank->size, next[16] = {0};
    gpubridge_request *sends[EACH];
    uint8_t *out = malloc(EACH * bytes + 1), *in = malloc(bytes + 1);
    if (!out || !in) abort();
    for (int k = 0; k < EACH; k++) {
        fill(out + (uint64_t)k * bytes, bytes, rank->rank, 0, k);
        sends[k] = post_send(comm, 0, tag, out + (uint64_t)k * bytes, bytes);
    }
    for (int k = 0; rank->rank == 0 && k < n * EACH; k++) {
        int from = source_of(post_recv(comm, -1, tag, in, bytes));
        EXPECT(from >= 0 && from < n && next[from] < EACH, "message %d came from %d", k, from);
        check(in, bytes, from, 0, next[from]++);
    }
    for (int k = 0; k < EACH; k++) finish(sends[k]);
    free(out);
    free(in);
}

/* Receives from anyone that are posted before there is anything to receive, next to receives from somebody. */
static void anyone_first(struct rank *rank, gpubridge_comm *comm)
{
    enum { N = 8, BYTES = 30000 };
    static uint8_t in[N][BYTES], named[BYTES], out[BYTES];
    gpubridge_request *any[N], *one;
    int n = rank->size, heard = 0;
    if (rank->rank == 0) {
        for (int k = 0; k < n - 1; k++) any[k] = post_recv(comm, -1, 6, in[k], BYTES);
        one = post_recv(comm, 1, 7, named, BYTES);
        rank_meet(rank);
        for (int k = 0; k < n - 1; k++) {
            int from = source_of(any[k]);
            check(in[k], BYTES, from, 0, 6);
            heard |= 1 << from;
        }
        finish(one);
        check(named, BYTES, 1, 0, 7);
        EXPECT(heard == (1 << n) - 2, "heard from the ranks %x only", (unsigned)heard);
        return;
    }
    rank_meet(rank);
    for (int tag = 6; tag <= (rank->rank == 1 ? 7 : 6); tag++) {
        fill(out, BYTES, rank->rank, 0, tag);
        finish(post_send(comm, 0, tag, out, BYTES));
    }
}

/* Returns when what rank 0 sent to rank 1 before this has arrived there: the link keeps the order, and whatever needs
 * a grant is announced no later than the first of the two messages is done. */
static void catch_up(struct rank *rank, void *comm)
{
    uint8_t byte = 0;
    for (int k = 0; k < 2; k++)
        finish(rank->rank == 0 ? post_send(comm, 1, 11, &byte, 1) : post_recv(comm, 0, 11, &byte, 1));
}

/* A fast member sends before a slow one has the group: small messages and announced ones wait for a receive from
 * anyone all the same. */
static void anyone_in_a_new_group(struct rank *rank, gpubridge_comm *old)
{
    enum { N = 6, MOST = 100000 };
    static const int pair[] = {0, 1};
    static uint8_t buffers[N][MOST];
    gpubridge_request *requests[N];
    if (rank->rank > 1) return;
    gpubridge_comm *comm =
        rank->rank == 0 ? rank_comm(rank, "new", pair, 2) : rank_late_comm(rank, "new", pair, 2, catch_up, old);
    for (int k = 0; k < N; k++) {
        uint64_t bytes = k & 1 ? MOST : 100;
        if (rank->rank == 0) {
            fill(buffers[k], bytes, 0, 1, k);
            requests[k] = post_send(comm, 1, 5, buffers[k], bytes);
            continue;
        }
        gpubridge_request *request = post_recv(comm, -1, 5, buffers[k], bytes);
        EXPECT_OK(gpubridge_request_wait(request, 10 * S));
        EXPECT(source_of(request) == 0, "message %d came from somebody else", k);
        check(buffers[k], bytes, 0, 1, k);
    }
    if (rank->rank == 0) {
        catch_up(rank, old);
        for (int k = 0; k < N; k++) finish(requests[k]);
    }
    gpubridge_comm_destroy(comm);
}

static void outstanding(struct rank *rank, gpubridge_comm *comm)
{
    enum { N = 300, MOST = 40000 };
    gpubridge_request *requests[2 * N];
    int n = rank->size, to = (rank->rank + 1) % n, from = (rank->rank + n - 1) % n;
    uint8_t *out = malloc((size_t)N * MOST), *in = malloc((size_t)N * MOST);
    if (!out || !in) abort();
    for (int k = 0; k < N; k++) {
        uint64_t bytes = (uint64_t)(k * 131 % MOST);
        fill(out + (size_t)k * MOST, bytes, rank->rank, to, k);
        requests[2 * k] = post_send(comm, to, k % 3, out + (size_t)k * MOST, bytes);
        requests[2 * k + 1] = post_recv(comm, from, k % 3, in + (size_t)k * MOST, bytes);
    }
    for (int k = 2 * N - 1; k >= 0; k--) finish(requests[k]);
    for (int k = 0; k < N; k++) check(in + (size_t)k * MOST, (uint64_t)(k * 131 % MOST), from, rank->rank, k);
    free(out);
    free(in);
}

/* The two ends differ in length: both learn it, with both counts.  A small message has left before the receiver can
 * refuse it, so its send may have completed; the group raises on both all the same. */
static void disagree(struct rank *rank, uint64_t sent, uint64_t received, int from)
{
    char name[64], a[32], b[32];
    snprintf(name, sizeof name, "disagree %llu %llu %d", (unsigned long long)sent, (unsigned long long)received, from);
    snprintf(a, sizeof a, "u8 x %llu", (unsigned long long)sent);
    snprintf(b, sizeof b, "u8 x %llu", (unsigned long long)received);
    gpubridge_comm *comm = rank_comm(rank, name, NULL, 0);
    uint8_t *buffer = calloc(sent + received + 1, 1);
    if (!buffer) abort();
    gpubridge_request *request = NULL;
    if (rank->rank == 0) request = post_send(comm, 1, 9, buffer, sent);
    if (rank->rank == 1) request = post_recv(comm, from, 9, buffer, received);
    double start = now_s();
    int rc = request ? gpubridge_request_wait(request, 10 * S) : 0, small = rank->rank == 0 && sent <= 8192;
    EXPECT(!request || rc == GPUBRIDGE_ERR_MISMATCH || (small && rc == 0), "%s gave %d", name, rc);
    while (!(rc = gpubridge_comm_status(comm)) && now_s() - start < 5) usleep(1000);
    EXPECT(rc == GPUBRIDGE_ERR_MISMATCH, "the group's status is %d", rc);
    EXPECT(strstr(gpubridge_last_error(), a) && strstr(gpubridge_last_error(), b),
           "both counts (%s, %s) should be named", a, b);
    gpubridge_request_free(request);
    gpubridge_comm_destroy(comm);
    free(buffer);
}

static void disagree_with_oneself(struct rank *rank)
{
    uint8_t out[10] = {0}, in[11];
    char name[32];
    snprintf(name, sizeof name, "oneself %d", rank->rank);
    gpubridge_comm *comm = rank_comm(rank, name, &rank->rank, 1);
    gpubridge_request *send = post_send(comm, 0, 9, out, sizeof out);
    gpubridge_request *recv = post_recv(comm, 0, 9, in, sizeof in);
    EXPECT(gpubridge_request_wait(send, 5 * S) == GPUBRIDGE_ERR_MISMATCH, "a send of 10 bytes met a receive of 11");
    EXPECT(gpubridge_request_wait(recv, 5 * S) == GPUBRIDGE_ERR_MISMATCH, "a receive of 11 bytes met a send of 10");
    gpubridge_request_free(send);
    gpubridge_request_free(recv);
    gpubridge_comm_destroy(comm);
}

static void wrong_arguments(gpubridge_comm *comm, int size)
{
    uint8_t byte = 0;
    gpubridge_request *request = NULL;
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_SEND,
                              .dtype = GPUBRIDGE_U8,
                              .root = size,
                              .send = &byte,
                              .count = 1};
    EXPECT(gpubridge_submit(comm, &op, &request) == GPUBRIDGE_ERR_INVALID, "a send to rank %d was accepted", size);
    op.root = -1;
    EXPECT(gpubridge_submit(comm, &op, &request) == GPUBRIDGE_ERR_INVALID, "a send to anyone was accepted");
    op.root = 0, op.tag = -1;
    EXPECT(gpubridge_submit(comm, &op, &request) == GPUBRIDGE_ERR_INVALID, "tag -1 was accepted");
    op.tag = 0, op.send = NULL;
    EXPECT(gpubridge_submit(comm, &op, &request) == GPUBRIDGE_ERR_INVALID, "a NULL buffer was accepted");
    EXPECT(request == NULL, "an output was written although the call failed");
}

/* A receive that nobody serves names its peer and tag when its time is up. */
static void unserved(struct rank *rank, gpubridge_comm *comm)
{
    uint8_t byte;
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_RECV,
                              .dtype = GPUBRIDGE_U8,
                              .root = 1,
                              .tag = 4711,
                              .recv = &byte,
                              .count = 1,
                              .timeout_ns = 300000 * US};
    if (rank->rank == 0) {
        int rc = gpubridge_run(comm, &op);
        EXPECT(rc == GPUBRIDGE_ERR_TIMEOUT, "it gave %d", rc);
        EXPECT(strstr(gpubridge_last_error(), "rank 1") && strstr(gpubridge_last_error(), "4711"),
               "peer and tag should be named");
    }
}

static void body(struct rank *rank)
{
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "p2p", NULL, 0);
    sizes(rank, comm);
    if (rank->size > 1) tags(rank, comm);
    anyone(rank, comm, 8, 100);
    anyone(rank, comm, 9, 20000);
    if (rank->size > 1) anyone_first(rank, comm);
    if (rank->size > 1) anyone_in_a_new_group(rank, comm);
    outstanding(rank, comm);
    wrong_arguments(comm, rank->size);
    disagree_with_oneself(rank);
    if (rank->size > 1) {
        disagree(rank, 10, 11, 0);
        disagree(rank, 11, 10, 0);
        disagree(rank, 0, 1, 0);
        disagree(rank, 100000, 99999, 0);
        disagree(rank, 100, 100000, 0);
        disagree(rank, 100000, 100, -1);
        disagree(rank, 10, 11, -1);
        EXPECT_OK(gpubridge_barrier(comm, 0));
        unserved(rank, comm);
    }
    rank_meet(rank);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

int main(void)
{
    static const char *const ab[] = {"a", "b"};
    static const char *const aabc[] = {"a", "a", "b", "c"};
    int failed = ranks_run(1, ab, NULL, 60, body, "one rank");
    failed += ranks_run(2, ab, NULL, 60, body, "two ranks");
    failed += ranks_run(4, aabc, NULL, 60, body, "four ranks");
    failed += ranks_run(1, NULL, "GPUBRIDGE_EMULATE=cuda\n", 60, body, "one emulated GPU");
    failed += ranks_run(4, NULL, "GPUBRIDGE_EMULATE=cuda,cuda,hip,none\n", 60, body, "emulated GPUs and a CPU");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
