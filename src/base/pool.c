/* SPDX-License-Identifier: Apache-2.0
 * Size-class free lists under one mutex.  Any thread. */
#include "base/pool.h"

#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define MIN_SHIFT  8 /* smallest class: 256 bytes */
#define NCLASSES   (4 * (48 - MIN_SHIFT))
#define HEAD_BYTES 64

struct head {
    struct head *next;
    size_t bytes;
    uint32_t class;
};

struct gb_pool {
    pthread_mutex_t lock;
    struct head *free[NCLASSES];               /* guarded by lock */
    size_t keep_bytes, free_bytes, used_bytes; /* guarded by lock */
};

/* Class sizes are (4 + q) / 4 * 2^s for q = 0..3. */
static uint32_t class_of(size_t bytes, size_t *rounded)
{
    uint32_t shift = MIN_SHIFT;
    while (shift < 47 && ((size_t)2 << shift) <= bytes) shift++;
    for (uint32_t quarter = 0; quarter < 4; quarter++) {
        size_t size = ((size_t)1 << shift) / 4 * (4 + quarter);
        if (bytes <= size) {
            *rounded = size;
            return (shift - MIN_SHIFT) * 4 + quarter;
        }
    }
    *rounded = (size_t)2 << shift;
    return (shift + 1 - MIN_SHIFT) * 4;
}

struct gb_pool *gb_pool_create(size_t keep_bytes)
{
    struct gb_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pool->keep_bytes = keep_bytes;
    return pool;
}

void gb_pool_destroy(struct gb_pool *pool)
{
    if (!pool) return;
    assert(pool->used_bytes == 0);
    for (int i = 0; i < NCLASSES; i++) {
        while (pool->free[i]) {
            struct head *head = pool->free[i];
            pool->free[i] = head->next;
            free(head);
        }
    }
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void *gb_pool_get(struct gb_pool *pool, size_t bytes)
{
    if (bytes > (size_t)1 << 46) return NULL;
    size_t size;
    uint32_t class = class_of(bytes, &size);
    pthread_mutex_lock(&pool->lock);
    struct head *head = pool->free[class];
    if (head) {
        pool->free[class] = head->next;
        pool->free_bytes -= size;
    }
    pool->used_bytes += size;
    pthread_mutex_unlock(&pool->lock);
    if (!head) {
        head = aligned_alloc(64, HEAD_BYTES + (size + 63) / 64 * 64);
        if (!head) {
            pthread_mutex_lock(&pool->lock);
            pool->used_bytes -= size;
            pthread_mutex_unlock(&pool->lock);
            return NULL;
        }
    }
    head->bytes = size;
    head->class = class;
    return (char *)head + HEAD_BYTES;
}

void gb_pool_put(struct gb_pool *pool, void *block)
{
    if (!block) return;
    struct head *head = (struct head *)(void *)((char *)block - HEAD_BYTES);
    pthread_mutex_lock(&pool->lock);
    pool->used_bytes -= head->bytes;
    int keep = pool->free_bytes + head->bytes <= pool->keep_bytes;
    if (keep) {
        head->next = pool->free[head->class];
        pool->free[head->class] = head;
        pool->free_bytes += head->bytes;
    }
    pthread_mutex_unlock(&pool->lock);
    if (!keep) free(head);
}

size_t gb_pool_used(struct gb_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    size_t used = pool->used_bytes;
    pthread_mutex_unlock(&pool->lock);
    return used;
}
