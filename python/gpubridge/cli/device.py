# SPDX-License-Identifier: Apache-2.0
"""`gpubridge doctor --device`: tries one GPU through the C library and writes a report that can be sent to others."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpubridge import __version__, _abi, _native

KINDS = {"cuda": _abi.DEVICE_CUDA, "hip": _abi.DEVICE_HIP}
REPORT_BYTES = 65536


def run(kind: str, index: int, out: Path | None) -> int:
    """Checks device `index` of `kind` ("cuda", "hip", "auto"); 1 when a check failed."""
    console = Console()
    report = check(kind if kind != "auto" else guess(), index)
    table = Table(title=title(report), title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for row in report["checks"]:
        found = row["found"] if row["ok"] else f"{row['found']} (without it: {row['without']})"
        table.add_row(row["check"], "ok" if row["ok"] else "[red]FAILED[/]", found)
    console.print(table)
    for line in report["log"]:
        console.print(line, highlight=False, markup=False)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"report: {out}", highlight=False)
    return 1 if report["failed"] else 0


def guess() -> str:
    """The vendor whose emulation is set, else the one whose driver is there; "cuda" when neither is."""
    emulate = os.environ.get("GPUBRIDGE_EMULATE", "").split(",")[0]
    if emulate in KINDS:
        return emulate
    for name, kind in (("libcuda.so.1", "cuda"), ("libamdhip64.so.7", "hip"), ("libamdhip64.so.6", "hip")):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return kind
    if Path("/dev/kfd").exists():
        return "hip"
    return "cuda"


def check(kind: str, index: int) -> dict[str, Any]:
    """The C library's account of the device, with what is known of the machine around it.

    Keys: gpubridge, checks (list of {check, ok, ms, found, without}), device, failed, machine, settings, log.
    """
    lib = _native.lib()
    lines: list[str] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def sink(_arg: int, _level: int, line: bytes) -> None:
        lines.append(line.decode(errors="replace"))

    buffer = ctypes.create_string_buffer(REPORT_BYTES)
    lib.log_sink(sink, None)
    try:
        status = lib.device_check(KINDS[kind], index, None, buffer, REPORT_BYTES)
    finally:
        lib.log_sink(type(sink)(), None)  # NULL: back to stderr
    if status not in (_abi.OK, _abi.ERR_DEVICE):
        _native.check(status)
    report: dict[str, Any] = json.loads(buffer.value)
    report["kind"] = kind
    report["machine"] = machine()
    report["settings"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("GPUBRIDGE_")}
    report["log"] = lines
    return report


def machine() -> dict[str, Any]:
    """Versions that matter when a device behaves oddly; no names of hosts or users."""
    facts: dict[str, Any] = {
        "gpubridge": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cores": os.cpu_count(),
        "kfd": Path("/dev/kfd").exists(),
    }
    for name in ("/sys/module/amdgpu/version", "/sys/module/nvidia/version", "/opt/rocm/.info/version"):
        path = Path(name)
        if path.exists():
            facts[name] = path.read_text(errors="replace").strip()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        facts["torch"] = f"{torch.__version__} (ROCm {torch.version.hip}, CUDA {torch.version.cuda})"
    return facts


def title(report: dict[str, Any]) -> str:
    device = report.get("device")
    if device is None:
        return f"{report['kind']}: no device could be opened"
    return f"{device['name']} ({device['arch']}){', emulated' if device['emulated'] else ''}"
