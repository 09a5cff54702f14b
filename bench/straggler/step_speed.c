/* SPDX-License-Identifier: Apache-2.0
 * Speed of one step of 16,384 ranks x 8 streams on one core, beside a read-modify-write of the same hot bytes in the
 * same run. One JSON line: medians in milliseconds of this thread's processor time.  bench/straggler/step_speed.py adds
 * a NumPy version.  */
#include "straggler/stream.h"

#include <gpubridge/straggler.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define RANKS 16384
#define KINDS 8
#define STEPS 400
#define POOL  (1u << 20)

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* other work on the machine does not count */
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static uint64_t state = 88172645463325252u;

static double jitter(void)
{
    double sum = 0.0;
    for (int i = 0; i < 4; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sum += (double)(state >> 11) * 0x1p-53 - 0.5;
    }
    return 1.0 + 0.05 * sum * 1.732;
}

int main(int argc, char **argv)
{
    int peers = argc > 1 ? atoi(argv[1]) : 0;
    int32_t *groups = malloc(RANKS * sizeof *groups), *last = malloc(RANKS * sizeof *last);
    double *pool = malloc(sizeof *pool * POOL), *now = malloc(sizeof *now * RANKS * KINDS), ms[STEPS], touch[STEPS];
    gpubridge_straggler *e;
    if (!groups || !last || !pool || !now) return 1;
    for (int r = 0; r < RANKS; r++) {
        groups[r] = r / 64;
        last[r] = -1;
    }
    struct gpubridge_straggler_config c = {
        .struct_size = sizeof c, .ranks = RANKS, .kinds = KINDS, .groups = groups, .use_peers = peers};
    if (gpubridge_straggler_create(&c, &e)) return 1;
    for (size_t i = 0; i < POOL; i++) pool[i] = jitter();
    size_t words = (size_t)e->kinds * (size_t)e->blocks * sizeof(struct gb_hot) / 8;
    uint64_t *copy = calloc(words, 8);
    if (!copy) return 1;
    for (int s = 0; s < STEPS + 400; s++) {
        for (int g = 0; g < RANKS / 64; g++) last[g] = g * 64 + (s * 7 + g) % 64;
        size_t offset = (size_t)(jitter() * 1e9) % POOL; /* a fresh place in a pool of a million values */
        for (size_t i = 0; i < (size_t)RANKS * KINDS; i++) now[i] = pool[(offset + i * 7) % POOL];
        double t0 = now_ms();
        if (gpubridge_straggler_step(e, s, now, NULL, last)) return 1;
        double t1 = now_ms();
        for (size_t i = 0; i < words; i++) copy[i] = copy[i] * 3 + 1;
        double t2 = now_ms();
        if (s >= 400) {
            ms[s - 400] = t1 - t0;
            touch[s - 400] = t2 - t1;
        }
    }
    qsort(ms, STEPS, sizeof *ms, by_value);
    qsort(touch, STEPS, sizeof *touch, by_value);
    printf(
        "{\"tool\": \"step_speed\", \"ranks\": %d, \"kinds\": %d, \"peers\": %d, \"streams\": %d, \"hot_bytes\": %zu, "
        "\"step_ms_p50\": %.3f, \"step_ms_p95\": %.3f, \"step_ms_min\": %.3f, \"read_modify_write_ms_p50\": %.3f, "
        "\"sink\": %llu}\n",
        RANKS, KINDS, peers >= 0, RANKS * KINDS, words * 8, ms[STEPS / 2], ms[STEPS * 95 / 100], ms[0],
        touch[STEPS / 2], (unsigned long long)(copy[words / 2] & 1));
    gpubridge_straggler_destroy(e);
    free(groups);
    free(last);
    free(pool);
    free(now);
    free(copy);
    return 0;
}
