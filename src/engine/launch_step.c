/* SPDX-License-Identifier: Apache-2.0
 * Issues the device steps of jobs into the streams of their set.  Launcher thread only.
 *
 *   network flags      out ----copy--write--copy--write------------------------------+
 *   (pinned memory)    in  ---------wait--copy--reduce--write------------------------+--poison?--done--write
 *                      vendor ----group-------------------group----------------------+
 *
 * Gate on: waits and writes are entries of the streams.  Gate off: the launcher looks at the flags of network steps
 * before it issues, and stores those of device steps when their events have passed. */
#include "engine/launch.h"

#include "base/clock.h"

#include <gpubridge/gpubridge.h>

#include <stdlib.h>

#define THREADS        256u
#define MAX_BLOCKS     32u /* few, so that training kernels keep the GPU */
#define VENDOR_ENTRIES 8u  /* what a grouped call may put into a stream */

/* ---- stream sets ---- */

int gb_set_get(struct gb_launcher *launcher, uint32_t id, struct gb_set **out)
{
    for (struct gb_set *set = launcher->sets; set; set = set->next)
        if (set->id == id) {
            *out = set;
            return 0;
        }
    struct gb_set *set = calloc(1, sizeof *set);
    if (!set) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a set of streams");
    set->id = id;
    set->retired = gb_launch_keep(launcher, QUEUES * sizeof *set->retired);
    int rc = set->retired ? 0 : GPUBRIDGE_ERR_NO_MEMORY;
    for (int q = 0; q < QUEUES && !rc; q++) {
        atomic_store(&set->retired[q], 0);
        rc = gb_stream_create(launcher->device, &set->stream[q]);
    }
    if (rc) {
        gb_set_destroy(launcher, set);
        return rc;
    }
    set->next = launcher->sets;
    launcher->sets = set;
    *out = set;
    return 0;
}

void gb_set_destroy(struct gb_launcher *launcher, struct gb_set *set)
{
    for (int q = 0; q < QUEUES; q++) gb_stream_destroy(launcher->device, set->stream[q]);
    gb_launch_unkeep(launcher, set->retired, QUEUES * sizeof *set->retired);
    free(set);
}

static uint32_t pending(const struct gb_set *set, int queue)
{
    return set->issued[queue] - atomic_load_explicit(&set->retired[queue], memory_order_acquire);
}

/* ---- may this step be issued now? ---- */

static int dependencies_hold(const struct gb_launcher *launcher, const struct gb_job *job, const struct gb_step *step)
{
    const struct gb_plan *plan = job->op->plan;
    for (uint32_t i = step->dep; i < step->dep + step->ndep; i++) {
        const uint32_t dep = plan->deps[i];
        const struct gb_step *before = &plan->steps[dep];
        if (!gb_launch_is_net(before)) {
            if (job->cursor[gb_launch_queue(before)] <= dep) return 0;
        } else if (!launcher->gated && atomic_load_explicit(&job->op->flags[dep], memory_order_acquire) == 0) {
            return 0;
        }
    }
    return 1;
}

static int left_of(const struct gb_job *job)
{
    return job->left[QUEUE_OUT] || job->left[QUEUE_IN] || job->left[QUEUE_VENDOR];
}

/* Gate on, an operation waits until those of its set before it are in the streams as a whole, for the reason given at
 * advance_steps.  Gate off, they go through each stream in order, and through the one that ends them as a whole. Vendor
 * calls of all sets follow the one order in which operations were started. */
static int earlier_jobs_allow(struct gb_launcher *launcher, const struct gb_job *job, int queue)
{
    int allowed = 1;
    pthread_mutex_lock(&launcher->lock);
    for (const struct gb_job *other = launcher->jobs; other != job && allowed; other = other->next) {
        if (other->state != JOB_RUNNING) continue;
        if (queue == QUEUE_VENDOR && (other->left[QUEUE_VENDOR] || !other->is_prepared)) allowed = 0;
        if (other->set_id != job->set_id) continue;
        if (launcher->gated || queue == QUEUE_IN || !other->is_prepared || other->left[queue] ||
            gb_job_conflicts(job, other))
            allowed = 0;
    }
    pthread_mutex_unlock(&launcher->lock);
    return allowed;
}

/* ---- the parts of issuing ---- */

/* The first entries of a job on a stream: the caller's work, and operations in flight on the same memory, come first.
 */
static int begin(struct gb_launcher *launcher, struct gb_job *job, int queue)
{
    void *const stream = job->set->stream[queue];
    void *before[16];
    int count = 0;
    if (job->begun[queue]) return 0;
    job->begun[queue] = 1;
    if (job->ready) before[count++] = job->ready;
    pthread_mutex_lock(&launcher->lock);
    for (const struct gb_job *other = launcher->jobs; other != job; other = other->next) {
        if (other->set_id != job->set_id || other->is_released || !gb_job_conflicts(job, other)) continue;
        if (count == 16) count = 15; /* the last one is later than those it replaces */
        before[count++] = other->done;
    }
    pthread_mutex_unlock(&launcher->lock);
    for (int i = 0; i < count; i++) GB_TRY(gb_stream_wait_event(launcher->device, stream, before[i]));
    job->set->issued[queue] += (uint32_t)count;
    return 0;
}

static int wait_for(struct gb_launcher *launcher, struct gb_job *job, const struct gb_step *step, int queue)
{
    const struct gb_plan *plan = job->op->plan;
    void *const stream = job->set->stream[queue];
    for (uint32_t i = step->dep; i < step->dep + step->ndep; i++) {
        const uint32_t dep = plan->deps[i];
        const struct gb_step *before = &plan->steps[dep];
        if (gb_launch_is_net(before)) {
            const uint8_t waited = (uint8_t)(STEP_WAITED << queue);
            if (!launcher->gated || (job->info[dep] & waited)) continue;
            job->info[dep] |= waited;
            GB_TRY(gb_stream_wait_flag(launcher->device, stream, (const void *)&job->op->flags[dep], 1));
        } else {
            const int other = gb_launch_queue(before);
            if (other == queue || job->seen[queue][other] > dep) continue;
            job->seen[queue][other] = dep + 1;
            GB_TRY(gb_stream_wait_event(launcher->device, stream, job->event[dep]));
        }
        job->set->issued[queue]++;
    }
    return 0;
}

static void *address(const struct gb_dev_op *op, const struct gb_ref *ref)
{
    return (char *)op->buf[ref->buf] + ref->off;
}

static int launch(struct gb_launcher *launcher, void *stream, void *kernel, uint64_t bytes, uint32_t most, void **args)
{
    const uint64_t blocks = bytes / 16 / THREADS + 1;
    return gb_stream_launch(launcher->device, stream, kernel, blocks > most ? most : (uint32_t)blocks, THREADS, args);
}

/* Sums wait for memory and are fast enough on a part of the GPU.  Encoding and decoding compute: on an H200 they reach
 * a copy's rate with three or four blocks for each multiprocessor and nine tenths of it with two
 * (bench/results/gpu/codec_h200.json), so they get two, and are gone the sooner. */
static uint32_t most_blocks(const struct gb_launcher *launcher, const struct gb_reduce_args *args)
{
    const int32_t processors = gb_device_info(launcher->device)->multiprocessors;
    if (!args->enc_mask && !args->dst_is_enc) return MAX_BLOCKS;
    return processors > (int32_t)MAX_BLOCKS / 2 ? 2 * (uint32_t)processors : MAX_BLOCKS;
}

/* The values that the step has just encoded, once more as floats.  It is one small kernel beside the one that counts.
 */
static int take_sample(struct gb_launcher *launcher, struct gb_job *job, const struct gb_step *step,
                       const struct gb_reduce_args *encode, void *stream)
{
    struct gb_dev_sample *sample = &job->op->sample;
    struct gb_reduce_args args = *encode;
    args.dst = sample->device;
    args.dst_is_enc = 0;
    args.dst_is_acc = 1;
    args.stats = NULL;
    if (args.count > GB_SAMPLE_VALUES) args.count = GB_SAMPLE_VALUES;
    sample->step = (uint32_t)(step - job->op->plan->steps);
    sample->count = (uint32_t)args.count;
    void *params[] = {&args};
    job->set->issued[gb_launch_queue(step)] += 2;
    GB_TRY(launch(launcher, stream, launcher->reduce[gb_reduce_way(&args)], args.count * sizeof(float), MAX_BLOCKS,
                  params));
    return gb_stream_copy(launcher->device, sample->host, sample->device, args.count * sizeof(float), stream);
}

/* The row of counters of a stream, zeroed before its first use. */
static int count_into(struct gb_launcher *launcher, struct gb_job *job, int queue, void *stream, uint64_t **row)
{
    struct gb_dev_counts *counts = &job->op->counts;
    if (!counts->device) return 0;
    *row = counts->device + (size_t)queue * GB_CODEC_STATS;
    if (counts->queues >> queue & 1) return 0;
    counts->queues |= (uint8_t)(1 << queue);
    job->set->issued[queue]++;
    return gb_stream_copy(launcher->device, *row, launcher->zeros, GB_CODEC_STATS * sizeof **row, stream);
}

static int issue_reduce(struct gb_launcher *launcher, struct gb_job *job, const struct gb_step *step, void *stream)
{
    const struct gb_dev_op *op = job->op;
    if (step->nparts == 0 || step->nparts > GB_REDUCE_MAX_SRC)
        return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "a reduce step has %u sources, 1 to %d", step->nparts,
                       GB_REDUCE_MAX_SRC);
    struct gb_reduce_args args = {.dst = address(op, &step->dst), .count = step->count, .factor = op->factor};
    args.divisor = op->nranks;
    args.nsrc = (uint8_t)step->nparts;
    args.dtype = (uint8_t)op->dtype;
    args.op = (uint8_t)op->reduce_op;
    args.flags = step->final ? GB_REDUCE_FINAL : 0;
    args.codec = op->plan->codec;
    args.dst_is_acc = step->dst_is_acc;
    args.dst_is_enc = step->dst_is_enc;
    if (step->dst_is_enc) GB_TRY(count_into(launcher, job, gb_launch_queue(step), stream, &args.stats));
    for (uint32_t k = 0; k < step->nparts; k++) {
        const struct gb_part *part = &op->plan->parts[step->part + k];
        args.src[k] = address(op, &part->ref);
        if (part->is_acc) args.acc_mask |= 1u << k;
        if (part->is_enc) args.enc_mask |= 1u << k;
        if (part->premul) args.premul_mask |= 1u << k;
    }
    gb_step_negate(step, &args);
    if (op->is_random) gb_step_randomise(step, op->seed, &args);
    void *params[] = {&args};
    GB_TRY(launch(launcher, stream, launcher->reduce[gb_reduce_way(&args)], step->count * gb_dtype_bytes(op->dtype),
                  most_blocks(launcher, &args), params));
    const int is_first = op->sample.device && !op->sample.count && step->dst_is_enc && !step->final && !args.enc_mask;
    return is_first ? take_sample(launcher, job, step, &args, stream) : 0;
}

static int issue_vendor(struct gb_launcher *launcher, struct gb_job *job, const struct gb_step *step, void *stream)
{
    const struct gb_dev_op *op = job->op;
    if (!op->ccl) return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "a vendor step without a vendor communicator");
    if (step->nparts > launcher->parts_capacity) {
        struct gb_ccl_part *grown = realloc(launcher->parts, step->nparts * sizeof *grown);
        if (!grown) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a grouped call of %u parts", step->nparts);
        launcher->parts = grown;
        launcher->parts_capacity = step->nparts;
    }
    for (uint32_t k = 0; k < step->nparts; k++) {
        const struct gb_part *part = &op->plan->parts[step->part + k];
        launcher->parts[k] = (struct gb_ccl_part){.buf = address(op, &part->ref),
                                                  .bytes = part->bytes,
                                                  .peer = (int32_t)part->peer,
                                                  .is_recv = part->is_recv};
    }
    job->set->issued[QUEUE_VENDOR] += VENDOR_ENTRIES;
    return gb_ccl_exchange(op->ccl, launcher->parts, (int)step->nparts, stream);
}

/* A message goes to the device from where it is.  A stream that holds the copy before that is known gets a copy from
 * where it was last time, and a kernel, which looks when its turn has come and does what the guess has not done.  (The
 * copy engines leave the processors to training, and are shared by processes without taking turns.) */
static int issue_landing(struct gb_launcher *launcher, struct gb_job *job, uint32_t index, void *stream)
{
    const struct gb_dev_op *op = job->op;
    const struct gb_step *step = &op->plan->steps[index];
    void *to = address(op, &step->dst), *from = (void *)&op->where[op->landing[index]];
    uint64_t bytes = step->bytes;
    if (launcher->gated) {
        uint64_t guess = atomic_load_explicit(&op->guess[op->landing[index]], memory_order_relaxed);
        void *params[] = {&to, &from, &bytes, &guess};
        if (guess) {
            GB_TRY(gb_stream_copy(launcher->device, to, (const void *)(uintptr_t)guess, bytes, stream));
            job->set->issued[QUEUE_IN]++;
        }
        return launch(launcher, stream, launcher->fetch, bytes, MAX_BLOCKS, params);
    }
    const uint64_t at = atomic_load_explicit(&op->where[op->landing[index]], memory_order_relaxed);
    if (!at) return 0; /* given up just now */
    return gb_stream_copy(launcher->device, to, (const void *)(uintptr_t)at, bytes, stream);
}

static int issue_work(struct gb_launcher *launcher, struct gb_job *job, uint32_t index, void *stream)
{
    const struct gb_dev_op *op = job->op;
    const struct gb_step *step = &op->plan->steps[index];
    switch (step->kind) {
    case GB_STEP_COPY:
        if (!step->bytes) return 0;
        if (op->landing && op->landing[index] != GB_NO_STEP) return issue_landing(launcher, job, index, stream);
        return gb_stream_copy(launcher->device, address(op, &step->dst), address(op, &step->src), step->bytes, stream);
    case GB_STEP_REDUCE:
        return step->count ? issue_reduce(launcher, job, step, stream) : 0;
    case GB_STEP_VENDOR:
        return step->nparts ? issue_vendor(launcher, job, step, stream) : 0;
    default:
        return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "step kind %u is not for a device", step->kind);
    }
}

/* Tells those who wait for the step: an event for other streams and, gate off, for the launcher; a flag for the
 * network. */
static int announce(struct gb_launcher *launcher, struct gb_job *job, uint32_t index, int queue)
{
    void *const stream = job->set->stream[queue];
    const int watched = job->info[index] & STEP_FLAG;
    if ((job->info[index] & STEP_EVENT) || (watched && !launcher->gated)) {
        GB_TRY(gb_launch_event_get(launcher, &job->event[index]));
        GB_TRY(gb_event_record(launcher->device, job->event[index], stream));
        job->set->issued[queue]++;
    }
    if (watched && launcher->gated) {
        GB_TRY(gb_stream_write_flag(launcher->device, stream, (void *)&job->op->flags[index], 1));
        job->set->issued[queue]++;
    }
    return 0;
}

static int mark(struct gb_launcher *launcher, struct gb_set *set, int queue)
{
    if (!launcher->gated || set->issued[queue] - set->marked[queue] < MARK_ENTRIES) return 0;
    set->marked[queue] = ++set->issued[queue];
    return gb_stream_write_flag(launcher->device, set->stream[queue], (void *)&set->retired[queue], set->issued[queue]);
}

static int issue(struct gb_launcher *launcher, struct gb_job *job, uint32_t index, int queue)
{
    const struct gb_step *step = &job->op->plan->steps[index];
    GB_TRY(begin(launcher, job, queue));
    GB_TRY(wait_for(launcher, job, step, queue));
    GB_TRY(issue_work(launcher, job, index, job->set->stream[queue]));
    job->set->issued[queue]++;
    GB_TRY(announce(launcher, job, index, queue));
    return mark(launcher, job->set, queue);
}

/* ---- the end of a job ---- */

static int join(struct gb_launcher *launcher, struct gb_job *job)
{
    void *const last = job->set->stream[QUEUE_IN];
    for (int q = 0; q < QUEUES; q++) {
        if (q == QUEUE_IN || !job->begun[q]) continue;
        GB_TRY(gb_event_record(launcher->device, job->joined[q], job->set->stream[q]));
        GB_TRY(gb_stream_wait_event(launcher->device, last, job->joined[q]));
        job->set->issued[q]++;
        job->set->issued[QUEUE_IN]++;
    }
    return 0;
}

/* The host has made the shadow of the output NaN; the copies that bring it in may have been left out. */
static int copy_outputs(struct gb_launcher *launcher, struct gb_job *job)
{
    const struct gb_plan *plan = job->op->plan;
    for (uint32_t i = 0; i < plan->nsteps; i++) {
        const struct gb_step *step = &plan->steps[i];
        if (step->kind != GB_STEP_COPY || step->dst.buf != GB_BUF_OUT) continue;
        GB_TRY(issue_work(launcher, job, i, job->set->stream[QUEUE_IN]));
        job->set->issued[QUEUE_IN]++;
    }
    return 0;
}

/* Gate on, always: waiting streams are let go by the done event, so the poison must stand before it.  Gate off: only
 * when the operation has been given up already, for nothing waits yet. */
static int poison(struct gb_launcher *launcher, struct gb_job *job)
{
    const int given_up = atomic_load(&job->given_up);
    if (job->op->poison_is_host) return given_up ? copy_outputs(launcher, job) : 0;
    if (!launcher->has_kernels) return 0; /* a message: the host has its data before the copy starts */
    _Atomic uint32_t *word = atomic_load(&job->poison);
    void *out = (void *)job->out_low, *seen = (void *)word;
    uint64_t bytes = job->out_high - job->out_low;
    void *params[] = {&out, &bytes, &seen};
    if (!bytes || (!launcher->gated && !given_up)) return 0;
    if (given_up) atomic_store(word, 1); /* who gave it up may not have come so far */
    job->set->issued[QUEUE_IN]++;
    return launch(launcher, job->set->stream[QUEUE_IN], launcher->poison, bytes, MAX_BLOCKS, params);
}

static int end(struct gb_launcher *launcher, struct gb_job *job)
{
    struct gb_dev_op *op = job->op;
    void *const stream = job->set->stream[QUEUE_IN];
    GB_TRY(begin(launcher, job, QUEUE_IN));
    GB_TRY(join(launcher, job));
    if (op->counts.queues) {
        const uint64_t bytes = GB_CODED_QUEUES * GB_CODEC_STATS * sizeof *op->counts.host;
        GB_TRY(gb_stream_copy(launcher->device, op->counts.host, op->counts.device, bytes, stream));
        job->set->issued[QUEUE_IN]++;
    }
    GB_TRY(poison(launcher, job));
    GB_TRY(gb_event_record(launcher->device, job->done, stream));
    op->done = job->done;
    op->issued_ns = gb_now_ns();
    atomic_store_explicit(&op->enqueued, 1, memory_order_release);
    job->set->issued[QUEUE_IN] += 2;
    GB_TRY(mark(launcher, job->set, QUEUE_IN));
    /* The very last entry, and the last use of `op`: the engine may take it away as soon as the flag is seen. */
    return launcher->gated ? gb_stream_write_flag(launcher->device, stream, (void *)&op->flags[job->nsteps], 1) : 0;
}

/* ---- moving on ---- */

/* Gate off: flags of device steps whose events have passed.  Events of one stream pass in order. */
static int poll_events(struct gb_launcher *launcher, struct gb_job *job)
{
    const struct gb_plan *plan = job->op->plan;
    int found = 0;
    for (int q = 0; q < QUEUES; q++)
        for (; job->watch[q] < job->cursor[q]; job->watch[q]++) {
            const uint32_t index = job->watch[q];
            const struct gb_step *step = &plan->steps[index];
            if (gb_launch_is_net(step) || gb_launch_queue(step) != q || !(job->info[index] & STEP_FLAG)) continue;
            if (!job->event[index]) continue;
            int rc = gb_event_query(launcher->device, job->event[index]);
            if (rc == GPUBRIDGE_AGAIN) break;
            if (rc) {
                gb_job_fail(launcher, job, rc);
                return 1;
            }
            atomic_store_explicit(&job->op->flags[index], 1, memory_order_release);
            found = 1;
        }
    if (found) launcher->wake(launcher->wake_arg);
    return found;
}

/* The next step of a queue; nsteps when there is none. */
static uint32_t next_of(struct gb_job *job, int queue)
{
    const struct gb_plan *plan = job->op->plan;
    uint32_t index = job->cursor[queue];
    if (!job->left[queue]) index = job->nsteps;
    while (index < job->nsteps &&
           (gb_launch_is_net(&plan->steps[index]) || gb_launch_queue(&plan->steps[index]) != queue))
        index++;
    job->cursor[queue] = index;
    return index;
}

/* 1 when the queue's next step was issued. */
static int advance_queue(struct gb_launcher *launcher, struct gb_job *job, int queue)
{
    const uint32_t index = next_of(job, queue);
    if (index == job->nsteps || atomic_load(&job->given_up)) return 0;
    if (launcher->gated && pending(job->set, queue) >= WINDOW_ENTRIES) return 0;
    if (!dependencies_hold(launcher, job, &job->op->plan->steps[index])) return 0;
    if (!earlier_jobs_allow(launcher, job, queue)) return 0;
    int rc = issue(launcher, job, index, queue);
    job->cursor[queue] = index + 1;
    job->left[queue]--;
    if (rc) gb_job_fail(launcher, job, rc);
    return 1;
}

/* Gate on: strictly in array order over all queues.  What is in the streams is then a prefix of the plan, which on
 * every rank can end with no more than prefixes of the others' plans: a driver call that is held off until the device
 * is idle (cudaFree in another thread) ends, however far the windows of the ranks have come.  Gate off: each queue by
 * itself. */
static int advance_steps(struct gb_launcher *launcher, struct gb_job *job)
{
    int found = 0, again = 1;
    while (again) {
        int first = QUEUE_OUT;
        again = 0;
        for (int q = 0; q < QUEUES; q++) {
            if (!launcher->gated) again |= advance_queue(launcher, job, q);
            if (next_of(job, q) < next_of(job, first)) first = q;
        }
        if (launcher->gated) again = advance_queue(launcher, job, first);
        found |= again;
    }
    return found;
}

/* The host says that the operation is finished on the device.  Its owner may take `op` away from then on. */
static void job_done(struct gb_launcher *launcher, struct gb_job *job)
{
    pthread_mutex_lock(&launcher->lock);
    job->state = JOB_DONE;
    atomic_store_explicit(&job->op->flags[job->nsteps], 1, memory_order_release);
    pthread_mutex_unlock(&launcher->lock);
    launcher->wake(launcher->wake_arg);
}

/* The streams do not answer any more: nothing of the operation runs. */
static void end_dead(struct gb_launcher *launcher, struct gb_job *job, int status)
{
    gb_job_fail(launcher, job, status);
    job_done(launcher, job);
}

static int may_end(struct gb_launcher *launcher, struct gb_job *job)
{
    if (left_of(job) && !atomic_load(&job->given_up)) return 0;
    return earlier_jobs_allow(launcher, job, QUEUE_IN);
}

/* Nothing is left to issue: the last entries.  What was not issued never will be. */
static int finish(struct gb_launcher *launcher, struct gb_job *job)
{
    for (int q = 0; q < QUEUES; q++) job->left[q] = 0;
    int rc = job->set ? end(launcher, job) : GPUBRIDGE_ERR_DEVICE;
    if (rc) {
        end_dead(launcher, job, rc);
        return 1;
    }
    pthread_mutex_lock(&launcher->lock);
    job->state = JOB_ISSUED;
    pthread_mutex_unlock(&launcher->lock);
    return 1;
}

static int poll_done(struct gb_launcher *launcher, struct gb_job *job)
{
    int rc = gb_event_query(launcher->device, job->done);
    if (rc == GPUBRIDGE_AGAIN) return 0;
    if (rc) {
        end_dead(launcher, job, rc);
        return 1;
    }
    /* All events came before this one; some had not passed when they were looked at. */
    for (uint32_t i = 0; i < job->nsteps; i++)
        if (job->info[i] & STEP_FLAG) atomic_store_explicit(&job->op->flags[i], 1, memory_order_release);
    job_done(launcher, job);
    return 1;
}

int gb_job_advance(struct gb_launcher *launcher, struct gb_job *job)
{
    int found = 0;
    if (job->state == JOB_ISSUED && !launcher->gated) return poll_events(launcher, job) | poll_done(launcher, job);
    if (job->state != JOB_RUNNING) return 0;
    if (!job->is_prepared) {
        int rc = gb_job_prepare(launcher, job);
        job->is_prepared = 1;
        if (rc) gb_job_fail(launcher, job, rc);
        found = 1;
    }
    found |= advance_steps(launcher, job);
    if (!launcher->gated) found |= poll_events(launcher, job);
    if (may_end(launcher, job)) found |= finish(launcher, job);
    return found;
}

int gb_job_needs_polling(const struct gb_launcher *launcher, const struct gb_job *job)
{
    if (launcher->gated) return job->state == JOB_RUNNING;
    if (job->state == JOB_ISSUED) return 1;
    for (int q = 0; q < QUEUES; q++)
        if (job->watch[q] < job->cursor[q]) return 1;
    return 0;
}

void gb_job_check(struct gb_launcher *launcher, struct gb_job *job)
{
    int rc = job->state == JOB_ISSUED ? gb_event_query(launcher->device, job->done) : 0;
    if (!rc || rc == GPUBRIDGE_AGAIN) return;
    pthread_mutex_lock(&launcher->lock);
    int gone = job->is_released;
    pthread_mutex_unlock(&launcher->lock);
    if (!gone) end_dead(launcher, job, rc);
}
