/* SPDX-License-Identifier: Apache-2.0
 * What only CUDA does: contexts.  The framework's primary context is used, never another one, and a user thread keeps
 * what it had. */
#include "device/driver.h"

#include <stdio.h>
#include <string.h>

enum { ATTR_MULTIPROCESSORS = 16, ATTR_MAJOR = 75, ATTR_MINOR = 76 };

static int open_context(struct gb_device *device)
{
    int rc = device->cuda.device_get(&device->ordinal, device->info.index);
    if (rc) return gb_driver_fail(device, rc, "cuDeviceGet");
    rc = device->cuda.primary_retain(&device->context, device->ordinal);
    if (rc) {
        device->context = NULL;
        return gb_driver_fail(device, rc, "cuDevicePrimaryCtxRetain");
    }
    return 0;
}

static void close_context(struct gb_device *device)
{
    if (device->context) (void)device->cuda.primary_release(device->ordinal);
    device->context = NULL;
}

static int bind(struct gb_device *device)
{
    int rc = device->cuda.ctx_set_current(device->context);
    return rc ? gb_driver_fail(device, rc, "cuCtxSetCurrent") : 0;
}

static int enter(struct gb_device *device, struct gb_device_saved *saved)
{
    int rc = device->cuda.ctx_get_current(&saved->context);
    if (rc) return gb_driver_fail(device, rc, "cuCtxGetCurrent");
    saved->changed = saved->context != device->context;
    return saved->changed ? bind(device) : 0;
}

static void leave(struct gb_device *device, const struct gb_device_saved *saved)
{
    if (saved->changed) (void)device->cuda.ctx_set_current(saved->context);
}

static int copy(struct gb_device *device, void *dst, const void *src, size_t bytes, void *stream)
{
    return device->cuda.copy(dst, src, bytes, stream);
}

static int arch(struct gb_device *device, char *text, size_t capacity)
{
    int major = 0, minor = 0;
    int rc = device->device.attribute(&major, ATTR_MAJOR, device->ordinal);
    if (!rc) rc = device->device.attribute(&minor, ATTR_MINOR, device->ordinal);
    if (rc) return gb_driver_fail(device, rc, "cuDeviceGetAttribute");
    snprintf(text, capacity, "sm_%d%d", major, minor);
    return 0;
}

static void error_text(struct gb_device *device, int raw, char *text, size_t capacity)
{
    const char *name = NULL, *words = NULL;
    (void)device->cuda.error_name(raw, &name);
    (void)device->cuda.error_string(raw, &words);
    snprintf(text, capacity, "%s: %s", name ? name : "unknown", words ? words : "no description");
}

static int rtc_options(struct gb_device *device, char options[][96], int capacity)
{
    static const char *const fixed[] = {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true",
                                        "--std=c++17"};
    int n = 0;
    snprintf(options[n++], 96, "--gpu-architecture=%s", device->info.arch);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed && n < capacity; i++)
        snprintf(options[n++], 96, "%s", fixed[i]);
    return n;
}

const struct gb_vendor_ops gb_cuda_ops = {
    .name = "nvidia",
    .module_name = "gpubridge_kernels.cu",
    .open = open_context,
    .close = close_context,
    .bind = bind,
    .enter = enter,
    .leave = leave,
    .copy = copy,
    .arch = arch,
    .error_text = error_text,
    .rtc_options = rtc_options,
    .attr_multiprocessors = ATTR_MULTIPROCESSORS,
};
