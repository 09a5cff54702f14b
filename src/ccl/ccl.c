/* SPDX-License-Identifier: Apache-2.0
 * NCCL and RCCL through the library opened at run time: loading, and what needs no communicator.  Both export the same
 * names. */
#include "ccl/ccl_library.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OLDEST 21700 /* the configuration struct we pass, and non-blocking communicators that can be aborted */

#define ROW(slot, name)          {offsetof(struct gb_ccl, slot), name, 0}
#define OPTIONAL_ROW(slot, name) {offsetof(struct gb_ccl, slot), name, 1}

static const struct {
    size_t offset;
    const char *name;
    int optional;
} symbols[] = {
    ROW(get_version, "ncclGetVersion"),
    ROW(get_unique_id, "ncclGetUniqueId"),
    ROW(error_string, "ncclGetErrorString"),
    OPTIONAL_ROW(last_error, "ncclGetLastError"),
    ROW(group_start, "ncclGroupStart"),
    ROW(group_end, "ncclGroupEnd"),
    ROW(send, "ncclSend"),
    ROW(recv, "ncclRecv"),
    ROW(init, "ncclCommInitRankConfig"),
    ROW(async_error, "ncclCommGetAsyncError"),
    ROW(abort, "ncclCommAbort"),
    ROW(finalize, "ncclCommFinalize"),
    ROW(destroy, "ncclCommDestroy"),
};

static const char *const nccl_sonames[] = {"libnccl.so.2", NULL};
static const char *const nccl_dirs[] = {"nvidia/nccl/lib", "torch/lib", "/usr/local/cuda/lib64", NULL};
static const char *const rccl_sonames[] = {"librccl.so.1", "librccl.so", NULL};
static const char *const rccl_dirs[] = {"torch/lib", "_rocm_sdk_libraries/lib", "_rocm_sdk_core/lib", "/opt/rocm/lib",
                                        NULL};

static const struct gb_dl_spec nccl_spec = {.what = "NCCL",
                                            .setting = "GPUBRIDGE_NCCL_LIB",
                                            .prefix = "libnccl.so",
                                            .sonames = nccl_sonames,
                                            .dirs = nccl_dirs};
static const struct gb_dl_spec rccl_spec = {.what = "RCCL",
                                            .setting = "GPUBRIDGE_RCCL_LIB",
                                            .prefix = "librccl.so",
                                            .sonames = rccl_sonames,
                                            .dirs = rccl_dirs};

/* Loaded libraries, kept for the life of the process. */
static pthread_mutex_t libraries_lock = PTHREAD_MUTEX_INITIALIZER;
static struct gb_ccl *libraries; /* guarded by libraries_lock */

static int load(struct gb_ccl *ccl, const struct gb_dl *dl)
{
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = gb_dl_find(dl, symbols[i].name);
        if (!address && !symbols[i].optional)
            return GB_FAIL(GPUBRIDGE_ERR_LIBRARY,
                           "%s (version %d) lacks %s; install %s 2.17 or newer, or another by %s", dl->path,
                           ccl->version, symbols[i].name, ccl->name,
                           ccl->vendor == GPUBRIDGE_DEVICE_CUDA ? nccl_spec.setting : rccl_spec.setting);
        memcpy((char *)ccl + symbols[i].offset, &address, sizeof address);
        if (i == 0 && ccl->get_version(&ccl->version) != GB_CCL_OK)
            return GB_FAIL(GPUBRIDGE_ERR_LIBRARY, "%s does not tell its version", dl->path);
    }
    if (ccl->version < OLDEST)
        return GB_FAIL(GPUBRIDGE_ERR_LIBRARY, "%s is version %d.%d.%d; 2.17 is the oldest that can be used", dl->path,
                       ccl->version / 10000, ccl->version / 100 % 100, ccl->version % 100);
    snprintf(ccl->text, sizeof ccl->text, "%s %d.%d.%d (%s)", ccl->name, ccl->version / 10000, ccl->version / 100 % 100,
             ccl->version % 100, dl->path);
    return 0;
}

static int open_new(int vendor, const struct gb_dl *dl, struct gb_ccl **out)
{
    struct gb_ccl *ccl = calloc(1, sizeof *ccl);
    if (!ccl) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a library's table");
    ccl->vendor = vendor;
    ccl->name = vendor == GPUBRIDGE_DEVICE_CUDA ? "NCCL" : "RCCL";
    ccl->handle = dl->handle;
    int rc = load(ccl, dl);
    if (rc) {
        free(ccl);
        return rc;
    }
    *out = ccl;
    return 0;
}

int gb_ccl_open(int vendor, const char *path, const struct gb_ccl **out)
{
    struct gb_dl dl;
    struct gb_ccl *ccl;
    GB_TRY(gb_dl_open(vendor == GPUBRIDGE_DEVICE_CUDA ? &nccl_spec : &rccl_spec, path, &dl));
    pthread_mutex_lock(&libraries_lock);
    int rc = 0;
    for (ccl = libraries; ccl; ccl = ccl->next)
        if (ccl->handle == dl.handle && ccl->vendor == vendor) break;
    if (!ccl && !(rc = open_new(vendor, &dl, &ccl))) {
        ccl->next = libraries;
        libraries = ccl;
    }
    pthread_mutex_unlock(&libraries_lock);
    if (!rc) *out = ccl;
    return rc;
}

const char *gb_ccl_describe(const struct gb_ccl *ccl)
{
    return ccl->text;
}

int gb_ccl_version(const struct gb_ccl *ccl)
{
    return ccl->version;
}

int gb_ccl_fail(const struct gb_ccl *ccl, int raw, const char *call)
{
    const char *last = ccl->last_error ? ccl->last_error(NULL) : "";
    return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "%s: %s failed with %d, %s%s%.300s", ccl->name, call, raw,
                   ccl->error_string(raw), last && *last ? ": " : "", last ? last : "");
}

int gb_ccl_unique_id(const struct gb_ccl *ccl, uint8_t id[GB_CCL_ID_BYTES])
{
    struct gb_ccl_id fresh;
    int rc = ccl->get_unique_id(&fresh);
    if (rc) return gb_ccl_fail(ccl, rc, "ncclGetUniqueId");
    memcpy(id, fresh.byte, GB_CCL_ID_BYTES);
    return 0;
}
