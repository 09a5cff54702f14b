# SPDX-License-Identifier: Apache-2.0
"""Values and stream order on real CUDA tensors, by the specified order of arithmetic.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 tests/gpu/values_streams.py [--rounds N]
    GPUBRIDGE_ISLAND=a,a,b,b torchrun --nproc-per-node 4 tests/gpu/values_streams.py

Ranks take the GPUs in turn.  With one GPU each sets an NCCL_HOSTID of its own, so that NCCL forms a communicator over
sockets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import gpubridge
import gpubridge.torch
import torch
import torch.distributed as dist

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
SIZES = [0, 1, 7, 127, 128, 129, 1000, 1000003, (4 << 20) + 5]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank- and position-dependent values, the same on every machine."""
    base = (torch.arange(numel, dtype=torch.int64) * 2654435761 + rank * 40503) % 251
    if dtype is torch.bool:
        return base % 3 == 0
    if dtype.is_floating_point:
        return ((base - 125).double() / (7.0 + rank)).to(dtype)
    return (base % 100 - (0 if dtype is torch.uint8 else 50)).to(dtype)


def islands(world: int) -> list[list[int]]:
    """Ranks by island label, in the order of their lowest rank."""
    labels = os.environ["GPUBRIDGE_ISLAND"].split(",")[:world]
    return [[r for r in range(world) if labels[r] == label] for label in dict.fromkeys(labels)]


def fold(parts: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """In the order given, in the accumulator's type."""
    total = parts[0]
    for part in parts[1:]:
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total = total | part if total.dtype is torch.bool else total + part
        elif op == dist.ReduceOp.MAX:
            total = torch.maximum(total, part)
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, part)
        else:
            total = total & part if total.dtype is torch.bool else total * part
    return total


def expected(parts: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """The specified order: ranks of an island, then islands (f32 for 16-bit types), one division, one rounding."""
    dtype = parts[0].dtype
    acc = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = fold([fold([parts[r].to(acc) for r in island], op) for island in islands(len(parts))], op)
    if op == dist.ReduceOp.AVG:
        n = len(parts)
        total = total / n if acc.is_floating_point else torch.div(total, n, rounding_mode="trunc")
    return total.to(dtype)


def values(rank: int, world: int) -> dict[str, int]:
    wrong = cases = 0
    for dtype in DTYPES:
        for op in OPS:
            if dtype is torch.bool and op == dist.ReduceOp.AVG:
                continue
            for numel in SIZES:
                x = data(rank, numel, dtype).cuda()
                dist.all_reduce(x, op=op)
                cases += 1
                want = expected([data(r, numel, dtype) for r in range(world)], op)
                if not torch.equal(x.cpu(), want):
                    wrong += 1
                    print(f"WRONG {dtype} {op} {numel}: {(x.cpu() != want).sum().item()} elements", flush=True)
    for dtype in DTYPES:
        for numel in (1, 129, 1000003):
            mine = data(rank, numel, dtype).cuda()
            out = torch.empty(world * numel, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(out, mine)
            cases += 1
            wrong += not torch.equal(out.cpu(), torch.cat([data(r, numel, dtype) for r in range(world)]))
            got = data(1, numel, dtype).cuda() if rank == 1 else torch.zeros(numel, dtype=dtype, device="cuda")
            dist.broadcast(got, src=1)
            cases += 1
            wrong += not torch.equal(got.cpu(), data(1, numel, dtype))
            if dtype is not torch.bool:
                full = torch.cat([data(rank + world * d, numel, dtype) for d in range(world)]).cuda()
                shard = torch.empty(numel, dtype=dtype, device="cuda")
                dist.reduce_scatter_tensor(shard, full)
                cases += 1
                parts = [data(r + world * rank, numel, dtype) for r in range(world)]
                wrong += not torch.equal(shard.cpu(), expected(parts, dist.ReduceOp.SUM))
    for numel in (1, 5000, 3000001):
        x = data(rank, numel, torch.float32).cuda()
        y = torch.empty_like(x)
        sent = dist.isend(x, (rank + 1) % world)
        dist.recv(y, (rank - 1) % world)
        sent.wait()
        cases += 1
        wrong += not torch.equal(y.cpu(), data((rank - 1) % world, numel, torch.float32))
    return {"cases": cases, "wrong": wrong}


def streams(rank: int, world: int, rounds: int) -> dict[str, int]:
    """A slow kernel before the op, side streams, and buffers freed and allocated again right after the call."""
    wrong = 0
    side = torch.cuda.Stream()
    for i in range(rounds):
        numel = 1000 + 7919 * (i % 37) * (1 + i % 5)
        with torch.cuda.stream(side if i % 2 else torch.cuda.current_stream()):
            x = torch.zeros(numel, device="cuda")
            torch.cuda._sleep(200_000 + 50_000 * (i % 7))
            x += i + rank
            work = dist.all_reduce(x, async_op=True)
            if i % 3 == 0:
                y = x
                del x
                work.wait()
                x = y
            else:
                gone = torch.full((numel,), -1.0, device="cuda")
                work2 = dist.all_reduce(gone, async_op=True)
                del gone
                junk = torch.full((numel,), 12345.0, device="cuda")
                work.wait()
                work2.wait()
                wrong += int((junk != 12345.0).any().item())
            x = x * 2
            want = (world * i + world * (world - 1) // 2) * 2
            wrong += int((x != want).any().item())
    return {"rounds": rounds, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Ranks of one island need devices of their own; with one GPU, NCCL is told that they sit on different hosts.
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    rank = dist.get_rank()
    begin = time.monotonic()
    result = {
        "rank": rank,
        "values": values(rank, dist.get_world_size()),
        "values_s": round(time.monotonic() - begin, 1),
    }
    result["streams"] = streams(rank, dist.get_world_size(), args.rounds)
    result["total_s"] = round(time.monotonic() - begin, 1)
    print("RESULT " + json.dumps(result), flush=True)
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, result)
    if args.out and rank == 0:
        report = {
            "what": "values and stream order of CUDA tensors",
            "device": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
            "torch": torch.__version__,
            "gpubridge": gpubridge.__version__,
            "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("GPUBRIDGE_") and "LIB" not in k},
            "ranks": every,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if result["values"]["wrong"] or result["streams"]["wrong"] else 0  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
