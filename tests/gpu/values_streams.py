# SPDX-License-Identifier: Apache-2.0
"""Values and stream order on real CUDA tensors: two single-rank islands, on one GPU or on two.

torchrun --nproc-per-node 2 tests/gpu/values_streams.py [--rounds N]      (with GPUBRIDGE_ISLAND=a,b)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

import gpubridge.torch  # noqa: F401

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


def expected(parts: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """The specified order: accumulate in rank order (f32 for 16-bit types), divide once, round once."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        both = {
            dist.ReduceOp.SUM: torch.logical_or,
            dist.ReduceOp.MAX: torch.logical_or,
            dist.ReduceOp.MIN: torch.logical_and,
            dist.ReduceOp.PRODUCT: torch.logical_and,
        }[op]
        return both(parts[0], parts[1])
    acc = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    a, b = parts[0].to(acc), parts[1].to(acc)
    if op == dist.ReduceOp.SUM:
        return (a + b).to(dtype)
    if op == dist.ReduceOp.AVG:
        total = a + b
        return (
            (total / 2).to(dtype) if dtype.is_floating_point else torch.div(total, 2, rounding_mode="trunc").to(dtype)
        )
    if op == dist.ReduceOp.MAX:
        return torch.maximum(a, b).to(dtype)
    if op == dist.ReduceOp.MIN:
        return torch.minimum(a, b).to(dtype)
    return (a * b).to(dtype)


def values(rank: int) -> dict[str, int]:
    wrong = cases = 0
    for dtype in DTYPES:
        for op in OPS:
            if dtype is torch.bool and op == dist.ReduceOp.AVG:
                continue
            for numel in SIZES:
                x = data(rank, numel, dtype).cuda()
                dist.all_reduce(x, op=op)
                cases += 1
                want = expected([data(0, numel, dtype), data(1, numel, dtype)], op)
                if not torch.equal(x.cpu(), want):
                    wrong += 1
                    print(f"WRONG {dtype} {op} {numel}: {(x.cpu() != want).sum().item()} elements", flush=True)
    for dtype in DTYPES:
        for numel in (1, 129, 1000003):
            mine = data(rank, numel, dtype).cuda()
            out = torch.empty(2 * numel, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(out, mine)
            cases += 1
            wrong += not torch.equal(out.cpu(), torch.cat([data(0, numel, dtype), data(1, numel, dtype)]))
            got = data(1, numel, dtype).cuda() if rank == 1 else torch.zeros(numel, dtype=dtype, device="cuda")
            dist.broadcast(got, src=1)
            cases += 1
            wrong += not torch.equal(got.cpu(), data(1, numel, dtype))
            if dtype is not torch.bool:
                full = torch.cat([data(rank + 2 * d, numel, dtype) for d in range(2)]).cuda()
                shard = torch.empty(numel, dtype=dtype, device="cuda")
                dist.reduce_scatter_tensor(shard, full)
                cases += 1
                wrong += not torch.equal(
                    shard.cpu(),
                    expected([data(2 * rank, numel, dtype), data(1 + 2 * rank, numel, dtype)], dist.ReduceOp.SUM),
                )
    for numel in (1, 5000, 3000001):
        x = data(rank, numel, torch.float32).cuda()
        y = torch.empty_like(x)
        (dist.send(x, 1), dist.recv(y, 1)) if rank == 0 else (dist.recv(y, 0), dist.send(x, 0))
        cases += 1
        wrong += not torch.equal(y.cpu(), data(1 - rank, numel, torch.float32))
    return {"cases": cases, "wrong": wrong}


def streams(rank: int, rounds: int) -> dict[str, int]:
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
            want = (2 * i + 1) * 2
            wrong += int((x != want).any().item())
    return {"rounds": rounds, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("GPU", "0")))
    dist.init_process_group("gpubridge")
    rank = dist.get_rank()
    begin = time.monotonic()
    result = {"rank": rank, "values": values(rank), "values_s": round(time.monotonic() - begin, 1)}
    result["streams"] = streams(rank, args.rounds)
    result["total_s"] = round(time.monotonic() - begin, 1)
    print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()
    return 1 if result["values"]["wrong"] or result["streams"]["wrong"] else 0  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
