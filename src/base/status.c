/* SPDX-License-Identifier: Apache-2.0
 * The one table of status words (gpubridge_strerror).  The switch has no default, so the compiler reports a status
 * without words. */
#include "base/status.h"

#include <gpubridge/gpubridge.h>

const char *gb_status_text(int status)
{
    switch ((enum gpubridge_status)status) {
    case GPUBRIDGE_OK:
        return "ok";
    case GPUBRIDGE_ERR_INVALID:
        return "invalid argument";
    case GPUBRIDGE_ERR_UNSUPPORTED:
        return "not supported here";
    case GPUBRIDGE_AGAIN:
        return "not finished yet";
    case GPUBRIDGE_ERR_TIMEOUT:
        return "deadline passed";
    case GPUBRIDGE_ERR_SETTING:
        return "bad setting";
    case GPUBRIDGE_ERR_CANCELLED:
        return "operation cancelled";
    case GPUBRIDGE_ERR_CHECKSUM:
        return "damaged data received";
    case GPUBRIDGE_ERR_MISMATCH:
        return "ranks disagree on the operation";
    case GPUBRIDGE_ERR_PEER_LOST:
        return "peer lost";
    case GPUBRIDGE_ERR_REFUSED:
        return "peer refused";
    case GPUBRIDGE_ERR_VERSION:
        return "incompatible version";
    case GPUBRIDGE_ERR_UNREACHABLE:
        return "peer unreachable";
    case GPUBRIDGE_ERR_ABORTED:
        return "group aborted";
    case GPUBRIDGE_ERR_DESTROYED:
        return "group or context destroyed";
    case GPUBRIDGE_ERR_NO_MEMORY:
        return "out of memory";
    case GPUBRIDGE_ERR_DEVICE:
        return "device or driver failure";
    case GPUBRIDGE_ERR_LIBRARY:
        return "vendor library not usable";
    case GPUBRIDGE_ERR_SYSTEM:
        return "system call failed";
    case GPUBRIDGE_ERR_FORKED:
        return "context belongs to the parent process";
    case GPUBRIDGE_ERR_INTERNAL:
        return "internal error of gpubridge";
    }
    return "unknown status";
}
