/* SPDX-License-Identifier: Apache-2.0
 * shm: processes of one host.  A Unix socket with a name that lives in the kernel only (and dies with the process) per
 * lane; express and bulk lanes then move their bytes through a ring in shared memory (ring.h), the control lane stays
 * on its socket.  The memory has no name either: its descriptor travels with the dialler's proof, after the other end
 * has proved the job's secret, and is looked at only after the dialler has.  auto: the same, with TCP for peers that
 * cannot be reached so. */
#include "transport/net_impl.h"

#include "base/log.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define GB_EXPRESS_RING (64u << 10)
#define GB_BULK_RING    (512u << 10)

/* ---- listener ---- */

/* The name comes from the uuid, which nobody knows before it is published; a leading 0 keeps it out of the file system.
 */
static socklen_t name_of(const struct gb_uuid *uuid, struct sockaddr_un *a)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "gpubridge-");
    for (int i = 0; i < 16; i++)
        n += snprintf(a->sun_path + 1 + n, sizeof a->sun_path - 1 - (size_t)n, "%02x", uuid->byte[i]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int listen_local(struct gb_net *net)
{
    struct sockaddr_un a;
    socklen_t len = name_of(&net->self, &a);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, len) != 0 || listen(fd, 1024) != 0) {
        int rc = GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "no local socket to listen on: %s", strerror(errno));
        if (fd >= 0) close(fd);
        return rc;
    }
    /* Made and dropped: where shared memory is not to be had, peers need not try. */
    struct gb_ring *probe = gb_ring_new();
    int rc = probe ? gb_ring_make(probe, GB_RING_MIN) : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory");
    gb_ring_free(probe);
    if (rc) {
        close(fd);
        return rc;
    }
    net->local_listener = fd;
    struct gb_endpoint *e = &net->own.endpoint[net->own.count++];
    *e = (struct gb_endpoint){.family = GB_FAMILY_LOCAL};
    gb_addr_boot_id(e->addr);
    return 0;
}

static int shm_listen(struct gb_net *net)
{
    gb_addr_host_id(net->own.host_id);
    return listen_local(net);
}

static int auto_listen(struct gb_net *net)
{
    GB_TRY(gb_transport_tcp.listen(net));
    if (listen_local(net) != 0) GB_WARN("peers on this host are reached over tcp: %s", gb_err_text());
    return 0;
}

static void shm_unlisten(struct gb_net *net)
{
    gb_transport_tcp.unlisten(net);
    if (net->local_listener >= 0) close(net->local_listener);
    net->local_listener = -1;
}

/* ---- connections ---- */

/* A local socket has a ring, with or without memory. */
static int dress(struct gb_sock *sock, int fd)
{
    sock->ring = gb_ring_new();
    if (!sock->ring) {
        close(fd);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a connection");
    }
    sock->fd = fd;
    return 0;
}

static int accept_local(struct gb_net *net, struct gb_sock *sock, char *where, size_t capacity)
{
    int fd;
    do fd = accept4(net->local_listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return GPUBRIDGE_AGAIN;
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "cannot accept a local connection: %s", strerror(errno));
    struct ucred peer = {0};
    socklen_t len = sizeof peer;
    /* Other users are not even listened to; root is not another user. */
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || (peer.uid != geteuid() && peer.uid != 0)) {
        if (net->complaints++ < GB_COMPLAINTS)
            GB_INFO("dropped a local connection from process %d of user %u", (int)peer.pid, (unsigned)peer.uid);
        close(fd);
        return GPUBRIDGE_AGAIN;
    }
    snprintf(where, capacity, "shared memory");
    return dress(sock, fd);
}

static int shm_accept(struct gb_net *net, struct gb_sock *sock, char *where, size_t capacity)
{
    int rc = net->local_listener >= 0 ? accept_local(net, sock, where, capacity) : GPUBRIDGE_AGAIN;
    if (rc != GPUBRIDGE_AGAIN || net->listener < 0) return rc;
    return gb_transport_tcp.accept(net, sock, where, capacity);
}

static int shm_dial(struct gb_net *net, const struct gb_uuid *uuid, const struct gb_endpoint *to, uint16_t port,
                    struct gb_sock *sock)
{
    if (to->family != GB_FAMILY_LOCAL) return gb_transport_tcp.dial(net, uuid, to, port, sock);
    struct sockaddr_un a;
    socklen_t len = name_of(uuid, &a);
    int rc, fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE, "%s", strerror(errno));
    do rc = connect(fd, (struct sockaddr *)&a, len);
    while (rc < 0 && errno == EINTR);
    if (rc < 0) {
        rc = GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE, "%s", strerror(errno));
        close(fd);
        return rc;
    }
    return dress(sock, fd);
}

static int shm_dialled(struct gb_sock *sock)
{
    return sock->ring ? 0 : gb_transport_tcp.dialled(sock);
}

static int shm_offer(struct gb_sock *sock)
{
    if (!sock->ring || sock->kind == GB_LANE_CONTROL) return 0;
    return gb_ring_make(sock->ring, sock->kind == GB_LANE_EXPRESS ? GB_EXPRESS_RING : GB_BULK_RING);
}

static int shm_take(struct gb_sock *sock)
{
    if (!sock->ring || sock->kind == GB_LANE_CONTROL) return 0;
    int rc = gb_ring_map(sock->ring);
    gb_ring_close_fd(sock->ring);
    return rc;
}

static void shm_start(struct gb_sock *sock)
{
    if (!sock->ring) return;
    gb_ring_close_fd(sock->ring);
    sock->ring->live = sock->ring->map != NULL;
    sock->ring->takes = sock->kind == GB_LANE_CONTROL;
}

/* ---- bytes of the handshake: through the socket, with the descriptor beside them ---- */

union fd_space {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(GB_RING_FDS * sizeof(int))];
};

static ssize_t write_socket(struct gb_sock *sock, const struct iovec *iov, int count)
{
    struct gb_ring *ring = sock->ring;
    const int *fds = ring->nout ? ring->outbox : &ring->fd;
    const size_t fd_bytes = sizeof(int) * (ring->nout ? (size_t)ring->nout : 1);
    if (!ring->nout && (ring->fd < 0 || !ring->map || ring->sent)) return gb_stream_write(sock, iov, count);
    union fd_space space = {.bytes = {0}};
    struct msghdr msg = {.msg_iov = (struct iovec *)(uintptr_t)iov,
                         .msg_iovlen = (size_t)count,
                         .msg_control = space.bytes,
                         .msg_controllen = CMSG_SPACE(fd_bytes)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fd_bytes);
    memcpy(CMSG_DATA(c), fds, fd_bytes);
    ssize_t n;
    do n = sendmsg(sock->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n > 0 && ring->nout)
        ring->nout = 0;
    else if (n > 0)
        ring->sent = 1;
    return n < 0 ? -errno : n;
}

/* What there is room for; the rest is closed again. */
static void keep_fds(struct gb_ring *ring, struct cmsghdr *c)
{
    size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        if (!ring->takes && ring->fd < 0)
            ring->fd = fd;
        else if (ring->takes && ring->nin < GB_RING_FDS)
            ring->inbox[ring->nin++] = fd;
        else
            close(fd);
    }
}

/* Keeps the descriptor of memory that an acceptor's lane is to have, and those that come with control messages. */
static ssize_t read_socket(struct gb_sock *sock, struct iovec *iov, int count)
{
    struct gb_ring *ring = sock->ring;
    if (!ring->takes && (sock->kind == GB_LANE_CONTROL || ring->fd >= 0)) return gb_stream_read(sock, iov, count);
    union fd_space space = {.bytes = {0}};
    struct msghdr msg = {
        .msg_iov = iov, .msg_iovlen = (size_t)count, .msg_control = space.bytes, .msg_controllen = sizeof space.bytes};
    ssize_t n;
    do n = recvmsg(sock->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0) return -errno;
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) keep_fds(ring, c);
    return n;
}

int gb_sock_pass(struct gb_sock *sock, int fd)
{
    struct gb_ring *ring = sock->ring;
    if (!ring || ring->nout == GB_RING_FDS) return 0;
    ring->outbox[ring->nout++] = fd;
    return 1;
}

int gb_sock_passed(struct gb_sock *sock)
{
    struct gb_ring *ring = sock->ring;
    if (!ring || ring->nin == 0) return -1;
    int fd = ring->inbox[0];
    memmove(ring->inbox, ring->inbox + 1, (size_t)--ring->nin * sizeof fd);
    return fd;
}

static ssize_t shm_read(struct gb_sock *sock, struct iovec *iov, int count)
{
    if (!sock->ring) return gb_stream_read(sock, iov, count);
    if (sock->ring->live) return gb_ring_read(sock->ring, sock->fd, iov, count);
    return read_socket(sock, iov, count);
}

static ssize_t shm_write(struct gb_sock *sock, const struct iovec *iov, int count)
{
    if (!sock->ring) return gb_stream_write(sock, iov, count);
    if (sock->ring->live) return gb_ring_write(sock->ring, sock->fd, iov, count);
    return write_socket(sock, iov, count);
}

int gb_sock_arm(struct gb_sock *sock, int want_room)
{
    return sock->ring && sock->ring->live ? gb_ring_arm(sock->ring, sock->fd, want_room) : 0;
}

static void shm_close(struct gb_sock *sock)
{
    gb_ring_free(sock->ring);
    sock->ring = NULL;
    gb_stream_close(sock);
}

#define GB_SHM_SLOTS                                                                                                   \
    .unlisten = shm_unlisten, .accept = shm_accept, .dial = shm_dial, .dialled = shm_dialled, .offer = shm_offer,      \
    .take = shm_take, .start = shm_start, .read = shm_read, .write = shm_write, .close = shm_close

const struct gb_transport gb_transport_shm = {.name = "shm", .listen = shm_listen, GB_SHM_SLOTS};
const struct gb_transport gb_transport_auto = {.name = "auto", .listen = auto_listen, GB_SHM_SLOTS};
