/* SPDX-License-Identifier: Apache-2.0
 * Opens lanes: one handshake per connection, both directions, each with a deadline (wire/hello.h has the messages).
 * Control thread only.  Whoever fails it costs one dropped connection and at most one log line. */
#include "transport/net_impl.h"

#include "base/clock.h"
#include "base/log.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#define GB_HANDSHAKE_NS 5000000000u
#define GB_CONNS_MAX    2048       /* connections in handshake; beyond it the oldest stranger goes */
#define GB_PAUSE_NS     100000000u /* without descriptors: until accepting is tried again */

enum stage { CONNECTING, WANT_CHALLENGE, WANT_ACCEPT, WANT_HELLO, WANT_PROOF, CLOSING, DEAD };

struct gb_conn {
    struct gb_conn *next;
    struct gb_net *net;
    struct gb_sock sock;
    struct gb_link *link; /* the dialler's */
    enum stage stage;
    uint64_t deadline_ns;
    uint8_t kind, index;
    struct gb_endpoint to;
    char where[64];
    struct gb_hello hello, challenge;
    uint8_t raw_hello[GB_HELLO_BYTES], raw_challenge[GB_CHALLENGE_BYTES];
    uint8_t in[GB_CHALLENGE_BYTES], out[GB_CHALLENGE_BYTES];
    size_t in_len, out_off, out_len;
};

static void close_conn(struct gb_conn *c)
{
    if (c->stage == DEAD) return;
    c->stage = DEAD; /* freed after the event batch: later events of it may name this one */
    if (c->sock.fd >= 0) c->net->via->close(&c->sock);
}

/* The dialler's attempt came to nothing. */
static void fail_dial(struct gb_conn *c, int definite, int status, const char *what)
{
    struct gb_link *link = c->link;
    close_conn(c);
    gb_dial_failed(link, definite, status, c->where, what);
}

__attribute__((format(printf, 2, 3))) static void complain(struct gb_conn *c, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (c->net->complaints++ < GB_COMPLAINTS) GB_INFO("dropped a connection from %s: %s", c->where, text);
}

static struct gb_conn *conn_new(struct gb_net *net, enum stage stage)
{
    struct gb_conn *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->net = net;
    c->stage = stage;
    c->sock = (struct gb_sock){.fd = -1, .net = net};
    c->deadline_ns = gb_now_ns() + GB_HANDSHAKE_NS;
    c->next = net->conns;
    net->conns = c;
    net->nconns++;
    return c;
}

static int send_out(struct gb_conn *c)
{
    while (c->out_off < c->out_len) {
        struct iovec iov = {c->out + c->out_off, c->out_len - c->out_off};
        ssize_t n = c->net->via->write(&c->sock, &iov, 1);
        if (n == -EAGAIN) break;
        if (n < 0) return (int)n;
        c->out_off += (size_t)n;
    }
    uint32_t want = c->stage == CONNECTING || c->out_off < c->out_len ? EPOLLOUT : 0;
    gb_control_watch(c->net, EPOLL_CTL_MOD, c->sock.fd, EPOLLIN | want, c, GB_WATCH_CONN);
    return 0;
}

static int queue_out(struct gb_conn *c, const uint8_t *data, size_t bytes)
{
    memcpy(c->out, data, bytes);
    c->out_off = 0;
    c->out_len = bytes;
    return send_out(c);
}

static void fill_hello(struct gb_net *net, struct gb_hello *h, uint16_t kind)
{
    h->kind = kind;
    h->version = GB_PROTOCOL_VERSION;
    memcpy(h->from, net->self.byte, 16);
    h->from_rank = net->global_rank;
    h->features = GB_FEATURE_LOANS;
    snprintf(h->host, sizeof h->host, "%s", net->host);
    snprintf(h->text, sizeof h->text, "gpubridge %s", GB_LIBRARY_VERSION);
    if (getrandom(h->nonce, sizeof h->nonce, 0) != (ssize_t)sizeof h->nonce) abort();
}

static void mac_of(struct gb_conn *c, const char *label, const void *more, size_t more_bytes, uint8_t mac[GB_MAC_BYTES])
{
    /* The acceptor's MAC cannot cover itself; the others cover it too. */
    size_t challenge = strcmp(label, "accept") == 0 ? GB_HELLO_BYTES : GB_CHALLENGE_BYTES;
    struct gb_part parts[] = {{c->raw_hello, GB_HELLO_BYTES}, {c->raw_challenge, challenge}, {more, more_bytes}};
    gb_mac(c->net->secret, c->net->secret_bytes, label, parts, more ? 3 : 2, mac);
}

static void accept_mac(struct gb_conn *c, uint32_t status, uint32_t lanes, uint8_t mac[GB_MAC_BYTES])
{
    uint8_t said[2] = {(uint8_t)status, (uint8_t)lanes};
    mac_of(c, "open", said, sizeof said, mac);
}

static void hand_over(struct gb_conn *c, struct gb_link *link, uint32_t lanes)
{
    struct gb_sock sock = c->sock;
    sock.features = c->hello.features & c->challenge.features;
    gb_control_watch(c->net, EPOLL_CTL_DEL, sock.fd, 0, NULL, GB_WATCH_CONN);
    c->sock.fd = -1;
    c->sock.ring = NULL;
    c->stage = DEAD;
    if (c->net->via->start) c->net->via->start(&sock);
    gb_control_lane_up(link, c->kind, c->index, &sock, lanes, c->where);
}

/* ---- dialler ---- */

static int say_hello(struct gb_conn *c)
{
    struct gb_link *link = c->link;
    fill_hello(c->net, &c->hello, GB_HS_HELLO);
    memcpy(c->hello.to, link->uuid.byte, 16);
    c->hello.to_rank = link->global_rank;
    c->hello.lane_kind = c->kind;
    c->hello.lane_index = c->index;
    c->hello.lanes = (uint8_t)c->net->lanes;
    gb_hello_pack(&c->hello, c->raw_hello);
    c->stage = WANT_CHALLENGE;
    return queue_out(c, c->raw_hello, GB_HELLO_BYTES);
}

static void on_challenge(struct gb_conn *c)
{
    const char *why;
    char text[256];
    struct gb_link *link = c->link;
    memcpy(c->raw_challenge, c->in, GB_CHALLENGE_BYTES);
    if (gb_hello_parse(c->in, GB_CHALLENGE_BYTES, &c->challenge, &why) != 0 || c->challenge.kind != GB_HS_CHALLENGE) {
        fail_dial(c, 0, 0, why ? why : "answered out of order");
        return;
    }
    const struct gb_hello *h = &c->challenge;
    if (memcmp(h->from, link->uuid.byte, 16) != 0) {
        int me = memcmp(h->from, c->net->self.byte, 16) == 0;
        snprintf(text, sizeof text, "answered as rank %d%s%s%s", h->from_rank, me ? " (myself)" : " (",
                 me ? "" : h->host, me ? "" : "), not the process we look for");
        fail_dial(c, 1, GPUBRIDGE_ERR_REFUSED, text);
        return;
    }
    if (h->status == GB_HS_BUSY) {
        fail_dial(c, 0, 0, "is still busy with an earlier connection");
        return;
    }
    uint8_t mac[GB_MAC_BYTES];
    mac_of(c, "accept", NULL, 0, mac);
    if (h->status != GB_HS_OK || !gb_mac_equal(mac, c->in + GB_HELLO_BYTES)) {
        fail_dial(c, 1, GPUBRIDGE_ERR_REFUSED,
                  "did not prove the job's secret (another job on that port, or ranks with different secrets)");
        return;
    }
    if (c->net->via->offer && c->net->via->offer(&c->sock) != 0) {
        snprintf(text, sizeof text, "%s", gb_err_text());
        fail_dial(c, 0, 0, text);
        return;
    }
    uint8_t proof[GB_PROOF_BYTES];
    mac_of(c, "dial", NULL, 0, mac);
    gb_proof_pack(mac, proof);
    c->stage = WANT_ACCEPT;
    if (queue_out(c, proof, sizeof proof) != 0) fail_dial(c, 0, 0, "closed the connection");
}

static void on_accept(struct gb_conn *c)
{
    uint32_t status, lanes;
    uint8_t mac[GB_MAC_BYTES], want[GB_MAC_BYTES];
    struct gb_link *link = c->link;
    int rc = gb_accept_parse(c->in, GB_ACCEPT_BYTES, &status, &lanes, mac);
    if (rc == 0) accept_mac(c, status, lanes, want);
    if (rc != 0 || !gb_mac_equal(mac, want)) {
        fail_dial(c, 0, 0, "sent a malformed acceptance");
        return;
    }
    if (status == GB_HS_NO_MEMORY) {
        fail_dial(c, 0, 0, "could not take the shared memory; its own log says why");
        return;
    }
    if (status != GB_HS_OK || lanes == 0 || lanes > c->net->lanes) {
        fail_dial(c, 0, 0, "is still busy with an earlier connection");
        return;
    }
    struct gb_endpoint to = c->to;
    uint8_t kind = c->kind;
    hand_over(c, link, lanes);
    gb_dial_lane_up(link, kind, &to);
}

int gb_handshake_dial(struct gb_link *link, const struct gb_endpoint *to, uint8_t kind, uint8_t index)
{
    struct gb_net *net = link->net;
    struct gb_conn *c = conn_new(net, CONNECTING);
    if (!c) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a connection");
    c->link = link;
    c->kind = kind;
    c->index = index;
    c->to = *to;
    uint64_t budget = link->dial.attempt_ns;
    c->deadline_ns = gb_now_ns() + (budget ? budget : GB_HANDSHAKE_NS);
    gb_endpoint_text(to, link->dial.to.port, c->where, sizeof c->where);
    int rc = net->via->dial(net, &link->uuid, to, link->dial.to.port, &c->sock);
    if (rc) {
        c->stage = DEAD;
        return rc;
    }
    c->sock.kind = kind;
    c->sock.index = index;
    gb_control_watch(net, EPOLL_CTL_ADD, c->sock.fd, EPOLLIN | EPOLLOUT, c, GB_WATCH_CONN);
    return 0;
}

/* ---- acceptor ---- */

static uint8_t judge(struct gb_conn *c)
{
    struct gb_net *net = c->net;
    if (memcmp(c->hello.to, net->self.byte, 16) != 0 || memcmp(c->hello.from, net->self.byte, 16) == 0)
        return GB_HS_WRONG_PEER;
    pthread_mutex_lock(&net->lock);
    struct gb_link *link = gb_link_find(net, c->hello.from);
    pthread_mutex_unlock(&net->lock);
    return link && atomic_load(&link->state) != GB_LINK_CONNECTING ? GB_HS_BUSY : GB_HS_OK;
}

static void answer(struct gb_conn *c, uint8_t status)
{
    fill_hello(c->net, &c->challenge, GB_HS_CHALLENGE);
    memcpy(c->challenge.to, c->hello.from, 16);
    c->challenge.to_rank = c->hello.from_rank;
    c->challenge.lane_kind = c->hello.lane_kind;
    c->challenge.lane_index = c->hello.lane_index;
    c->challenge.lanes = (uint8_t)c->net->lanes;
    c->challenge.status = status;
    gb_hello_pack(&c->challenge, c->raw_challenge);
    memset(c->raw_challenge + GB_HELLO_BYTES, 0, GB_MAC_BYTES);
    /* Nobody who asked for somebody else gets a MAC from us. */
    if (status == GB_HS_OK) mac_of(c, "accept", NULL, 0, c->raw_challenge + GB_HELLO_BYTES);
    c->stage = status == GB_HS_OK ? WANT_PROOF : CLOSING;
    if (queue_out(c, c->raw_challenge, GB_CHALLENGE_BYTES) != 0 || (c->stage == CLOSING && c->out_off == c->out_len))
        close_conn(c);
}

static void on_hello(struct gb_conn *c)
{
    const char *why;
    memcpy(c->raw_hello, c->in, GB_HELLO_BYTES);
    if (gb_hello_parse(c->in, GB_HELLO_BYTES, &c->hello, &why) != 0 || c->hello.kind != GB_HS_HELLO) {
        complain(c, "%s", why ? why : "a handshake out of order");
        close_conn(c);
        return;
    }
    c->kind = c->hello.lane_kind;
    c->index = c->hello.lane_index;
    c->sock.kind = c->kind;
    c->sock.index = c->index;
    uint8_t status = judge(c);
    if (status == GB_HS_WRONG_PEER)
        complain(c, "it looks for another process (rank %d of an earlier job?)", c->hello.to_rank);
    answer(c, status);
}

static void hint(struct gb_conn *c, const char *what)
{
    pthread_mutex_lock(&c->net->lock);
    struct gb_link *link = gb_link_find(c->net, c->hello.from);
    pthread_mutex_unlock(&c->net->lock);
    if (link) snprintf(link->hint, sizeof link->hint, "an attempt from %s under that rank's name %s", c->where, what);
}

static void on_proof(struct gb_conn *c)
{
    struct gb_net *net = c->net;
    uint8_t mac[GB_MAC_BYTES], want[GB_MAC_BYTES], out[GB_ACCEPT_BYTES];
    mac_of(c, "dial", NULL, 0, want);
    if (gb_proof_parse(c->in, GB_PROOF_BYTES, mac) != 0 || !gb_mac_equal(mac, want)) {
        complain(c, "it did not prove the job's secret (another job, or different secrets?)");
        hint(c, "did not prove the job's secret");
        close_conn(c);
        return;
    }
    pthread_mutex_lock(&net->lock);
    struct gb_link *link = gb_link_find(net, c->hello.from);
    if (!link) link = gb_link_make(net, c->hello.from, c->hello.from_rank, c->hello.host);
    pthread_mutex_unlock(&net->lock);
    int busy = !link || atomic_load(&link->state) != GB_LINK_CONNECTING;
    uint32_t lanes = c->hello.lanes < net->lanes ? c->hello.lanes : net->lanes, status = busy ? GB_HS_BUSY : GB_HS_OK;
    if (lanes == 0) lanes = 1;
    if (!busy && net->via->take && net->via->take(&c->sock) != 0) {
        if (net->complaints++ < GB_COMPLAINTS) GB_WARN("%s: no shared memory: %s", link->label, gb_err_text());
        status = GB_HS_NO_MEMORY;
    }
    accept_mac(c, status, lanes, mac);
    gb_accept_pack(status, lanes, mac, out);
    /* 56 bytes into an empty socket buffer: a short write here means the connection is unusable. */
    if (queue_out(c, out, sizeof out) != 0 || status != GB_HS_OK || c->out_off < c->out_len)
        close_conn(c);
    else
        hand_over(c, link, lanes);
}

void gb_handshake_accept(struct gb_net *net)
{
    for (int i = 0; i < 64; i++) {
        struct gb_sock sock = {.fd = -1, .net = net};
        char where[64] = "a stranger";
        int rc = net->via->accept(net, &sock, where, sizeof where);
        if (rc == GPUBRIDGE_AGAIN) return;
        if (rc != 0) {
            /* The connection stays in the listener's queue and would wake us for ever. */
            if (net->complaints++ < GB_COMPLAINTS) GB_WARN("%s; trying again", gb_err_text());
            gb_control_listen(net, EPOLL_CTL_MOD, 0);
            net->listen_again_ns = gb_now_ns() + GB_PAUSE_NS;
            return;
        }
        struct gb_conn *c = conn_new(net, WANT_HELLO);
        if (!c) {
            net->via->close(&sock);
            return;
        }
        c->sock = sock;
        memcpy(c->where, where, sizeof where);
        gb_control_watch(net, EPOLL_CTL_ADD, sock.fd, EPOLLIN, c, GB_WATCH_CONN);
    }
}

/* ---- both ---- */

static const struct {
    size_t bytes;
    void (*take)(struct gb_conn *c);
} stages[] = {
    [WANT_CHALLENGE] = {GB_CHALLENGE_BYTES, on_challenge},
    [WANT_ACCEPT] = {GB_ACCEPT_BYTES, on_accept},
    [WANT_HELLO] = {GB_HELLO_BYTES, on_hello},
    [WANT_PROOF] = {GB_PROOF_BYTES, on_proof},
};

/* The peer's side of the prefix: magic and version are checked before a whole message is there. */
static int check_prefix(struct gb_conn *c)
{
    struct gb_prefix p;
    char text[128];
    if (gb_prefix_parse(c->in, &p) != 0) {
        if (c->link)
            fail_dial(c, 1, GPUBRIDGE_ERR_REFUSED, "does not speak the gpubridge protocol");
        else
            close_conn(c); /* a port scanner or a browser: not worth a line */
        return -1;
    }
    if (p.version == GB_PROTOCOL_VERSION) return 0;
    snprintf(text, sizeof text, "speaks protocol version %u, this process (gpubridge %s) version %u", p.version,
             GB_LIBRARY_VERSION, GB_PROTOCOL_VERSION);
    if (c->link) {
        fail_dial(c, 1, GPUBRIDGE_ERR_VERSION, text);
    } else {
        complain(c, "it %s", text);
        answer(c, GB_HS_VERSION); /* our prefix tells it the version it met */
    }
    return -1;
}

static void read_conn(struct gb_conn *c)
{
    while (c->stage != DEAD && c->stage != CLOSING && c->stage != CONNECTING) {
        size_t want = stages[c->stage].bytes;
        if (c->in_len < GB_PREFIX_BYTES) want = GB_PREFIX_BYTES;
        struct iovec iov = {c->in + c->in_len, want - c->in_len};
        ssize_t n = c->net->via->read(&c->sock, &iov, 1);
        if (n == -EAGAIN) return;
        if (n <= 0) {
            if (c->link)
                fail_dial(c, 0, 0, n == 0 ? "closed the connection during the handshake" : strerror((int)-n));
            else
                close_conn(c);
            return;
        }
        c->in_len += (size_t)n;
        if (c->in_len == GB_PREFIX_BYTES && check_prefix(c) != 0) return;
        if (c->in_len < stages[c->stage].bytes) continue;
        c->in_len = 0;
        stages[c->stage].take(c);
    }
}

void gb_handshake_event(struct gb_conn *c, uint32_t events)
{
    if (c->stage == CONNECTING) {
        int rc = c->net->via->dialled(&c->sock);
        if (rc == 0) rc = say_hello(c);
        if (rc) fail_dial(c, 0, 0, strerror(-rc));
        return;
    }
    if (c->stage == DEAD) return;
    if ((events & EPOLLOUT) && send_out(c) != 0) events |= EPOLLIN;
    if (c->stage == CLOSING) {
        if (c->out_off == c->out_len || (events & (EPOLLERR | EPOLLHUP))) close_conn(c);
        return;
    }
    if (events & ~(uint32_t)EPOLLOUT) read_conn(c);
}

static struct gb_conn *oldest_stranger(struct gb_net *net)
{
    struct gb_conn *old = NULL;
    for (struct gb_conn *c = net->conns; c; c = c->next)
        if (!c->link && c->stage != DEAD && (!old || c->deadline_ns <= old->deadline_ns)) old = c;
    return old;
}

uint64_t gb_handshake_timeouts(struct gb_net *net, uint64_t now)
{
    uint64_t next = net->listen_again_ns ? net->listen_again_ns : UINT64_MAX;
    if (net->listen_again_ns && now >= net->listen_again_ns) {
        net->listen_again_ns = 0;
        gb_control_listen(net, EPOLL_CTL_MOD, EPOLLIN);
    }
    for (struct gb_conn *c = net->conns; c; c = c->next) {
        if (c->stage == DEAD) continue;
        if (now < c->deadline_ns) {
            if (c->deadline_ns < next) next = c->deadline_ns;
        } else if (c->link) {
            fail_dial(c, 0, 0, c->stage == CONNECTING ? "timed out (firewall?)" : "did not answer the handshake");
        } else {
            close_conn(c);
        }
    }
    struct gb_conn **p = &net->conns;
    while (*p) {
        struct gb_conn *c = *p;
        if (c->stage != DEAD) {
            p = &c->next;
            continue;
        }
        *p = c->next;
        net->nconns--;
        free(c);
    }
    if (net->nconns > GB_CONNS_MAX) {
        struct gb_conn *c = oldest_stranger(net);
        if (c) close_conn(c);
        return now;
    }
    return next;
}

void gb_handshake_drop_link(struct gb_link *link)
{
    for (struct gb_conn *c = link->net->conns; c; c = c->next)
        if (c->link == link) close_conn(c);
}

void gb_handshake_drop_all(struct gb_net *net)
{
    while (net->conns) {
        struct gb_conn *c = net->conns;
        net->conns = c->next;
        close_conn(c);
        free(c);
    }
}
