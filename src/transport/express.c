/* SPDX-License-Identifier: Apache-2.0
 * The express lane: small messages, announcements, grants, credit.  Engine role only: it reads and writes the socket
 * itself, so that a small message costs one system call at each end and no thread switch. */
#include "transport/net_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

int gb_outbuf_add(struct gb_outbuf *out, const void *data, size_t bytes)
{
    if (bytes == 0) return 0;
    if (out->off && out->off == out->len) out->off = out->len = 0;
    if (out->len + bytes > out->capacity) {
        size_t capacity = out->capacity ? out->capacity : 4096;
        while (capacity < out->len + bytes) capacity *= 2;
        void *grown = realloc(out->data, capacity);
        if (!grown) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for %zu bytes to send", capacity);
        out->data = grown;
        out->capacity = capacity;
    }
    memcpy(out->data + out->len, data, bytes);
    out->len += bytes;
    return 0;
}

void gb_express_mark(struct gb_link *link)
{
    if (link->dirty) return;
    link->dirty = 1;
    link->dirty_next = link->net->dirty;
    link->net->dirty = link;
}

/* Watches for room only while something waits. */
static void watch(struct gb_link *link)
{
    int want = link->out.off < link->out.len;
    if (want == link->want_out || !link->attached) return;
    if (link->express.ring) { /* gb_net_wait asks the ring */
        link->want_out = want;
        return;
    }
    struct epoll_event ev = {.events = (link->express_eof ? 0 : EPOLLIN) | (want ? EPOLLOUT : 0), .data.ptr = link};
    epoll_ctl(link->net->epoll, EPOLL_CTL_MOD, link->express.fd, &ev);
    link->want_out = want;
}

/* Nothing more can be written; the reading side learns why, and what the peer sent before is still taken. */
static void mute(struct gb_link *link)
{
    link->mute = 1;
    link->out.off = link->out.len = 0;
    watch(link);
}

/* Writes what is buffered and then head + payload; keeps what does not go. */
static int put(struct gb_link *link, const uint8_t *head, const void *payload, size_t bytes)
{
    struct gb_outbuf *out = &link->out;
    struct iovec iov[3];
    int n = 0;
    size_t total = 0;
    if (out->off < out->len) iov[n++] = (struct iovec){out->data + out->off, out->len - out->off};
    if (head) iov[n++] = (struct iovec){(void *)(uintptr_t)head, GB_FRAME_BYTES};
    if (bytes) iov[n++] = (struct iovec){(void *)(uintptr_t)payload, bytes};
    for (int i = 0; i < n; i++) total += iov[i].iov_len;
    if (total == 0) return 0;
    ssize_t sent = link->net->via->write(&link->express, iov, n);
    if (sent < 0 && sent != -EAGAIN) {
        mute(link);
        return 0;
    }
    size_t done = sent > 0 ? (size_t)sent : 0;
    if (done) atomic_fetch_add_explicit(&link->sent, done, memory_order_relaxed);
    size_t old = out->len - out->off < done ? out->len - out->off : done;
    out->off += old;
    done -= old;
    if (head) {
        size_t part = done < GB_FRAME_BYTES ? done : GB_FRAME_BYTES;
        GB_TRY(gb_outbuf_add(out, head + part, GB_FRAME_BYTES - part));
        done -= part;
        if (bytes) GB_TRY(gb_outbuf_add(out, (const uint8_t *)payload + done, bytes - done));
    }
    watch(link);
    return 0;
}

/* ---- hooks of the matching machine; link->lock held ---- */

static int hook_frame(void *arg, const struct gb_frame *f, const void *payload, int urgent)
{
    struct gb_link *link = arg;
    uint8_t head[GB_FRAME_BYTES];
    size_t bytes = gb_frame_payload(f);
    if (link->mute || link->express_eof) return 0; /* the end of the link is on its way */
    gb_frame_pack(f, head);
    if (urgent && link->attached && !link->want_out) return put(link, head, payload, bytes);
    GB_TRY(gb_outbuf_add(&link->out, head, sizeof head));
    if (bytes) GB_TRY(gb_outbuf_add(&link->out, payload, bytes));
    gb_express_mark(link);
    return 0;
}

static void hook_move(void *arg, struct gb_msg *m)
{
    struct gb_link *link = arg;
    uint32_t best = 0;
    for (uint32_t i = 1; i < link->lanes; i++)
        if (link->lane[i].outstanding < link->lane[best].outstanding) best = i;
    struct gb_lane *lane = &link->lane[best];
    m->stage = GB_MSG_QUEUED;
    m->lane = best;
    lane->outstanding += m->bytes;
    gb_msg_push(&lane->queue, m);
    gb_worker_kick(lane);
}

static void hook_unqueue(void *arg, struct gb_msg *m)
{
    struct gb_lane *lane = &((struct gb_link *)arg)->lane[m->lane];
    gb_msg_unlink(&lane->queue, m);
    lane->outstanding -= m->bytes;
}

static void hook_stop(void *arg, struct gb_msg *m)
{
    struct gb_link *link = arg;
    if (m->kind == GB_MSG_SEND) {
        gb_worker_kick(&link->lane[m->lane]);
        return;
    }
    for (uint32_t i = 0; i < link->lanes; i++) gb_worker_kick(&link->lane[i]); /* which one reads into it is theirs */
}

static void hook_event(void *arg, const struct gb_net_event *event)
{
    gb_net_push(((struct gb_link *)arg)->net, event);
}

/* Payload checksums need somebody who reads the payload. */
static int hook_find(void *arg, const struct gb_msg *m, struct gb_place *place)
{
    struct gb_link *link = arg;
    if (atomic_load_explicit(&link->checksum, memory_order_relaxed)) return 0;
    if (gb_loan_find(link, m->buf, m->bytes, place) != 0) return 0;
    atomic_fetch_add_explicit(&link->lent, m->bytes, memory_order_relaxed);
    return 1;
}

static void *hook_place(void *arg, const struct gb_place *place, uint64_t bytes)
{
    struct gb_link *link = arg;
    void *at = gb_loan_place(link, place, bytes);
    if (at) atomic_fetch_add_explicit(&link->borrowed, bytes, memory_order_relaxed);
    return at;
}

const struct gb_match_hooks gb_express_hooks = {.frame = hook_frame,
                                                .move = hook_move,
                                                .unqueue = hook_unqueue,
                                                .stop = hook_stop,
                                                .event = hook_event,
                                                .find = hook_find,
                                                .place = hook_place};

/* ---- reading ---- */

/* Parses whole frames; returns what is wrong, or NULL. */
static const char *parse(struct gb_link *link, int *rc)
{
    size_t at = 0;
    const char *why = NULL;
    pthread_mutex_lock(&link->lock);
    while (link->in_len - at >= GB_FRAME_BYTES) {
        struct gb_frame f;
        *rc = gb_frame_parse(link->in + at, &f, &why);
        if (*rc) break;
        *rc = f.type == GB_FRAME_EAGER && f.bytes > GB_EAGER_BYTES ? -1 : 0;
        why = "an eager message is too long";
        if (*rc) break;
        size_t payload = gb_frame_payload(&f);
        if (link->in_len - at < GB_FRAME_BYTES + payload) break;
        *rc = gb_match_frame(&link->match, &f, link->in + at + GB_FRAME_BYTES, &why);
        if (*rc) break;
        at += GB_FRAME_BYTES + payload;
    }
    pthread_mutex_unlock(&link->lock);
    link->in_len -= at;
    if (at && link->in_len) memmove(link->in, link->in + at, link->in_len);
    if (link->match.asking.head || link->match.owed >= GB_CREDIT_UNITS / 4) gb_express_mark(link);
    return *rc ? why : NULL;
}

static void end_of_express(struct gb_link *link, enum gb_report report, const char *text)
{
    if (!link->express_eof) epoll_ctl(link->net->epoll, EPOLL_CTL_DEL, link->express.fd, NULL);
    link->express_eof = 1;
    gb_control_report(link, report, link->in_len > 0, text);
}

void gb_express_read(struct gb_link *link)
{
    while (link->attached && !link->express_eof) {
        struct iovec iov = {link->in + link->in_len, GB_EXPRESS_IN - link->in_len};
        size_t asked = iov.iov_len;
        ssize_t n = link->net->via->read(&link->express, &iov, 1);
        if (n == -EAGAIN) return;
        if (n == -EBADMSG) {
            end_of_express(link, GB_REPORT_DAMAGE, GB_RING_LIE);
            return;
        }
        if (n <= 0) {
            end_of_express(link, n == 0 ? GB_REPORT_EOF : GB_REPORT_BROKEN, n ? strerror((int)-n) : "");
            return;
        }
        atomic_fetch_add_explicit(&link->recv, (uint64_t)n, memory_order_relaxed);
        link->in_len += (size_t)n;
        int rc = 0;
        const char *why = parse(link, &rc);
        if (why) {
            end_of_express(link, GB_REPORT_DAMAGE, why);
            return;
        }
        if ((size_t)n < asked) return;
    }
}

/* ---- flushing, life and death ---- */

void gb_express_flush(struct gb_link *link)
{
    pthread_mutex_lock(&link->lock);
    int rc = link->express_eof ? 0 : gb_match_flush(&link->match);
    if (rc == 0 && link->attached && !link->express_eof && !link->want_out && !link->mute)
        rc = put(link, NULL, NULL, 0);
    pthread_mutex_unlock(&link->lock);
    if (rc) gb_control_report(link, GB_REPORT_BROKEN, 0, gb_err_text());
}

void gb_express_room(struct gb_link *link)
{
    pthread_mutex_lock(&link->lock);
    if (link->attached && !link->express_eof && !link->mute) (void)!put(link, NULL, NULL, 0);
    pthread_mutex_unlock(&link->lock);
}

void gb_express_attach(struct gb_link *link)
{
    struct gb_net *net = link->net;
    if (!link->in) link->in = malloc(GB_EXPRESS_IN);
    if (net->expresses == net->express_capacity) {
        size_t capacity = net->express_capacity ? 2 * net->express_capacity : 16;
        struct gb_link **grown = (struct gb_link **)realloc((void *)net->express, capacity * sizeof(struct gb_link *));
        if (grown) {
            net->express = grown;
            net->express_capacity = capacity;
        }
    }
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = link};
    if (!link->in || net->expresses == net->express_capacity ||
        epoll_ctl(net->epoll, EPOLL_CTL_ADD, link->express.fd, &ev) != 0) {
        gb_control_report(link, GB_REPORT_BROKEN, 0, "no memory for the express lane");
        return;
    }
    net->express[net->expresses++] = link;
    link->attached = 1;
    gb_express_mark(link);
}

/* The control thread declared the link down: what arrived is still taken, all else completes with the link's error. */
void gb_express_down(struct gb_link *link)
{
    struct gb_net *net = link->net;
    gb_express_read(link);
    pthread_mutex_lock(&link->lock);
    for (size_t i = 0; i < net->expresses; i++)
        if (net->express[i] == link) net->express[i] = net->express[--net->expresses];
    if (link->express.fd >= 0) net->via->close(&link->express);
    link->attached = 0;
    link->express_eof = 1;
    link->out.off = link->out.len = 0;
    gb_match_fail(&link->match, link->down_status, link->text);
    pthread_mutex_unlock(&link->lock);
    for (uint32_t i = 0; i < link->lanes; i++)
        if (link->lane[i].worker) gb_worker_kick(&link->lane[i]);
}
