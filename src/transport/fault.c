/* SPDX-License-Identifier: Apache-2.0
 * The misbehaving transport of fault.h.  Each lane's state is used by the thread that owns the lane. */
#include "transport/fault.h"

#include "transport/net_impl.h"

#include "base/clock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define GB_FAULTS 8

enum action { CORRUPT, CLOSE, STALL, DROP, SHORT, DELAY, LATE, ACTIONS };
static const struct {
    const char *name;
    char mark;
} actions[ACTIONS] = {
    [CORRUPT] = {"corrupt", '@'}, [CLOSE] = {"close", '@'}, [STALL] = {"stall", '@'}, [DROP] = {"drop", '@'},
    [SHORT] = {"short", '='},     [DELAY] = {"delay", '='}, [LATE] = {"late", '='}};

struct gb_fault_item {
    int kind, index; /* enum gb_lane_kind and lane, or -1: all */
    enum action action;
    uint64_t n;
};
struct gb_fault {
    struct gb_fault_item item[GB_FAULTS];
    int items;
};
struct gb_fault_lane {
    uint64_t written;
    uint64_t late_ns;  /* when what is late was first tried; 0: nothing is */
    size_t late_bytes; /* how much it was */
};

static int parse_lane(const char *s, size_t n, struct gb_fault_item *it)
{
    static const char *const names[] = {
        [GB_LANE_CONTROL] = "control", [GB_LANE_EXPRESS] = "express", [GB_LANE_BULK] = "bulk"};
    it->kind = it->index = -1;
    if (n == 3 && strncmp(s, "all", 3) == 0) return 0;
    for (int k = 0; k < GB_LANE_KIND_END; k++) {
        size_t len = strlen(names[k]);
        if (n < len || strncmp(s, names[k], len) != 0) continue;
        it->kind = k;
        if (n > len) it->index = atoi(s + len);
        return 0;
    }
    return -1;
}

static int parse_item(const char *s, size_t n, struct gb_fault_item *it)
{
    const char *colon = memchr(s, ':', n);
    if (!colon || parse_lane(s, (size_t)(colon - s), it) != 0) return -1;
    for (int a = 0; a < ACTIONS; a++) {
        size_t len = strlen(actions[a].name);
        if (strncmp(colon + 1, actions[a].name, len) != 0 || colon[1 + len] != actions[a].mark) continue;
        it->action = (enum action)a;
        it->n = strtoull(colon + 2 + len, NULL, 10);
        return it->action == SHORT && it->n == 0 ? -1 : 0;
    }
    return -1;
}

int gb_fault_open(struct gb_net *net, const char *spec)
{
    if (!spec || !spec[0]) return 0;
    struct gb_fault *f = calloc(1, sizeof *f);
    if (!f) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the fault specification");
    net->fault = f;
    for (const char *s = spec; *s;) {
        size_t n = strcspn(s, ";");
        if (f->items == GB_FAULTS || parse_item(s, n, &f->item[f->items]) != 0)
            return GB_FAIL(GPUBRIDGE_ERR_SETTING, "bad fault specification \"%s\"; see transport/fault.h", spec);
        f->items++;
        s += n + (s[n] == ';');
    }
    net->via = &gb_transport_fault;
    return 0;
}

void gb_fault_close(struct gb_net *net)
{
    free(net->fault);
    net->fault = NULL;
}

void gb_fault_lane_up(struct gb_sock *sock)
{
    if (sock->net->fault) sock->fault = calloc(1, sizeof *sock->fault);
}

static const struct gb_fault_item *find(const struct gb_sock *sock, enum action action)
{
    const struct gb_fault *f = sock->net->fault;
    for (int i = 0; i < f->items; i++) {
        const struct gb_fault_item *it = &f->item[i];
        if (it->action == action && (it->kind < 0 || it->kind == sock->kind) &&
            (it->index < 0 || it->index == sock->index))
            return it;
    }
    return NULL;
}

static int cut(struct iovec *out, const struct iovec *iov, int count, uint64_t max)
{
    int n = 0;
    for (; n < count && n < 4 && max > 0; n++) {
        out[n] = iov[n];
        if (out[n].iov_len > max) out[n].iov_len = (size_t)max;
        max -= out[n].iov_len;
    }
    return n;
}

static ssize_t fault_read(struct gb_sock *sock, struct iovec *iov, int count)
{
    const struct gb_fault_item *limit = sock->fault ? find(sock, SHORT) : NULL;
    if (!limit) return sock->net->base->read(sock, iov, count);
    struct iovec part[4];
    return sock->net->base->read(sock, part, cut(part, iov, count, limit->n));
}

/* Writes up to the next offset where something happens, so that the offset is exact. */
static ssize_t write_until(struct gb_sock *sock, const struct iovec *iov, int count, uint64_t at)
{
    struct iovec part[4];
    ssize_t n = sock->net->base->write(sock, part, cut(part, iov, count, at - sock->fault->written));
    if (n > 0) sock->fault->written += (uint64_t)n;
    return n;
}

static ssize_t write_corrupted(struct gb_sock *sock, const struct iovec *iov)
{
    uint8_t byte = *(const uint8_t *)iov[0].iov_base ^ 0x10;
    struct iovec one = {&byte, 1};
    ssize_t n = sock->net->base->write(sock, &one, 1);
    if (n > 0) sock->fault->written++;
    return n;
}

static size_t length(const struct iovec *iov, int count)
{
    size_t n = 0;
    for (int i = 0; i < count; i++) n += iov[i].iov_len;
    return n;
}

/* A write that grew meanwhile counts from now, so that what was added is as late as the rest. */
static int is_late(struct gb_fault_lane *lane, size_t bytes, uint64_t delay_us)
{
    uint64_t now = gb_now_ns();
    if (!lane->late_ns || bytes != lane->late_bytes) lane->late_ns = now, lane->late_bytes = bytes;
    if (now - lane->late_ns < delay_us * 1000) return 1;
    lane->late_ns = 0;
    return 0;
}

static ssize_t fault_write(struct gb_sock *sock, const struct iovec *iov, int count)
{
    struct gb_fault_lane *lane = sock->fault;
    if (!lane) return sock->net->base->write(sock, iov, count);
    const struct gb_fault_item *it;
    uint64_t until = UINT64_MAX;
    while (count > 0 && iov[0].iov_len == 0) iov++, count--;
    if ((it = find(sock, DELAY)) != NULL)
        nanosleep(&(struct timespec){.tv_sec = (time_t)(it->n / 1000000), .tv_nsec = (long)(it->n % 1000000) * 1000},
                  NULL);
    if ((it = find(sock, LATE)) != NULL && is_late(lane, length(iov, count), it->n)) return -EAGAIN;
    if ((it = find(sock, SHORT)) != NULL) until = lane->written + it->n;
    for (int a = CORRUPT; a <= DROP; a++) {
        if ((it = find(sock, (enum action)a)) == NULL) continue;
        if (lane->written < it->n) {
            if (it->n < until) until = it->n;
            continue;
        }
        if (a == STALL) return -EAGAIN;
        if (a == CLOSE) return shutdown(sock->fd, SHUT_RDWR), -EPIPE;
        if (a == CORRUPT && lane->written == it->n) return write_corrupted(sock, iov);
        if (a == DROP) return (ssize_t)length(iov, count);
    }
    return write_until(sock, iov, count, until);
}

static int fault_listen(struct gb_net *net)
{
    return net->base->listen(net);
}

static void fault_unlisten(struct gb_net *net)
{
    net->base->unlisten(net);
}

static int fault_accept(struct gb_net *net, struct gb_sock *sock, char *where, size_t capacity)
{
    return net->base->accept(net, sock, where, capacity);
}

static int fault_dial(struct gb_net *net, const struct gb_uuid *uuid, const struct gb_endpoint *to, uint16_t port,
                      struct gb_sock *sock)
{
    return net->base->dial(net, uuid, to, port, sock);
}

static int fault_dialled(struct gb_sock *sock)
{
    return sock->net->base->dialled(sock);
}

static int fault_offer(struct gb_sock *sock)
{
    return sock->net->base->offer ? sock->net->base->offer(sock) : 0;
}

static int fault_take(struct gb_sock *sock)
{
    return sock->net->base->take ? sock->net->base->take(sock) : 0;
}

static void fault_start(struct gb_sock *sock)
{
    if (sock->net->base->start) sock->net->base->start(sock);
}

static void fault_close(struct gb_sock *sock)
{
    free(sock->fault);
    sock->fault = NULL;
    sock->net->base->close(sock);
}

const struct gb_transport gb_transport_fault = {
    .name = "fault",
    .listen = fault_listen,
    .unlisten = fault_unlisten,
    .accept = fault_accept,
    .dial = fault_dial,
    .dialled = fault_dialled,
    .offer = fault_offer,
    .take = fault_take,
    .start = fault_start,
    .read = fault_read,
    .write = fault_write,
    .close = fault_close,
};
