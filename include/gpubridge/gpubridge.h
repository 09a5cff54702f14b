/* SPDX-License-Identifier: Apache-2.0
 *
 * gpubridge.h: collectives over groups whose ranks sit on GPUs of different vendors, or on CPUs.
 *
 * A *context* is one rank's process-wide state: its device, its listener, its links to other processes, its threads.
 * A *comm* (group) is made by all its members: each asks for a hello (an opaque blob), the caller exchanges the blobs
 * by any means (a key-value store, a file, MPI_Allgather) and every member creates the comm from all of them.  Work is
 * submitted as an operation and finishes asynchronously behind a *request*.
 *
 * Every int returned is an enum gpubridge_status.  Pointers passed in are borrowed: for the call, or, for the buffers
 * of an operation, until its request has completed.  Outputs are written only on success.  All functions may be called
 * from any thread unless they say otherwise; operations of one comm must be submitted in the same order on all ranks.
 * After fork() in the child every call but gpubridge_abi/version/strerror returns GPUBRIDGE_ERR_FORKED.
 */
#ifndef GPUBRIDGE_H
#define GPUBRIDGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPUBRIDGE_API     __attribute__((visibility("default")))
#define GPUBRIDGE_CHECKED GPUBRIDGE_API __attribute__((warn_unused_result))

/* Changes whenever a caller compiled against (or generated from) an older header would break. */
#define GPUBRIDGE_ABI 2

/* Grouped by the largest thing that is lost. */
enum gpubridge_status {
    GPUBRIDGE_OK = 0,
    /* this call only */
    GPUBRIDGE_ERR_INVALID = -1,     /* an argument is wrong; the text says which and what is legal */
    GPUBRIDGE_ERR_UNSUPPORTED = -2, /* legal, but not for this dtype, op, device or library version */
    GPUBRIDGE_AGAIN = -3,           /* not finished yet: call again */
    GPUBRIDGE_ERR_TIMEOUT = -4,     /* the deadline passed; the text names who is missing */
    GPUBRIDGE_ERR_SETTING = -5,     /* a setting (environment, options) has a bad value */
    /* this request */
    GPUBRIDGE_ERR_CANCELLED = -20,
    GPUBRIDGE_ERR_CHECKSUM = -21, /* a frame arrived damaged; the text names the peer */
    GPUBRIDGE_ERR_MISMATCH = -22, /* ranks disagree on the operation; both signatures are in the text */
    /* a peer, and with it every comm it belongs to */
    GPUBRIDGE_ERR_PEER_LOST = -40,   /* died, went silent, or left while it was needed */
    GPUBRIDGE_ERR_REFUSED = -41,     /* did not prove the job's secret, or is not the expected process */
    GPUBRIDGE_ERR_VERSION = -42,     /* incompatible protocol, library or torch version */
    GPUBRIDGE_ERR_UNREACHABLE = -43, /* no address of the peer answered */
    /* the comm */
    GPUBRIDGE_ERR_ABORTED = -60, /* the comm was aborted; the text carries the first cause */
    GPUBRIDGE_ERR_DESTROYED = -61,
    /* the process */
    GPUBRIDGE_ERR_NO_MEMORY = -80,
    GPUBRIDGE_ERR_DEVICE = -81,  /* a vendor library or the driver failed; the raw code is in the text */
    GPUBRIDGE_ERR_LIBRARY = -82, /* a vendor library cannot be opened or lacks a symbol */
    GPUBRIDGE_ERR_SYSTEM = -83,  /* a system call failed */
    GPUBRIDGE_ERR_FORKED = -84,  /* the context belongs to the parent process */
    GPUBRIDGE_ERR_INTERNAL = -99 /* our bug */
};

enum gpubridge_dtype {
    GPUBRIDGE_I8,
    GPUBRIDGE_U8,
    GPUBRIDGE_I16,
    GPUBRIDGE_I32,
    GPUBRIDGE_I64,
    GPUBRIDGE_F16,
    GPUBRIDGE_BF16,
    GPUBRIDGE_F32,
    GPUBRIDGE_F64,
    GPUBRIDGE_BOOL, /* one byte, 0 or 1 in every result */
    GPUBRIDGE_C64,
    GPUBRIDGE_C128, /* pairs of f32 / f64; reduced by SUM, AVG and PREMUL_SUM only */
    GPUBRIDGE_U16,
    GPUBRIDGE_U32,
    GPUBRIDGE_U64,
    GPUBRIDGE_BYTE, /* one opaque byte: moved, never reduced (fp8 and the like) */
    GPUBRIDGE_DTYPE_COUNT
};

enum gpubridge_reduce_op {
    GPUBRIDGE_SUM,
    GPUBRIDGE_AVG,
    GPUBRIDGE_PRODUCT,
    GPUBRIDGE_MIN,
    GPUBRIDGE_MAX,
    GPUBRIDGE_BAND,
    GPUBRIDGE_BOR,
    GPUBRIDGE_BXOR,
    GPUBRIDGE_PREMUL_SUM, /* sum of factor * x; floats and complex only */
    GPUBRIDGE_REDUCE_OP_COUNT
};

/* What `send`, `recv`, `count`, the counts arrays and `root` mean per operation.  N = group size, counts in elements.
 * Buffers named "flat" hold the ranks' blocks in rank order, without gaps. */
enum gpubridge_op_kind {
    GPUBRIDGE_ALL_REDUCE,     /* send[count] -> recv[count]; may be the same buffer */
    GPUBRIDGE_BROADCAST,      /* root's send[count] -> recv[count]; non-roots may pass send = NULL */
    GPUBRIDGE_REDUCE,         /* send[count] -> root's recv[count]; non-roots may pass recv = NULL */
    GPUBRIDGE_ALL_GATHER,     /* send[own block] -> recv flat; blocks: count each, or recv_counts[N] when not NULL;
                                 send may be its own block inside recv */
    GPUBRIDGE_REDUCE_SCATTER, /* send flat -> recv[own block]; blocks: count each, or send_counts[N] when not NULL */
    GPUBRIDGE_ALL_TO_ALL,     /* send flat -> recv flat; blocks: count each, or send_counts[N] and recv_counts[N] */
    GPUBRIDGE_GATHER,         /* send[count] -> root's recv flat of count each */
    GPUBRIDGE_SCATTER,        /* root's send flat of count each -> recv[count] */
    GPUBRIDGE_SEND,           /* send[count] to rank `root`, matched by (tag, order of submission) */
    GPUBRIDGE_RECV,           /* recv[count] from rank `root`, or from anyone when root = -1 */
    GPUBRIDGE_BARRIER,        /* no data; ends after this rank's earlier collectives of host buffers, too */
    GPUBRIDGE_OP_KIND_COUNT
};

/* How what crosses between islands is encoded (docs/wire-format.md has the bytes): sums of f32, f16 and bf16, and, when
 * asked, ALL_GATHER and BROADCAST of them.  DEFAULT: as the comm's settings say. */
enum gpubridge_codec {
    GPUBRIDGE_CODEC_DEFAULT,
    GPUBRIDGE_CODEC_NONE,
    GPUBRIDGE_CODEC_BF16,
    GPUBRIDGE_CODEC_FP16,
    GPUBRIDGE_CODEC_FP8_E4M3,
    GPUBRIDGE_CODEC_FP8_E5M2,
    GPUBRIDGE_CODEC_INT8,
    GPUBRIDGE_CODEC_MXFP4,
    GPUBRIDGE_CODEC_COUNT
};

enum gpubridge_device_kind { GPUBRIDGE_DEVICE_CPU, GPUBRIDGE_DEVICE_CUDA, GPUBRIDGE_DEVICE_HIP };

enum gpubridge_op_flags {
    GPUBRIDGE_OP_NOTIFY = 1,       /* put `user` on the context's completion queue when done */
    GPUBRIDGE_OP_HOST_BUFFERS = 2, /* the buffers are host memory although the context has a device */
    GPUBRIDGE_OP_URGENT = 4        /* the caller waits at once: spend its time in submit rather than another thread's */
};

typedef struct gpubridge_context gpubridge_context;
typedef struct gpubridge_comm gpubridge_comm;
typedef struct gpubridge_request gpubridge_request;

/* ---- about the library ---- */

GPUBRIDGE_API int gpubridge_abi(void);                    /* GPUBRIDGE_ABI of the library that is loaded */
GPUBRIDGE_API const char *gpubridge_version(void);        /* "0.1.0" */
GPUBRIDGE_API const char *gpubridge_strerror(int status); /* words for a status; never NULL */
GPUBRIDGE_API const char *gpubridge_last_error(void);     /* this thread's last failure: who, what, what to do next */
/* NULL restores stderr.  `level`: 0 error, 1 warning, 2 info, 3 debug, 4 trace.  May be called from any thread. */
GPUBRIDGE_API void gpubridge_log_sink(void (*sink)(void *arg, int level, const char *line), void *arg);
/* Row `index` of the settings table.  Returns GPUBRIDGE_ERR_INVALID past the end.  Strings live for ever. */
GPUBRIDGE_CHECKED int gpubridge_setting_info(int index, const char **name, const char **type, const char **value,
                                             const char **help);

/* Tries on one device (enum gpubridge_device_kind, CUDA or HIP; ordinal) everything the library needs of it: driver,
 * copies, events, compiler, kernels' values, collectives.  `report` gets JSON; 16 KiB are plenty.  GPUBRIDGE_ERR_DEVICE
 * when a check failed: the report says which.  `settings`: "NAME=value\n...", may be NULL.  Takes seconds. */
GPUBRIDGE_CHECKED int gpubridge_device_check(int kind, int index, const char *settings, char *report, size_t capacity);

/* ---- context ---- */

struct gpubridge_context_config {
    size_t struct_size;      /* sizeof(struct gpubridge_context_config) */
    int32_t device_kind;     /* enum gpubridge_device_kind; GPUBRIDGE_EMULATE may override it */
    int32_t device_index;    /* ordinal as the vendor runtime counts (after *_VISIBLE_DEVICES) */
    int32_t global_rank;     /* this process's rank in the job: a label, and the dialling order */
    int32_t local_rank;      /* rank on this host: picks from per-rank lists in settings */
    const void *secret;      /* the job's shared secret; NULL only with GPUBRIDGE_SECRET_FILE */
    size_t secret_bytes;     /* >= 16 */
    const char *master_addr; /* a host name or address whose route picks our address; NULL: first global one */
    const char *settings;    /* "NAME=value\n..." overriding the environment; may be NULL */
    const char *versions;    /* free text compared in hellos, e.g. "torch 2.13.0"; may be NULL */
};

GPUBRIDGE_CHECKED int gpubridge_context_create(const struct gpubridge_context_config *config,
                                               gpubridge_context **context);
/* Says goodbye to every peer (with the first culprit known), closes links, stops threads.  At most 10 s.  NULL is fine.
 */
GPUBRIDGE_API void gpubridge_context_destroy(gpubridge_context *context);
/* Why this process is about to leave, for the errors of members that still need it after it destroyed a comm or the
 * context.  At most 159 bytes are told; NULL: no reason any more.  An error that came from a peer goes first. */
GPUBRIDGE_API void gpubridge_context_farewell(gpubridge_context *context, const char *reason);

/* ---- comm ---- */

#define GPUBRIDGE_HELLO_BYTES 1024

struct gpubridge_comm_config {
    size_t struct_size;
    const char *name;     /* same on all members, unique among comms alive between them */
    int32_t rank, size;   /* rank within the group */
    int64_t timeout_ns;   /* default deadline of operations and of creation; <= 0: 30 min */
    const char *settings; /* "NAME=value\n..." for this comm; may be NULL; agreed settings must be equal */
};

/* Writes this member's hello, *bytes in: capacity (>= GPUBRIDGE_HELLO_BYTES), out: length. */
GPUBRIDGE_CHECKED int gpubridge_comm_hello(gpubridge_context *context, const struct gpubridge_comm_config *config,
                                           void *hello, size_t *bytes);
/* hellos[i], hello_bytes[i]: member i's blob.  Connects what is not connected yet and returns when every member can be
 * reached, or an error within the timeout that names the member and the reason. */
GPUBRIDGE_CHECKED int gpubridge_comm_create(gpubridge_context *context, const struct gpubridge_comm_config *config,
                                            const void *const *hellos, const size_t *hello_bytes,
                                            gpubridge_comm **comm);
/* Fails what is pending with GPUBRIDGE_ERR_DESTROYED and frees the comm.  Returns within 10 s.  NULL is fine. */
GPUBRIDGE_API void gpubridge_comm_destroy(gpubridge_comm *comm);
/* Fails everything pending here and, by message, on all members, with `reason`. */
GPUBRIDGE_API void gpubridge_comm_abort(gpubridge_comm *comm, const char *reason);
GPUBRIDGE_API void gpubridge_comm_set_timeout(gpubridge_comm *comm, int64_t timeout_ns);
/* GPUBRIDGE_OK, or the error that aborted the comm, with its text as this thread's last error. */
GPUBRIDGE_CHECKED int gpubridge_comm_status(gpubridge_comm *comm);
/* A human-readable account of islands, links, transports and algorithms.  Returns the length needed without the 0. */
GPUBRIDGE_API size_t gpubridge_comm_describe(gpubridge_comm *comm, char *text, size_t capacity);

/* Counters since creation, of operations that succeeded on this rank; times in ns, summed.  An operation's times
 * overlap: they answer "when was something of this kind under way", not "what did it cost". */
struct gpubridge_comm_stats {
    size_t struct_size;
    uint64_t ops;               /* operations completed */
    uint64_t bridge_sent_bytes; /* message bytes to other islands, without frame headers */
    uint64_t bridge_recv_bytes;
    uint64_t island_sent_bytes; /* message bytes to links inside the island, and bytes given to the vendor library */
    uint64_t payload_bytes;     /* bytes of user data in the operations (input side) */
    uint64_t total_ns;          /* submit to completion */
    uint64_t island_ns;         /* first to last moment an island transfer was under way */
    uint64_t bridge_ns;         /* first to last moment a bridge transfer was under way */
    uint64_t wait_ns;           /* submit until the first transfer could begin: nobody else had arrived */
    uint64_t compute_ns;        /* reduce, copy and codec steps on the host */
};
GPUBRIDGE_CHECKED int gpubridge_comm_stats(gpubridge_comm *comm, struct gpubridge_comm_stats *stats);

/* What one kind of operation sent to other islands with one codec, since the comm was made.  A device's blocks are
 * counted with the operation that finishes next. */
struct gpubridge_codec_stats {
    size_t struct_size;
    uint64_t ops;               /* operations completed */
    uint64_t in_bytes;          /* values sent to other islands, as float32; without a codec as they are */
    uint64_t wire_bytes;        /* messages that carried them, without frame headers */
    uint64_t blocks;            /* encoded; values, for the casts */
    uint64_t saturated_blocks;  /* of these: a finite value was brought down to the largest the format has */
    uint64_t not_finite_values; /* NaN and infinity that this rank encoded; from host memory, and with three islands and
                                   more, also in the messages that it received */
    int32_t not_finite_rank;    /* member that sent the first, as all members come to know; -1 while none is known */
    uint32_t not_finite_seq;    /* number of that operation in the comm */
    uint64_t sampled_values;    /* whose error was measured: a few of one encoding in many, */
    double signal;              /* the sum of their squares, */
    double noise;               /* and that of the squares of their errors */
};
/* `kind`: ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER or BROADCAST; `codec`: any but DEFAULT. */
GPUBRIDGE_CHECKED int gpubridge_comm_codec_stats(gpubridge_comm *comm, int32_t kind, int32_t codec,
                                                 struct gpubridge_codec_stats *stats);

/* ---- operations ---- */

struct gpubridge_op {
    size_t struct_size;
    int32_t kind;      /* enum gpubridge_op_kind */
    int32_t dtype;     /* enum gpubridge_dtype */
    int32_t reduce_op; /* enum gpubridge_reduce_op; ignored where nothing is reduced */
    int32_t root;      /* root, or the peer of SEND / RECV, as a rank of this comm */
    uint32_t flags;    /* enum gpubridge_op_flags */
    int32_t tag;       /* SEND / RECV */
    const void *send;
    void *recv;
    uint64_t count;              /* elements */
    const uint64_t *send_counts; /* copied; see enum gpubridge_op_kind */
    const uint64_t *recv_counts;
    double factor;      /* PREMUL_SUM; equal on all ranks */
    void *stream;       /* CUstream / hipStream_t whose work comes first; ignored on CPU */
    int64_t timeout_ns; /* <= 0: the comm's */
    uint64_t user;      /* returned by gpubridge_completions */
    int32_t codec;      /* enum gpubridge_codec, equal on all ranks; one that is named applies whatever the size */
    int32_t reserved;   /* 0 */
    /* Error feedback of ALL_REDUCE and REDUCE_SCATTER (NULL: none): a float for each element of `send`, in the same
     * kind of memory, this rank's own.  It is added to the partials that this rank encodes, and then holds what
     * encoding them lost, with what encoding the result lost where this rank did that, too (three or more islands).
     * Elements that other ranks encode, and operations that are not compressed, leave it as it is. */
    float *residual;
};

/* Checks and queues.  Never blocks for the network; blocks for memory at most until earlier operations finish. */
GPUBRIDGE_CHECKED int gpubridge_submit(gpubridge_comm *comm, const struct gpubridge_op *op,
                                       gpubridge_request **request);
/* Waits at most timeout_ns (<= 0: no limit but the operation's own deadline) for completion in host terms.
 * GPUBRIDGE_AGAIN: not finished yet, the operation goes on.  GPUBRIDGE_ERR_TIMEOUT: its own deadline passed. */
GPUBRIDGE_CHECKED int gpubridge_request_wait(gpubridge_request *request, int64_t timeout_ns);
/* GPUBRIDGE_OK when complete, GPUBRIDGE_AGAIN when not, or the error. */
GPUBRIDGE_CHECKED int gpubridge_request_test(gpubridge_request *request);
/* Makes `stream` wait for the result.  Blocks the host only until the device side is enqueued (CUDA) or recorded (HIP);
 * on CPU and emulated devices it is gpubridge_request_wait. */
GPUBRIDGE_CHECKED int gpubridge_request_wait_stream(gpubridge_request *request, void *stream);
/* Source rank of a completed RECV with root = -1. */
GPUBRIDGE_CHECKED int gpubridge_request_source(gpubridge_request *request, int32_t *rank);
/* What an unfinished operation waits for, in words: its number, and who has not arrived.  Returns the length needed
 * without the 0; 0 when it is complete. */
GPUBRIDGE_API size_t gpubridge_request_describe(gpubridge_request *request, char *text, size_t capacity);
/* The operation goes on; its buffers stay borrowed until it is done.  NULL is fine. */
GPUBRIDGE_API void gpubridge_request_free(gpubridge_request *request);
/* Blocks until at least one operation with GPUBRIDGE_OP_NOTIFY completed or the timeout passed (GPUBRIDGE_AGAIN; < 0:
 * for ever), then returns up to `capacity` of their `user` values.  GPUBRIDGE_ERR_DESTROYED once the context goes down.
 */
GPUBRIDGE_CHECKED int gpubridge_completions(gpubridge_context *context, uint64_t *users, int32_t capacity,
                                            int64_t timeout_ns, int32_t *count);
/* Wakes every thread inside gpubridge_completions; from then on it returns GPUBRIDGE_ERR_DESTROYED at once. */
GPUBRIDGE_API void gpubridge_completions_stop(gpubridge_context *context);

/* submit + wait + free in one call, for small blocking operations. */
GPUBRIDGE_CHECKED int gpubridge_run(gpubridge_comm *comm, const struct gpubridge_op *op);
/* The same, waiting at most wait_ns, for callers that must look at signals meanwhile.  GPUBRIDGE_OK or an error:
 * finished, and *request is NULL.  GPUBRIDGE_AGAIN: the operation goes on behind *request; wait on it again soon. */
GPUBRIDGE_CHECKED int gpubridge_run_for(gpubridge_comm *comm, const struct gpubridge_op *op, int64_t wait_ns,
                                        gpubridge_request **request);

/* The common operations by name: fill a struct gpubridge_op and submit it; *request may be NULL to wait here. */
GPUBRIDGE_CHECKED int gpubridge_all_reduce(gpubridge_comm *comm, const void *send, void *recv, uint64_t count,
                                           int32_t dtype, int32_t reduce_op, void *stream, gpubridge_request **request);
GPUBRIDGE_CHECKED int gpubridge_broadcast(gpubridge_comm *comm, void *buffer, uint64_t count, int32_t dtype,
                                          int32_t root, void *stream, gpubridge_request **request);
GPUBRIDGE_CHECKED int gpubridge_all_gather(gpubridge_comm *comm, const void *send, void *recv, uint64_t count,
                                           int32_t dtype, void *stream, gpubridge_request **request);
GPUBRIDGE_CHECKED int gpubridge_reduce_scatter(gpubridge_comm *comm, const void *send, void *recv, uint64_t count,
                                               int32_t dtype, int32_t reduce_op, void *stream,
                                               gpubridge_request **request);
GPUBRIDGE_CHECKED int gpubridge_barrier(gpubridge_comm *comm, int64_t timeout_ns);

#ifdef __cplusplus
}
#endif
#endif
