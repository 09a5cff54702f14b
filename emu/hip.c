/* SPDX-License-Identifier: Apache-2.0
 * libgbemu_hip.so: HIP's names and numbers over core/.  Declared by hand from public documentation; only the exported
 * names that gpubridge opens (and a few that tests use).  hipRTC is in hiprtc.c, RCCL in nccl_api.c.  */
#include "core/emu.h"
#include "core/hooks.h"

#include <stdio.h>
#include <string.h>

/* 5: a library of ROCm 5, whose exports differ. */
#ifndef GBEMU_ROCM
#define GBEMU_ROCM 7
#endif

const struct emu_vendor emu_vendor = {
    .name = "hip",
    .arch = "gfx942:sramecc+:xnack-",
    .device_name = "Emulated AMD GPU",
    .needs_context = false,
    .cyclic_wait = false,
    .nccl_version = 22703,
    .driver_version = 70100000,
    .pci_bus_base = 0x40,
    .wave = 64,
};

/* hipGetLastError: the calling thread's last failure, kept until it is read. */
static _Thread_local int last_error;

static int keep(int rc)
{
    if (rc) last_error = rc;
    return rc;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int enter_rc = emu_enter(__func__, NULL);                                                                      \
        if (enter_rc) return keep(enter_rc);                                                                           \
    } while (0)
#define ENTER_DEVICE()                                                                                                 \
    struct emu_dev *dev = NULL;                                                                                        \
    do {                                                                                                               \
        int enter_rc = emu_enter(__func__, &dev);                                                                      \
        if (enter_rc) return keep(enter_rc);                                                                           \
    } while (0)
#define ENTER_STREAM(handle)                                                                                           \
    ENTER_DEVICE();                                                                                                    \
    struct emu_stream *s = emu_stream_get(dev, handle);                                                                \
    if (!s) return keep(EMU_BAD_HANDLE)

static int leave(struct emu_stream *s, int rc)
{
    emu_obj_put(s);
    return keep(rc);
}

/* ---- process and devices ---- */
EMU_API int hipInit(unsigned flags)
{
    ENTER();
    return keep(flags ? EMU_INVALID : emu_init());
}

EMU_API int hipRuntimeGetVersion(int *version)
{
    ENTER();
    *version = emu_conf()->driver_version;
    return EMU_OK;
}

EMU_API int hipDriverGetVersion(int *version)
{
    ENTER();
    *version = emu_conf()->driver_version;
    return EMU_OK;
}

EMU_API int hipGetDeviceCount(int *count)
{
    ENTER();
    *count = emu_dev_count();
    return keep(*count ? EMU_OK : EMU_NO_DEVICE);
}

EMU_API int hipSetDevice(int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    emu_thread.device = device;
    return EMU_OK;
}

EMU_API int hipGetDevice(int *device)
{
    ENTER();
    *device = emu_thread.device;
    return EMU_OK;
}

/* hipDeviceAttribute_t; what is not here is 0: no DMA-BUF. */
static const struct {
    int attribute, value;
} attributes[] = {
    {4, 1},     /* host pointer usable for registered memory */
    {90, 1},    /* host register */
    {10013, 1}, /* wait-value */
};

EMU_API int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    *value = attribute == 67 ? emu_vendor.pci_bus_base + device : 0;
    if (attribute == 63) *value = emu_conf()->multiprocessors;
    if (attribute == 87) *value = emu_conf()->wave;
    for (size_t i = 0; i < sizeof attributes / sizeof attributes[0]; i++)
        if (attributes[i].attribute == attribute) *value = attributes[i].value;
    return EMU_OK;
}

EMU_API int hipDeviceGetName(char *name, int size, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    snprintf(name, (size_t)size, "%s", emu_conf()->device_name);
    return EMU_OK;
}

EMU_API int hipDeviceGetPCIBusId(char *out, int size, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    emu_dev_pci(device, out, (size_t)size);
    return EMU_OK;
}

EMU_API int hipDeviceGetUuid(unsigned char *out, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    emu_dev_uuid(device, out);
    return EMU_OK;
}

#if GBEMU_ROCM >= 6
static void put_int(unsigned char *at, int value)
{
    memcpy(at, &value, sizeof value);
}

/* The layout of ROCm 6.0 to 7.2: 1472 bytes. */
EMU_API int hipGetDevicePropertiesR0600(unsigned char *out, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    size_t total = (size_t)16 << 30;
    memset(out, 0, 1472);
    snprintf((char *)out, 256, "%s", emu_conf()->device_name);
    emu_dev_uuid(device, out + 256);
    memcpy(out + 288, &total, sizeof total);
    put_int(out + 308, emu_conf()->wave);
    put_int(out + 320, 1024); /* threads per block */
    put_int(out + 388, emu_conf()->multiprocessors);
    snprintf((char *)out + 1160, 256, "%s", emu_conf()->arch);
    return EMU_OK;
}
#endif

/* The unversioned name still fills the layout of ROCm 5: 792 bytes. */
EMU_API int hipGetDeviceProperties(unsigned char *out, int device)
{
    ENTER();
    if (!emu_dev_at(device)) return keep(EMU_BAD_DEVICE);
    memset(out, 0, 792);
    snprintf((char *)out, 256, "%s", emu_conf()->device_name);
    snprintf((char *)out + 396, 256, "%s", emu_conf()->arch);
    return EMU_OK;
}

EMU_API int hipDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER_DEVICE();
    if (least) *least = 1;
    if (greatest) *greatest = -1;
    return EMU_OK;
}

EMU_API int hipDeviceSynchronize(void)
{
    ENTER_DEVICE();
    return keep(emu_dev_sync(dev));
}

/* ---- memory ---- */
EMU_API int hipMalloc(void **out, size_t size)
{
    ENTER_DEVICE();
    if (size == 0) {
        *out = NULL;
        return EMU_OK;
    }
    return keep(emu_mem_alloc(dev, EMU_MEM_DEVICE, size, 0, out));
}

EMU_API int hipExtMallocWithFlags(void **out, size_t size, unsigned flags)
{
    ENTER_DEVICE();
    return keep(flags & ~7u ? EMU_INVALID : emu_mem_alloc(dev, EMU_MEM_DEVICE, size, flags, out));
}

EMU_API int hipFree(void *p)
{
    ENTER_DEVICE();
    return keep(emu_mem_free(dev, EMU_MEM_DEVICE, p));
}

EMU_API int hipMemGetInfo(size_t *available, size_t *total)
{
    ENTER_DEVICE();
    *available = *total = (size_t)16 << 30;
    return EMU_OK;
}

EMU_API int hipHostMalloc(void **out, size_t size, unsigned flags)
{
    ENTER_DEVICE();
    return keep(emu_mem_alloc(dev, EMU_MEM_PINNED, size, flags, out));
}

EMU_API int hipHostFree(void *p)
{
    ENTER_DEVICE();
    return keep(emu_mem_free(dev, EMU_MEM_PINNED, p));
}

EMU_API int hipHostRegister(void *p, size_t size, unsigned flags)
{
    ENTER_DEVICE();
    if (hook_capturing()) return keep(EMU_CAPTURE_UNSUPPORTED);
    /* Portable, mapped, I/O memory, and HIP's two coarse/uncached flags; read-only (8) is refused. */
    return keep(flags & 8 ? EMU_INVALID : emu_mem_register(dev, p, size, flags));
}

EMU_API int hipHostUnregister(void *p)
{
    ENTER_DEVICE();
    return keep(emu_mem_unregister(p));
}

EMU_API int hipHostGetDevicePointer(void **out, void *p, unsigned flags)
{
    ENTER_DEVICE();
    struct emu_mem_info info;
    if (flags || !emu_mem_query(p, &info) || info.kind == EMU_MEM_DEVICE) return keep(EMU_INVALID);
    *out = p;
    return EMU_OK;
}

EMU_API int hipMemGetAddressRange(void **base, size_t *size, void *p)
{
    ENTER_DEVICE();
    struct emu_mem_info info;
    if (!emu_mem_query(p, &info)) return keep(EMU_NOT_FOUND);
    if (base) *base = info.base;
    if (size) *size = info.size;
    return EMU_OK;
}

struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};

EMU_API int hipPointerGetAttributes(struct pointer_attributes *out, const void *p)
{
    ENTER();
    /* The numbers of hipMemoryType changed in ROCm 6, and an unknown pointer became a success. */
    bool old = emu_conf()->driver_version < 60000000;
    struct emu_mem_info info;
    memset(out, 0, sizeof *out);
    if (!emu_mem_query(p, &info)) {
        out->device = -2;
        return keep(old ? EMU_INVALID : EMU_OK);
    }
    bool on_device = info.kind == EMU_MEM_DEVICE;
    out->type = (on_device ? 1 : 0) + (old ? 0 : 1);
    out->device = info.device;
    out->device_pointer = (void *)(uintptr_t)p;
    out->host_pointer = on_device ? NULL : out->device_pointer;
    out->flags = info.flags;
    return EMU_OK;
}

/* Host memory that is neither mapped nor asked to be coherent may be coarse-grained: what a stream writes there is not
 * sure to be seen after an event.  Nobody here waits for a whole stream instead, so such a copy is always a mistake. */
static void police_grain(const void *dst)
{
    struct emu_mem_info info;
    if (emu_mem_query(dst, &info) && info.kind == EMU_MEM_PINNED && !(info.flags & (2u | 0x40000000u)))
        emu_complain("%p is coarse-grained host memory (hipHostMalloc flags %x): an event does not make it visible",
                     dst, info.flags);
}

EMU_API int hipMemcpyAsync(void *dst, const void *src, size_t size, int kind, void *stream)
{
    ENTER_STREAM(stream);
    police_grain(dst);
    return leave(s, kind < 0 || kind > 4 ? EMU_INVALID : emu_copy(s, dst, src, size));
}

EMU_API int hipMemsetAsync(void *dst, int value, size_t size, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_fill(s, dst, (unsigned char)value, size));
}

/* ---- streams and events ---- */
EMU_API int hipStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
    ENTER_DEVICE();
    struct emu_stream *s = NULL;
    int rc = emu_stream_create(dev, flags, &s);
    if (!rc) *out = s;
    return keep(rc);
}

EMU_API int hipStreamCreateWithFlags(void **out, unsigned flags)
{
    return hipStreamCreateWithPriority(out, flags, 0);
}

EMU_API int hipStreamDestroy(void *stream)
{
    ENTER_DEVICE();
    return keep(emu_stream_destroy(dev, stream));
}

EMU_API int hipStreamQuery(void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_stream_query(s));
}

EMU_API int hipStreamSynchronize(void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_stream_sync(s));
}

EMU_API int hipStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    ENTER_STREAM(stream);
    return leave(s, emu_event_wait(s, event));
}

EMU_API int hipStreamIsCapturing(void *stream, int *status)
{
    ENTER_STREAM(stream);
    *status = hook_capturing();
    return leave(s, EMU_OK);
}

EMU_API int hipStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph,
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

EMU_API int hipThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER();
    int old = emu_thread.capture_mode;
    emu_thread.capture_mode = *mode;
    *mode = old;
    return EMU_OK;
}

EMU_API int hipStreamWaitValue32(void *stream, void *addr, uint32_t value, unsigned flags, uint32_t mask)
{
    ENTER_STREAM(stream);
    return leave(s, emu_wait32(s, addr, value, mask, (enum emu_wait)flags));
}

EMU_API int hipStreamWriteValue32(void *stream, void *addr, uint32_t value, unsigned flags)
{
    ENTER_STREAM(stream);
    return leave(s, flags ? EMU_INVALID : emu_write32(s, addr, value));
}

EMU_API int hipLaunchHostFunc(void *stream, void (*fn)(void *), void *arg)
{
    ENTER_STREAM(stream);
    return leave(s, emu_host_func(s, fn, arg));
}

EMU_API int hipEventCreateWithFlags(void **out, unsigned flags)
{
    ENTER_DEVICE();
    /* Bits 29 to 31 choose the release scope. */
    return keep(emu_event_create(dev, flags & 0x1fffffffu, out));
}

EMU_API int hipEventDestroy(void *event)
{
    ENTER_DEVICE();
    return keep(emu_event_destroy(event));
}

EMU_API int hipEventRecord(void *event, void *stream)
{
    ENTER_STREAM(stream);
    return leave(s, emu_event_record(s, event));
}

EMU_API int hipEventQuery(void *event)
{
    ENTER_DEVICE();
    return keep(emu_event_query(event));
}

EMU_API int hipEventSynchronize(void *event)
{
    ENTER_DEVICE();
    return keep(emu_event_sync(event));
}

/* ---- modules ---- */
EMU_API int hipModuleLoadData(void **out, const void *image)
{
    ENTER_DEVICE();
    return keep(emu_module_load(dev, image, out));
}

EMU_API int hipModuleUnload(void *module)
{
    ENTER_DEVICE();
    return keep(emu_module_unload(dev, module));
}

EMU_API int hipModuleGetFunction(void **out, void *module, const char *name)
{
    ENTER_DEVICE();
    return keep(emu_module_function(module, name, out));
}

EMU_API int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared, void *stream, void **params, void **extra)
{
    ENTER_STREAM(stream);
    if (extra) return leave(s, EMU_NOT_SUPPORTED);
    if ((uint64_t)gx * bx > UINT32_MAX) return leave(s, EMU_INVALID);
    return leave(s, emu_launch(s, function, (struct emu_dim){gx, gy, gz}, (struct emu_dim){bx, by, bz}, params));
}

/* ---- errors ---- */
EMU_API int hipGetLastError(void)
{
    int rc = last_error;
    last_error = EMU_OK;
    return rc;
}

EMU_API int hipPeekAtLastError(void)
{
    return last_error;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {EMU_OK, "hipSuccess", "no error"},
    {EMU_INVALID, "hipErrorInvalidValue", "invalid argument"},
    {EMU_OOM, "hipErrorOutOfMemory", "out of memory"},
    {EMU_NOT_INIT, "hipErrorNotInitialized", "initialization error"},
    {EMU_NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {EMU_BAD_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {EMU_BAD_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
    {EMU_NO_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
    {EMU_WRONG_ARCH, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
    {214, "hipErrorECCNotCorrectable", "uncorrectable ECC error encountered"},
    {EMU_BAD_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {EMU_NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {EMU_NOT_READY, "hipErrorNotReady", "device not ready"},
    {EMU_ILLEGAL_ADDRESS, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {EMU_CONTEXT_DESTROYED, "hipErrorContextIsDestroyed", "context is destroyed"},
    {EMU_ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered", "memory is already registered"},
    {EMU_NOT_REGISTERED, "hipErrorHostMemoryNotRegistered", "memory is not registered"},
    {EMU_LAUNCH_FAILED, "hipErrorLaunchFailure", "unspecified launch failure"},
    {EMU_NOT_PERMITTED, "hipErrorNotPermitted", "operation not permitted"},
    {EMU_NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
    {EMU_CAPTURE_UNSUPPORTED, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
};

static int find_error(int code)
{
    for (int i = 0; i < (int)(sizeof errors / sizeof errors[0]); i++)
        if (errors[i].code == code) return i;
    return -1;
}

EMU_API const char *hipGetErrorName(int code)
{
    int i = find_error(code);
    return i < 0 ? "hipErrorUnknown" : errors[i].name;
}

EMU_API const char *hipGetErrorString(int code)
{
    int i = find_error(code);
    return i < 0 ? "unknown error" : errors[i].text;
}
