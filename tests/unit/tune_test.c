/* SPDX-License-Identifier: Apache-2.0
 * The model behind GPUBRIDGE_COMPRESSION=auto: what it chooses for wires and codecs of known speed. */
#include "comm/tune.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
/* after the headers it needs */
#include <cmocka.h>

#define MB_S(x) (4e-6 / (x)) /* seconds per float at x MB/s */

static struct gb_tune_choice choose(double wire, double code, double round_s, uint64_t chunk)
{
    struct gb_tune_facts facts = {.round_s = round_s, .wire_s = MB_S(wire)};
    struct gb_tune_choice choice;
    facts.code_s[GB_CODEC_BF16] = MB_S(3 * code);
    facts.code_s[GB_CODEC_FP8_E4M3] = facts.code_s[GB_CODEC_INT8] = MB_S(code);
    gb_tune_choose(&facts, chunk, &choice);
    return choice;
}

/* 1 Gbit/s, 10 Gbit/s: the wire is the limit, fp8 sends a quarter.  Equal in speed, int8 does not displace it. */
static void test_slow_wires_take_fp8(void **state)
{
    (void)state;
    struct gb_tune_choice c = choose(118, 3000, 200e-6, 0);
    assert_int_equal(c.codec, GB_CODEC_FP8_E4M3);
    double gain = c.seconds[GB_CODEC_NONE] / c.seconds[GB_CODEC_FP8_E4M3];
    assert_true(gain > 3.7 && gain < 3.97);
    gain = c.seconds[GB_CODEC_NONE] / c.seconds[GB_CODEC_BF16];
    assert_true(gain > 1.9 && gain < 2.05);
    assert_int_equal(choose(1180, 6000, 100e-6, 0).codec, GB_CODEC_FP8_E4M3);
}

/* Between: fp8 costs more time than its bytes save, bf16 does not. */
static void test_codec_bound_takes_bf16(void **state)
{
    (void)state;
    assert_int_equal(choose(1000, 1200, 100e-6, 0).codec, GB_CODEC_BF16);
}

static void test_fast_wires_take_none(void **state)
{
    (void)state;
    assert_int_equal(choose(10000, 2000, 50e-6, 0).codec, GB_CODEC_NONE);
    /* A gain below 5 % is not worth a lossy codec. */
    assert_int_equal(choose(1000, 1020, 50e-6, 0).codec == GB_CODEC_FP8_E4M3, 0);
    struct gb_tune_facts facts = {.round_s = 1e-6, .wire_s = MB_S(1000)};
    for (int c = 1; c < GB_CODEC_COUNT; c++) facts.code_s[c] = MB_S(1040);
    struct gb_tune_choice choice;
    gb_tune_choose(&facts, 1 << 20, &choice);
    assert_int_equal(choice.codec, GB_CODEC_NONE);
}

/* GPUs: coding is no limit. */
static void test_no_coding_time_takes_the_fewest_bytes(void **state)
{
    (void)state;
    struct gb_tune_facts facts = {.round_s = 50e-6, .wire_s = MB_S(10000)};
    struct gb_tune_choice choice;
    gb_tune_choose(&facts, 0, &choice);
    assert_int_equal(choice.codec, GB_CODEC_FP8_E4M3);
    assert_true(choice.seconds[GB_CODEC_MXFP4] == 0 && choice.seconds[GB_CODEC_FP16] == 0);
}

/* Small chunks where the pipeline's ends cost, large ones where a round is long; a given size is kept. */
static void test_chunks(void **state)
{
    (void)state;
    uint64_t slow = choose(118, 3000, 100e-6, 0).chunk_bytes, far = choose(1180, 6000, 20e-3, 0).chunk_bytes;
    assert_int_equal(slow, 256 << 10);
    assert_int_equal(far, 8 << 20);
    assert_int_equal(choose(118, 3000, 100e-6, 3 << 20).chunk_bytes, 3 << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slow_wires_take_fp8),
        cmocka_unit_test(test_codec_bound_takes_bf16),
        cmocka_unit_test(test_fast_wires_take_none),
        cmocka_unit_test(test_no_coding_time_takes_the_fewest_bytes),
        cmocka_unit_test(test_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
