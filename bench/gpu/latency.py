# SPDX-License-Identifier: Apache-2.0
"""Latency of small all_reduces of CUDA tensors against Gloo in the same run, and the host time inside a call.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 bench/gpu/latency.py [--trace] [--out FILE.json]

`--trace` sets GPUBRIDGE_LOG=trace and reads the library's own account of each operation: microseconds from its
submission to each stage.  Tracing costs a few microseconds per operation, so latencies are taken without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpubridge.torch  # noqa: F401
import torch
import torch.distributed as dist
from report import header, percentile, rounded, write  # type: ignore[import-not-found]

SIZES = [8, 4096, 32768, 262144, 1 << 20]
STAGES = ("taken", "in the streams", "copied out", "first message", "last message", "let in", "finished")


def once(x: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def backend_of(group: Any) -> Any:
    """The Python object behind the group, whose submit call can be timed."""
    return group if hasattr(group, "_submit") else None


def inside(x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Time inside the call of a warm asynchronous all_reduce: all of it, and the part in the C library."""
    calls: list[float] = []
    native: list[float] = []
    backend = backend_of(dist.group.WORLD)
    plain: Callable[..., int] | None = backend._submit if backend is not None else None

    def timed(*args: Any) -> int:
        begin = time.perf_counter()
        status = plain(*args)  # type: ignore[misc]
        native.append((time.perf_counter() - begin) * 1e6)
        return status

    for phase in (0, 1):
        if phase and backend is None:
            break
        if phase:
            backend._submit = timed
        for i in range(rounds + 5):
            begin = time.perf_counter()
            work = dist.all_reduce(x, async_op=True)
            spent = (time.perf_counter() - begin) * 1e6
            work.wait()
            torch.cuda.synchronize()
            if i >= 5 and not phase:
                calls.append(spent)
    if backend is not None:
        backend._submit = plain
    row = {"call_p50_us": percentile(calls, 0.5), "call_p90_us": percentile(calls, 0.9)}
    if native:
        row["native_p50_us"] = percentile(native[5:], 0.5)
    return row


def stages(path: Path) -> dict[str, float]:
    """Medians over the traced operations of this rank."""
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for line in path.read_text(errors="replace").splitlines():
        if ": taken " not in line:
            continue
        for stage in STAGES:
            match = re.search(stage + r" ([0-9.]+)", line)
            if match:
                found[stage].append(float(match[1]))
    return {stage: round(statistics.median(values), 1) for stage, values in found.items() if values}


def traced(x: torch.Tensor, rounds: int) -> dict[str, float]:
    """The same operations with the log going to a file."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            for _ in range(rounds):
                once(x, None)
            time.sleep(0.01)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        return stages(Path(log.name))


def main() -> None:
    parser = argparse.ArgumentParser(description="latency of small all_reduces of CUDA tensors")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.trace:
        os.environ["GPUBRIDGE_LOG"] = "trace"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    gloo = None if args.no_gloo or args.trace else dist.new_group(backend="gloo")
    rows = []
    for size in SIZES:
        x = torch.zeros(size // 4, device="cuda")
        row: dict[str, Any] = {"bytes": size}
        for _ in range(20):
            once(x, None)
        if args.trace:
            row["stages_us"] = traced(x, args.rounds)
        else:
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(once(x, None))
                if gloo is not None:
                    theirs.append(once(x, gloo))
            row |= {"p50_us": percentile(ours, 0.5), "p99_us": percentile(ours, 0.99)}
            if gloo is not None:
                row |= {"gloo_p50_us": percentile(theirs, 0.5), "gloo_p99_us": percentile(theirs, 0.99)}
                row["speedup"] = row["gloo_p50_us"] / row["p50_us"]
            row |= inside(x, args.rounds)
        rows.append(rounded(row, 2))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        write(args.out, header("latency of all_reduce f32 of CUDA tensors") | {"rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
