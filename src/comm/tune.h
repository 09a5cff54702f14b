/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.h: GPUBRIDGE_COMPRESSION=auto: what a group measures when it is made, and the codec and chunk size that follow.
 * The model is a pure function of numbers that all ranks share, so all come to the same choice. */
#ifndef GB_COMM_TUNE_H
#define GB_COMM_TUNE_H

#include "codec/codec.h"
#include "comm/context.h"

/* Of the slowest rank each. */
struct gb_tune_facts {
    double round_s;                /* a small all_reduce */
    double wire_s;                 /* per float of a large uncompressed all_reduce */
    double code_s[GB_CODEC_COUNT]; /* per float: encoding a partial, decoding and adding all islands'; 0: no limit */
};

struct gb_tune_choice {
    int codec;
    uint64_t chunk_bytes;
    double seconds[GB_CODEC_COUNT]; /* modelled time of an all_reduce of GB_TUNE_FLOATS; 0: not a candidate */
};

#define GB_TUNE_FLOATS (25u << 18) /* 25 MiB: a gradient bucket of DDP */
#define GB_TUNE_GAIN   0.95        /* a less exact codec must bring the time below this share */

/* The model: chunks cross while others are coded, two at a time are under way, and the first and last stand alone:
 *     time = round + n max(wire, code, round / 2 per chunk) + chunk (wire + code)
 * `fixed_chunk`: a chunk size that the user chose; 0: any.  Candidates are none, bf16, fp8_e4m3 and int8: what trains
 * like float32.  The others are for those who name them. */
void gb_tune_choose(const struct gb_tune_facts *facts, uint64_t fixed_chunk, struct gb_tune_choice *choice);

/* Measures, agrees with the other members, and sets the group's codec and chunk size.  User thread, while the comm is
 * being made on all members. */
int gb_comm_tune(gpubridge_comm *comm) GB_NODISCARD;

#endif
