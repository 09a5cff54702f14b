/* SPDX-License-Identifier: Apache-2.0
 *
 * coded.h: what compressed operations must give, from docs/algorithms.md section 11 and codec_ref.h alone, and inputs
 * that look like gradients.  float32 and bfloat16. */
#ifndef GB_TESTS_CODED_H
#define GB_TESTS_CODED_H

#include "reference.h"

struct coded_sum {
    int kind, dtype, op;
    int codec; /* enum ref_codec */
    float factor;
    const uint64_t *seed; /* of the operation, when it rounds stochastically; NULL: to nearest */
};

size_t coded_width(int dtype); /* bytes of an element */
float coded_load(int dtype, const void *p, uint64_t i);
/* To nearest even; a NaN is canonical. */
void coded_store(int dtype, float x, void *p, uint64_t i);
/* Gradients as they are: magnitudes over a few powers of ten, a zero block here and there. */
void coded_fill(int dtype, uint64_t seed, int rank, uint64_t count, void *out);
/* island[r]: number of rank r's island, in the order of their lowest ranks.  Returns how many there are. */
int coded_islands(const struct ref_layout *layout, int island[REF_MAX_RANKS]);
/* What every rank must have of elements [0, count): partials and, with three islands, the result of an ALL_REDUCE cross
 * as messages. */
void coded_want(const struct ref_layout *layout, const struct coded_sum *sum, void *const *inputs, uint64_t count,
                void *out);

#endif
