/* SPDX-License-Identifier: Apache-2.0
 * Time that follows work is not a fault: slopes of log time on log work per class, by recursive least squares on
 * healthy ranks (docs/fleet.md section 3).  No intercept is fitted: a rank's level stays its own, and so does its
 * degradation. */
#include "base/err.h"
#include "straggler/num.h"

#include <gpubridge/fleet.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SLOPES      GPUBRIDGE_FLEET_SLOPES
#define ROW         (SLOPES + 1) /* covariates and log time of a rank */
#define FIT_PASSES  4
#define AT_MOST     64     /* ranks of a class that teach in one step */
#define REFERENCE   16.0   /* steps after which a class's usual work is fixed; nothing is learned before */
#define USUAL       24.0   /* steps behind these after which a rank's usual work is fixed */
#define MEMORY      1024.0 /* steps that a rank's means remember */
#define SETTLED     8.0    /* steps before a rank's deviations teach */
#define PRIOR       0.25   /* variance of a slope before anything is seen */
#define FIRST_NOISE 0.02
#define CLIP        3.0
#define WIND        1e-9 /* variance a slope regains per excited step, so that it can follow */
#define EXCITED     1e-4 /* least share of the noise variance that a slope's doubt must explain to be worth an update */

struct line {
    double slope[SLOPES], p[SLOPES][SLOPES], noise2;
    double reference[SLOPES], seen;
    int32_t next; /* rotates among more than AT_MOST ranks */
    int32_t size;
};

/* Of one rank: means of what taught, and its usual work, which is fixed after USUAL steps: slopes turn about it, so
 * that a level does not move when a slope is learned. */
struct level {
    double n, y, x[SLOPES];
    double seen, usual[SLOPES];
};

struct gpubridge_fleet_work {
    int32_t ranks, covariates, slopes, classes;
    int32_t *class_of;
    int32_t *place; /* of a rank within its class */
    double prior[SLOPES], least[SLOPES];
    struct line *line;
    struct level *level;
    double *x; /* [ranks][ROW] of the step in work */
};

void gpubridge_fleet_work_destroy(gpubridge_fleet_work *w)
{
    if (!w) return;
    free(w->class_of);
    free(w->place);
    free(w->line);
    free(w->level);
    free(w->x);
    free(w);
}

static void begin_line(const gpubridge_fleet_work *w, struct line *l)
{
    for (int i = 0; i < w->slopes; i++) {
        l->slope[i] = w->prior[i];
        l->p[i][i] = PRIOR;
    }
    l->noise2 = FIRST_NOISE * FIRST_NOISE;
}

int gpubridge_fleet_work_create(const struct gpubridge_fleet_work_config *c, gpubridge_fleet_work **work)
{
    if (!c || !work || c->struct_size != sizeof *c || c->ranks < 1 || c->ranks > 1 << 24 || c->covariates < 1 ||
        c->covariates > SLOPES || (c->curvature && c->covariates == SLOPES))
        return GB_FAIL(
            GPUBRIDGE_ERR_INVALID,
            "fleet: work of %d ranks with %d covariates; legal are 1 ... 2^24 and 1 ... 4 (3 with curvature)",
            c ? c->ranks : 0, c ? c->covariates : 0);
    for (int r = 0; c->classes && r < c->ranks; r++)
        if (c->classes[r] < 0 || c->classes[r] >= c->ranks)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: classes[%d] is %d; legal are 0 ... ranks - 1", r,
                           c->classes[r]);
    gpubridge_fleet_work *w = calloc(1, sizeof *w);
    if (!w) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory");
    size_t n = (size_t)c->ranks;
    w->ranks = c->ranks;
    w->covariates = c->covariates;
    w->slopes = c->covariates + (c->curvature ? 1 : 0);
    for (int i = 0; i < c->covariates; i++) /* by default time is proportional to work */
        w->prior[i] = c->prior ? c->prior[i] : 1.0 / (double)c->covariates;
    for (int i = 0; c->least && i < c->covariates; i++) w->least[i] = c->least[i];
    w->classes = 1;
    for (int r = 0; c->classes && r < c->ranks; r++)
        if (c->classes[r] >= w->classes) w->classes = c->classes[r] + 1;
    w->class_of = calloc(n, sizeof *w->class_of);
    w->place = calloc(n, sizeof *w->place);
    w->line = calloc((size_t)w->classes, sizeof *w->line);
    w->level = calloc(n, sizeof *w->level);
    w->x = calloc(n * ROW, sizeof *w->x);
    if (!w->class_of || !w->place || !w->line || !w->level || !w->x) {
        gpubridge_fleet_work_destroy(w);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", c->ranks);
    }
    for (int k = 0; k < w->classes; k++) begin_line(w, &w->line[k]);
    for (int r = 0; r < w->ranks; r++) {
        w->class_of[r] = c->classes ? c->classes[r] : 0;
        w->place[r] = w->line[w->class_of[r]].size++;
    }
    *work = w;
    return GPUBRIDGE_OK;
}

/* Log covariates of a rank, and the square of the first about the class's usual work.  0: something is missing. */
static int covariates(const gpubridge_fleet_work *w, const double *amounts, int rank, double *x)
{
    const struct line *l = &w->line[w->class_of[rank]];
    for (int i = 0; i < w->covariates; i++) {
        double amount = amounts[(size_t)i * (size_t)w->ranks + (size_t)rank];
        if (!(amount > 0.0)) return 0;
        x[i] = gb_log(amount) - l->reference[i];
    }
    if (w->slopes > w->covariates && w->covariates > 0) x[w->covariates] = x[0] * x[0];
    return 1;
}

/* The usual work of a class: the mean over its first rank-steps, then fixed, so that slopes turn about a fixed point.
 */
static int referred(const struct line *l)
{
    return l->seen >= REFERENCE * (double)(l->size < AT_MOST ? l->size : AT_MOST);
}

static void refer(gpubridge_fleet_work *w, const double *amounts)
{
    for (int r = 0; r < w->ranks; r++) {
        struct line *l = &w->line[w->class_of[r]];
        if (referred(l)) continue;
        double x[SLOPES];
        int whole = 1;
        for (int i = 0; i < w->covariates; i++) {
            double amount = amounts[(size_t)i * (size_t)w->ranks + (size_t)r];
            whole = whole && amount > 0.0;
            x[i] = whole ? gb_log(amount) : 0.0;
        }
        if (!whole) continue;
        l->seen += 1.0;
        for (int i = 0; i < w->covariates; i++) l->reference[i] += (x[i] - l->reference[i]) / l->seen;
    }
}

/* Deviations from a rank's means; one that is too small to teach counts as none. */
static void deviate(const gpubridge_fleet_work *w, const double *x, const struct level *v, double *dx)
{
    for (int i = 0; i < w->slopes; i++) {
        dx[i] = x[i] - v->x[i];
        if (fabs(dx[i]) < w->least[i]) dx[i] = 0.0;
    }
}

/* One observation: deviations of log time and covariates from the rank's own means. */
static void learn(const gpubridge_fleet_work *w, struct line *l, double y, const double *x)
{
    int n = w->slopes;
    double px[SLOPES], quad = 0.0, e = y;
    for (int i = 0; i < n; i++) {
        px[i] = 0.0;
        for (int j = 0; j < n; j++) px[i] += l->p[i][j] * x[j];
        quad += x[i] * px[i];
        e -= l->slope[i] * x[i];
    }
    double limit = CLIP * sqrt(l->noise2 + quad);
    e = e > limit ? limit : e < -limit ? -limit : e;
    double share = l->noise2 / (l->noise2 + quad);
    l->noise2 += (e * e * share * share - l->noise2) / 512.0;
    if (l->noise2 < 1e-10) l->noise2 = 1e-10;
    if (quad < EXCITED * l->noise2) return;
    double gain = 1.0 / (l->noise2 + quad);
    for (int i = 0; i < n; i++) l->slope[i] += px[i] * gain * e;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) l->p[i][j] -= px[i] * px[j] * gain;
    for (int i = 0; i < n; i++)
        if (l->p[i][i] < PRIOR) l->p[i][i] += WIND;
}

static void remember(const gpubridge_fleet_work *w, struct level *v, double y, const double *x)
{
    v->n = v->n < MEMORY ? v->n + 1.0 : MEMORY;
    v->y += (y - v->y) / v->n;
    for (int i = 0; i < w->slopes; i++) v->x[i] += (x[i] - v->x[i]) / v->n;
}

static int teaches(const gpubridge_fleet_work *w, int rank)
{
    const struct line *l = &w->line[w->class_of[rank]];
    if (l->size <= AT_MOST) return 1;
    int32_t turn = w->place[rank] - l->next;
    return (turn < 0 ? turn + l->size : turn) < AT_MOST;
}

static int check(const gpubridge_fleet_work *w, const double *seconds, const double *amounts)
{
    for (int r = 0; r < w->ranks; r++)
        if (seconds[r] != 0.0 && !(seconds[r] >= 1e-12 && seconds[r] <= 1e9))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: rank %d took %g s; legal are 1e-12 ... 1e9, 0 for missing", r,
                           seconds[r]);
    for (size_t i = 0; i < (size_t)w->covariates * (size_t)w->ranks; i++)
        if (amounts[i] != 0.0 && !(amounts[i] >= 1e-30 && amounts[i] <= 1e30))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                           "fleet: an amount of work is %g; legal are 1e-30 ... 1e30, 0 for missing", amounts[i]);
    return GPUBRIDGE_OK;
}

/* Keeps covariates and log time of every rank in w->x; a rank without either is missing. */
static void adjust(gpubridge_fleet_work *w, double *seconds, const double *amounts)
{
    for (int r = 0; r < w->ranks; r++) {
        double *x = &w->x[(size_t)r * ROW];
        if (seconds[r] == 0.0) continue;
        if (!covariates(w, amounts, r, x)) {
            seconds[r] = 0.0;
            continue;
        }
        const struct line *l = &w->line[w->class_of[r]];
        struct level *v = &w->level[r];
        double y = x[SLOPES] = gb_log(seconds[r]);
        int settling = v->seen < USUAL && referred(l);
        if (settling) v->seen += 1.0;
        for (int i = 0; i < w->slopes; i++) {
            if (settling) v->usual[i] += (x[i] - v->usual[i]) / v->seen;
            y -= l->slope[i] * (x[i] - v->usual[i]);
        }
        seconds[r] = gb_exp(y);
    }
}

int gpubridge_fleet_work_step(gpubridge_fleet_work *w, double *seconds, const double *amounts, const uint8_t *healthy)
{
    if (!w || !seconds || !amounts) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: work, seconds or amounts is NULL");
    GB_TRY(check(w, seconds, amounts));
    refer(w, amounts);
    adjust(w, seconds, amounts);
    for (int r = 0; r < w->ranks; r++) {
        const double *x = &w->x[(size_t)r * ROW];
        if (seconds[r] == 0.0 || (healthy && !healthy[r]) || !teaches(w, r) || !referred(&w->line[w->class_of[r]]))
            continue;
        double dx[SLOPES];
        struct level *v = &w->level[r];
        if (v->n >= SETTLED) {
            deviate(w, x, v, dx);
            learn(w, &w->line[w->class_of[r]], x[SLOPES] - v->y, dx);
        }
        remember(w, v, x[SLOPES], x);
    }
    for (int k = 0; k < w->classes; k++)
        if (w->line[k].size > AT_MOST) w->line[k].next = (w->line[k].next + AT_MOST) % w->line[k].size;
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_work_restart(gpubridge_fleet_work *w, int32_t rank)
{
    if (!w || rank >= w->ranks)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: rank %d of %d (or work is NULL)", rank, w ? w->ranks : 0);
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? w->ranks : rank + 1); r++) w->level[r] = (struct level){0};
    return GPUBRIDGE_OK;
}

/* The class's usual work over all recorded steps, and each rank's means about it. */
static void survey(gpubridge_fleet_work *w, int32_t steps, const double *seconds, const double *amounts)
{
    size_t ranks = (size_t)w->ranks, width = (size_t)w->covariates * ranks;
    double x[SLOPES];
    for (int k = 0; k < w->classes; k++) {
        begin_line(w, &w->line[k]);
        w->line[k].seen = 0.0;
        memset(w->line[k].reference, 0, sizeof w->line[k].reference);
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t t = 0; t < steps; t++) {
            for (int r = 0; r < w->ranks; r++) {
                double time = seconds[(size_t)t * ranks + (size_t)r];
                struct line *l = &w->line[w->class_of[r]];
                if (!(time > 0.0) || !covariates(w, amounts + (size_t)t * width, r, x)) continue;
                if (pass == 1) {
                    remember(w, &w->level[r], gb_log(time), x);
                    continue;
                }
                /* x is relative to the mean so far */
                l->seen += 1.0;
                for (int i = 0; i < w->covariates; i++) l->reference[i] += x[i] / l->seen;
            }
        }
        for (int r = 0; pass == 0 && r < w->ranks; r++) w->level[r] = (struct level){0};
    }
}

int gpubridge_fleet_work_fit(gpubridge_fleet_work *w, int32_t steps, const double *seconds, const double *amounts)
{
    if (!w || steps < 1 || !seconds || !amounts)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: work, seconds or amounts is NULL, or %d steps", steps);
    size_t ranks = (size_t)w->ranks, width = (size_t)w->covariates * ranks;
    for (int32_t t = 0; t < steps; t++) GB_TRY(check(w, seconds + (size_t)t * ranks, amounts + (size_t)t * width));
    survey(w, steps, seconds, amounts);
    for (int r = 0; r < w->ranks; r++) { /* a recording is judged at the work of the class, so that levels compare */
        w->level[r].seen = USUAL;
        memset(w->level[r].usual, 0, sizeof w->level[r].usual);
    }
    for (int pass = 0; pass < FIT_PASSES; pass++) {
        for (int k = 0; k < w->classes; k++) { /* a pass refines the noise; the doubt begins anew */
            memset(w->line[k].p, 0, sizeof w->line[k].p);
            for (int i = 0; i < w->slopes; i++) w->line[k].p[i][i] = PRIOR;
        }
        for (int32_t t = 0; t < steps; t++) {
            for (int r = 0; r < w->ranks; r++) {
                double x[SLOPES], time = seconds[(size_t)t * ranks + (size_t)r];
                if (!(time > 0.0) || !covariates(w, amounts + (size_t)t * width, r, x)) continue;
                deviate(w, x, &w->level[r], x);
                learn(w, &w->line[w->class_of[r]], gb_log(time) - w->level[r].y, x);
            }
        }
    }
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_work_doubt(const gpubridge_fleet_work *w, int32_t rank, int32_t slope, double *doubt, double *usual)
{
    if (!w || rank < 0 || rank >= w->ranks || slope < 0 || slope >= w->slopes || !doubt || !usual)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: rank %d of %d, slope %d, or an argument is NULL", rank,
                       w ? w->ranks : 0, slope);
    const struct line *l = &w->line[w->class_of[rank]];
    *doubt = sqrt(l->p[slope][slope] > 0.0 ? l->p[slope][slope] : 0.0);
    *usual = w->level[rank].usual[slope] + (slope < w->covariates ? l->reference[slope] : 0.0);
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_work_usual(const gpubridge_fleet_work *w, int32_t rank, double *factor)
{
    if (!w || rank < 0 || rank >= w->ranks || !factor)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: rank %d of %d, or factor is NULL", rank, w ? w->ranks : 0);
    const struct line *l = &w->line[w->class_of[rank]];
    double sum = 0.0;
    for (int i = 0; i < w->slopes; i++) sum += l->slope[i] * w->level[rank].usual[i];
    *factor = gb_exp(sum);
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_work_slopes(const gpubridge_fleet_work *w, int32_t rank_class, double *slopes, double *noise)
{
    if (!w || rank_class < 0 || rank_class >= w->classes || !slopes)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: class %d of %d, or an argument is NULL", rank_class,
                       w ? w->classes : 0);
    for (int i = 0; i < SLOPES; i++) slopes[i] = i < w->slopes ? w->line[rank_class].slope[i] : 0.0;
    if (noise) *noise = sqrt(w->line[rank_class].noise2);
    return GPUBRIDGE_OK;
}
