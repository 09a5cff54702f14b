/* SPDX-License-Identifier: Apache-2.0
 * The text of kernels.inc, for run-time compilers.  Kernels in it:
 *   gb_reduce(struct gb_reduce_args)                                any grid; arguments as reduce.h says
 *   gb_poison(void *dst, uint64_t bytes, const uint32_t *given_up)  any grid */
#ifndef GB_CODEC_KERNELS_H
#define GB_CODEC_KERNELS_H

extern const char gb_kernels_source[];

#endif
