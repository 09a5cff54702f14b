#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles GPU kernels with NVRTC, which needs no GPU: kernels_nvrtc.py KERNELS.INC [LIBNVRTC...]

Without libraries named, those of nvidia-cuda-nvrtc wheels next to this interpreter are used; exits 77 where there is
none.  Every architecture of ARCHS that a library supports must compile; CUDA 13 no longer supports sm_70.  Prints
registers and spills per architecture, and the time.
"""

from __future__ import annotations

import ctypes
import re
import site
import sys
import time
from pathlib import Path

ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
OPTIONS = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17", "--ptxas-options=-v")


def libraries() -> list[str]:
    """Paths of the NVRTC libraries of installed wheels, one per wheel."""
    roots = [*site.getsitepackages(), site.getusersitepackages()]
    found = [p for root in roots for p in Path(root).glob("nvidia/*/lib/libnvrtc.so.1[0-9]")]
    return [str(p) for p in sorted(found)]


class Nvrtc:
    """The calls that this program makes; raises RuntimeError with the compiler's log."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        count = ctypes.c_int()
        self.lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self.lib.nvrtcGetSupportedArchs(archs)
        self.archs = set(archs)

    def text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        getattr(self.lib, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    def compile(self, source: bytes, arch: int) -> tuple[bytes, str]:
        """Machine code for sm_`arch`, and the log."""
        program = ctypes.c_void_p()
        self.lib.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None)
        options = [f"--gpu-architecture=sm_{arch}", *OPTIONS]
        words = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        status = self.lib.nvrtcCompileProgram(program, len(options), words)
        log = self.text(program, "ProgramLog").rstrip(b"\0").decode()
        if status:
            raise RuntimeError(f"sm_{arch}: status {status}\n{log}")
        code = self.text(program, "CUBIN")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return code, log


def main() -> int:
    """Entry point."""
    source = Path(sys.argv[1]).read_bytes()
    kernels = re.findall(rb"^GB_KERNEL.*?\b(gb_\w+)\(", source, re.MULTILINE)
    paths = sys.argv[2:] or libraries()
    if not paths:
        print("no nvidia-cuda-nvrtc wheel is installed")
        return 77
    for path in paths:
        nvrtc = Nvrtc(path)
        wanted = [arch for arch in ARCHS if arch in nvrtc.archs]
        if len(wanted) < len(ARCHS) - 1:
            print(f"NVRTC {nvrtc.version} supports only {wanted} of {ARCHS}")
            return 1
        for arch in wanted:
            begin = time.perf_counter()
            code, log = nvrtc.compile(source, arch)
            missing = [k.decode() for k in kernels if k not in code]
            # That NVRTC will drop an architecture one day is no fault of the kernels.
            if not kernels or missing or any("warning" in x and "deprecated" not in x for x in log.splitlines()):
                print(f"sm_{arch}: {missing} missing\n{log}")
                return 1
            usage = re.findall(r"Used (\d+) registers.*", log)
            spills = re.findall(r"(\d+) bytes spill stores", log)
            seconds = time.perf_counter() - begin
            print(f"NVRTC {nvrtc.version} sm_{arch}: registers {usage}, spills {spills}, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
