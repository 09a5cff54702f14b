/* SPDX-License-Identifier: Apache-2.0
 * TCP: one listener per process for both address families, lanes as sockets.  Each socket is used by the thread that
 * owns its lane (transport.h). */
#include "transport/net_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- stream sockets, shared with inproc ---- */

ssize_t gb_stream_read(struct gb_sock *sock, struct iovec *iov, int count)
{
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)count};
    ssize_t n;
    do n = recvmsg(sock->fd, &msg, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

ssize_t gb_stream_write(struct gb_sock *sock, const struct iovec *iov, int count)
{
    struct msghdr msg = {.msg_iov = (struct iovec *)(uintptr_t)iov, .msg_iovlen = (size_t)count};
    ssize_t n;
    do n = sendmsg(sock->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n >= 0) return n;
    return errno == ENOBUFS || errno == ENOMEM ? -EAGAIN : -errno;
}

void gb_stream_close(struct gb_sock *sock)
{
    if (sock->fd >= 0) close(sock->fd);
    sock->fd = -1;
}

/* ---- listener ---- */

static socklen_t any_address(int family, uint16_t port, struct sockaddr_storage *ss)
{
    memset(ss, 0, sizeof *ss);
    if (family == AF_INET6) {
        struct sockaddr_in6 *a = (struct sockaddr_in6 *)ss;
        a->sin6_family = AF_INET6;
        a->sin6_port = htons(port);
        a->sin6_addr = in6addr_any;
        return sizeof *a;
    }
    struct sockaddr_in *a = (struct sockaddr_in *)ss;
    a->sin_family = AF_INET;
    a->sin_port = htons(port);
    a->sin_addr.s_addr = htonl(INADDR_ANY);
    return sizeof *a;
}

/* A listening descriptor, or -errno. */
static int try_port(int family, uint16_t port)
{
    struct sockaddr_storage ss;
    socklen_t len = any_address(family, port, &ss);
    int one = 1, zero = 0, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one); /* ports in TIME_WAIT are free */
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (bind(fd, (struct sockaddr *)&ss, len) == 0 && listen(fd, 1024) == 0) return fd;
    int rc = -errno;
    close(fd);
    return rc;
}

static int tcp_listen(struct gb_net *net)
{
    GB_TRY(gb_addr_choose(net));
    uint32_t low = net->port_low, high = net->port_high ? net->port_high : net->port_low;
    if (low > high)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_PORT_RANGE=%u-%u: the first port is the larger", low, high);
    int fd = -EADDRINUSE, family = AF_INET6;
    for (uint32_t port = low; fd < 0 && port <= high; port++) {
        fd = try_port(family, (uint16_t)port);
        if (fd == -EAFNOSUPPORT || fd == -EADDRNOTAVAIL) fd = try_port(family = AF_INET, (uint16_t)port);
        if (fd < 0 && fd != -EADDRINUSE && fd != -EACCES) break;
    }
    if (fd < 0 && low)
        return GB_FAIL(
            GPUBRIDGE_ERR_SETTING,
            "GPUBRIDGE_PORT_RANGE=%u-%u: no port of it can be opened on this host (%s); every process needs one "
            "port of its own",
            low, high, strerror(-fd));
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "no listening socket: %s", strerror(-fd));
    struct sockaddr_storage ss = {0};
    socklen_t len = sizeof ss;
    if (getsockname(fd, (struct sockaddr *)&ss, &len) != 0) {
        close(fd);
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "the listening socket has no name: errno %d", errno);
    }
    net->own.port = ntohs(ss.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&ss)->sin6_port
                                                   : ((struct sockaddr_in *)&ss)->sin_port);
    net->listener = fd;
    return 0;
}

static void tcp_unlisten(struct gb_net *net)
{
    if (net->listener >= 0) close(net->listener);
    net->listener = -1;
}

/* ---- connections ---- */

static void tune(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* Buffer sizes are left to the kernel: setting them would end its autotuning. */
}

static int tcp_accept(struct gb_net *net, struct gb_sock *sock, char *where, size_t capacity)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } from;
    memset(&from, 0, sizeof from);
    socklen_t len = sizeof from;
    int fd;
    do fd = accept4(net->listener, &from.any, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
    if (fd < 0 && errno == EAGAIN) return GPUBRIDGE_AGAIN;
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "cannot accept a connection: %s", strerror(errno));
    tune(fd);
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    struct gb_endpoint e = {.family = 4};
    uint16_t port = from.v6.sin6_port; /* at the same place in both */
    if (from.any.sa_family == AF_INET) {
        memcpy(e.addr, &from.v4.sin_addr, 4);
    } else if (memcmp(&from.v6.sin6_addr, mapped, sizeof mapped) == 0) {
        memcpy(e.addr, (const uint8_t *)&from.v6.sin6_addr + 12, 4);
    } else {
        e.family = 6;
        memcpy(e.addr, &from.v6.sin6_addr, 16);
    }
    gb_endpoint_text(&e, ntohs(port), where, capacity);
    sock->fd = fd;
    return 0;
}

static int tcp_dial(struct gb_net *net, const struct gb_uuid *uuid, const struct gb_endpoint *to, uint16_t port,
                    struct gb_sock *sock)
{
    (void)net, (void)uuid;
    struct sockaddr_storage ss;
    int family = to->family == 6 ? AF_INET6 : AF_INET;
    socklen_t len = any_address(family, port, &ss);
    if (family == AF_INET6)
        memcpy(&((struct sockaddr_in6 *)&ss)->sin6_addr, to->addr, 16);
    else
        memcpy(&((struct sockaddr_in *)&ss)->sin_addr, to->addr, 4);
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE, "%s", strerror(errno));
    tune(fd);
    int rc;
    do rc = connect(fd, (struct sockaddr *)&ss, len);
    while (rc < 0 && errno == EINTR);
    if (rc < 0 && errno != EINPROGRESS) {
        rc = GB_FAIL(GPUBRIDGE_ERR_UNREACHABLE, "%s", strerror(errno));
        close(fd);
        return rc;
    }
    sock->fd = fd;
    return 0;
}

static int tcp_dialled(struct gb_sock *sock)
{
    int error = 0;
    socklen_t len = sizeof error;
    if (getsockopt(sock->fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0) return -errno;
    return -error;
}

const struct gb_transport gb_transport_tcp = {
    .name = "tcp",
    .listen = tcp_listen,
    .unlisten = tcp_unlisten,
    .accept = tcp_accept,
    .dial = tcp_dial,
    .dialled = tcp_dialled,
    .read = gb_stream_read,
    .write = gb_stream_write,
    .close = gb_stream_close,
};
