/* SPDX-License-Identifier: Apache-2.0
 * The "device code" that the emulated run-time compilers hand out and modules load: this head, then the payload.  It is
 * self-contained, so that a caller's cache on disk works as with real images.  */
#ifndef EMU_IMAGE_H
#define EMU_IMAGE_H

#include "emu.h"
#include "twin.h"

#define IMAGE_MAGIC "GBEMUIMG"

enum image_kind { IMAGE_TWIN, IMAGE_OBJECT };
struct image_head {
    char magic[8];
    char vendor[8];
    char arch[64];
    uint32_t kind;
    uint32_t reserved;
    uint64_t hash; /* of the source */
    uint64_t size; /* payload: a shared object, or nothing */
};

/* Device code of `arch` runs on the emulated device: equal up to the first ':' (gfx942 runs on gfx942:sramecc+). */
bool image_arch_fits(const char *arch);
/* Twins of a source built into the library; NULL when there are none. */
const struct emu_twin *image_twins(uint64_t hash);

#endif
