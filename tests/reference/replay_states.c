/* SPDX-License-Identifier: Apache-2.0
 * Replays a file of straggler recordings, one after another, and writes what the engine holds after every record: the
 * status (i32), then of every stream the state bytes, the score and the slowdown detectable within 200 steps (f64
 * each). The differential test compares this, from every build, with the reference.  `replay_states FILE N` dumps after
 * every Nth record only.  */
#include "base/err.h"

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
            double slowdown;
            struct gpubridge_straggler_report report = {.struct_size = sizeof report};
            if (gpubridge_straggler_state_bytes(e, rank, kind, bytes, sizeof bytes, &n)) exit(4);
            if (gpubridge_straggler_detectable(e, rank, kind, 200.0, 0.95, &slowdown)) exit(5);
            if (gpubridge_straggler_report(e, rank, kind, &report)) exit(6);
            out(bytes, n);
            out(&report.score, sizeof report.score);
            out(&slowdown, sizeof slowdown);
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
    for (size_t at = 0, used; at < (size_t)size; at += used) {
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
