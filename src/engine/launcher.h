/* SPDX-License-Identifier: Apache-2.0
 *
 * launcher.h: runs the device steps (COPY, REDUCE, VENDOR) of plans on one GPU.  One launcher thread per device makes
 * every vendor and driver call, but for the ready event, which the submitting thread records on its own stream.
 *
 * The engine and the device meet only in flags, one uint32 per step in pinned host memory: 0, then 1 when the step is
 * finished.  The engine stores the flags of SEND and RECV steps and reads those of the device steps its network steps
 * depend on; it never makes a driver call, nor does anything that an open flag depends on.
 *   CUDA (gate on): when an operation starts, its whole device side is enqueued in array order on the streams out, in
 * and vendor: stream-wait-value on the flags of network steps, stream-write-value after steps that network steps wait
 * for, events between streams.  Operations with more than about 900 pending entries are enqueued in windows. HIP (gate
 * off): the launcher thread launches a step when its network dependencies' flags are set (in array order per queue),
 * records an event after steps somebody waits for and stores their flags when the event has passed.
 */
#ifndef GB_ENGINE_LAUNCHER_H
#define GB_ENGINE_LAUNCHER_H

#include "plan/plan.h"

#include <stdatomic.h>

struct gb_device;   /* device/device.h */
struct gb_ccl_comm; /* ccl/ccl.h: the island's vendor communicator, NULL where the island needs none */
struct gb_net;      /* transport/net.h */
struct gb_launcher;

#define GB_NO_STEP UINT32_MAX

#define GB_SAMPLE_VALUES 1024u /* a multiple of every codec's block */

/* The first values that an operation encodes, as they were before. */
struct gb_dev_sample {
    float *device, *host; /* each room for GB_SAMPLE_VALUES; NULL: not wanted */
    uint32_t step, count; /* filled by the launcher: who encodes them, how many there are; 0: none */
};

#define GB_CODED_QUEUES 3 /* streams of an operation that may encode */

/* What encoding met, by stream: counters of their own for every operation, so that a NaN is no other one's. */
struct gb_dev_counts {
    uint64_t *device, *host; /* [GB_CODED_QUEUES][GB_CODEC_STATS] scratch and pinned; NULL without a codec */
    uint8_t queues;          /* filled by the launcher: bit q, row q counts */
};

struct gb_dev_op {
    /* filled by the engine before start, constant until finished */
    const struct gb_plan *plan;
    int32_t dtype, reduce_op; /* of the operation */
    uint32_t nranks;          /* AVG divisor */
    double factor;
    uint64_t seed; /* of encodings that round stochastically, if they do */
    int is_random;
    void *buf[GB_BUF_COUNT]; /* base of enum gb_buf; DEV: from gb_launcher_mem, HOST: from gb_launcher_host */
    struct gb_ccl_comm *ccl;
    int poison_is_host; /* an operation that is given up copies its output in once more, instead of the poison kernel */
    uint32_t set;       /* stream set: operations of one set run in order, sets are independent of each other (one set
                           of streams per group, made at its first operation, so groups never stand behind each other) */
    void *ready;        /* event from gb_launcher_record on the caller's stream, or NULL */
    struct gb_dev_sample sample;
    struct gb_dev_counts counts;
    _Atomic uint32_t *flags; /* [nsteps + 1] pinned, zeroed; [nsteps]: everything on the device is finished */
    /* Messages that may lie elsewhere than in buf[HOST].  landing[i] of a RECV: the COPY that takes it to the device,
     * of that COPY: the RECV, else GB_NO_STEP; NULL: there are none. */
    const uint32_t *landing;
    _Atomic uint64_t *where; /* [nsteps] pinned, zeroed; of such a RECV: its address, stored before its flag */
    _Atomic uint64_t *guess; /* [nsteps] where it was in an earlier operation with this plan; 0: nowhere yet */
    /* filled by the launcher */
    void *done;           /* event after the last step: valid once `enqueued` */
    _Atomic int enqueued; /* CUDA: all is in the streams; HIP: the done event is recorded */
    uint64_t issued_ns;   /* when; written before `enqueued` */
    _Atomic int status;   /* first device error, enum gpubridge_status */
    char text[256];       /* its words; written before status (release) */
    void *priv;
};

/* `wake` is called (any thread) when a flag may have changed on the host side (HIP) or an error was stored.  `gate`: 1
 * on, 0 off.  Compiles the kernels: may take seconds; without a compiler the launcher works, but has no kernels. */
int gb_launcher_open(struct gb_device *device, int gate, void (*wake)(void *), void *wake_arg,
                     struct gb_launcher **launcher) GB_NODISCARD;
/* 0: the kernels could not be compiled (the log says why); REDUCE steps fail, copies work. */
int gb_launcher_has_kernels(const struct gb_launcher *launcher);
int gb_launcher_is_gated(const struct gb_launcher *launcher);
/* Joins the thread; operations must have finished or been aborted. */
void gb_launcher_close(struct gb_launcher *launcher);
/* All pools together grow to this and not further (GPUBRIDGE_MEM_BYTES), unless nothing is in use but what the caller
 * has already (`beside`, in bytes); who wants more waits up to `wait_ns` for operations that end. */
void gb_launcher_set_limit(struct gb_launcher *launcher, uint64_t bytes, uint64_t wait_ns);
/* Pools: device scratch and pinned host memory (flags, staging).  Any thread but the engine role, since growing is a
 * driver call; NULL with an error text when exhausted.  Giving back (NULL is fine) is none. */
void *gb_launcher_mem(struct gb_launcher *launcher, uint64_t bytes, uint64_t beside);
void gb_launcher_mem_free(struct gb_launcher *launcher, void *mem);
void *gb_launcher_host(struct gb_launcher *launcher, uint64_t bytes);
void gb_launcher_host_free(struct gb_launcher *launcher, void *mem);
/* Staging of messages: pinned host memory too, which peers of this host may read in place once it is shared.  A kept
 * block stays in use, whatever its owner frees, until as many calls of back; `at`: any address in it.  Any thread. */
void *gb_launcher_stage(struct gb_launcher *launcher, uint64_t bytes, uint64_t beside);
void gb_launcher_stage_free(struct gb_launcher *launcher, void *mem);
void gb_launcher_stage_keep(struct gb_launcher *launcher, const void *at);
void gb_launcher_stage_back(struct gb_launcher *launcher, const void *at);
/* From now on staging is shared with the peers of `net`, which must outlive the launcher.  Any thread. */
void gb_launcher_share(struct gb_launcher *launcher, struct gb_net *net);
/* 1: this device can read messages in the memory of peers. */
int gb_launcher_can_borrow(const struct gb_launcher *launcher);
/* A peer's region (GB_NET_REGION): registers and answers it.  Any thread. */
void gb_launcher_take_region(struct gb_launcher *launcher, void *region);
/* Submitting thread: records a ready event on `stream` (NULL: the legacy default stream), refusing a capturing stream.
 * gb_launcher_release gives it back, or gb_launcher_forget when the operation never got so far. */
int gb_launcher_record(struct gb_launcher *launcher, void *stream, void **event) GB_NODISCARD;
void gb_launcher_forget(struct gb_launcher *launcher, void *event);
/* Engine: hands an operation over.  Calls of one launcher execute in this order: the total order of vendor calls. */
void gb_launcher_start(struct gb_launcher *launcher, struct gb_dev_op *op);
/* The same by the submitting thread, in two halves: claim takes the operation's place (0: not now, use start), issue
 * puts it into the streams.  Between them the operation is handed to the engine, so that the network can go on while a
 * driver call of the second half is held off.  Little work only: other submitters wait meanwhile. */
int gb_launcher_claim(struct gb_launcher *launcher, struct gb_dev_op *op) GB_NODISCARD;
void gb_launcher_issue(struct gb_launcher *launcher, struct gb_dev_op *op);
/* Engine, after storing network flags: lets a gate-off launcher look again.  Cheap, no driver call. */
void gb_launcher_kick(struct gb_launcher *launcher);
/* Engine: gives the operation up: all its flags are opened, a poison kernel (NaN) goes last; vendor communicators must
 * have been aborted by the caller before.  flags[nsteps] is still set at the end. */
void gb_launcher_abort(struct gb_launcher *launcher, struct gb_dev_op *op);
/* Waiting thread: makes `stream` wait for op->done (which must be valid). */
int gb_launcher_wait_stream(struct gb_launcher *launcher, struct gb_dev_op *op, void *stream) GB_NODISCARD;
/* Engine: after flags[nsteps] was seen, or for an operation that was never started: gives its events and state back.
 * The launcher does not touch `op` any more. */
void gb_launcher_release(struct gb_launcher *launcher, struct gb_dev_op *op);

/* Engine: the streams of a set are not needed any more (none of its operations is in flight). */
void gb_launcher_drop_set(struct gb_launcher *launcher, uint32_t set);

/* Engine: operations that are started from now on wait (none is claimed) until unhold, which starts them in order.
 * Calls (gb_launcher_call) go on. */
void gb_launcher_hold(struct gb_launcher *launcher);
void gb_launcher_unhold(struct gb_launcher *launcher);
/* Engine: no operation is on the device or on its way there, held ones aside; claimed ones of user threads count. */
int gb_launcher_is_idle(struct gb_launcher *launcher);

/* Runs fn(arg) on the launcher thread, between operations: communicator creation. */
void gb_launcher_call(struct gb_launcher *launcher, void (*fn)(void *arg), void *arg);

#endif
