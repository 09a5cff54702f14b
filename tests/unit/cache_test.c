/* SPDX-License-Identifier: Apache-2.0
 * The cache of compiled kernels, with the emulators' compilers: hits, damage, keys, folders that cannot be written, and
 * one compiler among many processes.  Every case runs in a child with a folder of its own. */
#include "base/err.h"
#include "base/log.h"
#include "device/device.h"

#include <gpubridge/gpubridge.h>

#include <dirent.h>
#include <fcntl.h>
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

static char root[PATH_MAX];

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: CHECK(%s) failed: %s\n", __FILE__, __LINE__, #cond, gb_err_text());                \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Not one of the kernels that the emulators know: their compiler works for it, and for some time. */
static const char source[] = "GB_KERNEL void twice(int *x) { if (GB_TID == 0 && GB_BID == 0) x[0] *= 2; }\n";
static const char other_source[] = "GB_KERNEL void twice(int *x) { if (GB_TID == 0 && GB_BID == 0) x[0] *= 3; }\n";

static struct gb_device *open_device(int kind, const char *dir)
{
    char path[PATH_MAX];
    struct gb_device *device = NULL;
    CHECK(gb_device_emulator(kind, path, sizeof path) == 0);
    CHECK(gb_device_open(kind, 0, path, &device) == 0);
    CHECK(gb_device_bind(device) == 0);
    gb_device_set_cache(device, dir);
    return device;
}

/* Builds, runs the kernel on 21, and says whether the image came from the cache. */
static int build(struct gb_device *device, const char *text, int want)
{
    struct gb_module *module = NULL;
    void *kernel = NULL, *stream = NULL, *event = NULL, *word = NULL, *args[] = {&word};
    CHECK(gb_module_build(device, text, &module) == 0);
    CHECK(gb_module_kernel(device, module, "twice", &kernel) == 0);
    CHECK(gb_stream_create(device, &stream) == 0 && gb_event_create(device, &event) == 0);
    CHECK(gb_device_host_alloc(device, 64, &word) == 0);
    *(int *)word = 21;
    CHECK(gb_stream_launch(device, stream, kernel, 2, 32, args) == 0 && gb_event_record(device, event, stream) == 0);
    int rc;
    while ((rc = gb_event_query(device, event)) == GPUBRIDGE_AGAIN) usleep(100);
    CHECK(rc == 0 && *(int *)word == want);
    int cached = gb_module_was_cached(module);
    gb_device_host_free(device, word);
    gb_event_destroy(device, event);
    gb_stream_destroy(device, stream);
    gb_module_destroy(device, module);
    return cached;
}

/* The only entry of the folder, or "". */
static void entry(const char *dir, const char *end, char *path, int *count)
{
    DIR *d = opendir(dir);
    *path = 0;
    *count = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        size_t n = strlen(e->d_name), m = strlen(end);
        if (n < m || strcmp(e->d_name + n - m, end) != 0) continue;
        snprintf(path, PATH_MAX, "%.2000s/%s", dir, e->d_name);
        ++*count;
    }
    if (d) closedir(d);
}

static void damage(const char *path, off_t at, off_t length)
{
    int fd = open(path, O_RDWR);
    unsigned char byte;
    CHECK(fd >= 0);
    if (at >= 0) {
        CHECK(pread(fd, &byte, 1, at) == 1);
        byte ^= 0x40;
        CHECK(pwrite(fd, &byte, 1, at) == 1);
    }
    if (length >= 0) CHECK(ftruncate(fd, length) == 0);
    close(fd);
}

static void hits_and_damage(int kind)
{
    char dir[PATH_MAX + 32], path[PATH_MAX];
    int count;
    snprintf(dir, sizeof dir, "%s/a/b/c%d", root, kind); /* made with its parents */
    struct gb_device *device = open_device(kind, dir);
    CHECK(build(device, source, 42) == 0);
    entry(dir, ".bin", path, &count);
    CHECK(count == 1);
    CHECK(build(device, source, 42) == 1);
    CHECK(build(device, other_source, 63) == 0); /* another text, another entry */
    CHECK(build(device, other_source, 63) == 1);
    entry(dir, ".bin", path, &count);
    CHECK(count == 2);
    entry(dir, ".part", path, &count);
    CHECK(count == 0);
    gb_device_close(device);
}

static void damaged(int kind)
{
    char dir[PATH_MAX + 32], path[PATH_MAX];
    int count;
    struct stat st;
    snprintf(dir, sizeof dir, "%s/d%d", root, kind);
    struct gb_device *device = open_device(kind, dir);
    CHECK(build(device, source, 42) == 0);
    entry(dir, ".bin", path, &count);
    CHECK(count == 1 && stat(path, &st) == 0);
    /* Head, key, checksum, image, and lengths around the right one. */
    const off_t at[] = {0, 9, 20, 40, 60, st.st_size - 1};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        damage(path, at[i], -1);
        CHECK(build(device, source, 42) == 0);
        CHECK(build(device, source, 42) == 1); /* mended */
    }
    const off_t lengths[] = {0, 7, 48, st.st_size - 1, st.st_size + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        damage(path, -1, lengths[i]);
        CHECK(build(device, source, 42) == 0);
        CHECK(build(device, source, 42) == 1);
    }
    CHECK(chmod(path, 0666) == 0); /* anybody could have written it */
    CHECK(build(device, source, 42) == 0);
    gb_device_close(device);
}

static char logged[4096];

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg;
    if (level <= GB_LOG_WARN) snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s\n", line);
}

static void nowhere_to_write(int kind)
{
    struct gb_device *device = open_device(kind, "/dev/null/cache");
    gb_log_set_sink(keep_line, NULL);
    CHECK(build(device, source, 42) == 0);
    CHECK(strstr(logged, "GPUBRIDGE_CACHE_DIR"));
    CHECK(strchr(logged, '\n') == strrchr(logged, '\n')); /* once */
    gb_device_set_cache(device, "off");
    logged[0] = 0;
    CHECK(build(device, source, 42) == 0 && build(device, source, 42) == 0 && logged[0] == 0);
    gb_device_close(device);
}

/* The other architecture must not be given this one's code. */
static void architectures(int kind)
{
    char dir[PATH_MAX + 32], path[PATH_MAX];
    int count, status;
    snprintf(dir, sizeof dir, "%s/x%d", root, kind);
    static const char *const archs[2][2] = {{"sm_80", "sm_90"}, {"gfx90a:sramecc+:xnack-", "gfx90a:sramecc+:xnack+"}};
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            setenv("GBEMU_ARCH", archs[kind == GPUBRIDGE_DEVICE_HIP][i], 1);
            struct gb_device *device = open_device(kind, dir);
            CHECK(build(device, source, 42) == 0);
            gb_device_close(device);
            _exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    entry(dir, ".bin", path, &count);
    CHECK(count == 2);
}

#define CROWD 8

static void one_compiler(int kind)
{
    char dir[PATH_MAX + 32];
    pid_t pid[CROWD];
    int compiled = 0, status;
    snprintf(dir, sizeof dir, "%s/crowd%d", root, kind);
    for (int i = 0; i < CROWD; i++) {
        pid[i] = fork();
        if (pid[i] == 0) {
            struct gb_device *device = open_device(kind, dir);
            int cached = build(device, source, 42);
            gb_device_close(device);
            _exit(cached ? 10 : 11);
        }
    }
    for (int i = 0; i < CROWD; i++) {
        CHECK(waitpid(pid[i], &status, 0) == pid[i] && WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 10 || WEXITSTATUS(status) == 11);
        compiled += WEXITSTATUS(status) == 11;
    }
    CHECK(compiled == 1);
}

static void in_children(void (*body)(int kind))
{
    for (int kind = GPUBRIDGE_DEVICE_CUDA; kind <= GPUBRIDGE_DEVICE_HIP; kind++) {
        int status = 0;
        pid_t pid = fork();
        if (pid == 0) {
            body(kind);
            _exit(0);
        }
        assert_true(pid > 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
}

#define TEST(name)                                                                                                     \
    static void test_##name(void **state)                                                                              \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        in_children(name);                                                                                             \
    }
TEST(hits_and_damage)
TEST(damaged)
TEST(nowhere_to_write)
TEST(architectures)
TEST(one_compiler)

static int make_root(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(root, sizeof root, "%s/gb-cache-XXXXXX", tmp && *tmp ? tmp : "/tmp");
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
        cmocka_unit_test(test_hits_and_damage),  cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_nowhere_to_write), cmocka_unit_test(test_architectures),
        cmocka_unit_test(test_one_compiler),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
