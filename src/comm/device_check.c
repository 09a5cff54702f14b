/* SPDX-License-Identifier: Apache-2.0
 * Tries on one device everything that the library will need of it, and writes what it found as JSON: for
 * `gpubridge doctor --device`, above all on hardware that nobody of the project has.  No network, no other process; the
 * calling thread. */
#include "base/clock.h"
#include "ccl/ccl.h"
#include "codec/codec.h"
#include "codec/kernels.h"
#include "codec/reduce.h"
#include "comm/context.h"
#include "device/device.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT_NS    20000000000u /* for any piece of work to end */
#define COPY_BYTES  (16u << 20)
#define VALUES      4099u
#define MAX_SOURCES 4u
#define THREADS     256u
#define BLOCKS      32u

struct check {
    const struct gb_settings *settings;
    int kind;
    struct gb_device *device;
    struct gb_module *module;
    void *reduce[GB_REDUCE_WAYS], *poison, *stream, *event;
    char *json;
    size_t at, capacity;
    int index, failed;
    char words[600]; /* of the check that runs: what it found */
};

static void add(struct check *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(struct check *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n =
        vsnprintf(c->at < c->capacity ? c->json + c->at : NULL, c->at < c->capacity ? c->capacity - c->at : 0, fmt, ap);
    va_end(ap);
    if (n > 0) c->at += (size_t)n;
}

static void add_string(struct check *c, const char *text)
{
    add(c, "\"");
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            add(c, "\\%c", *p);
        else if (*p < 0x20)
            add(c, " ");
        else
            add(c, "%c", *p);
    }
    add(c, "\"");
}

static void found(struct check *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void found(struct check *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->words, sizeof c->words, fmt, ap);
    va_end(ap);
}

/* ---- pieces ---- */

static int finish(struct check *c, void *stream)
{
    const uint64_t start = gb_now_ns();
    int rc;
    GB_TRY(gb_event_record(c->device, c->event, stream));
    while ((rc = gb_event_query(c->device, c->event)) == GPUBRIDGE_AGAIN) {
        if (gb_now_ns() - start > LIMIT_NS)
            return GB_FAIL(GPUBRIDGE_ERR_TIMEOUT, "the work on a stream did not end within 20 s");
        sched_yield();
    }
    return rc;
}

static uint64_t random_bits(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545F4914F6CDD1Du;
}

/* Any bits: NaN, infinities and subnormal numbers among them. */
static void fill(uint8_t *data, uint64_t bytes, int dtype, uint64_t *state)
{
    for (uint64_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)(random_bits(state) >> 40);
        if (dtype == GPUBRIDGE_BOOL) data[i] &= 1;
    }
}

/* ---- the checks ---- */

static int check_open(struct check *c)
{
    const struct gb_settings *s = c->settings;
    const int cuda = c->kind == GPUBRIDGE_DEVICE_CUDA;
    char emulator[1024];
    const char *path = cuda ? s->cuda_lib : s->hip_lib;
    if (!path[0] && s->emulate != GB_EMULATE_NONE) {
        GB_TRY(gb_device_emulator(c->kind, emulator, sizeof emulator));
        path = emulator;
    }
    GB_TRY(gb_device_open(c->kind, c->index, path[0] ? path : NULL, &c->device));
    gb_device_set_cache(c->device, s->cache_dir);
    GB_TRY(gb_device_bind(c->device));
    GB_TRY(gb_stream_create(c->device, &c->stream));
    GB_TRY(gb_event_create(c->device, &c->event));
    gb_device_describe(c->device, c->words, sizeof c->words);
    return 0;
}

static int check_compiler(struct check *c)
{
    char compiler[500];
    const uint64_t start = gb_now_ns();
    gb_module_compiler(c->device, compiler, sizeof compiler);
    GB_TRY(gb_module_build(c->device, gb_kernels_source, &c->module));
    for (int way = 0; way < GB_REDUCE_WAYS; way++)
        GB_TRY(gb_module_kernel(c->device, c->module, gb_kernel_names[way], &c->reduce[way]));
    GB_TRY(gb_module_kernel(c->device, c->module, "gb_poison", &c->poison));
    found(c, "%s; %s in %.0f ms", compiler, gb_module_was_cached(c->module) ? "loaded from the cache" : "compiled",
          (double)(gb_now_ns() - start) * 1e-6);
    return 0;
}

static int compare_copies(struct check *c, uint8_t *host, void *a, void *b)
{
    uint64_t state = 7, started[2], took[2];
    uint8_t *const back = host + COPY_BYTES;
    for (uint64_t i = 0; i < COPY_BYTES; i += 8) {
        const uint64_t x = random_bits(&state);
        memcpy(host + i, &x, 8);
    }
    memset(back, 0, COPY_BYTES);
    started[0] = gb_now_ns();
    GB_TRY(gb_stream_copy(c->device, a, host, COPY_BYTES, c->stream));
    GB_TRY(finish(c, c->stream));
    took[0] = gb_now_ns() - started[0];
    GB_TRY(gb_stream_copy(c->device, b, a, COPY_BYTES, c->stream));
    GB_TRY(finish(c, c->stream));
    started[1] = gb_now_ns();
    GB_TRY(gb_stream_copy(c->device, back, b, COPY_BYTES, c->stream));
    GB_TRY(finish(c, c->stream));
    took[1] = gb_now_ns() - started[1];
    if (memcmp(host, back, COPY_BYTES) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "16 MiB came back changed from the device");
    if (gb_device_info(c->device)->emulated)
        found(c, "16 MiB to the device and back, equal");
    else
        found(c, "16 MiB to the device at %.1f GB/s, back at %.1f GB/s, equal", COPY_BYTES / (double)took[0],
              COPY_BYTES / (double)took[1]);
    return 0;
}

static int check_copies(struct check *c)
{
    void *host = NULL, *a = NULL, *b = NULL;
    int rc = gb_device_host_alloc(c->device, 2ull * COPY_BYTES, &host);
    if (!rc) rc = gb_device_alloc(c->device, COPY_BYTES, &a);
    if (!rc) rc = gb_device_alloc(c->device, COPY_BYTES, &b);
    if (!rc) rc = compare_copies(c, host, a, b);
    gb_device_free(c->device, b);
    gb_device_free(c->device, a);
    gb_device_host_free(c->device, host);
    return rc;
}

/* In memory that processes of a host can share, where messages between their devices lie. */
static int check_shared(struct check *c)
{
    void *a = NULL, *b = NULL;
    struct gb_region region;
    GB_TRY(gb_region_make(2ull * COPY_BYTES, &region));
    int rc = gb_device_host_register(c->device, region.base, region.bytes), is_registered = !rc;
    if (!rc) rc = gb_device_alloc(c->device, COPY_BYTES, &a);
    if (!rc) rc = gb_device_alloc(c->device, COPY_BYTES, &b);
    if (!rc) rc = compare_copies(c, region.base, a, b);
    gb_device_free(c->device, b);
    gb_device_free(c->device, a);
    if (is_registered) gb_device_host_unregister(c->device, region.base);
    gb_region_free(&region);
    return rc;
}

/* What one stream has written another sees after an event, a hundred times around. */
static int pass_around(struct check *c, void *other, void *const event[2], uint32_t *word, uint32_t *mem)
{
    word[0] = 0x5eed;
    GB_TRY(gb_stream_copy(c->device, mem, word, 4, c->stream));
    for (uint32_t i = 0; i < 100; i++) {
        void *const from = i % 2 ? other : c->stream, *const to = i % 2 ? c->stream : other;
        GB_TRY(gb_event_record(c->device, event[i % 2], from));
        GB_TRY(gb_stream_wait_event(c->device, to, event[i % 2]));
        GB_TRY(gb_stream_copy(c->device, mem + i + 1, mem + i, 4, to));
    }
    GB_TRY(gb_stream_copy(c->device, word + 1, mem + 100, 4, c->stream));
    GB_TRY(finish(c, c->stream));
    if (word[1] != word[0]) return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "a stream did not wait for another's event");
    found(c, "two streams ordered by events, 100 turns");
    return 0;
}

static int check_events(struct check *c)
{
    void *other = NULL, *event[2] = {NULL, NULL}, *word = NULL;
    int rc = gb_stream_create(c->device, &other);
    for (int i = 0; i < 2 && !rc; i++) rc = gb_event_create(c->device, &event[i]);
    if (!rc) rc = gb_device_host_alloc(c->device, 4096, &word);
    if (!rc) rc = pass_around(c, other, event, word, gb_device_scrap(c->device));
    gb_device_host_free(c->device, word);
    for (int i = 0; i < 2; i++) gb_event_destroy(c->device, event[i]);
    gb_stream_destroy(c->device, other);
    return rc;
}

static int turn_flags(struct check *c, _Atomic uint32_t *flag)
{
    const uint64_t start = gb_now_ns();
    for (uint32_t i = 1; i <= 100; i++) {
        GB_TRY(gb_stream_wait_flag(c->device, c->stream, (const void *)&flag[0], i));
        GB_TRY(gb_stream_write_flag(c->device, c->stream, (void *)&flag[16], i));
        atomic_store_explicit(&flag[0], i, memory_order_release);
        while (atomic_load_explicit(&flag[16], memory_order_acquire) != i)
            if (gb_now_ns() - start > LIMIT_NS)
                return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "a stream did not see a flag that the host had set");
    }
    GB_TRY(finish(c, c->stream));
    found(c, "streams wait for and write flags in host memory");
    return 0;
}

static int check_flags(struct check *c)
{
    void *flags = NULL;
    if (!gb_device_info(c->device)->has_stream_flags) {
        found(c, "not used on this vendor: the launcher thread polls events");
        return 0;
    }
    GB_TRY(gb_device_host_alloc(c->device, 4096, &flags));
    memset(flags, 0, 4096);
    int rc = turn_flags(c, flags);
    gb_device_host_free(c->device, flags);
    return rc;
}

struct value_case {
    uint8_t *host, *want; /* host: pinned, sources and then the device's result */
    uint8_t *mem;         /* device: the same layout */
    uint64_t stride;
    int dtype, op;
};

/* The same operation here and there, on sources that lie in v->host.  `bytes` of the result are compared. */
static int compare_values(struct check *c, const struct value_case *v, struct gb_reduce_args args, uint64_t bytes)
{
    struct gb_reduce_args there = args;
    for (uint32_t k = 0; k < args.nsrc; k++) {
        args.src[k] = v->host + k * v->stride;
        there.src[k] = v->mem + k * v->stride;
    }
    args.dst = v->want;
    there.dst = v->mem + MAX_SOURCES * v->stride;
    void *params[] = {&there};
    gb_reduce_host(&args);
    GB_TRY(gb_stream_copy(c->device, v->mem, v->host, args.nsrc * v->stride, c->stream));
    GB_TRY(gb_stream_launch(c->device, c->stream, c->reduce[gb_reduce_way(&args)], BLOCKS, THREADS, params));
    GB_TRY(gb_stream_copy(c->device, v->host + MAX_SOURCES * v->stride, there.dst, bytes, c->stream));
    GB_TRY(finish(c, c->stream));
    const uint8_t *got = v->host + MAX_SOURCES * v->stride;
    for (uint64_t i = 0; i < bytes; i++)
        if (got[i] != v->want[i])
            return GB_FAIL(GPUBRIDGE_ERR_DEVICE,
                           "%s of %s, %u sources, %s: byte %llu is %02x on the device and %02x here",
                           gb_reduce_op_name(args.op), gb_dtype_name(args.dtype), args.nsrc, gb_codec_name(args.codec),
                           (unsigned long long)i, got[i], v->want[i]);
    return 0;
}

static int compare_plain(struct check *c, const struct value_case *v, uint32_t nsrc, uint64_t *state)
{
    const uint64_t bytes = VALUES * gb_dtype_bytes(v->dtype);
    struct gb_reduce_args args = {.count = VALUES, .factor = 0.37, .divisor = 3, .nsrc = (uint8_t)nsrc};
    args.dtype = (uint8_t)v->dtype;
    args.op = (uint8_t)v->op;
    args.flags = GB_REDUCE_FINAL;
    if (v->op == GPUBRIDGE_PREMUL_SUM) args.premul_mask = (1u << nsrc) - 1;
    for (uint32_t k = 0; k < nsrc; k++) fill(v->host + k * v->stride, bytes, v->dtype, state);
    return compare_values(c, v, args, bytes);
}

static int all_values(struct check *c, struct value_case *v)
{
    uint64_t state = 11;
    int cases = 0;
    for (v->dtype = 0; v->dtype < GPUBRIDGE_DTYPE_COUNT; v->dtype++)
        for (v->op = 0; v->op < GPUBRIDGE_REDUCE_OP_COUNT; v->op++) {
            if (!gb_reduce_supported(v->dtype, v->op)) continue;
            for (uint32_t nsrc = 1; nsrc <= MAX_SOURCES; nsrc += nsrc) {
                GB_TRY(compare_plain(c, v, nsrc, &state));
                cases++;
            }
        }
    found(c, "%d sums, products, extremes and bit operations of random bits, equal to the host's bit for bit", cases);
    return 0;
}

/* Values as gradients have them, now and then one of random bits. */
static void fill_common(uint8_t *to, int dtype, uint64_t *state)
{
    const int bytes = (int)gb_dtype_bytes(dtype);
    fill(to, VALUES * (uint64_t)bytes, dtype, state);
    for (uint64_t i = 0; i < VALUES; i++) {
        uint64_t r = *state = *state * 6364136223846793005u + 1442695040888963407u;
        float x = (float)(int32_t)(r >> 32) * 0x1p-28f;
        uint16_t half = (uint16_t)(0x3c00u + (r >> 40 & 0x81ffu));
        if (r >> 20 & 511u) memcpy(to + i * (uint64_t)bytes, bytes == 4 ? (void *)&x : (void *)&half, (size_t)bytes);
    }
}

/* One codec and dtype: floats to a message, a message added to floats, two added and encoded again. */
static int compare_messages(struct check *c, const struct value_case *v, int codec, uint64_t *state)
{
    const uint64_t wire = gb_codec_bytes(codec, VALUES);
    struct gb_reduce_args pack = {.count = VALUES, .divisor = 4, .nsrc = 1, .op = GPUBRIDGE_AVG, .dst_is_enc = 1};
    pack.codec = (uint8_t)codec;
    pack.dtype = (uint8_t)v->dtype;
    uint8_t *const message = v->host + v->stride;
    fill_common(v->host, v->dtype, state);
    GB_TRY(compare_values(c, v, pack, wire));
    memcpy(message, v->want, wire);
    memcpy(message + v->stride, v->want, wire);
    struct gb_reduce_args add = pack, again = pack;
    add.nsrc = 2;
    add.enc_mask = 2;
    add.dst_is_enc = 0;
    add.flags = GB_REDUCE_FINAL;
    GB_TRY(compare_values(c, v, add, VALUES * gb_dtype_bytes(v->dtype)));
    again.nsrc = 3;
    again.enc_mask = 6;
    return compare_values(c, v, again, wire);
}

static int all_messages(struct check *c, struct value_case *v)
{
    static const uint8_t dtypes[] = {GPUBRIDGE_F32, GPUBRIDGE_BF16, GPUBRIDGE_F16};
    uint64_t state = 12;
    for (int codec = GB_CODEC_NONE + 1; codec < GB_CODEC_COUNT; codec++)
        for (int d = 0; d < 3; d++) {
            v->dtype = dtypes[d];
            GB_TRY(compare_messages(c, v, codec, &state));
        }
    found(c, "%d codecs: encoding, decoding, sums of both, equal to the host's bit for bit", GB_CODEC_COUNT - 1);
    return 0;
}

/* Runs `all` with memory for MAX_SOURCES sources and a result. */
static int with_values(struct check *c, int (*all)(struct check *c, struct value_case *v))
{
    struct value_case v = {.stride = VALUES * 16 + 48};
    void *host = NULL, *mem = NULL;
    if (!c->reduce[GB_WAY_ANY]) return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "no kernels: the compiler's check failed");
    v.want = malloc(v.stride);
    if (!v.want) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the values");
    int rc = gb_device_host_alloc(c->device, (MAX_SOURCES + 1) * v.stride, &host);
    if (!rc) rc = gb_device_alloc(c->device, (MAX_SOURCES + 1) * v.stride, &mem);
    v.host = host;
    v.mem = mem;
    if (!rc) rc = all(c, &v);
    gb_device_free(c->device, mem);
    gb_device_host_free(c->device, host);
    free(v.want);
    return rc;
}

static int check_values(struct check *c)
{
    return with_values(c, all_values);
}

static int check_messages(struct check *c)
{
    return with_values(c, all_messages);
}

/* The kernel that makes a result NaN when its operation was given up, and leaves it alone otherwise. */
static int look_at_poison(struct check *c, uint32_t *host, uint32_t *mem)
{
    uint64_t bytes = 1000 * sizeof *mem;
    void *word = host + 1024, *dst = mem, *params[] = {&dst, &bytes, &word};
    for (uint32_t given_up = 0; given_up < 2; given_up++) {
        for (uint32_t i = 0; i < 1000; i++) host[i] = 0x40000000u + i;
        host[1024] = given_up;
        GB_TRY(gb_stream_copy(c->device, mem, host, bytes, c->stream));
        GB_TRY(gb_stream_launch(c->device, c->stream, c->poison, 4, THREADS, params));
        GB_TRY(gb_stream_copy(c->device, host, mem, bytes, c->stream));
        GB_TRY(finish(c, c->stream));
        for (uint32_t i = 0; i < 1000; i++) {
            const int is_nan = (host[i] & 0x7fffffffu) > 0x7f800000u;
            if (is_nan != (int)given_up)
                return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "word %u is %08x after an operation that was%s given up", i,
                               host[i], given_up ? "" : " not");
        }
    }
    found(c, "kernels read host memory; results of operations that were given up become NaN");
    return 0;
}

static int check_poison(struct check *c)
{
    void *host = NULL, *mem = NULL;
    if (!c->poison) return GB_FAIL(GPUBRIDGE_ERR_DEVICE, "no kernels: the compiler's check failed");
    int rc = gb_device_host_alloc(c->device, 8192, &host);
    if (!rc) rc = gb_device_alloc(c->device, 8192, &mem);
    if (!rc) rc = look_at_poison(c, host, mem);
    gb_device_free(c->device, mem);
    gb_device_host_free(c->device, host);
    return rc;
}

static int check_vendor(struct check *c)
{
    const struct gb_settings *s = c->settings;
    const struct gb_device_info *info = gb_device_info(c->device);
    const struct gb_ccl *ccl = NULL;
    struct gb_ccl_comm *comm = NULL;
    uint8_t id[GB_CCL_ID_BYTES];
    const char *path = c->kind == GPUBRIDGE_DEVICE_CUDA ? s->nccl_lib : s->rccl_lib;
    if (!path[0] && info->emulated) path = info->library;
    GB_TRY(gb_ccl_open(c->kind, path[0] ? path : NULL, &ccl));
    GB_TRY(gb_ccl_unique_id(ccl, id));
    GB_TRY(gb_ccl_comm_create(ccl, c->device, 1, 0, id, (int64_t)LIMIT_NS, NULL, &comm));
    gb_ccl_comm_destroy(comm);
    found(c, "%s; a communicator of one rank was made", gb_ccl_describe(ccl));
    return 0;
}

static const struct {
    const char *name;
    int (*run)(struct check *c);
    const char *without; /* what its failure means */
} checks[] = {
    {"driver", check_open, "nothing works on this device"},
    {"copies", check_copies, "nothing works on this device"},
    {"shared", check_shared, "messages to other ranks of this host are copied by the processor"},
    {"events", check_events, "nothing works on this device"},
    {"flags", check_flags, "set GPUBRIDGE_GATE=off"},
    {"compiler", check_compiler, "sums are made in host memory, slower"},
    {"values", check_values, "sums are made in host memory, slower, without a compiler; do not use it otherwise"},
    {"messages", check_messages, "do not compress on this device"},
    {"poison", check_poison, "do not use kernels on this device"},
    {"collectives", check_vendor, "islands of one rank only"},
};

static void run_one(struct check *c, size_t i)
{
    const uint64_t start = gb_now_ns();
    c->words[0] = 0;
    int rc = i > 0 && !c->device ? GB_FAIL(GPUBRIDGE_ERR_DEVICE, "not tried") : checks[i].run(c);
    if (rc) found(c, "%s", gb_err_text());
    add(c, "%s  {\"check\": \"%s\", \"ok\": %s, \"ms\": %.1f, \"found\": ", i ? ",\n" : "", checks[i].name,
        rc ? "false" : "true", (double)(gb_now_ns() - start) * 1e-6);
    add_string(c, c->words);
    if (rc) {
        add(c, ", \"without\": ");
        add_string(c, checks[i].without);
        c->failed++;
    }
    add(c, "}");
}

static void add_device(struct check *c)
{
    if (!c->device) return;
    const struct gb_device_info *info = gb_device_info(c->device);
    add(c, "],\n \"device\": {\"name\": ");
    add_string(c, info->name);
    add(c, ", \"vendor\": ");
    add_string(c, info->vendor);
    add(c, ", \"arch\": ");
    add_string(c, info->arch);
    add(c, ", \"pci\": ");
    add_string(c, info->pci);
    add(c, ", \"library\": ");
    add_string(c, info->library);
    add(c, ", \"driver_version\": %d, \"multiprocessors\": %d, \"emulated\": %s, \"stream_flags\": %s}",
        info->driver_version, info->multiprocessors, info->emulated ? "true" : "false",
        info->has_stream_flags ? "true" : "false");
}

static void close_all(struct check *c)
{
    if (!c->device) return;
    gb_module_destroy(c->device, c->module);
    gb_event_destroy(c->device, c->event);
    gb_stream_destroy(c->device, c->stream);
    gb_device_close(c->device);
}

int gpubridge_device_check(int kind, int index, const char *settings_text, char *report, size_t capacity)
{
    struct gb_settings settings;
    if (!report || capacity == 0) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "there is no room for the report");
    GB_TRY(gb_settings_load(settings_text, 0, &settings));
    if (kind != GPUBRIDGE_DEVICE_CUDA && kind != GPUBRIDGE_DEVICE_HIP)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "device kind %d has nothing to check; CUDA (1) or HIP (2)", kind);
    struct check c = {.settings = &settings, .kind = kind, .json = report, .capacity = capacity, .index = index};
    report[0] = 0;
    add(&c, "{\"gpubridge\": \"%s\",\n \"checks\": [\n", GB_VERSION);
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) run_one(&c, i);
    if (!c.device) add(&c, "]");
    add_device(&c);
    add(&c, ",\n \"failed\": %d}\n", c.failed);
    close_all(&c);
    if (c.at >= capacity) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the report needs %zu bytes", c.at + 1);
    return c.failed ? GB_FAIL(GPUBRIDGE_ERR_DEVICE, "%d checks of the device failed", c.failed) : 0;
}
