/* SPDX-License-Identifier: Apache-2.0
 * Damages plans on purpose, so that a run can show that the simulator would have seen it. */
#include "sim.h"

#include <stdlib.h>

/* A random step of one kind in the world, or NULL. */
static struct gb_step *some_step(struct sim_world *w, int (*fits)(const struct sim_inst *, uint32_t),
                                 struct sim_inst **of)
{
    struct gb_step *chosen = NULL;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < w->nops; i++) {
        for (uint32_t r = 0; r < w->ops[i].group->nranks; r++) {
            struct sim_inst *in = w->ops[i].inst + r;
            for (uint32_t s = 0; s < in->plan->nsteps; s++) {
                if (!fits(in, s) || sim_below(&w->rng, ++seen) != 0) continue;
                chosen = in->plan->steps + s;
                *of = in;
            }
        }
    }
    return chosen;
}

static int is_fold_after_message(const struct sim_inst *in, uint32_t s)
{
    const struct gb_plan *p = in->plan;
    const struct gb_step *step = p->steps + s;
    int waits = 0; /* for what somebody else made: an earlier fold in the same queue is waited for anyhow */
    for (uint32_t d = step->dep; d < step->dep + step->ndep; d++) waits |= p->steps[p->deps[d]].kind != GB_STEP_REDUCE;
    return step->kind == GB_STEP_REDUCE && waits;
}

static int is_send(const struct sim_inst *in, uint32_t s)
{
    return in->plan->steps[s].kind == GB_STEP_SEND && in->plan->steps[s].bytes > 0;
}

/* A call before one that moves other amounts. */
static int is_call_pair(const struct sim_inst *in, uint32_t s)
{
    const struct gb_step *step = in->plan->steps + s;
    const struct gb_part *parts = in->plan->parts;
    if (step->kind != GB_STEP_VENDOR || step->nparts == 0) return 0;
    for (uint32_t i = s + 1; i < in->plan->nsteps; i++) {
        const struct gb_step *next = in->plan->steps + i;
        if (next->kind == GB_STEP_VENDOR)
            return next->nparts > 0 &&
                   (next->nparts != step->nparts || parts[next->part].bytes != parts[step->part].bytes);
    }
    return 0;
}

/* Long enough, and stored in a way that keeps every rounding, so that another order shows. */
static int is_long_float_sum(const struct sim_inst *in, uint32_t s)
{
    const struct gb_step *step = in->plan->steps + s;
    const struct gb_plan_spec *spec = &in->op->spec;
    int is_wide = spec->dtype == GPUBRIDGE_F32 || spec->dtype == GPUBRIDGE_F64 || spec->dtype == GPUBRIDGE_C64 ||
                  spec->dtype == GPUBRIDGE_C128;
    return step->kind == GB_STEP_REDUCE && step->nparts > 2 && step->count > 100 && spec->reduce_op <= GPUBRIDGE_AVG &&
           is_wide && !in->op->has_specials && in->plan->codec == GB_CODEC_NONE;
}

/* The first message of `in` to `peer` waits for the first from it.  0: there are none. */
static int wait_before_send(struct sim_inst *in, uint32_t peer)
{
    struct gb_plan *p = in->plan;
    uint32_t send = p->nsteps, recv = p->nsteps;
    for (uint32_t s = p->nsteps; s-- > 0;) {
        if (p->steps[s].peer != peer || p->steps[s].xid != 0) continue;
        if (p->steps[s].kind == GB_STEP_SEND) send = s;
        if (p->steps[s].kind == GB_STEP_RECV) recv = s;
    }
    if (send == p->nsteps || recv == p->nsteps) return 0;
    uint32_t *deps = realloc(p->deps, (p->ndeps + p->steps[send].ndep + 1) * sizeof *deps);
    if (!deps) return 0;
    p->deps = deps;
    for (uint32_t d = 0; d < p->steps[send].ndep; d++) deps[p->ndeps + d] = deps[p->steps[send].dep + d];
    p->steps[send].dep = p->ndeps;
    p->ndeps += p->steps[send].ndep + 1;
    deps[p->ndeps - 1] = recv;
    p->steps[send].ndep++;
    return 1;
}

static int cross_waits(struct sim_world *w)
{
    struct sim_inst *in = NULL;
    struct gb_step *step = some_step(w, is_send, &in);
    return step && wait_before_send(in, step->peer) && wait_before_send(in->op->inst + step->peer, in->rank);
}

int sim_world_damage(struct sim_world *w, enum sim_damage damage)
{
    struct sim_inst *in = NULL;
    struct gb_step *step = NULL, *other;
    struct gb_part part;
    switch (damage) {
    case SIM_FORGET_DEPS:
        if (!(step = some_step(w, is_fold_after_message, &in))) return 0;
        step->ndep = 0;
        return 1;
    case SIM_SHORT_MESSAGE:
        if (!(step = some_step(w, is_send, &in))) return 0;
        step->bytes--;
        return 1;
    case SIM_SWAP_CALLS:
        if (!(step = some_step(w, is_call_pair, &in))) return 0;
        for (other = step + 1; other->kind != GB_STEP_VENDOR; other++) {
        }
        struct gb_step saved = *step;
        step->part = other->part, step->nparts = other->nparts;
        other->part = saved.part, other->nparts = saved.nparts;
        return 1;
    case SIM_WRONG_ORDER:
        if (!(step = some_step(w, is_long_float_sum, &in))) return 0;
        part = in->plan->parts[step->part];
        in->plan->parts[step->part] = in->plan->parts[step->part + step->nparts - 1];
        in->plan->parts[step->part + step->nparts - 1] = part;
        return 1;
    case SIM_CROSSED_WAIT:
        return cross_waits(w);
    default:
        return 0;
    }
}
