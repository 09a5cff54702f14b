/* SPDX-License-Identifier: Apache-2.0
 *
 * reference.h: what an operation must give, element by element, from the specification alone (ARCHITECTURE.md,
 * "numerics"). Written for reading, not for speed; shares no code with the library.
 *
 * Order: an island's partial is the fold of its members by rank; the result is the fold of the partials by the islands'
 * lowest rank.  Accumulators: float for f16, bf16, f32 and the parts of c64; double for f64 and c128; the type itself,
 * modular, for integers; truth values for bool.  AVG divides once, at the end; integers truncate toward zero.  One last
 * rounding to nearest even.  MIN and MAX give NaN when any input is NaN, and the first of equals.  A NaN is canonical.
 */
#ifndef GB_TESTS_REFERENCE_H
#define GB_TESTS_REFERENCE_H

#include <gpubridge/gpubridge.h>

#define REF_MAX_RANKS 16

/* islands[r]: label of rank r; ranks with equal labels share an island. */
struct ref_layout {
    const char *name;
    int size;
    const char *islands[REF_MAX_RANKS];
};

size_t ref_dtype_bytes(int dtype);
const char *ref_dtype_name(int dtype);
const char *ref_op_name(int op);
/* Whether `op` is defined for `dtype`. */
int ref_supported(int dtype, int op);

/* Elements [first, first + count) of rank `rank`'s input, any `seed`: a function of rank and position, with NaNs of
 * several payloads, infinities, zeros of both signs, denormals and values that overflow when they are added. */
void ref_input(int dtype, uint64_t seed, int rank, uint64_t first, uint64_t count, void *out);

/* out[i] = reduction of inputs[0..size)[i]. */
void ref_reduce(const struct ref_layout *layout, int dtype, int op, double factor, const void *const *inputs,
                uint64_t count, void *out);

/* Largest |got - sum in double| / sum of |inputs| over the elements whose inputs and result are all finite; 0 for
 * dtypes that are not floats. */
double ref_distance(const struct ref_layout *layout, int dtype, const void *const *inputs, uint64_t count,
                    const void *got);

#endif
