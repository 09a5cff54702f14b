/* SPDX-License-Identifier: Apache-2.0
 * Fuzz target: frames, trailers and control messages, and the matching machine fed with arbitrary well-formed frames. A
 * fuzzer cannot guess checksums, so the second half repairs them first. */
#include "fuzz.h"
#include "transport/match.h"

#include <stdlib.h>
#include <string.h>

static void require(int condition)
{
    if (!condition) abort();
}

static void parsers(const uint8_t *data, size_t size)
{
    struct gb_frame f;
    struct gb_trailer t;
    struct gb_ctl c;
    const char *why = NULL;
    uint8_t raw[GB_FRAME_BYTES];
    if (size >= GB_FRAME_BYTES && gb_frame_parse(data, &f, &why) == 0) {
        gb_frame_pack(&f, raw);
        require(memcmp(raw, data, sizeof raw) == 0);
    }
    if (size >= GB_TRAILER_BYTES) (void)gb_trailer_parse(data, &t, &why);
    if (size >= GB_CTL_HEAD_BYTES && gb_ctl_parse(data, &c, &why) == 0) {
        require(c.bytes <= GB_CTL_BODY_MAX);
        if (size - GB_CTL_HEAD_BYTES >= c.bytes) (void)gb_ctl_check(data, data + GB_CTL_HEAD_BYTES, c.bytes, &why);
    }
}

static int take_frame(void *arg, const struct gb_frame *f, const void *payload, int urgent)
{
    (void)arg, (void)f, (void)payload, (void)urgent;
    return 0;
}
static void take_msg(void *arg, struct gb_msg *m)
{
    (void)arg;
    m->stage = GB_MSG_QUEUED;
}
static struct gb_msg *loans[64];
static size_t nloans;

static void take_event(void *arg, const struct gb_net_event *event)
{
    (void)arg;
    if (event->loan) require(nloans < sizeof loans / sizeof *loans), loans[nloans++] = event->loan;
}
/* Every send may be lent, and every place below 8 is good. */
static int find(void *arg, const struct gb_msg *m, struct gb_place *place)
{
    (void)arg;
    *place = (struct gb_place){.region = (uint32_t)m->bytes};
    return 1;
}
static void *place_of(void *arg, const struct gb_place *place, uint64_t bytes)
{
    static uint8_t region[20008];
    (void)arg;
    return place->offset < 8 && bytes <= 20000 ? region + place->offset : NULL;
}
static void nothing(void *arg, struct gb_msg *m)
{
    (void)arg, (void)m;
}
static const struct gb_match_hooks hooks = {.frame = take_frame,
                                            .move = take_msg,
                                            .unqueue = nothing,
                                            .stop = nothing,
                                            .event = take_event,
                                            .find = find,
                                            .place = place_of};

static uint8_t posted[4][20000];

/* Per step one byte of choice and, for frames, a short description: small keys, so that they meet. */
static void machine(const uint8_t *data, size_t size)
{
    struct gb_match mt;
    struct gb_cancel_set set = {0};
    static const uint8_t payload[GB_EAGER_BYTES];
    const char *why;
    nloans = 0;
    if (gb_match_init(&mt, &hooks, NULL, NULL, &set) != 0) return;
    for (size_t i = 0; i + 6 <= size; i += 6) {
        struct gb_frame f = {.type = data[i] % 9,
                             .group = data[i + 1] % 2,
                             .seq = data[i + 1] / 2 % 4,
                             .xid = data[i + 2] % 2,
                             .op = data[i + 3] % 2,
                             .bytes = data[i + 3] & 2 ? 16 : 20000,
                             .credit = data[i + 4] % 4,
                             .slot = data[i + 5],
                             .flags = data[i + 4] & GB_FRAME_BORROWS};
        struct gb_key key = {f.group, f.seq, f.xid};
        struct gb_sig sig = {.op = f.op};
        struct gb_msg *m;
        f.slot |= 1u << 20;
        if (f.type == GB_FRAME_EAGER) f.bytes = data[i + 3] % 32;
        f.check = gb_frame_payload(&f) ? gb_frame_check(payload, gb_frame_payload(&f)) : 0;
        if (data[i] & 0x80) {
            (void)!gb_match_recv(&mt, &key, &sig, posted[f.seq], data[i + 3] & 2 ? 16 : 20000, data[i + 3] & 4, NULL);
        } else if (data[i] & 0x40) {
            (void)!gb_match_send(&mt, &key, &sig, payload, data[i + 3] & 2 ? 16 : 20000, NULL);
        } else if (data[i] == 0x3f) {
            gb_match_cancel(&mt, f.group, -1);
        } else if (data[i] == 0x3e || nloans == sizeof loans / sizeof *loans) {
            if (nloans) (void)!gb_match_return(&mt, loans[--nloans]);
        } else if (f.type == GB_FRAME_DATA) {
            if (gb_match_data(&mt, &f, &m, &why) == 0 && m) {
                require(m->bytes == f.bytes && m->granted);
                gb_match_data_done(&mt, m, 0, data[i + 4]);
                gb_match_recycle(&mt, m);
            }
        } else if (gb_match_frame(&mt, &f, payload, &why) != 0) {
            break;
        }
    }
    (void)!gb_match_flush(&mt);
    gb_match_fail(&mt, GPUBRIDGE_ERR_PEER_LOST, "end");
    gb_match_fini(&mt);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    parsers(data, size);
    machine(data, size);
    return 0;
}
