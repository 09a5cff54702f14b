/* SPDX-License-Identifier: Apache-2.0
 * The engine role: who plays it, when it sleeps, and how events reach operations.  Engine thread and waiting user
 * threads. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NEVENTS       64
#define TICK_NS       50000000  /* deadlines and probes */
#define IDLE_NS       200000000 /* the engine thread looks at control traffic this often when nothing is in flight */
#define DEVICE_NAP_NS 20000     /* GPU flags have no file descriptor */
#define RETRY_NS      100000000 /* safety net of futex sleepers */

static void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_ns)
{
    struct timespec ts = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &ts, NULL, 0);
}

static void kick_thread(struct gb_engine *engine)
{
    atomic_fetch_add_explicit(&engine->kick, 1, memory_order_seq_cst);
    syscall(SYS_futex, &engine->kick, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* ---- queues from user threads ---- */

/* Somebody plays the role already: let it see the queue.  Else wake the engine thread, unless the caller will play it.
 */
static void announce_queue(struct gb_engine *engine, int caller_plays)
{
    atomic_store_explicit(&engine->queued, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&engine->sleeping, memory_order_seq_cst))
        gb_net_wake(engine->config.net);
    else if (!caller_plays)
        kick_thread(engine);
}

void gb_engine_push(struct gb_engine *engine, struct gb_op *op, int run)
{
    atomic_fetch_add_explicit(&engine->inflight, 1, memory_order_relaxed);
    pthread_mutex_lock(&engine->queue_lock);
    op->next = NULL;
    if (engine->queue_tail)
        engine->queue_tail->next = op;
    else
        engine->queue_head = op;
    engine->queue_tail = op;
    pthread_mutex_unlock(&engine->queue_lock);
    announce_queue(engine, run);
}

static int drain_queues(struct gb_engine *engine)
{
    if (!atomic_exchange_explicit(&engine->queued, 0, memory_order_seq_cst)) return 0;
    pthread_mutex_lock(&engine->queue_lock);
    struct gb_op *op = engine->queue_head;
    struct gb_call *call = engine->calls_head;
    engine->queue_head = engine->queue_tail = NULL;
    engine->calls_head = engine->calls_tail = NULL;
    pthread_mutex_unlock(&engine->queue_lock);
    while (op) {
        struct gb_op *next = op->next;
        gb_op_admit(op);
        op = next;
    }
    while (call) {
        struct gb_call *next = call->next;
        call->fn(call->arg);
        atomic_store_explicit(&call->done, 1, memory_order_release);
        syscall(SYS_futex, &call->done, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
        call = next;
    }
    return 1;
}

/* ---- events ---- */

struct gb_group *gb_engine_find_group(struct gb_engine *engine, uint64_t id)
{
    struct gb_group *group = engine->groups;
    while (group && group->id != id) group = group->next;
    return group;
}

static void unexpected(struct gb_engine *engine, const struct gb_net_event *event)
{
    struct gb_group *group = gb_engine_find_group(engine, event->key.group);
    if (!group) return; /* the message waits at its link: add_group asks for it */
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (group->links[rank] != event->link) continue;
        gb_p2p_unexpected(group, (int32_t)rank, event);
        return;
    }
}

static void dispatch(struct gb_engine *engine, const struct gb_net_event *event)
{
    const struct gb_engine_hooks *hooks = &engine->config.hooks;
    switch (event->kind) {
    case GB_NET_DONE:
        gb_op_message_done(event->cookie, event);
        break;
    case GB_NET_LINK_UP:
        break;
    case GB_NET_PEER_LEFT:
    case GB_NET_PEER_LOST:
        hooks->peer(hooks->arg, event->link, event->kind == GB_NET_PEER_LEFT, event->status, event->text);
        break;
    case GB_NET_CTRL:
        hooks->ctrl(hooks->arg, event->link, event->data, event->bytes);
        break;
    case GB_NET_REGION:
        if (engine->config.launcher)
            gb_launcher_take_region(engine->config.launcher, event->cookie);
        else
            gb_region_answer(event->cookie, GB_REGION_UNWANTED);
        break;
    case GB_NET_RETURNED:
        gb_launcher_stage_back(engine->config.launcher, event->data);
        break;
    case GB_NET_UNEXPECTED:
        unexpected(engine, event);
        break;
    }
}

static void settle_groups(struct gb_engine *engine)
{
    for (struct gb_group *group = engine->groups; group; group = group->next) {
        if (!group->needs_settle) continue;
        group->needs_settle = 0;
        struct gb_op *next;
        for (struct gb_op *op = group->ops_head; op; op = next) {
            next = op->next;
            gb_op_settle(op);
        }
    }
}

static int message_text(const struct gb_group *group, const struct gb_op *op, char *text, size_t capacity)
{
    const char *peer = op->is_any && !op->is_posted ? "anyone" : group->labels[op->source];
    return snprintf(text, capacity, "%s %s with tag %d", op->kind == GPUBRIDGE_SEND ? "receive at" : "send from", peer,
                    op->tag);
}

/* All sends and receives that wait, the late one first: a batch usually hangs on one of many. */
static void unmatched_text(const struct gb_group *group, const struct gb_op *late, char *text, size_t capacity)
{
    const size_t reserve = sizeof ", and 4294967295 more";
    size_t n = (size_t)snprintf(text, capacity, "no matching ");
    unsigned more = 0;
    n += (size_t)message_text(group, late, text + n, capacity - n);
    for (const struct gb_op *op = group->ops_head; op; op = op->next) {
        char one[200];
        if (op == late || !op->is_p2p || op->is_aborting) continue;
        if (n + (size_t)message_text(group, op, one, sizeof one) + 2 + reserve > capacity)
            more++;
        else
            n += (size_t)snprintf(text + n, capacity - n, ", %s", one);
    }
    if (more && n < capacity) snprintf(text + n, capacity - n, ", and %u more", more);
}

static const char *direction(const struct gb_op *op)
{
    return !op->is_p2p ? "" : op->kind == GPUBRIDGE_SEND ? "SEND of " : "RECV of ";
}

static void missing_text(const struct gb_group *group, const struct gb_op *op, const char *verb, char *text,
                         size_t capacity)
{
    char name[128];
    gb_sig_text(&op->sig, op->key.seq, name, sizeof name);
    const char *what = direction(op);
    int n = snprintf(text, capacity, "%s%s %s after %.1f s on rank %u (a timeout of %.1f s); ", what, name, verb,
                     (double)(gb_now_ns() - op->submit_ns) * 1e-9, group->rank,
                     (double)(op->deadline_ns - (int64_t)op->submit_ns) * 1e-9);
    if (op->is_p2p) {
        unmatched_text(group, op, text + n, capacity - (size_t)n);
        return;
    }
    int missing = 0;
    for (uint32_t r = 0; r < group->size && (size_t)n < capacity; r++) {
        if (r == group->rank || group->arrived[r] == 1) continue;
        n += snprintf(text + n, capacity - (size_t)n, "%s%s",
                      missing++ ? ", " : "not arrived there: ", group->labels[r]);
    }
    if (!missing && (size_t)n < capacity)
        snprintf(text + n, capacity - (size_t)n,
                 "every rank has arrived: the transfer itself does not move (link down or far too slow)");
}

/* A member that left, or stopped amid a message, and no news of anybody who made it do so. */
static void fail_by_leaver(struct gb_group *group, struct gb_op *op)
{
    char name[128], text[480];
    const char *label = op->given_up_ns ? group->labels[op->given_up_by] : "", *what = direction(op);
    gb_sig_text(&op->sig, op->key.seq, name, sizeof name);
    if (group->left_ns && strncmp(group->left_text, label, strlen(label)) == 0)
        snprintf(text, sizeof text, "%s, but %s%s still needs it", group->left_text, what, name);
    else
        snprintf(text, sizeof text, "%s stopped amid a message that %s%s needs, and did not say why: see its log",
                 label, what, name);
    gb_op_fail(op, GPUBRIDGE_ERR_PEER_LOST, text);
}

static void check_deadlines(struct gb_group *group, uint64_t now)
{
    struct gb_op *next;
    for (struct gb_op *op = group->ops_head; op; op = next) {
        next = op->next;
        if (op->is_aborting) continue;
        if ((int64_t)now > op->deadline_ns) {
            char text[480];
            missing_text(group, op, "timed out", text, sizeof text);
            gb_op_fail(op, GPUBRIDGE_ERR_TIMEOUT, text);
            return;
        }
        if (op->is_held) continue; /* fails with what it waits for */
        uint64_t since = group->left_ns > op->progress_ns ? group->left_ns : op->progress_ns;
        if (op->given_up_ns) since = op->given_up_ns;
        if ((group->left_ns || op->given_up_ns) && now - since > GB_NEWS_NS) {
            fail_by_leaver(group, op);
            return;
        }
    }
}

static void tick(struct gb_engine *engine, uint64_t now)
{
    engine->tick_ns = now;
    for (struct gb_group *group = engine->groups; group; group = group->next) check_deadlines(group, now);
    engine->config.hooks.tick(engine->config.hooks.arg, now);
}

/* One round of everything.  Returns whether anything happened.  Engine role. */
static int progress(struct gb_engine *engine)
{
    struct gb_net_event events[NEVENTS];
    int busy = drain_queues(engine);
    int n = gb_net_poll(engine->config.net, events, NEVENTS);
    for (int i = 0; i < n; i++) dispatch(engine, &events[i]);
    busy |= n;
    int moved = engine->staged ? gb_engine_poll_staged(engine) : 0;
    if (moved) engine->config.hooks.device_moved(engine->config.hooks.arg);
    busy |= moved;
    settle_groups(engine);
    return busy;
}

/* Nothing happened since `idle_ns`: yield for a while, then sleep until something can have happened.  While I/O workers
 * move bulk data, yielding would only take the processor from them (measured: 64 MiB over four ranks on two cores took
 * three times as long). */
static void relax(struct gb_engine *engine, uint64_t now, uint64_t idle_ns, int64_t limit_ns)
{
    int workers_move = engine->bulk && !engine->staged;
    if (!workers_move && (int64_t)(now - idle_ns) < engine->config.spin_ns) {
        sched_yield();
        return;
    }
    int64_t nap = engine->staged ? DEVICE_NAP_NS : TICK_NS;
    if (nap > limit_ns) nap = limit_ns;
    atomic_store_explicit(&engine->sleeping, 1, memory_order_seq_cst);
    if (!atomic_load_explicit(&engine->queued, memory_order_seq_cst)) gb_net_wait(engine->config.net, nap);
    atomic_store_explicit(&engine->sleeping, 0, memory_order_seq_cst);
}

/* Plays the role until *word is not `value`, `deadline_ns` passed or (word NULL) nothing is in flight.  Engine role. */
static void play(struct gb_engine *engine, _Atomic uint32_t *word, uint32_t value, int64_t deadline_ns)
{
    uint64_t idle_ns = gb_now_ns();
    for (;;) {
        int busy = progress(engine);
        if (word && atomic_load_explicit(word, memory_order_acquire) != value) return;
        uint64_t now = gb_now_ns();
        if (now - engine->tick_ns > TICK_NS) tick(engine, now);
        if (!word && (!atomic_load_explicit(&engine->inflight, memory_order_relaxed) ||
                      atomic_load_explicit(&engine->stop, memory_order_relaxed)))
            return;
        if ((int64_t)now >= deadline_ns) return;
        if (busy)
            idle_ns = now;
        else
            relax(engine, now, idle_ns, deadline_ns - (int64_t)now);
    }
}

static void leave_role(struct gb_engine *engine)
{
    pthread_mutex_unlock(&engine->role);
    if (atomic_load_explicit(&engine->inflight, memory_order_relaxed) ||
        atomic_load_explicit(&engine->queued, memory_order_relaxed))
        kick_thread(engine);
}

/* Until *word is not `value`: plays the role when it is free, sleeps on the word otherwise. */
static int wait_word(struct gb_engine *engine, _Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *sleepers,
                     int64_t timeout_ns)
{
    int64_t deadline = timeout_ns > 0 ? (int64_t)gb_now_ns() + timeout_ns : INT64_MAX;
    while (atomic_load_explicit(word, memory_order_acquire) == value) {
        int64_t left = deadline == INT64_MAX ? RETRY_NS : deadline - (int64_t)gb_now_ns();
        if (left <= 0) return GPUBRIDGE_ERR_TIMEOUT;
        if (pthread_mutex_trylock(&engine->role) == 0) {
            play(engine, word, value, deadline);
            leave_role(engine);
            continue;
        }
        atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
        futex_wait(word, value, left < RETRY_NS ? left : RETRY_NS);
        atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
    }
    return 0;
}

struct describe_call {
    struct gb_op *op;
    char *text;
    size_t capacity;
};

static void describe(void *arg)
{
    struct describe_call *call = arg;
    /* A finished operation may have outlived its group. */
    if (atomic_load_explicit(&call->op->state, memory_order_acquire) != GB_OP_FINISHED)
        missing_text(call->op->group, call->op, "is not done", call->text, call->capacity);
}

void gb_engine_describe(struct gb_op *op, char *text, size_t capacity)
{
    struct describe_call call = {op, text, capacity};
    text[0] = 0;
    /* Finished: the engine may be gone too. */
    if (atomic_load_explicit(&op->state, memory_order_acquire) != GB_OP_FINISHED)
        gb_engine_call(op->engine, describe, &call);
}

int gb_op_test(struct gb_op *op)
{
    if (atomic_load_explicit(&op->state, memory_order_acquire) != GB_OP_FINISHED) return GPUBRIDGE_AGAIN;
    if (op->status) gb_err_put(op->text);
    return op->status;
}

int gb_engine_wait(struct gb_op *op, int64_t timeout_ns)
{
    if (wait_word(op->engine, &op->state, GB_OP_PENDING, &op->sleepers, timeout_ns)) return GPUBRIDGE_AGAIN;
    return gb_op_test(op);
}

static void nothing(void *arg)
{
    (void)arg;
}

int gb_engine_wait_stream(struct gb_op *op, void *stream)
{
    int host = !op->dev || op->is_emulated || op->is_p2p;
    if (host) return gb_engine_wait(op, 0);
    /* The launcher stores `enqueued` and wakes the engine; somebody must play it meanwhile. */
    while (!atomic_load_explicit(&op->dev->enqueued, memory_order_acquire)) {
        int rc = gb_op_test(op);
        if (rc != GPUBRIDGE_AGAIN) return rc;
        gb_engine_call(op->engine, nothing, NULL);
        struct timespec nap = {.tv_nsec = 5000};
        nanosleep(&nap, NULL);
    }
    int rc = gb_op_test(op);
    if (rc && rc != GPUBRIDGE_AGAIN) return rc;
    return gb_launcher_wait_stream(op->engine->config.launcher, op->dev, stream);
}

void gb_engine_call(struct gb_engine *engine, void (*fn)(void *arg), void *arg)
{
    struct gb_call call = {.fn = fn, .arg = arg};
    _Atomic uint32_t sleepers = 0;
    pthread_mutex_lock(&engine->queue_lock);
    if (engine->calls_tail)
        engine->calls_tail->next = &call;
    else
        engine->calls_head = &call;
    engine->calls_tail = &call;
    pthread_mutex_unlock(&engine->queue_lock);
    announce_queue(engine, 1);
    (void)wait_word(engine, &call.done, 0, &sleepers, 0);
}

/* ---- groups ---- */

struct group_call {
    struct gb_engine *engine;
    struct gb_group *group;
    int status;
    const char *text;
};

static void add_group(void *arg)
{
    struct group_call *call = arg;
    call->group->next = call->engine->groups;
    call->engine->groups = call->group;
    /* A member that was faster may have sent already: a receive from anyone must learn of it. */
    gb_net_announce(call->engine->config.net, call->group->id);
}

void gb_engine_add(struct gb_engine *engine, struct gb_group *group)
{
    struct group_call call = {.engine = engine, .group = group};
    gb_engine_call(engine, add_group, &call);
}

static void close_group(void *arg)
{
    struct group_call *call = arg;
    gb_group_abort(call->group, call->status, call->text, 0);
}

static void unlink_group(void *arg)
{
    struct group_call *call = arg;
    struct gb_group **at = &call->engine->groups;
    while (*at && *at != call->group) at = &(*at)->next;
    if (*at) *at = call->group->next;
    gb_p2p_forget(call->group);
    gb_net_forget(call->engine->config.net, call->group->id);
}

void gb_engine_remove(struct gb_engine *engine, struct gb_group *group, int status, const char *text)
{
    struct group_call call = {.engine = engine, .group = group, .status = status, .text = text};
    gb_engine_call(engine, close_group, &call);
    while (atomic_load_explicit(&group->nops, memory_order_acquire)) {
        gb_engine_call(engine, nothing, NULL);
        struct timespec nap = {.tv_nsec = 200000};
        if (atomic_load_explicit(&group->nops, memory_order_acquire)) nanosleep(&nap, NULL);
    }
    gb_engine_call(engine, unlink_group, &call);
}

struct gb_op *gb_group_find_op(struct gb_group *group, uint32_t seq)
{
    struct gb_op *op = group->ops_head;
    while (op && (op->is_p2p || op->key.seq != seq)) op = op->next;
    return op;
}

int gb_group_history(struct gb_group *group, uint32_t seq, struct gb_sig *sig)
{
    if (seq >= group->last_seq || group->history[seq % GB_HISTORY].seq != seq) return 0;
    *sig = group->history[seq % GB_HISTORY].sig;
    return 1;
}

/* ---- the engine thread ---- */

static void *engine_main(void *arg)
{
    struct gb_engine *engine = arg;
    while (!atomic_load_explicit(&engine->stop, memory_order_acquire)) {
        uint32_t kick = atomic_load_explicit(&engine->kick, memory_order_seq_cst);
        if (pthread_mutex_trylock(&engine->role) == 0) {
            play(engine, NULL, 0, INT64_MAX);
            pthread_mutex_unlock(&engine->role);
        }
        if (!atomic_load_explicit(&engine->queued, memory_order_seq_cst)) futex_wait(&engine->kick, kick, IDLE_NS);
    }
    return NULL;
}

int gb_engine_open(const struct gb_engine_config *config, struct gb_engine **out)
{
    struct gb_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the engine");
    engine->config = *config;
    pthread_mutex_init(&engine->role, NULL);
    pthread_mutex_init(&engine->queue_lock, NULL);
    pthread_mutex_init(&engine->notify.lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->notify.cond, &attr);
    pthread_condattr_destroy(&attr);
    int rc = pthread_create(&engine->thread, NULL, engine_main, engine);
    if (rc) {
        free(engine);
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "cannot start the engine thread: %s", strerror(rc));
    }
    pthread_setname_np(engine->thread, "gb-engine");
    *out = engine;
    return 0;
}

void gb_engine_close(struct gb_engine *engine)
{
    if (!engine) return;
    gb_engine_completions_stop(engine);
    atomic_store_explicit(&engine->stop, 1, memory_order_release);
    kick_thread(engine);
    gb_net_wake(engine->config.net);
    pthread_join(engine->thread, NULL);
    pthread_mutex_destroy(&engine->role);
    pthread_mutex_destroy(&engine->queue_lock);
    pthread_mutex_destroy(&engine->notify.lock);
    pthread_cond_destroy(&engine->notify.cond);
    free(engine->notify.ring);
    free(engine);
}
