/* SPDX-License-Identifier: Apache-2.0
 * libgbemu_cuda.so: the CUDA driver API's names and numbers over core/.  Declared by hand from public documentation;
 * only the exported names that gpubridge opens (and a few that tests use).  NVRTC is in nvrtc.c, NCCL in nccl_api.c. */
#include "core/emu.h"
#include "core/hooks.h"

#include <stdio.h>
#include <string.h>

typedef unsigned long long devptr;

const struct emu_vendor emu_vendor = {
    .name = "cuda",
    .arch = "sm_90",
    .device_name = "Emulated NVIDIA GPU",
    .needs_context = true,
    .cyclic_wait = true,
    .nccl_version = 22809,
    .driver_version = 13000,
    .pci_bus_base = 0x10,
    .wave = 32,
};

/* Every entry point begins with one of these. */
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int enter_rc = emu_enter(__func__, NULL);                                                                      \
        if (enter_rc) return enter_rc;                                                                                 \
    } while (0)
#define ENTER_DEVICE()                                                                                                 \
    struct emu_dev *dev = NULL;                                                                                        \
    do {                                                                                                               \
        int enter_rc = emu_enter(__func__, &dev);                                                                      \
        if (enter_rc) return enter_rc;                                                                                 \
    } while (0)
/* And those that take a stream resolve it. */
#define ENTER_STREAM(handle)                                                                                           \
    ENTER_DEVICE();                                                                                                    \
    struct emu_stream *s = emu_stream_get(dev, handle);                                                                \
    if (!s) return EMU_BAD_HANDLE

static int leave(struct emu_stream *s, int rc)
{
    emu_obj_put(s);
    return rc;
}

static void *ptr(devptr p)
{
    return (void *)(uintptr_t)p;
}

/* ---- process, devices, contexts ---- */
EMU_API int cuInit(unsigned flags)
{
    ENTER();
    return flags ? EMU_INVALID : emu_init();
}

EMU_API int cuDriverGetVersion(int *version)
{
    ENTER();
    *version = emu_conf()->driver_version;
    return EMU_OK;
}

EMU_API int cuDeviceGetCount(int *count)
{
    ENTER();
    *count = emu_dev_count();
    return EMU_OK;
}

EMU_API int cuDeviceGet(int *device, int ordinal)
{
    ENTER();
    *device = ordinal;
    return emu_dev_at(ordinal) ? EMU_OK : EMU_BAD_DEVICE;
}

EMU_API int cuDeviceGetName(char *name, int size, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return EMU_BAD_DEVICE;
    snprintf(name, (size_t)size, "%s (%s)", emu_conf()->device_name, emu_conf()->arch);
    return EMU_OK;
}

EMU_API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return EMU_BAD_DEVICE;
    *bytes = (size_t)16 << 30;
    return EMU_OK;
}

/* CU_DEVICE_ATTRIBUTE_*; what is not here is 0: no DMA-BUF, no GPUDirect RDMA. */
static const struct {
    int attribute, value;
} attributes[] = {
    {1, 1024}, /* threads per block */
    {10, 32},  /* warp size */
    {41, 1},   /* unified addressing */
    {91, 1},   /* host pointer usable for registered memory */
    {92, 1},   /* stream memory operations */
    {94, 1},   /* wait-value NOR */
    {99, 1},   /* host register */
    {122, 1},  /* stream memory operations, second version */
};

EMU_API int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return EMU_BAD_DEVICE;
    int capability = 0;
    sscanf(emu_conf()->arch, "sm_%d", &capability);
    *value = 0;
    if (attribute == 33) *value = emu_vendor.pci_bus_base + device;
    if (attribute == 16) *value = emu_conf()->multiprocessors;
    if (attribute == 75) *value = capability / 10;
    if (attribute == 76) *value = capability % 10;
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (attributes[i].attribute == attribute) *value = attributes[i].value;
    return EMU_OK;
}

EMU_API int cuDeviceGetPCIBusId(char *out, int size, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return EMU_BAD_DEVICE;
    emu_dev_pci(device, out, (size_t)size);
    return EMU_OK;
}

EMU_API int cuDeviceGetUuid_v2(unsigned char *out, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return EMU_BAD_DEVICE;
    emu_dev_uuid(device, out);
    return EMU_OK;
}

EMU_API int cuDevicePrimaryCtxRetain(void **context, int device)
{
    ENTER();
    struct emu_dev *dev = emu_dev_at(device);
    struct emu_obj *o;
    if (!dev) return EMU_BAD_DEVICE;
    int rc = emu_dev_retain(dev, &o);
    *context = o;
    return rc;
}

EMU_API int cuDevicePrimaryCtxRelease_v2(int device)
{
    ENTER();
    struct emu_dev *dev = emu_dev_at(device);
    return dev ? emu_dev_release(dev) : EMU_BAD_DEVICE;
}

EMU_API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    ENTER();
    struct emu_dev *dev = emu_dev_at(device);
    if (!dev) return EMU_BAD_DEVICE;
    pthread_mutex_lock(&dev->mu);
    *active = dev->retained > 0;
    pthread_mutex_unlock(&dev->mu);
    *flags = 0;
    return EMU_OK;
}

EMU_API int cuCtxGetCurrent(void **context)
{
    ENTER();
    *context = emu_thread.context;
    return EMU_OK;
}

EMU_API int cuCtxSetCurrent(void *context)
{
    ENTER();
    struct emu_obj *o = NULL;
    if (context) {
        o = emu_obj_get(EMU_CONTEXT, context);
        if (!o) return EMU_NO_CONTEXT;
        emu_obj_put(o);
    }
    emu_thread.context = o;
    return EMU_OK;
}

EMU_API int cuCtxGetDevice(int *device)
{
    ENTER();
    if (!emu_thread.context) return EMU_NO_CONTEXT;
    *device = emu_thread.context->dev->index;
    return EMU_OK;
}

EMU_API int cuCtxSynchronize(void)
{
    ENTER_DEVICE();
    return emu_dev_sync(dev);
}

EMU_API int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER_DEVICE();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return EMU_OK;
}

/* ---- memory ---- */
EMU_API int cuMemAlloc_v2(devptr *out, size_t size)
{
    ENTER_DEVICE();
    void *p = NULL;
    int rc = emu_mem_alloc(dev, EMU_MEM_DEVICE, size, 0, &p);
    if (!rc) *out = (uintptr_t)p;
    return rc;
}

EMU_API int cuMemFree_v2(devptr p)
{
    ENTER_DEVICE();
    return emu_mem_free(dev, EMU_MEM_DEVICE, ptr(p));
}

EMU_API int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    ENTER_DEVICE();
    *available = *total = (size_t)16 << 30;
    return EMU_OK;
}

EMU_API int cuMemHostAlloc(void **out, size_t size, unsigned flags)
{
    ENTER_DEVICE();
    return flags & ~7u ? EMU_INVALID : emu_mem_alloc(dev, EMU_MEM_PINNED, size, flags, out);
}

EMU_API int cuMemFreeHost(void *p)
{
    ENTER_DEVICE();
    return emu_mem_free(dev, EMU_MEM_PINNED, p);
}

EMU_API int cuMemHostRegister_v2(void *p, size_t size, unsigned flags)
{
    ENTER_DEVICE();
    return flags & ~15u ? EMU_INVALID : emu_mem_register(dev, p, size, flags);
}

EMU_API int cuMemHostUnregister(void *p)
{
    ENTER_DEVICE();
    return emu_mem_unregister(p);
}

EMU_API int cuMemHostGetDevicePointer_v2(devptr *out, void *p, unsigned flags)
{
    ENTER_DEVICE();
    struct emu_mem_info info;
    if (flags || !emu_mem_query(p, &info) || info.kind == EMU_MEM_DEVICE) return EMU_INVALID;
    *out = (uintptr_t)p;
    return EMU_OK;
}

EMU_API int cuMemGetAddressRange_v2(devptr *base, size_t *size, devptr p)
{
    ENTER_DEVICE();
    struct emu_mem_info info;
    if (!emu_mem_query(ptr(p), &info)) return EMU_NOT_FOUND;
    if (base) *base = (uintptr_t)info.base;
    if (size) *size = info.size;
    return EMU_OK;
}

/* Bytes of a CU_POINTER_ATTRIBUTE_*; 0 for one that is not known here. */
static size_t attribute_bytes(int attribute)
{
    static const unsigned char bytes[] = {
        [1] = 8, [2] = 4, [3] = 8, [4] = 8, [6] = 4, [7] = 8, [8] = 4, [9] = 4, [11] = 8, [12] = 8, [13] = 4};
    return attribute > 0 && attribute < (int)sizeof bytes ? bytes[attribute] : 0;
}

static void *context_of(int device)
{
    struct emu_dev *dev = emu_dev_at(device);
    pthread_mutex_lock(&dev->mu);
    void *context = dev->context;
    pthread_mutex_unlock(&dev->mu);
    return context;
}

/* False for an attribute or pointer that is not known. */
static bool pointer_attribute(void *out, int attribute, devptr p)
{
    struct emu_mem_info info;
    size_t bytes = attribute_bytes(attribute);
    if (!bytes || !emu_mem_query(ptr(p), &info)) return false;
    bool on_device = info.kind == EMU_MEM_DEVICE;
    if (attribute == 4 && on_device) return false;
    const unsigned long long values[] = {[1] = (uintptr_t)context_of(info.device),
                                         [2] = on_device ? 2 : 1,
                                         [3] = p,
                                         [4] = p,
                                         [7] = (uintptr_t)info.base,
                                         [9] = (unsigned)info.device,
                                         [11] = (uintptr_t)info.base,
                                         [12] = info.size,
                                         [13] = 1};
    unsigned narrow = (unsigned)values[attribute];
    memcpy(out, bytes == 8 ? (const void *)&values[attribute] : &narrow, bytes);
    return true;
}

EMU_API int cuPointerGetAttribute(void *out, int attribute, devptr p)
{
    ENTER();
    return pointer_attribute(out, attribute, p) ? EMU_OK : EMU_INVALID;
}

/* Unlike the single query, plain host memory succeeds, with zeroes. */
EMU_API int cuPointerGetAttributes(unsigned count, const int *wanted, void **out, devptr p)
{
    ENTER();
    for (unsigned i = 0; i < count; i++)
        if (!pointer_attribute(out[i], wanted[i], p)) memset(out[i], 0, attribute_bytes(wanted[i]));
    return EMU_OK;
}

EMU_API int cuMemcpyAsync(devptr dst, devptr src, size_t size, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_copy(s, ptr(dst), ptr(src), size));
}

EMU_API int cuMemcpyHtoDAsync_v2(devptr dst, const void *src, size_t size, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_copy(s, ptr(dst), src, size));
}

EMU_API int cuMemcpyDtoHAsync_v2(void *dst, devptr src, size_t size, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_copy(s, dst, ptr(src), size));
}

EMU_API int cuMemcpyDtoDAsync_v2(devptr dst, devptr src, size_t size, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_copy(s, ptr(dst), ptr(src), size));
}

EMU_API int cuMemsetD8Async(devptr dst, unsigned char value, size_t size, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_fill(s, ptr(dst), value, size));
}

/* ---- streams and events ---- */
EMU_API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
    ENTER_DEVICE();
    struct emu_stream *s = NULL;
    int rc = emu_stream_create(dev, flags, &s);
    if (!rc) *out = s;
    return rc;
}

EMU_API int cuStreamCreate(void **out, unsigned flags)
{
    return cuStreamCreateWithPriority(out, flags, 0);
}

EMU_API int cuStreamDestroy_v2(void *stream)
{
    ENTER_DEVICE();
    return emu_stream_destroy(dev, stream);
}

EMU_API int cuStreamQuery(void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_stream_query(s));
}

EMU_API int cuStreamSynchronize(void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_stream_sync(s));
}

EMU_API int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    ENTER_STREAM(stream);
    return leave(s, emu_event_wait(s, event));
}

EMU_API int cuStreamIsCapturing(void *stream, int *status)
{
    ENTER_STREAM(stream);
    *status = hook_capturing();
    return leave(s, EMU_OK);
}

EMU_API int cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph,
                                      const void **deps, size_t *count)
{
    ENTER_STREAM(stream);
    *status = hook_capturing();
    if (id) *id = 1;
    if (graph) *graph = NULL;
    if (deps) *deps = NULL;
    if (count) *count = 0;
    return leave(s, EMU_OK);
}

EMU_API int cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER();
    int old = emu_thread.capture_mode;
    emu_thread.capture_mode = *mode;
    *mode = old;
    return EMU_OK;
}

EMU_API int cuStreamWaitValue32_v2(void *stream, devptr addr, unsigned value, unsigned flags)
{
    ENTER_STREAM(stream);
    /* Bit 30 is FLUSH: host memory needs none. */
    return leave(s, emu_wait32(s, ptr(addr), value, 0xffffffffu, (enum emu_wait)(flags & ~(1u << 30))));
}

EMU_API int cuStreamWriteValue32_v2(void *stream, devptr addr, unsigned value, unsigned flags)
{
    ENTER_STREAM(stream);
    return leave(s, flags & ~1u ? EMU_INVALID : emu_write32(s, ptr(addr), value));
}

EMU_API int cuLaunchHostFunc(void *stream, void (*fn)(void *), void *arg)
{
    ENTER_STREAM(stream);
    return leave(s, emu_host_func(s, fn, arg));
}

EMU_API int cuEventCreate(void **out, unsigned flags)
{
    ENTER_DEVICE();
    return emu_event_create(dev, flags, out);
}

EMU_API int cuEventDestroy_v2(void *event)
{
    ENTER_DEVICE();
    return emu_event_destroy(event);
}

EMU_API int cuEventRecord(void *event, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_event_record(s, event));
}

EMU_API int cuEventQuery(void *event)
{
    ENTER_DEVICE();
    return emu_event_query(event);
}

EMU_API int cuEventSynchronize(void *event)
{
    ENTER_DEVICE();
    return emu_event_sync(event);
}

/* ---- modules ---- */
EMU_API int cuModuleLoadData(void **out, const void *image)
{
    ENTER_DEVICE();
    return emu_module_load(dev, image, out);
}

EMU_API int cuModuleLoadDataEx(void **out, const void *image, unsigned count, int *options, void **values)
{
    ENTER_DEVICE();
    return emu_module_load(dev, image, out);
}

EMU_API int cuModuleUnload(void *module)
{
    ENTER_DEVICE();
    return emu_module_unload(dev, module);
}

EMU_API int cuModuleGetFunction(void **out, void *module, const char *name)
{
    ENTER_DEVICE();
    return emu_module_function(module, name, out);
}

EMU_API int cuFuncLoad(void *function)
{
    ENTER_DEVICE();
    return emu_function_load(dev, function);
}

EMU_API int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                           unsigned shared, void *stream, void **params, void **extra)
{
    ENTER_STREAM(stream);
    if (extra) return leave(s, EMU_NOT_SUPPORTED);
    return leave(s, emu_launch(s, function, (struct emu_dim){gx, gy, gz}, (struct emu_dim){bx, by, bz}, params));
}

/* ---- what this emulator has no hardware for ---- */
EMU_API int cuMemGetHandleForAddressRange(void *handle, devptr p, size_t size, int type, unsigned long long flags)
{
    ENTER_DEVICE();
    return EMU_NOT_SUPPORTED;
}

EMU_API int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    ENTER_DEVICE();
    return EMU_OK;
}

/* ---- error texts ---- */
static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {EMU_OK, "CUDA_SUCCESS", "no error"},
    {EMU_INVALID, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {EMU_OOM, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {EMU_NOT_INIT, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {EMU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {EMU_BAD_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {EMU_BAD_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {EMU_NO_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {EMU_WRONG_ARCH, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {EMU_BAD_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {EMU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {EMU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {EMU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {EMU_CONTEXT_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {EMU_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already registered"},
    {EMU_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory is not registered"},
    {EMU_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {EMU_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {EMU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {EMU_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
};

static int find_error(int code)
{
    for (int i = 0; i < (int)(sizeof errors / sizeof errors[0]); i++)
        if (errors[i].code == code) return i;
    return -1;
}

EMU_API int cuGetErrorName(int code, const char **out)
{
    int i = find_error(code);
    *out = i < 0 ? NULL : errors[i].name;
    return i < 0 ? EMU_INVALID : EMU_OK;
}

EMU_API int cuGetErrorString(int code, const char **out)
{
    int i = find_error(code);
    *out = i < 0 ? NULL : errors[i].text;
    return i < 0 ? EMU_INVALID : EMU_OK;
}
