/* SPDX-License-Identifier: Apache-2.0
 * What streams do besides kernels and collectives: copies, fills, 32-bit memory operations, host functions, events.
 * Bodies run on the stream's worker.  */
#include "emu.h"

#include <string.h>

struct copy_arg {
    void *dst;
    const void *src;
    size_t size;
    unsigned char value;
};

static void run_copy(struct emu_stream *s, const char *api, void *arg)
{
    struct copy_arg *c = arg;
    void *dst = emu_mem_view(c->dst, c->size, api);
    const void *src = emu_mem_view(c->src, c->size, api);
    if (!dst || !src)
        emu_dev_fail(s->obj.dev, EMU_ILLEGAL_ADDRESS);
    else
        memmove(dst, src, c->size);
}

static void drop_copy(void *arg)
{
    const struct copy_arg *c = arg;
    emu_mem_hold(c->dst, false);
    emu_mem_hold(c->src, false);
}

int emu_copy(struct emu_stream *s, void *dst, const void *src, size_t size)
{
    struct copy_arg c = {.dst = dst, .src = src, .size = size};
    /* Wrong from the start is the caller's error, and not yet the device's. */
    if (!emu_mem_view(dst, size, emu_thread.api) || !emu_mem_view(src, size, emu_thread.api)) return EMU_INVALID;
    emu_mem_hold(dst, true);
    emu_mem_hold(src, true);
    return emu_post(s, run_copy, drop_copy, &c, sizeof c, NULL);
}

static void run_fill(struct emu_stream *s, const char *api, void *arg)
{
    struct copy_arg *c = arg;
    void *dst = emu_mem_view(c->dst, c->size, api);
    if (!dst)
        emu_dev_fail(s->obj.dev, EMU_ILLEGAL_ADDRESS);
    else
        memset(dst, c->value, c->size);
}

int emu_fill(struct emu_stream *s, void *dst, unsigned char value, size_t size)
{
    struct copy_arg c = {.dst = dst, .value = value, .size = size};
    if (!emu_mem_view(dst, size, emu_thread.api)) return EMU_INVALID;
    return emu_post(s, run_fill, NULL, &c, sizeof c, NULL);
}

struct flag_arg {
    void *addr;
    uint32_t value, mask;
    enum emu_wait how;
};

static _Atomic uint32_t *flag_at(struct emu_stream *s, const char *api, void *addr)
{
    void *view = emu_mem_view(addr, 4, api);
    if (!view) emu_dev_fail(s->obj.dev, EMU_ILLEGAL_ADDRESS);
    return view;
}

static void run_write32(struct emu_stream *s, const char *api, void *arg)
{
    struct flag_arg *f = arg;
    _Atomic uint32_t *flag = flag_at(s, api, f->addr);
    if (flag) atomic_store_explicit(flag, f->value, memory_order_release);
}

int emu_write32(struct emu_stream *s, void *addr, uint32_t value)
{
    struct flag_arg f = {.addr = addr, .value = value};
    if (!addr || (uintptr_t)addr % 4) return EMU_INVALID;
    return emu_post(s, run_write32, NULL, &f, sizeof f, NULL);
}

static bool is_met(const struct flag_arg *f, uint32_t now)
{
    switch (f->how) {
    case EMU_WAIT_GEQ:
        return emu_vendor.cyclic_wait ? (int32_t)(now - f->value) >= 0 : (now & f->mask) >= f->value;
    case EMU_WAIT_EQ:
        return (now & f->mask) == f->value;
    case EMU_WAIT_AND:
        return (now & f->mask & f->value) != 0;
    case EMU_WAIT_NOR:
        return (~(now | f->value) & f->mask) != 0;
    }
    return false;
}

/* The flag is a plain store of another thread, process or stream: nobody can wake us, so poll, more and more seldom. */
static void run_wait32(struct emu_stream *s, const char *api, void *arg)
{
    struct flag_arg *f = arg;
    _Atomic uint32_t *flag = flag_at(s, api, f->addr);
    unsigned pause_us = 5;
    while (flag && !is_met(f, atomic_load_explicit(flag, memory_order_acquire)) && !atomic_load(&s->obj.dev->sticky)) {
        emu_sleep_us(pause_us);
        pause_us += pause_us / 4 + 1;
        if (pause_us > emu_conf()->poll_us) pause_us = emu_conf()->poll_us;
    }
}

int emu_wait32(struct emu_stream *s, void *addr, uint32_t value, uint32_t mask, enum emu_wait how)
{
    struct flag_arg f = {.addr = addr, .value = value, .mask = mask, .how = how};
    if (!addr || (uintptr_t)addr % 4 || (unsigned)how > EMU_WAIT_NOR) return EMU_INVALID;
    return emu_post(s, run_wait32, NULL, &f, sizeof f, NULL);
}

struct func_arg {
    void (*fn)(void *);
    void *arg;
};

static void run_func(struct emu_stream *s, const char *api, void *arg)
{
    struct func_arg *f = arg;
    emu_thread.in_callback = true;
    f->fn(f->arg);
    emu_thread.in_callback = false;
}

int emu_host_func(struct emu_stream *s, void (*fn)(void *), void *arg)
{
    struct func_arg f = {fn, arg};
    if (!fn) return EMU_INVALID;
    return emu_post(s, run_func, NULL, &f, sizeof f, NULL);
}

struct event {
    struct emu_obj obj;
    pthread_mutex_t mu;
    struct emu_stream *stream; /* guarded by mu; NULL: never recorded.  Holds a reference. */
    uint64_t seq;              /* guarded by mu */
};

static void fini_event(void *obj)
{
    struct event *e = obj;
    if (e->stream) emu_obj_put(e->stream);
}

int emu_event_create(struct emu_dev *dev, unsigned flags, void **out)
{
    if (flags & ~7u) return EMU_INVALID;
    struct event *e = emu_obj_new(EMU_EVENT, sizeof *e, dev);
    pthread_mutex_init(&e->mu, NULL);
    e->obj.fini = fini_event;
    *out = e;
    return EMU_OK;
}

int emu_event_destroy(void *handle)
{
    struct event *e = emu_obj_get(EMU_EVENT, handle);
    if (!e) return EMU_BAD_HANDLE;
    emu_obj_end(e);
    emu_obj_put(e);
    return EMU_OK;
}

static void run_mark(struct emu_stream *s, const char *api, void *arg) {}

int emu_event_record(struct emu_stream *s, void *handle)
{
    struct event *e = emu_obj_get(EMU_EVENT, handle);
    if (!e) return EMU_BAD_HANDLE;
    int rc = EMU_BAD_HANDLE;
    if (e->obj.dev != s->obj.dev) {
        emu_complain("event %p of device %d recorded on a stream of device %d", handle, e->obj.dev->index,
                     s->obj.dev->index);
    } else {
        uint64_t seq = 0;
        rc = emu_post(s, run_mark, NULL, NULL, 0, &seq);
        if (!rc) {
            emu_obj_ref(s);
            pthread_mutex_lock(&e->mu);
            struct emu_stream *old = e->stream;
            e->stream = s;
            e->seq = seq;
            pthread_mutex_unlock(&e->mu);
            if (old) emu_obj_put(old);
        }
    }
    emu_obj_put(e);
    return rc;
}

/* The recorded point, with a reference on its stream; NULL stream when never recorded. */
static int read_event(void *handle, struct emu_stream **s, uint64_t *seq)
{
    struct event *e = emu_obj_get(EMU_EVENT, handle);
    if (!e) return EMU_BAD_HANDLE;
    pthread_mutex_lock(&e->mu);
    *s = e->stream;
    *seq = e->seq;
    if (*s) emu_obj_ref(*s);
    pthread_mutex_unlock(&e->mu);
    emu_obj_put(e);
    return EMU_OK;
}

int emu_event_query(void *handle)
{
    struct emu_stream *s;
    uint64_t seq;
    int rc = read_event(handle, &s, &seq);
    if (rc || !s) return rc;
    rc = atomic_load(&s->obj.dev->sticky);
    if (!rc && !emu_stream_is_done(s, seq)) rc = EMU_NOT_READY;
    emu_obj_put(s);
    return rc;
}

int emu_event_sync(void *handle)
{
    struct emu_stream *s;
    uint64_t seq;
    int rc = read_event(handle, &s, &seq);
    if (rc || !s) return rc;
    emu_stream_wait(s, seq, NULL);
    rc = atomic_load(&s->obj.dev->sticky);
    emu_obj_put(s);
    return rc;
}

int emu_event_wait(struct emu_stream *s, void *handle)
{
    struct emu_stream *other;
    uint64_t seq;
    int rc = read_event(handle, &other, &seq);
    if (rc || !other) return rc;
    if (other != s) rc = emu_post_wait(s, other, seq);
    emu_obj_put(other);
    return rc;
}
