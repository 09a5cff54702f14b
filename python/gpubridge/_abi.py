# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""The C interface as ctypes.  Generated from gpubridge.h by tools/gen_ctypes.py: edit the header instead."""

from __future__ import annotations

from ctypes import (
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    CFUNCTYPE,
    POINTER,
    Structure,
)
from typing import Any

# macros
ABI = 1
HELLO_BYTES = 1024

# enum gpubridge_status
OK = 0
ERR_INVALID = -1
ERR_UNSUPPORTED = -2
AGAIN = -3
ERR_TIMEOUT = -4
ERR_SETTING = -5
ERR_CANCELLED = -20
ERR_CHECKSUM = -21
ERR_MISMATCH = -22
ERR_PEER_LOST = -40
ERR_REFUSED = -41
ERR_VERSION = -42
ERR_UNREACHABLE = -43
ERR_ABORTED = -60
ERR_DESTROYED = -61
ERR_NO_MEMORY = -80
ERR_DEVICE = -81
ERR_LIBRARY = -82
ERR_SYSTEM = -83
ERR_FORKED = -84
ERR_INTERNAL = -99

# enum gpubridge_dtype
I8 = 0
U8 = 1
I16 = 2
I32 = 3
I64 = 4
F16 = 5
BF16 = 6
F32 = 7
F64 = 8
BOOL = 9
C64 = 10
C128 = 11
U16 = 12
U32 = 13
U64 = 14
BYTE = 15
DTYPE_COUNT = 16

# enum gpubridge_reduce_op
SUM = 0
AVG = 1
PRODUCT = 2
MIN = 3
MAX = 4
BAND = 5
BOR = 6
BXOR = 7
PREMUL_SUM = 8
REDUCE_OP_COUNT = 9

# enum gpubridge_op_kind
ALL_REDUCE = 0
BROADCAST = 1
REDUCE = 2
ALL_GATHER = 3
REDUCE_SCATTER = 4
ALL_TO_ALL = 5
GATHER = 6
SCATTER = 7
SEND = 8
RECV = 9
BARRIER = 10
OP_KIND_COUNT = 11

# enum gpubridge_device_kind
DEVICE_CPU = 0
DEVICE_CUDA = 1
DEVICE_HIP = 2

# enum gpubridge_op_flags
OP_NOTIFY = 1
OP_HOST_BUFFERS = 2


class ContextConfig(Structure):
    """struct gpubridge_context_config"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("device_kind", c_int32),
        ("device_index", c_int32),
        ("global_rank", c_int32),
        ("local_rank", c_int32),
        ("secret", c_void_p),
        ("secret_bytes", c_size_t),
        ("master_addr", c_char_p),
        ("settings", c_char_p),
        ("versions", c_char_p),
    ]


class CommConfig(Structure):
    """struct gpubridge_comm_config"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("rank", c_int32),
        ("size", c_int32),
        ("timeout_ns", c_int64),
        ("settings", c_char_p),
    ]


class CommStats(Structure):
    """struct gpubridge_comm_stats"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("ops", c_uint64),
        ("bridge_sent_bytes", c_uint64),
        ("bridge_recv_bytes", c_uint64),
        ("island_sent_bytes", c_uint64),
        ("payload_bytes", c_uint64),
        ("total_ns", c_uint64),
        ("island_ns", c_uint64),
        ("bridge_ns", c_uint64),
        ("wait_ns", c_uint64),
        ("compute_ns", c_uint64),
    ]


class Op(Structure):
    """struct gpubridge_op"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("reduce_op", c_int32),
        ("root", c_int32),
        ("flags", c_uint32),
        ("tag", c_int32),
        ("send", c_void_p),
        ("recv", c_void_p),
        ("count", c_uint64),
        ("send_counts", c_void_p),
        ("recv_counts", c_void_p),
        ("factor", c_double),
        ("stream", c_void_p),
        ("timeout_ns", c_int64),
        ("user", c_uint64),
    ]


# (name without prefix, result, parameters)
FUNCTIONS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("abi", c_int, ()),
    ("version", c_char_p, ()),
    ("strerror", c_char_p, (c_int,)),
    ("last_error", c_char_p, ()),
    ("log_sink", None, (CFUNCTYPE(None, c_void_p, c_int, c_char_p), c_void_p)),
    ("setting_info", c_int, (c_int, POINTER(c_char_p), POINTER(c_char_p), POINTER(c_char_p), POINTER(c_char_p))),
    ("context_create", c_int, (POINTER(ContextConfig), POINTER(c_void_p))),
    ("context_destroy", None, (c_void_p,)),
    ("comm_hello", c_int, (c_void_p, POINTER(CommConfig), c_void_p, POINTER(c_size_t))),
    ("comm_create", c_int, (c_void_p, POINTER(CommConfig), POINTER(c_void_p), POINTER(c_size_t), POINTER(c_void_p))),
    ("comm_destroy", None, (c_void_p,)),
    ("comm_abort", None, (c_void_p, c_char_p)),
    ("comm_set_timeout", None, (c_void_p, c_int64)),
    ("comm_status", c_int, (c_void_p,)),
    ("comm_describe", c_size_t, (c_void_p, c_char_p, c_size_t)),
    ("comm_stats", c_int, (c_void_p, POINTER(CommStats))),
    ("submit", c_int, (c_void_p, POINTER(Op), POINTER(c_void_p))),
    ("request_wait", c_int, (c_void_p, c_int64)),
    ("request_test", c_int, (c_void_p,)),
    ("request_wait_stream", c_int, (c_void_p, c_void_p)),
    ("request_source", c_int, (c_void_p, POINTER(c_int32))),
    ("request_free", None, (c_void_p,)),
    ("completions", c_int, (c_void_p, POINTER(c_uint64), c_int32, c_int64, POINTER(c_int32))),
    ("completions_stop", None, (c_void_p,)),
    ("run", c_int, (c_void_p, POINTER(Op))),
    ("all_reduce", c_int, (c_void_p, c_void_p, c_void_p, c_uint64, c_int32, c_int32, c_void_p, POINTER(c_void_p))),
    ("broadcast", c_int, (c_void_p, c_void_p, c_uint64, c_int32, c_int32, c_void_p, POINTER(c_void_p))),
    ("all_gather", c_int, (c_void_p, c_void_p, c_void_p, c_uint64, c_int32, c_void_p, POINTER(c_void_p))),
    ("reduce_scatter", c_int, (c_void_p, c_void_p, c_void_p, c_uint64, c_int32, c_int32, c_void_p, POINTER(c_void_p))),
    ("barrier", c_int, (c_void_p, c_int64)),
]
