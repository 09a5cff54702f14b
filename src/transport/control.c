/* SPDX-License-Identifier: Apache-2.0
 * The control thread: listener, handshakes, heartbeats, control messages, liveness.  It never touches payload and never
 * waits for anybody, so a busy engine or a slow vendor call is no false death. */
#include "transport/fault.h"
#include "transport/net_impl.h"

#include "base/clock.h"
#include "base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#define GB_EXPLAIN_NS 200000000u /* a lane ended: time for the control lane to say why */
#define GB_BEAT_MAX   500000000u
#define GB_DRAIN_NS   2000000000u /* after a goodbye: time for the data lanes to end */

void gb_control_watch(struct gb_net *net, int op, int fd, uint32_t events, void *what, enum gb_watch kind)
{
    /* The pointers are aligned, so their lowest bits are free for the kind. */
    struct epoll_event ev = {.events = events, .data.u64 = (uint64_t)(uintptr_t)what | (uint64_t)kind};
    if (epoll_ctl(net->control_epoll, op, fd, &ev) != 0 && op != EPOLL_CTL_DEL)
        GB_WARN("the control thread cannot watch a socket: errno %d; raise the limit of open files", errno);
}

void gb_control_listen(struct gb_net *net, int op, uint32_t events)
{
    if (net->listener >= 0) gb_control_watch(net, op, net->listener, events, NULL, GB_WATCH_LISTENER);
    if (net->local_listener >= 0) gb_control_watch(net, op, net->local_listener, events, NULL, GB_WATCH_LISTENER);
}

void gb_control_wake(struct gb_net *net)
{
    uint64_t one = 1;
    if (!atomic_exchange(&net->control_asked, 1) && write(net->control_fd, &one, sizeof one) < 0) return;
}

void gb_control_report(struct gb_link *link, enum gb_report report, int torn, const char *text)
{
    pthread_mutex_lock(&link->lock);
    link->eofs++;
    link->torn |= torn;
    if (report > link->report) {
        link->report = report;
        snprintf(link->report_text, sizeof link->report_text, "%s", text);
    }
    pthread_mutex_unlock(&link->lock);
    gb_control_wake(link->net);
}

static void note_link(struct gb_link *link, enum gb_note_kind kind)
{
    struct gb_note *note = calloc(1, sizeof *note);
    if (!note) abort(); /* the engine would wait for ever */
    note->kind = kind;
    note->event.link = link;
    gb_net_note(link->net, note);
}

static void shut(struct gb_sock *sock, int how)
{
    if (sock->fd >= 0) shutdown(sock->fd, how);
}

void gb_control_down(struct gb_link *link, enum gb_link_state state, int status, const char *fmt, ...)
{
    struct gb_net *net = link->net;
    char text[GB_TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    gb_handshake_drop_link(link);
    pthread_mutex_lock(&link->lock);
    snprintf(link->text, sizeof link->text, "%s", text);
    /* Whoever still needs a peer that left has lost it. */
    link->down_status = state == GB_LINK_LEFT ? GPUBRIDGE_ERR_PEER_LOST : status;
    int how = state == GB_LINK_LEFT ? SHUT_WR : SHUT_RDWR;
    if (link->control.fd >= 0) gb_control_watch(net, EPOLL_CTL_DEL, link->control.fd, 0, NULL, GB_WATCH_LINK);
    shut(&link->express, how);
    for (int i = 0; i < GB_LANES_MAX; i++) shut(&link->lane[i].sock, how);
    if (link->control.fd >= 0) net->via->close(&link->control);
    atomic_store(&link->state, state);
    pthread_mutex_unlock(&link->lock);
    struct gb_net_event ev = {.kind = state == GB_LINK_LEFT ? GB_NET_PEER_LEFT : GB_NET_PEER_LOST, .status = status};
    gb_net_event_note(net, link, &ev, text, strlen(text));
    note_link(link, GB_NOTE_DOWN);
    for (uint32_t i = 0; i < link->lanes; i++)
        if (link->lane[i].worker) gb_worker_kick(&link->lane[i]);
}

/* ---- a lane passed its handshake ---- */

static void reset_lanes(struct gb_link *link)
{
    struct gb_net *net = link->net;
    if (link->control.fd >= 0) {
        gb_control_watch(net, EPOLL_CTL_DEL, link->control.fd, 0, NULL, GB_WATCH_LINK);
        net->via->close(&link->control);
    }
    if (link->express.fd >= 0) net->via->close(&link->express);
    for (int i = 0; i < GB_LANES_MAX; i++)
        if (link->lane[i].sock.fd >= 0) net->via->close(&link->lane[i].sock);
    link->control_up = link->express_up = 0;
    link->lanes_up = 0;
    link->ctl_in_len = 0;
    link->control_out_armed = 0;
    link->offered = 0;
}

void gb_control_reset(struct gb_link *link)
{
    pthread_mutex_lock(&link->lock);
    reset_lanes(link);
    pthread_mutex_unlock(&link->lock);
}

static int place(struct gb_link *link, uint8_t kind, uint8_t index, struct gb_sock *sock, uint32_t lanes)
{
    struct gb_sock *slot = &link->control;
    if (kind == GB_LANE_CONTROL) {
        reset_lanes(link); /* an earlier attempt that its dialler gave up */
        link->control_up = 1;
        link->lanes = lanes;
        link->local = sock->ring != NULL;
        link->lends = link->local && sock->features & GB_FEATURE_LOANS;
    } else if (kind == GB_LANE_EXPRESS) {
        slot = &link->express;
    } else {
        if (index >= link->lanes) return -1;
        slot = &link->lane[index].sock;
    }
    if (slot->fd >= 0 || (kind != GB_LANE_CONTROL && !link->control_up)) return -1;
    if (kind == GB_LANE_EXPRESS) link->express_up = 1;
    if (kind == GB_LANE_BULK) link->lanes_up++;
    *slot = *sock;
    gb_fault_lane_up(slot);
    return 0;
}

static void link_up(struct gb_link *link)
{
    struct gb_net *net = link->net;
    for (uint32_t i = 0; i < link->lanes; i++) {
        struct gb_lane *lane = &link->lane[i];
        lane->worker = &net->worker[net->next_worker++ % net->nworkers];
        lane->tx_sum = XXH3_createState();
        lane->rx_sum = XXH3_createState();
        if (!lane->tx_sum || !lane->rx_sum) abort();
    }
    gb_dial_told(link);
    atomic_store(&link->state, GB_LINK_UP);
    for (uint32_t i = 0; i < link->lanes; i++) gb_worker_kick(&link->lane[i]);
    note_link(link, GB_NOTE_ATTACH);
    gb_net_event_note(net, link, &(struct gb_net_event){.kind = GB_NET_LINK_UP}, NULL, 0);
    GB_DEBUG("%s: link up, %u lanes, %s", link->label, link->lanes, link->where);
}

void gb_control_lane_up(struct gb_link *link, uint8_t kind, uint8_t index, struct gb_sock *sock, uint32_t lanes,
                        const char *where)
{
    struct gb_net *net = link->net;
    pthread_mutex_lock(&link->lock);
    int fits = atomic_load(&link->state) == GB_LINK_CONNECTING && place(link, kind, index, sock, lanes) == 0;
    if (fits && kind == GB_LANE_CONTROL) {
        link->heard_ns = gb_now_ns();
        snprintf(link->where, sizeof link->where, "%s", where);
        gb_control_watch(net, EPOLL_CTL_ADD, link->control.fd, EPOLLIN, link, GB_WATCH_LINK);
    }
    int complete = fits && link->control_up && link->express_up && link->lanes_up == link->lanes;
    pthread_mutex_unlock(&link->lock);
    if (!fits)
        net->via->close(sock);
    else if (complete)
        link_up(link);
}

/* ---- control lane ---- */

static void queue_ctl(struct gb_link *link, uint8_t type, int status, const void *body, size_t bytes)
{
    uint8_t head[GB_CTL_HEAD_BYTES];
    struct gb_ctl ctl = {.type = type, .bytes = (uint16_t)bytes, .status = status};
    gb_ctl_pack(&ctl, body, head);
    pthread_mutex_lock(&link->lock);
    if (gb_outbuf_add(&link->ctl_out, head, sizeof head) == 0 && gb_outbuf_add(&link->ctl_out, body, bytes) != 0)
        link->ctl_out.len -= sizeof head;
    pthread_mutex_unlock(&link->lock);
}

void gb_control_queue(struct gb_link *link, uint8_t type, const void *body, size_t bytes)
{
    queue_ctl(link, type, 0, body, bytes);
}

static void write_ctl(struct gb_link *link)
{
    pthread_mutex_lock(&link->lock);
    struct gb_outbuf *out = &link->ctl_out;
    while (link->control_up && link->control.fd >= 0 && out->off < out->len) {
        struct iovec iov = {out->data + out->off, out->len - out->off};
        ssize_t n = link->net->via->write(&link->control, &iov, 1);
        if (n < 0) {
            if (n != -EAGAIN) out->off = out->len = 0; /* reading tells how the lane ended */
            break;
        }
        out->off += (size_t)n;
    }
    int want = out->off < out->len && link->control.fd >= 0 && !link->control_eof;
    if (link->control_up && !link->control_eof && want != link->control_out_armed) {
        gb_control_watch(link->net, EPOLL_CTL_MOD, link->control.fd, EPOLLIN | (want ? EPOLLOUT : 0), link,
                         GB_WATCH_LINK);
        link->control_out_armed = want;
    }
    pthread_mutex_unlock(&link->lock);
}

/* Returns what is wrong, or NULL. */
static const char *take_ctl(struct gb_link *link, const struct gb_ctl *ctl, const uint8_t *body)
{
    if (ctl->type == GB_CTL_REGION) return gb_loan_on_region(link, body, ctl->bytes);
    if (ctl->type == GB_CTL_TAKEN) return gb_loan_on_answer(link, body, ctl->bytes);
    if (ctl->type == GB_CTL_MESSAGE) {
        struct gb_net_event ev = {.kind = GB_NET_CTRL, .bytes = ctl->bytes};
        gb_net_event_note(link->net, link, &ev, body, ctl->bytes);
    } else if (ctl->type == GB_CTL_GOODBYE) {
        link->goodbye = 1;
        link->goodbye_status = ctl->status;
        link->trouble_ns = gb_now_ns();
        snprintf(link->goodbye_text, sizeof link->goodbye_text, "%.*s", (int)ctl->bytes, (const char *)body);
        /* It reads no more than the end of our lanes, and waits for that. */
        pthread_mutex_lock(&link->lock);
        shut(&link->express, SHUT_WR);
        shut(&link->control, SHUT_WR);
        for (int i = 0; i < GB_LANES_MAX; i++) shut(&link->lane[i].sock, SHUT_WR);
        pthread_mutex_unlock(&link->lock);
    }
    return NULL;
}

static void control_ended(struct gb_link *link, enum gb_report report, const char *text)
{
    link->control_eof = 1;
    gb_control_watch(link->net, EPOLL_CTL_DEL, link->control.fd, 0, NULL, GB_WATCH_LINK);
    pthread_mutex_lock(&link->lock);
    if (report > link->report) {
        link->report = report;
        snprintf(link->report_text, sizeof link->report_text, "%s", text);
    }
    pthread_mutex_unlock(&link->lock);
}

static int parse_ctl(struct gb_link *link)
{
    size_t at = 0;
    const char *why = NULL;
    while (link->ctl_in_len - at >= GB_CTL_HEAD_BYTES) {
        struct gb_ctl ctl;
        const uint8_t *head = link->ctl_in + at;
        if (gb_ctl_parse(head, &ctl, &why) != 0) break;
        if (link->ctl_in_len - at < GB_CTL_HEAD_BYTES + (size_t)ctl.bytes) break;
        if (gb_ctl_check(head, head + GB_CTL_HEAD_BYTES, ctl.bytes, &why) != 0) break;
        why = take_ctl(link, &ctl, head + GB_CTL_HEAD_BYTES);
        if (why) break;
        at += GB_CTL_HEAD_BYTES + ctl.bytes;
    }
    link->ctl_in_len -= at;
    memmove(link->ctl_in, link->ctl_in + at, link->ctl_in_len);
    if (why) control_ended(link, GB_REPORT_DAMAGE, why);
    return why ? -1 : 0;
}

static void read_ctl(struct gb_link *link)
{
    while (!link->control_eof && link->control.fd >= 0) {
        struct iovec iov = {link->ctl_in + link->ctl_in_len, sizeof link->ctl_in - link->ctl_in_len};
        ssize_t n = link->net->via->read(&link->control, &iov, 1);
        if (n == -EAGAIN) return;
        if (n <= 0) {
            control_ended(link, n == 0 ? GB_REPORT_EOF : GB_REPORT_BROKEN, n ? strerror((int)-n) : "");
            return;
        }
        link->heard_ns = gb_now_ns();
        link->ctl_in_len += (size_t)n;
        if (parse_ctl(link) != 0) return;
    }
}

/* ---- liveness ---- */

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Some lane ended: decides when it is known why.  Returns when to look again; 0: the link is down now. */
static uint64_t trouble(struct gb_link *link, uint64_t now)
{
    pthread_mutex_lock(&link->lock);
    enum gb_report report = link->report;
    char text[256];
    snprintf(text, sizeof text, "%s", link->report_text);
    uint32_t eofs = link->eofs, all = link->lanes + 1;
    pthread_mutex_unlock(&link->lock);
    if (report == GB_REPORT_DAMAGE) {
        gb_control_down(link, GB_LINK_DEAD, GPUBRIDGE_ERR_CHECKSUM,
                        "%s: damaged or impossible data arrived: %s; check the network and that both run one version",
                        link->label, text);
        return 0;
    }
    if (link->goodbye) {
        if (!(link->control_eof && eofs >= all) && now < link->trouble_ns + GB_DRAIN_NS)
            return link->trouble_ns + GB_DRAIN_NS;
        gb_control_down(link, GB_LINK_LEFT, link->goodbye_status, "%s left%s%s", link->label,
                        link->goodbye_text[0] ? ": " : "", link->goodbye_text);
        return 0;
    }
    if (report == GB_REPORT_NONE) return UINT64_MAX;
    if (!link->trouble_ns) link->trouble_ns = now;
    if (!link->control_eof && now < link->trouble_ns + GB_EXPLAIN_NS) return link->trouble_ns + GB_EXPLAIN_NS;
    gb_control_down(link, GB_LINK_DEAD, GPUBRIDGE_ERR_PEER_LOST,
                    "%s closed its connection without a goodbye (%s): crashed or killed? see that rank's log",
                    link->label, report == GB_REPORT_BROKEN ? text : "end of stream");
    return 0;
}

static uint64_t step_up(struct gb_link *link, uint64_t now)
{
    struct gb_net *net = link->net;
    uint64_t next = trouble(link, now);
    if (next == 0) return UINT64_MAX;
    uint64_t beat = (uint64_t)net->peer_timeout_ns / 4;
    if (beat > GB_BEAT_MAX) beat = GB_BEAT_MAX;
    if (now >= link->beat_ns + beat) {
        link->beat_ns = now;
        pthread_mutex_lock(&link->lock);
        size_t backlog = link->ctl_out.len - link->ctl_out.off;
        pthread_mutex_unlock(&link->lock);
        if (backlog < 4096) queue_ctl(link, GB_CTL_HEARTBEAT, 0, NULL, 0);
    }
    gb_loan_offer(link);
    write_ctl(link);
    uint64_t silent = now - link->heard_ns;
    if (!link->goodbye && now > link->heard_ns && silent >= (uint64_t)net->peer_timeout_ns) {
        gb_control_down(link, GB_LINK_DEAD, GPUBRIDGE_ERR_PEER_LOST, "%s silent for %.1f s (stopped? host down?)",
                        link->label, (double)silent / 1e9);
        return UINT64_MAX;
    }
    if (!link->goodbye) next = sooner(next, link->heard_ns + (uint64_t)net->peer_timeout_ns);
    return sooner(next, link->beat_ns + beat);
}

static uint64_t step_connecting(struct gb_link *link, uint64_t now)
{
    pthread_mutex_lock(&link->lock);
    if (link->requested) {
        link->requested = 0;
        link->dial.wanted = 1;
        link->dial.to = link->request;
    }
    uint64_t deadline = link->deadline_ns;
    enum gb_report report = link->report;
    pthread_mutex_unlock(&link->lock);
    int dials = memcmp(link->net->self.byte, link->uuid.byte, 16) < 0;
    if (link->goodbye) {
        gb_control_down(link, GB_LINK_LEFT, link->goodbye_status, "%s left%s%s", link->label,
                        link->goodbye_text[0] ? ": " : "", link->goodbye_text);
        return UINT64_MAX;
    }
    if (report != GB_REPORT_NONE) { /* the control lane of a half-made link ended: start over */
        gb_handshake_drop_link(link);
        gb_control_reset(link);
        link->control_eof = 0;
        pthread_mutex_lock(&link->lock);
        link->report = GB_REPORT_NONE;
        link->eofs = 0;
        pthread_mutex_unlock(&link->lock);
        if (dials) gb_dial_failed(link, 0, 0, link->where, "closed the connection while it was being set up");
    }
    if (link->dial.wanted && now >= deadline) {
        if (dials)
            gb_control_down(link, GB_LINK_DEAD, GPUBRIDGE_ERR_UNREACHABLE, "%s cannot be reached within %.0f s: %s",
                            link->label, (double)link->net->connect_timeout_ns / 1e9, link->dial.text);
        else
            gb_control_down(
                link, GB_LINK_DEAD, GPUBRIDGE_ERR_UNREACHABLE,
                "%s did not connect within %.0f s (it dials us: not started? firewall before our port %u?)%s%s",
                link->label, (double)link->net->connect_timeout_ns / 1e9, link->net->own.port,
                link->hint[0] ? "; " : "", link->hint);
        return UINT64_MAX;
    }
    uint64_t next = link->dial.wanted ? deadline : UINT64_MAX;
    return dials && link->dial.wanted ? sooner(next, gb_dial_step(link, now)) : next;
}

static uint64_t step_links(struct gb_net *net, uint64_t now)
{
    uint64_t next = UINT64_MAX;
    for (size_t i = 0;; i++) {
        pthread_mutex_lock(&net->lock);
        struct gb_link *link = i < net->links ? net->link[i] : NULL;
        pthread_mutex_unlock(&net->lock);
        if (!link) return next;
        int state = atomic_load(&link->state);
        if (state == GB_LINK_CONNECTING) next = sooner(next, step_connecting(link, now));
        /* Not else: a link that came up in this step has its first heartbeat due. */
        if (atomic_load(&link->state) == GB_LINK_UP) next = sooner(next, step_up(link, now));
    }
}

/* We, not the peers, were stopped: nobody is judged by the time that passed meanwhile. */
static void forgive(struct gb_net *net, uint64_t gap)
{
    pthread_mutex_lock(&net->lock);
    for (size_t i = 0; i < net->links; i++) net->link[i]->heard_ns += gap;
    pthread_mutex_unlock(&net->lock);
}

static void say_goodbye(struct gb_net *net)
{
    size_t bytes = strlen(net->farewell);
    if (bytes > 200) bytes = 200;
    gb_handshake_drop_all(net);
    for (size_t i = 0; i < net->links; i++) {
        struct gb_link *link = net->link[i];
        if (link->control.fd < 0) continue;
        queue_ctl(link, GB_CTL_GOODBYE, net->farewell_status, net->farewell, bytes);
        write_ctl(link);
    }
}

static void dispatch(struct gb_net *net, const struct epoll_event *ev)
{
    void *what = (void *)(uintptr_t)(ev->data.u64 & ~(uint64_t)7);
    uint64_t count;
    switch ((enum gb_watch)(ev->data.u64 & 7)) {
    case GB_WATCH_CONN:
        gb_handshake_event(what, ev->events);
        break;
    case GB_WATCH_LINK:
        if (ev->events & ~(uint32_t)EPOLLOUT) read_ctl(what);
        if (ev->events & EPOLLOUT) write_ctl(what);
        break;
    case GB_WATCH_LISTENER:
        gb_handshake_accept(net);
        break;
    case GB_WATCH_WAKE:
        if (read(net->control_fd, &count, sizeof count) < 0) break;
        break;
    }
}

void *gb_control_main(void *arg)
{
    struct gb_net *net = arg;
    struct epoll_event ev[64];
    gb_net_block_signals();
    uint64_t next = 0, slept_at = gb_now_ns();
    while (!atomic_load(&net->stopping)) {
        uint64_t now = gb_now_ns();
        int64_t ms = next == UINT64_MAX ? 60000 : next <= now ? 0 : (int64_t)((next - now) / 1000000 + 1);
        int n = epoll_wait(net->control_epoll, ev, 64, ms > 60000 ? 60000 : (int)ms);
        now = gb_now_ns();
        uint64_t gap = now - slept_at, planned = (uint64_t)ms * 1000000u + GB_BEAT_MAX;
        if (gap > planned) forgive(net, gap - planned);
        slept_at = now;
        atomic_store(&net->control_asked, 0);
        for (int i = 0; i < n; i++) dispatch(net, &ev[i]);
        now = gb_now_ns();
        next = sooner(gb_handshake_timeouts(net, now), step_links(net, now));
    }
    say_goodbye(net);
    return NULL;
}
