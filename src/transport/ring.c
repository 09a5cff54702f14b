/* SPDX-License-Identifier: Apache-2.0
 * See ring.h.  The writer publishes its position after the bytes, the reader after it took them.  An end that is about
 * to sleep says so and then looks once more; the other end moves its position and then looks whether somebody sleeps:
 * with both sequentially consistent, one of them sees the other. */
#include "transport/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define GB_PIECE (128u << 10) /* published piece by piece: the other end copies one while we copy the next */
#define GB_LOOKS 256u         /* a spinning reader looks at the socket this seldom */

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u
#endif

_Static_assert(sizeof(struct gb_ring_ctl) == 512, "the layout is part of the wire format");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "atomics work between processes");

struct gb_ring *gb_ring_new(void)
{
    struct gb_ring *ring = calloc(1, sizeof *ring);
    if (ring) ring->fd = -1;
    return ring;
}

void gb_ring_close_fd(struct gb_ring *ring)
{
    if (ring->fd >= 0) close(ring->fd);
    ring->fd = -1;
}

void gb_ring_free(struct gb_ring *ring)
{
    if (!ring) return;
    if (ring->map) munmap(ring->map, ring->map_bytes);
    gb_ring_close_fd(ring);
    for (int i = 0; i < ring->nin; i++) close(ring->inbox[i]);
    free(ring);
}

static int map(struct gb_ring *ring, uint32_t bytes, int maker)
{
    size_t all = GB_RING_PAGE + 2 * (size_t)bytes;
    void *at = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, 0);
    if (at == MAP_FAILED) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "cannot map shared memory: %s", strerror(errno));
    ring->map = at;
    ring->map_bytes = all;
    ring->bytes = bytes;
    for (int dir = 0; dir < 2; dir++) {
        struct gb_ring_side *side = dir == !maker ? &ring->out : &ring->in;
        side->ctl = (struct gb_ring_ctl *)(void *)(ring->map + (size_t)dir * (GB_RING_PAGE / 2));
        side->data = ring->map + GB_RING_PAGE + (size_t)dir * bytes;
    }
    return 0;
}

int gb_ring_make(struct gb_ring *ring, uint32_t bytes)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < GB_RING_PAGE + 2 * (rlim_t)bytes) /* else a signal */
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY,
                       "no %u KiB of shared memory: the limit of file sizes (ulimit -f) forbids it", (2 * bytes) >> 10);
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    ring->fd = memfd_create("gpubridge", flags | MFD_NOEXEC_SEAL);
    if (ring->fd < 0 && errno == EINVAL) ring->fd = memfd_create("gpubridge", flags); /* before Linux 6.3 */
    if (ring->fd < 0) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no shared memory: memfd_create: %s", strerror(errno));
    /* Taken now: memory that is missing later would be a SIGBUS. */
    if (fallocate(ring->fd, 0, 0, (off_t)GB_RING_PAGE + 2 * (off_t)bytes) != 0 ||
        fcntl(ring->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no %u KiB of shared memory: %s", (2 * bytes) >> 10, strerror(errno));
    return map(ring, bytes, 1);
}

int gb_ring_map(struct gb_ring *ring)
{
    const int needed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    struct stat st;
    struct statfs fs;
    if (ring->fd < 0)
        return GB_FAIL(GPUBRIDGE_ERR_REFUSED, "no descriptor of shared memory came (too many open files?)");
    int seals = fcntl(ring->fd, F_GET_SEALS);
    if (seals < 0 || (seals & needed) != needed || fstat(ring->fd, &st) != 0 || fstatfs(ring->fd, &fs) != 0 ||
        fs.f_type != TMPFS_MAGIC)
        return GB_FAIL(GPUBRIDGE_ERR_REFUSED, "the descriptor that came is not sealed shared memory");
    uint64_t bytes = st.st_size > (off_t)GB_RING_PAGE ? (uint64_t)(st.st_size - GB_RING_PAGE) / 2 : 0;
    if (bytes < GB_RING_MIN || bytes > GB_RING_MAX || (bytes & (bytes - 1)) ||
        (uint64_t)st.st_size != GB_RING_PAGE + 2 * bytes || (uint64_t)st.st_blocks * 512 < (uint64_t)st.st_size)
        return GB_FAIL(GPUBRIDGE_ERR_REFUSED, "the shared memory that came has an impossible size of %lld bytes",
                       (long long)st.st_size);
    return map(ring, (uint32_t)bytes, 0);
}

/* Wakes the other end.  A full socket has its wake-up already; a broken one is told by reading. */
static void ring_bell(int sock)
{
    (void)!send(sock, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Takes the bells off the socket and learns of its end. */
static void look(struct gb_ring *ring, int sock)
{
    char bells[256];
    ssize_t n;
    ring->idle = 0;
    while (!ring->ended && !ring->error) {
        n = recv(sock, bells, sizeof bells, MSG_DONTWAIT);
        if (n == (ssize_t)sizeof bells || (n < 0 && errno == EINTR)) continue;
        if (n == 0) ring->ended = 1;
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) ring->error = errno;
        return;
    }
}

/* What the reader has before it, or the writer's room; more than the ring holds is a lie. */
static int64_t readable(struct gb_ring *ring)
{
    uint64_t n = atomic_load_explicit(&ring->in.ctl->head, memory_order_seq_cst) - ring->in.pos;
    if (n > ring->bytes) ring->error = EBADMSG;
    return ring->error == EBADMSG ? -1 : (int64_t)n;
}

static int64_t writable(struct gb_ring *ring)
{
    uint64_t n = ring->out.pos - atomic_load_explicit(&ring->out.ctl->tail, memory_order_seq_cst);
    if (n > ring->bytes) ring->error = EBADMSG;
    return ring->error == EBADMSG ? -1 : (int64_t)(ring->bytes - n);
}

static void disarm(struct gb_ring_side *side, _Atomic uint32_t *waits)
{
    if (!side->armed) return;
    side->armed = 0;
    atomic_store_explicit(waits, 0, memory_order_relaxed);
}

/* Copies between the ring at `pos` and up to `max` bytes of iov[*i] from *off on; stops at the end of either. */
static uint32_t copy(const struct gb_ring *ring, const struct gb_ring_side *side, const struct iovec *iov, size_t off,
                     uint64_t max, int out)
{
    uint64_t at = side->pos & (ring->bytes - 1), n = iov->iov_len - off;
    if (n > max) n = max;
    if (n > ring->bytes - at) n = ring->bytes - at;
    if (n > GB_PIECE) n = GB_PIECE;
    uint8_t *mine = (uint8_t *)iov->iov_base + off;
    if (out)
        memcpy(side->data + at, mine, (size_t)n);
    else
        memcpy(mine, side->data + at, (size_t)n);
    return (uint32_t)n;
}

ssize_t gb_ring_write(struct gb_ring *ring, int sock, const struct iovec *iov, int count)
{
    struct gb_ring_side *out = &ring->out;
    uint64_t done = 0, fresh = 0;
    size_t off = 0;
    disarm(out, &out->ctl->writer_waits);
    int64_t room = writable(ring);
    for (int i = 0; i < count && room > 0;) {
        uint32_t n = copy(ring, out, &iov[i], off, (uint64_t)room, 1);
        out->pos += n;
        done += n;
        fresh += n;
        off += n;
        room -= n;
        if (off == iov[i].iov_len) i++, off = 0;
        if (room > 0 && i < count && fresh < GB_PIECE) continue;
        atomic_store_explicit(&out->ctl->head, out->pos, memory_order_seq_cst);
        if (atomic_load_explicit(&out->ctl->reader_waits, memory_order_seq_cst) &&
            atomic_exchange(&out->ctl->reader_waits, 0))
            ring_bell(sock);
        fresh = 0;
        if (room == 0) room = writable(ring);
    }
    if (ring->error) return -ring->error;
    return done ? (ssize_t)done : -EAGAIN;
}

ssize_t gb_ring_read(struct gb_ring *ring, int sock, struct iovec *iov, int count)
{
    struct gb_ring_side *in = &ring->in;
    uint64_t done = 0;
    size_t off = 0;
    disarm(in, &in->ctl->reader_waits);
    int was_ended = ring->ended;
    int64_t left = readable(ring);
    for (int i = 0; i < count && left > 0;) {
        uint32_t n = copy(ring, in, &iov[i], off, (uint64_t)left, 0);
        in->pos += n;
        done += n;
        off += n;
        left -= n;
        if (off == iov[i].iov_len) i++, off = 0;
        if (left == 0) left = readable(ring);
        atomic_store_explicit(&in->ctl->tail, in->pos, memory_order_seq_cst);
        /* A writer that waits has a full ring; half of it at once is worth waking it for. */
        if ((uint64_t)left <= ring->bytes / 2 && atomic_load_explicit(&in->ctl->writer_waits, memory_order_seq_cst) &&
            atomic_exchange(&in->ctl->writer_waits, 0))
            ring_bell(sock);
    }
    if (done) {
        ring->idle = 0;
        return (ssize_t)done;
    }
    if (left < 0) return -EBADMSG;
    if (was_ended) return 0;
    if (ring->error) return -ring->error;
    if (++ring->idle >= GB_LOOKS) look(ring, sock);
    return -EAGAIN;
}

int gb_ring_arm(struct gb_ring *ring, int sock, int want_room)
{
    atomic_store_explicit(&ring->in.ctl->reader_waits, 1, memory_order_seq_cst);
    ring->in.armed = 1;
    if (want_room) {
        atomic_store_explicit(&ring->out.ctl->writer_waits, 1, memory_order_seq_cst);
        ring->out.armed = 1;
    }
    look(ring, sock); /* bells that are left would end the sleep at once */
    /* The bell of the other end may have been among them: it took our word first, and will not ring again.  It rings
     * for what it knows of (an older word of ours, less room than half), so there need be nothing to do: then come
     * again. */
    int told = !atomic_load_explicit(&ring->in.ctl->reader_waits, memory_order_seq_cst);
    int what = told || readable(ring) != 0 || ring->ended || ring->error ? GB_RING_READABLE : 0;
    if (!want_room) return what;
    told = !atomic_load_explicit(&ring->out.ctl->writer_waits, memory_order_seq_cst);
    if (told || writable(ring) >= (int64_t)(ring->bytes / 2)) what |= GB_RING_WRITABLE;
    return what;
}
