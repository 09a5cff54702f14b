#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every include in src/ and emu/ points down the layers (ARCHITECTURE.md) and names no vendor header.

Prints one line per wrong include and exits 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "base": 0,
    "wire": 0,
    "device": 1,
    "ccl": 1,
    "transport": 1,
    "codec": 1,
    "fabric": 1,
    "plan": 2,
    "straggler": 2,
    "fleet": 2,
    "engine": 3,
    "comm": 4,
    "api": 5,  # files directly in src/
}
# Arrows inside one layer.  wire -> base: formats are checked with the base's errors and byte helpers.
SIDEWAYS = {("wire", "base"), ("codec", "device"), ("ccl", "device"), ("ccl", "transport"), ("fleet", "straggler")}
# The emulators stand in for vendor libraries: they may use the pure parts below, never what they are opened by.
EMU_MAY_USE = {"base", "codec"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
VENDOR = re.compile(
    r"^(cuda|hip|rocm|nccl|rccl|infiniband|nvrtc|rdma|cu[A-Z])|(^|/)(nccl|rccl|cuda|hip_runtime\w*|nvrtc)\.h$"
)


def folder_of(path: Path) -> str:
    """The layer name of a file below src/."""
    parts = path.relative_to(ROOT / "src").parts
    return parts[0] if len(parts) > 1 else "api"


def problem(path: Path, name: str, system: bool) -> str | None:
    """What is wrong with `path` including `name`, or None."""
    if system:
        return f"<{name}> is a vendor header; vendors are opened at run time" if VENDOR.search(name) else None
    if (path.parent / name).exists() or name.startswith("emu/"):
        return None
    target = name.split("/")[0]
    in_emu = path.is_relative_to(ROOT / "emu")
    if (ROOT / "emu" / name).exists() and in_emu:
        return None
    if target not in LAYERS or not (ROOT / "src" / name).exists():
        return f'"{name}" does not exist below src/'
    if in_emu:
        return None if target in EMU_MAY_USE else f"emu may not use {target}"
    source = folder_of(path)
    if source not in LAYERS:
        return f"folder {source} has no layer; add it to tools/check_includes.py and ARCHITECTURE.md"
    if source == target or LAYERS[target] < LAYERS[source] or (source, target) in SIDEWAYS:
        return None
    return f'"{name}" points up or sideways: {source} is layer {LAYERS[source]}, {target} is layer {LAYERS[target]}'


def main() -> int:
    """Checks all files; returns the exit code."""
    files = [p for top in ("src", "emu") for p in sorted((ROOT / top).rglob("*.[ch]"))]
    wrong = arrows = 0
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            arrows += 1
            text = problem(path, match[2], match[1] == "<")
            if text:
                wrong += 1
                print(f"{path.relative_to(ROOT)}:{number}: {text}")
    print(f"includes: {len(files)} files, {arrows} includes, {wrong} wrong")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main())
