/* SPDX-License-Identifier: Apache-2.0
 * Shared memory between processes: rings by themselves, peers that lie in the memory they share, memory that is not
 * what it should be, and every reason to go back to tcp or to refuse. */
#include "net_rig.h"

#include "base/clock.h"
#include "base/log.h"
#include "transport/net_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static const struct rig_options shm = {.transport = "shm", .lanes = 2, .ifname = "lo", .connect_timeout_ms = 20000};
static const struct rig_options either = {.transport = "auto", .lanes = 2, .ifname = "lo", .connect_timeout_ms = 20000};

/* ---- what was logged ---- */

static char logged[4096];
static void keep_line(void *arg, int level, const char *line)
{
    (void)arg, (void)level;
    size_t n = strlen(logged);
    snprintf(logged + n, sizeof logged - n, "%s\n", line);
}

static int keep_log(void **state)
{
    (void)state;
    logged[0] = 0;
    gb_log_set_sink(keep_line, NULL);
    return 0;
}

static int times_logged(const char *words)
{
    int n = 0;
    for (const char *at = logged; (at = strstr(at, words)) != NULL; at++) n++;
    return n;
}

/* ---- rings ---- */

struct pair {
    struct gb_ring *ring[2];
    int sock[2];
};

static void pair_open(struct pair *p, uint32_t bytes)
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p->sock), 0);
    for (int i = 0; i < 2; i++) assert_non_null(p->ring[i] = gb_ring_new());
    assert_int_equal(gb_ring_make(p->ring[0], bytes), 0);
    p->ring[1]->fd = dup(p->ring[0]->fd);
    assert_int_equal(gb_ring_map(p->ring[1]), 0);
    assert_int_equal(p->ring[1]->bytes, bytes);
}

static void pair_close(struct pair *p)
{
    for (int i = 0; i < 2; i++) {
        gb_ring_free(p->ring[i]);
        close(p->sock[i]);
    }
}

/* Pieces of every size through a ring of 4 KiB, both ways: nothing lost, nothing changed, never more than fits. */
static void test_ring_stream(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p, 4096);
    enum { ALL = 200000 };
    static uint8_t out[2][ALL], in[2][ALL];
    size_t sent[2] = {0}, got[2] = {0};
    for (int i = 0; i < 2; i++) rig_fill(out[i], ALL, (uint64_t)i);
    uint64_t dice = 1;
    while (got[0] < ALL || got[1] < ALL) {
        for (int i = 0; i < 2; i++) {
            dice = dice * 6364136223846793005u + 1442695040888963407u;
            size_t a = dice >> 51, b = dice >> 40 & 63;
            if (a > ALL - sent[i]) a = ALL - sent[i];
            if (b > a) b = a;
            struct iovec w[2] = {{out[i] + sent[i], b}, {out[i] + sent[i] + b, a - b}};
            ssize_t n = a ? gb_ring_write(p.ring[i], p.sock[i], w, 2) : 0;
            assert_true(n == -EAGAIN || (n >= 0 && n <= (ssize_t)a));
            if (n > 0) sent[i] += (size_t)n;
            assert_true(sent[i] - got[!i] <= 4096);
            struct iovec r = {in[i] + got[i], (dice >> 33 & 8191) + 1};
            if (r.iov_len > ALL - got[i]) r.iov_len = ALL - got[i];
            n = r.iov_len ? gb_ring_read(p.ring[i], p.sock[i], &r, 1) : 0;
            assert_true(n == -EAGAIN || n >= 0);
            if (n > 0) got[i] += (size_t)n;
        }
    }
    for (int i = 0; i < 2; i++) assert_memory_equal(in[i], out[!i], ALL);
    pair_close(&p);
}

static int rings(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0);
}

/* Who sleeps is woken once; who does not is left alone; the end comes after the bytes. */
static void test_ring_bells(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p, 4096);
    static uint8_t buf[4096];
    struct iovec one = {buf, 1}, all = {buf, sizeof buf};
    assert_int_equal(gb_ring_write(p.ring[0], p.sock[0], &one, 1), 1);
    assert_int_equal(rings(p.sock[1]), 0);
    assert_int_equal(gb_ring_arm(p.ring[1], p.sock[1], 0), GB_RING_READABLE);
    assert_int_equal(gb_ring_read(p.ring[1], p.sock[1], &one, 1), 1);
    assert_int_equal(gb_ring_arm(p.ring[1], p.sock[1], 0), 0);
    for (int i = 0; i < 3; i++) assert_int_equal(gb_ring_write(p.ring[0], p.sock[0], &one, 1), 1);
    char bells[8];
    assert_int_equal(recv(p.sock[1], bells, sizeof bells, MSG_DONTWAIT), 1);
    /* Room: the writer hears of it when half is free. */
    assert_int_equal(gb_ring_write(p.ring[0], p.sock[0], &all, 1), 4093);
    assert_int_equal(gb_ring_write(p.ring[0], p.sock[0], &all, 1), -EAGAIN);
    assert_int_equal(gb_ring_arm(p.ring[0], p.sock[0], 1), 0);
    struct iovec half = {buf, 2047};
    assert_int_equal(gb_ring_read(p.ring[1], p.sock[1], &half, 1), 2047);
    assert_int_equal(rings(p.sock[0]), 0);
    assert_int_equal(gb_ring_read(p.ring[1], p.sock[1], &one, 1), 1);
    assert_int_equal(rings(p.sock[0]), 1);
    assert_int_equal(gb_ring_arm(p.ring[0], p.sock[0], 1), GB_RING_WRITABLE);
    /* The end. */
    shutdown(p.sock[0], SHUT_WR);
    assert_int_equal(gb_ring_arm(p.ring[1], p.sock[1], 0), GB_RING_READABLE);
    assert_int_equal(gb_ring_read(p.ring[1], p.sock[1], &all, 1), 2048);
    assert_int_equal(gb_ring_read(p.ring[1], p.sock[1], &all, 1), 0);
    /* A reader that only spins sees it too. */
    shutdown(p.sock[1], SHUT_WR);
    ssize_t n = -EAGAIN;
    for (int i = 0; i < 1000 && n == -EAGAIN; i++) n = gb_ring_read(p.ring[0], p.sock[0], &all, 1);
    assert_int_equal(n, 0);
    pair_close(&p);
}

/* Whatever the other end writes where positions stand, nothing outside the ring is touched. */
static void test_ring_lies(void **state)
{
    (void)state;
    static const uint64_t lies[] = {4097, 8192, UINT64_MAX, UINT64_MAX / 2, 1ull << 40, UINT64_MAX - 4096};
    static uint8_t buf[10000];
    struct iovec all = {buf, sizeof buf};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct pair p;
        pair_open(&p, 4096);
        atomic_store(&p.ring[1]->out.ctl->head, lies[i]);
        assert_int_equal(gb_ring_read(p.ring[0], p.sock[0], &all, 1), -EBADMSG);
        assert_int_equal(gb_ring_arm(p.ring[0], p.sock[0], 0), GB_RING_READABLE);
        assert_int_equal(gb_ring_read(p.ring[0], p.sock[0], &all, 1), -EBADMSG);
        pair_close(&p);
        pair_open(&p, 4096);
        atomic_store(&p.ring[1]->in.ctl->tail, (uint64_t)0 - lies[i]);
        assert_int_equal(gb_ring_write(p.ring[0], p.sock[0], &all, 1), -EBADMSG);
        assert_int_equal(gb_ring_read(p.ring[0], p.sock[0], &all, 1), -EBADMSG);
        pair_close(&p);
    }
    /* A tail that jumps back and forth within what is possible costs the liar its own bytes only. */
    struct pair p;
    pair_open(&p, 4096);
    for (int i = 0; i < 100; i++) {
        ssize_t n = gb_ring_write(p.ring[0], p.sock[0], &all, 1);
        assert_true(n == -EAGAIN || (n > 0 && n <= 4096) || n == -EBADMSG);
        atomic_store(&p.ring[1]->in.ctl->tail, p.ring[0]->out.pos - (uint64_t)(i * 977 % 4097));
    }
    pair_close(&p);
}

static void refuse(int fd, const char *words)
{
    struct gb_ring *ring = gb_ring_new();
    assert_non_null(ring);
    ring->fd = fd;
    assert_int_not_equal(gb_ring_map(ring), 0);
    if (!strstr(gb_err_text(), words)) print_error("%s\n", gb_err_text());
    assert_non_null(strstr(gb_err_text(), words));
    assert_null(ring->map);
    gb_ring_free(ring);
}

static int memory(off_t bytes, int allocate, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(allocate ? fallocate(fd, 0, 0, bytes) : ftruncate(fd, bytes), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

/* Only sealed, complete memory of a possible size is mapped: anything else could be pulled away under the reader. */
static void test_foreign_memory(void **state)
{
    (void)state;
    enum { GOOD = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
    int fd[2];
    refuse(-1, "no descriptor");
    assert_int_equal(pipe2(fd, O_CLOEXEC), 0);
    close(fd[1]);
    refuse(fd[0], "not sealed shared memory");
    refuse(open("/dev/zero", O_RDWR | O_CLOEXEC), "not sealed shared memory");
    refuse(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), "not sealed shared memory");
    refuse(memory(4096 + 2 * 4096, 1, 0), "not sealed shared memory");
    refuse(memory(4096 + 2 * 4096, 1, F_SEAL_GROW | F_SEAL_SEAL), "not sealed shared memory");
    refuse(memory(4096 + 2 * 4096, 0, GOOD), "impossible size"); /* holes: no memory when it is touched */
    static const off_t sizes[] = {0, 1, 4096, 4096 + 2 * 2048, 4096 + 2 * 5000, 4096 + 8192 + 1, 4096 + (64 << 20)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        refuse(memory(sizes[i], sizes[i] > 0, GOOD), "impossible size");
    refuse(memory(4096 + 2 * 4096, 1, GOOD | F_SEAL_WRITE), "cannot map");
    struct gb_ring *ring = gb_ring_new();
    assert_non_null(ring);
    ring->fd = memory(4096 + 2 * 4096, 1, GOOD);
    assert_int_equal(gb_ring_map(ring), 0);
    gb_ring_free(ring);
}

/* ---- links ---- */

static void expect_describe(struct rig *rig, const char *name)
{
    char text[200];
    for (int i = 0; i < 2; i++) {
        if (!rig->net[i].to[!i]) continue;
        gb_link_describe(rig->net[i].to[!i], text, sizeof text);
        if (strncmp(text, name, strlen(name)) != 0) print_error("%s, want %s\n", text, name);
        assert_int_equal(strncmp(text, name, strlen(name)), 0);
    }
}

static void exchange_some(struct rig *rig)
{
    static uint8_t a[2][300000], b[2][300000];
    static const uint64_t sizes[] = {0, 8, 8192, 300000};
    static uint32_t seq;
    for (int k = 0; k < 4; k++) {
        struct rig_op s[2] = {0}, r[2] = {0};
        seq++;
        for (int i = 0; i < 2; i++) {
            rig_fill(a[i], sizes[k], seq + (uint32_t)i);
            rig_send(rig, i, !i, rig_key(77, seq, 0), a[i], sizes[k], &s[i]);
            rig_recv(rig, i, !i, rig_key(77, seq, 0), b[i], sizes[k], &r[i]);
        }
        for (int i = 0; i < 2; i++) {
            rig_until(rig, &r[i].done, 1, 20000);
            rig_until(rig, &s[i].done, 1, 20000);
            assert_int_equal(r[i].status, 0);
            assert_true(rig_check(b[i], sizes[k], seq + (uint32_t)!i));
        }
    }
}

static int count_maps(void)
{
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "re");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) n += strstr(line, "memfd:gpubridge") != NULL;
    fclose(f);
    return n;
}

/* What a link is made of, and that nothing of it stays: no port at all, no name, no mapping, no descriptor. */
static void test_link(void **state)
{
    (void)state;
    struct rig rig;
    int before = rig_count_fds(0);
    rig_open(&rig, 2, &shm);
    assert_true(rig_count_fds(before <= 3) > before);
    expect_describe(&rig, "shm 2 lanes shared memory");
    char text[200];
    gb_net_describe(rig.net[0].net, text, sizeof text);
    assert_int_equal(strncmp(text, "shm, reachable at shared memory", 31), 0);
    for (int i = 0; i < 2; i++) {
        struct gb_link *link = rig.net[i].to[!i];
        assert_int_equal(rig.net[i].net->listener, -1);
        assert_null(link->control.ring->map); /* death is seen on a socket of its own */
        assert_non_null(link->express.ring->map);
        for (int k = 0; k < 2; k++) assert_non_null(link->lane[k].sock.ring->map);
    }
    assert_int_equal(count_maps(), 2 * 3);
    exchange_some(&rig);
    rig_close(&rig);
    assert_int_equal(count_maps(), 0);
    assert_int_equal(rig_count_fds(0), before);
    assert_string_equal(logged, "");
}

static void test_auto_prefers(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &either);
    expect_describe(&rig, "shm 2 lanes");
    assert_true(rig.net[0].net->own.port != 0); /* and tcp for others */
    exchange_some(&rig);
    rig_close(&rig);
    assert_string_equal(logged, "");
}

/* A peer that writes nonsense into the shared memory of any lane loses the link, and nothing else happens. */
static void lie_once(int express, int tail)
{
    struct rig rig;
    rig_open(&rig, 2, &shm);
    exchange_some(&rig);
    struct gb_link *liar = rig.net[1].to[0];
    struct gb_ring *ring = express ? liar->express.ring : liar->lane[1].sock.ring;
    static uint8_t out[4][100000], in[4][100000];
    static struct rig_op s[4], r[4];
    memset(s, 0, sizeof s);
    memset(r, 0, sizeof r);
    if (tail) { /* found by the writer: messages on every lane */
        atomic_fetch_add(&ring->in.ctl->tail, 1ull << 33);
        for (uint32_t i = 0; i < 4; i++) {
            rig_recv(&rig, 1, 0, rig_key(5, i, 0), in[i], sizeof in[i], &r[i]);
            rig_send(&rig, 0, 1, rig_key(5, i, 0), out[i], sizeof out[i], &s[i]);
        }
    } else {
        atomic_fetch_add(&ring->out.ctl->head, 1ull << 33);
        assert_int_equal(send(express ? liar->express.fd : liar->lane[1].sock.fd, "", 1, MSG_NOSIGNAL), 1);
    }
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 20000);
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_CHECKSUM);
    assert_non_null(strstr(rig.net[0].text, "rank 1 (host-b)"));
    assert_non_null(strstr(rig.net[0].text, GB_RING_LIE));
    rig_close(&rig);
}

static void test_lying_peer(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) lie_once(i & 1, i >> 1);
}

/* Garbage where frames stand, in every lane and at every moment: the checks of frames hold, on a copy of them. */
static void test_garbage(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct rig rig;
        rig_open(&rig, 2, &shm);
        exchange_some(&rig);
        struct gb_link *liar = rig.net[1].to[0];
        struct gb_ring *ring = i ? liar->lane[i - 1].sock.ring : liar->express.ring;
        struct gb_ring_ctl *ctl = ring->out.ctl;
        uint64_t head = atomic_load(&ctl->head);
        for (uint64_t at = head; at < head + 3000; at++)
            ring->out.data[at & (ring->bytes - 1)] = (uint8_t)(at * 37 + (uint64_t)i);
        atomic_store(&ctl->head, head + 3000);
        assert_int_equal(send(i ? liar->lane[i - 1].sock.fd : liar->express.fd, "", 1, MSG_NOSIGNAL), 1);
        rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 20000);
        assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_CHECKSUM);
        rig_close(&rig);
    }
}

static void test_killed(void **state)
{
    (void)state;
    rig_death(&shm, SIGKILL, "rank 1 (host-b) closed its connection without a goodbye", 1000);
    assert_int_equal(count_maps(), 0);
}

static void test_stopped(void **state)
{
    (void)state;
    rig_death(&shm, SIGSTOP, "rank 1 (host-b) silent for", 3000);
}

/* ---- who may not in ---- */

static int raw_connect(const struct gb_uuid *uuid)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "gpubridge-");
    for (int i = 0; i < 16; i++)
        n += snprintf(a.sun_path + 1 + n, sizeof a.sun_path - 1 - (size_t)n, "%02x", uuid->byte[i]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 ||
        connect(fd, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1) + (socklen_t)n) != 0)
        return -1;
    return fd;
}

/* Bytes until the end of the stream; -1: it stays open. */
static ssize_t read_to_end(int fd)
{
    char buf[4096];
    ssize_t all = 0;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    while (poll(&p, 1, 5000) > 0) {
        ssize_t n = read(fd, buf, sizeof buf);
        if (n <= 0) return all;
        all += n;
    }
    return -1;
}

static void test_strangers(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &either), 0);
    int fd = raw_connect(&rig.net[1].uuid);
    assert_true(fd >= 0);
    assert_int_equal(send(fd, "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL), 18);
    assert_int_equal(read_to_end(fd), 0);
    close(fd);
    /* The right names without the secret, and memory that is never looked at. */
    struct gb_hello h = {.kind = GB_HS_HELLO, .version = GB_PROTOCOL_VERSION, .lane_kind = GB_LANE_BULK, .lanes = 1};
    uint8_t raw[GB_HELLO_BYTES], proof[GB_PROOF_BYTES], mac[GB_MAC_BYTES] = {0};
    memcpy(h.to, rig.net[1].uuid.byte, 16);
    memcpy(h.from, rig.net[0].uuid.byte, 16);
    gb_hello_pack(&h, raw);
    gb_proof_pack(mac, proof);
    int before = rig_count_fds(0);
    fd = raw_connect(&rig.net[1].uuid);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, raw, sizeof raw), sizeof raw);
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } space = {.bytes = {0}};
    struct iovec iov = {proof, sizeof proof};
    struct msghdr msg = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = space.bytes, .msg_controllen = sizeof space.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    int zero = open("/dev/zero", O_RDWR | O_CLOEXEC);
    memcpy(CMSG_DATA(c), &zero, sizeof zero);
    assert_int_equal(sendmsg(fd, &msg, 0), sizeof proof);
    close(zero);
    assert_int_equal(read_to_end(fd), GB_CHALLENGE_BYTES);
    close(fd);
    assert_int_equal(rig_count_fds(0), before);
    rig_link(&rig, 0, 1);
    for (int i = 0; i < 2; i++) rig_until(&rig, &rig.net[i].seen[GB_NET_LINK_UP], 1, 20000);
    expect_describe(&rig, "shm");
    rig_close(&rig);
}

/* Another user is cut off before a word. */
static void test_other_user(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        print_message("needs root to become another user\n");
        skip();
    }
    struct rig rig = {.nets = 1};
    pid_t pid;
    int go[2], status;
    (void)rig_uuid(0);
    assert_int_equal(pipe2(go, O_CLOEXEC), 0);
    assert_true((pid = fork()) >= 0);
    if (pid == 0) {
        struct gb_uuid uuid = rig_uuid(0);
        char c;
        close(go[1]);
        if (setgid(65534) || setuid(65534) || read(go[0], &c, 1) != 1) _exit(3);
        int fd = raw_connect(&uuid);
        if (fd < 0) _exit(4);
        uint8_t half[8] = "GPUBRDG\n"; /* a good beginning, which would be waited for */
        if (send(fd, half, sizeof half, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET) _exit(5);
        _exit(read_to_end(fd) == 0 ? 0 : 6);
    }
    assert_int_equal(rig_open_net(&rig, 0, &shm), 0);
    assert_int_equal(write(go[1], "g", 1), 1);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(go[0]);
    close(go[1]);
    rig_close(&rig);
}

static void test_wrong_secret(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    struct rig_options o = shm;
    o.other_secret = "not the secret of the job";
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &o), 0);
    rig_link(&rig, 0, 1);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 2000);
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_REFUSED);
    assert_non_null(strstr(rig.net[0].text, "did not prove the job's secret"));
    rig_close(&rig);
}

/* ---- where it cannot be ---- */

static void other_namespace(struct rig *rig, struct gb_address_info *a)
{
    (void)rig;
    a->host_id[3] ^= 1;
    for (int i = 0; i < a->count; i++) a->endpoint[i].flags &= (uint8_t)~GB_ENDPOINT_LOOPBACK;
}

static void other_boot(struct rig *rig, struct gb_address_info *a)
{
    other_namespace(rig, a);
    for (int i = 0; i < a->count; i++)
        if (a->endpoint[i].family == GB_FAMILY_LOCAL) a->endpoint[i].addr[0] ^= 1;
}

static void another_name(struct rig *rig, struct gb_address_info *a)
{
    (void)a;
    /* As good as a peer that looks near and is not: the same descriptor listens under a name of the kernel's choice. */
    struct sockaddr_un any = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&any, sizeof any.sun_family), 0);
    assert_int_equal(listen(fd, 1), 0);
    assert_true(dup3(fd, rig->net[1].net->local_listener, O_CLOEXEC) >= 0);
    close(fd);
}

static void no_offer(struct rig *rig, struct gb_address_info *a)
{
    (void)rig;
    a->count--;
}

static void fall_back(void (*change)(struct rig *, struct gb_address_info *), const char *reason)
{
    struct rig rig;
    logged[0] = 0;
    rig_dial_changed(&rig, &either, change);
    struct gb_net_peer me;
    rig_peer(&rig, 0, &me);
    assert_int_equal(gb_link_get(rig.net[1].net, &me, &rig.net[1].to[0]), 0);
    for (int i = 0; i < 2; i++) rig_until(&rig, &rig.net[i].seen[GB_NET_LINK_UP], 1, 20000);
    expect_describe(&rig, "tcp 2 lanes");
    exchange_some(&rig);
    rig_close(&rig);
    if (times_logged("rank 1 (host-b) is reached over tcp, not through shared memory: ") != (reason != NULL))
        print_error("%s\n", logged);
    assert_int_equal(times_logged("rank 1 (host-b) is reached over tcp, not through shared memory: "), reason != NULL);
    if (reason) assert_non_null(strstr(logged, reason));
}

static void test_falls_back(void **state)
{
    (void)state;
    fall_back(other_namespace, "it is in another network namespace of this host");
    fall_back(another_name, "Connection refused");
    fall_back(no_offer, "it offers none; its log says why");
    fall_back(other_boot, NULL); /* another host: nothing to explain */
}

static void refuse_link(void (*change)(struct rig *, struct gb_address_info *), const char *reason)
{
    struct rig rig = {.nets = 2};
    struct rig_options o = shm;
    o.connect_timeout_ms = 500;
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &o), 0);
    struct gb_net_peer p;
    struct gb_address_info a;
    const char *why;
    rig_peer(&rig, 1, &p);
    assert_int_equal(gb_address_parse(p.address.blob, p.address.bytes, &a, &why), 0);
    change(&rig, &a);
    p.address.bytes = (uint16_t)gb_address_pack(&a, p.address.blob, sizeof p.address.blob);
    int rc = gb_link_get(rig.net[0].net, &p, &rig.net[0].to[1]);
    char text[512];
    snprintf(text, sizeof text, "%s", rc ? gb_err_text() : "");
    if (rc == 0) {
        rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 20000);
        rc = rig.net[0].last[GB_NET_PEER_LOST].status;
        snprintf(text, sizeof text, "%s", rig.net[0].text);
    }
    assert_int_equal(rc, GPUBRIDGE_ERR_UNREACHABLE);
    if (!strstr(text, reason)) print_error("%s\n", text);
    assert_non_null(strstr(text, "rank 1 (host-b)"));
    assert_non_null(strstr(text, reason));
    rig_close(&rig);
}

static void test_refuses(void **state)
{
    (void)state;
    refuse_link(other_namespace, "on another host, or in another network namespace of this one");
    refuse_link(another_name, "Connection refused");
    refuse_link(no_offer, "cannot be reached through shared memory: it offers none");
}

/* Memory runs out between the probe and the link: the dialler's side. */
static void test_no_memory(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    struct rlimit old, tight;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight = old;
    tight.rlim_cur = 100000; /* enough for the probe, not for a lane */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &either), 0);
    rig_link(&rig, 0, 1);
    for (int i = 0; i < 2; i++) rig_until(&rig, &rig.net[i].seen[GB_NET_LINK_UP], 1, 20000);
    expect_describe(&rig, "tcp");
    exchange_some(&rig);
    rig_close(&rig);
    assert_int_equal(
        times_logged("is reached over tcp, not through shared memory: no 128 KiB of shared memory: the limit of "
                     "file sizes (ulimit -f) forbids it"),
        1);
    /* shm says the same and does not go on. */
    rig = (struct rig){.nets = 2};
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &shm), 0);
    rig_link(&rig, 0, 1);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 2000);
    assert_non_null(strstr(rig.net[0].text, "rank 1 (host-b) cannot be reached through shared memory: no 128 KiB"));
    rig_close(&rig);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
}

/* From now on this process may not make a system call, with a given second argument if `second` is not 0. */
static void forbid(int call, uint32_t second)
{
    uint8_t skip = second ? 2 : 0;
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, second, 0, skip ? 1 : 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(77);
}

static void forbid_seals(void)
{
    forbid(SYS_fcntl, F_GET_SEALS);
}

/* The accepting process cannot take the memory: it says so, and both go on over tcp. */
static void test_acceptor_cannot(void **state)
{
    (void)state;
    struct rig rig;
    struct rig_child c = rig_start_child(&rig, &either, forbid_seals);
    rig_until(&rig, &rig.net[0].seen[GB_NET_LINK_UP], 1, 20000);
    expect_describe(&rig, "tcp 2 lanes");
    assert_int_equal(times_logged("not through shared memory: could not take the shared memory; its own log says why"),
                     1);
    static uint8_t buf[1 << 20];
    struct rig_op op = {0};
    rig_send(&rig, 0, 1, rig_key(1, 0, 0), buf, sizeof buf, &op);
    rig_until(&rig, &op.done, 1, 20000);
    assert_int_equal(op.status, 0);
    rig_end_child(&c);
    rig_close(&rig);
}

/* memfd_create is forbidden (a strict container): auto goes without, with the reason; shm refuses to open. */
static void test_forbidden(void **state)
{
    (void)state;
    int status;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rig rig = {.nets = 2};
        forbid(SYS_memfd_create, 0);
        if (rig_open_net(&rig, 0, &shm) != GPUBRIDGE_ERR_NO_MEMORY) _exit(3);
        if (!strstr(gb_err_text(), "memfd_create: Operation not permitted")) _exit(4);
        if (rig_open_net(&rig, 0, &either) != 0 || rig_open_net(&rig, 1, &either) != 0) _exit(5);
        if (times_logged("peers on this host are reached over tcp: no shared memory: memfd_create") != 2) _exit(6);
        struct gb_net_peer p[2];
        for (int i = 0; i < 2; i++) rig_peer(&rig, i, &p[i]);
        for (int i = 0; i < 2; i++)
            if (gb_link_get(rig.net[i].net, &p[!i], &rig.net[i].to[!i]) != 0) _exit(7);
        for (int i = 0; i < 2; i++)
            if (rig_until_quiet(&rig, &rig.net[i].seen[GB_NET_LINK_UP], 1, 5000) != 0) _exit(8);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test_setup(test_acceptor_cannot, keep_log),
        cmocka_unit_test_setup(test_forbidden, keep_log),
        cmocka_unit_test(test_other_user),
        cmocka_unit_test(test_ring_stream),
        cmocka_unit_test(test_ring_bells),
        cmocka_unit_test(test_ring_lies),
        cmocka_unit_test(test_foreign_memory),
        cmocka_unit_test_setup(test_link, keep_log),
        cmocka_unit_test_setup(test_auto_prefers, keep_log),
        cmocka_unit_test(test_lying_peer),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_wrong_secret),
        cmocka_unit_test_setup(test_falls_back, keep_log),
        cmocka_unit_test_setup(test_refuses, keep_log),
        cmocka_unit_test_setup(test_no_memory, keep_log),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
