/* SPDX-License-Identifier: Apache-2.0
 * What only HIP does: a current device per thread, a properties struct that changed its layout, a remembered last error
 * that the framework would report as its own. */
#include "device/driver.h"

#include <stdio.h>
#include <string.h>

enum { ATTR_MULTIPROCESSORS = 63, COPY_BY_ADDRESS = 4 };
/* Where gcnArchName stands in hipDeviceProp_t of ROCm 6 and later, and before. */
enum { ARCH_OFFSET = 1160, ARCH_OFFSET_OLD = 396 };

static int open_device(struct gb_device *device)
{
    device->ordinal = device->info.index;
    return 0;
}

static void close_device(struct gb_device *device)
{
    (void)device;
}

static int bind(struct gb_device *device)
{
    int rc = device->hip.set_device(device->ordinal);
    return rc ? gb_driver_fail(device, rc, "hipSetDevice") : 0;
}

static int enter(struct gb_device *device, struct gb_device_saved *saved)
{
    int rc = device->hip.get_device(&saved->ordinal);
    if (rc) return gb_driver_fail(device, rc, "hipGetDevice");
    saved->changed = saved->ordinal != device->ordinal;
    return saved->changed ? bind(device) : 0;
}

static void leave(struct gb_device *device, const struct gb_device_saved *saved)
{
    if (saved->changed) (void)device->hip.set_device(saved->ordinal);
}

static int copy(struct gb_device *device, void *dst, const void *src, size_t bytes, void *stream)
{
    return device->hip.copy(dst, src, bytes, COPY_BY_ADDRESS, stream);
}

static int arch(struct gb_device *device, char *text, size_t capacity)
{
    char properties[4096] = {0}; /* larger than any layout so far */
    const char *at = properties + (device->hip.properties ? ARCH_OFFSET : ARCH_OFFSET_OLD);
    int (*get)(void *, int) = device->hip.properties ? device->hip.properties : device->hip.properties_old;
    if (!get) return GB_FAIL(GPUBRIDGE_ERR_LIBRARY, "%s exports no hipGetDeviceProperties", device->dl.path);
    int rc = get(properties, device->ordinal);
    if (rc) return gb_driver_fail(device, rc, "hipGetDeviceProperties");
    if (strncmp(at, "gfx", 3) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_LIBRARY,
                       "%s (version %d) lays out hipDeviceProp_t in a way this library does not know", device->dl.path,
                       device->info.driver_version);
    snprintf(text, capacity, "%s", at);
    return 0;
}

static void error_text(struct gb_device *device, int raw, char *text, size_t capacity)
{
    const char *name = device->hip.error_name(raw), *words = device->hip.error_string(raw);
    snprintf(text, capacity, "%s: %s", name ? name : "unknown", words ? words : "no description");
}

static void clear_error(struct gb_device *device)
{
    (void)device->hip.last_error();
}

static int rtc_options(struct gb_device *device, char options[][96], int capacity)
{
    static const char *const fixed[] = {"-ffp-contract=off", "-std=c++17", "-O3"};
    int n = 0;
    snprintf(options[n++], 96, "--offload-arch=%s", device->info.arch);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed && n < capacity; i++)
        snprintf(options[n++], 96, "%s", fixed[i]);
    return n;
}

const struct gb_vendor_ops gb_hip_ops = {
    .name = "amd",
    .module_name = "gpubridge_kernels.hip",
    .open = open_device,
    .close = close_device,
    .bind = bind,
    .enter = enter,
    .leave = leave,
    .copy = copy,
    .arch = arch,
    .error_text = error_text,
    .clear_error = clear_error,
    .rtc_options = rtc_options,
    .attr_multiprocessors = ATTR_MULTIPROCESSORS,
};
