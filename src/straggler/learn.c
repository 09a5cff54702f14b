/* SPDX-License-Identifier: Apache-2.0
 * What a stream learns from its healthy steps: level and scale once, then the moments of its score, and from them the
 * thresholds (sections 2, 4 and 6 of docs/straggler-engine.md).  Called for one stream at a time, rarely. */
#include "straggler/num.h"
#include "straggler/stream.h"

#include <math.h>

static const float tail_levels[5] = {2.0f, 3.0f, 4.0f, 6.0f, 12.0f};

static double median(float *v, int n)
{
    for (int i = 1; i < n; i++) {
        float x = v[i];
        int j = i;
        for (; j > 0 && v[j - 1] > x; j--) v[j] = v[j - 1];
        v[j] = x;
    }
    return ((double)v[n / 2 - 1] + (double)v[n / 2]) * 0.5;
}

void gb_bank_zero(struct gb_hot *h, int lane, int member)
{
    h->up[member][lane] = h->down[member][lane] = 0.0f;
    h->up_run[member][lane] = h->down_run[member][lane] = 0.0f;
}

static void clear_batch(struct gb_hot *h, int lane)
{
    h->q_count[lane] = h->q1[lane] = h->q2[lane] = h->q11[lane] = h->q3[lane] = h->q_in[lane] = 0.0f;
    for (int i = 0; i < GB_TAILS; i++) h->tail[i][lane] = 0;
}

void gb_learn_reset(struct gb_hot *h, int lane, struct gb_cold *c)
{
    memset(c, 0, sizeof *c);
    c->gross_step = INT64_MIN;
    for (int j = 0; j < GB_MEMBERS; j++) gb_bank_zero(h, lane, j);
    clear_batch(h, lane);
    h->level[lane] = 0.0;
    h->inv_scale[lane] = 1.0f;
    h->centre[lane] = h->count[lane] = h->prev[lane] = 0.0f;
    h->inv_omega[lane] = 1.0f;
    h->older_count[lane] = h->older_sum[lane] = h->newer_count[lane] = h->newer_sum[lane] = 0.0f;
    h->guard[lane] = h->gross[lane] = INFINITY;
    h->flags[lane] = 0;
}

static void start_run(struct gb_hot *h, int lane, struct gb_cold *c)
{
    memset(&c->u.learned, 0, sizeof c->u.learned);
    for (int j = 0; j < GB_MEMBERS; j++) c->u.learned.up[j] = c->u.learned.down[j] = -1.0f;
    h->inv_omega[lane] = (float)(1.0 / 0.9594461556733254); /* a unit normal clipped at 2, until the first batch */
    c->phase = GB_PHASE_RUN;
}

void gb_learn_feed(struct gpubridge_straggler *e, struct gb_hot *h, int lane, struct gb_cold *c, double x)
{
    if (c->phase == GB_PHASE_WARMUP) {
        if (++c->filled >= e->warmup) {
            c->phase = GB_PHASE_LEVEL;
            c->filled = 0;
        }
        return;
    }
    c->u.window[c->filled++] = (float)(c->phase == GB_PHASE_SCALE ? x - h->level[lane] : x);
    if (c->phase == GB_PHASE_LEVEL) {
        if (c->filled < GB_LEVEL_STEPS) return;
        h->level[lane] = median(c->u.window, GB_LEVEL_STEPS);
        c->phase = GB_PHASE_SCALE;
        c->filled = 0;
        return;
    }
    if (c->filled < GB_SCALE_STEPS) return;
    double m = median(c->u.window, GB_SCALE_STEPS);
    for (int i = 0; i < GB_SCALE_STEPS; i++) {
        double d = (double)c->u.window[i] - m;
        c->u.window[i] = (float)(d < 0.0 ? -d : d);
    }
    double scale = 1.4826 * median(c->u.window, GB_SCALE_STEPS);
    h->level[lane] = h->level[lane] + m;
    h->inv_scale[lane] = (float)(1.0 / (scale > 1e-6 ? scale : 1e-6));
    start_run(h, lane, c);
}

/* Largest ratio r <= 1 of the exponent to 2k for which a wide member's moment function stays below 1: a normal core and
 * the tails as counted, each exceedance taken at the far end of its bin (section 6.4). */
static double wide_ratio(const struct gb_learned *s, const struct gb_tables *t, int j, int slower, double inv_omega)
{
    static const double up_edge[5] = {3.0, 4.0, 6.0, 12.0, 12.0}, down_edge[3] = {3.0, 5.0, 12.0};
    double k = t->k[j], cap = t->clip[j], p[5], edge[5], all = 0.0;
    int bins = slower ? 5 : 3, first = slower ? 0 : 5;
    for (int i = 0; i < bins; i++) {
        double beyond = i + 1 < bins ? (double)s->tail[first + i + 1] : 0.0;
        double far = slower ? up_edge[i] : down_edge[i];
        p[i] = ((double)s->tail[first + i] - beyond + (i == 0 ? 0.0 : 1.0)) / (s->n + 1.0);
        edge[i] = (far < cap ? far : cap) * inv_omega;
        all += p[i];
    }
    for (int step = 20; step >= 1; step--) {
        double theta = 2.0 * k * 0.05 * (double)step;
        double f = (1.0 - all) * gb_exp(theta * theta * 0.5 - theta * k);
        for (int i = 0; i < bins; i++) f += p[i] * gb_exp(theta * (edge[i] - k));
        if (f <= 1.0) return 0.05 * (double)step;
    }
    return 0.0;
}

struct shape {
    double rho, ratio, skew, error2;  /* lag-1 correlation, long-run ratio, skewness, relative error of the variance */
    double excess_short, excess_long; /* variance of block sums beyond what `ratio` explains */
};

static double block_excess(double blocks, double dev, double steps, double var, const struct shape *s, double allow)
{
    if (blocks < (steps > GB_BATCH ? 16.0 : 100.0)) return 0.0;
    double lag = 1.0 - s->rho;
    double expected = var * (s->ratio - 2.0 * s->rho / (lag * lag * steps));
    double excess = dev / (blocks * steps * expected) - 1.0;
    return excess > allow * sqrt(2.0 / blocks) ? excess : 0.0;
}

static struct shape shape_of(const struct gb_learned *a, double *var_out)
{
    struct shape s;
    double mean = a->s1 / a->n, var = a->s2 / a->n - mean * mean;
    if (!(var > 1e-6)) var = 1e-6;
    double rho = (a->s11 / a->n - mean * mean) / var;
    s.rho = rho > 0.95 ? 0.95 : rho < -0.3 ? -0.3 : rho;
    s.ratio = (1.0 + s.rho) / (1.0 - s.rho);
    s.skew = (a->s3 / a->n - 3.0 * mean * (a->s2 / a->n) + 2.0 * mean * mean * mean) / (var * sqrt(var));
    s.error2 = (4.0 + 1.5 * (1.0 + s.rho * s.rho)) / ((1.0 - s.rho * s.rho) * a->n);
    s.excess_short = block_excess(a->short_n, a->short_dev, GB_BATCH, var, &s, 0.5);
    s.excess_long = block_excess(a->long_n, a->long_dev, GB_BATCH * GB_LONG, var, &s, 0.0);
    *var_out = var;
    return s;
}

/* A young stream may alarm more often than an old one: at age m at (1 + YOUNG / m) times the rate, and members that are
 * armed take over the shares of the slower ones that are not yet (section 6.6). */
#define YOUNG 8000.0

static double allowance(double age, int slowest)
{
    double rest = slowest >= 2 ? 2.0 : slowest == 1 ? 1.5 : 1.0;
    return gb_log(rest * (1.0 + YOUNG / age));
}

static double threshold_of(const struct gb_learned *a, const struct gb_tables *t, const struct shape *s, int j,
                           int slower, double inv_omega, double allowed)
{
    double k = t->k[j], x = t->exponent[j] - allowed, r;
    if (j >= GB_NARROW) {
        r = wide_ratio(a, t, j, slower, inv_omega);
        if (r <= 0.0) return -1.0;
    } else {
        double skew = slower ? s->skew : -s->skew;
        r = 1.0 - (2.0 / 3.0) * k * skew + 0.18 * k * k;
        r = r < 0.3 ? 0.3 : r > 1.5 ? 1.5 : r;
    }
    double most = s->excess_long > s->excess_short ? s->excess_long : s->excess_short;
    double excess = j == 0 ? 1.7 * most : j == 1 ? most : j == 2 ? 1.7 * s->excess_short : s->excess_short;
    double h = x / (2.0 * k * r) * (1.0 + 0.5 * x * s->error2) * (1.0 + excess) - 1.166 / sqrt(s->ratio);
    return h > 0.5 ? h : 0.5;
}

static float gross_level(const struct gb_learned *a, const struct gb_tables *t, const struct shape *s)
{
    double rho = s->rho + 2.0 / sqrt(a->n);
    rho = rho < 0.0 ? 0.0 : rho > 0.9 ? 0.9 : rho;
    for (int i = 1; i < 5; i++)
        if (((double)a->tail[i] + 3.0) / (a->n + 3.0) <= t->gross_probability)
            return (float)((double)tail_levels[i] / (1.0 - rho));
    return INFINITY;
}

static int is_ripe(const struct gb_tables *t, const struct gb_hot *h, int lane, int j)
{
    double sigma = 2.0 * t->k[j];
    double healthy = (double)h->count[lane] + (double)h->older_count[lane] + (double)h->newer_count[lane];
    return healthy * sigma * sigma >= 159.999;
}

void gb_learn_refresh(const struct gb_tables *t, struct gb_hot *h, int lane, struct gb_cold *c)
{
    struct gb_learned *a = &c->u.learned;
    double var, guard = INFINITY;
    struct shape s = shape_of(a, &var);
    double inv_omega = 1.0 / sqrt(var * s.ratio);
    uint32_t slow = 0;
    int slowest = GB_MEMBERS - 1;
    while (slowest > 0 && is_ripe(t, h, lane, slowest - 1)) slowest--;
    double allowed =
        allowance((double)h->count[lane] + (double)h->older_count[lane] + (double)h->newer_count[lane], slowest);
    h->inv_omega[lane] = (float)inv_omega;
    a->slope = (float)(a->in / a->n);
    for (int j = GB_MEMBERS - 1; j >= 0; j--) {
        if (a->up[j] < 0.0f && a->down[j] < 0.0f && !is_ripe(t, h, lane, j)) continue;
        if (a->up[j] < 0.0f && a->down[j] < 0.0f) gb_bank_zero(h, lane, j);
        a->up[j] = (float)threshold_of(a, t, &s, j, 1, inv_omega, allowed);
        a->down[j] = (float)threshold_of(a, t, &s, j, 0, inv_omega, allowed);
        double up = (double)a->up[j] / t->reference[j], down = (double)a->down[j] / t->reference[j];
        if (up > 0.0 && up < guard) guard = up;
        if (down > 0.0 && down < guard) guard = down;
        slow = (uint32_t)j + 1;
    }
    h->flags[lane] = (h->flags[lane] & (GB_DOWN_OLDER | GB_FROZEN)) | slow << GB_SLOW_SHIFT;
    h->guard[lane] = (float)(guard * 0.999);
    h->gross[lane] = gross_level(a, t, &s);
}

/* A member that is not armed yet has seen enough healthy steps.  The first refresh has armed the widest one. */
static int can_arm(const struct gb_tables *t, const struct gb_hot *h, int lane)
{
    uint32_t slow = h->flags[lane] >> GB_SLOW_SHIFT;
    return slow > 1 && is_ripe(t, h, lane, (int)slow - 2);
}

static void halve(struct gb_learned *a)
{
    a->n *= 0.5;
    a->s1 *= 0.5;
    a->s2 *= 0.5;
    a->s11 *= 0.5;
    a->s3 *= 0.5;
    a->in *= 0.5;
    a->short_n *= 0.5;
    a->short_dev *= 0.5;
    a->long_n *= 0.5;
    a->long_dev *= 0.5;
    for (int i = 0; i < GB_TAILS; i++) a->tail[i] /= 2;
}

/* Squared deviations of the batch's sum, and of sixteen batches', from what the mean so far predicts.  Suspect batches
 * count too, or wandering levels would look steady; no block counts for more than three deviations, so a fault hides
 * nothing. */
static void add_blocks(struct gb_learned *a, double count, double sum, double inv_omega)
{
    if (a->n < 1000.0) return;
    double mean = a->s1 / a->n, d = sum - count * mean, cap = 9.0 / (inv_omega * inv_omega);
    double square = d * d / (1.0 + count / a->n), most = cap * count;
    a->short_dev += square < most ? square : most;
    a->short_n += 1.0;
    a->long_sum += sum;
    a->long_steps += count;
    if (a->long_steps < (double)(GB_BATCH * GB_LONG)) return;
    d = a->long_sum - a->long_steps * mean;
    square = d * d / (1.0 + a->long_steps / a->n);
    most = cap * a->long_steps;
    a->long_dev += square < most ? square : most;
    a->long_n += 1.0;
    a->long_sum = a->long_steps = 0.0;
}

void gb_learn_batch(const struct gpubridge_straggler *e, struct gb_hot *h, int lane, struct gb_cold *c)
{
    struct gb_learned *a = &c->u.learned;
    int member, slower;
    if (!(h->flags[lane] & GB_FROZEN))
        add_blocks(a, (double)h->q_count[lane], (double)h->q1[lane], (double)h->inv_omega[lane]);
    if ((h->flags[lane] & GB_FROZEN) || gb_score_ratio(h, lane, c, &member, &slower) >= 0.5) {
        clear_batch(h, lane);
        return;
    }
    a->n += (double)h->q_count[lane];
    a->s1 += (double)h->q1[lane];
    a->s2 += (double)h->q2[lane];
    a->s11 += (double)h->q11[lane];
    a->s3 += (double)h->q3[lane];
    a->in += (double)h->q_in[lane];
    for (int i = 0; i < GB_TAILS; i++) a->tail[i] += h->tail[i][lane];
    clear_batch(h, lane);
    if (a->n >= (double)a->next_refresh || can_arm(&e->tables, h, lane)) {
        gb_learn_refresh(&e->tables, h, lane, c);
        double next = a->n + (a->n < 25600.0 ? a->n * 0.25 : 6400.0);
        a->next_refresh = (float)next;
    }
    if (a->n >= 1048576.0) {
        halve(a);
        a->next_refresh = (float)(a->n + 6400.0);
    }
}

void gb_learn_given(const struct gb_tables *t, struct gb_hot *h, int lane, struct gb_cold *c, double level,
                    double noise, double correlation)
{
    static const uint32_t tails[GB_TAILS] = {22750132, 1349898, 31671, 1, 0, 22750132, 1349898, 287};
    gb_learn_reset(h, lane, c);
    start_run(h, lane, c);
    struct gb_learned *a = &c->u.learned;
    a->n = 1e9;
    a->s2 = 0.920536925636323 * a->n;
    a->s11 = correlation * a->s2;
    a->in = 0.9544997361036416 * a->n;
    memcpy(a->tail, tails, sizeof tails);
    h->level[lane] = level;
    h->inv_scale[lane] = (float)(1.0 / noise);
    h->count[lane] = 1e9f;
    h->flags[lane] = GB_FROZEN;
    gb_learn_refresh(t, h, lane, c);
}

double gb_detectable(const struct gb_tables *t, const struct gb_hot *h, int lane, const struct gb_cold *c, double steps,
                     double z)
{
    const struct gb_learned *a = &c->u.learned;
    double best = -1.0, io = (double)h->inv_omega[lane], spread = 1.0 + steps / (double)h->count[lane];
    if (c->phase != GB_PHASE_RUN || !(h->count[lane] > 0.0f)) return -1.0;
    for (int j = 0; j < GB_MEMBERS; j++) {
        if (a->up[j] < 0.0f) continue;
        double v = t->k[j] + (double)a->up[j] * spread / steps + z * sqrt(spread / steps);
        double mean = v / io, d;
        if (j < GB_NARROW) {
            mean = mean * 0.9544997361036416 / (double)a->slope;
            if (mean > 1.95) continue;
            d = gb_gauss_clipped_inverse(mean);
        } else {
            if (mean > t->clip[j] - 1.0) continue;
            d = mean;
        }
        if (best < 0.0 || d < best) best = d;
    }
    if (best < 0.0) return -1.0;
    double up = best / (double)h->inv_scale[lane];
    return gb_exp(up > t->min_log ? up : t->min_log) - 1.0;
}
