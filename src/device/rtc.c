/* SPDX-License-Identifier: Apache-2.0
 * Run-time compilation: NVRTC and hipRTC have one shape under two names.  Machine code of exactly this device is
 * preferred; a device that the compiler does not know yet gets the newest intermediate code, which the driver finishes.
 */
#include "device/driver.h"

#include "base/log.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OPTIONS 12
#define MAX_ARCHS   64

struct gb_module {
    void *handle;
};

#define ROW(slot, cuda, hip)          {offsetof(struct gb_device, rtc.slot), cuda, hip, 0}
#define OPTIONAL_ROW(slot, cuda, hip) {offsetof(struct gb_device, rtc.slot), cuda, hip, 1}

static const struct gb_symbol symbols[] = {
    ROW(version, "nvrtcVersion", "hiprtcVersion"),
    ROW(create, "nvrtcCreateProgram", "hiprtcCreateProgram"),
    ROW(compile, "nvrtcCompileProgram", "hiprtcCompileProgram"),
    ROW(log_size, "nvrtcGetProgramLogSize", "hiprtcGetProgramLogSize"),
    ROW(log, "nvrtcGetProgramLog", "hiprtcGetProgramLog"),
    ROW(code_size, "nvrtcGetCUBINSize", "hiprtcGetCodeSize"),
    ROW(code, "nvrtcGetCUBIN", "hiprtcGetCode"),
    ROW(destroy, "nvrtcDestroyProgram", "hiprtcDestroyProgram"),
    ROW(error_string, "nvrtcGetErrorString", "hiprtcGetErrorString"),
    OPTIONAL_ROW(ptx_size, "nvrtcGetPTXSize", NULL),
    OPTIONAL_ROW(ptx, "nvrtcGetPTX", NULL),
    OPTIONAL_ROW(count_archs, "nvrtcGetNumSupportedArchs", NULL),
    OPTIONAL_ROW(archs, "nvrtcGetSupportedArchs", NULL),
};

static const char *const nvrtc_sonames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", NULL};
static const char *const nvrtc_dirs[] = {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "torch/lib",
                                         "/usr/local/cuda/lib64", NULL};
static const char *const hiprtc_sonames[] = {"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so",
                                             NULL};
static const char *const hiprtc_dirs[] = {"torch/lib", "_rocm_sdk_core/lib", "/opt/rocm/lib", NULL};

static const struct gb_dl_spec nvrtc_spec = {.what = "the CUDA run-time compiler (NVRTC)",
                                             .prefix = "libnvrtc",
                                             .exclude = "builtins",
                                             .sonames = nvrtc_sonames,
                                             .dirs = nvrtc_dirs};
static const struct gb_dl_spec hiprtc_spec = {.what = "the HIP run-time compiler (hipRTC)",
                                              .prefix = "libhiprtc",
                                              .exclude = "builtins",
                                              .sonames = hiprtc_sonames,
                                              .dirs = hiprtc_dirs};

int gb_rtc_load(struct gb_device *device)
{
    const int is_cuda = device->info.kind == GPUBRIDGE_DEVICE_CUDA;
    if (device->rtc.create) return 0;
    /* ROCm 5 and 6 export the compiler from the runtime itself, and so do the emulators. */
    struct gb_dl dl = device->dl;
    if (!gb_dl_find(&dl, is_cuda ? "nvrtcVersion" : "hiprtcVersion"))
        GB_TRY(gb_dl_open(is_cuda ? &nvrtc_spec : &hiprtc_spec, NULL, &dl));
    int rc = gb_driver_load(device, &dl, symbols, sizeof symbols / sizeof *symbols);
    device->rtc.dl = dl;
    if (rc) device->rtc.create = NULL;
    return rc;
}

static int rtc_fail(struct gb_device *device, int raw, const char *call)
{
    return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "%s: %s failed with %d, %s", device->rtc.dl.path, call, raw,
                   device->rtc.error_string(raw));
}

static int compile_fail(struct gb_device *device, void *program, int raw)
{
    size_t bytes = 0;
    char *log = NULL;
    if (device->rtc.log_size(program, &bytes) == 0 && bytes) log = calloc(1, bytes + 1);
    if (log) (void)device->rtc.log(program, log);
    int rc = GB_FAIL(GPUBRIDGE_ERR_DEVICE, "%s cannot compile the kernels for %s: %s: %.600s", device->rtc.dl.path,
                     device->info.arch, device->rtc.error_string(raw), log ? log : "");
    free(log);
    return rc;
}

/* The newest architecture that the compiler knows and the device can run, as a number; 0 when this one is known itself.
 */
static int fallback_arch(struct gb_device *device)
{
    int archs[MAX_ARCHS], count = 0, mine = 0, best = 0;
    if (!device->rtc.count_archs || !device->rtc.archs || sscanf(device->info.arch, "sm_%d", &mine) != 1) return 0;
    if (device->rtc.count_archs(&count) || count > MAX_ARCHS || device->rtc.archs(archs)) return 0;
    for (int i = 0; i < count; i++) {
        if (archs[i] == mine) return 0;
        if (archs[i] < mine && archs[i] > best) best = archs[i];
    }
    return best;
}

static int read_code(struct gb_device *device, void *program, int as_ptx, char **image)
{
    size_t bytes = 0;
    int rc = as_ptx ? device->rtc.ptx_size(program, &bytes) : device->rtc.code_size(program, &bytes);
    if (rc) return rtc_fail(device, rc, "reading the code's size");
    char *code = calloc(1, bytes + 1);
    if (!code) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for %zu bytes of kernels", bytes);
    rc = as_ptx ? device->rtc.ptx(program, code) : device->rtc.code(program, code);
    if (rc) {
        free(code);
        return rtc_fail(device, rc, "reading the code");
    }
    *image = code;
    return 0;
}

static int compile(struct gb_device *device, void *program, char **image)
{
    char text[MAX_OPTIONS][96];
    const char *options[MAX_OPTIONS];
    int older = fallback_arch(device);
    int count = device->vendor->rtc_options(device, text, MAX_OPTIONS);
    if (older) {
        snprintf(text[0], sizeof text[0], "--gpu-architecture=compute_%d", older);
        GB_INFO("%s does not know %s yet: kernels are compiled for %d and finished by the driver", device->rtc.dl.path,
                device->info.arch, older);
    }
    for (int i = 0; i < count; i++) options[i] = text[i];
    int rc = device->rtc.compile(program, count, options);
    return rc ? compile_fail(device, program, rc) : read_code(device, program, older != 0, image);
}

int gb_module_build(struct gb_device *device, const char *source, struct gb_module **out)
{
    void *program = NULL, *handle = NULL;
    char *image = NULL;
    GB_TRY(gb_rtc_load(device));
    int rc = device->rtc.create(&program, source, device->vendor->module_name, 0, NULL, NULL);
    if (rc) return rtc_fail(device, rc, "creating a program");
    rc = compile(device, program, &image);
    (void)device->rtc.destroy(&program);
    if (rc) return rc;
    rc = device->module.load(&handle, image);
    free(image);
    if (rc) return gb_driver_fail(device, rc, "loading the kernels");
    struct gb_module *module = calloc(1, sizeof *module);
    if (!module) {
        (void)device->module.unload(handle);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a module");
    }
    module->handle = handle;
    *out = module;
    return 0;
}

void gb_module_destroy(struct gb_device *device, struct gb_module *module)
{
    if (!module) return;
    (void)device->module.unload(module->handle);
    free(module);
}

int gb_module_kernel(struct gb_device *device, struct gb_module *module, const char *name, void **kernel)
{
    int rc = device->module.function(kernel, module->handle, name);
    return rc ? gb_driver_fail(device, rc, name) : 0;
}
