/* SPDX-License-Identifier: Apache-2.0
 *
 * ccl.h: the vendor collective library of an island (NCCL or RCCL: one loader, two sonames).  Only what VENDOR steps
 * and communicator life need: data moves by grouped send/recv of bytes, our own kernels add.  Launcher thread, except
 * gb_ccl_abort (any thread: it must free a stuck call) and gb_ccl_open / gb_ccl_unique_id (any thread).
 */
#ifndef GB_CCL_CCL_H
#define GB_CCL_CCL_H

#include "base/err.h"

#define GB_CCL_ID_BYTES 128

struct gb_device;
struct gb_ccl; /* a loaded library; process-wide, never unloaded */
struct gb_ccl_comm;

struct gb_ccl_part {
    void *buf;
    uint64_t bytes;
    int32_t peer; /* rank in the communicator */
    int is_recv;
};

/* vendor: GPUBRIDGE_DEVICE_CUDA or GPUBRIDGE_DEVICE_HIP.  `path`: explicit library, or NULL to search as documented. */
int gb_ccl_open(int vendor, const char *path, const struct gb_ccl **ccl) GB_NODISCARD;
const char *gb_ccl_describe(const struct gb_ccl *ccl); /* "NCCL 2.28.9 (path)" */
int gb_ccl_version(const struct gb_ccl *ccl);
int gb_ccl_unique_id(const struct gb_ccl *ccl, uint8_t id[GB_CCL_ID_BYTES]) GB_NODISCARD;
/* Non-blocking inside, with a deadline; connects every pair by one small exchange before it returns, so that no lazy
 * connection happens while gates are closed.  `give_up`, which may be NULL, ends it early once it is not 0: a member
 * that died would be waited for until the deadline. */
int gb_ccl_comm_create(const struct gb_ccl *ccl, struct gb_device *device, int nranks, int rank,
                       const uint8_t id[GB_CCL_ID_BYTES], int64_t timeout_ns, const _Atomic int *give_up,
                       struct gb_ccl_comm **comm) GB_NODISCARD;
/* One grouped call on `stream`. */
int gb_ccl_exchange(struct gb_ccl_comm *comm, const struct gb_ccl_part *parts, int nparts, void *stream) GB_NODISCARD;
/* GPUBRIDGE_OK, GPUBRIDGE_AGAIN while in progress, or the library's asynchronous error. */
int gb_ccl_poll(struct gb_ccl_comm *comm) GB_NODISCARD;
void gb_ccl_abort(struct gb_ccl_comm *comm);
void gb_ccl_comm_destroy(struct gb_ccl_comm *comm);

#endif
