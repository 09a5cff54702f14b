/* SPDX-License-Identifier: Apache-2.0
 * Emulated streams: asynchrony, order by events and flags, default streams, host functions, the bounded queue, capture
 * state, contexts, policing, injected faults.  Both vendors where they differ.  */
#include "emu_test.h"

static uint32_t load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static void store(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

/* ---- asynchrony and order ---- */
/* A call returns before its work runs: a closed gate in front proves it without any clock. */
static void asynchrony(void *arg)
{
    uint32_t gate = 0, a = 1, b = 2;
    void *e;
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuEventCreate(&e, 2));
    CHECK(cuEventQuery(e) == 0); /* never recorded */
    OK(cuEventSynchronize(e));
    OK(cuStreamWaitEvent(s, e, 0));
    CHECK(cuStreamQuery(s) == 0);
    OK(cuStreamWaitValue32_v2(s, dev(&gate), 1, 0));
    OK(cuMemcpyAsync(dev(&b), dev(&a), 4, s));
    OK(cuEventRecord(e, s));
    CHECK(cuStreamQuery(s) == 600 && cuEventQuery(e) == 600);
    CHECK(gbemu_pending(0) == 3);
    a = 77; /* read when the copy runs, not when it is queued */
    CHECK(b == 2);
    store(&gate, 1);
    OK(cuEventSynchronize(e));
    CHECK(b == 77 && cuEventQuery(e) == 0);
    OK(cuStreamSynchronize(s));
    CHECK(gbemu_pending(0) == 0);
}

/* Two streams hand a counter to each other through write-value and wait-value, 200 times. */
static void flags_across_streams(void *arg)
{
    enum { ROUNDS = 200 };
    static uint32_t ping, pong, log[2 * ROUNDS];
    open_cuda();
    use_device(0);
    void *s = new_stream(), *t = new_stream();
    for (uint32_t i = 0; i < ROUNDS; i++) {
        OK(cuStreamWriteValue32_v2(s, dev(&log[2 * i]), i + 1, 0));
        OK(cuStreamWriteValue32_v2(s, dev(&ping), i + 1, 0));
        OK(cuStreamWaitValue32_v2(s, dev(&pong), i + 1, 0));
        OK(cuStreamWaitValue32_v2(t, dev(&ping), i + 1, 1 /* EQ: the other side cannot run ahead */));
        OK(cuMemcpyAsync(dev(&log[2 * i + 1]), dev(&log[2 * i]), 4, t));
        OK(cuStreamWriteValue32_v2(t, dev(&pong), i + 1, 0));
    }
    OK(cuStreamSynchronize(s));
    OK(cuStreamSynchronize(t));
    for (uint32_t i = 0; i < ROUNDS; i++) CHECK(log[2 * i] == i + 1 && log[2 * i + 1] == i + 1);
}

/* An event holds what was recorded at the wait, not what is recorded later. */
static void events_across_streams(void *arg)
{
    static uint32_t gate, gate2, x, y;
    void *e;
    open_cuda();
    use_device(0);
    void *s = new_stream(), *t = new_stream(), *u = new_stream();
    OK(cuEventCreate(&e, 2));
    OK(cuStreamWaitValue32_v2(s, dev(&gate), 1, 0));
    OK(cuStreamWriteValue32_v2(s, dev(&x), 5, 0));
    OK(cuEventRecord(e, s));
    OK(cuStreamWaitEvent(t, e, 0));
    OK(cuMemcpyAsync(dev(&y), dev(&x), 4, t));
    /* Recorded again behind another gate: `t` still waits for the first record. */
    OK(cuStreamWaitValue32_v2(u, dev(&gate2), 1, 0));
    OK(cuEventRecord(e, u));
    OK(cuEventDestroy_v2(e)); /* allowed: the waits keep what they need */
    CHECK(cuStreamQuery(t) == 600);
    store(&gate, 1);
    OK(cuStreamSynchronize(t));
    CHECK(y == 5 && cuStreamQuery(u) == 600);
    store(&gate2, 1);
    OK(cuStreamSynchronize(u));
}

/* Wait-value modes; GEQ is cyclic on CUDA. */
static void cuda_compare(void *arg)
{
    uint32_t flag = 5;
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuStreamWaitValue32_v2(s, dev(&flag), 0xfffffff0u, 0)); /* 5 is after 0xfffffff0 */
    OK(cuStreamWaitValue32_v2(s, dev(&flag), 5, 1));
    OK(cuStreamWaitValue32_v2(s, dev(&flag), 4, 2));
    OK(cuStreamWaitValue32_v2(s, dev(&flag), 5, 3));
    OK(cuStreamWaitValue32_v2(s, dev(&flag), 1, 1u << 30)); /* FLUSH */
    OK(cuStreamSynchronize(s));
    CHECK(cuStreamWaitValue32_v2(s, dev(&flag) + 1, 1, 0) == 1);
    CHECK(cuStreamWaitValue32_v2(s, dev(&flag), 1, 4) == 1);
}

static void hip_compare(void *arg)
{
    uint32_t flag = 5;
    void *s;
    open_hip();
    OK(hipStreamCreateWithPriority(&s, 1, -1));
    OK(hipStreamWaitValue32(s, &flag, 5, 1, 0xff));
    OK(hipStreamWaitValue32(s, &flag, 1, 1, 0x3)); /* the mask counts */
    OK(hipStreamSynchronize(s));
    OK(hipStreamWaitValue32(s, &flag, 0xfffffff0u, 0, 0xffffffffu));
    CHECK(hipStreamQuery(s) == 600);
    CHECK(hipGetLastError() == 600 && hipGetLastError() == 0);
    store(&flag, 0xfffffff1u);
    OK(hipStreamSynchronize(s));
}

static void test_order(void **state)
{
    CHILD(asynchrony, "GBEMU_DELAY_US=20");
    CHILD(flags_across_streams, "GBEMU_DELAY_US=200", "GBEMU_SEED=7");
    CHILD(flags_across_streams, "GBEMU_DELAY_US=0");
    CHILD(events_across_streams, "GBEMU_SEED=3");
    CHILD(cuda_compare, "GBEMU_SEED=1");
    CHILD(hip_compare, "GBEMU_SEED=1");
}

/* Legacy stream: after all blocking streams, before their later work; non-blocking streams pass it. */
static void default_streams(void *arg)
{
    static uint32_t gate, gate2, x, y, z;
    void *blocking;
    open_cuda();
    use_device(0);
    void *free_running = new_stream();
    OK(cuStreamCreateWithPriority(&blocking, 0, 0));
    OK(cuStreamWriteValue32_v2(NULL, dev(&z), 1, 0)); /* makes the legacy stream */
    OK(cuStreamSynchronize(NULL));
    OK(cuStreamWaitValue32_v2(blocking, dev(&gate), 1, 0));
    OK(cuStreamWriteValue32_v2(blocking, dev(&x), 1, 0));
    OK(cuMemcpyAsync(dev(&y), dev(&x), 4, NULL));
    OK(cuStreamWriteValue32_v2(free_running, dev(&z), 9, 0));
    OK(cuStreamSynchronize(free_running));
    CHECK(z == 9 && cuStreamQuery(NULL) == 600 && load(&y) == 0);
    store(&gate, 1);
    OK(cuStreamSynchronize((void *)1)); /* CU_STREAM_LEGACY is the same stream */
    CHECK(y == 1);
    /* And the other way: blocking work after legacy work. */
    OK(cuStreamWaitValue32_v2(NULL, dev(&gate2), 1, 0));
    OK(cuStreamWriteValue32_v2(blocking, dev(&x), 2, 0));
    OK(cuStreamWriteValue32_v2((void *)2, dev(&y), 2, 0)); /* the per-thread stream is a blocking one */
    CHECK(cuStreamQuery(blocking) == 600 && cuStreamQuery((void *)2) == 600);
    store(&gate2, 1);
    OK(cuCtxSynchronize());
    CHECK(x == 2 && y == 2);
}

static void test_default_streams(void **state)
{
    CHILD(default_streams, "GBEMU_SEED=2");
}

/* ---- host functions ---- */
static _Atomic int called, inside_rc;

static void host_fn(void *arg)
{
    atomic_store(&inside_rc, cuEventQuery(arg));
    atomic_store(&called, 1);
}

static void host_func(void *arg)
{
    uint32_t gate = 0;
    void *e;
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuEventCreate(&e, 2));
    OK(cuStreamWaitValue32_v2(s, dev(&gate), 1, 0));
    OK(cuLaunchHostFunc(s, host_fn, e));
    CHECK(!atomic_load(&called));
    store(&gate, 1);
    OK(cuStreamSynchronize(s));
    CHECK(atomic_load(&called) && atomic_load(&inside_rc) == 800);
}

static void test_host_func(void **state)
{
    CHILD(host_func, "GBEMU_SEED=1");
}

/* ---- the queue ---- */
struct filler {
    void *context, *stream;
    uint32_t *target;
    int count;
    _Atomic int queued;
};

static void *fill(void *arg)
{
    struct filler *f = arg;
    OK(cuCtxSetCurrent(f->context));
    for (int i = 0; i < f->count; i++) {
        OK(cuStreamWriteValue32_v2(f->stream, dev(f->target), (unsigned)i, 0));
        atomic_fetch_add(&f->queued, 1);
    }
    return NULL;
}

/* 1,019 pending operations: the gate (which the worker already holds) and 1,018 behind it; then the caller stands
 * still, and other threads use other streams. */
static void bounded_queue(void *arg)
{
    uint32_t gate = 0, x = 0, y = 0;
    pthread_t t;
    open_cuda();
    use_device(0);
    struct filler f = {.stream = new_stream(), .target = &x, .count = 1100};
    void *other = new_stream();
    OK(cuCtxGetCurrent(&f.context));
    OK(cuStreamWaitValue32_v2(f.stream, dev(&gate), 1, 0));
    OK(pthread_create(&t, NULL, fill, &f));
    EVENTUALLY(&f.queued, 1018);
    NOT_YET(&f.queued, 1019);
    OK(cuStreamWriteValue32_v2(other, dev(&y), 3, 0));
    OK(cuStreamSynchronize(other));
    CHECK(y == 3 && atomic_load(&f.queued) == 1018);
    store(&gate, 1);
    OK(pthread_join(t, NULL));
    OK(cuStreamSynchronize(f.stream));
    CHECK(x == 1099);
}

static void small_queue(void *arg)
{
    uint32_t gate = 0, x = 0;
    pthread_t t;
    open_cuda();
    use_device(0);
    struct filler f = {.stream = new_stream(), .target = &x, .count = 20};
    OK(cuCtxGetCurrent(&f.context));
    OK(cuStreamWaitValue32_v2(f.stream, dev(&gate), 1, 0));
    OK(pthread_create(&t, NULL, fill, &f));
    EVENTUALLY(&f.queued, 7);
    NOT_YET(&f.queued, 8);
    store(&gate, 1);
    OK(pthread_join(t, NULL));
    OK(cuStreamSynchronize(f.stream));
}

static void test_queue(void **state)
{
    CHILD(bounded_queue, "GBEMU_DELAY_US=0");
    CHILD(small_queue, "GBEMU_QUEUE=8");
}

/* ---- contexts, devices ---- */
static void *no_context(void *arg)
{
    devptr p;
    void *s;
    CHECK(cuMemAlloc_v2(&p, 64) == 201);
    CHECK(cuStreamCreateWithPriority(&s, 1, 0) == 201);
    CHECK(cuStreamQuery(arg) == 201);
    return NULL;
}

static void contexts(void *arg)
{
    int count = 0;
    unsigned char a[16], b[16];
    char pci[2][32];
    void *h = dlopen(GBEMU_CUDA_SO, RTLD_NOW | RTLD_LOCAL);
    CHECK(h != NULL);
    CUDA_CALLS(RESOLVE)
    void *s, *context;
    CHECK(cuStreamCreateWithPriority(&s, 1, 0) == 3); /* before cuInit */
    OK(cuInit(0));
    OK(cuDeviceGetCount(&count));
    CHECK(count == 3);
    OK(cuDeviceGetUuid_v2(a, 0));
    OK(cuDeviceGetUuid_v2(b, 1));
    CHECK(memcmp(a, b, 16) != 0);
    OK(cuDeviceGetPCIBusId(pci[0], 32, 0));
    OK(cuDeviceGetPCIBusId(pci[1], 32, 1));
    CHECK(strcmp(pci[0], pci[1]) != 0);
    CHECK(cuDeviceGetUuid_v2(a, 3) == 101);
    int major = 0, minor = 0;
    OK(cuDeviceGetAttribute(&major, 75, 0));
    OK(cuDeviceGetAttribute(&minor, 76, 0));
    CHECK(major == 8 && minor == 6);
    CHECK(cuStreamCreateWithPriority(&s, 1, 0) == 201);
    use_device(0);
    s = new_stream();
    pthread_t t;
    OK(pthread_create(&t, NULL, no_context, s));
    OK(pthread_join(t, NULL));
    use_device(1);
    CHECK(cuStreamQuery(s) == 400); /* a stream of another device */
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamQuery(s));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    OK(cuStreamQuery(s)); /* still retained once */
    OK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK(cuStreamQuery(s) == 709);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == 201);
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuStreamQuery(s) == 400); /* the context is back, its streams are not */
    OK(cuStreamSynchronize(new_stream()));
}

static void hip_devices(void *arg)
{
    unsigned char props[4096] = {0};
    void *s, *p;
    struct {
        int type, device;
        void *dev, *host;
        int managed;
        unsigned flags;
    } attr;
    open_hip();
    OK(hipGetDevicePropertiesR0600(props, 0));
    CHECK(!strcmp((char *)props + 1160, "gfx942:sramecc+:xnack-"));
    OK(hipGetDeviceProperties(props, 0));
    CHECK(!strcmp((char *)props + 396, "gfx942:sramecc+:xnack-"));
    CHECK(hipSetDevice(99) == 101);
    OK(hipSetDevice(1));
    OK(hipStreamCreateWithPriority(&s, 1, 0));
    OK(hipSetDevice(0));
    CHECK(hipStreamQuery(s) == 400);
    OK(hipSetDevice(1));
    OK(hipMalloc(&p, 100));
    OK(hipPointerGetAttributes(&attr, p));
    CHECK(attr.type == 2 && attr.device == 1 && attr.dev == p);
    OK(hipPointerGetAttributes(&attr, props));
    CHECK(attr.type == 0);
    OK(hipHostRegister(props, sizeof props, 3));
    OK(hipPointerGetAttributes(&attr, props + 5));
    CHECK(attr.type == 1);
    CHECK(hipHostRegister(props, sizeof props, 3) == 712);
    OK(hipFree(p));
}

static void test_contexts(void **state)
{
    CHILD(contexts, "GBEMU_DEVICES=3", "GBEMU_ARCH=sm_86");
    CHILD(hip_devices, "GBEMU_DEVICES=2");
}

static void after_fork(void *arg)
{
    open_cuda();
    use_device(0);
    pid_t pid = fork();
    if (pid == 0) {
        void *s;
        _exit(cuStreamCreateWithPriority(&s, 1, 0) == 3 && cuInit(0) == 3 ? 0 : 1);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK(status == 0);
}

static void test_fork(void **state)
{
    CHILD(after_fork, "GBEMU_SEED=1");
}

/* ---- capture ---- */
static void capture_hook(void *arg)
{
    int status = 9;
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuStreamIsCapturing(s, &status));
    CHECK(status == (arg ? 1 : 0));
    gbemu_set_capturing(2);
    OK(cuStreamIsCapturing(s, &status));
    CHECK(status == 2);
}

static void capture_by_env(void *arg)
{
    capture_hook(&called);
}

static void test_capture(void **state)
{
    CHILD(capture_hook, "GBEMU_SEED=1");
    CHILD(capture_by_env, "GBEMU_CAPTURING=1");
}

/* ---- policing and faults ---- */
static void destroyed_handles(void *arg)
{
    int junk = 0;
    void *e, *f;
    open_cuda();
    use_device(0);
    void *s = new_stream(), *live = new_stream();
    OK(cuEventCreate(&e, 2));
    OK(cuEventCreate(&f, 2));
    OK(cuStreamDestroy_v2(s));
    CHECK(cuStreamQuery(s) == 400);
    CHECK(cuStreamDestroy_v2(s) == 400);
    CHECK(cuEventRecord(e, s) == 400);
    OK(cuEventDestroy_v2(e));
    CHECK(cuEventQuery(e) == 400);
    CHECK(cuStreamWaitEvent(live, e, 0) == 400);
    CHECK(cuStreamQuery(f) == 400);    /* an event is no stream */
    CHECK(cuEventQuery(&junk) == 400); /* never given out */
    CHECK(cuStreamCreateWithPriority(&s, 6, 0) == 1);
}

/* The complaint names the call. */
static void policing_text(void *arg)
{
    char text[4096] = "";
    int to[2];
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuStreamDestroy_v2(s));
    CHECK(pipe(to) == 0);
    int saved = dup(2);
    dup2(to[1], 2);
    CHECK(cuStreamQuery(s) == 400);
    dup2(saved, 2);
    close(to[1]);
    CHECK(read(to[0], text, sizeof text - 1) > 0);
    CHECK(strstr(text, "cuStreamQuery") && strstr(text, "destroyed stream"));
}

static void use_destroyed(void *arg)
{
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuStreamDestroy_v2(s));
    cuStreamQuery(s);
}

static void test_policing(void **state)
{
    const char *const fatal[] = {"GBEMU_STRICT=2", NULL};
    CHILD(destroyed_handles, "GBEMU_STRICT=1");
    CHILD(destroyed_handles, "GBEMU_STRICT=0");
    CHILD(policing_text, "GBEMU_STRICT=1");
    assert_int_equal(in_child(use_destroyed, NULL, fatal), 128 + 6); /* SIGABRT */
}

/* Destroying a stream with work pending: the work still runs. */
static void destroy_busy(void *arg)
{
    uint32_t gate = 0;
    static _Atomic int x;
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuStreamWaitValue32_v2(s, dev(&gate), 1, 0));
    OK(cuStreamWriteValue32_v2(s, dev(&x), 4, 0));
    OK(cuStreamDestroy_v2(s));
    store(&gate, 1);
    EVENTUALLY(&x, 4);
}

static void fail_third(void *arg)
{
    uint32_t a = 1, b = 2;
    open_cuda();
    use_device(0);
    void *s = new_stream();
    OK(cuMemcpyAsync(dev(&b), dev(&a), 4, s));
    OK(cuMemcpyAsync(dev(&b), dev(&a), 4, s));
    CHECK(cuMemcpyAsync(dev(&b), dev(&a), 4, s) == 2); /* out of memory: not sticky */
    OK(cuMemcpyAsync(dev(&b), dev(&a), 4, s));
    OK(cuStreamSynchronize(s));
}

/* A fatal status sticks, and what was pending never runs: the closed gate lets go. */
static void fail_for_good(void *arg)
{
    uint32_t gate = 0, x = 0;
    double started = now_s();
    open_cuda();
    use_device(0);
    void *s = new_stream(), *e;
    OK(cuStreamWaitValue32_v2(s, dev(&gate), 1, 0));
    OK(cuStreamWriteValue32_v2(s, dev(&x), 1, 0));
    CHECK(cuEventCreate(&e, 2) == 719);
    CHECK(cuStreamSynchronize(s) == 719 && cuStreamQuery(s) == 719);
    CHECK(cuMemcpyAsync(dev(&x), dev(&gate), 4, s) == 719);
    CHECK(x == 0 && now_s() - started < 10);
    use_device(1); /* the other device is well */
    OK(cuStreamSynchronize(new_stream()));
}

static void slow_call(void *arg)
{
    open_cuda();
    use_device(0);
    void *s = new_stream();
    double t = now_s();
    OK(cuStreamQuery(s));
    CHECK(now_s() - t >= 0.05);
}

static void test_faults(void **state)
{
    CHILD(destroy_busy, "GBEMU_SEED=1");
    CHILD(fail_third, "GBEMU_FAIL=cuMemcpyAsync:3:2");
    CHILD(fail_for_good, "GBEMU_FAIL=cuEventCreate:1:719");
    CHILD(slow_call, "GBEMU_SLOW=cuStreamQuery:50000");
}

/* Through the sonames, as a loader finds the real libraries: one copy under all names. */
static void by_soname(void *arg)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/soname-cuda/libcuda.so.1", GBEMU_DIR);
    void *cuda = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    snprintf(path, sizeof path, "%s/soname-cuda/libnccl.so.2", GBEMU_DIR);
    void *nccl = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    snprintf(path, sizeof path, "%s/soname-hip/libamdhip64.so.7", GBEMU_DIR);
    void *hip = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(cuda && cuda == nccl && hip && hip != cuda);
    CHECK(dlsym(cuda, "cuStreamWaitValue32_v2") && dlsym(nccl, "ncclCommInitRankConfig"));
    CHECK(!dlsym(hip, "cuInit") && dlsym(hip, "hipStreamWaitValue32") && dlsym(hip, "ncclSend"));
}

static void test_soname(void **state)
{
    CHILD(by_soname, "GBEMU_SEED=1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),   cmocka_unit_test(test_default_streams), cmocka_unit_test(test_host_func),
        cmocka_unit_test(test_queue),   cmocka_unit_test(test_contexts),        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_capture), cmocka_unit_test(test_policing),        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_soname),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
