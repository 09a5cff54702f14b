# SPDX-License-Identifier: Apache-2.0
"""The codec kernels on a CUDA device: speed against a device copy and a Triton twin, bits against the CPU.

    python bench/gpu/codec.py [--values 268435456] [--reference libcodec_reference.so] [--out FILE.json]

Speed is bytes read and written per second; `share` is that of a device copy measured between the same calls.
The bits: every one of the 2^32 floats, in blocks whose scale is 1 (up to the format's largest number), for both
fp8 codecs; random values for the others.  Kernels come from src/codec/kernels.inc through the NVRTC of PyTorch's
wheels.  A few GiB of device memory, two to three minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "codec"))

from reduce_args import CODECS, Args  # type: ignore[import-not-found] # noqa: E402

DTYPES = {torch.float16: 5, torch.bfloat16: 6, torch.float32: 7}
THREADS = 256


def message_bytes(codec: str, count: int) -> int:
    """Bytes of an encoded message, as docs/wire-format.md says."""
    up = lambda n: (n + 15) // 16 * 16  # noqa: E731
    if codec in ("bf16", "fp16"):
        return up(2 * count)
    block, scale, bits = {"int8": (128, 4, 8), "mxfp4": (32, 1, 4)}.get(codec, (128, 1, 8))
    return up((count + block - 1) // block * scale) + up((count * bits + 7) // 8)


def pack_args(codec: str, dst: int, src: int, count: int, dtype: int = 7) -> Args:
    a = Args(dst=dst, count=count, divisor=1, nsrc=1, dtype=dtype, codec=CODECS[codec], dst_is_enc=1)
    a.src[0] = src
    return a


def add_args(codec: str, dst: int, plain: int, message: int, count: int, dtype: int = 7) -> Args:
    """dst = plain + decoded message; without `plain`, the decoded message."""
    sources = [plain, message] if plain else [message]
    a = Args(dst=dst, count=count, divisor=1, nsrc=len(sources), dtype=dtype, codec=CODECS[codec])
    a.src[: len(sources)] = sources
    a.enc_mask = 1 << len(sources) - 1
    return a


class Kernel:
    """The kernels, compiled for this device with values held by a thread and groups at least on a processor."""

    def __init__(self, defines: dict[str, int]) -> None:
        roots = [Path(p) for p in sys.path if p.endswith("-packages")]
        found = [p for r in roots for p in sorted(r.glob("nvidia/*/lib/libnvrtc.so.1[0-9]"))]
        if not found:
            raise SystemExit("codec.py: no nvidia/*/lib/libnvrtc.so in this Python's packages")
        nvrtc = ctypes.CDLL(str(found[-1]))
        source = (ROOT / "src/codec/kernels.inc").read_bytes()
        major, minor = torch.cuda.get_device_capability()
        options = [f"--gpu-architecture=sm_{major}{minor}", "--fmad=false", "--ftz=false", "--prec-div=true"]
        options += ["--prec-sqrt=true", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        words = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        begin = time.perf_counter()
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
        status = nvrtc.nvrtcCompileProgram(program, len(options), words)
        self.seconds = time.perf_counter() - begin
        if status:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise SystemExit(f"codec.py: {log.value.decode()}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.functions: dict[str, ctypes.c_void_p] = {}
        self.registers: dict[str, int] = {}
        for name in ("gb_reduce", "gb_pack", "gb_add"):
            function, registers = ctypes.c_void_p(), ctypes.c_int()
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            self.call("cuFuncGetAttribute", ctypes.byref(registers), 4, function)
            self.functions[name], self.registers[name] = function, registers.value

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self.cuda, name)(*args)
        if status:
            raise SystemExit(f"codec.py: {name} failed with {status}")

    def launch(self, args: Args, blocks: int) -> None:
        params = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(args), ctypes.c_void_p))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        common = "gb_pack" if args.dst_is_enc else "gb_add"  # reduce.h: gb_reduce_way
        name = common if args.nsrc == 2 - args.dst_is_enc else "gb_reduce"
        self.call("cuLaunchKernel", self.functions[name], blocks, 1, 1, THREADS, 1, 1, 0, stream, params, None)


# ---- Triton twin: fp8_e4m3 of finite values, the same bytes ----

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]

    @triton.jit
    def triton_pack(x_ptr, codes_ptr, scales_ptr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        at = rows[:, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, :]
        x = tl.load(x_ptr + at).to(tl.float32)
        greatest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        power = (greatest >> 23) + ((greatest & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = tl.maximum(power, 8) - 8
        inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
        tl.store(codes_ptr + at, (x * inverse[:, None]).to(tl.float8e4nv))
        tl.store(scales_ptr + rows, scale.to(tl.uint8))

    @triton.jit
    def triton_add(y_ptr, x_ptr, codes_ptr, scales_ptr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        at = rows[:, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, :]
        scale = (tl.load(scales_ptr + rows).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        x = tl.load(x_ptr + at).to(tl.float32) + tl.load(codes_ptr + at).to(tl.float32) * scale[:, None]
        tl.store(y_ptr + at, x)

    TRITON = str(triton.__version__)
except ImportError:
    TRITON = ""


# ---- speed ----


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, one after the other in every round."""
    events = {name: [] for name in calls}  # type: dict[str, list[tuple[Any, Any]]]
    for _ in range(rounds + 2):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: statistics.median(b.elapsed_time(e) for b, e in pairs[2:]) / 1e3 for n, pairs in events.items()}


class Speed:
    """Buffers of one run; `values` floats."""

    def __init__(self, values: int) -> None:
        self.values = values
        self.x = torch.randn(values, device="cuda") * 3
        self.y = torch.empty_like(self.x)
        self.message = torch.zeros(message_bytes("bf16", values), dtype=torch.uint8, device="cuda")

    def measure(self, kernel: Kernel, codec: str, dtype: torch.dtype, blocks: int, rounds: int = 7) -> dict[str, Any]:
        """Shares of the device copy's bandwidth for pack, decode-add, and (fp8_e4m3) the Triton twin."""
        n, number = self.values, DTYPES[dtype]
        x = self.x if dtype == torch.float32 else self.x.to(dtype)
        y = self.y.view(dtype)[:n]
        packing = pack_args(codec, self.message.data_ptr(), x.data_ptr(), n, number)
        # The sum goes elsewhere: in place, x would double with every call and soon be infinite.
        adding = add_args(codec, y.data_ptr(), x.data_ptr(), self.message.data_ptr(), n, number)
        wire = message_bytes(codec, n)
        moved = {"copy": 2 * n * x.element_size()}
        moved |= {"pack": n * x.element_size() + wire, "decode_add": 2 * n * x.element_size() + wire}
        calls: dict[str, Callable[[], object]] = {
            "copy": lambda: y.copy_(x),
            "pack": lambda: kernel.launch(packing, blocks),
            "decode_add": lambda: kernel.launch(adding, blocks),
        }
        if TRITON and codec == "fp8_e4m3" and n % 4096 == 0:
            scales = self.message[: n // 128]
            codes = self.message[(n // 128 + 15) // 16 * 16 :][:n].view(torch.float8_e4m3fn)
            calls["triton_pack"] = lambda: triton_pack[(n // 128 // 32,)](x, codes, scales, BLOCKS=32)
            calls["triton_decode_add"] = lambda: triton_add[(n // 128 // 32,)](y, x, codes, scales, BLOCKS=32)
            moved |= {"triton_pack": moved["pack"], "triton_decode_add": moved["decode_add"]}
        seconds = timed(calls, rounds)
        rates = {name: moved[name] / seconds[name] / 1e9 for name in calls}
        row: dict[str, Any] = {"codec": codec, "dtype": str(dtype).removeprefix("torch."), "blocks": blocks}
        row |= {f"{name}_GBps": round(rate, 1) for name, rate in rates.items()}
        row |= {f"{name}_share": round(rate / rates["copy"], 4) for name, rate in rates.items() if name != "copy"}
        return row

    def same_as_triton(self, kernel: Kernel, blocks: int) -> bool | None:
        """Whether the Triton twin wrote the same message."""
        if not TRITON or self.values % 4096:
            return None
        n, size = self.values, message_bytes("fp8_e4m3", self.values)
        self.x.normal_()
        kernel.launch(pack_args("fp8_e4m3", self.message.data_ptr(), self.x.data_ptr(), n), blocks)
        ours = self.message[:size].clone()
        codes = self.message[(n // 128 + 15) // 16 * 16 :][:n].view(torch.float8_e4m3fn)
        triton_pack[(n // 128 // 32,)](self.x, codes, self.message[: n // 128], BLOCKS=32)
        return bool(torch.equal(ours, self.message[:size]))


# ---- bits ----


def reference_library(path: Path) -> ctypes.CDLL:
    """The CPU's arithmetic; compiled here when `path` does not exist."""
    if not path.exists():
        path = Path(tempfile.mkdtemp()) / "libcodec_reference.so"
        sources = [ROOT / f"src/codec/{name}.c" for name in ("codec", "message", "reduce")]
        flags = ["-std=c17", "-D_GNU_SOURCE", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
        folders = [f"-I{ROOT}/src", f"-I{ROOT}/include"]
        subprocess.run(
            ["cc", *flags, *folders, *map(str, sources), str(ROOT / "tests/codec/reference.c"), "-o", str(path)],
            check=True,
        )
    library = ctypes.CDLL(str(path))
    library.codec_bytes.restype = ctypes.c_uint64
    return library


def check_pack(kernel: Kernel, cpu: ctypes.CDLL, codec: str, x: torch.Tensor, blocks: int) -> tuple[int, int]:
    """Bytes that differ in the message, and in what it decodes to."""
    n, size = x.numel(), message_bytes(codec, x.numel())
    message = torch.empty(size, dtype=torch.uint8, device="cuda")
    y = torch.empty(n, device="cuda")
    kernel.launch(pack_args(codec, message.data_ptr(), x.data_ptr(), n), blocks)
    kernel.launch(add_args(codec, y.data_ptr(), 0, message.data_ptr(), n), blocks)
    on_host = x.cpu().numpy()
    want, decoded = np.empty(size, np.uint8), np.empty(n, np.float32)
    cpu.codec_reduce(ctypes.byref(pack_args(codec, want.ctypes.data, on_host.ctypes.data, n)))
    cpu.codec_reduce(ctypes.byref(add_args(codec, decoded.ctypes.data, 0, want.ctypes.data, n)))
    bad = int(np.count_nonzero(message.cpu().numpy() != want))
    return bad, int(np.count_nonzero(y.cpu().numpy().view(np.uint32) != decoded.view(np.uint32)))


def check_all_floats(kernel: Kernel, cpu: ctypes.CDLL, codec: str, blocks: int) -> dict[str, Any]:
    """Every float; each block holds 127 of them in a row and the format's largest number."""
    largest = 448.0 if codec == "fp8_e4m3" else 57344.0
    begin, rows, bad, bad_values = time.perf_counter(), 1 << 18, 0, 0
    total = (2**32 + 126) // 127
    for at in range(0, total, rows):
        count = min(rows, total - at)
        index = torch.arange(at * 127, (at + count) * 127, device="cuda", dtype=torch.int64)
        x = torch.full((count, 128), largest, device="cuda")
        x[:, 1:] = index.to(torch.int32).view(torch.float32).view(count, 127)
        differing = check_pack(kernel, cpu, codec, x.view(-1), blocks)
        bad, bad_values = bad + differing[0], bad_values + differing[1]
    seconds = round(time.perf_counter() - begin, 1)
    return {
        "codec": codec,
        "floats": 2**32,
        "message_bytes_differing": bad,
        "values_differing": bad_values,
        "s": seconds,
    }


def check_random(kernel: Kernel, cpu: ctypes.CDLL, codec: str, blocks: int) -> dict[str, Any]:
    """2^25 random bit patterns, 2^25 of one scale with a few specials, and a count that is no multiple of anything."""
    bad = bad_values = 0
    bits = torch.randint(-(2**31), 2**31, (1 << 25,), dtype=torch.int64, device="cuda").to(torch.int32)
    plain = torch.randn(1 << 25, device="cuda")
    plain[:: 1 << 14] = float("inf")
    for x in (bits.view(torch.float32), plain, plain[:1000003], plain[1:1000]):
        differing = check_pack(kernel, cpu, codec, x, blocks)
        bad, bad_values = bad + differing[0], bad_values + differing[1]
    return {"codec": codec, "floats": "2^26 random", "message_bytes_differing": bad, "values_differing": bad_values}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="codec kernels against a device copy, a Triton twin and the CPU")
    parser.add_argument("--values", type=int, default=1 << 28)
    parser.add_argument("--reference", type=Path, default=ROOT / "build/tests/codec/libcodec_reference.so")
    parser.add_argument("--no-bits", action="store_true", help="speed only")
    parser.add_argument("--no-sweep", action="store_true", help="the default variant only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.init()
    begin = time.perf_counter()
    speed = Speed(args.values)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    default = Kernel({})
    variants: list[tuple[dict[str, int], Kernel]] = [({}, default)]
    if not args.no_sweep:
        for groups in (2, 3):
            defines = {"GB_GROUPS(most)": groups}
            variants.append((defines, Kernel(defines)))
    sweep: list[dict[str, Any]] = []
    for defines, kernel in variants:
        for per_processor in (3, 4, 12):
            for dtype in (torch.float32, torch.bfloat16):
                row = speed.measure(kernel, "fp8_e4m3", dtype, processors * per_processor, 5)
                about = {"defines": defines, "registers": kernel.registers, "compile_s": round(kernel.seconds, 1)}
                row = about | row
                sweep.append(row)
                print(json.dumps(row), flush=True)
    # What the library compiles, on the grid that suits its slower kernel best.
    best = max((r for r in sweep if not r["defines"]), key=lambda r: min(r["pack_share"], r["decode_add_share"]))
    kernel = default
    table = []
    for codec in CODECS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            table.append({"defines": best["defines"]} | speed.measure(kernel, codec, dtype, best["blocks"]))
            print(json.dumps(table[-1]), flush=True)
    table.append({"defines": {}} | speed.measure(default, "fp8_e4m3", torch.float32, 2 * processors))
    same = speed.same_as_triton(default, best["blocks"])
    bits: list[dict[str, Any]] = []
    if not args.no_bits:
        del speed
        cpu = reference_library(args.reference)
        for codec in CODECS:
            bits.append(check_random(default, cpu, codec, 64))
            print(json.dumps(bits[-1]), flush=True)
        for codec in ("fp8_e4m3", "fp8_e5m2"):
            bits.append(check_all_floats(default, cpu, codec, 4 * processors))
            print(json.dumps(bits[-1]), flush=True)
    report = {
        "what": "codec kernels: bytes moved per second against a device copy, bits against the CPU",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": TRITON,
        "values": args.values,
        "triton_writes_the_same_message": same,
        "table": table,
        "sweep": sweep,
        "bits": bits,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps({"triton_writes_the_same_message": same, "seconds": report["seconds"]}))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
