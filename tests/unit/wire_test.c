/* SPDX-License-Identifier: Apache-2.0
 * The wire formats: bytes as docs/wire-format.md says (made by an independent program), round trips, and refusal of
 * everything damaged, short or out of range. */
#include "wire/frame.h"
#include "wire/hello.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static const char *why;

static void check_hex(const uint8_t *bytes, size_t n, const char *hex)
{
    char text[1024];
    assert_int_equal(strlen(hex), 2 * n);
    for (size_t i = 0; i < n; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    assert_string_equal(text, hex);
}

static const struct gb_frame sample = {.type = GB_FRAME_DATA,
                                       .flags = GB_FRAME_SUM | GB_FRAME_ASKED,
                                       .credit = 77,
                                       .group = 0x1122334455667788,
                                       .seq = 7,
                                       .xid = 0x80000009,
                                       .op = 1,
                                       .dtype = 2,
                                       .reduce_op = 3,
                                       .root_lo = 4,
                                       .plan_hash = 0xdeadbeef,
                                       .count = (uint64_t)1 << 40,
                                       .bytes = 12345678901,
                                       .slot = 0x00300005};

static void test_golden(void **state)
{
    (void)state;
    uint8_t out[GB_CHALLENGE_BYTES];
    gb_frame_pack(&sample, out);
    check_hex(out, GB_FRAME_BYTES,
              "47420106000000008877665544332211070000000900008001020304efbeadde0000000000010000351cdcdf02000000"
              "050030004d0003000000000032582fc8");
    gb_trailer_pack(&(struct gb_trailer){.sum = 0x32fe61f05b2d8d7b}, out);
    check_hex(out, GB_TRAILER_BYTES, "7b8d2d5bf061fe32000000008064334e");
    gb_ctl_pack(&(struct gb_ctl){.type = GB_CTL_GOODBYE, .bytes = 3, .status = -40}, "bye", out);
    memcpy(out + GB_CTL_HEAD_BYTES, "bye", 3);
    check_hex(out, GB_CTL_HEAD_BYTES + 3, "4743010303000000d8ffffffc2fd5d2b627965");
    struct gb_part parts[] = {{"hello", 5}, {"challenge", 9}};
    gb_mac((const uint8_t *)"0123456789abcdef", 16, "dial", parts, 2, out);
    check_hex(out, GB_MAC_BYTES, "08c9d5d5fde3ad110ddae5b4343f074149bc0b588fb928166d94d4da934e4dcf");
    struct gb_hello h = {.kind = GB_HS_HELLO,
                         .version = 1,
                         .from_rank = 3,
                         .to_rank = -1,
                         .lane_kind = GB_LANE_BULK,
                         .lane_index = 5,
                         .lanes = 8,
                         .host = "host-a",
                         .text = "gpubridge 0.1.0"};
    for (uint8_t i = 0; i < 16; i++) h.from[i] = i, h.to[i] = (uint8_t)(16 + i), h.nonce[i] = (uint8_t)(32 + i);
    gb_hello_pack(&h, out);
    check_hex(out, GB_HELLO_BYTES,
              "475055425244470a01000100c0000000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
              "202122232425262728292a2b2c2d2e2f03000000ffffffff0205080000000000686f73742d6100000000000000000000"
              "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
              "67707562726964676520302e312e30000000000000000000000000000000000000000000000000000000000000000000");
    struct gb_address_info a = {
        .port = 4711,
        .count = 2,
        .endpoint = {{4, GB_ENDPOINT_LOOPBACK, {127, 0, 0, 1}}, {6, 0, {0x20, 1, 0xd, 0xb8, [15] = 1}}}};
    for (uint8_t i = 0; i < 16; i++) a.host_id[i] = i;
    size_t n = gb_address_pack(&a, out, sizeof out);
    check_hex(out, n,
              "01006712000102030405060708090a0b0c0d0e0f0200000004017f000001000000000000000000000000060020010db8"
              "000000000000000000000001");
}

static void test_frame_round_trip(void **state)
{
    (void)state;
    uint8_t raw[GB_FRAME_BYTES], again[GB_FRAME_BYTES];
    struct gb_frame f;
    for (uint8_t type = 1; type < GB_FRAME_TYPE_END; type++) {
        struct gb_frame in = sample;
        in.type = type;
        gb_frame_pack(&in, raw);
        assert_int_equal(gb_frame_parse(raw, &f, &why), 0);
        gb_frame_pack(&f, again);
        assert_memory_equal(raw, again, sizeof raw);
    }
    struct gb_frame bad = sample;
    bad.type = GB_FRAME_TYPE_END;
    gb_frame_pack(&bad, raw);
    assert_int_not_equal(gb_frame_parse(raw, &f, &why), 0);
}

static void test_place(void **state)
{
    (void)state;
    static const uint8_t want[GB_PLACE_BYTES] = {0x2a, 0,    0,    0,    0,    0,    0,    0,
                                                 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11};
    uint8_t raw[GB_PLACE_BYTES];
    struct gb_place place = {.region = 42, .offset = 0x1122334455667788u}, again;
    gb_place_pack(&place, raw);
    assert_memory_equal(raw, want, sizeof raw);
    gb_place_parse(raw, &again);
    assert_int_equal(again.region, 42);
    assert_true(again.offset == place.offset);
    assert_int_equal(gb_frame_payload(&(struct gb_frame){.type = GB_FRAME_LENT, .bytes = 1 << 20}), GB_PLACE_BYTES);
    assert_int_equal(gb_frame_payload(&(struct gb_frame){.type = GB_FRAME_RETURN, .bytes = 1 << 20}), 0);
}

/* Every single flipped bit is seen. */
static void test_flipped_bits(void **state)
{
    (void)state;
    uint8_t raw[GB_FRAME_BYTES], ctl[GB_CTL_HEAD_BYTES + 5];
    struct gb_frame f;
    struct gb_trailer t;
    struct gb_ctl c;
    gb_frame_pack(&sample, raw);
    for (unsigned i = 0; i < 8 * GB_FRAME_BYTES; i++) {
        raw[i / 8] ^= (uint8_t)(1u << i % 8);
        assert_int_not_equal(gb_frame_parse(raw, &f, &why), 0);
        raw[i / 8] ^= (uint8_t)(1u << i % 8);
    }
    gb_trailer_pack(&(struct gb_trailer){.sum = 99}, raw);
    for (unsigned i = 0; i < 8 * GB_TRAILER_BYTES; i++) {
        raw[i / 8] ^= (uint8_t)(1u << i % 8);
        assert_int_not_equal(gb_trailer_parse(raw, &t, &why), 0);
        raw[i / 8] ^= (uint8_t)(1u << i % 8);
    }
    memcpy(ctl + GB_CTL_HEAD_BYTES, "howdy", 5);
    gb_ctl_pack(&(struct gb_ctl){.type = GB_CTL_MESSAGE, .bytes = 5}, "howdy", ctl);
    for (unsigned i = 0; i < 8 * sizeof ctl; i++) {
        ctl[i / 8] ^= (uint8_t)(1u << i % 8);
        int rc = gb_ctl_parse(ctl, &c, &why);
        if (rc == 0 && c.bytes <= 5) rc = gb_ctl_check(ctl, ctl + GB_CTL_HEAD_BYTES, c.bytes, &why);
        /* A grown length makes the reader wait for a body that then fails its check. */
        assert_true(rc != 0 || c.bytes > 5);
        ctl[i / 8] ^= (uint8_t)(1u << i % 8);
    }
    assert_int_equal(gb_ctl_parse(ctl, &c, &why), 0);
    assert_int_equal(gb_ctl_check(ctl, ctl + GB_CTL_HEAD_BYTES, 5, &why), 0);
}

static void test_hello_limits(void **state)
{
    (void)state;
    uint8_t raw[GB_CHALLENGE_BYTES] = {0};
    struct gb_hello h = {.kind = GB_HS_CHALLENGE, .version = 1, .lanes = 1}, out;
    memset(h.host, 'x', sizeof h.host); /* no end: must be cut, not overrun */
    h.host[0] = '\n';
    gb_hello_pack(&h, raw);
    assert_int_equal(gb_hello_parse(raw, sizeof raw, &out, &why), 0);
    assert_int_equal(strlen(out.host), GB_HELLO_HOST - 1);
    assert_int_equal(out.host[0], '?');
    for (size_t n = 0; n < GB_HELLO_BYTES; n++) assert_int_not_equal(gb_hello_parse(raw, n, &out, &why), 0);
    static const struct {
        int at;
        uint8_t value;
    } bad[] = {{0, 'X'}, {8, 2}, {10, 3}, {10, 0}, {12, 0}, {13, 9}, {72, 3}, {73, 1}, {75, GB_HS_STATUS_END}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint8_t keep = raw[bad[i].at];
        raw[bad[i].at] = bad[i].value;
        assert_int_not_equal(gb_hello_parse(raw, sizeof raw, &out, &why), 0);
        assert_non_null(why);
        raw[bad[i].at] = keep;
    }
}

static void test_proof_and_accept(void **state)
{
    (void)state;
    uint8_t mac[GB_MAC_BYTES], back[GB_MAC_BYTES], raw[GB_ACCEPT_BYTES];
    uint32_t status, lanes;
    for (int i = 0; i < (int)GB_MAC_BYTES; i++) mac[i] = (uint8_t)(i * 7);
    gb_accept_pack(GB_HS_BUSY, 4, mac, raw);
    assert_int_equal(gb_accept_parse(raw, sizeof raw, &status, &lanes, back), 0);
    assert_true(status == GB_HS_BUSY && lanes == 4 && gb_mac_equal(mac, back));
    assert_int_not_equal(gb_accept_parse(raw, sizeof raw - 1, &status, &lanes, back), 0);
    raw[16] = GB_HS_STATUS_END;
    assert_int_not_equal(gb_accept_parse(raw, sizeof raw, &status, &lanes, back), 0);
    gb_proof_pack(mac, raw);
    assert_int_equal(gb_proof_parse(raw, GB_PROOF_BYTES, back), 0);
    assert_int_not_equal(gb_accept_parse(raw, sizeof raw, &status, &lanes, back), 0);
    assert_int_not_equal(gb_proof_parse(raw, GB_PROOF_BYTES - 1, back), 0);
    back[31] ^= 1;
    assert_false(gb_mac_equal(mac, back));
}

/* The MAC depends on the secret, the label, and where one part ends and the next begins. */
static void test_mac_binds(void **state)
{
    (void)state;
    uint8_t a[GB_MAC_BYTES], b[GB_MAC_BYTES];
    const uint8_t *s = (const uint8_t *)"0123456789abcdefX";
    struct gb_part ab[] = {{"ab", 2}, {"c", 1}}, bc[] = {{"a", 1}, {"bc", 2}};
    gb_mac(s, 16, "dial", ab, 2, a);
    gb_mac(s, 16, "dial", bc, 2, b);
    assert_false(gb_mac_equal(a, b));
    gb_mac(s, 16, "accept", ab, 2, b);
    assert_false(gb_mac_equal(a, b));
    gb_mac(s, 17, "dial", ab, 2, b);
    assert_false(gb_mac_equal(a, b));
}

static void test_address_limits(void **state)
{
    (void)state;
    uint8_t raw[24 + 18 * GB_ENDPOINTS_MAX + 18];
    struct gb_address_info a = {.port = 1, .count = GB_ENDPOINTS_MAX}, out;
    for (int i = 0; i < GB_ENDPOINTS_MAX; i++) a.endpoint[i].family = i & 1 ? 4 : 6;
    size_t n = gb_address_pack(&a, raw, sizeof raw);
    assert_true(n <= 512);
    assert_int_equal(gb_address_parse(raw, n, &out, &why), 0);
    assert_memory_equal(&a, &out, sizeof a);
    for (size_t k = 0; k < n; k++) assert_int_not_equal(gb_address_parse(raw, k, &out, &why), 0);
    assert_int_not_equal(gb_address_parse(raw, n + 18, &out, &why), 0);
    raw[20]++; /* more endpoints than anybody may have */
    assert_int_not_equal(gb_address_parse(raw, n + 18, &out, &why), 0);
    raw[20]--;
    raw[24] = 5;
    assert_int_not_equal(gb_address_parse(raw, n, &out, &why), 0);
    raw[24] = 6;
    raw[0] = 2;
    assert_int_not_equal(gb_address_parse(raw, n, &out, &why), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_frame_round_trip),
        cmocka_unit_test(test_place),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_hello_limits),
        cmocka_unit_test(test_mac_binds),
        cmocka_unit_test(test_proof_and_accept),
        cmocka_unit_test(test_address_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
