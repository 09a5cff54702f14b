# SPDX-License-Identifier: Apache-2.0
"""The codecs against ml_dtypes, which shares no code with them.

    python tests/codec/oracle.py LIBCODEC_REFERENCE.SO [--stride N] [--out FILE.json]

Codes of all 2^32 floats (every N-th, in an order that meets every exponent, with --stride N) for fp8_e4m3, fp8_e5m2,
mxfp4 and the casts: finite values are clamped first, NaN stays NaN, infinity becomes NaN in e4m3 and stays in e5m2.
All 2^16 bf16 and f16 inputs.  Values of all codes.  Whole messages against the format written down again here in NumPy.
Exits 1 when anything differs, 77 without ml_dtypes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from reduce_args import CODECS, Args

try:
    import ml_dtypes
    import numpy as np
    import numpy.typing as npt
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

TYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}
NAN = {"bf16": 0x7FC0, "fp16": 0x7E00, "fp8_e4m3": 0x7F, "fp8_e5m2": 0x7E, "mxfp4": -1}
LARGEST = {name: float(ml_dtypes.finfo(t).max) for name, t in TYPES.items()}
CHUNK = 1 << 22
Array = npt.NDArray[Any]


class Codecs:
    """The library under test."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path.resolve()))
        self.lib.codec_bytes.restype = ctypes.c_uint64
        self.lib.codec_bytes.argtypes = [ctypes.c_int, ctypes.c_uint64]

    def codes(self, codec: str, x: Array) -> Array:
        """Codes of float32 values that need no scale."""
        out = np.empty(x.size, np.uint16 if codec in ("bf16", "fp16") else np.uint8)
        call = self.lib.codec_casts if out.itemsize == 2 else self.lib.codec_codes
        call(CODECS[codec], ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(x.size))
        return out

    def values(self, codec: str, codes: Array) -> Array:
        """Values of codes without a scale."""
        x = np.empty(codes.size, np.float32)
        pointers = ctypes.c_void_p(codes.ctypes.data), ctypes.c_void_p(x.ctypes.data)
        self.lib.codec_values(CODECS[codec], *pointers, ctypes.c_uint64(codes.size))
        return x

    def message(self, codec: str, x: Array) -> Array:
        """The message of float32, float16 or bfloat16 values."""
        out = np.full(self.lib.codec_bytes(CODECS[codec], x.size), 0xCC, np.uint8)
        number = {np.dtype(np.float32): 7, np.dtype(np.float16): 5}.get(x.dtype, 6)
        args = Args(dst=out.ctypes.data, count=x.size, nsrc=1, dtype=number, codec=CODECS[codec], dst_is_enc=1)
        args.src[0] = x.ctypes.data
        self.lib.codec_reduce(ctypes.byref(args))
        return out

    def unpack(self, codec: str, message: Array, count: int) -> Array:
        """The floats of a message."""
        x = np.empty(count, np.float32)
        args = Args(dst=x.ctypes.data, count=count, nsrc=1, enc_mask=1, dtype=7, codec=CODECS[codec])
        args.src[0] = message.ctypes.data
        self.lib.codec_reduce(ctypes.byref(args))
        return x


def want_codes(codec: str, x: Array) -> tuple[Array, Array]:
    """What ml_dtypes gives for clamped values, as integers, and where that is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        wild = ~np.isfinite(x)
        clamped = np.clip(x, np.float32(-LARGEST[codec]), np.float32(LARGEST[codec]))
        clamped = np.where(wild, x, clamped) if wild.any() else clamped
        typed = clamped.astype(TYPES[codec])
        return typed.view(np.uint16 if typed.itemsize == 2 else np.uint8), np.isnan(typed)


def differing(codec: str, got: Array, x: Array) -> int:
    """How many codes are not what they must be.  mxfp4 has no code for what is not finite."""
    want, is_nan = want_codes(codec, x)
    if codec == "mxfp4":
        return int(np.count_nonzero((got != want) & np.isfinite(x)))
    return int(np.count_nonzero(np.where(is_nan, got != NAN[codec], got != want)))


def check_floats(codecs: Codecs, codec: str, stride: int) -> dict[str, Any]:
    """Every `stride`-th float, an odd number."""
    begin, bad, seen = time.process_time(), 0, 0
    steps = np.arange(CHUNK, dtype=np.uint32) * np.uint32(stride)
    for at in range(0, 2**32, CHUNK * stride):
        x = (steps[: -((at - 2**32) // stride)] + np.uint32(at)).view(np.float32)
        got = codecs.codes(codec, x)
        seen += x.size
        if stride == 1 and at & 0x7F800000 != 0x7F800000:  # the short way for what is finite
            typed = np.clip(x, np.float32(-LARGEST[codec]), np.float32(LARGEST[codec])).astype(TYPES[codec])
            if np.array_equal(got, typed.view(got.dtype)):
                continue
        bad += differing(codec, got, x)
    seconds = round(time.process_time() - begin, 1)
    return {"check": "codes", "codec": codec, "floats": seen, "differ": bad, "cpu_s": seconds}


def check_halves(codecs: Codecs, codec: str) -> dict[str, Any]:
    """All 2^16 inputs of both 16-bit types; ml_dtypes rounds them itself, from that type."""
    bad = 0
    for source in (ml_dtypes.bfloat16, np.float16):
        x = np.arange(65536, dtype=np.uint16).view(source).astype(np.float32)
        bad += differing(codec, codecs.codes(codec, x), x)
    return {"check": "16-bit inputs", "codec": codec, "floats": 131072, "differ": bad}


def check_values(codecs: Codecs, codec: str) -> dict[str, Any]:
    """Values of all codes."""
    codes = np.arange(16 if codec == "mxfp4" else 256, dtype=np.uint8)
    want, got = codes.view(TYPES[codec]).astype(np.float32), codecs.values(codec, codes)
    same = np.where(np.isnan(want), np.isnan(got), want.view(np.uint32) == got.view(np.uint32))
    return {"check": "values", "codec": codec, "codes": codes.size, "differ": int(np.count_nonzero(~same))}


def up(n: int) -> int:
    return (n + 15) // 16 * 16


def want_message(codec: str, x: Array) -> Array:
    """docs/wire-format.md section 8 once more, for finite values."""
    n = x.size
    if codec in ("bf16", "fp16"):
        raw = want_codes(codec, x)[0].view(np.uint8)
        return np.pad(raw, (0, up(raw.size) - raw.size))
    block = 32 if codec == "mxfp4" else 128
    blocks = np.pad(x, (0, -n % block)).reshape(-1, block).astype(np.float32)
    greatest = np.abs(blocks).max(axis=1)
    if codec == "int8":
        scale = np.float32(greatest * np.float32(0.00787401571869850158691))
        scale = np.clip(scale, np.float32(2.0**-126), np.array([0x7C010203], np.uint32).view(np.float32)[0])
        codes = np.rint(blocks * (np.float32(1) / scale)[:, None]).astype(np.int8).view(np.uint8).reshape(-1)[:n]
        scales = scale.view(np.uint8)
    else:
        mantissa_bits, top = {"fp8_e4m3": (3, 8), "fp8_e5m2": (2, 15), "mxfp4": (1, 2)}[codec]
        limit = np.float32((2 - 2.0**-mantissa_bits) * 2.0**127)
        blocks, greatest = np.clip(blocks, -limit, limit), np.minimum(greatest, limit)
        fraction, power = np.frexp(greatest)
        power = np.where(greatest == 0, -200, power - 1 + (fraction > 0.875)) - top
        power = np.maximum(power, -127)
        scaled = (blocks.astype(np.float64) * 2.0 ** -power[:, None].astype(np.float64)).astype(np.float32)
        codes = want_codes(codec, scaled.reshape(-1)[:n])[0].view(np.uint8)
        scales = (power + 127).astype(np.uint8)
        if codec == "mxfp4":
            codes = np.pad(codes, (0, n % 2))
            codes = codes[0::2] | codes[1::2] << 4
    parts = [np.pad(part, (0, up(part.size) - part.size)) for part in (scales, codes)]
    return np.concatenate(parts)


def check_messages(codecs: Codecs, codec: str) -> dict[str, Any]:
    """Messages of all sorts of finite values, sizes and input types, and that they decode to what their codes say."""
    rng, bad, messages = np.random.default_rng(CODECS[codec]), 0, 0
    for n in (1, 7, 127, 128, 129, 255, 257, 1023, 1024, 1025, 1000003):
        for power in (0, -30, 30, -126, -140, 126):
            for source in (np.float32, np.float16, ml_dtypes.bfloat16):
                with np.errstate(over="ignore"):
                    x = (rng.standard_normal(n) * 2.0**power).astype(source)
                x = np.where(np.isfinite(x.astype(np.float32)), x, source(0)).astype(source)
                if power == 0:
                    x[rng.integers(0, n, n // 50 + 1)] = source(-0.0)
                    x[256:384] = source(0)
                bad += int(np.count_nonzero(codecs.message(codec, x) != want_message(codec, x.astype(np.float32))))
                messages += 1
    return {"check": "messages", "codec": codec, "messages": messages, "differ": bad}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="codecs against ml_dtypes")
    parser.add_argument("library", type=Path)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--codecs", nargs="*", default=list(TYPES), help="whose codes of floats")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    codecs, rows = Codecs(args.library), []
    for codec in CODECS:
        rows.append(check_messages(codecs, codec))
        if codec != "int8":
            rows.append(check_halves(codecs, codec))
        if codec.startswith("fp8") or codec == "mxfp4":
            rows.append(check_values(codecs, codec))
    for codec in args.codecs:
        rows.append(check_floats(codecs, codec, args.stride))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "what": "codecs against ml_dtypes",
        "ml_dtypes": ml_dtypes.__version__,
        "stride": args.stride,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row for row in rows if row["differ"]]
    print(json.dumps(wrong) if wrong else f"{len(rows)} checks, none differs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
