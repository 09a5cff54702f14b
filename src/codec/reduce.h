/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce.h: the one arithmetic of the project.  dst[i] = fold of src[0][i], src[1][i], ... in that order, in the
 * accumulator of the logical dtype: f32 for f16, bf16, f32 and c64 parts; f64 for f64 and c128 parts; the type itself
 * (modular) for integers; logical for bool (SUM, MAX, BOR = or; PRODUCT, MIN, BAND = and; BXOR = xor; bytes in are 0 or
 * not 0, bytes out 0 or 1).  MIN and MAX propagate NaN; every NaN written is canonical (0x7fc00000, 0x7ff8..., 0x7e00,
 * 0x7fc0).  Conversions round to nearest even.  The same source (kernels.inc) is compiled for the CPU here and at run
 * time for GPUs, with contraction off, and gives the same bits everywhere.
 */
#ifndef GB_CODEC_REDUCE_H
#define GB_CODEC_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#define GB_REDUCE_MAX_SRC 16

enum gb_reduce_flags {
    GB_REDUCE_FINAL = 1 /* AVG: divide by `divisor` (integers truncate toward zero) before the last rounding */
};

struct gb_reduce_args {
    void *dst; /* may equal a src exactly, never overlap it partly */
    const void *src[GB_REDUCE_MAX_SRC];
    uint64_t count;       /* elements (complex: pairs) */
    double factor;        /* PREMUL_SUM */
    uint64_t divisor;     /* ranks in the group */
    uint32_t premul_mask; /* bit k: src[k] is raw input, multiply by `factor` (converted to the accumulator) */
    uint32_t acc_mask;    /* bit k: src[k] is stored in the accumulator type, else in `dtype` */
    uint8_t nsrc;
    uint8_t dtype;      /* enum gpubridge_dtype */
    uint8_t op;         /* enum gpubridge_reduce_op */
    uint8_t flags;      /* enum gb_reduce_flags */
    uint8_t dst_is_acc; /* dst is stored in the accumulator type, else in `dtype` */
};

/* Bytes of one element of dtype / of its accumulator.  0 for a value that is not a dtype. */
size_t gb_dtype_bytes(int dtype);
size_t gb_acc_bytes(int dtype);
const char *gb_dtype_name(int dtype);  /* "bf16" */
const char *gb_reduce_op_name(int op); /* "SUM" */
/* 1 when `op` is defined for `dtype` (the table behind docs and tests). */
int gb_reduce_supported(int dtype, int op);

/* Runs on the calling thread, SIMD by the compiler; saves and clears FTZ/DAZ around the arithmetic. */
void gb_reduce_host(const struct gb_reduce_args *args);

#endif
