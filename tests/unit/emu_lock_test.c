/* SPDX-License-Identifier: Apache-2.0
 * The driver's locks as measured on hardware: a gate is closed on one stream, thread A does something, thread B tries
 * the ordinary calls on another stream, and only then the gate opens.  Which of them stand still is a table.  */
#include "emu_test.h"

static const char kernel_source[] =
    "GB_KERNEL void touch(unsigned *p) { if (GB_TID == 0 && GB_BID == 0) *p = 1; }\n"
    "GB_KERNEL void touch_again(unsigned *p) { if (GB_TID == 0 && GB_BID == 0) *p = 2; }\n";

static struct {
    void *context;
    void *gated, *stream_a, *stream_b, *event;
    uint32_t gate, word;
    devptr victim; /* device memory that A frees */
    void *pinned, *module, *image;
    void *loaded, *fresh; /* functions: launched before, never launched */
    _Atomic int a_started, a_done, b_started, b_done;
} t;

static void launch(void *function, void *stream)
{
    uint32_t *word = &t.word;
    void *args[] = {&word};
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, args, NULL));
}

/* Compiles kernel_source; the image. */
static void *compile(void)
{
    void *program, *image;
    size_t n = 0;
    OK(nvrtcCreateProgram(&program, kernel_source, "k.cu", 0, NULL, NULL));
    OK(nvrtcCompileProgram(program, 0, NULL));
    OK(nvrtcGetCUBINSize(program, &n));
    CHECK((image = malloc(n)) != NULL);
    OK(nvrtcGetCUBIN(program, image));
    OK(nvrtcDestroyProgram(&program));
    return image;
}

/* ---- what A does ---- */
static void a_loaded_kernel(void)
{
    launch(t.loaded, t.stream_a);
}
static void a_fresh_kernel(void)
{
    launch(t.fresh, t.stream_a);
}
static void a_free(void)
{
    OK(cuMemFree_v2(t.victim));
}
static void a_free_pinned(void)
{
    OK(cuMemFreeHost(t.pinned));
}

static void a_alloc(void)
{
    devptr p;
    OK(cuMemAlloc_v2(&p, 1 << 20));
}

static void a_alloc_pinned(void)
{
    void *p;
    OK(cuMemHostAlloc(&p, 1 << 20, 3));
}

static void a_load_module(void)
{
    void *m;
    OK(cuModuleLoadData(&m, t.image));
}

static void a_create_comm(void)
{
    struct nccl_id id;
    void *comm;
    float x = 1;
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&comm, 1, id, 0));
    OK(ncclAllReduce(&x, &x, 1, 7, 0, comm, t.stream_a));
    OK(cuStreamSynchronize(t.stream_a));
    OK(ncclCommDestroy(comm));
}

/* ---- what B does: the calls of an engine ---- */
static void b_calls(void)
{
    uint32_t to = 0;
    OK(cuMemcpyAsync(dev(&to), dev(&t.word), 4, t.stream_b));
    launch(t.loaded, t.stream_b);
    OK(cuEventRecord(t.event, t.stream_b));
    int rc = cuEventQuery(t.event);
    CHECK(rc == 0 || rc == 600);
    OK(cuStreamSynchronize(t.stream_b));
}

static void *thread_a(void *arg)
{
    void (*fn)(void) = *(void (**)(void))arg;
    OK(cuCtxSetCurrent(t.context));
    atomic_store(&t.a_started, 1);
    fn();
    atomic_store(&t.a_done, 1);
    return NULL;
}

static void *thread_b(void *arg)
{
    OK(cuCtxSetCurrent(t.context));
    atomic_store(&t.b_started, 1);
    b_calls();
    atomic_store(&t.b_done, 1);
    return NULL;
}

static void set_up(void)
{
    open_cuda();
    use_device(0);
    OK(cuCtxGetCurrent(&t.context));
    t.gated = new_stream();
    t.stream_a = new_stream();
    t.stream_b = new_stream();
    OK(cuEventCreate(&t.event, 2));
    OK(cuMemAlloc_v2(&t.victim, 4096));
    OK(cuMemHostAlloc(&t.pinned, 4096, 3));
    t.image = compile();
    OK(cuModuleLoadData(&t.module, t.image));
    OK(cuModuleGetFunction(&t.loaded, t.module, "touch"));
    OK(cuModuleGetFunction(&t.fresh, t.module, "touch_again"));
    launch(t.loaded, t.stream_a);
    OK(cuStreamSynchronize(t.stream_a));
    CHECK(t.word == 1);
}

struct row {
    void (*a)(void);
    bool a_blocks, b_blocks;
};

static void scenario(void *arg)
{
    struct row *row = arg;
    pthread_t a, b;
    set_up();
    OK(cuStreamWaitValue32_v2(t.gated, dev(&t.gate), 1, 0));
    OK(pthread_create(&a, NULL, thread_a, &row->a));
    EVENTUALLY(&t.a_started, 1);
    if (row->a_blocks)
        NOT_YET(&t.a_done, 1);
    else
        EVENTUALLY(&t.a_done, 1);
    OK(pthread_create(&b, NULL, thread_b, NULL));
    EVENTUALLY(&t.b_started, 1);
    if (row->b_blocks)
        NOT_YET(&t.b_done, 1);
    else
        EVENTUALLY(&t.b_done, 1);
    CHECK(atomic_load(&t.a_done) == !row->a_blocks);
    __atomic_store_n(&t.gate, 1, __ATOMIC_RELEASE);
    OK(pthread_join(a, NULL));
    OK(pthread_join(b, NULL));
    OK(cuStreamSynchronize(t.gated));
}

static void run_row(void (*a)(void), bool a_blocks, bool b_blocks, const char *loading)
{
    struct row row = {a, a_blocks, b_blocks};
    const char *const env[] = {loading, NULL};
    assert_int_equal(in_child(scenario, &row, env), 0);
}

#define LAZY  "CUDA_MODULE_LOADING=LAZY"
#define EAGER "CUDA_MODULE_LOADING=EAGER"

static void test_frees(void **state)
{
    run_row(a_free, true, true, LAZY);
    run_row(a_free_pinned, true, true, LAZY);
}

static void test_launch(void **state)
{
    run_row(a_loaded_kernel, false, false, LAZY);
    run_row(a_fresh_kernel, true, false, LAZY);
    run_row(a_fresh_kernel, false, false, EAGER);
}

static void test_module_load(void **state)
{
    run_row(a_load_module, false, false, LAZY);
    run_row(a_load_module, true, true, EAGER);
}

static void test_allocs(void **state)
{
    run_row(a_alloc, false, false, LAZY);
    run_row(a_alloc_pinned, false, false, LAZY);
}

static void test_create_comm(void **state)
{
    run_row(a_create_comm, false, false, LAZY);
}

/* HIP is taken to behave alike: hipFree waits, and holds other threads' calls. */
static void *hip_free(void *p)
{
    atomic_store(&t.a_started, 1);
    OK(hipFree(p));
    atomic_store(&t.a_done, 1);
    return NULL;
}

static void *hip_copy(void *stream)
{
    uint32_t to = 0;
    atomic_store(&t.b_started, 1);
    OK(hipMemcpyAsync(&to, &t.word, 4, 4, stream));
    OK(hipStreamSynchronize(stream));
    atomic_store(&t.b_done, 1);
    return NULL;
}

static void hip_scenario(void *arg)
{
    void *gated, *stream, *p;
    pthread_t a, b;
    open_hip();
    OK(hipStreamCreateWithPriority(&gated, 1, 0));
    OK(hipStreamCreateWithPriority(&stream, 1, 0));
    OK(hipMalloc(&p, 64));
    OK(hipStreamWaitValue32(gated, &t.gate, 1, 0, 0xffffffffu));
    OK(pthread_create(&a, NULL, hip_free, p));
    EVENTUALLY(&t.a_started, 1);
    NOT_YET(&t.a_done, 1);
    OK(pthread_create(&b, NULL, hip_copy, stream));
    EVENTUALLY(&t.b_started, 1);
    NOT_YET(&t.b_done, 1);
    __atomic_store_n(&t.gate, 1, __ATOMIC_RELEASE);
    OK(pthread_join(a, NULL));
    OK(pthread_join(b, NULL));
}

static void test_hip_free(void **state)
{
    CHILD(hip_scenario, LAZY);
}

/* The rule behind the table: an operation enqueued in advance, with nothing but flags between its parts, ends although
 * another thread frees memory meanwhile; the network thread makes no driver call. */
static void *network(void *arg)
{
    uint32_t *flags = arg;
    for (int i = 0; i < 8; i++) {
        while (!__atomic_load_n(&flags[2 * i], __ATOMIC_ACQUIRE)) sched_yield();
        __atomic_store_n(&flags[2 * i + 1], 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void pipeline(void *arg)
{
    static uint32_t flags[16], data[8], landed[8];
    void (*fn)(void) = a_free;
    pthread_t a, n;
    set_up();
    for (int i = 0; i < 8; i++) {
        OK(cuStreamWriteValue32_v2(t.stream_a, dev(&data[i]), (unsigned)i + 1, 0));
        OK(cuStreamWriteValue32_v2(t.stream_a, dev(&flags[2 * i]), 1, 0));
        OK(cuStreamWaitValue32_v2(t.stream_b, dev(&flags[2 * i + 1]), 1, 0));
        OK(cuMemcpyAsync(dev(&landed[i]), dev(&data[i]), 4, t.stream_b));
    }
    OK(pthread_create(&a, NULL, thread_a, &fn));
    EVENTUALLY(&t.a_started, 1);
    OK(pthread_create(&n, NULL, network, flags));
    OK(pthread_join(n, NULL));
    OK(pthread_join(a, NULL));
    OK(cuStreamSynchronize(t.stream_b));
    for (uint32_t i = 0; i < 8; i++) CHECK(landed[i] == i + 1);
}

static void test_pipeline(void **state)
{
    CHILD(pipeline, LAZY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frees),    cmocka_unit_test(test_launch),      cmocka_unit_test(test_module_load),
        cmocka_unit_test(test_allocs),   cmocka_unit_test(test_create_comm), cmocka_unit_test(test_pipeline),
        cmocka_unit_test(test_hip_free),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
