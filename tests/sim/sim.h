/* SPDX-License-Identifier: Apache-2.0
 *
 * sim.h: the plan simulator.  It runs all ranks' plans of several operations and groups in one process, on real data,
 * with nothing but the order that dependencies, queues, vendor calls and message credit impose; everything else happens
 * in random order.  It judges values bit by bit against a reference, races, deadlock, and bytes moved against formulas.
 *
 * A *world* is one random case.  Its group, operation and instance (one rank's part of an operation) objects live in
 * it.
 */
#ifndef GB_TESTS_SIM_H
#define GB_TESTS_SIM_H

#include "plan/plan.h"

#include <stdio.h>

#define SIM_MAX_RANKS  48
#define SIM_MAX_GROUPS 3
#define SIM_MAX_OPS    8
#define SIM_EAGER      8192u

struct sim_rng {
    uint64_t state;
};

static inline uint64_t sim_next(struct sim_rng *rng)
{
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint32_t sim_below(struct sim_rng *rng, uint32_t n)
{
    return (uint32_t)(sim_next(rng) % n);
}

struct sim_group {
    struct gb_topo *topo;
    uint32_t nranks, index;
    uint32_t world_rank[SIM_MAX_RANKS];
    uint32_t depth[SIM_MAX_RANKS]; /* a rank's own affair */
    uint64_t chunk_bytes, flat_bytes, codec_min_bytes;
    int32_t codec; /* enum gb_codec */
    uint8_t codec_spreads, codec_skips;
    uint32_t nops, ops[SIM_MAX_OPS]; /* in the order in which every member submits them */
};

/* One rank's part of an operation. */
struct sim_inst {
    struct sim_op *op;
    struct gb_plan *plan;
    uint32_t rank; /* in the group */
    uint64_t in_bytes, out_bytes;
    unsigned char *mem[5]; /* allocations: user, user, DEV, HOST, RESIDUAL */
    unsigned char *buf[GB_BUF_COUNT];
    unsigned char *input;      /* copy of the input */
    float *residual;           /* copy of the residual: the same values on all ranks of an island */
    uint32_t *left, *net_left; /* per step: dependencies not done; those on messages */
    uint32_t *succ_first, *succ;
    uint32_t *message; /* per step: index of its message */
    uint32_t *lent;    /* per copy: 1 + index of the message that it reads in its sender's memory; 0: of none */
    uint8_t *done;
    uint32_t ndone, ncalls;
    uint8_t submitted, started;
};

struct sim_op {
    struct sim_group *group;
    uint32_t index;
    struct gb_plan_spec spec; /* counts and rows below; depth is set per rank */
    uint64_t counts[SIM_MAX_RANKS];
    uint64_t rows[SIM_MAX_RANKS * SIM_MAX_RANKS]; /* ALL_TO_ALL: [from][to] */
    uint64_t columns[SIM_MAX_RANKS * SIM_MAX_RANKS];
    double factor;
    uint8_t is_uneven, in_place, has_specials;
    uint8_t feedback[SIM_MAX_RANKS]; /* by island: its ranks have residuals */
    uint32_t nsubmitted;
    struct sim_inst inst[SIM_MAX_RANKS];
};

struct sim_world {
    struct sim_rng rng;
    uint32_t nranks, ngroups, nops;
    char keys[SIM_MAX_RANKS][4];
    uint8_t vendor[SIM_MAX_RANKS], staged[SIM_MAX_RANKS], gate[SIM_MAX_RANKS];
    uint8_t one_vendor_queue; /* all groups of a rank share one stream for vendor calls, in ticket order */
    uint64_t credit;          /* bytes sent ahead per pair */
    uint8_t lends;            /* of messages between staged ranks, so many in four stay in their senders' memory */
    struct sim_group groups[SIM_MAX_GROUPS];
    struct sim_op ops[SIM_MAX_OPS];
    uint64_t nsteps, nmessages, nlent, ncalls;
    char text[512]; /* what went wrong */
};

/* Deliberate damage, to show that the simulator sees it. */
enum sim_damage {
    SIM_NO_DAMAGE,
    SIM_FORGET_DEPS,   /* one step waits for nothing */
    SIM_SHORT_MESSAGE, /* one message is one byte shorter at its sender */
    SIM_SWAP_CALLS,    /* two vendor calls of one rank in the other order */
    SIM_WRONG_ORDER,   /* one fold takes its sources in another order */
    SIM_CROSSED_WAIT,  /* two ranks each wait for the other's message before they send */
    SIM_DAMAGE_COUNT
};

/* world.c: makes the case and its plans, 0 or -1 with world->text. */
int sim_world_init(struct sim_world *world, uint64_t seed);
void sim_world_fini(struct sim_world *world);
void sim_world_print(const struct sim_world *world, FILE *file);
int sim_fail(struct sim_world *world, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The spec as one rank sees it. */
struct gb_plan_spec sim_spec_of(const struct sim_op *op, uint32_t rank);

/* damage.c.  0: nothing in this world can be damaged like that. */
int sim_world_damage(struct sim_world *world, enum sim_damage damage);

/* machine.c: runs it. */
int sim_run(struct sim_world *world);

/* reference.c */
void sim_fill(struct sim_rng *rng, int dtype, int specials, void *data, uint64_t count);
/* The right output of a rank; `out` has its size. */
void sim_reference(const struct sim_op *op, uint32_t rank, unsigned char *out);
/* 0 when every element's residual was renewed on exactly one rank of each island that has residuals. */
int sim_check_residuals(struct sim_world *world, const struct sim_op *op);

/* volume.c: bytes that the ranks of the operation send together, by the formulas of docs/algorithms.md. */
void sim_volume(const struct sim_op *op, uint64_t *bridge, uint64_t *island);

#endif
