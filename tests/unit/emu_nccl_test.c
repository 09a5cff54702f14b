/* SPDX-License-Identifier: Apache-2.0
 * Emulated NCCL between processes: results by value, lazy connection, non-blocking creation, aborts, order mismatches,
 * killed peers, and that nothing is left behind.  */
#include "emu_test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/mman.h>

enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16 };
enum { SUM, PROD, MAX, MIN, AVG };
enum { IN_PROGRESS = 7, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

/* One rank of a job. */
static struct {
    int rank, n;
    struct nccl_id id;
    void *comm, *stream;
    _Atomic int *shared; /* 16 counters that all ranks see */
} me;

static void init_blocking(void)
{
    OK(ncclCommInitRank(&me.comm, me.n, me.id, me.rank));
}

/* Forks `n` ranks that run `fn` on device `rank`.  The unique id travels through a pipe from rank 0, as through a
 * store. */
static void run_ranks(int n, void (*fn)(void), void (*open)(void), int *codes)
{
    int to[8][2];
    pid_t pids[8];
    _Atomic int *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    fflush(NULL);
    for (int r = 0; r < n; r++) assert_int_equal(pipe(to[r]), 0);
    for (int r = 0; r < n; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            alarm(60);
            me.rank = r;
            me.n = n;
            me.shared = shared;
            open();
            if (r == 0) {
                OK(ncclGetUniqueId(&me.id));
                for (int i = 0; i < n; i++) CHECK(write(to[i][1], &me.id, sizeof me.id) == sizeof me.id);
            }
            CHECK(read(to[r][0], &me.id, sizeof me.id) == sizeof me.id);
            fn();
            fflush(NULL);
            _exit(0);
        }
    }
    for (int r = 0; r < n; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        codes[r] = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        close(to[r][0]);
        close(to[r][1]);
    }
    munmap((void *)shared, 4096);
}

static void cuda_rank(void)
{
    open_cuda();
    use_device(me.rank);
    me.stream = new_stream();
}

static void ranks(int n, void (*fn)(void))
{
    int codes[8];
    run_ranks(n, fn, cuda_rank, codes);
    for (int r = 0; r < n; r++) assert_int_equal(codes[r], 0);
}

static void sync_stream(void)
{
    OK(cuStreamSynchronize(me.stream));
}

static void barrier(int slot)
{
    atomic_fetch_add(&me.shared[slot], 1);
    CHECK(becomes(&me.shared[slot], me.n, 20));
}

static int async_error(void)
{
    int rc = 0;
    OK(ncclCommGetAsyncError(me.comm, &rc));
    return rc;
}

static int await_error(void)
{
    double end = now_s() + 20;
    struct timespec pause = {.tv_nsec = 1000000};
    int rc = 0;
    while (((rc = async_error()) == 0 || rc == IN_PROGRESS) && now_s() < end) nanosleep(&pause, NULL);
    return rc;
}

/* ---- values ---- */
static float value(int rank, size_t i)
{
    return (float)((i * 7 + (size_t)rank * 13) % 101) - 50;
}

static float *filled(int rank, size_t n)
{
    float *p = malloc(n * sizeof *p + 4);
    CHECK(p != NULL);
    for (size_t i = 0; i < n; i++) p[i] = value(rank, i);
    return p;
}

static float sum_at(size_t i)
{
    float s = 0;
    for (int r = 0; r < me.n; r++) s += value(r, i);
    return s;
}

static void check_all_reduce(size_t n)
{
    float *in = filled(me.rank, n), *out = malloc(n * sizeof *out + 4);
    OK(ncclAllReduce(in, out, n, F32, SUM, me.comm, me.stream));
    OK(ncclAllReduce(in, in, n, F32, MAX, me.comm, me.stream));
    sync_stream();
    for (size_t i = 0; i < n; i++) {
        float max = value(0, i);
        for (int r = 1; r < me.n; r++) max = value(r, i) > max ? value(r, i) : max;
        CHECK(out[i] == sum_at(i));
        CHECK(in[i] == max);
    }
    free(in);
    free(out);
}

static void check_scatter_gather(size_t n)
{
    float *in = filled(me.rank, n * (size_t)me.n), *out = malloc(n * sizeof *out + 4);
    float *all = malloc(n * (size_t)me.n * sizeof *all + 4);
    OK(ncclReduceScatter(in, out, n, F32, SUM, me.comm, me.stream));
    OK(ncclAllGather(out, all, n, F32, me.comm, me.stream));
    sync_stream();
    for (size_t i = 0; i < n; i++) CHECK(out[i] == sum_at((size_t)me.rank * n + i));
    for (size_t i = 0; i < n * (size_t)me.n; i++) CHECK(all[i] == sum_at(i));
    free(in);
    free(out);
    free(all);
}

static void check_broadcast(size_t n)
{
    for (int root = 0; root < me.n; root++) {
        float *in = filled(me.rank, n), *out = malloc(n * sizeof *out + 4);
        OK(ncclBroadcast(in, out, n, F32, root, me.comm, me.stream));
        OK(ncclBroadcast(in, in, n, F32, root, me.comm, me.stream));
        sync_stream();
        for (size_t i = 0; i < n; i++) CHECK(out[i] == value(root, i) && in[i] == value(root, i));
        free(in);
        free(out);
    }
}

static void check_all_to_all(size_t n)
{
    float *in = filled(me.rank, n * (size_t)me.n), *out = calloc(n * (size_t)me.n + 1, sizeof *out);
    OK(ncclGroupStart());
    for (int p = 0; p < me.n; p++) {
        OK(ncclSend(in + (size_t)p * n, n, F32, p, me.comm, me.stream));
        OK(ncclRecv(out + (size_t)p * n, n, F32, p, me.comm, me.stream));
    }
    OK(ncclGroupEnd());
    sync_stream();
    for (int p = 0; p < me.n; p++)
        for (size_t i = 0; i < n; i++) CHECK(out[(size_t)p * n + i] == value(p, (size_t)me.rank * n + i));
    free(in);
    free(out);
}

union cell {
    int8_t i8;
    uint8_t u8;
    int32_t i32;
    uint32_t u32;
    int64_t i64;
    uint64_t u64;
    float f;
    double d;
};

static union cell cell_of(int type, int v)
{
    union cell c = {0};
    if (type == I8) c.i8 = (int8_t)v;
    if (type == U8) c.u8 = (uint8_t)v;
    if (type == I32) c.i32 = v;
    if (type == U32) c.u32 = (uint32_t)v;
    if (type == I64) c.i64 = v;
    if (type == U64) c.u64 = (uint64_t)v;
    if (type == F32) c.f = (float)v;
    if (type == F64) c.d = v;
    return c;
}

static double value_of(int type, union cell c)
{
    const double values[] = {[I8] = c.i8,           [U8] = c.u8,           [I32] = c.i32,       [U32] = c.u32,
                             [I64] = (double)c.i64, [U64] = (double)c.u64, [F32] = (double)c.f, [F64] = c.d};
    return values[type];
}

/* Numbers that are exact in every type; means of integers are cut off. */
static void check_types(void)
{
    static const int types[] = {I8, U8, I32, U32, I64, U64, F32, F64};
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++)
        for (int i = 0; i < 8; i++) {
            union cell x = cell_of(types[t], i + me.rank), sum, avg;
            int want = me.n * i + me.n * (me.n - 1) / 2;
            OK(ncclAllReduce(&x, &sum, 1, types[t], SUM, me.comm, me.stream));
            OK(ncclAllReduce(&x, &avg, 1, types[t], AVG, me.comm, me.stream));
            sync_stream();
            CHECK(value_of(types[t], sum) == want);
            double mean = value_of(types[t], avg), exact = (double)want / me.n;
            CHECK(types[t] >= F32 ? mean > exact - 1e-5 && mean < exact + 1e-5 : mean == want / me.n);
        }
    /* 16-bit floats: 1.5 + rank. */
    static const uint16_t f16[] = {0x3e00, 0x4100, 0x4300, 0x4480}, bf16[] = {0x3fc0, 0x4020, 0x4060, 0x4090};
    static const uint16_t f16_sum[] = {0, 0x3e00, 0x4400, 0x4780, 0x4a00},
                          bf16_sum[] = {0, 0x3fc0, 0x4080, 0x40f0, 0x4140};
    uint16_t h = f16[me.rank], b = bf16[me.rank];
    OK(ncclAllReduce(&h, &h, 1, F16, SUM, me.comm, me.stream));
    OK(ncclAllReduce(&b, &b, 1, BF16, SUM, me.comm, me.stream));
    sync_stream();
    CHECK(h == f16_sum[me.n] && b == bf16_sum[me.n]);
}

static void check_premul(void)
{
    float factor = 0.25f * (float)(me.rank + 1), want = 0;
    float *in = filled(me.rank, 1000), *out = malloc(4000);
    int op;
    OK(ncclRedOpCreatePreMulSum(&op, &factor, F32, 1, me.comm));
    OK(ncclAllReduce(in, out, 1000, F32, op, me.comm, me.stream));
    OK(ncclRedOpDestroy(op, me.comm));
    CHECK(ncclRedOpDestroy(op, me.comm) == INVALID_ARGUMENT);
    sync_stream();
    for (size_t i = 0; i < 1000; i++) {
        want = 0;
        for (int r = 0; r < me.n; r++) want += value(r, i) * 0.25f * (float)(r + 1);
        CHECK(out[i] == want);
    }
    free(in);
    free(out);
}

static void values(void)
{
    static const size_t sizes[] = {0, 1, 7, 1000, 100003};
    int n = 0, rank = 0, device = -1;
    init_blocking();
    OK(ncclCommCount(me.comm, &n));
    OK(ncclCommUserRank(me.comm, &rank));
    OK(ncclCommCuDevice(me.comm, &device));
    CHECK(n == me.n && rank == me.rank && device == me.rank);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_all_reduce(sizes[i]);
        check_scatter_gather(sizes[i]);
        check_broadcast(sizes[i]);
        check_all_to_all(sizes[i]);
    }
    check_types();
    check_premul();
    OK(ncclCommDestroy(me.comm));
    CHECK(ncclAllReduce(&n, &n, 1, I32, SUM, me.comm, me.stream) == INVALID_ARGUMENT);
}

static void test_values(void **state)
{
    for (int n = 1; n <= 4; n++) ranks(n, values);
}

static void hip_rank(void)
{
    open_hip();
    OK(hipSetDevice(me.rank));
    OK(hipStreamCreateWithPriority(&me.stream, 1, 0));
}

/* Results of the fault table are NCCL's; a fatal device error ends what runs, and shows in every call. */
static void faults(void)
{
    float x = 1;
    uint32_t gate = 0;
    init_blocking();
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    CHECK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream) == 2);
    OK(cuStreamWaitValue32_v2(me.stream, dev(&gate), 1, 0));
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    CHECK(cuMemHostAlloc(NULL, 1, 0) == 700);
    CHECK(cuStreamSynchronize(me.stream) == 700);
    CHECK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream) == 1 && async_error() == 1);
    barrier(0);
    OK(ncclCommAbort(me.comm));
}

static void cuda_rank_faulty(void)
{
    setenv("GBEMU_FAIL", "ncclAllReduce:2:2,cuMemHostAlloc:1:700", 1);
    cuda_rank();
}

static void test_faults(void **state)
{
    int codes[8];
    run_ranks(2, faults, cuda_rank_faulty, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
}

static void hip_values(void)
{
    float *in = filled(me.rank, 5000), *out = malloc(20000);
    int version = 0;
    OK(ncclGetVersion(&version));
    CHECK(version == 22703);
    init_blocking();
    OK(ncclAllReduce(in, out, 5000, F32, SUM, me.comm, me.stream));
    OK(hipStreamSynchronize(me.stream));
    for (size_t i = 0; i < 5000; i++) CHECK(out[i] == sum_at(i));
    OK(ncclCommDestroy(me.comm));
}

static void test_rccl(void **state)
{
    int codes[8];
    run_ranks(3, hip_values, hip_rank, codes);
    for (int r = 0; r < 3; r++) assert_int_equal(codes[r], 0);
}

/* 64 MiB there and back, in allocations of the emulator. */
static void large(void)
{
    size_t n = 16u << 20;
    devptr a, b;
    uint32_t *host = malloc(n * 4);
    OK(cuMemAlloc_v2(&a, n * 4));
    OK(cuMemAlloc_v2(&b, n * 4));
    for (size_t i = 0; i < n; i++) host[i] = (uint32_t)i * 2654435761u + (uint32_t)me.rank;
    init_blocking();
    OK(cuMemcpyHtoDAsync_v2(a, host, n * 4, me.stream));
    OK(ncclGroupStart());
    OK(ncclSend((void *)(uintptr_t)a, n, U32, 1 - me.rank, me.comm, me.stream));
    OK(ncclRecv((void *)(uintptr_t)b, n, U32, 1 - me.rank, me.comm, me.stream));
    OK(ncclGroupEnd());
    sync_stream(); /* `host` is read by the queued copy until here */
    memset(host, 0, n * 4);
    OK(cuMemcpyDtoHAsync_v2(host, b, n * 4, me.stream));
    sync_stream();
    for (size_t i = 0; i < n; i++) CHECK(host[i] == (uint32_t)i * 2654435761u + (uint32_t)(1 - me.rank));
    OK(ncclCommDestroy(me.comm));
}

static void test_large(void **state)
{
    ranks(2, large);
}

/* ---- asynchrony and order ---- */
static void waits_for_gate(void)
{
    uint32_t flag = 0;
    float x = (float)(me.rank + 1);
    init_blocking();
    OK(cuStreamWaitValue32_v2(me.stream, dev(&flag), 1, 0));
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    CHECK(cuStreamQuery(me.stream) == 600);
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    sync_stream();
    CHECK(x == 3);
    /* The next operation of the communicator on another stream runs after this one. */
    void *other = new_stream();
    flag = 0;
    OK(cuStreamWaitValue32_v2(me.stream, dev(&flag), 1, 0));
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    OK(ncclAllReduce(&x, &x, 1, F32, MAX, me.comm, other));
    CHECK(cuStreamQuery(other) == 600);
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    OK(cuStreamSynchronize(other));
    CHECK(x == 6 && cuStreamQuery(me.stream) == 0);
    OK(ncclCommDestroy(me.comm));
}

static void test_stream_order(void **state)
{
    ranks(2, waits_for_gate);
}

struct call {
    _Atomic int started, done;
    void *context;
    int first; /* wait for the peer before the call */
};

static void *exchange(void *arg)
{
    struct call *k = arg;
    float in = (float)me.rank, out = -1;
    void *s;
    OK(cuCtxSetCurrent(k->context));
    OK(cuStreamCreateWithPriority(&s, 1, 0));
    atomic_store(&k->started, 1);
    OK(ncclGroupStart());
    OK(ncclSend(&in, 1, F32, 1 - me.rank, me.comm, s));
    OK(ncclRecv(&out, 1, F32, 1 - me.rank, me.comm, s));
    OK(ncclGroupEnd());
    atomic_store(&k->done, 1);
    OK(cuStreamSynchronize(s));
    CHECK(out == (float)(1 - me.rank));
    return NULL;
}

/* First send/recv of a pair holds the host until the device's flags open; the second does not; collectives never. */
static void lazy_connection(void)
{
    uint32_t flag = 0;
    float x = 1;
    struct call first = {0}, second = {0};
    pthread_t t;
    void *gated = new_stream(), *event;
    OK(cuEventCreate(&event, 2));
    OK(cuCtxGetCurrent(&first.context));
    second.context = first.context;
    OK(cuStreamWaitValue32_v2(gated, dev(&flag), 1, 0));
    /* Creation and a first collective pass. */
    init_blocking();
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    sync_stream();
    CHECK(x == 2);
    OK(pthread_create(&t, NULL, exchange, &first));
    EVENTUALLY(&first.started, 1);
    NOT_YET(&first.done, 1);
    /* Other threads' driver calls go through meanwhile. */
    OK(cuEventRecord(event, me.stream));
    OK(cuEventSynchronize(event));
    CHECK(!atomic_load(&first.done));
    barrier(0);
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    OK(pthread_join(t, NULL));
    flag = 0;
    OK(cuStreamWaitValue32_v2(gated, dev(&flag), 1, 0));
    OK(pthread_create(&t, NULL, exchange, &second));
    EVENTUALLY(&second.done, 1);
    OK(pthread_join(t, NULL));
    CHECK(cuStreamQuery(gated) == 600);
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    OK(ncclCommDestroy(me.comm));
}

static void test_lazy_connection(void **state)
{
    ranks(2, lazy_connection);
}

/* ---- failures ---- */
/* Rank 1 never comes: rank 0's all_reduce hangs until the abort, and the stream is free again. */
static void abort_hang(void)
{
    float x = 1;
    init_blocking();
    if (me.rank == 0) {
        OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
        barrier(0);
        CHECK(cuStreamQuery(me.stream) == 600);
        CHECK(async_error() == 0);
        OK(ncclCommAbort(me.comm));
        sync_stream();
        barrier(1);
    } else {
        barrier(0);
        barrier(1);
        CHECK(await_error() == REMOTE_ERROR);
        OK(ncclCommAbort(me.comm));
    }
    CHECK(ncclCommAbort(me.comm) == INVALID_ARGUMENT);
}

static void test_abort(void **state)
{
    ranks(2, abort_hang);
}

static void mismatch_end(void)
{
    CHECK(await_error() == INVALID_USAGE);
    /* It hangs, as the real one, until somebody aborts. */
    CHECK(cuStreamQuery(me.stream) == 600);
    barrier(0);
    OK(ncclCommAbort(me.comm));
    sync_stream();
}

static float buffer[4096];

/* A call after the first may find the mismatch known already. */
static void later(int rc)
{
    CHECK(rc == 0 || rc == INVALID_USAGE);
}

static void mismatch_kind(void)
{
    init_blocking();
    if (me.rank == 0) {
        OK(ncclAllReduce(buffer, buffer, 64, F32, SUM, me.comm, me.stream));
        later(ncclBroadcast(buffer, buffer, 64, F32, 0, me.comm, me.stream));
    } else {
        OK(ncclBroadcast(buffer, buffer, 64, F32, 0, me.comm, me.stream));
        later(ncclAllReduce(buffer, buffer, 64, F32, SUM, me.comm, me.stream));
    }
    mismatch_end();
}

static void mismatch_size(void)
{
    init_blocking();
    OK(ncclAllReduce(buffer, buffer, me.rank ? 64 : 65, F32, SUM, me.comm, me.stream));
    mismatch_end();
}

static void mismatch_p2p(void)
{
    init_blocking();
    if (me.rank == 0) {
        OK(ncclGroupStart());
        OK(ncclSend(buffer, 64, F32, 1, me.comm, me.stream));
        OK(ncclGroupEnd());
    } else {
        OK(ncclRecv(buffer, 32, F32, 0, me.comm, me.stream));
    }
    mismatch_end();
}

/* Both connect the pair first; then collective against point-to-point. */
static void mismatch_mixed(void)
{
    init_blocking();
    check_all_to_all(10);
    if (me.rank == 0) {
        OK(ncclSend(buffer, 64, F32, 1, me.comm, me.stream));
        later(ncclAllReduce(buffer, buffer, 64, F32, SUM, me.comm, me.stream));
    } else {
        OK(ncclAllReduce(buffer, buffer, 64, F32, SUM, me.comm, me.stream));
        later(ncclRecv(buffer, 64, F32, 0, me.comm, me.stream));
    }
    mismatch_end();
}

/* Ungrouped: both send first, which no buffer may hide. */
static void mismatch_both_send(void)
{
    init_blocking();
    check_all_to_all(10);
    OK(ncclSend(buffer, 16, F32, 1 - me.rank, me.comm, me.stream));
    later(ncclRecv(buffer + 64, 16, F32, 1 - me.rank, me.comm, me.stream));
    mismatch_end();
}

static void test_order_mismatch(void **state)
{
    ranks(2, mismatch_kind);
    ranks(2, mismatch_size);
    ranks(2, mismatch_p2p);
    ranks(2, mismatch_mixed);
    ranks(2, mismatch_both_send);
}

static void killed_peer(void)
{
    float x = 1;
    init_blocking();
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    sync_stream();
    barrier(0);
    if (me.rank == 2) raise(SIGKILL);
    OK(ncclAllReduce(&x, &x, 1, F32, SUM, me.comm, me.stream));
    CHECK(await_error() == REMOTE_ERROR);
    CHECK(cuStreamQuery(me.stream) == 600);
    OK(ncclCommAbort(me.comm));
    sync_stream();
}

/* Nothing of ours in /dev/shm, /tmp or the table of abstract sockets. */
static int leftovers(void)
{
    static const char *const dirs[] = {"/dev/shm", "/tmp"};
    int n = 0;
    for (int i = 0; i < 2; i++) {
        DIR *d = opendir(dirs[i]);
        struct dirent *e;
        while (d && (e = readdir(d)) != NULL)
            if (strstr(e->d_name, "gbemu")) n++;
        if (d) closedir(d);
    }
    char line[512];
    FILE *f = fopen("/proc/net/unix", "r");
    while (f && fgets(line, sizeof line, f))
        if (strstr(line, "gbemu")) n++;
    if (f) fclose(f);
    return n;
}

static void test_killed_peer(void **state)
{
    int codes[8], before = leftovers();
    run_ranks(3, killed_peer, cuda_rank, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
    assert_int_equal(codes[2], 128 + SIGKILL);
    assert_int_equal(leftovers(), before);
}

/* ---- creation ---- */
static struct nccl_config config(void)
{
    return (struct nccl_config){.size = sizeof(struct nccl_config),
                                .magic = 0xcafebeef,
                                .version = 21800,
                                .blocking = 0,
                                .cga = INT_MIN,
                                .min_ctas = INT_MIN,
                                .max_ctas = INT_MIN,
                                .split_share = INT_MIN};
}

static void non_blocking(void)
{
    struct nccl_config cfg = config();
    float in = (float)me.rank, out = -1;
    if (me.rank == 1) CHECK(becomes(&me.shared[0], 1, 20));
    int rc = ncclCommInitRankConfig(&me.comm, me.n, me.id, me.rank, &cfg);
    CHECK(rc == IN_PROGRESS);
    if (me.rank == 0) {
        CHECK(async_error() == IN_PROGRESS);
        /* No other call may be made on it yet. */
        CHECK(ncclAllReduce(&in, &out, 1, F32, SUM, me.comm, me.stream) == INVALID_ARGUMENT);
        atomic_fetch_add(&me.shared[0], 1);
    }
    while (async_error() == IN_PROGRESS) sched_yield();
    CHECK(async_error() == 0);
    OK(ncclGroupStart());
    OK(ncclSend(&in, 1, F32, 1 - me.rank, me.comm, me.stream));
    OK(ncclRecv(&out, 1, F32, 1 - me.rank, me.comm, me.stream));
    rc = ncclGroupEnd();
    CHECK(rc == IN_PROGRESS);
    while (async_error() == IN_PROGRESS) sched_yield();
    sync_stream();
    CHECK(out == (float)(1 - me.rank));
    /* Connected or not, any call may say "in progress"; then nothing is on the stream before it ended. */
    int in_progress = 0;
    for (int i = 0; i < 100; i++) {
        in = (float)(i + 1);
        rc = ncclAllReduce(&in, &out, 1, F32, SUM, me.comm, me.stream);
        CHECK(rc == 0 || rc == IN_PROGRESS);
        in_progress += rc == IN_PROGRESS;
        while (async_error() == IN_PROGRESS) sched_yield();
        sync_stream();
        CHECK(out == 2 * in);
    }
    CHECK(in_progress > 0 && in_progress < 50);
    OK(ncclCommDestroy(me.comm));
}

/* An init that cannot finish is aborted. */
static void stuck_init(void)
{
    struct nccl_config cfg = config();
    CHECK(ncclCommInitRankConfig(&me.comm, 2, me.id, 0, &cfg) == IN_PROGRESS);
    CHECK(async_error() == IN_PROGRESS);
    OK(ncclCommAbort(me.comm));
}

static void bad_configs(void)
{
    struct nccl_config cfg = config();
    cfg.blocking = 1;
    cfg.magic = 1;
    CHECK(ncclCommInitRankConfig(&me.comm, 1, me.id, 0, &cfg) == INVALID_ARGUMENT);
    cfg = config();
    cfg.size = 24; /* the layout of 2.14 with a newer stamp */
    CHECK(ncclCommInitRankConfig(&me.comm, 1, me.id, 0, &cfg) == INVALID_ARGUMENT);
    cfg = config();
    cfg.min_ctas = 4; /* and no maximum */
    CHECK(ncclCommInitRankConfig(&me.comm, 1, me.id, 0, &cfg) == INVALID_ARGUMENT);
    cfg = config();
    cfg.blocking = 1;
    OK(ncclCommInitRankConfig(&me.comm, 1, me.id, 0, &cfg));
    OK(ncclCommDestroy(me.comm));
}

static void duplicate_gpu(void)
{
    use_device(0);
    CHECK(ncclCommInitRank(&me.comm, me.n, me.id, me.rank) == INVALID_USAGE);
    CHECK(strstr(ncclGetLastError(NULL), "Duplicate GPU") != NULL);
}

static void other_host_id(void)
{
    use_device(0);
    me.stream = new_stream();
    init_blocking();
    check_all_reduce(100);
    OK(ncclCommDestroy(me.comm));
}

static void cuda_rank_host_id(void)
{
    setenv("NCCL_HOSTID", me.rank ? "host-b" : "host-a", 1);
    cuda_rank();
}

static void split(void)
{
    void *half;
    int n = 0, rank = -1;
    init_blocking();
    /* Even and odd ranks, in reverse. */
    OK(ncclCommSplit(me.comm, me.rank % 2, -me.rank, &half, NULL));
    OK(ncclCommCount(half, &n));
    OK(ncclCommUserRank(half, &rank));
    CHECK(n == 2 && rank == (me.rank < 2 ? 1 : 0));
    int x = me.rank;
    OK(ncclAllReduce(&x, &x, 1, I32, SUM, half, me.stream));
    sync_stream();
    CHECK(x == (me.rank % 2 ? 4 : 2));
    void *none = half;
    OK(ncclCommSplit(me.comm, me.rank == 0 ? -1 : 0, 0, &none, NULL));
    CHECK((none == NULL) == (me.rank == 0));
    if (none) OK(ncclCommDestroy(none));
    OK(ncclCommDestroy(half));
    OK(ncclCommDestroy(me.comm));
}

/* Two ranks in one process: inits in a group, then operations in a group. */
static void two_ranks_one_process(void)
{
    void *comm[2], *stream[2];
    int x[2] = {3, 4};
    OK(ncclGroupStart());
    for (int d = 0; d < 2; d++) {
        use_device(d);
        stream[d] = new_stream();
        OK(ncclCommInitRank(&comm[d], 2, me.id, d));
    }
    OK(ncclGroupEnd());
    OK(ncclGroupStart());
    for (int d = 0; d < 2; d++) OK(ncclAllReduce(&x[d], &x[d], 1, I32, SUM, comm[d], stream[d]));
    OK(ncclGroupEnd());
    for (int d = 0; d < 2; d++) {
        use_device(d);
        OK(cuStreamSynchronize(stream[d]));
        CHECK(x[d] == 7);
        OK(ncclCommDestroy(comm[d]));
    }
}

static void test_creation(void **state)
{
    int codes[8];
    ranks(2, non_blocking);
    ranks(1, stuck_init);
    ranks(1, bad_configs);
    ranks(2, duplicate_gpu);
    run_ranks(2, other_host_id, cuda_rank_host_id, codes);
    assert_int_equal(codes[0], 0);
    assert_int_equal(codes[1], 0);
    ranks(4, split);
    ranks(1, two_ranks_one_process);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),   cmocka_unit_test(test_rccl),           cmocka_unit_test(test_faults),
        cmocka_unit_test(test_large),    cmocka_unit_test(test_stream_order),   cmocka_unit_test(test_lazy_connection),
        cmocka_unit_test(test_abort),    cmocka_unit_test(test_order_mismatch), cmocka_unit_test(test_killed_peer),
        cmocka_unit_test(test_creation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
