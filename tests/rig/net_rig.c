/* SPDX-License-Identifier: Apache-2.0
 * See net_rig.h. */
#include "net_rig.h"

#include "base/clock.h"
#include "wire/hello.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static const uint8_t secret[] = "a secret of the test job";

struct gb_uuid rig_uuid(int n)
{
    struct gb_uuid u = {{0}};
    static pid_t pid; /* of the process that first asked: its children mean the same nets */
    if (!pid) pid = getpid();
    u.byte[0] = (uint8_t)(n + 1);         /* orders who dials: the lower number */
    memcpy(u.byte + 1, &pid, sizeof pid); /* tests beside this one listen under other names */
    return u;
}

int rig_open_net(struct rig *rig, int who, const struct rig_options *o)
{
    struct rig_net *n = &rig->net[who];
    char host[16];
    snprintf(host, sizeof host, "host-%c", 'a' + who);
    n->uuid = rig_uuid(who);
    const uint8_t *s = who == 1 && o->other_secret ? (const uint8_t *)o->other_secret : secret;
    struct gb_net_config c = {.self = n->uuid,
                              .global_rank = who,
                              .host = host,
                              .transport = o->transport,
                              .ifname = o->ifname,
                              .master_addr = o->master,
                              .secret = s,
                              .secret_bytes = strlen((const char *)s),
                              .lanes = o->lanes,
                              .workers = o->workers,
                              .checksum = o->checksum,
                              .peer_timeout_ns = o->peer_timeout_ms * 1000000,
                              .connect_timeout_ns = (o->connect_timeout_ms ? o->connect_timeout_ms : 20000) * 1000000,
                              .fault = who == 0 ? o->fault : NULL};
    return gb_net_open(&c, &n->net);
}

void rig_peer(struct rig *rig, int who, struct gb_net_peer *peer)
{
    static const char *const hosts[] = {"host-a", "host-b", "host-c", "host-d"};
    *peer = (struct gb_net_peer){.uuid = rig->net[who].uuid, .global_rank = who, .host = hosts[who]};
    gb_net_get_address(rig->net[who].net, &peer->address);
}

void rig_link(struct rig *rig, int a, int b)
{
    struct gb_net_peer pa, pb;
    rig_peer(rig, a, &pa);
    rig_peer(rig, b, &pb);
    assert_int_equal(gb_link_get(rig->net[a].net, &pb, &rig->net[a].to[b]), 0);
    assert_int_equal(gb_link_get(rig->net[b].net, &pa, &rig->net[b].to[a]), 0);
}

void rig_open(struct rig *rig, int nets, const struct rig_options *options)
{
    memset(rig, 0, sizeof *rig);
    rig->nets = nets;
    for (int i = 0; i < nets; i++) {
        int rc = rig_open_net(rig, i, options);
        if (rc) print_error("%s\n", gb_err_text());
        assert_int_equal(rc, 0);
    }
    for (int a = 0; a < nets; a++)
        for (int b = a + 1; b < nets; b++) rig_link(rig, a, b);
    for (int a = 0; a < nets; a++) rig_until(rig, &rig->net[a].seen[GB_NET_LINK_UP], nets - 1, 10000);
}

void rig_close(struct rig *rig)
{
    for (int i = 0; i < rig->nets; i++)
        for (int k = 0; k < RIG_NETS; k++) gb_link_put(rig->net[i].to[k]);
    for (int i = 0; i < rig->nets; i++) gb_net_close(rig->net[i].net, 0, "");
}

void rig_poll(struct rig *rig)
{
    struct gb_net_event ev[32];
    for (int i = 0; i < rig->nets; i++) {
        struct rig_net *me = &rig->net[i];
        int n = me->net ? gb_net_poll(me->net, ev, 32) : 0;
        for (int k = 0; k < n; k++) {
            me->seen[ev[k].kind]++;
            me->last[ev[k].kind] = ev[k];
            if (ev[k].text) snprintf(me->text, sizeof me->text, "%s", ev[k].text);
            if (ev[k].kind == GB_NET_CTRL) memcpy(me->ctrl, ev[k].data, ev[k].bytes);
            struct rig_op *op = ev[k].cookie;
            if (ev[k].kind == GB_NET_DONE && op) {
                op->done++;
                op->status = ev[k].status;
                op->sig = ev[k].sig;
                op->bytes = ev[k].bytes;
                op->start_ns = ev[k].start_ns;
                snprintf(op->text, sizeof op->text, "%s", ev[k].text ? ev[k].text : "");
            }
            if (rig->on_event) rig->on_event(rig, i, &ev[k]);
        }
    }
}

int rig_until_quiet(struct rig *rig, const int *flag, int want, int ms)
{
    uint64_t end = gb_now_ns() + (uint64_t)ms * 1000000u;
    for (int spins = 0; *flag < want; spins++) {
        rig_poll(rig);
        if (*flag >= want) break;
        if (gb_now_ns() > end) return -1;
        /* Several nets, one thread: wait on each in turn, briefly. */
        if (spins > 200 && rig->net[spins % rig->nets].net) gb_net_wait(rig->net[spins % rig->nets].net, 200000);
    }
    return 0;
}

void rig_until(struct rig *rig, const int *flag, int want, int ms)
{
    if (rig_until_quiet(rig, flag, want, ms) == 0) return;
    for (int i = 0; i < rig->nets; i++)
        for (int k = 0; k < rig->nets; k++) {
            char text[200];
            if (!rig->net[i].to[k]) continue;
            gb_link_describe(rig->net[i].to[k], text, sizeof text);
            print_error("net %d to %d: %s; last text: %s\n", i, k, text, rig->net[i].text);
        }
    fail_msg("waited %d ms: count is %d, want %d", ms, *flag, want);
}

struct gb_key rig_key(uint64_t group, uint32_t seq, uint32_t xid)
{
    return (struct gb_key){.group = group, .seq = seq, .xid = xid};
}

struct gb_sig rig_sig(uint64_t count)
{
    return (struct gb_sig){.op = 1, .dtype = 2, .reduce_op = 3, .root_lo = 4, .plan_hash = 0xabcdef01, .count = count};
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

void rig_fill(void *buf, uint64_t bytes, uint64_t seed)
{
    uint8_t *p = buf;
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t v = mix(seed * 1000003 + i);
        memcpy(p + i, &v, bytes - i < 8 ? (size_t)(bytes - i) : 8);
    }
}

int rig_check(const void *buf, uint64_t bytes, uint64_t seed)
{
    const uint8_t *p = buf;
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t v = mix(seed * 1000003 + i);
        if (memcmp(p + i, &v, bytes - i < 8 ? (size_t)(bytes - i) : 8) != 0) return 0;
    }
    return 1;
}

void rig_send(struct rig *rig, int from, int to, struct gb_key key, const void *buf, uint64_t bytes, struct rig_op *op)
{
    struct gb_sig sig = rig_sig(bytes);
    assert_int_equal(gb_link_send(rig->net[from].to[to], &key, &sig, buf, bytes, op), 0);
}

void rig_recv(struct rig *rig, int at, int from, struct gb_key key, void *buf, uint64_t bytes, struct rig_op *op)
{
    struct gb_sig sig = rig_sig(bytes);
    assert_int_equal(gb_link_recv(rig->net[at].to[from], &key, &sig, buf, bytes, op), 0);
}

void rig_dial_changed(struct rig *rig, const struct rig_options *o,
                      void (*change)(struct rig *, struct gb_address_info *))
{
    *rig = (struct rig){.nets = 2};
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(rig, i, o), 0);
    struct gb_net_peer p;
    struct gb_address_info a;
    const char *why;
    rig_peer(rig, 1, &p);
    assert_int_equal(gb_address_parse(p.address.blob, p.address.bytes, &a, &why), 0);
    change(rig, &a);
    p.address.bytes = (uint16_t)gb_address_pack(&a, p.address.blob, sizeof p.address.blob);
    assert_int_equal(gb_link_get(rig->net[0].net, &p, &rig->net[0].to[1]), 0);
}

/* ---- another process ---- */

static void exchange(int fd, const void *mine, void *theirs, size_t n)
{
    if (write(fd, mine, n) != (ssize_t)n) _exit(3);
    for (size_t got = 0; got < n;) {
        ssize_t k = read(fd, (char *)theirs + got, n - got);
        if (k <= 0) _exit(4);
        got += (size_t)k;
    }
}

/* A child that is rank 1, links to rank 0 here and then receives whatever this test sends, for ever. */
static void child_main(int fd, const struct rig_options *o)
{
    static struct rig rig;
    static uint8_t buf[1 << 20];
    rig.nets = 2;
    if (rig_open_net(&rig, 1, o) != 0) _exit(5);
    struct gb_net_peer me, peer;
    rig_peer(&rig, 1, &me);
    exchange(fd, &me, &peer, sizeof me);
    peer.host = "host-a";
    if (gb_link_get(rig.net[1].net, &peer, &rig.net[1].to[0]) != 0) _exit(6);
    struct gb_sig sig = rig_sig(sizeof buf);
    for (uint32_t seq = 0;; seq++) {
        struct gb_key key = rig_key(1, seq, 0);
        struct rig_op op = {0};
        if (gb_link_recv(rig.net[1].to[0], &key, &sig, buf, sizeof buf, &op) != 0) _exit(7);
        while (!op.done) {
            rig_poll(&rig);
            gb_net_wait(rig.net[1].net, 100000000);
        }
        if (op.status) _exit(8);
    }
}

struct rig_child rig_start_child(struct rig *rig, const struct rig_options *o, void (*first)(void))
{
    int fd[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
    (void)rig_uuid(0); /* the same in both */
    struct rig_child c = {.pid = fork(), .fd = fd[0]};
    assert_true(c.pid >= 0);
    if (c.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nobody */
        close(fd[0]);
        if (first) first();
        child_main(fd[1], o);
    }
    close(fd[1]);
    *rig = (struct rig){.nets = 1};
    assert_int_equal(rig_open_net(rig, 0, o), 0);
    struct gb_net_peer me, peer;
    rig_peer(rig, 0, &me);
    exchange(c.fd, &me, &peer, sizeof me);
    peer.host = "host-b";
    assert_int_equal(gb_link_get(rig->net[0].net, &peer, &rig->net[0].to[1]), 0);
    return c;
}

void rig_end_child(struct rig_child *c)
{
    int status;
    kill(c->pid, SIGKILL);
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    close(c->fd);
}

static void send_some(struct rig *rig, struct rig_op *op, uint8_t *buf, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++) rig_send(rig, 0, 1, rig_key(1, i, 0), buf, 1 << 20, &op[i]);
}

void rig_death(const struct rig_options *options, int signal, const char *words, int within_ms)
{
    struct rig rig;
    struct rig_options o = *options;
    o.peer_timeout_ms = 600;
    static uint8_t buf[1 << 20];
    static struct rig_op op[40];
    memset(op, 0, sizeof op);
    struct rig_child c = rig_start_child(&rig, &o, NULL);
    send_some(&rig, op, buf, 0, 20);
    for (int i = 0; i < 10; i++) rig_until(&rig, &op[i].done, 1, 10000);
    kill(c.pid, signal);
    uint64_t t0 = gb_now_ns();
    send_some(&rig, op, buf, 20, 40);
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 5000);
    assert_true(gb_now_ns() - t0 < (uint64_t)within_ms * 1000000);
    assert_int_equal(rig.net[0].last[GB_NET_PEER_LOST].status, GPUBRIDGE_ERR_PEER_LOST);
    if (!strstr(rig.net[0].text, words)) print_error("%s\n", rig.net[0].text);
    assert_non_null(strstr(rig.net[0].text, words));
    /* Everything posted comes back, with the reason. */
    for (int i = 0; i < 40; i++) rig_until(&rig, &op[i].done, 1, 2000);
    assert_int_equal(op[39].status, GPUBRIDGE_ERR_PEER_LOST);
    assert_non_null(strstr(op[39].text, words));
    rig_end_child(&c);
    t0 = gb_now_ns();
    gb_net_close(rig.net[0].net, 0, "");
    assert_true(gb_now_ns() - t0 < 1000000000); /* nothing to wait for */
}

int rig_count_fds(int check_cloexec)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    struct dirent *e;
    while ((e = readdir(d)) != NULL) {
        int fd = atoi(e->d_name);
        if (e->d_name[0] == '.' || fd == dirfd(d)) continue;
        n++;
        if (check_cloexec && fd > 2) assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    }
    closedir(d);
    return n;
}
