/* SPDX-License-Identifier: Apache-2.0
 * Bulk lanes: payloads straight from the sender's buffer into the posted one, whole messages per lane.  Runs on the I/O
 * worker that owns the lane; touches matching state only under the link's lock. */
#include "transport/net_impl.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>
#include <xxhash.h>

#define GB_SUM_PIECE (256u << 10) /* hashed and written while it is in the cache */
#define GB_SCRATCH   (64u << 10)
#define GB_BUDGET    (8u << 20) /* bytes before another lane of this worker gets its turn */

static const uint8_t filler[GB_SCRATCH];

/* Hands a message back to the engine role. */
static void finish(struct gb_lane *lane, struct gb_msg *m, int status, int flags)
{
    struct gb_link *link = lane->link;
    pthread_mutex_lock(&link->lock);
    if (m->kind == GB_MSG_SEND) lane->outstanding -= m->bytes;
    gb_match_data_done(&link->match, m, status, flags);
    /* A worker may be the first to see the damage: the link's own text comes when the control thread takes it down. */
    if (status && !m->note.event.text) m->note.event.text = link->down_status ? link->text : link->doubt;
    pthread_mutex_unlock(&link->lock);
    gb_net_note(link->net, &m->note);
}

/* ---- sending ---- */

static int tx_take(struct gb_lane *lane)
{
    struct gb_link *link = lane->link;
    pthread_mutex_lock(&link->lock);
    struct gb_msg *m = lane->queue.head;
    if (m) {
        gb_msg_unlink(&lane->queue, m);
        m->stage = GB_MSG_ACTIVE;
    }
    pthread_mutex_unlock(&link->lock);
    if (!m) return 0;
    int sum = atomic_load_explicit(&link->checksum, memory_order_relaxed) && m->bytes > 0;
    struct gb_frame f = {.type = GB_FRAME_DATA,
                         .flags = (uint16_t)((sum ? GB_FRAME_SUM : 0) | (m->asked ? GB_FRAME_ASKED : 0)),
                         .group = m->key.group,
                         .seq = m->key.seq,
                         .xid = m->key.xid,
                         .op = m->sig.op,
                         .dtype = m->sig.dtype,
                         .reduce_op = m->sig.reduce_op,
                         .root_lo = m->sig.root_lo,
                         .plan_hash = m->sig.plan_hash,
                         .count = m->sig.count,
                         .bytes = m->bytes,
                         .slot = m->slot};
    gb_frame_pack(&f, lane->tx_head);
    lane->tx = m;
    lane->tx_busy = 1;
    lane->tx_off = 0;
    lane->tx_bytes = m->bytes;
    lane->tx_filler = 0;
    lane->tx_summed = sum ? 0 : m->bytes;
    if (sum) XXH3_64bits_reset(lane->tx_sum);
    gb_trailer_pack(&(struct gb_trailer){0}, lane->tx_tail);
    return 1;
}

/* The sender gave up inside a frame: the rest goes out as filler, and the trailer says so. */
static void tx_abandon(struct gb_lane *lane, int status)
{
    struct gb_msg *m = lane->tx;
    lane->tx = NULL;
    if (lane->tx_off == 0) {
        lane->tx_busy = 0;
    } else if (lane->tx_off < GB_FRAME_BYTES + lane->tx_bytes) {
        lane->tx_filler = 1;
        gb_trailer_pack(&(struct gb_trailer){.abandoned = 1}, lane->tx_tail);
    }
    finish(lane, m, status, 0);
}

/* What may be written next; hashes ahead of it piece by piece. */
static int tx_iov(struct gb_lane *lane, struct iovec iov[3])
{
    int n = 0;
    uint64_t off = lane->tx_off, bytes = lane->tx_bytes;
    if (off < GB_FRAME_BYTES) iov[n++] = (struct iovec){lane->tx_head + off, (size_t)(GB_FRAME_BYTES - off)};
    uint64_t at = off > GB_FRAME_BYTES ? off - GB_FRAME_BYTES : 0;
    if (lane->tx_filler) {
        uint64_t left = at < bytes ? bytes - at : 0;
        size_t piece = left > sizeof filler ? sizeof filler : (size_t)left;
        if (piece) iov[n++] = (struct iovec){(void *)(uintptr_t)filler, piece};
        if (piece < left) return n;
    } else if (lane->tx) {
        uint8_t *buf = lane->tx->buf;
        if (lane->tx_summed < bytes && at >= lane->tx_summed) {
            uint64_t piece = bytes - lane->tx_summed;
            if (piece > GB_SUM_PIECE) piece = GB_SUM_PIECE;
            XXH3_64bits_update(lane->tx_sum, buf + lane->tx_summed, (size_t)piece);
            lane->tx_summed += piece;
            if (lane->tx_summed == bytes)
                gb_trailer_pack(&(struct gb_trailer){.sum = XXH3_64bits_digest(lane->tx_sum)}, lane->tx_tail);
        }
        if (at < lane->tx_summed) iov[n++] = (struct iovec){buf + at, (size_t)(lane->tx_summed - at)};
        if (lane->tx_summed < bytes) return n;
    }
    uint64_t tail = off > GB_FRAME_BYTES + bytes ? off - GB_FRAME_BYTES - bytes : 0;
    iov[n++] = (struct iovec){lane->tx_tail + tail, (size_t)(GB_TRAILER_BYTES - tail)};
    return n;
}

static void tx_run(struct gb_lane *lane)
{
    struct gb_link *link = lane->link;
    while (lane->tx_busy || tx_take(lane)) {
        int stop = lane->tx ? atomic_load_explicit(&lane->tx->stop, memory_order_relaxed) : 0;
        if (stop) {
            tx_abandon(lane, stop);
            continue;
        }
        struct iovec iov[3];
        ssize_t n = link->net->via->write(&lane->sock, iov, tx_iov(lane, iov));
        if (n == -EAGAIN) {
            lane->tx_blocked = 1;
            return;
        }
        if (n < 0) {
            lane->tx_blocked = 1; /* reading this lane tells why it ended */
            return;
        }
        atomic_fetch_add_explicit(&link->sent, (uint64_t)n, memory_order_relaxed);
        lane->tx_off += (uint64_t)n;
        if (lane->tx_off < GB_FRAME_BYTES + lane->tx_bytes + GB_TRAILER_BYTES) continue;
        lane->tx_busy = 0;
        struct gb_msg *m = lane->tx;
        lane->tx = NULL;
        if (m) finish(lane, m, 0, 0);
    }
}

/* ---- receiving ---- */

static void rx_damage(struct gb_lane *lane, const char *why)
{
    if (lane->rx) {
        struct gb_msg *m = lane->rx;
        lane->rx = NULL;
        finish(lane, m, GPUBRIDGE_ERR_CHECKSUM, lane->rx_flags);
    }
    lane->read_eof = 1;
    gb_control_report(lane->link, GB_REPORT_DAMAGE, 1, why);
}

static int rx_begin(struct gb_lane *lane)
{
    const char *why = "";
    struct gb_link *link = lane->link;
    if (gb_frame_parse(lane->rx_buf, &lane->rx_frame, &why) != 0) return rx_damage(lane, why), -1;
    if (lane->rx_frame.type != GB_FRAME_DATA)
        return rx_damage(lane, "a frame of a type that has no place on a bulk lane"), -1;
    pthread_mutex_lock(&link->lock);
    int rc = gb_match_data(&link->match, &lane->rx_frame, &lane->rx, &why);
    pthread_mutex_unlock(&link->lock);
    if (rc) return rx_damage(lane, why), -1;
    lane->rx_flags = lane->rx_frame.flags;
    lane->rx_in_payload = 1;
    lane->rx_off = 0;
    lane->rx_len = 0;
    if (lane->rx_flags & GB_FRAME_SUM) XXH3_64bits_reset(lane->rx_sum);
    return 0;
}

static int rx_end(struct gb_lane *lane)
{
    struct gb_trailer t;
    const char *why = "";
    if (gb_trailer_parse(lane->rx_buf, &t, &why) != 0) return rx_damage(lane, why), -1;
    if (lane->rx && !t.abandoned && (lane->rx_flags & GB_FRAME_SUM) && XXH3_64bits_digest(lane->rx_sum) != t.sum)
        return rx_damage(lane, "a payload's checksum is wrong"), -1;
    struct gb_msg *m = lane->rx;
    lane->rx = NULL;
    lane->rx_in_payload = 0;
    lane->rx_len -= GB_TRAILER_BYTES;
    memmove(lane->rx_buf, lane->rx_buf + GB_TRAILER_BYTES, lane->rx_len);
    if (m) finish(lane, m, t.abandoned ? GPUBRIDGE_ERR_CANCELLED : 0, lane->rx_flags);
    return 0;
}

/* Lets go of a receive that was given up; what follows of its payload is discarded. */
static void rx_stop(struct gb_lane *lane)
{
    struct gb_msg *m = lane->rx;
    int stop = m ? atomic_load_explicit(&m->stop, memory_order_relaxed) : 0;
    if (!stop) return;
    lane->rx = NULL;
    finish(lane, m, stop, lane->rx_flags);
}

static int rx_iov(struct gb_lane *lane, uint8_t *scratch, struct iovec iov[2])
{
    if (!lane->rx_in_payload) {
        iov[0] = (struct iovec){lane->rx_buf + lane->rx_len, GB_FRAME_BYTES - lane->rx_len};
        return 1;
    }
    int n = 0;
    uint64_t left = lane->rx_frame.bytes - lane->rx_off;
    if (left && !lane->rx) {
        iov[n++] = (struct iovec){scratch, left > GB_SCRATCH ? GB_SCRATCH : (size_t)left};
        if (left > GB_SCRATCH) return n;
    } else if (left) {
        size_t piece = (size_t)left;
        /* Hashing follows the copy, so keep the pieces small enough for the cache. */
        if ((lane->rx_flags & GB_FRAME_SUM) && piece > GB_SUM_PIECE) piece = GB_SUM_PIECE;
        iov[n++] = (struct iovec){(uint8_t *)lane->rx->buf + lane->rx_off, piece};
        if (piece < left) return n;
    }
    iov[n++] = (struct iovec){lane->rx_buf + lane->rx_len, sizeof lane->rx_buf - lane->rx_len};
    return n;
}

static int rx_take(struct gb_lane *lane, size_t n)
{
    if (lane->rx_in_payload) {
        uint64_t left = lane->rx_frame.bytes - lane->rx_off;
        size_t part = n < left ? n : (size_t)left;
        if (part && lane->rx && (lane->rx_flags & GB_FRAME_SUM))
            XXH3_64bits_update(lane->rx_sum, (uint8_t *)lane->rx->buf + lane->rx_off, part);
        lane->rx_off += part;
        n -= part;
    }
    lane->rx_len += n;
    if (lane->rx_in_payload && lane->rx_off == lane->rx_frame.bytes && lane->rx_len >= GB_TRAILER_BYTES &&
        rx_end(lane) != 0)
        return -1;
    if (!lane->rx_in_payload && lane->rx_len == GB_FRAME_BYTES) return rx_begin(lane);
    return 0;
}

static void rx_run(struct gb_lane *lane)
{
    uint8_t scratch[GB_SCRATCH];
    struct gb_link *link = lane->link;
    size_t budget = GB_BUDGET;
    while (!lane->read_eof) {
        rx_stop(lane);
        struct iovec iov[2];
        int count = rx_iov(lane, scratch, iov);
        size_t asked = iov[0].iov_len + (count > 1 ? iov[1].iov_len : 0);
        ssize_t n = link->net->via->read(&lane->sock, iov, count);
        if (n == -EAGAIN) return;
        if (n == -EBADMSG) {
            rx_damage(lane, GB_RING_LIE);
            return;
        }
        if (n <= 0) {
            lane->read_eof = 1;
            int torn = lane->rx_in_payload || lane->rx_len > 0;
            gb_control_report(link, n == 0 ? GB_REPORT_EOF : GB_REPORT_BROKEN, torn, n ? strerror((int)-n) : "");
            return;
        }
        atomic_fetch_add_explicit(&link->recv, (uint64_t)n, memory_order_relaxed);
        if (rx_take(lane, (size_t)n) != 0) return;
        /* A short read means the socket is empty: the next byte brings a new event. */
        if ((size_t)n < asked && !link->net->fault) return;
        if ((size_t)n >= budget) {
            lane->ready = 1;
            return;
        }
        budget -= (size_t)n;
    }
}

/* ---- the worker's side of life and death ---- */

static void attach(struct gb_lane *lane)
{
    /* The socket beside a ring can nearly always be written to: that says nothing about the ring. */
    uint32_t room = lane->sock.ring ? 0 : EPOLLOUT;
    struct epoll_event ev = {.events = EPOLLIN | room | EPOLLRDHUP | EPOLLET, .data.ptr = lane};
    if (epoll_ctl(lane->worker->epoll, EPOLL_CTL_ADD, lane->sock.fd, &ev) != 0)
        gb_control_report(lane->link, GB_REPORT_BROKEN, 0, strerror(errno));
    lane->attached = 1;
}

static void detach(struct gb_lane *lane)
{
    struct gb_link *link = lane->link;
    struct gb_msg *held[2] = {lane->tx, lane->rx};
    lane->tx = lane->rx = NULL;
    lane->tx_busy = 0;
    lane->read_eof = 1;
    pthread_mutex_lock(&link->lock);
    int status = link->down_status;
    link->net->via->close(&lane->sock);
    pthread_mutex_unlock(&link->lock);
    lane->attached = 0;
    for (int i = 0; i < 2; i++)
        if (held[i]) finish(lane, held[i], status, lane->rx_flags);
}

void gb_lane_run(struct gb_lane *lane, int what)
{
    enum gb_link_state state = (enum gb_link_state)atomic_load(&lane->link->state);
    if (state == GB_LINK_LEFT || state == GB_LINK_DEAD) {
        if (lane->attached) detach(lane);
        return;
    }
    if (!lane->attached) {
        if (state != GB_LINK_UP) return;
        attach(lane);
    }
    lane->ready = 0;
    if (what & GB_LANE_KICK) rx_stop(lane);
    if (what & GB_LANE_IN) rx_run(lane);
    if ((what & GB_LANE_OUT) || lane->sock.ring) lane->tx_blocked = 0;
    if (lane->tx && atomic_load_explicit(&lane->tx->stop, memory_order_relaxed))
        tx_abandon(lane, atomic_load_explicit(&lane->tx->stop, memory_order_relaxed));
    if (!lane->tx_blocked) tx_run(lane);
    if (!lane->ready && gb_sock_arm(&lane->sock, lane->tx_busy) && !lane->read_eof) lane->ready = 1;
}
