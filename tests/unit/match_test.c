/* SPDX-License-Identifier: Apache-2.0
 * The matching machine alone, fed with frames: what a peer must not do is refused, and nothing of it reaches a buffer.
 */
#include "transport/match.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static struct {
    int frames, moved, events;
    struct gb_frame frame;
    struct gb_msg *msg;
    struct gb_net_event event;
    uint8_t place[GB_PLACE_BYTES];
} saw;

static int on_frame(void *arg, const struct gb_frame *f, const void *payload, int urgent)
{
    (void)arg, (void)urgent;
    saw.frames++;
    saw.frame = *f;
    if (f->type == GB_FRAME_LENT) memcpy(saw.place, payload, sizeof saw.place);
    return 0;
}
static void on_move(void *arg, struct gb_msg *m)
{
    (void)arg;
    saw.moved++;
    saw.msg = m;
    m->stage = GB_MSG_ACTIVE;
}
static void on_unqueue(void *arg, struct gb_msg *m)
{
    (void)arg, (void)m;
}
static void on_event(void *arg, const struct gb_net_event *event)
{
    (void)arg;
    saw.events++;
    saw.event = *event;
}

/* Our region 3, and the only one of the peer, which we have taken. */
static uint8_t ours[40000], theirs[40000];

static int on_find(void *arg, const struct gb_msg *m, struct gb_place *place)
{
    (void)arg;
    const uint8_t *at = m->buf;
    if (at < ours || at + m->bytes > ours + sizeof ours) return 0;
    *place = (struct gb_place){.region = 3, .offset = (uint64_t)(at - ours)};
    return 1;
}
static void *on_place(void *arg, const struct gb_place *place, uint64_t bytes)
{
    (void)arg;
    if (place->region || place->offset > sizeof theirs || bytes > sizeof theirs - place->offset) return NULL;
    return theirs + place->offset;
}
static const struct gb_match_hooks hooks = {.frame = on_frame,
                                            .move = on_move,
                                            .unqueue = on_unqueue,
                                            .stop = on_unqueue,
                                            .event = on_event,
                                            .find = on_find,
                                            .place = on_place};
static struct gb_cancel_set cancelled;
static struct gb_match mt;
static const char *why;
static const struct gb_sig sig = {.op = 1, .count = 5};

static int setup(void **state)
{
    (void)state;
    memset(&saw, 0, sizeof saw);
    return gb_match_init(&mt, &hooks, NULL, NULL, &cancelled);
}

static int teardown(void **state)
{
    (void)state;
    gb_match_fini(&mt);
    free(cancelled.item);
    memset(&cancelled, 0, sizeof cancelled);
    return 0;
}

static struct gb_frame frame(uint8_t type, uint32_t seq, uint64_t bytes)
{
    return (struct gb_frame){.type = type, .group = 1, .seq = seq, .op = 1, .count = 5, .bytes = bytes};
}

static int feed(struct gb_frame f, const void *payload)
{
    if (f.type == GB_FRAME_EAGER) f.check = gb_frame_check(payload, (size_t)f.bytes);
    return gb_match_frame(&mt, &f, payload, &why);
}

static struct gb_key key(uint32_t seq)
{
    return (struct gb_key){.group = 1, .seq = seq};
}

static void test_credit_overdrawn(void **state)
{
    (void)state;
    static const char payload[GB_EAGER_BYTES];
    int i = 0;
    while (i < 200 && feed(frame(GB_FRAME_EAGER, (uint32_t)i, GB_EAGER_BYTES), payload) == 0) i++;
    assert_int_equal(i, GB_CREDIT_UNITS / (GB_EAGER_BYTES / GB_CREDIT_UNIT + 1));
    assert_non_null(strstr(why, "eager credit"));
}

static void test_credit_invented(void **state)
{
    (void)state;
    struct gb_frame f = frame(GB_FRAME_CREDIT, 0, 0);
    f.credit = 1;
    assert_int_not_equal(feed(f, NULL), 0);
}

static void test_twice(void **state)
{
    (void)state;
    assert_int_equal(feed(frame(GB_FRAME_EAGER, 1, 3), "abc"), 0);
    assert_int_not_equal(feed(frame(GB_FRAME_EAGER, 1, 3), "abc"), 0);
    assert_int_not_equal(feed(frame(GB_FRAME_RTS, 1, 3), NULL), 0);
    assert_int_equal(feed(frame(GB_FRAME_RTS, 2, 30000), NULL), 0);
    assert_int_not_equal(feed(frame(GB_FRAME_RTS, 2, 30000), NULL), 0);
    assert_int_equal(feed(frame(GB_FRAME_GRANT, 3, 30000), NULL), 0);
    assert_int_not_equal(feed(frame(GB_FRAME_GRANT, 3, 30000), NULL), 0);
    struct gb_key k = key(3);
    assert_int_equal(gb_match_send(&mt, &k, &sig, "x", 30000, NULL), 0);
    assert_int_equal(saw.moved, 1);
    assert_int_not_equal(feed(frame(GB_FRAME_GRANT, 3, 30000), NULL), 0); /* it is moving already */
    assert_int_not_equal(feed(frame(GB_FRAME_DATA, 9, 3), NULL), 0);
}

static void test_damaged_payload(void **state)
{
    (void)state;
    struct gb_frame f = frame(GB_FRAME_EAGER, 1, 3);
    char buf[3] = {0};
    struct gb_key k = key(1);
    f.check = gb_frame_check("abc", 3);
    assert_int_equal(gb_match_recv(&mt, &k, &sig, buf, 3, 0, NULL), 0);
    assert_int_equal(gb_match_frame(&mt, &f, "abd", &why), GPUBRIDGE_ERR_CHECKSUM);
    assert_int_equal(buf[0], 0);
    assert_int_equal(saw.events, 0);
}

static void test_data(void **state)
{
    (void)state;
    static char buf[30000];
    struct gb_msg *m;
    struct gb_key k = key(4);
    assert_int_equal(gb_match_recv(&mt, &k, &sig, buf, sizeof buf, 0, NULL), 0);
    assert_int_equal(saw.frame.type, GB_FRAME_GRANT);
    uint32_t slot = saw.frame.slot;
    struct gb_frame f = frame(GB_FRAME_DATA, 4, sizeof buf);
    f.slot = slot + 1; /* no such slot: read and discarded */
    assert_int_equal(gb_match_data(&mt, &f, &m, &why), 0);
    assert_null(m);
    f.slot = 0xfffff;
    assert_int_equal(gb_match_data(&mt, &f, &m, &why), 0);
    assert_null(m);
    f.slot = slot;
    f.bytes--; /* a length that would not fill, or overrun, the buffer */
    assert_int_not_equal(gb_match_data(&mt, &f, &m, &why), 0);
    f.bytes += 2;
    assert_int_not_equal(gb_match_data(&mt, &f, &m, &why), 0);
    f.bytes--;
    f.seq = 5;
    assert_int_not_equal(gb_match_data(&mt, &f, &m, &why), 0);
    f.seq = 4;
    f.count = 6;
    assert_int_not_equal(gb_match_data(&mt, &f, &m, &why), 0);
    f.count = 5;
    assert_int_equal(gb_match_data(&mt, &f, &m, &why), 0);
    assert_ptr_equal(m->buf, buf);
    struct gb_msg *again;
    assert_int_not_equal(gb_match_data(&mt, &f, &again, &why), 0); /* one payload at a time */
    gb_match_data_done(&mt, m, 0, GB_FRAME_ASKED);
    gb_match_recycle(&mt, m);
    assert_int_equal(gb_match_data(&mt, &f, &again, &why), 0); /* the slot's generation moved on */
    assert_null(again);
    /* The announcement that the payload overtook is absorbed, once. */
    assert_int_equal(feed(frame(GB_FRAME_RTS, 4, sizeof buf), NULL), 0);
    assert_int_equal(mt.recv.count, 0);
}

static void test_late_frames_of_cancelled(void **state)
{
    (void)state;
    assert_int_equal(gb_cancel_add(&cancelled, 1, 7), 0);
    assert_int_equal(feed(frame(GB_FRAME_EAGER, 7, 3), "abc"), 0);
    assert_int_equal(feed(frame(GB_FRAME_RTS, 7, 30000), NULL), 0);
    assert_int_equal(feed(frame(GB_FRAME_GRANT, 7, 30000), NULL), 0);
    assert_int_equal(mt.recv.count + mt.send.count, 0);
    assert_int_equal(mt.owed, 2); /* its credit goes back */
    assert_int_equal(feed(frame(GB_FRAME_EAGER, 8, 3), "abc"), 0);
    assert_int_equal(mt.recv.count, 1);
    gb_match_cancel(&mt, 1, -1);
    assert_int_equal(mt.recv.count, 0);
    assert_int_equal(mt.owed, 4);
    gb_cancel_forget(&cancelled, 1);
    assert_int_equal(gb_cancel_has(&cancelled, 1, 7), 0);
}

/* A cancelled message that a mover holds is let go by the mover, and only then done. */
static void test_stop(void **state)
{
    (void)state;
    struct gb_key k = key(1);
    int cookie;
    assert_int_equal(feed(frame(GB_FRAME_GRANT, 1, 30000), NULL), 0);
    assert_int_equal(gb_match_send(&mt, &k, &sig, "x", 30000, &cookie), 0);
    gb_match_cancel(&mt, 1, -1);
    assert_int_equal(saw.events, 0);
    assert_int_equal(atomic_load(&saw.msg->stop), GPUBRIDGE_ERR_CANCELLED);
    gb_match_data_done(&mt, saw.msg, GPUBRIDGE_ERR_CANCELLED, 0);
    assert_ptr_equal(saw.msg->note.event.cookie, &cookie);
    assert_int_equal(saw.msg->note.event.status, GPUBRIDGE_ERR_CANCELLED);
    gb_match_recycle(&mt, saw.msg);
}

/* What arrived in full before the link went down can still be received; the rest fails. */
static void test_down(void **state)
{
    (void)state;
    char buf[3] = {0};
    struct gb_key k = key(1), k2 = key(2);
    assert_int_equal(feed(frame(GB_FRAME_EAGER, 1, 3), "abc"), 0);
    assert_int_equal(gb_match_recv(&mt, &k2, &sig, buf, 3, 0, NULL), 0);
    gb_match_fail(&mt, GPUBRIDGE_ERR_PEER_LOST, "gone");
    assert_int_equal(saw.event.status, GPUBRIDGE_ERR_PEER_LOST);
    assert_string_equal(saw.event.text, "gone");
    assert_int_equal(gb_match_recv(&mt, &k, &sig, buf, 3, 0, NULL), 0);
    assert_int_equal(saw.event.status, 0);
    assert_memory_equal(buf, "abc", 3);
    assert_int_equal(gb_match_send(&mt, &k, &sig, buf, 3, NULL), 0);
    assert_int_equal(saw.event.status, GPUBRIDGE_ERR_PEER_LOST);
}

/* ---- loans ---- */

static int lend_to_us(uint32_t seq, uint32_t slot, uint64_t bytes, struct gb_place place)
{
    uint8_t body[GB_PLACE_BYTES];
    gb_place_pack(&place, body);
    struct gb_frame f = frame(GB_FRAME_LENT, seq, bytes);
    f.slot = slot;
    f.check = gb_frame_check(body, sizeof body);
    return gb_match_frame(&mt, &f, body, &why);
}

static uint32_t post_borrow(uint32_t seq, int borrows)
{
    static char buf[30000];
    struct gb_key k = key(seq);
    assert_int_equal(gb_match_recv(&mt, &k, &sig, buf, sizeof buf, borrows, buf), 0);
    assert_int_equal(saw.frame.type, GB_FRAME_GRANT);
    assert_int_equal(saw.frame.flags, borrows ? GB_FRAME_BORROWS : 0);
    return saw.frame.slot;
}

static void test_borrow(void **state)
{
    (void)state;
    uint32_t slot = post_borrow(1, 1);
    assert_int_equal(lend_to_us(1, slot, 30000, (struct gb_place){.offset = 512}), 0);
    assert_int_equal(saw.events, 1);
    assert_int_equal(saw.event.status, 0);
    assert_ptr_equal(saw.event.data, theirs + 512);
    assert_non_null(saw.event.loan);
    gb_match_cancel(&mt, 1, -1); /* what is lent stays so */
    assert_int_equal(saw.events, 1);
    assert_int_equal(gb_match_return(&mt, saw.event.loan), 0);
    assert_int_equal(saw.frame.type, GB_FRAME_RETURN);
    assert_int_equal(saw.frame.seq, 1);
    assert_int_equal(saw.frame.bytes, 30000);
}

/* Nobody reads it, so it goes back at once. */
static void test_lent_to_a_cancelled_receive(void **state)
{
    (void)state;
    uint32_t slot = post_borrow(1, 1);
    gb_match_cancel(&mt, 1, -1);
    assert_int_equal(saw.events, 1);
    assert_int_equal(lend_to_us(1, slot, 30000, (struct gb_place){0}), 0);
    assert_int_equal(saw.events, 1);
    assert_int_equal(saw.frame.type, GB_FRAME_RETURN);
}

static void test_bad_loans(void **state)
{
    (void)state;
    uint32_t slot = post_borrow(1, 1), plain = post_borrow(2, 0);
    const struct gb_place fine = {.offset = 512};
    const struct gb_place bad[] = {
        {.region = 1}, {.region = UINT32_MAX}, {.offset = sizeof theirs - 29999}, {.offset = UINT64_MAX - 100}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(lend_to_us(1, slot, 30000, bad[i]), -1);
        assert_non_null(strstr(why, "does not lie in the memory"));
    }
    assert_int_equal(lend_to_us(2, plain, 30000, fine), -1); /* its receive does not borrow */
    assert_int_equal(lend_to_us(2, slot, 30000, fine), -1);  /* another receive's slot */
    assert_int_equal(lend_to_us(1, slot, 29999, fine), -1);
    uint8_t body[GB_PLACE_BYTES] = {0};
    struct gb_frame f = frame(GB_FRAME_LENT, 1, 30000);
    f.slot = slot;
    assert_int_equal(gb_match_frame(&mt, &f, body, &why), GPUBRIDGE_ERR_CHECKSUM);
    assert_int_equal(feed(frame(GB_FRAME_RETURN, 7, 30000), NULL), -1);
    assert_non_null(strstr(why, "was not lent"));
    assert_int_equal(saw.events, 0);
}

static void grant_ours(uint32_t seq, uint16_t flags, void *cookie)
{
    struct gb_key k = key(seq);
    struct gb_frame f = frame(GB_FRAME_GRANT, seq, 30000);
    f.flags = flags;
    assert_int_equal(gb_match_send(&mt, &k, &sig, ours + 256, 30000, cookie), 0);
    assert_int_equal(feed(f, NULL), 0);
}

static void test_lend(void **state)
{
    (void)state;
    struct gb_place place;
    int cookie;
    grant_ours(1, 0, &cookie); /* the peer cannot borrow: the payload moves */
    assert_int_equal(saw.moved, 1);
    grant_ours(2, GB_FRAME_BORROWS, &cookie);
    assert_int_equal(saw.moved, 1);
    assert_int_equal(saw.frame.type, GB_FRAME_LENT);
    gb_place_parse(saw.place, &place);
    assert_int_equal(place.region, 3);
    assert_int_equal(place.offset, 256);
    assert_int_equal(saw.events, 0); /* not before it comes back */
    assert_int_equal(feed(frame(GB_FRAME_RETURN, 2, 29999), NULL), -1);
    assert_int_equal(feed(frame(GB_FRAME_RETURN, 2, 30000), NULL), 0);
    assert_int_equal(saw.events, 1);
    assert_ptr_equal(saw.event.cookie, &cookie);
    assert_int_equal(saw.event.status, 0);
    assert_int_equal(feed(frame(GB_FRAME_RETURN, 2, 30000), NULL), -1); /* once */
}

/* The operation learns at once that it was given up, and later that its memory is its own again. */
static void test_given_up_while_lent(void **state)
{
    (void)state;
    int cookie;
    grant_ours(1, GB_FRAME_BORROWS, &cookie);
    gb_match_cancel(&mt, 1, -1);
    gb_match_cancel(&mt, 1, -1);
    assert_int_equal(saw.events, 1);
    assert_int_equal(saw.event.status, GPUBRIDGE_ERR_CANCELLED);
    assert_int_equal(saw.event.is_lent, 1);
    assert_int_equal(feed(frame(GB_FRAME_RETURN, 1, 30000), NULL), 0);
    assert_int_equal(saw.events, 2);
    assert_int_equal(saw.event.kind, GB_NET_RETURNED);
    assert_ptr_equal(saw.event.data, ours + 256);
}

/* A lost peer gives nothing back. */
static void test_lost_while_lent(void **state)
{
    (void)state;
    int cookie;
    uint32_t slot = post_borrow(3, 1);
    assert_int_equal(lend_to_us(3, slot, 30000, (struct gb_place){0}), 0);
    struct gb_msg *loan = saw.event.loan;
    grant_ours(1, GB_FRAME_BORROWS, &cookie);
    int frames = saw.frames;
    gb_match_fail(&mt, GPUBRIDGE_ERR_PEER_LOST, "gone");
    assert_int_equal(saw.events, 2);
    assert_int_equal(saw.event.status, GPUBRIDGE_ERR_PEER_LOST);
    assert_int_equal(saw.event.is_lent, 1);
    assert_string_equal(saw.event.text, "gone");
    assert_int_equal(gb_match_return(&mt, loan), 0);
    assert_int_equal(saw.frames, frames);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_credit_overdrawn, setup, teardown),
        cmocka_unit_test_setup_teardown(test_credit_invented, setup, teardown),
        cmocka_unit_test_setup_teardown(test_twice, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damaged_payload, setup, teardown),
        cmocka_unit_test_setup_teardown(test_data, setup, teardown),
        cmocka_unit_test_setup_teardown(test_late_frames_of_cancelled, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stop, setup, teardown),
        cmocka_unit_test_setup_teardown(test_down, setup, teardown),
        cmocka_unit_test_setup_teardown(test_borrow, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lent_to_a_cancelled_receive, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bad_loans, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lend, setup, teardown),
        cmocka_unit_test_setup_teardown(test_given_up_while_lent, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lost_while_lent, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
