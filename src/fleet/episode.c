/* SPDX-License-Identifier: Apache-2.0
 * Random mixed jobs with known faults, or without, watched by a monitor: the material of the confusion matrix and of
 * the healthy histories (docs/fleet.md section 7).  Seeded and pure; one thread per call. */
#include "base/err.h"
#include "fleet/random.h"

#include <gpubridge/fleet.h>
#include <stdlib.h>
#include <string.h>

#define MOST_VERDICTS 64
#define LOOK          10 /* steps between two looks at the verdicts */
#define DETECT_STEPS  200.0
#define PERIOD        50 /* steps between the pauses that go round */

struct fault {
    int kind, where, other; /* other: the second channel of an island's fabric, -1: none */
    double size, detectable;
};

struct episode {
    const struct gpubridge_fleet_episode_config *c;
    struct gpubridge_fleet_episode out;
    struct gb_random random;
    gpubridge_fleet_sim *sim;
    gpubridge_fleet_monitor *monitor;
    int ranks, islands[2], channels, capacity, fastest, slow_rank;
    int32_t *model;
    struct gpubridge_fleet_record *records;
    double *amounts;
    int64_t step;
    struct fault fault[2];
};

static int below(struct gb_random *g, int n)
{
    return (int)(gb_random_uniform(g) * (double)n);
}

/* One or two models of each vendor; a vendor may be missing. */
static int draw_models(struct episode *e)
{
    static const double speed[GPUBRIDGE_FLEET_MODELS] = {1, 2, 4, 1, 2, 4};
    int least = e->c->least_class > 0 ? e->c->least_class : 1;
    e->model = calloc(4 * ((size_t)least + 6), sizeof *e->model);
    if (!e->model) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for an episode");
    if (e->c->pair) {
        static const int pair[2] = {GPUBRIDGE_FLEET_V100, GPUBRIDGE_FLEET_MI50};
        for (int i = 0; i < 2; i++) e->model[i] = pair[i];
        e->ranks = 2;
        e->islands[0] = e->islands[1] = 1;
        e->fastest = pair[below(&e->random, 2)];
        return GPUBRIDGE_OK;
    }
    int only = below(&e->random, 8); /* 0, 1: one vendor alone */
    for (int vendor = 0; vendor < 2; vendor++) {
        if (only < 2 && vendor != only) continue;
        int kinds = 1 + (below(&e->random, 3) == 0), first = below(&e->random, 3);
        for (int k = 0; k < kinds; k++) {
            int model = vendor * 3 + (first + k) % 3, count = least + below(&e->random, kinds == 2 ? 3 : 5);
            if (e->islands[vendor] + count < 2 && only < 2) count = 2;
            for (int i = 0; i < count; i++) e->model[e->ranks++] = model;
            e->islands[vendor] += count;
            if (e->ranks == count || speed[model] > speed[e->fastest]) e->fastest = model;
        }
    }
    return GPUBRIDGE_OK;
}

static int open_episode(struct episode *e)
{
    const struct gpubridge_fleet_episode_config *c = e->c;
    GB_TRY(draw_models(e));
    int lengths = c->history == GPUBRIDGE_FLEET_HISTORY_LENGTHS || below(&e->random, 2);
    struct gpubridge_fleet_sim_config sim = {.struct_size = sizeof sim,
                                             .seed = gb_random_bits(&e->random),
                                             .ranks = e->ranks,
                                             .buckets = 2 + below(&e->random, 3),
                                             .models = e->model,
                                             .lottery = 0.04,
                                             .clock_shift = 0.05,
                                             .work_spread = c->history == GPUBRIDGE_FLEET_HISTORY_LENGTHS ? 0.4
                                                            : lengths                                     ? 0.15
                                                                                                          : 0.0,
                                             .missing = 0.002,
                                             .pauses = 0.001};
    GB_TRY(gpubridge_fleet_sim_create(&sim, &e->sim));
    GB_TRY(gpubridge_fleet_sim_size(e->sim, &e->channels, &e->capacity));
    struct gpubridge_fleet_monitor_config monitor = {.struct_size = sizeof monitor,
                                                     .ranks = e->ranks,
                                                     .channels = e->channels,
                                                     .max_records = e->capacity,
                                                     .covariates = 1,
                                                     .classes = e->model,
                                                     .alarms = c->alarms > 0.0 ? c->alarms : 1.0};
    /* class numbers must be below the number of ranks: renumber the models */
    int32_t *classes = calloc((size_t)e->ranks, sizeof *classes);
    e->records = calloc((size_t)e->capacity, sizeof *e->records);
    e->amounts = calloc((size_t)e->ranks, sizeof *e->amounts);
    if (!classes || !e->records || !e->amounts) {
        free(classes);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for an episode");
    }
    int found = 0;
    for (int r = 0; r < e->ranks; r++) {
        classes[r] = -1;
        for (int o = 0; o < r; o++)
            if (e->model[o] == e->model[r]) classes[r] = classes[o];
        if (classes[r] < 0) classes[r] = found++;
    }
    monitor.classes = classes;
    int rc = gpubridge_fleet_monitor_create(&monitor, &e->monitor);
    free(classes);
    GB_TRY(rc);
    e->slow_rank = -1;
    if (c->slow_part > 0.0) {
        e->slow_rank = below(&e->random, e->ranks);
        GB_TRY(gpubridge_fleet_sim_slow_part(e->sim, e->slow_rank, c->slow_part));
    }
    e->out.ranks = e->ranks;
    return GPUBRIDGE_OK;
}

static void close_episode(struct episode *e)
{
    gpubridge_fleet_sim_destroy(e->sim);
    gpubridge_fleet_monitor_destroy(e->monitor);
    free(e->model);
    free(e->records);
    free(e->amounts);
}

/* What a healthy job does besides training; times in steps. */
static int live(struct episode *e)
{
    int64_t t = e->step, in = t % 300;
    int rank = (int)((t / 300) % e->ranks);
    switch (e->c->history) {
    case GPUBRIDGE_FLEET_HISTORY_EVALUATION: /* all ranks, then one rank alone */
        if (in == 0 && t > 0) {
            GB_TRY(gpubridge_fleet_monitor_hold(e->monitor, (t / 300) % 2 ? -1 : rank, 1));
            GB_TRY(gpubridge_fleet_sim_rescale(e->sim, 0.4));
        }
        if (in == 20 && t > 300) {
            GB_TRY(gpubridge_fleet_sim_rescale(e->sim, 2.5));
            GB_TRY(gpubridge_fleet_monitor_hold(e->monitor, (t / 300) % 2 ? -1 : rank, 0));
        }
        return GPUBRIDGE_OK;
    case GPUBRIDGE_FLEET_HISTORY_CHECKPOINT:
        if (in == 0 && t > 0) {
            GB_TRY(gpubridge_fleet_monitor_hold(e->monitor, -1, 1));
            return gpubridge_fleet_sim_fault(e->sim, GPUBRIDGE_FLEET_FAULT_INPUT, 0, 500.0);
        }
        if (in == 3 && t > 300) {
            GB_TRY(gpubridge_fleet_sim_fault(e->sim, GPUBRIDGE_FLEET_FAULT_INPUT, 0, 0.0));
            return gpubridge_fleet_monitor_hold(e->monitor, -1, 0);
        }
        return GPUBRIDGE_OK;
    case GPUBRIDGE_FLEET_HISTORY_RESTART:
        if (t % 1000 == 600) { /* perhaps on another device of the model */
            rank = (int)((t / 1000) % e->ranks);
            GB_TRY(gpubridge_fleet_sim_restart(e->sim, rank, 1.0 + 0.04 * gb_random_normal(&e->random)));
            return gpubridge_fleet_monitor_restart(e->monitor, rank);
        }
        return GPUBRIDGE_OK;
    case GPUBRIDGE_FLEET_HISTORY_RESCALE:
        if (t % 1500 == 1400) {
            GB_TRY(gpubridge_fleet_sim_rescale(e->sim, (t / 1500) % 2 ? 2.0 : 0.5));
            return gpubridge_fleet_monitor_restart(e->monitor, -1);
        }
        return GPUBRIDGE_OK;
    case GPUBRIDGE_FLEET_HISTORY_PAUSES:
        if (t % PERIOD == 1)
            GB_TRY(
                gpubridge_fleet_sim_fault(e->sim, GPUBRIDGE_FLEET_FAULT_PAUSES, (int)((t / PERIOD) % e->ranks), 0.0));
        if (t % PERIOD == 0)
            GB_TRY(
                gpubridge_fleet_sim_fault(e->sim, GPUBRIDGE_FLEET_FAULT_PAUSES, (int)((t / PERIOD) % e->ranks), 1.0));
        return GPUBRIDGE_OK;
    default:
        return GPUBRIDGE_OK;
    }
}

static int advance(struct episode *e, int steps)
{
    for (int i = 0; i < steps; i++) {
        int32_t count = 0;
        GB_TRY(live(e));
        GB_TRY(gpubridge_fleet_sim_step(e->sim, e->records, e->capacity, &count, e->amounts));
        GB_TRY(gpubridge_fleet_monitor_step(e->monitor, e->step, e->records, count, e->amounts));
        e->out.records += count;
        e->step++;
    }
    e->out.steps = (int32_t)e->step;
    return GPUBRIDGE_OK;
}

static int cause_of(int fault)
{
    static const int causes[GPUBRIDGE_FLEET_FAULTS] = {GPUBRIDGE_FLEET_CAUSE_NONE,   GPUBRIDGE_FLEET_CAUSE_COMPUTE,
                                                       GPUBRIDGE_FLEET_CAUSE_MEMORY, GPUBRIDGE_FLEET_CAUSE_COMPUTE,
                                                       GPUBRIDGE_FLEET_CAUSE_LINK,   GPUBRIDGE_FLEET_CAUSE_INPUT,
                                                       GPUBRIDGE_FLEET_CAUSE_PAUSES};
    return causes[fault];
}

/* A channel that carries something: an island's fabric, or one direction of a pair. */
static int draw_channel(struct episode *e, int *other)
{
    *other = -1;
    int fabrics[2], n = 0;
    for (int i = 0; i < 2; i++)
        if (e->islands[i] > 1) fabrics[n++] = i;
    int hops = e->channels - 4, at = below(&e->random, n + hops);
    if (at >= n) return 4 + at - n;
    if (hops > 0) *other = 2 + fabrics[at]; /* reduce and gather share the fabric */
    return fabrics[at];
}

static int detectable(struct episode *e, struct fault *f)
{
    return gpubridge_fleet_monitor_detectable(e->monitor, cause_of(f->kind), f->where, DETECT_STEPS, &f->detectable);
}

static int device_kind(int fault)
{
    return fault == GPUBRIDGE_FLEET_FAULT_COMPUTE || fault == GPUBRIDGE_FLEET_FAULT_MEMORY ||
           fault == GPUBRIDGE_FLEET_FAULT_THERMAL;
}

static int draw_fault(struct episode *e, struct fault *f, const struct fault *before, int kind)
{
    for (int tries = 0; tries < 100; tries++) {
        f->kind = kind ? kind : 1 + below(&e->random, GPUBRIDGE_FLEET_FAULTS - 1);
        f->other = -1;
        f->where = f->kind == GPUBRIDGE_FLEET_FAULT_LINK ? draw_channel(e, &f->other) : below(&e->random, e->ranks);
        while (e->c->size > 0.0 && e->model[f->where] != e->fastest) f->where = below(&e->random, e->ranks);
        int links = f->kind == GPUBRIDGE_FLEET_FAULT_LINK;
        if (before && before->where == f->where && links == (before->kind == GPUBRIDGE_FLEET_FAULT_LINK) &&
            (links || before->kind == f->kind || (device_kind(before->kind) && device_kind(f->kind))))
            continue; /* the same thing twice, or two faults that are one to any observer */
        GB_TRY(detectable(e, f));
        if (f->detectable > 0.0 || e->c->size > 0.0) break;
    }
    double span = gb_log(e->c->most / e->c->least);
    f->size =
        e->c->size > 0.0 ? e->c->size : f->detectable * e->c->least * gb_exp(span * gb_random_uniform(&e->random));
    if (f->kind == GPUBRIDGE_FLEET_FAULT_PAUSES && f->size > 0.8) f->size = 0.8;
    GB_TRY(gpubridge_fleet_sim_fault(e->sim, f->kind, f->where, f->size));
    return f->other < 0 ? GPUBRIDGE_OK : gpubridge_fleet_sim_fault(e->sim, f->kind, f->other, f->size);
}

static int at_culprit(const struct fault *f, const struct gpubridge_fleet_verdict *v)
{
    if (f->kind == GPUBRIDGE_FLEET_FAULT_NONE) return 0;
    if (f->kind == GPUBRIDGE_FLEET_FAULT_LINK) return v->rank < 0 && (v->channel == f->where || v->channel == f->other);
    return v->rank == f->where;
}

/* Reads the verdicts that stand now into the result. */
static int look(struct episode *e)
{
    struct gpubridge_fleet_verdict v[MOST_VERDICTS];
    int32_t count = 0;
    int found[2] = {0, 0};
    GB_TRY(gpubridge_fleet_monitor_verdicts(e->monitor, v, MOST_VERDICTS, &count));
    struct gpubridge_fleet_episode *o = &e->out;
    o->named = o->wrong = o->misread = o->cause = o->slow_parts = o->slow_part_found = 0;
    for (int i = 0; i < count; i++) {
        if (v[i].cause == GPUBRIDGE_FLEET_CAUSE_SLOW_PART) {
            o->slow_parts++;
            o->slow_part_found |= v[i].rank == e->slow_rank;
            continue;
        }
        if (o->named++ == 0) o->cause = v[i].cause;
        int right = 0, place = 0;
        for (int k = 0; k < 2; k++) {
            int here = at_culprit(&e->fault[k], &v[i]);
            place |= here;
            if (!here || cause_of(e->fault[k].kind) != v[i].cause) continue;
            right = 1;
            if (k == 0 && !found[0]) o->peers = v[i].peers;
            found[k] = 1;
        }
        if (!right) o->wrong++;
        if (!right && place) o->misread++;
    }
    o->found = found[0] + found[1];
    if (found[0] && o->delay < 0) o->delay = -2; /* the caller knows the step */
    return GPUBRIDGE_OK;
}

static int run_episode(struct episode *e)
{
    const struct gpubridge_fleet_episode_config *c = e->c;
    e->out.delay = -1;
    GB_TRY(open_episode(e));
    for (int done = 0; done < c->healthy_steps; done += LOOK) {
        GB_TRY(advance(e, c->healthy_steps - done < LOOK ? c->healthy_steps - done : LOOK));
        GB_TRY(look(e));
        if (e->out.named > e->out.early) e->out.early = e->out.named;
    }
    if (c->faults > 0) GB_TRY(draw_fault(e, &e->fault[0], NULL, c->fault));
    if (c->faults > 1) GB_TRY(draw_fault(e, &e->fault[1], &e->fault[0], 0));
    for (int done = 0; c->faults > 0 && done < c->window_steps; done += LOOK) {
        GB_TRY(advance(e, LOOK));
        GB_TRY(look(e));
        if (e->out.delay == -2) e->out.delay = done + LOOK;
    }
    e->out.fault = e->fault[0].kind;
    e->out.where = e->fault[0].where;
    e->out.size = e->fault[0].size;
    e->out.detectable = e->fault[0].detectable;
    e->out.second_fault = e->fault[1].kind;
    e->out.second_where = e->fault[1].where;
    e->out.second_size = e->fault[1].size;
    e->out.second_detectable = e->fault[1].detectable;
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_run_episode(const struct gpubridge_fleet_episode_config *c, struct gpubridge_fleet_episode *episode)
{
    if (!c || !episode || c->struct_size != sizeof *c || episode->struct_size != sizeof *episode)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: config or episode is NULL, or struct_size is wrong");
    if (c->faults < 0 || c->faults > 2 || c->fault < 0 || c->fault >= GPUBRIDGE_FLEET_FAULTS || c->history < 0 ||
        c->history >= GPUBRIDGE_FLEET_HISTORIES || c->healthy_steps < 0 || c->window_steps < 0 || c->least_class < 0 ||
        c->least_class > 1000 || (c->faults && !(c->size > 0.0) && !(c->least > 0.0 && c->most >= c->least)))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: episode with %d faults of kind %d, history %d, sizes %g ... %g",
                       c->faults, c->fault, c->history, c->least, c->most);
    struct episode e = {.c = c};
    gb_random_begin(&e.random, c->seed);
    int rc = run_episode(&e);
    if (rc == GPUBRIDGE_OK) {
        e.out.struct_size = sizeof e.out;
        *episode = e.out;
    }
    close_episode(&e);
    return rc;
}
