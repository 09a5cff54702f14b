/* SPDX-License-Identifier: Apache-2.0
 * Damage, sudden ends and silence on each kind of lane: always loud, always naming the peer, never wrong data. */
#include "net_rig.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

enum { BIG = 300000, SMALL = 900 };
static const char *transport = "inproc";
static uint8_t a[BIG], b[BIG], c[SMALL], d[SMALL];

/* Net 0 misbehaves while it sends a large and a small message to net 1. */
static void misbehave(const char *spec, int status, const char *words, int64_t within_ms)
{
    struct rig rig;
    struct rig_options o = {.transport = transport, .lanes = 1, .checksum = 1, .fault = spec, .peer_timeout_ms = 800};
    struct rig_op s = {0}, r = {0}, s2 = {0}, r2 = {0};
    print_message("%s\n", spec);
    rig_open(&rig, 2, &o);
    rig_fill(a, BIG, 1);
    rig_fill(c, SMALL, 2);
    memset(b, 0, BIG);
    memset(d, 0, SMALL);
    rig_recv(&rig, 1, 0, rig_key(1, 1, 1), b, BIG, &r);
    rig_recv(&rig, 1, 0, rig_key(1, 1, 2), d, SMALL, &r2);
    uint64_t t0 = gb_now_ns();
    rig_send(&rig, 0, 1, rig_key(1, 1, 1), a, BIG, &s);
    rig_send(&rig, 0, 1, rig_key(1, 1, 2), c, SMALL, &s2);
    int rc = gb_link_ctrl(rig.net[0].to[1], "hello", 6);
    assert_true(rc == 0 || rc == GPUBRIDGE_ERR_PEER_LOST); /* a damaged heartbeat may have ended the link by now */
    rig_until(&rig, &rig.net[1].seen[GB_NET_PEER_LOST], 1, 8000);
    assert_true(gb_now_ns() - t0 < (uint64_t)within_ms * 1000000);
    assert_int_equal(rig.net[1].last[GB_NET_PEER_LOST].status, status);
    if (!strstr(rig.net[1].text, words)) print_error("%s\n", rig.net[1].text);
    assert_non_null(strstr(rig.net[1].text, "rank 0 (host-a)"));
    assert_non_null(strstr(rig.net[1].text, words));
    rig_until(&rig, &r.done, 1, 3000);
    rig_until(&rig, &r2.done, 1, 3000);
    if (r.status == 0) assert_true(rig_check(b, BIG, 1));
    if (r2.status == 0) assert_true(rig_check(d, SMALL, 2));
    assert_true(r.status != 0 || r2.status != 0 || strstr(spec, "control"));
    rig_until(&rig, &rig.net[0].seen[GB_NET_PEER_LOST], 1, 8000); /* and the other side hears of it */
    rig_close(&rig);
}

static void test_damage(void **state)
{
    (void)state;
    static const char *const specs[] = {
        "bulk:corrupt@0",      "bulk:corrupt@30",     "bulk:corrupt@63",     /* header */
        "bulk:corrupt@64",     "bulk:corrupt@150000", "bulk:corrupt@300063", /* payload */
        "bulk:corrupt@300064", "bulk:corrupt@300079",                        /* trailer */
        "express:corrupt@0",   "express:corrupt@45",  "express:corrupt@63",  /* header: the length among it */
        "express:corrupt@64",  "express:corrupt@963",                        /* payload */
        "control:corrupt@0",   "control:corrupt@5",   "control:corrupt@15",  "control:corrupt@17",
    };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        misbehave(specs[i], GPUBRIDGE_ERR_CHECKSUM, "damaged or impossible data", 4000);
}

static void test_sudden_end(void **state)
{
    (void)state;
    static const char *const specs[] = {"bulk:close@100000", "express:close@10", "control:close@0"};
    for (size_t i = 0; i < 3; i++)
        misbehave(specs[i], GPUBRIDGE_ERR_PEER_LOST, "closed its connection without a goodbye", 3000);
}

static void test_silence(void **state)
{
    (void)state;
    misbehave("control:stall@0", GPUBRIDGE_ERR_PEER_LOST, "silent for 0.8 s (stopped? host down?)", 4000);
    misbehave("control:drop@0", GPUBRIDGE_ERR_PEER_LOST, "silent for 0.8 s (stopped? host down?)", 4000);
}

/* A lane that swallows bytes while the peer lives: nothing completes, and a cancel still frees both buffers. */
static void swallowed(const char *spec)
{
    struct rig rig;
    struct rig_options o = {.transport = transport, .lanes = 1, .fault = spec};
    struct rig_op s = {0}, r = {0};
    print_message("%s\n", spec);
    rig_open(&rig, 2, &o);
    rig_recv(&rig, 1, 0, rig_key(1, 1, 1), b, BIG, &r);
    rig_send(&rig, 0, 1, rig_key(1, 1, 1), a, BIG, &s);
    assert_int_equal(rig_until_quiet(&rig, &r.done, 1, 300), -1);
    for (int i = 0; i < 2; i++) gb_net_cancel(rig.net[i].net, 1, -1);
    rig_until(&rig, &r.done, 1, 2000);
    rig_until(&rig, &s.done, 1, 2000);
    assert_int_equal(r.status, GPUBRIDGE_ERR_CANCELLED);
    rig_close(&rig);
}

static void test_swallowed(void **state)
{
    (void)state;
    swallowed("bulk:stall@100000");
    swallowed("bulk:drop@100000");
}

static void test_delay(void **state)
{
    (void)state;
    struct rig rig;
    struct rig_options o = {.transport = transport, .lanes = 2, .fault = "all:delay=300;all:short=5000"};
    struct rig_op s = {0}, r = {0};
    rig_open(&rig, 2, &o);
    rig_fill(a, BIG, 1);
    memset(b, 0, BIG);
    rig_send(&rig, 0, 1, rig_key(1, 1, 1), a, BIG, &s);
    rig_recv(&rig, 1, 0, rig_key(1, 1, 1), b, BIG, &r);
    rig_until(&rig, &r.done, 1, 10000);
    rig_until(&rig, &s.done, 1, 10000);
    assert_true(r.status == 0 && rig_check(b, BIG, 1));
    rig_close(&rig);
}

int main(int argc, char **argv)
{
    if (argc > 1) transport = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damage),    cmocka_unit_test(test_sudden_end), cmocka_unit_test(test_silence),
        cmocka_unit_test(test_swallowed), cmocka_unit_test(test_delay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
