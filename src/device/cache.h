/* SPDX-License-Identifier: Apache-2.0
 * Compiled kernels on disk, shared by the processes of a host and by later ones.  An entry that is damaged, foreign or
 * unreadable is as good as none.  Private to src/device; any thread. */
#ifndef GB_DEVICE_CACHE_H
#define GB_DEVICE_CACHE_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

struct gb_cache_entry {
    char dir[1024];   /* "": no cache */
    uint8_t key[16];  /* of everything that the image depends on */
    int lock_fd;      /* -1: not held */
    uint8_t is_quiet; /* the log knows already that nothing can be kept */
};

/* `dir`: as GPUBRIDGE_CACHE_DIR says; NULL or "": below XDG_CACHE_HOME or HOME.  "off": no cache. */
void gb_cache_entry_open(struct gb_cache_entry *entry, const char *dir, const uint8_t key[16]);
/* The image, with a 0 behind it, or GPUBRIDGE_AGAIN: compile it.  Then this process holds the host's lock for the
 * entry, if it could be had, until gb_cache_entry_close; others wait for it instead of compiling too. */
int gb_cache_load(struct gb_cache_entry *entry, char **image, size_t *bytes) GB_NODISCARD;
/* Best effort: what cannot be kept is compiled again the next time. */
void gb_cache_store(struct gb_cache_entry *entry, const char *image, size_t bytes);
void gb_cache_entry_close(struct gb_cache_entry *entry);

#endif
