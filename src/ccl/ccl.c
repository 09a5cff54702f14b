/* SPDX-License-Identifier: Apache-2.0
 * Vendor collectives are not part of this version: opening them says so. */
#include "ccl/ccl.h"

#include <stdlib.h>

int gb_ccl_open(int vendor, const char *path, const struct gb_ccl **ccl)
{
    (void)vendor, (void)path, (void)ccl;
    return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "vendor collectives are not supported by this version");
}

#define UNREACHABLE(decl)                                                                                              \
    decl                                                                                                               \
    {                                                                                                                  \
        abort();                                                                                                       \
    }
UNREACHABLE(const char *gb_ccl_describe(const struct gb_ccl *ccl))
UNREACHABLE(int gb_ccl_version(const struct gb_ccl *ccl))
UNREACHABLE(int gb_ccl_unique_id(const struct gb_ccl *ccl, uint8_t id[GB_CCL_ID_BYTES]))
UNREACHABLE(int gb_ccl_comm_create(const struct gb_ccl *c, struct gb_device *d, int n, int r,
                                   const uint8_t id[GB_CCL_ID_BYTES], int64_t t, struct gb_ccl_comm **o))
UNREACHABLE(void gb_ccl_abort(struct gb_ccl_comm *c))
UNREACHABLE(void gb_ccl_comm_destroy(struct gb_ccl_comm *c))
