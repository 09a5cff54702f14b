/* SPDX-License-Identifier: Apache-2.0
 * NVRTC's names over core/rtc.c.  CUBIN and PTX are both the emulator's own image.  */
#include "core/emu.h"

#include <stdio.h>
#include <string.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int enter_rc = emu_enter(__func__, NULL);                                                                      \
        if (enter_rc) return enter_rc;                                                                                 \
    } while (0)

EMU_API int nvrtcVersion(int *major, int *minor)
{
    ENTER();
    *major = emu_conf()->driver_version / 1000;
    *minor = emu_conf()->driver_version % 1000 / 10;
    return 0;
}

EMU_API const char *nvrtcGetErrorString(int code)
{
    static const char *const names[] = {
        "NVRTC_SUCCESS",
        "NVRTC_ERROR_OUT_OF_MEMORY",
        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        "NVRTC_ERROR_INVALID_INPUT",
        "NVRTC_ERROR_INVALID_PROGRAM",
        "NVRTC_ERROR_INVALID_OPTION",
        "NVRTC_ERROR_COMPILATION",
    };
    return code >= 0 && code < (int)(sizeof names / sizeof names[0]) ? names[code] : "NVRTC_ERROR_INTERNAL_ERROR";
}

EMU_API int nvrtcCreateProgram(void **out, const char *source, const char *name, int headers, const char *const *texts,
                               const char *const *names)
{
    ENTER();
    return emu_rtc_create(source, name, headers, out);
}

EMU_API int nvrtcDestroyProgram(void **program)
{
    ENTER();
    int rc = program ? emu_rtc_destroy(*program) : 4;
    if (!rc) *program = NULL;
    return rc;
}

EMU_API int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    ENTER();
    return emu_rtc_compile(program, count, options);
}

EMU_API int nvrtcGetCUBINSize(void *program, size_t *out)
{
    ENTER();
    return emu_rtc_size(program, EMU_RTC_BINARY, out);
}

EMU_API int nvrtcGetCUBIN(void *program, char *out)
{
    ENTER();
    return emu_rtc_read(program, EMU_RTC_BINARY, out);
}

EMU_API int nvrtcGetPTXSize(void *program, size_t *out)
{
    ENTER();
    return emu_rtc_size(program, EMU_RTC_INTERMEDIATE, out);
}

EMU_API int nvrtcGetPTX(void *program, char *out)
{
    ENTER();
    return emu_rtc_read(program, EMU_RTC_INTERMEDIATE, out);
}

EMU_API int nvrtcGetProgramLogSize(void *program, size_t *out)
{
    ENTER();
    return emu_rtc_size(program, EMU_RTC_LOG, out);
}

EMU_API int nvrtcGetProgramLog(void *program, char *out)
{
    ENTER();
    return emu_rtc_read(program, EMU_RTC_LOG, out);
}

/* CUDA 13 dropped those before 75; CUDA 12 does not know the newest. */
static const int archs[] = {50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

static int first_arch(void)
{
    return emu_conf()->driver_version >= 13000 ? 8 : 0;
}

bool emu_arch_known(const char *arch)
{
    int n = 0;
    if (sscanf(arch, "sm_%d", &n) != 1 && sscanf(arch, "compute_%d", &n) != 1) return false;
    for (size_t i = (size_t)first_arch(); i < sizeof archs / sizeof archs[0]; i++)
        if (archs[i] == n) return true;
    return false;
}

EMU_API int nvrtcGetNumSupportedArchs(int *count)
{
    ENTER();
    *count = (int)(sizeof archs / sizeof archs[0]) - first_arch();
    return 0;
}

EMU_API int nvrtcGetSupportedArchs(int *out)
{
    ENTER();
    memcpy(out, archs + first_arch(), sizeof archs - (size_t)first_arch() * sizeof archs[0]);
    return 0;
}
