/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.h: host memory that is used again and again: operation state and scratch.  Blocks are 64-byte aligned and kept
 * in size classes (four per power of two), so that after the first operations of a kind nothing is allocated.  Any
 * thread. */
#ifndef GB_BASE_POOL_H
#define GB_BASE_POOL_H

#include <stddef.h>

struct gb_pool;

/* `keep_bytes`: free blocks above this total go back to the system. */
struct gb_pool *gb_pool_create(size_t keep_bytes);
/* All blocks must have been put back. */
void gb_pool_destroy(struct gb_pool *pool);
/* NULL when the system has no memory.  Contents are arbitrary. */
void *gb_pool_get(struct gb_pool *pool, size_t bytes);
/* NULL is fine. */
void gb_pool_put(struct gb_pool *pool, void *block);
/* Bytes handed out now, for tests and reports. */
size_t gb_pool_used(struct gb_pool *pool);

#endif
