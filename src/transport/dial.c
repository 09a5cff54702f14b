/* SPDX-License-Identifier: Apache-2.0
 * Dialling: which candidate address is tried when, and what is said when none answers.  Control thread only.  A round
 * goes over all candidates with the control lane; the address that answers gets the other lanes. */
#include "transport/net_impl.h"

#include "base/clock.h"
#include "base/log.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#define GB_ATTEMPT_NS  3000000000u /* per candidate and round, so that a silent one does not use up the budget */
#define GB_BACKOFF_NS  20000000u
#define GB_BACKOFF_MAX 500000000u

void gb_endpoint_text(const struct gb_endpoint *e, uint16_t port, char *text, size_t capacity)
{
    char addr[INET6_ADDRSTRLEN] = "?";
    if (e->family == GB_FAMILY_LOCAL) {
        snprintf(text, capacity, "shared memory");
        return;
    }
    inet_ntop(e->family == 6 ? AF_INET6 : AF_INET, e->addr, addr, sizeof addr);
    snprintf(text, capacity, e->family == 6 ? "[%s]:%u" : "%s:%u", addr, port);
}

static int usable(const struct gb_link *link, int i)
{
    const struct gb_address_info *to = &link->dial.to;
    int same = memcmp(to->host_id, link->net->own.host_id, 16) == 0;
    if (to->endpoint[i].family == GB_FAMILY_LOCAL)
        return same && link->net->local_listener >= 0 && !link->dial.no_local;
    return same || !(to->endpoint[i].flags & GB_ENDPOINT_LOOPBACK);
}

/* Shared memory: whether it was to be expected, and why there is none. */
static void explain_tcp(struct gb_link *link)
{
    struct gb_net *net = link->net;
    struct gb_dial *d = &link->dial;
    uint8_t boot[16];
    if (net->local_listener < 0 || d->no_shm[0]) return; /* said when it could not listen; known */
    int same = memcmp(d->to.host_id, net->own.host_id, 16) == 0;
    const struct gb_endpoint *local = d->to.endpoint; /* stands first */
    int offers = d->to.count && local->family == GB_FAMILY_LOCAL;
    gb_addr_boot_id(boot);
    if (same && !offers)
        snprintf(d->no_shm, sizeof d->no_shm, "it offers none; its log says why");
    else if (!same && offers && memcmp(local->addr, boot, 16) == 0)
        snprintf(d->no_shm, sizeof d->no_shm, "it is in another network namespace of this host");
}

void gb_dial_told(struct gb_link *link)
{
    if (!link->local && link->dial.no_shm[0])
        GB_WARN("%s is reached over tcp, not through shared memory: %s", link->label, link->dial.no_shm);
}

static void round_over(struct gb_link *link)
{
    struct gb_dial *d = &link->dial;
    d->phase = 0;
    if (d->tried == 0 && link->net->base == &gb_transport_shm) {
        gb_control_down(link, GB_LINK_DEAD, GPUBRIDGE_ERR_UNREACHABLE,
                        "%s cannot be reached through shared memory: %s; GPUBRIDGE_TRANSPORT=auto would use tcp",
                        link->label, d->no_shm[0] ? d->no_shm : "it offers none");
        return;
    }
    if (d->tried == 0) {
        gb_control_down(
            link, GB_LINK_DEAD, GPUBRIDGE_ERR_UNREACHABLE,
            "%s advertises loopback addresses only, but is on another host; set GPUBRIDGE_IFNAME there to an "
            "interface that this host can reach",
            link->label);
        return;
    }
    if (d->refused == d->tried) {
        gb_control_down(link, GB_LINK_DEAD, d->refused_status, "%s: %s", link->label, d->text);
        return;
    }
    d->backoff_ns = d->backoff_ns ? 2 * d->backoff_ns : GB_BACKOFF_NS;
    if (d->backoff_ns > GB_BACKOFF_MAX) d->backoff_ns = GB_BACKOFF_MAX;
    d->next_ns = gb_now_ns() + d->backoff_ns;
}

/* Keeps one line per candidate of the current round. */
static void record(struct gb_dial *d, const char *where, const char *what)
{
    size_t n = strlen(d->text);
    snprintf(d->text + n, sizeof d->text - n, "%s%s %s", n ? "; " : "", where, what);
}

static void next_candidate(struct gb_link *link)
{
    struct gb_dial *d = &link->dial;
    for (; d->candidate < d->to.count; d->candidate++) {
        if (!usable(link, d->candidate)) continue;
        struct gb_endpoint *to = &d->to.endpoint[d->candidate++];
        d->tried++;
        d->phase = 1;
        if (gb_handshake_dial(link, to, GB_LANE_CONTROL, 0) == 0) return;
        char where[64];
        gb_endpoint_text(to, d->to.port, where, sizeof where);
        record(d, where, gb_err_text());
        if (to->family == GB_FAMILY_LOCAL) snprintf(d->no_shm, sizeof d->no_shm, "%s", gb_err_text());
    }
    round_over(link);
}

uint64_t gb_dial_step(struct gb_link *link, uint64_t now)
{
    struct gb_dial *d = &link->dial;
    if (d->phase != 0) return UINT64_MAX;
    if (now < d->next_ns) return d->next_ns;
    d->candidate = d->tried = d->refused = 0;
    explain_tcp(link);
    d->text[0] = 0;
    d->attempt_ns = (uint64_t)link->net->connect_timeout_ns / (d->to.count ? d->to.count + 1u : 1u);
    if (d->attempt_ns > GB_ATTEMPT_NS) d->attempt_ns = GB_ATTEMPT_NS;
    next_candidate(link);
    return d->phase == 0 ? d->next_ns : UINT64_MAX;
}

void gb_dial_failed(struct gb_link *link, int definite, int status, const char *where, const char *what)
{
    struct gb_dial *d = &link->dial;
    if (atomic_load(&link->state) != GB_LINK_CONNECTING || d->phase == 0) return;
    record(d, where, what);
    /* The candidate in work is the one before the next. */
    if (d->candidate > 0 && d->to.endpoint[d->candidate - 1].family == GB_FAMILY_LOCAL) {
        snprintf(d->no_shm, sizeof d->no_shm, "%s", what);
        d->no_local |= d->phase == 2;
    }
    if (definite) {
        d->refused++;
        d->refused_status = status;
    }
    if (d->phase == 1) {
        next_candidate(link);
        return;
    }
    gb_handshake_drop_link(link);
    gb_control_reset(link);
    round_over(link);
}

void gb_dial_lane_up(struct gb_link *link, uint8_t kind, const struct gb_endpoint *to)
{
    struct gb_dial *d = &link->dial;
    if (kind != GB_LANE_CONTROL) return;
    d->phase = 2;
    int rc = gb_handshake_dial(link, to, GB_LANE_EXPRESS, 0);
    for (uint32_t i = 0; rc == 0 && i < link->lanes; i++) rc = gb_handshake_dial(link, to, GB_LANE_BULK, (uint8_t)i);
    char where[64];
    gb_endpoint_text(to, d->to.port, where, sizeof where);
    if (rc) gb_dial_failed(link, 0, 0, where, gb_err_text());
}
