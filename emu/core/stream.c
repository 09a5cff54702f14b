/* SPDX-License-Identifier: Apache-2.0
 * Streams: a queue and a worker thread each.  An operation never runs on the thread that queues it; the worker adds
 * seeded random delays.  Events are (stream, operation number) pairs, so waiting is waiting for a number.  */
#include "emu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

struct emu_op {
    struct emu_op *next;
    uint64_t seq, ticket; /* ticket: place in the hardware queue */
    emu_run_fn *run;
    void (*drop)(void *arg);
    const char *api;
    _Alignas(16) char arg[];
};

static _Atomic unsigned next_id;
static _Thread_local struct {
    struct emu_stream *s;
    unsigned generation;
} per_thread[EMU_MAX_DEVICES];

/* An operation left the stream: whoever waits for it or for an idle device may go on.  The device's count goes first,
 * so that a thread which has seen a stream end also sees its work gone from the device. */
static void finish_op(struct emu_stream *s, struct emu_op *op)
{
    struct emu_dev *dev = s->obj.dev;
    pthread_mutex_lock(&dev->mu);
    if (--dev->pending == 0) pthread_cond_broadcast(&dev->cv);
    pthread_mutex_unlock(&dev->mu);
    pthread_mutex_lock(&s->mu);
    s->done = op->seq;
    s->pending--;
    pthread_cond_broadcast(&s->cv);
    pthread_mutex_unlock(&s->mu);
    free(op);
}

/* Ring of a hardware queue: the packets of all its streams, in the order in which they came. */
static void take_ticket(struct emu_stream *s, struct emu_op *op)
{
    struct emu_dev *dev = s->obj.dev;
    if (!s->hw) return;
    pthread_mutex_lock(&dev->hw_mu);
    op->ticket = s->hw->given++;
    pthread_mutex_unlock(&dev->hw_mu);
}

static void await_ticket(struct emu_stream *s, const struct emu_op *op)
{
    struct emu_dev *dev = s->obj.dev;
    if (!s->hw) return;
    pthread_mutex_lock(&dev->hw_mu);
    while (s->hw->served != op->ticket) pthread_cond_wait(&dev->hw_cv, &dev->hw_mu);
    pthread_mutex_unlock(&dev->hw_mu);
}

static void serve_next(struct emu_stream *s)
{
    struct emu_dev *dev = s->obj.dev;
    if (!s->hw) return;
    pthread_mutex_lock(&dev->hw_mu);
    s->hw->served++;
    pthread_cond_broadcast(&dev->hw_cv);
    pthread_mutex_unlock(&dev->hw_mu);
}

static struct emu_op *next_op(struct emu_stream *s)
{
    pthread_mutex_lock(&s->mu);
    while (!s->head && !s->closing) pthread_cond_wait(&s->cv, &s->mu);
    struct emu_op *op = s->head;
    if (op) {
        s->head = op->next;
        if (!s->head) s->tail = &s->head;
    }
    pthread_mutex_unlock(&s->mu);
    return op;
}

static void unlink_stream(struct emu_stream *s)
{
    struct emu_dev *dev = s->obj.dev;
    pthread_mutex_lock(&dev->mu);
    for (struct emu_stream **at = &dev->streams; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    pthread_mutex_unlock(&dev->mu);
}

static void *worker(void *arg)
{
    struct emu_stream *s = arg;
    unsigned delay = emu_conf()->delay_us;
    /* The default slack of 50 us would make every short sleep a long one. */
    prctl(PR_SET_TIMERSLACK, 1000UL);
    struct emu_op *op;
    while ((op = next_op(s)) != NULL) {
        await_ticket(s, op);
        if (delay && (emu_rand(&s->rng) & 3) == 0) emu_sleep_us((unsigned)(emu_rand(&s->rng) % (delay + 1)));
        if (!atomic_load(&s->obj.dev->sticky)) op->run(s, op->api, op->arg);
        if (op->drop) op->drop(op->arg);
        serve_next(s);
        finish_op(s, op);
    }
    unlink_stream(s);
    emu_obj_put(s);
    return NULL;
}

int emu_stream_create(struct emu_dev *dev, unsigned flags, struct emu_stream **out)
{
    if (flags & ~1u) return EMU_INVALID;
    struct emu_stream *s = emu_obj_new(EMU_STREAM, sizeof *s, dev);
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->cv, NULL);
    s->tail = &s->head;
    s->nonblocking = flags & 1;
    s->id = atomic_fetch_add(&next_id, 1);
    s->rng = emu_conf()->seed ^ ((uint64_t)s->id * 0xD1B54A32D192ED03u);
    if (!s->rng) s->rng = 1;
    emu_obj_ref(s); /* the worker's */
    pthread_mutex_lock(&dev->mu);
    s->next = dev->streams;
    dev->streams = s;
    const unsigned queues = (unsigned)emu_conf()->hw_queues;
    if (queues) s->hw = &dev->hw[dev->nstreams++ % queues];
    pthread_mutex_unlock(&dev->mu);
    pthread_t thread;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int rc = pthread_create(&thread, &attr, worker, s);
    pthread_attr_destroy(&attr);
    if (rc) {
        emu_complain("cannot start a worker thread for a stream: %s", strerror(rc));
        unlink_stream(s);
        emu_obj_end(s);
        emu_obj_put(s);
        return EMU_OOM;
    }
    *out = s;
    return EMU_OK;
}

/* The handle ends now, the worker when the queue is empty. */
static void close_stream(struct emu_stream *s)
{
    pthread_mutex_lock(&s->mu);
    s->closing = true;
    pthread_cond_broadcast(&s->cv);
    pthread_mutex_unlock(&s->mu);
    emu_obj_end(s);
}

int emu_stream_destroy(struct emu_dev *dev, void *handle)
{
    struct emu_stream *s = emu_obj_get(EMU_STREAM, handle);
    if (!s) return EMU_BAD_HANDLE;
    close_stream(s);
    emu_obj_put(s);
    return EMU_OK;
}

void emu_stream_destroy_all(struct emu_dev *dev)
{
    for (;;) {
        pthread_mutex_lock(&dev->mu);
        struct emu_stream *s = dev->streams;
        while (s && s->condemned) s = s->next;
        if (s)
            s->condemned = true;
        else
            dev->generation++;
        dev->legacy = NULL;
        pthread_mutex_unlock(&dev->mu);
        if (!s) return;
        close_stream(s);
    }
}

/* The calling thread's default stream; made at first use and again after a context teardown. */
static struct emu_stream *thread_stream(struct emu_dev *dev)
{
    pthread_mutex_lock(&dev->mu);
    unsigned generation = dev->generation;
    pthread_mutex_unlock(&dev->mu);
    if (per_thread[dev->index].s && per_thread[dev->index].generation == generation) return per_thread[dev->index].s;
    struct emu_stream *s = NULL;
    if (emu_stream_create(dev, 0, &s) != EMU_OK) return NULL;
    per_thread[dev->index].s = s;
    per_thread[dev->index].generation = generation;
    return s;
}

static struct emu_stream *legacy_stream(struct emu_dev *dev)
{
    pthread_mutex_lock(&dev->mu);
    struct emu_stream *s = dev->legacy;
    pthread_mutex_unlock(&dev->mu);
    if (s) return s;
    if (emu_stream_create(dev, 0, &s) != EMU_OK) return NULL;
    pthread_mutex_lock(&dev->mu);
    struct emu_stream *extra = dev->legacy ? s : NULL;
    if (!dev->legacy) dev->legacy = s;
    s = dev->legacy;
    pthread_mutex_unlock(&dev->mu);
    if (extra) close_stream(extra);
    return s;
}

struct emu_stream *emu_stream_get(struct emu_dev *dev, void *handle)
{
    if ((uintptr_t)handle <= 2) {
        struct emu_stream *d = (uintptr_t)handle == 2 ? thread_stream(dev) : legacy_stream(dev);
        return d ? emu_obj_get(EMU_STREAM, d) : NULL;
    }
    struct emu_stream *s = emu_obj_get(EMU_STREAM, handle);
    if (s && s->obj.dev != dev) {
        emu_complain("stream %p belongs to device %d, but device %d is current", handle, s->obj.dev->index, dev->index);
        emu_obj_put(s);
        return NULL;
    }
    return s;
}

/* Appends; blocks while the queue is full. */
static int push(struct emu_stream *s, struct emu_op *op, uint64_t *seq)
{
    struct emu_dev *dev = s->obj.dev;
    pthread_mutex_lock(&s->mu);
    while (s->pending >= emu_conf()->queue && !s->closing) pthread_cond_wait(&s->cv, &s->mu);
    if (s->closing) {
        pthread_mutex_unlock(&s->mu);
        emu_complain("stream %p was destroyed while this call was waiting for room in its queue", (void *)s);
        if (op->drop) op->drop(op->arg);
        free(op);
        return EMU_BAD_HANDLE;
    }
    /* Counted before the worker can see it, so that the device never looks idle in between. */
    pthread_mutex_unlock(&s->mu);
    pthread_mutex_lock(&dev->mu);
    dev->pending++;
    pthread_mutex_unlock(&dev->mu);
    pthread_mutex_lock(&s->mu);
    op->seq = ++s->submitted;
    if (seq) *seq = op->seq;
    s->pending++;
    take_ticket(s, op);
    *s->tail = op;
    s->tail = &op->next;
    pthread_cond_broadcast(&s->cv);
    pthread_mutex_unlock(&s->mu);
    return EMU_OK;
}

static int post(struct emu_stream *s, emu_run_fn *run, void (*drop)(void *arg), const void *arg, size_t size,
                uint64_t *seq)
{
    struct emu_op *op = calloc(1, sizeof *op + size);
    if (!op) return EMU_OOM;
    op->run = run;
    op->drop = drop;
    op->api = emu_thread.api;
    if (size) memcpy(op->arg, arg, size);
    return push(s, op, seq);
}

/* Legacy default stream: its work comes after that of all blocking streams, and theirs after its. */
static int order_default(struct emu_stream *s)
{
    struct emu_dev *dev = s->obj.dev;
    struct emu_stream *other[64];
    uint64_t seq[64];
    int n = 0, rc = EMU_OK;
    if (s->nonblocking) return EMU_OK;
    pthread_mutex_lock(&dev->mu);
    bool legacy = dev->legacy == s;
    for (struct emu_stream *t = dev->legacy ? dev->streams : NULL; t && n < 64; t = t->next) {
        if (t == s || t->nonblocking || (!legacy && t != dev->legacy)) continue;
        pthread_mutex_lock(&t->mu);
        seq[n] = t->submitted;
        if (t->done < t->submitted) {
            emu_obj_ref(t);
            other[n++] = t;
        }
        pthread_mutex_unlock(&t->mu);
    }
    pthread_mutex_unlock(&dev->mu);
    for (int i = 0; i < n; i++) {
        if (!rc) rc = emu_post_wait(s, other[i], seq[i]);
        emu_obj_put(other[i]);
    }
    return rc;
}

int emu_post(struct emu_stream *s, emu_run_fn *run, void (*drop)(void *arg), const void *arg, size_t size,
             uint64_t *seq)
{
    int rc = order_default(s);
    return rc ? rc : post(s, run, drop, arg, size, seq);
}

struct wait_arg {
    struct emu_stream *other;
    uint64_t seq;
};

static void run_wait(struct emu_stream *s, const char *api, void *arg)
{
    struct wait_arg *w = arg;
    emu_stream_wait(w->other, w->seq, NULL);
}

static void drop_wait(void *arg)
{
    emu_obj_put(((struct wait_arg *)arg)->other);
}

int emu_post_wait(struct emu_stream *s, struct emu_stream *other, uint64_t seq)
{
    struct wait_arg w = {other, seq};
    emu_obj_ref(other);
    return post(s, run_wait, drop_wait, &w, sizeof w, NULL);
}

void emu_stream_wait(struct emu_stream *s, uint64_t seq, const _Atomic int *stop)
{
    pthread_mutex_lock(&s->mu);
    while (s->done < seq && !(stop && atomic_load(stop)) && !atomic_load(&s->obj.dev->sticky)) {
        struct timespec ts;
        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_nsec += 20 * 1000 * 1000; /* `stop` and sticky errors have nobody who signals */
        ts.tv_sec += ts.tv_nsec / 1000000000;
        ts.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&s->cv, &s->mu, &ts);
    }
    pthread_mutex_unlock(&s->mu);
}

bool emu_stream_is_done(struct emu_stream *s, uint64_t seq)
{
    pthread_mutex_lock(&s->mu);
    bool done = s->done >= seq;
    pthread_mutex_unlock(&s->mu);
    return done;
}

uint64_t emu_stream_last(struct emu_stream *s)
{
    pthread_mutex_lock(&s->mu);
    uint64_t seq = s->submitted;
    pthread_mutex_unlock(&s->mu);
    return seq;
}

int emu_stream_query(struct emu_stream *s)
{
    int sticky = atomic_load(&s->obj.dev->sticky);
    if (sticky) return sticky;
    return emu_stream_is_done(s, emu_stream_last(s)) ? EMU_OK : EMU_NOT_READY;
}

int emu_stream_sync(struct emu_stream *s)
{
    emu_stream_wait(s, emu_stream_last(s), NULL);
    return atomic_load(&s->obj.dev->sticky);
}

int emu_dev_sync(struct emu_dev *dev)
{
    emu_drain(dev, NULL);
    return atomic_load(&dev->sticky);
}
