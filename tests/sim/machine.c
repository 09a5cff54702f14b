/* SPDX-License-Identifier: Apache-2.0
 * Executes a world.  What can happen next stands in a bag; one thing is drawn at random and done, until the bag is
 * empty.
 *
 * Host ranks: a step may run when its dependencies are done, in any order.  Staged ranks: device steps stand in three
 * in-order queues per group (out, in, vendor); with the gate on they are enqueued when the operation starts and the
 * head waits for its dependencies; with the gate off a launcher appends them one by one, and only when the messages
 * they wait for are done.  A vendor call finishes when all ranks of the island reached it.  Messages meet by pair and
 * number: small ones may be sent ahead while the pair's credit lasts, others move when both ends are posted.  Between
 * staged ranks a message may be lent: the copy at its receiver reads it in the sender's memory, and only then has the
 * send ended. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum event_kind { EV_SUBMIT, EV_POST, EV_RUN, EV_QUEUE, EV_MOVE, EV_DONE };

struct event {
    enum event_kind kind;
    uint32_t step; /* POST, RUN, DONE: step; MOVE: message; SUBMIT: world rank */
    struct sim_inst *inst;
    struct queue *queue;
};

struct entry {
    struct sim_inst *inst;
    uint32_t step;
};

struct queue {
    struct entry *v;
    uint32_t n, cap, launched, head;
    uint8_t gate, busy; /* busy: the head is on its way */
};

struct message {
    struct sim_inst *from, *to;
    uint32_t send, recv;  /* steps */
    unsigned char *ahead; /* sent before the receive was posted */
    uint8_t is_sent, is_posted, is_moved;
};

struct machine {
    struct sim_world *world;
    struct event *bag;
    uint32_t nbag, bag_cap;
    struct message *messages;
    uint32_t nmessages, message_cap;
    struct queue queues[SIM_MAX_RANKS][SIM_MAX_GROUPS][3], shared[SIM_MAX_RANKS];
    uint64_t ahead[SIM_MAX_RANKS][SIM_MAX_RANKS];
    uint32_t program[SIM_MAX_RANKS][SIM_MAX_OPS], nprogram[SIM_MAX_RANKS], pc[SIM_MAX_RANKS];
    struct sim_op *tickets[SIM_MAX_OPS];
    uint32_t ntickets, ticket_pos[SIM_MAX_RANKS];
    uint32_t bridge_bytes_of[SIM_MAX_OPS];
};

static void *grow(void *array, uint32_t *cap, uint32_t need, size_t size)
{
    if (need <= *cap) return array;
    *cap = *cap ? *cap * 2 : 64;
    if (*cap < need) *cap = need;
    array = realloc(array, *cap * size);
    if (!array) abort();
    return array;
}

static void put(struct machine *m, struct event ev)
{
    m->bag = grow(m->bag, &m->bag_cap, m->nbag + 1, sizeof *m->bag);
    m->bag[m->nbag++] = ev;
}

static uint32_t world_rank(const struct sim_inst *in)
{
    return in->op->group->world_rank[in->rank];
}

static int is_staged(const struct machine *m, const struct sim_inst *in)
{
    return m->world->staged[world_rank(in)];
}

static const struct gb_step *step_of(const struct sim_inst *in, uint32_t s)
{
    return in->plan->steps + s;
}

static unsigned char *address(const struct sim_inst *in, struct gb_ref ref)
{
    return in->buf[ref.buf] + ref.off;
}

static struct queue *queue_of(struct machine *m, const struct sim_inst *in, uint32_t kind)
{
    uint32_t rank = world_rank(in);
    if (kind == GB_QUEUE_VENDOR && m->world->one_vendor_queue) return m->shared + rank;
    return &m->queues[rank][in->op->group->index][kind - GB_QUEUE_OUT];
}

/* ---- steps ---- */

static void run_reduce(const struct sim_inst *in, const struct gb_step *step)
{
    const struct sim_op *op = in->op;
    struct gb_reduce_args a = {.dst = address(in, step->dst), .count = step->count, .factor = op->factor};
    a.divisor = op->group->nranks;
    a.nsrc = (uint8_t)step->nparts;
    a.dtype = (uint8_t)op->spec.dtype;
    a.op = (uint8_t)op->spec.reduce_op;
    a.flags = step->final ? GB_REDUCE_FINAL : 0;
    a.codec = in->plan->codec;
    a.dst_is_acc = step->dst_is_acc;
    a.dst_is_enc = step->dst_is_enc;
    for (uint32_t i = 0; i < step->nparts; i++) {
        const struct gb_part *part = in->plan->parts + step->part + i;
        a.src[i] = address(in, part->ref);
        a.acc_mask |= (uint32_t)part->is_acc << i;
        a.enc_mask |= (uint32_t)part->is_enc << i;
        a.premul_mask |= (uint32_t)part->premul << i;
    }
    if (step->negate) {
        a.op = GPUBRIDGE_PREMUL_SUM;
        a.dtype = GPUBRIDGE_F32;
        a.factor = -(double)step->times;
        a.premul_mask = step->negate;
    }
    gb_reduce_host(&a);
}

/* Host ranks' steps in user and scratch memory, and the same on a device. */
static void run_local(const struct sim_inst *in, uint32_t s)
{
    const struct gb_step *step = step_of(in, s);
    if (step->kind == GB_STEP_REDUCE)
        run_reduce(in, step);
    else
        memmove(address(in, step->dst), address(in, step->src), step->bytes);
}

/* Lets the head of a queue go when its time has come. */
static void look(struct machine *m, struct queue *q)
{
    while (q->launched < q->n && (q->gate || q->v[q->launched].inst->net_left[q->v[q->launched].step] == 0))
        q->launched++;
    if (q->busy || q->head >= q->launched || q->v[q->head].inst->left[q->v[q->head].step] > 0) return;
    q->busy = 1;
    put(m, (struct event){.kind = EV_QUEUE, .queue = q});
}

static void look_all(struct machine *m, const struct sim_inst *in)
{
    for (uint32_t k = GB_QUEUE_OUT; k <= GB_QUEUE_VENDOR; k++) look(m, queue_of(m, in, k));
}

/* No step before it is open any more. */
static void ready(struct machine *m, struct sim_inst *in, uint32_t s)
{
    const struct gb_step *step = step_of(in, s);
    if (step->queue == GB_QUEUE_NET)
        put(m, (struct event){.kind = EV_POST, .inst = in, .step = s});
    else if (!is_staged(m, in) && step->kind != GB_STEP_VENDOR)
        put(m, (struct event){.kind = EV_RUN, .inst = in, .step = s});
}

static void finish(struct machine *m, struct sim_inst *in, uint32_t s)
{
    in->done[s] = 1;
    in->ndone++;
    for (uint32_t i = in->succ_first[s]; i < in->succ_first[s + 1]; i++) {
        uint32_t next = in->succ[i];
        in->left[next]--;
        if (step_of(in, s)->queue == GB_QUEUE_NET) in->net_left[next]--;
        if (in->left[next] == 0) ready(m, in, next);
    }
    look_all(m, in);
}

static void leave_queue(struct machine *m, struct queue *q)
{
    struct entry e = q->v[q->head++];
    q->busy = 0;
    finish(m, e.inst, e.step);
    look(m, q);
}

/* ---- vendor calls ---- */

/* The n-th part that goes between local ranks a and b as seen by a (its sends) or b (its receives). */
static const struct gb_part *part_between(const struct sim_inst *in, const struct gb_step *call, uint32_t peer,
                                          int is_recv, uint32_t n)
{
    for (uint32_t i = 0; i < call->nparts; i++) {
        const struct gb_part *part = in->plan->parts + call->part + i;
        if (part->peer == peer && part->is_recv == is_recv && n-- == 0) return part;
    }
    return NULL;
}

static int move_parts(struct machine *m, const struct entry *calls, uint32_t a, uint32_t b)
{
    for (uint32_t n = 0;; n++) {
        const struct gb_part *give = part_between(calls[a].inst, step_of(calls[a].inst, calls[a].step), b, 0, n);
        const struct gb_part *take = part_between(calls[b].inst, step_of(calls[b].inst, calls[b].step), a, 1, n);
        if (!give && !take) return 0;
        if (!give || !take || give->bytes != take->bytes)
            return sim_fail(m->world,
                            "vendor call of op %u: part %u from local rank %u to %u does not match (%llu, %llu bytes)",
                            calls[a].inst->op->index, n, a, b, give ? (unsigned long long)give->bytes : 0,
                            take ? (unsigned long long)take->bytes : 0);
        memmove(address(calls[b].inst, take->ref), address(calls[a].inst, give->ref), give->bytes);
    }
}

/* A rank reached a vendor call at the head of its queue.  It goes on when all mates stand before the same call. */
static int reach_call(struct machine *m, struct queue *q)
{
    struct sim_inst *in = q->v[q->head].inst;
    const struct sim_op *op = in->op;
    const struct gb_topo *t = op->group->topo;
    uint32_t island = t->island[in->rank], n = t->island_first[island + 1] - t->island_first[island];
    struct entry calls[SIM_MAX_RANKS];
    struct queue *queues[SIM_MAX_RANKS];
    q->busy = 2;
    for (uint32_t j = 0; j < n; j++) {
        const struct sim_inst *mate = op->inst + t->members[t->island_first[island] + j];
        queues[j] = queue_of(m, mate, GB_QUEUE_VENDOR);
        if (queues[j]->busy != 2) return 0;
        calls[j] = queues[j]->v[queues[j]->head];
        /* In one queue for all groups a mate may stand before another group's call: that is waited for, not wrong. */
        if (calls[j].inst->op->group != op->group) return 0;
        if (calls[j].inst->op != op || calls[j].inst->ncalls != in->ncalls)
            return sim_fail(m->world, "vendor calls out of order: op %u call %u meets op %u call %u", op->index,
                            in->ncalls, calls[j].inst->op->index, calls[j].inst->ncalls);
    }
    m->world->ncalls++;
    for (uint32_t a = 0; a < n; a++)
        for (uint32_t b = 0; b < n; b++)
            if (move_parts(m, calls, a, b)) return -1;
    for (uint32_t j = 0; j < n; j++) {
        calls[j].inst->ncalls++;
        leave_queue(m, queues[j]);
    }
    return 0;
}

static void run_landing(struct machine *m, const struct sim_inst *in, uint32_t s)
{
    struct message *msg = m->messages + in->lent[s] - 1;
    const struct gb_step *step = step_of(in, s);
    memmove(address(in, step->dst), address(msg->from, step_of(msg->from, msg->send)->src), step->bytes);
    put(m, (struct event){.kind = EV_DONE, .inst = msg->from, .step = msg->send});
}

static int run_queue(struct machine *m, struct queue *q)
{
    struct entry e = q->v[q->head];
    if (step_of(e.inst, e.step)->kind == GB_STEP_VENDOR) return reach_call(m, q);
    if (e.inst->lent[e.step])
        run_landing(m, e.inst, e.step);
    else
        run_local(e.inst, e.step);
    leave_queue(m, q);
    return 0;
}

/* ---- messages ---- */

static void post(struct machine *m, struct sim_inst *in, uint32_t s)
{
    uint32_t index = in->message[s];
    struct message *msg = m->messages + index;
    const struct gb_step *step = step_of(in, s);
    uint64_t *ahead = &m->ahead[world_rank(msg->from)][world_rank(msg->to)];
    if (step->kind == GB_STEP_RECV) {
        msg->is_posted = 1;
    } else {
        msg->is_sent = 1;
        if (!msg->is_posted && step->bytes <= SIM_EAGER && *ahead + step->bytes <= m->world->credit) {
            *ahead += step->bytes;
            msg->ahead = malloc(step->bytes + 1);
            memcpy(msg->ahead, address(in, step->src), step->bytes);
            put(m, (struct event){.kind = EV_DONE, .inst = in, .step = s});
        }
    }
    if (msg->is_sent && msg->is_posted) put(m, (struct event){.kind = EV_MOVE, .step = index});
}

/* The one step that reads a message at a staged receiver, a copy of all of it; UINT32_MAX: there are others. */
static uint32_t landing_of(const struct sim_inst *in, uint32_t recv)
{
    const struct gb_step *message = step_of(in, recv);
    const uint64_t lo = message->dst.off, hi = lo + message->bytes;
    uint32_t found = UINT32_MAX;
    for (uint32_t s = recv + 1; s < in->plan->nsteps; s++) {
        const struct gb_step *step = step_of(in, s);
        if (step->kind == GB_STEP_RECV && step->dst.off < hi && lo < step->dst.off + step->bytes) break;
        if ((step->kind != GB_STEP_COPY && step->kind != GB_STEP_SEND) || step->src.buf != GB_BUF_HOST) continue;
        if (step->src.off >= hi || lo >= step->src.off + step->bytes) continue;
        if (found != UINT32_MAX || step->kind != GB_STEP_COPY || step->src.off != lo || step->bytes != message->bytes)
            return UINT32_MAX;
        found = s;
    }
    return found;
}

static int lend(struct machine *m, const struct message *msg)
{
    if (!is_staged(m, msg->from) || !is_staged(m, msg->to)) return 0;
    if (step_of(msg->from, msg->send)->bytes == 0 || sim_below(&m->world->rng, 4) >= m->world->lends) return 0;
    const uint32_t copy = landing_of(msg->to, msg->recv);
    if (copy == UINT32_MAX) return 0;
    msg->to->lent[copy] = 1 + (uint32_t)(msg - m->messages);
    m->world->nlent++;
    return 1;
}

static void move(struct machine *m, struct message *msg)
{
    const struct gb_step *send = step_of(msg->from, msg->send), *recv = step_of(msg->to, msg->recv);
    msg->is_moved = 1;
    m->world->nmessages++;
    if (!msg->ahead && lend(m, msg)) {
        put(m, (struct event){.kind = EV_DONE, .inst = msg->to, .step = msg->recv});
        return;
    }
    if (msg->ahead) {
        memcpy(address(msg->to, recv->dst), msg->ahead, send->bytes);
        m->ahead[world_rank(msg->from)][world_rank(msg->to)] -= send->bytes;
        free(msg->ahead);
        msg->ahead = NULL;
    } else {
        if (send->bytes) memcpy(address(msg->to, recv->dst), address(msg->from, send->src), send->bytes);
        put(m, (struct event){.kind = EV_DONE, .inst = msg->from, .step = msg->send});
    }
    put(m, (struct event){.kind = EV_DONE, .inst = msg->to, .step = msg->recv});
}

static uint32_t find_step(const struct sim_inst *in, uint32_t kind, uint32_t peer, uint32_t xid)
{
    for (uint32_t s = 0; s < in->plan->nsteps; s++)
        if (in->plan->steps[s].kind == kind && in->plan->steps[s].peer == peer && in->plan->steps[s].xid == xid)
            return s;
    return UINT32_MAX;
}

/* Pairs the sends of one rank to another with the receives there. */
static int match_pair(struct machine *m, struct sim_inst *from, struct sim_inst *to)
{
    uint32_t recvs = 0, sends = 0, hint = 0;
    for (uint32_t s = 0; s < to->plan->nsteps; s++)
        recvs += to->plan->steps[s].kind == GB_STEP_RECV && to->plan->steps[s].peer == from->rank;
    for (uint32_t s = 0; s < from->plan->nsteps; s++) {
        const struct gb_step *step = step_of(from, s);
        if (step->kind != GB_STEP_SEND || step->peer != to->rank) continue;
        sends++;
        while (hint < to->plan->nsteps &&
               !(to->plan->steps[hint].kind == GB_STEP_RECV && to->plan->steps[hint].peer == from->rank &&
                 to->plan->steps[hint].xid == step->xid))
            hint++;
        uint32_t r = hint < to->plan->nsteps ? hint : find_step(to, GB_STEP_RECV, from->rank, step->xid);
        if (r == UINT32_MAX || to->plan->steps[r].bytes != step->bytes)
            return sim_fail(m->world, "op %u: message %u from %u to %u has %llu bytes, its receive %lld",
                            from->op->index, step->xid, from->rank, to->rank, (unsigned long long)step->bytes,
                            r == UINT32_MAX ? -1ll : (long long)to->plan->steps[r].bytes);
        m->messages = grow(m->messages, &m->message_cap, m->nmessages + 1, sizeof *m->messages);
        from->message[s] = to->message[r] = m->nmessages;
        m->messages[m->nmessages++] = (struct message){.from = from, .to = to, .send = s, .recv = r};
    }
    if (sends != recvs)
        return sim_fail(m->world, "op %u: %u sends from %u to %u, %u receives", from->op->index, sends, from->rank,
                        to->rank, recvs);
    return 0;
}

/* ---- operations ---- */

/* Successors from predecessors. */
static void make_graph(struct sim_inst *in)
{
    const struct gb_plan *p = in->plan;
    size_t n = p->nsteps + 2;
    in->left = calloc(n, 4);
    in->net_left = calloc(n, 4);
    in->message = calloc(n, 4);
    in->lent = calloc(n, 4);
    in->succ_first = calloc(n, 4);
    in->succ = calloc(p->ndeps + 1, 4);
    in->done = calloc(n, 1);
    for (uint32_t i = 0; i < p->nsteps; i++) {
        in->left[i] = p->steps[i].ndep;
        for (uint32_t d = p->steps[i].dep; d < p->steps[i].dep + p->steps[i].ndep; d++) {
            in->succ_first[p->deps[d] + 2]++;
            in->net_left[i] += p->steps[p->deps[d]].queue == GB_QUEUE_NET;
        }
    }
    for (size_t i = 2; i < n; i++) in->succ_first[i] += in->succ_first[i - 1];
    for (uint32_t i = 0; i < p->nsteps; i++)
        for (uint32_t d = p->steps[i].dep; d < p->steps[i].dep + p->steps[i].ndep; d++)
            in->succ[in->succ_first[p->deps[d] + 1]++] = i;
}

static void start(struct machine *m, struct sim_inst *in)
{
    in->started = 1;
    for (uint32_t s = 0; s < in->plan->nsteps; s++) {
        const struct gb_step *step = step_of(in, s);
        if (step->queue != GB_QUEUE_NET && (is_staged(m, in) || step->kind == GB_STEP_VENDOR)) {
            struct queue *q = queue_of(m, in, step->queue);
            q->gate = m->world->gate[world_rank(in)];
            q->v = grow(q->v, &q->cap, q->n + 1, sizeof *q->v);
            q->v[q->n++] = (struct entry){in, s};
        }
        if (in->left[s] == 0) ready(m, in, s);
    }
    look_all(m, in);
}

static int needs_ticket(const struct machine *m, const struct sim_op *op)
{
    int any = 0;
    for (uint32_t r = 0; r < op->group->nranks; r++) any |= op->inst[r].plan->uses_vendor;
    return any && m->world->one_vendor_queue;
}

static struct sim_inst *inst_at(struct sim_op *op, uint32_t rank)
{
    for (uint32_t r = 0; r < op->group->nranks; r++)
        if (op->group->world_rank[r] == rank) return op->inst + r;
    return NULL;
}

/* Starts what may start on a rank: a group's operations in their order, and those that need a ticket in ticket order.
 */
static void start_ready(struct machine *m, uint32_t rank)
{
    for (int again = 1; again;) {
        again = 0;
        for (uint32_t g = 0; g < m->world->ngroups; g++) {
            const struct sim_group *group = m->world->groups + g;
            for (uint32_t k = 0; k < group->nops; k++) {
                struct sim_op *op = m->world->ops + group->ops[k];
                struct sim_inst *in = inst_at(op, rank);
                if (!in || in->started) continue;
                if (!in->submitted) break;
                if (needs_ticket(m, op)) {
                    while (m->ticket_pos[rank] < m->ntickets && !inst_at(m->tickets[m->ticket_pos[rank]], rank))
                        m->ticket_pos[rank]++;
                    if (m->ticket_pos[rank] == m->ntickets || m->tickets[m->ticket_pos[rank]] != op) break;
                    m->ticket_pos[rank]++;
                }
                start(m, in);
                again = 1;
            }
        }
    }
}

static void submit(struct machine *m, uint32_t rank)
{
    struct sim_op *op = m->world->ops + m->program[rank][m->pc[rank]++];
    inst_at(op, rank)->submitted = 1;
    if (m->pc[rank] < m->nprogram[rank]) put(m, (struct event){.kind = EV_SUBMIT, .step = rank});
    if (++op->nsubmitted == op->group->nranks && needs_ticket(m, op)) {
        m->tickets[m->ntickets++] = op;
        for (uint32_t r = 0; r < m->world->nranks; r++) start_ready(m, r);
    }
    start_ready(m, rank);
}

/* Every rank's own interleaving of its groups' operations. */
static void write_program(struct machine *m, uint32_t rank)
{
    struct sim_world *w = m->world;
    uint32_t next[SIM_MAX_GROUPS] = {0}, left = 0;
    for (uint32_t i = 0; i < w->nops; i++) left += inst_at(w->ops + i, rank) != NULL;
    while (left > 0) {
        uint32_t g = sim_below(&w->rng, w->ngroups);
        if (next[g] == w->groups[g].nops || !inst_at(w->ops + w->groups[g].ops[0], rank)) continue;
        m->program[rank][m->nprogram[rank]++] = w->groups[g].ops[next[g]++];
        left--;
    }
    if (m->nprogram[rank]) put(m, (struct event){.kind = EV_SUBMIT, .step = rank});
}

static int act(struct machine *m, struct event ev)
{
    switch (ev.kind) {
    case EV_SUBMIT:
        submit(m, ev.step);
        return 0;
    case EV_POST:
        post(m, ev.inst, ev.step);
        return 0;
    case EV_QUEUE:
        return run_queue(m, ev.queue);
    case EV_MOVE:
        move(m, m->messages + ev.step);
        return 0;
    case EV_RUN:
        run_local(ev.inst, ev.step); /* fall through */
    case EV_DONE:
        finish(m, ev.inst, ev.step);
        return 0;
    }
    return 0;
}

/* ---- judgement ---- */

static int judge_inst(struct sim_world *w, const struct sim_inst *in)
{
    const struct sim_op *op = in->op;
    if (in->ndone != in->plan->nsteps) {
        uint32_t s = 0;
        while (in->done[s]) s++;
        return sim_fail(w, "deadlock: op %u rank %u stands at step %u of %u (kind %u)", op->index, in->rank, s,
                        in->plan->nsteps, in->plan->steps[s].kind);
    }
    if (!op->in_place && memcmp(in->input, in->buf[GB_BUF_IN], in->in_bytes) != 0)
        return sim_fail(w, "op %u rank %u: the input was written to", op->index, in->rank);
    unsigned char *right = malloc(in->out_bytes + 1);
    sim_reference(op, in->rank, right);
    uint64_t at = 0;
    while (at < in->out_bytes && right[at] == in->buf[GB_BUF_OUT][at]) at++;
    free(right);
    if (at < in->out_bytes)
        return sim_fail(w, "op %u rank %u: wrong from byte %llu of %llu on", op->index, in->rank,
                        (unsigned long long)at, (unsigned long long)in->out_bytes);
    return 0;
}

static int judge_volume(struct sim_world *w, const struct sim_op *op)
{
    uint64_t bridge = 0, island = 0, moved_bridge = 0, moved_island = 0, told_bridge = 0, told_island = 0;
    sim_volume(op, &bridge, &island);
    for (uint32_t r = 0; r < op->group->nranks; r++) {
        const struct gb_plan *p = op->inst[r].plan;
        told_bridge += p->bridge_send_bytes;
        told_island += p->island_send_bytes;
        for (uint32_t s = 0; s < p->nsteps; s++) {
            if (p->steps[s].kind == GB_STEP_SEND)
                *(p->steps[s].crosses ? &moved_bridge : &moved_island) += p->steps[s].bytes;
            for (uint32_t i = 0; p->steps[s].kind == GB_STEP_VENDOR && i < p->steps[s].nparts; i++)
                if (!p->parts[p->steps[s].part + i].is_recv) moved_island += p->parts[p->steps[s].part + i].bytes;
        }
    }
    if (bridge != moved_bridge || island != moved_island || bridge != told_bridge || island != told_island)
        return sim_fail(w,
                        "op %u: moved %llu bytes over the bridge and %llu inside, plans say %llu and %llu, the formula "
                        "%llu and %llu",
                        op->index, (unsigned long long)moved_bridge, (unsigned long long)moved_island,
                        (unsigned long long)told_bridge, (unsigned long long)told_island, (unsigned long long)bridge,
                        (unsigned long long)island);
    return 0;
}

static int judge(struct sim_world *w)
{
    for (uint32_t i = 0; i < w->nops; i++) {
        for (uint32_t r = 0; r < w->ops[i].group->nranks; r++)
            if (judge_inst(w, w->ops[i].inst + r)) return -1;
        if (judge_volume(w, w->ops + i) || sim_check_residuals(w, w->ops + i)) return -1;
    }
    return 0;
}

static int match_all(struct machine *m)
{
    for (uint32_t i = 0; i < m->world->nops; i++) {
        struct sim_op *op = m->world->ops + i;
        for (uint32_t a = 0; a < op->group->nranks; a++)
            for (uint32_t b = 0; b < op->group->nranks; b++)
                if (match_pair(m, op->inst + a, op->inst + b)) return -1;
    }
    return 0;
}

int sim_run(struct sim_world *w)
{
    struct machine *m = calloc(1, sizeof *m);
    if (!m) abort();
    m->world = w;
    for (uint32_t i = 0; i < w->nops; i++)
        for (uint32_t r = 0; r < w->ops[i].group->nranks; r++) make_graph(w->ops[i].inst + r);
    int rc = match_all(m);
    for (uint32_t r = 0; r < w->nranks && !rc; r++) write_program(m, r);
    while (m->nbag > 0 && !rc) {
        uint32_t k = sim_below(&w->rng, m->nbag);
        struct event ev = m->bag[k];
        m->bag[k] = m->bag[--m->nbag];
        rc = act(m, ev);
    }
    if (!rc) rc = judge(w);
    for (uint32_t i = 0; i < m->nmessages; i++) free(m->messages[i].ahead);
    for (uint32_t r = 0; r < SIM_MAX_RANKS; r++) {
        free(m->shared[r].v);
        for (uint32_t q = 0; q < SIM_MAX_GROUPS * 3; q++) free(m->queues[r][q / 3][q % 3].v);
    }
    free(m->messages);
    free(m->bag);
    free(m);
    return rc;
}
