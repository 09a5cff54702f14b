/* SPDX-License-Identifier: Apache-2.0
 * The search for vendor libraries, on look-alike files: a copy that is loaded already is used whatever its file is
 * called, explicit paths win, package folders are found from what is loaded, and failures say what to do.  Every case
 * runs in a child, since libraries are never closed. */
#include "base/dl.h"

#include "base/log.h"
#include "device/device.h"

#include <gpubridge/gpubridge.h>

#include <dlfcn.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
/* cmocka needs the headers above first */
#include <cmocka.h>

static char root[PATH_MAX]; /* a folder of this test, removed at its end */

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: CHECK(%s) failed: %s\n", __FILE__, __LINE__, #cond, gb_err_text());                \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static int in_child(void (*body)(void))
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        body();
        _exit(0);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

#define IN_CHILD(name)                                                                                                 \
    static void body_##name(void);                                                                                     \
    static void test_##name(void **state)                                                                              \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        assert_int_equal(in_child(body_##name), 0);                                                                    \
    }                                                                                                                  \
    static void body_##name(void)

static const char *at(const char *path)
{
    static char text[4][PATH_MAX + 64];
    static int turn;
    char *out = text[turn++ % 4];
    snprintf(out, sizeof text[0], "%s/%s", root, path);
    return out;
}

/* A library whose file is `path` and whose soname is `soname`, exporting gb_lookalike. */
static void make(const char *path, const char *soname)
{
    char command[4 * PATH_MAX];
    char folder[PATH_MAX + 64];
    snprintf(folder, sizeof folder, "%s", at(path));
    *strrchr(folder, '/') = 0;
    snprintf(command, sizeof command,
             "mkdir -p '%s' && echo 'int gb_lookalike(void); int gb_lookalike(void) { return 42; }' | "
             "cc -shared -fPIC -x c - -o '%s' -Wl,-soname,%s",
             folder, at(path), soname);
    CHECK(system(command) == 0);
}

static const char *const sonames[] = {"libgblook.so.7", "libgblook.so.6", "libgblook.so", NULL};
static const char *const dirs[] = {"torch/lib", "_rocm_sdk_core/lib", NULL};
static const struct gb_dl_spec spec = {.what = "the look-alike",
                                       .setting = "GPUBRIDGE_LOOK_LIB",
                                       .prefix = "libgblook",
                                       .exclude = "builtins",
                                       .sonames = sonames,
                                       .dirs = dirs};

IN_CHILD(nothing_to_find)
{
    struct gb_dl dl = {0};
    CHECK(gb_dl_open(&spec, NULL, &dl) == GPUBRIDGE_ERR_LIBRARY);
    CHECK(dl.handle == NULL);
    CHECK(strstr(gb_err_text(), "libgblook.so.7") && strstr(gb_err_text(), "libgblook.so.6"));
    CHECK(strstr(gb_err_text(), "GPUBRIDGE_LOOK_LIB"));
}

IN_CHILD(explicit_path)
{
    struct gb_dl dl = {0};
    make("own/anything.so", "libgblook.so.7");
    CHECK(gb_dl_open(&spec, at("own/anything.so"), &dl) == 0);
    CHECK(gb_dl_find(&dl, "gb_lookalike") && !gb_dl_find(&dl, "gb_missing"));
    CHECK(strstr(dl.path, "own/anything.so"));
    struct gb_dl other = {0};
    CHECK(gb_dl_open(&spec, at("own/absent.so"), &other) == GPUBRIDGE_ERR_LIBRARY);
    CHECK(strstr(gb_err_text(), "absent.so") && strstr(gb_err_text(), "GPUBRIDGE_LOOK_LIB"));
}

/* A wheel's copy: an unversioned file name with a versioned soname inside, loaded by path before us. */
IN_CHILD(loaded_under_another_name)
{
    struct gb_dl dl = {0};
    make("site-packages/torch/lib/libgblook.so", "libgblook.so.6");
    void *first = dlopen(at("site-packages/torch/lib/libgblook.so"), RTLD_NOW | RTLD_LOCAL);
    CHECK(first);
    CHECK(gb_dl_open(&spec, NULL, &dl) == 0);
    CHECK(strstr(dl.path, "torch/lib/libgblook.so"));
    CHECK(gb_dl_find(&dl, "gb_lookalike") == dlsym(first, "gb_lookalike"));
}

/* A file renamed with a hash, and a soname that is not in our list. */
IN_CHILD(loaded_under_a_hashed_name)
{
    struct gb_dl dl = {0};
    make("site-packages/torch/lib/libgblook-0a1b2c.so.6", "libgblook-0a1b2c.so.6");
    make("site-packages/torch/lib/libgblook-builtins.so.6", "libgblook-builtins.so.6");
    CHECK(dlopen(at("site-packages/torch/lib/libgblook-builtins.so.6"), RTLD_NOW | RTLD_LOCAL));
    CHECK(dlopen(at("site-packages/torch/lib/libgblook-0a1b2c.so.6"), RTLD_NOW | RTLD_LOCAL));
    CHECK(gb_dl_open(&spec, NULL, &dl) == 0);
    CHECK(strstr(dl.path, "libgblook-0a1b2c.so.6"));
}

static char logged[4096];

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg;
    if (level == GB_LOG_ERROR) snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s\n", line);
}

/* Two copies in one process: said, and the one that torch uses is taken. */
IN_CHILD(two_copies)
{
    struct gb_dl dl = {0};
    make("opt/rocm/lib/libgblook.so.6", "libgblook.so.6");
    make("site-packages/torch/lib/libgblook.so", "libgblook_other.so");
    make("site-packages/torch/lib/libtorch_cpu.so", "libtorch_cpu.so");
    CHECK(dlopen(at("opt/rocm/lib/libgblook.so.6"), RTLD_NOW | RTLD_LOCAL));
    CHECK(dlopen(at("site-packages/torch/lib/libgblook.so"), RTLD_NOW | RTLD_LOCAL));
    CHECK(dlopen(at("site-packages/torch/lib/libtorch_cpu.so"), RTLD_NOW | RTLD_LOCAL));
    gb_log_set_sink(keep_line, NULL);
    CHECK(gb_dl_open(&spec, NULL, &dl) == 0);
    CHECK(strstr(dl.path, "site-packages/torch/lib/libgblook.so"));
    CHECK(strstr(logged, "two copies") && strstr(logged, "opt/rocm") && strstr(logged, "GPUBRIDGE_LOOK_LIB"));
}

/* Nothing of ours is loaded, but torch is: its package folder shows where others are (no unversioned name there). */
IN_CHILD(package_folder)
{
    struct gb_dl dl = {0};
    make("venv/site-packages/torch/lib/libtorch_cpu.so", "libtorch_cpu.so");
    make("venv/site-packages/_rocm_sdk_core/lib/libgblook.so.7", "libgblook.so.7");
    CHECK(dlopen(at("venv/site-packages/torch/lib/libtorch_cpu.so"), RTLD_NOW | RTLD_LOCAL));
    CHECK(gb_dl_open(&spec, NULL, &dl) == 0);
    CHECK(strstr(dl.path, "_rocm_sdk_core/lib/libgblook.so.7"));
}

IN_CHILD(missing_symbol_is_named)
{
    struct gb_device *device = NULL;
    make("bad/libcuda.so.1", "libcuda.so.1");
    CHECK(gb_device_open(GPUBRIDGE_DEVICE_CUDA, 0, at("bad/libcuda.so.1"), &device) == GPUBRIDGE_ERR_LIBRARY);
    CHECK(device == NULL && strstr(gb_err_text(), "cuInit") && strstr(gb_err_text(), "bad/libcuda.so.1"));
    CHECK(gb_device_open(GPUBRIDGE_DEVICE_CPU, 0, NULL, &device) == GPUBRIDGE_ERR_INVALID);
}

static void check_device(int kind, int index, const char *vendor, const char *arch, int has_flags)
{
    char path[PATH_MAX], text[1024];
    struct gb_device *device = NULL, *other = NULL;
    CHECK(gb_device_emulator(kind, path, sizeof path) == 0);
    CHECK(gb_device_open(kind, index, path, &device) == 0);
    CHECK(gb_device_open(kind, index + 1, path, &other) == 0);
    const struct gb_device_info *info = gb_device_info(device);
    CHECK(strcmp(info->vendor, vendor) == 0 && strcmp(info->arch, arch) == 0);
    CHECK(info->emulated && info->has_stream_flags == has_flags);
    CHECK(strstr(info->library, "libgbemu_") && strlen(info->pci) > 8);
    CHECK(strcmp(info->pci, gb_device_info(other)->pci) != 0);
    CHECK(memcmp(info->uuid, gb_device_info(other)->uuid, 16) != 0);
    gb_device_describe(device, text, sizeof text);
    CHECK(strstr(text, arch) && strstr(text, "emulated"));
    gb_device_close(other);
    gb_device_close(device);
    gb_device_close(NULL);
    CHECK(gb_device_open(kind, 1000, path, &device) == GPUBRIDGE_ERR_INVALID);
    CHECK(strstr(gb_err_text(), "VISIBLE_DEVICES"));
}

IN_CHILD(emulated_cuda)
{
    check_device(GPUBRIDGE_DEVICE_CUDA, 0, "nvidia", "sm_90", 1);
}

IN_CHILD(emulated_hip)
{
    check_device(GPUBRIDGE_DEVICE_HIP, 2, "amd", "gfx942:sramecc+:xnack-", 0);
}

/* A file that really is a HIP runtime, for the searches of the product itself. */
static void put_hip(const char *path, const char *emulator)
{
    char command[4 * PATH_MAX], folder[PATH_MAX + 64], own[PATH_MAX];
    CHECK(gb_device_emulator(GPUBRIDGE_DEVICE_HIP, own, sizeof own) == 0);
    *strrchr(own, '/') = 0;
    snprintf(folder, sizeof folder, "%s", at(path));
    *strrchr(folder, '/') = 0;
    snprintf(command, sizeof command, "mkdir -p '%s' && cp '%s/%s' '%s'", folder, own, emulator, at(path));
    CHECK(system(command) == 0);
}

static void load_torch(const char *path)
{
    make(path, "libtorch_cpu.so");
    CHECK(dlopen(at(path), RTLD_NOW | RTLD_LOCAL));
}

static void find_hip(const char *where, const char *arch)
{
    struct gb_device *device = NULL;
    CHECK(gb_device_open(GPUBRIDGE_DEVICE_HIP, 0, NULL, &device) == 0);
    CHECK(strstr(gb_device_info(device)->library, where));
    CHECK(strcmp(gb_device_info(device)->arch, arch) == 0);
    gb_device_close(device);
}

/* ROCm 5: the properties struct has another layout there, under the only name that it exports. */
IN_CHILD(emulated_rocm_5)
{
    setenv("GBEMU_PROFILE", "MI50", 1);
    put_hip("rocm5/site-packages/torch/lib/libamdhip64.so", "libgbemu_hip5.so");
    load_torch("rocm5/site-packages/torch/lib/libtorch_cpu.so");
    find_hip("rocm5/site-packages/torch/lib/libamdhip64.so", "gfx906:sramecc+:xnack-");
    void *handle = dlopen(at("rocm5/site-packages/torch/lib/libamdhip64.so"), RTLD_NOW | RTLD_NOLOAD);
    CHECK(handle && dlsym(handle, "hipGetDeviceProperties") && !dlsym(handle, "hipGetDevicePropertiesR0600"));
}

/* PyTorch's ROCm wheels: plain file names in torch/lib, loaded by torch before us. */
IN_CHILD(wheel_with_plain_names)
{
    setenv("GBEMU_PROFILE", "MI210", 1);
    put_hip("plain/site-packages/torch/lib/libamdhip64.so", "libgbemu_hip.so");
    load_torch("plain/site-packages/torch/lib/libtorch_cpu.so");
    CHECK(dlopen(at("plain/site-packages/torch/lib/libamdhip64.so"), RTLD_NOW | RTLD_LOCAL));
    find_hip("plain/site-packages/torch/lib/libamdhip64.so", "gfx90a:sramecc+:xnack-");
}

/* TheRock's wheels: versioned names in a package of their own, and no plain one. */
IN_CHILD(wheel_of_therock)
{
    setenv("GBEMU_PROFILE", "MI300X", 1);
    put_hip("rock/site-packages/_rocm_sdk_core/lib/libamdhip64.so.7", "libgbemu_hip.so");
    load_torch("rock/site-packages/torch/lib/libtorch_cpu.so");
    find_hip("_rocm_sdk_core/lib/libamdhip64.so.7", "gfx942:sramecc+:xnack-");
}

/* Two HIP runtimes: what torch uses is used, and the log names both and the setting. */
IN_CHILD(two_hip_runtimes)
{
    put_hip("two/opt/rocm/lib/libamdhip64.so.6", "libgbemu_hip.so");
    put_hip("two/site-packages/torch/lib/libamdhip64.so", "libgbemu_hip.so");
    load_torch("two/site-packages/torch/lib/libtorch_cpu.so");
    CHECK(dlopen(at("two/opt/rocm/lib/libamdhip64.so.6"), RTLD_NOW | RTLD_LOCAL));
    CHECK(dlopen(at("two/site-packages/torch/lib/libamdhip64.so"), RTLD_NOW | RTLD_LOCAL));
    gb_log_set_sink(keep_line, NULL);
    find_hip("two/site-packages/torch/lib/libamdhip64.so", "gfx942:sramecc+:xnack-");
    CHECK(strstr(logged, "two copies") && strstr(logged, "two/opt/rocm") && strstr(logged, "GPUBRIDGE_HIP_LIB"));
}

/* A compiler that does not know the device: intermediate code of the newest architecture below it. */
IN_CHILD(build_reports_the_log)
{
    char path[PATH_MAX];
    struct gb_device *device = NULL;
    struct gb_module *module = NULL;
    CHECK(gb_device_emulator(GPUBRIDGE_DEVICE_CUDA, path, sizeof path) == 0);
    CHECK(gb_device_open(GPUBRIDGE_DEVICE_CUDA, 0, path, &device) == 0);
    CHECK(gb_device_bind(device) == 0);
    CHECK(gb_module_build(device, "GB_KERNEL void broken(int x) { return undeclared; }", &module) ==
          GPUBRIDGE_ERR_DEVICE);
    CHECK(module == NULL && strstr(gb_err_text(), "undeclared") && strstr(gb_err_text(), "sm_90"));
    gb_device_close(device);
}

static int make_root(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(root, sizeof root, "%s/gb-dl-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    char command[PATH_MAX + 32];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_to_find),
        cmocka_unit_test(test_explicit_path),
        cmocka_unit_test(test_loaded_under_another_name),
        cmocka_unit_test(test_loaded_under_a_hashed_name),
        cmocka_unit_test(test_two_copies),
        cmocka_unit_test(test_package_folder),
        cmocka_unit_test(test_missing_symbol_is_named),
        cmocka_unit_test(test_emulated_cuda),
        cmocka_unit_test(test_emulated_hip),
        cmocka_unit_test(test_emulated_rocm_5),
        cmocka_unit_test(test_wheel_with_plain_names),
        cmocka_unit_test(test_wheel_of_therock),
        cmocka_unit_test(test_two_hip_runtimes),
        cmocka_unit_test(test_build_reports_the_log),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
