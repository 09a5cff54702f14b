/* SPDX-License-Identifier: Apache-2.0
 * The queue of finished operations that somebody wants to hear of.  Any thread. */
#include "base/clock.h"
#include "engine/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void gb_notify_push(struct gb_notify *notify, uint64_t user)
{
    pthread_mutex_lock(&notify->lock);
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
    pthread_cond_signal(&notify->cond);
    pthread_mutex_unlock(&notify->lock);
}

static struct timespec deadline_of(int64_t timeout_ns)
{
    uint64_t at = gb_now_ns() + (uint64_t)timeout_ns;
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
}

int gb_engine_completions(struct gb_engine *engine, uint64_t *users, int32_t capacity, int64_t timeout_ns,
                          int32_t *count)
{
    struct gb_notify *notify = &engine->notify;
    struct timespec at = deadline_of(timeout_ns > 0 ? timeout_ns : 0);
    int rc = 0;
    pthread_mutex_lock(&notify->lock);
    while (!notify->count && !notify->stopped && rc != ETIMEDOUT) {
        if (timeout_ns < 0)
            pthread_cond_wait(&notify->cond, &notify->lock);
        else
            rc = pthread_cond_timedwait(&notify->cond, &notify->lock, &at);
    }
    int32_t n = 0;
    while (notify->count && n < capacity) {
        users[n++] = notify->ring[notify->head];
        notify->head = (notify->head + 1) % notify->capacity;
        notify->count--;
    }
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
