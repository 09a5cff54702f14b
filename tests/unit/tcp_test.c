/* SPDX-License-Identifier: Apache-2.0
 * The tcp transport against the world: strangers on its port, wrong peers, wrong secrets, taken ports, killed and
 * stopped processes. */
#include "net_rig.h"

#include "base/clock.h"
#include "transport/net_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static const struct rig_options plain = {.transport = "tcp", .lanes = 2, .ifname = "lo"};

static uint16_t port_of(struct gb_net *net)
{
    return net->own.port;
}

static int raw_connect(uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Reads to the end of the stream; how many bytes came, or -1 when it stays open. */
static ssize_t read_to_end(int fd, int ms)
{
    char buf[4096];
    ssize_t all = 0;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    while (poll(&p, 1, ms) > 0) {
        ssize_t n = read(fd, buf, sizeof buf);
        if (n <= 0) return all;
        all += n;
    }
    return -1;
}

/* Strangers cost a dropped connection each, and the listener goes on. */
static void test_strangers(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    enum { HOLD = 200 };
    int held[HOLD];
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &plain), 0);
    uint16_t port = port_of(rig.net[1].net);
    static const char *const words[] = {"GET / HTTP/1.0\r\nHost: x\r\n\r\n",
                                        "\x16\x03\x01\x02\x01\x01\x01\x01\xfc\x03\x03 rest of a client hello",
                                        "SSH-2.0-scanner of some kind\r\n"};
    for (int i = 0; i < 3; i++) {
        int fd = raw_connect(port);
        assert_true(write(fd, words[i], strlen(words[i])) > 0);
        assert_int_equal(read_to_end(fd, 5000), 0);
        close(fd);
    }
    /* Well-formed, but for another process: told who is here, no MAC, dropped. */
    struct gb_hello h = {.kind = GB_HS_HELLO, .version = GB_PROTOCOL_VERSION, .lane_kind = GB_LANE_CONTROL, .lanes = 1};
    uint8_t raw[GB_HELLO_BYTES];
    gb_hello_pack(&h, raw);
    int fd = raw_connect(port);
    assert_int_equal(write(fd, raw, sizeof raw), sizeof raw);
    assert_int_equal(read_to_end(fd, 5000), GB_CHALLENGE_BYTES);
    close(fd);
    /* The right name without the secret: nothing after the challenge. */
    memcpy(h.to, rig.net[1].uuid.byte, 16);
    memcpy(h.from, rig.net[0].uuid.byte, 16);
    gb_hello_pack(&h, raw);
    fd = raw_connect(port);
    assert_int_equal(write(fd, raw, sizeof raw), sizeof raw);
    uint8_t proof[GB_PROOF_BYTES], mac[GB_MAC_BYTES] = {0};
    gb_proof_pack(mac, proof);
    assert_int_equal(write(fd, proof, sizeof proof), sizeof proof);
    assert_int_equal(read_to_end(fd, 5000), GB_CHALLENGE_BYTES);
    close(fd);
    /* Slow ones: one byte each, then nothing, while the real peers meet. */
    for (int i = 0; i < HOLD; i++) {
        held[i] = raw_connect(port);
        assert_int_equal(write(held[i], "G", 1), 1);
    }
    rig_link(&rig, 0, 1);
    for (int i = 0; i < 2; i++) rig_until(&rig, &rig.net[i].seen[GB_NET_LINK_UP], 1, 5000);
    for (int i = 0; i < HOLD; i++) close(held[i]);
    rig_close(&rig);
}

static void test_wrong_secret(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    struct rig_options o = plain;
    o.other_secret = "not the secret of the job";
    o.connect_timeout_ms = 1500;
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &o), 0);
    uint64_t t0 = gb_now_ns();
    rig_link(&rig, 0, 1);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 1000);
    assert_true(gb_now_ns() - t0 < 1000000000); /* certain: no use in waiting for the budget */
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_REFUSED);
    assert_non_null(strstr(rig.net[0].text, "rank 1 (host-b)"));
    assert_non_null(strstr(rig.net[0].text, "did not prove the job's secret"));
    rig_until(&rig, &rig.net[1].seen[GB_NET_PEER_LOST], 1, 5000);
    assert_int_equal(rig.net[1].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_UNREACHABLE);
    assert_non_null(strstr(rig.net[1].text, "rank 0 (host-a) did not connect within"));
    rig_close(&rig);
}

static void to_myself(struct rig *rig, struct gb_address_info *a)
{
    a->port = port_of(rig->net[0].net);
}

static void test_answered_by_myself(void **state)
{
    (void)state;
    struct rig rig;
    rig_dial_changed(&rig, &plain, to_myself);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 5000);
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_REFUSED);
    assert_non_null(strstr(rig.net[0].text, "127.0.0.1"));
    assert_non_null(strstr(rig.net[0].text, "answered as rank 0 (myself)"));
    rig_close(&rig);
}

static void closed_port(struct rig *rig, struct gb_address_info *a)
{
    (void)rig;
    int fd = socket(AF_INET, SOCK_STREAM, 0); /* bound, never listening: refuses for as long as it is open */
    struct sockaddr_in any = {.sin_family = AF_INET};
    socklen_t len = sizeof any;
    assert_int_equal(bind(fd, (struct sockaddr *)&any, len), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&any, &len), 0);
    a->port = ntohs(any.sin_port);
    rig->user = (void *)(intptr_t)fd;
}

static void test_unreachable(void **state)
{
    (void)state;
    struct rig rig;
    struct rig_options o = plain;
    o.connect_timeout_ms = 600;
    rig_dial_changed(&rig, &o, closed_port);
    uint64_t t0 = gb_now_ns();
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 5000);
    assert_true(gb_now_ns() - t0 >= 500000000); /* refusals are retried: the peer may just be starting */
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_UNREACHABLE);
    assert_non_null(strstr(rig.net[0].text, "Connection refused"));
    assert_non_null(strstr(rig.net[0].text, "rank 1 (host-b) cannot be reached"));
    close((int)(intptr_t)rig.user);
    rig_close(&rig);
}

static void bad_candidates_first(struct rig *rig, struct gb_address_info *a)
{
    (void)rig;
    struct gb_endpoint good = a->endpoint[0];
    a->count = 3;
    a->endpoint[0] = (struct gb_endpoint){.family = 4, .flags = GB_ENDPOINT_LOOPBACK, .addr = {240, 0, 0, 1}};
    a->endpoint[1] = (struct gb_endpoint){.family = 6, .flags = GB_ENDPOINT_LOOPBACK, .addr = {0x01, 0x00, 9}};
    a->endpoint[2] = good;
}

static void test_next_candidate(void **state)
{
    (void)state;
    struct rig rig;
    rig_dial_changed(&rig, &plain, bad_candidates_first);
    struct gb_net_peer me;
    rig_peer(&rig, 0, &me);
    assert_int_equal(gb_link_get(rig.net[1].net, &me, &rig.net[1].to[0]), 0);
    rig_until(&rig, &rig.net[0].seen[GB_NET_LINK_UP], 1, 10000);
    rig_until(&rig, &rig.net[1].seen[GB_NET_LINK_UP], 1, 10000);
    rig_close(&rig);
}

static void other_host(struct rig *rig, struct gb_address_info *a)
{
    (void)rig;
    a->host_id[3] ^= 1;
}

static void test_foreign_loopback(void **state)
{
    (void)state;
    struct rig rig;
    rig_dial_changed(&rig, &plain, other_host);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 2000);
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_UNREACHABLE);
    assert_non_null(strstr(rig.net[0].text, "advertises loopback"));
    assert_non_null(strstr(rig.net[0].text, "GPUBRIDGE_IFNAME"));
    rig_close(&rig);
}

static void only_v6(struct rig *rig, struct gb_address_info *a)
{
    (void)rig;
    a->count = 1;
    a->endpoint[0] = (struct gb_endpoint){.family = 6, .flags = GB_ENDPOINT_LOOPBACK, .addr = {[15] = 1}};
}

static void test_ipv6_only(void **state)
{
    (void)state;
    struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    int usable = fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    if (fd >= 0) close(fd);
    if (!usable) {
        print_message("no IPv6 loopback here\n");
        skip();
    }
    struct rig rig;
    struct rig_op s = {0}, r = {0};
    rig_dial_changed(&rig, &plain, only_v6);
    struct gb_net_peer me;
    rig_peer(&rig, 0, &me);
    assert_int_equal(gb_link_get(rig.net[1].net, &me, &rig.net[1].to[0]), 0);
    static uint8_t x[100000], y[100000];
    rig_fill(x, sizeof x, 4);
    rig_send(&rig, 0, 1, rig_key(1, 1, 1), x, sizeof x, &s);
    rig_recv(&rig, 1, 0, rig_key(1, 1, 1), y, sizeof y, &r);
    rig_until(&rig, &r.done, 1, 10000);
    rig_until(&rig, &s.done, 1, 10000);
    assert_true(rig_check(y, sizeof y, 4));
    char text[200];
    gb_link_describe(rig.net[0].to[1], text, sizeof text);
    assert_non_null(strstr(text, "[::1]:"));
    rig_close(&rig);
}

/* ---- a server that is not ours, or of another version ---- */

static void fake_server(struct rig *rig, struct gb_address_info *a)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof any;
    assert_true(bind(fd, (struct sockaddr *)&any, len) == 0 && listen(fd, 8) == 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&any, &len), 0);
    a->port = ntohs(any.sin_port);
    a->count = 1;
    rig->user = (void *)(intptr_t)fd;
}

static void answer_with(const char *bytes, size_t n, int status, const char *words)
{
    struct rig rig;
    rig_dial_changed(&rig, &plain, fake_server);
    int listener = (int)(intptr_t)rig.user, fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n), n);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 5000);
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, status);
    if (!strstr(rig.net[0].text, words)) print_error("%s\n", rig.net[0].text);
    assert_non_null(strstr(rig.net[0].text, words));
    close(fd);
    close(listener);
    rig_close(&rig);
}

static void test_other_servers(void **state)
{
    (void)state;
    static const char http[] = "HTTP/1.1 400 Bad Request\r\n\r\n";
    answer_with(http, sizeof http - 1, GPUBRIDGE_ERR_REFUSED, "does not speak the gpubridge protocol");
    static const char newer[16] = {'G', 'P', 'U', 'B', 'R', 'D', 'G', '\n', 9, 0, 2, 0, 16, 0, 0, 0};
    answer_with(newer, sizeof newer, GPUBRIDGE_ERR_VERSION,
                "speaks protocol version 9, this process (gpubridge 0.1.0) version 1");
}

/* A newer dialler learns our version before we drop it. */
static void test_newer_dialler(void **state)
{
    (void)state;
    struct rig rig = {.nets = 1};
    assert_int_equal(rig_open_net(&rig, 0, &plain), 0);
    int fd = raw_connect(port_of(rig.net[0].net));
    static const char newer[16] = {'G', 'P', 'U', 'B', 'R', 'D', 'G', '\n', 9, 0, 1, 0, 16, 0, 0, 0};
    assert_int_equal(write(fd, newer, sizeof newer), sizeof newer);
    uint8_t back[GB_PREFIX_BYTES];
    assert_int_equal(recv(fd, back, sizeof back, MSG_WAITALL), sizeof back);
    struct gb_prefix p;
    assert_int_equal(gb_prefix_parse(back, &p), 0);
    assert_int_equal(p.version, GB_PROTOCOL_VERSION);
    close(fd);
    rig_close(&rig);
}

/* ---- settings ---- */

static void test_port_range(void **state)
{
    (void)state;
    static const uint8_t secret[16] = "0123456789abcde";
    struct gb_net_config c = {.transport = "tcp", .secret = secret, .secret_bytes = 16, .ifname = "lo"};
    struct gb_net *net[3] = {NULL};
    /* Two free neighbouring ports. */
    for (c.port_low = 42000; !net[1] && c.port_low < 60000; c.port_low += 7) {
        c.port_high = c.port_low + 1;
        gb_net_close(net[0], 0, "");
        net[0] = NULL;
        if (gb_net_open(&c, &net[0]) != 0) continue;
        if (gb_net_open(&c, &net[1]) == 0) break;
    }
    assert_non_null(net[1]);
    for (int i = 0; i < 2; i++) assert_true(port_of(net[i]) >= c.port_low && port_of(net[i]) <= c.port_high);
    assert_int_not_equal(port_of(net[0]), port_of(net[1]));
    char range[40];
    snprintf(range, sizeof range, "GPUBRIDGE_PORT_RANGE=%u-%u", c.port_low, c.port_high);
    assert_int_equal(gb_net_open(&c, &net[2]), GPUBRIDGE_ERR_SETTING);
    assert_non_null(strstr(gb_err_text(), range));
    assert_non_null(strstr(gb_err_text(), "every process needs one port"));
    for (int i = 0; i < 2; i++) gb_net_close(net[i], 0, "");
    c.port_high = 1000;
    assert_int_equal(gb_net_open(&c, &net[2]), GPUBRIDGE_ERR_SETTING);
}

static void test_bad_settings(void **state)
{
    (void)state;
    static const uint8_t secret[16] = "0123456789abcde";
    struct gb_net *net = NULL;
    struct gb_net_config c = {.transport = "tcp", .secret = secret, .secret_bytes = 16, .ifname = "nosuch"};
    assert_int_equal(gb_net_open(&c, &net), GPUBRIDGE_ERR_SETTING);
    assert_non_null(strstr(gb_err_text(), "GPUBRIDGE_IFNAME=nosuch matches no interface"));
    assert_non_null(strstr(gb_err_text(), "lo 127.0.0.1"));
    c.ifname = NULL;
    setenv("NCCL_SOCKET_IFNAME", "nosuch2", 1);
    assert_int_equal(gb_net_open(&c, &net), GPUBRIDGE_ERR_SETTING);
    assert_non_null(strstr(gb_err_text(), "NCCL_SOCKET_IFNAME=nosuch2"));
    setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
    assert_int_equal(gb_net_open(&c, &net), 0);
    for (int i = 0; i < net->own.count; i++) assert_int_equal(net->own.endpoint[i].flags, GB_ENDPOINT_LOOPBACK);
    gb_net_close(net, 0, "");
    unsetenv("NCCL_SOCKET_IFNAME");
    c.transport = "pigeon";
    assert_int_equal(gb_net_open(&c, &net), GPUBRIDGE_ERR_SETTING);
    assert_non_null(strstr(gb_err_text(), "pigeon"));
    c.transport = "tcp";
    c.secret_bytes = 15;
    assert_int_equal(gb_net_open(&c, &net), GPUBRIDGE_ERR_INVALID);
    c.secret_bytes = 16;
    c.lanes = 99;
    assert_int_equal(gb_net_open(&c, &net), GPUBRIDGE_ERR_SETTING);
    c.lanes = 1;
    c.fault = "bulk:explode@3";
    assert_int_equal(gb_net_open(&c, &net), GPUBRIDGE_ERR_SETTING);
}

static void test_interface_lists(void **state)
{
    (void)state;
    static const struct {
        const char *list, *name;
        int want;
    } cases[] = {{"eth", "eth0", 1},       {"eth", "veth0", 0},     {"=eth0", "eth0", 1},
                 {"=eth0", "eth01", 0},    {"^lo,docker", "lo", 0}, {"^lo,docker", "docker0", 0},
                 {"^lo,docker", "ib0", 1}, {"ib,eth", "eth3", 1},   {"=ib0,eth0", "eth01", 0},
                 {"ib,=eth0", "eth01", 0}, {"ib,=eth0", "ib7", 1},  {"^=lo", "lo1", 1},
                 {"^=lo", "lo", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(gb_addr_matches(cases[i].list, cases[i].name), cases[i].want);
}

/* The address is the one the route to the master picks; with a master on loopback, loopback works. */
static void test_route(void **state)
{
    (void)state;
    static const uint8_t secret[16] = "0123456789abcde";
    struct gb_net *net = NULL;
    struct gb_net_config c = {.transport = "tcp", .secret = secret, .secret_bytes = 16, .master_addr = "127.0.0.1"};
    assert_int_equal(gb_net_open(&c, &net), 0);
    int loopback = 0;
    for (int i = 0; i < net->own.count; i++) loopback |= net->own.endpoint[i].flags & GB_ENDPOINT_LOOPBACK;
    assert_true(loopback);
    gb_net_close(net, 0, "");
    c.master_addr = "no.such.host.invalid";
    assert_int_equal(gb_net_open(&c, &net), 0); /* a warning; the scan still finds addresses */
    gb_net_close(net, 0, "");
}

/* ---- other processes ---- */

static void test_killed(void **state)
{
    (void)state;
    rig_death(&plain, SIGKILL, "rank 1 (host-b) closed its connection without a goodbye", 2000);
}

static void test_stopped(void **state)
{
    (void)state;
    rig_death(&plain, SIGSTOP, "rank 1 (host-b) silent for", 3000);
}

/* ---- nothing is left behind ---- */

static void test_descriptors(void **state)
{
    (void)state;
    int before = rig_count_fds(0);
    struct rig rig;
    rig_open(&rig, 3, &plain);
    assert_true(rig_count_fds(before <= 3) > before);
    rig_close(&rig);
    assert_int_equal(rig_count_fds(0), before);
}

/* Without descriptors a connection waits, without a busy thread, and is taken when there are some again. */
static void test_no_descriptors(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    struct rlimit old, tight;
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &plain), 0);
    int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    tight = old;
    tight.rlim_cur = (rlim_t)stranger + 1;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port_of(rig.net[1].net)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(connect(stranger, (struct sockaddr *)&a, sizeof a), 0);
    struct timespec t0, t1;
    clockid_t clock;
    assert_int_equal(pthread_getcpuclockid(rig.net[1].net->control, &clock), 0);
    clock_gettime(clock, &t0);
    struct pollfd p = {.fd = stranger, .events = POLLIN};
    assert_int_equal(write(stranger, "GET / HTTP/1.1\r\n", 16), 16);
    assert_int_equal(poll(&p, 1, 500), 0);
    clock_gettime(clock, &t1);
    assert_true((t1.tv_sec - t0.tv_sec) * 1000 + (t1.tv_nsec - t0.tv_nsec) / 1000000 < 200);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(read_to_end(stranger, 5000), 0);
    close(stranger);
    rig_link(&rig, 0, 1);
    for (int i = 0; i < 2; i++) rig_until(&rig, &rig.net[i].seen[GB_NET_LINK_UP], 1, 5000);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_strangers),
        cmocka_unit_test(test_wrong_secret),
        cmocka_unit_test(test_answered_by_myself),
        cmocka_unit_test(test_unreachable),
        cmocka_unit_test(test_next_candidate),
        cmocka_unit_test(test_foreign_loopback),
        cmocka_unit_test(test_ipv6_only),
        cmocka_unit_test(test_other_servers),
        cmocka_unit_test(test_newer_dialler),
        cmocka_unit_test(test_port_range),
        cmocka_unit_test(test_bad_settings),
        cmocka_unit_test(test_interface_lists),
        cmocka_unit_test(test_route),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_no_descriptors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
