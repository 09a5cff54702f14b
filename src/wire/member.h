/* SPDX-License-Identifier: Apache-2.0
 *
 * member.h: what a member of a new comm tells the others.  Written once per comm, exchanged by the caller, parsed with
 * nothing trusted: a hello is peers' bytes.  Layout in docs/wire-format.md. */
#ifndef GB_WIRE_MEMBER_H
#define GB_WIRE_MEMBER_H

#include "base/config.h"

#define GB_MEMBER_PROTOCOL 1

enum gb_member_flags {
    GB_MEMBER_STAGED = 1,
    GB_MEMBER_EMULATED = 2,
    GB_MEMBER_NO_KERNELS = 4 /* staged, but its device cannot run our kernels: the group adds in host memory */
};

struct gb_member_hello {
    uint16_t protocol;   /* GB_MEMBER_PROTOCOL */
    uint8_t device_kind; /* enum gpubridge_device_kind */
    uint8_t flags;       /* enum gb_member_flags */
    int32_t rank, size;  /* in the comm */
    int32_t global_rank;
    uint32_t ccl_epoch;      /* aborted vendor communicators so far: members use the highest */
    uint8_t uuid[16];        /* of the context */
    uint8_t leader_uuid[16]; /* who orders operations of all GPU ranks; zero: nobody yet */
    uint64_t name_hash;      /* of the comm's name */
    uint64_t birth;          /* random: makes the comm's id unique in time */
    uint64_t host_id;        /* equal on one host */
    char host[64];
    char island[64];   /* island key */
    char device[64];   /* identity of the device (PCI id or UUID); "" for a CPU */
    char library[32];  /* gpubridge version */
    char versions[64]; /* caller's text, e.g. "torch 2.13.0" */
    char ccl[48];      /* "NCCL 2.28.9"; "" when none */
    char agreed[GB_SETTINGS_AGREED_BYTES];
    uint16_t address_bytes;
    uint8_t address[512];
};

/* Writes at most `capacity` bytes; GPUBRIDGE_ERR_INVALID when they do not fit. */
int gb_member_hello_encode(const struct gb_member_hello *hello, uint8_t *bytes, size_t capacity,
                           size_t *length) GB_NODISCARD;
/* Checks magic, version, lengths and terminators.  A version that differs is GPUBRIDGE_ERR_VERSION with both in the
 * text. */
int gb_member_hello_decode(const uint8_t *bytes, size_t length, struct gb_member_hello *hello) GB_NODISCARD;

#endif
