/* SPDX-License-Identifier: Apache-2.0
 * Run-time compilation: NVRTC and hipRTC have one shape under two names.  Machine code of exactly this device is
 * preferred; a device that the compiler does not know yet gets the newest intermediate code, which the driver finishes.
 */
#include "device/driver.h"

#include "base/log.h"
#include "device/cache.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define MAX_OPTIONS 12
#define MAX_ARCHS   64

struct gb_module {
    void *handle;
    int was_cached;
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

static int read_code(struct gb_device *device, void *program, int as_ptx, char **image, size_t *size)
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
    *size = bytes;
    return 0;
}

/* What the compiler is asked for. */
struct request {
    const char *source;
    char text[MAX_OPTIONS][96];
    const char *options[MAX_OPTIONS];
    int count;
    int as_ptx; /* the driver finishes it */
};

static void make_request(struct gb_device *device, const char *source, struct request *r)
{
    int older = fallback_arch(device);
    r->source = source;
    r->count = device->vendor->rtc_options(device, r->text, MAX_OPTIONS);
    r->as_ptx = older != 0;
    if (older) {
        snprintf(r->text[0], sizeof r->text[0], "--gpu-architecture=compute_%d", older);
        GB_INFO("%s does not know %s yet: kernels are compiled for %d and finished by the driver", device->rtc.dl.path,
                device->info.arch, older);
    }
    for (int i = 0; i < r->count; i++) r->options[i] = r->text[i];
}

/* Of everything that the image depends on. */
static void request_key(struct gb_device *device, const struct request *r, uint8_t key[16])
{
    XXH3_state_t *state = XXH3_createState();
    int facts[6] = {1 /* of this list and the file's layout */, device->info.kind, device->info.emulated, r->as_ptx};
    XXH128_canonical_t canonical = {{0}};
    memset(key, 0, 16);
    if (!state) return;
    (void)device->rtc.version(&facts[4], &facts[5]);
    (void)XXH3_128bits_reset(state);
    (void)XXH3_128bits_update(state, facts, sizeof facts);
    (void)XXH3_128bits_update(state, device->info.arch, strlen(device->info.arch) + 1);
    for (int i = 0; i < r->count; i++) (void)XXH3_128bits_update(state, r->text[i], strlen(r->text[i]) + 1);
    (void)XXH3_128bits_update(state, r->source, strlen(r->source));
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    memcpy(key, canonical.digest, 16);
    XXH3_freeState(state);
}

static int compile(struct gb_device *device, const struct request *r, char **image, size_t *bytes)
{
    void *program = NULL;
    int rc = device->rtc.create(&program, r->source, device->vendor->module_name, 0, NULL, NULL);
    if (rc) return rtc_fail(device, rc, "creating a program");
    rc = device->rtc.compile(program, r->count, r->options);
    rc = rc ? compile_fail(device, program, rc) : read_code(device, program, r->as_ptx, image, bytes);
    (void)device->rtc.destroy(&program);
    return rc;
}

static int load(struct gb_device *device, const char *image, struct gb_module **out)
{
    struct gb_module *module = calloc(1, sizeof *module);
    if (!module) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a module");
    int rc = device->module.load(&module->handle, image);
    if (rc) {
        free(module);
        return gb_driver_fail(device, rc, "loading the kernels");
    }
    *out = module;
    return 0;
}

static int load_cached(struct gb_device *device, struct gb_cache_entry *entry, struct gb_module **out)
{
    char *image = NULL;
    size_t bytes = 0;
    if (gb_cache_load(entry, &image, &bytes)) return GPUBRIDGE_AGAIN;
    int rc = load(device, image, out);
    free(image);
    if (rc) GB_DEBUG("a cached image does not load (%s): the kernels are compiled again", gb_err_text());
    if (!rc) (*out)->was_cached = 1;
    return rc ? GPUBRIDGE_AGAIN : 0;
}

int gb_module_build(struct gb_device *device, const char *source, struct gb_module **out)
{
    struct request request;
    struct gb_cache_entry entry;
    uint8_t key[16];
    char *image = NULL;
    size_t bytes = 0;
    GB_TRY(gb_rtc_load(device));
    make_request(device, source, &request);
    request_key(device, &request, key);
    const int is_named = device->cache_dir && *device->cache_dir;
    gb_cache_entry_open(&entry, is_named || !device->info.emulated ? device->cache_dir : "off", key);
    int rc = load_cached(device, &entry, out);
    if (rc) {
        rc = compile(device, &request, &image, &bytes);
        if (!rc) rc = load(device, image, out);
        if (!rc) gb_cache_store(&entry, image, bytes);
        free(image);
    }
    gb_cache_entry_close(&entry);
    return rc;
}

int gb_module_was_cached(const struct gb_module *module)
{
    return module->was_cached;
}

void gb_device_set_cache(struct gb_device *device, const char *dir)
{
    device->cache_dir = dir;
}

size_t gb_module_compiler(struct gb_device *device, char *text, size_t capacity)
{
    int major = 0, minor = 0, n;
    if (gb_rtc_load(device))
        n = snprintf(text, capacity, "none (%s)", gb_err_text());
    else {
        (void)device->rtc.version(&major, &minor);
        n = snprintf(text, capacity, "%s %d.%d (%s)", device->info.kind == GPUBRIDGE_DEVICE_CUDA ? "NVRTC" : "hipRTC",
                     major, minor, device->rtc.dl.path);
    }
    return n > 0 ? (size_t)n : 0;
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
