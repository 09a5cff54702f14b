# SPDX-License-Identifier: Apache-2.0
"""One job of real NVIDIA ranks and emulated AMD ranks: the same bits everywhere, by sha256.

    GPUBRIDGE_EMULATE=none,none,hip,hip torchrun --nproc-per-node 4 tests/gpu/mixed_vendors.py [--out FILE.json]

Ranks whose entry is `none` use CUDA tensors (with one GPU they share it); the others CPU tensors, which the emulated
vendor takes for device memory.  Random bits go in: NaN, infinities and subnormal numbers among them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import gpubridge
import gpubridge.torch
import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64]
SIZES = [1, 129, 5000, 300001, 1500000]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def bits(rank: int, numel: int, dtype: torch.dtype, case: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case + rank)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    words = os.environ["GPUBRIDGE_EMULATE"].split(",")
    real = words[local] == "none"
    if real and torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
    if real:
        torch.cuda.set_device(local % torch.cuda.device_count())
    device = "cuda" if real else "cpu"
    dist.init_process_group("gpubridge")
    rank, world = dist.get_rank(), dist.get_world_size()
    sums: dict[str, str] = {}
    case = 0
    for dtype in DTYPES:
        for op in OPS:
            for numel in SIZES:
                case += 1
                x = bits(rank, numel, dtype, case).to(device)
                dist.all_reduce(x, op=op)
                out = torch.empty(world * numel, dtype=dtype, device=device)
                dist.all_gather_into_tensor(out, bits(rank, numel, dtype, case).to(device))
                data = torch.cat((x.cpu(), out.cpu())).view(torch.uint8).numpy().tobytes()
                sums[f"{dtype} {op} {numel}"] = hashlib.sha256(data).hexdigest()
    every: list[Any] = [None] * world
    dist.all_gather_object(every, sums)
    different = [name for name in sums if len({ranks[name] for ranks in every}) > 1]
    row = {"cases": len(sums), "different": len(different), "ranks": words[:world], "first": different[:5]}
    if rank == 0:
        print("RESULT " + json.dumps(row), flush=True)
        if args.out:
            report = {
                "what": "real NVIDIA and emulated AMD ranks in one job",
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
                "torch": torch.__version__,
                "gpubridge": gpubridge.__version__,
            }
            args.out.write_text(json.dumps(report | row, indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
