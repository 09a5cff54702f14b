/* SPDX-License-Identifier: Apache-2.0
 * A simulated mixed job with overlapped, bridged gradient exchange (docs/fleet.md section 7): true times on one axis,
 * records on every rank's own shifted clock.  Seeded and pure; not a model of any real machine's speed. */
#include "base/err.h"
#include "fleet/random.h"
#include "straggler/num.h"

#include <gpubridge/fleet.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SPILL        0.15  /* of a memory fault into computation, and of a compute fault into memory kernels */
#define RAMP         200.0 /* steps until a thermal fault is complete */
#define KERNEL_NOISE 0.5   /* of a device's noise per step, each stretch of kernels on its own */
#define COMMON       0.01  /* what all devices of a class share per step */
#define LINK_NOISE   0.04
#define CONGESTION   0.005 /* share of transfers that take half as long again */
#define INPUT_S      0.004
#define HOST_S       0.0005
#define ISLAND_S     0.004
#define HOP_S        0.012
#define ISLANDS      2

/* Seconds of one step's computation and memory kernels at unit work, and their noise per step. */
static const struct profile {
    double compute, memory, noise;
    int island;
} profiles[GPUBRIDGE_FLEET_MODELS] = {
    [GPUBRIDGE_FLEET_V100] = {0.190, 0.060, 0.015, 0},  [GPUBRIDGE_FLEET_A100] = {0.150, 0.050, 0.013, 0},
    [GPUBRIDGE_FLEET_H200] = {0.120, 0.040, 0.012, 0},  [GPUBRIDGE_FLEET_MI50] = {0.200, 0.060, 0.045, 1},
    [GPUBRIDGE_FLEET_MI210] = {0.160, 0.055, 0.040, 1}, [GPUBRIDGE_FLEET_MI300X] = {0.120, 0.040, 0.035, 1},
};

struct device {
    int model, island, place;      /* place within the island */
    double clock, compute, memory; /* shift of the clock; levels */
    double compute_fault, memory_fault, thermal, input_fault, pauses;
    int64_t thermal_from;
    /* of the step in work, on the true axis */
    double now, busy_from, free; /* end of own work; transfers in progress since, until */
    double ready, work, compute_step, memory_step, stretch;
    int lost;
};

struct gpubridge_fleet_sim {
    struct gb_random random;
    struct gpubridge_fleet_sim_config config;
    int ranks, buckets, pairs, channels;
    int size[ISLANDS];
    int *member[ISLANDS];
    struct device *device;
    double *slow;             /* [channels] */
    double scale, contention; /* kernels are so much slower while a transfer is in progress */
    double common[GPUBRIDGE_FLEET_MODELS];
    int64_t step;
    struct gpubridge_fleet_record *out;
    int32_t count;
};

void gpubridge_fleet_sim_destroy(gpubridge_fleet_sim *s)
{
    if (!s) return;
    for (int i = 0; i < ISLANDS; i++) free(s->member[i]);
    free(s->device);
    free(s->slow);
    free(s);
}

static void begin_device(gpubridge_fleet_sim *s, int rank, int model)
{
    struct device *d = &s->device[rank];
    d->model = model;
    d->island = profiles[model].island;
    d->place = s->size[d->island]++;
    s->member[d->island][d->place] = rank;
    d->clock = s->config.clock_shift * gb_random_normal(&s->random);
    d->compute = gb_exp(s->config.lottery * gb_random_normal(&s->random));
    d->memory = gb_exp(0.5 * s->config.lottery * gb_random_normal(&s->random));
}

int gpubridge_fleet_sim_create(const struct gpubridge_fleet_sim_config *c, gpubridge_fleet_sim **sim)
{
    if (!c || !sim || c->struct_size != sizeof *c || c->ranks < 1 || c->ranks > 1 << 16 || c->buckets < 0 ||
        c->buckets > 64 || !c->models)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "fleet: a simulation of %d ranks with %d buckets; legal are 1 ... 65536 and 0 ... 64",
                       c ? c->ranks : 0, c ? c->buckets : 0);
    for (int r = 0; r < c->ranks; r++)
        if (c->models[r] < 0 || c->models[r] >= GPUBRIDGE_FLEET_MODELS)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: models[%d] is %d", r, c->models[r]);
    if (!(c->noise >= 0.0 && c->noise < 100.0) || !(c->lottery >= 0.0 && c->lottery < 1.0) ||
        !(c->clock_shift >= 0.0 && c->clock_shift < 1e6) || !(c->work_spread >= 0.0 && c->work_spread < 3.0) ||
        !(c->missing >= 0.0 && c->missing < 1.0) || !(c->pauses >= 0.0 && c->pauses < 1.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "fleet: noise, lottery, clock_shift, work_spread, missing or pauses is out of range");
    gpubridge_fleet_sim *s = calloc(1, sizeof *s);
    if (!s) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory");
    s->config = *c;
    if (c->noise == 0.0) s->config.noise = 1.0;
    s->ranks = c->ranks;
    s->buckets = c->buckets ? c->buckets : 3;
    s->scale = 1.0;
    gb_random_begin(&s->random, c->seed);
    s->contention = 0.03 + 0.17 * gb_random_uniform(&s->random);
    s->device = calloc((size_t)c->ranks, sizeof *s->device);
    for (int i = 0; i < ISLANDS; i++) s->member[i] = calloc((size_t)c->ranks, sizeof(int));
    int ok = s->device && s->member[0] && s->member[1];
    for (int r = 0; ok && r < c->ranks; r++) begin_device(s, r, c->models[r]);
    s->pairs = s->size[0] && s->size[1] ? (s->size[0] > s->size[1] ? s->size[0] : s->size[1]) : 0;
    s->channels = 2 * ISLANDS + 2 * s->pairs;
    s->slow = calloc((size_t)s->channels, sizeof *s->slow);
    if (!ok || !s->slow) {
        gpubridge_fleet_sim_destroy(s);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", c->ranks);
    }
    s->config.models = NULL;
    *sim = s;
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_sim_size(const gpubridge_fleet_sim *s, int32_t *channels, int32_t *max_records)
{
    if (!s || !channels || !max_records) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: sim or an argument is NULL");
    *channels = s->channels;
    *max_records = s->ranks * (6 + 4 * s->buckets) + s->pairs * 4 * s->buckets;
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_sim_fault(gpubridge_fleet_sim *s, int32_t fault, int32_t where, double size)
{
    int limit = s && fault == GPUBRIDGE_FLEET_FAULT_LINK ? s->channels : s ? s->ranks : 0;
    if (!s || where < 0 || where >= limit || !(size >= 0.0 && size < 1000.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: fault %d of size %g at %d of %d", fault, size, where, limit);
    struct device *d = &s->device[fault == GPUBRIDGE_FLEET_FAULT_LINK ? 0 : where];
    switch (fault) {
    case GPUBRIDGE_FLEET_FAULT_COMPUTE:
        d->compute_fault = size;
        break;
    case GPUBRIDGE_FLEET_FAULT_MEMORY:
        d->memory_fault = size;
        break;
    case GPUBRIDGE_FLEET_FAULT_THERMAL:
        d->thermal = size;
        d->thermal_from = s->step;
        break;
    case GPUBRIDGE_FLEET_FAULT_LINK:
        s->slow[where] = size;
        break;
    case GPUBRIDGE_FLEET_FAULT_INPUT:
        d->input_fault = size;
        break;
    case GPUBRIDGE_FLEET_FAULT_PAUSES:
        d->pauses = size;
        break;
    default:
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: there is no fault %d", fault);
    }
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_sim_restart(gpubridge_fleet_sim *s, int32_t rank, double level)
{
    if (!s || rank < 0 || rank >= s->ranks || !(level > 0.0 && level < 1000.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: restart of rank %d of %d at level %g", rank, s ? s->ranks : 0,
                       level);
    struct device *d = &s->device[rank];
    d->clock += 1.0 + s->config.clock_shift * gb_random_normal(&s->random);
    d->compute *= level;
    return GPUBRIDGE_OK;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int gpubridge_fleet_sim_slow_part(gpubridge_fleet_sim *s, int32_t rank, double ratio)
{
    if (!s || rank < 0 || rank >= s->ranks || !(ratio > 0.0 && ratio < 1000.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: slow part at rank %d of %d, ratio %g", rank, s ? s->ranks : 0,
                       ratio);
    double *levels = calloc((size_t)s->ranks, sizeof *levels), middle = 1.0;
    if (!levels) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", s->ranks);
    int n = 0;
    for (int r = 0; r < s->ranks; r++)
        if (r != rank && s->device[r].model == s->device[rank].model) levels[n++] = s->device[r].compute;
    qsort(levels, (size_t)n, sizeof *levels, ascending);
    if (n) middle = n % 2 ? levels[n / 2] : sqrt(levels[n / 2 - 1] * levels[n / 2]);
    s->device[rank].compute = ratio * middle;
    free(levels);
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_sim_rescale(gpubridge_fleet_sim *s, double factor)
{
    if (!s || !(factor > 0.01 && factor < 100.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: a rescale by %g; legal are 0.01 ... 100", factor);
    s->scale *= factor;
    return GPUBRIDGE_OK;
}

static void put(gpubridge_fleet_sim *s, int rank, int kind, int channel, int op, double start, double end, double ready)
{
    struct device *d = &s->device[rank];
    if (d->lost) return;
    s->out[s->count++] = (struct gpubridge_fleet_record){.step = s->step,
                                                         .rank = rank,
                                                         .kind = kind,
                                                         .channel = channel,
                                                         .op = op,
                                                         .start = start + d->clock,
                                                         .end = end + d->clock,
                                                         .ready = ready + d->clock};
}

/* Kernels of `seconds`, longer while a transfer is in progress. */
static void run(gpubridge_fleet_sim *s, int rank, int kind, double seconds)
{
    struct device *d = &s->device[rank];
    seconds *= 1.0 + KERNEL_NOISE * s->config.noise * profiles[d->model].noise * gb_random_normal(&s->random);
    double from = d->now > d->busy_from ? d->now : d->busy_from,
           to = d->now + seconds < d->free ? d->now + seconds : d->free;
    if (to > from) seconds += s->contention * (to - from);
    put(s, rank, kind, 0, 0, d->now, d->now + seconds, NAN);
    d->now += seconds;
}

static void begin_step(gpubridge_fleet_sim *s, int rank)
{
    struct device *d = &s->device[rank];
    struct gb_random *g = &s->random;
    const struct profile *p = &profiles[d->model];
    double noise = s->config.noise * p->noise, ramp = 0.0;
    d->lost = s->config.missing > 0.0 && gb_random_uniform(g) < s->config.missing;
    d->work = s->scale * (s->config.work_spread > 0.0 ? gb_exp(s->config.work_spread * gb_random_normal(g)) : 1.0);
    if (d->thermal > 0.0) {
        double age = (double)(s->step - d->thermal_from) / RAMP;
        ramp = d->thermal * (age < 1.0 ? age : 1.0);
    }
    double common = s->common[d->model], log_work = d->work == 1.0 ? 0.0 : gb_log(d->work);
    d->compute_step = p->compute * d->compute * gb_exp(1.2 * log_work + common + noise * gb_random_normal(g)) *
                      (1.0 + d->compute_fault + ramp + SPILL * d->memory_fault);
    d->memory_step = p->memory * d->memory * gb_exp(log_work + common + noise * gb_random_normal(g)) *
                     (1.0 + d->memory_fault + SPILL * (d->compute_fault + ramp));
    double input = INPUT_S * gb_exp(0.25 * gb_random_normal(g)) * (1.0 + d->input_fault);
    put(s, rank, GPUBRIDGE_FLEET_INPUT, 0, 0, d->now, d->now + input, NAN);
    d->now += input;
    double host = HOST_S * gb_exp(0.2 * gb_random_normal(g)), rate = s->config.pauses + d->pauses;
    if (rate > 0.0 && gb_random_uniform(g) < rate) host += (0.2 + 0.8 * gb_random_uniform(g)) * p->compute;
    put(s, rank, GPUBRIDGE_FLEET_HOST, 0, 0, d->now, d->now + host, NAN);
    d->now += host;
    d->busy_from = d->free = d->now;
    run(s, rank, GPUBRIDGE_FLEET_COMPUTE, 0.34 * d->compute_step);
    run(s, rank, GPUBRIDGE_FLEET_MEMORY, 0.3 * d->memory_step);
}

static double transfer(gpubridge_fleet_sim *s, double seconds, int channel)
{
    double length = seconds * gb_exp(LINK_NOISE * gb_random_normal(&s->random)) * (1.0 + s->slow[channel]);
    return gb_random_uniform(&s->random) < CONGESTION ? 1.5 * length : length;
}

/* One collective of an island: `begin` of each member is d->ready; all leave together at the returned time. */
static double collective(gpubridge_fleet_sim *s, int island, int channel, int op, int queued)
{
    double last = 0.0;
    for (int k = 0; k < s->size[island]; k++) {
        struct device *d = &s->device[s->member[island][k]];
        double start = queued && d->free > d->ready ? d->free : d->ready;
        if (start > last) last = start;
    }
    if (s->size[island] < 2) return last;
    double end = last + transfer(s, ISLAND_S, channel);
    for (int k = 0; k < s->size[island]; k++) {
        int rank = s->member[island][k];
        struct device *d = &s->device[rank];
        double start = queued && d->free > d->ready ? d->free : d->ready;
        put(s, rank, GPUBRIDGE_FLEET_COLLECTIVE, channel, op, start, end, d->ready);
        if (start > d->free || d->free == d->busy_from) d->busy_from = start;
    }
    return end;
}

/* The bridged exchange of one bucket: island reduce, both directions of every pair, island gather. */
static void exchange(gpubridge_fleet_sim *s, int bucket)
{
    double reduced[ISLANDS] = {0.0, 0.0};
    for (int i = 0; i < ISLANDS; i++) {
        if (s->size[i]) reduced[i] = collective(s, i, i, bucket, 1);
        for (int k = 0; k < s->size[i]; k++) {
            struct device *d = &s->device[s->member[i][k]];
            if (s->size[i] < 2) d->busy_from = reduced[i] > d->free ? reduced[i] : d->busy_from;
            d->free = d->ready = reduced[i];
        }
    }
    if (!s->pairs || !s->size[0] || !s->size[1]) return;
    double both = reduced[0] > reduced[1] ? reduced[0] : reduced[1];
    for (int p = 0; p < s->pairs; p++) {
        int end[ISLANDS] = {s->member[0][p % s->size[0]], s->member[1][p % s->size[1]]};
        for (int direction = 0; direction < 2; direction++) {
            int channel = 2 * ISLANDS + 2 * p + direction;
            double stop = both + transfer(s, HOP_S, channel);
            for (int i = 0; i < ISLANDS; i++) {
                struct device *d = &s->device[end[i]];
                put(s, end[i], GPUBRIDGE_FLEET_HOP, channel, bucket, reduced[i], stop, reduced[i]);
                if (stop > d->free) d->free = stop;
            }
        }
    }
    for (int i = 0; i < ISLANDS; i++) {
        for (int k = 0; k < s->size[i]; k++) s->device[s->member[i][k]].ready = s->device[s->member[i][k]].free;
        double end = collective(s, i, ISLANDS + i, bucket, 0);
        for (int k = 0; k < s->size[i]; k++) s->device[s->member[i][k]].free = end;
    }
}

int gpubridge_fleet_sim_step(gpubridge_fleet_sim *s, struct gpubridge_fleet_record *records, int32_t capacity,
                             int32_t *count, double *amounts)
{
    int32_t channels, most = 0;
    GB_TRY(gpubridge_fleet_sim_size(s, &channels, &most));
    if (!records || !count || capacity < most)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: room for %d records; a step can have %d", capacity, most);
    s->out = records;
    s->count = 0;
    for (int m = 0; m < GPUBRIDGE_FLEET_MODELS; m++) s->common[m] = COMMON * gb_random_normal(&s->random);
    for (int r = 0; r < s->ranks; r++) begin_step(s, r);
    for (int b = 0; b < s->buckets; b++) {
        double share = 1.0 / (double)s->buckets;
        for (int r = 0; r < s->ranks; r++) {
            struct device *d = &s->device[r];
            run(s, r, GPUBRIDGE_FLEET_COMPUTE, 0.66 * share * d->compute_step);
            run(s, r, GPUBRIDGE_FLEET_MEMORY, 0.4 * share * d->memory_step);
            d->ready = d->now;
        }
        exchange(s, b);
    }
    for (int r = 0; r < s->ranks; r++) { /* the optimizer needs all gradients */
        struct device *d = &s->device[r];
        if (d->free > d->now) d->now = d->free;
        run(s, r, GPUBRIDGE_FLEET_MEMORY, 0.3 * d->memory_step);
        if (amounts) amounts[r] = d->work;
    }
    s->step++;
    *count = s->count;
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_sim_seconds(gpubridge_fleet_sim *s, double *seconds)
{
    if (!s || !seconds) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: sim or seconds is NULL");
    for (int m = 0; m < GPUBRIDGE_FLEET_MODELS; m++) s->common[m] = COMMON * gb_random_normal(&s->random);
    for (int r = 0; r < s->ranks; r++) {
        const struct device *d = &s->device[r];
        const struct profile *p = &profiles[d->model];
        /* exp(x) to third order: x stays below a tenth or so */
        double x = s->common[d->model] + s->config.noise * p->noise * gb_random_normal(&s->random);
        seconds[r] = p->compute * d->compute * (1.0 + x * (1.0 + x * (0.5 + x * 0.16666666666666666))) *
                     (1.0 + d->compute_fault);
        if (!(seconds[r] > 1e-12)) seconds[r] = 1e-12;
    }
    s->step++;
    return GPUBRIDGE_OK;
}
