/* SPDX-License-Identifier: Apache-2.0
 * Seeded random numbers of the simulator: xoshiro256++ and the polar method.  Not for secrets.  */
#ifndef GB_FLEET_RANDOM_H
#define GB_FLEET_RANDOM_H

#include "straggler/num.h"

#include <math.h>
#include <stdint.h>

struct gb_random {
    uint64_t s[4];
    double spare;
    int has_spare;
};

static inline void gb_random_begin(struct gb_random *g, uint64_t seed)
{
    for (int i = 0; i < 4; i++) { /* splitmix64 */
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        g->s[i] = z ^ (z >> 31);
    }
    g->has_spare = 0;
}

static inline uint64_t gb_random_bits(struct gb_random *g)
{
    uint64_t *s = g->s, sum = s[0] + s[3], r = ((sum << 23) | (sum >> 41)) + s[0], t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = (s[3] << 45) | (s[3] >> 19);
    return r;
}

/* In (0, 1). */
static inline double gb_random_uniform(struct gb_random *g)
{
    return ((double)(gb_random_bits(g) >> 12) + 0.5) * 0x1p-52;
}

static inline double gb_random_normal(struct gb_random *g)
{
    if (g->has_spare) {
        g->has_spare = 0;
        return g->spare;
    }
    double x, y, q;
    do {
        x = 2.0 * gb_random_uniform(g) - 1.0;
        y = 2.0 * gb_random_uniform(g) - 1.0;
        q = x * x + y * y;
    } while (q >= 1.0 || q == 0.0);
    double f = sqrt(-2.0 * gb_log(q) / q);
    g->spare = y * f;
    g->has_spare = 1;
    return x * f;
}

#endif
