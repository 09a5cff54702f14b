/* SPDX-License-Identifier: Apache-2.0
 * plan: layouts from keys, refusals, hashes, and the structure of every operation's plans on named layouts.  Values,
 * order and progress are the simulator's subject (tests/sim). */
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_RANKS 40

/* One letter per rank: its island.  Lower case: CPU ranks (messages inside, nothing staged). */
static struct gb_topo *layout(const char *letters)
{
    char names[MAX_RANKS][2];
    const char *keys[MAX_RANKS];
    uint8_t is_gpu[MAX_RANKS];
    uint32_t n = (uint32_t)strlen(letters);
    for (uint32_t r = 0; r < n; r++) {
        names[r][0] = letters[r];
        names[r][1] = 0;
        keys[r] = names[r];
        is_gpu[r] = letters[r] < 'a';
    }
    struct gb_topo *topo = NULL;
    assert_int_equal(gb_topo_create(n, keys, is_gpu, is_gpu, &topo), 0);
    return topo;
}

static struct gb_plan_spec spec_of(int op, uint64_t count)
{
    return (struct gb_plan_spec){.op = op,
                                 .dtype = GPUBRIDGE_BF16,
                                 .reduce_op = GPUBRIDGE_SUM,
                                 .count = count,
                                 .chunk_bytes = 8192,
                                 .flat_bytes = 4096,
                                 .depth = 2};
}

static void test_layout(void **state)
{
    (void)state;
    struct gb_topo *t = layout("NANAaN");
    assert_int_equal(t->nislands, 3);
    const uint32_t island[] = {0, 1, 0, 1, 2, 0}, local[] = {0, 0, 1, 1, 0, 2}, members[] = {0, 2, 5, 1, 3, 4};
    assert_memory_equal(t->island, island, sizeof island);
    assert_memory_equal(t->local, local, sizeof local);
    assert_memory_equal(t->members, members, sizeof members);
    assert_int_equal(t->island_first[3], 6);
    assert_true(t->vendor[0] && t->vendor[1] && !t->vendor[2]);
    gb_topo_destroy(t);
    gb_topo_destroy(NULL);
    assert_int_equal(gb_topo_create(0, NULL, NULL, NULL, &t), GPUBRIDGE_ERR_INVALID);
}

/* The shortest path of all: two CPU ranks, a small message. */
static void test_two_ranks_are_minimal(void **state)
{
    (void)state;
    struct gb_topo *t = layout("ab");
    struct gb_plan_spec s = spec_of(GPUBRIDGE_ALL_REDUCE, 4);
    struct gb_plan *p = NULL;
    assert_int_equal(gb_plan_build(t, &s, 1, &p), 0);
    assert_int_equal(p->nsteps, 3);
    assert_int_equal(p->steps[0].kind, GB_STEP_SEND);
    assert_int_equal(p->steps[1].kind, GB_STEP_RECV);
    assert_int_equal(p->steps[2].kind, GB_STEP_REDUCE);
    assert_int_equal(p->steps[2].ndep, 2);              /* in place: the input must have left */
    assert_int_equal(p->parts[0].ref.buf, GB_BUF_HOST); /* rank 0 comes first on both ranks */
    assert_int_equal(p->parts[1].ref.buf, GB_BUF_IN);
    assert_true(p->flat);
    gb_plan_destroy(p);

    s = spec_of(GPUBRIDGE_ALL_REDUCE, 4096); /* two chunks: send, receive and fold per chunk */
    assert_int_equal(gb_plan_build(t, &s, 0, &p), 0);
    assert_int_equal(p->nsteps, 2 * 3);
    assert_int_equal(p->bridge_send_bytes, 8192);
    assert_false(p->flat);
    gb_plan_destroy(p);

    s = spec_of(GPUBRIDGE_ALL_REDUCE, 8192); /* long: each rank folds half of a chunk and sends the result */
    assert_int_equal(gb_plan_build(t, &s, 0, &p), 0);
    assert_int_equal(p->nsteps, 2 * 5);
    assert_int_equal(p->bridge_send_bytes, 16384);
    gb_plan_destroy(p);
    gb_topo_destroy(t);
}

static void refused(const struct gb_topo *t, struct gb_plan_spec s, int status)
{
    struct gb_plan *p = NULL;
    assert_int_equal(gb_plan_build(t, &s, 0, &p), status);
    assert_null(p);
    assert_true(strlen(gb_err_text()) > 20);
}

static void test_refusals(void **state)
{
    (void)state;
    struct gb_topo *t = layout("NNA");
    struct gb_plan_spec s = spec_of(GPUBRIDGE_BROADCAST, 4);
    s.root = 3;
    refused(t, s, GPUBRIDGE_ERR_INVALID);
    s = spec_of(GPUBRIDGE_ALL_REDUCE, 4);
    s.dtype = GPUBRIDGE_BYTE;
    refused(t, s, GPUBRIDGE_ERR_UNSUPPORTED);
    s.dtype = GPUBRIDGE_DTYPE_COUNT;
    refused(t, s, GPUBRIDGE_ERR_INVALID);
    refused(t, spec_of(GPUBRIDGE_SEND, 4), GPUBRIDGE_ERR_INVALID);
    refused(t, spec_of(GPUBRIDGE_ALL_GATHER, UINT64_MAX / 2), GPUBRIDGE_ERR_INVALID);
    const uint64_t huge[] = {1, UINT64_MAX, 1};
    s = spec_of(GPUBRIDGE_ALL_GATHER, 0);
    s.counts = huge;
    refused(t, s, GPUBRIDGE_ERR_INVALID);
    const uint64_t rows[] = {1, 0, 2}, others[] = {2, 0, 1};
    s = spec_of(GPUBRIDGE_ALL_TO_ALL, 0);
    s.send_counts = rows, s.recv_counts = others;
    refused(t, s, GPUBRIDGE_ERR_INVALID);
    s = spec_of(GPUBRIDGE_ALL_REDUCE, 4);
    s.depth = 1;
    refused(t, s, GPUBRIDGE_ERR_INVALID);
    gb_topo_destroy(t);
}

static uint32_t hash_of(const struct gb_topo *t, const struct gb_plan_spec *s, uint32_t rank)
{
    struct gb_plan *p = NULL;
    assert_int_equal(gb_plan_build(t, s, rank, &p), 0);
    uint32_t hash = p->hash;
    gb_plan_destroy(p);
    return hash;
}

static void test_hash(void **state)
{
    (void)state;
    struct gb_topo *t = layout("NNA"), *u = layout("nna"), *v = layout("NAA");
    struct gb_plan_spec s = spec_of(GPUBRIDGE_ALL_REDUCE, 100), o = s;
    uint32_t hash = hash_of(t, &s, 0);
    assert_int_equal(hash_of(t, &s, 2), hash);
    o.depth = 7; /* a rank's own affair, like its rows of an all_to_all */
    assert_int_equal(hash_of(t, &o, 1), hash);
    o.count++;
    assert_int_not_equal(hash_of(t, &o, 1), hash);
    o = s, o.reduce_op = GPUBRIDGE_MAX;
    assert_int_not_equal(hash_of(t, &o, 1), hash);
    o = s, o.chunk_bytes *= 2;
    assert_int_not_equal(hash_of(t, &o, 1), hash);
    assert_int_not_equal(hash_of(v, &s, 1), hash);
    assert_int_equal(hash_of(u, &s, 1), hash); /* in one round it does not matter who has a vendor library */
    o = s, o.count = 100000;
    s = o, s.dtype = GPUBRIDGE_BF16, o = s, o.codec = GB_CODEC_INT8;
    assert_int_not_equal(hash_of(t, &s, 1), hash_of(t, &o, 1));
    o.codec_min_bytes = 2 * o.count + 1; /* a codec that does not apply makes no difference */
    assert_int_equal(hash_of(t, &s, 1), hash_of(t, &o, 1));
    o = s;
    assert_int_not_equal(hash_of(u, &o, 1), hash_of(t, &o, 1)); /* an island without one exchanges by messages */
    const uint64_t a[] = {1, 2, 3}, b[] = {3, 2, 1};
    s = spec_of(GPUBRIDGE_ALL_TO_ALL, 2), o = s;
    s.send_counts = s.recv_counts = a, o.send_counts = o.recv_counts = b;
    assert_int_equal(hash_of(t, &s, 0), hash_of(t, &o, 1));
    gb_topo_destroy(t);
    gb_topo_destroy(u);
    gb_topo_destroy(v);
}

static void check_all_ranks(const struct gb_topo *t, const struct gb_plan_spec *s)
{
    for (uint32_t r = 0; r < t->nranks; r++) {
        struct gb_plan *p = NULL;
        assert_int_equal(gb_plan_build(t, s, r, &p), 0);
        if (gb_plan_check(t, s, r, p) != 0)
            fail_msg("op %d count %d rank %u: %s", s->op, (int)s->count, r, gb_err_text());
        gb_plan_destroy(p);
    }
}

static void test_structure(void **state)
{
    (void)state;
    static const char *const layouts[] = {"a",
                                          "N",
                                          "ab",
                                          "NA",
                                          "NNAA",
                                          "NNNA",
                                          "NAAAA",
                                          "NANA",
                                          "NNAAbb",
                                          "abc",
                                          "aabbc",
                                          "NaAb",
                                          "abcdefghijklmnopqrst",
                                          "aaaaaaaaaaaaaaaaaaab",
                                          "NNNNNNNNNNNNNNNNNNA"};
    static const uint64_t counts[] = {0, 1, 7, 1000, 5000, 30001};
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++) {
        struct gb_topo *t = layout(layouts[l]);
        for (int op = 0; op <= GPUBRIDGE_BARRIER; op++) {
            if (op == GPUBRIDGE_SEND || op == GPUBRIDGE_RECV) continue;
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                struct gb_plan_spec s = spec_of(op, counts[c]);
                s.root = t->nranks / 2;
                check_all_ranks(t, &s);
                s.reduce_op = GPUBRIDGE_PREMUL_SUM;
                check_all_ranks(t, &s);
                s.codec = op % 2 ? GB_CODEC_FP8_E4M3 : GB_CODEC_MXFP4;
                s.codec_spreads = 1;
                check_all_ranks(t, &s);
            }
        }
        gb_topo_destroy(t);
    }
}

static void test_where_codecs_apply(void **state)
{
    (void)state;
    struct gb_topo *t = layout("NNA"), *one = layout("NNN");
    struct gb_plan_spec s = spec_of(GPUBRIDGE_ALL_REDUCE, 100), o;
    s.codec = GB_CODEC_FP8_E4M3;
    assert_int_equal(gb_spec_codec(t, &s), GB_CODEC_FP8_E4M3);
    assert_int_equal(gb_spec_codec(one, &s), GB_CODEC_NONE);
    o = s, o.codec_min_bytes = 201;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE);
    o.codec_min_bytes = 200;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_FP8_E4M3);
    o = s, o.reduce_op = GPUBRIDGE_MAX;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE);
    o = s, o.dtype = GPUBRIDGE_F64;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE);
    o = s, o.codec_skips = GB_SKIP_HALF;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE); /* bf16 */
    o.codec_skips = GB_SKIP_F32;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_FP8_E4M3);
    o = s, o.op = GPUBRIDGE_ALL_GATHER;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE);
    o.codec_spreads = 1;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_FP8_E4M3);
    o.op = GPUBRIDGE_ALL_TO_ALL;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE);
    const uint64_t counts[] = {100, 0, 1};
    o = s, o.op = GPUBRIDGE_REDUCE_SCATTER, o.counts = counts, o.codec_min_bytes = 203;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_NONE); /* all blocks together: 202 bytes */
    o.codec_min_bytes = 202;
    assert_int_equal(gb_spec_codec(t, &o), GB_CODEC_FP8_E4M3);
    o = s, o.codec = GB_CODEC_COUNT;
    refused(t, o, GPUBRIDGE_ERR_INVALID);
    gb_topo_destroy(t);
    gb_topo_destroy(one);
}

/* The check must see what it is there for. */
static void test_check_sees_damage(void **state)
{
    (void)state;
    struct gb_topo *t = layout("NNA");
    struct gb_plan_spec s = spec_of(GPUBRIDGE_ALL_REDUCE, 30000);
    struct gb_plan *p = NULL;
    assert_int_equal(gb_plan_build(t, &s, 0, &p), 0);
    uint32_t damaged = 0;
    for (uint32_t i = 0; i < p->nsteps; i++) {
        if (p->steps[i].ndep == 0) continue;
        struct gb_step saved = p->steps[i];
        p->steps[i].ndep = 0; /* a forgotten dependency is a race somewhere, unless another path implies it */
        damaged += gb_plan_check(t, &s, 0, p) != 0;
        p->steps[i] = saved;
        p->steps[i].dep = i;
        uint32_t dep = p->deps[i];
        p->deps[i] = i;
        assert_int_not_equal(gb_plan_check(t, &s, 0, p), 0);
        p->deps[i] = dep;
        p->steps[i] = saved;
    }
    assert_true(damaged > p->nsteps / 2);
    p->host_bytes--;
    assert_int_not_equal(gb_plan_check(t, &s, 0, p), 0);
    gb_plan_destroy(p);
    gb_topo_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_two_ranks_are_minimal),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_structure),
        cmocka_unit_test(test_check_sees_damage),
        cmocka_unit_test(test_where_codecs_apply),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
