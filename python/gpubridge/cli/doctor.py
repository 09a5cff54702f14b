# SPDX-License-Identifier: Apache-2.0
"""`gpubridge doctor` and `gpubridge settings`: what this machine and environment give, in tables; changes nothing."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import socket
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpubridge import __version__, _native
from gpubridge.errors import GpuBridgeError

# What the core opens at run time: (purpose, setting that names another file, sonames in order).
VENDOR_LIBRARIES = (
    ("CUDA driver", "GPUBRIDGE_CUDA_LIB", ("libcuda.so.1",)),
    ("NCCL", "GPUBRIDGE_NCCL_LIB", ("libnccl.so.2",)),
    (
        "HIP runtime",
        "GPUBRIDGE_HIP_LIB",
        ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"),
    ),
    ("RCCL", "GPUBRIDGE_RCCL_LIB", ("librccl.so.1", "librccl.so")),
    ("verbs (RDMA)", "GPUBRIDGE_VERBS_LIB", ("libibverbs.so.1",)),
)


def run() -> int:
    """Prints the account; 1 when the library itself cannot be used."""
    console = Console()
    problem = None
    try:
        library = f"{_native.lib().path}, version {_native.version()}"
    except GpuBridgeError as error:
        library, problem = "not usable", str(error)
    console.print(_table("versions", [("gpubridge (Python)", __version__), ("libgpubridge", library), *_versions()]))
    console.print(_table("vendor libraries, opened at run time", [(n, _find(s, so)) for n, s, so in VENDOR_LIBRARIES]))
    console.print(_table("emulators beside the library", _emulators()))
    console.print(_table("network interfaces", _interfaces()))
    if problem is None:
        changed = [(name, value) for name, _, value, _ in _native.settings() if name in os.environ]
        console.print(_table("settings from the environment", changed or [("none", "all at their defaults")]))
    console.print(_table("island", [("ranks of this host", _island())]))
    if problem is not None:
        console.print(f"[red]problem:[/] {problem}", highlight=False)
    return 1 if problem else 0


def show_settings(plain: bool) -> None:
    """All rows of the library's settings table."""
    rows = _native.settings()
    if plain:
        for name, _, value, _ in rows:
            print(f"{name}={value}")
        return
    table = Table(title="settings (environment, pg_options, C config)")
    for column in ("name", "type", "value now", "what it does"):
        table.add_column(column, overflow="fold")
    for name, kind, value, text in rows:
        table.add_row(name, kind, value, text)
    Console().print(table)


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _versions() -> list[tuple[str, str]]:
    rows = [
        ("Python", sys.version.split()[0]),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]
    if importlib.util.find_spec("torch") is None:
        return [*rows, ("torch", "not installed: the C library and the straggler tools still work")]
    import torch

    vendor = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return [*rows, ("torch", f"{torch.__version__}, {vendor}"), ("GPUs", ", ".join(gpus) or "none")]


def _find(setting: str, sonames: tuple[str, ...]) -> str:
    given = os.environ.get(setting)
    for name in (given,) if given else sonames:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            if given:
                return f"{setting}={given}: {error}"
        else:
            return f"{name} (from {setting})" if given else name
    return "not found"


def _emulators() -> list[tuple[str, str]]:
    try:
        here = Path(_native.find_library()).resolve().parent
    except GpuBridgeError:
        return [("none", "the library was not found")]
    rows = []
    for vendor in ("cuda", "hip"):
        name = f"libgbemu_{vendor}.so"
        found = next((p for p in (here / name, here.parent / "emu" / name) if p.exists()), None)
        rows.append((vendor, str(found) if found else "not there"))
    return rows


def _interfaces() -> list[tuple[str, str]]:
    rows = []
    for _, name in socket.if_nameindex():
        state = Path(f"/sys/class/net/{name}/operstate")
        text = state.read_text().strip() if state.exists() else "?"
        rows.append((name, f"{text}, {_ipv4(name) or 'no IPv4 address'}"))
    return rows


def _ipv4(name: str) -> str | None:
    """IPv4 address of an interface by the SIOCGIFADDR request."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _island() -> str:
    """The label that decides the island of a process started here now."""
    for name, words in (("GPUBRIDGE_ISLAND", "labelled"), ("GPUBRIDGE_EMULATE", "emulated")):
        value = os.environ.get(name)
        if value:
            return f"{words}: {value} ({name}, by local rank where it is a list)"
    by = os.environ.get("GPUBRIDGE_ISLAND_BY", "arch")
    rule = {"arch": "by vendor and architecture", "vendor": "by vendor", "host": "by host"}.get(by, by)
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            vendor = "AMD" if torch.version.hip else "NVIDIA"
            return f"{vendor} {torch.cuda.get_device_name(0)}, {rule}"
    return f"CPU, {rule}"
