/* SPDX-License-Identifier: Apache-2.0
 * Proves every edge once, by value, before a comm uses it: both ends exchange patterns that depend on the pair, the
 * direction and the position, at sizes that take every path of a link (eager, granted, several pages).  The user thread
 * that makes a comm. */
#include "comm/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define TAG 0x7fffffff /* no user message exists yet: the comm is being made */

static const uint32_t sizes[] = {1, GB_EAGER_BYTES, GB_EAGER_BYTES + 1, 256 * 1024 + 5};
#define NSIZES (sizeof sizes / sizeof *sizes)
#define TOTAL  (1 + GB_EAGER_BYTES + GB_EAGER_BYTES + 1 + 256 * 1024 + 5)

struct edge { /* one peer: what goes out and what comes in, sizes one after the other */
    uint8_t out[TOTAL], in[TOTAL];
    gpubridge_request *requests[2 * NSIZES];
    uint32_t rank;
};

static void pattern(uint8_t *bytes, const struct gb_member_hello *from, const struct gb_member_hello *to)
{
    uint64_t state = XXH3_64bits_withSeed(to->uuid, 16, XXH3_64bits(from->uuid, 16)) | 1;
    for (size_t i = 0; i < TOTAL; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth, MMIX */
        bytes[i] = (uint8_t)(state >> 56);
    }
}

static int is_proven(gpubridge_context *context, const uint8_t uuid[16])
{
    pthread_mutex_lock(&context->lock);
    size_t i = 0;
    while (i < context->nproven && memcmp(context->proven[i].byte, uuid, 16) != 0) i++;
    int found = i < context->nproven;
    pthread_mutex_unlock(&context->lock);
    return found;
}

static int remember(gpubridge_context *context, const uint8_t uuid[16])
{
    pthread_mutex_lock(&context->lock);
    struct gb_uuid *more = realloc(context->proven, (context->nproven + 1) * sizeof *more);
    if (more) {
        context->proven = more;
        memcpy(more[context->nproven++].byte, uuid, 16);
    }
    pthread_mutex_unlock(&context->lock);
    return more ? 0 : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to remember a proven link");
}

static int start(gpubridge_comm *comm, struct edge *edge)
{
    size_t offset = 0;
    pattern(edge->out, &comm->members[comm->group.rank].hello, &comm->members[edge->rank].hello);
    for (size_t i = 0; i < NSIZES; i++) {
        struct gpubridge_op op = {.struct_size = sizeof op,
                                  .dtype = GPUBRIDGE_BYTE,
                                  .root = (int32_t)edge->rank,
                                  .flags = GPUBRIDGE_OP_HOST_BUFFERS,
                                  .tag = TAG,
                                  .send = edge->out + offset,
                                  .recv = edge->in + offset,
                                  .count = sizes[i]};
        op.kind = GPUBRIDGE_RECV;
        GB_TRY(gpubridge_submit(comm, &op, &edge->requests[2 * i]));
        op.kind = GPUBRIDGE_SEND;
        GB_TRY(gpubridge_submit(comm, &op, &edge->requests[2 * i + 1]));
        offset += sizes[i];
    }
    return 0;
}

static int finish(gpubridge_comm *comm, struct edge *edge)
{
    for (size_t i = 0; i < 2 * NSIZES; i++) GB_TRY(gpubridge_request_wait(edge->requests[i], 0));
    uint8_t *want = malloc(TOTAL);
    if (!want) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the self-test of a link");
    pattern(want, &comm->members[edge->rank].hello, &comm->members[comm->group.rank].hello);
    size_t bad = 0;
    while (bad < TOTAL && want[bad] == edge->in[bad]) bad++;
    free(want);
    if (bad < TOTAL)
        return GB_FAIL(GPUBRIDGE_ERR_CHECKSUM,
                       "self-test: the link from %s to rank %u delivers wrong bytes (first at %zu): the comm is "
                       "refused; try another "
                       "GPUBRIDGE_TRANSPORT and report this",
                       comm->group.labels[edge->rank], comm->group.rank, bad);
    return remember(comm->context, comm->members[edge->rank].hello.uuid);
}

int gb_comm_self_test(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    struct edge **edges = calloc(group->size, sizeof *edges);
    if (!edges) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a group of %u ranks", group->size);
    int rc = 0;
    char text[480];
    for (uint32_t r = 0; r < group->size && !rc; r++) {
        if (r == group->rank || is_proven(comm->context, comm->members[r].hello.uuid)) continue;
        edges[r] = calloc(1, sizeof **edges);
        if (!edges[r]) {
            rc = GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the self-test of a link");
            break;
        }
        edges[r]->rank = r;
        rc = start(comm, edges[r]);
    }
    for (uint32_t r = 0; r < group->size && !rc; r++)
        if (edges[r]) rc = finish(comm, edges[r]);
    if (rc) { /* no buffer may be in use when it is freed; the text of the first failure is kept */
        snprintf(text, sizeof text, "%s", gb_err_text());
        gpubridge_comm_abort(comm, text);
    }
    for (uint32_t r = 0; r < group->size; r++) {
        for (size_t i = 0; edges[r] && i < 2 * NSIZES; i++) {
            while (rc && edges[r]->requests[i] && gpubridge_request_wait(edges[r]->requests[i], 0) == GPUBRIDGE_AGAIN)
                continue;
            gpubridge_request_free(edges[r]->requests[i]);
        }
        free(edges[r]);
    }
    free(edges);
    if (rc) gb_err_put(text);
    return rc;
}
