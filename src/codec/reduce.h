/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce.h: the one arithmetic of the project.  dst[i] = fold of src[0][i], src[1][i], ... in that order, in the
 * accumulator of the logical dtype: f32 for f16, bf16, f32 and c64 parts; f64 for f64 and c128 parts; the type itself
 * (modular) for integers; logical for bool (SUM, MAX, BOR = or; PRODUCT, MIN, BAND = and; BXOR = xor; bytes in are 0 or
 * not 0, bytes out 0 or 1).  MIN and MAX propagate NaN; every NaN written is canonical (0x7fc00000, 0x7ff8..., 0x7e00,
 * 0x7fc0).  Conversions round to nearest even.  The same source (kernels.inc) is compiled for the CPU here and at run
 * time for GPUs, with contraction off, and gives the same bits everywhere.
 *
 * Sources and destination may be messages of a wire codec where the accumulator is f32 (f16, bf16, f32, c64): packing,
 * and decoding and adding in order, are this one operation too.  A message holds all `count` values (2 * count for
 * c64), begins on a multiple of 16 bytes, and may be decoded and encoded in place.
 */
#ifndef GB_CODEC_REDUCE_H
#define GB_CODEC_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#define GB_REDUCE_MAX_SRC 16

enum gb_reduce_flags {
    GB_REDUCE_FINAL = 1,     /* AVG: divide by `divisor` (integers truncate toward zero) before the last rounding */
    GB_REDUCE_STOCHASTIC = 2 /* an encoded destination is rounded up or down at random */
};

/* What encoding met; counts are added, so one array may serve many operations. */
enum gb_codec_stat {
    GB_CODEC_BLOCKS,     /* blocks encoded; values, for the casts */
    GB_CODEC_SATURATED,  /* of these: a finite value was brought down to the largest the format has */
    GB_CODEC_NOT_FINITE, /* values that were infinite or NaN */
    GB_CODEC_STATS
};

struct gb_reduce_args {
    void *dst; /* may equal a src exactly, never overlap it partly */
    const void *src[GB_REDUCE_MAX_SRC];
    uint64_t count;       /* elements (complex: pairs) */
    double factor;        /* PREMUL_SUM */
    uint64_t divisor;     /* ranks in the group */
    uint64_t seed;        /* GB_REDUCE_STOCHASTIC: of the generator, */
    uint64_t first_index; /* and the counter of value 0 */
    uint64_t *stats;      /* [GB_CODEC_STATS] or NULL; on a device memory that it can add to atomically */
    uint32_t premul_mask; /* bit k: src[k] is raw input, multiply by `factor` (converted to the accumulator) */
    uint32_t acc_mask;    /* bit k: src[k] is stored in the accumulator type, else in `dtype` */
    uint32_t enc_mask;    /* bit k: src[k] is a message of `codec` (codec.h), whose values are accumulators */
    uint8_t nsrc;
    uint8_t dtype;      /* enum gpubridge_dtype */
    uint8_t op;         /* enum gpubridge_reduce_op */
    uint8_t flags;      /* enum gb_reduce_flags */
    uint8_t dst_is_acc; /* dst is stored in the accumulator type, else in `dtype` */
    uint8_t codec;      /* enum gb_codec, of encoded sources and of an encoded destination */
    uint8_t dst_is_enc; /* dst is a message of `codec` */
};

/* Bytes of one element of dtype / of its accumulator.  0 for a value that is not a dtype. */
size_t gb_dtype_bytes(int dtype);
size_t gb_acc_bytes(int dtype);
const char *gb_dtype_name(int dtype);  /* "bf16" */
const char *gb_reduce_op_name(int op); /* "SUM" */
/* 1 when `op` is defined for `dtype` (the table behind docs and tests). */
int gb_reduce_supported(int dtype, int op);

/* Which kernel (kernels.h) suits an operation best; gb_reduce does any. */
enum gb_reduce_way {
    GB_WAY_ANY,  /* gb_reduce */
    GB_WAY_PACK, /* gb_pack: floats become a message */
    GB_WAY_ADD,  /* gb_add: floats and a message, added or averaged over 2^n ranks, become floats */
    GB_REDUCE_WAYS
};
int gb_reduce_way(const struct gb_reduce_args *args);

/* Runs on the calling thread, SIMD by the compiler; saves and clears FTZ/DAZ around the arithmetic. */
void gb_reduce_host(const struct gb_reduce_args *args);

#endif
