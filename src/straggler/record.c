/* SPDX-License-Identifier: Apache-2.0
 * Recordings of what a straggler engine was told (section 12 of docs/straggler-engine.md): records as bytes, little
 * endian, each with a checksum.  The caller does the I/O; replaying gives the same verdicts bit for bit. */
#include "straggler/stream.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

static const char magic[8] = {'G', 'B', 'S', 'T', 'R', 'A', 'G', '1'};

/* Every record: u32 type, u32 payload bytes, payload, u64 FNV-1a of all before.  The header's type is 0. */
#define FRAME_BYTES 16

struct out {
    unsigned char *at;
    size_t left, used;
};

static void put(struct out *o, const void *p, size_t n)
{
    if (o->at && n <= o->left && n > 0) {
        memcpy(o->at + o->used, p, n);
        o->left -= n;
    } else if (n > 0) {
        o->left = 0;
    }
    o->used += n;
}

static uint64_t checksum(const unsigned char *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static int check_room(const void *bytes, size_t capacity, size_t need, const size_t *written)
{
    if (!bytes || !written || capacity < need)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: the record has %zu bytes, the buffer %zu", need, capacity);
    return GPUBRIDGE_OK;
}

static void begin(struct out *o, void *bytes, size_t capacity, uint32_t type, size_t payload)
{
    uint32_t length = (uint32_t)payload;
    *o = (struct out){.at = bytes, .left = capacity};
    put(o, &type, 4);
    put(o, &length, 4);
}

static void end(struct out *o, size_t *written)
{
    uint64_t sum = checksum(o->at, o->used);
    put(o, &sum, 8);
    *written = o->used;
}

int gpubridge_straggler_record_header(const struct gpubridge_straggler_config *c, void *bytes, size_t capacity,
                                      size_t *written)
{
    if (!c || c->struct_size != sizeof *c || c->ranks < 1 || c->ranks > GPUBRIDGE_STRAGGLER_MAX_STREAMS)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: config is NULL, of another size, or has no ranks");
    size_t payload = 8 + 2 * 4 + 4 * 8 + 4 * 4 + 4 + (size_t)c->ranks * 8;
    GB_TRY(check_room(bytes, capacity, payload + FRAME_BYTES, written));
    struct out o;
    begin(&o, bytes, capacity, 0, payload);
    put(&o, magic, 8);
    put(&o, &c->ranks, 2 * 4);
    put(&o, &c->alarms, 4 * 8);
    put(&o, &c->warmup_steps, 4 * 4);
    uint32_t given = (c->groups ? 1u : 0u) | (c->classes ? 2u : 0u);
    put(&o, &given, 4);
    for (int i = 0; i < 2; i++) {
        const int32_t *v = i == 0 ? c->groups : c->classes;
        for (int32_t r = 0, zero = 0; r < c->ranks; r++) put(&o, v ? &v[r] : &zero, 4);
    }
    end(&o, written);
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_record_step(const gpubridge_straggler *e, int64_t step, const double *seconds,
                                    const uint8_t *present, const int32_t *last, void *bytes, size_t capacity,
                                    size_t *written)
{
    if (!e || !seconds) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine or seconds is NULL");
    size_t n = (size_t)e->kinds * (size_t)e->ranks, groups = (size_t)e->groups;
    size_t payload = 8 + 4 + n * 8 + (present ? n : 0) + (last ? groups * 4 : 0);
    GB_TRY(check_room(bytes, capacity, payload + FRAME_BYTES, written));
    struct out o;
    uint32_t parts = (present ? 1u : 0u) | (last ? 2u : 0u);
    begin(&o, bytes, capacity, GPUBRIDGE_STRAGGLER_RECORD_STEP, payload);
    put(&o, &step, 8);
    put(&o, &parts, 4);
    put(&o, seconds, n * 8);
    if (present) put(&o, present, n);
    if (last) put(&o, last, groups * 4);
    end(&o, written);
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_record_mark(int32_t type, int32_t rank, int32_t kind, const double values[3], void *bytes,
                                    size_t capacity, size_t *written)
{
    static const double none[3] = {0};
    if (type < GPUBRIDGE_STRAGGLER_RECORD_HOLD || type > GPUBRIDGE_STRAGGLER_RECORD_GIVEN)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: record type %d is no mark", type);
    GB_TRY(check_room(bytes, capacity, 32 + FRAME_BYTES, written));
    struct out o;
    begin(&o, bytes, capacity, (uint32_t)type, 32);
    put(&o, &rank, 4);
    put(&o, &kind, 4);
    put(&o, values ? values : none, 24);
    end(&o, written);
    return GPUBRIDGE_OK;
}

/* Checks the frame at the start of `bytes`: its payload and the length of all. */
static int open_frame(const void *bytes, size_t size, uint32_t *type, const unsigned char **payload, size_t *length,
                      size_t *all)
{
    const unsigned char *p = bytes;
    uint32_t n;
    uint64_t sum;
    if (!p || size < FRAME_BYTES)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: the recording is truncated: %zu bytes left", size);
    memcpy(type, p, 4);
    memcpy(&n, p + 4, 4);
    if ((size_t)n > size - FRAME_BYTES)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: the recording is truncated: a record of %u bytes, %zu left",
                       n, size - FRAME_BYTES);
    memcpy(&sum, p + 8 + n, 8);
    if (sum != checksum(p, 8 + (size_t)n))
        return GB_FAIL(GPUBRIDGE_ERR_CHECKSUM, "straggler: a record of the recording is damaged");
    *payload = p + 8;
    *length = n;
    *all = FRAME_BYTES + (size_t)n;
    return GPUBRIDGE_OK;
}

int gpubridge_straggler_replay_open(const void *bytes, size_t size, gpubridge_straggler **engine, size_t *used)
{
    const unsigned char *p = NULL;
    uint32_t type = 0, given = 0;
    size_t n = 0, all = 0;
    struct gpubridge_straggler_config c = {.struct_size = sizeof c};
    if (!engine || !used) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine or used is NULL");
    GB_TRY(open_frame(bytes, size, &type, &p, &n, &all));
    if (type != 0 || n < 68 || memcmp(p, magic, 8) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_VERSION, "straggler: no recording of this version (GBSTRAG1)");
    memcpy(&c.ranks, p + 8, 8);
    memcpy(&c.alarms, p + 16, 32);
    memcpy(&c.warmup_steps, p + 48, 16);
    memcpy(&given, p + 64, 4);
    if (c.ranks < 1 || c.ranks > GPUBRIDGE_STRAGGLER_MAX_STREAMS || n != 68 + (size_t)c.ranks * 8)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: the recording's header names %d ranks in %zu bytes", c.ranks,
                       n);
    int32_t *lists = malloc((size_t)c.ranks * 8);
    if (!lists) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "straggler: no memory for %d ranks", c.ranks);
    memcpy(lists, p + 68, (size_t)c.ranks * 8);
    if (given & 1u) c.groups = lists;
    if (given & 2u) c.classes = lists + c.ranks;
    int rc = gpubridge_straggler_create(&c, engine);
    free(lists);
    if (rc == GPUBRIDGE_OK) *used = all;
    return rc;
}

static int replay_step(gpubridge_straggler *e, const unsigned char *p, size_t n)
{
    if (!p) return GB_FAIL(GPUBRIDGE_ERR_INTERNAL, "straggler: a record without a payload");
    size_t values = (size_t)e->kinds * (size_t)e->ranks;
    uint32_t parts;
    int64_t step;
    if (n < 12 + values * 8)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: a step record of %zu bytes is too short", n);
    memcpy(&step, p, 8);
    memcpy(&parts, p + 8, 4);
    size_t present = parts & 1u ? values : 0, last = parts & 2u ? (size_t)e->groups * 4 : 0;
    if (n != 12 + values * 8 + present + last)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: a step record of %zu bytes; this engine's have %zu", n,
                       12 + values * 8 + present + last);
    /* The payload is not aligned for doubles: the replay vectors were set aside at create. */
    memcpy(e->replay, p + 12, values * 8);
    memcpy(e->replay_last, p + 12 + values * 8 + present, last);
    return gpubridge_straggler_step(e, step, e->replay, present ? p + 12 + values * 8 : NULL,
                                    last ? e->replay_last : NULL);
}

int gpubridge_straggler_replay_next(gpubridge_straggler *e, const void *bytes, size_t size, size_t *used)
{
    const unsigned char *p = NULL;
    uint32_t type = 0;
    size_t n = 0, all = 0;
    int32_t rank, kind;
    double v[3];
    if (!e || !used) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: engine or used is NULL");
    GB_TRY(open_frame(bytes, size, &type, &p, &n, &all));
    if (type == GPUBRIDGE_STRAGGLER_RECORD_STEP) {
        GB_TRY(replay_step(e, p, n));
        *used = all;
        return GPUBRIDGE_OK;
    }
    if (n != 32) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: a mark of %zu bytes; legal are 32", n);
    memcpy(&rank, p, 4);
    memcpy(&kind, p + 4, 4);
    memcpy(v, p + 8, 24);
    switch (type) {
    case GPUBRIDGE_STRAGGLER_RECORD_HOLD:
        GB_TRY(gpubridge_straggler_hold(e, rank, 1));
        break;
    case GPUBRIDGE_STRAGGLER_RECORD_RELEASE:
        GB_TRY(gpubridge_straggler_hold(e, rank, 0));
        break;
    case GPUBRIDGE_STRAGGLER_RECORD_RESTART:
        GB_TRY(gpubridge_straggler_restart(e, rank));
        break;
    case GPUBRIDGE_STRAGGLER_RECORD_CLEAR:
        GB_TRY(gpubridge_straggler_clear(e, rank));
        break;
    case GPUBRIDGE_STRAGGLER_RECORD_GIVEN:
        GB_TRY(gpubridge_straggler_given(e, rank, kind, v[0], v[1], v[2]));
        break;
    default:
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "straggler: record type %u is unknown", type);
    }
    *used = all;
    return GPUBRIDGE_OK;
}
