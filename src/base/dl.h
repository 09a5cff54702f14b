/* SPDX-License-Identifier: Apache-2.0
 *
 * dl.h: finds and opens the vendor libraries at run time.  A copy that the process has already loaded (by torch, say)
 * is always preferred: two copies of one runtime in a process do not share a device.  Libraries are never closed again.
 * Any thread. */
#ifndef GB_BASE_DL_H
#define GB_BASE_DL_H

#include "base/err.h"

struct gb_dl_spec {
    const char *what;           /* "the CUDA driver": for texts */
    const char *setting;        /* "GPUBRIDGE_CUDA_LIB", or NULL when there is none */
    const char *prefix;         /* file names of other copies begin with it: "libcuda.so" */
    const char *exclude;        /* but do not hold this: "builtins"; NULL: nothing */
    const char *const *sonames; /* versioned ones first; NULL ends the list */
    const char *const *dirs;    /* tried last, in order; below a directory of installed Python packages when they do not
                                   begin with '/'; NULL ends the list */
};

struct gb_dl {
    void *handle;
    char path[512]; /* of the file that was opened */
};

/* `path`: this file and no other; NULL or "" searches: loaded copies, sonames, package directories, system directories.
 * On failure the text lists what was tried, and where. */
int gb_dl_open(const struct gb_dl_spec *spec, const char *path, struct gb_dl *dl) GB_NODISCARD;
/* NULL when the library does not export `name`. */
void *gb_dl_find(const struct gb_dl *dl, const char *name);
/* The folder of the file this code is in, without a final '/'.  Returns "" in `dir` when it is not known. */
void gb_dl_own_dir(char *dir, size_t capacity);

#endif
