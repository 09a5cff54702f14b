/* SPDX-License-Identifier: Apache-2.0
 * The common mode of a group of peers, each member left out of its own (section 3.2 of docs/straggler-engine.md): a
 * median, then one clipped-mean step around it.  Works on one kind's vectors of the engine, on its thread. */
#include "straggler/stream.h"

#include <string.h>

/* Moves the value of rank `k` (0-based order) to v[k], smaller ones before it, larger ones behind it. */
static void select_rank(double *v, int n, int k)
{
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        double pivot = v[lo + (hi - lo) / 2];
        int i = lo, j = hi;
        while (i <= j) {
            while (v[i] < pivot) i++;
            while (v[j] > pivot) j--;
            if (i <= j) {
                double t = v[i];
                v[i++] = v[j];
                v[j--] = t;
            }
        }
        if (k <= j)
            hi = j;
        else if (k >= i)
            lo = i;
        else
            return;
    }
}

/* Order statistics around the middle: out[0] <= out[1] <= out[2] of ranks m-1, m, m+1 with m = n / 2; n >= 3. */
static void middle(double *v, int n, double out[3])
{
    int m = n / 2;
    if (n <= 16) {
        for (int i = 1; i < n; i++) {
            double x = v[i];
            int j = i;
            for (; j > 0 && v[j - 1] > x; j--) v[j] = v[j - 1];
            v[j] = x;
        }
    } else {
        select_rank(v, n, m);
        for (int i = 0; i < m - 1; i++) /* the largest below the middle */
            if (v[i] > v[m - 1]) {
                double t = v[i];
                v[i] = v[m - 1];
                v[m - 1] = t;
            }
        for (int i = m + 2; i < n; i++)
            if (v[i] < v[m + 1]) {
                double t = v[i];
                v[i] = v[m + 1];
                v[m + 1] = t;
            }
    }
    out[0] = v[m - 1];
    out[1] = v[m];
    out[2] = m + 1 < n ? v[m + 1] : v[m];
}

struct centres {
    double at[4];  /* left-out medians for a member below, at, above the middle; the whole group's median */
    double sum[4]; /* clipped deviations around them, over all members */
};

static void fill_medians(struct centres *c, const double v[3], int n)
{
    if (n % 2) {
        c->at[0] = (v[1] + v[2]) * 0.5;
        c->at[1] = (v[0] + v[2]) * 0.5;
        c->at[2] = (v[0] + v[1]) * 0.5;
        c->at[3] = v[1];
    } else {
        c->at[0] = v[1];
        c->at[1] = v[1];
        c->at[2] = v[0];
        c->at[3] = (v[0] + v[1]) * 0.5;
    }
}

/* Which of the centres belongs to a member with residual r. */
static int centre_of(double r, const double v[3], int n)
{
    if (n % 2) return r < v[1] ? 0 : r > v[1] ? 2 : 1;
    return r <= v[0] ? 0 : 2;
}

static inline double clip(double d, double bound)
{
    return d > bound ? bound : d < -bound ? -bound : d;
}

static double sum_clipped(const double *r, const double *bound, int n, double at)
{
    double lane[8] = {0}, all = 0.0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) lane[l] += clip(r[i + l] - at, bound[i + l]);
    for (int l = 0; i < n; i++, l++) lane[l] += clip(r[i] - at, bound[i]);
    for (int l = 0; l < 8; l++) all += lane[l];
    return all;
}

/* A member counts for the others when its level is known and it is neither missing, held nor confirmed. */
static int counts(const struct gpubridge_straggler *e, int kind, int s, uint8_t route)
{
    if (!e->present[s]) return 0;
    if (!route) return 1;
    const struct gb_cold *c = gb_cold_of(e, kind, s);
    return !e->held[s] && !c->skip && !c->unknown && c->phase >= GB_PHASE_SCALE && c->verdict != GB_VERDICT_CONFIRMED;
}

/* What is left of a member's log time without its own level: learned ones agree, so that a member that comes or goes
 * moves nobody. */
static double residual_of(const struct gpubridge_straggler *e, int kind, int s)
{
    const struct gb_hot *h = gb_hot_of(e, kind, s);
    int l = s % GB_LANES;
    return e->x[s] - (h->level[l] + (double)h->centre[l] / (double)h->inv_scale[l]);
}

static int gather(const struct gpubridge_straggler *e, int kind, const struct gb_group *g, double *r, double *bound)
{
    const uint8_t *route = e->route + (size_t)kind * (size_t)e->stride;
    int n = 0;
    for (int i = 0; i < g->size; i++) {
        int s = e->members[g->first + i];
        if (!counts(e, kind, s, route[s])) continue;
        const struct gb_hot *h = gb_hot_of(e, kind, s);
        int scaled = !route[s] || gb_cold_of(e, kind, s)->phase == GB_PHASE_RUN;
        r[n] = residual_of(e, kind, s);
        bound[n++] = scaled ? 2.0 / (double)h->inv_scale[s % GB_LANES] : 0.0;
    }
    return n;
}

static void remove_from(struct gpubridge_straggler *e, int kind, const struct gb_group *g, int pseudo)
{
    double *r = e->scratch, *bound = r + g->size, *sorted = bound + g->size, v[3];
    int n = gather(e, kind, g, r, bound);
    struct centres c;
    if (n < GB_LEAST_RANKS) {
        for (int i = 0; i < g->size; i++)
            if (gb_cold_of(e, kind, e->members[g->first + i])->phase >= GB_PHASE_SCALE)
                e->present[e->members[g->first + i]] = 0;
        e->present[pseudo] = 0;
        return;
    }
    memcpy(sorted, r, (size_t)n * sizeof *r);
    middle(sorted, n, v);
    fill_medians(&c, v, n);
    for (int a = 0; a < 4; a++) c.sum[a] = sum_clipped(r, bound, n, c.at[a]);
    const uint8_t *route = e->route + (size_t)kind * (size_t)e->stride;
    for (int i = 0, j = 0; i < g->size; i++) {
        int s = e->members[g->first + i];
        double residual = residual_of(e, kind, s);
        if (counts(e, kind, s, route[s])) {
            int a = centre_of(residual, v, n);
            double own = clip(residual - c.at[a], bound[j++]);
            e->x[s] = e->x[s] - (c.at[a] + (c.sum[a] - own) / (double)(n - 1));
        } else if (!route[s] || gb_cold_of(e, kind, s)->phase >= GB_PHASE_SCALE) {
            e->x[s] = e->x[s] - (c.at[3] + c.sum[3] / (double)n);
        }
    }
    e->x[pseudo] = c.at[3];
    e->present[pseudo] = 1;
}

void gb_peers_remove(struct gpubridge_straggler *e, int kind)
{
    for (int g = 0; g < e->groups; g++) {
        if (e->group[g].peers)
            remove_from(e, kind, &e->group[g], e->ranks + g);
        else
            e->present[e->ranks + g] = 0;
    }
}
