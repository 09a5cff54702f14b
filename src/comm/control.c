/* SPDX-License-Identifier: Apache-2.0
 * Control messages between members: aborts, departures, probes for who is late or disagrees, turns, vendor
 * communicators.  These are the engine's hooks.  Engine role. */
#include "base/clock.h"
#include "base/log.h"
#include "comm/ccls.h"
#include "comm/turns.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROBE_AFTER_NS 500000000u /* an operation that takes longer asks who is late */
#define PROBE_EVERY_NS 1000000000u

enum ctrl_type {
    CTRL_ABORT = 1,
    CTRL_LEAVE,
    CTRL_PROBE,
    CTRL_HAVE,
    CTRL_BEHIND,
    CTRL_DIFFERS,
    CTRL_ANNOUNCE,
    CTRL_TICKET,
    CTRL_CCL_ID,
    CTRL_CCL_WORD, /* and the types after it: enum gb_ccl_word */
    CTRL_CCL_LAST = CTRL_CCL_WORD + GB_CCL_WORDS - 1,
    CTRL_WILD
};

/* All integers little-endian as on every supported machine; the size is part of the protocol (docs/wire-format.md). */
struct ctrl {
    uint32_t type;     /* enum ctrl_type */
    int32_t status;    /* ABORT */
    uint64_t group;    /* CCL_ID, CCL_WORD: the member set */
    uint32_t seq;      /* CCL_WORD: the round */
    uint32_t members;  /* ANNOUNCE */
    struct gb_sig sig; /* PROBE, DIFFERS, WILD */
    char text[400];    /* ABORT, LEAVE: words, CCL_ID: 128 bytes */
};
_Static_assert(sizeof(struct ctrl) == 440, "the layout of control messages is part of the protocol");

static void send_ctrl(struct gb_link *link, const struct ctrl *message)
{
    if (!link || gb_link_state(link) == GB_LINK_DEAD || gb_link_state(link) == GB_LINK_LEFT) return;
    int rc = gb_link_ctrl(link, message, sizeof *message);
    if (rc) GB_DEBUG("control message %u to %s not sent: %s", message->type, gb_link_label(link), gb_err_text());
}

gpubridge_comm *gb_context_find_comm(gpubridge_context *context, uint64_t group)
{
    gpubridge_comm *comm = context->comms;
    while (comm && comm->group.id != group) comm = comm->next;
    return comm;
}

static int member_of(const gpubridge_comm *comm, const struct gb_link *link)
{
    for (uint32_t r = 0; r < comm->group.size; r++)
        if (comm->group.links[r] == link && link) return (int)r;
    return -1;
}

static void tell_members(gpubridge_comm *comm, const struct ctrl *message)
{
    for (uint32_t r = 0; r < comm->group.size; r++)
        if (r != comm->group.rank && !comm->members[r].has_left) send_ctrl(comm->group.links[r], message);
}

/* ---- aborts and departures ---- */

static void note_farewell(gpubridge_context *context, int status, const char *text)
{
    pthread_mutex_lock(&context->lock);
    if (!context->farewell_status) {
        context->farewell_status = status;
        snprintf(context->farewell, sizeof context->farewell, "%s", text);
    }
    pthread_mutex_unlock(&context->lock);
}

static void on_aborted(void *arg, struct gb_group *group, int status, const char *text, int tell)
{
    gpubridge_context *context = arg;
    gpubridge_comm *comm = group->comm;
    if (tell) {
        struct ctrl message = {.type = CTRL_ABORT, .status = status, .group = group->id};
        snprintf(message.text, sizeof message.text, "%s", text);
        tell_members(comm, &message);
    }
    if (status != GPUBRIDGE_ERR_DESTROYED) note_farewell(context, status, text);
    gb_turns_aborted(context, comm);
}

static void remember_stray(gpubridge_context *context, const struct ctrl *message)
{
    struct gb_stray_abort *stray = calloc(1, sizeof *stray);
    if (!stray) return; /* the new group will find the peer gone by itself, only later */
    *stray = (struct gb_stray_abort){.group = message->group, .status = message->status, .next = context->stray_aborts};
    snprintf(stray->text, sizeof stray->text, "%s", message->text);
    context->stray_aborts = stray;
}

static void on_abort_message(gpubridge_context *context, struct gb_link *link, const struct ctrl *message)
{
    gpubridge_comm *comm = gb_context_find_comm(context, message->group);
    if (!comm) {
        remember_stray(context, message);
        return;
    }
    int status =
        message->status < 0 && message->status != GPUBRIDGE_ERR_TIMEOUT ? message->status : GPUBRIDGE_ERR_ABORTED;
    char text[480];
    const char *reporter = strstr(message->text, "[reported by ") ? NULL : gb_link_label(link);
    snprintf(text, sizeof text, "%s%s%s%s", message->text, reporter ? " [reported by " : "", reporter ? reporter : "",
             reporter ? "]" : "");
    /* Passed on, so that on every link the cause comes before the goodbye, or the end, of a rank that gives up because
     * of it. */
    gb_group_abort(&comm->group, status, text, 1);
}

/* `reason`: the leaver's own, or "". */
static void member_left(gpubridge_comm *comm, int rank, const char *words, const char *reason)
{
    struct gb_group *group = &comm->group;
    comm->members[rank].has_left = 1;
    if (group->left_ns) return;
    group->left_ns = gb_now_ns();
    snprintf(group->left_text, sizeof group->left_text, "%s %s%s%.240s", group->labels[rank], words,
             reason[0] ? " after an error: " : "", reason);
}

void gb_control_leave(gpubridge_comm *comm)
{
    struct ctrl message = {.type = CTRL_LEAVE, .group = comm->group.id};
    pthread_mutex_lock(&comm->context->lock);
    snprintf(message.text, sizeof message.text, "%s", comm->context->own_reason);
    pthread_mutex_unlock(&comm->context->lock);
    tell_members(comm, &message);
}

/* A goodbye without a culprit: what the peer gave as its reason. */
static const char *reason_of(const struct gb_link *link, const char *text)
{
    const char *label = gb_link_label(link), *rest = text ? text : "";
    size_t n = strlen(label);
    return strncmp(rest, label, n) == 0 && strncmp(rest + n, " left: ", 7) == 0 ? rest + n + 7 : "";
}

static void on_peer(void *arg, struct gb_link *link, int left, int status, const char *text)
{
    gpubridge_context *context = arg;
    struct gb_lost_link *lost = calloc(1, sizeof *lost);
    if (lost) {
        *lost = (struct gb_lost_link){.link = link, .status = status, .next = context->lost};
        snprintf(lost->text, sizeof lost->text, "%s", text ? text : "");
        pthread_mutex_lock(&context->lock);
        context->lost = lost;
        pthread_mutex_unlock(&context->lock);
    }
    for (gpubridge_comm *comm = context->comms; comm; comm = comm->next) {
        int rank = member_of(comm, link);
        if (rank < 0 && comm->leader_link != link) continue;
        if (rank >= 0 && left && status == 0) {
            member_left(comm, rank, "has left the job", reason_of(link, text));
            continue;
        }
        char words[480];
        if (left)
            snprintf(words, sizeof words, "%s left after an error: %s", gb_link_label(link), text ? text : "");
        else
            snprintf(words, sizeof words, "%s", text ? text : "a member is lost"); /* begins with its label */
        if (rank >= 0) comm->members[rank].has_left = 1;
        gb_group_abort(&comm->group, left ? GPUBRIDGE_ERR_PEER_LOST : status, words, 1);
    }
}

/* ---- probes ---- */

static void disagree(gpubridge_comm *comm, int rank, uint32_t seq, const struct gb_sig *mine,
                     const struct gb_sig *theirs)
{
    char a[128], b[128], text[480];
    gb_sig_text(mine, seq, a, sizeof a);
    gb_sig_text(theirs, seq, b, sizeof b);
    snprintf(text, sizeof text,
             "ranks disagree: rank %u has %s, %s has %s: all ranks must call the same operations with the same "
             "arguments in the same order",
             comm->group.rank, a, comm->group.labels[rank], b);
    gb_group_abort(&comm->group, GPUBRIDGE_ERR_MISMATCH, text, 1);
}

static void on_probe(gpubridge_context *context, struct gb_link *link, const struct ctrl *message)
{
    gpubridge_comm *comm = gb_context_find_comm(context, message->group);
    int rank = comm ? member_of(comm, link) : -1;
    if (rank < 0) return;
    struct ctrl answer = {.type = CTRL_HAVE, .group = message->group, .seq = message->seq};
    struct gb_sig mine;
    if (message->seq >= comm->group.last_seq) {
        answer.type = CTRL_BEHIND;
    } else if (gb_group_history(&comm->group, message->seq, &mine) && memcmp(&mine, &message->sig, sizeof mine) != 0) {
        answer.type = CTRL_DIFFERS;
        answer.sig = mine;
        send_ctrl(link, &answer);
        disagree(comm, rank, message->seq, &mine, &message->sig);
        return;
    }
    send_ctrl(link, &answer);
}

static void on_probe_answer(gpubridge_context *context, struct gb_link *link, const struct ctrl *message)
{
    gpubridge_comm *comm = gb_context_find_comm(context, message->group);
    int rank = comm ? member_of(comm, link) : -1;
    struct gb_op *op = rank >= 0 ? gb_group_find_op(&comm->group, message->seq) : NULL;
    if (!op) return;
    if (message->type == CTRL_DIFFERS)
        disagree(comm, rank, message->seq, &op->sig, &message->sig);
    else
        comm->group.arrived[rank] = message->type == CTRL_HAVE ? 1 : 2;
}

static void probe(gpubridge_comm *comm, uint64_t now)
{
    struct gb_group *group = &comm->group;
    struct gb_op *op = group->ops_head;
    while (op && (op->is_p2p || op->is_aborting)) op = op->next;
    if (!op || now - op->submit_ns < PROBE_AFTER_NS || now - group->probe_ns < PROBE_EVERY_NS) return;
    group->probe_ns = now;
    struct ctrl message = {.type = CTRL_PROBE, .group = group->id, .seq = op->key.seq, .sig = op->sig};
    tell_members(comm, &message);
}

/* A broadcast whose ranks name two roots finishes on both of them; only the message that nobody wants tells. */
static void find_unwanted(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    const struct gb_op *op = group->ops_head;
    while (op && op->is_p2p) op = op->next;
    uint32_t before = op ? op->key.seq : group->last_seq;
    for (uint32_t r = 0; r < group->size; r++) {
        struct gb_key key;
        struct gb_sig theirs, mine;
        if (!group->links[r] || !gb_link_stale(group->links[r], group->id, before, &key, &theirs)) continue;
        char name[128], text[400];
        gb_sig_text(&theirs, key.seq, name, sizeof name);
        snprintf(text, sizeof text,
                 "ranks disagree: %s sent a message of %s that rank %u does not know: all ranks must call the same "
                 "operations with the same arguments in the same order",
                 group->labels[r], name, group->rank);
        if (gb_group_history(group, key.seq, &mine))
            disagree(comm, (int)r, key.seq, &mine, &theirs);
        else
            gb_group_abort(group, GPUBRIDGE_ERR_MISMATCH, text, 1);
        return;
    }
}

static void on_tick(void *arg, uint64_t now)
{
    gpubridge_context *context = arg;
    for (gpubridge_comm *comm = context->comms; comm; comm = comm->next) {
        if (atomic_load_explicit(&comm->group.status, memory_order_relaxed)) continue;
        probe(comm, now);
        find_unwanted(comm);
    }
    gb_ccls_tick(context, now);
    gb_turns_advance(context);
}

/* ---- NaN and infinity in compressed operations ---- */

/* Who only receives results, or nothing but what a mate decoded, cannot see whose partial it came from. */
static void on_wild(void *arg, struct gb_group *group, uint32_t seq, const struct gb_sig *sig)
{
    (void)arg;
    struct ctrl message = {.type = CTRL_WILD, .group = group->id, .seq = seq, .sig = *sig};
    tell_members(group->comm, &message);
}

static void on_wild_message(gpubridge_context *context, struct gb_link *link, const struct ctrl *message)
{
    gpubridge_comm *comm = gb_context_find_comm(context, message->group);
    int rank = comm ? member_of(comm, link) : -1;
    if (rank >= 0) gb_group_heard_wild(&comm->group, (uint32_t)rank, message->seq, &message->sig);
}

/* ---- turns and vendor communicators ---- */

static void on_announce(void *arg, struct gb_op *op)
{
    gb_turns_announce(arg, op);
}

static void on_device_moved(void *arg)
{
    gb_turns_advance(arg);
}

void gb_control_send_turn(struct gb_link *link, int ticket, uint64_t group, uint32_t seq, uint32_t members)
{
    struct ctrl message = {
        .type = ticket ? CTRL_TICKET : CTRL_ANNOUNCE, .group = group, .seq = seq, .members = members};
    send_ctrl(link, &message);
}

void gb_control_send_ccl_id(struct gb_link *link, uint64_t set, const uint8_t id[GB_CCL_ID_BYTES])
{
    struct ctrl message = {.type = CTRL_CCL_ID, .group = set};
    memcpy(message.text, id, GB_CCL_ID_BYTES);
    send_ctrl(link, &message);
}

void gb_control_send_ccl_word(struct gb_link *link, int word, uint64_t set, uint32_t round)
{
    struct ctrl message = {.type = CTRL_CCL_WORD + (uint32_t)word, .group = set, .seq = round};
    send_ctrl(link, &message);
}

/* ---- dispatch ---- */

static void on_ctrl(void *arg, struct gb_link *link, const void *data, size_t bytes)
{
    gpubridge_context *context = arg;
    struct ctrl message;
    if (bytes != sizeof message) {
        GB_WARN("%s sent a control message of %zu bytes, expected %zu: dropped", gb_link_label(link), bytes,
                sizeof message);
        return;
    }
    memcpy(&message, data, sizeof message);
    message.text[sizeof message.text - 1] = 0;
    gpubridge_comm *comm;
    switch (message.type) {
    case CTRL_ABORT:
        on_abort_message(context, link, &message);
        break;
    case CTRL_LEAVE:
        comm = gb_context_find_comm(context, message.group);
        if (comm && member_of(comm, link) >= 0)
            member_left(comm, member_of(comm, link), "has destroyed the group", message.text);
        break;
    case CTRL_PROBE:
        on_probe(context, link, &message);
        break;
    case CTRL_HAVE:
    case CTRL_BEHIND:
    case CTRL_DIFFERS:
        on_probe_answer(context, link, &message);
        break;
    case CTRL_ANNOUNCE:
        gb_turns_on_announce(context, link, message.group, message.seq, message.members);
        break;
    case CTRL_TICKET:
        gb_turns_on_ticket(context, message.group, message.seq);
        break;
    case CTRL_CCL_ID:
        gb_ccls_on_id(context, message.group, (const uint8_t *)message.text);
        break;
    case CTRL_WILD:
        on_wild_message(context, link, &message);
        break;
    default:
        if (message.type >= CTRL_CCL_WORD && message.type <= CTRL_CCL_LAST) {
            gb_ccls_on_word(context, link, message.type - CTRL_CCL_WORD, message.group, message.seq);
            break;
        }
        GB_WARN("%s sent a control message of unknown type %u: dropped", gb_link_label(link), message.type);
    }
}

void gb_control_hooks(gpubridge_context *context, struct gb_engine_hooks *hooks)
{
    *hooks = (struct gb_engine_hooks){.ctrl = on_ctrl,
                                      .peer = on_peer,
                                      .aborted = on_aborted,
                                      .announce = on_announce,
                                      .device_moved = on_device_moved,
                                      .wild = on_wild,
                                      .tick = on_tick,
                                      .arg = context};
}
