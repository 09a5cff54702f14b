/* SPDX-License-Identifier: Apache-2.0
 * Measures a link between two processes of this host (tcp over loopback, or shm), next to plain sockets in the same
 * run: 8-byte ping-pong, and streaming of messages over as many streams.  One JSON line per result.  Not a test.
 *
 * usage: net_bench [LANES [MESSAGE_BYTES [WORKERS [TRANSPORT]]]] */
#include "base/clock.h"
#include "transport/net.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define WINDOW 16

static uint32_t lanes = 2, workers = 1;
static size_t message = 1 << 20;
static uint64_t total = 1ull << 30;
static int pipe_fd;
static const char *transport = "tcp";

static void swap(int fd, const void *mine, void *theirs, size_t bytes)
{
    if (write(fd, mine, bytes) != (ssize_t)bytes) exit(1);
    for (size_t n = 0; n < bytes;) {
        ssize_t got = read(fd, (char *)theirs + n, bytes - n);
        if (got <= 0) exit(1);
        n += (size_t)got;
    }
}

/* CPU time of both processes since *since; on a busy machine it says more than the clock. */
static double cpu_s(double *since)
{
    struct rusage ru;
    double mine, theirs;
    getrusage(RUSAGE_SELF, &ru);
    mine = (double)ru.ru_utime.tv_sec + (double)ru.ru_stime.tv_sec +
           (double)(ru.ru_utime.tv_usec + ru.ru_stime.tv_usec) / 1e6;
    double spent = mine - *since;
    *since = mine;
    swap(pipe_fd, &spent, &theirs, sizeof spent);
    return spent + theirs;
}

static void die(const char *what)
{
    fprintf(stderr, "net_bench: %s: %s\n", what, gb_err_text());
    exit(1);
}

static int wait_done(struct gb_net *net, int want)
{
    struct gb_net_event ev[32];
    int done = 0;
    while (done < want) {
        int n = gb_net_poll(net, ev, 32);
        for (int i = 0; i < n; i++) {
            if (ev[i].kind == GB_NET_PEER_LOST) die(ev[i].text);
            done += ev[i].kind == GB_NET_DONE;
        }
        if (n == 0 && want > 8) gb_net_wait(net, 100000000);
    }
    return done;
}

static void ping_pong(struct gb_net *net, struct gb_link *link, int me, int rounds, int report)
{
    struct gb_sig sig = {.count = 8};
    uint64_t out = 1, in = 0, t0 = gb_now_ns();
    for (int i = 0; i < rounds; i++) { /* an exchange: both send, both receive */
        struct gb_key key = {.group = 1, .seq = (uint32_t)i};
        if (gb_link_recv(link, &key, &sig, &in, 8, NULL) || gb_link_send(link, &key, &sig, &out, 8, NULL)) die("post");
        wait_done(net, 2);
    }
    if (me == 0 && report)
        printf("{\"bench\":\"exchange_8B\",\"us\":%.2f}\n", (double)(gb_now_ns() - t0) / 1e3 / rounds);
}

static void stream(struct gb_net *net, struct gb_link *link, int me, uint64_t bytes, const char *what)
{
    struct gb_sig sig = {.count = message};
    int count = (int)(bytes / message), posted = 0, done = 0;
    char *buf = aligned_alloc(4096, message * WINDOW);
    memset(buf, 1, message * WINDOW);
    double cpu = 0;
    cpu_s(&cpu);
    uint64_t t0 = gb_now_ns();
    struct gb_net_event ev[32];
    while (done < count) {
        for (; posted < count && posted < done + WINDOW; posted++) {
            struct gb_key key = {.group = 2 + (uint64_t)bytes, .seq = (uint32_t)posted};
            char *b = buf + (size_t)(posted % WINDOW) * message;
            if (me == 0 ? gb_link_send(link, &key, &sig, b, message, NULL)
                        : gb_link_recv(link, &key, &sig, b, message, NULL))
                die("post");
        }
        int n = gb_net_poll(net, ev, 32);
        for (int i = 0; i < n; i++) {
            if (ev[i].kind == GB_NET_PEER_LOST) die(ev[i].text);
            done += ev[i].kind == GB_NET_DONE;
        }
        if (n == 0) gb_net_wait(net, 100000000);
    }
    double s = (double)(gb_now_ns() - t0) / 1e9, spent = cpu_s(&cpu);
    if (me == 0 && what)
        printf("{\"bench\":\"%s\",\"lanes\":%u,\"message\":%zu,\"GBps\":%.3f,\"cpu_s_per_GB\":%.3f}\n", what, lanes,
               message, (double)bytes / s / 1e9, spent / ((double)bytes / 1e9));
    free(buf);
}

static void run(int me, int fd, int checksum)
{
    static const uint8_t secret[16] = "0123456789abcde";
    struct gb_net_config c = {.self = {{(uint8_t)(me + 1)}},
                              .global_rank = me,
                              .host = "bench",
                              .transport = transport,
                              .ifname = "lo",
                              .secret = secret,
                              .secret_bytes = 16,
                              .lanes = lanes,
                              .workers = workers,
                              .checksum = checksum};
    struct gb_net *net;
    struct gb_link *link;
    if (gb_net_open(&c, &net)) die("open");
    struct gb_net_address mine = {0}, theirs;
    gb_net_get_address(net, &mine);
    swap(fd, &mine, &theirs, sizeof mine);
    struct gb_net_peer peer = {.uuid = {{(uint8_t)(2 - me)}}, .global_rank = !me, .host = "bench", .address = theirs};
    if (gb_link_get(net, &peer, &link)) die("link");
    if (!checksum) {
        ping_pong(net, link, me, 2000, 0);
        ping_pong(net, link, me, 5000, 1);
    }
    stream(net, link, me, total / 8, NULL);
    stream(net, link, me, total, checksum ? "stream_checksum" : "stream");
    fflush(stdout);
    gb_net_close(net, 0, "");
}

static void plain(int me, int fd)
{
    int s[16], one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    if (me == 1 && (bind(l, (void *)&a, len) || listen(l, 64) || getsockname(l, (void *)&a, &len))) die("listen");
    struct sockaddr_in b;
    swap(fd, &a, &b, sizeof a);
    for (uint32_t i = 0; i <= lanes; i++) {
        s[i] = me == 1 ? accept(l, NULL, NULL) : socket(AF_INET, SOCK_STREAM, 0);
        if (me == 0 && connect(s[i], (void *)&b, sizeof b)) die("connect");
        setsockopt(s[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    uint64_t x = 1, t0 = 0;
    for (int i = 0; i < 7000; i++) {
        if (i == 2000) t0 = gb_now_ns();
        if (send(s[lanes], &x, 8, 0) != 8) exit(1);
        while (recv(s[lanes], &x, 8, MSG_DONTWAIT) != 8) {
        }
    }
    if (me == 0) printf("{\"bench\":\"plain_exchange_8B\",\"us\":%.2f}\n", (double)(gb_now_ns() - t0) / 1e3 / 5000);
    /* Streams in turn from one thread per process, like one I/O worker: non-blocking, poll between. */
    char *buf = aligned_alloc(4096, message * WINDOW); /* the same memory traffic as the link's */
    memset(buf, 1, message * WINDOW);
    uint32_t at[16], turn = 0;
    struct pollfd p[16];
    uint64_t left[16], off[16] = {0};
    for (uint32_t i = 0; i < lanes; i++)
        at[i] = turn++ % WINDOW, left[i] = total / lanes, p[i] = (struct pollfd){s[i], me ? POLLIN : POLLOUT, 0};
    double cpu = 0;
    cpu_s(&cpu);
    t0 = gb_now_ns();
    for (uint32_t open = lanes; open > 0;) {
        poll(p, lanes, -1);
        for (uint32_t i = 0; i < lanes; i++) {
            if (!p[i].revents) continue;
            size_t n = message - off[i];
            ssize_t k = me ? recv(s[i], buf + at[i] * message + off[i], n, MSG_DONTWAIT)
                           : send(s[i], buf + at[i] * message + off[i], n, MSG_DONTWAIT);
            if (k < 0) continue;
            off[i] = (off[i] + (size_t)k) % message;
            if (off[i] == 0) at[i] = turn++ % WINDOW;
            left[i] = left[i] > (uint64_t)k ? left[i] - (uint64_t)k : 0;
            if (left[i] == 0) p[i].fd = -1, open--;
        }
    }
    char done;
    if (me == 1 && send(s[lanes], "x", 1, 0) != 1) exit(1);
    if (me == 0 && recv(s[lanes], &done, 1, 0) != 1) exit(1);
    double sec = (double)(gb_now_ns() - t0) / 1e9, spent = cpu_s(&cpu);
    if (me == 0)
        printf("{\"bench\":\"plain_stream\",\"lanes\":%u,\"message\":%zu,\"GBps\":%.3f,\"cpu_s_per_GB\":%.3f}\n", lanes,
               message, (double)total / sec / 1e9, spent / ((double)total / 1e9));
    fflush(stdout);
    free(buf);
}

int main(int argc, char **argv)
{
    int fd[2];
    if (argc > 1) lanes = (uint32_t)atoi(argv[1]);
    if (argc > 2) message = (size_t)atoll(argv[2]);
    if (argc > 3) workers = (uint32_t)atoi(argv[3]);
    if (argc > 4) transport = argv[4];
    if (lanes < 1 || lanes > 15 || socketpair(AF_UNIX, SOCK_STREAM, 0, fd)) return 1;
    pid_t child = fork();
    int me = child == 0;
    pipe_fd = fd[me];
    for (int i = 0; i < 2; i++) {
        plain(me, fd[me]);
        run(me, fd[me], 0);
    }
    run(me, fd[me], 1);
    if (!me) waitpid(child, NULL, 0);
    return 0;
}
