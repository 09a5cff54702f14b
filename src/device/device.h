/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h: one GPU of one vendor, through the driver library opened at run time.  One thin call per thing that is
 * needed; both vendors export the same shapes under two names (driver.c holds the table), and what differs is here and
 * nowhere else.
 *
 * Threads.  The launcher thread makes these calls, after gb_device_bind.  A user thread may make the few that its own
 * stream needs between gb_device_enter and gb_device_leave, which leave its current device as it was.  Calls that can
 * wait for the device (gb_device_free, gb_device_sync) are for opening and closing only: see docs of launcher.h. Opaque
 * pointers are the vendor's: CUstream or hipStream_t, CUevent or hipEvent_t, CUfunction or hipFunction_t.
 */
#ifndef GB_DEVICE_DEVICE_H
#define GB_DEVICE_DEVICE_H

#include "base/err.h"

#include <stdint.h>

struct gb_device;

struct gb_device_info {
    int32_t kind, index;    /* enum gpubridge_device_kind; ordinal as the runtime counts */
    int32_t driver_version; /* the library's own number: 13000, 70100000 */
    int32_t multiprocessors;
    uint8_t emulated;         /* the library is an emulator: no figure of it is a speed */
    uint8_t has_stream_flags; /* streams can wait for and write flags in pinned memory safely: the enqueued pipeline
                                 works */
    uint8_t uuid[16];         /* zero when the library cannot tell */
    char vendor[16];          /* "nvidia", "amd" */
    char name[128];
    char arch[64];     /* "sm_90", "gfx90a:sramecc+:xnack-" */
    char pci[24];      /* "0000:19:00.0" */
    char library[512]; /* the file that was opened */
};

/* `kind`: CUDA or HIP.  `path`: explicit library, NULL or "": searched as base/dl.h says.  Retains the primary context.
 */
int gb_device_open(int kind, int index, const char *path, struct gb_device **device) GB_NODISCARD;
/* NULL is fine. */
void gb_device_close(struct gb_device *device);
const struct gb_device_info *gb_device_info(const struct gb_device *device);
/* "NVIDIA H200 (sm_90, 0000:19:00.0, driver 13.0 from libcuda.so.1)" */
size_t gb_device_describe(const struct gb_device *device, char *text, size_t capacity);
/* File of the emulated library of `kind` that belongs to this build or installation; INVALID when there is none. */
int gb_device_emulator(int kind, char *path, size_t capacity) GB_NODISCARD;

/* The calling thread works on this device from now on. */
int gb_device_bind(struct gb_device *device) GB_NODISCARD;
/* The same for a moment: what was current is kept in `saved` and made current again; allocation is allowed even while
 * some stream of the process is being captured. */
struct gb_device_saved {
    void *context;
    int32_t ordinal, capture_mode, changed;
};
int gb_device_enter(struct gb_device *device, struct gb_device_saved *saved) GB_NODISCARD;
void gb_device_leave(struct gb_device *device, const struct gb_device_saved *saved);

/* ---- memory ---- */
int gb_device_alloc(struct gb_device *device, uint64_t bytes, void **mem) GB_NODISCARD;
void gb_device_free(struct gb_device *device,
                    void *mem); /* waits for the whole device, and holds off other driver calls */
/* Pinned, coherent, at one address for host and device. */
int gb_device_host_alloc(struct gb_device *device, uint64_t bytes, void **mem) GB_NODISCARD;
void gb_device_host_free(struct gb_device *device, void *mem);
/* Makes memory of the process pinned, coherent and at one address for host and device: whole pages, which must stay
 * mapped until gb_device_host_unregister, which can wait for the device. */
int gb_device_host_register(struct gb_device *device, void *mem, uint64_t bytes) GB_NODISCARD;
void gb_device_host_unregister(struct gb_device *device, void *mem);
/* 64 KiB of device memory that anybody may overwrite at any time. */
#define GB_DEVICE_SCRAP_BYTES 65536u
void *gb_device_scrap(const struct gb_device *device);

/* ---- streams, events, work on streams ---- */
int gb_stream_create(struct gb_device *device, void **stream) GB_NODISCARD; /* non-blocking, high priority */
void gb_stream_destroy(struct gb_device *device, void *stream);
/* 1 when the stream is being captured into a graph (also: when the legacy stream cannot be used because of a capture).
 */
int gb_stream_is_capturing(struct gb_device *device, void *stream, int *yes) GB_NODISCARD;
int gb_stream_copy(struct gb_device *device, void *dst, const void *src, uint64_t bytes, void *stream) GB_NODISCARD;
int gb_stream_wait_event(struct gb_device *device, void *stream, void *event) GB_NODISCARD;
/* Until *flag >= value (cyclic), and *flag = value after everything before: only with has_stream_flags. */
int gb_stream_wait_flag(struct gb_device *device, void *stream, const void *flag, uint32_t value) GB_NODISCARD;
int gb_stream_write_flag(struct gb_device *device, void *stream, void *flag, uint32_t value) GB_NODISCARD;
int gb_stream_launch(struct gb_device *device, void *stream, void *kernel, uint32_t blocks, uint32_t threads,
                     void **args) GB_NODISCARD;
int gb_event_create(struct gb_device *device, void **event) GB_NODISCARD; /* without timing */
void gb_event_destroy(struct gb_device *device, void *event);
int gb_event_record(struct gb_device *device, void *event, void *stream) GB_NODISCARD;
/* GPUBRIDGE_OK when passed, GPUBRIDGE_AGAIN when not, or the device's error. */
int gb_event_query(struct gb_device *device, void *event) GB_NODISCARD;

/* ---- run-time compilation ---- */
struct gb_module;
/* Where compiled kernels are kept from process to process; `dir` must live as long as the device.  NULL or "": the
 * user's cache folder, but nowhere for an emulated device, whose compiler costs nothing.  "off": nowhere. */
void gb_device_set_cache(struct gb_device *device, const char *dir);
/* Compiles header-free source for this device, or finds it compiled, and loads it.  No contraction, denormals kept,
 * correctly rounded division. */
int gb_module_build(struct gb_device *device, const char *source, struct gb_module **module) GB_NODISCARD;
void gb_module_destroy(struct gb_device *device, struct gb_module *module);
/* 1 when the image came from the cache. */
int gb_module_was_cached(const struct gb_module *module);
/* "NVRTC 13.0 (path)"; "none (why)" when there is no compiler. */
size_t gb_module_compiler(struct gb_device *device, char *text, size_t capacity);
int gb_module_kernel(struct gb_device *device, struct gb_module *module, const char *name, void **kernel) GB_NODISCARD;

#endif
