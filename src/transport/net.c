/* SPDX-License-Identifier: Apache-2.0
 * One net per context: opening, the event queue, polling and waiting.  The engine role drives it; notes from the
 * control thread and the I/O workers come through one queue. */
#include "transport/fault.h"
#include "transport/net_impl.h"

#include "base/clock.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define GB_DIRECT_LINKS 3 /* up to so many express sockets are tried by recv; more by one epoll_wait */

static const struct gb_transport *const transports[] = {&gb_transport_auto, &gb_transport_tcp, &gb_transport_shm,
                                                        &gb_transport_inproc};

/* ---- notes and events ---- */

static void wake(struct gb_net *net)
{
    uint64_t one = 1;
    if (atomic_exchange(&net->sleeping, 0) && write(net->wake_fd, &one, sizeof one) < 0) return;
}

void gb_net_note(struct gb_net *net, struct gb_note *note)
{
    note->next = NULL;
    pthread_mutex_lock(&net->queue_lock);
    if (net->queue_tail)
        net->queue_tail->next = note;
    else
        net->queue_head = note;
    net->queue_tail = note;
    atomic_fetch_add(&net->queued, 1);
    pthread_mutex_unlock(&net->queue_lock);
    wake(net);
}

void gb_net_wake(struct gb_net *net)
{
    atomic_store(&net->woken, 1);
    wake(net);
}

void gb_net_event_note(struct gb_net *net, struct gb_link *link, const struct gb_net_event *event, const void *text,
                       size_t text_bytes)
{
    struct gb_note *note = calloc(1, sizeof *note);
    char *copy = text ? malloc(text_bytes + 1) : NULL;
    if (!note || (text && !copy)) {
        free(note);
        free(copy);
        return; /* the next poll of a link that is down tells its posts the same */
    }
    note->kind = GB_NOTE_EVENT;
    note->event = *event;
    note->event.link = link;
    note->text = copy;
    if (copy) {
        memcpy(copy, text, text_bytes);
        copy[text_bytes] = 0;
        if (event->kind == GB_NET_CTRL)
            note->event.data = copy;
        else
            note->event.text = copy;
    }
    if (!link) {
        gb_net_note(net, note);
        return;
    }
    pthread_mutex_lock(&net->lock);
    if (link->claimed) {
        gb_net_note(net, note);
    } else if (link->held_tail) {
        link->held_tail = link->held_tail->next = note;
    } else {
        link->held_head = link->held_tail = note;
    }
    pthread_mutex_unlock(&net->lock);
}

void gb_net_block_signals(void)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
}

void gb_net_push(struct gb_net *net, const struct gb_net_event *ev)
{
    if (net->ring_count == net->ring_capacity) {
        size_t capacity = net->ring_capacity ? 2 * net->ring_capacity : 256;
        struct gb_net_event *ring = malloc(capacity * sizeof *ring);
        /* A lost completion would be a silent hang. */
        if (!ring) abort();
        for (size_t i = 0; i < net->ring_count; i++)
            ring[i] = net->ring[(net->ring_head + i) & (net->ring_capacity - 1)];
        free(net->ring);
        net->ring = ring;
        net->ring_capacity = capacity;
        net->ring_head = 0;
    }
    net->ring[(net->ring_head + net->ring_count++) & (net->ring_capacity - 1)] = *ev;
}

/* ---- polling ---- */

static void take_note(struct gb_net *net, struct gb_note *note)
{
    struct gb_link *link = note->event.link;
    switch (note->kind) {
    case GB_NOTE_MSG:
        gb_net_push(net, &note->event);
        pthread_mutex_lock(&link->lock);
        gb_match_recycle(&link->match, (struct gb_msg *)note);
        pthread_mutex_unlock(&link->lock);
        return;
    case GB_NOTE_EVENT:
        gb_net_push(net, &note->event);
        note->next = net->retired;
        net->retired = note;
        return;
    case GB_NOTE_ATTACH:
        gb_express_attach(link);
        break;
    case GB_NOTE_DOWN:
        gb_express_down(link);
        break;
    }
    free(note);
}

static void take_notes(struct gb_net *net)
{
    if (atomic_load(&net->queued) == 0) return;
    pthread_mutex_lock(&net->queue_lock);
    struct gb_note *note = net->queue_head;
    net->queue_head = net->queue_tail = NULL;
    atomic_store(&net->queued, 0);
    pthread_mutex_unlock(&net->queue_lock);
    while (note) {
        struct gb_note *next = note->next;
        take_note(net, note);
        note = next;
    }
}

static void flush(struct gb_net *net)
{
    struct gb_link *link = net->dirty;
    net->dirty = NULL;
    while (link) {
        struct gb_link *next = link->dirty_next;
        link->dirty = 0;
        gb_express_flush(link);
        link = next;
    }
}

/* Looking into a ring costs no system call; the others' sockets are asked one by one or together. */
static void read_lanes(struct gb_net *net)
{
    int some_blocked = 0;
    size_t sockets = 0;
    for (size_t i = net->expresses; i-- > 0;) {
        struct gb_link *link = net->express[i];
        if (!link->express.ring) {
            sockets++;
            some_blocked |= link->want_out;
            continue;
        }
        if (link->want_out) gb_express_room(link);
        gb_express_read(link);
    }
    if (sockets == 0) return;
    if (sockets <= GB_DIRECT_LINKS && !some_blocked) {
        for (size_t i = net->expresses; i-- > 0;)
            if (!net->express[i]->express.ring) gb_express_read(net->express[i]);
        return;
    }
    struct epoll_event ev[64];
    int n = epoll_wait(net->epoll, ev, 64, 0);
    for (int i = 0; i < n; i++) {
        struct gb_link *link = ev[i].data.ptr;
        uint64_t count;
        if (!link) {
            if (read(net->wake_fd, &count, sizeof count) < 0) continue;
            continue;
        }
        if (link->express.ring) { /* looked into above; only takes its bell */
            gb_sock_arm(&link->express, 0);
            continue;
        }
        if (ev[i].events & EPOLLOUT) gb_express_room(link);
        if (ev[i].events & ~(uint32_t)EPOLLOUT) gb_express_read(link);
    }
}

int gb_net_poll(struct gb_net *net, struct gb_net_event *events, int max)
{
    if (net->ring_count == 0) {
        /* Texts handed out by the last poll end here, and not before all of its events were taken. */
        while (net->retired) {
            struct gb_note *next = net->retired->next;
            free(net->retired->text);
            free(net->retired);
            net->retired = next;
        }
    }
    if (net->dirty) flush(net);
    take_notes(net);
    if (net->ring_count < (size_t)max) read_lanes(net);
    if (net->dirty) flush(net);
    int n = 0;
    for (; n < max && net->ring_count > 0; n++, net->ring_count--) {
        events[n] = net->ring[net->ring_head];
        net->ring_head = (net->ring_head + 1) & (net->ring_capacity - 1);
    }
    return n;
}

/* Rings tell their sleeping reader only when they are asked to. */
static int arm_lanes(struct gb_net *net)
{
    int ready = 0;
    for (size_t i = 0; i < net->expresses && !ready; i++) {
        struct gb_link *link = net->express[i];
        if (link->express.ring && !link->express_eof) ready = gb_sock_arm(&link->express, link->want_out);
    }
    return ready;
}

void gb_net_wait(struct gb_net *net, int64_t timeout_ns)
{
    if (net->dirty) flush(net);
    atomic_store(&net->sleeping, 1);
    /* Whoever queues a note after this store writes the eventfd; what was queued before is seen here. */
    if (net->ring_count || atomic_load(&net->queued) || atomic_load(&net->woken)) timeout_ns = 0;
    if (timeout_ns > 0 && arm_lanes(net)) timeout_ns = 0;
    int ready = 0;
    if (timeout_ns > 0) {
        struct pollfd p = {.fd = net->epoll, .events = POLLIN};
        struct timespec ts = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
        ready = ppoll(&p, 1, &ts, NULL);
    }
    int written = !atomic_exchange(&net->sleeping, 0);
    atomic_store(&net->woken, 0);
    uint64_t count;
    if ((written || ready > 0) && read(net->wake_fd, &count, sizeof count) < 0) return;
}

/* The messages themselves stay with their links. */
static void drop_announcements(struct gb_net *net, uint64_t group)
{
    size_t kept = 0, mask = net->ring_capacity - 1;
    for (size_t i = 0; i < net->ring_count; i++) {
        struct gb_net_event ev = net->ring[(net->ring_head + i) & mask];
        if (ev.kind == GB_NET_UNEXPECTED && ev.key.group == group) continue;
        net->ring[(net->ring_head + kept++) & mask] = ev;
    }
    net->ring_count = kept;
}

void gb_net_announce(struct gb_net *net, uint64_t group)
{
    drop_announcements(net, group);
    pthread_mutex_lock(&net->lock);
    for (size_t i = 0; i < net->links; i++) {
        pthread_mutex_lock(&net->link[i]->lock);
        gb_match_announce(&net->link[i]->match, group);
        pthread_mutex_unlock(&net->link[i]->lock);
    }
    pthread_mutex_unlock(&net->lock);
}

void gb_net_cancel(struct gb_net *net, uint64_t group, int64_t seq)
{
    if (gb_cancel_add(&net->cancelled, group, seq) != 0) abort(); /* late data of the group would be taken for new */
    pthread_mutex_lock(&net->lock);
    for (size_t i = 0; i < net->links; i++) {
        pthread_mutex_lock(&net->link[i]->lock);
        gb_match_cancel(&net->link[i]->match, group, seq);
        pthread_mutex_unlock(&net->link[i]->lock);
    }
    pthread_mutex_unlock(&net->lock);
}

void gb_net_forget(struct gb_net *net, uint64_t group)
{
    gb_cancel_forget(&net->cancelled, group);
}

void gb_net_get_address(struct gb_net *net, struct gb_net_address *address)
{
    address->bytes = (uint16_t)gb_address_pack(&net->own, address->blob, sizeof address->blob);
}

size_t gb_net_describe(struct gb_net *net, char *text, size_t capacity)
{
    char where[64] = "this process only";
    const char *name = net->base->name;
    if (net->base == &gb_transport_auto) name = net->local_listener >= 0 ? "shm and tcp" : "tcp";
    if (net->own.count) gb_endpoint_text(&net->own.endpoint[0], net->own.port, where, sizeof where);
    int n = snprintf(text, capacity, "%s, reachable at %s (%u addresses), %u lanes per link, %u I/O workers%s", name,
                     where, net->own.count, net->lanes, net->nworkers,
                     net->checksum == 1 ? ", payload checksums"
                     : net->checksum    ? ", payload checksums between hosts"
                                        : "");
    return n < 0 ? 0 : (size_t)n;
}

/* ---- opening ---- */

static uint32_t cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : (uint32_t)n;
}

static int configure(struct gb_net *net, const struct gb_net_config *c)
{
    if (!c->secret || c->secret_bytes < 16)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the job's secret has %zu bytes; at least 16 are needed",
                       c->secret_bytes);
    const char *name = c->transport && c->transport[0] ? c->transport : "auto";
    for (size_t i = 0; i < sizeof transports / sizeof transports[0]; i++)
        if (strcmp(transports[i]->name, name) == 0) net->via = net->base = transports[i];
    if (!net->via)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_TRANSPORT=%s: this build has auto, tcp, shm and inproc", name);
    net->secret = malloc(c->secret_bytes);
    if (!net->secret) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the secret");
    memcpy(net->secret, c->secret, c->secret_bytes);
    net->secret_bytes = c->secret_bytes;
    net->self = c->self;
    net->global_rank = c->global_rank;
    snprintf(net->host, sizeof net->host, "%s", c->host ? c->host : "?");
    snprintf(net->ifname, sizeof net->ifname, "%s", c->ifname ? c->ifname : "");
    snprintf(net->master, sizeof net->master, "%s", c->master_addr ? c->master_addr : "");
    net->port_low = c->port_low;
    net->port_high = c->port_high;
    uint32_t n = cores();
    /* Measured on loopback: one lane and its worker carry about 4 GB/s, and add up until about half the cores are busy.
     */
    net->lanes = c->lanes ? c->lanes : (n >= 16 ? 8 : n >= 8 ? 4 : 2);
    net->nworkers = c->workers ? c->workers : (n >= 16 ? 8 : n >= 8 ? 4 : n >= 4 ? 2 : 1);
    if (net->lanes > GB_LANES_MAX || net->nworkers > GB_WORKERS_MAX)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING, "%u lanes and %u workers; at most %u and %u", net->lanes, net->nworkers,
                       GB_LANES_MAX, GB_WORKERS_MAX);
    net->peer_timeout_ns = c->peer_timeout_ns > 0 ? c->peer_timeout_ns : 3000000000;
    net->connect_timeout_ns = c->connect_timeout_ns > 0 ? c->connect_timeout_ns : 30000000000;
    net->checksum = c->checksum;
    return 0;
}

static int start_control(struct gb_net *net)
{
    net->control_epoll = epoll_create1(EPOLL_CLOEXEC);
    net->control_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (net->control_epoll < 0 || net->control_fd < 0)
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "epoll for the control thread: errno %d; raise the limit of open files",
                       errno);
    gb_control_watch(net, EPOLL_CTL_ADD, net->control_fd, EPOLLIN, NULL, GB_WATCH_WAKE);
    gb_control_listen(net, EPOLL_CTL_ADD, EPOLLIN);
    int rc = pthread_create(&net->control, NULL, gb_control_main, net);
    if (rc) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "the control thread: errno %d", rc);
    pthread_setname_np(net->control, "gb-control");
    net->control_started = 1;
    return 0;
}

static int open_steps(struct gb_net *net, const struct gb_net_config *config)
{
    GB_TRY(configure(net, config));
    net->epoll = epoll_create1(EPOLL_CLOEXEC);
    net->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    if (net->epoll < 0 || net->wake_fd < 0 || epoll_ctl(net->epoll, EPOLL_CTL_ADD, net->wake_fd, &ev) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "epoll for the engine: errno %d; raise the limit of open files", errno);
    GB_TRY(gb_fault_open(net, config->fault));
    GB_TRY(net->via->listen(net));
    GB_TRY(gb_workers_start(net));
    return start_control(net);
}

int gb_net_open(const struct gb_net_config *config, struct gb_net **out)
{
    struct gb_net *net = calloc(1, sizeof *net);
    if (!net) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the network state");
    net->epoll = net->wake_fd = net->listener = net->local_listener = net->control_epoll = net->control_fd = -1;
    pthread_mutex_init(&net->lock, NULL);
    pthread_mutex_init(&net->queue_lock, NULL);
    pthread_mutex_init(&net->job_lock, NULL);
    for (int i = 0; i < GB_WORKERS_MAX; i++) net->worker[i].epoll = net->worker[i].kick_fd = -1;
    int rc = open_steps(net, config);
    if (rc) {
        char text[1024];
        snprintf(text, sizeof text, "%s", gb_err_text());
        gb_net_close(net, 0, "");
        gb_err_put(text);
        return rc;
    }
    *out = net;
    return 0;
}
