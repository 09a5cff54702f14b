/* SPDX-License-Identifier: Apache-2.0
 * The false-alarm counter: feeds simulated healthy noise to the straggler engine, all rules on, and counts alarms.
 * One shard per run, one JSON line on stdout; tests/calibration/run.py starts many.  After an alarm the rank restarts
 * and learns anew (or, with given noise, its scores are zeroed).  */
#include "noise.h"

#include "base/err.h"

#include <gpubridge/straggler.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GROUP 8

struct options {
    int family, ranks, peers, given, progress;
    double steps, run_length, wander, share, cycle;
    uint64_t seed;
};

struct tally {
    double stream_steps;
    long alarms, slower, gross, count, everybody, member[6], young, restarts;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "count: %s: %s\n", what, gb_err_text());
    exit(1);
}

static int parse(int argc, char **argv, struct options *o)
{
    *o = (struct options){.ranks = 256, .steps = 1e5, .run_length = 25e6, .seed = 1, .peers = -1, .wander = 200.0};
    for (int i = 1; i < argc; i++) {
        char *v = strchr(argv[i], '=');
        if (!v) return -1;
        *v++ = 0;
        if (!strcmp(argv[i], "family"))
            o->family = noise_find(v);
        else if (!strcmp(argv[i], "ranks"))
            o->ranks = atoi(v);
        else if (!strcmp(argv[i], "steps"))
            o->steps = atof(v);
        else if (!strcmp(argv[i], "run_length"))
            o->run_length = atof(v);
        else if (!strcmp(argv[i], "seed"))
            o->seed = strtoull(v, NULL, 10);
        else if (!strcmp(argv[i], "peers"))
            o->peers = atoi(v);
        else if (!strcmp(argv[i], "given"))
            o->given = atoi(v);
        else if (!strcmp(argv[i], "wander"))
            o->wander = atof(v);
        else if (!strcmp(argv[i], "share"))
            o->share = atof(v);
        else if (!strcmp(argv[i], "cycle"))
            o->cycle = atof(v);
        else if (!strcmp(argv[i], "progress"))
            o->progress = atoi(v);
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
        if (gpubridge_straggler_given(e, r, 0, 1.0, 0.05, 0.0)) die("given");
    return e;
}

static void take(gpubridge_straggler *e, const struct options *o, struct noise *n, struct tally *t)
{
    struct gpubridge_straggler_event v[64];
    int32_t count;
    do {
        if (gpubridge_straggler_events(e, v, 64, &count, NULL)) die("events");
        for (int i = 0; i < count; i++) {
            if (v[i].to != GPUBRIDGE_STRAGGLER_CONFIRMED) continue;
            if (v[i].rank < 0) {
                t->everybody++;
                continue;
            }
            struct gpubridge_straggler_report r = {.struct_size = sizeof r};
            if (gpubridge_straggler_report(e, v[i].rank, 0, &r)) die("report");
            t->alarms++;
            t->slower += (v[i].answers & GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST) != 0;
            t->gross += v[i].rule == GPUBRIDGE_STRAGGLER_RULE_GROSS;
            t->count += v[i].rule == GPUBRIDGE_STRAGGLER_RULE_COUNT;
            if (v[i].member >= 0) t->member[v[i].member]++;
            t->young += r.learned_steps < 60000.0;
            if (o->progress)
                fprintf(stderr, "alarm step %lld rank %d rule %d member %d %+.4f learned %.0f since %lld\n",
                        (long long)v[i].step, v[i].rank, v[i].rule, v[i].member, v[i].slowdown, r.learned_steps,
                        (long long)(v[i].step - v[i].onset));
            if (o->given ? gpubridge_straggler_clear(e, v[i].rank) : gpubridge_straggler_restart(e, v[i].rank))
                die("reset");
            if (!o->given) noise_restart(n, v[i].rank);
            t->restarts++;
        }
    } while (count == 64);
}

static void find_last(const double *seconds, int ranks, int32_t *last)
{
    for (int g = 0; g * GROUP < ranks; g++) {
        int best = g * GROUP;
        for (int r = best + 1; r < (g + 1) * GROUP; r++) best = seconds[r] > seconds[best] ? r : best;
        last[g] = best;
    }
}

int main(int argc, char **argv)
{
    struct options o;
    struct noise n;
    struct tally t = {0};
    if (parse(argc, argv, &o)) {
        fprintf(stderr,
                "usage: count family=NAME ranks=N steps=N run_length=N seed=N peers=-1|0 given=0|1 wander=STEPS "
                "share=X cycle=STEPS progress=0|1\n");
        return 2;
    }
    gpubridge_straggler *e = make_engine(&o);
    double *seconds = malloc((size_t)o.ranks * sizeof *seconds);
    int32_t *last = malloc((size_t)o.ranks * sizeof *last);
    if (!seconds || !last || noise_init(&n, o.family, o.ranks, GROUP, o.seed)) die("no memory");
    n.wander_steps = o.wander;
    n.share = o.share;
    double start = now();
    for (int64_t s = 0; (double)s < o.steps; s++) {
        if (o.cycle > 0.0 && s > 0 && s % (int64_t)o.cycle == 0) {
            if (gpubridge_straggler_restart(e, -1)) die("restart");
            for (int r = 0; r < o.ranks; r++) noise_restart(&n, r);
            t.restarts += o.ranks;
        }
        noise_step(&n, seconds);
        find_last(seconds, o.ranks, last);
        if (gpubridge_straggler_step(e, s, seconds, NULL, last)) die("step");
        take(e, &o, &n, &t);
        t.stream_steps += o.ranks;
    }
    double wall = now() - start;
    printf("{\"tool\": \"count\", \"family\": \"%s\", \"seed\": %llu, \"ranks\": %d, \"steps\": %.0f, \"run_length\": "
           "%.6g, "
           "\"peers\": %d, \"given\": %d, \"wander_steps\": %.0f, \"share\": %.3f, \"cycle\": %.0f, \"stream_steps\": "
           "%.0f, "
           "\"expected\": %.4f, \"alarms\": %ld, \"slower\": %ld, \"gross\": %ld, \"count\": %ld, "
           "\"members\": [%ld, %ld, %ld, %ld, %ld, %ld], \"young\": %ld, \"everybody\": %ld, \"learned_anew\": %ld, "
           "\"ns_per_stream_step\": %.2f}\n",
           noise_name(o.family), (unsigned long long)o.seed, o.ranks, o.steps, o.run_length, o.peers, o.given, o.wander,
           o.share, o.cycle, t.stream_steps, t.stream_steps / o.run_length, t.alarms, t.slower, t.gross, t.count,
           t.member[0], t.member[1], t.member[2], t.member[3], t.member[4], t.member[5], t.young, t.everybody,
           o.given ? 0 : (long)o.ranks + t.restarts, wall * 1e9 / t.stream_steps);
    noise_fini(&n);
    free(seconds);
    free(last);
    gpubridge_straggler_destroy(e);
    return 0;
}
