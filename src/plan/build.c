/* SPDX-License-Identifier: Apache-2.0
 * The pieces that algorithms emit: steps, scratch, staging, exchanges inside an island, folds.  See build.h. */
#include "plan/build.h"

#include <stdlib.h>
#include <string.h>

int gb_grow(struct gb_builder *b, void **array, uint32_t *cap, uint32_t need, size_t size)
{
    if (need <= *cap) return !b->failed;
    uint32_t want = *cap < 16 ? 32 : *cap * 2;
    if (want < need) want = need;
    void *bigger = *cap < UINT32_MAX / 4 ? realloc(*array, want * size) : NULL;
    if (!bigger) {
        b->failed = 1;
        return 0;
    }
    *array = bigger;
    *cap = want;
    return !b->failed;
}

void gb_b_dep(struct gb_builder *b, uint32_t step)
{
    struct gb_plan *p = b->plan;
    uint32_t self = p->nsteps - 1;
    if (step == self || b->mark[step] == self + 1) return;
    if (!gb_grow(b, (void **)&p->deps, &b->dep_cap, p->ndeps + 1, sizeof *p->deps)) return;
    b->mark[step] = self + 1;
    p->deps[p->ndeps++] = step;
    p->steps[self].ndep++;
}

/* A step to be filled, or NULL when memory ran out. */
static struct gb_step *add_step(struct gb_builder *b, uint32_t kind, uint32_t queue)
{
    struct gb_plan *p = b->plan;
    uint32_t cap = b->step_cap;
    if (!gb_grow(b, (void **)&p->steps, &b->step_cap, p->nsteps + 1, sizeof *p->steps)) return NULL;
    if (!gb_grow(b, (void **)&b->mark, &cap, b->step_cap, sizeof *b->mark)) return NULL;
    struct gb_step *step = p->steps + p->nsteps;
    *step = (struct gb_step){.kind = (uint8_t)kind, .queue = (uint8_t)queue, .dep = p->ndeps, .part = p->nparts};
    b->mark[p->nsteps++] = 0;
    return step;
}

static void access_user(struct gb_builder *b, uint64_t lo, uint64_t hi, int is_write)
{
    uint32_t z = 0, end = b->nzones;
    while (end - z > 1) { /* the last zone that begins at or before lo */
        uint32_t mid = z + (end - z) / 2;
        if (b->zone_first[mid] <= lo)
            z = mid;
        else
            end = mid;
    }
    for (; lo < hi; z++) {
        uint64_t stop = z + 1 < b->nzones && b->zone_first[z + 1] < hi ? b->zone_first[z + 1] : hi;
        if (stop > lo) gb_track_access(b, b->user + z, lo, stop, is_write);
        lo = stop;
    }
}

static void touch(struct gb_builder *b, struct gb_ref ref, uint64_t bytes, int is_write)
{
    if (bytes == 0) return;
    if (ref.buf == GB_BUF_IN)
        access_user(b, b->in_base + ref.off, b->in_base + ref.off + bytes, is_write);
    else if (ref.buf == GB_BUF_OUT)
        access_user(b, b->out_base + ref.off, b->out_base + ref.off + bytes, is_write);
    else if (ref.buf == GB_BUF_RESIDUAL)
        gb_track_access(b, &b->residual, ref.off, ref.off + bytes, is_write);
    else
        gb_track_access(b, b->scratch + (ref.buf == GB_BUF_HOST), ref.off, ref.off + bytes, is_write);
}

uint32_t gb_b_send(struct gb_builder *b, uint32_t peer, struct gb_ref src, uint64_t bytes)
{
    struct gb_step *step = add_step(b, GB_STEP_SEND, GB_QUEUE_NET);
    if (!step) return 0;
    step->peer = peer;
    step->crosses = b->topo->island[peer] != b->isl;
    step->xid = b->send_xid[peer]++;
    step->src = src;
    step->bytes = bytes;
    *(step->crosses ? &b->plan->bridge_send_bytes : &b->plan->island_send_bytes) += bytes;
    touch(b, src, bytes, 0);
    return b->plan->nsteps - 1;
}

uint32_t gb_b_recv(struct gb_builder *b, uint32_t peer, struct gb_ref dst, uint64_t bytes)
{
    struct gb_step *step = add_step(b, GB_STEP_RECV, GB_QUEUE_NET);
    if (!step) return 0;
    step->peer = peer;
    step->crosses = b->topo->island[peer] != b->isl;
    step->xid = b->recv_xid[peer]++;
    step->dst = dst;
    step->bytes = bytes;
    touch(b, dst, bytes, 1);
    return b->plan->nsteps - 1;
}

void gb_b_copy(struct gb_builder *b, uint32_t queue, struct gb_ref src, struct gb_ref dst, uint64_t bytes)
{
    struct gb_step *step = bytes ? add_step(b, GB_STEP_COPY, queue) : NULL;
    if (!step) return;
    step->src = src;
    step->dst = dst;
    step->bytes = bytes;
    touch(b, src, bytes, 0);
    touch(b, dst, bytes, 1);
}

void gb_b_open_slot(struct gb_builder *b, uint64_t chunk)
{
    gb_b_use_slot(b, chunk);
    b->bump[0][b->slot] = b->bump[1][b->slot] = 0;
    b->kept[chunk % GB_STAGES].n = b->kept[chunk % GB_STAGES].pos = 0;
}

void gb_b_use_slot(struct gb_builder *b, uint64_t chunk)
{
    b->slot = (uint32_t)(chunk % b->depth);
    b->last_bytes = 0;
}

static struct gb_ref take_slot(struct gb_builder *b, int is_host, uint64_t bytes)
{
    uint64_t *bump = b->bump[is_host] + b->slot;
    struct gb_ref ref = gb_at(is_host ? GB_BUF_HOST : GB_BUF_DEV, (uint64_t)b->slot << GB_SLOT_SHIFT | *bump);
    *bump += (bytes + 255) & ~(uint64_t)255; /* 256: what device memory and vector loads like */
    if (b->slot >= b->nslots) b->nslots = b->slot + 1;
    if (*bump > b->peak[is_host]) b->peak[is_host] = *bump;
    return ref;
}

struct gb_ref gb_b_scratch(struct gb_builder *b, uint64_t bytes)
{
    return take_slot(b, !b->staged, bytes);
}

struct gb_ref gb_b_staging(struct gb_builder *b, uint64_t bytes)
{
    return take_slot(b, 1, bytes);
}

struct gb_ref gb_b_stage_out(struct gb_builder *b, struct gb_ref from, uint64_t bytes)
{
    if (!b->staged || bytes == 0) return from;
    if (bytes == b->last_bytes && from.off == b->last_from.off && from.buf == b->last_from.buf) return b->last_staged;
    struct gb_ref host = gb_b_staging(b, bytes);
    gb_b_copy(b, GB_QUEUE_OUT, from, host, bytes);
    b->last_from = from;
    b->last_bytes = bytes;
    b->last_staged = host;
    return host;
}

struct gb_ref gb_b_recv_to(struct gb_builder *b, uint32_t list, uint32_t peer, struct gb_ref dst, uint64_t bytes)
{
    if (!b->staged) {
        gb_b_recv(b, peer, dst, bytes);
        return dst;
    }
    struct gb_ref host = gb_b_staging(b, bytes);
    struct gb_landings *l = b->land + list;
    gb_b_recv(b, peer, host, bytes);
    if (gb_grow(b, (void **)&l->v, &l->cap, l->n + 1, sizeof *l->v))
        l->v[l->n++] = (struct gb_landing){host, dst, bytes};
    return host;
}

void gb_b_land(struct gb_builder *b, uint32_t list)
{
    struct gb_landings *l = b->land + list;
    for (uint32_t i = 0; i < l->n; i++) gb_b_copy(b, GB_QUEUE_IN, l->v[i].from, l->v[i].to, l->v[i].bytes);
    l->n = 0;
}

static void add_call(struct gb_builder *b, uint32_t mate, struct gb_ref ref, uint64_t bytes, int is_recv)
{
    if (!gb_grow(b, (void **)&b->call, &b->call_cap, b->ncall + 1, sizeof *b->call)) return;
    b->call[b->ncall++] =
        (struct gb_part){.ref = ref, .bytes = bytes, .peer = b->topo->local[mate], .is_recv = (uint8_t)is_recv};
}

void gb_b_give(struct gb_builder *b, uint32_t mate, struct gb_ref src, uint64_t bytes)
{
    if (bytes == 0) return;
    if (b->vendor)
        add_call(b, mate, src, bytes, 0);
    else
        gb_b_send(b, mate, gb_b_stage_out(b, src, bytes), bytes);
}

void gb_b_take(struct gb_builder *b, uint32_t list, uint32_t mate, struct gb_ref dst, uint64_t bytes)
{
    if (bytes == 0) return;
    if (b->vendor)
        add_call(b, mate, dst, bytes, 1);
    else
        gb_b_recv_to(b, list, mate, dst, bytes);
}

void gb_b_call(struct gb_builder *b)
{
    struct gb_plan *p = b->plan;
    if (!b->vendor) return;
    struct gb_step *step = add_step(b, GB_STEP_VENDOR, GB_QUEUE_VENDOR);
    if (!step || !gb_grow(b, (void **)&p->parts, &b->part_cap, p->nparts + b->ncall, sizeof *p->parts)) return;
    step->nparts = b->ncall;
    for (uint32_t i = 0; i < b->ncall; i++) {
        p->parts[p->nparts++] = b->call[i];
        if (!b->call[i].is_recv) p->island_send_bytes += b->call[i].bytes;
        touch(b, b->call[i].ref, b->call[i].bytes, b->call[i].is_recv);
    }
    b->ncall = 0;
    p->uses_vendor = 1;
}

void gb_b_add(struct gb_builder *b, struct gb_ref ref, int is_acc)
{
    if (gb_grow(b, (void **)&b->fold, &b->fold_cap, b->nfold + 1, sizeof *b->fold))
        b->fold[b->nfold++] = (struct gb_fold_src){.ref = ref, .store = is_acc ? GB_STORE_ACC : GB_STORE_RAW};
}

void gb_b_add_encoded(struct gb_builder *b, struct gb_ref ref, uint32_t from)
{
    if (gb_grow(b, (void **)&b->fold, &b->fold_cap, b->nfold + 1, sizeof *b->fold))
        b->fold[b->nfold++] = (struct gb_fold_src){ref, GB_STORE_ENC, from};
}

static uint64_t stored_bytes(const struct gb_builder *b, int store, uint64_t count)
{
    if (store == GB_STORE_ENC) return gb_codec_bytes(b->codec, count);
    return count * (store == GB_STORE_ACC ? b->as : b->es);
}

static void add_reduce(struct gb_builder *b, uint32_t queue, const struct gb_fold_src *src, uint32_t nsrc,
                       struct gb_ref dst, uint64_t count, int dst_store, int final)
{
    struct gb_plan *p = b->plan;
    struct gb_step *step = add_step(b, GB_STEP_REDUCE, queue);
    if (!step || !gb_grow(b, (void **)&p->parts, &b->part_cap, p->nparts + nsrc, sizeof *p->parts)) return;
    step->dst = dst;
    step->count = count;
    step->dst_is_acc = dst_store == GB_STORE_ACC;
    step->dst_is_enc = dst_store == GB_STORE_ENC;
    step->final = (uint8_t) final;
    step->nparts = nsrc;
    for (uint32_t i = 0; i < nsrc; i++) {
        uint64_t bytes = stored_bytes(b, src[i].store, count);
        p->parts[p->nparts++] = (struct gb_part){.ref = src[i].ref,
                                                 .bytes = bytes,
                                                 .peer = src[i].from,
                                                 .is_acc = src[i].store == GB_STORE_ACC,
                                                 .is_enc = src[i].store == GB_STORE_ENC,
                                                 .premul = b->premul && src[i].store == GB_STORE_RAW};
        touch(b, src[i].ref, bytes, 0);
    }
    touch(b, dst, stored_bytes(b, dst_store, count), 1);
}

void gb_b_fold(struct gb_builder *b, uint32_t queue, struct gb_ref dst, uint64_t count, int dst_store, int final)
{
    struct gb_fold_src *src = b->fold;
    uint32_t left = b->nfold;
    b->nfold = 0;
    if (b->failed || count == 0) return;
    if (left > GB_REDUCE_MAX_SRC) {
        struct gb_ref sum = gb_b_scratch(b, count * b->as);
        for (; left > GB_REDUCE_MAX_SRC; left -= GB_REDUCE_MAX_SRC - 1) {
            add_reduce(b, queue, src, GB_REDUCE_MAX_SRC, sum, count, GB_STORE_ACC, 0);
            src += GB_REDUCE_MAX_SRC - 1; /* its last source makes room for the sum so far */
            *src = (struct gb_fold_src){.ref = sum, .store = GB_STORE_ACC};
        }
    }
    add_reduce(b, queue, src, left, dst, count, dst_store, final);
}

/* The last step is a message of `count` encoded values. */
static void note_encoded(struct gb_builder *b, uint64_t count, int final)
{
    if (b->failed) return;
    struct gb_step *step = b->plan->steps + b->plan->nsteps - 1;
    step->count = count;
    step->final = (uint8_t) final;
}

void gb_b_send_encoded(struct gb_builder *b, uint32_t peer, struct gb_ref message, uint64_t count, int final)
{
    uint64_t bytes = gb_codec_bytes(b->codec, count);
    gb_b_send(b, peer, gb_b_stage_out(b, message, bytes), bytes);
    note_encoded(b, count, final);
    b->plan->encoded_values += count;
}

struct gb_ref gb_b_recv_encoded(struct gb_builder *b, uint32_t list, uint32_t peer, uint64_t count, int final)
{
    uint64_t bytes = gb_codec_bytes(b->codec, count);
    struct gb_ref to = gb_b_scratch(b, bytes);
    gb_b_recv_to(b, list, peer, to, bytes);
    note_encoded(b, count, final);
    return to;
}

struct gb_ref gb_b_encode(struct gb_builder *b, uint32_t queue, uint64_t at, uint64_t count, int final)
{
    struct gb_ref to = gb_b_scratch(b, gb_codec_bytes(b->codec, count));
    gb_b_fold(b, queue, to, count, GB_STORE_ENC, final);
    if (b->failed || count == 0) return to;
    struct gb_step *step = b->plan->steps + b->plan->nsteps - 1;
    step->first = at;
    step->draw = !gb_spec_reduces(b->spec) ? b->me : final ? b->topo->nislands : b->isl;
    return to;
}

/* Folds the gathered accumulators, those of the mask times -`times`. */
static void fold_signed(struct gb_builder *b, uint32_t queue, struct gb_ref dst, uint64_t count, uint32_t negate,
                        uint32_t times)
{
    gb_b_fold(b, queue, dst, count, GB_STORE_ACC, 0);
    if (b->failed || count == 0) return;
    b->plan->steps[b->plan->nsteps - 1].negate = (uint8_t)negate;
    b->plan->steps[b->plan->nsteps - 1].times = times;
}

struct gb_ref gb_b_encode_partial(struct gb_builder *b, uint32_t queue, uint64_t at, uint64_t count)
{
    if (!b->feedback) return gb_b_encode(b, queue, at, count, 0);
    struct gb_ref residual = gb_at(GB_BUF_RESIDUAL, at * b->as);
    gb_b_add(b, residual, 1);
    gb_b_fold(b, queue, residual, count, GB_STORE_ACC, 0);
    gb_b_add(b, residual, 1);
    struct gb_ref message = gb_b_encode(b, queue, at, count, 0);
    /* What was lost, in two steps: only plain sources can change their sign. */
    gb_b_add_encoded(b, message, b->me);
    gb_b_add(b, residual, 1);
    fold_signed(b, queue, residual, count, 2, 1);
    gb_b_add(b, residual, 1);
    fold_signed(b, queue, residual, count, 1, 1);
    return message;
}

/* In a mean a loss counts as often as there are ranks: the residual belongs to the sum. */
struct gb_ref gb_b_encode_result(struct gb_builder *b, uint64_t at, uint64_t count)
{
    if (!b->feedback || count == 0) return gb_b_encode(b, GB_QUEUE_IN, at, count, 1);
    const uint32_t times = b->spec->reduce_op == GPUBRIDGE_AVG ? b->topo->nranks : 1;
    struct gb_ref sum = gb_b_scratch(b, count * b->as), left = gb_b_scratch(b, count * b->as);
    struct gb_ref residual = gb_at(GB_BUF_RESIDUAL, at * b->as);
    gb_b_fold(b, GB_QUEUE_IN, sum, count, GB_STORE_ACC, 0);
    gb_b_add(b, sum, 1);
    struct gb_ref message = gb_b_encode(b, GB_QUEUE_IN, at, count, 1);
    gb_b_add_encoded(b, message, b->me);
    gb_b_fold(b, GB_QUEUE_IN, left, count, GB_STORE_ACC, 0);
    gb_b_add(b, sum, 1);
    gb_b_add(b, left, 1);
    gb_b_add(b, residual, 1);
    fold_signed(b, GB_QUEUE_IN, residual, count, 2, times);
    return message;
}

void gb_b_decode(struct gb_builder *b, struct gb_ref ref, uint32_t from, struct gb_ref dst, uint64_t count)
{
    gb_b_add_encoded(b, ref, from);
    gb_b_fold(b, GB_QUEUE_IN, dst, count, GB_STORE_RAW, 0);
}

void gb_b_keep(struct gb_builder *b, uint64_t chunk, struct gb_ref ref)
{
    struct gb_refs *r = b->kept + chunk % GB_STAGES;
    if (gb_grow(b, (void **)&r->v, &r->cap, r->n + 1, sizeof *r->v)) r->v[r->n++] = ref;
}

struct gb_ref gb_b_kept(struct gb_builder *b, uint64_t chunk)
{
    struct gb_refs *r = b->kept + chunk % GB_STAGES;
    return r->pos < r->n ? r->v[r->pos++] : gb_at(GB_BUF_HOST, 0);
}
