/* SPDX-License-Identifier: Apache-2.0
 * SEND and RECV: one message per operation, matched by (peer, tag, order).  They keep no order with collectives.  A
 * device buffer is copied to host staging before its message leaves, or from it (or from the sender's, on one host)
 * after it arrived; nothing on the device waits for the network.  Engine role. */
#include "base/clock.h"
#include "engine/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct gb_p2p_slot *slot_of(struct gb_group *group, int32_t peer, int32_t tag)
{
    const size_t nbuckets = sizeof group->p2p / sizeof *group->p2p;
    struct gb_p2p_slot **bucket = &group->p2p[((uint32_t)peer * 31u + (uint32_t)tag) % nbuckets];
    for (struct gb_p2p_slot *slot = *bucket; slot; slot = slot->next)
        if (slot->peer == peer && slot->tag == tag) return slot;
    struct gb_p2p_slot *slot = calloc(1, sizeof *slot);
    if (!slot) return NULL;
    *slot = (struct gb_p2p_slot){.peer = peer, .tag = tag, .next = *bucket};
    *bucket = slot;
    return slot;
}

uint32_t gb_p2p_next(struct gb_group *group, int kind, int32_t peer, int32_t tag)
{
    const struct gb_p2p_slot *slot = peer < 0 ? NULL : slot_of(group, peer, tag);
    if (!slot) return 0;
    return kind == GPUBRIDGE_SEND ? slot->send_seq : slot->recv_seq;
}

/* The message is between host memories: the user's, or the staging of a device buffer. */
static void *host_buffer(struct gb_op *op)
{
    if (op->dev) return op->buf[GB_BUF_HOST];
    return op->buf[op->kind == GPUBRIDGE_SEND ? GB_BUF_IN : GB_BUF_OUT];
}

static void post(struct gb_op *op)
{
    struct gb_link *link = op->group->links[op->source];
    op->started++;
    op->is_posted = 1;
    int rc;
    if (op->kind == GPUBRIDGE_SEND)
        rc = gb_link_send(link, &op->key, &op->sig, host_buffer(op), op->payload_bytes, op->cells);
    else if (op->dev && op->group->lends && op->group->lends[op->source])
        rc = gb_link_borrow(link, &op->key, &op->sig, host_buffer(op), op->payload_bytes, op->cells);
    else
        rc = gb_link_recv(link, &op->key, &op->sig, host_buffer(op), op->payload_bytes, op->cells);
    if (rc) {
        op->started--;
        gb_op_fail(op, rc, gb_err_text());
    }
}

static int self_matches(const struct gb_op *a, const struct gb_op *b)
{
    return b->is_p2p && !b->is_aborting && a->kind != b->kind && a->tag == b->tag &&
           b->source == (int32_t)b->group->rank && a->key.seq == b->key.seq && b->is_posted && a != b;
}

/* Both ends are here: copy, then finish both. */
static void post_self(struct gb_op *op)
{
    struct gb_op *other = op->group->ops_head;
    op->is_posted = 1;
    while (other && !self_matches(op, other)) other = other->next;
    if (!other) return;
    struct gb_op *send = op->kind == GPUBRIDGE_SEND ? op : other;
    struct gb_op *recv = send == op ? other : op;
    if (send->payload_bytes != recv->payload_bytes) {
        char text[256];
        snprintf(text, sizeof text, "rank %u sends %llu bytes to itself and receives %llu with tag %d", op->group->rank,
                 (unsigned long long)send->payload_bytes, (unsigned long long)recv->payload_bytes, op->tag);
        gb_op_fail(send, GPUBRIDGE_ERR_MISMATCH, text);
        gb_op_fail(recv, GPUBRIDGE_ERR_MISMATCH, text);
    } else {
        if (send->payload_bytes) memcpy(host_buffer(recv), host_buffer(send), send->payload_bytes);
        gb_p2p_message_done(send);
        gb_p2p_message_done(recv);
    }
    gb_op_settle(other);
}

static void post_to_peer(struct gb_op *op)
{
    if (op->source == (int32_t)op->group->rank)
        post_self(op);
    else
        post(op);
}

/* Takes the oldest announced message for a receive from anyone that continues its pair's order. */
static int bind_any(struct gb_op *op)
{
    struct gb_group *group = op->group;
    struct gb_p2p_seen **at = &group->seen_head, *seen;
    for (seen = *at; seen; at = &seen->next, seen = *at) {
        if (seen->tag != op->tag) continue;
        struct gb_p2p_slot *slot = slot_of(group, seen->peer, seen->tag);
        if (!slot || seen->seq != slot->recv_seq) continue;
        op->source = seen->peer;
        op->key.seq = slot->recv_seq++;
        break;
    }
    if (!seen) return 0;
    *at = seen->next;
    if (group->seen_tail == seen) {
        group->seen_tail = NULL;
        for (struct gb_p2p_seen *s = group->seen_head; s; s = s->next) group->seen_tail = s;
    }
    free(seen);
    return 1;
}

static int bind_any_self(struct gb_op *op)
{
    struct gb_p2p_slot *slot = slot_of(op->group, (int32_t)op->group->rank, op->tag);
    if (!slot || slot->send_seq == slot->recv_seq) return 0;
    op->source = (int32_t)op->group->rank;
    op->key.seq = slot->recv_seq++;
    return 1;
}

static void forget_seen(struct gb_group *group, int32_t peer, int32_t tag, uint32_t seq)
{
    struct gb_p2p_seen *last = NULL;
    for (struct gb_p2p_seen **at = &group->seen_head; *at;) {
        struct gb_p2p_seen *seen = *at;
        if (seen->peer == peer && seen->tag == tag && seen->seq == seq) {
            *at = seen->next;
            free(seen);
            continue;
        }
        last = seen;
        at = &seen->next;
    }
    group->seen_tail = last;
}

static void retry_any(struct gb_group *group)
{
    struct gb_op *next;
    for (struct gb_op *op = group->ops_head; op; op = next) {
        next = op->next;
        if (!op->is_any || op->is_posted || op->is_aborting) continue;
        if (bind_any(op) || bind_any_self(op)) {
            post_to_peer(op);
            gb_op_settle(op);
            return; /* the list may have changed; one message serves one receive */
        }
    }
}

void gb_p2p_admit(struct gb_op *op)
{
    struct gb_group *group = op->group;
    op->is_started = 1;
    op->start_ns = op->progress_ns = gb_now_ns();
    op->left = 1;
    if (op->is_any) {
        if (bind_any(op) || bind_any_self(op)) post_to_peer(op);
    } else {
        struct gb_p2p_slot *slot = slot_of(group, op->root, op->tag);
        if (!slot) {
            gb_op_fail(op, GPUBRIDGE_ERR_NO_MEMORY, "no memory for a send or receive");
            gb_op_settle(op);
            return;
        }
        op->source = op->root;
        op->key.seq = op->kind == GPUBRIDGE_SEND ? slot->send_seq++ : slot->recv_seq++;
        if (op->kind == GPUBRIDGE_RECV) forget_seen(group, op->source, op->tag, op->key.seq);
        if (op->kind == GPUBRIDGE_SEND && op->dev)
            gb_op_start_device(op);
        else
            post_to_peer(op);
        if (op->root == (int32_t)group->rank && op->kind == GPUBRIDGE_SEND) retry_any(group);
    }
    gb_op_settle(op);
}

void gb_p2p_unexpected(struct gb_group *group, int32_t peer, const struct gb_net_event *event)
{
    struct gb_p2p_seen *seen = calloc(1, sizeof *seen);
    if (!seen) {
        gb_group_abort(group, GPUBRIDGE_ERR_NO_MEMORY, "no memory to remember an announced message", 1);
        return;
    }
    *seen = (struct gb_p2p_seen){.peer = peer, .tag = (int32_t)(event->key.xid & ~GB_XID_P2P), .seq = event->key.seq};
    if (group->seen_tail)
        group->seen_tail->next = seen;
    else
        group->seen_head = seen;
    group->seen_tail = seen;
    retry_any(group);
}

void gb_p2p_message_done(struct gb_op *op)
{
    op->left--;
    if (op->dev && op->kind == GPUBRIDGE_RECV) gb_op_start_device(op);
}

void gb_p2p_device_done(struct gb_op *op)
{
    if (op->kind == GPUBRIDGE_SEND) post_to_peer(op);
}

void gb_p2p_forget(struct gb_group *group)
{
    while (group->seen_head) {
        struct gb_p2p_seen *seen = group->seen_head;
        group->seen_head = seen->next;
        free(seen);
    }
    group->seen_tail = NULL;
    for (size_t i = 0; i < sizeof group->p2p / sizeof *group->p2p; i++) {
        while (group->p2p[i]) {
            struct gb_p2p_slot *slot = group->p2p[i];
            group->p2p[i] = slot->next;
            free(slot);
        }
    }
}
