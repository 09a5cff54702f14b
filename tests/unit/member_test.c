/* SPDX-License-Identifier: Apache-2.0
 * Hellos are peers' bytes: whatever is cut or flipped is refused, and nothing is read past the end. */
#include "wire/member.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above first */
#include <cmocka.h>

static struct gb_member_hello sample(void)
{
    struct gb_member_hello h;
    memset(&h, 0, sizeof h);
    h = (struct gb_member_hello){.protocol = GB_MEMBER_PROTOCOL,
                                 .device_kind = 1,
                                 .flags = GB_MEMBER_STAGED,
                                 .rank = 2,
                                 .size = 5,
                                 .global_rank = 7,
                                 .ccl_epoch = 3,
                                 .name_hash = 0x0123456789abcdefu,
                                 .birth = 99,
                                 .host_id = 1234,
                                 .address_bytes = 6};
    for (uint8_t i = 0; i < 16; i++) h.uuid[i] = (uint8_t)(i * 3), h.leader_uuid[i] = (uint8_t)(200 + i);
    strcpy(h.host, "host-a");
    strcpy(h.island, "nvidia:sm_90");
    strcpy(h.device, "0000:19:00.0");
    strcpy(h.library, "0.1.0");
    strcpy(h.versions, "torch 2.13.0");
    strcpy(h.ccl, "NCCL 2.28.9");
    strcpy(h.agreed, "chunk_bytes=auto");
    memcpy(h.address, "\1\2\0\4\5\6", 6);
    return h;
}

static void test_round_trip(void **state)
{
    (void)state;
    struct gb_member_hello in = sample(), out;
    uint8_t bytes[GPUBRIDGE_HELLO_BYTES];
    size_t length = 0;
    assert_int_equal(gb_member_hello_encode(&in, bytes, sizeof bytes, &length), 0);
    assert_int_equal(gb_member_hello_decode(bytes, length, &out), 0);
    assert_int_equal(out.rank, 2);
    assert_int_equal(out.size, 5);
    assert_int_equal(out.global_rank, 7);
    assert_int_equal(out.ccl_epoch, 3);
    assert_true(out.name_hash == in.name_hash && out.birth == in.birth && out.host_id == in.host_id);
    assert_memory_equal(out.uuid, in.uuid, 16);
    assert_memory_equal(out.leader_uuid, in.leader_uuid, 16);
    assert_string_equal(out.island, "nvidia:sm_90");
    assert_string_equal(out.agreed, "chunk_bytes=auto");
    assert_string_equal(out.ccl, "NCCL 2.28.9");
    assert_int_equal(out.address_bytes, 6);
    assert_memory_equal(out.address, in.address, 6);
}

static void test_too_small(void **state)
{
    (void)state;
    struct gb_member_hello in = sample();
    uint8_t bytes[GPUBRIDGE_HELLO_BYTES];
    size_t length = 0, got = 77;
    assert_int_equal(gb_member_hello_encode(&in, bytes, sizeof bytes, &length), 0);
    for (size_t n = 0; n < length; n++)
        assert_int_equal(gb_member_hello_encode(&in, bytes, n, &got), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(got, 77);
}

/* Exact-size heap blocks, so that a sanitizer sees a read past the end. */
static void test_damage(void **state)
{
    (void)state;
    struct gb_member_hello in = sample(), out;
    uint8_t bytes[GPUBRIDGE_HELLO_BYTES];
    size_t length = 0;
    assert_int_equal(gb_member_hello_encode(&in, bytes, sizeof bytes, &length), 0);
    for (size_t n = 0; n < length; n++) {
        uint8_t *cut = malloc(n ? n : 1);
        memcpy(cut, bytes, n);
        assert_int_not_equal(gb_member_hello_decode(cut, n, &out), 0);
        free(cut);
    }
    for (size_t i = 0; i < length * 8; i++) {
        bytes[i / 8] ^= (uint8_t)(1u << (i % 8));
        assert_int_not_equal(gb_member_hello_decode(bytes, length, &out), 0);
        bytes[i / 8] ^= (uint8_t)(1u << (i % 8));
    }
    assert_int_equal(gb_member_hello_decode(bytes, length, &out), 0);
}

static void test_other_protocol(void **state)
{
    (void)state;
    struct gb_member_hello in = sample(), out;
    in.protocol = 9;
    uint8_t bytes[GPUBRIDGE_HELLO_BYTES];
    size_t length = 0;
    assert_int_equal(gb_member_hello_encode(&in, bytes, sizeof bytes, &length), 0);
    assert_int_equal(gb_member_hello_decode(bytes, length, &out), GPUBRIDGE_ERR_VERSION);
    assert_non_null(strstr(gb_err_text(), "protocol 9"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_too_small),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_other_protocol),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
