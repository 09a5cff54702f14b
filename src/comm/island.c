/* SPDX-License-Identifier: Apache-2.0
 * The device side of a context: which device, which island, which vendor library.  The user thread that makes the
 * context. */
#include "comm/context.h"

#include "base/log.h"
#include "device/device.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#define MEMORY_WAIT_NS 30000000000u /* for an operation to end, before the next is refused for want of memory */

/* Default key: vendor and architecture, without the feature suffixes of an AMD target ("gfx90a:sramecc+"). */
static void name_island(gpubridge_context *context, const char *vendor, const char *arch)
{
    const struct gb_settings *s = &context->settings;
    if (s->island[0])
        snprintf(context->island, sizeof context->island, "%s", s->island);
    else if (s->island_by == GB_ISLAND_BY_HOST)
        snprintf(context->island, sizeof context->island, "%s@%.40s", vendor, context->host);
    else if (s->island_by == GB_ISLAND_BY_VENDOR)
        snprintf(context->island, sizeof context->island, "%s", vendor);
    else
        snprintf(context->island, sizeof context->island, "%s:%.*s", vendor, (int)strcspn(arch, ":"), arch);
}

static void wake(void *net)
{
    gb_net_wake(net);
}

static int open_launcher(gpubridge_context *context)
{
    const struct gb_device_info *info = gb_device_info(context->device);
    int gate = context->settings.gate == GB_GATE_AUTO ? info->has_stream_flags : context->settings.gate == GB_GATE_ON;
    if (gate && !info->has_stream_flags)
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED,
                       "GPUBRIDGE_GATE=on, but streams of %s cannot wait for flags safely: use auto or off",
                       info->name);
    gb_device_set_cache(context->device, context->settings.cache_dir);
    GB_TRY(gb_launcher_open(context->device, gate, wake, context->net, &context->launcher));
    gb_launcher_set_limit(context->launcher, context->settings.mem_bytes, MEMORY_WAIT_NS);
    return 0;
}

/* An island of one rank needs no vendor library, so one that is not found is only remembered; one that was asked for by
 * name must open. */
static int open_ccl(gpubridge_context *context, const char *path)
{
    int rc = gb_ccl_open(context->device_kind, path, &context->ccl);
    if (rc && path) return rc;
    if (rc) {
        snprintf(context->ccl_missing, sizeof context->ccl_missing, "%s", gb_err_text());
        GB_INFO("no vendor collectives: %s", context->ccl_missing);
        return 0;
    }
    int version = gb_ccl_version(context->ccl);
    snprintf(context->ccl_name, sizeof context->ccl_name, "%s %d.%d.%d",
             context->device_kind == GPUBRIDGE_DEVICE_CUDA ? "NCCL" : "RCCL", version / 10000, version / 100 % 100,
             version % 100);
    GB_INFO("vendor collectives: %s", gb_ccl_describe(context->ccl));
    return 0;
}

static const char *or_null(const char *path)
{
    return path[0] ? path : NULL;
}

static int open_device(gpubridge_context *context)
{
    const struct gb_settings *s = &context->settings;
    int cuda = context->device_kind == GPUBRIDGE_DEVICE_CUDA;
    char emulator[1024];
    const char *path = or_null(cuda ? s->cuda_lib : s->hip_lib), *ccl_path = or_null(cuda ? s->nccl_lib : s->rccl_lib);
    if (context->emulated) {
        GB_TRY(gb_device_emulator(context->device_kind, emulator, sizeof emulator));
        path = path ? path : emulator;
        ccl_path = ccl_path ? ccl_path : path;
    }
    GB_TRY(gb_device_open(context->device_kind, context->device_index, path, &context->device));
    const struct gb_device_info *info = gb_device_info(context->device);
    context->emulated = info->emulated;
    snprintf(context->device_id, sizeof context->device_id, "%s", info->pci);
    name_island(context, info->vendor, info->arch);
    int rc = open_ccl(context, ccl_path);
    if (!rc) rc = open_launcher(context);
    if (rc) gb_device_close(context->device);
    return rc;
}

int gb_island_open(gpubridge_context *context, int device_kind, int device_index)
{
    context->device_kind = device_kind;
    context->device_index = device_index;
    if (context->settings.emulate != GB_EMULATE_NONE) {
        context->device_kind =
            context->settings.emulate == GB_EMULATE_CUDA ? GPUBRIDGE_DEVICE_CUDA : GPUBRIDGE_DEVICE_HIP;
        context->device_index = context->local_rank;
        context->emulated = 1;
    }
    if (context->device_kind != GPUBRIDGE_DEVICE_CPU) return open_device(context);
    struct utsname uts;
    name_island(context, "cpu", uname(&uts) ? "unknown" : uts.machine);
    return 0;
}

void gb_island_close(gpubridge_context *context)
{
    if (!context->device) return;
    gb_launcher_close(context->launcher);
    gb_device_close(context->device);
}
