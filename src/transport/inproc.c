/* SPDX-License-Identifier: Apache-2.0
 * inproc: contexts of one process, joined by socket pairs: no port, no network, but the whole protocol above.  For
 * tests and for ranks as threads.  The table of reachable nets is process-wide, because that is what inproc means. */
#include "transport/net_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define GB_INPROC_NETS    256
#define GB_INPROC_WAITING 64

struct entry {
    struct gb_net *net;
    int waiting[GB_INPROC_WAITING]; /* accepted ends */
    int count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry entries[GB_INPROC_NETS]; /* guarded by lock */

static struct entry *find(const struct gb_net *net, const struct gb_uuid *uuid)
{
    for (int i = 0; i < GB_INPROC_NETS; i++) {
        struct gb_net *n = entries[i].net;
        if (uuid ? n && memcmp(n->self.byte, uuid->byte, 16) == 0 : n == net) return &entries[i];
    }
    return NULL;
}

static int inproc_listen(struct gb_net *net)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "eventfd: errno %d; raise the limit of open files", errno);
    pthread_mutex_lock(&lock);
    struct entry *e = find(NULL, NULL);
    if (e) *e = (struct entry){.net = net};
    pthread_mutex_unlock(&lock);
    if (!e) {
        close(fd);
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "more than %d inproc contexts in one process", GB_INPROC_NETS);
    }
    net->listener = fd;
    net->own.inproc = 1;
    net->own.count = 1;
    net->own.endpoint[0] = (struct gb_endpoint){.family = 4, .addr = {127, 0, 0, 1}};
    return 0;
}

static void inproc_unlisten(struct gb_net *net)
{
    pthread_mutex_lock(&lock);
    struct entry *e = net->listener >= 0 ? find(net, NULL) : NULL;
    if (e) {
        for (int i = 0; i < e->count; i++) close(e->waiting[i]);
        *e = (struct entry){.net = NULL};
    }
    pthread_mutex_unlock(&lock);
    if (net->listener >= 0) close(net->listener);
    net->listener = -1;
}

static int inproc_accept(struct gb_net *net, struct gb_sock *sock, char *where, size_t capacity)
{
    uint64_t one;
    int rc = GPUBRIDGE_AGAIN;
    pthread_mutex_lock(&lock);
    struct entry *e = find(net, NULL);
    if (e && e->count > 0) {
        sock->fd = e->waiting[0];
        memmove(e->waiting, e->waiting + 1, (size_t)--e->count * sizeof e->waiting[0]);
        rc = 0;
    }
    pthread_mutex_unlock(&lock);
    /* One count per waiting end, so the descriptor stays readable while there are more. */
    if (rc == 0) (void)!read(net->listener, &one, sizeof one);
    snprintf(where, capacity, "this process");
    return rc;
}

static int inproc_dial(struct gb_net *net, const struct gb_uuid *uuid, const struct gb_endpoint *to, uint16_t port,
                       struct gb_sock *sock)
{
    (void)net, (void)to, (void)port;
    int fd[2];
    uint64_t one = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fd) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE, "socketpair: %s", strerror(errno));
    pthread_mutex_lock(&lock);
    struct entry *e = find(NULL, uuid);
    int ok = e && e->count < GB_INPROC_WAITING && write(e->net->listener, &one, sizeof one) == (ssize_t)sizeof one;
    if (ok) e->waiting[e->count++] = fd[1];
    pthread_mutex_unlock(&lock);
    if (!ok) {
        close(fd[0]);
        close(fd[1]);
        return GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE, "no such context in this process, or it is swamped");
    }
    sock->fd = fd[0];
    return 0;
}

static int inproc_dialled(struct gb_sock *sock)
{
    (void)sock;
    return 0;
}

const struct gb_transport gb_transport_inproc = {
    .name = "inproc",
    .listen = inproc_listen,
    .unlisten = inproc_unlisten,
    .accept = inproc_accept,
    .dial = inproc_dial,
    .dialled = inproc_dialled,
    .read = gb_stream_read,
    .write = gb_stream_write,
    .close = gb_stream_close,
};
