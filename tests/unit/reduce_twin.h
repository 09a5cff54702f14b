/* SPDX-License-Identifier: Apache-2.0
 * The kernels as CPU functions; for tests. */
#ifndef GB_TESTS_REDUCE_TWIN_H
#define GB_TESTS_REDUCE_TWIN_H

#include "codec/reduce.h"

/* By one of the kernels, enum gb_reduce_way. */
void twin_reduce(int way, const struct gb_reduce_args *args, unsigned blocks, unsigned threads);
void twin_poison(void *dst, uint64_t bytes, const uint32_t *given_up);

#endif
