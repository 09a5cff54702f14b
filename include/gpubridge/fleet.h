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
    double *own;     /* [kind * ranks + rank], 4 kinds: seconds of the rank's own work; 0: none recorded */
    double *wait;    /* [ranks]: seconds inside transfers spent waiting for others */
    double *head;    /* [2 * ranks]: seconds of computation, then of memory kernels, before the step's first transfer */
    double *overlap; /* [2 * ranks]: share of those behind it with a transfer in progress */
    double *exposed; /* [ranks]: seconds of transfers that no own work hid */
    double *charged; /* [ranks]: seconds that others waited for this rank, inherited lateness sent upstream */
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
    const double *least;    /* [covariates] deviations of log work below which it teaches nothing; NULL: none */
};

GPUBRIDGE_CHECKED int gpubridge_fleet_work_create(const struct gpubridge_fleet_work_config *config,
                                                  gpubridge_fleet_work **work);
GPUBRIDGE_API void gpubridge_fleet_work_destroy(gpubridge_fleet_work *work);
/* Replaces seconds[ranks] by what they would be at the rank's usual work (after fit: its class's), then learns from at
 * most 64 ranks of each class for which `healthy` is not 0 (NULL: all).  amounts[covariate * ranks + rank].  A time or
 * amount that is 0 is missing. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_step(gpubridge_fleet_work *work, double *seconds, const double *amounts,
                                                const uint8_t *healthy);
/* The rank starts anew: its own means are forgotten, the slopes of its class stay.  rank < 0: all. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_restart(gpubridge_fleet_work *work, int32_t rank);
/* Learns from `steps` recorded steps at once, seconds[step * ranks + rank], amounts[(step * covariates + c) * ranks +
 * rank]. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_fit(gpubridge_fleet_work *work, int32_t steps, const double *seconds,
                                               const double *amounts);
/* Standard error of a slope, and the rank's usual log amount that it turns about. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_doubt(const gpubridge_fleet_work *work, int32_t rank, int32_t slope,
                                                 double *doubt, double *usual);
/* Time at the rank's usual work over time at its class's. */
GPUBRIDGE_CHECKED int gpubridge_fleet_work_usual(const gpubridge_fleet_work *work, int32_t rank, double *factor);
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

/* ---- a running job ---- */

typedef struct gpubridge_fleet_monitor gpubridge_fleet_monitor;

enum gpubridge_fleet_cause {
    GPUBRIDGE_FLEET_CAUSE_NONE,
    GPUBRIDGE_FLEET_CAUSE_INPUT,
    GPUBRIDGE_FLEET_CAUSE_COMPUTE,
    GPUBRIDGE_FLEET_CAUSE_MEMORY,
    GPUBRIDGE_FLEET_CAUSE_HOST,
    GPUBRIDGE_FLEET_CAUSE_PAUSES, /* stops again and again, not slow in between */
    GPUBRIDGE_FLEET_CAUSE_LINK,
    GPUBRIDGE_FLEET_CAUSE_SLOW_PART /* slow from the start: a property of the device, not a degradation */
};

struct gpubridge_fleet_monitor_config {
    size_t struct_size;
    int32_t ranks, channels, max_records;
    int32_t covariates;     /* amounts of work given with each step, 0 ... 2 */
    const int32_t *classes; /* [ranks], 0 ... ranks-1: device model and role; NULL: all of one */
    double alarms;          /* the budget, as in straggler.h; over ranks, kinds and channels */
    double days, steps_per_second, min_slowdown;
    double lottery;       /* 0: 0.04 */
    int32_t warmup_steps; /* as in straggler.h */
};

struct gpubridge_fleet_verdict {
    int32_t cause;   /* enum gpubridge_fleet_cause */
    int32_t rank;    /* -1: a channel */
    int32_t channel; /* -1: a rank */
    int32_t peers;   /* 0: judged by its own history, a common change cannot be told apart */
    double slowdown; /* relative; PAUSES: pauses per step */
    int64_t onset;   /* step; -1 for a slow part */
};

GPUBRIDGE_CHECKED int gpubridge_fleet_monitor_create(const struct gpubridge_fleet_monitor_config *config,
                                                     gpubridge_fleet_monitor **monitor);
GPUBRIDGE_API void gpubridge_fleet_monitor_destroy(gpubridge_fleet_monitor *monitor);
/* One step's records, in any order, `step` growing; amounts[covariate * ranks + rank] or NULL without covariates. */
GPUBRIDGE_CHECKED int gpubridge_fleet_monitor_step(gpubridge_fleet_monitor *monitor, int64_t step,
                                                   const struct gpubridge_fleet_record *records, int32_t count,
                                                   const double *amounts);
/* As gpubridge_straggler_hold and _restart; rank < 0: all ranks and channels. */
GPUBRIDGE_CHECKED int gpubridge_fleet_monitor_hold(gpubridge_fleet_monitor *monitor, int32_t rank, int32_t begin);
GPUBRIDGE_CHECKED int gpubridge_fleet_monitor_restart(gpubridge_fleet_monitor *monitor, int32_t rank);
/* The standing verdicts, ranks first. */
GPUBRIDGE_CHECKED int gpubridge_fleet_monitor_verdicts(gpubridge_fleet_monitor *monitor,
                                                       struct gpubridge_fleet_verdict *verdicts, int32_t capacity,
                                                       int32_t *count);
/* Smallest slowdown (PAUSES: pauses per step) of this cause at this rank or channel that is found within `steps` steps
 * with 95 %; < 0: none yet. */
GPUBRIDGE_CHECKED int gpubridge_fleet_monitor_detectable(const gpubridge_fleet_monitor *monitor, int32_t cause,
                                                         int32_t where, double steps, double *size);

/* ---- simulated fleets ---- */

typedef struct gpubridge_fleet_sim gpubridge_fleet_sim;

enum gpubridge_fleet_model {
    GPUBRIDGE_FLEET_V100,
    GPUBRIDGE_FLEET_A100,
    GPUBRIDGE_FLEET_H200,
    GPUBRIDGE_FLEET_MI50,
    GPUBRIDGE_FLEET_MI210,
    GPUBRIDGE_FLEET_MI300X,
    GPUBRIDGE_FLEET_MODELS
};

enum gpubridge_fleet_fault {
    GPUBRIDGE_FLEET_FAULT_NONE,
    GPUBRIDGE_FLEET_FAULT_COMPUTE,
    GPUBRIDGE_FLEET_FAULT_MEMORY,
    GPUBRIDGE_FLEET_FAULT_THERMAL, /* computation, growing over 200 steps */
    GPUBRIDGE_FLEET_FAULT_LINK,
    GPUBRIDGE_FLEET_FAULT_INPUT,
    GPUBRIDGE_FLEET_FAULT_PAUSES,
    GPUBRIDGE_FLEET_FAULTS
};

struct gpubridge_fleet_sim_config {
    size_t struct_size;
    uint64_t seed;
    int32_t ranks;
    int32_t buckets;       /* 0: 3 */
    const int32_t *models; /* [ranks], enum gpubridge_fleet_model; one island per vendor */
    double noise;          /* factor on the models' own noise; 0: 1 */
    double lottery;        /* spread of devices of one model; 0: none */
    double clock_shift;    /* standard deviation of the clocks, seconds */
    double work_spread;    /* standard deviation of log work per rank and step; 0: fixed length */
    double missing;        /* share of a rank's steps whose records are lost */
    double pauses;         /* healthy pauses per rank and step */
};

GPUBRIDGE_CHECKED int gpubridge_fleet_sim_create(const struct gpubridge_fleet_sim_config *config,
                                                 gpubridge_fleet_sim **sim);
GPUBRIDGE_API void gpubridge_fleet_sim_destroy(gpubridge_fleet_sim *sim);
/* How many channels there are, and the most records that a step can have. */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_size(const gpubridge_fleet_sim *sim, int32_t *channels, int32_t *max_records);
/* From the next step on: size is the relative slowdown, of PAUSES the pauses per step.  where: rank; LINK: channel.
 * Size 0 ends it. */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_fault(gpubridge_fleet_sim *sim, int32_t fault, int32_t where, double size);
/* The rank starts anew: its clock jumps; level: what its speed is multiplied by. */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_restart(gpubridge_fleet_sim *sim, int32_t rank, double level);
/* A slow part: its level becomes `ratio` times the median level of the other devices of its model. */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_slow_part(gpubridge_fleet_sim *sim, int32_t rank, double ratio);
/* All ranks do `factor` times the work from now on (a new batch size). */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_rescale(gpubridge_fleet_sim *sim, double factor);
/* Records of the next step, and the work of each rank in it (amounts[ranks], may be NULL). */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_step(gpubridge_fleet_sim *sim, struct gpubridge_fleet_record *records,
                                               int32_t capacity, int32_t *count, double *amounts);

/* Seconds of computation alone for the next step, seconds[ranks]: no timeline, for streams of many ranks. */
GPUBRIDGE_CHECKED int gpubridge_fleet_sim_seconds(gpubridge_fleet_sim *sim, double *seconds);

/* ---- episodes: a random mixed job, watched by a monitor ---- */

enum gpubridge_fleet_history {
    GPUBRIDGE_FLEET_HISTORY_PLAIN,
    GPUBRIDGE_FLEET_HISTORY_LENGTHS,    /* variable length, strongly */
    GPUBRIDGE_FLEET_HISTORY_EVALUATION, /* holds of all and of some ranks, other work in them */
    GPUBRIDGE_FLEET_HISTORY_CHECKPOINT, /* holds in which one rank takes long */
    GPUBRIDGE_FLEET_HISTORY_RESTART,    /* single ranks start anew */
    GPUBRIDGE_FLEET_HISTORY_RESCALE,    /* another batch size, everybody starts anew */
    GPUBRIDGE_FLEET_HISTORY_PAUSES,     /* a pause every 50 steps, the ranks in turn */
    GPUBRIDGE_FLEET_HISTORIES
};

struct gpubridge_fleet_episode_config {
    size_t struct_size;
    uint64_t seed;
    int32_t faults;                      /* 0, 1 or 2 at once */
    int32_t fault;                       /* kind of the first one, enum gpubridge_fleet_fault; 0: drawn */
    int32_t history;                     /* enum gpubridge_fleet_history */
    int32_t least_class;                 /* devices of each model at least; 0: 1 */
    int32_t pair;                        /* 1: one V100 and one MI50, nothing else */
    int32_t healthy_steps, window_steps; /* before the fault; after it */
    double least, most; /* size of the fault in units of the smallest detectable one, drawn evenly in the logarithm */
    double size;        /* > 0: the fault's size itself, at a device of the fastest model */
    double slow_part;   /* > 0: one device is so many times as slow as its class from the start */
    double alarms;      /* the budget, false alarms in 30 days at 1 step/s */
};

struct gpubridge_fleet_episode {
    size_t struct_size;
    int32_t ranks, steps, records;
    int32_t early; /* verdicts before the fault, slow parts left out */
    int32_t fault, where, second_fault, second_where;
    double size, detectable, second_size, second_detectable;
    int32_t found;                       /* faults whose culprit and cause were named at the end of the window */
    int32_t named;                       /* verdicts at the end, slow parts left out */
    int32_t wrong;                       /* of these, how many name something that is no fault's culprit or cause */
    int32_t misread;                     /* of these, how many name the right culprit with another cause */
    int32_t cause;                       /* the first verdict's cause, 0: none */
    int32_t delay;                       /* steps until the first fault was named, -1: never */
    int32_t slow_parts, slow_part_found; /* devices called slow parts; whether the one put in is among them */
    int32_t peers;                       /* 0: the first right verdict says that a common change cannot be told apart */
};

GPUBRIDGE_CHECKED int gpubridge_fleet_run_episode(const struct gpubridge_fleet_episode_config *config,
                                                  struct gpubridge_fleet_episode *episode);

#ifdef __cplusplus
}
#endif
#endif
