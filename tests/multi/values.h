/* SPDX-License-Identifier: Apache-2.0
 *
 * values.h: every collective by value, as one rank sees it: runs a list of cases on a comm and compares every byte of
 * the result with reference.h; what must not be written is checked too. */
#ifndef GB_TESTS_VALUES_H
#define GB_TESTS_VALUES_H

#include "ranks.h"
#include "reference.h"

enum values_form { VALUES_IN_PLACE = 1, VALUES_UNEVEN = 2 };

struct values_case {
    int kind, dtype, op, root;
    unsigned form; /* enum values_form */
    uint64_t count;
    uint64_t seed;
};

/* Every kind, dtype, op, form, root and count; of these cases every `stride`-th (a prime that does not divide ncounts),
 * and for every `large_stride`-th triple of kind, dtype and op one with the `large` count (0: none). */
struct values_plan {
    const struct ref_layout *layout;
    const uint64_t *counts;
    size_t ncounts;
    uint64_t stride, large_stride, large;
};

/* Runs one case; exits with 1 and says what differs. */
void values_run_case(gpubridge_comm *comm, const struct ref_layout *layout, int me, const struct values_case *c);
/* All cases of the plan.  Returns how many ran. */
uint64_t values_run(struct rank *rank, gpubridge_comm *comm, const struct values_plan *plan);
/* Rank 0 prints the largest distances from a double sum seen so far, by dtype. */
void values_print_distances(const char *what);

#endif
