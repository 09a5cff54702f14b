/* SPDX-License-Identifier: Apache-2.0
 * Emulated memory: what is device memory, poison, guard pages, bounds, freeing twice, leaks.  */
#include "emu_test.h"

#include <signal.h>

#define ALLOCATED 0x7ffb7ffbu
#define FREED     0xfffdfffdu

static void *s;

static void set_up(void)
{
    open_cuda();
    use_device(0);
    s = new_stream();
}

static uint32_t word_at(devptr p)
{
    uint32_t w = 0;
    OK(cuMemcpyDtoHAsync_v2(&w, p, 4, s));
    OK(cuStreamSynchronize(s));
    return w;
}

static void poison(void *arg)
{
    devptr p;
    float f;
    uint32_t *pinned;
    set_up();
    OK(cuMemAlloc_v2(&p, 1000));
    uint32_t w = word_at(p + 996);
    memcpy(&f, &w, 4);
    CHECK(w == ALLOCATED && f != f);
    OK(cuMemHostAlloc((void **)&pinned, 64, 3));
    CHECK(pinned[15] == ALLOCATED);
    OK(cuMemFreeHost(pinned));
    CHECK(pinned[15] == FREED); /* in quarantine: readable, and poisoned */
    OK(cuMemFree_v2(p));
    CHECK(cuMemcpyDtoHAsync_v2(&w, p, 4, s) == 1);
}

/* Freed between the call and the copy: the copy itself finds out, and the device has failed. */
static void use_after_free(void *arg)
{
    devptr p;
    uint32_t w = 0;
    set_up();
    OK(cuMemAlloc_v2(&p, 64));
    OK(cuMemFree_v2(p));
    CHECK(cuMemFree_v2(p) == 1);                     /* twice */
    CHECK(cuMemFree_v2((devptr)(uintptr_t)&w) == 1); /* not ours */
    OK(cuMemAlloc_v2(&p, 64));
    CHECK(cuMemFree_v2(p + 16) == 1); /* not the start */
    CHECK(cuMemFreeHost((void *)(uintptr_t)p) == 1);
    CHECK(cuMemcpyAsync(p, dev(&w), 65, s) == 1); /* out of bounds */
    OK(cuMemcpyAsync(p + 60, dev(&w), 4, s));
    CHECK(cuMemcpyAsync(p + 61, dev(&w), 4, s) == 1);
    CHECK(cuMemcpyAsync(0, dev(&w), 4, s) == 1);
    CHECK(cuMemAlloc_v2(&p, 0) == 1);
    OK(cuStreamSynchronize(s));
}

static void query(void *arg)
{
    static char registered[8192];
    devptr p, base, d;
    size_t size;
    unsigned type = 9;
    int device = -1;
    void *pinned;
    set_up();
    OK(cuMemAlloc_v2(&p, 1000));
    OK(cuMemHostAlloc(&pinned, 1000, 3));
    OK(cuPointerGetAttribute(&type, 2, p + 10));
    OK(cuPointerGetAttribute(&device, 9, p + 10));
    CHECK(type == 2 && device == 0);
    OK(cuMemGetAddressRange_v2(&base, &size, p + 999));
    CHECK(base == p && size == 1000);
    CHECK(cuMemGetAddressRange_v2(&base, &size, p + 1000) == 500);
    OK(cuPointerGetAttribute(&type, 2, dev(pinned)));
    CHECK(type == 1);
    CHECK(cuPointerGetAttribute(&type, 2, dev(registered)) == 1); /* plain host memory */
    OK(cuMemHostRegister_v2(registered, sizeof registered, 3));
    OK(cuPointerGetAttribute(&type, 2, dev(registered + 5)));
    CHECK(type == 1);
    OK(cuMemHostGetDevicePointer_v2(&d, registered + 5, 0));
    CHECK(d == dev(registered + 5));
    CHECK(cuMemHostRegister_v2(registered + 4096, 10, 3) == 712);
    CHECK(cuMemHostUnregister(registered + 4096) == 713);
    OK(cuMemHostUnregister(registered));
    CHECK(cuMemHostUnregister(registered) == 713);
}

/* Registered memory stays so while copies from or to it wait behind others. */
static void unregister_busy(void *arg)
{
    static char registered[8192], other[8192];
    devptr p, flag;
    set_up();
    OK(cuMemAlloc_v2(&p, sizeof registered));
    OK(cuMemAlloc_v2(&flag, 4));
    OK(cuMemHostRegister_v2(registered, sizeof registered, 3));
    OK(cuMemHostRegister_v2(other, sizeof other, 3));
    OK(cuStreamWriteValue32_v2(s, flag, 0, 0));
    OK(cuStreamSynchronize(s));
    OK(cuStreamWaitValue32_v2(s, flag, 1, 0));
    OK(cuMemcpyAsync(p, dev(registered + 100), 1000, s));
    OK(cuMemcpyAsync(dev(registered + 100), p, 1000, s));
    CHECK(cuMemHostUnregister(registered) == 800);
    OK(cuMemHostUnregister(other));
    atomic_store((_Atomic uint32_t *)(uintptr_t)flag, 1);
    OK(cuStreamSynchronize(s));
    OK(cuMemHostUnregister(registered));
}

/* Plain memory of anybody counts as device memory. */
static void plain(void *arg)
{
    uint32_t *a = malloc(4096), *b = malloc(4096);
    devptr p;
    set_up();
    for (uint32_t i = 0; i < 1024; i++) a[i] = i * i;
    OK(cuMemAlloc_v2(&p, 4096));
    OK(cuMemcpyAsync(p, dev(a), 4096, s));
    OK(cuMemcpyAsync(dev(b), p, 4096, s));
    OK(cuMemsetD8Async(dev(a), 0xab, 4095, s));
    OK(cuStreamSynchronize(s));
    for (uint32_t i = 0; i < 1024; i++) CHECK(b[i] == i * i);
    CHECK(a[0] == 0xababababu && a[1023] == (0x00abababu | (1023u * 1023u & 0xff000000u)));
    free(a);
    free(b);
}

/* The device's address is not the host's; copies, fills and flags go through the other mapping. */
static void guarded(void *arg)
{
    devptr p;
    uint32_t x = 42;
    set_up();
    OK(cuMemAlloc_v2(&p, 100000));
    CHECK(word_at(p) == ALLOCATED);
    OK(cuMemcpyAsync(p + 99996, dev(&x), 4, s));
    CHECK(word_at(p + 99996) == 42);
    OK(cuStreamWriteValue32_v2(s, p + 8, 7, 0));
    OK(cuStreamWaitValue32_v2(s, p + 8, 7, 0));
    CHECK(word_at(p + 8) == 7);
    OK(cuMemFree_v2(p));
    CHECK(cuMemcpyAsync(p, dev(&x), 4, s) == 1);
}

static void touch_guarded(void *arg)
{
    devptr p;
    set_up();
    OK(cuMemAlloc_v2(&p, 4096));
    signal(SIGSEGV, SIG_DFL); /* a sanitizer's own handler would make it another exit */
    *(volatile char *)(uintptr_t)p = 1;
}

/* Small quarantine: blocks come and go, and a late write is told. */
static void late_write(void *arg)
{
    char text[4096] = "", *q;
    void *pinned, *next;
    int to[2];
    set_up();
    OK(cuMemHostAlloc(&pinned, 64, 3));
    OK(cuMemHostAlloc(&next, 2 << 20, 3));
    OK(cuMemFreeHost(pinned));
    q = pinned;
    q[7] = 1;
    CHECK(pipe(to) == 0);
    int saved = dup(2);
    dup2(to[1], 2);
    OK(cuMemFreeHost(next)); /* more than the quarantine holds */
    dup2(saved, 2);
    close(to[1]);
    CHECK(read(to[0], text, sizeof text - 1) > 0);
    CHECK(strstr(text, "cuMemFreeHost") && strstr(text, "written after it was freed"));
}

static void churn(void *arg)
{
    set_up();
    for (int i = 0; i < 2000; i++) {
        devptr p[4];
        for (int j = 0; j < 4; j++) OK(cuMemAlloc_v2(&p[j], (size_t)(1 + (i * 37 + j * 101) % 5000)));
        for (int j = 0; j < 4; j++) OK(cuMemFree_v2(p[(j * 3 + i) % 4]));
    }
}

static void test_poison(void **state)
{
    CHILD(poison, "GBEMU_SEED=1");
    CHILD(use_after_free, "GBEMU_SEED=1");
    CHILD(use_after_free, "GBEMU_GUARD=1");
}

static void test_query(void **state)
{
    CHILD(query, "GBEMU_GUARD=0");
    CHILD(query, "GBEMU_GUARD=1");
    CHILD(plain, "GBEMU_SEED=1");
    CHILD(unregister_busy, "GBEMU_GUARD=0");
}

static void test_guard(void **state)
{
    const char *const env[] = {"GBEMU_GUARD=1", NULL};
    CHILD(guarded, "GBEMU_GUARD=1");
    assert_int_equal(in_child(touch_guarded, NULL, env), 128 + SIGSEGV);
}

static void test_quarantine(void **state)
{
    CHILD(late_write, "GBEMU_QUARANTINE_MB=1");
    CHILD(churn, "GBEMU_QUARANTINE_MB=1");
    CHILD(churn, "GBEMU_GUARD=1", "GBEMU_QUARANTINE_MB=0");
}

static int leak_pipe[2];

static void leaks(void *arg)
{
    devptr p, q;
    set_up();
    OK(cuMemAlloc_v2(&p, 10));
    OK(cuMemAlloc_v2(&q, 10));
    OK(cuMemFree_v2(q));
    dup2(leak_pipe[1], 2);
    exit(0); /* the report comes with the exit handlers */
}

static void test_leaks(void **state)
{
    char text[1024] = "";
    assert_int_equal(pipe(leak_pipe), 0);
    CHILD(leaks, "GBEMU_LEAKS=1");
    assert_true(read(leak_pipe[0], text, sizeof text - 1) > 0);
    assert_non_null(strstr(text, "device 1, pinned 0, registered 0, streams 1, events 0"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_poison),     cmocka_unit_test(test_query), cmocka_unit_test(test_guard),
        cmocka_unit_test(test_quarantine), cmocka_unit_test(test_leaks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
