/* SPDX-License-Identifier: Apache-2.0
 * The queue of finished operations that somebody wants to hear of.  Any thread. */
#include "base/clock.h"
#include "engine/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Who hears of a completion may need what the threads that submit need, too (Python's lock): what is not urgent is told
 * in batches. */
#define LAZY_NS    1000000
#define LAZY_COUNT 256

void gb_notify_push(struct gb_notify *notify, uint64_t user, int is_urgent)
{
    pthread_mutex_lock(&notify->lock);
    if (!notify->count) notify->first_ns = gb_now_ns();
    notify->urgent += is_urgent != 0;
    if (notify->count == notify->capacity) {
        uint32_t capacity = notify->capacity ? notify->capacity * 2 : 1024;
        uint64_t *ring = malloc(capacity * sizeof *ring);
        if (!ring) abort(); /* losing a completion would be a silent hang */
        for (uint32_t i = 0; i < notify->count; i++) ring[i] = notify->ring[(notify->head + i) % notify->capacity];
        free(notify->ring);
        notify->ring = ring;
        notify->capacity = capacity;
        notify->head = 0;
    }
    notify->ring[(notify->head + notify->count++) % notify->capacity] = user;
    if (is_urgent || notify->count == 1 || notify->count == LAZY_COUNT) pthread_cond_signal(&notify->cond);
    pthread_mutex_unlock(&notify->lock);
}

static struct timespec time_of(uint64_t at)
{
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
}

int gb_engine_completions(struct gb_engine *engine, uint64_t *users, int32_t capacity, int64_t timeout_ns,
                          int32_t *count)
{
    struct gb_notify *notify = &engine->notify;
    struct timespec at = time_of(gb_now_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0));
    int rc = 0;
    pthread_mutex_lock(&notify->lock);
    while (!notify->count && !notify->stopped && rc != ETIMEDOUT) {
        if (timeout_ns < 0)
            pthread_cond_wait(&notify->cond, &notify->lock);
        else
            rc = pthread_cond_timedwait(&notify->cond, &notify->lock, &at);
    }
    while (notify->count && !notify->urgent && notify->count < LAZY_COUNT && !notify->stopped && timeout_ns != 0) {
        struct timespec batch = time_of(notify->first_ns + LAZY_NS);
        if (pthread_cond_timedwait(&notify->cond, &notify->lock, &batch) == ETIMEDOUT) break;
    }
    int32_t n = 0;
    while (notify->count && n < capacity) {
        users[n++] = notify->ring[notify->head];
        notify->head = (notify->head + 1) % notify->capacity;
        notify->count--;
    }
    if (!notify->count) notify->urgent = 0; /* else this much more often than needed */
    int stopped = notify->stopped;
    if (notify->count) pthread_cond_signal(&notify->cond);
    pthread_mutex_unlock(&notify->lock);
    if (n) {
        *count = n;
        return 0;
    }
    return stopped ? GPUBRIDGE_ERR_DESTROYED : GPUBRIDGE_AGAIN;
}

void gb_engine_completions_stop(struct gb_engine *engine)
{
    pthread_mutex_lock(&engine->notify.lock);
    engine->notify.stopped = 1;
    pthread_cond_broadcast(&engine->notify.cond);
    pthread_mutex_unlock(&engine->notify.lock);
}
