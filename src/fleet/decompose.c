/* SPDX-License-Identifier: Apache-2.0
 * One step's records taken apart (docs/fleet.md section 2): own work, pure transfer, waiting, overlap, and whom the
 * waiting is charged to.  Only intervals of one clock are subtracted, so clocks of different ranks may stand anywhere.
 */
#include "base/err.h"

#include <gpubridge/fleet.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROBUST_MEMBERS 16   /* from here on the second shortest duration is the transfer */
#define CHAIN          64   /* transfers that lateness is followed through */
#define TOUCH          1e-6 /* seconds between an end and a start that belong together */

struct transfer {
    int32_t channel, op, members;
    int32_t last;         /* record of the rank that arrived last */
    double first, second; /* shortest durations */
    double waited;        /* sum over members */
};

struct gpubridge_fleet_decomposer {
    int32_t ranks, channels, capacity, slots;
    int32_t *begin;   /* [ranks + 1]: slices of `order` */
    int32_t *order;   /* record indices by rank, in order of start */
    int32_t *slot;    /* hash table of transfers, -1: free */
    int32_t *belongs; /* transfer of a record, -1: own work */
    int32_t *before;  /* the rank's transfer before this one, as record index, -1: none */
    struct transfer *transfer;
    double *previous_end; /* [ranks]: end of the last transfer of the step before, NaN: none */
    double *worst;        /* [channels] */
};

void gpubridge_fleet_decomposer_destroy(gpubridge_fleet_decomposer *d)
{
    if (!d) return;
    free(d->begin);
    free(d->order);
    free(d->slot);
    free(d->belongs);
    free(d->before);
    free(d->transfer);
    free(d->previous_end);
    free(d->worst);
    free(d);
}

int gpubridge_fleet_decomposer_create(int32_t ranks, int32_t channels, int32_t max_records,
                                      gpubridge_fleet_decomposer **decomposer)
{
    if (!decomposer || ranks < 1 || ranks > 1 << 20 || channels < 0 || channels > 1 << 20 || max_records < 1 ||
        max_records > 1 << 26)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "fleet: %d ranks, %d channels, %d records; legal are 1 ... 2^20, 0 ... 2^20, 1 ... 2^26", ranks,
                       channels, max_records);
    gpubridge_fleet_decomposer *d = calloc(1, sizeof *d);
    if (!d) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory");
    size_t n = (size_t)max_records;
    d->ranks = ranks;
    d->channels = channels;
    d->capacity = max_records;
    for (d->slots = 16; d->slots < 2 * max_records;) d->slots *= 2;
    d->begin = calloc((size_t)ranks + 1, sizeof *d->begin);
    d->order = calloc(n, sizeof *d->order);
    d->slot = calloc((size_t)d->slots, sizeof *d->slot);
    d->belongs = calloc(n, sizeof *d->belongs);
    d->before = calloc(n, sizeof *d->before);
    d->transfer = calloc(n, sizeof *d->transfer);
    d->previous_end = calloc((size_t)ranks, sizeof *d->previous_end);
    d->worst = calloc((size_t)channels + 1, sizeof *d->worst);
    if (!d->begin || !d->order || !d->slot || !d->belongs || !d->before || !d->transfer || !d->previous_end ||
        !d->worst) {
        gpubridge_fleet_decomposer_destroy(d);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d records a step", max_records);
    }
    for (int r = 0; r < ranks; r++) d->previous_end[r] = NAN;
    *decomposer = d;
    return GPUBRIDGE_OK;
}

static int check(const gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *r, int32_t count)
{
    if (count < 0 || count > d->capacity || (count && !r))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: %d records; this decomposer takes 0 ... %d a step", count,
                       d->capacity);
    for (int i = 0; i < count; i++) {
        int transfer = r[i].kind == GPUBRIDGE_FLEET_COLLECTIVE || r[i].kind == GPUBRIDGE_FLEET_HOP;
        if (r[i].rank < 0 || r[i].rank >= d->ranks || r[i].kind < 0 || r[i].kind > GPUBRIDGE_FLEET_HOP ||
            (transfer && (r[i].channel < 0 || r[i].channel >= d->channels)))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                           "fleet: record %d has rank %d, kind %d, channel %d; there are %d ranks, %d channels", i,
                           r[i].rank, r[i].kind, r[i].channel, d->ranks, d->channels);
        if (!(r[i].end >= r[i].start) || !(fabs(r[i].start) < 1e15) || !(r[i].end < 1e15) || isinf(r[i].ready))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: record %d of rank %d lasts from %g to %g", i, r[i].rank,
                           r[i].start, r[i].end);
        if (r[i].step != r[0].step)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                           "fleet: record %d is of step %lld, the first one of %lld; give one step at a time", i,
                           (long long)r[i].step, (long long)r[0].step);
    }
    return GPUBRIDGE_OK;
}

/* By start; a transfer before the work that begins with it. */
static int follows(const struct gpubridge_fleet_record *a, const struct gpubridge_fleet_record *b)
{
    if (a->start != b->start) return a->start > b->start;
    return a->kind < GPUBRIDGE_FLEET_COLLECTIVE && b->kind >= GPUBRIDGE_FLEET_COLLECTIVE;
}

/* Counting sort by rank, then insertion by start: a rank's records come almost sorted. */
static void sort(gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *r, int32_t count)
{
    memset(d->begin, 0, ((size_t)d->ranks + 1) * sizeof *d->begin);
    for (int i = 0; i < count; i++) d->begin[r[i].rank + 1]++;
    for (int k = 0; k < d->ranks; k++) d->begin[k + 1] += d->begin[k];
    for (int i = count - 1; i >= 0; i--) d->before[i] = -1;
    for (int i = 0; i < count; i++) d->order[d->begin[r[i].rank]++] = i;
    for (int k = d->ranks; k > 0; k--) d->begin[k] = d->begin[k - 1];
    d->begin[0] = 0;
    for (int k = 0; k < d->ranks; k++) {
        for (int a = d->begin[k] + 1; a < d->begin[k + 1]; a++) {
            int32_t moved = d->order[a];
            int b = a;
            for (; b > d->begin[k] && follows(&r[d->order[b - 1]], &r[moved]); b--) d->order[b] = d->order[b - 1];
            d->order[b] = moved;
        }
    }
}

static int32_t find(gpubridge_fleet_decomposer *d, int32_t *count, int32_t channel, int32_t op)
{
    uint64_t key = ((uint64_t)(uint32_t)channel << 32 | (uint32_t)op) * 0x9e3779b97f4a7c15u;
    for (uint32_t at = (uint32_t)(key >> 32) & (uint32_t)(d->slots - 1);; at = (at + 1) & (uint32_t)(d->slots - 1)) {
        int32_t t = d->slot[at];
        if (t < 0) {
            d->slot[at] = *count;
            d->transfer[*count] =
                (struct transfer){.channel = channel, .op = op, .last = -1, .first = INFINITY, .second = INFINITY};
            return (*count)++;
        }
        if (d->transfer[t].channel == channel && d->transfer[t].op == op) return t;
    }
}

/* The shortest durations of each operation; returns how many operations there are. */
static int32_t gather(gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *r, int32_t count)
{
    int32_t transfers = 0;
    memset(d->slot, 0xff, (size_t)d->slots * sizeof *d->slot);
    for (int i = 0; i < count; i++) {
        d->belongs[i] = -1;
        if (r[i].kind < GPUBRIDGE_FLEET_COLLECTIVE) continue;
        int32_t t = d->belongs[i] = find(d, &transfers, r[i].channel, r[i].op);
        struct transfer *x = &d->transfer[t];
        double length = r[i].end - r[i].start;
        x->members++;
        if (length < x->first) {
            x->second = x->first;
            x->first = length;
            x->last = i;
        } else if (length < x->second) {
            x->second = length;
        }
    }
    return transfers;
}

static double pure(const struct transfer *t)
{
    return t->members >= ROBUST_MEMBERS ? t->second : t->first;
}

/* Own seconds, transfer time that own work did not hide, and the transfer that precedes each transfer on a rank. */
static void walk_rank(gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *r, int rank,
                      const struct gpubridge_fleet_parts *p)
{
    double busy_from = 0.0, busy_to = -INFINITY; /* the union of transfers in progress */
    double work_from = 0.0, work_to = -INFINITY; /* the union of own work */
    double transfers = 0.0, hidden = 0.0, covered[2] = {0.0, 0.0}, head[2] = {0.0, 0.0}, last_ready = NAN,
           last_end = NAN;
    int working = 0; /* the kind of the last own work */
    double own[GPUBRIDGE_FLEET_OWN_KINDS] = {0};
    int32_t before = -1;
    for (int a = d->begin[rank]; a < d->begin[rank + 1]; a++) {
        const struct gpubridge_fleet_record *x = &r[d->order[a]];
        double length = x->end - x->start;
        if (x->kind >= GPUBRIDGE_FLEET_COLLECTIVE) {
            d->before[d->order[a]] = before;
            if (before < 0 || x->end >= r[before].end) before = d->order[a];
            double from = x->start > busy_to ? x->start : busy_to;
            if (x->end > from) transfers += x->end - from;
            if (x->start > busy_to) busy_from = x->start;
            if (x->end > busy_to) busy_to = x->end;
            double to = x->end < work_to ? x->end : work_to; /* own work that began before this transfer */
            from = from > work_from ? from : work_from;
            if (to > from) {
                hidden += to - from;
                covered[working] += to - from;
            }
            double ready = isnan(x->ready) ? x->start : x->ready;
            if (!(ready <= last_ready)) last_ready = ready;
            if (!(x->end <= last_end)) last_end = x->end;
        } else {
            own[x->kind] += length;
            working = x->kind == GPUBRIDGE_FLEET_MEMORY;
            if (before < 0 && (x->kind == GPUBRIDGE_FLEET_COMPUTE || x->kind == GPUBRIDGE_FLEET_MEMORY))
                head[working] += length;
            double from = x->start > busy_from ? x->start : busy_from, to = x->end < busy_to ? x->end : busy_to;
            if (to > from) {
                hidden += to - from;
                if (x->kind == GPUBRIDGE_FLEET_COMPUTE || x->kind == GPUBRIDGE_FLEET_MEMORY)
                    covered[working] += to - from;
            }
            work_from = x->start;
            work_to = x->end;
        }
    }
    double silent = own[0] + own[1] + own[2] + own[3];
    if (silent == 0.0 && last_ready > d->previous_end[rank]) /* only transfers are known: progress since the last one */
        own[GPUBRIDGE_FLEET_COMPUTE] = last_ready - d->previous_end[rank];
    d->previous_end[rank] = last_end;
    if (p->own)
        for (int k = 0; k < GPUBRIDGE_FLEET_OWN_KINDS; k++)
            p->own[(size_t)k * (size_t)d->ranks + (size_t)rank] = own[k];
    for (int k = 0; k < 2; k++) {
        double tail = own[k ? GPUBRIDGE_FLEET_MEMORY : GPUBRIDGE_FLEET_COMPUTE] - head[k];
        if (p->head) p->head[k * d->ranks + rank] = head[k];
        if (p->overlap)
            p->overlap[k * d->ranks + rank] = !(tail > 0.0) ? 0.0 : covered[k] < tail ? covered[k] / tail : 1.0;
    }
    if (p->exposed) p->exposed[rank] = transfers > hidden ? transfers - hidden : 0.0;
}

/* The rank whose own lateness made the last arriver of `t` late: a start that follows an earlier transfer at once was
 * decided there. */
static int32_t root(const gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *r, int32_t t)
{
    int32_t late = d->transfer[t].last;
    for (int i = 0; i < CHAIN; i++) {
        int32_t before = d->before[late];
        if (before < 0) break;
        double ready = isnan(r[late].ready) ? r[late].start : r[late].ready;
        if (r[before].end < ready - TOUCH) break;
        late = d->transfer[d->belongs[before]].last;
    }
    return r[late].rank;
}

static void charge(gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *r, int32_t count,
                   int32_t transfers, const struct gpubridge_fleet_parts *p)
{
    for (int i = 0; i < count; i++) {
        if (d->belongs[i] < 0) continue;
        struct transfer *t = &d->transfer[d->belongs[i]];
        double waited = r[i].end - r[i].start - pure(t);
        if (waited <= 0.0) continue;
        t->waited += waited;
        if (p->wait) p->wait[r[i].rank] += waited;
    }
    for (int c = 0; c < d->channels; c++) d->worst[c] = 0.0;
    for (int32_t i = 0; i < transfers; i++) {
        const struct transfer *t = &d->transfer[i];
        if (p->transfer) p->transfer[t->channel] += pure(t);
        if (p->ends && (p->ends[t->channel] == 0 || t->members < p->ends[t->channel])) p->ends[t->channel] = t->members;
        if (t->members < 2 || t->waited <= 0.0 || (!p->charged && !p->last)) continue;
        int32_t who = root(d, r, i);
        if (p->charged) p->charged[who] += t->waited;
        if (p->last && t->waited > d->worst[t->channel]) {
            d->worst[t->channel] = t->waited;
            p->last[t->channel] = who;
        }
    }
}

int gpubridge_fleet_decompose(gpubridge_fleet_decomposer *d, const struct gpubridge_fleet_record *records,
                              int32_t count, const struct gpubridge_fleet_parts *parts)
{
    if (!d || !parts || parts->struct_size != sizeof *parts)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: decomposer or parts is NULL, or struct_size is not %zu",
                       sizeof *parts);
    GB_TRY(check(d, records, count));
    size_t ranks = (size_t)d->ranks, channels = (size_t)d->channels;
    if (parts->wait) memset(parts->wait, 0, ranks * sizeof(double));
    if (parts->charged) memset(parts->charged, 0, ranks * sizeof(double));
    if (parts->transfer) memset(parts->transfer, 0, channels * sizeof(double));
    for (size_t c = 0; parts->last && c < channels; c++) parts->last[c] = -1;
    if (parts->ends) memset(parts->ends, 0, channels * sizeof *parts->ends);
    sort(d, records, count);
    int32_t transfers = gather(d, records, count);
    for (int k = 0; k < d->ranks; k++) walk_rank(d, records, k, parts);
    charge(d, records, count, transfers, parts);
    return GPUBRIDGE_OK;
}

/* Ends of all nodes, depth first; path[count] is scratch.  Returns the node that depends on itself, -1: none. */
static int32_t settle(int32_t count, const double *seconds, const int32_t *first, const int32_t *second,
                      const double *delay, double *end, uint8_t *state, int32_t *path)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t depth = 0;
        if (state[i] == 0) path[depth++] = i;
        while (depth > 0) {
            int32_t node = path[depth - 1], a = first[node], b = second[node];
            state[node] = 1; /* on the path; 2: done */
            int32_t open = a >= 0 && state[a] != 2 ? a : b >= 0 && state[b] != 2 ? b : -1;
            if (open >= 0) {
                if (state[open] == 1) return open;
                path[depth++] = open;
                continue;
            }
            double begin = a >= 0 ? end[a] : 0.0;
            if (b >= 0 && end[b] + delay[node] > begin) begin = end[b] + delay[node];
            end[node] = begin + seconds[node];
            state[node] = 2;
            depth--;
        }
    }
    return -1;
}

int gpubridge_fleet_makespan(int32_t count, const double *seconds, const int32_t *first, const int32_t *second,
                             const double *delay, double *span)
{
    if (count < 1 || !seconds || !first || !second || !delay || !span)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: makespan of %d nodes, or an argument is NULL", count);
    size_t n = (size_t)count;
    for (size_t i = 0; i < n; i++)
        if (first[i] < -1 || first[i] >= count || second[i] < -1 || second[i] >= count || !(seconds[i] >= 0.0))
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: node %zu takes %g s after nodes %d and %d of %d", i,
                           seconds[i], first[i], second[i], count);
    double *end = calloc(n, sizeof *end);
    uint8_t *state = calloc(n, 1);
    int32_t *path = calloc(n, sizeof *path), circle = -1;
    int rc = GPUBRIDGE_ERR_NO_MEMORY;
    if (end && state && path) {
        double last = 0.0;
        circle = settle(count, seconds, first, second, delay, end, state, path);
        for (size_t i = 0; i < n; i++)
            if (end[i] > last) last = end[i];
        rc = circle < 0 ? GPUBRIDGE_OK : GPUBRIDGE_ERR_INVALID;
        if (circle < 0) *span = last;
    }
    free(end);
    free(state);
    free(path);
    if (rc == GPUBRIDGE_ERR_INVALID) return GB_FAIL(rc, "fleet: node %d depends on itself", circle);
    if (rc != GPUBRIDGE_OK) return GB_FAIL(rc, "fleet: no memory for %d nodes", count);
    return GPUBRIDGE_OK;
}
