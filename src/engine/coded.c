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

#define SAMPLE_EVERY  64u   /* encoded messages of a group and kind */
#define SAMPLE_VALUES 1024u /* its first ones: a multiple of every block */

static struct gb_coded *counters(struct gb_op *op)
{
    return &op->group->coded[op->kind][op->xplan->plan->codec];
}

/* The first one is told; the others are counted. */
static void note_sender(struct gb_op *op, uint32_t rank, uint64_t values)
{
    struct gb_group *group = op->group;
    struct gb_coded *c = counters(op);
    pthread_mutex_lock(&group->coded_lock);
    int is_first = c->not_finite == 0;
    c->not_finite += values;
    if (is_first) {
        c->first_rank = (int32_t)rank;
        c->first_seq = op->key.seq;
    }
    pthread_mutex_unlock(&group->coded_lock);
    if (is_first) {
        char name[128];
        gb_sig_text(&op->sig, op->key.seq, name, sizeof name);
        GB_WARN("group %s: NaN or infinity from %s in %s; it reaches all ranks", group->name,
                rank == group->rank ? "this rank" : group->labels[rank], name);
    }
}

/* The error of the first values of a message: what was folded, and what is left of it.  Blocks do not depend on each
 * other, so the values are encoded once more by themselves. */
static void sample(struct gb_op *op, const struct gb_reduce_args *args)
{
    float exact[SAMPLE_VALUES], left[SAMPLE_VALUES];
    _Alignas(16) unsigned char message[4 * SAMPLE_VALUES + 64];
    struct gb_reduce_args fold = *args;
    if (fold.count > SAMPLE_VALUES) fold.count = SAMPLE_VALUES;
    fold.stats = NULL;
    fold.dst = exact;
    fold.dst_is_enc = 0;
    fold.dst_is_acc = 1;
    gb_reduce_host(&fold);
    struct gb_reduce_args code = {.dst = message,
                                  .src = {exact},
                                  .count = fold.count,
                                  .acc_mask = 1,
                                  .nsrc = 1,
                                  .dtype = args->dtype,
                                  .op = GPUBRIDGE_SUM,
                                  .codec = args->codec,
                                  .dst_is_enc = 1};
    gb_reduce_host(&code);
    code.src[0] = message;
    code.dst = left;
    code.acc_mask = 0;
    code.enc_mask = 1;
    code.dst_is_enc = 0;
    code.dst_is_acc = 1;
    gb_reduce_host(&code);
    double signal = 0, noise = 0;
    for (uint64_t i = 0; i < fold.count; i++) {
        double error = (double)left[i] - (double)exact[i];
        if (!isfinite(exact[i]) || !isfinite(left[i])) continue;
        signal += (double)exact[i] * (double)exact[i];
        noise += error * error;
    }
    struct gb_coded *c = counters(op);
    pthread_mutex_lock(&op->group->coded_lock);
    c->signal += signal;
    c->noise += noise;
    c->samples += fold.count;
    pthread_mutex_unlock(&op->group->coded_lock);
}

void gb_coded_reduced(struct gb_op *op, const struct gb_step *step, const struct gb_reduce_args *args)
{
    const struct gb_part *parts = op->xplan->plan->parts + step->part;
    if (step->dst_is_enc) {
        struct gb_coded *c = counters(op);
        pthread_mutex_lock(&op->group->coded_lock);
        int is_sampled = c->messages++ % SAMPLE_EVERY == 0 && args->enc_mask == 0;
        c->blocks += args->stats[GB_CODEC_BLOCKS];
        c->saturated += args->stats[GB_CODEC_SATURATED];
        pthread_mutex_unlock(&op->group->coded_lock);
        if (is_sampled) sample(op, args);
        /* Of a result that is encoded once more, the senders of its parts have been counted. */
        if (args->stats[GB_CODEC_NOT_FINITE] && args->enc_mask == 0)
            note_sender(op, op->group->rank, args->stats[GB_CODEC_NOT_FINITE]);
    }
    /* A message that is decoded alone is a result, unless it is a block: who sent it did not make its NaN. */
    int is_result = step->nparts == 1 && op->kind != GPUBRIDGE_ALL_GATHER && op->kind != GPUBRIDGE_BROADCAST;
    for (uint32_t i = 0; i < step->nparts && !is_result; i++) {
        if (!parts[i].is_enc || parts[i].peer == op->group->rank) continue;
        uint64_t wild = gb_codec_not_finite(args->codec, args->src[i], args->count);
        if (wild) note_sender(op, parts[i].peer, wild);
    }
}

void gb_coded_message(struct gb_op *op, const struct gb_step *step)
{
    const int codec = op->xplan->plan->codec, is_send = step->kind == GB_STEP_SEND;
    if (is_send) {
        struct gb_coded *c = counters(op);
        pthread_mutex_lock(&op->group->coded_lock);
        c->wire_bytes += step->bytes;
        pthread_mutex_unlock(&op->group->coded_lock);
    }
    if (!op->dev || op->shadow || !codec || step->final) return;
    const struct gb_ref *ref = is_send ? &step->src : &step->dst;
    uint64_t wild = gb_codec_not_finite(codec, (const char *)op->buf[ref->buf] + ref->off, step->count);
    if (wild) note_sender(op, is_send ? op->group->rank : step->peer, wild);
}

/* What the device counted since it was asked last: of this operation, and of the beginnings of others in flight. */
static void take_device_counts(struct gb_op *op, uint64_t fresh[GB_CODEC_STATS])
{
    struct gb_engine *engine = op->engine;
    uint64_t now[GB_CODEC_STATS];
    gb_launcher_coded(engine->config.launcher, now);
    for (int i = 0; i < GB_CODEC_STATS; i++) {
        fresh[i] = now[i] > engine->coded_seen[i] ? now[i] - engine->coded_seen[i] : 0;
        engine->coded_seen[i] += fresh[i];
    }
}

void gb_coded_finished(struct gb_op *op)
{
    const struct gb_plan *plan = op->xplan->plan;
    struct gb_coded *c = counters(op);
    uint64_t fresh[GB_CODEC_STATS] = {0};
    if (op->dev && !op->shadow && plan->codec) take_device_counts(op, fresh);
    pthread_mutex_lock(&op->group->coded_lock);
    c->blocks += fresh[GB_CODEC_BLOCKS];
    c->saturated += fresh[GB_CODEC_SATURATED];
    c->ops++;
    c->in_bytes += plan->codec ? 4 * plan->encoded_values : plan->bridge_send_bytes;
    pthread_mutex_unlock(&op->group->coded_lock);
}
