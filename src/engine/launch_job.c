/* SPDX-License-Identifier: Apache-2.0
 * Jobs: what the launcher knows about an operation beyond its plan, and how one is given up. */
#include "engine/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gb_job *gb_job_get(struct gb_launcher *launcher, struct gb_dev_op *op)
{
    pthread_mutex_lock(&launcher->lock);
    struct gb_job *job = launcher->spare_jobs;
    if (job) launcher->spare_jobs = job->free_next;
    pthread_mutex_unlock(&launcher->lock);
    if (!job) job = calloc(1, sizeof *job);
    if (!job) return NULL;
    _Atomic uint32_t *poison = atomic_load(&job->poison);
    if (poison) atomic_store(poison, 0);
    *job = (struct gb_job){
        .op = op, .set_id = op->set, .ready = op->ready, .arrays = job->arrays, .capacity = job->capacity};
    atomic_init(&job->poison, poison);
    return job;
}

void gb_job_free(struct gb_job *job)
{
    free(job->arrays);
    free(job);
}

/* Caller holds the lock.  Events go back to the stock; the arrays and the pinned word stay with the job. */
void gb_job_put(struct gb_launcher *launcher, struct gb_job *job)
{
    for (struct gb_job **at = &launcher->jobs; *at; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            break;
        }
    gb_launch_event_put(launcher, job->ready);
    gb_launch_event_put(launcher, job->done);
    if (job->is_prepared) {
        const uint32_t nsteps = job->nsteps;
        for (uint32_t i = 0; i < nsteps; i++) gb_launch_event_put(launcher, job->event[i]);
        for (int q = 0; q < QUEUES; q++) gb_launch_event_put(launcher, job->joined[q]);
    }
    job->op = NULL;
    job->free_next = launcher->spare_jobs;
    launcher->spare_jobs = job;
}

static int reserve(struct gb_job *job, uint32_t nsteps)
{
    const size_t one = sizeof *job->event + sizeof *job->info;
    if (nsteps == 0) return 0; /* an operation whose device side is empty: nothing to look up */
    if (nsteps > job->capacity) {
        free(job->arrays);
        job->capacity = 0;
        job->arrays = malloc(nsteps * one);
        if (!job->arrays) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a job of %u steps", nsteps);
        job->capacity = nsteps;
    }
    job->event = job->arrays;
    job->info = (uint8_t *)(job->event + nsteps);
    memset(job->arrays, 0, nsteps * one);
    return 0;
}

static void widen(const struct gb_ref *ref, uint64_t bytes, struct gb_job *job)
{
    if (ref->buf != GB_BUF_IN && ref->buf != GB_BUF_OUT) return;
    uintptr_t low = (uintptr_t)job->op->buf[ref->buf] + ref->off, high = low + bytes;
    uintptr_t *lows = ref->buf == GB_BUF_IN ? &job->in_low : &job->out_low;
    uintptr_t *highs = ref->buf == GB_BUF_IN ? &job->in_high : &job->out_high;
    if (!bytes) return;
    if (*highs == 0 || low < *lows) *lows = low;
    if (high > *highs) *highs = high;
}

static void measure(struct gb_job *job, const struct gb_plan *plan, const struct gb_step *step)
{
    const int dtype = job->op->dtype;
    switch (step->kind) {
    case GB_STEP_COPY:
        widen(&step->src, step->bytes, job);
        widen(&step->dst, step->bytes, job);
        break;
    case GB_STEP_REDUCE:
        widen(&step->dst, step->count * (step->dst_is_acc ? gb_acc_bytes(dtype) : gb_dtype_bytes(dtype)), job);
        for (uint32_t i = step->part; i < step->part + step->nparts; i++)
            widen(&plan->parts[i].ref, step->count * gb_dtype_bytes(dtype), job);
        break;
    case GB_STEP_VENDOR:
        for (uint32_t i = step->part; i < step->part + step->nparts; i++)
            widen(&plan->parts[i].ref, plan->parts[i].bytes, job);
        break;
    default:
        break;
    }
}

/* Marks what others wait for. */
static void link_step(struct gb_job *job, const struct gb_plan *plan, uint32_t index)
{
    const struct gb_step *step = &plan->steps[index];
    for (uint32_t i = step->dep; i < step->dep + step->ndep; i++) {
        const uint32_t dep = plan->deps[i];
        const struct gb_step *before = &plan->steps[dep];
        if (gb_launch_is_net(before)) continue;
        if (gb_launch_is_net(step))
            job->info[dep] |= STEP_FLAG;
        else if (gb_launch_queue(before) != gb_launch_queue(step))
            job->info[dep] |= STEP_EVENT;
    }
}

int gb_job_prepare(struct gb_launcher *launcher, struct gb_job *job)
{
    const struct gb_plan *plan = job->op->plan;
    GB_TRY(reserve(job, plan->nsteps));
    job->nsteps = plan->nsteps;
    job->is_prepared = 1;
    for (uint32_t i = 0; i < plan->nsteps; i++) {
        const struct gb_step *step = &plan->steps[i];
        link_step(job, plan, i);
        if (gb_launch_is_net(step)) continue;
        const int queue = gb_launch_queue(step);
        if (queue < 0 || queue >= QUEUES)
            return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "device step %u is on queue %u", i, step->queue);
        /* The network gives the message's place back then. */
        if (job->op->landing && job->op->landing[i] != GB_NO_STEP) job->info[i] |= STEP_FLAG;
        job->left[queue]++;
        measure(job, plan, step);
    }
    _Atomic uint32_t *poison = atomic_load(&job->poison);
    if (!poison) {
        poison = gb_launch_keep(launcher, sizeof *poison);
        if (!poison) return GPUBRIDGE_ERR_NO_MEMORY;
        atomic_store(poison, 0);
        atomic_store(&job->poison, poison);
    }
    if (atomic_load(&job->given_up)) atomic_store(poison, 1); /* given up before the word existed */
    /* What the end needs is got now, so that the end can fail only with the device. */
    GB_TRY(gb_launch_event_get(launcher, &job->done));
    for (int q = 0; q < QUEUES; q++)
        if (q != QUEUE_IN) GB_TRY(gb_launch_event_get(launcher, &job->joined[q]));
    return gb_set_get(launcher, job->set_id, &job->set);
}

static int overlaps(uintptr_t low, uintptr_t high, uintptr_t other_low, uintptr_t other_high)
{
    return low < other_high && other_low < high;
}

int gb_job_conflicts(const struct gb_job *a, const struct gb_job *b)
{
    return overlaps(a->out_low, a->out_high, b->out_low, b->out_high) ||
           overlaps(a->out_low, a->out_high, b->in_low, b->in_high) ||
           overlaps(a->in_low, a->in_high, b->out_low, b->out_high);
}

/* Poison first, then the flags: whoever passes an opened flag ends at a kernel that sees the poison. */
void gb_job_give_up(struct gb_job *job)
{
    atomic_store(&job->given_up, 1);
    _Atomic uint32_t *poison = atomic_load(&job->poison);
    if (poison) atomic_store(poison, 1);
    for (uint32_t i = 0; i < job->op->plan->nsteps; i++)
        atomic_store_explicit(&job->op->flags[i], 1, memory_order_release);
}

void gb_job_fail(struct gb_launcher *launcher, struct gb_job *job, int status)
{
    struct gb_dev_op *op = job->op;
    if (atomic_load(&op->status) == 0) {
        snprintf(op->text, sizeof op->text, "%s", gb_err_text());
        atomic_store_explicit(&op->status, status, memory_order_release);
    }
    gb_job_give_up(job);
    launcher->wake(launcher->wake_arg);
}
