/* SPDX-License-Identifier: Apache-2.0
 * Decomposition, work slopes, slow parts and scans on cases small enough to compute by hand, and bad input.  */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <gpubridge/fleet.h>

#include <math.h>
#include <string.h>

#define RANKS 4

struct rig {
    uint64_t s;
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

static struct gpubridge_fleet_record record(int rank, int kind, int channel, int op, double start, double end,
                                            double ready)
{
    return (struct gpubridge_fleet_record){.step = 1,
                                           .rank = rank,
                                           .kind = kind,
                                           .channel = channel,
                                           .op = op,
                                           .start = start,
                                           .end = end,
                                           .ready = ready};
}

/* Rank 2's backward is late by 0.2 s; two buckets; the second one's start is late on every rank for that reason alone.
 * Each rank's clock is shifted by an arbitrary amount. */
static void lateness_is_charged_upstream(void **state)
{
    (void)state;
    static const double shift[RANKS] = {0.0, 1000.0, -3.5, 0.05};
    struct gpubridge_fleet_record r[RANKS * 4];
    int n = 0;
    for (int k = 0; k < RANKS; k++) {
        double c = shift[k], late = k == 2 ? 0.2 : 0.0;
        r[n++] = record(k, GPUBRIDGE_FLEET_COMPUTE, 0, 0, c, c + 0.5 + late, NAN);
        r[n++] = record(k, GPUBRIDGE_FLEET_COMPUTE, 0, 0, c + 0.5 + late, c + 0.6 + late, NAN);
        /* first bucket ready at 0.5 (+late), all enter, transfer 0.3 after the last */
        r[n++] = record(k, GPUBRIDGE_FLEET_COLLECTIVE, 0, 0, c + 0.5 + late, c + 1.0, c + 0.5 + late);
        r[n++] = record(k, GPUBRIDGE_FLEET_COLLECTIVE, 1, 0, c + 1.0, c + 1.1 + 0.02 * k, c + 0.6 + late);
    }
    double own[4 * RANKS], wait[RANKS], head[2 * RANKS], overlap[2 * RANKS], exposed[RANKS], charged[RANKS],
        transfer[2];
    int32_t last[2], ends[2];
    struct gpubridge_fleet_parts p = {sizeof p, own, wait, head, overlap, exposed, charged, transfer, last, ends};
    gpubridge_fleet_decomposer *d = NULL;
    assert_int_equal(gpubridge_fleet_decomposer_create(RANKS, 2, 64, &d), GPUBRIDGE_OK);
    assert_int_equal(gpubridge_fleet_decompose(d, r, n, &p), GPUBRIDGE_OK);
    assert_true(fabs(transfer[0] - 0.3) < 1e-9 && fabs(transfer[1] - 0.1) < 1e-9);
    for (int k = 0; k < RANKS; k++) {
        double late = k == 2 ? 0.2 : 0.0;
        assert_true(fabs(own[GPUBRIDGE_FLEET_COMPUTE * RANKS + k] - 0.6 - late) < 1e-9);
        assert_true(fabs(wait[k] - (0.2 - late) - 0.02 * k) < 1e-9);
        assert_true(fabs(head[k] - 0.5 - late) < 1e-9 && fabs(overlap[k] - 1.0) < 1e-9);
        assert_true(fabs(exposed[k] - (0.5 + 0.02 * k - late)) < 1e-9);
        assert_true(k == 2 ? charged[k] > 0.6 : charged[k] == 0.0);
    }
    assert_true(ends[0] == RANKS && ends[1] == RANKS);
    assert_int_equal(last[0], 2);
    assert_int_equal(last[1], 2); /* rank 0 left the second one soonest, but its start was decided in the first */
    gpubridge_fleet_decomposer_destroy(d);
}

static void progress_is_seen_without_kernels(void **state)
{
    (void)state;
    double own[4 * RANKS];
    struct gpubridge_fleet_parts p = {.struct_size = sizeof p, .own = own};
    gpubridge_fleet_decomposer *d = NULL;
    assert_int_equal(gpubridge_fleet_decomposer_create(RANKS, 1, 64, &d), GPUBRIDGE_OK);
    for (int step = 0; step < 3; step++) {
        struct gpubridge_fleet_record r[RANKS];
        for (int k = 0; k < RANKS; k++) {
            double ready = (double)step * 2.0 + (k == 1 ? 0.9 : 0.7);
            r[k] = record(k, GPUBRIDGE_FLEET_COLLECTIVE, 0, 0, ready, (double)step * 2.0 + 1.5, ready);
            r[k].step = step;
        }
        assert_int_equal(gpubridge_fleet_decompose(d, r, RANKS, &p), GPUBRIDGE_OK);
        for (int k = 0; k < RANKS; k++)
            assert_true(fabs(own[GPUBRIDGE_FLEET_COMPUTE * RANKS + k] - (step ? (k == 1 ? 1.4 : 1.2) : 0.0)) < 1e-9);
    }
    gpubridge_fleet_decomposer_destroy(d);
}

static void bad_records_are_refused(void **state)
{
    (void)state;
    gpubridge_fleet_decomposer *d = NULL;
    struct gpubridge_fleet_parts p = {.struct_size = sizeof p};
    assert_int_equal(gpubridge_fleet_decomposer_create(0, 1, 1, &d), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(gpubridge_fleet_decomposer_create(RANKS, 1, 4, &d), GPUBRIDGE_OK);
    struct gpubridge_fleet_record good = record(0, GPUBRIDGE_FLEET_COLLECTIVE, 0, 0, 0.0, 1.0, NAN), bad[6];
    for (int i = 0; i < 6; i++) bad[i] = good;
    bad[0].rank = RANKS;
    bad[1].channel = 1;
    bad[2].end = -1.0;
    bad[3].start = NAN;
    bad[4].kind = 17;
    bad[5].ready = INFINITY;
    for (int i = 0; i < 6; i++) assert_int_equal(gpubridge_fleet_decompose(d, &bad[i], 1, &p), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(gpubridge_fleet_decompose(d, bad, 5, &p), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(gpubridge_fleet_decompose(d, &good, 1, &p), GPUBRIDGE_OK);
    assert_int_equal(gpubridge_fleet_decompose(d, NULL, 0, &p), GPUBRIDGE_OK);
    gpubridge_fleet_decomposer_destroy(d);
}

/* Time = work^1.3 per class and a rank's own level; a slow rank keeps its slowness, alone in its class or not. */
static void slopes_take_work_and_leave_levels(void **state)
{
    (void)state;
    static const int32_t classes[RANKS] = {0, 0, 0, 1};
    struct rig g = {.s = 7};
    struct gpubridge_fleet_work_config c = {
        .struct_size = sizeof c, .ranks = RANKS, .covariates = 1, .classes = classes};
    gpubridge_fleet_work *w = NULL;
    assert_int_equal(gpubridge_fleet_work_create(&c, &w), GPUBRIDGE_OK);
    double sum[2][RANKS] = {{0}}, square[RANKS] = {0};
    for (int step = 0; step < 4000; step++) {
        double seconds[RANKS], work[RANKS];
        uint8_t healthy[RANKS] = {1, 1, 1, 1};
        int slow = step >= 2000;
        for (int r = 0; r < RANKS; r++) {
            work[r] = exp(0.3 * normal(&g));
            seconds[r] = pow(work[r], r == 3 ? 0.8 : 1.3) * exp(0.01 * normal(&g)) * (slow && r != 1 ? 1.02 : 1.0);
            healthy[r] = !(slow && r != 1);
        }
        assert_int_equal(gpubridge_fleet_work_step(w, seconds, work, healthy), GPUBRIDGE_OK);
        for (int r = 0; r < RANKS && step >= 1000; r++) {
            if (step < 3000 && step >= 2000) continue;
            sum[slow][r] += log(seconds[r]) / 1000.0;
            if (!slow) square[r] += log(seconds[r]) * log(seconds[r]) / 1000.0;
        }
    }
    double slopes[4], noise;
    assert_int_equal(gpubridge_fleet_work_slopes(w, 0, slopes, &noise), GPUBRIDGE_OK);
    assert_true(fabs(slopes[0] - 1.3) < 0.01 && slopes[1] == 0.0 && noise > 0.008 && noise < 0.012);
    assert_int_equal(gpubridge_fleet_work_slopes(w, 1, slopes, &noise), GPUBRIDGE_OK);
    assert_true(fabs(slopes[0] - 0.8) < 0.01);
    for (int r = 0; r < RANKS; r++) {
        assert_true(sqrt(square[r] - sum[0][r] * sum[0][r]) < 0.012); /* 30 % of work noise is gone */
        assert_true(fabs(sum[1][r] - sum[0][r] - (r == 1 ? 0.0 : log(1.02))) < 0.003);
    }
    double bad[RANKS] = {1.0, -1.0, 1.0, 1.0}, one[RANKS] = {1.0, 1.0, 1.0, 1.0};
    assert_int_equal(gpubridge_fleet_work_step(w, bad, one, NULL), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(gpubridge_fleet_work_step(w, one, bad, NULL), GPUBRIDGE_ERR_INVALID);
    gpubridge_fleet_work_destroy(w);
}

/* Work that hardly varies teaches nothing: the slope stays at "time proportional to work". */
static void constant_work_winds_nothing_up(void **state)
{
    (void)state;
    struct rig g = {.s = 11};
    struct gpubridge_fleet_work_config c = {.struct_size = sizeof c, .ranks = RANKS, .covariates = 1};
    gpubridge_fleet_work *w = NULL;
    assert_int_equal(gpubridge_fleet_work_create(&c, &w), GPUBRIDGE_OK);
    for (int step = 0; step < 20000; step++) {
        double seconds[RANKS], work[RANKS];
        for (int r = 0; r < RANKS; r++) {
            work[r] = 5.0 * (1.0 + 1e-9 * normal(&g));
            seconds[r] = exp(0.05 * normal(&g));
        }
        assert_int_equal(gpubridge_fleet_work_step(w, seconds, work, NULL), GPUBRIDGE_OK);
    }
    double slopes[4];
    assert_int_equal(gpubridge_fleet_work_slopes(w, 0, slopes, NULL), GPUBRIDGE_OK);
    assert_true(fabs(slopes[0] - 1.0) < 1e-6);
    gpubridge_fleet_work_destroy(w);
}

static void slow_parts_need_more_than_luck(void **state)
{
    (void)state;
    double levels[9] = {1.00, 1.03, 0.96, 1.05, 0.99, 1.15, 2.0, 2.1, 5.0}, ratio[9];
    static const int32_t classes[9] = {0, 0, 0, 0, 0, 0, 1, 1, 2};
    uint8_t slow[9];
    assert_int_equal(gpubridge_fleet_lottery(9, levels, classes, 0.0, ratio, slow), GPUBRIDGE_OK);
    for (int r = 0; r < 9; r++) assert_int_equal(slow[r], r == 5);
    assert_true(fabs(ratio[5] - 1.15) < 1e-9 && ratio[8] == 0.0 && fabs(ratio[7] - 1.05) < 1e-9);
}

static void makespan_follows_dependencies(void **state)
{
    (void)state;
    /* rank A: 0 then 1; rank B: 2 (after 0 with delay 0.5) then 3 (after 1) */
    double seconds[4] = {1.0, 2.0, 1.0, 1.0}, delay[4] = {0.0, 0.0, 0.5, 0.25}, span;
    int32_t first[4] = {-1, 0, -1, 2}, second[4] = {-1, -1, 0, 1};
    assert_int_equal(gpubridge_fleet_makespan(4, seconds, first, second, delay, &span), GPUBRIDGE_OK);
    assert_true(fabs(span - 4.25) < 1e-12);
    first[0] = 0; /* a node that waits for itself, and nothing else */
    assert_int_equal(gpubridge_fleet_makespan(1, seconds, first, second, delay, &span), GPUBRIDGE_ERR_INVALID);
    first[0] = 3; /* a cycle */
    assert_int_equal(gpubridge_fleet_makespan(4, seconds, first, second, delay, &span), GPUBRIDGE_ERR_INVALID);
}

static void scan_finds_a_late_change_only(void **state)
{
    (void)state;
    enum { STEPS = 60, MANY = 12 };
    static double x[STEPS * MANY];
    struct rig g = {.s = 5};
    struct gpubridge_fleet_scan out[MANY];
    struct gpubridge_fleet_scan_config c = {.struct_size = sizeof c, .steps = STEPS, .ranks = MANY, .learn = 30};
    int healthy = 0, hits = 0;
    for (int job = 0; job < 200; job++) {
        for (int t = 0; t < STEPS; t++) {
            double common = 0.05 * normal(&g);
            for (int r = 0; r < MANY; r++)
                x[t * MANY + r] = exp(common + 0.005 * normal(&g) + (job % 2 && r == 4 && t >= 40 ? 0.012 : 0.0));
        }
        x[7] = 0.0; /* a missing value */
        assert_int_equal(gpubridge_fleet_scan(&c, x, out), GPUBRIDGE_OK);
        for (int r = 0; r < MANY; r++) {
            if (job % 2 && r == 4) {
                hits += out[r].slower && out[r].onset >= 34 && out[r].onset <= 46 && fabs(out[r].shift - 0.012) < 0.006;
            } else {
                healthy += out[r].slower || out[r].slow_part;
            }
        }
    }
    print_message("%d of 100 found, %d false verdicts in 2300\n", hits, healthy);
    assert_true(hits >= 88);
    assert_true(healthy <= 4); /* 200 recordings at one false verdict in 100 */
    c.learn = 2;
    assert_int_equal(gpubridge_fleet_scan(&c, x, out), GPUBRIDGE_ERR_INVALID);
}

/* A mixed fleet with skewed clocks: the same records give the same verdicts whatever the clocks say. */
static void clocks_do_not_matter(void **state)
{
    (void)state;
    static const int32_t models[6] = {GPUBRIDGE_FLEET_V100, GPUBRIDGE_FLEET_V100, GPUBRIDGE_FLEET_H200,
                                      GPUBRIDGE_FLEET_MI50, GPUBRIDGE_FLEET_MI50, GPUBRIDGE_FLEET_MI300X};
    static struct gpubridge_fleet_record records[1024];
    static double own[4 * 6], first[4 * 6], transfer[64], first_transfer[64];
    struct gpubridge_fleet_sim_config c = {.struct_size = sizeof c, .seed = 4, .ranks = 6, .models = models};
    for (int shifted = 0; shifted < 2; shifted++) {
        gpubridge_fleet_sim *sim = NULL;
        gpubridge_fleet_decomposer *d = NULL;
        int32_t channels, most, count;
        c.clock_shift = shifted ? 0.05 : 0.0;
        assert_int_equal(gpubridge_fleet_sim_create(&c, &sim), GPUBRIDGE_OK);
        assert_int_equal(gpubridge_fleet_sim_size(sim, &channels, &most), GPUBRIDGE_OK);
        assert_true(most <= 1024 && channels <= 64);
        assert_int_equal(gpubridge_fleet_decomposer_create(6, channels, most, &d), GPUBRIDGE_OK);
        struct gpubridge_fleet_parts p = {.struct_size = sizeof p, .own = own, .transfer = transfer};
        for (int step = 0; step < 50; step++) {
            assert_int_equal(gpubridge_fleet_sim_step(sim, records, 1024, &count, NULL), GPUBRIDGE_OK);
            assert_int_equal(gpubridge_fleet_decompose(d, records, count, &p), GPUBRIDGE_OK);
        }
        for (int i = 0; i < 4 * 6; i++) assert_true(!shifted ? own[i] > 0.0 : fabs(own[i] / first[i] - 1.0) < 1e-6);
        for (int i = 0; i < channels; i++)
            assert_true(!shifted ? transfer[i] > 0.0 : fabs(transfer[i] / first_transfer[i] - 1.0) < 1e-5);
        memcpy(first, own, sizeof own);
        memcpy(first_transfer, transfer, sizeof transfer);
        gpubridge_fleet_decomposer_destroy(d);
        gpubridge_fleet_sim_destroy(sim);
    }
}

static struct gpubridge_fleet_episode episode(struct gpubridge_fleet_episode_config c, uint64_t seed)
{
    struct gpubridge_fleet_episode e = {.struct_size = sizeof e};
    c.struct_size = sizeof c;
    c.seed = seed;
    assert_int_equal(gpubridge_fleet_run_episode(&c, &e), GPUBRIDGE_OK);
    return e;
}

static void every_fault_is_named(void **state)
{
    (void)state;
    int right = 0, all = 0;
    for (int fault = 1; fault < GPUBRIDGE_FLEET_FAULTS; fault++) {
        for (uint64_t i = 0; i < 6; i++) {
            struct gpubridge_fleet_episode e = episode((struct gpubridge_fleet_episode_config){.faults = 1,
                                                                                               .fault = fault,
                                                                                               .healthy_steps = 1400,
                                                                                               .window_steps = 400,
                                                                                               .least = 2.0,
                                                                                               .most = 6.0,
                                                                                               .alarms = 0.1},
                                                       1000 * (uint64_t)fault + i);
            assert_true(e.size >= 2.0 * e.detectable || fault == GPUBRIDGE_FLEET_FAULT_PAUSES);
            right += e.found == 1 && e.wrong == 0 && e.early == 0;
            all++;
        }
    }
    print_message("%d of %d episodes right\n", right, all);
    assert_true(right >= all - 1);
}

static void healthy_histories_raise_nothing(void **state)
{
    (void)state;
    for (int history = 0; history < GPUBRIDGE_FLEET_HISTORIES; history++) {
        for (uint64_t i = 0; i < 4; i++) {
            struct gpubridge_fleet_episode e = episode(
                (struct gpubridge_fleet_episode_config){.history = history, .healthy_steps = 3200, .alarms = 1e-4},
                77000 + 100 * (uint64_t)history + i);
            assert_int_equal(e.early, 0);
        }
    }
}

/* One device of each vendor: no peers, found from its own history, and said so. */
static void a_pair_is_judged_by_its_own_history(void **state)
{
    (void)state;
    static const int32_t models[2] = {GPUBRIDGE_FLEET_V100, GPUBRIDGE_FLEET_MI50}, classes[2] = {0, 1};
    static struct gpubridge_fleet_record records[256];
    for (int slow = 0; slow < 2; slow++) {
        struct gpubridge_fleet_sim_config c = {
            .struct_size = sizeof c, .seed = 9, .ranks = 2, .models = models, .clock_shift = 0.05};
        gpubridge_fleet_sim *sim = NULL;
        gpubridge_fleet_monitor *m = NULL;
        struct gpubridge_fleet_verdict v[8];
        int32_t channels, most, count = 0;
        assert_int_equal(gpubridge_fleet_sim_create(&c, &sim), GPUBRIDGE_OK);
        assert_int_equal(gpubridge_fleet_sim_size(sim, &channels, &most), GPUBRIDGE_OK);
        struct gpubridge_fleet_monitor_config mc = {
            .struct_size = sizeof mc, .ranks = 2, .channels = channels, .max_records = most, .classes = classes};
        assert_int_equal(gpubridge_fleet_monitor_create(&mc, &m), GPUBRIDGE_OK);
        for (int step = 0; step < 6000; step++) {
            if (step == 3000) {
                assert_int_equal(gpubridge_fleet_monitor_verdicts(m, v, 8, &count), GPUBRIDGE_OK);
                assert_int_equal(count, 0);
                assert_int_equal(gpubridge_fleet_sim_fault(sim, GPUBRIDGE_FLEET_FAULT_COMPUTE, slow, 0.02),
                                 GPUBRIDGE_OK);
            }
            int32_t n;
            assert_int_equal(gpubridge_fleet_sim_step(sim, records, 256, &n, NULL), GPUBRIDGE_OK);
            assert_int_equal(gpubridge_fleet_monitor_step(m, step, records, n, NULL), GPUBRIDGE_OK);
        }
        assert_int_equal(gpubridge_fleet_monitor_verdicts(m, v, 8, &count), GPUBRIDGE_OK);
        assert_int_equal(count, 1);
        assert_true(v[0].rank == slow && v[0].cause == GPUBRIDGE_FLEET_CAUSE_COMPUTE && v[0].peers == 0);
        assert_true(fabs(v[0].slowdown - 0.02) < 0.012);
        gpubridge_fleet_monitor_destroy(m);
        gpubridge_fleet_sim_destroy(sim);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lateness_is_charged_upstream),
        cmocka_unit_test(progress_is_seen_without_kernels),
        cmocka_unit_test(bad_records_are_refused),
        cmocka_unit_test(slopes_take_work_and_leave_levels),
        cmocka_unit_test(constant_work_winds_nothing_up),
        cmocka_unit_test(slow_parts_need_more_than_luck),
        cmocka_unit_test(makespan_follows_dependencies),
        cmocka_unit_test(scan_finds_a_late_change_only),
        cmocka_unit_test(clocks_do_not_matter),
        cmocka_unit_test(every_fault_is_named),
        cmocka_unit_test(healthy_histories_raise_nothing),
        cmocka_unit_test(a_pair_is_judged_by_its_own_history),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
