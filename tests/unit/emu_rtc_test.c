/* SPDX-License-Identifier: Apache-2.0
 * Emulated run-time compilation and kernels: built-in twins and the host compiler give the same results, images refuse
 * the wrong device, blocks run in random order, pointers are found in guarded memory, timed kernels occupy a stream. */
#include "emu_test.h"

static char *read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    CHECK(f != NULL);
    char *text = calloc(1, 1 << 20);
    CHECK(text != NULL && fread(text, 1, (1 << 20) - 1, f) > 0);
    fclose(f);
    return text;
}

static void *stream;

/* NULL when the compiler refuses; then `log` is filled. */
static void *compile(const char *source, const char *option, char *log)
{
    void *program, *image = NULL;
    size_t n = 0;
    OK(nvrtcCreateProgram(&program, source, "k.cu", 0, NULL, NULL));
    int rc = nvrtcCompileProgram(program, option ? 1 : 0, &option);
    if (rc == 0) {
        OK(nvrtcGetCUBINSize(program, &n));
        CHECK((image = malloc(n)) != NULL);
        OK(nvrtcGetCUBIN(program, image));
    } else {
        OK(nvrtcGetProgramLogSize(program, &n));
        CHECK(n < 4096);
        OK(nvrtcGetProgramLog(program, log));
        CHECK(nvrtcGetCUBINSize(program, &n) != 0);
    }
    OK(nvrtcDestroyProgram(&program));
    CHECK(program == NULL);
    return image;
}

static void *function_of(const void *image, const char *name)
{
    void *module, *function;
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&function, module, name));
    CHECK(cuModuleGetFunction(&module, module, "no_such_kernel") == 500);
    return function;
}

static void launch(void *function, unsigned grid, unsigned block, void **args)
{
    OK(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, args, NULL));
}

static void set_up(void)
{
    open_cuda();
    use_device(0);
    stream = new_stream();
}

static devptr upload(const void *p, size_t n)
{
    devptr d;
    OK(cuMemAlloc_v2(&d, n));
    OK(cuMemcpyHtoDAsync_v2(d, p, n, stream));
    OK(cuStreamSynchronize(stream));
    return d;
}

static void check_demo(const void *image)
{
    enum { N = 10007 };
    static float a[N], b[N], out[N];
    for (int i = 0; i < N; i++) a[i] = (float)i * 0.5f, b[i] = (float)(i % 7);
    devptr da = upload(a, sizeof a), db = upload(b, sizeof b), dout = upload(out, sizeof out);
    unsigned long long n = N;
    void *args[] = {&dout, &da, &db, &n};
    launch(function_of(image, "demo_add"), 13, 64, args);
    n = 0; /* arguments were copied by the call */
    struct {
        devptr in, out;
        float factor;
        unsigned n;
    } by_value = {dout, da, 3.0f, N};
    void *one[] = {&by_value};
    launch(function_of(image, "demo_scale"), 3, 128, one);
    OK(cuMemcpyDtoHAsync_v2(out, da, sizeof out, stream));
    OK(cuStreamSynchronize(stream));
    for (int i = 0; i < N; i++) CHECK(out[i] == ((float)i * 0.5f + (float)(i % 7)) * 3.0f);
}

/* Every block once, not in order. */
static void check_order(const void *image)
{
    enum { N = 1000 };
    static uint32_t order[N + 1];
    uint32_t sorted = 0;
    bool seen[N] = {false};
    uint32_t *next = &order[N], *where = order;
    void *args[] = {&next, &where};
    launch(function_of(image, "demo_order"), N, 4, args);
    OK(cuStreamSynchronize(stream));
    for (uint32_t i = 0; i < N; i++) {
        CHECK(order[i] < N && !seen[order[i]]);
        seen[order[i]] = true;
        sorted += order[i] == i;
    }
    CHECK(sorted < N / 2);
}

static void demo(void *arg)
{
    char log[4096];
    set_up();
    void *image = compile(read_text(GBEMU_DEMO_KERNELS), "--gpu-architecture=sm_90", log);
    CHECK(image != NULL);
    check_demo(image);
    check_order(image);
}

static void add_any_grid(void *arg)
{
    char log[4096];
    set_up();
    check_demo(compile(read_text(GBEMU_DEMO_KERNELS), NULL, log));
}

/* A source of nobody's, in CUDA's own words. */
static void foreign(void *arg)
{
    static const char source[] =
        "__device__ static int twice(int x) { return 2 * x; }\n"
        "#define MAKE(NAME, TYPE) \\\n"
        "extern \"C\" __global__ void __launch_bounds__(64) NAME(TYPE *p, const TYPE add) { \\\n"
        "    p[blockIdx.x * blockDim.x + threadIdx.x] += twice((int)add) + OFFSET; }\n"
        "MAKE(add_int, int)\nMAKE(add_double, double)\n";
    int x[128] = {0}, add = 4;
    double y[128] = {0}, addd = 5;
    char log[4096];
    set_up();
    void *image = compile(source, "-DOFFSET=100", log);
    if (!image) fputs(log, stderr);
    CHECK(image != NULL);
    int *px = x;
    double *py = y;
    void *args[] = {&px, &add}, *argsd[] = {&py, &addd};
    launch(function_of(image, "add_int"), 2, 64, args);
    launch(function_of(image, "add_double"), 2, 64, argsd);
    OK(cuStreamSynchronize(stream));
    for (int i = 0; i < 128; i++) CHECK(x[i] == 108 && y[i] == 110);
    /* What it does not compile, it says why. */
    CHECK(!compile("extern \"C\" __global__ void bad(int *p) { *p = nonsense; }", NULL, log));
    CHECK(strstr(log, "nonsense") != NULL);
    CHECK(!compile(source, "--no-such-option", log));
    CHECK(strstr(log, "unrecognized option --no-such-option") != NULL);
}

static void twin_only(void *arg)
{
    char log[4096], *text = read_text(GBEMU_DEMO_KERNELS), *longer = calloc(1, strlen(text) + 100);
    CHECK(longer != NULL);
    set_up();
    /* Definitions in front do not change a built-in text; anything else does. */
    sprintf(longer, "#define FRONT 1\n%s", text);
    CHECK(compile(longer, NULL, log) != NULL);
    sprintf(longer, "%s\n// changed\n", text);
    CHECK(compile(longer, NULL, log) == NULL && strstr(log, "GBEMU_RTC=twin"));
}

static void images(void *arg)
{
    char log[4096], *text = read_text(GBEMU_DEMO_KERNELS);
    void *m, *f;
    set_up();
    CHECK(cuModuleLoadData(&m, "not an image at all, and long enough to be read as one, which is what a cache may hold"
                               "............................................................................") == 200);
    void *other = compile(text, "--gpu-architecture=sm_80", log);
    CHECK(cuModuleLoadData(&m, other) == 209);
    CHECK(!compile(text, "--gpu-architecture=sm_70", log) && strstr(log, "sm_70")); /* gone from the compiler */
    void *image = compile(text, NULL, log);
    OK(cuModuleLoadData(&m, image));
    OK(cuModuleGetFunction(&f, m, "demo_add"));
    OK(cuModuleUnload(m));
    CHECK(cuModuleUnload(m) == 400);
    CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 400);
}

/* A device that the compiler does not know yet: no machine code, but intermediate code, of an older one only. */
static void intermediate(void *arg)
{
    static const char *const options[] = {"--gpu-architecture=compute_121", "--gpu-architecture=compute_120"};
    void *program, *m;
    size_t n = 1;
    set_up();
    for (int i = 0; i < 2; i++) {
        OK(nvrtcCreateProgram(&program, read_text(GBEMU_DEMO_KERNELS), "k.cu", 0, NULL, NULL));
        OK(nvrtcCompileProgram(program, 1, &options[i]));
        OK(nvrtcGetCUBINSize(program, &n));
        CHECK(n == 0);
        OK(nvrtcGetPTXSize(program, &n));
        char *image = malloc(n);
        CHECK(image != NULL);
        OK(nvrtcGetPTX(program, image));
        OK(nvrtcDestroyProgram(&program));
        CHECK(cuModuleLoadData(&m, image) == (i ? 0 : 209));
        free(image);
    }
}

static void bad_launches(void *arg)
{
    char log[4096];
    set_up();
    void *image = compile(read_text(GBEMU_DEMO_KERNELS), NULL, log);
    void *f = function_of(image, "demo_order");
    void *none[] = {NULL, NULL};
    CHECK(cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, stream, none, NULL) == 1);
    CHECK(cuLaunchKernel(f, 1, 1, 1, 1025, 1, 1, 0, stream, none, NULL) == 1);
    CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, none, NULL) == 1);
    CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL) == 1);
}

/* Occupies its stream for the time asked for, not the processor. */
static void busy(void *arg)
{
    uint32_t us = 200000;
    char log[4096];
    void *args[] = {&us};
    struct timespec cpu0, cpu1;
    set_up();
    void *f = function_of(compile(read_text(GBEMU_DEMO_KERNELS), NULL, log), "gbemu_busy");
    double t = now_s();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu0);
    launch(f, 4, 1, args);
    OK(cuStreamSynchronize(new_stream()));
    CHECK(cuStreamQuery(stream) == 600);
    OK(cuStreamSynchronize(stream));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu1);
    CHECK(now_s() - t >= 0.2);
    double used = (double)(cpu1.tv_sec - cpu0.tv_sec) + (double)(cpu1.tv_nsec - cpu0.tv_nsec) * 1e-9;
    CHECK(used < 0.1);
}

static void hip(void *arg)
{
    void *program, *image, *module, *f, *s;
    size_t n = 0;
    float a[64], b[64], out[64];
    float *pa = a, *pb = b, *po = out;
    unsigned long long count = 64;
    const char *option = "--offload-arch=gfx942";
    void *args[] = {&po, &pa, &pb, &count};
    open_hip();
    OK(hipStreamCreateWithPriority(&s, 1, 0));
    for (int i = 0; i < 64; i++) a[i] = (float)i, b[i] = 1;
    OK(hiprtcCreateProgram(&program, read_text(GBEMU_DEMO_KERNELS), "k.hip", 0, NULL, NULL));
    OK(hiprtcCompileProgram(program, 1, &option));
    OK(hiprtcGetCodeSize(program, &n));
    CHECK((image = malloc(n)) != NULL);
    OK(hiprtcGetCode(program, image));
    OK(hiprtcDestroyProgram(&program));
    OK(hipModuleLoadData(&module, image));
    OK(hipModuleGetFunction(&f, module, "demo_add"));
    OK(hipModuleLaunchKernel(f, 2, 1, 1, 16, 1, 1, 0, s, args, NULL));
    OK(hipStreamSynchronize(s));
    for (int i = 0; i < 64; i++) CHECK(out[i] == (float)i + 1);
}

static void test_demo(void **state)
{
    CHILD(demo, "GBEMU_RTC=twin");
    CHILD(demo, "GBEMU_RTC=gcc");
    CHILD(demo, "GBEMU_RTC=auto", "GBEMU_GUARD=1");
    CHILD(demo, "GBEMU_RTC=gcc", "GBEMU_GUARD=1");
    CHILD(add_any_grid, "GBEMU_ONE_THREAD=1");
}

static void test_foreign(void **state)
{
    CHILD(foreign, "GBEMU_RTC=auto");
    CHILD(twin_only, "GBEMU_RTC=twin");
}

static void test_images(void **state)
{
    CHILD(images, "GBEMU_ARCH=sm_90");
    CHILD(intermediate, "GBEMU_ARCH=sm_120");
    CHILD(bad_launches, "GBEMU_SEED=1");
}

static void test_busy(void **state)
{
    CHILD(busy, "GBEMU_DELAY_US=0");
}
static void test_hip(void **state)
{
    CHILD(hip, "GBEMU_RTC=twin");
    CHILD(hip, "GBEMU_RTC=gcc");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_demo), cmocka_unit_test(test_foreign), cmocka_unit_test(test_images),
        cmocka_unit_test(test_busy), cmocka_unit_test(test_hip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
