# SPDX-License-Identifier: Apache-2.0
"""struct gb_reduce_args and the numbers of the codecs for ctypes: for programs that call the arithmetic directly."""

from __future__ import annotations

import ctypes

CODECS = {"bf16": 1, "fp16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5, "mxfp4": 6}


class Args(ctypes.Structure):
    """struct gb_reduce_args of src/codec/reduce.h."""

    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("src", ctypes.c_void_p * 16),
        ("count", ctypes.c_uint64),
        ("factor", ctypes.c_double),
        ("divisor", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("first_index", ctypes.c_uint64),
        ("stats", ctypes.c_void_p),
        ("premul_mask", ctypes.c_uint32),
        ("acc_mask", ctypes.c_uint32),
        ("enc_mask", ctypes.c_uint32),
        ("nsrc", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),
        ("op", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("dst_is_acc", ctypes.c_uint8),
        ("codec", ctypes.c_uint8),
        ("dst_is_enc", ctypes.c_uint8),
    )
