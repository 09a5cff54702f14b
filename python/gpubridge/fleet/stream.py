# SPDX-License-Identifier: Apache-2.0
"""Recordings as endless streams (docs/straggler-engine.md section 12): written by a simulated fleet, judged
from a pipe in
bounded memory."""

from __future__ import annotations

import ctypes
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from gpubridge import _fleet_abi as abi
from gpubridge.errors import GpuBridgeError
from gpubridge.fleet.native import call, ints, pointer
from gpubridge.straggler import Engine, Event
from gpubridge.straggler import _engine as raw

CHUNK = 1 << 20
MODELS = ("V100", "A100", "H200", "MI50", "MI210", "MI300X")
_RECORD_FRAME = 16  # type, length, checksum
_HEADER = 76
_LARGEST = 1 << 28


@dataclass(frozen=True)
class Fault:
    """One rank computes slower by `size` (relative) from a step on."""

    rank: int
    size: float
    step: int


def write_stream(file: BinaryIO, ranks: int, steps: int, seed: int, fault: Fault | None = None) -> None:
    """A recording of a simulated fleet: V100, MI50, H200 and MI300X devices in equal parts, one class each.

    Raises:
        GpuBridgeError: an argument is out of range.
    """
    kinds = [MODELS.index(m) for m in ("V100", "MI50", "H200", "MI300X")]
    models = ints([kinds[r * len(kinds) // ranks] for r in range(ranks)])
    groups = [r * len(kinds) // ranks for r in range(ranks)]
    engine = Engine(ranks, groups=groups, classes=groups)
    config = abi.FleetSimConfig(
        struct_size=ctypes.sizeof(abi.FleetSimConfig), seed=seed, ranks=ranks, models=models.ctypes.data, lottery=0.04
    )
    sim, used = ctypes.c_void_p(), ctypes.c_size_t()
    call("fleet_sim_create", ctypes.byref(config), ctypes.byref(sim))
    seconds = np.zeros(ranks)
    address = pointer(seconds)
    buffer = ctypes.create_string_buffer(4096 + 13 * ranks)
    view = memoryview(buffer)
    raw._call("record_header", ctypes.byref(engine._config), buffer, len(buffer), ctypes.byref(used))
    file.write(view[: used.value])
    for step in range(steps):
        if fault and step == fault.step:
            call("fleet_sim_fault", sim, abi.FLEET_FAULT_COMPUTE, fault.rank, fault.size)
        call("fleet_sim_seconds", sim, address)
        raw._call("record_step", engine._handle, step, address, None, None, buffer, len(buffer), ctypes.byref(used))
        file.write(view[: used.value])
    file.flush()


@dataclass
class StreamResult:
    """What was read: records, bytes, seconds, the process's largest memory, and the events in order."""

    records: int
    bytes: int
    seconds: float
    peak_mib: float
    events: list[Event]
    engine: Engine | None
    error: str = ""


def judge_stream(file: BinaryIO, tell: Callable[[int, int, float], None] | None = None) -> StreamResult:
    """Judges a recording as it arrives; memory does not grow with its length.

    Args:
        tell: called about once a second with records, bytes and seconds so far.
    """
    begin = told = time.monotonic()
    buffer = bytearray()
    result = StreamResult(0, 0, 0.0, 0.0, [], None)
    used, handle = ctypes.c_size_t(), ctypes.c_void_p()
    while True:
        block = file.read(CHUNK)
        if not block:
            break
        result.bytes += len(block)
        buffer += block
        try:
            at = _judge_block(buffer, result, handle, used)
        except GpuBridgeError as error:
            result.error = str(error)
            break
        del buffer[:at]
        now = time.monotonic()
        if tell and now - told > 1.0:
            told = now
            tell(result.records, result.bytes, now - begin)
    if result.engine is None and not buffer and not result.error:
        result.error = "nothing came: no recording"
    if buffer and not result.error:
        result.error = f"the last record is cut short: {len(buffer)} bytes"
    result.seconds = time.monotonic() - begin
    result.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return result


def _judge_block(buffer: bytearray, result: StreamResult, handle: Any, used: Any) -> int:
    """Applies the whole records at the start of `buffer`; returns how many bytes they have."""
    base, at, end = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 0, len(buffer)
    next_record = raw._call
    while end - at >= _RECORD_FRAME:
        size = _RECORD_FRAME + struct.unpack_from("<I", buffer, at + 4)[0]
        if size > _LARGEST:
            raise GpuBridgeError(f"a record of {size} bytes: not a recording, or a damaged one", -1)
        if end - at < size:
            break
        if result.engine is None:
            next_record("replay_open", base, size, ctypes.byref(handle), ctypes.byref(used))
            result.engine = _engine_of(handle, bytes(buffer[:size]))
        else:
            next_record("replay_next", handle, base + at, size, ctypes.byref(used))
            result.records += 1
            if result.records % 64 == 0:
                result.events += result.engine.events()
        at += size
    if result.engine is not None:
        result.events += result.engine.events()
    return at


def _engine_of(handle: Any, header: bytes) -> Engine:
    engine = Engine.__new__(Engine)
    engine._handle = handle
    engine.ranks, engine.kinds = struct.unpack_from("<ii", header, 16)
    given = struct.unpack_from("<I", header, _HEADER - 4)[0]
    members = struct.unpack_from(f"<{engine.ranks}i", header, _HEADER)
    engine.groups = max(members) + 1 if given & 1 else 1
    return engine


def read_only(file: BinaryIO) -> tuple[int, float]:
    """Reads to the end and does nothing with it: bytes and seconds, to compare with."""
    begin, total = time.monotonic(), 0
    while block := file.read(CHUNK):
        total += len(block)
    return total, time.monotonic() - begin
