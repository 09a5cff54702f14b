/* SPDX-License-Identifier: Apache-2.0
 *
 * ccl_library.h: the part of the NCCL interface that is the same in every version since 2.17, declared by hand. Private
 * to src/ccl.
 */
#ifndef GB_CCL_CCL_LIBRARY_H
#define GB_CCL_CCL_LIBRARY_H

#include "base/dl.h"
#include "ccl/ccl.h"

enum gb_ccl_result { GB_CCL_OK = 0, GB_CCL_IN_PROGRESS = 7 };
enum { GB_CCL_BYTE = 1 }; /* ncclUint8 */

struct gb_ccl_id {
    uint8_t byte[GB_CCL_ID_BYTES];
};

/* The layout of 2.17.  A library copies as many bytes as `size` says, and treats fields newer than `version` as unset,
 * so this one works with all later ones: never write a newer version into it. */
struct gb_ccl_config {
    size_t size;
    uint32_t magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
};

struct gb_ccl {
    int vendor, version;
    const char *name;
    void *handle;
    struct gb_ccl *next;
    char text[600];
    int (*get_version)(int *version);
    int (*get_unique_id)(struct gb_ccl_id *id);
    const char *(*error_string)(int result);
    const char *(*last_error)(void *comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *buf, size_t count, int type, int peer, void *comm, void *stream);
    int (*recv)(void *buf, size_t count, int type, int peer, void *comm, void *stream);
    int (*init)(void **comm, int nranks, struct gb_ccl_id id, int rank, struct gb_ccl_config *config);
    int (*async_error)(void *comm, int *result);
    int (*abort)(void *comm);
    int (*finalize)(void *comm);
    int (*destroy)(void *comm);
};

int gb_ccl_fail(const struct gb_ccl *ccl, int raw, const char *call);

#endif
