/* SPDX-License-Identifier: Apache-2.0
 * State of the streams that the straggler engine judges: hot blocks of eight streams for the kernel, cold records for
 * the rare work.  docs/straggler-engine.md defines every field.  Owned by the thread that uses the engine.  */
#ifndef GB_STRAGGLER_STREAM_H
#define GB_STRAGGLER_STREAM_H

#include <gpubridge/straggler.h>
#include <stdalign.h>

#define GB_LANES         8
#define GB_MEMBERS       6
#define GB_NARROW        4 /* members 0 ... 3 see the score clipped at 2 */
#define GB_TAILS         8
#define GB_BATCH         200 /* steps whose statistics are accepted or dropped together */
#define GB_LONG          16  /* batches in a long block */
#define GB_LEVEL_STEPS   32
#define GB_SCALE_STEPS   64
#define GB_MEMORY        65536.0 /* steps the baseline remembers */
#define GB_GROUP_RANKS   4       /* smallest group whose common mode is removed ... */
#define GB_LEAST_RANKS   3       /* ... as long as so many of it can be compared */
#define GB_MISSING_STEPS 64      /* steps without data after which a stream is unknown */
#define GB_SKIP_STEPS    2       /* ignored after a hold */

/* flags of a hot stream */
#define GB_DOWN_OLDER 1u /* the down side's last zero is the older one */
#define GB_FROZEN     2u /* level and noise are given: nothing is committed */
#define GB_SLOW_SHIFT 8  /* bits 8 ...: 1 + slowest armed member, 0: none armed */

struct gb_hot {
    alignas(64) double level[GB_LANES];
    float inv_scale[GB_LANES], centre[GB_LANES], inv_omega[GB_LANES];
    float up[GB_MEMBERS][GB_LANES], down[GB_MEMBERS][GB_LANES];
    float up_run[GB_MEMBERS][GB_LANES], down_run[GB_MEMBERS][GB_LANES];
    float older_count[GB_LANES], older_sum[GB_LANES]; /* between the two sides' last zeros */
    float newer_count[GB_LANES], newer_sum[GB_LANES]; /* since the newer one */
    float count[GB_LANES];                            /* steps committed to `centre` */
    float q_count[GB_LANES], q1[GB_LANES], q2[GB_LANES], q11[GB_LANES], q3[GB_LANES], q_in[GB_LANES];
    float prev[GB_LANES];
    float guard[GB_LANES], gross[GB_LANES];
    uint16_t tail[GB_TAILS][GB_LANES];
    uint32_t flags[GB_LANES];
};

enum gb_phase { GB_PHASE_WARMUP, GB_PHASE_LEVEL, GB_PHASE_SCALE, GB_PHASE_RUN };
enum gb_verdict { GB_VERDICT_NONE, GB_VERDICT_CONFIRMED, GB_VERDICT_RECOVERING };

/* What the healthy steps taught; valid in GB_PHASE_RUN. */
struct gb_learned {
    double n, s1, s2, s11, s3, in; /* accepted sums of the clipped score */
    double short_n, short_dev;     /* squared deviations of batch sums */
    double long_n, long_dev, long_sum, long_steps;
    uint32_t tail[GB_TAILS];
    float up[GB_MEMBERS], down[GB_MEMBERS]; /* thresholds; negative: not armed */
    float next_refresh;
    float slope; /* share of unclipped scores */
    /* the standing verdict */
    int64_t onset, onset_low, onset_high;
    float magnitude, magnitude_low, magnitude_high; /* log ratio */
    float recover, shift;                           /* reverse score; shift of the verdict in score units */
    float gross_sum;
    uint32_t clean; /* healthy steps since recovering */
};

struct gb_cold {
    union {
        float window[GB_SCALE_STEPS];
        struct gb_learned learned;
    } u;
    int64_t gross_step; /* last step above the gross level */
    uint16_t gross_run, missing, filled, skip;
    uint8_t phase, verdict, rule, member, slower, unknown;
};

_Static_assert(sizeof(struct gb_hot) == GB_LANES * 192, "hot state is 192 bytes a stream");
_Static_assert(sizeof(struct gb_hot) / GB_LANES + sizeof(struct gb_cold) <= 512, "a stream has at most 512 bytes");

/* Arrivals of one rank. */
struct gb_arrivals {
    double steps, last, repeat; /* committed steps, arrivals as the last, of these after another such */
    double refresh_at;
    float pending_steps, pending_last, pending_repeat;
    float score, run, weight_last, weight_other, threshold;
    uint8_t was_last, armed;
    int64_t seen; /* observed steps of the group that this record contains */
};

/* Constants of one engine, set at create. */
struct gb_tables {
    double k[GB_MEMBERS], clip[GB_MEMBERS];
    double exponent[GB_MEMBERS];  /* X of section 5: 2 k b that gives the member its run length */
    double reference[GB_MEMBERS]; /* threshold for white Gaussian noise, perfectly known */
    double gross_probability;     /* per step above the gross level */
    double count_threshold;
    double min_log; /* ln(1 + min_slowdown) */
};

struct gb_group {
    int32_t first, size; /* slice of `members` */
    uint8_t peers;       /* the common mode is removed */
    int64_t observed;    /* steps whose last arrival is known */
};

struct gpubridge_straggler {
    int32_t ranks, kinds, groups, stride, blocks; /* streams per kind: ranks, then groups, padded to GB_LANES */
    int32_t warmup, max_hold, window_steps, event_capacity;
    struct gb_tables tables;
    int64_t step, steps; /* last step number given (INT64_MIN: none); steps taken */
    struct gb_hot *hot;
    struct gb_cold *cold;
    struct gb_arrivals *arrivals;
    struct gb_group *group;
    int32_t *members, *group_of, *class_of;
    int32_t *held, *held_since; /* depth of holds per rank; steps since the first began */
    double *x, *scratch;        /* one kind at a time; scratch: three vectors of ranks */
    uint8_t *present, *active;  /* [stride] of the kind in work */
    uint8_t *route;             /* per stream: 0 when the kernel alone handles it */
    double *window;             /* push: window_steps vectors, then their step numbers and counts */
    uint8_t *window_present;
    int64_t *window_step;
    int64_t *window_count;
    double *replay; /* one step of a recording */
    int32_t *replay_last;
    struct gpubridge_straggler_event *events;
    uint64_t event_head, event_tail, event_lost;
    struct gpubridge_straggler_config config; /* resolved; pointers are NULL */
};

/* tables.c */
int gb_tables_init(struct gb_tables *t, double run_length, double min_slowdown);
double gb_gauss_clipped_inverse(double mean);

/* bank.c: steps the active lanes of one block on x (log time less common mode); bit l of the result: lane l needs
 * gb_stream_examine. */
unsigned gb_bank_step(struct gb_hot *h, const double *x, const uint8_t *active, const struct gb_tables *t);

/* peers.c: fills x with residuals less the common mode and the groups' own medians, and clears `active` where it
 * cannot. */
void gb_peers_remove(struct gpubridge_straggler *e, int kind);

/* learn.c */
void gb_learn_reset(struct gb_hot *h, int lane, struct gb_cold *c);
void gb_learn_feed(struct gpubridge_straggler *e, struct gb_hot *h, int lane, struct gb_cold *c, double x);
void gb_learn_batch(const struct gpubridge_straggler *e, struct gb_hot *h, int lane, struct gb_cold *c);
void gb_learn_refresh(const struct gb_tables *t, struct gb_hot *h, int lane, struct gb_cold *c);
void gb_learn_given(const struct gb_tables *t, struct gb_hot *h, int lane, struct gb_cold *c, double level,
                    double noise, double correlation);
void gb_bank_zero(struct gb_hot *h, int lane, int member);
double gb_detectable(const struct gb_tables *t, const struct gb_hot *h, int lane, const struct gb_cold *c, double steps,
                     double z);

/* arrivals.c */
void gb_arrivals_reset(struct gb_arrivals *a);
void gb_arrivals_skip(struct gb_arrivals *a, int64_t gap, const struct gb_tables *t);
/* This rank was the last.  Returns 1 when the score passes its threshold. */
int gb_arrivals_last(struct gb_arrivals *a, const struct gb_tables *t);

/* verdict.c */
double gb_relative(float magnitude);
double gb_score_ratio(const struct gb_hot *h, int lane, const struct gb_cold *c, int *member, int *slower);
void gb_stream_examine(struct gpubridge_straggler *e, int kind, int index, double x);
void gb_stream_confirmed_step(struct gpubridge_straggler *e, int kind, int index, double x);
int gb_stream_state(const struct gpubridge_straggler *e, int kind, int index);
void gb_stream_recovering_step(struct gpubridge_straggler *e, int kind, int index);
void gb_stream_clear(struct gpubridge_straggler *e, int kind, int index);
void gb_stream_count_alarm(struct gpubridge_straggler *e, int rank);

static inline struct gb_hot *gb_hot_of(const struct gpubridge_straggler *e, int kind, int index)
{
    return &e->hot[(size_t)kind * (size_t)e->blocks + (size_t)index / GB_LANES];
}
static inline struct gb_cold *gb_cold_of(const struct gpubridge_straggler *e, int kind, int index)
{
    return &e->cold[(size_t)kind * (size_t)e->stride + (size_t)index];
}

#endif
