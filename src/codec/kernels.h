/* SPDX-License-Identifier: Apache-2.0
 * The text of kernels.inc, for run-time compilers.  Kernels in it:
 *   gb_reduce(struct gb_reduce_args)                                any grid; arguments as reduce.h says
 *   gb_pack(struct gb_reduce_args)                                  only what gb_reduce_way finds for them; block sizes
 *   gb_add(struct gb_reduce_args)                                   that are multiples of 32
 *   gb_poison(void *dst, uint64_t bytes, const uint32_t *given_up)  any grid */
#ifndef GB_CODEC_KERNELS_H
#define GB_CODEC_KERNELS_H

extern const char gb_kernels_source[];
extern const char *const gb_kernel_names[]; /* by enum gb_reduce_way */

#endif
