/* SPDX-License-Identifier: Apache-2.0
 * hipRTC's names over core/rtc.c.  The code object is the emulator's own image.  */
#include "core/emu.h"

#include <string.h>

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int enter_rc = emu_enter(__func__, NULL);                                                                      \
        if (enter_rc) return enter_rc;                                                                                 \
    } while (0)

bool emu_arch_known(const char *arch)
{
    return !strncmp(arch, "gfx", 3);
}

EMU_API int hiprtcVersion(int *major, int *minor)
{
    ENTER();
    *major = emu_conf()->driver_version / 10000000;
    *minor = emu_conf()->driver_version / 100000 % 100;
    return 0;
}

EMU_API const char *hiprtcGetErrorString(int code)
{
    static const char *const names[] = {
        "HIPRTC_SUCCESS",
        "HIPRTC_ERROR_OUT_OF_MEMORY",
        "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE",
        "HIPRTC_ERROR_INVALID_INPUT",
        "HIPRTC_ERROR_INVALID_PROGRAM",
        "HIPRTC_ERROR_INVALID_OPTION",
        "HIPRTC_ERROR_COMPILATION",
    };
    return code >= 0 && code < (int)(sizeof names / sizeof names[0]) ? names[code] : "HIPRTC_ERROR_INTERNAL_ERROR";
}

EMU_API int hiprtcCreateProgram(void **out, const char *source, const char *name, int headers, const char *const *texts,
                                const char *const *names)
{
    ENTER();
    return emu_rtc_create(source, name, headers, out);
}

EMU_API int hiprtcDestroyProgram(void **program)
{
    ENTER();
    int rc = program ? emu_rtc_destroy(*program) : 4;
    if (!rc) *program = NULL;
    return rc;
}

EMU_API int hiprtcCompileProgram(void *program, int count, const char *const *options)
{
    ENTER();
    return emu_rtc_compile(program, count, options);
}

EMU_API int hiprtcGetCodeSize(void *program, size_t *out)
{
    ENTER();
    return emu_rtc_size(program, EMU_RTC_BINARY, out);
}

EMU_API int hiprtcGetCode(void *program, char *out)
{
    ENTER();
    return emu_rtc_read(program, EMU_RTC_BINARY, out);
}

EMU_API int hiprtcGetProgramLogSize(void *program, size_t *out)
{
    ENTER();
    return emu_rtc_size(program, EMU_RTC_LOG, out);
}

EMU_API int hiprtcGetProgramLog(void *program, char *out)
{
    ENTER();
    return emu_rtc_read(program, EMU_RTC_LOG, out);
}
