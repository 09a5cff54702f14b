/* SPDX-License-Identifier: Apache-2.0
 * Tickets: who leads, what has its turn, and the leader's part.  Engine role. */
#include "comm/turns.h"

#include "comm/ccls.h"

#include <stdlib.h>
#include <string.h>

struct gb_turn { /* leader: announced by `seen` of `members` */
    uint64_t group;
    uint32_t seq, seen, members;
    struct gb_link **links; /* [members]; NULL: this process */
    struct gb_turn *next;
};

static int uuid_is_zero(const uint8_t uuid[16])
{
    static const uint8_t zero[16];
    return memcmp(uuid, zero, 16) == 0;
}

/* ---- who leads ---- */

static uint32_t island_size(const struct gb_topo *topo, uint32_t island)
{
    return topo->island_first[island + 1] - topo->island_first[island];
}

/* Ranks with GPUs, also those that are alone in their island. */
static int takes_turns(const struct gb_topo *topo, uint32_t rank)
{
    return topo->vendor[topo->island[rank]];
}

static uint32_t count_turn_takers(const struct gb_topo *topo)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < topo->nranks; r++) n += (uint32_t)takes_turns(topo, r);
    return n;
}

/* Some island of the group has a vendor communicator. */
static int any_vendor_calls(const struct gb_topo *topo)
{
    for (uint32_t i = 0; i < topo->nislands; i++)
        if (topo->vendor[i] && island_size(topo, i) > 1) return 1;
    return 0;
}

static int calls_vendor(const gpubridge_comm *comm)
{
    return island_size(comm->group.topo, comm->group.topo->island[comm->group.rank]) > 1;
}

/* The leader that all turn takers of the group know, or NULL. */
static const uint8_t *common_leader(const gpubridge_comm *comm, uint32_t lowest)
{
    const struct gb_topo *topo = comm->group.topo;
    const uint8_t *leader = comm->members[lowest].hello.leader_uuid;
    if (uuid_is_zero(leader)) return NULL;
    for (uint32_t r = lowest; r < topo->nranks; r++)
        if (takes_turns(topo, r) && memcmp(comm->members[r].hello.leader_uuid, leader, 16) != 0) return NULL;
    return leader;
}

void gb_turns_join(gpubridge_comm *comm)
{
    const struct gb_topo *topo = comm->group.topo;
    struct gb_turns *turns = &comm->context->turns;
    gb_ccls_join(comm);
    if (!takes_turns(topo, comm->group.rank) || count_turn_takers(topo) < 2) return;
    uint32_t lowest = 0;
    while (!takes_turns(topo, lowest)) lowest++;
    const uint8_t *leader = common_leader(comm, lowest);
    if (!leader && !any_vendor_calls(topo)) return;
    comm->group.takes_turns = 1;

    /* A leader that all share orders all their groups; otherwise the lowest such member orders this one. */
    const int is_me = leader && memcmp(leader, comm->context->uuid.byte, 16) == 0;
    comm->leader_link = is_me ? NULL : leader ? comm->context->leader_link : comm->group.links[lowest];
    if (uuid_is_zero(turns->leader.byte)) {
        /* The link is held for as long as the context lives: later groups may not have the leader as a member. */
        if (lowest != comm->group.rank && gb_comm_get_link(comm, lowest, &comm->context->leader_link)) return;
        memcpy(turns->leader.byte, comm->members[lowest].hello.uuid, 16);
    }
}

/* ---- starting what has its ticket, in order ---- */

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
        int rc = calls_vendor(op->group->comm) ? gb_ccls_use(op->group->comm) : 0;
        if (rc == GPUBRIDGE_AGAIN) return;
        pop_granted(turns);
        if (rc)
            gb_op_fail(op, rc, gb_err_text());
        else
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
    int rc = calls_vendor(comm) ? gb_ccls_offer(comm) : 0;
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
    gb_ccls_aborted(context, comm);
}

void gb_turns_close(gpubridge_context *context)
{
    while (context->turns.waiting) drop_turn(&context->turns, context->turns.waiting);
}
