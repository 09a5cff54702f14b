/* SPDX-License-Identifier: Apache-2.0
 * What an engine knows about a stream, and the steps that arrive one value at a time (sections 9 to 11 of
 * docs/straggler-engine.md).  Reads the state that engine.c writes, on the same thread. */
#include "straggler/num.h"
#include "straggler/stream.h"

#include "base/err.h"

#include <math.h>
#include <stdlib.h>

#define CLASS_TOLERANCE 0.06 /* a device slower than its class by less is lottery */
#define CLASS_SIGMAS    3.0
#define CLASS_RANKS     4

static int find_stream(const struct gpubridge_straggler *e, int32_t rank, int32_t kind, int *index)
{
    if (!e || rank >= e->ranks || rank < -e->groups || kind < 0 || kind >= e->kinds)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "straggler: no stream rank %d, kind %d (rank -1 - g: common mode of group g)", rank, kind);
    *index = rank >= 0 ? rank : e->ranks - 1 - rank;
    return GPUBRIDGE_OK;
}

static double level_of(const struct gpubridge_straggler *e, int kind, int index)
{
    const struct gb_hot *h = gb_hot_of(e, kind, index);
    int l = index % GB_LANES;
    return h->level[l] + (double)h->centre[l] / (double)h->inv_scale[l];
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return (v[(n - 1) / 2] + v[n / 2]) * 0.5;
}

/* Log ratio of a rank's level to the median of its class; *slower when it leaves the class's own spread. */
static double class_shift(const struct gpubridge_straggler *e, int kind, int index, int *slower)
{
    double *v = e->scratch;
    int n = 0;
    *slower = 0;
    for (int r = 0; r < e->ranks; r++)
        if (e->class_of[r] == e->class_of[index] && gb_cold_of(e, kind, r)->phase == GB_PHASE_RUN &&
            gb_hot_of(e, kind, r)->count[r % GB_LANES] >= 100.0f)
            v[n++] = level_of(e, kind, r);
    if (n < CLASS_RANKS) return 0.0;
    double m = median_of(v, n), own = level_of(e, kind, index) - m;
    for (int i = 0; i < n; i++) v[i] = v[i] < m ? m - v[i] : v[i] - m;
    double spread = CLASS_SIGMAS * 1.4826 * median_of(v, n);
    *slower = own > gb_log(1.0 + CLASS_TOLERANCE) && own > spread;
    return own;
}

/* Standard normal quantile for 0.5 <= p < 1, absolute error below 5e-4. */
static double normal_quantile(double p)
{
    double t = sqrt(-2.0 * gb_log(1.0 - p));
    double top = 2.515517 + t * (0.802853 + t * 0.010328);
    double bottom = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    return p > 0.5 ? t - top / bottom : 0.0;
}

int gpubridge_straggler_detectable(const gpubridge_straggler *e, int32_t rank, int32_t kind, double steps,
                                   double probability, double *slowdown)
{
    int index = 0;
    GB_TRY(find_stream(e, rank, kind, &index));
    if (!slowdown || !(steps >= 1.0 && steps <= 1e9) || !(probability >= 0.5 && probability <= 0.999))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: steps must be 1 ... 1e9 and probability 0.5 ... 0.999");
    *slowdown = gb_detectable(&e->tables, gb_hot_of(e, kind, index), index % GB_LANES, gb_cold_of(e, kind, index),
                              steps, normal_quantile(probability));
    return GPUBRIDGE_OK;
}

static void fill_verdict(const struct gpubridge_straggler *e, int kind, int index, struct gpubridge_straggler_report *r)
{
    const struct gb_cold *c = gb_cold_of(e, kind, index);
    const struct gb_learned *a = &c->u.learned;
    r->rule = c->rule;
    r->member = c->rule == GPUBRIDGE_STRAGGLER_RULE_BANK ? c->member : -1;
    r->slowdown = gb_relative(a->magnitude);
    r->slowdown_low = gb_relative(a->magnitude_low);
    r->slowdown_high = gb_relative(a->magnitude_high);
    r->onset = a->onset;
    r->onset_low = a->onset_low;
    r->onset_high = a->onset_high;
    if (c->verdict == GB_VERDICT_CONFIRMED)
        r->answers |= c->slower ? GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST : GPUBRIDGE_STRAGGLER_FASTER_THAN_PAST;
}

static void fill_learned(const struct gpubridge_straggler *e, int kind, int index, struct gpubridge_straggler_report *r)
{
    const struct gb_hot *h = gb_hot_of(e, kind, index);
    const struct gb_cold *c = gb_cold_of(e, kind, index);
    int l = index % GB_LANES, slower = 0, member;
    r->level_seconds = index < e->ranks ? gb_exp(level_of(e, kind, index)) : 0.0;
    r->learned_steps = (double)h->count[l];
    r->noise = 1.0 / ((double)h->inv_omega[l] * (double)h->inv_scale[l]);
    r->score = gb_score_ratio(h, l, c, &member, &slower);
    for (int j = 0; j < GB_MEMBERS; j++) r->armed |= (c->u.learned.up[j] >= 0.0f) << j;
    r->min_detectable = gb_detectable(&e->tables, h, l, c, 200.0, 1.645);
    if (h->gross[l] < INFINITY) r->gross_level = gb_exp((double)h->gross[l] / (double)h->inv_scale[l]) - 1.0;
    if (index < e->ranks) {
        r->class_ratio = gb_exp(class_shift(e, kind, index, &slower));
        if (slower) r->answers |= GPUBRIDGE_STRAGGLER_SLOWER_THAN_CLASS;
    }
}

int gpubridge_straggler_report(const gpubridge_straggler *e, int32_t rank, int32_t kind,
                               struct gpubridge_straggler_report *report)
{
    int index = 0;
    GB_TRY(find_stream(e, rank, kind, &index));
    if (!report || report->struct_size != sizeof *report)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: report is NULL or its struct_size is not %zu",
                       sizeof *report);
    struct gpubridge_straggler_report r = {
        .struct_size = sizeof r, .member = -1, .min_detectable = -1.0, .gross_level = -1.0, .class_ratio = 1.0};
    const struct gb_cold *c = gb_cold_of(e, kind, index);
    r.state = gb_stream_state(e, kind, index);
    if (c->phase == GB_PHASE_RUN && c->verdict != GB_VERDICT_NONE) fill_verdict(e, kind, index, &r);
    if (c->phase == GB_PHASE_RUN) fill_learned(e, kind, index, &r);
    if (index < e->ranks) {
        int g = e->group_of[index];
        const struct gb_arrivals *a = &e->arrivals[index];
        r.has_peers = e->group[g].peers;
        r.last_share = a->steps > 0.0 ? a->last / a->steps : 0.0;
        if (gb_cold_of(e, kind, e->ranks + g)->verdict == GB_VERDICT_CONFIRMED)
            r.answers |= GPUBRIDGE_STRAGGLER_EVERYBODY_MOVED;
    }
    if (r.state == GPUBRIDGE_STRAGGLER_WARMUP || r.state == GPUBRIDGE_STRAGGLER_LEARN ||
        r.state == GPUBRIDGE_STRAGGLER_HOLD || r.state == GPUBRIDGE_STRAGGLER_UNKNOWN)
        r.answers |= GPUBRIDGE_STRAGGLER_CANNOT_TELL;
    *report = r;
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_events(gpubridge_straggler *e, struct gpubridge_straggler_event *events, int32_t capacity,
                               int32_t *count, uint64_t *lost)
{
    if (!e || !count || capacity < 0 || (capacity > 0 && !events))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine, count or events is NULL, or capacity is negative");
    int32_t n = 0;
    while (n < capacity && e->event_tail < e->event_head)
        events[n++] = e->events[e->event_tail++ % (uint64_t)e->event_capacity];
    *count = n;
    if (lost) *lost = e->event_lost;
    return GPUBRIDGE_OK;
}

/* ---- one value at a time ---- */

static int judge_slot(struct gpubridge_straggler *e, int slot)
{
    size_t values = (size_t)e->kinds * (size_t)e->ranks;
    int64_t step = e->window_step[slot];
    uint8_t *present = e->window_present + (size_t)slot * values;
    int rc = gpubridge_straggler_step(e, step, e->window + (size_t)slot * values, present, NULL);
    memset(present, 0, values);
    e->window_step[slot] = INT64_MIN;
    e->window_count[slot] = 0;
    return rc;
}

static int oldest_slot(const struct gpubridge_straggler *e)
{
    int best = -1;
    for (int s = 0; s < e->window_steps; s++)
        if (e->window_step[s] != INT64_MIN && (best < 0 || e->window_step[s] < e->window_step[best])) best = s;
    return best;
}

static int free_slot(const struct gpubridge_straggler *e)
{
    for (int s = 0; s < e->window_steps; s++)
        if (e->window_step[s] == INT64_MIN) return s;
    return -1;
}

static int slot_of(const struct gpubridge_straggler *e, int64_t step)
{
    for (int s = 0; s < e->window_steps; s++)
        if (e->window_step[s] == step) return s;
    return -1;
}

int gpubridge_straggler_push(gpubridge_straggler *e, int64_t step, int32_t rank, int32_t kind, double seconds)
{
    if (!e || rank < 0 || rank >= e->ranks || kind < 0 || kind >= e->kinds || step == INT64_MIN)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: no stream rank %d, kind %d (or engine is NULL)", rank, kind);
    if (!(seconds >= 1e-12 && seconds <= 1e9))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: %g seconds for rank %d, kind %d; legal are 1e-12 ... 1e9",
                       seconds, rank, kind);
    if (step <= e->step)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "straggler: step %lld of rank %d is already judged; raise window_steps (%d)", (long long)step,
                       rank, e->window_steps);
    size_t values = (size_t)e->kinds * (size_t)e->ranks, at = (size_t)kind * (size_t)e->ranks + (size_t)rank;
    int slot = slot_of(e, step);
    if (slot >= 0 && e->window_present[(size_t)slot * values + at])
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: rank %d, kind %d gave step %lld twice", rank, kind,
                       (long long)step);
    if (slot < 0) {
        slot = free_slot(e);
        if (slot < 0) {
            int oldest = oldest_slot(e);
            if (e->window_step[oldest] > step)
                return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                               "straggler: step %lld of rank %d is more than window_steps (%d) late", (long long)step,
                               rank, e->window_steps);
            GB_TRY(judge_slot(e, oldest));
            slot = oldest;
        }
        e->window_step[slot] = step;
    }
    e->window[(size_t)slot * values + at] = seconds;
    e->window_present[(size_t)slot * values + at] = 1;
    e->window_count[slot]++;
    /* A complete step waits for the one before it, until that comes or the window is full. */
    for (slot = oldest_slot(e); slot >= 0 && (size_t)e->window_count[slot] == values && e->step != INT64_MIN &&
                                e->window_step[slot] == e->step + 1;
         slot = oldest_slot(e))
        GB_TRY(judge_slot(e, slot));
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_flush(gpubridge_straggler *e)
{
    if (!e) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine is NULL");
    for (int slot = oldest_slot(e); slot >= 0; slot = oldest_slot(e)) GB_TRY(judge_slot(e, slot));
    return GPUBRIDGE_OK;
}

/* ---- the state as bytes ---- */

struct writer {
    unsigned char *at;
    size_t left, used;
};

static void put(struct writer *w, const void *p, size_t n)
{
    if (n <= w->left) {
        memcpy(w->at, p, n);
        w->at += n;
        w->left -= n;
    }
    w->used += n;
}

static void put_hot(struct writer *w, const struct gb_hot *h, int l)
{
    put(w, &h->level[l], 8);
    const float *first[] = {h->inv_scale, h->centre, h->inv_omega};
    const float *rest[] = {h->older_count, h->older_sum, h->newer_count, h->newer_sum, h->count, h->q_count, h->q1,
                           h->q2,          h->q11,       h->q3,          h->q_in,      h->prev,  h->guard,   h->gross};
    for (int i = 0; i < 3; i++) put(w, &first[i][l], 4);
    for (int j = 0; j < GB_MEMBERS; j++) {
        put(w, &h->up[j][l], 4);
        put(w, &h->down[j][l], 4);
        put(w, &h->up_run[j][l], 4);
        put(w, &h->down_run[j][l], 4);
    }
    for (int i = 0; i < 14; i++) put(w, &rest[i][l], 4);
    for (int i = 0; i < GB_TAILS; i++) put(w, &h->tail[i][l], 2);
    put(w, &h->flags[l], 4);
}

static void put_learned(struct writer *w, const struct gb_learned *a)
{
    put(w, &a->n, 6 * 8);
    put(w, &a->short_n, 6 * 8);
    put(w, a->tail, sizeof a->tail);
    put(w, a->up, sizeof a->up);
    put(w, a->down, sizeof a->down);
    put(w, &a->next_refresh, 8);
    put(w, &a->onset, 3 * 8);
    put(w, &a->magnitude, 6 * 4);
    put(w, &a->clean, 4);
}

int gpubridge_straggler_state_bytes(const gpubridge_straggler *e, int32_t rank, int32_t kind, void *bytes,
                                    size_t capacity, size_t *written)
{
    int index = 0;
    GB_TRY(find_stream(e, rank, kind, &index));
    const struct gb_cold *c = gb_cold_of(e, kind, index);
    struct writer w = {.at = bytes, .left = capacity};
    int32_t state = gb_stream_state(e, kind, index);
    put(&w, &state, 4);
    put_hot(&w, gb_hot_of(e, kind, index), index % GB_LANES);
    if (c->phase == GB_PHASE_RUN)
        put_learned(&w, &c->u.learned);
    else
        put(&w, c->u.window, c->filled <= GB_SCALE_STEPS && c->phase != GB_PHASE_WARMUP ? (size_t)c->filled * 4 : 0);
    put(&w, &c->gross_step, 8);
    put(&w, &c->gross_run, 4 * 2);
    put(&w, &c->phase, 6);
    if (index < e->ranks && kind == 0) {
        const struct gb_arrivals *a = &e->arrivals[index];
        put(&w, &a->steps, 4 * 8);
        put(&w, &a->pending_steps, 8 * 4);
        put(&w, &a->was_last, 2);
        put(&w, &a->seen, 8);
    }
    if (!bytes || !written || w.used > capacity)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: the state has %zu bytes, the buffer %zu", w.used, capacity);
    *written = w.used;
    return GPUBRIDGE_OK;
}
