/* SPDX-License-Identifier: Apache-2.0
 * I/O workers: each owns some bulk lanes by epoll and runs jobs between them.  A worker is woken by its eventfd only
 * while it sleeps. */
#include "transport/net_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void wake(struct gb_worker *w)
{
    uint64_t one = 1;
    /* Only a full counter can make this fail, and then the worker is awake anyway. */
    if (write(w->kick_fd, &one, sizeof one) < 0) return;
}

void gb_worker_kick(struct gb_lane *lane)
{
    struct gb_worker *w = lane->worker;
    if (atomic_exchange(&lane->kicked, 1)) return;
    pthread_mutex_lock(&w->lock);
    lane->kick_next = w->kicks;
    w->kicks = lane;
    pthread_mutex_unlock(&w->lock);
    if (atomic_exchange(&w->idle, 0)) wake(w);
}

void gb_net_job(struct gb_net *net, void (*fn)(void *arg), void *arg, void *cookie)
{
    struct gb_job *job = calloc(1, sizeof *job);
    if (!job) { /* no memory for a queue entry: run it here, and let the engine see it at its next poll */
        fn(arg);
        gb_net_event_note(net, NULL, &(struct gb_net_event){.kind = GB_NET_DONE, .cookie = cookie}, NULL, 0);
        return;
    }
    job->fn = fn;
    job->arg = arg;
    job->note.kind = GB_NOTE_EVENT;
    job->note.event = (struct gb_net_event){.kind = GB_NET_DONE, .cookie = cookie};
    pthread_mutex_lock(&net->job_lock);
    if (net->job_tail)
        net->job_tail->next = job;
    else
        net->job_head = job;
    net->job_tail = job;
    atomic_fetch_add(&net->jobs, 1);
    pthread_mutex_unlock(&net->job_lock);
    for (uint32_t i = 0; i < net->nworkers; i++)
        if (atomic_exchange(&net->worker[i].idle, 0)) {
            wake(&net->worker[i]);
            break;
        }
}

static int run_job(struct gb_net *net)
{
    if (atomic_load(&net->jobs) == 0) return 0;
    pthread_mutex_lock(&net->job_lock);
    struct gb_job *job = net->job_head;
    if (job) {
        net->job_head = job->next;
        if (!net->job_head) net->job_tail = NULL;
        atomic_fetch_sub(&net->jobs, 1);
    }
    pthread_mutex_unlock(&net->job_lock);
    if (!job) return 0;
    job->fn(job->arg);
    gb_net_note(net, &job->note);
    return 1;
}

static void run_lane(struct gb_worker *w, struct gb_lane *lane, int what)
{
    int was_ready = lane->ready;
    gb_lane_run(lane, what);
    if (lane->ready && !was_ready) {
        lane->ready_next = w->ready;
        w->ready = lane;
    } else if (was_ready) {
        lane->ready = 1; /* still on the list; the list's turn will look */
    }
}

static void run_kicks(struct gb_worker *w)
{
    pthread_mutex_lock(&w->lock);
    struct gb_lane *lane = w->kicks;
    w->kicks = NULL;
    pthread_mutex_unlock(&w->lock);
    while (lane) {
        struct gb_lane *next = lane->kick_next;
        atomic_store(&lane->kicked, 0);
        run_lane(w, lane, GB_LANE_KICK);
        lane = next;
    }
}

/* Lanes that stopped for fairness. */
static void run_ready(struct gb_worker *w)
{
    struct gb_lane *lane = w->ready;
    w->ready = NULL;
    while (lane) {
        struct gb_lane *next = lane->ready_next;
        lane->ready = 0;
        run_lane(w, lane, GB_LANE_IN);
        lane = next;
    }
}

static int has_work(struct gb_worker *w)
{
    pthread_mutex_lock(&w->lock);
    int has = w->kicks != NULL;
    pthread_mutex_unlock(&w->lock);
    return has || w->ready || atomic_load(&w->net->jobs) || atomic_load(&w->net->stopping);
}

static void *worker_main(void *arg)
{
    struct gb_worker *w = arg;
    struct epoll_event ev[32];
    gb_net_block_signals();
    while (!atomic_load(&w->net->stopping)) {
        /* Whoever adds work after the store sees `idle` and writes the eventfd; what was added before is seen here. */
        atomic_store(&w->idle, 1);
        int busy = has_work(w);
        if (busy) atomic_store(&w->idle, 0);
        int n = epoll_wait(w->epoll, ev, 32, busy ? 0 : -1);
        atomic_store(&w->idle, 0);
        for (int i = 0; i < n; i++) {
            struct gb_lane *lane = ev[i].data.ptr;
            uint64_t count;
            if (!lane) {
                if (read(w->kick_fd, &count, sizeof count) < 0) continue;
                continue;
            }
            int what = (ev[i].events & ~(uint32_t)EPOLLOUT) ? GB_LANE_IN : 0;
            if (ev[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) what |= GB_LANE_OUT;
            run_lane(w, lane, what);
        }
        run_kicks(w);
        run_ready(w);
        run_job(w->net);
    }
    while (run_job(w->net)) {
    }
    return NULL;
}

static int worker_start(struct gb_net *net, struct gb_worker *w)
{
    w->net = net;
    pthread_mutex_init(&w->lock, NULL);
    w->epoll = epoll_create1(EPOLL_CLOEXEC);
    w->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    if (w->epoll < 0 || w->kick_fd < 0 || epoll_ctl(w->epoll, EPOLL_CTL_ADD, w->kick_fd, &ev) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "an I/O worker's epoll: errno %d; raise the limit of open files", errno);
    int rc = pthread_create(&w->thread, NULL, worker_main, w);
    if (rc) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "an I/O worker's thread: errno %d", rc);
    pthread_setname_np(w->thread, "gb-io");
    w->started = 1;
    return 0;
}

int gb_workers_start(struct gb_net *net)
{
    for (uint32_t i = 0; i < net->nworkers; i++) GB_TRY(worker_start(net, &net->worker[i]));
    return 0;
}

void gb_workers_stop(struct gb_net *net)
{
    for (uint32_t i = 0; i < net->nworkers; i++) {
        struct gb_worker *w = &net->worker[i];
        if (!w->started) continue;
        wake(w);
        pthread_join(w->thread, NULL);
        w->started = 0;
    }
    for (uint32_t i = 0; i < GB_WORKERS_MAX; i++) {
        if (net->worker[i].epoll >= 0) close(net->worker[i].epoll);
        if (net->worker[i].kick_fd >= 0) close(net->worker[i].kick_fd);
    }
}
