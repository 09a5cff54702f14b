/* SPDX-License-Identifier: Apache-2.0
 * Seeded noise for the calibration programs: the healthy families that a false-alarm budget is counted over.
 * A test tool, not part of the library; one generator per thread.  */
#ifndef GB_CALIBRATION_NOISE_H
#define GB_CALIBRATION_NOISE_H

#include <stdint.h>

enum noise_family {
    NOISE_GAUSSIAN,
    NOISE_LOGNORMAL,
    NOISE_T3,
    NOISE_STALLS,
    NOISE_AR05,
    NOISE_AR10,
    NOISE_AR30,
    NOISE_AR66,
    NOISE_DRIFT,
    NOISE_WANDER,
    NOISE_SETTLING,
    NOISE_FAMILY_COUNT
};

struct noise {
    uint64_t s[4];
    int family;
    int ranks, group;    /* `group` consecutive ranks share the drift */
    double sd;           /* relative noise per step */
    double share;        /* common-mode share of the variance, 0 ... 1 */
    double wander_steps; /* time constant of WANDER */
    double *state;       /* AR / OU state per rank; drift per group behind them */
    int64_t *age;        /* steps since a rank's start, for SETTLING */
    double *common;
};

const char *noise_name(int family);
int noise_find(const char *name); /* -1: no such family */
/* Returns 0, or -1 when memory is short. */
int noise_init(struct noise *n, int family, int ranks, int group, uint64_t seed);
void noise_fini(struct noise *n);
/* One step of relative times, 1 when nothing disturbs; seconds[ranks]. */
void noise_step(struct noise *n, double *seconds);
/* A rank starts anew (restart): its settling begins again. */
void noise_restart(struct noise *n, int rank);
double noise_normal(struct noise *n);
double noise_uniform(struct noise *n); /* in (0, 1) */

#endif
