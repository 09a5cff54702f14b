/* SPDX-License-Identifier: Apache-2.0
 * Detection delays: injects a slowdown into every rank at one step and records how many steps the straggler engine
 * takes to confirm it, with the intervals it states then.  One JSON line on stdout; see tests/calibration/run.py.  */
#include "base/err.h"
#include "noise.h"

#include <gpubridge/straggler.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GROUP 8

struct options {
    int family, ranks, peers, given, random_onset, one_of_group, samples, mdc;
    double shift, learn, run_length, wander, share, horizon;
    uint64_t seed;
};

struct outcome {
    int64_t delay;
    int early, found, wrong_side, size_covered, onset_covered, in_horizon, rule, member;
    double size_width, onset_width, shift;
};

static void die(const char *what)
{
    fprintf(stderr, "delay: %s: %s\n", what, gb_err_text());
    exit(1);
}

static int parse(int argc, char **argv, struct options *o)
{
    *o = (struct options){
        .ranks = 2048, .run_length = 25e6, .seed = 1, .peers = -1, .wander = 200.0, .shift = 0.02, .horizon = 100000.0};
    for (int i = 1; i < argc; i++) {
        char *v = strchr(argv[i], '=');
        if (!v) return -1;
        *v++ = 0;
        if (!strcmp(argv[i], "family"))
            o->family = noise_find(v);
        else if (!strcmp(argv[i], "ranks"))
            o->ranks = atoi(v);
        else if (!strcmp(argv[i], "run_length"))
            o->run_length = atof(v);
        else if (!strcmp(argv[i], "seed"))
            o->seed = strtoull(v, NULL, 10);
        else if (!strcmp(argv[i], "peers"))
            o->peers = atoi(v);
        else if (!strcmp(argv[i], "given"))
            o->given = atoi(v);
        else if (!strcmp(argv[i], "learn"))
            o->learn = atof(v);
        else if (!strcmp(argv[i], "random"))
            o->random_onset = atoi(v);
        else if (!strcmp(argv[i], "one"))
            o->one_of_group = atoi(v);
        else if (!strcmp(argv[i], "samples"))
            o->samples = atoi(v);
        else if (!strcmp(argv[i], "detectable"))
            o->mdc = atoi(v);
        else if (!strcmp(argv[i], "shift"))
            o->shift = atof(v);
        else if (!strcmp(argv[i], "wander"))
            o->wander = atof(v);
        else if (!strcmp(argv[i], "share"))
            o->share = atof(v);
        else if (!strcmp(argv[i], "horizon"))
            o->horizon = atof(v);
        else
            return -1;
    }
    return o->family < 0 || o->ranks < GROUP || o->ranks % GROUP ? -1 : 0;
}

static gpubridge_straggler *make_engine(const struct options *o)
{
    int32_t *groups = malloc((size_t)o->ranks * sizeof *groups);
    if (!groups) die("no memory");
    for (int r = 0; r < o->ranks; r++) groups[r] = r / GROUP;
    struct gpubridge_straggler_config c = {.struct_size = sizeof c,
                                           .ranks = o->ranks,
                                           .groups = groups,
                                           .alarms = o->ranks,
                                           .days = o->run_length / 86400.0,
                                           .steps_per_second = 1.0,
                                           .use_peers = o->peers};
    gpubridge_straggler *e;
    if (gpubridge_straggler_create(&c, &e)) die("create");
    free(groups);
    for (int r = 0; o->given && r < o->ranks; r++)
        if (gpubridge_straggler_given(e, r, 0, o->family == NOISE_LOGNORMAL ? 1.0 : exp(-0.00125), 0.05, 0.0))
            die("given");
    return e;
}

static int injected(const struct options *o, int rank)
{
    return !o->one_of_group || rank % GROUP == 3;
}

static void find_last(const double *seconds, int ranks, int32_t *last)
{
    for (int g = 0; g * GROUP < ranks; g++) {
        int best = g * GROUP;
        for (int r = best + 1; r < (g + 1) * GROUP; r++) best = seconds[r] > seconds[best] ? r : best;
        last[g] = best;
    }
}

static void take(gpubridge_straggler *e, int64_t onset, struct outcome *out)
{
    struct gpubridge_straggler_event v[64];
    int32_t count;
    do {
        if (gpubridge_straggler_events(e, v, 64, &count, NULL)) die("events");
        for (int i = 0; i < count; i++) {
            if (v[i].to != GPUBRIDGE_STRAGGLER_CONFIRMED || v[i].rank < 0) continue;
            struct outcome *r = &out[v[i].rank];
            if (onset < 0) r->early = 1;
            if (onset < 0 || r->found || r->early) continue;
            r->found = 1;
            r->delay = v[i].step - onset + 1;
            r->rule = v[i].rule;
            r->member = v[i].member;
            r->wrong_side = !(v[i].answers & GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST);
            r->size_covered = v[i].slowdown_low <= r->shift && r->shift <= v[i].slowdown_high;
            r->onset_covered = v[i].onset_low <= onset && onset <= v[i].onset_high;
            r->size_width = fmin(v[i].slowdown_high - v[i].slowdown_low, 999.0); /* 999: no upper bound */
            r->onset_width = (double)(v[i].onset_high - v[i].onset_low);
        }
    } while (count == 64);
}

static int by_delay(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double at(const double *sorted, int n, double p)
{
    return n ? sorted[(int)(p * (double)(n - 1) + 0.5)] : -1.0;
}

static void print(const struct options *o, const struct outcome *out, double learned)
{
    double *d = malloc((size_t)o->ranks * sizeof *d), *w = malloc((size_t)o->ranks * sizeof *w);
    double *ow = malloc((size_t)o->ranks * sizeof *ow), sum = 0.0, shifts = 0.0;
    int n = 0, early = 0, lost = 0, wrong = 0, size = 0, onset = 0, within = 0, tried = 0, members[6] = {0}, gross = 0,
        counts = 0;
    if (!d || !w || !ow) die("no memory");
    for (int r = 0; r < o->ranks; r++) {
        if (!injected(o, r)) continue;
        early += out[r].early;
        if (out[r].early) continue;
        tried++;
        shifts += out[r].shift;
        if (!out[r].found) {
            lost++;
            continue;
        }
        d[n] = (double)out[r].delay;
        sum += d[n];
        w[n] = out[r].size_width;
        ow[n++] = out[r].onset_width;
        wrong += out[r].wrong_side;
        size += out[r].size_covered;
        onset += out[r].onset_covered;
        within += out[r].delay <= 200;
        gross += out[r].rule == GPUBRIDGE_STRAGGLER_RULE_GROSS;
        counts += out[r].rule == GPUBRIDGE_STRAGGLER_RULE_COUNT;
        if (out[r].member >= 0) members[out[r].member]++;
    }
    double f = n ? 1.0 / (double)n : 0.0;
    qsort(d, (size_t)n, sizeof *d, by_delay);
    qsort(w, (size_t)n, sizeof *w, by_delay);
    qsort(ow, (size_t)n, sizeof *ow, by_delay);
    printf("{\"tool\": \"delay\", \"family\": \"%s\", \"seed\": %llu, \"shift\": %.5f, \"run_length\": %.6g, "
           "\"given\": %d, "
           "\"learn\": %.0f, \"learned\": %.0f, \"random_onset\": %d, \"peers\": %d, \"share\": %.3f, "
           "\"one_of_group\": %d, "
           "\"wander_steps\": %.0f, \"injected\": %d, \"alarm_before\": %d, \"found\": %d, \"not_found\": %d, "
           "\"mean\": %.2f, "
           "\"p50\": %.0f, \"p95\": %.0f, \"p99\": %.0f, \"max\": %.0f, \"wrong_side\": %d, \"within_200\": %.4f, "
           "\"size_coverage\": %.4f, \"size_width_p50\": %.5f, \"onset_coverage\": %.4f, \"onset_width_p50\": %.0f, "
           "\"members\": [%d, %d, %d, %d, %d, %d], \"gross\": %d, \"count\": %d",
           noise_name(o->family), (unsigned long long)o->seed, tried ? shifts / tried : 0.0, o->run_length, o->given,
           o->learn, learned, o->random_onset, o->peers, o->share, o->one_of_group, o->wander, tried, early, n, lost,
           sum * f, at(d, n, 0.5), at(d, n, 0.95), at(d, n, 0.99), at(d, n, 1.0), wrong,
           tried ? (double)within / tried : 0.0, size * f, at(w, n, 0.5), onset * f, at(ow, n, 0.5), members[0],
           members[1], members[2], members[3], members[4], members[5], gross, counts);
    if (o->samples) {
        printf(", \"delays\": [");
        for (int i = 0; i < n; i++) printf("%s%.0f", i ? ", " : "", d[i]);
        printf("]");
    }
    printf("}\n");
    free(d);
    free(w);
    free(ow);
}

static void one_step(gpubridge_straggler *e, struct noise *n, int64_t step, const struct options *o,
                     const struct outcome *out, int shifted, double *seconds, int32_t *last)
{
    noise_step(n, seconds);
    for (int r = 0; shifted && r < o->ranks; r++)
        if (injected(o, r)) seconds[r] *= 1.0 + out[r].shift;
    find_last(seconds, o->ranks, last);
    if (gpubridge_straggler_step(e, step, seconds, NULL, last)) die("step");
}

/* The slowdown of each rank: as asked, or what the engine states it could find within 200 steps. */
static double choose_shifts(const gpubridge_straggler *e, const struct options *o, struct outcome *out)
{
    double learned = 0.0;
    for (int r = 0; r < o->ranks; r++) {
        struct gpubridge_straggler_report rep = {.struct_size = sizeof rep};
        if (gpubridge_straggler_report(e, r, 0, &rep)) die("report");
        learned += rep.learned_steps / o->ranks;
        out[r].shift = o->mdc ? rep.min_detectable : o->shift;
        if (out[r].shift < 0.0) out[r].early = 1;
    }
    return learned;
}

int main(int argc, char **argv)
{
    struct options o;
    struct noise n;
    if (parse(argc, argv, &o)) {
        fprintf(stderr, "usage: delay family= ranks= shift= learn= given= random= run_length= seed= peers= share= one= "
                        "wander= samples= horizon= detectable=\n");
        return 2;
    }
    gpubridge_straggler *e = make_engine(&o);
    double *seconds = malloc((size_t)o.ranks * sizeof *seconds);
    int32_t *last = malloc((size_t)o.ranks * sizeof *last);
    struct outcome *out = calloc((size_t)o.ranks, sizeof *out);
    if (!seconds || !last || !out || noise_init(&n, o.family, o.ranks, GROUP, o.seed)) die("no memory");
    n.wander_steps = o.wander;
    n.share = o.share;
    int64_t s = 0, before = o.given ? (o.random_onset ? 5000 : 0) : (int64_t)o.learn + 50 + 32 + 64;
    for (; s < before; s++) {
        one_step(e, &n, s, &o, out, 0, seconds, last);
        take(e, -1, out);
    }
    if (!o.random_onset && gpubridge_straggler_clear(e, -1)) die("clear");
    double learned = choose_shifts(e, &o, out);
    for (int64_t onset = s, left = 1; left && s < onset + (int64_t)o.horizon; s++) {
        one_step(e, &n, s, &o, out, 1, seconds, last);
        take(e, onset, out);
        if (s % 64) continue;
        left = 0;
        for (int r = 0; r < o.ranks; r++) left += injected(&o, r) && !out[r].early && !out[r].found;
    }
    print(&o, out, learned);
    noise_fini(&n);
    free(seconds);
    free(last);
    free(out);
    gpubridge_straggler_destroy(e);
    return 0;
}
