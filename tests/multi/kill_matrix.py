#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills a random rank of a job at a random time: every kind of job, over CPU islands and over emulated vendors.

Where kill_random.py kills one training script, this runs the kinds of work in which a death is met differently:
all_reduce, an FSDP2 step, batch_isend_irecv, barrier, and an object collective.  Number, seed and nothing else decide a
kill, so a run can be stopped and resumed (`--state FILE`, a JSON line per kill), or one kill repeated (`--only N`).

Every survivor must raise within 5 s of the kill and say on its own stderr, in one line, the dead rank, the operation
and its number; it must exit by itself with a code that is not 0; and no process, socket or shared memory may be left.

Ranks are forked from this process, which has imported torch once; as root it has namespaces of its own.

usage: kill_matrix.py [--kills 100] [--seed 1] [--state FILE] [--transport auto] [--only N]
"""

from __future__ import annotations

import argparse
import atexit
import io
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_random as base

LAYOUTS: list[dict[str, str]] = [
    {"GPUBRIDGE_ISLAND": "a,a,b,b"},
    {"GPUBRIDGE_EMULATE": "cuda,cuda,hip,hip"},
    {"GPUBRIDGE_ISLAND": "a,b,a,b"},
    {"GPUBRIDGE_EMULATE": "cuda,hip,hip"},
    {"GPUBRIDGE_ISLAND": "a,b,b"},
    {"GPUBRIDGE_EMULATE": "cuda,cuda,none,none"},
    {"GPUBRIDGE_ISLAND": "a,b"},
    {"GPUBRIDGE_EMULATE": "cuda,hip,cuda,hip"},
]
SPREAD_S = 1.5
START_WITHIN_S = 90.0
OPERATION = re.compile(r"\bop \d+ [A-Z_]{3,}|\b(SEND|RECV)\b.*\bmessage \d+ of ")


# ---- what the ranks do: each yields after every round ----


def all_reduce(rank: int, size: int) -> Any:
    """Blocking and not, small and large, so that a kill lands in any phase."""
    import torch
    import torch.distributed as dist

    sizes = random.Random(size)  # the same on every rank
    while True:
        count = sizes.choice((1, 1000, 70000, 1 << 20))
        works = [dist.all_reduce(torch.ones(count), async_op=True) for _ in range(sizes.randrange(4))]
        dist.all_reduce(torch.full((count,), float(rank)))
        for work in works:
            work.wait()
        yield


def fsdp2_step(rank: int, size: int) -> Any:
    """Forward, backward and optimizer step of a fully sharded model."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(*[torch.nn.Linear(192, 192) for _ in range(4)])
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        optimizer.zero_grad()
        model(torch.full((8, 192), 1.0 + rank)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def batch_isend_irecv(rank: int, size: int) -> Any:
    """Every rank sends to and receives from every other in one batch."""
    import torch
    import torch.distributed as dist

    while True:
        batch, got = [], []
        for peer in range(size):
            if peer == rank:
                continue
            for count in (10, 40000):
                got.append(torch.empty(count))
                batch.append(dist.P2POp(dist.isend, torch.full((count,), float(rank)), peer))
                batch.append(dist.P2POp(dist.irecv, got[-1], peer))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        yield


def barrier(rank: int, size: int) -> Any:
    import torch.distributed as dist

    while True:
        dist.barrier()
        yield


def object_collective(rank: int, size: int) -> Any:
    import torch.distributed as dist

    while True:
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, {"rank": rank, "text": "x" * 2000 * rank})
        assert [item["rank"] for item in everybody] == list(range(size))
        chosen: list[Any] = [everybody if rank == 0 else None]
        dist.broadcast_object_list(chosen, src=0)
        assert len(chosen[0]) == size
        yield


JOBS: list[Callable[[int, int], Any]] = [all_reduce, fsdp2_step, batch_isend_irecv, barrier, object_collective]


def rank_main(job: Callable[[int, int], Any], rank: int, size: int) -> int:
    """A rank: says "ready" after its first round and works until something raises."""
    import gpubridge.torch  # noqa: F401
    import torch.distributed as dist

    dist.init_process_group("gpubridge")
    for round_, _ in enumerate(job(rank, size)):
        if round_ == 0:
            print("ready", flush=True)
    return 0


# ---- ranks as forks ----


class Child:
    """A forked rank, with as much of subprocess.Popen as base.Process needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def become_rank(job: Callable[[int, int], Any], env: dict[str, str], streams: tuple[int, int]) -> None:
    """Turns this fork into a rank; does not return."""
    code = 1
    try:
        os.setsid()
        for target, fd in zip((1, 2), streams, strict=True):
            os.dup2(fd, target)
        os.closerange(3, 256)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(fd, "wb", 0), write_through=True) for fd in (1, 2))
        os.environ.update(env)
        code = rank_main(job, int(env["RANK"]), int(env["WORLD_SIZE"]))
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def fork_ranks(job: Callable[[int, int], Any], layout: dict[str, str], transport: str) -> list[base.Process]:
    """Starts the ranks of a job."""
    size = len(next(iter(layout.values())).split(","))
    common = {"GPUBRIDGE_EMULATE": "", "GPUBRIDGE_ISLAND": "", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size)}
    common.update(layout, MASTER_PORT=str(base.free_port()), GPUBRIDGE_TRANSPORT=transport, LOCAL_WORLD_SIZE=str(size))
    made: list[tuple[int, Any, Any, Any]] = []
    for rank in range(size):
        out, err = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            become_rank(job, dict(common, RANK=str(rank), LOCAL_RANK=str(rank)), (out[1], err[1]))
        os.close(out[1])
        os.close(err[1])
        made.append((rank, Child(pid), open(out[0], "rb"), open(err[0], "rb")))
    # Threads only now: a fork should not copy one that holds a lock.
    return [base.Process(rank, child, base.Reader(out), base.Reader(err)) for rank, child, out, err in made]


# ---- one kill ----


def judge_words(processes: list[base.Process], victim: int, killed_at: float) -> list[str]:
    """Every survivor's line that names the victim must also say which operation, and its number."""
    problems = []
    for p in processes:
        if p.rank == victim:
            continue
        lines = [line for at, line in p.err.lines if at >= killed_at and re.search(rf"\brank {victim}\b", line)]
        if lines and not any(OPERATION.search(line) for line in lines):
            problems.append(f"rank {p.rank} did not name the operation and its number: {lines[0]}")
    return problems


def one_kill(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs kill `number`; the result as it goes into the state."""
    rng = random.Random(f"{options.seed}/{number}")
    job, layout = JOBS[number % len(JOBS)], LAYOUTS[number // len(JOBS) % len(LAYOUTS)]
    size = len(next(iter(layout.values())).split(","))
    victim, delay = rng.randrange(size), rng.uniform(0, SPREAD_S)
    row: dict[str, Any] = {"kill": number, "job": job.__name__, **layout, "transport": options.transport}
    row |= {"victim": victim, "after_s": round(delay, 3)}
    sockets, memory = base.listening(), base.shared_memory()
    processes = fork_ranks(job, layout, options.transport)
    sessions = {p.popen.pid for p in processes}
    ready = re.compile("^ready$")
    try:
        base.wait_until(
            lambda: any(p.popen.poll() is not None for p in processes) or all(p.out.first(ready) for p in processes),
            START_WITHIN_S,
        )
        if any(p.popen.poll() is not None for p in processes) or not all(p.out.first(ready) for p in processes):
            said = [(p.rank, p.popen.poll(), p.err.tail(5)) for p in processes]
            return row | {"problems": [f"the job did not start: {said}"]}
        time.sleep(delay)
        if early := [p.rank for p in processes if p.popen.poll() is not None]:
            return row | {"problems": [f"ranks {early} ended before the kill: {processes[early[0]].err.tail()}"]}
        killed_at = time.monotonic()
        processes[victim].popen.kill()
        processes[victim].popen.wait()
        delays, problems = base.judge_survivors(processes, victim, killed_at)
        problems += judge_words(processes, victim, killed_at)
        problems += base.judge_leftovers(sessions, sockets, memory)
        return row | {"named_after_s": delays, "problems": problems}
    finally:
        base.end_all(sessions)
        for p in processes:
            p.popen.wait()
            p.out.thread.join(5)
            p.err.thread.join(5)


def main() -> int:
    parser = argparse.ArgumentParser(description="kill a random rank in every kind of job")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="JSON lines of finished kills; those that passed are not repeated")
    parser.add_argument("--transport", default="auto", help="GPUBRIDGE_TRANSPORT of the jobs")
    parser.add_argument("--only", type=int, help="this one kill")
    options = parser.parse_args()
    base.enter_namespaces()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed.fsdp  # noqa: F401  once, for all ranks

    done: dict[int, dict[str, Any]] = {}
    if options.state and options.state.exists():
        done = {row["kill"]: row for row in map(json.loads, options.state.read_text().splitlines())}
    numbers = [options.only] if options.only is not None else range(options.kills)
    passed = 0
    for number in numbers:
        row = done.get(number)
        if row is None or row["problems"]:
            began = time.monotonic()
            row = one_kill(number, options)
            row["took_s"] = round(time.monotonic() - began, 1)
            print(json.dumps(row), flush=True)
            if options.state:
                with options.state.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        passed += not row["problems"]
    print(f"{passed} of {len(numbers)}")
    return 0 if passed == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
