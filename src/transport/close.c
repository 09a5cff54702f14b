/* SPDX-License-Identifier: Apache-2.0
 * The end of a net: goodbye, end of sending, reading until the peers ended too, so that nothing that was sent is lost
 * to a reset.  Runs on the closing thread alone, once the workers and the control thread are joined. */
#include "transport/fault.h"
#include "transport/net_impl.h"

#include "base/clock.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define GB_LINGER_NS 2000000000u

struct ending {
    struct gb_sock *sock;
    struct gb_outbuf *out; /* NULL: nothing left to write */
    int shut, ended;
};

static void finish_writing(struct gb_net *net, struct ending *e)
{
    while (e->out && e->out->off < e->out->len) {
        struct iovec iov = {e->out->data + e->out->off, e->out->len - e->out->off};
        ssize_t n = net->via->write(e->sock, &iov, 1);
        if (n == -EAGAIN) return;
        if (n < 0) break;
        e->out->off += (size_t)n;
    }
    shutdown(e->sock->fd, SHUT_WR);
    e->shut = 1;
}

static void read_away(struct gb_net *net, struct ending *e)
{
    static _Thread_local uint8_t scratch[64 << 10];
    for (int i = 0; i < 64; i++) {
        struct iovec iov = {scratch, sizeof scratch};
        ssize_t n = net->via->read(e->sock, &iov, 1);
        if (n == -EAGAIN) return;
        if (n <= 0) {
            e->ended = 1;
            return;
        }
    }
}

static size_t list_socks(struct gb_net *net, struct ending *e)
{
    size_t n = 0;
    for (size_t i = 0; i < net->links; i++) {
        struct gb_link *l = net->link[i];
        int half = atomic_load(&l->state) == GB_LINK_CONNECTING;
        if (l->control.fd >= 0)
            e[n++] = (struct ending){.sock = &l->control, .out = &l->ctl_out, .ended = l->control_eof};
        if (l->express.fd >= 0)
            e[n++] =
                (struct ending){.sock = &l->express, .out = half || l->mute ? NULL : &l->out, .ended = l->express_eof};
        for (int k = 0; k < GB_LANES_MAX; k++)
            if (l->lane[k].sock.fd >= 0)
                e[n++] = (struct ending){.sock = &l->lane[k].sock, .ended = l->lane[k].read_eof};
    }
    return n;
}

/* How long poll may sleep: a ring's other end wakes us, but not any more once we have ended our side. */
static int arm(struct ending *e, int longest)
{
    int ready = gb_sock_arm(e->sock, !e->shut);
    if (ready && !e->ended) return 0;
    return !e->shut && longest > 1 ? 1 : longest;
}

static void linger(struct gb_net *net)
{
    size_t max = net->links * (GB_LANES_MAX + 2) + 1;
    struct ending *e = calloc(max, sizeof *e);
    struct pollfd *p = calloc(max, sizeof *p);
    size_t n = e && p ? list_socks(net, e) : 0;
    uint64_t end = gb_now_ns() + GB_LINGER_NS;
    for (;;) {
        size_t open = 0;
        int longest = GB_LINGER_NS / 1000000;
        for (size_t i = 0; i < n; i++) {
            if (!e[i].shut) finish_writing(net, &e[i]);
            if (!e[i].ended) read_away(net, &e[i]);
            p[i] = (struct pollfd){.fd = -1};
            if (e[i].ended && e[i].shut) continue;
            if (e[i].sock->ring) longest = arm(&e[i], longest);
            p[i] = (struct pollfd){.fd = e[i].sock->fd,
                                   .events = (short)((e[i].ended ? 0 : POLLIN) | (e[i].shut ? 0 : POLLOUT))};
            open++;
        }
        uint64_t now = gb_now_ns();
        if (open == 0 || now >= end) break;
        int ms = (int)((end - now) / 1000000) + 1;
        poll(p, n, ms < longest ? ms : longest);
    }
    for (size_t i = 0; i < n; i++) net->via->close(e[i].sock);
    free(e);
    free(p);
}

static void free_notes(struct gb_note *note)
{
    while (note) {
        struct gb_note *next = note->next;
        free(note->kind == GB_NOTE_EVENT ? note->text : NULL);
        if (note->kind != GB_NOTE_MSG) free(note); /* messages live in their link */
        note = next;
    }
}

static void close_fd(int fd)
{
    if (fd >= 0) close(fd);
}

void gb_net_close(struct gb_net *net, int status, const char *farewell)
{
    if (!net) return;
    if (net->epoll >= 0) {
        /* Completed eager sends may still wait in our own buffers. */
        for (struct gb_link *link = net->dirty; link; link = link->dirty_next) gb_express_flush(link);
    }
    net->farewell_status = status;
    net->farewell = farewell ? farewell : "";
    atomic_store(&net->stopping, 1);
    gb_workers_stop(net);
    if (net->control_started) {
        atomic_store(&net->control_asked, 0);
        gb_control_wake(net);
        pthread_join(net->control, NULL);
    }
    if (net->via) net->via->unlisten(net);
    linger(net);
    free_notes(net->queue_head);
    free_notes(net->retired);
    for (size_t i = 0; i < net->links; i++) gb_link_free(net->link[i]);
    gb_loan_net_fini(net);
    gb_fault_close(net);
    close_fd(net->epoll);
    close_fd(net->wake_fd);
    close_fd(net->control_epoll);
    close_fd(net->control_fd);
    free((void *)net->link);
    free((void *)net->express);
    free(net->ring);
    free(net->cancelled.item);
    if (net->secret) explicit_bzero(net->secret, net->secret_bytes);
    free(net->secret);
    pthread_mutex_destroy(&net->lock);
    pthread_mutex_destroy(&net->queue_lock);
    pthread_mutex_destroy(&net->job_lock);
    free(net);
}
