/* SPDX-License-Identifier: Apache-2.0
 * The kernel of the straggler engine: one step of eight streams through score, CUSUM bank, baseline and statistics
 * (sections 3 and 4 of docs/straggler-engine.md).  Pure arithmetic on one block, called by the engine's thread.
 * Every lane loop stands alone so that compilers vectorise it; the order of operations inside a lane is the contract.
 */
#include "straggler/stream.h"
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
#pragma GCC optimize("O3,no-trapping-math") /* no flag is read; values stay the same */
#endif

/* The resolver of clones runs before the thread sanitizer is ready. */
#if defined(__SANITIZE_THREAD__) && !defined(GB_NO_CLONES)
#define GB_NO_CLONES
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) && !defined(GB_NO_CLONES)
#define GB_NO_CLONES
#endif
#endif

#if defined(__x86_64__) && defined(__OPTIMIZE__) && !defined(GB_NO_CLONES)
#define GB_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define GB_CLONES
#endif
#define GB_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed" /* the loops over a single lane stay scalar */
#define GB_LOOP _Pragma("clang loop vectorize(assume_safety) vectorize_width(8) interleave(disable)")
#else
#define GB_LOOP
#endif
#define GB_EACH GB_LOOP for (int l = lo; l < hi; l++)

/* Every choice below compares and selects values of one width: mixed widths keep gcc from vectorising. */
struct scores {
    double psi[GB_LANES];                         /* clipped at 2, in units of the anchor's scale */
    double v[3][GB_LANES];                        /* centred, in long-run units: clipped at 2, 4, 6 */
    float slow_up[GB_LANES], slow_down[GB_LANES]; /* scores of the slowest armed member; 0 when none is armed */
    double alert[GB_LANES];
};

GB_INLINE double clipped(double z, double c)
{
    return z > c ? c : z < -c ? -c : z;
}

GB_INLINE void score(struct gb_hot *h, const double *x, struct scores *s, int lo, int hi)
{
    GB_EACH
    {
        double z = (x[l] - h->level[l]) * (double)h->inv_scale[l];
        double c = (double)h->centre[l], o = (double)h->inv_omega[l];
        s->psi[l] = clipped(z, 2.0);
        s->v[0][l] = (s->psi[l] - c) * o;
        s->v[1][l] = (clipped(z, 4.0) - c) * o;
        s->v[2][l] = (clipped(z, 6.0) - c) * o;
        s->alert[l] = z > (double)h->gross[l] ? 1.0 : 0.0;
        double in = z > -2.0 ? 1.0 : 0.0;
        h->q_in[l] = (float)((double)h->q_in[l] + (z < 2.0 ? in : 0.0));
        h->tail[0][l] = (uint16_t)(h->tail[0][l] + (z > 2.0));
        h->tail[1][l] = (uint16_t)(h->tail[1][l] + (z > 3.0));
        h->tail[2][l] = (uint16_t)(h->tail[2][l] + (z > 4.0));
        h->tail[3][l] = (uint16_t)(h->tail[3][l] + (z > 6.0));
        h->tail[4][l] = (uint16_t)(h->tail[4][l] + (z > 12.0));
        h->tail[5][l] = (uint16_t)(h->tail[5][l] + (z < -2.0));
        h->tail[6][l] = (uint16_t)(h->tail[6][l] + (z < -3.0));
        h->tail[7][l] = (uint16_t)(h->tail[7][l] + (z < -5.0));
    }
}

GB_INLINE void member(struct gb_hot *h, struct scores *s, const struct gb_tables *t, int j, int lo, int hi)
{
    const double *v = s->v[j < GB_NARROW ? 0 : j - GB_NARROW + 1];
    double k = t->k[j], reference = t->reference[j];
    float *up = h->up[j], *down = h->down[j], *up_run = h->up_run[j], *down_run = h->down_run[j];
    uint32_t mine = (uint32_t)(j + 1);
    GB_EACH
    {
        double a = (double)up[l] + (v[l] - k), b = (double)down[l] + (-v[l] - k);
        float u = (float)(a > 0.0 ? a : 0.0), d = (float)(b > 0.0 ? b : 0.0);
        double limit = reference * (double)h->guard[l], hit = (double)u >= limit ? 1.0 : s->alert[l];
        up[l] = u;
        down[l] = d;
        up_run[l] = u > 0.0f ? up_run[l] + 1.0f : 0.0f;
        down_run[l] = d > 0.0f ? down_run[l] + 1.0f : 0.0f;
        uint32_t slow = h->flags[l] >> GB_SLOW_SHIFT;
        s->slow_up[l] = slow == mine ? u : s->slow_up[l];
        s->slow_down[l] = slow == mine ? d : s->slow_down[l];
        s->alert[l] = (double)d >= limit ? 1.0 : hit;
    }
}

/* Moves what lies before the older of the two sides' last zeros into the baseline. */
GB_INLINE void commit(struct gb_hot *h, const struct scores *s, int lo, int hi)
{
    GB_EACH
    {
        uint32_t f = h->flags[l];
        double down_older = (double)(int32_t)(f & GB_DOWN_OLDER), frozen = (double)(int32_t)(f & GB_FROZEN);
        double up = (double)s->slow_up[l], down = (double)s->slow_down[l];
        double old = down_older != 0.0 ? down : up, young = down_older != 0.0 ? up : down; /* zero: see below */
        double bn = (double)h->older_count[l], bs = (double)h->older_sum[l];
        double dn = (double)h->newer_count[l] + 1.0, ds = (double)(float)((double)h->newer_sum[l] + s->psi[l]);
        /* young at zero: `newer` joins `older`; old at zero too: all of it is committed, else what `older` was. */
        double joined_n = young == 0.0 ? bn + dn : bn, joined_s = young == 0.0 ? bs + ds : bs;
        double add_n = old == 0.0 ? joined_n : 0.0, add_s = old == 0.0 ? joined_s : 0.0;
        double left_n = young == 0.0 ? 0.0 : dn, left_s = young == 0.0 ? 0.0 : ds; /* not in `joined` */
        double flip = young == 0.0 ? 0.0 : 1.0;
        flip = old == 0.0 ? flip : 0.0;
        h->older_count[l] = (float)(old == 0.0 ? left_n : joined_n);
        h->older_sum[l] = (float)(old == 0.0 ? left_s : joined_s);
        h->newer_count[l] = (float)(old == 0.0 ? 0.0 : left_n);
        h->newer_sum[l] = (float)(old == 0.0 ? 0.0 : left_s);
        h->flags[l] = f ^ (uint32_t)(int32_t)flip;
        double c = (double)h->centre[l], n = (double)h->count[l], m = n + add_n;
        double moved = c + (add_s - add_n * c) / (m > 0.0 ? m : 1.0);
        double taken = frozen != 0.0 ? 0.0 : add_n, capped = m < GB_MEMORY ? m : GB_MEMORY;
        h->centre[l] = (float)(taken > 0.0 ? moved : c);
        h->count[l] = (float)(taken > 0.0 ? capped : n);
    }
}

GB_INLINE void gather(struct gb_hot *h, struct scores *s, int lo, int hi)
{
    GB_EACH
    {
        double p = s->psi[l], p2 = p * p;
        h->q_count[l] = h->q_count[l] + 1.0f;
        h->q1[l] = (float)((double)h->q1[l] + p);
        h->q2[l] = (float)((double)h->q2[l] + p2);
        h->q3[l] = (float)((double)h->q3[l] + p2 * p);
        h->q11[l] = (float)((double)h->q11[l] + p * (double)h->prev[l]);
        h->prev[l] = (float)p;
        s->alert[l] = (double)h->q_count[l] >= (double)GB_BATCH ? 1.0 : s->alert[l];
    }
}

GB_INLINE unsigned advance(struct gb_hot *h, const double *x, const struct gb_tables *t, int lo, int hi)
{
    struct scores s;
    GB_EACH s.slow_up[l] = s.slow_down[l] = 0.0f;
    score(h, x, &s, lo, hi);
    /* Written out so that every compiler sees constant members and vectorises across the lanes. */
    member(h, &s, t, 0, lo, hi);
    member(h, &s, t, 1, lo, hi);
    member(h, &s, t, 2, lo, hi);
    member(h, &s, t, 3, lo, hi);
    member(h, &s, t, 4, lo, hi);
    member(h, &s, t, 5, lo, hi);
    commit(h, &s, lo, hi);
    gather(h, &s, lo, hi);
    unsigned alert = 0;
    GB_EACH alert |= (s.alert[l] == 1.0 ? 1u : 0u) << l;
    return alert;
}

GB_CLONES unsigned gb_bank_step(struct gb_hot *h, const double *x, const uint8_t *active, const struct gb_tables *t)
{
    uint64_t mask;
    memcpy(&mask, active, sizeof mask);
    if (mask == 0x0101010101010101u) return advance(h, x, t, 0, GB_LANES);
    unsigned alert = 0;
    for (int l = 0; l < GB_LANES; l++)
        if (active[l]) alert |= advance(h, x, t, l, l + 1);
    return alert;
}
