/* SPDX-License-Identifier: Apache-2.0
 * Replays a file of straggler recordings, one after another, and writes what the engine holds after every record: the
 * status (i32), then of every stream the state bytes and the slowdown detectable within 200 steps (f64).  The
 * differential test compares this, from every build, with the reference.  `replay_states FILE [hash]` prints one
 * checksum instead.  */
#include "base/err.h"

#include <gpubridge/straggler.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t hash = 0xcbf29ce484222325u;
static int only_hash;

static void out(const void *p, size_t n)
{
    if (!only_hash) {
        if (fwrite(p, 1, n, stdout) != n) exit(3);
        return;
    }
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)p)[i]) * 0x100000001b3u;
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
            if (gpubridge_straggler_state_bytes(e, rank, kind, bytes, sizeof bytes, &n)) exit(4);
            if (gpubridge_straggler_detectable(e, rank, kind, 200.0, 0.95, &slowdown)) exit(5);
            out(bytes, n);
            out(&slowdown, sizeof slowdown);
        }
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    only_hash = argc > 2;
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
        out(&rc, sizeof rc);
        dump(e, &shape);
    }
    if (only_hash) printf("%016llx\n", (unsigned long long)hash);
    gpubridge_straggler_destroy(e);
    free(data);
    return 0;
}
