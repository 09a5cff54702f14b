/* SPDX-License-Identifier: Apache-2.0
 * From scores to verdicts (sections 7 and 9 of docs/straggler-engine.md): which score passed, how large and since when,
 * confirmation, recovery.  Works on single streams, on the engine's thread; rare but for confirmed streams. */
#include "straggler/num.h"
#include "straggler/stream.h"

#include <math.h>

/* Interval constants, tuned on seeds that no published figure uses (section 9.2). */
static const double magnitude_bias = 0.90, magnitude_low = 2.3, magnitude_high = 3.2, gross_error = 3.45;
static const double onset_before = 20.0, onset_after = 16.0;
#define RECOVER_NATS 10.0

static double ratio_of(float score, float run, float threshold, float count)
{
    return (double)score / ((double)threshold * (1.0 + (double)run / (double)count));
}

double gb_score_ratio(const struct gb_hot *h, int lane, const struct gb_cold *c, int *member, int *slower)
{
    const struct gb_learned *a = &c->u.learned;
    double best = 0.0;
    *member = -1;
    *slower = 1;
    for (int j = 0; j < GB_MEMBERS; j++) {
        for (int side = 1; side >= 0; side--) {
            float threshold = side ? a->up[j] : a->down[j];
            if (threshold < 0.0f) continue;
            double r = ratio_of(side ? h->up[j][lane] : h->down[j][lane],
                                side ? h->up_run[j][lane] : h->down_run[j][lane], threshold, h->count[lane]);
            if (r > best) {
                best = r;
                *member = j;
                *slower = side;
            }
        }
    }
    return best;
}

/* Log ratio that belongs to a mean score of `v` in member j's units; infinite where the clip hides it. */
static double log_shift(const struct gb_hot *h, int lane, const struct gb_cold *c, const struct gb_tables *t, int j,
                        double v)
{
    double mean = v / (double)h->inv_omega[lane], d;
    if (v <= 0.0) return 0.0;
    if (j < GB_NARROW) {
        mean = mean * 0.9544997361036416 / (double)c->u.learned.slope;
        d = mean > 1.95 ? INFINITY : gb_gauss_clipped_inverse(mean);
    } else {
        d = mean > t->clip[j] - 0.5 ? INFINITY : mean;
    }
    return d / (double)h->inv_scale[lane];
}

struct size {
    double low, mid, high; /* log ratio, positive */
    double sure;           /* lower end that decides on confirmation */
    double shift, run;     /* mean score and its steps */
};

static struct size size_of(const struct gb_hot *h, int lane, const struct gb_cold *c, const struct gb_tables *t, int j,
                           int slower)
{
    double s = (double)(slower ? h->up[j][lane] : h->down[j][lane]);
    double n = (double)(slower ? h->up_run[j][lane] : h->down_run[j][lane]);
    struct size z = {0};
    if (!(n > 0.0)) return z;
    z.run = n;
    z.shift = s / n + t->k[j];
    double error = sqrt(1.0 / n + 1.0 / (double)h->count[lane]), mid = z.shift * magnitude_bias;
    z.low = log_shift(h, lane, c, t, j, mid - magnitude_low * error);
    z.mid = log_shift(h, lane, c, t, j, mid);
    z.high = log_shift(h, lane, c, t, j, mid + magnitude_high * error);
    z.sure = log_shift(h, lane, c, t, j, mid - error);
    return z;
}

/* Relative change of a log ratio; what the clip hid stays without a bound. */
double gb_relative(float magnitude)
{
    return magnitude > 80.0f ? (double)INFINITY : gb_exp((double)magnitude) - 1.0;
}

static void put_event(struct gpubridge_straggler *e, int kind, int index, int from, int to)
{
    const struct gb_learned *a = &gb_cold_of(e, kind, index)->u.learned;
    const struct gb_cold *c = gb_cold_of(e, kind, index);
    if (e->event_head - e->event_tail == (uint64_t)e->event_capacity) {
        e->event_tail++;
        e->event_lost++;
    }
    struct gpubridge_straggler_event *v = &e->events[e->event_head++ % (uint64_t)e->event_capacity];
    memset(v, 0, sizeof *v);
    v->step = e->step;
    v->rank = index < e->ranks ? index : -1 - (index - e->ranks);
    v->kind = kind;
    v->from = from;
    v->to = to;
    v->rule = c->rule;
    v->member = c->rule == GPUBRIDGE_STRAGGLER_RULE_BANK ? c->member : -1;
    v->answers = index >= e->ranks ? GPUBRIDGE_STRAGGLER_EVERYBODY_MOVED
                 : c->slower       ? GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST
                                   : GPUBRIDGE_STRAGGLER_FASTER_THAN_PAST;
    v->slowdown = gb_relative(a->magnitude);
    v->slowdown_low = gb_relative(a->magnitude_low);
    v->slowdown_high = gb_relative(a->magnitude_high);
    v->onset = a->onset;
    v->onset_low = a->onset_low;
    v->onset_high = a->onset_high;
}

static void confirm(struct gpubridge_straggler *e, int kind, int index, int rule, int member, int slower,
                    const struct size *z)
{
    struct gb_cold *c = gb_cold_of(e, kind, index);
    struct gb_learned *a = &c->u.learned;
    double sign = slower ? 1.0 : -1.0, reach = 1.0 / (z->shift * z->shift);
    double before = 2.0 + onset_before * reach, after = 1.0 + onset_after * reach;
    a->onset = e->step - (int64_t)z->run + 1;
    a->onset_low = a->onset - (int64_t)before;
    a->onset_high = a->onset + (int64_t)after;
    if (a->onset_high > e->step) a->onset_high = e->step;
    a->magnitude = (float)(sign * z->mid);
    a->magnitude_low = (float)(sign * (slower ? z->low : z->high));
    a->magnitude_high = (float)(sign * (slower ? z->high : z->low));
    a->shift = (float)(z->shift < 2.0 ? z->shift : 2.0);
    a->recover = 0.0f;
    a->clean = 0;
    c->verdict = GB_VERDICT_CONFIRMED;
    c->rule = (uint8_t)rule;
    c->member = (uint8_t)member;
    c->slower = (uint8_t)slower;
    e->route[(size_t)kind * (size_t)e->stride + (size_t)index] = 1;
    put_event(e, kind, index, GPUBRIDGE_STRAGGLER_SUSPECT, GPUBRIDGE_STRAGGLER_CONFIRMED);
}

/* Three steps in a row above the gross level. */
static void watch_gross(struct gpubridge_straggler *e, int kind, int index, double z)
{
    struct gb_hot *h = gb_hot_of(e, kind, index);
    int lane = index % GB_LANES;
    struct gb_cold *c = gb_cold_of(e, kind, index);
    struct gb_learned *a = &c->u.learned;
    if (!(z > (double)h->gross[lane])) return;
    int follows = c->gross_step == e->steps - 1;
    c->gross_run = (uint16_t)(follows ? c->gross_run + 1 : 1);
    a->gross_sum = (float)(follows ? (double)a->gross_sum + z : z);
    c->gross_step = e->steps;
    if (c->gross_run < 3) return;
    double mean = (double)a->gross_sum / (double)c->gross_run, unit = 1.0 / (double)h->inv_scale[lane];
    struct size s = {.run = 3.0, .shift = 2.0, .mid = mean * unit};
    double error = gross_error * unit / sqrt(3.0);
    s.low = s.mid > error ? s.mid - error : 0.0;
    s.high = s.mid + error;
    if (s.low > e->tables.min_log) confirm(e, kind, index, GPUBRIDGE_STRAGGLER_RULE_GROSS, 0, 1, &s);
}

void gb_stream_examine(struct gpubridge_straggler *e, int kind, int index, double x)
{
    struct gb_hot *h = gb_hot_of(e, kind, index);
    struct gb_cold *c = gb_cold_of(e, kind, index);
    int lane = index % GB_LANES, member, slower;
    watch_gross(e, kind, index, (x - h->level[lane]) * (double)h->inv_scale[lane]);
    if (c->verdict == GB_VERDICT_CONFIRMED) return;
    double ratio = gb_score_ratio(h, lane, c, &member, &slower);
    if (ratio >= 1.0) {
        struct size z = size_of(h, lane, c, &e->tables, member, slower);
        if (z.sure > e->tables.min_log) {
            confirm(e, kind, index, GPUBRIDGE_STRAGGLER_RULE_BANK, member, slower, &z);
            return;
        }
    }
    if (h->q_count[lane] >= (float)GB_BATCH) gb_learn_batch(e, h, lane, c);
}

void gb_stream_count_alarm(struct gpubridge_straggler *e, int rank)
{
    struct gb_hot *h = gb_hot_of(e, 0, rank);
    struct gb_cold *c = gb_cold_of(e, 0, rank);
    int lane = rank % GB_LANES, best = -1;
    double top = 0.0;
    if (c->phase != GB_PHASE_RUN || c->verdict != GB_VERDICT_NONE) return;
    for (int j = 0; j < GB_NARROW; j++) {
        if (c->u.learned.up[j] < 0.0f) continue;
        double r = ratio_of(h->up[j][lane], h->up_run[j][lane], c->u.learned.up[j], h->count[lane]);
        if (r > top) {
            top = r;
            best = j;
        }
    }
    if (best < 0) return;
    struct size z = size_of(h, lane, c, &e->tables, best, 1);
    if (z.sure <= e->tables.min_log) return;
    confirm(e, 0, rank, GPUBRIDGE_STRAGGLER_RULE_COUNT, best, 1, &z);
    e->arrivals[rank].score = e->arrivals[rank].run = 0.0f; /* the next verdict needs evidence of its own */
}

static void zero_scores(struct gb_hot *h, int lane)
{
    for (int j = 0; j < GB_MEMBERS; j++) gb_bank_zero(h, lane, j);
    h->older_count[lane] = h->older_sum[lane] = h->newer_count[lane] = h->newer_sum[lane] = 0.0f;
    h->prev[lane] = 0.0f;
}

void gb_stream_confirmed_step(struct gpubridge_straggler *e, int kind, int index, double x)
{
    struct gb_hot *h = gb_hot_of(e, kind, index);
    struct gb_cold *c = gb_cold_of(e, kind, index);
    struct gb_learned *a = &c->u.learned;
    int lane = index % GB_LANES;
    double z = (x - h->level[lane]) * (double)h->inv_scale[lane];
    z = z > 2.0 ? 2.0 : z < -2.0 ? -2.0 : z;
    double v = (z - (double)h->centre[lane]) * (double)h->inv_omega[lane], shift = (double)a->shift;
    double r = (double)a->recover + (shift * 0.5 - (c->slower ? v : -v));
    a->recover = (float)(r > 0.0 ? r : 0.0);
    if ((double)a->recover * shift < RECOVER_NATS) return;
    c->verdict = GB_VERDICT_RECOVERING;
    a->clean = 0;
    zero_scores(h, lane);
    put_event(e, kind, index, GPUBRIDGE_STRAGGLER_CONFIRMED, GPUBRIDGE_STRAGGLER_RECOVERING);
}

/* One step of a stream that is recovering, after the kernel's. */
void gb_stream_recovering_step(struct gpubridge_straggler *e, int kind, int index)
{
    struct gb_cold *c = gb_cold_of(e, kind, index);
    struct gb_learned *a = &c->u.learned;
    int member, slower;
    double need = 16.0 / ((double)a->shift * (double)a->shift);
    need = need < 32.0 ? 32.0 : need > 2000.0 ? 2000.0 : need;
    a->clean++;
    if ((double)a->clean < need) return;
    if (gb_score_ratio(gb_hot_of(e, kind, index), index % GB_LANES, c, &member, &slower) >= 0.5) return;
    c->verdict = GB_VERDICT_NONE;
    c->rule = GPUBRIDGE_STRAGGLER_RULE_NONE;
    put_event(e, kind, index, GPUBRIDGE_STRAGGLER_RECOVERING, GPUBRIDGE_STRAGGLER_HEALTHY);
}

void gb_stream_clear(struct gpubridge_straggler *e, int kind, int index)
{
    struct gb_cold *c = gb_cold_of(e, kind, index);
    if (c->phase != GB_PHASE_RUN) return;
    zero_scores(gb_hot_of(e, kind, index), index % GB_LANES);
    c->verdict = GB_VERDICT_NONE;
    c->rule = GPUBRIDGE_STRAGGLER_RULE_NONE;
    c->gross_run = 0;
    c->gross_step = INT64_MIN;
}

int gb_stream_state(const struct gpubridge_straggler *e, int kind, int index)
{
    const struct gb_cold *c = gb_cold_of(e, kind, index);
    int member, slower;
    if (index < e->ranks && e->held[index]) return GPUBRIDGE_STRAGGLER_HOLD;
    if (c->unknown) return GPUBRIDGE_STRAGGLER_UNKNOWN;
    if (c->phase == GB_PHASE_WARMUP) return GPUBRIDGE_STRAGGLER_WARMUP;
    if (c->phase != GB_PHASE_RUN) return GPUBRIDGE_STRAGGLER_LEARN;
    if (c->verdict == GB_VERDICT_CONFIRMED) return GPUBRIDGE_STRAGGLER_CONFIRMED;
    if (c->verdict == GB_VERDICT_RECOVERING) return GPUBRIDGE_STRAGGLER_RECOVERING;
    const struct gb_hot *h = gb_hot_of(e, kind, index);
    if (h->flags[index % GB_LANES] >> GB_SLOW_SHIFT == 0) return GPUBRIDGE_STRAGGLER_LEARN;
    return gb_score_ratio(h, index % GB_LANES, c, &member, &slower) >= 0.5 ? GPUBRIDGE_STRAGGLER_SUSPECT
                                                                           : GPUBRIDGE_STRAGGLER_HEALTHY;
}
