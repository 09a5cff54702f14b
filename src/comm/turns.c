/* SPDX-License-Identifier: Apache-2.0
 * Tickets for vendor calls, and vendor communicators shared by groups with equal island members.  Engine role, but for
 * create_ccl, which runs on the launcher thread. */
#include "comm/turns.h"

#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

enum ccl_state { CCL_NO_ID, CCL_HAS_ID, CCL_CREATING, CCL_READY, CCL_FAILED };

struct gb_turn { /* leader: announced by `seen` of `members` */
    uint64_t group;
    uint32_t seq, seen, members;
    struct gb_link **links; /* [members]; NULL: this process */
    struct gb_turn *next;
};

struct gb_turn_ccl {
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
    struct gb_turn_ccl *next;
};

struct creating_call {
    gpubridge_context *context;
    int count;
};

static int uuid_is_zero(const uint8_t uuid[16])
{
    static const uint8_t zero[16];
    return memcmp(uuid, zero, 16) == 0;
}

/* ---- who leads, which communicator ---- */

static uint32_t my_island(const gpubridge_comm *comm)
{
    return comm->group.topo->island[comm->group.rank];
}

/* Ranks of islands that may call the vendor library. */
static int takes_turns(const struct gb_topo *topo, uint32_t rank)
{
    uint32_t i = topo->island[rank];
    return topo->vendor[i] && topo->island_first[i + 1] - topo->island_first[i] > 1;
}

static uint32_t count_turn_takers(const struct gb_topo *topo)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < topo->nranks; r++) n += (uint32_t)takes_turns(topo, r);
    return n;
}

static void join_set(gpubridge_comm *comm)
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

void gb_turns_join(gpubridge_comm *comm)
{
    const struct gb_topo *topo = comm->group.topo;
    struct gb_turns *turns = &comm->context->turns;
    join_set(comm);
    if (!takes_turns(topo, comm->group.rank)) return;
    uint32_t lowest = 0;
    while (!takes_turns(topo, lowest)) lowest++;
    const uint8_t *leader = comm->members[lowest].hello.leader_uuid;
    for (uint32_t r = lowest; r < topo->nranks && leader; r++)
        if (takes_turns(topo, r) && memcmp(comm->members[r].hello.leader_uuid, leader, 16) != 0) leader = NULL;

    /* A leader that all share orders all their groups; otherwise the lowest such member orders this one. */
    struct gb_link *known = leader && !uuid_is_zero(leader) ? comm->context->leader_link : NULL;
    int self_known = leader && memcmp(leader, comm->context->uuid.byte, 16) == 0;
    comm->leader_link = self_known ? NULL : known ? known : comm->group.links[lowest];
    if (uuid_is_zero(turns->leader.byte)) {
        /* The link is held for as long as the context lives: later groups may not have the leader as a member. */
        if (lowest != comm->group.rank && gb_comm_get_link(comm, lowest, &comm->context->leader_link)) return;
        memcpy(turns->leader.byte, comm->members[lowest].hello.uuid, 16);
    }
}

static struct gb_turn_ccl *ccl_of(gpubridge_context *context, uint64_t set)
{
    for (struct gb_turn_ccl *ccl = context->turns.ccls; ccl; ccl = ccl->next)
        if (ccl->set == set && !ccl->dead) return ccl;
    struct gb_turn_ccl *ccl = calloc(1, sizeof *ccl);
    if (!ccl) return NULL;
    ccl->set = set;
    ccl->context = context;
    ccl->next = context->turns.ccls;
    context->turns.ccls = ccl;
    return ccl;
}

/* The lowest member makes the id and sends it before it announces its first use. */
static int offer_id(gpubridge_comm *comm, struct gb_turn_ccl *ccl)
{
    const struct gb_topo *topo = comm->group.topo;
    uint32_t first = topo->island_first[my_island(comm)], end = topo->island_first[my_island(comm) + 1];
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

void gb_turns_on_ccl_id(gpubridge_context *context, uint64_t set, const uint8_t id[GB_CCL_ID_BYTES])
{
    struct gb_turn_ccl *ccl = ccl_of(context, set);
    if (!ccl || ccl->state != CCL_NO_ID) return;
    memcpy(ccl->id, id, GB_CCL_ID_BYTES);
    ccl->state = CCL_HAS_ID;
    gb_turns_advance(context);
}

/* ---- starting what has its ticket, in order ---- */

static void created(void *arg)
{
    struct gb_turn_ccl *ccl = arg;
    ccl->state = ccl->status ? CCL_FAILED : CCL_READY;
    if (ccl->dead && ccl->comm) gb_ccl_abort(ccl->comm);
    gb_turns_advance(ccl->context);
}

/* Launcher thread: may take seconds, in the same order on every member. */
static void create_ccl(void *arg)
{
    struct gb_turn_ccl *ccl = arg;
    ccl->status = gb_ccl_comm_create(ccl->context->ccl, ccl->context->device, (int)ccl->nranks, (int)ccl->rank, ccl->id,
                                     ccl->timeout_ns, &ccl->give_up, &ccl->comm);
    if (ccl->status) snprintf(ccl->text, sizeof ccl->text, "%s", gb_err_text());
    gb_engine_call(ccl->context->engine, created, ccl);
}

static void pop_granted(struct gb_turns *turns)
{
    struct gb_op *op = turns->granted_head;
    turns->granted_head = op->ticket_next;
    if (!turns->granted_head) turns->granted_tail = NULL;
    op->ticket_next = NULL;
}

void gb_turns_advance(gpubridge_context *context)
{
    struct gb_turns *turns = &context->turns;
    while (turns->granted_head) {
        struct gb_op *op = turns->granted_head;
        gpubridge_comm *comm = op->group->comm;
        struct gb_turn_ccl *ccl = ccl_of(context, comm->ccl_set);
        if (!ccl) {
            pop_granted(turns);
            gb_op_fail(op, GPUBRIDGE_ERR_NO_MEMORY, "no memory for a vendor communicator");
            continue;
        }
        if (ccl->state == CCL_HAS_ID) {
            ccl->state = CCL_CREATING;
            gb_launcher_call(context->launcher, create_ccl, ccl);
        }
        if (ccl->state == CCL_NO_ID || ccl->state == CCL_CREATING) return;
        pop_granted(turns);
        if (ccl->state == CCL_FAILED) {
            gb_op_fail(op, ccl->status, ccl->text);
            continue;
        }
        op->group->ccl = ccl->comm;
        gb_engine_ticket(op);
    }
}

void gb_turns_on_ticket(gpubridge_context *context, uint64_t group, uint32_t seq)
{
    gpubridge_comm *comm = gb_context_find_comm(context, group);
    struct gb_op *op = comm ? gb_group_find_op(&comm->group, seq) : NULL;
    if (!op || op->is_aborting || op->has_ticket) return;
    op->ticket_next = NULL;
    if (context->turns.granted_tail)
        context->turns.granted_tail->ticket_next = op;
    else
        context->turns.granted_head = op;
    context->turns.granted_tail = op;
    gb_turns_advance(context);
}

/* ---- the leader's part ---- */

static struct gb_turn *turn_of(struct gb_turns *turns, uint64_t group, uint32_t seq, uint32_t members)
{
    struct gb_turn **at = &turns->waiting;
    for (; *at; at = &(*at)->next)
        if ((*at)->group == group && (*at)->seq == seq) return *at;
    struct gb_turn *turn = calloc(1, sizeof *turn);
    struct gb_link **links = calloc(members, sizeof *links);
    if (!turn || !links) {
        free(turn);
        free(links);
        return NULL;
    }
    *turn = (struct gb_turn){.group = group, .seq = seq, .members = members, .links = links};
    *at = turn;
    return turn;
}

static void drop_turn(struct gb_turns *turns, struct gb_turn *turn)
{
    struct gb_turn **at = &turns->waiting;
    while (*at != turn) at = &(*at)->next;
    *at = turn->next;
    free(turn->links);
    free(turn);
}

void gb_turns_on_announce(gpubridge_context *context, struct gb_link *link, uint64_t group, uint32_t seq,
                          uint32_t members)
{
    if (members == 0 || members > 65536) return;
    struct gb_turn *turn = turn_of(&context->turns, group, seq, members);
    if (!turn || turn->seen >= turn->members) return;
    turn->links[turn->seen++] = link;
    if (turn->seen < turn->members) return;
    int self = 0;
    for (uint32_t i = 0; i < turn->members; i++) {
        if (turn->links[i])
            gb_control_send_turn(turn->links[i], 1, group, seq, 0);
        else
            self = 1;
    }
    drop_turn(&context->turns, turn);
    if (self) gb_turns_on_ticket(context, group, seq);
}

void gb_turns_announce(gpubridge_context *context, struct gb_op *op)
{
    gpubridge_comm *comm = op->group->comm;
    struct gb_turn_ccl *ccl = ccl_of(context, comm->ccl_set);
    int rc = ccl ? offer_id(comm, ccl) : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a vendor communicator");
    if (rc) {
        gb_op_fail(op, rc, gb_err_text());
        return;
    }
    uint32_t members = count_turn_takers(comm->group.topo);
    if (comm->leader_link)
        gb_control_send_turn(comm->leader_link, 0, op->group->id, op->key.seq, members);
    else
        gb_turns_on_announce(context, NULL, op->group->id, op->key.seq, members);
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
    for (struct gb_turn_ccl *ccl = turns->ccls; ccl; ccl = ccl->next) {
        if (ccl->set != comm->ccl_set || ccl->state != CCL_CREATING || atomic_load(&ccl->give_up)) continue;
        atomic_store(&ccl->give_up, 1);
        turns->epoch++;
    }
}

void gb_turns_aborted(gpubridge_context *context, gpubridge_comm *comm)
{
    struct gb_turns *turns = &context->turns;
    for (struct gb_turn *turn = turns->waiting, *next; turn; turn = next) {
        next = turn->next;
        if (turn->group == comm->group.id) drop_turn(turns, turn);
    }
    struct gb_op **at = &turns->granted_head;
    turns->granted_tail = NULL;
    while (*at) {
        if ((*at)->group == &comm->group)
            *at = (*at)->ticket_next;
        else
            turns->granted_tail = *at, at = &(*at)->ticket_next;
    }
    give_up_creating(turns, comm);
    if (!comm->group.ccl || !vendor_busy(&comm->group)) return;
    comm->group.ccl = NULL;
    turns->epoch++;
    for (struct gb_turn_ccl *ccl = turns->ccls; ccl; ccl = ccl->next) {
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
    for (struct gb_turn_ccl *ccl = call->context->turns.ccls; ccl; ccl = ccl->next)
        call->count += ccl->state == CCL_CREATING;
}

void gb_turns_quiesce(gpubridge_context *context)
{
    struct creating_call call = {.context = context};
    const struct timespec nap = {.tv_nsec = 200000};
    for (;;) {
        gb_engine_call(context->engine, count_creating, &call);
        if (!call.count) return;
        nanosleep(&nap, NULL);
    }
}

void gb_turns_close(gpubridge_context *context)
{
    struct gb_turns *turns = &context->turns;
    while (turns->waiting) drop_turn(turns, turns->waiting);
    while (turns->ccls) {
        struct gb_turn_ccl *ccl = turns->ccls;
        turns->ccls = ccl->next;
        if (ccl->comm) gb_launcher_call(context->launcher, destroy_ccl, ccl->comm);
        free(ccl);
    }
}
