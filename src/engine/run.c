/* SPDX-License-Identifier: Apache-2.0
 * Walks the plans of operations in flight: posts messages, runs or hands out arithmetic, opens the flags of the device,
 * finishes and fails.  Engine role. */
#include "base/clock.h"
#include "base/log.h"
#include "engine/coded.h"
#include "engine/internal.h"

#include <assert.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WATCH_WINDOW 64 /* unfinished watched device steps looked at per poll: they finish nearly in order */

static struct gb_launcher *launcher_of(struct gb_op *op)
{
    return op->engine->config.launcher;
}

static void *address(const struct gb_op *op, const struct gb_ref *ref)
{
    char *base = op->buf[ref->buf]; /* NULL for a buffer of no bytes */
    return base ? base + ref->off : NULL;
}

static uint32_t index_of(const struct gb_cell *cell)
{
    return (uint32_t)(cell - cell->op->cells);
}

void gb_op_push_ready(struct gb_op *op, struct gb_cell *cell)
{
    cell->next = NULL;
    if (op->ready_tail)
        op->ready_tail->next = cell;
    else
        op->ready_head = cell;
    op->ready_tail = cell;
}

/* ---- arithmetic on the host ---- */

static void reduce_args(const struct gb_op *op, const struct gb_step *step, struct gb_reduce_args *args)
{
    const struct gb_part *parts = op->xplan->plan->parts + step->part;
    *args = (struct gb_reduce_args){.dst = address(op, &step->dst),
                                    .count = step->count,
                                    .factor = op->factor,
                                    .divisor = op->group->size,
                                    .nsrc = (uint8_t)step->nparts,
                                    .dtype = (uint8_t)op->dtype,
                                    .op = (uint8_t)op->reduce_op,
                                    .flags = step->final ? GB_REDUCE_FINAL : 0,
                                    .codec = op->xplan->plan->codec,
                                    .dst_is_acc = step->dst_is_acc,
                                    .dst_is_enc = step->dst_is_enc};
    for (uint32_t i = 0; i < step->nparts; i++) {
        args->src[i] = address(op, &parts[i].ref);
        args->enc_mask |= (uint32_t)parts[i].is_enc << i;
        args->premul_mask |= (uint32_t)parts[i].premul << i;
        args->acc_mask |= (uint32_t)parts[i].is_acc << i;
    }
    gb_step_negate(step, args);
    if (op->is_random) gb_step_randomise(step, op->seed, args);
}

/* An I/O worker or the engine role: touches only memory that the plan gave to this step. */
static void compute(void *arg)
{
    struct gb_cell *cell = arg;
    struct gb_op *op = cell->op;
    const struct gb_step *step = op->xplan->plan->steps + index_of(cell);
    uint64_t before = gb_now_ns();
    if (step->kind == GB_STEP_COPY) {
        void *dst = address(op, &step->dst);
        const void *src = address(op, &step->src);
        if (dst != src) memmove(dst, src, step->bytes);
    } else {
        struct gb_reduce_args args;
        uint64_t stats[GB_CODEC_STATS] = {0};
        reduce_args(op, step, &args);
        args.stats = stats;
        gb_reduce_host(&args);
        if (args.codec) gb_coded_reduced(op, step, &args);
    }
    atomic_fetch_add_explicit(&op->compute_ns, gb_now_ns() - before, memory_order_relaxed);
}

static uint64_t compute_bytes(const struct gb_op *op, const struct gb_step *step)
{
    if (step->kind == GB_STEP_COPY) return address(op, &step->dst) == address(op, &step->src) ? 0 : step->bytes;
    return step->count * gb_acc_bytes(op->dtype) * (step->nparts + 1);
}

/* ---- steps ---- */

static void step_done(struct gb_op *op, uint32_t index);

static int start_message(struct gb_op *op, struct gb_cell *cell, const struct gb_step *step)
{
    struct gb_link *link = op->group->links[step->peer];
    struct gb_key key = op->key;
    key.xid = step->xid;
    if (step->kind == GB_STEP_SEND)
        return gb_link_send(link, &key, &op->sig, address(op, &step->src), step->bytes, cell);
    const uint32_t *landing = op->xplan->landing;
    if (landing && landing[index_of(cell)] != GB_NO_STEP)
        return gb_link_borrow(link, &key, &op->sig, address(op, &step->dst), step->bytes, cell);
    return gb_link_recv(link, &key, &op->sig, address(op, &step->dst), step->bytes, cell);
}

/* ---- messages that stay in their senders' memory until they are on the device ---- */

static struct gb_link *link_of(const struct gb_op *op, uint32_t index)
{
    return op->group->links[op->is_p2p ? (uint32_t)op->source : op->xplan->plan->steps[index].peer];
}

static void return_loan(struct gb_op *op, uint32_t index)
{
    struct gb_cell *cell = &op->cells[index];
    if (!cell->loan) return;
    gb_link_return(link_of(op, index), cell->loan);
    cell->loan = NULL;
    op->loans--;
}

void gb_op_return_loans(struct gb_op *op)
{
    for (uint32_t i = 0; op->loans && i <= op->xplan->plan->nsteps; i++) return_loan(op, i);
}

/* The next operation of this turn will find it there, too; turns that know nothing may guess so. */
static void remember_place(const struct gb_op *op, uint32_t index, uint64_t at)
{
    atomic_store_explicit(&op->dev->guess[index], at, memory_order_relaxed);
    for (uint32_t t = 0; t < GB_GUESSES; t++) {
        uint64_t nowhere = 0;
        _Atomic uint64_t *guess = &op->xplan->guess[(size_t)t * op->xplan->plan->nsteps + index];
        (void)atomic_compare_exchange_strong_explicit(guess, &nowhere, at, memory_order_relaxed, memory_order_relaxed);
    }
}

/* A message came, or left: says where the device finds it, and keeps what the peer may still read of ours. */
static void settle_places(struct gb_op *op, struct gb_cell *cell, const struct gb_net_event *event)
{
    const uint32_t index = index_of(cell);
    if (event->is_lent) {
        const struct gb_ref start = {0, GB_BUF_HOST};
        const struct gb_ref *at = op->is_p2p ? &start : &op->xplan->plan->steps[index].src;
        gb_launcher_stage_keep(launcher_of(op), address(op, at));
    }
    if (event->loan && op->is_aborting) {
        gb_link_return(event->link, event->loan);
    } else if (event->loan) {
        cell->loan = event->loan;
        op->loans++;
    }
    if (event->status || op->is_aborting) return;
    if (op->is_p2p) {
        if (event->loan) op->dev->buf[GB_BUF_HOST] = (void *)(uintptr_t)event->data;
        return;
    }
    const struct gb_step *step = op->xplan->plan->steps + index;
    if (!op->xplan->landing || step->kind != GB_STEP_RECV || op->xplan->landing[index] == GB_NO_STEP) return;
    const void *at = event->loan ? event->data : address(op, &step->dst);
    atomic_store_explicit(&op->dev->where[index], (uintptr_t)at, memory_order_relaxed); /* the flag follows */
    if (event->loan) remember_place(op, index, (uintptr_t)at);
}

static void start_step(struct gb_op *op, struct gb_cell *cell)
{
    const struct gb_step *step = op->xplan->plan->steps + index_of(cell);
    cell->state = GB_CELL_STARTED;
    if (step->kind == GB_STEP_SEND || step->kind == GB_STEP_RECV) {
        op->started++;
        op->engine->bulk += step->bytes > GB_EAGER_BYTES;
        int rc = start_message(op, cell, step);
        if (rc) {
            op->engine->bulk -= step->bytes > GB_EAGER_BYTES;
            op->started--;
            gb_op_fail(op, rc, gb_err_text());
        }
        return;
    }
    assert(step->kind != GB_STEP_VENDOR && (!op->dev || op->shadow));
    if (compute_bytes(op, step) > (uint64_t)op->engine->config.inline_bytes && !gb_shadow_is_small(op)) {
        op->started++;
        gb_net_job(op->engine->config.net, compute, cell, cell);
        return;
    }
    compute(cell);
    step_done(op, index_of(cell));
}

static int engine_runs(const struct gb_op *op, const struct gb_step *step)
{
    return !op->dev || op->shadow || step->kind == GB_STEP_SEND || step->kind == GB_STEP_RECV;
}

static void step_done(struct gb_op *op, uint32_t index)
{
    const struct gb_xplan *xplan = op->xplan;
    const struct gb_step *step = xplan->plan->steps + index;
    op->cells[index].state = GB_CELL_DONE;
    if (engine_runs(op, step)) {
        assert(op->left > 0);
        op->left--;
        if (op->dev && !op->shadow) atomic_store_explicit(&op->dev->flags[index], 1, memory_order_release);
    }
    for (uint32_t s = xplan->succ_first[index]; s < xplan->succ_first[index + 1]; s++) {
        struct gb_cell *next = op->cells + xplan->succ[s];
        if (!engine_runs(op, xplan->plan->steps + xplan->succ[s])) continue;
        assert(next->left > 0);
        if (--next->left == 0) gb_op_push_ready(op, next);
    }
}

void gb_op_run_ready(struct gb_op *op)
{
    while (op->ready_head && !op->is_aborting) {
        struct gb_cell *cell = op->ready_head;
        op->ready_head = cell->next;
        if (!op->ready_head) op->ready_tail = NULL;
        start_step(op, cell);
    }
}

static void count_message(struct gb_op *op, const struct gb_step *step, uint64_t start_ns, uint64_t now)
{
    struct gb_group_counters *c = &op->group->counters;
    if (step->crosses) {
        if (start_ns && (!op->first_bridge_ns || start_ns < op->first_bridge_ns)) op->first_bridge_ns = start_ns;
        op->last_bridge_ns = now;
        atomic_fetch_add_explicit(step->kind == GB_STEP_SEND ? &c->bridge_sent : &c->bridge_recv, step->bytes,
                                  memory_order_relaxed);
    } else {
        if (start_ns && (!op->first_island_ns || start_ns < op->first_island_ns)) op->first_island_ns = start_ns;
        op->last_island_ns = now;
        if (step->kind == GB_STEP_SEND) atomic_fetch_add_explicit(&c->island_sent, step->bytes, memory_order_relaxed);
    }
}

static void fail_message(struct gb_op *op, uint32_t peer, const struct gb_net_event *event)
{
    char mine[128], text[512];
    const char *label = op->group->labels[peer];
    if (event->status == GPUBRIDGE_ERR_CANCELLED) { /* by the peer, since we cancel only what fails already */
        if (!op->given_up_ns) op->given_up_by = peer, op->given_up_ns = gb_now_ns();
        return; /* why comes over the control lane, perhaps later: engine.c waits for it */
    }
    gb_sig_text(&op->sig, op->key.seq, mine, sizeof mine);
    if (event->status == GPUBRIDGE_ERR_MISMATCH) {
        char theirs[128];
        gb_sig_text(&event->sig, op->key.seq, theirs, sizeof theirs);
        snprintf(text, sizeof text,
                 "ranks disagree: rank %u has %s, %s has %s: all ranks must call the same operation with the "
                 "same arguments in the same order",
                 op->group->rank, mine, label, theirs);
    } else {
        const char *words = event->text && event->text[0] ? event->text : gpubridge_strerror(event->status);
        int named = strstr(words, label) != NULL; /* a link that was down already has no story to tell */
        snprintf(text, sizeof text, "%s%s%s, needed by %s", named ? "" : label, named ? "" : ": ", words, mine);
    }
    gb_op_fail(op, event->status, text);
}

void gb_op_message_done(struct gb_cell *cell, const struct gb_net_event *event)
{
    struct gb_op *op = cell->op;
    assert(op->started > 0);
    op->started--;
    settle_places(op, cell, event);
    if (op->is_p2p) {
        if (event->status && !op->is_aborting)
            fail_message(op, (uint32_t)op->source, event);
        else if (!op->is_aborting)
            gb_p2p_message_done(op);
        gb_op_settle(op);
        return;
    }
    const struct gb_step *step = op->xplan->plan->steps + index_of(cell);
    int is_message = step->kind == GB_STEP_SEND || step->kind == GB_STEP_RECV;
    op->engine->bulk -= is_message && step->bytes > GB_EAGER_BYTES;
    uint64_t now = gb_now_ns();
    if (!event->status) op->progress_ns = now;
    if (op->is_aborting) {
        gb_op_settle(op);
        return;
    }
    if (event->status) {
        fail_message(op, step->peer, event);
    } else {
        if (is_message) {
            count_message(op, step, event->start_ns, now);
            if (step->crosses && op->kind < GB_CODED_KINDS) {
                const struct gb_ref *own = step->kind == GB_STEP_SEND ? &step->src : &step->dst;
                gb_coded_message(op, step, event->loan ? event->data : address(op, own));
            }
            if (step->kind == GB_STEP_RECV) op->group->arrived[step->peer] = 1;
        }
        step_done(op, index_of(cell));
        if (op->dev && !op->shadow) gb_launcher_kick(launcher_of(op));
        gb_op_run_ready(op);
    }
    gb_op_settle(op);
}

/* ---- the device side ---- */

static void no_longer_unstarted(struct gb_op *op)
{
    if (op->is_unstarted) atomic_fetch_sub_explicit(&op->group->unstarted, 1, memory_order_release);
    op->is_unstarted = 0;
}

void gb_op_start_device(struct gb_op *op)
{
    op->dev->ccl = op->group->ccl;
    op->on_device = 1;
    op->staged_next = op->engine->staged;
    op->engine->staged = op;
    op->left++; /* the device's own end */
    if (!op->is_claimed) gb_launcher_start(launcher_of(op), op->dev);
    no_longer_unstarted(op);
}

static int poll_watched(struct gb_op *op)
{
    const struct gb_xplan *xplan = op->xplan;
    int found = 0;
    uint32_t seen = 0;
    for (uint32_t w = op->watch_pos; w < xplan->nwatch && seen < WATCH_WINDOW; w++) {
        uint32_t index = xplan->watch[w];
        if (op->cells[index].state == GB_CELL_DONE) {
            if (w == op->watch_pos) op->watch_pos++;
            continue;
        }
        if (!atomic_load_explicit(&op->dev->flags[index], memory_order_acquire)) {
            seen++;
            continue;
        }
        if (xplan->landing && xplan->landing[index] != GB_NO_STEP) return_loan(op, xplan->landing[index]);
        step_done(op, index);
        if (w == op->watch_pos) op->watch_pos++;
        found++;
    }
    return found;
}

/* A vendor library fails on this rank too when another member of its island gave up because of somebody's death: the
 * news of the death then names the culprit, so it gets a moment to arrive. */
static int is_own_fault(struct gb_op *op)
{
    uint64_t now = gb_now_ns();
    if (!op->group->ccl) return 1;
    if (!op->fault_ns) op->fault_ns = now;
    return now - op->fault_ns > GB_NEWS_NS;
}

static int start_steps(struct gb_op *op);

static int poll_device(struct gb_op *op)
{
    int found = 0;
    int status = atomic_load_explicit(&op->dev->status, memory_order_acquire);
    if (status && !op->is_aborting && is_own_fault(op)) gb_op_fail(op, status, op->dev->text);
    if (op->shadow) return gb_shadow_begins(op) ? start_steps(op) : 0;
    if (!op->is_aborting) {
        uint32_t before = op->left;
        found = poll_watched(op);
        gb_op_run_ready(op);
        found += before != op->left;
    }
    return found;
}

int gb_engine_poll_staged(struct gb_engine *engine)
{
    int found = 0;
    struct gb_op **at = &engine->staged;
    while (*at) {
        struct gb_op *op = *at;
        /* The end first: flags that are set before it are then seen by the look at the others. */
        uint32_t ended = atomic_load_explicit(&op->dev->flags[op->dev->plan->nsteps], memory_order_acquire);
        found += poll_device(op);
        /* A device that gave up has an end too, which is none until the failure is told. */
        if (!op->is_aborting && atomic_load_explicit(&op->dev->status, memory_order_acquire)) ended = 0;
        if (ended) {
            *at = op->staged_next;
            op->staged_next = op; /* marks: the device is through */
            op->left--;
            found++;
            gb_op_return_loans(op);
            if (!op->is_aborting) op->progress_ns = gb_now_ns();
            if (op->is_p2p && !op->is_aborting) gb_p2p_device_done(op);
            gb_op_settle(op);
            continue;
        }
        at = &op->staged_next;
    }
    return found;
}

/* ---- life of an operation ---- */

static int start_steps(struct gb_op *op)
{
    const struct gb_plan *plan = op->xplan->plan;
    for (uint32_t i = 0; i < plan->nsteps && !op->is_aborting; i++)
        if (op->cells[i].left == 0 && op->cells[i].state == GB_CELL_WAITING && engine_runs(op, plan->steps + i))
            gb_op_push_ready(op, op->cells + i);
    gb_op_run_ready(op);
    gb_op_settle(op);
    return 1;
}

static void start_now(struct gb_op *op)
{
    op->is_started = 1;
    op->start_ns = op->progress_ns = gb_now_ns();
    if (op->dev) gb_op_start_device(op);
    if (!op->shadow || gb_shadow_begins(op)) (void)start_steps(op);
}

/* Staged operations of a group start in the order of submission on every rank (one stream set per group); host
 * operations have no such order, their messages are matched by number. */
void gb_group_start_heads(struct gb_group *group)
{
    struct gb_op *op = group->ops_head;
    while (op) {
        struct gb_op *next = op->next;
        if (op->dev && !op->is_p2p && !op->is_started) {
            if (op->wants_turn && !op->has_ticket) return;
            start_now(op);
        }
        op = next;
    }
}

static void link_op(struct gb_group *group, struct gb_op *op)
{
    op->next = NULL;
    op->prev = group->ops_tail;
    if (group->ops_tail)
        group->ops_tail->next = op;
    else
        group->ops_head = op;
    group->ops_tail = op;
}

void gb_op_admit(struct gb_op *op)
{
    struct gb_group *group = op->group;
    const struct gb_plan *plan = op->xplan->plan;
    link_op(group, op);
    for (uint32_t i = 0; i <= plan->nsteps; i++)
        op->cells[i] = (struct gb_cell){.op = op, .left = i < plan->nsteps ? plan->steps[i].ndep : 0};
    int status = atomic_load_explicit(&group->status, memory_order_acquire);
    if (status) {
        if (op->is_claimed) gb_op_start_device(op);
        gb_op_fail(op, status, group->status_text);
        gb_op_settle(op);
        return;
    }
    if (op->is_p2p) {
        gb_p2p_admit(op);
        return;
    }
    group->history[op->key.seq % GB_HISTORY].seq = op->key.seq;
    group->history[op->key.seq % GB_HISTORY].sig = op->sig;
    group->last_seq = op->key.seq + 1;
    op->left = op->dev && !op->shadow ? op->xplan->nnet : plan->nsteps;
    if (!op->dev) {
        start_now(op);
        return;
    }
    if (op->wants_turn) {
        op->is_announced = 1;
        op->engine->config.hooks.announce(op->engine->config.hooks.arg, op);
    }
    gb_group_start_heads(group);
}

void gb_engine_ticket(struct gb_op *op)
{
    op->has_ticket = 1;
    gb_group_start_heads(op->group);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

static void count_op(struct gb_op *op, uint64_t now)
{
    struct gb_group_counters *c = &op->group->counters;
    uint64_t first = op->first_bridge_ns;
    if (!first || (op->first_island_ns && op->first_island_ns < first)) first = op->first_island_ns;
    atomic_fetch_add_explicit(&c->ops, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->payload, op->payload_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->total_ns, now - op->submit_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->compute_ns, atomic_load_explicit(&op->compute_ns, memory_order_relaxed),
                              memory_order_relaxed);
    if (first > op->submit_ns) atomic_fetch_add_explicit(&c->wait_ns, first - op->submit_ns, memory_order_relaxed);
    if (op->first_bridge_ns)
        atomic_fetch_add_explicit(&c->bridge_ns, op->last_bridge_ns - op->first_bridge_ns, memory_order_relaxed);
    if (op->first_island_ns)
        atomic_fetch_add_explicit(&c->island_ns, op->last_island_ns - op->first_island_ns, memory_order_relaxed);
}

static double after(const struct gb_op *op, uint64_t ns)
{
    return ns > op->submit_ns ? (double)(ns - op->submit_ns) * 1e-3 : 0;
}

/* Where the time of one operation went: microseconds since its submission, 0 for what did not happen. */
static void trace(const struct gb_op *op, uint64_t now)
{
    char name[128];
    if (!gb_log_is_on(GB_LOG_TRACE)) return;
    gb_sig_text(&op->sig, op->key.seq, name, sizeof name);
    gb_log(GB_LOG_TRACE,
           "%s: taken %.1f, in the streams %.1f, copied out %.1f, first message %.1f, last message %.1f, let in %.1f, "
           "finished %.1f us",
           name, after(op, op->start_ns), op->dev ? after(op, op->dev->issued_ns) : 0, after(op, op->begun_ns),
           after(op, op->first_bridge_ns), after(op, op->last_bridge_ns), after(op, op->opened_ns), after(op, now));
}

static void finish(struct gb_op *op)
{
    struct gb_group *group = op->group;
    struct gb_engine *engine = op->engine;
    if (op->prev)
        op->prev->next = op->next;
    else
        group->ops_head = op->next;
    if (op->next)
        op->next->prev = op->prev;
    else
        group->ops_tail = op->prev;
    if (group->held) group->needs_settle = 1;
    group->held -= op->is_held;
    no_longer_unstarted(op);
    memset(group->arrived, 0, group->size);
    if (!op->status) count_op(op, gb_now_ns());
    if (!op->status && op->kind < GB_CODED_KINDS) gb_coded_finished(op);
    trace(op, gb_now_ns());
    gb_op_return_loans(op); /* of one that never went to the device */
    if (op->dev) gb_launcher_release(launcher_of(op), op->dev);
    gb_op_free_scratch(op); /* now, not when the caller frees its request, which may be much later */
    int notify = op->flags & GPUBRIDGE_OP_NOTIFY ? 1 : 0;
    uint64_t user = op->user;
    /* On a device with the gate on, streams wait, not threads: only memory is given back. */
    const int is_awaited =
        !op->dev || op->is_emulated || op->is_p2p || op->status || !gb_launcher_is_gated(launcher_of(op));
    atomic_store_explicit(&op->state, GB_OP_FINISHED, memory_order_seq_cst);
    if (atomic_load_explicit(&op->sleepers, memory_order_seq_cst)) futex_wake_all(&op->state);
    if (notify) gb_notify_push(&engine->notify, user, is_awaited);
    atomic_fetch_sub_explicit(&engine->inflight, 1, memory_order_relaxed);
    gb_op_put(op);
    atomic_fetch_sub_explicit(&group->nops, 1, memory_order_release);
}

/* Who comes out of a barrier may leave, which would stop what the others still need of its earlier operations.  What is
 * in streams is the caller's to wait for; messages may find their other end only after the barrier. */
static int is_held(struct gb_op *op)
{
    const struct gb_op *before = op->kind == GPUBRIDGE_BARRIER && !op->is_aborting ? op->prev : NULL;
    while (before && (before->is_p2p || (before->dev && !before->is_emulated))) before = before->prev;
    if (before && !op->is_held) op->is_held = 1, op->group->held++;
    return before != NULL;
}

void gb_op_settle(struct gb_op *op)
{
    if (atomic_load_explicit(&op->state, memory_order_relaxed) == GB_OP_FINISHED || op->started) return;
    if (op->shadow) gb_shadow_settle(op);
    int device_busy = op->on_device && op->staged_next != op; /* a receive goes to the device last */
    if (device_busy) return;
    if (!op->is_aborting && (op->left || !op->is_started)) return;
    if (is_held(op)) return;
    finish(op);
}

/* `text`, and which operation it hit when it does not say so. */
static char *failure_text(const struct gb_op *op, const char *text)
{
    char name[128], whole[800];
    gb_sig_text(&op->sig, op->key.seq, name, sizeof name);
    if (strstr(text, name))
        snprintf(whole, sizeof whole, "%s", text);
    else if (op->is_p2p)
        snprintf(whole, sizeof whole, "%s [during %s with tag %d, %s]", text,
                 op->kind == GPUBRIDGE_SEND ? "SEND" : "RECV", op->tag, name);
    else
        snprintf(whole, sizeof whole, "%s [during %s]", text, name);
    return strdup(whole);
}

void gb_op_fail(struct gb_op *op, int status, const char *text)
{
    if (op->is_aborting) return;
    op->is_aborting = 1;
    op->status = status;
    op->text = failure_text(op, text ? text : "");
    op->ready_head = op->ready_tail = NULL;
    if (op->on_device && op->staged_next != op && !op->shadow) gb_launcher_abort(launcher_of(op), op->dev);
    gb_group_abort(op->group, status, text, 1);
}

void gb_group_abort(struct gb_group *group, int status, const char *text, int tell)
{
    int none = 0;
    if (atomic_load_explicit(&group->status, memory_order_relaxed)) return;
    snprintf(group->status_text, sizeof group->status_text, "%s", text ? text : "");
    if (!atomic_compare_exchange_strong(&group->status, &none, status)) return;
    const struct gb_engine_hooks *hooks = &group->engine->config.hooks;
    hooks->aborted(hooks->arg, group, status, group->status_text, tell);
    for (struct gb_op *op = group->ops_head; op; op = op->next) gb_op_fail(op, status, group->status_text);
    gb_net_cancel(group->engine->config.net, group->id, -1);
    group->needs_settle = 1;
}
