/* SPDX-License-Identifier: Apache-2.0
 * What every transport must do, the same tests for each: the first argument names the transport, the second one
 * (optional) a fault specification under which everything must still be right. */
#include "net_rig.h"

#include "base/clock.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static struct rig_options options = {.lanes = 2};
static int slow; /* under a fault: fewer messages */

static uint32_t rnd_state = 1;
static uint32_t rnd(void)
{
    rnd_state = rnd_state * 1664525u + 1013904223u;
    return rnd_state >> 8;
}

static void test_sizes(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {0, 1, 8, 63, 64, 65, 8191, 8192, 8193, 65536, 1000003, 4 << 20};
    struct rig rig;
    rig_open(&rig, 2, &options);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int late = 0; late < 2; late++) { /* receive posted first, or after the send */
            struct rig_op s = {0}, r = {0};
            uint64_t n = sizes[i];
            uint8_t *a = malloc(n + 1), *b = malloc(n + 1);
            rig_fill(a, n, i + 7);
            memset(b, 0xee, n + 1);
            struct gb_key key = rig_key(5, (uint32_t)i, (uint32_t)late);
            if (!late) rig_recv(&rig, 1, 0, key, b, n, &r);
            rig_send(&rig, 0, 1, key, a, n, &s);
            if (late) {
                for (int k = 0; k < 50; k++) rig_poll(&rig);
                rig_recv(&rig, 1, 0, key, b, n, &r);
            }
            rig_until(&rig, &s.done, 1, 20000);
            rig_until(&rig, &r.done, 1, 20000);
            assert_int_equal(s.status, 0);
            assert_int_equal(r.status, 0);
            assert_true(rig_check(b, n, i + 7));
            assert_int_equal(b[n], 0xee);
            free(a);
            free(b);
        }
    rig_close(&rig);
}

/* Random sizes both ways, posted in different random orders at both ends. */
struct storm {
    uint64_t bytes;
    uint8_t *a, *b;
    struct rig_op s, r;
    int from;
};

static void shuffle(int *v, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int k = (int)(rnd() % (uint32_t)(i + 1)), t = v[i];
        v[i] = v[k];
        v[k] = t;
    }
}

static void run_storm(struct rig *rig, int count, uint64_t max)
{
    struct storm *m = calloc((size_t)count, sizeof *m);
    int *sends = malloc((size_t)count * sizeof(int)), *recvs = malloc((size_t)count * sizeof(int));
    for (int i = 0; i < count; i++) {
        m[i].bytes = rnd() % 3 ? rnd() % 300 : rnd() % max;
        m[i].from = (int)(rnd() & 1);
        m[i].a = malloc(m[i].bytes + 1);
        m[i].b = calloc(1, m[i].bytes + 1);
        rig_fill(m[i].a, m[i].bytes, (uint64_t)i);
        sends[i] = recvs[i] = i;
    }
    shuffle(sends, count);
    shuffle(recvs, count);
    for (int i = 0, k = 0; i < count || k < count;) {
        int n = (int)(rnd() % 20);
        for (; n-- > 0 && i < count; i++) {
            struct storm *x = &m[sends[i]];
            rig_send(rig, x->from, !x->from, rig_key(77, (uint32_t)sends[i] / 8, (uint32_t)sends[i]), x->a, x->bytes,
                     &x->s);
        }
        n = (int)(rnd() % 20);
        for (; n-- > 0 && k < count; k++) {
            struct storm *x = &m[recvs[k]];
            rig_recv(rig, !x->from, x->from, rig_key(77, (uint32_t)recvs[k] / 8, (uint32_t)recvs[k]), x->b, x->bytes,
                     &x->r);
        }
        rig_poll(rig);
    }
    for (int i = 0; i < count; i++) {
        rig_until(rig, &m[i].s.done, 1, 60000);
        rig_until(rig, &m[i].r.done, 1, 60000);
        assert_int_equal(m[i].s.status, 0);
        assert_int_equal(m[i].r.status, 0);
        assert_true(rig_check(m[i].b, m[i].bytes, (uint64_t)i));
        free(m[i].a);
        free(m[i].b);
    }
    for (int i = 0; i < 20; i++) rig_poll(rig);
    for (int i = 0; i < count; i++) assert_true(m[i].s.done == 1 && m[i].r.done == 1);
    free(m);
    free(sends);
    free(recvs);
}

static void test_storm(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &options);
    run_storm(&rig, slow ? 300 : 3000, 100000);
    rig_close(&rig);
}

static void test_many(void **state)
{
    (void)state;
    enum { N = 10000 };
    int n = slow ? 1000 : N;
    struct rig rig;
    rig_open(&rig, 2, &options);
    struct rig_op *s = calloc(N, sizeof *s), *r = calloc(N, sizeof *r);
    uint32_t *in = calloc(N, sizeof *in), *out = calloc(N, sizeof *out);
    /* All sends first, in order; receives from the last to the first: most wait at the receiver or for a grant. */
    for (int i = 0; i < n; i++) {
        out[i] = (uint32_t)i * 7u;
        rig_send(&rig, 0, 1, rig_key(9, (uint32_t)i, 0), &out[i], 4, &s[i]);
        if (i % 64 == 0) rig_poll(&rig);
    }
    for (int i = n - 1; i >= 0; i--) rig_recv(&rig, 1, 0, rig_key(9, (uint32_t)i, 0), &in[i], 4, &r[i]);
    for (int i = 0; i < n; i++) {
        rig_until(&rig, &r[i].done, 1, 30000);
        rig_until(&rig, &s[i].done, 1, 30000);
        assert_int_equal(r[i].status, 0);
        assert_int_equal(in[i], (uint32_t)i * 7u);
    }
    free(s);
    free(r);
    free(in);
    free(out);
    rig_close(&rig);
}

static void test_64_mib(void **state)
{
    (void)state;
    uint64_t n = slow ? 1 << 20 : 64 << 20;
    uint8_t *a = malloc(n), *b = malloc(n);
    struct rig rig;
    struct rig_op s = {0}, r = {0};
    rig_fill(a, n, 3);
    rig_open(&rig, 2, &options);
    rig_send(&rig, 1, 0, rig_key(1, 1, 1), a, n, &s);
    rig_recv(&rig, 0, 1, rig_key(1, 1, 1), b, n, &r);
    rig_until(&rig, &r.done, 1, 60000);
    rig_until(&rig, &s.done, 1, 60000);
    assert_int_equal(r.status, 0);
    assert_true(rig_check(b, n, 3));
    assert_true(r.start_ns > 0);
    struct gb_link_counters c;
    gb_link_counters(rig.net[1].to[0], &c);
    assert_true(c.sent_bytes >= n && c.sent_bytes < n + 10000);
    rig_close(&rig);
    free(a);
    free(b);
}

/* 2 MiB of small messages without a receive: half of them has credit, the rest asks; nothing blocks another key. */
static void test_credit(void **state)
{
    (void)state;
    enum { N = 512, BYTES = 4096 };
    struct rig rig;
    rig_open(&rig, 2, &options);
    static uint8_t a[N][BYTES], b[N][BYTES];
    static struct rig_op s[N], r[N], s2, r2;
    memset(s, 0, sizeof s);
    memset(r, 0, sizeof r);
    memset(&s2, 0, sizeof s2);
    memset(&r2, 0, sizeof r2);
    memset(b, 0, sizeof b);
    for (int i = 0; i < N; i++) {
        rig_fill(a[i], BYTES, (uint64_t)i);
        rig_send(&rig, 0, 1, rig_key(2, 0, (uint32_t)i), a[i], BYTES, &s[i]);
        rig_poll(&rig);
    }
    int sent = 0;
    for (int i = 0; i < N; i++) sent += s[i].done;
    assert_true(sent > 200 && sent < 256);
    char x = 'x', y = 0;
    rig_recv(&rig, 1, 0, rig_key(3, 0, 0), &y, 1, &r2);
    rig_send(&rig, 0, 1, rig_key(3, 0, 0), &x, 1, &s2);
    rig_until(&rig, &r2.done, 1, 10000);
    assert_int_equal(y, 'x');
    for (int i = N - 1; i >= 0; i--) rig_recv(&rig, 1, 0, rig_key(2, 0, (uint32_t)i), b[i], BYTES, &r[i]);
    for (int i = 0; i < N; i++) {
        rig_until(&rig, &r[i].done, 1, 20000);
        rig_until(&rig, &s[i].done, 1, 20000);
        assert_true(rig_check(b[i], BYTES, (uint64_t)i));
    }
    /* And the credit is back: all of this round is eager again. */
    for (int i = 0; i < 200; i++) {
        memset(&s[i], 0, sizeof s[i]);
        memset(&r[i], 0, sizeof r[i]);
        rig_recv(&rig, 1, 0, rig_key(4, 0, (uint32_t)i), b[i], BYTES, &r[i]);
    }
    for (int i = 0; i < 200; i++) rig_send(&rig, 0, 1, rig_key(4, 0, (uint32_t)i), a[i], BYTES, &s[i]);
    rig_poll(&rig);
    for (int i = 0; i < 200; i++) rig_until(&rig, &r[i].done, 1, 20000);
    rig_close(&rig);
}

/* Every pairing of small and large, receive first or send first; both ends must hear of it where both still can. */
static void test_mismatch(void **state)
{
    (void)state;
    static const uint64_t sizes[][2] = {{100, 200},     {100, 50000},   {50000, 100},
                                        {50000, 60000}, {50000, 50000}, {64, 64}};
    struct rig rig;
    rig_open(&rig, 2, &options);
    static uint8_t a[60000], b[60000], zero[60000];
    for (uint32_t i = 0; i < 6; i++)
        for (uint32_t late = 0; late < 2; late++) {
            uint64_t n = sizes[i][0], m = sizes[i][1];
            struct gb_key key = rig_key(6, i, late);
            struct gb_sig ss = rig_sig(n), rs = rig_sig(m);
            if (n == m) rs.dtype = 7;
            struct rig_op s = {0}, r = {0}, s2 = {0}, r2 = {0};
            memset(a, 1, sizeof a);
            if (!late) assert_int_equal(gb_link_recv(rig.net[1].to[0], &key, &rs, b, m, &r), 0);
            for (int k = 0; k < 20; k++) rig_poll(&rig);
            assert_int_equal(gb_link_send(rig.net[0].to[1], &key, &ss, a, n, &s), 0);
            for (int k = 0; k < 20; k++) rig_poll(&rig);
            if (late) assert_int_equal(gb_link_recv(rig.net[1].to[0], &key, &rs, b, m, &r), 0);
            rig_until(&rig, &r.done, 1, 5000);
            rig_until(&rig, &s.done, 1, 5000);
            assert_int_equal(r.status, GPUBRIDGE_ERR_MISMATCH);
            assert_int_equal(r.sig.count, n);
            assert_int_equal(r.bytes, n);
            if (n > GB_EAGER_BYTES) { /* a small message has left before anybody could know */
                assert_int_equal(s.status, GPUBRIDGE_ERR_MISMATCH);
                assert_int_equal(s.sig.count, m);
                assert_int_equal(s.sig.dtype, rs.dtype);
            }
            assert_memory_equal(b, zero, sizeof b);
            /* The link goes on. */
            rig_send(&rig, 1, 0, rig_key(8, i, late), a, 10000, &s2);
            rig_recv(&rig, 0, 1, rig_key(8, i, late), a + 10000, 10000, &r2);
            rig_until(&rig, &r2.done, 1, 5000);
            rig_until(&rig, &s2.done, 1, 5000);
        }
    rig_close(&rig);
}

static void test_duplicate_key(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &options);
    static uint8_t a[20000];
    struct rig_op r = {0}, s = {0};
    struct gb_key key = rig_key(6, 0, 0);
    struct gb_sig sig = rig_sig(20000);
    rig_send(&rig, 0, 1, key, a, 20000, &s);
    assert_int_equal(gb_link_send(rig.net[0].to[1], &key, &sig, a, 20000, &s), GPUBRIDGE_ERR_INVALID);
    rig_recv(&rig, 0, 1, key, a, 20000, &r);
    assert_int_equal(gb_link_recv(rig.net[0].to[1], &key, &sig, a, 20000, &r), GPUBRIDGE_ERR_INVALID);
    rig_close(&rig);
}

/* Cancel at every moment: posted, announced, granted, half sent, half received. */
static void cancel_once(struct rig *rig, uint64_t group, int polls, int receiver_first, int whole_group)
{
    enum { BYTES = 3 << 20 };
    static uint8_t a[BYTES], b[BYTES], c[200000];
    struct rig_op s = {0}, r = {0}, s2 = {0}, r2 = {0}, other = {0};
    uint8_t byte = 9;
    memset(a, 0x55, BYTES);
    memset(b, 0, BYTES);
    if (receiver_first) rig_recv(rig, 1, 0, rig_key(group, 1, 0), b, BYTES, &r);
    rig_send(rig, 0, 1, rig_key(group, 1, 0), a, BYTES, &s);
    if (!receiver_first) rig_recv(rig, 1, 0, rig_key(group, 1, 0), b, BYTES, &r);
    rig_recv(rig, 1, 0, rig_key(group, 2, 0), &byte, 1, &other);
    for (int i = 0; i < polls; i++) rig_poll(rig);
    int both = polls & 1;
    gb_net_cancel(rig->net[1].net, group, whole_group ? -1 : 1);
    rig_until(rig, &r.done, 1, 10000);
    assert_true(r.status == GPUBRIDGE_ERR_CANCELLED || r.status == 0);
    /* After the event the buffer is ours: nobody may write into it any more. */
    memset(b, 0x77, BYTES);
    if (both) {
        gb_net_cancel(rig->net[0].net, group, whole_group ? -1 : 1);
        rig_until(rig, &s.done, 1, 10000);
        memset(a, 0x33, BYTES);
    }
    rig_send(rig, 0, 1, rig_key(group + 1, 1, 0), c, 100000, &s2); /* another group is untouched */
    rig_recv(rig, 1, 0, rig_key(group + 1, 1, 0), c + 100000, 100000, &r2);
    rig_until(rig, &r2.done, 1, 10000);
    rig_until(rig, &s2.done, 1, 10000);
    assert_int_equal(r2.status, 0);
    if (!both) gb_net_cancel(rig->net[0].net, group, whole_group ? -1 : 1);
    rig_until(rig, &s.done, 1, 10000);
    assert_true(s.status == GPUBRIDGE_ERR_CANCELLED || s.status == 0);
    for (int i = 0; i < BYTES; i++) assert_true(b[i] == 0x77);
    assert_int_equal(other.done, whole_group);
    gb_net_cancel(rig->net[1].net, group, -1);
    rig_until(rig, &other.done, 1, 1000);
    assert_int_equal(other.status, GPUBRIDGE_ERR_CANCELLED);
    for (int i = 0; i < 2; i++) gb_net_forget(rig->net[i].net, group);
}

static void test_cancel(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &options);
    for (int i = 0; i < (slow ? 16 : 64); i++) cancel_once(&rig, 1000 + 10 * (uint64_t)i, i / 2, i & 1, (i & 2) != 0);
    /* A cancelled group refuses what comes, until it is forgotten. */
    struct rig_op s = {0};
    char c = 0;
    gb_net_cancel(rig.net[0].net, 50, -1);
    rig_send(&rig, 0, 1, rig_key(50, 7, 0), &c, 1, &s);
    rig_until(&rig, &s.done, 1, 1000);
    assert_int_equal(s.status, GPUBRIDGE_ERR_CANCELLED);
    rig_close(&rig);
}

static void test_three_nets(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 3, &options);
    static uint8_t buf[3][3][100000], in[3][3][100000];
    static struct rig_op s[3][3], r[3][3];
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++) {
            if (a == b) continue;
            rig_fill(buf[a][b], 100000, (uint64_t)(a * 3 + b));
            memset(&s[a][b], 0, sizeof s[a][b]);
            memset(&r[a][b], 0, sizeof r[a][b]);
            rig_send(&rig, a, b, rig_key(1, 1, 1), buf[a][b], 100000, &s[a][b]); /* one key, every pair */
            rig_recv(&rig, b, a, rig_key(1, 1, 1), in[a][b], 100000, &r[a][b]);
        }
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++) {
            if (a == b) continue;
            rig_until(&rig, &r[a][b].done, 1, 10000);
            rig_until(&rig, &s[a][b].done, 1, 10000);
            assert_true(rig_check(in[a][b], 100000, (uint64_t)(a * 3 + b)));
        }
    rig_close(&rig);
}

/* Receive from anyone: an unexpected message is announced once, with its key and length, and can then be received. */
static void test_unexpected(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &options);
    static uint8_t a[70000], b[70000];
    static const uint64_t sizes[] = {0, 5, 8192, 70000};
    for (uint32_t i = 0; i < 4; i++) {
        struct rig_op s = {0}, r = {0};
        struct gb_key key = rig_key(3, i, GB_XID_P2P | 42);
        rig_fill(a, sizes[i], i);
        rig_send(&rig, 0, 1, key, a, sizes[i], &s);
        rig_until(&rig, &rig.net[1].seen[GB_NET_UNEXPECTED], (int)i + 1, 5000);
        struct gb_net_event *ev = &rig.net[1].last[GB_NET_UNEXPECTED];
        assert_true(ev->key.seq == i && ev->key.xid == (GB_XID_P2P | 42) && ev->bytes == sizes[i]);
        assert_true(ev->sig.count == sizes[i] && ev->link == rig.net[1].to[0]);
        rig_recv(&rig, 1, 0, key, b, sizes[i], &r);
        rig_until(&rig, &r.done, 1, 5000);
        rig_until(&rig, &s.done, 1, 5000);
        assert_true(r.status == 0 && rig_check(b, sizes[i], i));
    }
    /* With the receive posted first there is nothing to announce, also when the payload overtakes its announcement. */
    for (uint32_t i = 0; i < 40; i++) {
        struct rig_op s = {0}, r = {0};
        struct gb_key key = rig_key(4, i, GB_XID_P2P | 42);
        rig_recv(&rig, 1, 0, key, b, 70000, &r);
        if (i & 1) rig_poll(&rig);
        rig_send(&rig, 0, 1, key, a, 70000, &s);
        rig_until(&rig, &r.done, 1, 5000);
        rig_until(&rig, &s.done, 1, 5000);
    }
    for (int i = 0; i < 100; i++) rig_poll(&rig);
    assert_int_equal(rig.net[1].seen[GB_NET_UNEXPECTED], 4);
    rig_close(&rig);
}

/* What was announced can be announced anew, once whatever is queued, and without what has been received since. */
static void test_announce(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &options);
    static uint8_t a[70000], b[70000];
    static const uint64_t sizes[] = {0, 5, 8192, 70000};
    struct rig_op s[5] = {0}, r[4] = {0};
    const int *seen = &rig.net[1].seen[GB_NET_UNEXPECTED];
    for (uint32_t i = 0; i < 4; i++) rig_send(&rig, 0, 1, rig_key(3, i, GB_XID_P2P | 42), a, sizes[i], &s[i]);
    rig_send(&rig, 0, 1, rig_key(3, 4, 0), a, 5, &s[4]); /* of a collective */
    rig_until(&rig, seen, 4, 5000);
    for (int left = 4; left >= 0; left--) {
        int before = *seen;
        for (int k = 0; k < 3; k++) gb_net_announce(rig.net[1].net, 3);
        gb_net_announce(rig.net[1].net, 4);
        for (int k = 0; k < 20; k++) rig_poll(&rig);
        assert_int_equal(*seen - before, left);
        if (left == 0) break;
        int i = 4 - left;
        rig_recv(&rig, 1, 0, rig_key(3, (uint32_t)i, GB_XID_P2P | 42), b, sizes[i], &r[i]);
        rig_until(&rig, &r[i].done, 1, 5000);
        rig_until(&rig, &s[i].done, 1, 5000);
    }
    rig_close(&rig);
}

static void test_control_messages(void **state)
{
    (void)state;
    struct rig rig = {.nets = 2};
    char big[GB_CTRL_BYTES + 1] = {0};
    for (int i = 0; i < 2; i++) assert_int_equal(rig_open_net(&rig, i, &options), 0);
    struct gb_net_peer pa, pb;
    rig_peer(&rig, 0, &pa);
    rig_peer(&rig, 1, &pb);
    /* To a link that still connects, from the accepting side, before the peer asked for the link. */
    assert_int_equal(gb_link_get(rig.net[1].net, &pa, &rig.net[1].to[0]), 0);
    assert_int_equal(gb_link_ctrl(rig.net[1].to[0], "early", 6), 0);
    assert_int_equal(gb_link_get(rig.net[0].net, &pb, &rig.net[0].to[1]), 0);
    rig_until(&rig, &rig.net[0].seen[GB_NET_CTRL], 1, 5000);
    assert_string_equal(rig.net[0].ctrl, "early");
    for (int i = 0; i < 200; i++) {
        memset(big, 'a' + i % 26, GB_CTRL_BYTES);
        assert_int_equal(gb_link_ctrl(rig.net[0].to[1], big, GB_CTRL_BYTES), 0);
    }
    assert_int_equal(gb_link_ctrl(rig.net[0].to[1], big, GB_CTRL_BYTES + 1), GPUBRIDGE_ERR_INVALID);
    rig_until(&rig, &rig.net[1].seen[GB_NET_CTRL], 200, 5000);
    assert_memory_equal(rig.net[1].ctrl, big, GB_CTRL_BYTES);
    rig_close(&rig);
}

static _Atomic int ran;
static void job(void *arg)
{
    atomic_fetch_add(&ran, *(int *)arg);
}

static void test_jobs_and_wake(void **state)
{
    (void)state;
    struct rig rig;
    struct rig_op op = {0};
    int one = 1;
    rig_open(&rig, 2, &options);
    atomic_store(&ran, 0);
    for (int i = 0; i < 1000; i++) gb_net_job(rig.net[0].net, job, &one, &op);
    rig_until(&rig, &op.done, 1000, 10000);
    assert_int_equal(atomic_load(&ran), 1000);
    /* A wake before the wait is not lost; without one the wait ends with its time. */
    uint64_t t0 = gb_now_ns();
    gb_net_wake(rig.net[0].net);
    gb_net_wait(rig.net[0].net, 5000000000);
    assert_true(gb_now_ns() - t0 < 2000000000);
    /* A message ends a wait. */
    struct rig_op s = {0}, r = {0};
    char x = 'q', y = 0;
    rig_recv(&rig, 1, 0, rig_key(1, 0, 0), &y, 1, &r);
    rig_send(&rig, 0, 1, rig_key(1, 0, 0), &x, 1, &s);
    while (!r.done) {
        gb_net_wait(rig.net[1].net, 10000000000);
        assert_true(gb_now_ns() - t0 < 8000000000);
        rig_poll(&rig);
    }
    assert_int_equal(y, 'q');
    rig_close(&rig);
}

static void *close_broken(void *net)
{
    gb_net_close(net, GPUBRIDGE_ERR_DEVICE, "the GPU fell off");
    return NULL;
}

/* What was sent before a goodbye arrives before PEER_LEFT; afterwards everything fails at once, with the reason. */
static void test_goodbye(void **state)
{
    (void)state;
    enum { N = 100 };
    struct rig rig;
    rig_open(&rig, 2, &options);
    static uint8_t a[N][5000], b[N][5000];
    static struct rig_op s[N], r[N];
    memset(s, 0, sizeof s);
    memset(r, 0, sizeof r);
    struct rig_op late = {0}, none = {0};
    for (int i = 0; i < N; i++) {
        rig_fill(a[i], 5000, (uint64_t)i);
        rig_send(&rig, 0, 1, rig_key(1, (uint32_t)i, 0), a[i], 5000, &s[i]);
    }
    rig_recv(&rig, 1, 0, rig_key(2, 0, 0), b[0], 100000, &none);
    struct gb_net *leaver = rig.net[0].net;
    rig.net[0].net = NULL;
    for (int i = 0; i < N / 2; i++) rig_recv(&rig, 1, 0, rig_key(1, (uint32_t)i, 0), b[i], 5000, &r[i]);
    pthread_t closer;
    assert_int_equal(pthread_create(&closer, NULL, close_broken, leaver), 0);
    rig_until(&rig, &rig.net[1].seen[GB_NET_PEER_LEFT], 1, 5000);
    pthread_join(closer, NULL);
    assert_non_null(strstr(rig.net[1].text, "rank 0 (host-a) left: the GPU fell off"));
    assert_int_equal(rig.net[1].last[GB_NET_PEER_LEFT].status, GPUBRIDGE_ERR_DEVICE);
    for (int i = N / 2; i < N; i++) rig_recv(&rig, 1, 0, rig_key(1, (uint32_t)i, 0), b[i], 5000, &r[i]);
    for (int i = 0; i < N; i++) {
        rig_until(&rig, &r[i].done, 1, 1000);
        assert_int_equal(r[i].status, 0);
        assert_true(rig_check(b[i], 5000, (uint64_t)i));
    }
    rig_until(&rig, &none.done, 1, 1000);
    assert_int_equal(none.status, GPUBRIDGE_ERR_PEER_LOST);
    assert_non_null(strstr(none.text, "the GPU fell off"));
    rig_send(&rig, 1, 0, rig_key(1, 1, 1), a, 1, &late);
    rig_until(&rig, &late.done, 1, 1000);
    assert_int_equal(late.status, GPUBRIDGE_ERR_PEER_LOST);
    assert_int_equal(gb_link_state(rig.net[1].to[0]), GB_LINK_LEFT);
    assert_int_equal(gb_link_ctrl(rig.net[1].to[0], "x", 1), GPUBRIDGE_ERR_PEER_LOST);
    gb_net_close(rig.net[1].net, 0, "");
}

int main(int argc, char **argv)
{
    options.transport = argc > 1 ? argv[1] : "tcp";
    options.fault = argc > 2 ? argv[2] : NULL;
    options.checksum = argc > 3;
    slow = argc > 2 && argv[2][0];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_storm),    cmocka_unit_test(test_many),
        cmocka_unit_test(test_64_mib),        cmocka_unit_test(test_credit),   cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_duplicate_key), cmocka_unit_test(test_cancel),   cmocka_unit_test(test_three_nets),
        cmocka_unit_test(test_unexpected),    cmocka_unit_test(test_announce), cmocka_unit_test(test_control_messages),
        cmocka_unit_test(test_jobs_and_wake), cmocka_unit_test(test_goodbye),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
