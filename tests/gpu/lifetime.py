# SPDX-License-Identifier: Apache-2.0
"""Stream order and lifetime of CUDA tensors: each case a thousand times, and every result looked at on the device.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 tests/gpu/lifetime.py [--rounds N] [--out FILE.json]
    GPUBRIDGE_GATE=off GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 tests/gpu/lifetime.py

Wrong elements are counted in a device tensor, so that no check waits for the device by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpubridge
import gpubridge.torch
import torch
import torch.distributed as dist


class Counter:
    """Wrong elements so far, on the device."""

    def __init__(self) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def expect(self, x: torch.Tensor, value: float) -> None:
        self.wrong += (x != value).sum()


def total(value: float) -> float:
    """What all_reduce makes of value + rank."""
    world = dist.get_world_size()
    return value * world + world * (world - 1) / 2


def size_of(i: int) -> int:
    """From a few elements to some megabytes: host path, kernels, several chunks."""
    return (7, 1000, 40000, 300001, 1300000)[i % 5] + i % 13


def sleep_before(i: int, c: Counter) -> None:
    x = torch.zeros(size_of(i), device="cuda")
    torch.cuda._sleep(100_000 + 30_000 * (i % 5))
    x += i % 1000 + dist.get_rank()
    dist.all_reduce(x)
    c.expect(x, total(i % 1000))


SIDE: list[torch.cuda.Stream] = []


def side_streams(i: int, c: Counter) -> None:
    """Issued on one side stream, waited for on another."""
    first, second = SIDE[i % 2], SIDE[(i + 1) % 2]
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        x = torch.full((size_of(i),), float(i % 100 + dist.get_rank()), device="cuda")
        torch.cuda._sleep(50_000)
        work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(second):
        work.wait()
        c.expect(x, total(i % 100))
        x.record_stream(second)
    torch.cuda.current_stream().wait_stream(second)


def deleted_and_reused(i: int, c: Counter) -> None:
    """The tensor goes right after the call and its memory is handed out again at once."""
    n = size_of(i)
    x = torch.full((n,), float(dist.get_rank()), device="cuda")
    work = dist.all_reduce(x, async_op=True)
    del x
    junk = [torch.full((n,), 123.0, device="cuda") for _ in range(2)]
    work.wait()
    for t in junk:
        c.expect(t, 123.0)


class Reduce(torch.autograd.Function):
    """all_reduce of the gradient, from autograd's thread of the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def autograd_thread(i: int, c: Counter) -> None:
    x = torch.ones(size_of(i), device="cuda", requires_grad=True)
    (Reduce.apply(x * 2.0) * float(i % 50 + dist.get_rank())).sum().backward()
    assert x.grad is not None
    c.expect(x.grad, 2 * total(i % 50))


GROUPS: list[dist.ProcessGroup] = []


def two_groups(i: int, c: Counter) -> None:
    """Both in flight at once, and submitted in different orders by different ranks."""
    n = size_of(i)
    x = [torch.full((n,), float(i % 100 + 10 * g + dist.get_rank()), device="cuda") for g in range(2)]
    works: list[Any] = [None, None]
    for g in (0, 1) if (i + dist.get_rank()) % 2 else (1, 0):
        works[g] = dist.all_reduce(x[g], group=GROUPS[g], async_op=True)
    for g in range(2):
        works[g].wait()
        c.expect(x[g], total(i % 100 + 10 * g))


def emptied_cache(i: int, c: Counter) -> None:
    """cudaFree while the operation's flags are closed."""
    hold = torch.empty(3 << 20, device="cuda")
    x = torch.full((size_of(i),), float(i % 100 + dist.get_rank()), device="cuda")
    work = dist.all_reduce(x, async_op=True)
    del hold
    torch.cuda.empty_cache()
    work.wait()
    c.expect(x, total(i % 100))


CASES: dict[str, Callable[[int, Counter], None]] = {
    "a slow kernel before": sleep_before,
    "side streams": side_streams,
    "deleted and reused": deleted_and_reused,
    "autograd's thread": autograd_thread,
    "two groups": two_groups,
    "empty_cache in flight": emptied_cache,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    SIDE.extend(torch.cuda.Stream() for _ in range(2))
    GROUPS.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(2))
    cases = {}
    for name, case in CASES.items():
        counter, begin = Counter(), time.monotonic()
        for i in range(args.rounds):
            case(i, counter)
        wrong = int(counter.wrong.item())
        cases[name] = {"rounds": args.rounds, "wrong": wrong, "seconds": round(time.monotonic() - begin, 1)}
        if dist.get_rank() == 0:
            print(json.dumps({name: cases[name]}), flush=True)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, cases)
    wrong = sum(case["wrong"] for ranks in every for case in ranks.values())
    if args.out and dist.get_rank() == 0:
        report = {
            "what": "stream order and lifetime of CUDA tensors",
            "device": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
            "torch": torch.__version__,
            "gpubridge": gpubridge.__version__,
            "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("GPUBRIDGE_") and "LIB" not in k},
            "ranks": every,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
