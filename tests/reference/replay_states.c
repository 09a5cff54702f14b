/* SPDX-License-Identifier: Apache-2.0
 * Replays a file of straggler recordings, one after another, and writes what the engine holds after every record: the
 * status (i32), then of every stream the state bytes, the score, the slowdown of its verdict and the ones detectable
 * within 200, 15, 30, 45 and 70 steps (f64 each). The differential test compares this, from every build, with the
 * reference.  `replay_states FILE N` dumps after every Nth record only; with N = 0 the file holds doubles, and their
 * exponentials, logarithms and clipped inverses come out, or 0 where there is none: what single precision in the states
 * would hide.  */
#include "base/err.h"
#include "straggler/num.h"
#include "straggler/stream.h"

#include <gpubridge/straggler.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void out(const void *p, size_t n)
{
    if (fwrite(p, 1, n, stdout) != n) exit(3);
}

struct shape {
    int32_t ranks, kinds, groups;
};

/* Ranks, kinds and groups as the header states them (docs/straggler-engine.md, 12). */
static struct shape shape_of(const unsigned char *header)
{
    struct shape s = {.groups = 1};
    uint32_t given;
    memcpy(&s.ranks, header + 16, 4);
    memcpy(&s.kinds, header + 20, 4);
    memcpy(&given, header + 72, 4);
    for (int32_t r = 0; (given & 1u) && r < s.ranks; r++) {
        int32_t g;
        memcpy(&g, header + 76 + 4 * r, 4);
        if (g >= s.groups) s.groups = g + 1;
    }
    return s;
}

static void dump(const gpubridge_straggler *e, const struct shape *s)
{
    unsigned char bytes[1024];
    size_t n;
    for (int32_t kind = 0; kind < s->kinds; kind++)
        for (int32_t i = 0; i < s->ranks + s->groups; i++) {
            int32_t rank = i < s->ranks ? i : s->ranks - 1 - i;
            static const double horizons[] = {200.0, 15.0, 30.0, 45.0, 70.0};
            double found[5];
            struct gpubridge_straggler_report report = {.struct_size = sizeof report};
            if (gpubridge_straggler_state_bytes(e, rank, kind, bytes, sizeof bytes, &n)) exit(4);
            for (int k = 0; k < 5; k++)
                if (gpubridge_straggler_detectable(e, rank, kind, horizons[k], 0.95, &found[k])) exit(5);
            if (gpubridge_straggler_report(e, rank, kind, &report)) exit(6);
            out(bytes, n);
            out(&report.score, sizeof report.score);
            out(&report.slowdown, sizeof report.slowdown);
            out(found, sizeof found);
        }
}

static void numbers(const unsigned char *data, size_t size)
{
    for (size_t at = 0; at + sizeof(double) <= size; at += sizeof(double)) {
        double x, y;
        memcpy(&x, data + at, sizeof x);
        y = gb_exp(x);
        out(&y, sizeof y);
        y = x > 0.0 ? gb_log(x) : 0.0;
        out(&y, sizeof y);
        y = gb_gauss_clipped_inverse(x < 0.0 ? 0.0 : x < 2.0 ? x : 2.0);
        out(&y, sizeof y);
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    long every = argc > 2 ? atol(argv[2]) : 1, record = 0;
    FILE *f = fopen(argv[1], "rb");
    if (!f || fseek(f, 0, SEEK_END)) return 2;
    long size = ftell(f);
    rewind(f);
    unsigned char *data = malloc((size_t)size + 1);
    if (size < 0 || !data || fread(data, 1, (size_t)size, f) != (size_t)size) return 2;
    fclose(f);
    gpubridge_straggler *e = NULL;
    struct shape shape = {0};
    if (every <= 0) numbers(data, (size_t)size);
    for (size_t at = 0, used; every > 0 && at < (size_t)size; at += used) {
        uint32_t type, length;
        memcpy(&type, data + at, 4);
        memcpy(&length, data + at + 4, 4);
        int32_t rc;
        if (type == 0) {
            gpubridge_straggler_destroy(e);
            e = NULL;
            rc = gpubridge_straggler_replay_open(data + at, (size_t)size - at, &e, &used);
            if (rc) {
                fprintf(stderr, "replay_states: %s\n", gb_err_text());
                return 1;
            }
            shape = shape_of(data + at);
        } else {
            rc = gpubridge_straggler_replay_next(e, data + at, (size_t)size - at, &used);
            if (rc) used = 16 + (size_t)length; /* refused: the state must be what it was */
        }
        if (record++ % every) continue;
        out(&rc, sizeof rc);
        dump(e, &shape);
    }
    gpubridge_straggler_destroy(e);
    free(data);
    return 0;
}
