# SPDX-License-Identifier: Apache-2.0
"""all_reduce of CUDA tensors against Gloo in the same run: p50 and p99 per size, interleaved.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 bench/gpu/all_reduce.py [--max-bytes 1G] [--out FILE.json]

Two ranks on one GPU are two single-rank islands: the path between two hosts, but for the wire, which is loopback here.
Both ranks then share the GPU's copy engines and time slices, which a real pair does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import gpubridge
import gpubridge.torch
import torch
import torch.distributed as dist


def once(x: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def host_time(x: torch.Tensor, rounds: int) -> float:
    """Median time inside the call of a warm asynchronous all_reduce, seconds."""
    inside = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work = dist.all_reduce(x, async_op=True)
        inside.append(time.perf_counter() - begin)
        work.wait()
        torch.cuda.synchronize()
    return statistics.median(inside)


def percentile(samples: list[float], q: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * q))]


def main() -> None:
    parser = argparse.ArgumentParser(description="all_reduce of CUDA tensors against Gloo")
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-gloo", action="store_true")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    gloo = None if args.no_gloo else dist.new_group(backend="gloo")
    rows = []
    size = 8
    while size <= args.max_bytes:
        x = torch.zeros(size // 4, device="cuda")
        rounds = 100 if size <= 65536 else 20 if size <= 16 << 20 else 5 if size < 1 << 30 else 3
        ours, theirs = [], []
        for i in range(rounds + 2):
            t = once(x, None)
            u = once(x, gloo) if gloo is not None else 0.0
            if i >= 2:
                ours.append(t)
                theirs.append(u)
        row = {"bytes": size, "p50_us": percentile(ours, 0.5) * 1e6, "p99_us": percentile(ours, 0.99) * 1e6}
        if gloo is not None:
            row |= {"gloo_p50_us": percentile(theirs, 0.5) * 1e6, "gloo_p99_us": percentile(theirs, 0.99) * 1e6}
            row["speedup"] = row["gloo_p50_us"] / row["p50_us"]
        rows.append({k: round(v, 2) for k, v in row.items()})
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
        size *= 8 if size < 1 << 20 else 4
    inside = host_time(torch.zeros(1 << 18, device="cuda"), 50) * 1e6
    if dist.get_rank() == 0:
        settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith("GPUBRIDGE_") and "LIB" not in k}
        report = {
            "what": "all_reduce f32 of CUDA tensors",
            "device": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "gpubridge": gpubridge.__version__,
            "settings": settings,
            "host_time_in_call_p50_us": round(inside, 1),
            "rows": rows,
        }
        print(json.dumps({"host_time_in_call_p50_us": round(inside, 1)}), flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
