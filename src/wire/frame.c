/* SPDX-License-Identifier: Apache-2.0
 * Packs and parses frames, trailers and control messages.  Pure; bytes from a peer are never trusted. */
#include "wire/frame.h"

#include "wire/le.h"

#include <string.h>
#include <xxhash.h>

#define GB_MAGIC     0x4247u /* "GB" */
#define GB_CTL_MAGIC 0x4347u /* "GC" */

uint32_t gb_frame_check(const void *data, size_t bytes)
{
    return (uint32_t)XXH3_64bits(data, bytes);
}

void gb_frame_pack(const struct gb_frame *f, uint8_t out[GB_FRAME_BYTES])
{
    gb_put16(out, GB_MAGIC);
    out[2] = GB_FRAME_VERSION;
    out[3] = f->type;
    gb_put32(out + 4, f->ack);
    gb_put64(out + 8, f->group);
    gb_put32(out + 16, f->seq);
    gb_put32(out + 20, f->xid);
    out[24] = f->op;
    out[25] = f->dtype;
    out[26] = f->reduce_op;
    out[27] = f->root_lo;
    gb_put32(out + 28, f->plan_hash);
    gb_put64(out + 32, f->count);
    gb_put64(out + 40, f->bytes);
    gb_put32(out + 48, f->slot);
    gb_put16(out + 52, f->credit);
    gb_put16(out + 54, f->flags);
    gb_put32(out + 56, f->check);
    gb_put32(out + 60, gb_frame_check(out, 60));
}

int gb_frame_parse(const uint8_t in[GB_FRAME_BYTES], struct gb_frame *f, const char **why)
{
    if (gb_get32(in + 60) != gb_frame_check(in, 60)) {
        *why = "a frame header's checksum is wrong";
        return -1;
    }
    if (gb_get16(in) != GB_MAGIC || in[2] != GB_FRAME_VERSION) {
        *why = "a frame has the wrong magic or version";
        return -1;
    }
    if (in[3] < GB_FRAME_EAGER || in[3] >= GB_FRAME_TYPE_END) {
        *why = "a frame is of an unknown type";
        return -1;
    }
    *f = (struct gb_frame){.type = in[3],
                           .ack = gb_get32(in + 4),
                           .group = gb_get64(in + 8),
                           .seq = gb_get32(in + 16),
                           .xid = gb_get32(in + 20),
                           .op = in[24],
                           .dtype = in[25],
                           .reduce_op = in[26],
                           .root_lo = in[27],
                           .plan_hash = gb_get32(in + 28),
                           .count = gb_get64(in + 32),
                           .bytes = gb_get64(in + 40),
                           .slot = gb_get32(in + 48),
                           .credit = gb_get16(in + 52),
                           .flags = gb_get16(in + 54),
                           .check = gb_get32(in + 56)};
    return 0;
}

size_t gb_frame_payload(const struct gb_frame *f)
{
    if (f->type == GB_FRAME_LENT) return GB_PLACE_BYTES;
    return f->type == GB_FRAME_EAGER ? (size_t)f->bytes : 0;
}

void gb_place_pack(const struct gb_place *place, uint8_t out[GB_PLACE_BYTES])
{
    gb_put32(out, place->region);
    gb_put32(out + 4, 0);
    gb_put64(out + 8, place->offset);
}

void gb_place_parse(const uint8_t in[GB_PLACE_BYTES], struct gb_place *place)
{
    *place = (struct gb_place){.region = gb_get32(in), .offset = gb_get64(in + 8)};
}

void gb_trailer_pack(const struct gb_trailer *t, uint8_t out[GB_TRAILER_BYTES])
{
    gb_put64(out, t->sum);
    gb_put32(out + 8, t->abandoned);
    gb_put32(out + 12, gb_frame_check(out, 12));
}

int gb_trailer_parse(const uint8_t in[GB_TRAILER_BYTES], struct gb_trailer *t, const char **why)
{
    if (gb_get32(in + 12) != gb_frame_check(in, 12) || gb_get32(in + 8) > 1) {
        *why = "a frame trailer's checksum is wrong";
        return -1;
    }
    t->sum = gb_get64(in);
    t->abandoned = gb_get32(in + 8);
    return 0;
}

/* The check covers the first 12 bytes of the head and the body, so a damaged head never decides about a body. */
static uint32_t ctl_check(const uint8_t in[GB_CTL_HEAD_BYTES], const void *body, size_t bytes)
{
    uint8_t all[12 + GB_CTL_BODY_MAX];
    memcpy(all, in, 12);
    if (bytes) memcpy(all + 12, body, bytes);
    return gb_frame_check(all, 12 + bytes);
}

void gb_ctl_pack(const struct gb_ctl *ctl, const void *body, uint8_t out[GB_CTL_HEAD_BYTES])
{
    gb_put16(out, GB_CTL_MAGIC);
    out[2] = GB_FRAME_VERSION;
    out[3] = ctl->type;
    gb_put16(out + 4, ctl->bytes);
    gb_put16(out + 6, 0);
    gb_put32(out + 8, (uint32_t)ctl->status);
    gb_put32(out + 12, ctl_check(out, body, ctl->bytes));
}

int gb_ctl_parse(const uint8_t in[GB_CTL_HEAD_BYTES], struct gb_ctl *ctl, const char **why)
{
    if (gb_get16(in) != GB_CTL_MAGIC || in[2] != GB_FRAME_VERSION || gb_get16(in + 6) != 0) {
        *why = "a control message has the wrong magic or version";
        return -1;
    }
    if (in[3] < GB_CTL_HEARTBEAT || in[3] >= GB_CTL_TYPE_END || gb_get16(in + 4) > GB_CTL_BODY_MAX) {
        *why = "a control message is of an unknown type or too long";
        return -1;
    }
    ctl->type = in[3];
    ctl->bytes = gb_get16(in + 4);
    ctl->status = (int32_t)gb_get32(in + 8);
    return 0;
}

int gb_ctl_check(const uint8_t in[GB_CTL_HEAD_BYTES], const void *body, size_t bytes, const char **why)
{
    if (bytes > GB_CTL_BODY_MAX || gb_get32(in + 12) != ctl_check(in, body, bytes)) {
        *why = "a control message's checksum is wrong";
        return -1;
    }
    return 0;
}
