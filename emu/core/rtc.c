/* SPDX-License-Identifier: Apache-2.0
 * The run-time compiler under NVRTC's and hipRTC's names.  A text that the library was built with is recognised by its
 * hash and answered at once; any other is compiled by the host's C compiler in a private folder that is removed again.
 * A program belongs to one thread at a time, as in the real libraries.  */
#include "image.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define RTC_INVALID_INPUT   3
#define RTC_INVALID_PROGRAM 4
#define RTC_INVALID_OPTION  5
#define RTC_COMPILATION     6
#define RTC_INTERNAL        11
#define MAX_DEFINES         32

extern char **environ;

struct program {
    struct emu_obj obj;
    char *source, *log, *image;
    size_t image_size;
    char arch[64];
    const char *defines[MAX_DEFINES];
    int define_count;
};
struct job {
    char dir[64], base[96], source[96], text[96], twin[96], object[96], log[96];
};

static void fini_program(void *obj)
{
    struct program *p = obj;
    free(p->source);
    free(p->log);
    free(p->image);
}

bool image_arch_fits(const char *arch)
{
    int theirs = 0, mine = 0;
    size_t n = strcspn(arch, ":");
    /* Intermediate code runs on its architecture and all newer ones. */
    if (sscanf(arch, "compute_%d", &theirs) == 1)
        return sscanf(emu_conf()->arch, "sm_%d", &mine) == 1 && mine >= theirs;
    return n == strcspn(emu_conf()->arch, ":") && !strncmp(arch, emu_conf()->arch, n);
}

const struct emu_twin *image_twins(uint64_t hash)
{
    for (const struct emu_twin_source *const *s = emu_twin_sources; *s; s++)
        if ((*s)->hash == hash) return (*s)->twins;
    return NULL;
}

int emu_rtc_create(const char *source, const char *name, int headers, void **out)
{
    if (!source || headers) return RTC_INVALID_INPUT;
    struct program *p = emu_obj_new(EMU_PROGRAM, sizeof *p, NULL);
    p->obj.fini = fini_program;
    p->source = strdup(source);
    p->log = strdup("");
    if (!p->source || !p->log) abort();
    *out = p;
    return 0;
}

int emu_rtc_destroy(void *handle)
{
    struct program *p = emu_obj_get(EMU_PROGRAM, handle);
    if (!p) return RTC_INVALID_PROGRAM;
    emu_obj_end(p);
    emu_obj_put(p);
    return 0;
}

static void set_log(struct program *p, const char *fmt, const char *what)
{
    char *text = malloc(strlen(fmt) + strlen(what) + 1);
    if (!text) abort();
    const char *at = strstr(fmt, "%s");
    sprintf(text, "%.*s%s%s", (int)(at - fmt), fmt, what, at + 2);
    free(p->log);
    p->log = text;
}

static bool starts(const char *s, const char *prefix, const char **rest)
{
    size_t n = strlen(prefix);
    *rest = s + n;
    return !strncmp(s, prefix, n);
}

/* Known options only, as in the real compilers; what changes the meaning on a CPU is kept. */
static int read_option(struct program *p, const char *o)
{
    static const char *const ignored[] = {"--std=",
                                          "-std=",
                                          "--fmad=false",
                                          "-fmad=false",
                                          "--ftz=false",
                                          "-ftz=false",
                                          "--prec-div=",
                                          "-prec-div=",
                                          "--prec-sqrt=",
                                          "-prec-sqrt=",
                                          "-default-device",
                                          "--device-as-default-execution-space",
                                          "-ffp-contract=off",
                                          "-O",
                                          "-w",
                                          "-lineinfo",
                                          "--generate-line-info",
                                          "-fno-fast-math",
                                          "-Wno-",
                                          NULL};
    const char *rest;
    if (starts(o, "--gpu-architecture=", &rest) || starts(o, "-arch=", &rest) || starts(o, "--offload-arch=", &rest)) {
        snprintf(p->arch, sizeof p->arch, "%s", rest);
        if (emu_arch_known(rest)) return 0;
        set_log(p, "error: invalid value for --gpu-architecture: %s\n", rest);
        return RTC_INVALID_OPTION;
    }
    if (starts(o, "-D", &rest) || starts(o, "--define-macro=", &rest)) {
        if (p->define_count == MAX_DEFINES) return RTC_INVALID_OPTION;
        p->defines[p->define_count++] = rest;
        return 0;
    }
    for (int i = 0; ignored[i]; i++)
        if (starts(o, ignored[i], &rest)) return 0;
    set_log(p, "error: unrecognized option %s\n", o);
    return RTC_INVALID_OPTION;
}

static void set_image(struct program *p, enum image_kind kind, uint64_t hash, const void *bytes, size_t size)
{
    struct image_head head = {.kind = kind, .hash = hash, .size = size};
    memcpy(head.magic, IMAGE_MAGIC, sizeof head.magic);
    snprintf(head.vendor, sizeof head.vendor, "%s", emu_vendor.name);
    snprintf(head.arch, sizeof head.arch, "%s", p->arch);
    free(p->image);
    p->image_size = sizeof head + size;
    p->image = malloc(p->image_size);
    if (!p->image) abort();
    memcpy(p->image, &head, sizeof head);
    if (size) memcpy(p->image + sizeof head, bytes, size);
}

/* Lines before a built-in text may be blank, comments or definitions that a front adds for the real compiler. */
static bool is_harmless_prefix(const char *text, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t line = strcspn(text + i, "\n"), skip = strspn(text + i, " \t");
        const char *p = text + i + skip;
        if (skip < line && strncmp(p, "#define", 7) != 0 && strncmp(p, "#line", 5) != 0 && strncmp(p, "//", 2) != 0)
            return false;
        i += line + 1;
    }
    return true;
}

static bool find_builtin(const char *source, uint64_t *hash)
{
    size_t n = strlen(source);
    for (const struct emu_twin_source *const *s = emu_twin_sources; *s; s++) {
        size_t length = (*s)->length;
        if (length > n || emu_twin_hash(source + n - length, length) != (*s)->hash) continue;
        *hash = (*s)->hash;
        if (is_harmless_prefix(source, n - length)) return true;
    }
    return false;
}

static char *slurp(const char *path, size_t *size)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return NULL;
    char *text = fstat(fd, &st) == 0 ? malloc((size_t)st.st_size + 1) : NULL;
    ssize_t n = text ? read(fd, text, (size_t)st.st_size) : -1;
    close(fd);
    if (n < 0) {
        free(text);
        return NULL;
    }
    text[n] = 0;
    if (size) *size = (size_t)n;
    return text;
}

static bool spill(const char *path, const char *text)
{
    FILE *f = fopen(path, "we");
    if (!f) return false;
    bool ok = fputs(text, f) >= 0;
    return fclose(f) == 0 && ok;
}

static int run_compiler(const char *const *argv, const char *log)
{
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&fa, 2, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t pid;
    int status = -1;
    int rc = posix_spawnp(&pid, argv[0], &fa, NULL, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    if (rc) return rc;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    return status;
}

static const char *compiler(void)
{
    const char *cc = getenv("GBEMU_CC");
    return cc && *cc ? cc : "cc";
}

/* Step 1: macros, so that kernels made by macros are seen; the kernel marker stays in the text. */
static int preprocess(struct program *p, const struct job *j)
{
    const char *argv[MAX_DEFINES * 2 + 32] = {compiler(),
                                              "-E",
                                              "-P",
                                              "-DGBEMU=1",
                                              "-DGB_KERNEL=__gbemu_kernel__",
                                              "-D__global__=__gbemu_kernel__",
                                              "-D__device__=",
                                              "-D__forceinline__=inline",
                                              "-D__launch_bounds__(...)=",

                                              "-DGB_GLOBAL=",
                                              "-DGB_TID=threadIdx.x",
                                              "-DGB_BID=blockIdx.x",
                                              "-DGB_BDIM=blockDim.x",
                                              "-DGB_GDIM=gridDim.x"};
    int n = 0;
    while (argv[n]) n++;
    for (int i = 0; i < p->define_count; i++) {
        argv[n++] = "-D";
        argv[n++] = p->defines[i];
    }
    argv[n++] = "-o";
    argv[n++] = j->text;
    argv[n++] = j->source;
    return run_compiler(argv, j->log);
}

static int compile(const struct job *j)
{
    const char *const argv[] = {compiler(),
                                "-shared",
                                "-fPIC",
                                "-O2",
                                "-w",
                                "-ffp-contract=off",
                                "-fno-fast-math",
                                "-fno-strict-aliasing",
                                "-fvisibility=hidden",
                                "-o",
                                j->object,
                                j->twin,
                                NULL};
    return run_compiler(argv, j->log);
}

static bool open_job(struct job *j, bool cplusplus)
{
    const char *tmp = getenv("TMPDIR");
    if (!tmp || !*tmp || strlen(tmp) > 40) tmp = "/tmp";
    snprintf(j->dir, sizeof j->dir, "%s/gbemu-XXXXXX", tmp);
    if (!mkdtemp(j->dir)) return false;
    const char *ext = cplusplus ? "cpp" : "c";
    snprintf(j->source, sizeof j->source, "%s/source.%s", j->dir, ext);
    snprintf(j->text, sizeof j->text, "%s/text.i", j->dir);
    snprintf(j->twin, sizeof j->twin, "%s/twin.%s", j->dir, ext);
    snprintf(j->object, sizeof j->object, "%s/twin.so", j->dir);
    snprintf(j->log, sizeof j->log, "%s/log", j->dir);
    return true;
}

static void close_job(const struct job *j)
{
    unlink(j->source);
    unlink(j->text);
    unlink(j->twin);
    unlink(j->object);
    unlink(j->log);
    rmdir(j->dir);
}

static int compile_in(struct program *p, const struct job *j, uint64_t hash)
{
    char why[256] = "";
    size_t size = 0;
    if (!spill(j->source, p->source)) return RTC_INTERNAL;
    int rc = preprocess(p, j);
    char *text = rc ? NULL : slurp(j->text, NULL);
    char *twin = text ? emu_twin_generate(text, NULL, 0, 0, why, sizeof why) : NULL;
    free(text);
    if (twin) rc = spill(j->twin, twin) ? compile(j) : -1;
    free(twin);
    char *log = slurp(j->log, NULL);
    char *object = !rc && !why[0] ? slurp(j->object, &size) : NULL;
    if (object)
        set_image(p, IMAGE_OBJECT, hash, object, size);
    else
        set_log(p, "error: the host compiler (GBEMU_CC, default cc) refused the source:\n%s",
                why[0]        ? why
                : log && *log ? log
                              : "it could not be started");
    free(log);
    free(object);
    return p->image ? 0 : RTC_COMPILATION;
}

int emu_rtc_compile(void *handle, int count, const char *const *options)
{
    struct program *p = emu_obj_get(EMU_PROGRAM, handle);
    if (!p) return RTC_INVALID_PROGRAM;
    int rc = 0;
    p->define_count = 0;
    snprintf(p->arch, sizeof p->arch, "%s", emu_conf()->arch);
    for (int i = 0; i < count && !rc; i++) rc = read_option(p, options[i]);
    uint64_t hash = 0;
    enum emu_rtc_mode mode = emu_conf()->rtc;
    if (rc) {
    } else if (mode != EMU_RTC_GCC && !p->define_count && find_builtin(p->source, &hash)) {
        set_image(p, IMAGE_TWIN, hash, NULL, 0);
    } else if (mode == EMU_RTC_TWIN) {
        set_log(p, "error: %s\n", "GBEMU_RTC=twin, and the source is not one this library was built with");
        rc = RTC_COMPILATION;
    } else {
        struct job j;
        bool is_cpp = !strstr(p->source, "GB_KERNEL");
        rc = RTC_INTERNAL;
        if (open_job(&j, is_cpp)) {
            rc = compile_in(p, &j, emu_twin_hash(p->source, strlen(p->source)));
            close_job(&j);
        }
    }
    emu_obj_put(p);
    return rc;
}

int emu_rtc_size(void *handle, enum emu_rtc_what what, size_t *out)
{
    bool log = what == EMU_RTC_LOG;
    struct program *p = emu_obj_get(EMU_PROGRAM, handle);
    if (!p) return RTC_INVALID_PROGRAM;
    bool ok = log || p->image;
    /* There is no machine code for an intermediate architecture. */
    bool none = !log && what == EMU_RTC_BINARY && !strncmp(p->arch, "compute_", 8);
    if (ok) *out = log ? strlen(p->log) + 1 : none ? 0 : p->image_size;
    emu_obj_put(p);
    return ok ? 0 : RTC_INVALID_PROGRAM;
}

int emu_rtc_read(void *handle, enum emu_rtc_what what, char *out)
{
    bool log = what == EMU_RTC_LOG;
    struct program *p = emu_obj_get(EMU_PROGRAM, handle);
    if (!p) return RTC_INVALID_PROGRAM;
    bool ok = log || p->image;
    if (log)
        strcpy(out, p->log);
    else if (ok)
        memcpy(out, p->image, p->image_size);
    emu_obj_put(p);
    return ok ? 0 : RTC_INVALID_PROGRAM;
}
