/* SPDX-License-Identifier: Apache-2.0
 * Loans over a real link of one host, without a device: memory that is offered, taken or not, messages that are read
 * where they lie, memory that is not what it should be, and control messages that cannot be. */
#include "net_rig.h"

#include "base/log.h"
#include "transport/net_impl.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

#define REGIONS 20 /* more than may be on their way at a time */
#define BYTES   (64u << 10)

static const struct rig_options shm = {.transport = "shm", .lanes = 2, .ifname = "lo", .connect_timeout_ms = 20000};
static const struct rig_options tcp = {.transport = "tcp", .lanes = 2, .ifname = "lo", .connect_timeout_ms = 20000};

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

static struct {
    enum gb_region_use use; /* what net 1 answers */
    int offered, loans, returned;
    void *loan;
    const void *data;
} saw;

static void watch(struct rig *rig, int who, const struct gb_net_event *event)
{
    (void)rig;
    if (event->kind == GB_NET_REGION) {
        assert_int_equal(who, 1);
        saw.offered++;
        gb_region_answer(event->cookie, saw.use);
    }
    if (event->kind == GB_NET_DONE && event->loan) {
        saw.loans++;
        saw.loan = event->loan;
        saw.data = event->data;
    }
    saw.returned += event->kind == GB_NET_RETURNED;
}

static void open_pair(struct rig *rig, const struct rig_options *options, enum gb_region_use use)
{
    memset(&saw, 0, sizeof saw);
    saw.use = use;
    rig_open(rig, 2, options);
    rig->on_event = watch;
}

/* Net 0 learns what became of its regions: the control threads talk, so there is nothing to poll for. */
static void await_answers(struct rig *rig, uint32_t n, int taken)
{
    struct gb_link *link = rig->net[0].to[1];
    for (int ms = 0; ms < 5000; ms++) {
        rig_poll(rig);
        pthread_mutex_lock(&link->lock);
        uint32_t have = 0;
        for (uint32_t i = 0; i < n; i++) have += link->taken[i];
        const int refused = link->told_refusal;
        pthread_mutex_unlock(&link->lock);
        if (taken ? have == n : refused) return;
        usleep(1000);
    }
    fail_msg("no answers about %u regions within 5 s", n);
}

static void post_borrow(struct rig *rig, uint32_t seq, void *buf, struct rig_op *op)
{
    struct gb_key key = rig_key(1, seq, 0);
    struct gb_sig sig = rig_sig(BYTES);
    assert_int_equal(gb_link_borrow(rig->net[1].to[0], &key, &sig, buf, BYTES, op), 0);
}

/* One message from `src` that must be read in place. */
static void lend_one(struct rig *rig, uint32_t seq, const void *src, uint64_t seed)
{
    static uint8_t room[BYTES];
    struct rig_op sent = {0}, got = {0};
    const int loans = saw.loans;
    memset(room, 0x5a, sizeof room);
    post_borrow(rig, seq, room, &got);
    rig_send(rig, 0, 1, rig_key(1, seq, 0), src, BYTES, &sent);
    rig_until(rig, &got.done, 1, 5000);
    assert_int_equal(saw.loans, loans + 1);
    assert_int_equal(got.status, 0);
    assert_true(rig_check(saw.data, BYTES, seed));
    assert_ptr_not_equal(saw.data, src);
    for (size_t i = 0; i < sizeof room; i++) assert_int_equal(room[i], 0x5a);
    for (int i = 0; i < 50; i++) rig_poll(rig);
    assert_int_equal(sent.done, 0);
    gb_link_return(rig->net[1].to[0], saw.loan);
    rig_until(rig, &sent.done, 1, 5000);
    assert_int_equal(sent.status, 0);
}

static void copy_one(struct rig *rig, uint32_t seq, const void *src, uint64_t seed)
{
    static uint8_t room[BYTES];
    struct rig_op sent = {0}, got = {0};
    memset(room, 0x5a, sizeof room);
    post_borrow(rig, seq, room, &got);
    rig_send(rig, 0, 1, rig_key(1, seq, 0), src, BYTES, &sent);
    rig_until(rig, &got.done, 1, 5000);
    rig_until(rig, &sent.done, 1, 5000);
    assert_int_equal(saw.loans, 0);
    assert_true(rig_check(room, BYTES, seed));
}

static uint64_t sent_bytes(struct rig *rig)
{
    struct gb_link_counters c;
    gb_link_counters(rig->net[0].to[1], &c);
    return c.sent_bytes;
}

static void test_lend(void **state)
{
    (void)state;
    struct rig rig = {0};
    struct gb_region region[REGIONS];
    const int before = rig_count_fds(0);
    open_pair(&rig, &shm, GB_REGION_TAKEN);
    assert_true(gb_link_lends(rig.net[0].to[1]));
    for (uint32_t i = 0; i < REGIONS; i++) {
        assert_int_equal(gb_region_make(2 * BYTES, &region[i]), 0);
        rig_fill((uint8_t *)region[i].base + 4096, BYTES, i);
        assert_int_equal(gb_net_offer(rig.net[0].net, &region[i]), 0);
    }
    await_answers(&rig, REGIONS, 1);
    assert_int_equal(saw.offered, REGIONS);
    const uint64_t start = sent_bytes(&rig);
    for (uint32_t i = 0; i < REGIONS; i++) lend_one(&rig, i, (uint8_t *)region[i].base + 4096, i);
    assert_true(sent_bytes(&rig) - start < (uint64_t)REGIONS * 512);
    struct gb_link_counters c;
    gb_link_counters(rig.net[1].to[0], &c);
    assert_int_equal(c.borrowed_bytes, (uint64_t)REGIONS * BYTES);
    /* Outside of all regions. */
    static uint8_t plain[BYTES];
    rig_fill(plain, BYTES, 77);
    saw.loans = 0;
    copy_one(&rig, 100, plain, 77);
    rig_close(&rig);
    for (uint32_t i = 0; i < REGIONS; i++) gb_region_free(&region[i]);
    assert_int_equal(rig_count_fds(0), before);
}

/* Cancelled while lent: told at once, and again when the memory is free. */
static void test_cancel(void **state)
{
    (void)state;
    struct rig rig = {0};
    struct gb_region region;
    struct rig_op sent = {0}, got = {0};
    static uint8_t room[BYTES];
    open_pair(&rig, &shm, GB_REGION_TAKEN);
    assert_int_equal(gb_region_make(BYTES, &region), 0);
    assert_int_equal(gb_net_offer(rig.net[0].net, &region), 0);
    await_answers(&rig, 1, 1);
    post_borrow(&rig, 1, room, &got);
    rig_send(&rig, 0, 1, rig_key(1, 1, 0), region.base, BYTES, &sent);
    rig_until(&rig, &got.done, 1, 5000);
    gb_net_cancel(rig.net[0].net, 1, -1);
    rig_until(&rig, &sent.done, 1, 5000);
    assert_int_equal(sent.status, GPUBRIDGE_ERR_CANCELLED);
    for (int i = 0; i < 50; i++) rig_poll(&rig);
    assert_int_equal(saw.returned, 0);
    gb_link_return(rig.net[1].to[0], saw.loan);
    rig_until(&rig, &saw.returned, 1, 5000);
    rig_close(&rig);
    gb_region_free(&region);
}

static void test_refused(void **state)
{
    (void)state;
    struct rig rig = {0};
    struct gb_region region;
    open_pair(&rig, &shm, GB_REGION_FAILED);
    assert_int_equal(gb_region_make(BYTES, &region), 0);
    rig_fill(region.base, BYTES, 5);
    assert_int_equal(gb_net_offer(rig.net[0].net, &region), 0);
    await_answers(&rig, 1, 0);
    assert_non_null(strstr(logged, "cannot read our staging memory in place"));
    copy_one(&rig, 1, region.base, 5);
    rig_close(&rig);
    gb_region_free(&region);
}

/* No seals; shorter than announced.  Nobody maps it, nobody is harmed, messages are copied. */
static void test_foreign_memory(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct rig rig = {0};
        struct gb_region good;
        open_pair(&rig, &shm, GB_REGION_TAKEN);
        assert_int_equal(gb_region_make(BYTES, &good), 0);
        int fd = k ? dup(good.fd) : memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (!k) assert_int_equal(fallocate(fd, 0, 0, BYTES + GB_REGION_HEAD), 0);
        struct gb_region bad = {.fd = fd, .base = good.base, .bytes = k ? 2 * BYTES : BYTES};
        logged[0] = 0;
        assert_int_equal(gb_net_offer(rig.net[0].net, &bad), 0);
        await_answers(&rig, 1, 0);
        assert_int_equal(saw.offered, 0);
        assert_non_null(strstr(logged, "is not sealed shared memory"));
        rig_fill(good.base, BYTES, 6);
        copy_one(&rig, 1, good.base, 6);
        rig_close(&rig);
        close(fd);
        gb_region_free(&good);
    }
}

static void no_descriptor(struct rig *rig)
{
    uint8_t body[16] = {0};
    body[9] = 1; /* 256 bytes: not whole pages */
    gb_control_queue(rig->net[0].to[1], GB_CTL_REGION, body, sizeof body);
    gb_control_wake(rig->net[0].net);
}

static void out_of_order(struct rig *rig)
{
    uint8_t body[16] = {3};
    body[10] = 1;
    gb_control_queue(rig->net[0].to[1], GB_CTL_REGION, body, sizeof body);
    gb_control_wake(rig->net[0].net);
}

static void not_offered(struct rig *rig)
{
    const uint8_t body[8] = {0, 0, 0, 0, 1};
    gb_control_queue(rig->net[0].to[1], GB_CTL_TAKEN, body, sizeof body);
    gb_control_wake(rig->net[0].net);
}

static void test_impossible(void **state)
{
    (void)state;
    static const struct {
        void (*lie)(struct rig *rig);
        const struct rig_options *options;
        const char *words;
    } lies[] = {{no_descriptor, &shm, "an offer of shared staging that cannot be"},
                {out_of_order, &shm, "an offer of shared staging that cannot be"},
                {out_of_order, &tcp, "where none was agreed"},
                {not_offered, &shm, "that was not offered"}};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct rig rig = {0};
        open_pair(&rig, lies[i].options, GB_REGION_TAKEN);
        lies[i].lie(&rig);
        rig_until(&rig, &rig.net[1].seen[GB_NET_PEER_LOST], 1, 5000);
        assert_non_null(strstr(rig.net[1].text, lies[i].words));
        rig_close(&rig);
    }
}

static void test_tcp_does_not_lend(void **state)
{
    (void)state;
    struct rig rig = {0};
    struct gb_region region;
    open_pair(&rig, &tcp, GB_REGION_TAKEN);
    assert_false(gb_link_lends(rig.net[0].to[1]));
    assert_int_equal(gb_region_make(BYTES, &region), 0);
    rig_fill(region.base, BYTES, 8);
    assert_int_equal(gb_net_offer(rig.net[0].net, &region), 0);
    copy_one(&rig, 1, region.base, 8);
    assert_int_equal(saw.offered, 0);
    rig_close(&rig);
    gb_region_free(&region);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lend),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test_setup(test_refused, keep_log),
        cmocka_unit_test_setup(test_foreign_memory, keep_log),
        cmocka_unit_test_setup(test_impossible, keep_log),
        cmocka_unit_test(test_tcp_does_not_lend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
