/* SPDX-License-Identifier: Apache-2.0
 *
 * fleet.h: from raw records of a mixed fleet to streams that the straggler engine can judge, and to a culprit and a
 * cause.
 *
 * Everything here is pure: no clock, no I/O, no threads.  An object is used by one thread at a time.  Every int
 * returned is an enum gpubridge_status; outputs are written only on success.  docs/fleet.md says what is computed.
 */
#ifndef GPUBRIDGE_FLEET_H
#define GPUBRIDGE_FLEET_H

#include <gpubridge/gpubridge.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPUBRIDGE_FLEET_OWN_KINDS 4
#define GPUBRIDGE_FLEET_SLOPES    4

enum gpubridge_fleet_kind {
    GPUBRIDGE_FLEET_INPUT,      /* waiting for the loader, copies to the device */
    GPUBRIDGE_FLEET_COMPUTE,    /* kernels bound by arithmetic */
    GPUBRIDGE_FLEET_MEMORY,     /* kernels bound by memory: optimizer, norms, elementwise */
    GPUBRIDGE_FLEET_HOST,       /* pauses of the host: garbage collection, a busy CPU */
    GPUBRIDGE_FLEET_COLLECTIVE, /* nobody leaves before all have entered */
    GPUBRIDGE_FLEET_HOP         /* one direction between two ends */
};

/* One interval on one rank, on that rank's own clock.  Clocks of different ranks are never compared. */
struct gpubridge_fleet_record {
    int64_t step;
    int32_t rank;
    int32_t kind;    /* enum gpubridge_fleet_kind */
    int32_t channel; /* COLLECTIVE, HOP: the group or link direction; otherwise ignored */
    int32_t op;      /* COLLECTIVE, HOP: equal at all members of one operation of the channel within the step */
    double start, end;
    double ready; /* when the data were ready on the compute stream; NaN: not known, as start */
};

/* ---- decomposition of one step ---- */

typedef struct gpubridge_fleet_decomposer gpubridge_fleet_decomposer;

/* Results of one step; the caller's arrays, any may be NULL. */
struct gpubridge_fleet_parts {
    size_t struct_size;
    double *own;      /* [kind * ranks + rank], 4 kinds: seconds of the rank's own work; 0: none recorded */
    double *wait;     /* [ranks]: seconds inside transfers spent waiting for others */
    double *overlap;  /* [ranks]: share of own compute and memory time during which a transfer was in progress */
    double *exposed;  /* [ranks]: seconds of transfers that no own work hid */
    double *charged;  /* [ranks]: seconds that others waited for this rank, inherited lateness sent upstream */
    double *transfer; /* [channels]: seconds of pure transfer, summed over operations; 0: none */
    int32_t *last;    /* [channels]: the rank that kept the others waiting longest, -1: none */
    int32_t *ends;    /* [channels]: fewest recorded members of an operation, 0: none */
};

GPUBRIDGE_CHECKED int gpubridge_fleet_decomposer_create(int32_t ranks, int32_t channels, int32_t max_records,
                                                        gpubridge_fleet_decomposer **decomposer);
GPUBRIDGE_API void gpubridge_fleet_decomposer_destroy(gpubridge_fleet_decomposer *decomposer);
/* records[count] of one step, in any order. */
GPUBRIDGE_CHECKED int gpubridge_fleet_decompose(gpubridge_fleet_decomposer *decomposer,
                                                const struct gpubridge_fleet_record *records, int32_t count,
                                                const struct gpubridge_fleet_parts *parts);

/* Seconds from the start to the last end of operations with dependencies: node i takes seconds[i], begins when nodes
 * first[i] and second[i] (-1: none) have ended, second[i] plus delay[i].  Fails on a cycle. */
GPUBRIDGE_CHECKED int gpubridge_fleet_makespan(int32_t count, const double *seconds, const int32_t *first,
                                               const int32_t *second, const double *delay, double *span);

/* ---- work covariates ---- */

typedef struct gpubridge_fleet_work gpubridge_fleet_work;

struct gpubridge_fleet_work_config {
    size_t struct_size;
    int32_t ranks;
    int32_t covariates;     /* 1 ... 4 amounts of work per rank and step, each positive */
    int32_t curvature;      /* 1: the square of the first log covariate gets a slope too (3 covariates at most) */
    const int32_t *classes; /* [ranks], 0 ... ranks-1; NULL: all of one */
    const double *prior;    /* [covariates] slopes before anything is seen; NULL: time proportional to work */
};

GPUBRIDGE_CHECKED int gpubridge_fleet_work_create(const struct gpubridge_fleet_work_config *config,
                                                  gpubridge_fleet_work **work);
GPUBRIDGE_API void gpubridge_fleet_work_destroy(gpubridge_fleet_work *work);
/* Replaces seconds[ranks] by what they would be at the class's usual work, then learns from at most 64 ranks of each
 * class for which `healthy` is not 0 (NULL: all).  amounts[covariate * ranks + rank].  A time or amount that is 0 is
 * missing. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_step(gpubridge_fleet_work *work, double *seconds, const double *amounts,
                                                const uint8_t *healthy);
/* Learns from `steps` recorded steps at once, seconds[step * ranks + rank], amounts[(step * covariates + c) * ranks +
 * rank]. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_fit(gpubridge_fleet_work *work, int32_t steps, const double *seconds,
                                               const double *amounts);
/* Slopes of log time on log work (and the curvature behind them) of a class; unused ones are 0.  *noise: what is left.
 */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_slopes(const gpubridge_fleet_work *work, int32_t rank_class, double *slopes,
                                                  double *noise);

/* ---- slow parts ---- */

/* Judges levels[ranks] (seconds; 0: not known) against the others of a class with a prior for how much healthy devices
 * of one model differ (`lottery`, relative; 0: 0.04).  ratio: level over the median of the others, 0: nobody to compare
 * with; slow[rank] is 1 for a slow part: beyond three times the spread and 6 %. */
GPUBRIDGE_CHECKED int gpubridge_fleet_lottery(int32_t ranks, const double *levels, const int32_t *classes,
                                              double lottery, double *ratio, uint8_t *slow);

/* ---- a recorded job, judged as a whole ---- */

struct gpubridge_fleet_scan_config {
    size_t struct_size;
    int32_t steps, ranks;
    int32_t learn;          /* the first steps, that teach what is normal */
    const int32_t *classes; /* [ranks], 0 ... ranks-1; NULL: all of one */
    double alarms;          /* false verdicts per recording; 0: 0.01 */
    double min_slowdown;    /* 0: 0.0025 */
    double lottery;         /* 0: 0.04 */
};

struct gpubridge_fleet_scan {
    double ratio;      /* level over the median level of its class peers, 0: no peers */
    double noise;      /* per step, relative, after common mode */
    double shift, low; /* log ratio of the later steps against the learned ones, and its lower end; 0: no verdict */
    double score;      /* shift over its standard error at the best onset */
    double threshold;  /* of the score */
    int32_t onset;     /* index of the first changed step, -1: none */
    int32_t slow_part; /* slow from the start */
    int32_t slower;    /* slower than its own past: a verdict */
    int32_t compared;  /* peers that took part in the common mode */
};

/* seconds[step * ranks + rank], 0: missing; result[ranks]. */
GPUBRIDGE_CHECKED int gpubridge_fleet_scan(const struct gpubridge_fleet_scan_config *config, const double *seconds,
                                           struct gpubridge_fleet_scan *result);

#ifdef __cplusplus
}
#endif
#endif
