/* SPDX-License-Identifier: Apache-2.0
 * Life of an emulated communicator: join, errors, abort, split, end.  Blocking parts run on the calling thread, or on a
 * thread of their own for non-blocking communicators.  */
#include "nccl.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local char last_error[512];

const char *nccl_last_error(void)
{
    return last_error;
}

int nccl_error(int result, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(last_error, sizeof last_error, fmt, ap);
    va_end(ap);
    emu_complain("%s", last_error);
    return result;
}

void nccl_fail(struct nccl_comm *c, int result, const char *fmt, ...)
{
    char text[512];
    int none = NCCL_OK;
    if (!atomic_compare_exchange_strong(&c->async, &none, result)) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    emu_say("%s", text);
}

static bool is_dead(const struct nccl_comm *c, int rank)
{
    struct pollfd p = {.fd = c->pidfds[rank], .events = POLLIN};
    return p.fd >= 0 && poll(&p, 1, 0) == 1;
}

void nccl_check_peers(struct nccl_comm *c)
{
    if (atomic_load(&c->async)) return;
    if (atomic_load(&c->map.head->error)) {
        nccl_fail(c, NCCL_INVALID_USAGE, "rank %d: another rank reported an order mismatch", c->rank);
        return;
    }
    for (int r = 0; r < c->nranks; r++) {
        uint32_t state = atomic_load(&c->map.slots[r].state);
        if (state == NCCL_ABORTED && r != c->rank)
            nccl_fail(c, NCCL_REMOTE_ERROR, "rank %d: rank %d aborted the communicator", c->rank, r);
        else if (state == NCCL_JOINED && is_dead(c, r))
            nccl_fail(c, NCCL_REMOTE_ERROR, "rank %d: rank %d (pid %d) is gone; its operations hang until CommAbort",
                      c->rank, r, (int)c->map.slots[r].pid);
    }
}

static void fini_comm(void *obj)
{
    struct nccl_comm *c = obj;
    for (int r = 0; r < c->nranks; r++)
        if (c->pidfds[r] >= 0) close(c->pidfds[r]);
    free(c->pidfds);
    free(c->sends_to);
    free(c->receives_from);
    nccl_map_close(&c->map);
}

int nccl_comm_create(struct nccl_comm **out, int nranks, const struct nccl_id *id, int rank, bool blocking,
                     struct emu_dev *dev)
{
    if (nranks < 1 || nranks > NCCL_MAX_RANKS || rank < 0 || rank >= nranks)
        return nccl_error(NCCL_INVALID_ARGUMENT, "rank %d of %d ranks", rank, nranks);
    struct nccl_comm *c = emu_obj_new(EMU_COMM, sizeof *c, dev);
    c->id = *id;
    c->rank = rank;
    c->nranks = nranks;
    c->blocking = blocking;
    c->pidfds = calloc((size_t)nranks, sizeof *c->pidfds);
    c->sends_to = calloc((size_t)nranks, 1);
    c->receives_from = calloc((size_t)nranks, 1);
    if (!c->pidfds || !c->sends_to || !c->receives_from) abort();
    for (int r = 0; r < nranks; r++) c->pidfds[r] = -1;
    pthread_mutex_init(&c->mu, NULL);
    pthread_cond_init(&c->cv, NULL);
    atomic_store(&c->state, NCCL_IN_PROGRESS);
    c->rng = (emu_conf()->seed + (uint64_t)rank) | 1;
    c->obj.fini = fini_comm;
    *out = c;
    return NCCL_OK;
}

static int check_members(struct nccl_comm *c)
{
    for (int r = 0; r < c->nranks; r++) {
        const struct nccl_slot *a = &c->map.slots[r];
        if (strncmp(a->vendor, emu_vendor.name, sizeof a->vendor) != 0 || a->version != emu_conf()->nccl_version)
            return nccl_error(NCCL_INVALID_USAGE, "rank %d runs %s %d, this rank %s %d", r, a->vendor, a->version,
                              emu_vendor.name, emu_conf()->nccl_version);
        for (int q = 0; q < r; q++)
            if (c->map.slots[q].host == a->host && c->map.slots[q].device == a->device)
                return nccl_error(NCCL_INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on device %d",
                                  q, r, a->device);
    }
    return NCCL_OK;
}

static int open_pidfds(struct nccl_comm *c)
{
    for (int r = 0; r < c->nranks; r++) {
        if (c->map.slots[r].pid == getpid()) continue;
        c->pidfds[r] = (int)syscall(SYS_pidfd_open, c->map.slots[r].pid, 0);
        if (c->pidfds[r] < 0 && errno != ESRCH && errno != ENOSYS)
            return nccl_error(NCCL_SYSTEM_ERROR, "pidfd_open: %s", strerror(errno));
    }
    return NCCL_OK;
}

int nccl_comm_join(struct nccl_comm *c)
{
    int rc = nccl_map_open(&c->map, &c->id, c->nranks);
    if (rc) return rc;
    struct nccl_slot *me = &c->map.slots[c->rank];
    uint32_t absent = NCCL_ABSENT;
    me->pid = (int32_t)getpid();
    me->device = c->obj.dev->index;
    me->version = emu_conf()->nccl_version;
    me->host = emu_host_id();
    snprintf(me->vendor, sizeof me->vendor, "%s", emu_vendor.name);
    if (!atomic_compare_exchange_strong(&me->state, &absent, NCCL_JOINED))
        return nccl_error(NCCL_INVALID_USAGE, "rank %d has joined already", c->rank);
    for (int r = 0; r < c->nranks; r++) nccl_ring_bell(&c->map.slots[r]);
    for (int r = 0; r < c->nranks;) {
        uint32_t seen = atomic_load(&me->bell);
        if (atomic_load(&c->map.slots[r].state) != NCCL_ABSENT) {
            r++;
            continue;
        }
        if (atomic_load(&c->abort)) return nccl_error(NCCL_INTERNAL_ERROR, "aborted while waiting for rank %d", r);
        nccl_await_bell(me, seen, 20);
    }
    nccl_id_close(&c->id);
    rc = check_members(c);
    return rc ? rc : open_pidfds(c);
}

struct job {
    struct nccl_comm *c; /* a reference */
    int (*fn)(struct nccl_comm *c, void *arg);
    void *arg;
    struct emu_thread as;
};

static void *run_job(void *arg)
{
    struct job *j = arg;
    emu_thread = j->as;
    int rc = j->fn(j->c, j->arg);
    if (rc && rc != NCCL_IN_PROGRESS) nccl_fail(j->c, rc, "%s", last_error);
    atomic_store(&j->c->state, NCCL_OK);
    emu_obj_put(j->c);
    free(j);
    return NULL;
}

int nccl_background(struct nccl_comm *c, int (*fn)(struct nccl_comm *c, void *arg), void *arg)
{
    struct job *j = malloc(sizeof *j);
    pthread_attr_t attr;
    pthread_t thread;
    if (!j) abort();
    *j = (struct job){c, fn, arg, emu_thread};
    emu_obj_ref(c);
    atomic_store(&c->state, NCCL_IN_PROGRESS);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int rc = pthread_create(&thread, &attr, run_job, j);
    pthread_attr_destroy(&attr);
    if (!rc) return NCCL_IN_PROGRESS;
    emu_obj_put(c);
    free(j);
    return nccl_error(NCCL_SYSTEM_ERROR, "cannot start a thread: %s", strerror(rc));
}

bool nccl_dawdles(struct nccl_comm *c)
{
    pthread_mutex_lock(&c->mu);
    bool yes = emu_rand(&c->rng) >> 61 == 0;
    pthread_mutex_unlock(&c->mu);
    return yes && emu_conf()->delay_us;
}

void nccl_comm_quiesce(struct nccl_comm *c)
{
    pthread_mutex_lock(&c->mu);
    while (c->done < c->issued && !atomic_load(&c->abort)) pthread_cond_wait(&c->cv, &c->mu);
    pthread_mutex_unlock(&c->mu);
}

static void leave(struct nccl_comm *c, uint32_t state)
{
    if (!c->map.head) return;
    uint32_t joined = NCCL_JOINED;
    atomic_compare_exchange_strong(&c->map.slots[c->rank].state, &joined, state);
    for (int r = 0; r < c->nranks; r++) nccl_ring_bell(&c->map.slots[r]);
}

void nccl_comm_abort(struct nccl_comm *c)
{
    pthread_mutex_lock(&c->mu);
    atomic_store(&c->abort, 1);
    pthread_cond_broadcast(&c->cv);
    pthread_mutex_unlock(&c->mu);
    /* A join or connection on another thread looks at the flag by itself. */
    while (atomic_load(&c->state) == NCCL_IN_PROGRESS) emu_sleep_us(500);
    leave(c, NCCL_ABORTED);
    /* What runs must leave the buffers alone before the caller frees them; what is still queued will do nothing. */
    pthread_mutex_lock(&c->mu);
    while (c->running) pthread_cond_wait(&c->cv, &c->mu);
    pthread_mutex_unlock(&c->mu);
}

void nccl_comm_leave(struct nccl_comm *c)
{
    leave(c, NCCL_LEFT);
}

/* Waits until `test` holds for all ranks' slots. */
static int await_all(struct nccl_comm *c, bool (*test)(const struct nccl_slot *slot, uint64_t seq), uint64_t seq)
{
    struct nccl_slot *me = &c->map.slots[c->rank];
    for (int r = 0; r < c->nranks;) {
        uint32_t seen = atomic_load(&me->bell);
        if (test(&c->map.slots[r], seq)) {
            r++;
            continue;
        }
        if (atomic_load(&c->abort)) return nccl_error(NCCL_INTERNAL_ERROR, "aborted while splitting");
        nccl_await_bell(me, seen, 20);
        nccl_check_peers(c);
    }
    return NCCL_OK;
}

static bool has_published(const struct nccl_slot *s, uint64_t seq)
{
    return atomic_load(&s->split_seq) >= seq;
}
static bool has_read(const struct nccl_slot *s, uint64_t seq)
{
    return atomic_load(&s->split_read) >= seq;
}

static void tell_all(struct nccl_comm *c)
{
    for (int r = 0; r < c->nranks; r++) nccl_ring_bell(&c->map.slots[r]);
}

/* The unique id of my colour, which its first member makes. */
static int share_id(struct nccl_comm *c, uint64_t seq, int leader, struct nccl_id *id)
{
    struct nccl_slot *from = &c->map.slots[leader], *me = &c->map.slots[c->rank];
    if (leader == c->rank) {
        int rc = nccl_id_make(id);
        if (rc) return rc;
        me->split_id = *id;
        atomic_store(&me->split_id_seq, seq);
        tell_all(c);
    }
    for (;;) {
        uint32_t seen = atomic_load(&me->bell);
        if (atomic_load(&from->split_id_seq) >= seq) break;
        if (atomic_load(&c->abort)) return nccl_error(NCCL_INTERNAL_ERROR, "aborted while splitting");
        nccl_await_bell(me, seen, 20);
        nccl_check_peers(c);
    }
    *id = from->split_id;
    return NCCL_OK;
}

int nccl_comm_split(struct nccl_comm *c, int color, int key, struct nccl_comm **out)
{
    struct nccl_slot *me = &c->map.slots[c->rank];
    struct nccl_id id;
    int n = 0, rank = 0, leader = -1;
    pthread_mutex_lock(&c->mu);
    uint64_t seq = ++c->splits;
    pthread_mutex_unlock(&c->mu);
    *out = NULL;
    int rc = await_all(c, has_read, seq - 1);
    if (rc) return rc;
    me->color = color;
    me->key = key;
    atomic_store(&me->split_seq, seq);
    tell_all(c);
    rc = await_all(c, has_published, seq);
    for (int r = 0; r < c->nranks && !rc; r++) {
        const struct nccl_slot *s = &c->map.slots[r];
        if (s->color != color) continue;
        if (leader < 0) leader = r;
        n++;
        if (s->key < key || (s->key == key && r < c->rank)) rank++;
    }
    if (!rc && color >= 0) rc = share_id(c, seq, leader, &id);
    atomic_store(&me->split_read, seq);
    tell_all(c);
    if (rc || color < 0) return rc;
    rc = nccl_comm_create(out, n, &id, rank, c->blocking, c->obj.dev);
    if (rc) return rc;
    rc = nccl_comm_join(*out);
    atomic_store(&(*out)->state, NCCL_OK);
    if (!rc) return rc;
    emu_obj_end(*out);
    *out = NULL;
    return rc;
}
