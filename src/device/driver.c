/* SPDX-License-Identifier: Apache-2.0
 * The driver libraries' exported names, in one table for both vendors, and how they are opened.  CUDA names carry their
 * version suffix: the plain ones are obsolete calls with other arguments. */
#include "device/driver.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define ROW(slot, cuda, hip)          {offsetof(struct gb_device, slot), cuda, hip, 0}
#define OPTIONAL_ROW(slot, cuda, hip) {offsetof(struct gb_device, slot), cuda, hip, 1}

static const struct gb_symbol symbols[] = {
    ROW(device.init, "cuInit", "hipInit"),
    ROW(device.count, "cuDeviceGetCount", "hipGetDeviceCount"),
    ROW(device.attribute, "cuDeviceGetAttribute", "hipDeviceGetAttribute"),
    ROW(device.name, "cuDeviceGetName", "hipDeviceGetName"),
    ROW(device.pci, "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId"),
    OPTIONAL_ROW(device.uuid, "cuDeviceGetUuid_v2", "hipDeviceGetUuid"),
    ROW(device.version, "cuDriverGetVersion", "hipRuntimeGetVersion"),
    ROW(device.priorities, "cuCtxGetStreamPriorityRange", "hipDeviceGetStreamPriorityRange"),
    ROW(device.capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"),
    ROW(memory.alloc, "cuMemAlloc_v2", "hipMalloc"),
    ROW(memory.free, "cuMemFree_v2", "hipFree"),
    ROW(memory.host_alloc, "cuMemHostAlloc", "hipHostMalloc"),
    ROW(memory.host_free, "cuMemFreeHost", "hipHostFree"),
    ROW(memory.host_address, "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer"),
    OPTIONAL_ROW(memory.host_register, "cuMemHostRegister_v2", "hipHostRegister"),
    OPTIONAL_ROW(memory.host_unregister, "cuMemHostUnregister", "hipHostUnregister"),
    ROW(queue.stream_create, "cuStreamCreateWithPriority", "hipStreamCreateWithPriority"),
    ROW(queue.stream_destroy, "cuStreamDestroy_v2", "hipStreamDestroy"),
    ROW(queue.stream_wait, "cuStreamWaitEvent", "hipStreamWaitEvent"),
    ROW(queue.is_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing"),
    ROW(queue.event_create, "cuEventCreate", "hipEventCreateWithFlags"),
    ROW(queue.event_destroy, "cuEventDestroy_v2", "hipEventDestroy"),
    ROW(queue.event_record, "cuEventRecord", "hipEventRecord"),
    ROW(queue.event_query, "cuEventQuery", "hipEventQuery"),
    /* HIP has them too, with a fifth argument, another comparison, and streams that share hardware queues: never used.
     */
    OPTIONAL_ROW(queue.wait_value, "cuStreamWaitValue32_v2", NULL),
    OPTIONAL_ROW(queue.write_value, "cuStreamWriteValue32_v2", NULL),
    ROW(module.load, "cuModuleLoadData", "hipModuleLoadData"),
    ROW(module.unload, "cuModuleUnload", "hipModuleUnload"),
    ROW(module.function, "cuModuleGetFunction", "hipModuleGetFunction"),
    ROW(module.launch, "cuLaunchKernel", "hipModuleLaunchKernel"),
    ROW(cuda.device_get, "cuDeviceGet", NULL),
    ROW(cuda.ctx_get_current, "cuCtxGetCurrent", NULL),
    ROW(cuda.ctx_set_current, "cuCtxSetCurrent", NULL),
    ROW(cuda.primary_retain, "cuDevicePrimaryCtxRetain", NULL),
    ROW(cuda.primary_release, "cuDevicePrimaryCtxRelease_v2", NULL),
    ROW(cuda.copy, "cuMemcpyAsync", NULL),
    ROW(cuda.error_name, "cuGetErrorName", NULL),
    ROW(cuda.error_string, "cuGetErrorString", NULL),
    ROW(hip.set_device, NULL, "hipSetDevice"),
    ROW(hip.get_device, NULL, "hipGetDevice"),
    ROW(hip.copy, NULL, "hipMemcpyAsync"),
    OPTIONAL_ROW(hip.properties, NULL, "hipGetDevicePropertiesR0600"),
    OPTIONAL_ROW(hip.properties_old, NULL, "hipGetDeviceProperties"),
    ROW(hip.error_name, NULL, "hipGetErrorName"),
    ROW(hip.error_string, NULL, "hipGetErrorString"),
    ROW(hip.last_error, NULL, "hipGetLastError"),
};

/* Never libcuda.so: that may be the toolkit's stub, which opens and then fails every call. */
static const char *const cuda_sonames[] = {"libcuda.so.1", NULL};
/* The number is not ROCm's: ROCm 10 still reports HIP 7.  Wheels of torch carry the plain name. */
static const char *const hip_sonames[] = {
    "libamdhip64.so.7", "libamdhip64.so.6",  "libamdhip64.so.5", "libamdhip64.so.8",
    "libamdhip64.so.9", "libamdhip64.so.10", "libamdhip64.so",   NULL};
static const char *const hip_dirs[] = {"torch/lib", "_rocm_sdk_core/lib", "/opt/rocm/lib", NULL};

static const struct gb_dl_spec cuda_spec = {
    .what = "the CUDA driver", .setting = "GPUBRIDGE_CUDA_LIB", .prefix = "libcuda.so", .sonames = cuda_sonames};
static const struct gb_dl_spec hip_spec = {.what = "the HIP runtime",
                                           .setting = "GPUBRIDGE_HIP_LIB",
                                           .prefix = "libamdhip64",
                                           .sonames = hip_sonames,
                                           .dirs = hip_dirs};

int gb_driver_load(struct gb_device *device, const struct gb_dl *dl, const struct gb_symbol *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const char *name = device->info.kind == GPUBRIDGE_DEVICE_CUDA ? rows[i].cuda : rows[i].hip;
        if (!name) continue;
        void *address = gb_dl_find(dl, name);
        if (!address && !rows[i].optional) {
            int version = 0;
            if (device->device.version) (void)device->device.version(&version);
            return GB_FAIL(GPUBRIDGE_ERR_LIBRARY, "%s (driver version %d) lacks %s; install a newer one", dl->path,
                           version, name);
        }
        memcpy((char *)device + rows[i].offset, &address, sizeof address);
    }
    return 0;
}

static int load_all(struct gb_device *device)
{
    /* The version first, so that what is missing can be named with it. */
    int (*version)(int *);
    void *address = gb_dl_find(&device->dl, device->info.kind == GPUBRIDGE_DEVICE_CUDA ? "cuDriverGetVersion"
                                                                                       : "hipRuntimeGetVersion");
    memcpy(&version, &address, sizeof version);
    device->device.version = version;
    return gb_driver_load(device, &device->dl, symbols, sizeof symbols / sizeof *symbols);
}

int gb_driver_open(struct gb_device *device, const char *path)
{
    const struct gb_dl_spec *spec = device->info.kind == GPUBRIDGE_DEVICE_CUDA ? &cuda_spec : &hip_spec;
    GB_TRY(gb_dl_open(spec, path, &device->dl));
    snprintf(device->info.library, sizeof device->info.library, "%s", device->dl.path);
    device->info.emulated = gb_dl_find(&device->dl, "gbemu_vendor") != NULL;
    return load_all(device);
}

int gb_driver_fail(struct gb_device *device, int raw, const char *call)
{
    char words[200] = "";
    device->vendor->error_text(device, raw, words, sizeof words);
    if (device->vendor->clear_error) device->vendor->clear_error(device);
    int status = raw == GB_DRIVER_OOM ? GPUBRIDGE_ERR_NO_MEMORY : GPUBRIDGE_ERR_DEVICE;
    return GB_FAIL(status, "%s device %d: %s failed with %d, %s", device->vendor->name, device->info.index, call, raw,
                   words);
}
