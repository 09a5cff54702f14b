/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.h: two byte streams, one each way, through memory that two processes share (docs/wire-format.md section 9), with
 * a Unix socket beside them that wakes a sleeping end and tells when the other end is gone.  Not framing, not
 * admission: those are above.  A ring belongs to the thread that owns its sock.
 *
 * The other process is not trusted.  Positions that it writes are checked before use, its own position is kept outside
 * the shared memory, and the memory is sealed so that it cannot shrink under a reader; bytes may change while they are
 * read, so whoever parses them works on a copy.
 */
#ifndef GB_TRANSPORT_RING_H
#define GB_TRANSPORT_RING_H

#include "base/err.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define GB_RING_LIE  "positions in shared memory that cannot be" /* what -EBADMSG means */
#define GB_RING_PAGE 4096u
#define GB_RING_MIN  4096u
#define GB_RING_MAX  (16u << 20)
#define GB_RING_FDS  8 /* on the way at a time */

/* One direction; at offset 0 (from the maker) and 2048 (to it) of the shared memory. */
struct gb_ring_ctl {
    _Atomic uint64_t head; /* bytes written so far; by the writer */
    uint8_t pad0[120];
    _Atomic uint64_t tail; /* bytes read so far; by the reader */
    uint8_t pad1[120];
    _Atomic uint32_t reader_waits; /* wants a byte on the socket when there is something to read */
    uint8_t pad2[124];
    _Atomic uint32_t writer_waits; /* the same for room */
    uint8_t pad3[124];
};

struct gb_ring_side {
    struct gb_ring_ctl *ctl;
    uint8_t *data;
    uint64_t pos; /* ours: where we read or write; never taken from the shared memory */
    int armed;
};

struct gb_ring {
    int fd; /* of the memory: to be handed over (maker), or as it came (the other end); -1: none */
    uint8_t *map;
    size_t map_bytes;
    uint32_t bytes; /* of one direction; a power of two */
    struct gb_ring_side in, out;
    int sent;      /* the descriptor went out */
    int live;      /* bytes go through the memory; before, through the socket */
    int ended;     /* the socket ended */
    int error;     /* errno of the socket, or EBADMSG: impossible positions; 0: fine */
    unsigned idle; /* fruitless reads since the socket was looked at */
    /* Control lane: descriptors that go with the next bytes, and that came and were not asked for yet. */
    int takes; /* the handshake is over */
    int outbox[GB_RING_FDS], inbox[GB_RING_FDS];
    int nout, nin;
};

struct gb_ring *gb_ring_new(void); /* without memory yet; NULL: no memory for it either */
void gb_ring_free(struct gb_ring *ring);
/* Makes the memory, `bytes` each way; ring->fd is what the other end needs. */
int gb_ring_make(struct gb_ring *ring, uint32_t bytes) GB_NODISCARD;
/* Maps what came as ring->fd, once it is sure that it is such memory, complete and sealed. */
int gb_ring_map(struct gb_ring *ring) GB_NODISCARD;
void gb_ring_close_fd(struct gb_ring *ring);

/* As the slots of a transport (transport.h); `sock` is the socket beside the ring. */
ssize_t gb_ring_read(struct gb_ring *ring, int sock, struct iovec *iov, int count);
ssize_t gb_ring_write(struct gb_ring *ring, int sock, const struct iovec *iov, int count);
/* Before its owner sleeps on the socket: from now on the other end wakes us.  Returns whether there may be something to
 * do already: to read (also the end), or, with `want_room`, to write; then try, and arm again before sleeping. */
enum { GB_RING_READABLE = 1, GB_RING_WRITABLE = 2 };
int gb_ring_arm(struct gb_ring *ring, int sock, int want_room);

#endif
