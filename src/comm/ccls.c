/* SPDX-License-Identifier: Apache-2.0
 * Vendor communicators shared by groups with equal island members.  Engine role, but for create_ccl, which runs on the
 * launcher thread. */
#include "comm/ccls.h"

#include "comm/turns.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

enum ccl_state { CCL_NO_ID, CCL_HAS_ID, CCL_CREATING, CCL_READY, CCL_FAILED };

struct gb_shared_ccl {
    uint64_t set;
    enum ccl_state state;
    uint8_t id[GB_CCL_ID_BYTES];
    struct gb_ccl_comm *comm;
    int status; /* why creation failed */
    char text[400];
    gpubridge_context *context;
    uint32_t nranks, rank;
    int64_t timeout_ns;
    int dead;            /* aborted: never found again */
    _Atomic int give_up; /* read by the launcher thread while it creates */
    struct gb_shared_ccl *next;
};

struct creating_call {
    gpubridge_context *context;
    int count;
};

static uint32_t my_island(const gpubridge_comm *comm)
{
    return comm->group.topo->island[comm->group.rank];
}

void gb_ccls_join(gpubridge_comm *comm)
{
    const struct gb_topo *topo = comm->group.topo;
    struct gb_turns *turns = &comm->context->turns;
    uint32_t epoch = 0;
    uint64_t set = 0;
    for (uint32_t i = topo->island_first[my_island(comm)]; i < topo->island_first[my_island(comm) + 1]; i++) {
        const struct gb_member_hello *hello = &comm->members[topo->members[i]].hello;
        if (hello->ccl_epoch > epoch) epoch = hello->ccl_epoch;
        set = XXH3_64bits_withSeed(hello->uuid, 16, set);
    }
    comm->ccl_set = XXH3_64bits_withSeed(&epoch, sizeof epoch, set);
    if (turns->epoch < epoch) turns->epoch = epoch;
}

static struct gb_shared_ccl *ccl_of(gpubridge_context *context, uint64_t set)
{
    for (struct gb_shared_ccl *ccl = context->turns.ccls; ccl; ccl = ccl->next)
        if (ccl->set == set && !ccl->dead) return ccl;
    struct gb_shared_ccl *ccl = calloc(1, sizeof *ccl);
    if (!ccl) {
        (void)GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a vendor communicator");
        return NULL;
    }
    ccl->set = set;
    ccl->context = context;
    ccl->next = context->turns.ccls;
    context->turns.ccls = ccl;
    return ccl;
}

int gb_ccls_offer(gpubridge_comm *comm)
{
    const struct gb_topo *topo = comm->group.topo;
    uint32_t first = topo->island_first[my_island(comm)], end = topo->island_first[my_island(comm) + 1];
    struct gb_shared_ccl *ccl = ccl_of(comm->context, comm->ccl_set);
    if (!ccl) return GPUBRIDGE_ERR_NO_MEMORY;
    if (ccl->nranks) return 0; /* offered, or being made on the launcher thread by now, which reads these */
    ccl->nranks = end - first;
    ccl->rank = topo->local[comm->group.rank];
    ccl->timeout_ns = comm->group.timeout_ns;
    if (ccl->state != CCL_NO_ID || ccl->rank != 0) return 0;
    GB_TRY(gb_ccl_unique_id(comm->context->ccl, ccl->id));
    ccl->state = CCL_HAS_ID;
    for (uint32_t i = first + 1; i < end; i++)
        gb_control_send_ccl_id(comm->group.links[topo->members[i]], ccl->set, ccl->id);
    return 0;
}

void gb_ccls_on_id(gpubridge_context *context, uint64_t set, const uint8_t id[GB_CCL_ID_BYTES])
{
    struct gb_shared_ccl *ccl = ccl_of(context, set);
    if (!ccl || ccl->state != CCL_NO_ID) return;
    memcpy(ccl->id, id, GB_CCL_ID_BYTES);
    ccl->state = CCL_HAS_ID;
    gb_turns_advance(context);
}

static void created(void *arg)
{
    struct gb_shared_ccl *ccl = arg;
    ccl->state = ccl->status ? CCL_FAILED : CCL_READY;
    if (ccl->dead && ccl->comm) gb_ccl_abort(ccl->comm);
    gb_turns_advance(ccl->context);
}

/* Launcher thread: may take seconds, in the same order on every member. */
static void create_ccl(void *arg)
{
    struct gb_shared_ccl *ccl = arg;
    ccl->status = gb_ccl_comm_create(ccl->context->ccl, ccl->context->device, (int)ccl->nranks, (int)ccl->rank, ccl->id,
                                     ccl->timeout_ns, &ccl->give_up, &ccl->comm);
    if (ccl->status) snprintf(ccl->text, sizeof ccl->text, "%s", gb_err_text());
    gb_engine_call(ccl->context->engine, created, ccl);
}

int gb_ccls_use(gpubridge_comm *comm)
{
    struct gb_shared_ccl *ccl = ccl_of(comm->context, comm->ccl_set);
    if (!ccl) return GPUBRIDGE_ERR_NO_MEMORY;
    if (ccl->state == CCL_READY) {
        comm->group.ccl = ccl->comm;
        return 0;
    }
    if (ccl->state == CCL_FAILED) {
        gb_err_put(ccl->text);
        return ccl->status;
    }
    if (ccl->state == CCL_HAS_ID) {
        ccl->state = CCL_CREATING;
        gb_launcher_call(comm->context->launcher, create_ccl, ccl);
    }
    return GPUBRIDGE_AGAIN;
}

/* ---- ends ---- */

/* Its vendor calls may be stuck: the communicator cannot be used again. */
static int vendor_busy(const struct gb_group *group)
{
    for (const struct gb_op *op = group->ops_head; op; op = op->next)
        if (op->wants_vendor && op->is_started) return 1;
    return 0;
}

/* The communicator that is being made may wait for a member that is gone.  Groups that share it fail with it; later
 * ones have another epoch, hence another set. */
static void give_up_creating(struct gb_turns *turns, const gpubridge_comm *comm)
{
    const struct gb_op *op = comm->group.ops_head;
    while (op && !op->wants_vendor) op = op->next;
    if (!op) return; /* it is being made for others */
    for (struct gb_shared_ccl *ccl = turns->ccls; ccl; ccl = ccl->next) {
        if (ccl->set != comm->ccl_set || ccl->state != CCL_CREATING || atomic_load(&ccl->give_up)) continue;
        atomic_store(&ccl->give_up, 1);
        turns->epoch++;
    }
}

void gb_ccls_aborted(gpubridge_context *context, gpubridge_comm *comm)
{
    struct gb_turns *turns = &context->turns;
    give_up_creating(turns, comm);
    if (!comm->group.ccl || !vendor_busy(&comm->group)) return;
    comm->group.ccl = NULL;
    turns->epoch++;
    for (struct gb_shared_ccl *ccl = turns->ccls; ccl; ccl = ccl->next) {
        if (ccl->set != comm->ccl_set || ccl->dead) continue;
        ccl->dead = 1;
        if (ccl->comm) gb_ccl_abort(ccl->comm);
    }
    for (gpubridge_comm *other = context->comms; other; other = other->next) {
        if (other->ccl_set != comm->ccl_set || !other->group.ccl) continue;
        other->group.ccl = NULL;
        char text[480];
        snprintf(text, sizeof text, "shares the vendor communicator of group %s, which was aborted: %.300s",
                 comm->group.name, comm->group.status_text);
        gb_group_abort(&other->group, GPUBRIDGE_ERR_ABORTED, text, 1);
    }
}

/* Launcher thread. */
static void destroy_ccl(void *arg)
{
    gb_ccl_comm_destroy(arg);
}

static void count_creating(void *arg)
{
    struct creating_call *call = arg;
    call->count = 0;
    for (struct gb_shared_ccl *ccl = call->context->turns.ccls; ccl; ccl = ccl->next)
        call->count += ccl->state == CCL_CREATING;
}

void gb_ccls_quiesce(gpubridge_context *context)
{
    struct creating_call call = {.context = context};
    const struct timespec nap = {.tv_nsec = 200000};
    for (;;) {
        gb_engine_call(context->engine, count_creating, &call);
        if (!call.count) return;
        nanosleep(&nap, NULL);
    }
}

void gb_ccls_close(gpubridge_context *context)
{
    struct gb_turns *turns = &context->turns;
    while (turns->ccls) {
        struct gb_shared_ccl *ccl = turns->ccls;
        turns->ccls = ccl->next;
        if (ccl->comm) gb_launcher_call(context->launcher, destroy_ccl, ccl->comm);
        free(ccl);
    }
}
