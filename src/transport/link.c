/* SPDX-License-Identifier: Apache-2.0
 * Links as the engine sees them: making, finding, naming, posting.  The parts that move bytes are express.c and lane.c.
 */
#include "transport/net_impl.h"

#include "base/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

struct gb_link *gb_link_find(struct gb_net *net, const uint8_t uuid[16])
{
    for (size_t i = 0; i < net->links; i++)
        if (memcmp(net->link[i]->uuid.byte, uuid, 16) == 0) return net->link[i];
    return NULL;
}

static struct gb_sock no_sock(struct gb_net *net)
{
    return (struct gb_sock){.fd = -1, .net = net};
}

struct gb_link *gb_link_make(struct gb_net *net, const uint8_t uuid[16], int32_t rank, const char *host)
{
    if (net->links == net->link_capacity) {
        size_t capacity = net->link_capacity ? 2 * net->link_capacity : 16;
        struct gb_link **grown = (struct gb_link **)realloc((void *)net->link, capacity * sizeof(struct gb_link *));
        if (!grown) return NULL;
        net->link = grown;
        net->link_capacity = capacity;
    }
    struct gb_link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    link->net = net;
    memcpy(link->uuid.byte, uuid, 16);
    link->global_rank = rank;
    snprintf(link->host, sizeof link->host, "%s", host);
    snprintf(link->label, sizeof link->label, "rank %" PRId32 " (%s)", rank, link->host);
    snprintf(link->doubt, sizeof link->doubt, "%s: the connection broke or delivered damaged data", link->label);
    link->express = link->control = no_sock(net);
    for (int i = 0; i < GB_LANES_MAX; i++) {
        link->lane[i].link = link;
        link->lane[i].sock = no_sock(net);
    }
    pthread_mutex_init(&link->lock, NULL);
    if (gb_match_init(&link->match, &gb_express_hooks, link, link, &net->cancelled) != 0) {
        free(link);
        return NULL;
    }
    link->deadline_ns = gb_now_ns() + (uint64_t)net->connect_timeout_ns;
    net->link[net->links++] = link;
    return link;
}

void gb_link_free(struct gb_link *link)
{
    gb_match_fini(&link->match);
    gb_loan_link_fini(link);
    for (int i = 0; i < GB_LANES_MAX; i++) {
        XXH3_freeState(link->lane[i].tx_sum);
        XXH3_freeState(link->lane[i].rx_sum);
    }
    while (link->held_head) {
        struct gb_note *next = link->held_head->next;
        free(link->held_head->text);
        free(link->held_head);
        link->held_head = next;
    }
    free(link->out.data);
    free(link->ctl_out.data);
    free(link->in);
    pthread_mutex_destroy(&link->lock);
    free(link);
}

void gb_link_release_held(struct gb_link *link)
{
    while (link->held_head) {
        struct gb_note *note = link->held_head;
        link->held_head = note->next;
        gb_net_note(link->net, note);
    }
    link->held_tail = NULL;
}

/* Same host: shared memory first, then loopback, it always works there.  Elsewhere both would reach the wrong process.
 */
static void order_endpoints(struct gb_net *net, struct gb_address_info *a)
{
    struct gb_address_info in = *a;
    int same = memcmp(in.host_id, net->own.host_id, 16) == 0;
    a->count = 0;
    for (int i = 0; i < in.count; i++)
        if (in.endpoint[i].family == GB_FAMILY_LOCAL) a->endpoint[a->count++] = in.endpoint[i];
    for (int want = same; want >= 0; want--)
        for (int i = 0; i < in.count; i++)
            if (in.endpoint[i].family != GB_FAMILY_LOCAL && (in.endpoint[i].flags & GB_ENDPOINT_LOOPBACK) == want)
                a->endpoint[a->count++] = in.endpoint[i];
}

int gb_link_get(struct gb_net *net, const struct gb_net_peer *peer, struct gb_link **out)
{
    struct gb_address_info to;
    const char *why;
    if (memcmp(peer->uuid.byte, net->self.byte, 16) == 0)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "rank %d is this process itself: there is no link to it",
                       peer->global_rank);
    if (peer->address.bytes > GB_ADDRESS_BYTES ||
        gb_address_parse(peer->address.blob, peer->address.bytes, &to, &why) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the address of rank %d: %s", peer->global_rank,
                       peer->address.bytes > GB_ADDRESS_BYTES ? "too long" : why);
    if (to.inproc != net->own.inproc)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING,
                       "rank %d uses %s, this process %s: set GPUBRIDGE_TRANSPORT equally on all ranks",
                       peer->global_rank, to.inproc ? "inproc" : "tcp", net->base->name);
    if (net->base == &gb_transport_shm && memcmp(to.host_id, net->own.host_id, 16) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE,
                       "rank %d (%s) is on another host, or in another network namespace of this one: "
                       "GPUBRIDGE_TRANSPORT=shm cannot reach it; auto can",
                       peer->global_rank, peer->host ? peer->host : "?");
    order_endpoints(net, &to);
    pthread_mutex_lock(&net->lock);
    struct gb_link *link = gb_link_find(net, peer->uuid.byte);
    if (!link) link = gb_link_make(net, peer->uuid.byte, peer->global_rank, peer->host ? peer->host : "?");
    if (!link) {
        pthread_mutex_unlock(&net->lock);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the link to rank %d", peer->global_rank);
    }
    link->refs++;
    if (!link->claimed) {
        int far = memcmp(to.host_id, net->own.host_id, 16) != 0;
        atomic_store_explicit(&link->checksum, net->checksum == 2 ? far : net->checksum, memory_order_relaxed);
        link->claimed = 1;
        pthread_mutex_lock(&link->lock);
        link->request = to;
        link->requested = 1;
        link->deadline_ns = gb_now_ns() + (uint64_t)net->connect_timeout_ns;
        pthread_mutex_unlock(&link->lock);
        gb_link_release_held(link);
    }
    pthread_mutex_unlock(&net->lock);
    gb_control_wake(net);
    *out = link;
    return 0;
}

/* The link stays up for the next group between the two processes; gb_net_close ends it. */
void gb_link_put(struct gb_link *link)
{
    if (!link) return;
    pthread_mutex_lock(&link->net->lock);
    link->refs--;
    pthread_mutex_unlock(&link->net->lock);
}

enum gb_link_state gb_link_state(const struct gb_link *link)
{
    return (enum gb_link_state)atomic_load(&link->state);
}

const char *gb_link_label(const struct gb_link *link)
{
    return link->label;
}

size_t gb_link_describe(const struct gb_link *link, char *text, size_t capacity)
{
    static const char *const words[] = {"connecting", "up", "left", "down"};
    struct gb_link *l = (struct gb_link *)(uintptr_t)link; /* only its lock is touched */
    pthread_mutex_lock(&l->lock);
    int state = atomic_load(&l->state);
    const char *name = l->local ? "shm" : l->net->base == &gb_transport_auto ? "tcp" : l->net->base->name;
    int n = snprintf(text, capacity, "%s %u lanes %s%s%s", name, l->lanes, l->where, state == GB_LINK_UP ? "" : " ",
                     state == GB_LINK_UP ? "" : words[state]);
    pthread_mutex_unlock(&l->lock);
    return n < 0 ? 0 : (size_t)n;
}

void gb_link_set_user(struct gb_link *link, void *user)
{
    link->user = user;
}

void *gb_link_user(const struct gb_link *link)
{
    return link->user;
}

void gb_link_counters(const struct gb_link *link, struct gb_link_counters *out)
{
    out->sent_bytes = atomic_load_explicit(&link->sent, memory_order_relaxed);
    out->recv_bytes = atomic_load_explicit(&link->recv, memory_order_relaxed);
    out->lent_bytes = atomic_load_explicit(&link->lent, memory_order_relaxed);
    out->borrowed_bytes = atomic_load_explicit(&link->borrowed, memory_order_relaxed);
}

int gb_link_send(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, const void *buf,
                 uint64_t bytes, void *cookie)
{
    pthread_mutex_lock(&link->lock);
    int rc = gb_match_send(&link->match, key, sig, buf, bytes, cookie);
    pthread_mutex_unlock(&link->lock);
    if (link->match.asking.head) gb_express_mark(link);
    return rc;
}

static int post_recv(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, void *buf,
                     uint64_t bytes, int borrows, void *cookie)
{
    pthread_mutex_lock(&link->lock);
    int rc = gb_match_recv(&link->match, key, sig, buf, bytes, borrows, cookie);
    pthread_mutex_unlock(&link->lock);
    if (link->match.owed >= GB_CREDIT_UNITS / 4) gb_express_mark(link);
    return rc;
}

int gb_link_recv(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, void *buf, uint64_t bytes,
                 void *cookie)
{
    return post_recv(link, key, sig, buf, bytes, 0, cookie);
}

int gb_link_borrow(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, void *buf, uint64_t bytes,
                   void *cookie)
{
    return post_recv(link, key, sig, buf, bytes, gb_link_lends(link), cookie);
}

void gb_link_return(struct gb_link *link, void *loan)
{
    pthread_mutex_lock(&link->lock);
    int rc = gb_match_return(&link->match, loan);
    pthread_mutex_unlock(&link->lock);
    if (rc) gb_control_report(link, GB_REPORT_BROKEN, 0, gb_err_text());
}

int gb_link_lends(const struct gb_link *link)
{
    return gb_link_state(link) == GB_LINK_UP && link->lends;
}

int gb_link_stale(struct gb_link *link, uint64_t group, uint32_t before, struct gb_key *key, struct gb_sig *sig)
{
    pthread_mutex_lock(&link->lock);
    int found = gb_match_stale(&link->match, group, before, key, sig);
    pthread_mutex_unlock(&link->lock);
    return found;
}

int gb_link_ctrl(struct gb_link *link, const void *data, size_t bytes)
{
    if (bytes > GB_CTRL_BYTES)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a control message of %zu bytes; at most %u", bytes, GB_CTRL_BYTES);
    uint8_t head[GB_CTL_HEAD_BYTES];
    struct gb_ctl ctl = {.type = GB_CTL_MESSAGE, .bytes = (uint16_t)bytes};
    gb_ctl_pack(&ctl, data, head);
    pthread_mutex_lock(&link->lock);
    int rc = link->down_status;
    if (rc)
        rc = GB_FAIL(rc, "%s", link->text);
    else if ((rc = gb_outbuf_add(&link->ctl_out, head, sizeof head)) == 0)
        rc = gb_outbuf_add(&link->ctl_out, data, bytes);
    pthread_mutex_unlock(&link->lock);
    if (rc == 0) gb_control_wake(link->net);
    return rc;
}
