/* SPDX-License-Identifier: Apache-2.0
 * The straggler engine: creation from a budget, and one step of all streams in the order of section 3 of
 * docs/straggler-engine.md.  No clock, no I/O, no allocation after create; one thread at a time. */
#include "straggler/num.h"
#include "straggler/stream.h"

#include "base/err.h"

#include <stdlib.h>

static int resolve(const struct gpubridge_straggler_config *in, struct gpubridge_straggler_config *c)
{
    if (!in || in->struct_size != sizeof *in)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: config is NULL or its struct_size is not %zu", sizeof *in);
    *c = *in;
    if (c->kinds == 0) c->kinds = 1;
    if (c->ranks < 1 || c->kinds < 1 || c->kinds > 64 || (int64_t)c->ranks * c->kinds > GPUBRIDGE_STRAGGLER_MAX_STREAMS)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "straggler: %d ranks x %d kinds; legal are 1 or more, 1 ... 64, at most %d "
                       "streams",
                       c->ranks, c->kinds, GPUBRIDGE_STRAGGLER_MAX_STREAMS);
    if (c->alarms == 0.0) c->alarms = 1.0;
    if (c->days == 0.0) c->days = 30.0;
    if (c->steps_per_second == 0.0) c->steps_per_second = 1.0;
    if (c->min_slowdown == 0.0) c->min_slowdown = 0.0025;
    if (c->warmup_steps == 0) c->warmup_steps = 50;
    if (c->max_hold_steps == 0) c->max_hold_steps = 2000;
    if (c->window_steps == 0) c->window_steps = 8;
    if (!(c->alarms > 0.0 && c->alarms < 1e12) || !(c->days > 0.0 && c->days < 1e9) ||
        !(c->steps_per_second > 0.0 && c->steps_per_second < 1e9) || !(c->min_slowdown > 0.0 && c->min_slowdown < 10.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "straggler: alarms, days, steps_per_second and min_slowdown must be positive "
                       "and finite (0 takes the default)");
    if (c->warmup_steps > 60000 || c->max_hold_steps < 1 || c->window_steps < 1 || c->window_steps > 64)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: warmup_steps is at most 60000, max_hold_steps at least 1, "
                                              "window_steps 1 ... 64");
    return GPUBRIDGE_OK;
}

static int count_groups(const struct gpubridge_straggler_config *c, int *groups)
{
    *groups = 1;
    if (!c->groups) return GPUBRIDGE_OK;
    for (int r = 0; r < c->ranks; r++) {
        if (c->groups[r] < 0 || c->groups[r] >= c->ranks)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: groups[%d] is %d; legal are 0 ... ranks - 1", r,
                           c->groups[r]);
        if (c->groups[r] >= *groups) *groups = c->groups[r] + 1;
    }
    return GPUBRIDGE_OK;
}

/* Members of each group in rank order. */
static void fill_groups(struct gpubridge_straggler *e, const struct gpubridge_straggler_config *c)
{
    for (int r = 0; r < e->ranks; r++) {
        e->group_of[r] = c->groups ? c->groups[r] : 0;
        e->class_of[r] = c->classes ? c->classes[r] : 0;
        e->group[e->group_of[r]].size++;
    }
    for (int g = 0, at = 0; g < e->groups; g++) {
        e->group[g].first = at;
        at += e->group[g].size;
        e->group[g].peers = c->use_peers >= 0 && e->group[g].size >= GB_GROUP_RANKS;
        e->group[g].size = 0;
    }
    for (int r = 0; r < e->ranks; r++) {
        struct gb_group *g = &e->group[e->group_of[r]];
        e->members[g->first + g->size++] = r;
    }
}

static int allocate(struct gpubridge_straggler *e)
{
    size_t streams = (size_t)e->kinds * (size_t)e->stride, ranks = (size_t)e->ranks, stride = (size_t)e->stride;
    size_t values = (size_t)e->kinds * ranks, slots = (size_t)e->window_steps;
    e->hot = aligned_alloc(64, (size_t)e->kinds * (size_t)e->blocks * sizeof *e->hot);
    e->cold = calloc(streams, sizeof *e->cold);
    e->route = calloc(streams, 1);
    e->arrivals = calloc(ranks, sizeof *e->arrivals);
    e->group = calloc((size_t)e->groups, sizeof *e->group);
    e->members = calloc(ranks * 5, sizeof *e->members);
    e->x = calloc(stride + ranks * 3 + 8, sizeof *e->x);
    e->present = calloc(stride * 2, 1);
    e->replay = calloc(values, sizeof *e->replay);
    e->replay_last = calloc((size_t)e->groups, sizeof *e->replay_last);
    e->window = calloc(values * slots, sizeof *e->window);
    e->window_present = calloc(values * slots, 1);
    e->window_step = calloc(slots * 2, sizeof *e->window_step);
    e->events = calloc((size_t)e->event_capacity, sizeof *e->events);
    if (!e->hot || !e->cold || !e->route || !e->arrivals || !e->group || !e->members || !e->x || !e->present ||
        !e->replay || !e->replay_last || !e->window || !e->window_present || !e->window_step || !e->events)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "straggler: no memory for %d ranks x %d kinds", e->ranks, e->kinds);
    memset(e->hot, 0, (size_t)e->kinds * (size_t)e->blocks * sizeof *e->hot);
    e->group_of = e->members + ranks;
    e->class_of = e->group_of + ranks;
    e->held = e->class_of + ranks;
    e->held_since = e->held + ranks;
    e->scratch = e->x + stride;
    e->active = e->present + stride;
    e->window_count = e->window_step + slots;
    return GPUBRIDGE_OK;
}

static void reset_stream(struct gpubridge_straggler *e, int kind, int index)
{
    struct gb_cold *c = gb_cold_of(e, kind, index);
    gb_learn_reset(gb_hot_of(e, kind, index), index % GB_LANES, c);
    if (e->warmup <= 0) c->phase = GB_PHASE_LEVEL;
    e->route[(size_t)kind * (size_t)e->stride + (size_t)index] = index < e->ranks + e->groups;
}

int gpubridge_straggler_create(const struct gpubridge_straggler_config *config, gpubridge_straggler **engine)
{
    struct gpubridge_straggler_config c = {0};
    int groups = 1;
    if (!engine) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine is NULL");
    GB_TRY(resolve(config, &c));
    GB_TRY(count_groups(&c, &groups));
    struct gpubridge_straggler *e = calloc(1, sizeof *e);
    if (!e) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "straggler: no memory");
    e->ranks = c.ranks;
    e->kinds = c.kinds;
    e->groups = groups;
    e->blocks = (c.ranks + groups + GB_LANES - 1) / GB_LANES;
    e->stride = e->blocks * GB_LANES;
    e->warmup = c.warmup_steps;
    e->max_hold = c.max_hold_steps;
    e->window_steps = c.window_steps;
    e->event_capacity = 1024 + c.ranks;
    e->step = INT64_MIN;
    double streams = (double)c.ranks * (double)c.kinds;
    int rc = gb_tables_init(&e->tables, c.days * 86400.0 * c.steps_per_second * streams / c.alarms, c.min_slowdown);
    if (rc == GPUBRIDGE_OK) rc = allocate(e);
    if (rc != GPUBRIDGE_OK) {
        gpubridge_straggler_destroy(e);
        return rc;
    }
    fill_groups(e, &c);
    c.groups = c.classes = NULL;
    e->config = c;
    for (int kind = 0; kind < e->kinds; kind++)
        for (int i = 0; i < e->stride; i++) reset_stream(e, kind, i);
    for (int s = 0; s < e->window_steps; s++) e->window_step[s] = INT64_MIN;
    *engine = e;
    return GPUBRIDGE_OK;
}

void gpubridge_straggler_destroy(gpubridge_straggler *e)
{
    if (!e) return;
    free(e->hot);
    free(e->cold);
    free(e->route);
    free(e->arrivals);
    free(e->group);
    free(e->members);
    free(e->x);
    free(e->present);
    free(e->replay);
    free(e->replay_last);
    free(e->window);
    free(e->window_present);
    free(e->window_step);
    free(e->events);
    free(e);
}

static int check_values(const struct gpubridge_straggler *e, const double *seconds, const uint8_t *present)
{
    size_t n = (size_t)e->kinds * (size_t)e->ranks;
    for (size_t i = 0; i < n; i++) {
        if (present && !present[i]) continue;
        if (!(seconds[i] >= 1e-12 && seconds[i] <= 1e9))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                           "straggler: %g seconds for rank %zu, kind %zu; legal are 1e-12 ... 1e9: "
                           "mark what is missing in `present`",
                           seconds[i], i % (size_t)e->ranks, i / (size_t)e->ranks);
    }
    return GPUBRIDGE_OK;
}

static void age_holds(struct gpubridge_straggler *e)
{
    for (int r = 0; r < e->ranks; r++)
        if (e->held[r] && ++e->held_since[r] > e->max_hold) {
            e->held[r] = 0;
            e->arrivals[r].seen = e->group[e->group_of[r]].observed;
            for (int kind = 0; kind < e->kinds; kind++) gb_cold_of(e, kind, r)->skip = GB_SKIP_STEPS;
        }
}

/* Counts gaps; after long ones the scores start anew and a few steps must come before the stream is trusted again. */
static int follow_gaps(struct gpubridge_straggler *e, int kind, int index, struct gb_cold *c)
{
    if (!e->present[index]) {
        c->missing = (uint16_t)(c->missing < 1000 ? c->missing + 1 : 1000);
        if (c->missing >= GB_MISSING_STEPS && !c->unknown) {
            c->unknown = 1;
            if (c->phase == GB_PHASE_RUN && c->verdict != GB_VERDICT_CONFIRMED) gb_stream_clear(e, kind, index);
        }
        return 0;
    }
    if (c->unknown) {
        c->missing = (uint16_t)(c->missing > GB_MISSING_STEPS ? GB_MISSING_STEPS - 4
                                : c->missing >= 4             ? c->missing - 4
                                                              : 0);
        c->unknown = c->missing > 0;
        return !c->unknown;
    }
    c->missing = 0;
    return 1;
}

/* A stream that the kernel alone does not handle.  Returns whether the kernel steps it now. */
static int step_special(struct gpubridge_straggler *e, int kind, int index)
{
    struct gb_cold *c = gb_cold_of(e, kind, index);
    if (index < e->ranks && e->held[index]) return 0;
    if (c->skip) {
        c->skip--;
        return 0;
    }
    if (!follow_gaps(e, kind, index, c)) return 0;
    if (c->phase != GB_PHASE_RUN) {
        gb_learn_feed(e, gb_hot_of(e, kind, index), index % GB_LANES, c, e->x[index]);
        return 0;
    }
    if (c->verdict == GB_VERDICT_CONFIRMED) {
        gb_stream_confirmed_step(e, kind, index, e->x[index]);
        return 0;
    }
    return 1;
}

static void step_kind(struct gpubridge_straggler *e, int kind)
{
    uint8_t *route = e->route + (size_t)kind * (size_t)e->stride;
    int used = e->ranks + e->groups;
    gb_peers_remove(e, kind);
    for (int i = 0; i < used; i++) {
        if (!route[i] && e->present[i]) {
            e->active[i] = 1;
            continue;
        }
        route[i] = 1;
        e->active[i] = (uint8_t)step_special(e, kind, i);
    }
    for (int b = 0; b < e->blocks; b++) {
        struct gb_hot *h = &e->hot[(size_t)kind * (size_t)e->blocks + (size_t)b];
        unsigned alert = gb_bank_step(h, e->x + b * GB_LANES, e->active + b * GB_LANES, &e->tables);
        for (int l = 0; alert; l++, alert >>= 1)
            if (alert & 1u) gb_stream_examine(e, kind, b * GB_LANES + l, e->x[b * GB_LANES + l]);
    }
    for (int i = 0; i < used; i++) {
        if (!route[i]) continue;
        struct gb_cold *c = gb_cold_of(e, kind, i);
        if (e->active[i] && c->verdict == GB_VERDICT_RECOVERING) gb_stream_recovering_step(e, kind, i);
        route[i] = c->phase != GB_PHASE_RUN || c->verdict != GB_VERDICT_NONE || c->missing || c->unknown || c->skip ||
                   (i < e->ranks && e->held[i]);
    }
}

static void load_kind(struct gpubridge_straggler *e, int kind, const double *seconds, const uint8_t *present)
{
    const double *t = seconds + (size_t)kind * (size_t)e->ranks;
    if (!present) {
        memset(e->present, 1, (size_t)e->ranks);
        for (int i = 0; i < e->ranks; i++) e->x[i] = gb_log(t[i]);
        return;
    }
    const uint8_t *p = present + (size_t)kind * (size_t)e->ranks;
    for (int i = 0; i < e->ranks; i++) {
        e->present[i] = p[i] != 0;
        e->x[i] = p[i] ? gb_log(t[i]) : 0.0;
    }
}

/* Only the last rank of a group is touched; the others catch up when it is their turn. */
static void step_arrivals(struct gpubridge_straggler *e, const int32_t *last)
{
    for (int g = 0; g < e->groups; g++) {
        int32_t r = last[g];
        if (r < 0) continue;
        e->group[g].observed++;
        if (e->held[r]) continue;
        struct gb_arrivals *a = &e->arrivals[r];
        gb_arrivals_skip(a, e->group[g].observed - 1 - a->seen, &e->tables);
        a->seen = e->group[g].observed;
        if (gb_arrivals_last(a, &e->tables)) gb_stream_count_alarm(e, r);
    }
}

int gpubridge_straggler_step(gpubridge_straggler *e, int64_t step, const double *seconds, const uint8_t *present,
                             const int32_t *last)
{
    if (!e || !seconds) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine or seconds is NULL");
    if (step <= e->step)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: step %lld came after step %lld; steps must grow",
                       (long long)step, (long long)e->step);
    GB_TRY(check_values(e, seconds, present));
    for (int g = 0; last && g < e->groups; g++)
        if (last[g] >= e->ranks || (last[g] >= 0 && e->group_of[last[g]] != g))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: last[%d] is %d, no rank of that group (-1: not known)", g,
                           last[g]);
    e->step = step;
    e->steps++;
    age_holds(e);
    for (int kind = 0; kind < e->kinds; kind++) {
        load_kind(e, kind, seconds, present);
        step_kind(e, kind);
    }
    if (last) step_arrivals(e, last);
    return GPUBRIDGE_OK;
}

static int check_rank(const struct gpubridge_straggler *e, int32_t rank)
{
    if (!e || rank >= e->ranks)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: rank %d of %d (or engine is NULL)", rank, e ? e->ranks : 0);
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_hold(gpubridge_straggler *e, int32_t rank, int32_t begin)
{
    GB_TRY(check_rank(e, rank));
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? e->ranks : rank + 1); r++) {
        struct gb_arrivals *a = &e->arrivals[r];
        int64_t observed = e->group[e->group_of[r]].observed;
        if (begin) {
            if (e->held[r] == 0) {
                e->held_since[r] = 0;
                gb_arrivals_skip(a, observed - a->seen, &e->tables);
            }
            if (e->held[r] < 1000000) e->held[r]++;
        } else {
            if (e->held[r] == 0) continue;
            e->held[r]--;
            if (e->held[r] > 0) continue;
        }
        a->seen = observed; /* what happens during a hold does not count */
        for (int kind = 0; kind < e->kinds; kind++) {
            if (!begin) gb_cold_of(e, kind, r)->skip = GB_SKIP_STEPS;
            e->route[(size_t)kind * (size_t)e->stride + (size_t)r] = 1;
        }
    }
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_restart(gpubridge_straggler *e, int32_t rank)
{
    GB_TRY(check_rank(e, rank));
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? e->ranks : rank + 1); r++) {
        e->held[r] = 0;
        gb_arrivals_reset(&e->arrivals[r]);
        e->arrivals[r].seen = e->group[e->group_of[r]].observed;
        for (int kind = 0; kind < e->kinds; kind++) reset_stream(e, kind, r);
    }
    for (int kind = 0; rank < 0 && kind < e->kinds; kind++)
        for (int g = 0; g < e->groups; g++) reset_stream(e, kind, e->ranks + g);
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_clear(gpubridge_straggler *e, int32_t rank)
{
    GB_TRY(check_rank(e, rank));
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? e->ranks : rank + 1); r++) {
        e->arrivals[r].score = e->arrivals[r].run = 0.0f;
        for (int kind = 0; kind < e->kinds; kind++) gb_stream_clear(e, kind, r);
    }
    for (int kind = 0; rank < 0 && kind < e->kinds; kind++)
        for (int g = 0; g < e->groups; g++) gb_stream_clear(e, kind, e->ranks + g);
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_given(gpubridge_straggler *e, int32_t rank, int32_t kind, double seconds, double noise,
                              double correlation)
{
    GB_TRY(check_rank(e, rank));
    if (rank < 0 || kind < 0 || kind >= e->kinds || !(seconds >= 1e-12 && seconds <= 1e9) ||
        !(noise >= 1e-6 && noise <= 10.0) || !(correlation >= -0.3 && correlation <= 0.95))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "straggler: given values need a rank, a kind, seconds in 1e-12 ... 1e9, noise "
                       "in 1e-6 ... 10, correlation in -0.3 ... 0.95");
    gb_learn_given(&e->tables, gb_hot_of(e, kind, rank), rank % GB_LANES, gb_cold_of(e, kind, rank), gb_log(seconds),
                   noise, correlation);
    return GPUBRIDGE_OK;
}
