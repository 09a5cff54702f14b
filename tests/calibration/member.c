/* SPDX-License-Identifier: Apache-2.0
 * The yardstick: single CUSUMs with the bank's slopes on one noise family, location, scale and correlation known, their
 * thresholds found by brute force so that each alone has the wanted run length, and their mean delay for one shift.
 * Shares no code with the engine but its logarithm.  One JSON line on stdout.  */
#include "noise.h"

#include "straggler/num.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMBERS 4
#define SAMPLE  4000000
#define BINS    4096 /* of 1/16 unit */

static const double slopes[MEMBERS] = {0.05, 0.1, 0.2, 0.5};

struct scale {
    double location, spread, mean, omega;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Log times; for the drifting family less the mean of the seven peers, which no single stream could do without. */
static void to_log(int family, double *t, int ranks)
{
    for (int r = 0; r < ranks; r++) t[r] = gb_log(t[r]);
    for (int g = 0; family == NOISE_DRIFT && g < ranks; g += 8) {
        double sum = 0.0;
        for (int r = g; r < g + 8; r++) sum += t[r];
        for (int r = g; r < g + 8; r++) t[r] -= (sum - t[r]) / 7.0;
    }
}

static double clipped(double z)
{
    return z > 2.0 ? 2.0 : z < -2.0 ? -2.0 : z;
}

/* Median, MAD, mean and long-run deviation of the clipped score from a large sample of one rank after another. */
static struct scale measure(int family, double wander, uint64_t seed)
{
    struct noise n;
    struct scale s;
    int ranks = 8;
    double *x = malloc(sizeof *x * SAMPLE), *d = malloc(sizeof *d * SAMPLE), t[8];
    if (!x || !d || noise_init(&n, family, ranks, 8, seed)) exit(1);
    n.wander_steps = wander;
    int per = SAMPLE / ranks;
    for (int i = 0; i < per; i++) {
        noise_step(&n, t);
        to_log(family, t, ranks);
        for (int r = 0; r < ranks; r++) x[r * per + i] = t[r];
    }
    memcpy(d, x, sizeof *x * SAMPLE);
    qsort(d, SAMPLE, sizeof *d, by_value);
    s.location = d[SAMPLE / 2];
    for (int i = 0; i < SAMPLE; i++) d[i] = fabs(x[i] - s.location);
    qsort(d, SAMPLE, sizeof *d, by_value);
    s.spread = 1.4826 * d[SAMPLE / 2];
    double sum = 0.0, block = 0.0, total = 0.0;
    for (int i = 0; i < SAMPLE; i++) sum += clipped((x[i] - s.location) / s.spread);
    s.mean = sum / SAMPLE;
    for (int i = 0; i < SAMPLE; i++) {
        block += clipped((x[i] - s.location) / s.spread) - s.mean;
        if (i % 100 == 99) {
            total += block * block;
            block = 0.0;
        }
    }
    s.omega = sqrt(total / SAMPLE);
    noise_fini(&n);
    free(x);
    free(d);
    return s;
}

/* Histogram of the peaks of excursions above zero; both sides are taken, so half as many steps are needed. */
static void find_peaks(int family, double wander, uint64_t seed, const struct scale *s, double steps,
                       double (*peaks)[BINS])
{
    struct noise n;
    enum { RANKS = 256 };
    static double t[RANKS], c[2][MEMBERS][RANKS], top[2][MEMBERS][RANKS];
    if (noise_init(&n, family, RANKS, 8, seed)) exit(1);
    n.wander_steps = wander;
    for (double done = 0.0; done < steps; done += RANKS) {
        noise_step(&n, t);
        to_log(family, t, RANKS);
        for (int r = 0; r < RANKS; r++) t[r] = (clipped((t[r] - s->location) / s->spread) - s->mean) / s->omega;
        for (int j = 0; j < MEMBERS; j++) {
            double *up = c[0][j], *peak = top[0][j];
            for (int r = 0; r < RANKS; r++) {
                double v = up[r] + t[r] - slopes[j];
                up[r] = v > 0.0 ? v : 0.0;
                if (v > 0.0) {
                    peak[r] = v > peak[r] ? v : peak[r];
                } else if (peak[r] > 0.0) {
                    int bin = (int)(peak[r] * 16.0);
                    peaks[j][bin < BINS ? bin : BINS - 1] += 1.0;
                    peak[r] = 0.0;
                }
            }
        }
    }
    noise_fini(&n);
}

/* Threshold exceeded by `wanted` excursions, between bins by log-linear interpolation. */
static double threshold_at(const double *peaks, double wanted)
{
    double above = 0.0;
    for (int b = BINS - 1; b > 0; b--) {
        double next = above + peaks[b];
        if (next >= wanted) return ((double)b + (next - wanted) / (peaks[b] > 0.0 ? peaks[b] : 1.0)) / 16.0;
        above = next;
    }
    return 0.0;
}

static double mean_delay(int family, double wander, uint64_t seed, const struct scale *s, int j, double h, double shift,
                         int ranks)
{
    struct noise n;
    double *t = malloc(sizeof *t * (size_t)ranks), *c = calloc((size_t)ranks, sizeof *c), sum = 0.0;
    if (!t || !c || noise_init(&n, family, ranks, 8, seed)) exit(1);
    n.wander_steps = wander;
    int left = ranks / 8;                  /* one rank of each group is slowed down */
    for (int warm = 0; warm < 500; warm++) /* past SETTLING */
        noise_step(&n, t);
    for (int step = 1; left && step < 400000; step++) {
        noise_step(&n, t);
        for (int r = 3; r < ranks; r += 8) t[r] *= 1.0 + shift;
        to_log(family, t, ranks);
        for (int r = 3; r < ranks; r += 8) {
            if (c[r] < 0.0) continue;
            double v = (clipped((t[r] - s->location) / s->spread) - s->mean) / s->omega;
            c[r] = c[r] + v - slopes[j] > 0.0 ? c[r] + v - slopes[j] : 0.0;
            if (c[r] >= h) {
                c[r] = -1.0;
                sum += step;
                left--;
            }
        }
    }
    noise_fini(&n);
    free(t);
    free(c);
    return left ? INFINITY : sum / (ranks / 8);
}

int main(int argc, char **argv)
{
    int family = 0, best = 0;
    double shift = 0.02, run = 25e6, steps = 1e9, wander = 200.0;
    uint64_t seed = 1;
    for (int i = 1; i < argc; i++) {
        char *v = strchr(argv[i], '=');
        if (v) *v++ = 0;
        if (v && !strcmp(argv[i], "family"))
            family = noise_find(v);
        else if (v && !strcmp(argv[i], "shift"))
            shift = atof(v);
        else if (v && !strcmp(argv[i], "run_length"))
            run = atof(v);
        else if (v && !strcmp(argv[i], "steps"))
            steps = atof(v);
        else if (v && !strcmp(argv[i], "wander"))
            wander = atof(v);
        else if (v && !strcmp(argv[i], "seed"))
            seed = strtoull(v, NULL, 10);
        else
            family = -1;
    }
    if (family < 0) {
        fprintf(stderr, "usage: member family= shift= run_length= steps= seed= wander=\n");
        return 2;
    }
    static double peaks[MEMBERS][BINS];
    double h[MEMBERS], delay[MEMBERS];
    struct scale s = measure(family, wander, seed);
    find_peaks(family, wander, seed + 1, &s, steps, peaks);
    for (int j = 0; j < MEMBERS; j++) {
        h[j] = threshold_at(peaks[j], steps / run);
        delay[j] = mean_delay(family, wander, seed + 2, &s, j, h[j], shift, 32768);
        if (delay[j] < delay[best]) best = j;
    }
    char delays[MEMBERS][32];
    for (int j = 0; j < MEMBERS; j++) /* JSON knows no infinity: a member that never found all of them */
        if (snprintf(delays[j], sizeof delays[j], isinf(delay[j]) ? "null" : "%.1f", delay[j]) < 0) return 1;
    printf(
        "{\"tool\": \"member\", \"family\": \"%s\", \"shift\": %g, \"run_length\": %g, \"steps\": %g, \"seed\": %llu, "
        "\"wander_steps\": %g, \"spread\": %.5f, \"omega\": %.5f, \"thresholds\": [%.3f, %.3f, %.3f, %.3f], "
        "\"delays\": "
        "[%s, %s, %s, %s], \"best\": %.2f, \"member\": %d}\n",
        noise_name(family), shift, run, steps, (unsigned long long)seed, wander, s.spread, s.omega, h[0], h[1], h[2],
        h[3], delays[0], delays[1], delays[2], delays[3], delay[best], best);
    return 0;
}
