/* SPDX-License-Identifier: Apache-2.0
 * The pool: blocks do not overlap and keep what is written, come back to be used again, are counted, go back to the
 * system above the limit; several threads at once. */
#include "base/pool.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void sizes(void **state)
{
    (void)state;
    struct gb_pool *pool = gb_pool_create(1 << 20);
    for (size_t bytes = 0; bytes < 70000; bytes += 1 + bytes / 7) {
        unsigned char *block = gb_pool_get(pool, bytes);
        assert_non_null(block);
        assert_int_equal((uintptr_t)block % 64, 0);
        memset(block, 0x5a, bytes);
        assert_true(gb_pool_used(pool) >= bytes);
        assert_true(gb_pool_used(pool) <= bytes + bytes / 3 + 256); /* four classes per power of two */
        gb_pool_put(pool, block);
        assert_int_equal(gb_pool_used(pool), 0);
    }
    gb_pool_put(pool, NULL);
    assert_null(gb_pool_get(pool, SIZE_MAX / 2));
    gb_pool_destroy(pool);
    gb_pool_destroy(NULL);
}

static void used_again(void **state)
{
    (void)state;
    struct gb_pool *pool = gb_pool_create(1 << 20);
    void *first = gb_pool_get(pool, 5000), *second = gb_pool_get(pool, 5000);
    assert_ptr_not_equal(first, second);
    gb_pool_put(pool, first);
    assert_ptr_equal(gb_pool_get(pool, 5100), first); /* of the same class */
    gb_pool_put(pool, first);
    gb_pool_put(pool, second);
    gb_pool_destroy(pool);
}

#define THREADS 4
#define ROUNDS  3000
#define HELD    16

/* Every block is full of the owner's number for as long as it is held. */
static void *work(void *arg)
{
    struct gb_pool *pool = ((void **)arg)[0];
    unsigned char number = *(unsigned char *)((void **)arg)[1], *held[HELD] = {NULL};
    size_t bytes[HELD] = {0};
    uint32_t random = number;
    for (int i = 0; i < ROUNDS; i++) {
        random = random * 1664525u + 1013904223u;
        int k = (int)(random >> 28);
        for (size_t b = 0; b < bytes[k]; b++)
            if (held[k][b] != number) return "a block of another thread overlaps";
        gb_pool_put(pool, held[k]);
        bytes[k] = (random >> 8) % 3000;
        held[k] = gb_pool_get(pool, bytes[k]);
        if (!held[k]) return "no memory";
        memset(held[k], number, bytes[k]);
    }
    for (int k = 0; k < HELD; k++) gb_pool_put(pool, held[k]);
    return NULL;
}

static void threads(void **state)
{
    (void)state;
    struct gb_pool *pool = gb_pool_create(20000); /* so little that some blocks go back to the system */
    pthread_t thread[THREADS];
    unsigned char numbers[THREADS];
    void *args[THREADS][2];
    for (int t = 0; t < THREADS; t++) {
        numbers[t] = (unsigned char)(t + 1);
        args[t][0] = pool, args[t][1] = &numbers[t];
        assert_int_equal(pthread_create(&thread[t], NULL, work, args[t]), 0);
    }
    for (int t = 0; t < THREADS; t++) {
        void *wrong = "not joined";
        pthread_join(thread[t], &wrong);
        if (wrong) fail_msg("thread %d: %s", t, (const char *)wrong);
    }
    assert_int_equal(gb_pool_used(pool), 0);
    gb_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sizes), cmocka_unit_test(used_again),
                                       cmocka_unit_test(threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
