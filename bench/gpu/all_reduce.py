# SPDX-License-Identifier: Apache-2.0
"""all_reduce of CUDA tensors against Gloo in the same run: p50 and p99 per size, interleaved.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 bench/gpu/all_reduce.py [--max-bytes N] [--out FILE.json]

Two ranks on one GPU are two single-rank islands: the path between two hosts, but for the wire, which is loopback or
shared memory here.  Both ranks then share the GPU's copy engines and time slices, which a real pair does not.

`--compression bf16,fp8` measures these too, as groups of their own, against the same Gloo figures.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import gpubridge.torch  # noqa: F401
import torch
import torch.distributed as dist
from report import header, percentile, rounded, write  # type: ignore[import-not-found]


def once(x: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def rounds_of(size: int) -> int:
    return 100 if size <= 65536 else 30 if size <= 16 << 20 else 8 if size < 1 << 30 else 3


def main() -> None:
    parser = argparse.ArgumentParser(description="all_reduce of CUDA tensors against Gloo")
    parser.add_argument("--min-bytes", type=int, default=8)
    parser.add_argument("--max-bytes", type=int, default=4 << 30)
    parser.add_argument("--compression", default="", help="comma list of codecs to measure as well")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--gloo-max-bytes", type=int, default=4 << 30, help="Gloo takes seconds above this")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    gloo = None if args.no_gloo else dist.new_group(backend="gloo")
    groups: dict[str, Any] = {"": None}
    for name in filter(None, args.compression.split(",")):
        groups[name] = dist.new_group(backend="gpubridge", pg_options={"compression": name})
    rows = []
    size = args.min_bytes
    while size <= args.max_bytes:
        # Never zeros: they cost less to move and to encode.
        x = torch.randn(max(1, size // 4), device="cuda")
        samples: dict[str, list[float]] = {name: [] for name in groups}
        theirs: list[float] = []
        for i in range(rounds_of(size) + 2):
            x.uniform_(-1, 1)
            taken = {name: once(x, group) for name, group in groups.items()}
            u = once(x, gloo) if gloo is not None and size <= args.gloo_max_bytes else 0.0
            if i >= 2:
                for name, t in taken.items():
                    samples[name].append(t)
                if u:
                    theirs.append(u)
        row: dict[str, Any] = {"bytes": size}
        if theirs:
            row |= {"gloo_p50_us": percentile(theirs, 0.5), "gloo_p99_us": percentile(theirs, 0.99)}
        for name, taken_us in samples.items():
            mark = f"{name}_" if name else ""
            row |= {f"{mark}p50_us": percentile(taken_us, 0.5), f"{mark}p99_us": percentile(taken_us, 0.99)}
            row[f"{mark}GB_per_s"] = size / row[f"{mark}p50_us"] * 1e-3
            if theirs:
                row[f"{mark}speedup"] = row["gloo_p50_us"] / row[f"{mark}p50_us"]
        rows.append(rounded(row, 2))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
        del x
        size *= 8 if size < 1 << 18 else 4
    if dist.get_rank() == 0:
        write(args.out, header("all_reduce f32 of CUDA tensors") | {"rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
