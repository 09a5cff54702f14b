/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.h: what a vendor's driver library exports, as tables of functions by subject.  CUDA and HIP give most of them
 * the same arguments, so one slot serves both under two names (driver.c); the rest is in struct gb_vendor_ops.  Private
 * to src/device.
 */
#ifndef GB_DEVICE_DRIVER_H
#define GB_DEVICE_DRIVER_H

#include "base/dl.h"
#include "device/device.h"

/* Statuses are the numbers that both vendors share. */
enum gb_driver_status { GB_DRIVER_OK = 0, GB_DRIVER_OOM = 2, GB_DRIVER_GONE = 4, GB_DRIVER_NOT_READY = 600 };

struct gb_driver_device {
    int (*init)(unsigned flags);
    int (*count)(int *count);
    int (*attribute)(int *value, int attribute, int ordinal);
    int (*name)(char *name, int bytes, int ordinal);
    int (*pci)(char *id, int bytes, int ordinal);
    int (*uuid)(uint8_t *uuid, int ordinal); /* optional */
    int (*version)(int *version);
    int (*priorities)(int *least, int *greatest);
    int (*capture_mode)(int *mode); /* exchanges the thread's */
};

struct gb_driver_memory {
    int (*alloc)(void **mem, size_t bytes);
    int (*free)(void *mem);
    int (*host_alloc)(void **mem, size_t bytes, unsigned flags);
    int (*host_free)(void *mem);
    int (*host_address)(void **mem, void *host, unsigned flags);
    int (*host_register)(void *mem, size_t bytes, unsigned flags); /* optional */
    int (*host_unregister)(void *mem);                             /* optional */
};

struct gb_driver_queue {
    int (*stream_create)(void **stream, unsigned flags, int priority);
    int (*stream_destroy)(void *stream);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*is_capturing)(void *stream, int *status);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*wait_value)(void *stream, void *address, uint32_t value, unsigned flags);  /* optional; CUDA only */
    int (*write_value)(void *stream, void *address, uint32_t value, unsigned flags); /* optional; CUDA only */
};

struct gb_driver_module {
    int (*load)(void **module, const void *image);
    int (*unload)(void *module);
    int (*function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void *stream, void **args, void **extra);
};

/* What differs in more than the name. */
struct gb_vendor_ops {
    const char *name;                        /* "nvidia" */
    const char *module_name;                 /* "gpubridge_kernels.cu" */
    int (*open)(struct gb_device *device);   /* primary context, if there is such a thing */
    void (*close)(struct gb_device *device); /* safe after a failed open */
    int (*bind)(struct gb_device *device);
    int (*enter)(struct gb_device *device, struct gb_device_saved *saved);
    void (*leave)(struct gb_device *device, const struct gb_device_saved *saved);
    int (*copy)(struct gb_device *device, void *dst, const void *src, size_t bytes, void *stream);
    int (*arch)(struct gb_device *device, char *arch, size_t capacity);
    void (*error_text)(struct gb_device *device, int raw, char *text, size_t capacity);
    void (*clear_error)(struct gb_device *device); /* optional: a remembered last error */
    int (*rtc_options)(struct gb_device *device, char options[][96], int capacity); /* returns their number */
    int attr_multiprocessors;
};

extern const struct gb_vendor_ops gb_cuda_ops, gb_hip_ops;

/* Symbols of one vendor that the shared tables do not hold. */
struct gb_cuda_symbols {
    int (*device_get)(int *device, int ordinal);
    int (*ctx_get_current)(void **context);
    int (*ctx_set_current)(void *context);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*copy)(void *dst, const void *src, size_t bytes, void *stream);
    int (*error_name)(int code, const char **text);
    int (*error_string)(int code, const char **text);
};

struct gb_hip_symbols {
    int (*set_device)(int ordinal);
    int (*get_device)(int *ordinal);
    int (*copy)(void *dst, const void *src, size_t bytes, int kind, void *stream);
    int (*properties)(void *properties, int ordinal);     /* layout of ROCm 6 and later; optional */
    int (*properties_old)(void *properties, int ordinal); /* layout of ROCm 5; optional */
    const char *(*error_name)(int code);
    const char *(*error_string)(int code);
    int (*last_error)(void);
};

struct gb_rtc {
    int (*version)(int *major, int *minor);
    int (*create)(void **program, const char *source, const char *name, int nheaders, const char *const *headers,
                  const char *const *names);
    int (*compile)(void *program, int noptions, const char *const *options);
    int (*log_size)(void *program, size_t *bytes);
    int (*log)(void *program, char *log);
    int (*code_size)(void *program, size_t *bytes);
    int (*code)(void *program, char *code);
    int (*destroy)(void **program);
    const char *(*error_string)(int code);
    int (*ptx_size)(void *program, size_t *bytes); /* optional; CUDA only */
    int (*ptx)(void *program, char *ptx);          /* optional; CUDA only */
    int (*count_archs)(int *count);                /* optional; CUDA only */
    int (*archs)(int *archs);                      /* optional; CUDA only */
    struct gb_dl dl;
};

struct gb_device {
    const struct gb_vendor_ops *vendor;
    struct gb_dl dl;
    struct gb_device_info info;
    struct gb_driver_device device;
    struct gb_driver_memory memory;
    struct gb_driver_queue queue;
    struct gb_driver_module module;
    struct gb_cuda_symbols cuda;
    struct gb_hip_symbols hip;
    struct gb_rtc rtc;
    void *context; /* CUDA: the primary context, retained */
    int ordinal;   /* CUDA: CUdevice */
    int priority;  /* of our streams */
    void *scrap;
    const char *cache_dir; /* of compiled kernels; NULL: the user's */
};

/* One row of a symbol table: where the address goes, and the exported name. */
struct gb_symbol {
    size_t offset;          /* in struct gb_device */
    const char *cuda, *hip; /* NULL: this vendor has none */
    int optional;
};

/* Fills the slots of `rows`; the error names the symbol, the library and its version. */
int gb_driver_load(struct gb_device *device, const struct gb_dl *dl, const struct gb_symbol *rows,
                   size_t count) GB_NODISCARD;
/* Opens the library (`path`, or searched) and fills every table. */
int gb_driver_open(struct gb_device *device, const char *path) GB_NODISCARD;
/* GB_FAIL with the call, the vendor's words and number; GPUBRIDGE_ERR_NO_MEMORY for an exhausted device. */
int gb_driver_fail(struct gb_device *device, int raw, const char *call);
/* Loads NVRTC or hipRTC at the first use. */
int gb_rtc_load(struct gb_device *device) GB_NODISCARD;

#endif
