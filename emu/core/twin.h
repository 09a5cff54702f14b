/* SPDX-License-Identifier: Apache-2.0
 * CPU twins: kernels compiled by the host compiler.  twingen.c turns preprocessed kernel source into a C file that
 * ends with a table of these; the generated file repeats the declarations, so keep both alike.  */
#ifndef EMU_TWIN_H
#define EMU_TWIN_H

#include <stddef.h>

/* Runs all threads of one block.  `args` points to the arguments' values; `dims` is block index, grid, block (x, y, z
 * each); `alias` maps a pointer argument to where a worker may touch it. */
typedef void emu_twin_fn(void *const *args, const unsigned *dims, void *(*alias)(const void *));
struct emu_twin {
    const char *name; /* NULL ends a table */
    unsigned count;
    const unsigned *sizes; /* bytes of each argument */
    emu_twin_fn *run;
};
/* One source that is built into the library: text hash and length, and its kernels. */
struct emu_twin_source {
    unsigned long long hash;
    size_t length;
    const struct emu_twin *twins;
};
/* twin_list.c (generated): ends with NULL. */
extern const struct emu_twin_source *const emu_twin_sources[];

unsigned long long emu_twin_hash(const char *text, size_t length);
/* The C (or C++) file for `source`, already preprocessed with GB_KERNEL and __global__ replaced by
 * __gbemu_kernel__.  With `id` it also defines emu_twin_source_<id>; without, the table is exported as gbemu_twins.
 * NULL, and a reason in `why`, when a kernel's parameters cannot be read.  Caller frees. */
char *emu_twin_generate(const char *source, const char *id, unsigned long long hash, size_t length, char *why,
                        size_t why_size);

#endif
