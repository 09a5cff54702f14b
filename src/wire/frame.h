/* SPDX-License-Identifier: Apache-2.0
 *
 * frame.h: the bytes on the lanes of a link once it is up (docs/wire-format.md is normative).  Pure: no I/O, no state,
 * any thread.  What a parser accepts is well formed; whether it makes sense now is the business of match.c.
 */
#ifndef GB_WIRE_FRAME_H
#define GB_WIRE_FRAME_H

#include <stddef.h>
#include <stdint.h>

#define GB_FRAME_BYTES    64u
#define GB_TRAILER_BYTES  16u
#define GB_FRAME_VERSION  1u
#define GB_CREDIT_UNIT    64u    /* bytes of one unit of eager credit */
#define GB_CREDIT_UNITS   16384u /* what a sender starts with: 1 MiB */
#define GB_CTL_HEAD_BYTES 16u

enum gb_frame_type {
    GB_FRAME_EAGER = 1, /* express: header + payload */
    GB_FRAME_RTS,       /* express: a message waits for a grant */
    GB_FRAME_GRANT,     /* express: the receive is posted, move the payload to `slot` */
    GB_FRAME_CREDIT,    /* express: only the credit field means something */
    GB_FRAME_NACK,      /* express: signature or length differ; carries the sender's of this frame */
    GB_FRAME_DATA,      /* bulk: header + payload + trailer */
    GB_FRAME_LENT,      /* express: header + gb_place: the payload can be read there */
    GB_FRAME_RETURN,    /* express: a lent payload has been read */
    GB_FRAME_TYPE_END
};

enum gb_frame_flags {
    GB_FRAME_SUM = 1,       /* DATA: the trailer holds the payload's checksum */
    GB_FRAME_ASKED = 2,     /* DATA: an RTS for this message went before it on the express lane */
    GB_FRAME_TO_SENDER = 4, /* NACK: for the message's sender (else: for its receiver) */
    GB_FRAME_BORROWS = 8    /* GRANT: the payload may be lent */
};

struct gb_frame {
    uint8_t type;
    uint16_t flags;
    uint16_t credit; /* units given back by the sender of this frame */
    uint32_t ack;    /* reserved for per-chunk acknowledgements; 0 */
    uint64_t group;
    uint32_t seq, xid;
    uint8_t op, dtype, reduce_op, root_lo;
    uint32_t plan_hash;
    uint64_t count;
    uint64_t bytes; /* length of the message */
    uint32_t slot;  /* GRANT, DATA, NACK to a receiver: the receiver's slot */
    uint32_t check; /* EAGER, LENT: low half of XXH3-64 of the payload */
};

void gb_frame_pack(const struct gb_frame *frame, uint8_t out[GB_FRAME_BYTES]);
/* 0, or -1 and *why: a constant text. */
int gb_frame_parse(const uint8_t in[GB_FRAME_BYTES], struct gb_frame *frame, const char **why);
/* Low half of XXH3-64. */
uint32_t gb_frame_check(const void *data, size_t bytes);

/* Bytes that follow the header on the express lane. */
size_t gb_frame_payload(const struct gb_frame *frame);

/* Payload of LENT: where the message lies in the sender's regions. */
#define GB_PLACE_BYTES 16u
struct gb_place {
    uint32_t region;
    uint64_t offset;
};
void gb_place_pack(const struct gb_place *place, uint8_t out[GB_PLACE_BYTES]);
void gb_place_parse(const uint8_t in[GB_PLACE_BYTES], struct gb_place *place);

/* Ends a DATA payload. */
struct gb_trailer {
    uint64_t sum;       /* XXH3-64 of the payload when GB_FRAME_SUM */
    uint32_t abandoned; /* 1: the sender gave up, the payload is filler */
};
void gb_trailer_pack(const struct gb_trailer *trailer, uint8_t out[GB_TRAILER_BYTES]);
int gb_trailer_parse(const uint8_t in[GB_TRAILER_BYTES], struct gb_trailer *trailer, const char **why);

/* Control lane: 16-byte head + body. */
enum gb_ctl_type {
    GB_CTL_HEARTBEAT = 1,
    GB_CTL_MESSAGE,
    GB_CTL_GOODBYE,
    GB_CTL_REGION, /* offers memory, whose descriptor comes beside it */
    GB_CTL_TAKEN,  /* the answer */
    GB_CTL_TYPE_END
};
#define GB_CTL_BODY_MAX 1024u
struct gb_ctl {
    uint8_t type;
    uint16_t bytes; /* of the body */
    int32_t status; /* GOODBYE */
};
void gb_ctl_pack(const struct gb_ctl *ctl, const void *body, uint8_t out[GB_CTL_HEAD_BYTES]);
/* The head alone; its check covers the body too, so gb_ctl_check follows when the body is there. */
int gb_ctl_parse(const uint8_t in[GB_CTL_HEAD_BYTES], struct gb_ctl *ctl, const char **why);
int gb_ctl_check(const uint8_t in[GB_CTL_HEAD_BYTES], const void *body, size_t bytes, const char **why);

#endif
