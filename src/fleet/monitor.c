/* SPDX-License-Identifier: Apache-2.0
 * A running job: records of each step to streams, streams to the straggler engine, its reports to culprits and causes
 * (docs/fleet.md section 6).  Work and contention are taken out first; pauses have a counter of their own. */
#include "base/err.h"
#include "straggler/num.h"

#include <gpubridge/fleet.h>
#include <gpubridge/straggler.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KINDS       GPUBRIDGE_FLEET_OWN_KINDS
#define RECENT      128   /* values that give the size of a verdict */
#define FADED       0.5   /* of what the verdict said at least: below, it is over */
#define CHECK       4     /* steps between two looks at who may teach */
#define PAUSE       0.05  /* share of a rank's usual own time that a pause lasts at least */
#define PAUSE_RATE  0.002 /* healthy pauses per step before any are counted */
#define PAUSE_SEEN  500.0 /* steps that this guess counts for */
#define PAUSE_LEARN 400.0 /* steps before the counter of a rank is armed */
#define PAUSE_MORE  4.0   /* rate that is looked for, as a multiple of the healthy one ... */
#define PAUSE_STEP  0.02  /* ... and at least so much above it */
#define USUAL       256.0 /* steps that the usual own time remembers */

/* Engine kinds: computation first. */
static const int record_kind[KINDS] = {GPUBRIDGE_FLEET_COMPUTE, GPUBRIDGE_FLEET_MEMORY, GPUBRIDGE_FLEET_INPUT,
                                       GPUBRIDGE_FLEET_HOST};
static const int cause_of[KINDS] = {GPUBRIDGE_FLEET_CAUSE_COMPUTE, GPUBRIDGE_FLEET_CAUSE_MEMORY,
                                    GPUBRIDGE_FLEET_CAUSE_INPUT, GPUBRIDGE_FLEET_CAUSE_HOST};

struct pause {
    double usual;         /* own seconds of a step */
    double score;         /* log likelihood ratio of a raised rate */
    double steps, pauses; /* healthy ones */
    int64_t onset;
    int32_t recent, seen; /* pauses and steps since the onset */
    uint8_t alarmed, held;
};

struct gpubridge_fleet_monitor {
    struct gpubridge_fleet_monitor_config config;
    int ranks, channels, classes;
    int32_t *class_of;
    gpubridge_fleet_decomposer *decomposer;
    gpubridge_fleet_work *contention[2], *work[2]; /* computation, memory */
    gpubridge_straggler *own, *links;
    struct gpubridge_fleet_parts parts;
    double *seconds, *amounts, *transfer;
    uint8_t *present, *healthy, *link_present;
    int32_t *most_ends;
    float *overlap;              /* [2 * ranks] recent share of overlap */
    float *recent, *link_recent; /* [stream][RECENT] log seconds, as judged */
    int64_t *recent_step;        /* [RECENT] */
    struct pause *pause;
    double pause_threshold;
    int64_t steps;
};

void gpubridge_fleet_monitor_destroy(gpubridge_fleet_monitor *m)
{
    if (!m) return;
    gpubridge_fleet_decomposer_destroy(m->decomposer);
    for (int i = 0; i < 2; i++) {
        gpubridge_fleet_work_destroy(m->contention[i]);
        gpubridge_fleet_work_destroy(m->work[i]);
    }
    gpubridge_straggler_destroy(m->own);
    gpubridge_straggler_destroy(m->links);
    free(m->class_of);
    free(m->parts.own);
    free(m->parts.ends);
    free(m->seconds);
    free(m->present);
    free(m->recent);
    free(m->recent_step);
    free(m->pause);
    free(m);
}

static int allocate(gpubridge_fleet_monitor *m)
{
    size_t n = (size_t)m->ranks, c = (size_t)m->channels;
    m->class_of = calloc(n, sizeof *m->class_of);
    m->parts.struct_size = sizeof m->parts;
    m->parts.own = calloc(n * (KINDS + 4) + c, sizeof(double));
    m->parts.last = calloc(2 * c + 1, sizeof(int32_t));
    m->seconds = calloc(n * (KINDS + 3) + c + 1, sizeof *m->seconds);
    m->present = calloc(n * (KINDS + 2) + c + 1, 1);
    m->recent = calloc((n * KINDS + c) * RECENT + 2 * n, sizeof *m->recent);
    m->recent_step = calloc(RECENT, sizeof *m->recent_step);
    m->pause = calloc(n, sizeof *m->pause);
    if (!m->class_of || !m->parts.own || !m->parts.last || !m->seconds || !m->present || !m->recent ||
        !m->recent_step || !m->pause)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks, %d channels", m->ranks, m->channels);
    m->parts.overlap = m->parts.own + n * KINDS;
    m->parts.head = m->parts.overlap + 2 * n;
    m->parts.transfer = m->parts.head + 2 * n;
    m->parts.ends = m->parts.last;
    m->most_ends = m->parts.last + c;
    m->parts.last = NULL;
    m->amounts = m->seconds + n * KINDS;
    m->transfer = m->amounts + n * 3;
    m->healthy = m->present + n * KINDS;
    m->link_present = m->healthy + 2 * n;
    m->link_recent = m->recent + n * KINDS * RECENT;
    m->overlap = m->link_recent + c * RECENT;
    return GPUBRIDGE_OK;
}

static int open_parts(gpubridge_fleet_monitor *m, const struct gpubridge_fleet_monitor_config *c)
{
    static const double none = 0.0; /* contention is not expected until it is seen */
    struct gpubridge_fleet_work_config work = {
        .struct_size = sizeof work, .ranks = c->ranks, .covariates = c->covariates, .classes = m->class_of};
    struct gpubridge_fleet_work_config contention = work;
    contention.covariates = 1;
    contention.prior = &none;
    struct gpubridge_straggler_config own = {.struct_size = sizeof own,
                                             .ranks = c->ranks,
                                             .kinds = KINDS,
                                             .groups = m->class_of,
                                             .classes = m->class_of,
                                             .alarms = c->alarms,
                                             .days = c->days,
                                             .steps_per_second = c->steps_per_second,
                                             .min_slowdown = c->min_slowdown,
                                             .warmup_steps = c->warmup_steps};
    struct gpubridge_straggler_config links = own;
    links.ranks = c->channels;
    links.kinds = 1;
    links.groups = links.classes = NULL;
    links.use_peers = -1;
    GB_TRY(gpubridge_fleet_decomposer_create(c->ranks, c->channels, c->max_records, &m->decomposer));
    for (int i = 0; i < 2; i++) {
        GB_TRY(gpubridge_fleet_work_create(&contention, &m->contention[i]));
        if (c->covariates) GB_TRY(gpubridge_fleet_work_create(&work, &m->work[i]));
    }
    GB_TRY(gpubridge_straggler_create(&own, &m->own));
    if (c->channels > 0) GB_TRY(gpubridge_straggler_create(&links, &m->links));
    double alarms = c->alarms > 0.0 ? c->alarms : 1.0, days = c->days > 0.0 ? c->days : 30.0;
    double rate = c->steps_per_second > 0.0 ? c->steps_per_second : 1.0;
    m->pause_threshold = gb_log(days * 86400.0 * rate * (double)c->ranks / alarms);
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_monitor_create(const struct gpubridge_fleet_monitor_config *c, gpubridge_fleet_monitor **monitor)
{
    if (!c || !monitor || c->struct_size != sizeof *c || c->ranks < 1 || c->ranks > 1 << 16 || c->channels < 0 ||
        c->channels > 1 << 16 || c->covariates < 0 || c->covariates > 2)
        return GB_FAIL(
            GPUBRIDGE_ERR_INVALID,
            "fleet: a monitor of %d ranks, %d channels, %d covariates; legal are 1 ... 65536, 0 ... 65536, 0 ... 2",
            c ? c->ranks : 0, c ? c->channels : 0, c ? c->covariates : 0);
    for (int r = 0; c->classes && r < c->ranks; r++)
        if (c->classes[r] < 0 || c->classes[r] >= c->ranks)
            return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: classes[%d] is %d; legal are 0 ... ranks - 1", r,
                           c->classes[r]);
    gpubridge_fleet_monitor *m = calloc(1, sizeof *m);
    if (!m) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory");
    m->config = *c;
    m->ranks = c->ranks;
    m->channels = c->channels;
    int rc = allocate(m);
    for (int r = 0; rc == GPUBRIDGE_OK && r < m->ranks; r++) {
        m->class_of[r] = c->classes ? c->classes[r] : 0;
        if (m->class_of[r] >= m->classes) m->classes = m->class_of[r] + 1;
    }
    if (rc == GPUBRIDGE_OK) rc = open_parts(m, c);
    if (rc != GPUBRIDGE_OK) {
        gpubridge_fleet_monitor_destroy(m);
        return rc;
    }
    m->config.classes = NULL;
    for (int r = 0; r < m->ranks; r++) m->healthy[r] = m->healthy[m->ranks + r] = 1;
    *monitor = m;
    return GPUBRIDGE_OK;
}

/* ---- pauses ---- */

/* Healthy pauses per step of a rank's class, the others counted too. */
static double pause_rate(const gpubridge_fleet_monitor *m, int rank)
{
    double pauses = PAUSE_RATE * PAUSE_SEEN, steps = PAUSE_SEEN;
    for (int r = 0; r < m->ranks; r++) {
        pauses += m->pause[r].pauses;
        steps += m->pause[r].steps;
    }
    double own = (m->pause[rank].pauses + 1.0) / (m->pause[rank].steps + PAUSE_SEEN), all = pauses / steps;
    return own > all ? own : all;
}

static double raised(double rate)
{
    double more = PAUSE_MORE * rate > rate + PAUSE_STEP ? PAUSE_MORE * rate : rate + PAUSE_STEP;
    return more < 0.9 ? more : 0.9;
}

/* Counts a pause or its absence; returns the host's seconds without it, 0 where there was one. */
static double count_pause(gpubridge_fleet_monitor *m, int64_t step, int rank, double host, double busy)
{
    struct pause *p = &m->pause[rank];
    if (p->held) return host;
    double n = p->steps + p->recent < USUAL ? p->steps + (double)p->seen + 1.0 : USUAL;
    int paused = p->usual > 0.0 && host > PAUSE * p->usual;
    if (!paused || p->usual == 0.0) p->usual += (busy - p->usual) / n;
    if (p->alarmed) return paused ? 0.0 : host;
    if (p->steps + (double)p->seen < PAUSE_LEARN) {
        p->steps += 1.0;
        p->pauses += (double)paused;
        return paused ? 0.0 : host;
    }
    double p0 = pause_rate(m, rank), p1 = raised(p0);
    double score = p->score + (paused ? gb_log(p1 / p0) : gb_log((1.0 - p1) / (1.0 - p0)));
    if (score <= 0.0) { /* all since the last zero was healthy */
        p->steps += (double)p->seen + 1.0;
        p->pauses += (double)p->recent + (paused ? 1.0 : 0.0);
        if (p->steps > 65536.0) {
            p->steps *= 0.5;
            p->pauses *= 0.5;
        }
        p->score = 0.0;
        p->recent = p->seen = 0;
    } else {
        if (p->score == 0.0) p->onset = step;
        p->score = score;
        p->seen++;
        p->recent += paused;
        p->alarmed = score > m->pause_threshold;
    }
    return paused ? 0.0 : host;
}

/* ---- one step ---- */

static void keep(float *ring, int64_t step, double seconds)
{
    ring[step % RECENT] = seconds > 0.0 ? (float)gb_log(seconds) : NAN;
}

/* Takes contention out of the kernels behind the step's first transfer: their ratio to those before it depends on the
 * share of overlap, and on nothing that a fault of the device would change. */
static int remove_contention(gpubridge_fleet_monitor *m, int kind)
{
    size_t n = (size_t)m->ranks;
    double *seconds = m->seconds + (size_t)kind * n, *ratio = m->amounts, *overlap = m->amounts + n;
    const double *head = m->parts.head + (size_t)kind * n, *share = m->parts.overlap + (size_t)kind * n;
    for (size_t r = 0; r < n; r++) {
        m->overlap[(size_t)kind * n + r] += ((float)share[r] - m->overlap[(size_t)kind * n + r]) / 32.0f;
        ratio[r] = head[r] > 0.0 && seconds[r] > head[r] ? (seconds[r] - head[r]) / head[r] : 0.0;
        overlap[r] = gb_exp(share[r]);
    }
    GB_TRY(gpubridge_fleet_work_step(m->contention[kind], ratio, overlap, m->healthy + (size_t)kind * n));
    for (size_t r = 0; r < n; r++)
        if (ratio[r] > 0.0) seconds[r] = head[r] * (1.0 + ratio[r]);
    return GPUBRIDGE_OK;
}

/* Own seconds of the kinds with contention and work taken out; marks what is missing. */
static int load(gpubridge_fleet_monitor *m, int64_t step, const double *amounts)
{
    size_t n = (size_t)m->ranks;
    for (int k = 0; k < KINDS; k++)
        memcpy(m->seconds + (size_t)k * n, m->parts.own + (size_t)record_kind[k] * n, n * sizeof(double));
    for (int r = 0; r < m->ranks; r++) {
        double busy = m->seconds[r] + m->seconds[n + (size_t)r], *host = &m->seconds[3 * n + (size_t)r];
        if (*host > 0.0 && busy > 0.0) *host = count_pause(m, step, r, *host, busy);
    }
    for (int k = 0; k < 2; k++) {
        GB_TRY(remove_contention(m, k));
        if (m->work[k])
            GB_TRY(
                gpubridge_fleet_work_step(m->work[k], m->seconds + (size_t)k * n, amounts, m->healthy + (size_t)k * n));
    }
    for (size_t i = 0; i < KINDS * n; i++) {
        m->present[i] = m->seconds[i] >= 1e-12;
        keep(m->recent + i * RECENT, m->steps, m->present[i] ? m->seconds[i] : 0.0);
        if (!m->present[i]) m->seconds[i] = 1.0;
    }
    return GPUBRIDGE_OK;
}

/* Transfers count where every member that was ever seen is there: else waiting could pass for transfer. */
static void load_links(gpubridge_fleet_monitor *m)
{
    for (int c = 0; c < m->channels; c++) {
        if (m->parts.ends[c] > m->most_ends[c]) m->most_ends[c] = m->parts.ends[c];
        int whole = m->most_ends[c] >= 2 && m->parts.ends[c] == m->most_ends[c] && m->parts.transfer[c] >= 1e-12;
        m->link_present[c] = (uint8_t)whole;
        m->transfer[c] = whole ? m->parts.transfer[c] : 1.0;
        keep(m->link_recent + (size_t)c * RECENT, m->steps, whole ? m->transfer[c] : 0.0);
    }
}

static int note_healthy(gpubridge_fleet_monitor *m)
{
    struct gpubridge_straggler_report report = {.struct_size = sizeof report};
    for (int k = 0; k < 2; k++) {
        for (int r = 0; r < m->ranks; r++) {
            GB_TRY(gpubridge_straggler_report(m->own, r, k, &report));
            m->healthy[k * m->ranks + r] =
                report.state <= GPUBRIDGE_STRAGGLER_HEALTHY; /* warming up and learning ranks teach too */
        }
    }
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_monitor_step(gpubridge_fleet_monitor *m, int64_t step, const struct gpubridge_fleet_record *records,
                                 int32_t count, const double *amounts)
{
    if (!m || (m->config.covariates > 0 && !amounts))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: monitor or amounts is NULL");
    if (m->steps > 0 && step <= m->recent_step[(m->steps - 1) % RECENT])
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: step %lld after step %lld; step numbers must grow",
                       (long long)step, (long long)m->recent_step[(m->steps - 1) % RECENT]);
    GB_TRY(gpubridge_fleet_decompose(m->decomposer, records, count, &m->parts));
    GB_TRY(load(m, step, amounts));
    GB_TRY(gpubridge_straggler_step(m->own, step, m->seconds, m->present, NULL));
    if (m->links) {
        load_links(m);
        GB_TRY(gpubridge_straggler_step(m->links, step, m->transfer, m->link_present, NULL));
    }
    m->recent_step[m->steps % RECENT] = step;
    m->steps++;
    return m->steps % CHECK == 0 ? note_healthy(m) : GPUBRIDGE_OK;
}

int gpubridge_fleet_monitor_hold(gpubridge_fleet_monitor *m, int32_t rank, int32_t begin)
{
    if (!m) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: monitor is NULL");
    GB_TRY(gpubridge_straggler_hold(m->own, rank, begin));
    if (m->links) GB_TRY(gpubridge_straggler_hold(m->links, -1, begin)); /* nobody's transfers are as usual */
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? m->ranks : rank + 1); r++) m->pause[r].held = begin != 0;
    return GPUBRIDGE_OK;
}

int gpubridge_fleet_monitor_restart(gpubridge_fleet_monitor *m, int32_t rank)
{
    if (!m) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: monitor is NULL");
    GB_TRY(gpubridge_straggler_restart(m->own, rank));
    for (int k = 0; k < 2; k++) {
        GB_TRY(gpubridge_fleet_work_restart(m->contention[k], rank));
        if (m->work[k]) GB_TRY(gpubridge_fleet_work_restart(m->work[k], rank));
    }
    if (m->links) GB_TRY(gpubridge_straggler_restart(m->links, -1)); /* its links are new ones */
    for (int r = rank < 0 ? 0 : rank; r < (rank < 0 ? m->ranks : rank + 1); r++) m->pause[r] = (struct pause){0};
    return GPUBRIDGE_OK;
}

/* ---- verdicts ---- */

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

/* Median of the recent log seconds since `onset`, NaN: none. */
static double recent_level(const gpubridge_fleet_monitor *m, const float *ring, int64_t onset)
{
    float v[RECENT];
    int n = 0, kept = m->steps < RECENT ? (int)m->steps : RECENT;
    for (int i = 0; i < kept; i++)
        if (!isnan(ring[i]) && m->recent_step[i] >= onset) v[n++] = ring[i];
    if (n == 0) return NAN;
    qsort(v, (size_t)n, sizeof *v, ascending);
    return (double)v[n / 2];
}

/* Slowdown of a confirmed stream: its recent level over its own learned one, less what its class peers did. */
static double size_of(const gpubridge_fleet_monitor *m, int kind, int rank,
                      const struct gpubridge_straggler_report *own)
{
    size_t n = (size_t)m->ranks;
    double now = recent_level(m, m->recent + ((size_t)kind * n + (size_t)rank) * RECENT, own->onset), sum = 0.0;
    int peers = 0;
    if (isnan(now)) return own->slowdown;
    for (int r = 0; own->has_peers && r < m->ranks; r++) {
        struct gpubridge_straggler_report other = {.struct_size = sizeof other};
        if (r == rank || m->class_of[r] != m->class_of[rank]) continue;
        if (gpubridge_straggler_report(m->own, r, kind, &other) != GPUBRIDGE_OK ||
            other.state != GPUBRIDGE_STRAGGLER_HEALTHY)
            continue;
        double level = recent_level(m, m->recent + ((size_t)kind * n + (size_t)r) * RECENT, own->onset);
        if (isnan(level)) continue;
        sum += level - gb_log(other.level_seconds);
        peers++;
    }
    return gb_exp(now - gb_log(own->level_seconds) - (peers ? sum / (double)peers : 0.0)) - 1.0;
}

/* How much of a slowdown may be contention that was not taken off exactly: the doubt of its slope times the change of
 * overlap. */
static int contention_doubt(const gpubridge_fleet_monitor *m, int kind, int rank, double *doubt)
{
    double error, usual;
    GB_TRY(gpubridge_fleet_work_doubt(m->contention[kind], rank, 0, &error, &usual));
    *doubt = 2.0 * error * fabs((double)m->overlap[kind * m->ranks + rank] - usual);
    return GPUBRIDGE_OK;
}

struct list {
    struct gpubridge_fleet_verdict *v;
    int32_t capacity, count;
};

static void add(struct list *l, struct gpubridge_fleet_verdict v)
{
    if (l->count < l->capacity) l->v[l->count] = v;
    l->count++;
}

static int slower(const struct gpubridge_straggler_report *r)
{
    return r->state == GPUBRIDGE_STRAGGLER_CONFIRMED && (r->answers & GPUBRIDGE_STRAGGLER_SLOWER_THAN_PAST);
}

/* A fault of the device shows in its computation and, less, in its memory kernels, or the other way round: the
 * larger one is the cause. */
static int judge_rank(gpubridge_fleet_monitor *m, int rank, struct list *l)
{
    struct gpubridge_fleet_verdict found[KINDS];
    int is[KINDS] = {0};
    for (int k = 0; k < KINDS; k++) {
        struct gpubridge_straggler_report r = {.struct_size = sizeof r};
        GB_TRY(gpubridge_straggler_report(m->own, rank, k, &r));
        is[k] = slower(&r);
        if (!is[k]) continue;
        double doubt = 0.0;
        if (k < 2) GB_TRY(contention_doubt(m, k, rank, &doubt));
        found[k] =
            (struct gpubridge_fleet_verdict){cause_of[k], rank, -1, r.has_peers, size_of(m, k, rank, &r), r.onset};
        /* what is over, or might be contention, is not named */
        if (found[k].slowdown < FADED * r.slowdown_low || found[k].slowdown < doubt) is[k] = 0;
    }
    if (is[0] && is[1]) is[found[0].slowdown >= found[1].slowdown ? 1 : 0] = 0;
    for (int k = 0; k < KINDS; k++)
        if (is[k]) add(l, found[k]);
    const struct pause *p = &m->pause[rank];
    if (p->alarmed)
        add(l, (struct gpubridge_fleet_verdict){GPUBRIDGE_FLEET_CAUSE_PAUSES, rank, -1, 1,
                                                (double)p->recent / (double)p->seen, p->onset});
    return GPUBRIDGE_OK;
}

static int judge_slow_parts(gpubridge_fleet_monitor *m, struct list *l)
{
    size_t n = (size_t)m->ranks;
    double *levels = calloc(2 * n, sizeof *levels);
    uint8_t *slow = calloc(n, 1);
    int rc =
        levels && slow ? GPUBRIDGE_OK : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "fleet: no memory for %d ranks", m->ranks);
    for (int r = 0; rc == GPUBRIDGE_OK && r < m->ranks; r++) {
        struct gpubridge_straggler_report report = {.struct_size = sizeof report};
        rc = gpubridge_straggler_report(m->own, r, 0, &report);
        double usual = 1.0, contention = 1.0, all = m->seconds[r], head = all > 0.0 ? m->parts.head[r] / all : 1.0;
        if (rc == GPUBRIDGE_OK && m->work[0]) rc = gpubridge_fleet_work_usual(m->work[0], r, &usual);
        if (rc == GPUBRIDGE_OK) rc = gpubridge_fleet_work_usual(m->contention[0], r, &contention);
        if (head < 1.0 && all != 1.0)
            usual *= head + (1.0 - head) * contention; /* a slow device meets fewer transfers */
        levels[r] = report.learned_steps >= 100.0 ? report.level_seconds / usual : 0.0;
    }
    if (rc == GPUBRIDGE_OK)
        rc = gpubridge_fleet_lottery(m->ranks, levels, m->class_of, m->config.lottery, levels + n, slow);
    for (int r = 0; rc == GPUBRIDGE_OK && r < m->ranks; r++)
        if (slow[r])
            add(l, (struct gpubridge_fleet_verdict){GPUBRIDGE_FLEET_CAUSE_SLOW_PART, r, -1, 1,
                                                    levels[n + (size_t)r] - 1.0, -1});
    free(levels);
    free(slow);
    return rc;
}

int gpubridge_fleet_monitor_verdicts(gpubridge_fleet_monitor *m, struct gpubridge_fleet_verdict *verdicts,
                                     int32_t capacity, int32_t *count)
{
    if (!m || capacity < 0 || (capacity && !verdicts) || !count)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: monitor, verdicts or count is NULL");
    struct list l = {verdicts, capacity, 0};
    for (int r = 0; r < m->ranks; r++) GB_TRY(judge_rank(m, r, &l));
    for (int c = 0; c < m->channels; c++) {
        struct gpubridge_straggler_report r = {.struct_size = sizeof r};
        GB_TRY(gpubridge_straggler_report(m->links, c, 0, &r));
        if (!slower(&r)) continue;
        double now = recent_level(m, m->link_recent + (size_t)c * RECENT, r.onset);
        add(&l, (struct gpubridge_fleet_verdict){GPUBRIDGE_FLEET_CAUSE_LINK, -1, c, 0,
                                                 isnan(now) ? r.slowdown : gb_exp(now - gb_log(r.level_seconds)) - 1.0,
                                                 r.onset});
    }
    GB_TRY(judge_slow_parts(m, &l));
    *count = l.count < capacity ? l.count : capacity;
    return GPUBRIDGE_OK;
}

/* Rate at which the counter passes its threshold within `steps` in 95 of 100 cases. */
static double detectable_pauses(const gpubridge_fleet_monitor *m, int rank, double steps)
{
    double p0 = pause_rate(m, rank), p1 = raised(p0), up = gb_log(p1 / p0), down = gb_log((1.0 - p1) / (1.0 - p0));
    for (int i = 0; p0 + 0.001 * (double)i < 0.9; i++) {
        double p = p0 + 0.001 * (double)i;
        double drift = p * up + (1.0 - p) * down, spread = (up - down) * sqrt(p * (1.0 - p) * steps);
        if (drift > 0.0 && steps * drift - 1.645 * spread >= m->pause_threshold) return p - p0;
    }
    return -1.0;
}

int gpubridge_fleet_monitor_detectable(const gpubridge_fleet_monitor *m, int32_t cause, int32_t where, double steps,
                                       double *size)
{
    if (!m || !size || where < 0 || where >= (cause == GPUBRIDGE_FLEET_CAUSE_LINK ? m->channels : m->ranks))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: cause %d at %d, or an argument is NULL", cause, where);
    if (cause == GPUBRIDGE_FLEET_CAUSE_LINK)
        return gpubridge_straggler_detectable(m->links, where, 0, steps, 0.95, size);
    if (cause == GPUBRIDGE_FLEET_CAUSE_PAUSES) {
        *size = m->pause[where].steps < PAUSE_LEARN ? -1.0 : detectable_pauses(m, where, steps);
        return GPUBRIDGE_OK;
    }
    for (int k = 0; k < KINDS; k++)
        if (cause_of[k] == cause) return gpubridge_straggler_detectable(m->own, where, k, steps, 0.95, size);
    return GB_FAIL(GPUBRIDGE_ERR_INVALID, "fleet: cause %d has no detectable size", cause);
}
