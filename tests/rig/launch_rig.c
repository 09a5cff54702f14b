/* SPDX-License-Identifier: Apache-2.0
 * See launch_rig.h. */
#include "launch_rig.h"

#include "base/clock.h"
#include "ccl/ccl.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int ok_rc_ = (call);                                                                                           \
        if (ok_rc_) {                                                                                                  \
            fprintf(stderr, "%s:%d: %s: %d: %s\n", __FILE__, __LINE__, #call, ok_rc_, gb_err_text());                  \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static void die(const char *what)
{
    fprintf(stderr, "launch_rig: %s\n", what);
    abort();
}

static void woken(void *arg)
{
    struct rig_rank *rank = arg;
    atomic_fetch_add(&rank->wakes, 1);
}

static int kind_of(char letter)
{
    return letter >= 'N' ? GPUBRIDGE_DEVICE_CUDA : GPUBRIDGE_DEVICE_HIP;
}

static void open_topo(struct rig *rig, const char *letters)
{
    char names[RIG_MAX_RANKS][2] = {{0}};
    const char *keys[RIG_MAX_RANKS];
    uint8_t ones[RIG_MAX_RANKS];
    memset(ones, 1, sizeof ones);
    for (uint32_t r = 0; r < rig->nranks; r++) {
        names[r][0] = letters[r];
        keys[r] = names[r];
    }
    OK(gb_topo_create(rig->nranks, keys, ones, ones, &rig->topo));
}

struct join {
    struct rig *rig;
    uint32_t rank;
    const struct gb_ccl *ccl;
    const uint8_t *id;
    _Atomic int done;
};

static void create_ccl(void *arg)
{
    struct join *join = arg;
    struct rig_rank *rank = &join->rig->rank[join->rank];
    const struct gb_topo *topo = join->rig->topo;
    uint32_t island = topo->island[join->rank];
    OK(gb_ccl_comm_create(join->ccl, rank->device, (int)(topo->island_first[island + 1] - topo->island_first[island]),
                          (int)topo->local[join->rank], join->id, 20000000000, NULL, &rank->ccl));
    atomic_store(&join->done, 1);
}

static void open_ccls(struct rig *rig, const char *letters)
{
    struct join joins[RIG_MAX_RANKS] = {{0}};
    uint8_t ids[RIG_MAX_RANKS][GB_CCL_ID_BYTES];
    const struct gb_topo *topo = rig->topo;
    for (uint32_t i = 0; i < topo->nislands; i++) {
        const struct gb_ccl *ccl;
        uint32_t first = topo->island_first[i], end = topo->island_first[i + 1];
        if (end - first < 2) continue;
        int kind = kind_of(letters[topo->members[first]]);
        OK(gb_ccl_open(kind, gb_device_info(rig->rank[topo->members[first]].device)->library, &ccl));
        OK(gb_ccl_unique_id(ccl, ids[i]));
        for (uint32_t m = first; m < end; m++) {
            uint32_t r = topo->members[m];
            joins[r] = (struct join){.rig = rig, .rank = r, .ccl = ccl, .id = ids[i]};
            gb_launcher_call(rig->rank[r].launcher, create_ccl, &joins[r]);
        }
    }
    for (uint32_t r = 0; r < rig->nranks; r++)
        while (joins[r].ccl && !atomic_load(&joins[r].done)) sched_yield();
}

void rig_open(struct rig *rig, const char *letters, int gate)
{
    memset(rig, 0, sizeof *rig);
    rig->nranks = (uint32_t)strlen(letters);
    open_topo(rig, letters);
    for (uint32_t r = 0; r < rig->nranks; r++) {
        struct rig_rank *rank = &rig->rank[r];
        char path[1024];
        int kind = kind_of(letters[r]);
        OK(gb_device_emulator(kind, path, sizeof path));
        OK(gb_device_open(kind, (int)r, path, &rank->device));
        OK(gb_launcher_open(rank->device, kind == GPUBRIDGE_DEVICE_CUDA && gate, woken, rank, &rank->launcher));
        OK(gb_device_bind(rank->device));
        OK(gb_stream_create(rank->device, &rank->stream));
        OK(gb_device_host_alloc(rank->device, RIG_PINNED_BYTES, &rank->pinned));
    }
    open_ccls(rig, letters);
}

static void destroy_ccl(void *arg)
{
    gb_ccl_comm_destroy(arg);
}

void rig_close(struct rig *rig)
{
    for (uint32_t r = 0; r < rig->nranks; r++)
        if (rig->rank[r].ccl) gb_launcher_call(rig->rank[r].launcher, destroy_ccl, rig->rank[r].ccl);
    for (uint32_t r = 0; r < rig->nranks; r++) {
        OK(gb_device_bind(rig->rank[r].device));
        gb_stream_destroy(rig->rank[r].device, rig->rank[r].stream);
        gb_launcher_close(rig->rank[r].launcher);
        gb_device_host_free(rig->rank[r].device, rig->rank[r].pinned);
        gb_device_close(rig->rank[r].device);
    }
    gb_topo_destroy(rig->topo);
}

void *rig_device_mem(struct rig *rig, uint32_t rank, uint64_t bytes)
{
    void *mem;
    OK(gb_device_bind(rig->rank[rank].device));
    OK(gb_device_alloc(rig->rank[rank].device, bytes ? bytes : 1, &mem));
    return mem;
}

void rig_device_free(struct rig *rig, uint32_t rank, void *mem)
{
    OK(gb_device_bind(rig->rank[rank].device));
    gb_device_free(rig->rank[rank].device, mem);
}

void rig_sync(struct rig *rig, uint32_t rank)
{
    struct rig_rank *k = &rig->rank[rank];
    void *event;
    int rc;
    OK(gb_device_bind(k->device));
    OK(gb_event_create(k->device, &event));
    OK(gb_event_record(k->device, event, k->stream));
    while ((rc = gb_event_query(k->device, event)) == GPUBRIDGE_AGAIN) sched_yield();
    OK(rc);
    gb_event_destroy(k->device, event);
}

/* The staging area is made once: freeing memory would wait for operations that a test holds. */
void rig_put(struct rig *rig, uint32_t rank, void *mem, const void *data, uint64_t bytes)
{
    struct rig_rank *k = &rig->rank[rank];
    if (bytes > RIG_PINNED_BYTES) die("too much to put");
    OK(gb_device_bind(k->device));
    memcpy(k->pinned, data, bytes);
    OK(gb_stream_copy(k->device, mem, k->pinned, bytes, k->stream));
    rig_sync(rig, rank);
}

void rig_get(struct rig *rig, uint32_t rank, void *data, const void *mem, uint64_t bytes)
{
    struct rig_rank *k = &rig->rank[rank];
    if (bytes > RIG_PINNED_BYTES) die("too much to get");
    OK(gb_device_bind(k->device));
    OK(gb_stream_copy(k->device, k->pinned, mem, bytes, k->stream));
    rig_sync(rig, rank);
    memcpy(data, k->pinned, bytes);
}

/* ---- operations ---- */

static int is_net(const struct gb_step *step)
{
    return step->kind == GB_STEP_SEND || step->kind == GB_STEP_RECV;
}

static void start_side(struct rig_op *op, uint32_t r, void *in, void *out, uint32_t set)
{
    struct rig_side *side = &op->side[r];
    struct rig_rank *rank = &op->rig->rank[r];
    OK(gb_plan_build(op->rig->topo, &op->spec, r, &side->plan));
    const struct gb_plan *plan = side->plan;
    side->net = calloc(plan->nsteps + 1, 1);
    if (!side->net) die("no memory");
    _Atomic uint32_t *flags = gb_launcher_host(rank->launcher, (plan->nsteps + 1) * sizeof *flags);
    side->dev_mem = gb_launcher_mem(rank->launcher, plan->dev_bytes, 0);
    side->host_mem = gb_launcher_host(rank->launcher, plan->host_bytes);
    if (!flags || !side->dev_mem || !side->host_mem) die(gb_err_text());
    for (uint32_t i = 0; i <= plan->nsteps; i++) atomic_store(&flags[i], 0);
    side->op = (struct gb_dev_op){.plan = plan,
                                  .dtype = op->spec.dtype,
                                  .reduce_op = op->spec.reduce_op,
                                  .nranks = op->rig->nranks,
                                  .factor = 0.5,
                                  .buf = {in, out, side->dev_mem, side->host_mem},
                                  .ccl = rank->ccl,
                                  .set = set,
                                  .flags = flags};
    OK(gb_launcher_record(rank->launcher, rank->stream, &side->op.ready));
    gb_launcher_start(rank->launcher, &side->op);
}

/* meets[i] of a SEND: the index of the peer's RECV. */
static void match_sends(struct rig_op *op, uint32_t r)
{
    struct rig_side *side = &op->side[r];
    side->meets = calloc(side->plan->nsteps + 1, sizeof *side->meets);
    if (!side->meets) die("no memory");
    for (uint32_t i = 0; i < side->plan->nsteps; i++) {
        const struct gb_step *send = &side->plan->steps[i];
        if (send->kind != GB_STEP_SEND) continue;
        const struct gb_plan *peer = op->side[send->peer].plan;
        uint32_t found = UINT32_MAX;
        /* Receives come in about the order of the sends: look on from the last one. */
        for (uint32_t k = 0, at = op->side[send->peer].look[r]; k < peer->nsteps; k++, at++) {
            const struct gb_step *recv = &peer->steps[at % peer->nsteps];
            if (recv->kind != GB_STEP_RECV || recv->peer != r || recv->xid != send->xid) continue;
            if (recv->bytes != send->bytes) die("a message meets a receive of another length");
            found = op->side[send->peer].look[r] = at % peer->nsteps;
            break;
        }
        if (found == UINT32_MAX) die("a message without a receive");
        side->meets[i] = found;
    }
}

struct rig_op *rig_start(struct rig *rig, const struct gb_plan_spec *spec, void *const *in, void *const *out,
                         uint32_t set)
{
    struct rig_op *op = calloc(1, sizeof *op);
    if (!op) die("no memory");
    op->rig = rig;
    op->spec = *spec;
    for (uint32_t r = 0; r < rig->nranks; r++) start_side(op, r, in[r], out[r], set);
    for (uint32_t r = 0; r < rig->nranks; r++) match_sends(op, r);
    return op;
}

static int is_ready(const struct rig_side *side, const struct gb_step *step)
{
    for (uint32_t i = step->dep; i < step->dep + step->ndep; i++) {
        uint32_t dep = side->plan->deps[i];
        int done = is_net(&side->plan->steps[dep])
                       ? side->net[dep]
                       : atomic_load_explicit(&side->op.flags[dep], memory_order_acquire) != 0;
        if (!done) return 0;
    }
    return 1;
}

static void finish_net(struct rig_op *op, uint32_t r, uint32_t index)
{
    struct rig_side *side = &op->side[r];
    side->net[index] = 1;
    atomic_store_explicit(&side->op.flags[index], 1, memory_order_release);
    gb_launcher_kick(op->rig->rank[r].launcher);
}

int rig_step(struct rig_op *op, int budget)
{
    int moved = 0;
    for (uint32_t r = 0; r < op->rig->nranks; r++) {
        struct rig_side *side = &op->side[r];
        for (uint32_t i = 0; i < side->plan->nsteps && moved < budget; i++) {
            const struct gb_step *step = &side->plan->steps[i];
            if (step->kind != GB_STEP_SEND || side->net[i] || !is_ready(side, step)) continue;
            struct rig_side *peer = &op->side[step->peer];
            const uint32_t at = side->meets[i];
            const struct gb_step *recv = &peer->plan->steps[at];
            if (peer->net[at] || !is_ready(peer, recv)) continue;
            memcpy((char *)peer->op.buf[recv->dst.buf] + recv->dst.off,
                   (char *)side->op.buf[step->src.buf] + step->src.off, step->bytes);
            finish_net(op, r, i);
            finish_net(op, step->peer, at);
            moved++;
        }
    }
    return moved;
}

int rig_is_done(const struct rig_op *op)
{
    for (uint32_t r = 0; r < op->rig->nranks; r++) {
        const struct rig_side *side = &op->side[r];
        if (!atomic_load_explicit(&side->op.flags[side->plan->nsteps], memory_order_acquire)) return 0;
    }
    return 1;
}

void rig_wait(struct rig_op *op)
{
    uint64_t end = gb_now_ns() + 60000000000u;
    while (!rig_is_done(op)) {
        if (!rig_step(op, 1 << 30)) sched_yield();
        if (gb_now_ns() > end) die("an operation did not finish within a minute");
    }
    for (uint32_t r = 0; r < op->rig->nranks; r++)
        if (atomic_load(&op->side[r].op.status)) die(op->side[r].op.text);
}

void rig_free(struct rig_op *op)
{
    for (uint32_t r = 0; r < op->rig->nranks; r++) {
        struct rig_side *side = &op->side[r];
        struct gb_launcher *launcher = op->rig->rank[r].launcher;
        gb_launcher_release(launcher, &side->op);
        gb_launcher_host_free(launcher, (void *)(uintptr_t)side->op.flags);
        gb_launcher_host_free(launcher, side->host_mem);
        gb_launcher_mem_free(launcher, side->dev_mem);
        gb_plan_destroy(side->plan);
        free(side->net);
        free(side->meets);
    }
    free(op);
}
