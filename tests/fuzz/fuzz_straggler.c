/* SPDX-License-Identifier: Apache-2.0
 * Fuzz target: the straggler engine.  Input is either a recording as it stands, or (first byte odd) a script of calls
 * whose values are taken from the bytes: NaN, zero, old steps, wrong ranks.  A refused call must leave every state byte
 * alone.
 */
#include "fuzz.h"

#include <gpubridge/straggler.h>

#include <stdlib.h>
#include <string.h>

#define RANKS  5
#define GROUPS 2

static void require(int condition)
{
    if (!condition) abort();
}

static size_t snapshot(const gpubridge_straggler *e, int ranks, int groups, uint8_t *out, size_t capacity)
{
    size_t used = 0, n;
    for (int r = -groups; r < ranks; r++) {
        require(gpubridge_straggler_state_bytes(e, r, 0, out + used, capacity - used, &n) == GPUBRIDGE_OK);
        used += n;
        struct gpubridge_straggler_report report = {.struct_size = sizeof report};
        require(gpubridge_straggler_report(e, r, 0, &report) == GPUBRIDGE_OK);
        require(report.state >= GPUBRIDGE_STRAGGLER_WARMUP && report.state <= GPUBRIDGE_STRAGGLER_UNKNOWN);
    }
    return used;
}

static void recording(const uint8_t *data, size_t size)
{
    gpubridge_straggler *e = NULL;
    size_t used, at;
    if (size > 65536 || gpubridge_straggler_replay_open(data, size, &e, &at) != GPUBRIDGE_OK) {
        require(e == NULL);
        return;
    }
    while (at < size && gpubridge_straggler_replay_next(e, data + at, size - at, &used) == GPUBRIDGE_OK) {
        require(used > 0 && used <= size - at);
        at += used;
    }
    gpubridge_straggler_destroy(e);
}

struct input {
    const uint8_t *at;
    size_t left;
};

static uint8_t byte(struct input *in)
{
    if (!in->left) return 0;
    in->left--;
    return *in->at++;
}

/* Mostly a plausible time; sometimes eight raw bytes as a double. */
static double value(struct input *in)
{
    uint8_t b = byte(in);
    double d = 1.0 + 0.01 * ((double)(b & 63) - 32.0);
    if (b < 240 || in->left < 8) return d;
    memcpy(&d, in->at, 8);
    in->at += 8;
    in->left -= 8;
    return d;
}

static int call(gpubridge_straggler *e, struct input *in, int64_t *step)
{
    double seconds[RANKS];
    uint8_t present[RANKS], op = byte(in);
    int32_t last[GROUPS], rank = (int32_t)(op >> 5) - 1;
    if (op % 32 < 24) {
        for (int r = 0; r < RANKS; r++) {
            seconds[r] = value(in);
            present[r] = op % 4 != 1 || byte(in) > 60;
        }
        for (int g = 0; g < GROUPS; g++) last[g] = (int32_t)(byte(in) % 7) - 1;
        *step += op % 32 == 7 ? -1 : 1;
        return gpubridge_straggler_step(e, *step, seconds, op % 4 == 1 ? present : NULL, op % 8 == 3 ? last : NULL);
    }
    switch (op % 32) {
    case 24:
        return gpubridge_straggler_hold(e, rank, 1);
    case 25:
        return gpubridge_straggler_hold(e, rank, 0);
    case 26:
        return gpubridge_straggler_restart(e, rank);
    case 27:
        return gpubridge_straggler_clear(e, rank);
    case 28:
        return gpubridge_straggler_given(e, rank, 0, value(in), value(in), 0.0);
    case 29:
        return gpubridge_straggler_flush(e);
    default:
        return gpubridge_straggler_push(e, *step + byte(in) % 12, rank, 0, value(in));
    }
}

static void script(const uint8_t *data, size_t size)
{
    static uint8_t before[8192], after[8192];
    static const int32_t groups[RANKS] = {0, 0, 1, 0, 0};
    struct gpubridge_straggler_config c = {.struct_size = sizeof c,
                                           .ranks = RANKS,
                                           .groups = groups,
                                           .warmup_steps = -1,
                                           .max_hold_steps = 9,
                                           .alarms = 1e4};
    struct input in = {data, size};
    gpubridge_straggler *e;
    int64_t step = 0;
    if (gpubridge_straggler_create(&c, &e) != GPUBRIDGE_OK) return;
    for (int r = 0; size && (data[0] & 2) && r < RANKS; r++)
        require(gpubridge_straggler_given(e, r, 0, 1.0, 0.05, 0.1) == GPUBRIDGE_OK);
    byte(&in);
    while (in.left) {
        size_t n = snapshot(e, RANKS, GROUPS, before, sizeof before);
        if (call(e, &in, &step) == GPUBRIDGE_OK) continue;
        require(n == snapshot(e, RANKS, GROUPS, after, sizeof after) && memcmp(before, after, n) == 0);
    }
    gpubridge_straggler_destroy(e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size && (data[0] & 1))
        script(data, size);
    else
        recording(data, size);
    return 0;
}
