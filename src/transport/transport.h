/* SPDX-License-Identifier: Apache-2.0
 *
 * transport.h: contract of a transport, which makes and drives the byte streams (lanes) of links.  Handshake, framing,
 * matching and liveness are above it and shared.  Transports are the explicit array in net.c.
 *
 * No slot blocks.  `int` results are an enum gpubridge_status with its text set; read and write return bytes, 0 for the
 * end of the stream (read), or -errno.  A sock belongs to one thread at a time: control thread (control lane,
 * handshakes), engine role (express lane), one I/O worker (bulk lane).
 */
#ifndef GB_TRANSPORT_TRANSPORT_H
#define GB_TRANSPORT_TRANSPORT_H

#include "transport/net.h"
#include "wire/hello.h"

#include <sys/types.h>
#include <sys/uio.h>

struct gb_fault_lane;
struct gb_ring;

struct gb_sock {
    int fd; /* pollable; -1: none */
    struct gb_net *net;
    uint8_t kind, index;         /* enum gb_lane_kind; set by the handshake before data flows */
    uint8_t features;            /* enum gb_feature of both ends; the same */
    struct gb_ring *ring;        /* of a Unix socket: the memory beside it, or the place for it; else NULL */
    struct gb_fault_lane *fault; /* state of the fault wrapper, or NULL */
};

struct gb_transport {
    const char *name;
    /* Makes the net reachable: fills net->own (addresses), net->listener and net->local_listener (descriptors to poll,
     * or -1).  gb_net_open. */
    int (*listen)(struct gb_net *net);
    void (*unlisten)(struct gb_net *net); /* safe after a failed listen */
    /* Control thread.  Takes one waiting connection and names its other end: 0, or GPUBRIDGE_AGAIN when there is none;
     * another error (no descriptors) is worth a pause.
     */
    int (*accept)(struct gb_net *net, struct gb_sock *sock, char *where, size_t capacity);
    /* Control thread.  Starts a connection; it is made, or has failed, when the descriptor becomes writable. */
    int (*dial)(struct gb_net *net, const struct gb_uuid *uuid, const struct gb_endpoint *to, uint16_t port,
                struct gb_sock *sock);
    int (*dialled)(struct gb_sock *sock); /* 0 or -errno */
    /* Control thread, in a handshake; NULL: nothing to do.  offer: the acceptor has proved the secret, what else the
     * lane needs (shared memory) goes out with the next write.  take: the dialler has, what it offered is put to use.
     * start: the handshake is over. */
    int (*offer)(struct gb_sock *sock);
    int (*take)(struct gb_sock *sock);
    void (*start)(struct gb_sock *sock);
    ssize_t (*read)(struct gb_sock *sock, struct iovec *iov, int count);
    ssize_t (*write)(struct gb_sock *sock, const struct iovec *iov, int count);
    void (*close)(struct gb_sock *sock); /* sets fd to -1 */
};

extern const struct gb_transport gb_transport_tcp, gb_transport_inproc, gb_transport_shm, gb_transport_auto,
    gb_transport_fault;

/* Shared by transports whose lanes are stream sockets. */
ssize_t gb_stream_read(struct gb_sock *sock, struct iovec *iov, int count);
ssize_t gb_stream_write(struct gb_sock *sock, const struct iovec *iov, int count);
void gb_stream_close(struct gb_sock *sock);

/* Before the owner of a lane sleeps: lanes in shared memory want to be told (gb_ring_arm, with its result); sockets
 * need nothing and give 0. */
int gb_sock_arm(struct gb_sock *sock, int want_room);

#endif
