/* SPDX-License-Identifier: Apache-2.0
 *
 * coded.c: counters of compressed operations: bytes, saturated blocks, NaN and infinity with the rank that sent the
 * first, and the error of the quantisation in samples.  The counters are under the group's coded_lock: they are touched
 * once per message, not per value. */
#include "engine/coded.h"

#include "base/log.h"
#include "codec/scan.h"
#include "engine/internal.h"

#include <math.h>
#include <string.h>

#define SAMPLE_EVERY 64u /* encoded messages of a group and kind on the host */

static struct gb_coded *counters(struct gb_op *op)
{
    return &op->group->coded[op->kind][op->xplan->plan->codec];
}

/* ---- NaN and infinity ---- */

/* Member `rank` sent some in an operation.  The earliest one stays, of its senders the lowest, so that all ranks come
 * to name the same.  The first one that is known is told; caller holds coded_lock.  1: to be told. */
static int keep_first(struct gb_coded *c, uint32_t rank, uint32_t seq)
{
    const int is_news = !c->has_first;
    const int32_t later = (int32_t)(seq - c->first_seq);
    if (is_news || later < 0 || (later == 0 && (int32_t)rank < c->first_rank)) {
        c->first_rank = (int32_t)rank;
        c->first_seq = seq;
    }
    c->has_first = 1;
    return is_news;
}

static void tell(const struct gb_group *group, uint32_t rank, uint32_t seq, const struct gb_sig *sig)
{
    char name[128];
    gb_sig_text(sig, seq, name, sizeof name);
    GB_WARN("group %s: NaN or infinity from %s in %s; it reaches all ranks", group->name,
            rank == group->rank ? "this rank" : group->labels[rank], name);
}

static void note_values(struct gb_op *op, uint64_t values)
{
    pthread_mutex_lock(&op->group->coded_lock);
    counters(op)->not_finite += values;
    pthread_mutex_unlock(&op->group->coded_lock);
}

static void note_sender(struct gb_op *op, uint32_t rank, uint64_t values)
{
    struct gb_group *group = op->group;
    struct gb_coded *c = counters(op);
    atomic_store_explicit(&op->is_wild, 1, memory_order_relaxed);
    pthread_mutex_lock(&group->coded_lock);
    c->not_finite += values;
    const int is_news = keep_first(c, rank, op->key.seq);
    if (rank == group->rank && !c->has_own) {
        c->has_own = c->must_tell_others = 1;
        c->own_seq = op->key.seq;
        c->own_sig = op->sig;
    }
    pthread_mutex_unlock(&group->coded_lock);
    if (is_news) tell(group, rank, op->key.seq, &op->sig);
}

void gb_group_heard_wild(struct gb_group *group, uint32_t rank, uint32_t seq, const struct gb_sig *sig)
{
    const int kind = sig->op, codec = gb_sig_codec(sig);
    if (kind >= GB_CODED_KINDS || codec == GB_CODEC_NONE || codec >= GB_CODEC_COUNT) return;
    pthread_mutex_lock(&group->coded_lock);
    const int is_news = keep_first(&group->coded[kind][codec], rank, seq);
    pthread_mutex_unlock(&group->coded_lock);
    if (is_news) tell(group, rank, seq, sig);
}

/* ---- the error of the quantisation ---- */

/* Of the first values that a step encodes.  Blocks do not depend on each other, so encoding them once more by
 * themselves loses the same, on whatever device the message was made. */
static void measure(struct gb_op *op, const struct gb_step *step, const float *exact, uint64_t count)
{
    float left[GB_SAMPLE_VALUES];
    _Alignas(16) unsigned char message[4 * GB_SAMPLE_VALUES + 64];
    struct gb_reduce_args code = {.dst = message,
                                  .src = {exact},
                                  .count = count,
                                  .acc_mask = 1,
                                  .nsrc = 1,
                                  .dtype = (uint8_t)op->dtype,
                                  .op = GPUBRIDGE_SUM,
                                  .codec = op->xplan->plan->codec,
                                  .dst_is_enc = 1};
    if (op->is_random) gb_step_randomise(step, op->seed, &code);
    gb_reduce_host(&code);
    code.src[0] = message;
    code.dst = left;
    code.acc_mask = 0;
    code.enc_mask = 1;
    code.dst_is_enc = 0;
    code.dst_is_acc = 1;
    gb_reduce_host(&code);
    double signal = 0, noise = 0;
    for (uint64_t i = 0; i < count; i++) {
        double error = (double)left[i] - (double)exact[i];
        if (!isfinite(exact[i]) || !isfinite(left[i])) continue;
        signal += (double)exact[i] * (double)exact[i];
        noise += error * error;
    }
    struct gb_coded *c = counters(op);
    pthread_mutex_lock(&op->group->coded_lock);
    c->signal += signal;
    c->noise += noise;
    c->samples += count;
    pthread_mutex_unlock(&op->group->coded_lock);
}

/* On the host: what `args` folds before it is encoded. */
static void sample(struct gb_op *op, const struct gb_step *step, const struct gb_reduce_args *args)
{
    float exact[GB_SAMPLE_VALUES];
    struct gb_reduce_args fold = *args;
    if (fold.count > GB_SAMPLE_VALUES) fold.count = GB_SAMPLE_VALUES;
    fold.stats = NULL;
    fold.dst = exact;
    fold.dst_is_enc = 0;
    fold.dst_is_acc = 1;
    gb_reduce_host(&fold);
    measure(op, step, exact, fold.count);
}

/* ---- what the engine calls ---- */

static int is_wild(struct gb_op *op)
{
    return atomic_load_explicit(&op->is_wild, memory_order_relaxed);
}

/* A message was made here: a partial or an input, or a result, whose NaN its parts brought unless the sum made it. */
static void count_encoded(struct gb_op *op, const struct gb_step *step, const struct gb_reduce_args *args)
{
    struct gb_coded *c = counters(op);
    const uint64_t wild = args->stats[GB_CODEC_NOT_FINITE];
    const int is_plain = args->enc_mask == 0 && !step->final;
    pthread_mutex_lock(&op->group->coded_lock);
    const int is_sampled = c->messages++ % SAMPLE_EVERY == 0 && is_plain;
    c->blocks += args->stats[GB_CODEC_BLOCKS];
    c->saturated += args->stats[GB_CODEC_SATURATED];
    pthread_mutex_unlock(&op->group->coded_lock);
    if (is_sampled) sample(op, step, args);
    if (wild && step->final && is_wild(op))
        note_values(op, wild);
    else if (wild)
        note_sender(op, op->group->rank, wild);
}

void gb_coded_reduced(struct gb_op *op, const struct gb_step *step, const struct gb_reduce_args *args)
{
    const struct gb_part *parts = op->xplan->plan->parts + step->part;
    /* A message that is decoded alone is a result, unless it is a block: who sent it did not make its NaN. */
    int is_result = step->nparts == 1 && op->kind != GPUBRIDGE_ALL_GATHER && op->kind != GPUBRIDGE_BROADCAST;
    for (uint32_t i = 0; i < step->nparts; i++) {
        if (!parts[i].is_enc || parts[i].peer == op->group->rank) continue;
        uint64_t wild = gb_codec_not_finite(args->codec, args->src[i], args->count);
        if (wild && is_result)
            note_values(op, wild);
        else if (wild)
            note_sender(op, parts[i].peer, wild);
    }
    if (step->dst_is_enc) count_encoded(op, step, args);
}

void gb_coded_message(struct gb_op *op, const struct gb_step *step, const void *bytes)
{
    const int codec = op->xplan->plan->codec, is_send = step->kind == GB_STEP_SEND;
    if (is_send) {
        struct gb_coded *c = counters(op);
        pthread_mutex_lock(&op->group->coded_lock);
        c->wire_bytes += step->bytes;
        pthread_mutex_unlock(&op->group->coded_lock);
    }
    /* The device counts what it encodes, and its rank tells the others.  Where results are encoded as well, whose NaN
     * is told from that of their parts, the messages are looked at, which costs more than to send them. */
    if (!op->dev || op->shadow || !op->xplan->plan->encodes_result) return;
    uint64_t wild = gb_codec_not_finite(codec, bytes, step->count);
    /* In a result that this rank folded and that no part explains, its own part, which was not sent, or the sum. */
    if (wild && step->final && (!is_send || is_wild(op)))
        note_values(op, wild);
    else if (wild)
        note_sender(op, is_send ? op->group->rank : step->peer, wild);
}

/* What the device counted while it encoded for this operation. */
static void take_device_counts(const struct gb_op *op, uint64_t found[GB_CODEC_STATS])
{
    const struct gb_dev_counts *counts = &op->dev->counts;
    for (int q = 0; q < GB_CODED_QUEUES; q++)
        for (int i = 0; i < GB_CODEC_STATS && counts->queues >> q & 1; i++)
            found[i] += ((const volatile uint64_t *)counts->host)[q * GB_CODEC_STATS + i];
}

void gb_coded_finished(struct gb_op *op)
{
    const struct gb_plan *plan = op->xplan->plan;
    struct gb_coded *c = counters(op);
    uint64_t fresh[GB_CODEC_STATS] = {0};
    if (op->dev && !op->shadow && plan->codec) {
        const struct gb_dev_sample *sample = &op->dev->sample;
        take_device_counts(op, fresh);
        if (fresh[GB_CODEC_NOT_FINITE] && !plan->encodes_result)
            note_sender(op, op->group->rank, fresh[GB_CODEC_NOT_FINITE]);
        if (sample->count) measure(op, plan->steps + sample->step, sample->host, sample->count);
    }
    pthread_mutex_lock(&op->group->coded_lock);
    c->blocks += fresh[GB_CODEC_BLOCKS];
    c->saturated += fresh[GB_CODEC_SATURATED];
    c->ops++;
    c->in_bytes += plan->codec ? 4 * plan->encoded_values : plan->bridge_send_bytes;
    const uint8_t must_tell = c->must_tell_others;
    c->must_tell_others = 0;
    pthread_mutex_unlock(&op->group->coded_lock);
    const struct gb_engine_hooks *hooks = &op->engine->config.hooks;
    if (must_tell) hooks->wild(hooks->arg, op->group, c->own_seq, &c->own_sig);
}
