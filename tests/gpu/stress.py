# SPDX-License-Identifier: Apache-2.0
"""Mixed stress on CUDA tensors for a given time: random operations, types, sizes, groups, streams, frees and matrix
products, every result checked on the device; a hang ends as an error of the operation's deadline.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 tests/gpu/stress.py --seconds 480 [--seed N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gpubridge
import gpubridge.torch
import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64]
BATCH = 50  # operations between two looks at the clock, which rank 0 decides


class Stress:
    """All ranks draw the same random numbers, so they call the same things."""

    def __init__(self, seed: int, sizes: int) -> None:
        self.random = random.Random(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.groups = [dist.new_group(list(range(self.world))) for _ in range(3)]
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.counts: dict[str, int] = {}
        self.sizes = sizes
        self.bytes = 0
        self.pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def values(self, numel: int, dtype: torch.dtype, rank: int, salt: int) -> torch.Tensor:
        """Small integers: exact in every type, so one expectation holds for all."""
        return ((torch.arange(numel, device="cuda") * 7 + rank * 3 + salt) % 13).to(dtype)

    def summed(self, numel: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
        return sum((self.values(numel, torch.float64, r, salt) for r in range(self.world)), torch.zeros(())).to(dtype)

    def one(self) -> None:
        r = self.random
        kind = r.choice(["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p"])
        numel = int(2 ** r.uniform(0, self.sizes))
        dtype, salt = r.choice(DTYPES), r.randrange(1000)
        group, stream, is_async = r.choice(self.groups), r.choice(self.streams), r.random() < 0.5
        sleep, frees, product = r.random() < 0.2, r.random() < 0.03, r.random() < 0.1
        self.counts[kind] = self.counts.get(kind, 0) + 1
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if sleep:
                torch.cuda._sleep(r.randrange(1, 300_000))
            work, out, want = getattr(self, kind)(numel, dtype, salt, group, is_async)
            if product:
                a = torch.randn(256, 256, device="cuda")
                a @ a
            if frees:
                torch.cuda.empty_cache()
            if work is not None:
                work.wait()
            self.wrong += (out != want).sum()
        torch.cuda.current_stream().wait_stream(stream)
        self.bytes += numel * dtype.itemsize

    def all_reduce(self, n: int, dtype: torch.dtype, salt: int, group: Any, is_async: bool) -> tuple[Any, Any, Any]:
        x = self.values(n, dtype, self.rank, salt)
        return dist.all_reduce(x, group=group, async_op=is_async), x, self.summed(n, dtype, salt)

    def all_gather(self, n: int, dtype: torch.dtype, salt: int, group: Any, is_async: bool) -> tuple[Any, Any, Any]:
        out = torch.empty(n * self.world, dtype=dtype, device="cuda")
        mine = self.values(n, dtype, self.rank, salt)
        work = dist.all_gather_into_tensor(out, mine, group=group, async_op=is_async)
        return work, out, torch.cat([self.values(n, dtype, r, salt) for r in range(self.world)])

    def reduce_scatter(self, n: int, dtype: torch.dtype, salt: int, group: Any, is_async: bool) -> tuple[Any, Any, Any]:
        out = torch.empty(n, dtype=dtype, device="cuda")
        rows = torch.cat([self.values(n, dtype, self.rank, salt + d) for d in range(self.world)])
        work = dist.reduce_scatter_tensor(out, rows, group=group, async_op=is_async)
        return work, out, self.summed(n, dtype, salt + self.rank)

    def broadcast(self, n: int, dtype: torch.dtype, salt: int, group: Any, is_async: bool) -> tuple[Any, Any, Any]:
        root = salt % self.world
        x = self.values(n, dtype, self.rank, salt)
        return dist.broadcast(x, root, group=group, async_op=is_async), x, self.values(n, dtype, root, salt)

    def all_to_all(self, n: int, dtype: torch.dtype, salt: int, group: Any, is_async: bool) -> tuple[Any, Any, Any]:
        out = torch.empty(n * self.world, dtype=dtype, device="cuda")
        rows = torch.cat([self.values(n, dtype, self.rank, salt + 5 * d) for d in range(self.world)])
        work = dist.all_to_all_single(out, rows, group=group, async_op=is_async)
        return work, out, torch.cat([self.values(n, dtype, r, salt + 5 * self.rank) for r in range(self.world)])

    def p2p(self, n: int, dtype: torch.dtype, salt: int, group: Any, is_async: bool) -> tuple[Any, Any, Any]:
        out = torch.empty(n, dtype=dtype, device="cuda")
        before = (self.rank - 1) % self.world
        sent = dist.isend(self.values(n, dtype, self.rank, salt), (self.rank + 1) % self.world, group=group)
        dist.recv(out, before, group=group)
        return sent, out, self.values(n, dtype, before, salt)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", type=float, default=22, help="largest tensor: two to this power elements")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge", timeout=timedelta(seconds=60))
    stress = Stress(args.seed, args.sizes)
    begin = time.monotonic()
    longest = 0.0
    more = torch.ones((), device="cuda")
    while more.item():
        for _ in range(BATCH):
            start = time.monotonic()
            stress.one()
            longest = max(longest, time.monotonic() - start)
        more.fill_(1.0 if time.monotonic() - begin < args.seconds else 0.0)
        dist.broadcast(more, 0)
    wrong = int(stress.wrong.item())
    row = {
        "rank": stress.rank,
        "seconds": round(time.monotonic() - begin, 1),
        "operations": sum(stress.counts.values()),
        "kinds": stress.counts,
        "gigabytes": round(stress.bytes * 1e-9, 2),
        "longest_call_s": round(longest, 3),
        "wrong": wrong,
    }
    every: list[Any] = [None] * stress.world
    dist.all_gather_object(every, row)
    if stress.rank == 0:
        print("RESULT " + json.dumps(row), flush=True)
        if args.out:
            report = {
                "what": "mixed stress of CUDA tensors",
                "device": torch.cuda.get_device_name(),
                "devices": torch.cuda.device_count(),
                "torch": torch.__version__,
                "gpubridge": gpubridge.__version__,
                "seed": args.seed,
                "settings": {
                    k: v for k, v in sorted(os.environ.items()) if k.startswith("GPUBRIDGE_") and "LIB" not in k
                },
                "ranks": every,
            }
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
