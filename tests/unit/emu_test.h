/* SPDX-License-Identifier: Apache-2.0
 * What the emulators' tests share: the libraries opened the way gpubridge opens the real ones, and children.  Settings
 * are read once per process, so every scenario runs in a forked child with its own environment; a failed CHECK ends the
 * child.  */
#ifndef EMU_TEST_H
#define EMU_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: CHECK(%s) failed in process %d\n", __FILE__, __LINE__, #cond, (int)getpid());      \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int ok_rc_ = (call);                                                                                           \
        if (ok_rc_ != 0) {                                                                                             \
            fprintf(stderr, "%s:%d: %s gave %d in process %d\n", __FILE__, __LINE__, #call, ok_rc_, (int)getpid());    \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

typedef unsigned long long devptr;
struct nccl_id {
    char bytes[128];
};
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas;
    const char *net;
    int split_share;
};

/* name, result, parameters */
#define NCCL_CALLS(X)                                                                                                  \
    X(ncclGetVersion, int, (int *))                                                                                    \
    X(ncclGetUniqueId, int, (struct nccl_id *))                                                                        \
    X(ncclCommInitRank, int, (void **, int, struct nccl_id, int))                                                      \
    X(ncclCommInitRankConfig, int, (void **, int, struct nccl_id, int, struct nccl_config *))                          \
    X(ncclCommDestroy, int, (void *))                                                                                  \
    X(ncclCommAbort, int, (void *))                                                                                    \
    X(ncclCommFinalize, int, (void *))                                                                                 \
    X(ncclCommGetAsyncError, int, (void *, int *))                                                                     \
    X(ncclGetErrorString, const char *, (int))                                                                         \
    X(ncclGetLastError, const char *, (void *))                                                                        \
    X(ncclCommSplit, int, (void *, int, int, void **, struct nccl_config *))                                           \
    X(ncclCommCount, int, (void *, int *))                                                                             \
    X(ncclCommUserRank, int, (void *, int *))                                                                          \
    X(ncclCommCuDevice, int, (void *, int *))                                                                          \
    X(ncclGroupStart, int, (void))                                                                                     \
    X(ncclGroupEnd, int, (void))                                                                                       \
    X(ncclSend, int, (const void *, size_t, int, int, void *, void *))                                                 \
    X(ncclRecv, int, (void *, size_t, int, int, void *, void *))                                                       \
    X(ncclAllReduce, int, (const void *, void *, size_t, int, int, void *, void *))                                    \
    X(ncclReduceScatter, int, (const void *, void *, size_t, int, int, void *, void *))                                \
    X(ncclAllGather, int, (const void *, void *, size_t, int, void *, void *))                                         \
    X(ncclBroadcast, int, (const void *, void *, size_t, int, int, void *, void *))                                    \
    X(ncclRedOpCreatePreMulSum, int, (int *, void *, int, int, void *))                                                \
    X(ncclRedOpDestroy, int, (int, void *))
#define CUDA_CALLS(X)                                                                                                  \
    X(cuInit, int, (unsigned))                                                                                         \
    X(cuDeviceGetCount, int, (int *))                                                                                  \
    X(cuDeviceGetUuid_v2, int, (unsigned char *, int))                                                                 \
    X(cuDeviceGetPCIBusId, int, (char *, int, int))                                                                    \
    X(cuDeviceGetAttribute, int, (int *, int, int))                                                                    \
    X(cuDevicePrimaryCtxRetain, int, (void **, int))                                                                   \
    X(cuDevicePrimaryCtxRelease_v2, int, (int))                                                                        \
    X(cuCtxGetCurrent, int, (void **))                                                                                 \
    X(cuCtxSetCurrent, int, (void *))                                                                                  \
    X(cuCtxSynchronize, int, (void))                                                                                   \
    X(cuMemAlloc_v2, int, (devptr *, size_t))                                                                          \
    X(cuMemFree_v2, int, (devptr))                                                                                     \
    X(cuMemHostAlloc, int, (void **, size_t, unsigned))                                                                \
    X(cuMemFreeHost, int, (void *))                                                                                    \
    X(cuMemHostRegister_v2, int, (void *, size_t, unsigned))                                                           \
    X(cuMemHostUnregister, int, (void *))                                                                              \
    X(cuMemHostGetDevicePointer_v2, int, (devptr *, void *, unsigned))                                                 \
    X(cuMemGetAddressRange_v2, int, (devptr *, size_t *, devptr))                                                      \
    X(cuPointerGetAttribute, int, (void *, int, devptr))                                                               \
    X(cuMemcpyAsync, int, (devptr, devptr, size_t, void *))                                                            \
    X(cuMemcpyHtoDAsync_v2, int, (devptr, const void *, size_t, void *))                                               \
    X(cuMemcpyDtoHAsync_v2, int, (void *, devptr, size_t, void *))                                                     \
    X(cuMemsetD8Async, int, (devptr, unsigned char, size_t, void *))                                                   \
    X(cuStreamCreateWithPriority, int, (void **, unsigned, int))                                                       \
    X(cuStreamDestroy_v2, int, (void *))                                                                               \
    X(cuStreamQuery, int, (void *))                                                                                    \
    X(cuStreamSynchronize, int, (void *))                                                                              \
    X(cuStreamWaitEvent, int, (void *, void *, unsigned))                                                              \
    X(cuStreamIsCapturing, int, (void *, int *))                                                                       \
    X(cuStreamWaitValue32_v2, int, (void *, devptr, unsigned, unsigned))                                               \
    X(cuStreamWriteValue32_v2, int, (void *, devptr, unsigned, unsigned))                                              \
    X(cuLaunchHostFunc, int, (void *, void (*)(void *), void *))                                                       \
    X(cuEventCreate, int, (void **, unsigned))                                                                         \
    X(cuEventDestroy_v2, int, (void *))                                                                                \
    X(cuEventRecord, int, (void *, void *))                                                                            \
    X(cuEventQuery, int, (void *))                                                                                     \
    X(cuEventSynchronize, int, (void *))                                                                               \
    X(cuModuleLoadData, int, (void **, const void *))                                                                  \
    X(cuModuleUnload, int, (void *))                                                                                   \
    X(cuModuleGetFunction, int, (void **, void *, const char *))                                                       \
    X(cuLaunchKernel, int,                                                                                             \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))        \
    X(nvrtcCreateProgram, int, (void **, const char *, const char *, int, const char *const *, const char *const *))   \
    X(nvrtcCompileProgram, int, (void *, int, const char *const *))                                                    \
    X(nvrtcGetCUBINSize, int, (void *, size_t *))                                                                      \
    X(nvrtcGetCUBIN, int, (void *, char *))                                                                            \
    X(nvrtcGetPTXSize, int, (void *, size_t *))                                                                        \
    X(nvrtcGetPTX, int, (void *, char *))                                                                              \
    X(nvrtcGetProgramLogSize, int, (void *, size_t *))                                                                 \
    X(nvrtcGetProgramLog, int, (void *, char *))                                                                       \
    X(nvrtcDestroyProgram, int, (void **))                                                                             \
    X(gbemu_set_capturing, void, (int))                                                                                \
    X(gbemu_pending, unsigned long long, (int))
#define HIP_CALLS(X)                                                                                                   \
    X(hipInit, int, (unsigned))                                                                                        \
    X(hipGetDeviceCount, int, (int *))                                                                                 \
    X(hipSetDevice, int, (int))                                                                                        \
    X(hipGetDevicePropertiesR0600, int, (unsigned char *, int))                                                        \
    X(hipGetDeviceProperties, int, (unsigned char *, int))                                                             \
    X(hipMalloc, int, (void **, size_t))                                                                               \
    X(hipFree, int, (void *))                                                                                          \
    X(hipHostMalloc, int, (void **, size_t, unsigned))                                                                 \
    X(hipHostFree, int, (void *))                                                                                      \
    X(hipHostRegister, int, (void *, size_t, unsigned))                                                                \
    X(hipPointerGetAttributes, int, (void *, const void *))                                                            \
    X(hipMemcpyAsync, int, (void *, const void *, size_t, int, void *))                                                \
    X(hipStreamCreateWithPriority, int, (void **, unsigned, int))                                                      \
    X(hipStreamDestroy, int, (void *))                                                                                 \
    X(hipStreamQuery, int, (void *))                                                                                   \
    X(hipStreamSynchronize, int, (void *))                                                                             \
    X(hipStreamWaitValue32, int, (void *, void *, uint32_t, unsigned, uint32_t))                                       \
    X(hipStreamWriteValue32, int, (void *, void *, uint32_t, unsigned))                                                \
    X(hipEventCreateWithFlags, int, (void **, unsigned))                                                               \
    X(hipEventRecord, int, (void *, void *))                                                                           \
    X(hipEventQuery, int, (void *))                                                                                    \
    X(hipStreamWaitEvent, int, (void *, void *, unsigned))                                                             \
    X(hipModuleLoadData, int, (void **, const void *))                                                                 \
    X(hipModuleGetFunction, int, (void **, void *, const char *))                                                      \
    X(hipModuleLaunchKernel, int,                                                                                      \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))        \
    X(hiprtcCreateProgram, int, (void **, const char *, const char *, int, const char *const *, const char *const *))  \
    X(hiprtcCompileProgram, int, (void *, int, const char *const *))                                                   \
    X(hiprtcGetCodeSize, int, (void *, size_t *))                                                                      \
    X(hiprtcGetCode, int, (void *, char *))                                                                            \
    X(hiprtcDestroyProgram, int, (void **))                                                                            \
    X(hipGetLastError, int, (void))

#define DECLARE(name, result, params) __attribute__((unused)) static result(*name) params;
#define RESOLVE(name, result, params)                                                                                  \
    *(void **)&name = dlsym(h, #name);                                                                                 \
    CHECK(name != NULL);

NCCL_CALLS(DECLARE)
CUDA_CALLS(DECLARE)
HIP_CALLS(DECLARE)

static inline void open_cuda(void)
{
    void *h = dlopen(GBEMU_CUDA_SO, RTLD_NOW | RTLD_LOCAL);
    if (!h) fprintf(stderr, "%s\n", dlerror());
    CHECK(h != NULL);
    CUDA_CALLS(RESOLVE)
    NCCL_CALLS(RESOLVE)
    OK(cuInit(0));
}

static inline void open_hip(void)
{
    void *h = dlopen(GBEMU_HIP_SO, RTLD_NOW | RTLD_LOCAL);
    if (!h) fprintf(stderr, "%s\n", dlerror());
    CHECK(h != NULL);
    HIP_CALLS(RESOLVE)
    NCCL_CALLS(RESOLVE)
    OK(hipInit(0));
}

/* Makes a device's primary context current in the calling thread. */
static inline void use_device(int device)
{
    void *context;
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
}

static inline void *new_stream(void)
{
    void *s;
    OK(cuStreamCreateWithPriority(&s, 1, 0));
    return s;
}

static inline devptr dev(const void *p)
{
    return (devptr)(uintptr_t)p;
}

static inline double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

/* Whether *flag became at least `value` within `seconds`. */
static inline bool becomes(const _Atomic int *flag, int value, double seconds)
{
    double end = now_s() + seconds;
    struct timespec pause = {.tv_nsec = 100000};
    while (atomic_load(flag) < value) {
        if (now_s() > end) return false;
        nanosleep(&pause, NULL);
    }
    return true;
}
#define EVENTUALLY(flag, value) CHECK(becomes(flag, value, 20))
/* Long enough that a call that is not blocked would have returned. */
#define NOT_YET(flag, value) CHECK(!becomes(flag, value, 0.08))

/* Runs `fn(arg)` in a child; "NAME=value" strings up to NULL are its environment.  Exit code, or 128 + signal. */
static inline int in_child(void (*fn)(void *), void *arg, const char *const *env)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(60);
        for (; env && *env; env++) putenv((char *)(uintptr_t)*env);
        fn(arg);
        fflush(NULL);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* At least one setting. */
#define CHILD(fn, ...)                                                                                                 \
    do {                                                                                                               \
        const char *const child_env_[] = {__VA_ARGS__, NULL};                                                          \
        assert_int_equal(in_child(fn, NULL, child_env_), 0);                                                           \
    } while (0)

#endif
