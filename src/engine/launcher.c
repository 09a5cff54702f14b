/* SPDX-License-Identifier: Apache-2.0
 * The launcher thread: takes commands in order and moves jobs on until everything is in the streams.  What one step
 * needs is in launch_step.c. */
#include "engine/launch.h"

#include "base/clock.h"
#include "base/log.h"
#include "codec/kernels.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define CHECK_NS 100000000 /* between looks for a failed device while jobs are in the streams */
#define IDLE_NS  900000000 /* between such looks while nothing is known to be in them */
#define SPINS    50        /* passes without a pause while events are pending */
#define PAUSE_NS 20000

#define CODED_BYTES (GB_CODEC_STATS * sizeof(uint64_t))

/* ---- opening: on the launcher thread, since contexts and modules are bound to threads ---- */

/* First uses may load code or start threads inside the driver, and would then wait for closed flags: now nothing waits.
 */
static int warm_up(struct gb_launcher *launcher)
{
    struct gb_device *device = launcher->device;
    struct gb_set *set = NULL;
    void *event = NULL, *scrap = gb_device_scrap(device);
    uint64_t none = 0;
    struct gb_reduce_args args = {.dst = scrap, .src = {scrap}, .nsrc = 1};
    GB_TRY(gb_set_get(launcher, UINT32_MAX, &set));
    void *word = (void *)set->retired, *reduce[] = {&args}, *poison[] = {&scrap, &none, &word},
         *fetch[] = {&scrap, &word, &none, &none};
    void *const stream = set->stream[QUEUE_IN];
    GB_TRY(gb_launch_event_get(launcher, &event));
    if (launcher->has_kernels) {
        for (int way = 0; way < GB_REDUCE_WAYS; way++)
            GB_TRY(gb_stream_launch(device, stream, launcher->reduce[way], 1, 32, reduce));
        GB_TRY(gb_stream_launch(device, stream, launcher->poison, 1, 32, poison));
    }
    if (launcher->fetch) GB_TRY(gb_stream_launch(device, stream, launcher->fetch, 1, 32, fetch));
    GB_TRY(gb_stream_copy(device, word, scrap, sizeof(uint32_t), stream));
    GB_TRY(gb_stream_copy(device, scrap, word, sizeof(uint32_t), stream));
    GB_TRY(gb_stream_copy(device, scrap, launcher->zeros, sizeof(uint32_t), stream));
    if (launcher->gated) {
        GB_TRY(gb_stream_write_flag(device, stream, word, 1));
        GB_TRY(gb_stream_wait_flag(device, stream, word, 1));
    }
    GB_TRY(gb_event_record(device, event, stream));
    GB_TRY(gb_stream_wait_event(device, set->stream[QUEUE_OUT], event));
    int rc;
    while ((rc = gb_event_query(device, event)) == GPUBRIDGE_AGAIN) sched_yield();
    gb_launcher_forget(launcher, event);
    launcher->sets = set->next;
    gb_set_destroy(launcher, set);
    return rc;
}

static int load_kernels(struct gb_launcher *launcher)
{
    GB_TRY(gb_module_build(launcher->device, gb_kernels_source, &launcher->module));
    for (int way = 0; way < GB_REDUCE_WAYS; way++)
        GB_TRY(gb_module_kernel(launcher->device, launcher->module, gb_kernel_names[way], &launcher->reduce[way]));
    return gb_module_kernel(launcher->device, launcher->module, "gb_poison", &launcher->poison);
}

/* Only streams that hold copies in advance need it. */
static int load_fetch(struct gb_launcher *launcher)
{
    if (!launcher->gated) return 0;
    GB_TRY(gb_module_build(launcher->device, gb_fetch_source, &launcher->fetch_module));
    return gb_module_kernel(launcher->device, launcher->fetch_module, "gb_fetch", &launcher->fetch);
}

static int open_device(struct gb_launcher *launcher)
{
    GB_TRY(gb_device_bind(launcher->device));
    launcher->has_kernels = load_kernels(launcher) == 0;
    if (!launcher->has_kernels)
        GB_WARN("sums are made in host memory, far slower, since the kernels could not be compiled: %s", gb_err_text());
    else if (load_fetch(launcher) != 0)
        GB_WARN("messages of peers on this host are copied: %s", gb_err_text());
    launcher->zeros = gb_launch_keep(launcher, CODED_BYTES);
    if (!launcher->zeros) return GPUBRIDGE_ERR_NO_MEMORY;
    memset(launcher->zeros, 0, CODED_BYTES);
    return warm_up(launcher);
}

static void close_device(struct gb_launcher *launcher)
{
    while (launcher->sets) {
        struct gb_set *set = launcher->sets;
        launcher->sets = set->next;
        gb_set_destroy(launcher, set);
    }
    gb_launch_events_fini(launcher);
    gb_launch_share_fini(launcher);
    gb_launch_unkeep(launcher, launcher->zeros, CODED_BYTES);
    gb_module_destroy(launcher->device, launcher->fetch_module);
    gb_module_destroy(launcher->device, launcher->module);
    gb_launch_pool_fini(&launcher->stage);
    gb_launch_pool_fini(&launcher->host);
    gb_launch_pool_fini(&launcher->mem);
}

/* ---- the thread ---- */

static void append_job(struct gb_job **at, struct gb_job *job)
{
    while (*at) at = &(*at)->next;
    job->next = NULL;
    *at = job;
}

/* Runs the calls and lists the jobs that are next; lock held.  Returns 1 when there was any. */
static int take_commands(struct gb_launcher *launcher)
{
    int found = 0;
    while (launcher->commands) {
        struct gb_command command = *launcher->commands, *node = launcher->commands;
        launcher->commands = node->next;
        if (!launcher->commands) launcher->commands_tail = &launcher->commands;
        node->next = launcher->spare_commands;
        launcher->spare_commands = node;
        found = 1;
        if (command.job) {
            append_job(&launcher->jobs, command.job);
            continue;
        }
        pthread_mutex_unlock(&launcher->lock);
        command.fn(command.arg);
        pthread_mutex_lock(&launcher->lock);
    }
    return found;
}

static int wants_pass(const struct gb_launcher *launcher, const struct gb_job *job, int check)
{
    return job->state == JOB_RUNNING || (job->state == JOB_ISSUED && (!launcher->gated || check));
}

/* Pins the jobs of this pass: a pinned job that is released stays until unpin. */
static uint32_t pin_jobs(struct gb_launcher *launcher, int check)
{
    uint32_t count = 0;
    for (struct gb_job *job = launcher->jobs; job; job = job->next) {
        if (job->is_released || !wants_pass(launcher, job, check)) continue;
        if (count == launcher->active_capacity) {
            uint32_t capacity = count ? count * 2 : 64;
            struct gb_job **grown = realloc(launcher->active, capacity * sizeof *grown);
            if (!grown) break; /* the others have their turn when these are gone */
            launcher->active = grown;
            launcher->active_capacity = capacity;
        }
        job->is_pinned = 1;
        launcher->active[count++] = job;
    }
    return count;
}

static void unpin_jobs(struct gb_launcher *launcher, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        launcher->active[i]->is_pinned = 0;
        if (launcher->active[i]->is_released) gb_job_put(launcher, launcher->active[i]);
    }
}

/* One look at all jobs, without the lock.  Returns 1 when something moved; *polling: look again soon by yourself. */
static int pass(struct gb_launcher *launcher, uint32_t count, int check, int *polling)
{
    int found = 0;
    *polling = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct gb_job *job = launcher->active[i];
        found |= gb_job_advance(launcher, job);
        if (check) gb_job_check(launcher, job);
        *polling |= gb_job_needs_polling(launcher, job);
    }
    return found;
}

static int has_issued(const struct gb_launcher *launcher)
{
    for (const struct gb_job *job = launcher->jobs; job; job = job->next)
        if (job->state == JOB_ISSUED && !job->is_released) return 1;
    return 0;
}

static void pause_ns(long ns)
{
    struct timespec ts = {.tv_nsec = ns};
    (void)nanosleep(&ts, NULL);
}

/* Sleeps until a command, a kick, or the time to look at the device (submitting threads issue without a word to this
 * one, so now and then also when it knows of nothing); lock held. */
static void sleep_locked(struct gb_launcher *launcher, uint32_t kicks)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += has_issued(launcher) ? CHECK_NS : IDLE_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    atomic_store(&launcher->sleeping, 1);
    while (!launcher->commands && !launcher->stopping && atomic_load(&launcher->kicks) == kicks)
        if (pthread_cond_timedwait(&launcher->cond, &launcher->lock, &until) == ETIMEDOUT) break;
    atomic_store(&launcher->sleeping, 0);
}

static void run(struct gb_launcher *launcher)
{
    uint64_t checked = gb_now_ns();
    int idle = 0, stopping = 0;
    while (!stopping) {
        pthread_mutex_lock(&launcher->issuing);
        pthread_mutex_lock(&launcher->lock);
        uint32_t kicks = atomic_load(&launcher->kicks);
        int polling, found = take_commands(launcher), check = gb_now_ns() - checked >= CHECK_NS;
        if (check) checked = gb_now_ns();
        uint32_t count = pin_jobs(launcher, check);
        pthread_mutex_unlock(&launcher->lock);
        found |= pass(launcher, count, check, &polling);
        pthread_mutex_lock(&launcher->lock);
        unpin_jobs(launcher, count);
        pthread_mutex_unlock(&launcher->issuing);
        if (!found && !polling) sleep_locked(launcher, kicks);
        stopping = launcher->stopping && !launcher->commands;
        pthread_mutex_unlock(&launcher->lock);
        idle = found ? 0 : idle + 1;
        if (polling && idle > SPINS) pause_ns(PAUSE_NS);
    }
}

static void *thread_main(void *arg)
{
    struct gb_launcher *launcher = arg;
    (void)prctl(PR_SET_TIMERSLACK, 1000ul); /* the default makes 70 us of a pause of 20 */
    int rc = open_device(launcher);
    pthread_mutex_lock(&launcher->lock);
    launcher->opened = 1;
    launcher->open_status = rc;
    if (rc) snprintf(launcher->open_text, sizeof launcher->open_text, "%s", gb_err_text());
    pthread_cond_broadcast(&launcher->cond);
    pthread_mutex_unlock(&launcher->lock);
    if (!rc) run(launcher);
    close_device(launcher);
    return NULL;
}

/* ---- the calls of launcher.h ---- */

static void launcher_free(struct gb_launcher *launcher)
{
    for (struct gb_job *job = launcher->spare_jobs; job;) {
        struct gb_job *next = job->free_next;
        gb_job_free(job);
        job = next;
    }
    for (struct gb_command *command = launcher->spare_commands; command;) {
        struct gb_command *next = command->next;
        free(command);
        command = next;
    }
    pthread_cond_destroy(&launcher->cond);
    pthread_mutex_destroy(&launcher->lock);
    pthread_mutex_destroy(&launcher->issuing);
    free(launcher->active);
    free((void *)launcher->borrowed);
    free(launcher->parts);
    free(launcher);
}

static void init_sync(struct gb_launcher *launcher)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&launcher->cond, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&launcher->lock, NULL);
    pthread_mutex_init(&launcher->issuing, NULL);
}

int gb_launcher_open(struct gb_device *device, int gate, void (*wake)(void *), void *wake_arg, struct gb_launcher **out)
{
    const struct gb_device_info *info = gb_device_info(device);
    if (gate && !info->has_stream_flags)
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "streams of %s cannot wait for flags safely: use GPUBRIDGE_GATE=off",
                       info->name);
    struct gb_launcher *launcher = calloc(1, sizeof *launcher);
    if (!launcher) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a launcher");
    launcher->device = device;
    launcher->gated = gate != 0;
    launcher->wake = wake;
    launcher->wake_arg = wake_arg;
    launcher->commands_tail = &launcher->commands;
    init_sync(launcher);
    gb_launch_pool_init(&launcher->mem, device, GB_POOL_DEVICE);
    gb_launch_pool_init(&launcher->host, device, GB_POOL_HOST);
    gb_launch_pool_init(&launcher->stage, device, GB_POOL_STAGE);
    int rc = pthread_create(&launcher->thread, NULL, thread_main, launcher);
    if (rc) {
        launcher_free(launcher);
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "cannot start the launcher thread: %s", strerror(rc));
    }
    pthread_mutex_lock(&launcher->lock);
    while (!launcher->opened) pthread_cond_wait(&launcher->cond, &launcher->lock);
    rc = launcher->open_status;
    pthread_mutex_unlock(&launcher->lock);
    if (rc) {
        gb_err_put(launcher->open_text);
        pthread_join(launcher->thread, NULL);
        launcher_free(launcher);
        return rc;
    }
    *out = launcher;
    return 0;
}

void gb_launcher_close(struct gb_launcher *launcher)
{
    if (!launcher) return;
    pthread_mutex_lock(&launcher->lock);
    launcher->stopping = 1;
    pthread_cond_signal(&launcher->cond);
    pthread_mutex_unlock(&launcher->lock);
    pthread_join(launcher->thread, NULL);
    launcher_free(launcher);
}

/* Lock held.  A command that cannot be queued would be lost in silence: the process is out of memory, so it ends. */
static void push_command(struct gb_launcher *launcher, struct gb_command command)
{
    struct gb_command *node = launcher->spare_commands;
    if (node) launcher->spare_commands = node->next;
    if (!node) node = malloc(sizeof *node);
    if (!node) abort();
    *node = command;
    node->next = NULL;
    *launcher->commands_tail = node;
    launcher->commands_tail = &node->next;
    pthread_cond_signal(&launcher->cond);
}

void gb_launcher_start(struct gb_launcher *launcher, struct gb_dev_op *op)
{
    struct gb_job *job = gb_job_get(launcher, op);
    if (!job) {
        snprintf(op->text, sizeof op->text, "no memory for a launcher job");
        atomic_store_explicit(&op->status, GPUBRIDGE_ERR_NO_MEMORY, memory_order_release);
        atomic_store_explicit(&op->flags[op->plan->nsteps], 1, memory_order_release);
        return;
    }
    op->priv = job;
    pthread_mutex_lock(&launcher->lock);
    if (launcher->holding)
        append_job(&launcher->held, job);
    else
        push_command(launcher, (struct gb_command){.job = job});
    pthread_mutex_unlock(&launcher->lock);
}

void gb_launcher_hold(struct gb_launcher *launcher)
{
    pthread_mutex_lock(&launcher->lock);
    launcher->holding = 1;
    pthread_mutex_unlock(&launcher->lock);
}

void gb_launcher_unhold(struct gb_launcher *launcher)
{
    pthread_mutex_lock(&launcher->lock);
    launcher->holding = 0;
    while (launcher->held) {
        struct gb_job *job = launcher->held;
        launcher->held = job->next;
        push_command(launcher, (struct gb_command){.job = job});
    }
    pthread_mutex_unlock(&launcher->lock);
}

/* A released job is off the device, and its operation may be gone. */
static int has_ended(const struct gb_job *job)
{
    const struct gb_dev_op *op = job->op;
    return job->is_released || atomic_load_explicit(&op->flags[op->plan->nsteps], memory_order_acquire);
}

int gb_launcher_is_idle(struct gb_launcher *launcher)
{
    int idle = 1;
    pthread_mutex_lock(&launcher->lock);
    for (const struct gb_command *command = launcher->commands; command; command = command->next) idle &= !command->job;
    for (const struct gb_job *job = launcher->jobs; job && idle; job = job->next) idle = has_ended(job);
    pthread_mutex_unlock(&launcher->lock);
    return idle;
}

int gb_launcher_claim(struct gb_launcher *launcher, struct gb_dev_op *op)
{
    if (!launcher->gated || pthread_mutex_trylock(&launcher->issuing)) return 0;
    struct gb_job *job = gb_job_get(launcher, op);
    pthread_mutex_lock(&launcher->lock);
    int free_now = job && !launcher->commands && !launcher->holding && !launcher->stopping;
    if (free_now) {
        job->is_pinned = 1;
        append_job(&launcher->jobs, job);
        op->priv = job;
    } else if (job) {
        job->ready = NULL; /* stays with `op` */
        gb_job_put(launcher, job);
    }
    pthread_mutex_unlock(&launcher->lock);
    if (!free_now) pthread_mutex_unlock(&launcher->issuing);
    return free_now;
}

/* `op` may have ended, and its owner gone on, as soon as its last entry is in a stream: only the pinned job is used. */
static void issue_claimed(struct gb_launcher *launcher, struct gb_job *job)
{
    struct gb_device_saved saved;
    if (gb_device_enter(launcher->device, &saved) == 0) {
        (void)gb_job_advance(launcher, job);
        gb_device_leave(launcher->device, &saved);
    }
    pthread_mutex_lock(&launcher->lock);
    job->is_pinned = 0;
    int is_left = job->state == JOB_RUNNING; /* for the launcher thread */
    if (job->is_released && !is_left) gb_job_put(launcher, job);
    if (is_left) {
        atomic_fetch_add(&launcher->kicks, 1);
        pthread_cond_signal(&launcher->cond);
    }
    pthread_mutex_unlock(&launcher->lock);
    pthread_mutex_unlock(&launcher->issuing);
}

void gb_launcher_issue(struct gb_launcher *launcher, struct gb_dev_op *op)
{
    issue_claimed(launcher, op->priv);
}

int gb_launcher_is_gated(const struct gb_launcher *launcher)
{
    return launcher->gated;
}

int gb_launcher_has_kernels(const struct gb_launcher *launcher)
{
    return launcher->has_kernels;
}

void gb_launcher_kick(struct gb_launcher *launcher)
{
    if (launcher->gated) return; /* the streams look at the flags themselves */
    atomic_fetch_add(&launcher->kicks, 1);
    if (!atomic_load(&launcher->sleeping)) return;
    pthread_mutex_lock(&launcher->lock);
    pthread_cond_signal(&launcher->cond);
    pthread_mutex_unlock(&launcher->lock);
}

void gb_launcher_abort(struct gb_launcher *launcher, struct gb_dev_op *op)
{
    struct gb_job *job = op->priv;
    if (!job) return;
    gb_job_give_up(job);
    pthread_mutex_lock(&launcher->lock);
    atomic_fetch_add(&launcher->kicks, 1);
    pthread_cond_signal(&launcher->cond);
    pthread_mutex_unlock(&launcher->lock);
}

void gb_launcher_release(struct gb_launcher *launcher, struct gb_dev_op *op)
{
    struct gb_job *job = op->priv;
    pthread_mutex_lock(&launcher->lock);
    if (!job) {
        gb_launch_event_put(launcher, op->ready);
    } else if (job->state == JOB_RUNNING || job->is_pinned) {
        job->is_released = 1;
    } else {
        gb_job_put(launcher, job);
    }
    op->ready = op->priv = NULL;
    pthread_mutex_unlock(&launcher->lock);
}

void gb_launcher_call(struct gb_launcher *launcher, void (*fn)(void *arg), void *arg)
{
    pthread_mutex_lock(&launcher->lock);
    push_command(launcher, (struct gb_command){.fn = fn, .arg = arg});
    pthread_mutex_unlock(&launcher->lock);
}

struct drop {
    struct gb_launcher *launcher;
    uint32_t set;
};

static void drop_set(void *arg)
{
    struct drop *drop = arg;
    for (struct gb_set **at = &drop->launcher->sets; *at; at = &(*at)->next) {
        struct gb_set *set = *at;
        if (set->id != drop->set) continue;
        *at = set->next;
        gb_set_destroy(drop->launcher, set);
        break;
    }
    free(drop);
}

void gb_launcher_drop_set(struct gb_launcher *launcher, uint32_t set)
{
    struct drop *drop = malloc(sizeof *drop);
    if (!drop) return; /* the streams stay until the launcher closes */
    *drop = (struct drop){launcher, set};
    gb_launcher_call(launcher, drop_set, drop);
}
