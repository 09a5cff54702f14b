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
#define GB_EACH   for (int l = lo; l < hi; l++)

struct scores {
    double psi[GB_LANES];           /* clipped at 2, in units of the anchor's scale */
    double v[3][GB_LANES];          /* centred, in long-run units: clipped at 2, 4, 6 */
    uint32_t zero_up[GB_LANES], zero_down[GB_LANES]; /* the slowest armed member's score is at zero */
    uint32_t alert[GB_LANES];
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
        s->alert[l] = z > (double)h->gross[l];
        h->q_in[l] = h->q_in[l] + (z > -2.0 && z < 2.0 ? 1.0f : 0.0f);
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
        up[l] = u;
        down[l] = d;
        up_run[l] = u > 0.0f ? up_run[l] + 1.0f : 0.0f;
        down_run[l] = d > 0.0f ? down_run[l] + 1.0f : 0.0f;
        double limit = reference * (double)h->guard[l];
        uint32_t slow = h->flags[l] >> GB_SLOW_SHIFT, other = slow != mine;
        s->zero_up[l] &= other | (u == 0.0f);
        s->zero_down[l] &= other | (d == 0.0f);
        s->alert[l] |= ((double)u >= limit) | ((double)d >= limit);
    }
}

/* Moves what lies before the older of the two sides' last zeros into the baseline. */
GB_INLINE void commit(struct gb_hot *h, const struct scores *s, int lo, int hi)
{
    GB_EACH
    {
        uint32_t f = h->flags[l], down_older = f & GB_DOWN_OLDER;
        uint32_t old = down_older ? s->zero_down[l] : s->zero_up[l];
        uint32_t young = down_older ? s->zero_up[l] : s->zero_down[l];
        double bn = (double)h->older_count[l], bs = (double)h->older_sum[l];
        double dn = (double)h->newer_count[l] + 1.0, ds = (double)(float)((double)h->newer_sum[l] + s->psi[l]);
        uint32_t both = old & young;
        double add_n = old ? bn + (both ? dn : 0.0) : 0.0, add_s = old ? bs + (both ? ds : 0.0) : 0.0;
        double next_bn = both ? 0.0 : old ? dn : young ? bn + dn : bn;
        double next_bs = both ? 0.0 : old ? ds : young ? bs + ds : bs;
        h->newer_count[l] = (float)(old | young ? 0.0 : dn);
        h->newer_sum[l] = (float)(old | young ? 0.0 : ds);
        h->older_count[l] = (float)next_bn;
        h->older_sum[l] = (float)next_bs;
        uint32_t flip = old & (young ^ 1u);
        h->flags[l] = f ^ flip;
        double c = (double)h->centre[l], m = (double)h->count[l] + add_n;
        double moved = c + (add_s - add_n * c) / (m > 0.0 ? m : 1.0);
        uint32_t learn = (add_n > 0.0) & ((f & GB_FROZEN) == 0);
        h->centre[l] = learn ? (float)moved : h->centre[l];
        h->count[l] = learn ? (float)(m < GB_MEMORY ? m : GB_MEMORY) : h->count[l];
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
        s->alert[l] |= h->q_count[l] >= (float)GB_BATCH;
    }
}

GB_INLINE unsigned advance(struct gb_hot *h, const double *x, const struct gb_tables *t, int lo, int hi)
{
    struct scores s;
    GB_EACH s.zero_up[l] = s.zero_down[l] = 1;
    score(h, x, &s, lo, hi);
    for (int j = 0; j < GB_MEMBERS; j++) member(h, &s, t, j, lo, hi);
    commit(h, &s, lo, hi);
    gather(h, &s, lo, hi);
    unsigned alert = 0;
    GB_EACH alert |= (unsigned)s.alert[l] << l;
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
