/* SPDX-License-Identifier: Apache-2.0
 * Vendor communicators shared by groups with equal island members.  Engine role, but for create_ccl, which runs on the
 * launcher thread. */
#include "comm/ccls.h"

#include "base/clock.h"
#include "base/log.h"
#include "comm/turns.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#define DRAIN_NS        20000000   /* how long operations are held for the device to become idle */
#define PATIENCE_NS     50000000   /* before that is tried; doubled after each time in vain, */
#define MAX_PATIENCE_NS 1600000000 /* so that few operations are held at last */

enum ccl_state {
    CCL_NO_ID,
    CCL_HAS_ID,
    CCL_ASKED,    /* said READY */
    CCL_DRAINING, /* frozen, but something is on the device still */
    CCL_FROZEN,   /* said YES */
    CCL_CREATING,
    CCL_MADE,
    CCL_FAILED
};

enum voice { NONE, IS_READY, SAID_YES };

struct gb_shared_ccl {
    uint64_t set;
    enum ccl_state state;
    uint32_t round;                           /* of the agreement: the lowest member counts, the others repeat */
    int is_open;                              /* lowest member: FREEZE is out, not all have answered */
    uint8_t *voice;                           /* lowest member: [nranks] enum voice */
    uint64_t wait_ns, patience_ns, freeze_ns; /* since when it is needed, what that is compared with; frozen since */
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
    if (topo->local[comm->group.rank] == 0 && !ccl->voice) ccl->voice = calloc(end - first, sizeof *ccl->voice);
    if (topo->local[comm->group.rank] == 0 && !ccl->voice)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a vendor communicator of %u ranks", end - first);
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

/* ---- agreement (turns.h says why) ---- */

static struct gb_turns *turns_of(const struct gb_shared_ccl *ccl)
{
    return &ccl->context->turns;
}

static struct gb_link *member_link(const gpubridge_comm *comm, uint32_t member)
{
    const struct gb_topo *topo = comm->group.topo;
    return comm->group.links[topo->members[topo->island_first[my_island(comm)] + member]];
}

static void say(const gpubridge_comm *comm, uint32_t member, enum gb_ccl_word word, const struct gb_shared_ccl *ccl)
{
    gb_control_send_ccl_word(member_link(comm, member), word, ccl->set, ccl->round);
}

static void say_to_all(const gpubridge_comm *comm, enum gb_ccl_word word, const struct gb_shared_ccl *ccl)
{
    for (uint32_t i = 1; i < ccl->nranks; i++) say(comm, i, word, ccl);
}

/* The comm of the operation that is next, when it is for `ccl`. */
static gpubridge_comm *next_user(const struct gb_shared_ccl *ccl)
{
    const struct gb_op *op = turns_of(ccl)->granted_head;
    gpubridge_comm *comm = op ? op->group->comm : NULL;
    return comm && comm->ccl_set == ccl->set ? comm : NULL;
}

static int is_impatient(const struct gb_shared_ccl *ccl)
{
    return gb_now_ns() - ccl->wait_ns > ccl->patience_ns;
}

static void thaw(struct gb_shared_ccl *ccl, enum ccl_state state)
{
    ccl->state = state;
    turns_of(ccl)->holder = NULL;
    gb_launcher_unhold(ccl->context->launcher);
}

/* FROZEN when the device is idle.  Else DRAINING, but only after a long wait: what is on the device may need operations
 * that are held now. */
static void freeze(struct gb_shared_ccl *ccl)
{
    turns_of(ccl)->holder = ccl;
    ccl->freeze_ns = gb_now_ns();
    gb_launcher_hold(ccl->context->launcher);
    if (gb_launcher_is_idle(ccl->context->launcher))
        ccl->state = CCL_FROZEN;
    else if (is_impatient(ccl))
        ccl->state = CCL_DRAINING;
    else
        thaw(ccl, CCL_HAS_ID);
}

static void created(void *arg)
{
    struct gb_shared_ccl *ccl = arg;
    thaw(ccl, ccl->status ? CCL_FAILED : CCL_MADE);
    if (ccl->dead && ccl->comm) gb_ccl_abort(ccl->comm);
    gb_turns_advance(ccl->context);
}

/* Launcher thread: may take seconds, on all members at once. */
static void create_ccl(void *arg)
{
    struct gb_shared_ccl *ccl = arg;
    ccl->status = gb_ccl_comm_create(ccl->context->ccl, ccl->context->device, (int)ccl->nranks, (int)ccl->rank, ccl->id,
                                     ccl->timeout_ns, &ccl->give_up, &ccl->comm);
    if (ccl->status) snprintf(ccl->text, sizeof ccl->text, "%s", gb_err_text());
    gb_engine_call(ccl->context->engine, created, ccl);
}

static void create(struct gb_shared_ccl *ccl)
{
    ccl->state = CCL_CREATING;
    gb_launcher_call(ccl->context->launcher, create_ccl, ccl);
}

/* ---- the lowest member's part ---- */

static int all_say(const struct gb_shared_ccl *ccl, enum voice voice)
{
    for (uint32_t i = 0; i < ccl->nranks; i++)
        if (ccl->voice[i] < voice) return 0;
    return 1;
}

static void close_round(struct gb_shared_ccl *ccl, const gpubridge_comm *comm)
{
    ccl->is_open = 0;
    memset(ccl->voice, NONE, ccl->nranks);
    say_to_all(comm, GB_CCL_THAW, ccl);
    thaw(ccl, CCL_HAS_ID);
}

static void count_yes(struct gb_shared_ccl *ccl, const gpubridge_comm *comm, uint32_t member)
{
    ccl->voice[member] = SAID_YES;
    if (!all_say(ccl, SAID_YES)) return;
    ccl->is_open = 0;
    say_to_all(comm, GB_CCL_GO, ccl);
    create(ccl);
}

static void count_ready(struct gb_shared_ccl *ccl, uint32_t member)
{
    ccl->voice[member] = IS_READY;
    if (!all_say(ccl, IS_READY)) return;
    const gpubridge_comm *comm = next_user(ccl);
    ccl->state = CCL_HAS_ID;
    if (comm && !turns_of(ccl)->holder) freeze(ccl);
    ccl->voice[0] = NONE;
    if (ccl->state == CCL_HAS_ID) return; /* the others' READY stands */
    ccl->round++;
    ccl->is_open = 1;
    say_to_all(comm, GB_CCL_FREEZE, ccl);
    if (ccl->state == CCL_FROZEN) count_yes(ccl, comm, 0);
}

static void on_member_word(struct gb_shared_ccl *ccl, const gpubridge_comm *comm, uint32_t member,
                           enum gb_ccl_word word, uint32_t round)
{
    if (word == GB_CCL_READY) {
        if (!ccl->is_open && ccl->state < CCL_DRAINING) count_ready(ccl, member);
    } else if (ccl->is_open && round == ccl->round && ccl->voice[member] == IS_READY) {
        if (word == GB_CCL_YES)
            count_yes(ccl, comm, member);
        else
            close_round(ccl, comm);
    }
}

/* ---- every member's part ---- */

static void ask(struct gb_shared_ccl *ccl, const gpubridge_comm *comm)
{
    ccl->state = CCL_ASKED;
    if (ccl->rank == 0)
        count_ready(ccl, 0);
    else
        say(comm, 0, GB_CCL_READY, ccl);
}

static void say_yes(struct gb_shared_ccl *ccl, const gpubridge_comm *comm)
{
    ccl->state = CCL_FROZEN;
    if (ccl->rank == 0)
        count_yes(ccl, comm, 0);
    else
        say(comm, 0, GB_CCL_YES, ccl);
}

static void say_no(struct gb_shared_ccl *ccl, const gpubridge_comm *comm)
{
    if (ccl->rank == 0) {
        close_round(ccl, comm);
        return;
    }
    thaw(ccl, CCL_HAS_ID);
    say(comm, 0, GB_CCL_NO, ccl);
}

static void on_freeze(struct gb_shared_ccl *ccl, const gpubridge_comm *comm, uint32_t round)
{
    if (ccl->state != CCL_ASKED) return;
    ccl->round = round;
    ccl->state = CCL_HAS_ID;
    if (next_user(ccl) && !turns_of(ccl)->holder) freeze(ccl);
    if (ccl->state == CCL_HAS_ID)
        say(comm, 0, GB_CCL_NO, ccl);
    else if (ccl->state == CCL_FROZEN)
        say_yes(ccl, comm);
}

static void on_lowest_word(struct gb_shared_ccl *ccl, const gpubridge_comm *comm, enum gb_ccl_word word, uint32_t round)
{
    if (word == GB_CCL_FREEZE)
        on_freeze(ccl, comm, round);
    else if (round != ccl->round)
        return;
    else if (word == GB_CCL_GO && ccl->state == CCL_FROZEN)
        create(ccl);
    else if (word == GB_CCL_THAW && (ccl->state == CCL_FROZEN || ccl->state == CCL_DRAINING))
        thaw(ccl, CCL_HAS_ID);
}

void gb_ccls_on_word(gpubridge_context *context, const struct gb_link *link, enum gb_ccl_word word, uint64_t set,
                     uint32_t round)
{
    struct gb_shared_ccl *ccl = context->turns.ccls;
    const gpubridge_comm *comm = context->comms;
    while (ccl && (ccl->set != set || ccl->dead || !ccl->nranks)) ccl = ccl->next;
    while (comm && comm->ccl_set != set) comm = comm->next;
    if (!ccl || !comm) return; /* of a group that is over here */
    uint32_t member = 0;
    while (member < ccl->nranks && member_link(comm, member) != link) member++;
    const int to_lowest = word == GB_CCL_READY || word == GB_CCL_YES || word == GB_CCL_NO;
    if (member == ccl->nranks || (ccl->rank == 0) != to_lowest || (member == 0) == to_lowest) {
        GB_WARN("%s sent word %d about a vendor communicator that is not its to say: dropped", gb_link_label(link),
                (int)word);
        return;
    }
    if (to_lowest)
        on_member_word(ccl, comm, member, word, round);
    else
        on_lowest_word(ccl, comm, word, round);
    gb_turns_advance(context);
}

static void try_to_agree(struct gb_shared_ccl *ccl, gpubridge_comm *comm)
{
    const int is_idle = gb_launcher_is_idle(ccl->context->launcher);
    if (!ccl->wait_ns) {
        ccl->wait_ns = gb_now_ns();
        ccl->patience_ns = PATIENCE_NS;
    }
    if (ccl->state == CCL_DRAINING && is_idle)
        say_yes(ccl, comm);
    else if (ccl->state == CCL_HAS_ID && !turns_of(ccl)->holder && (is_idle || is_impatient(ccl)))
        ask(ccl, comm);
}

int gb_ccls_use(gpubridge_comm *comm)
{
    struct gb_shared_ccl *ccl = ccl_of(comm->context, comm->ccl_set);
    if (!ccl) return GPUBRIDGE_ERR_NO_MEMORY;
    if (ccl->state == CCL_MADE) {
        comm->group.ccl = ccl->comm;
        return 0;
    }
    if (ccl->state == CCL_FAILED) {
        gb_err_put(ccl->text);
        return ccl->status;
    }
    if (ccl->state == CCL_HAS_ID || ccl->state == CCL_DRAINING) try_to_agree(ccl, comm);
    return GPUBRIDGE_AGAIN;
}

void gb_ccls_tick(gpubridge_context *context, uint64_t now)
{
    struct gb_shared_ccl *ccl = context->turns.holder;
    const gpubridge_comm *comm = ccl ? next_user(ccl) : NULL;
    if (!comm || ccl->state != CCL_DRAINING || now - ccl->freeze_ns < DRAIN_NS) return;
    ccl->wait_ns = now;
    if (ccl->patience_ns < MAX_PATIENCE_NS) ccl->patience_ns *= 2;
    say_no(ccl, comm);
}

/* ---- ends ---- */

/* Its vendor calls may be stuck: the communicator cannot be used again. */
static int vendor_busy(const struct gb_group *group)
{
    for (const struct gb_op *op = group->ops_head; op; op = op->next)
        if (op->wants_turn && op->is_started) return 1;
    return 0;
}

/* The communicator that is being made may wait for a member that is gone.  Groups that share it fail with it; later
 * ones have another epoch, hence another set. */
static void give_up_creating(struct gb_turns *turns, const gpubridge_comm *comm)
{
    const struct gb_op *op = comm->group.ops_head;
    while (op && !op->wants_turn) op = op->next;
    if (!op) return; /* it is being made for others */
    for (struct gb_shared_ccl *ccl = turns->ccls; ccl; ccl = ccl->next) {
        if (ccl->set != comm->ccl_set || ccl->state != CCL_CREATING || atomic_load(&ccl->give_up)) continue;
        atomic_store(&ccl->give_up, 1);
        turns->epoch++;
    }
}

/* Frozen for an operation of `comm`, which was aborted: no other one is next.  A member that said YES cannot take it
 * back: the others may be creating already, until the abort reaches them. */
static void leave_agreement(const gpubridge_comm *comm)
{
    struct gb_turns *turns = &comm->context->turns;
    struct gb_shared_ccl *ccl = turns->holder;
    if (!ccl || ccl->set != comm->ccl_set || ccl->state == CCL_CREATING || next_user(ccl)) return;
    if (ccl->rank == 0 || ccl->state == CCL_DRAINING) {
        say_no(ccl, comm);
        return;
    }
    ccl->status = GPUBRIDGE_ERR_ABORTED;
    snprintf(ccl->text, sizeof ccl->text, "the vendor communicator was given up with group %s: %.300s",
             comm->group.name, comm->group.status_text);
    thaw(ccl, CCL_FAILED);
    turns->epoch++;
}

void gb_ccls_aborted(gpubridge_context *context, gpubridge_comm *comm)
{
    struct gb_turns *turns = &context->turns;
    leave_agreement(comm);
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
        free(ccl->voice);
        free(ccl);
    }
}
