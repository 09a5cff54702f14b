/* SPDX-License-Identifier: Apache-2.0
 * Behaviour of the straggler engine through its public header: what it finds, what it must not raise, bad input,
 * replay. Noise is seeded; nothing waits for a clock.  */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <gpubridge/straggler.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define RANKS 8

struct rig {
    gpubridge_straggler *e;
    uint64_t s;
    int64_t step;
    double noise, slow[RANKS];
    int32_t last;
    struct gpubridge_straggler_event event[64];
    int32_t events, confirmed;
};

static double uniform(struct rig *r)
{
    uint64_t z = (r->s += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return ((double)((z ^ (z >> 31)) >> 12) + 0.5) * 0x1p-52;
}

static double normal(struct rig *r)
{
    return sqrt(-2.0 * log(uniform(r))) * cos(6.283185307179586 * uniform(r));
}

static struct rig start(double noise, int peers)
{
    struct rig r = {.s = 88172645463325252u, .noise = noise};
    struct gpubridge_straggler_config c = {.struct_size = sizeof c, .ranks = RANKS, .use_peers = peers};
    assert_int_equal(gpubridge_straggler_create(&c, &r.e), GPUBRIDGE_OK);
    for (int i = 0; i < RANKS; i++) r.slow[i] = 1.0;
    return r;
}

static void collect(struct rig *r)
{
    int32_t n;
    assert_int_equal(gpubridge_straggler_events(r->e, r->event, 64, &n, NULL), GPUBRIDGE_OK);
    r->events += n;
    for (int32_t i = 0; i < n; i++)
        if (r->event[i].to == GPUBRIDGE_STRAGGLER_CONFIRMED && r->event[i].rank >= 0) r->confirmed++;
}

static void draw(struct rig *r, double *t)
{
    r->last = 0;
    for (int i = 0; i < RANKS; i++) {
        t[i] = 0.8 * (1.0 + 0.02 * i) * r->slow[i] * (1.0 + r->noise * normal(r));
        if (t[i] > t[r->last]) r->last = i;
    }
}

static void run(struct rig *r, int steps)
{
    double t[RANKS];
    for (int s = 0; s < steps; s++) {
        draw(r, t);
        assert_int_equal(gpubridge_straggler_step(r->e, r->step++, t, NULL, &r->last), GPUBRIDGE_OK);
        collect(r);
    }
}

static struct gpubridge_straggler_report report(const struct rig *r, int rank)
{
    struct gpubridge_straggler_report rep = {.struct_size = sizeof rep};
    assert_int_equal(gpubridge_straggler_report(r->e, rank, 0, &rep), GPUBRIDGE_OK);
    return rep;
}

static void stop(struct rig *r)
{
    gpubridge_straggler_destroy(r->e);
}

static void test_states_follow(void **state)
{
    struct rig r = start(0.01, 0);
    assert_int_equal(report(&r, 0).state, GPUBRIDGE_STRAGGLER_WARMUP);
    assert_true(report(&r, 0).answers & GPUBRIDGE_STRAGGLER_CANNOT_TELL);
    run(&r, 60);
    assert_int_equal(report(&r, 0).state, GPUBRIDGE_STRAGGLER_LEARN);
    run(&r, 3000);
    struct gpubridge_straggler_report rep = report(&r, 3);
    assert_int_equal(rep.state, GPUBRIDGE_STRAGGLER_HEALTHY);
    assert_int_equal(rep.answers, 0);
    assert_float_equal(rep.level_seconds, 0.8 * 1.06, 0.002);
    assert_true(rep.noise > 0.008 && rep.noise < 0.015);
    assert_true(rep.min_detectable > 0.0025 && rep.min_detectable < 0.02);
    assert_int_equal(r.confirmed, 0);
    stop(&r);
}

static void test_slow_rank_is_named_with_size_onset_and_recovery(void **state)
{
    struct rig r = start(0.01, 0);
    run(&r, 3000);
    r.slow[5] = 1.03;
    run(&r, 120);
    struct gpubridge_straggler_report rep = report(&r, 5);
    assert_int_equal(rep.state, GPUBRIDGE_STRAGGLER_CONFIRMED);
    assert_true(rep.answers & GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST);
    assert_true(rep.slowdown_low < 0.03 && 0.03 < rep.slowdown_high);
    assert_true(rep.onset_low <= 3000 && 3000 <= rep.onset_high);
    assert_int_equal(r.confirmed, 1);
    r.slow[5] = 1.0;
    run(&r, 400);
    assert_int_equal(report(&r, 5).state, GPUBRIDGE_STRAGGLER_HEALTHY);
    assert_int_equal(r.confirmed, 1);
    stop(&r);
}

static void test_two_culprits_and_one_nobody_waits_for(void **state)
{
    struct rig r = start(0.01, 0);
    run(&r, 3000);
    r.slow[0] = 1.015; /* rank 0 stays the fastest: nobody waits for it */
    r.slow[6] = 1.05;
    run(&r, 400);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(report(&r, i).state == GPUBRIDGE_STRAGGLER_CONFIRMED, i == 0 || i == 6);
    stop(&r);
}

static void test_everybody_moved_is_said_of_nobody(void **state)
{
    struct rig r = start(0.01, 0);
    run(&r, 3000);
    for (int i = 0; i < RANKS; i++) r.slow[i] = 1.05;
    run(&r, 300);
    struct gpubridge_straggler_report rep = report(&r, 2);
    assert_true(rep.answers & GPUBRIDGE_STRAGGLER_EVERYBODY_MOVED);
    assert_false(rep.answers & GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST);
    assert_int_equal(r.confirmed, 0);
    stop(&r);
}

static void test_slow_part_is_told_from_a_slow_rank(void **state)
{
    struct rig r = start(0.01, 0);
    r.slow[4] = 1.30; /* from the start */
    run(&r, 3000);
    struct gpubridge_straggler_report rep = report(&r, 4);
    assert_int_equal(rep.state, GPUBRIDGE_STRAGGLER_HEALTHY);
    assert_true(rep.answers == GPUBRIDGE_STRAGGLER_SLOWER_THAN_CLASS);
    assert_true(rep.class_ratio > 1.25 && rep.class_ratio < 1.35);
    assert_int_equal(report(&r, 3).answers, 0);
    stop(&r);
}

static void test_gross_fault_is_found_in_three_steps(void **state)
{
    struct rig r = start(0.05, 0);
    run(&r, 20000);
    r.slow[1] = 1.5;
    run(&r, 3);
    assert_int_equal(report(&r, 1).state, GPUBRIDGE_STRAGGLER_CONFIRMED);
    assert_int_equal(r.confirmed, 1);
    stop(&r);
}

static void test_rotating_pauses_raise_nothing(void **state)
{
    struct rig r = start(0.01, 0);
    for (int s = 0; s < 20000; s++) {
        int pause = s % 50 == 0, who = (s / 50) % RANKS;
        if (pause) r.slow[who] = 2.9;
        run(&r, 1);
        if (pause) r.slow[who] = 1.0;
    }
    assert_int_equal(r.confirmed, 0);
    stop(&r);
}

static void test_held_phases_raise_nothing(void **state)
{
    struct rig r = start(0.01, 0);
    run(&r, 2000);
    for (int round = 0; round < 10; round++) { /* evaluation on all, checkpoint on rank 0 alone */
        int32_t who = round % 2 ? 0 : -1;
        assert_int_equal(gpubridge_straggler_hold(r.e, who, 1), GPUBRIDGE_OK);
        assert_int_equal(report(&r, 0).state, GPUBRIDGE_STRAGGLER_HOLD);
        for (int i = 0; i < RANKS; i++) r.slow[i] = who < 0 || i == who ? 0.3 + 4.0 * (round % 2) : 1.0;
        run(&r, 40);
        for (int i = 0; i < RANKS; i++) r.slow[i] = 1.0;
        assert_int_equal(gpubridge_straggler_hold(r.e, who, 0), GPUBRIDGE_OK);
        run(&r, 300);
    }
    assert_int_equal(gpubridge_straggler_hold(r.e, 3, 0), GPUBRIDGE_OK); /* an end without a begin */
    assert_int_equal(gpubridge_straggler_hold(r.e, 3, 1), GPUBRIDGE_OK); /* a begin without an end heals */
    run(&r, 2100);
    assert_int_equal(report(&r, 3).state, GPUBRIDGE_STRAGGLER_HEALTHY);
    assert_int_equal(r.confirmed, 0);
    stop(&r);
}

static void test_restart_learns_anew(void **state)
{
    struct rig r = start(0.01, 0);
    run(&r, 2000);
    assert_int_equal(gpubridge_straggler_restart(r.e, 2), GPUBRIDGE_OK);
    r.slow[2] = 1.2; /* another device took its place */
    run(&r, 2000);
    assert_int_equal(report(&r, 2).state, GPUBRIDGE_STRAGGLER_HEALTHY);
    assert_int_equal(r.confirmed, 0);
    assert_int_equal(gpubridge_straggler_restart(r.e, -1), GPUBRIDGE_OK);
    assert_int_equal(report(&r, 2).state, GPUBRIDGE_STRAGGLER_WARMUP);
    stop(&r);
}

static void test_missing_data_is_unknown_and_raises_nothing(void **state)
{
    struct rig r = start(0.01, 0);
    run(&r, 2000);
    double t[RANKS];
    uint8_t present[RANKS];
    for (int s = 0; s < 3000; s++) {
        draw(&r, t);
        for (int i = 0; i < RANKS; i++) present[i] = uniform(&r) > 0.4;
        present[7] = s >= 100;
        assert_int_equal(gpubridge_straggler_step(r.e, r.step++, t, present, NULL), GPUBRIDGE_OK);
        collect(&r);
        if (s == 99) assert_int_equal(report(&r, 7).state, GPUBRIDGE_STRAGGLER_UNKNOWN);
    }
    assert_int_equal(report(&r, 7).state, GPUBRIDGE_STRAGGLER_HEALTHY);
    assert_int_equal(r.confirmed, 0);
    stop(&r);
}

static size_t bytes_of(const gpubridge_straggler *e, unsigned char *out)
{
    size_t at = 0, n;
    for (int i = -1; i < RANKS; i++) {
        assert_int_equal(gpubridge_straggler_state_bytes(e, i, 0, out + at, GPUBRIDGE_STRAGGLER_STATE_BYTES * 2, &n),
                         GPUBRIDGE_OK);
        at += n;
    }
    return at;
}

static void test_reordered_values_give_the_same_bits(void **state)
{
    static unsigned char a[RANKS * 2048], b[RANKS * 2048];
    struct rig r = start(0.01, 0), q = start(0.01, 0);
    enum { STEPS = 1500 };
    static double t[STEPS][RANKS];
    for (int s = 0; s < STEPS; s++) {
        draw(&r, t[s]);
        assert_int_equal(gpubridge_straggler_step(r.e, s, t[s], NULL, NULL), GPUBRIDGE_OK);
    }
    for (int s = 0; s < STEPS; s += 3) /* three steps at a time, backwards */
        for (int k = 2; k >= 0; k--)
            for (int i = RANKS - 1; i >= 0; i--)
                assert_int_equal(gpubridge_straggler_push(q.e, s + k, i, 0, t[s + k][i]), GPUBRIDGE_OK);
    assert_int_equal(gpubridge_straggler_flush(q.e), GPUBRIDGE_OK);
    size_t n = bytes_of(r.e, a);
    assert_int_equal(n, bytes_of(q.e, b));
    assert_memory_equal(a, b, n);
    assert_int_equal(gpubridge_straggler_push(q.e, STEPS - 1, 0, 0, 1.0), GPUBRIDGE_ERR_INVALID); /* already judged */
    assert_int_equal(gpubridge_straggler_push(q.e, STEPS, 0, 0, 1.0), GPUBRIDGE_OK);
    assert_int_equal(gpubridge_straggler_push(q.e, STEPS, 0, 0, 1.0), GPUBRIDGE_ERR_INVALID); /* twice */
    stop(&r);
    stop(&q);
}

static void test_bad_input_changes_nothing(void **state)
{
    static unsigned char a[RANKS * 2048], b[RANKS * 2048];
    struct rig r = start(0.01, 0);
    run(&r, 500);
    size_t n = bytes_of(r.e, a);
    static const double bad[] = {NAN, -1.0, 0.0, INFINITY, -INFINITY, 1e10, 1e-300};
    double t[RANKS];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        draw(&r, t);
        t[RANKS - 1] = bad[i];
        assert_int_equal(gpubridge_straggler_step(r.e, r.step, t, NULL, NULL), GPUBRIDGE_ERR_INVALID);
        assert_int_equal(gpubridge_straggler_push(r.e, r.step, 0, 0, bad[i]), GPUBRIDGE_ERR_INVALID);
    }
    draw(&r, t);
    assert_int_equal(gpubridge_straggler_step(r.e, r.step - 1, t, NULL, NULL), GPUBRIDGE_ERR_INVALID); /* again */
    assert_int_equal(gpubridge_straggler_step(r.e, r.step, NULL, NULL, NULL), GPUBRIDGE_ERR_INVALID);
    int32_t last = RANKS;
    assert_int_equal(gpubridge_straggler_step(r.e, r.step, t, NULL, &last), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(gpubridge_straggler_hold(r.e, RANKS, 1), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(gpubridge_straggler_given(r.e, 0, 1, 1.0, 0.05, 0.0), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(n, bytes_of(r.e, b));
    assert_memory_equal(a, b, n);
    stop(&r);
}

static void test_config_is_checked(void **state)
{
    gpubridge_straggler *e = NULL;
    struct gpubridge_straggler_config c = {.struct_size = sizeof c, .ranks = 0};
    assert_int_equal(gpubridge_straggler_create(&c, &e), GPUBRIDGE_ERR_INVALID);
    c.ranks = GPUBRIDGE_STRAGGLER_MAX_STREAMS + 1;
    assert_int_equal(gpubridge_straggler_create(&c, &e), GPUBRIDGE_ERR_INVALID);
    c.ranks = 4;
    c.alarms = NAN;
    assert_int_equal(gpubridge_straggler_create(&c, &e), GPUBRIDGE_ERR_INVALID);
    c.alarms = 1e11;
    assert_int_equal(gpubridge_straggler_create(&c, &e), GPUBRIDGE_ERR_INVALID); /* run length below 1000 */
    c.alarms = 0.0;
    int32_t groups[4] = {0, 0, 4, 0};
    c.groups = groups;
    assert_int_equal(gpubridge_straggler_create(&c, &e), GPUBRIDGE_ERR_INVALID);
    c.struct_size = 1;
    assert_int_equal(gpubridge_straggler_create(&c, &e), GPUBRIDGE_ERR_INVALID);
    assert_null(e);
    struct gpubridge_straggler_config million = {.struct_size = sizeof million, .ranks = 1000000, .use_peers = -1};
    double *t = malloc(1000000 * sizeof *t);
    assert_non_null(t);
    for (int i = 0; i < 1000000; i++) t[i] = 1.0;
    assert_int_equal(gpubridge_straggler_create(&million, &e), GPUBRIDGE_OK);
    assert_int_equal(gpubridge_straggler_step(e, 0, t, NULL, NULL), GPUBRIDGE_OK);
    gpubridge_straggler_destroy(e);
    free(t);
}

static void test_replay_gives_the_same_bits_and_refuses_damage(void **state)
{
    static unsigned char rec[1 << 20], a[RANKS * 2048], b[RANKS * 2048];
    struct rig r = start(0.02, 0);
    struct gpubridge_straggler_config c = {.struct_size = sizeof c, .ranks = RANKS};
    size_t at = 0, n, first;
    assert_int_equal(gpubridge_straggler_record_header(&c, rec, sizeof rec, &first), GPUBRIDGE_OK);
    at = first;
    double t[RANKS];
    for (int s = 0; s < 1000; s++) {
        if (s == 700) r.slow[2] = 1.6;
        draw(&r, t);
        assert_int_equal(gpubridge_straggler_record_step(r.e, s, t, NULL, &r.last, rec + at, sizeof rec - at, &n),
                         GPUBRIDGE_OK);
        at += n;
        assert_int_equal(gpubridge_straggler_step(r.e, s, t, NULL, &r.last), GPUBRIDGE_OK);
        if (s == 500) {
            assert_int_equal(gpubridge_straggler_record_mark(GPUBRIDGE_STRAGGLER_RECORD_HOLD, 1, 0, NULL, rec + at,
                                                             sizeof rec - at, &n),
                             GPUBRIDGE_OK);
            at += n;
            assert_int_equal(gpubridge_straggler_hold(r.e, 1, 1), GPUBRIDGE_OK);
        }
    }
    gpubridge_straggler *e;
    size_t used;
    assert_int_equal(gpubridge_straggler_replay_open(rec, at, &e, &used), GPUBRIDGE_OK);
    assert_int_equal(used, first);
    for (size_t p = used; p < at; p += used) {
        size_t before = bytes_of(e, a);
        assert_int_equal(gpubridge_straggler_replay_next(e, rec + p, 20, &used), GPUBRIDGE_ERR_INVALID); /* truncated */
        rec[p + 30] ^= 1;
        assert_int_equal(gpubridge_straggler_replay_next(e, rec + p, at - p, &used), GPUBRIDGE_ERR_CHECKSUM);
        rec[p + 30] ^= 1;
        assert_int_equal(before, bytes_of(e, b));
        assert_memory_equal(a, b, before);
        assert_int_equal(gpubridge_straggler_replay_next(e, rec + p, at - p, &used), GPUBRIDGE_OK);
    }
    n = bytes_of(r.e, a);
    assert_int_equal(n, bytes_of(e, b));
    assert_memory_equal(a, b, n);
    assert_int_equal(report(&r, 2).state, GPUBRIDGE_STRAGGLER_CONFIRMED);
    gpubridge_straggler_destroy(e);
    stop(&r);
}

static void test_last_arrivals_are_a_cost_and_an_alarm(void **state)
{
    struct rig r = start(0.01, -1);
    double t[RANKS];
    for (int s = 0; s < 12000; s++) { /* equal shares, then rank 4 is last in half of the steps and 0.6 % slower */
        draw(&r, t);
        int32_t last = (int32_t)(uniform(&r) * RANKS);
        if (s >= 8000 && s % 2) last = 4;
        if (s >= 8000) t[4] *= 1.006;
        assert_int_equal(gpubridge_straggler_step(r.e, r.step++, t, NULL, &last), GPUBRIDGE_OK);
        if (s == 7999) assert_true(fabs(report(&r, 4).last_share - 0.125) < 0.03);
        collect(&r);
    }
    assert_int_equal(report(&r, 4).state, GPUBRIDGE_STRAGGLER_CONFIRMED);
    assert_int_equal(report(&r, 4).rule, GPUBRIDGE_STRAGGLER_RULE_COUNT);
    assert_int_equal(r.confirmed, 1);
    stop(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_states_follow),
        cmocka_unit_test(test_slow_rank_is_named_with_size_onset_and_recovery),
        cmocka_unit_test(test_two_culprits_and_one_nobody_waits_for),
        cmocka_unit_test(test_everybody_moved_is_said_of_nobody),
        cmocka_unit_test(test_slow_part_is_told_from_a_slow_rank),
        cmocka_unit_test(test_gross_fault_is_found_in_three_steps),
        cmocka_unit_test(test_rotating_pauses_raise_nothing),
        cmocka_unit_test(test_held_phases_raise_nothing),
        cmocka_unit_test(test_restart_learns_anew),
        cmocka_unit_test(test_missing_data_is_unknown_and_raises_nothing),
        cmocka_unit_test(test_reordered_values_give_the_same_bits),
        cmocka_unit_test(test_bad_input_changes_nothing),
        cmocka_unit_test(test_config_is_checked),
        cmocka_unit_test(test_replay_gives_the_same_bits_and_refuses_damage),
        cmocka_unit_test(test_last_arrivals_are_a_cost_and_an_alarm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
