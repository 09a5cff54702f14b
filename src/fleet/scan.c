/* SPDX-License-Identifier: Apache-2.0
 * A recorded job judged as a whole (docs/fleet.md section 5): the first steps teach levels, noise and common mode, the
 * later ones are compared with them.  Also the test for slow parts, which knows how much healthy devices of one model
 * differ. */
#include "base/err.h"
#include "straggler/num.h"

#include <gpubridge/fleet.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LOTTERY        0.04  /* relative spread of healthy devices of one model */
#define LOTTERY_WEIGHT 128.0 /* devices that the prior counts for */
#define SLOW_LEAST     0.06
#define SLOW_SPREADS   3.0
#define PEERS          4    /* smallest class whose common mode is removed */
#define PRIOR_STEPS    16.0 /* weight of the pooled noise in a rank's own */
#define LEAST_STEPS    3    /* shortest change that is looked for */
#define CLIP           3.0

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    if (n == 0) return NAN;
    qsort(v, (size_t)n, sizeof *v, ascending);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

/* 1.4826 times the median of |v|; destroys v. */
static double spread(double *v, int n)
{
    for (int i = 0; i < n; i++) v[i] = fabs(v[i]);
    return n ? 1.4826 * median(v, n) : 0.0;
}

/* z with upper tail p, 1e-15 ... 0.4: Newton on an asymptotic start (erfc is accurate far out). */
static double tail_quantile(double p)
{
    double z = sqrt(-2.0 * gb_log(p));
    for (int i = 0; i < 40; i++) {
        double tail = 0.5 * erfc(z * 0.7071067811865476), slope = 0.3989422804014327 * exp(-0.5 * z * z);
        z += (tail - p) / slope < -1.0 ? -1.0 : (tail - p) / slope > 1.0 ? 1.0 : (tail - p) / slope;
    }
    return z;
}

int gpubridge_fleet_lottery(int32_t ranks, const double *levels, const int32_t *classes, double lottery, double *ratio,
                            uint8_t *slow)
{
    if (ranks < 1 || !levels || !ratio || !slow || !(lottery >= 0.0 && lottery < 1.0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: lottery of %d ranks with spread %g, or an argument is NULL",
                       ranks, lottery);
    double prior = lottery > 0.0 ? lottery : LOTTERY;
    double *others = calloc((size_t)ranks, sizeof *others);
    if (!others) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", ranks);
    for (int r = 0; r < ranks; r++) {
        int n = 0;
        ratio[r] = 0.0;
        slow[r] = 0;
        if (!(levels[r] > 0.0)) continue;
        for (int o = 0; o < ranks; o++)
            if (o != r && levels[o] > 0.0 && (!classes || classes[o] == classes[r])) others[n++] = gb_log(levels[o]);
        if (n == 0) continue;
        double middle = median(others, n);
        for (int i = 0; i < n; i++) others[i] -= middle;
        double s = spread(others, n);
        s = sqrt((LOTTERY_WEIGHT * prior * prior + (double)n * s * s) / (LOTTERY_WEIGHT + (double)n));
        ratio[r] = gb_exp(gb_log(levels[r]) - middle);
        slow[r] = n >= PEERS - 1 && ratio[r] > 1.0 + SLOW_LEAST && gb_log(ratio[r]) > SLOW_SPREADS * s;
    }
    free(others);
    return GPUBRIDGE_OK;
}

struct job {
    const struct gpubridge_fleet_scan_config *c;
    int steps, ranks, learn, later;
    double *x;     /* log seconds, then residuals; NaN: missing */
    double *level; /* [ranks] */
    double *noise;
    double *shift; /* mean of the later residuals, clipped */
    double *scratch;
    double pooled, wander;
};

static int class_of(const struct job *j, int rank)
{
    return j->c->classes ? j->c->classes[rank] : 0;
}

static void learn_levels(struct job *j)
{
    for (int r = 0; r < j->ranks; r++) {
        int n = 0;
        for (int t = 0; t < j->learn; t++) {
            double v = j->x[(size_t)t * (size_t)j->ranks + (size_t)r];
            if (!isnan(v)) j->scratch[n++] = v;
        }
        j->level[r] = median(j->scratch, n);
    }
}

/* Subtracts levels and, per step, the median deviation of the class's other ranks. */
static void remove_common(struct job *j, struct gpubridge_fleet_scan *out)
{
    size_t ranks = (size_t)j->ranks;
    double *row = j->scratch + j->steps + j->ranks;
    for (int t = 0; t < j->steps; t++) {
        double *x = j->x + (size_t)t * ranks;
        for (int r = 0; r < j->ranks; r++) x[r] -= j->level[r];
        memcpy(row, x, ranks * sizeof *row);
        for (int r = 0; r < j->ranks; r++) {
            int n = 0;
            for (int o = 0; o < j->ranks; o++)
                if (o != r && class_of(j, o) == class_of(j, r) && !isnan(row[o])) j->scratch[n++] = row[o];
            if (n >= PEERS - 1) x[r] = row[r] - median(j->scratch, n);
            if (n > out[r].compared) out[r].compared = n;
        }
    }
}

/* Noise per step of every rank, shrunk towards the pooled one; correlation counts as fewer steps. */
static void learn_noise(struct job *j, struct gpubridge_fleet_scan *out)
{
    int pooled = 0;
    double *all = j->scratch + j->steps + 2 * j->ranks, cross = 0.0, square = 0.0;
    for (int r = 0; r < j->ranks; r++) {
        int n = 0;
        double before = NAN;
        for (int t = 0; t < j->learn; t++) {
            double v = j->x[(size_t)t * (size_t)j->ranks + (size_t)r];
            if (!isnan(v)) j->scratch[n++] = all[pooled++] = v;
        }
        j->noise[r] = spread(j->scratch, n);
        for (int t = 0; t < j->learn; t++) {
            double v = j->x[(size_t)t * (size_t)j->ranks + (size_t)r], limit = CLIP * j->noise[r];
            v = v > limit ? limit : v < -limit ? -limit : v;
            if (!isnan(v) && !isnan(before)) cross += v * before;
            if (!isnan(v)) square += v * v;
            before = v;
        }
    }
    j->pooled = spread(all, pooled);
    if (j->pooled < 1e-7) j->pooled = 1e-7;
    double phi = square > 0.0 ? cross / square : 0.0;
    phi = phi < 0.0 ? 0.0 : phi > 0.8 ? 0.8 : phi;
    double longer = (1.0 + phi) / (1.0 - phi), m = (double)j->learn;
    for (int r = 0; r < j->ranks; r++) {
        j->noise[r] =
            sqrt((m * j->noise[r] * j->noise[r] + PRIOR_STEPS * j->pooled * j->pooled) / (m + PRIOR_STEPS) * longer);
        out[r].noise = j->noise[r];
    }
    j->pooled *= sqrt(longer);
}

static double clipped(const struct job *j, int t, int r)
{
    double v = j->x[(size_t)t * (size_t)j->ranks + (size_t)r], limit = CLIP * j->noise[r];
    return v > limit ? limit : v < -limit ? -limit : v;
}

/* The median was a start; the mean of clipped residuals is a better level. */
static void settle_levels(struct job *j)
{
    for (int r = 0; r < j->ranks; r++) {
        double sum = 0.0;
        int n = 0;
        for (int t = 0; t < j->learn; t++) {
            double v = clipped(j, t, r);
            if (!isnan(v)) sum += v, n++;
        }
        for (int t = 0; n && t < j->steps; t++) j->x[(size_t)t * (size_t)j->ranks + (size_t)r] -= sum / (double)n;
    }
}

/* How far healthy levels move between the two parts beyond sampling: seen on all ranks at once, so that one slow rank
 * does not hide itself. */
static void learn_wander(struct job *j)
{
    int n = 0;
    double *d = j->scratch;
    for (int r = 0; r < j->ranks; r++) {
        int k = 0;
        double sum = 0.0;
        for (int t = j->learn; t < j->steps; t++) {
            double v = clipped(j, t, r);
            if (!isnan(v)) sum += v, k++;
        }
        if (k && !isnan(j->level[r])) d[n++] = sum / (double)k;
    }
    if (n < 2 * PEERS) return; /* too few to tell wandering from a fault */
    double *copy = d + n, middle;
    memcpy(copy, d, (size_t)n * sizeof *d);
    middle = median(copy, n);
    for (int i = 0; i < n; i++) d[i] -= middle;
    double s = spread(d, n), sampling = j->pooled * j->pooled * (1.0 / (double)j->later + 1.0 / (double)j->learn);
    sampling *= 1.0 + sqrt(3.0 / (double)n); /* s itself is an estimate: what it may exceed by chance is no wandering */
    j->wander = s * s > sampling ? sqrt(s * s - sampling) : 0.0;
}

/* The best onset of a lasting change, by its standard score with the doubt of the learned level. */
static void judge(const struct job *j, int r, double threshold, double least, struct gpubridge_fleet_scan *o)
{
    double sum = 0.0, m = (double)j->learn;
    int k = 0;
    o->onset = -1;
    o->threshold = threshold;
    for (int t = j->steps - 1; t >= j->learn; t--) {
        double v = clipped(j, t, r);
        if (isnan(v)) continue;
        sum += v;
        k++;
        if (k < LEAST_STEPS) continue;
        double n = (double)k, error = sqrt(j->noise[r] * j->noise[r] * (1.0 / n + 1.0 / m) + j->wander * j->wander);
        if (sum / n / error <= o->score) continue;
        o->score = sum / n / error;
        o->shift = sum / n;
        o->low = o->shift - 2.0 * error;
        o->onset = t;
    }
    o->slower = o->score > threshold && o->low > least;
    if (o->slower && o->shift > 0.9 * CLIP * j->noise[r]) { /* the clip hides the size: take the plain median */
        int n = 0;
        for (int t = o->onset; t < j->steps; t++) {
            double v = j->x[(size_t)t * (size_t)j->ranks + (size_t)r];
            if (!isnan(v)) j->scratch[n++] = v;
        }
        o->shift = median(j->scratch, n);
    }
}

static int open_job(struct job *j, const struct gpubridge_fleet_scan_config *c, const double *seconds)
{
    size_t cells = (size_t)c->steps * (size_t)c->ranks, ranks = (size_t)c->ranks;
    *j = (struct job){.c = c, .steps = c->steps, .ranks = c->ranks, .learn = c->learn, .later = c->steps - c->learn};
    j->x = calloc(cells, sizeof *j->x);
    j->level = calloc(ranks * 2, sizeof *j->level);
    j->scratch = calloc(cells + (size_t)c->steps + 4 * ranks, sizeof *j->scratch);
    if (!j->x || !j->level || !j->scratch)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d steps of %d ranks", c->steps, c->ranks);
    j->noise = j->level + ranks;
    for (size_t i = 0; i < cells; i++) {
        if (seconds[i] != 0.0 && !(seconds[i] >= 1e-12 && seconds[i] <= 1e9))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: rank %zu took %g s; legal are 1e-12 ... 1e9, 0 for missing",
                           i % ranks, seconds[i]);
        j->x[i] = seconds[i] > 0.0 ? gb_log(seconds[i]) : NAN;
    }
    return GPUBRIDGE_OK;
}

static int scan(struct job *j, struct gpubridge_fleet_scan *out)
{
    const struct gpubridge_fleet_scan_config *c = j->c;
    double alarms = c->alarms > 0.0 ? c->alarms : 0.01;
    double least = gb_log(1.0 + (c->min_slowdown > 0.0 ? c->min_slowdown : 0.0025));
    learn_levels(j);
    double *levels = j->scratch, *ratio = j->scratch + j->ranks;
    uint8_t *slow = calloc((size_t)j->ranks, 1);
    if (!slow) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", j->ranks);
    for (int r = 0; r < j->ranks; r++) levels[r] = isnan(j->level[r]) ? 0.0 : gb_exp(j->level[r]);
    int rc = gpubridge_fleet_lottery(j->ranks, levels, c->classes, c->lottery, ratio, slow);
    for (int r = 0; rc == GPUBRIDGE_OK && r < j->ranks; r++) {
        out[r] = (struct gpubridge_fleet_scan){.ratio = ratio[r], .slow_part = slow[r]};
    }
    free(slow);
    GB_TRY(rc);
    remove_common(j, out);
    learn_noise(j, out);
    settle_levels(j);
    learn_wander(j);
    /* onsets overlap, so they count by their logarithm; each rank may alarm */
    double chances = (double)j->ranks * (1.0 + gb_log((double)j->later)), p = alarms / chances;
    double threshold = tail_quantile(p < 0.4 ? p : 0.4);
    for (int r = 0; r < j->ranks; r++) judge(j, r, threshold, least, &out[r]);
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_scan(const struct gpubridge_fleet_scan_config *c, const double *seconds,
                         struct gpubridge_fleet_scan *result)
{
    if (!c || c->struct_size != sizeof *c || !seconds || !result || c->ranks < 1 || c->learn < 8 ||
        c->steps < c->learn + LEAST_STEPS || (int64_t)c->steps * c->ranks > 1 << 28)
        return GB_FAIL(
            GPUBRIDGE_ERR_INVALID,
            "fleet: a scan of %d steps, %d of them to learn from, over %d ranks; at least 8 to learn and 3 more",
            c ? c->steps : 0, c ? c->learn : 0, c ? c->ranks : 0);
    for (int r = 0; c->classes && r < c->ranks; r++)
        if (c->classes[r] < 0 || c->classes[r] >= c->ranks)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: classes[%d] is %d; legal are 0 ... ranks - 1", r,
                           c->classes[r]);
    struct job j = {0};
    struct gpubridge_fleet_scan *out = calloc((size_t)c->ranks, sizeof *out);
    if (!out) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", c->ranks);
    int rc = open_job(&j, c, seconds);
    if (rc == GPUBRIDGE_OK) rc = scan(&j, out);
    if (rc == GPUBRIDGE_OK) memcpy(result, out, (size_t)c->ranks * sizeof *out);
    free(out);
    free(j.x);
    free(j.level);
    free(j.scratch);
    return rc;
}
