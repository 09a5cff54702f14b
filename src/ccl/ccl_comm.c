/* SPDX-License-Identifier: Apache-2.0
 * Vendor communicators.  They are non-blocking: every call may go on in the background and is polled, so that a stuck
 * one can be given up.  An abort may wait inside the library for kernels to leave the device; it runs on a thread of
 * its own, so that whoever aborts can go on and open what the kernels wait for. */
#include "ccl/ccl_library.h"

#include "base/clock.h"
#include "device/device.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CONFIG_MAGIC   0xcafebeefu
#define CONFIG_VERSION 21700u
#define CONNECT_BYTES  16u /* to and from each peer, once */
#define DESTROY_NS     5000000000u
#define SPINS          200
#define PAUSE_NS       20000

struct gb_ccl_comm {
    const struct gb_ccl *ccl;
    struct gb_device *device;
    void *handle; /* guarded by lock: the library's; NULL once aborted or destroyed */
    int nranks, rank;
    const _Atomic int *give_up; /* while it is being made */
    int is_aborted;             /* guarded by lock */
    int has_aborter;            /* guarded by lock */
    pthread_t aborter;
    pthread_mutex_t lock; /* held for single calls, which return at once, never while waiting */
};

static void pause_after(int spins)
{
    struct timespec ts = {.tv_nsec = PAUSE_NS};
    if (spins < SPINS)
        sched_yield();
    else
        (void)nanosleep(&ts, NULL);
}

static int aborted(void)
{
    return GB_FAIL(GPUBRIDGE_ERR_ABORTED, "the vendor communicator was aborted");
}

int gb_ccl_poll(struct gb_ccl_comm *comm)
{
    int result = GB_CCL_OK, rc = GB_CCL_OK;
    if (comm->give_up && atomic_load_explicit(comm->give_up, memory_order_relaxed)) return aborted();
    pthread_mutex_lock(&comm->lock);
    int gone = comm->is_aborted || !comm->handle;
    if (!gone) rc = comm->ccl->async_error(comm->handle, &result);
    pthread_mutex_unlock(&comm->lock);
    if (gone) return aborted();
    if (rc) return gb_ccl_fail(comm->ccl, rc, "ncclCommGetAsyncError");
    if (result == GB_CCL_IN_PROGRESS) return GPUBRIDGE_AGAIN;
    return result ? gb_ccl_fail(comm->ccl, result, "a communicator") : 0;
}

/* Until nothing is in progress.  deadline 0: none, an abort ends the wait. */
static int settle(struct gb_ccl_comm *comm, uint64_t deadline_ns, const char *what)
{
    for (int spins = 0;; spins++) {
        int rc = gb_ccl_poll(comm);
        if (rc != GPUBRIDGE_AGAIN) return rc;
        if (deadline_ns && gb_now_ns() > deadline_ns)
            return GB_FAIL(GPUBRIDGE_ERR_TIMEOUT,
                           "%s: rank %d of %d: %s did not finish in time; see the logs of the other ranks",
                           comm->ccl->name, comm->rank, comm->nranks, what);
        pause_after(spins);
    }
}

static int add_part(struct gb_ccl_comm *comm, const struct gb_ccl_part *part, void *stream)
{
    if (part->is_recv) return comm->ccl->recv(part->buf, part->bytes, GB_CCL_BYTE, part->peer, comm->handle, stream);
    return comm->ccl->send(part->buf, part->bytes, GB_CCL_BYTE, part->peer, comm->handle, stream);
}

/* Groups belong to threads: one that was opened is closed, whatever happened in it.  Lock held. */
static int grouped(struct gb_ccl_comm *comm, const struct gb_ccl_part *parts, int nparts, void *stream)
{
    int rc = comm->ccl->group_start();
    if (rc) return gb_ccl_fail(comm->ccl, rc, "ncclGroupStart");
    for (int i = 0; i < nparts && (rc == GB_CCL_OK || rc == GB_CCL_IN_PROGRESS); i++)
        rc = add_part(comm, &parts[i], stream);
    int end = comm->ccl->group_end();
    if (rc && rc != GB_CCL_IN_PROGRESS) return gb_ccl_fail(comm->ccl, rc, "ncclSend or ncclRecv");
    if (end && end != GB_CCL_IN_PROGRESS) return gb_ccl_fail(comm->ccl, end, "ncclGroupEnd");
    return 0;
}

static int exchange(struct gb_ccl_comm *comm, const struct gb_ccl_part *parts, int nparts, void *stream,
                    uint64_t deadline_ns)
{
    pthread_mutex_lock(&comm->lock);
    int rc = comm->is_aborted ? aborted() : grouped(comm, parts, nparts, stream);
    pthread_mutex_unlock(&comm->lock);
    return rc ? rc : settle(comm, deadline_ns, "a grouped exchange");
}

int gb_ccl_exchange(struct gb_ccl_comm *comm, const struct gb_ccl_part *parts, int nparts, void *stream)
{
    return exchange(comm, parts, nparts, stream, 0);
}

static int wait_event(struct gb_ccl_comm *comm, void *event, uint64_t deadline_ns)
{
    for (int spins = 0;; spins++) {
        int rc = gb_event_query(comm->device, event);
        if (rc != GPUBRIDGE_AGAIN) return rc;
        rc = gb_ccl_poll(comm);
        if (rc && rc != GPUBRIDGE_AGAIN) return rc;
        if (gb_now_ns() > deadline_ns)
            return GB_FAIL(GPUBRIDGE_ERR_TIMEOUT,
                           "%s: rank %d of %d: the first exchange with its peers did not finish in time",
                           comm->ccl->name, comm->rank, comm->nranks);
        pause_after(spins);
    }
}

static int connect_on(struct gb_ccl_comm *comm, void *stream, void *event, uint64_t deadline_ns)
{
    char *scrap = gb_device_scrap(comm->device);
    const int batch = (int)(GB_DEVICE_SCRAP_BYTES / CONNECT_BYTES / 2);
    struct gb_ccl_part *parts = calloc((size_t)comm->nranks * 2, sizeof *parts);
    if (!parts) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to connect %d ranks", comm->nranks);
    int n = 0;
    for (int peer = 0; peer < comm->nranks; peer++) {
        const size_t slot = (size_t)(peer % batch) * 2 * CONNECT_BYTES;
        if (peer == comm->rank) continue;
        parts[n++] = (struct gb_ccl_part){.buf = scrap + slot, .bytes = CONNECT_BYTES, .peer = peer};
        parts[n++] = (struct gb_ccl_part){scrap + slot + CONNECT_BYTES, CONNECT_BYTES, peer, 1};
    }
    int rc = n ? exchange(comm, parts, n, stream, deadline_ns) : 0;
    free(parts);
    if (!rc) rc = gb_event_record(comm->device, event, stream);
    return rc ? rc : wait_event(comm, event, deadline_ns);
}

/* A pair connects at its first exchange, and holds the host meanwhile: that must never be while gates are closed. */
static int connect_all(struct gb_ccl_comm *comm, uint64_t deadline_ns)
{
    void *stream = NULL, *event = NULL;
    GB_TRY(gb_stream_create(comm->device, &stream));
    int rc = gb_event_create(comm->device, &event);
    if (!rc) rc = connect_on(comm, stream, event, deadline_ns);
    gb_event_destroy(comm->device, event);
    gb_stream_destroy(comm->device, stream);
    return rc;
}

static int init(struct gb_ccl_comm *comm, const uint8_t id[GB_CCL_ID_BYTES], uint64_t deadline_ns)
{
    struct gb_ccl_config config = {.size = sizeof config, .magic = CONFIG_MAGIC, .version = CONFIG_VERSION};
    struct gb_ccl_id by_value;
    config.cga_cluster_size = config.min_ctas = config.max_ctas = INT_MIN; /* the library's own choice */
    memcpy(by_value.byte, id, GB_CCL_ID_BYTES);
    int rc = comm->ccl->init(&comm->handle, comm->nranks, by_value, comm->rank, &config);
    if (rc && rc != GB_CCL_IN_PROGRESS) return gb_ccl_fail(comm->ccl, rc, "ncclCommInitRankConfig");
    GB_TRY(settle(comm, deadline_ns, "creating a communicator"));
    return connect_all(comm, deadline_ns);
}

static void free_comm(struct gb_ccl_comm *comm)
{
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

int gb_ccl_comm_create(const struct gb_ccl *ccl, struct gb_device *device, int nranks, int rank,
                       const uint8_t id[GB_CCL_ID_BYTES], int64_t timeout_ns, const _Atomic int *give_up,
                       struct gb_ccl_comm **out)
{
    if (gb_device_info(device)->kind != ccl->vendor)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s cannot join devices of another vendor", ccl->name);
    struct gb_ccl_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a vendor communicator");
    comm->ccl = ccl;
    comm->device = device;
    comm->nranks = nranks;
    comm->rank = rank;
    pthread_mutex_init(&comm->lock, NULL);
    comm->give_up = give_up;
    int rc = init(comm, id, gb_now_ns() + (uint64_t)timeout_ns);
    comm->give_up = NULL;
    if (rc) {
        gb_ccl_abort(comm);
        gb_ccl_comm_destroy(comm);
        return rc;
    }
    *out = comm;
    return 0;
}

static void *abort_main(void *arg)
{
    struct gb_ccl_comm *comm = arg;
    if (gb_device_bind(comm->device) == 0) (void)comm->ccl->abort(comm->handle);
    return NULL;
}

void gb_ccl_abort(struct gb_ccl_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    if (!comm->is_aborted) {
        comm->is_aborted = 1;
        comm->has_aborter = comm->handle && pthread_create(&comm->aborter, NULL, abort_main, comm) == 0;
    }
    pthread_mutex_unlock(&comm->lock);
}

/* Finalize lets what is in flight end; a peer that never comes must not hold us. */
static void leave(struct gb_ccl_comm *comm)
{
    int rc = comm->ccl->finalize(comm->handle);
    if (rc == GB_CCL_OK || rc == GB_CCL_IN_PROGRESS)
        rc = settle(comm, gb_now_ns() + DESTROY_NS, "leaving a communicator");
    if (rc)
        (void)comm->ccl->abort(comm->handle);
    else
        (void)comm->ccl->destroy(comm->handle);
}

void gb_ccl_comm_destroy(struct gb_ccl_comm *comm)
{
    if (!comm) return;
    pthread_mutex_lock(&comm->lock);
    int has_aborter = comm->has_aborter, is_aborted = comm->is_aborted;
    pthread_mutex_unlock(&comm->lock);
    if (has_aborter) pthread_join(comm->aborter, NULL);
    if (!is_aborted && comm->handle) leave(comm);
    free_comm(comm);
}
