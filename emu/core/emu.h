/* SPDX-License-Identifier: Apache-2.0
 * The emulated GPU runtime under both ABI fronts (cuda.c, hip.c): what a front may call.  It is not the ABI: the
 * fronts own names, argument order and numbers that differ.  Statuses are the numbers CUDA and HIP share.
 * Any thread may call anything here, unless it says otherwise.  */
#ifndef EMU_H
#define EMU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_API         __attribute__((visibility("default")))
#define EMU_MAX_DEVICES 16

enum emu_status {
    EMU_OK = 0,
    EMU_INVALID = 1,
    EMU_OOM = 2,
    EMU_NOT_INIT = 3,
    EMU_NO_DEVICE = 100,
    EMU_BAD_DEVICE = 101,
    EMU_BAD_IMAGE = 200,
    EMU_NO_CONTEXT = 201,
    EMU_WRONG_ARCH = 209,
    EMU_BAD_HANDLE = 400,
    EMU_NOT_FOUND = 500,
    EMU_NOT_READY = 600,
    EMU_ILLEGAL_ADDRESS = 700,
    EMU_CONTEXT_DESTROYED = 709,
    EMU_ALREADY_REGISTERED = 712,
    EMU_NOT_REGISTERED = 713,
    EMU_LAUNCH_FAILED = 719,
    EMU_NOT_PERMITTED = 800,
    EMU_NOT_SUPPORTED = 801,
    EMU_CAPTURE_UNSUPPORTED = 900,
};

/* What differs between the two libraries; each front defines one. */
struct emu_vendor {
    const char *name;        /* "cuda": log word, and part of every image */
    const char *arch;        /* default of GBEMU_ARCH */
    const char *device_name; /* marketing name, "emulated" included */
    bool needs_context;      /* error 201 without a current context (CUDA); else per-thread device (HIP) */
    bool cyclic_wait;        /* GEQ of wait-value compares (int32)(*p - v) >= 0 */
    int nccl_version;        /* default of GBEMU_NCCL_VERSION */
    int driver_version;
    int pci_bus_base;
    int wave;
};
extern const struct emu_vendor emu_vendor;

/* ---- conf.c: settings, read once from the environment (README.md lists them) ---- */
enum emu_rtc_mode { EMU_RTC_AUTO, EMU_RTC_TWIN, EMU_RTC_GCC };
struct emu_conf {
    uint64_t seed;
    unsigned delay_us;
    unsigned poll_us;
    unsigned queue;
    int devices;
    bool guard;
    bool one_thread;
    int strict;
    bool leaks;
    bool eager;
    bool capturing;
    size_t quarantine_bytes;
    enum emu_rtc_mode rtc;
    int nccl_version;
    int driver_version;
    int multiprocessors;
    int wave;      /* threads of a warp or wave */
    int hw_queues; /* streams share so many; 0: each has its own */
    char arch[64];
    char device_name[64];
};
const struct emu_conf *emu_conf(void);
/* The injected status of this call of `api` (GBEMU_FAIL), or 0; also sleeps what GBEMU_SLOW asks for. */
int emu_conf_fault(const char *api);
/* One line on stderr, "gbemu[cuda] pid N: API: text"; aborts when GBEMU_STRICT=2, is silent when 0. */
void emu_complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The same whatever GBEMU_STRICT says. */
void emu_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
uint64_t emu_now_ns(void);
void emu_sleep_us(unsigned us);
/* xorshift64*; `state` must not be 0. */
uint64_t emu_rand(uint64_t *state);

/* ---- obj.c: handles.  Every object starts with this head; dead ones stay in quarantine so that use is caught. ---- */
enum emu_kind { EMU_STREAM = 1, EMU_EVENT, EMU_MODULE, EMU_FUNCTION, EMU_COMM, EMU_PROGRAM, EMU_CONTEXT, EMU_KINDS };
struct emu_obj {
    enum emu_kind kind;
    bool alive;              /* guarded by the table's lock */
    int refs;                /* guarded by the table's lock */
    struct emu_dev *dev;     /* NULL: no device */
    void (*fini)(void *obj); /* runs once nobody uses the object any more; may be NULL */
    struct emu_obj *next;    /* quarantine */
};
/* Zeroed, alive, one reference (the handle's). */
void *emu_obj_new(enum emu_kind kind, size_t size, struct emu_dev *dev);
/* NULL after a complaint when `handle` is not a live object of this kind; else takes a reference. */
void *emu_obj_get(enum emu_kind kind, const void *handle);
void emu_obj_ref(void *obj);
void emu_obj_put(void *obj);
/* Ends the handle: later uses are caught.  Gives back the handle's reference. */
void emu_obj_end(void *obj);
/* Ends every handle of a device but its contexts (primary context torn down). */
void emu_obj_end_device(struct emu_dev *dev);
int emu_obj_count(enum emu_kind kind);

/* ---- device.c: devices, contexts, the calling thread, the driver's lock ---- */
struct emu_stream;
/* Streams of one hardware queue: what was put in first runs first, whatever stream it is of. */
#define EMU_MAX_HW_QUEUES 32
struct emu_hw_queue {
    uint64_t given, served; /* guarded by the device's hw_mu */
};
struct emu_dev {
    pthread_mutex_t hw_mu;
    pthread_cond_t hw_cv;
    struct emu_hw_queue hw[EMU_MAX_HW_QUEUES];
    unsigned nstreams; /* made so far; guarded by mu */
    int index;
    pthread_mutex_t mu;
    pthread_cond_t cv;
    struct emu_stream *streams; /* guarded by mu */
    struct emu_stream *legacy;  /* guarded by mu */
    uint64_t pending;           /* operations not finished on all streams; guarded by mu */
    bool exclusive;             /* a free (or eager load) holds the driver; guarded by mu */
    unsigned generation;        /* context teardowns so far; guarded by mu */
    int retained;               /* primary context count; guarded by mu */
    struct emu_obj *context;    /* guarded by mu; NULL before the first retain */
    _Atomic int sticky;         /* first fatal status: every later call returns it */
};
struct emu_thread {
    const char *api;
    bool in_callback;
    struct emu_obj *context; /* CUDA: current context (a reference is not held: contexts are never freed) */
    int device;              /* HIP: current device */
    int capture_mode;
};
extern _Thread_local struct emu_thread emu_thread;

int emu_dev_count(void);
struct emu_dev *emu_dev_at(int index); /* NULL when out of range */
void emu_dev_uuid(int index, unsigned char out[16]);
void emu_dev_pci(int index, char *out, size_t size);
/* 64-bit host identity: NCCL_HOSTID, or the boot id. */
uint64_t emu_host_id(void);
int emu_dev_retain(struct emu_dev *dev, struct emu_obj **context);
int emu_dev_release(struct emu_dev *dev);
/* Marks emulator as initialised in this process (cuInit); calls before it return 3 where the vendor says so. */
int emu_init(void);
/* Start of every API call: fork, callback and fault checks.  With `dev`: resolves the calling thread's device, waits
 * for the driver's lock and returns its sticky error. */
int emu_enter(const char *api, struct emu_dev **dev);
/* Only the checks of a call that works on a device but not on the calling thread's context. */
int emu_gate(struct emu_dev *dev);
/* Takes the driver for itself and waits until the device is idle: what cuMemFree does on real hardware. */
void emu_exclusive_begin(struct emu_dev *dev);
void emu_exclusive_end(struct emu_dev *dev);
/* Waits for what is pending now, without holding anything: lazy loading, first connection of an NCCL pair.
 * `stop` (may be NULL) ends the wait early when it becomes true. */
void emu_drain(struct emu_dev *dev, const _Atomic int *stop);
/* Makes `status` the device's sticky error: pending work is dropped, every later call fails. */
void emu_dev_fail(struct emu_dev *dev, int status);

/* ---- memory.c ---- */
enum emu_mem { EMU_MEM_DEVICE, EMU_MEM_PINNED, EMU_MEM_REGISTERED };
struct emu_mem_info {
    enum emu_mem kind;
    int device;
    void *base;
    size_t size;
    unsigned flags;
};
int emu_mem_alloc(struct emu_dev *dev, enum emu_mem kind, size_t size, unsigned flags, void **out);
/* Takes the driver exclusively (see emu_exclusive_begin). */
int emu_mem_free(struct emu_dev *dev, enum emu_mem kind, void *p);
int emu_mem_register(struct emu_dev *dev, void *p, size_t size, unsigned flags);
int emu_mem_unregister(void *p);
/* A copy from or to `p` is queued (begins) or over: registered memory stays so until then. */
void emu_mem_hold(const void *p, bool begins);
/* False when no live allocation holds `p`: plain host memory, which also counts as device memory. */
bool emu_mem_query(const void *p, struct emu_mem_info *out);
/* The address at which a worker may touch [p, p+size); NULL after a complaint when it is out of bounds or freed. */
void *emu_mem_view(const void *p, size_t size, const char *api);
/* Alias of a pointer argument of a kernel: like emu_mem_view with an unknown size. */
void *emu_mem_alias(const void *p);
void emu_mem_count(int out[3]);

/* ---- stream.c ---- */
struct emu_op;
struct emu_stream {
    struct emu_obj obj;
    pthread_mutex_t mu;
    pthread_cond_t cv;
    struct emu_op *head, **tail;       /* guarded by mu */
    uint64_t submitted, done, pending; /* guarded by mu */
    bool closing;                      /* guarded by mu */
    bool nonblocking;
    bool condemned; /* guarded by dev->mu */
    unsigned id;
    struct emu_hw_queue *hw; /* NULL: its own */
    uint64_t rng;            /* worker only */
    struct emu_stream *next; /* guarded by dev->mu */
};
typedef void emu_run_fn(struct emu_stream *stream, const char *api, void *arg);
int emu_stream_create(struct emu_dev *dev, unsigned flags, struct emu_stream **out);
int emu_stream_destroy(struct emu_dev *dev, void *handle);
/* Destroys all streams of a device (context teardown). */
void emu_stream_destroy_all(struct emu_dev *dev);
/* Resolves a handle (0 and 1: legacy default, 2: per thread) and takes a reference; NULL after a complaint. */
struct emu_stream *emu_stream_get(struct emu_dev *dev, void *handle);
int emu_stream_query(struct emu_stream *s);
int emu_stream_sync(struct emu_stream *s);
int emu_dev_sync(struct emu_dev *dev);
/* Queues run(arg) with a copy of `size` bytes of arg; `drop` (may be NULL) frees what arg owns, after run or instead.
 * Blocks while the queue is full.  Returns the operation's number in `seq` (may be NULL). */
int emu_post(struct emu_stream *s, emu_run_fn *run, void (*drop)(void *arg), const void *arg, size_t size,
             uint64_t *seq);
int emu_post_wait(struct emu_stream *s, struct emu_stream *other, uint64_t seq);
/* Waits on the calling thread until operation `seq` is done. */
void emu_stream_wait(struct emu_stream *s, uint64_t seq, const _Atomic int *stop);
bool emu_stream_is_done(struct emu_stream *s, uint64_t seq);
/* Number of the last operation queued so far. */
uint64_t emu_stream_last(struct emu_stream *s);

/* ---- ops.c: copies, fills, memory operations, host functions, events ---- */
enum emu_wait { EMU_WAIT_GEQ = 0, EMU_WAIT_EQ = 1, EMU_WAIT_AND = 2, EMU_WAIT_NOR = 3 };
int emu_copy(struct emu_stream *s, void *dst, const void *src, size_t size);
int emu_fill(struct emu_stream *s, void *dst, unsigned char value, size_t size);
int emu_write32(struct emu_stream *s, void *addr, uint32_t value);
int emu_wait32(struct emu_stream *s, void *addr, uint32_t value, uint32_t mask, enum emu_wait how);
int emu_host_func(struct emu_stream *s, void (*fn)(void *), void *arg);
int emu_event_create(struct emu_dev *dev, unsigned flags, void **out);
int emu_event_destroy(void *handle);
int emu_event_record(struct emu_stream *s, void *handle);
int emu_event_query(void *handle);
int emu_event_sync(void *handle);
int emu_event_wait(struct emu_stream *s, void *handle);

/* ---- module.c, rtc.c ---- */
struct emu_dim {
    unsigned x, y, z;
};
int emu_module_load(struct emu_dev *dev, const void *image, void **out);
int emu_module_unload(struct emu_dev *dev, void *handle);
int emu_module_function(void *handle, const char *name, void **out);
int emu_function_load(struct emu_dev *dev, void *handle);
int emu_launch(struct emu_stream *s, void *function, struct emu_dim grid, struct emu_dim block, void **params);

/* Statuses of both compilers' APIs agree: 0, 1 OOM, 3 invalid input, 4 invalid program, 5 invalid option, 6 compile. */
int emu_rtc_create(const char *source, const char *name, int headers, void **out);
int emu_rtc_destroy(void *handle);
int emu_rtc_compile(void *handle, int count, const char *const *options);
enum emu_rtc_what { EMU_RTC_LOG, EMU_RTC_BINARY, EMU_RTC_INTERMEDIATE };
/* Bytes (the log's NUL included), and the bytes themselves. */
int emu_rtc_size(void *handle, enum emu_rtc_what what, size_t *out);
int emu_rtc_read(void *handle, enum emu_rtc_what what, char *out);
/* Each front's own: whether its compiler knows the architecture. */
bool emu_arch_known(const char *arch);

#endif
