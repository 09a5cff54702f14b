/* SPDX-License-Identifier: Apache-2.0
 * The launcher on emulated devices, with real plans: values in both gate modes and with vendor calls, order on streams,
 * windows, giving up, and the driver's locks. */
#include "launch_rig.h"

#include "base/clock.h"
#include "base/dl.h"
#include "ccl/ccl.h"

#include <gpubridge/gpubridge.h>

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above first */
#include <cmocka.h>

static struct gb_plan_spec all_reduce(int dtype, int reduce_op, uint64_t count, uint64_t chunk)
{
    return (struct gb_plan_spec){.op = GPUBRIDGE_ALL_REDUCE,
                                 .dtype = dtype,
                                 .reduce_op = reduce_op,
                                 .count = count,
                                 .chunk_bytes = chunk,
                                 .depth = 4};
}

struct buffers {
    struct rig *rig;
    uint64_t count;
    void *in[RIG_MAX_RANKS], *out[RIG_MAX_RANKS];
};

static int32_t input(uint32_t rank, uint64_t i, int round)
{
    return (int32_t)(i * 7 + rank * 1000003 + (uint32_t)round * 17);
}

static int32_t expected(const struct rig *rig, uint64_t i, int round)
{
    uint32_t sum = 0;
    for (uint32_t r = 0; r < rig->nranks; r++) sum += (uint32_t)input(r, i, round);
    return (int32_t)sum;
}

static void make_buffers(struct buffers *b, struct rig *rig, uint64_t count, int in_place)
{
    *b = (struct buffers){.rig = rig, .count = count};
    for (uint32_t r = 0; r < rig->nranks; r++) {
        b->in[r] = rig_device_mem(rig, r, count * 4);
        b->out[r] = in_place ? b->in[r] : rig_device_mem(rig, r, count * 4);
    }
}

static void free_buffers(struct buffers *b)
{
    for (uint32_t r = 0; r < b->rig->nranks; r++) {
        if (b->out[r] != b->in[r]) rig_device_free(b->rig, r, b->out[r]);
        rig_device_free(b->rig, r, b->in[r]);
    }
}

static void fill(struct buffers *b, int round)
{
    int32_t *x = malloc(b->count * 4 + 4);
    assert_non_null(x);
    for (uint32_t r = 0; r < b->rig->nranks; r++) {
        for (uint64_t i = 0; i < b->count; i++) x[i] = input(r, i, round);
        rig_put(b->rig, r, b->in[r], x, b->count * 4);
    }
    free(x);
}

static void check(struct buffers *b, int round)
{
    int32_t *x = malloc(b->count * 4 + 4);
    assert_non_null(x);
    for (uint32_t r = 0; r < b->rig->nranks; r++) {
        rig_get(b->rig, r, x, b->out[r], b->count * 4);
        for (uint64_t i = 0; i < b->count; i++)
            if (x[i] != expected(b->rig, i, round))
                fail_msg("rank %u element %llu is %d, want %d", r, (unsigned long long)i, x[i],
                         expected(b->rig, i, round));
    }
    free(x);
}

static void run_values(const char *letters, int gate)
{
    static const uint64_t counts[] = {1, 7, 1000, 5000, 100003};
    struct rig rig;
    rig_open(&rig, letters, gate);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int in_place = 0; in_place < 2; in_place++) {
            struct buffers b;
            struct gb_plan_spec spec = all_reduce(GPUBRIDGE_I32, GPUBRIDGE_SUM, counts[c], 16384);
            spec.flat_bytes = 4096;
            make_buffers(&b, &rig, counts[c], in_place);
            fill(&b, 0);
            struct rig_op *op = rig_start(&rig, &spec, b.in, b.out, 1);
            rig_wait(op);
            check(&b, 0);
            rig_free(op);
            free_buffers(&b);
        }
    rig_close(&rig);
}

static void test_values_gate_on(void **state)
{
    (void)state;
    run_values("NO", 1);
    run_values("NNOO", 1);
    run_values("NHNH", 1);
}

static void test_values_gate_off(void **state)
{
    (void)state;
    run_values("NO", 0);
    run_values("HHII", 0);
    run_values("NHO", 0);
}

/* Floats: AVG of bf16 over 3 ranks of 256, 1, 1: 258 / 3, one rounding; PREMUL_SUM multiplies once (factor 0.5). */
static void check_bf16(int reduce_op, const uint16_t want)
{
    static const uint16_t x[3] = {0x4380, 0x3f80, 0x3f80};
    struct rig rig;
    void *buf[RIG_MAX_RANKS];
    rig_open(&rig, "NOP", 1);
    for (uint32_t r = 0; r < 3; r++) {
        buf[r] = rig_device_mem(&rig, r, 2);
        rig_put(&rig, r, buf[r], &x[r], 2);
    }
    struct gb_plan_spec spec = all_reduce(GPUBRIDGE_BF16, reduce_op, 1, 16384);
    struct rig_op *op = rig_start(&rig, &spec, buf, buf, 1);
    rig_wait(op);
    for (uint32_t r = 0; r < 3; r++) {
        uint16_t got = 0;
        rig_get(&rig, r, &got, buf[r], 2);
        assert_int_equal(got, want);
        rig_device_free(&rig, r, buf[r]);
    }
    rig_free(op);
    rig_close(&rig);
}

static void test_floats(void **state)
{
    (void)state;
    check_bf16(GPUBRIDGE_SUM, 0x4381);
    check_bf16(GPUBRIDGE_AVG, 0x42ac);
    check_bf16(GPUBRIDGE_PREMUL_SUM, 0x4301);
    check_bf16(GPUBRIDGE_MAX, 0x4380);
}

/* Operations on one buffer in flight together: each sees what the one before it left, though nobody waited. */
static void run_back_to_back(int gate)
{
    enum { N = 4 };
    struct rig rig;
    struct buffers b;
    struct rig_op *op[N];
    rig_open(&rig, "NO", gate);
    make_buffers(&b, &rig, 30000, 1);
    fill(&b, 0);
    struct gb_plan_spec spec = all_reduce(GPUBRIDGE_I32, GPUBRIDGE_SUM, b.count, 8192);
    for (int i = 0; i < N; i++) op[i] = rig_start(&rig, &spec, b.in, b.out, 1);
    for (int all = 0; !all;) {
        all = 1;
        for (int i = 0; i < N; i++) {
            rig_step(op[i], 1);
            all &= rig_is_done(op[i]);
        }
    }
    int32_t *x = malloc(b.count * 4);
    assert_non_null(x);
    for (uint32_t r = 0; r < 2; r++) {
        rig_get(&rig, r, x, b.out[r], b.count * 4);
        for (uint64_t i = 0; i < b.count; i++) assert_int_equal(x[i], (uint32_t)expected(&rig, i, 0) << (N - 1));
    }
    free(x);
    for (int i = 0; i < N; i++) rig_free(op[i]);
    free_buffers(&b);
    rig_close(&rig);
}

static void test_back_to_back(void **state)
{
    (void)state;
    run_back_to_back(1);
    run_back_to_back(0);
}

/* Far more entries than a stream takes behind a closed flag, in two sets at once: the launcher must not block. */
static void test_windows(void **state)
{
    (void)state;
    struct rig rig;
    struct buffers b, c;
    rig_open(&rig, "NO", 1);
    make_buffers(&b, &rig, 2000000, 1);
    make_buffers(&c, &rig, 500, 1);
    fill(&b, 3);
    fill(&c, 4);
    struct gb_plan_spec spec = all_reduce(GPUBRIDGE_I32, GPUBRIDGE_SUM, b.count, 4096);
    struct rig_op *large = rig_start(&rig, &spec, b.in, b.out, 1);
    uint32_t device_steps = 0;
    for (uint32_t i = 0; i < large->side[0].plan->nsteps; i++)
        device_steps += large->side[0].plan->steps[i].kind > GB_STEP_RECV;
    assert_true(device_steps > 3000);
    spec.count = c.count;
    struct rig_op *small = rig_start(&rig, &spec, c.in, c.out, 2);
    rig_wait(small); /* the large one stands still: nothing moves its messages */
    assert_false(rig_is_done(large));
    check(&c, 4);
    rig_wait(large);
    check(&b, 3);
    rig_free(large);
    rig_free(small);
    free_buffers(&b);
    free_buffers(&c);
    rig_close(&rig);
}

/* Gives up in mid-flight: streams that already wait for the result are let go, and it is NaN. */
static void run_abort(const char *letters, int gate, int messages)
{
    struct rig rig;
    void *buf[RIG_MAX_RANKS];
    enum { N = 60000 };
    float *x = malloc(N * 4);
    assert_non_null(x);
    rig_open(&rig, letters, gate);
    for (uint32_t r = 0; r < rig.nranks; r++) {
        for (int i = 0; i < N; i++) x[i] = 1;
        buf[r] = rig_device_mem(&rig, r, N * 4);
        rig_put(&rig, r, buf[r], x, N * 4);
    }
    struct gb_plan_spec spec = all_reduce(GPUBRIDGE_F32, GPUBRIDGE_SUM, N, 8192);
    struct rig_op *op = rig_start(&rig, &spec, buf, buf, 1);
    for (int moved = 0; moved < messages;) moved += rig_step(op, messages - moved);
    for (uint32_t r = 0; r < rig.nranks; r++) {
        struct rig_rank *k = &rig.rank[r];
        while (gate && !rig.rank[r].ccl && !atomic_load(&op->side[r].op.enqueued)) sched_yield();
        if (gate && !k->ccl) {
            assert_int_equal(gb_device_bind(k->device), 0);
            assert_int_equal(gb_launcher_wait_stream(k->launcher, &op->side[r].op, k->stream), 0);
        }
    }
    for (uint32_t r = 0; r < rig.nranks; r++) {
        if (rig.rank[r].ccl) gb_ccl_abort(rig.rank[r].ccl);
        gb_launcher_abort(rig.rank[r].launcher, &op->side[r].op);
    }
    while (!rig_is_done(op)) sched_yield();
    for (uint32_t r = 0; r < rig.nranks; r++) {
        rig_sync(&rig, r);
        rig_get(&rig, r, x, buf[r], N * 4);
        for (int i = 0; i < N; i++) assert_true(isnan(x[i]));
    }
    rig_free(op);
    for (uint32_t r = 0; r < rig.nranks; r++) rig_device_free(&rig, r, buf[r]);
    rig_close(&rig);
    free(x);
}

static void test_abort(void **state)
{
    (void)state;
    run_abort("NO", 1, 0);
    run_abort("NO", 1, 5);
    run_abort("NO", 0, 0);
    run_abort("NO", 0, 5);
    run_abort("HI", 0, 3);
    run_abort("NNO", 1, 1);
}

/* The driver's locks: a free waits for the device and holds off every other driver call, also the launcher's.  What is
 * in flight must end without one. */
static void *free_main(void *arg)
{
    struct buffers *b = arg;
    assert_int_equal(gb_device_bind(b->rig->rank[0].device), 0);
    gb_device_free(b->rig->rank[0].device, b->in[1]);
    return NULL;
}

static void run_free_in_flight(uint64_t count, uint64_t chunk)
{
    struct rig rig;
    struct buffers b, extra;
    pthread_t thread;
    rig_open(&rig, "NO", 1);
    make_buffers(&b, &rig, count, 1);
    fill(&b, 0);
    extra.rig = &rig;
    extra.in[1] = rig_device_mem(&rig, 0, 4096);
    struct gb_plan_spec spec = all_reduce(GPUBRIDGE_I32, GPUBRIDGE_SUM, count, chunk);
    struct rig_op *op = rig_start(&rig, &spec, b.in, b.out, 1);
    for (int moved = 0; moved < 2;) moved += rig_step(op, 1);
    assert_int_equal(pthread_create(&thread, NULL, free_main, &extra), 0);
    for (int i = 0; i < 200; i++) sched_yield(); /* the free is likely waiting by now; either order must work */
    rig_wait(op);
    pthread_join(thread, NULL);
    check(&b, 0);
    rig_free(op);
    free_buffers(&b);
    rig_close(&rig);
}

static void test_free_in_flight(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++) run_free_in_flight(60000, 8192);
    run_free_in_flight(1500000, 4096); /* windows as well */
}

static void test_capture_is_refused(void **state)
{
    (void)state;
    struct rig rig;
    struct gb_dl dl;
    void *event = NULL, *address;
    void (*set_capturing)(int);
    static const char *const none[] = {NULL};
    static const struct gb_dl_spec spec = {.what = "the emulator", .prefix = "libgbemu", .sonames = none};
    rig_open(&rig, "N", 1);
    assert_int_equal(gb_dl_open(&spec, gb_device_info(rig.rank[0].device)->library, &dl), 0);
    address = gb_dl_find(&dl, "gbemu_set_capturing");
    memcpy(&set_capturing, &address, sizeof address);
    set_capturing(1);
    int rc = gb_launcher_record(rig.rank[0].launcher, rig.rank[0].stream, &event);
    set_capturing(0);
    assert_int_equal(rc, GPUBRIDGE_ERR_UNSUPPORTED);
    assert_null(event);
    assert_non_null(strstr(gb_err_text(), "captured"));
    assert_int_equal(gb_launcher_record(rig.rank[0].launcher, rig.rank[0].stream, &event), 0);
    gb_launcher_forget(rig.rank[0].launcher, event);
    rig_close(&rig);
}

static void *give_back_soon(void *arg)
{
    struct {
        struct gb_launcher *launcher;
        void *mem;
    } *give = arg;
    const struct timespec nap = {.tv_nsec = 20000000};
    nanosleep(&nap, NULL);
    gb_launcher_mem_free(give->launcher, give->mem);
    return NULL;
}

static void test_pools(void **state)
{
    (void)state;
    enum { N = 64 };
    struct rig rig;
    void *mem[N];
    rig_open(&rig, "N", 1);
    struct gb_launcher *l = rig.rank[0].launcher;
    gb_launcher_set_limit(l, 100u << 20, 100000000u);
    for (int i = 0; i < N; i++) {
        mem[i] = gb_launcher_mem(l, 1000 * (uint64_t)(i + 1), 0);
        assert_non_null(mem[i]);
        assert_int_equal((uintptr_t)mem[i] % 256, 0);
        for (int j = 0; j < i; j++) assert_true((char *)mem[i] >= (char *)mem[j] + 1000 * (j + 1) || mem[i] < mem[j]);
    }
    for (int i = 0; i < N; i += 2) gb_launcher_mem_free(l, mem[i]);
    for (int i = 1; i < N; i += 2) gb_launcher_mem_free(l, mem[i]);
    gb_launcher_mem_free(l, NULL);
    void *whole = gb_launcher_mem(l, 32u << 20, 0); /* fits the first slab only if all blocks were joined again */
    assert_ptr_equal(whole, mem[0]);
    assert_null(gb_launcher_mem(l, 90u << 20, 0));
    assert_non_null(strstr(gb_err_text(), "GPUBRIDGE_MEM_BYTES"));
    gb_launcher_mem_free(l, whole);
    void *large = gb_launcher_mem(l, 128u << 20, 0); /* nothing is in use: the limit gives way */
    assert_non_null(large);
    /* What lies unused beside something in use makes room for something else. */
    whole = gb_launcher_mem(l, 1000, 0);
    gb_launcher_mem_free(l, large);
    void *pinned = gb_launcher_host(l, 40u << 20);
    assert_non_null(pinned);
    /* Somebody gives back what is missing. */
    gb_launcher_set_limit(l, 100u << 20, 60000000000u);
    large = gb_launcher_mem(l, 20u << 20, 0);
    struct {
        struct gb_launcher *launcher;
        void *mem;
    } give = {l, large};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, give_back_soon, &give), 0);
    large = gb_launcher_mem(l, 30u << 20, 0);
    assert_non_null(large);
    assert_int_equal(pthread_join(thread, NULL), 0);
    gb_launcher_mem_free(l, large);
    gb_launcher_mem_free(l, whole);
    gb_launcher_host_free(l, pinned);
    /* Nobody else is in the way: a single operation always has its memory. */
    gb_launcher_set_limit(l, 10u << 20, 0);
    whole = gb_launcher_mem(l, 64u << 20, 0);
    assert_non_null(whole);
    assert_null(gb_launcher_mem(l, 64u << 20, 0));
    large = gb_launcher_mem(l, 64u << 20, 64u << 20);
    assert_non_null(large);
    gb_launcher_mem_free(l, whole);
    gb_launcher_mem_free(l, large);
    rig_close(&rig);
}

static void note_call(void *arg)
{
    atomic_store((_Atomic int *)arg, 1);
}

/* The launcher has looked at everything that was started before. */
static void meet_launcher(struct gb_launcher *launcher)
{
    _Atomic int called = 0;
    gb_launcher_call(launcher, note_call, &called);
    while (!atomic_load(&called)) sched_yield();
}

static struct gb_dev_op copy_of(struct rig *rig, const struct gb_plan *plan, _Atomic uint32_t *flags, void *in,
                                void *out)
{
    struct gb_dev_op op = {.plan = plan, .buf = {in, out}, .set = 7, .flags = flags};
    for (uint32_t i = 0; i <= plan->nsteps; i++) atomic_store(&flags[i], 0);
    assert_int_equal(gb_launcher_record(rig->rank[0].launcher, rig->rank[0].stream, &op.ready), 0);
    return op;
}

/* A claimed operation is seen before it is in the streams; while operations are held none is claimed or started. */
static void test_hold(void **state)
{
    (void)state;
    struct rig rig;
    struct gb_step step = {
        .kind = GB_STEP_COPY, .queue = GB_QUEUE_OUT, .bytes = 4, .src = {0, GB_BUF_IN}, .dst = {0, GB_BUF_OUT}};
    const struct gb_plan plan = {.steps = &step, .nsteps = 1};
    rig_open(&rig, "N", 1);
    struct gb_launcher *l = rig.rank[0].launcher;
    void *in = rig_device_mem(&rig, 0, 4), *out = rig_device_mem(&rig, 0, 4);
    _Atomic uint32_t *flags = gb_launcher_host(l, 2 * sizeof *flags), *end = &flags[1];
    uint32_t value = 4711;
    rig_put(&rig, 0, in, &value, 4);
    assert_true(gb_launcher_is_idle(l));

    struct gb_dev_op op = copy_of(&rig, &plan, flags, in, out);
    while (!gb_launcher_claim(l, &op)) sched_yield(); /* its thread is at work for moments */
    assert_false(gb_launcher_is_idle(l));
    gb_launcher_hold(l); /* too late for that one */
    assert_false(gb_launcher_is_idle(l));
    gb_launcher_issue(l, &op);
    while (!atomic_load(end)) sched_yield();
    assert_true(gb_launcher_is_idle(l)); /* also before the engine has taken note */
    gb_launcher_release(l, &op);

    op = copy_of(&rig, &plan, flags, in, out);
    for (int i = 0; i < 1000; i++) assert_false(gb_launcher_claim(l, &op));
    gb_launcher_start(l, &op);
    meet_launcher(l);
    rig_sync(&rig, 0);
    assert_int_equal(atomic_load(end), 0);
    assert_true(gb_launcher_is_idle(l));
    gb_launcher_unhold(l);
    while (!atomic_load(end)) sched_yield();
    value = 0;
    rig_get(&rig, 0, &value, out, 4);
    assert_int_equal(value, 4711);
    gb_launcher_release(l, &op);
    gb_launcher_host_free(l, flags);
    rig_device_free(&rig, 0, in);
    rig_device_free(&rig, 0, out);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pools),          cmocka_unit_test(test_capture_is_refused),
        cmocka_unit_test(test_values_gate_on), cmocka_unit_test(test_values_gate_off),
        cmocka_unit_test(test_floats),         cmocka_unit_test(test_back_to_back),
        cmocka_unit_test(test_windows),        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_free_in_flight), cmocka_unit_test(test_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
