/* SPDX-License-Identifier: Apache-2.0
 *
 * straggler.h: an engine that turns the step times of many ranks into verdicts with a false-alarm budget.
 *
 * One engine judges ranks x kinds streams (a kind is one sort of time: computation, input, ...).  Feed it one vector of
 * seconds per step; ask for reports and events.  It reads no clock, does no I/O, allocates nothing after create, and
 * computes the same bits on every machine.  docs/straggler-engine.md is its specification.
 *
 * One engine is used by one thread at a time.  Every int returned is an enum gpubridge_status (gpubridge.h); a call
 * that fails leaves the engine as it was.  Outputs are written only on success.
 */
#ifndef GPUBRIDGE_STRAGGLER_H
#define GPUBRIDGE_STRAGGLER_H

#include <gpubridge/gpubridge.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPUBRIDGE_STRAGGLER_MAX_STREAMS (1 << 24)

typedef struct gpubridge_straggler gpubridge_straggler;

enum gpubridge_straggler_state {
    GPUBRIDGE_STRAGGLER_WARMUP, /* first steps after start or restart: ignored */
    GPUBRIDGE_STRAGGLER_LEARN,  /* level and noise are being learned; no detector is armed */
    GPUBRIDGE_STRAGGLER_HEALTHY,
    GPUBRIDGE_STRAGGLER_SUSPECT, /* some score is above half its threshold */
    GPUBRIDGE_STRAGGLER_CONFIRMED,
    GPUBRIDGE_STRAGGLER_RECOVERING, /* back at the old level, not yet for long enough */
    GPUBRIDGE_STRAGGLER_HOLD,       /* evaluation, checkpoint, ...: the caller said so */
    GPUBRIDGE_STRAGGLER_UNKNOWN     /* too much data is missing */
};

/* Which question has which answer.  Several may be true at once. */
enum gpubridge_straggler_answer {
    GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST = 1,
    GPUBRIDGE_STRAGGLER_FASTER_THAN_PAST = 2,
    GPUBRIDGE_STRAGGLER_SLOWER_THAN_CLASS = 4,
    GPUBRIDGE_STRAGGLER_EVERYBODY_MOVED = 8,
    GPUBRIDGE_STRAGGLER_CANNOT_TELL = 16
};

/* What raised a verdict. */
enum gpubridge_straggler_rule {
    GPUBRIDGE_STRAGGLER_RULE_NONE,
    GPUBRIDGE_STRAGGLER_RULE_BANK,  /* a member of the CUSUM bank */
    GPUBRIDGE_STRAGGLER_RULE_GROSS, /* three steps in a row above the gross level */
    GPUBRIDGE_STRAGGLER_RULE_COUNT  /* arrives last more often than it used to */
};

struct gpubridge_straggler_config {
    size_t struct_size; /* sizeof(struct gpubridge_straggler_config) */
    int32_t ranks;
    int32_t kinds;          /* streams per rank; 0: 1 */
    const int32_t *groups;  /* [ranks], 0 ... groups-1: ranks with equal numbers are peers; NULL: all are */
    const int32_t *classes; /* [ranks], any numbers: ranks of one device class; NULL: all of one */
    /* The budget: `alarms` false alarms in `days` over all ranks and kinds at `steps_per_second`. */
    double alarms;           /* 0: 1 */
    double days;             /* 0: 30 */
    double steps_per_second; /* 0: 1 */
    double min_slowdown;     /* smallest relative change that matters; 0: 0.0025 */
    int32_t warmup_steps;    /* ignored after start and restart; 0: 50, < 0: none */
    int32_t use_peers;       /* 0: where a group has 4 or more ranks; < 0: never */
    int32_t max_hold_steps;  /* a hold that nobody ends heals after this many steps; 0: 2000 */
    int32_t window_steps;    /* steps that gpubridge_straggler_push may run ahead of the slowest; 0: 8 */
};

/* What is known about one stream. */
struct gpubridge_straggler_report {
    size_t struct_size;
    int32_t state;        /* enum gpubridge_straggler_state */
    uint32_t answers;     /* enum gpubridge_straggler_answer */
    int32_t rule;         /* enum gpubridge_straggler_rule of the standing verdict */
    int32_t member;       /* bank member, 0 (0.1 sigma) ... 5 (4 sigma); -1: none */
    double score;         /* largest score over threshold of any armed member: >= 1 is an alarm */
    double level_seconds; /* the learned level: the stream's own normal time */
    double noise;         /* relative noise per step after common mode, long-run */
    double learned_steps; /* healthy steps the level rests on */
    int32_t has_peers;    /* 0: judged by its own history only, so a common change is seen as its own */
    int32_t armed;        /* bit per bank member that may raise a verdict */
    double slowdown, slowdown_low, slowdown_high; /* of the standing verdict, relative (0.02: 2 % slower) */
    int64_t onset, onset_low, onset_high;         /* step numbers */
    double class_ratio;                           /* level over the median level of its class */
    double last_share;     /* learned share of steps in which this rank arrived last (a cost, not a verdict) */
    double min_detectable; /* smallest slowdown found within 200 steps with 95 %; < 0: none yet */
    double gross_level;    /* relative slowdown that is found in 3 steps; < 0: none yet */
};

struct gpubridge_straggler_event {
    int64_t step;
    int32_t rank; /* -1 - group for a group's common mode */
    int32_t kind;
    int32_t from, to; /* enum gpubridge_straggler_state */
    int32_t rule, member;
    uint32_t answers;
    int32_t reserved;
    double slowdown, slowdown_low, slowdown_high;
    int64_t onset, onset_low, onset_high;
};

GPUBRIDGE_CHECKED int gpubridge_straggler_create(const struct gpubridge_straggler_config *config,
                                                 gpubridge_straggler **engine);
GPUBRIDGE_API void gpubridge_straggler_destroy(gpubridge_straggler *engine); /* NULL is fine */

/* One step of all ranks.  seconds[kind * ranks + rank] > 0; present[same index] == 0 marks what is missing (NULL:
 * nothing is); last[group] is the rank that arrived last, or -1 (NULL: not known).  `step` must grow; gaps are fine.
 * Any value that is NaN, infinite, not positive or beyond 1e9 s refuses the whole step. */
GPUBRIDGE_CHECKED int gpubridge_straggler_step(gpubridge_straggler *engine, int64_t step, const double *seconds,
                                               const uint8_t *present, const int32_t *last);
/* One value at a time, in any order within window_steps; a step is judged once it is complete or the window has passed
 * it.  A value for a step already judged, or given twice, is refused with GPUBRIDGE_ERR_INVALID and changes nothing. */
GPUBRIDGE_CHECKED int gpubridge_straggler_push(gpubridge_straggler *engine, int64_t step, int32_t rank, int32_t kind,
                                               double seconds);
/* Judges the steps that are waiting, complete or not. */
GPUBRIDGE_CHECKED int gpubridge_straggler_flush(gpubridge_straggler *engine);

/* rank < 0: all ranks.  A hold freezes the streams; begins may nest, an end without a begin is ignored. */
GPUBRIDGE_CHECKED int gpubridge_straggler_hold(gpubridge_straggler *engine, int32_t rank, int32_t begin);
/* Forgets everything about a rank (restart, replaced device).  rank < 0: all. */
GPUBRIDGE_CHECKED int gpubridge_straggler_restart(gpubridge_straggler *engine, int32_t rank);
/* Zeroes the scores and drops the verdict, keeps what was learned. */
GPUBRIDGE_CHECKED int gpubridge_straggler_clear(gpubridge_straggler *engine, int32_t rank);
/* States level, noise per step (sd of log time, Gaussian) and lag-1 correlation instead of learning them. */
GPUBRIDGE_CHECKED int gpubridge_straggler_given(gpubridge_straggler *engine, int32_t rank, int32_t kind, double seconds,
                                                double noise, double correlation);

GPUBRIDGE_CHECKED int gpubridge_straggler_report(const gpubridge_straggler *engine, int32_t rank, int32_t kind,
                                                 struct gpubridge_straggler_report *report);
/* Smallest relative slowdown that is found within `steps` steps with `probability` (0.5 ... 0.999). */
GPUBRIDGE_CHECKED int gpubridge_straggler_detectable(const gpubridge_straggler *engine, int32_t rank, int32_t kind,
                                                     double steps, double probability, double *slowdown);
/* Takes up to `capacity` state changes to or from CONFIRMED, oldest first.  *lost counts those dropped since the start
 * because nobody took them in time. */
GPUBRIDGE_CHECKED int gpubridge_straggler_events(gpubridge_straggler *engine, struct gpubridge_straggler_event *events,
                                                 int32_t capacity, int32_t *count, uint64_t *lost);

/* Bytes of one stream's state in the order of the specification; the group's common mode is rank -1 - group. */
#define GPUBRIDGE_STRAGGLER_STATE_BYTES 512
GPUBRIDGE_CHECKED int gpubridge_straggler_state_bytes(const gpubridge_straggler *engine, int32_t rank, int32_t kind,
                                                      void *bytes, size_t capacity, size_t *written);

/* Recording: what an engine was told, as bytes.  Each call writes one record into `bytes` (*written of it), or fails
 * with GPUBRIDGE_ERR_INVALID when `capacity` is too small.  docs/straggler-engine.md section 12 is the format. */
enum gpubridge_straggler_record {
    GPUBRIDGE_STRAGGLER_RECORD_STEP = 1,
    GPUBRIDGE_STRAGGLER_RECORD_HOLD = 2,
    GPUBRIDGE_STRAGGLER_RECORD_RELEASE = 3,
    GPUBRIDGE_STRAGGLER_RECORD_RESTART = 4,
    GPUBRIDGE_STRAGGLER_RECORD_CLEAR = 5,
    GPUBRIDGE_STRAGGLER_RECORD_GIVEN = 6
};
GPUBRIDGE_CHECKED int gpubridge_straggler_record_header(const struct gpubridge_straggler_config *config, void *bytes,
                                                        size_t capacity, size_t *written);
GPUBRIDGE_CHECKED int gpubridge_straggler_record_step(const gpubridge_straggler *engine, int64_t step,
                                                      const double *seconds, const uint8_t *present,
                                                      const int32_t *last, void *bytes, size_t capacity,
                                                      size_t *written);
/* HOLD, RELEASE, RESTART, CLEAR: rank; GIVEN: also kind and the three values. */
GPUBRIDGE_CHECKED int gpubridge_straggler_record_mark(int32_t type, int32_t rank, int32_t kind, const double values[3],
                                                      void *bytes, size_t capacity, size_t *written);
/* Creates an engine from the header at the start of `bytes`; *used is the header's length. */
GPUBRIDGE_CHECKED int gpubridge_straggler_replay_open(const void *bytes, size_t size, gpubridge_straggler **engine,
                                                      size_t *used);
/* Applies the record at the start of `bytes`.  A truncated or damaged record is refused and changes nothing. */
GPUBRIDGE_CHECKED int gpubridge_straggler_replay_next(gpubridge_straggler *engine, const void *bytes, size_t size,
                                                      size_t *used);

#ifdef __cplusplus
}
#endif
#endif
