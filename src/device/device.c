/* SPDX-License-Identifier: Apache-2.0
 * The calls of device.h over the tables of driver.h: opening, and one line of error text per failure. */
#include "device/device.h"

#include "device/driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HOST_PORTABLE_MAPPED = 3, /* HIP: mapped is what makes it coherent */
    STREAM_NON_BLOCKING = 1,
    EVENT_NO_TIMING = 2,
    CAPTURE_RELAXED = 2,
    WAIT_GEQ = 0,
    CAPTURE_FIRST_ERROR = 900,
    CAPTURE_LAST_ERROR = 908
};

/* Calls `call`; a failure becomes the function's error. */
#define DRIVER(device, call, name)                                                                                     \
    do {                                                                                                               \
        int driver_rc_ = (call);                                                                                       \
        if (driver_rc_) return gb_driver_fail(device, driver_rc_, name);                                               \
    } while (0)

static int check_index(struct gb_device *device)
{
    int count = 0;
    DRIVER(device, device->device.init(0), "initialising the driver");
    DRIVER(device, device->device.count(&count), "counting devices");
    if (device->info.index < 0 || device->info.index >= count)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "there is no %s device %d: %d visible here; check the device index and %s_VISIBLE_DEVICES",
                       device->vendor->name, device->info.index, count,
                       device->info.kind == GPUBRIDGE_DEVICE_CUDA ? "CUDA" : "HIP");
    return 0;
}

static int read_info(struct gb_device *device)
{
    struct gb_device_info *info = &device->info;
    snprintf(info->vendor, sizeof info->vendor, "%s", device->vendor->name);
    DRIVER(device, device->device.version(&info->driver_version), "reading the version");
    DRIVER(device, device->device.name(info->name, (int)sizeof info->name, device->ordinal), "reading the name");
    DRIVER(device, device->device.pci(info->pci, (int)sizeof info->pci, device->ordinal), "reading the PCI address");
    DRIVER(device,
           device->device.attribute(&info->multiprocessors, device->vendor->attr_multiprocessors, device->ordinal),
           "reading an attribute");
    if (device->device.uuid && device->device.uuid(info->uuid, device->ordinal)) {
        memset(info->uuid, 0, sizeof info->uuid);
        if (device->vendor->clear_error) device->vendor->clear_error(device);
    }
    info->has_stream_flags = device->queue.wait_value && device->queue.write_value;
    return device->vendor->arch(device, info->arch, sizeof info->arch);
}

static int open_bound(struct gb_device *device)
{
    int least = 0;
    DRIVER(device, device->device.priorities(&least, &device->priority), "reading stream priorities");
    return gb_device_alloc(device, GB_DEVICE_SCRAP_BYTES, &device->scrap);
}

static int open_device(struct gb_device *device, const char *path)
{
    struct gb_device_saved saved;
    GB_TRY(gb_driver_open(device, path));
    GB_TRY(check_index(device));
    GB_TRY(device->vendor->open(device));
    GB_TRY(read_info(device));
    GB_TRY(gb_device_enter(device, &saved));
    int rc = open_bound(device);
    gb_device_leave(device, &saved);
    return rc;
}

int gb_device_open(int kind, int index, const char *path, struct gb_device **out)
{
    if (kind != GPUBRIDGE_DEVICE_CUDA && kind != GPUBRIDGE_DEVICE_HIP)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "device kind %d has no driver; CUDA (1) or HIP (2)", kind);
    struct gb_device *device = calloc(1, sizeof *device);
    if (!device) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a device");
    device->info.kind = kind;
    device->info.index = index;
    device->vendor = kind == GPUBRIDGE_DEVICE_CUDA ? &gb_cuda_ops : &gb_hip_ops;
    int rc = open_device(device, path);
    if (rc) {
        gb_device_close(device);
        return rc;
    }
    *out = device;
    return 0;
}

void gb_device_close(struct gb_device *device)
{
    struct gb_device_saved saved;
    if (!device) return;
    if (device->scrap && gb_device_enter(device, &saved) == 0) {
        gb_device_free(device, device->scrap);
        gb_device_leave(device, &saved);
    }
    device->vendor->close(device);
    free(device);
}

const struct gb_device_info *gb_device_info(const struct gb_device *device)
{
    return &device->info;
}

size_t gb_device_describe(const struct gb_device *device, char *text, size_t capacity)
{
    const struct gb_device_info *i = &device->info;
    int n = snprintf(text, capacity, "%s (%s, %s, driver %d from %s%s)", i->name, i->arch, i->pci, i->driver_version,
                     i->library, i->emulated ? ", emulated" : "");
    return n > 0 ? (size_t)n : 0;
}

int gb_device_emulator(int kind, char *path, size_t capacity)
{
    /* Installed beside the library, or where the build puts it seen from the library and from the tests. */
    static const char *const places[] = {"", "/../emu", "/../../emu"};
    char dir[1024], file[1200];
    gb_dl_own_dir(dir, sizeof dir);
    const char *vendor = kind == GPUBRIDGE_DEVICE_CUDA ? "cuda" : "hip";
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(file, sizeof file, "%s%s/libgbemu_%s.so", dir, places[i], vendor);
        if (access(file, R_OK) != 0 || strlen(file) >= capacity) continue;
        snprintf(path, capacity, "%s", file);
        return 0;
    }
    return GB_FAIL(GPUBRIDGE_ERR_LIBRARY,
                   "there is no emulated library libgbemu_%s.so beside %s; build it, or unset GPUBRIDGE_EMULATE",
                   vendor, dir);
}

int gb_device_bind(struct gb_device *device)
{
    return device->vendor->bind(device);
}

int gb_device_enter(struct gb_device *device, struct gb_device_saved *saved)
{
    memset(saved, 0, sizeof *saved);
    saved->capture_mode = CAPTURE_RELAXED;
    GB_TRY(device->vendor->enter(device, saved));
    DRIVER(device, device->device.capture_mode(&saved->capture_mode), "exchanging the capture mode");
    return 0;
}

void gb_device_leave(struct gb_device *device, const struct gb_device_saved *saved)
{
    int mode = saved->capture_mode;
    (void)device->device.capture_mode(&mode);
    device->vendor->leave(device, saved);
}

int gb_device_alloc(struct gb_device *device, uint64_t bytes, void **mem)
{
    DRIVER(device, device->memory.alloc(mem, (size_t)bytes), "allocating device memory");
    return 0;
}

void gb_device_free(struct gb_device *device, void *mem)
{
    if (mem) (void)device->memory.free(mem);
}

int gb_device_host_alloc(struct gb_device *device, uint64_t bytes, void **mem)
{
    void *host = NULL, *seen = NULL;
    DRIVER(device, device->memory.host_alloc(&host, (size_t)bytes, HOST_PORTABLE_MAPPED), "allocating pinned memory");
    int rc = device->memory.host_address(&seen, host, 0);
    if (rc || seen != host) {
        (void)device->memory.host_free(host);
        if (rc) return gb_driver_fail(device, rc, "mapping pinned memory");
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "%s device %d maps host memory at another address",
                       device->vendor->name, device->info.index);
    }
    *mem = host;
    return 0;
}

void gb_device_host_free(struct gb_device *device, void *mem)
{
    if (mem) (void)device->memory.host_free(mem);
}

int gb_device_host_register(struct gb_device *device, void *mem, uint64_t bytes)
{
    void *seen = NULL;
    const struct gb_driver_memory *m = &device->memory;
    if (!m->host_register || !m->host_unregister)
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "%s cannot register memory of the process", device->info.library);
    DRIVER(device, m->host_register(mem, (size_t)bytes, HOST_PORTABLE_MAPPED), "registering host memory");
    int rc = m->host_address(&seen, mem, 0);
    if (!rc && seen == mem) return 0;
    (void)m->host_unregister(mem);
    if (rc) return gb_driver_fail(device, rc, "mapping registered memory");
    return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "%s device %d maps registered memory at another address",
                   device->vendor->name, device->info.index);
}

void gb_device_host_unregister(struct gb_device *device, void *mem)
{
    if (mem) (void)device->memory.host_unregister(mem);
}

void *gb_device_scrap(const struct gb_device *device)
{
    return device->scrap;
}

int gb_stream_create(struct gb_device *device, void **stream)
{
    DRIVER(device, device->queue.stream_create(stream, STREAM_NON_BLOCKING, device->priority), "creating a stream");
    return 0;
}

void gb_stream_destroy(struct gb_device *device, void *stream)
{
    if (stream) (void)device->queue.stream_destroy(stream);
}

int gb_stream_is_capturing(struct gb_device *device, void *stream, int *yes)
{
    int status = 0;
    int rc = device->queue.is_capturing(stream, &status);
    if (rc && (rc < CAPTURE_FIRST_ERROR || rc > CAPTURE_LAST_ERROR))
        return gb_driver_fail(device, rc, "asking for a capture");
    if (rc && device->vendor->clear_error) device->vendor->clear_error(device);
    *yes = rc || status;
    return 0;
}

int gb_stream_copy(struct gb_device *device, void *dst, const void *src, uint64_t bytes, void *stream)
{
    DRIVER(device, device->vendor->copy(device, dst, src, (size_t)bytes, stream), "copying");
    return 0;
}

int gb_stream_wait_event(struct gb_device *device, void *stream, void *event)
{
    DRIVER(device, device->queue.stream_wait(stream, event, 0), "waiting for an event");
    return 0;
}

int gb_stream_wait_flag(struct gb_device *device, void *stream, const void *flag, uint32_t value)
{
    DRIVER(device, device->queue.wait_value(stream, (void *)(uintptr_t)flag, value, WAIT_GEQ), "waiting for a flag");
    return 0;
}

int gb_stream_write_flag(struct gb_device *device, void *stream, void *flag, uint32_t value)
{
    DRIVER(device, device->queue.write_value(stream, flag, value, 0), "writing a flag");
    return 0;
}

int gb_stream_launch(struct gb_device *device, void *stream, void *kernel, uint32_t blocks, uint32_t threads,
                     void **args)
{
    DRIVER(device, device->module.launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, args, NULL),
           "launching a kernel");
    return 0;
}

int gb_event_create(struct gb_device *device, void **event)
{
    DRIVER(device, device->queue.event_create(event, EVENT_NO_TIMING), "creating an event");
    return 0;
}

void gb_event_destroy(struct gb_device *device, void *event)
{
    if (event) (void)device->queue.event_destroy(event);
}

int gb_event_record(struct gb_device *device, void *event, void *stream)
{
    DRIVER(device, device->queue.event_record(event, stream), "recording an event");
    return 0;
}

int gb_event_query(struct gb_device *device, void *event)
{
    int rc = device->queue.event_query(event);
    if (rc == GB_DRIVER_NOT_READY) {
        if (device->vendor->clear_error) device->vendor->clear_error(device);
        return GPUBRIDGE_AGAIN;
    }
    return rc ? gb_driver_fail(device, rc, "querying an event") : 0;
}
