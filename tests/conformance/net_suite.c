/* SPDX-License-Identifier: Apache-2.0
 * What every transport must do, the same tests for each: the first argument names the transport, the second one
 * (optional) a fault specification under which everything must still be right. */
#include "net_rig.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static struct rig_options options = {.lanes = 2};
static int slow; /* under a fault: fewer messages */

static uint32_t rnd_state = 1;
static uint32_t rnd(void)
{
    rnd_state = rnd_state * 1664525u + 1013904223u;
    return rnd_state >> 8;
}

static void test_sizes(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {0, 1, 8, 63, 64, 65, 8191, 8192, 8193, 65536, 1000003, 4 << 20};
    struct rig rig;
    rig_open(&rig, 2, &options);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int late = 0; late < 2; late++) { /* receive posted first, or after the send */
            struct rig_op s = {0}, r = {0};
            uint64_t n = sizes[i];
            uint8_t *a = malloc(n + 1), *b = malloc(n + 1);
            rig_fill(a, n, i + 7);
            memset(b, 0xee, n + 1);
            struct gb_key key = rig_key(5, (uint32_t)i, (uint32_t)late);
            if (!late) rig_recv(&rig, 1, 0, key, b, n, &r);
            rig_send(&rig, 0, 1, key, a, n, &s);
            if (late) {
                for (int k = 0; k < 50; k++) rig_poll(&rig);
                rig_recv(&rig, 1, 0, key, b, n, &r);
            }
            rig_until(&rig, &s.done, 1, 20000);
            rig_until(&rig, &r.done, 1, 20000);
            assert_int_equal(s.status, 0);
            assert_int_equal(r.status, 0);
            assert_true(rig_check(b, n, i + 7));
            assert_int_equal(b[n], 0xee);
            free(a);
            free(b);
        }
    rig_close(&rig);
}

/* Random sizes both ways, posted in different random orders at both ends. */
struct storm {
    uint64_t bytes;
    uint8_t *a, *b;
    struct rig_op s, r;
    int from;
};

static void shuffle(int *v, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int k = (int)(rnd() % (uint32_t)(i + 1)), t = v[i];
        v[i] = v[k];
        v[k] = t;
    }
}

static void run_storm(struct rig *rig, int count, uint64_t max)
{
    struct storm *m = calloc((size_t)count, sizeof *m);
    int *sends = malloc((size_t)count * sizeof(int)), *recvs = malloc((size_t)count * sizeof(int));
    for (int i = 0; i < count; i++) {
        m[i].bytes = rnd() % 3 ? rnd() % 300 : rnd() % max;
        m[i].from = (int)(rnd() & 1);
        m[i].a = malloc(m[i].bytes + 1);
        m[i].b = calloc(1, m[i].bytes + 1);
        rig_fill(m[i].a, m[i].bytes, (uint64_t)i);
        sends[i] = recvs[i] = i;
    }
    shuffle(sends, count);
    shuffle(recvs, count);
    for (int i = 0, k = 0; i < count || k < count;) {
        int n = (int)(rnd() % 20);
        for (; n-- > 0 && i < count; i++) {
            struct storm *x = &m[sends[i]];
            rig_send(rig, x->from, !x->from, rig_key(77, (uint32_t)sends[i] / 8, (uint32_t)sends[i]), x->a, x->bytes,
                     &x->s);
        }
        n = (int)(rnd() % 20);
        for (; n-- > 0 && k < count; k++) {
            struct storm *x = &m[recvs[k]];
            rig_recv(rig, !x->from, x->from, rig_key(77, (uint32_t)recvs[k] / 8, (uint32_t)recvs[k]), x->b, x->bytes,
                     &x->r);
        }
        rig_poll(rig);
    }
    for (int i = 0; i < count; i++) {
        rig_until(rig, &m[i].s.done, 1, 60000);
        rig_until(rig, &m[i].r.done, 1, 60000);
        assert_int_equal(m[i].s.status, 0);
        assert_int_equal(m[i].r.status, 0);
        assert_true(rig_check(m[i].b, m[i].bytes, (uint64_t)i));
        free(m[i].a);
        free(m[i].b);
    }
    for (int i = 0; i < 20; i++) rig_poll(rig);
    for (int i = 0; i < count; i++) assert_true(m[i].s.done == 1 && m[i].r.done == 1);
    free(m);
    free(sends);
    free(recvs);
}

static void test_storm(void **state)
{
    (void)state;
    struct rig rig;
    rig_open(&rig, 2, &options);
    run_storm(&rig, slow ? 300 : 3000, 100000);
    rig_close(&rig);
}

int main(int argc, char **argv)
{
    options.transport = argc > 1 ? argv[1] : "tcp";
    options.fault = argc > 2 ? argv[2] : NULL;
    options.checksum = argc > 3;
    slow = argc > 2 && argv[2][0];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_storm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
