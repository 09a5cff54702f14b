/* SPDX-License-Identifier: Apache-2.0
 * From a caller's description to a queued operation: checks, plan, memory, number.  User threads; nothing here waits
 * for the network. */
#include "base/clock.h"
#include "engine/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define PAD 256u /* pools round up to a multiple of this */

#define FAR_FUTURE INT64_MAX
/* gb_sig.reduce_op: bits 4 to 6 hold the codec, bit 7 says that it rounds stochastically. */
#define SIG_CODEC_SHIFT 4
#define SIG_RANDOM      0x80
_Static_assert(GPUBRIDGE_REDUCE_OP_COUNT <= 16 && GB_CODEC_COUNT <= 8, "both fit into a byte of the frame");

static const char *const kind_names[GPUBRIDGE_OP_KIND_COUNT] = {
    [GPUBRIDGE_ALL_REDUCE] = "ALL_REDUCE",
    [GPUBRIDGE_BROADCAST] = "BROADCAST",
    [GPUBRIDGE_REDUCE] = "REDUCE",
    [GPUBRIDGE_ALL_GATHER] = "ALL_GATHER",
    [GPUBRIDGE_REDUCE_SCATTER] = "REDUCE_SCATTER",
    [GPUBRIDGE_ALL_TO_ALL] = "ALL_TO_ALL",
    [GPUBRIDGE_GATHER] = "GATHER",
    [GPUBRIDGE_SCATTER] = "SCATTER",
    [GPUBRIDGE_SEND] = "SEND",
    [GPUBRIDGE_RECV] = "RECV",
    [GPUBRIDGE_BARRIER] = "BARRIER",
};

static int reduces(int kind)
{
    return kind == GPUBRIDGE_ALL_REDUCE || kind == GPUBRIDGE_REDUCE || kind == GPUBRIDGE_REDUCE_SCATTER;
}

static int is_rooted(int kind)
{
    return kind == GPUBRIDGE_BROADCAST || kind == GPUBRIDGE_REDUCE || kind == GPUBRIDGE_GATHER ||
           kind == GPUBRIDGE_SCATTER;
}

int gb_sig_codec(const struct gb_sig *sig)
{
    return sig->reduce_op >> SIG_CODEC_SHIFT & 7;
}

void gb_sig_text(const struct gb_sig *sig, uint32_t seq, char *text, size_t capacity)
{
    const char *name = sig->op < GPUBRIDGE_OP_KIND_COUNT ? kind_names[sig->op] : "?";
    int reduce_op = sig->reduce_op & 0xf, codec = gb_sig_codec(sig);
    char coded[64] = "";
    if (codec != GB_CODEC_NONE)
        snprintf(coded, sizeof coded, ", %s%s between islands", gb_codec_name(codec),
                 sig->reduce_op & SIG_RANDOM ? " rounded stochastically" : "");
    if (sig->op == GPUBRIDGE_BARRIER)
        snprintf(text, capacity, "op %u %s", seq, name);
    else if (sig->op == GPUBRIDGE_SEND || sig->op == GPUBRIDGE_RECV)
        snprintf(text, capacity, "message %u of %s x %llu", seq, gb_dtype_name(sig->dtype),
                 (unsigned long long)sig->count);
    else if (is_rooted(sig->op))
        snprintf(text, capacity, "op %u %s%s%s %s x %llu, root %u%s", seq, name, reduces(sig->op) ? " " : "",
                 reduces(sig->op) ? gb_reduce_op_name(reduce_op) : "", gb_dtype_name(sig->dtype),
                 (unsigned long long)sig->count, sig->root_lo, coded);
    else
        snprintf(text, capacity, "op %u %s%s%s %s x %llu%s", seq, name, reduces(sig->op) ? " " : "",
                 reduces(sig->op) ? gb_reduce_op_name(reduce_op) : "", gb_dtype_name(sig->dtype),
                 (unsigned long long)sig->count, coded);
}

static int check(const struct gb_group *group, const struct gpubridge_op *d)
{
    if (d->struct_size != sizeof *d)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "struct gpubridge_op has %zu bytes here and %zu at the caller: rebuild one of them", sizeof *d,
                       d->struct_size);
    if (d->kind < 0 || d->kind >= GPUBRIDGE_OP_KIND_COUNT)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "operation kind %d does not exist", d->kind);
    const char *name = kind_names[d->kind];
    if (d->dtype < 0 || d->dtype >= GPUBRIDGE_DTYPE_COUNT)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: dtype %d does not exist", name, d->dtype);
    if (reduces(d->kind)) {
        if (d->reduce_op < 0 || d->reduce_op >= GPUBRIDGE_REDUCE_OP_COUNT)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: reduce op %d does not exist", name, d->reduce_op);
        if (!gb_reduce_supported(d->dtype, d->reduce_op))
            return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "%s: %s is not defined for %s (docs/operations.md has the table)",
                           name, gb_reduce_op_name(d->reduce_op), gb_dtype_name(d->dtype));
    }
    if (d->residual && d->kind != GPUBRIDGE_ALL_REDUCE && d->kind != GPUBRIDGE_REDUCE_SCATTER)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: only ALL_REDUCE and REDUCE_SCATTER take a residual", name);
    int any = d->kind == GPUBRIDGE_RECV && d->root == -1;
    int rooted = is_rooted(d->kind) || d->kind == GPUBRIDGE_SEND || d->kind == GPUBRIDGE_RECV;
    if (rooted && !any && (d->root < 0 || (uint32_t)d->root >= group->size))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: rank %d is not in the group of %u ranks", name, d->root,
                       group->size);
    if (d->count > (UINT64_MAX >> 8) / group->size / gb_dtype_bytes(d->dtype))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: %llu elements overflow the address space", name,
                       (unsigned long long)d->count);
    if (d->codec < 0 || d->codec >= GPUBRIDGE_CODEC_COUNT)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: codec %d does not exist", name, d->codec);
    if ((d->kind == GPUBRIDGE_SEND || d->kind == GPUBRIDGE_RECV) && (d->tag < 0))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: tag %d is negative", name, d->tag);
    return 0;
}

static struct gb_op *op_create(struct gb_group *group, const struct gpubridge_op *d)
{
    struct gb_engine *engine = group->engine;
    struct gb_op *op = gb_pool_get(engine->config.pool, sizeof *op);
    if (!op) return NULL;
    memset(op, 0, sizeof *op);
    atomic_init(&op->refs, 2);
    op->group = group;
    op->engine = engine;
    op->kind = d->kind;
    op->dtype = d->dtype;
    op->reduce_op = reduces(d->kind) ? d->reduce_op : 0;
    op->root = d->root;
    op->tag = d->tag;
    op->flags = d->flags;
    op->user = d->user;
    op->count = d->count;
    op->factor = d->factor;
    op->source = -1;
    op->is_emulated = (uint8_t)engine->config.emulated;
    op->key.group = group->id;
    op->buf[GB_BUF_IN] = (void *)(uintptr_t)d->send;
    op->buf[GB_BUF_OUT] = d->recv;
    op->buf[GB_BUF_RESIDUAL] = d->residual;
    return op;
}

/* The operation was never queued, or has finished: nobody touches its scratch any more. */
void gb_op_free_scratch(struct gb_op *op)
{
    struct gb_engine *engine = op->engine;
    if (op->dev) {
        gb_launcher_host_free(engine->config.launcher, (void *)(uintptr_t)op->dev->flags);
        op->dev->flags = NULL;
    }
    gb_shadow_free(op);
    if (op->dev && !op->shadow) {
        gb_launcher_mem_free(engine->config.launcher, op->dev_mem);
        gb_launcher_stage_free(engine->config.launcher, op->host_mem);
    } else {
        gb_pool_put(engine->config.pool, op->dev_mem);
        gb_pool_put(engine->config.pool, op->host_mem);
    }
    gb_pool_put(engine->config.pool, op->cells);
    op->dev_mem = op->host_mem = NULL;
    op->cells = NULL;
}

void gb_op_put(struct gb_op *op)
{
    if (!op || atomic_fetch_sub_explicit(&op->refs, 1, memory_order_acq_rel) != 1) return;
    gb_op_free_scratch(op);
    gb_pool_put(op->engine->config.pool, op->dev);
    gb_pool_put(op->engine->config.pool, op->shadow);
    gb_xplan_put(op->xplan);
    free(op->text);
    gb_pool_put(op->engine->config.pool, op);
}

#define SAMPLE_EVERY 64u /* operations of one kind and codec */

/* Room for a sample behind the scratch of an operation whose turn it is. */
static uint64_t sample_bytes(struct gb_op *op, const struct gb_plan *plan)
{
    if (!plan->codec || op->kind >= GB_CODED_KINDS) return 0;
    return op->group->encodings[op->kind][plan->codec]++ % SAMPLE_EVERY ? 0 : GB_SAMPLE_VALUES * sizeof(float);
}

static int op_memory(struct gb_op *op, const struct gb_plan *plan, int staged)
{
    struct gb_engine *engine = op->engine;
    op->cells = gb_pool_get(engine->config.pool, (plan->nsteps + 1) * sizeof *op->cells);
    if (!op->cells) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for an operation of %u steps", plan->nsteps);
    if (!staged) {
        if (plan->dev_bytes) op->dev_mem = gb_pool_get(engine->config.pool, plan->dev_bytes);
        if (plan->host_bytes) op->host_mem = gb_pool_get(engine->config.pool, plan->host_bytes);
        if ((plan->dev_bytes && !op->dev_mem) || (plan->host_bytes && !op->host_mem))
            return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for %llu bytes of scratch",
                           (unsigned long long)(plan->dev_bytes + plan->host_bytes));
    } else {
        struct gb_launcher *launcher = engine->config.launcher;
        op->dev = gb_pool_get(engine->config.pool, sizeof *op->dev);
        if (!op->dev) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for an operation");
        memset(op->dev, 0, sizeof *op->dev);
        const size_t flag_bytes = (plan->nsteps + 2) / 2 * sizeof(uint64_t);
        const size_t where_bytes = op->xplan->landing ? plan->nsteps * sizeof(uint64_t) : 0;
        op->dev->flags = gb_launcher_host(launcher, flag_bytes + where_bytes);
        if (!op->dev->flags) return GPUBRIDGE_ERR_NO_MEMORY;
        op->dev->landing = op->xplan->landing;
        const uint32_t turn = atomic_fetch_add_explicit(&op->xplan->turns, 1, memory_order_relaxed) % GB_GUESSES;
        if (op->xplan->guess) op->dev->guess = op->xplan->guess + (size_t)turn * plan->nsteps;
        op->dev->where = (_Atomic uint64_t *)((char *)op->dev->flags + flag_bytes);
        for (uint32_t i = 0; i <= plan->nsteps; i++) atomic_store_explicit(&op->dev->flags[i], 0, memory_order_relaxed);
        for (size_t i = 0; i < where_bytes / sizeof(uint64_t); i++)
            atomic_store_explicit(&op->dev->where[i], 0, memory_order_relaxed);
        const uint64_t counts = plan->codec ? GB_CODED_QUEUES * GB_CODEC_STATS * sizeof(uint64_t) : 0;
        const uint64_t sample = sample_bytes(op, plan), dev_end = (plan->dev_bytes + sample + 15) & ~15ull,
                       host_end = (plan->host_bytes + sample + 15) & ~15ull, dev = dev_end + counts,
                       host = host_end + counts;
        const uint64_t beside = flag_bytes + where_bytes + PAD;
        if (dev && !(op->dev_mem = gb_launcher_mem(launcher, dev, beside))) return GPUBRIDGE_ERR_NO_MEMORY;
        if (host && !(op->host_mem = gb_launcher_stage(launcher, host, beside + dev + PAD)))
            return GPUBRIDGE_ERR_NO_MEMORY;
        if (sample) {
            op->dev->sample.device = (void *)((char *)op->dev_mem + plan->dev_bytes);
            op->dev->sample.host = (void *)((char *)op->host_mem + plan->host_bytes);
        }
        if (counts) {
            op->dev->counts.device = (void *)((char *)op->dev_mem + dev_end);
            op->dev->counts.host = (void *)((char *)op->host_mem + host_end);
        }
    }
    op->buf[GB_BUF_DEV] = op->dev_mem;
    op->buf[GB_BUF_HOST] = op->host_mem;
    return 0;
}

static int op_device(struct gb_op *op, void *stream)
{
    struct gb_dev_op *dev = op->dev;
    dev->dtype = op->dtype;
    dev->reduce_op = op->reduce_op;
    dev->nranks = op->group->size;
    dev->factor = op->factor;
    if (!op->shadow) {
        dev->plan = op->xplan->plan;
        memcpy((void *)dev->buf, (const void *)op->buf, sizeof dev->buf);
    }
    dev->set = op->group->stream_set + op->is_p2p;
    return gb_launcher_record(op->engine->config.launcher, stream, &dev->ready);
}

/* P2P: one message, staged ones with a copy before or after it. */
static int p2p_plan(struct gb_op *op, uint64_t bytes, int staged)
{
    struct gb_xplan *x = calloc(1, sizeof *x);
    struct gb_plan *plan = calloc(1, sizeof *plan);
    struct gb_step *steps = calloc(2, sizeof *steps);
    uint32_t *deps = calloc(1, sizeof *deps);
    if (!x || !plan || !steps || !deps) {
        free(x), free(plan), free(steps), free(deps);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for an operation");
    }
    atomic_init(&x->refs, 1);
    x->plan = plan;
    plan->steps = steps;
    plan->deps = deps;
    op->xplan = x;
    /* The device half is the copy alone: the engine runs the message before or after it. */
    plan->nsteps = staged;
    plan->host_bytes = staged ? bytes : 0;
    int send = op->kind == GPUBRIDGE_SEND;
    steps[0] = (struct gb_step){.kind = GB_STEP_COPY,
                                .queue = send ? GB_QUEUE_OUT : GB_QUEUE_IN,
                                .bytes = bytes,
                                .src = {0, send ? GB_BUF_IN : GB_BUF_HOST},
                                .dst = {0, send ? GB_BUF_HOST : GB_BUF_OUT}};
    return 0;
}

static int any_staged(const struct gb_topo *topo)
{
    int any = 0;
    for (uint32_t r = 0; r < topo->nranks; r++) any |= topo->staged[r];
    return any;
}

/* `auto`.  On CPUs a chunk that stays in the cache between its arrival and its addition; on devices each chunk costs
 * several stream operations in several streams (measured on an H200 that two ranks share: about 0.3 ms), so large
 * operations take larger ones, and still larger ones where no processor needs to copy messages: there 1 GiB took 127 ms
 * in chunks of 8 MiB and 62 in chunks of 32.  A pure function of what all ranks agree on. */
static uint64_t chunk_bytes(const struct gb_group *group, int staged_somewhere, uint64_t bytes)
{
    const uint64_t smallest = 1u << 20, largest = group->is_one_host ? 32u << 20 : 8u << 20;
    if (group->chunk_bytes) return group->chunk_bytes;
    if (!staged_somewhere) return smallest;
    uint64_t chunk = smallest;
    while (chunk < largest && chunk * 8 < bytes) chunk *= 2;
    return chunk;
}

/* An operation that names its codec is compressed whatever its size, kind and dtype. */
static int choose_codec(const struct gpubridge_op *d, struct gb_plan_spec *spec)
{
    if (d->codec == GPUBRIDGE_CODEC_DEFAULT) return 0;
    spec->codec = d->codec - GPUBRIDGE_CODEC_NONE;
    spec->codec_min_bytes = 0;
    spec->codec_spreads = 1;
    spec->codec_skips = GB_SKIP_NONE;
    if (spec->codec != GB_CODEC_NONE && !gb_spec_can_compress(spec))
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED,
                       "%s of %s cannot be compressed (%s): codecs apply to sums of f16, bf16 and f32, and to "
                       "ALL_GATHER and BROADCAST of them",
                       kind_names[d->kind], gb_dtype_name(d->dtype), gb_codec_name(spec->codec));
    return 0;
}

static int wants_turn(const struct gb_op *op)
{
    return op->xplan->plan->takes_turn && op->group->takes_turns;
}

static int prepare(struct gb_op *op, const struct gpubridge_op *d)
{
    struct gb_group *group = op->group;
    const int on_host = d->flags & GPUBRIDGE_OP_HOST_BUFFERS ? 1 : 0;
    int staged = group->staged && !on_host, shadow = 0;
    const struct gb_topo *topo = on_host ? group->host_topo : group->topo;
    uint64_t in = 0, out = 0;
    op->is_p2p = d->kind == GPUBRIDGE_SEND || d->kind == GPUBRIDGE_RECV;
    if (op->is_p2p) {
        in = d->kind == GPUBRIDGE_SEND ? d->count * gb_dtype_bytes(d->dtype) : 0;
        out = d->kind == GPUBRIDGE_RECV ? d->count * gb_dtype_bytes(d->dtype) : 0;
        if (d->kind == GPUBRIDGE_RECV && d->root == -1) op->is_any = 1;
        GB_TRY(p2p_plan(op, in + out, staged && in + out > 0));
    } else {
        shadow = !on_host && gb_shadow_wanted(group, d);
        if (shadow) topo = group->host_topo;
        struct gb_plan_spec spec = {.op = d->kind,
                                    .dtype = d->dtype,
                                    .reduce_op = op->reduce_op,
                                    .count = d->count,
                                    .root = d->root < 0 ? 0 : (uint32_t)d->root,
                                    .chunk_bytes =
                                        chunk_bytes(group, any_staged(topo), d->count * gb_dtype_bytes(d->dtype)),
                                    .flat_bytes = group->flat_bytes,
                                    .codec = group->codec,
                                    .codec_min_bytes = group->codec_min_bytes,
                                    .codec_spreads = (uint8_t)group->codec_spreads,
                                    .codec_skips = group->codec_skips,
                                    /* A shadow runs in host memory, where the residual is not. */
                                    .feedback = d->residual && !(shadow && group->staged),
                                    .depth = group->depth};
        GB_TRY(choose_codec(d, &spec));
        if (!is_rooted(d->kind)) spec.root = 0;
        if (d->kind == GPUBRIDGE_BARRIER) spec.dtype = GPUBRIDGE_U8, spec.count = 0;
        if (d->kind == GPUBRIDGE_ALL_GATHER) spec.counts = d->recv_counts;
        if (d->kind == GPUBRIDGE_REDUCE_SCATTER) spec.counts = d->send_counts;
        if (d->kind == GPUBRIDGE_ALL_TO_ALL) spec.send_counts = d->send_counts, spec.recv_counts = d->recv_counts;
        gb_plan_user_bytes(topo, &spec, group->rank, &in, &out);
        GB_TRY(gb_xplan_get(group, topo, &spec, &op->xplan));
        staged = staged && (op->xplan->plan->nsteps > 0 || wants_turn(op));
    }
    if ((in && !d->send) || (out && !d->recv))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%s: %s buffer is NULL but %llu bytes are expected in it",
                       kind_names[d->kind], in && !d->send ? "the send" : "the recv",
                       (unsigned long long)(in && !d->send ? in : out));
    op->payload_bytes = in ? in : out;
    op->wants_turn = (uint8_t)wants_turn(op);
    GB_TRY(op_memory(op, op->xplan->plan, staged && !shadow));
    if (staged && shadow) GB_TRY(gb_shadow_prepare(op, in, out));
    return staged ? op_device(op, d->stream) : 0;
}

static void number(struct gb_op *op)
{
    struct gb_group *group = op->group;
    op->sig = (struct gb_sig){.op = (uint8_t)op->kind,
                              .dtype = (uint8_t)op->dtype,
                              .reduce_op = (uint8_t)(op->reduce_op | op->xplan->plan->codec << SIG_CODEC_SHIFT),
                              .root_lo = is_rooted(op->kind) ? (uint8_t)op->root : 0,
                              .plan_hash = op->xplan->plan->hash,
                              .count = op->count};
    if (op->is_p2p) { /* both directions of a pair must sign alike; the engine numbers it per (peer, tag) */
        op->sig.op = GPUBRIDGE_SEND;
        op->sig.root_lo = 0;
        op->key.xid = GB_XID_P2P | (uint32_t)op->tag;
    } else {
        op->key.seq = group->next_seq++;
    }
    if (op->xplan->plan->codec && group->codec_is_random) {
        op->is_random = 1;
        op->seed = gb_codec_seed(group->codec_seed, op->key.seq);
        op->sig.reduce_op |= SIG_RANDOM;
        op->sig.plan_hash ^= (uint32_t)XXH3_64bits(&op->seed, sizeof op->seed);
    }
    if (op->dev) op->dev->seed = op->seed, op->dev->is_random = op->is_random;
    if (op->reduce_op == GPUBRIDGE_PREMUL_SUM) /* flat plans multiply at the receiver: all ranks need one factor */
        op->sig.plan_hash ^= (uint32_t)XXH3_64bits(&op->factor, sizeof op->factor);
    if (op->kind == GPUBRIDGE_ALL_TO_ALL) op->sig.count = 0; /* rows differ by rank */
}

/* A small operation that is waited for, with nothing of its group before it, is put into the streams by the submitting
 * thread: two thread switches less.  Submit lock. */
static void claim(struct gb_op *op, int is_urgent)
{
    struct gb_group *group = op->group;
    if (!op->dev || op->is_p2p) return;
    op->is_claimed = is_urgent && gb_shadow_is_tiny(op) &&
                     atomic_load_explicit(&group->unstarted, memory_order_acquire) == 0 &&
                     gb_launcher_claim(group->engine->config.launcher, op->dev);
    op->is_unstarted = !op->is_claimed;
    if (op->is_unstarted) atomic_fetch_add_explicit(&group->unstarted, 1, memory_order_relaxed);
}

struct next_call {
    struct gb_group *group;
    const struct gpubridge_op *desc;
    uint32_t number;
};

static void read_next_message(void *arg)
{
    struct next_call *call = arg;
    call->number = gb_p2p_next(call->group, call->desc->kind, call->desc->root, call->desc->tag);
}

/* The group is over: says which operation this one would have been. */
static int refuse(struct gb_group *group, const struct gpubridge_op *desc, int status)
{
    if (desc->kind == GPUBRIDGE_SEND || desc->kind == GPUBRIDGE_RECV) {
        struct next_call call = {.group = group, .desc = desc};
        gb_engine_call(group->engine, read_next_message, &call);
        return GB_FAIL(status, "%s of message %u of tag %d not started: %s", kind_names[desc->kind], call.number,
                       desc->tag, group->status_text);
    }
    const char *name = desc->kind >= 0 && desc->kind < GPUBRIDGE_OP_KIND_COUNT ? kind_names[desc->kind] : "operation";
    pthread_mutex_lock(&group->submit_lock);
    uint32_t seq = group->next_seq;
    pthread_mutex_unlock(&group->submit_lock);
    return GB_FAIL(status, "op %u %s not started: %s", seq, name, group->status_text);
}

int gb_engine_submit(struct gb_group *group, const struct gpubridge_op *desc, int run, struct gb_op **out)
{
    int status = atomic_load_explicit(&group->status, memory_order_acquire);
    if (status) return refuse(group, desc, status);
    GB_TRY(check(group, desc));
    struct gb_op *op = op_create(group, desc);
    if (!op) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for an operation");
    op->submit_ns = gb_now_ns();

    pthread_mutex_lock(&group->submit_lock);
    int rc = prepare(op, desc);
    if (rc) {
        pthread_mutex_unlock(&group->submit_lock);
        atomic_store_explicit(&op->refs, 1, memory_order_relaxed);
        gb_op_put(op);
        return rc;
    }
    int64_t timeout = desc->timeout_ns > 0 ? desc->timeout_ns : group->timeout_ns;
    op->deadline_ns = timeout < FAR_FUTURE - (int64_t)op->submit_ns ? (int64_t)op->submit_ns + timeout : FAR_FUTURE;
    number(op);
    claim(op, run || (op->flags & GPUBRIDGE_OP_URGENT));
    const int claimed = op->is_claimed;
    atomic_fetch_add_explicit(&group->nops, 1, memory_order_relaxed);
    gb_engine_push(group->engine, op, run); /* inside the lock: queue order is number order */
    pthread_mutex_unlock(&group->submit_lock);
    /* Only now: the operation ends without this thread once its first entries are in the streams. */
    if (claimed) gb_launcher_issue(group->engine->config.launcher, op->dev);
    *out = op;
    return 0;
}
