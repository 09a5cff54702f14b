#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""all_reduce (64 MiB of float32, and 8 bytes) and reduce_scatter_tensor (64 MiB in all) against Gloo in the same
processes; 1 + 1 and 2 + 2 islands of CPU ranks, over TCP, through shared memory, or both.

The two backends take turns in pairs, so that whatever else the machine does hits both alike; the ratio of a pair is
what is compared, and its median what is quoted.  Several transports take turns too, in processes of their own, a third
of the pairs at a time.  One JSON line per result, on stdout and appended to bench/results/.  Emulated vendors are never
measured.

usage: all_reduce.py [--transport tcp,shm] [--op all_reduce,reduce_scatter] [--pairs 9] [--ranks 2,4]
                     [--big-rounds 3] [--small-rounds 300] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import finish, machine  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
ISLANDS = {2: "a,b", 4: "a,a,b,b"}
BIG_BYTES = 64 << 20
SMALL_BYTES = 8


# ---- inside a rank ----


def time_rounds(group: Any, call: Callable[[Any], Any], rounds: int) -> list[float]:
    """Seconds of each of `rounds` blocking calls, after a barrier so that all ranks start together."""
    import torch.distributed as dist

    dist.barrier(group=group)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call(group)
        times.append(time.perf_counter() - start)
    return times


def measure(
    groups: dict[str, Any], call: Callable[[Any], Any], rounds: int, pairs: int, first: int
) -> dict[str, list[list[float]]]:
    """Times by backend, [pair][round]; the order within a pair alternates, and begins with `first`'s parity."""
    for group in groups.values():
        time_rounds(group, call, max(2, rounds // 4))
    found: dict[str, list[list[float]]] = {name: [] for name in groups}
    for pair in range(pairs):
        names = list(groups) if (pair + first) % 2 == 0 else list(reversed(groups))
        for name in names:
            found[name].append(time_rounds(groups[name], call, rounds))
    return found


def measure_all(groups: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {}
    big, small = torch.zeros(BIG_BYTES // 4), torch.zeros(SMALL_BYTES // 4)
    share = torch.zeros(BIG_BYTES // 4 // dist.get_world_size())
    pairs, first = options.pairs, options.first
    if "all_reduce" in options.ops:
        found["all_reduce"] = measure(
            groups, lambda group: dist.all_reduce(big, group=group), options.big_rounds, pairs, first
        )
        found["small"] = measure(
            groups, lambda group: dist.all_reduce(small, group=group), options.small_rounds, pairs, first
        )
    if "reduce_scatter" in options.ops:
        found["reduce_scatter"] = measure(
            groups, lambda group: dist.reduce_scatter_tensor(share, big, group=group), options.big_rounds, pairs, first
        )
    return found


def rank_main(options: argparse.Namespace) -> None:
    import gpubridge.torch  # noqa: F401
    import torch
    import torch.distributed as dist
    from gpubridge import _native

    dist.init_process_group("gpubridge")
    groups = {"gpubridge": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = measure_all(groups, options)
    if dist.get_rank() == 0:
        versions = {"gpubridge": _native.version(), "torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({**found, "versions": versions}), flush=True)
    dist.destroy_process_group()


# ---- launcher and evaluation ----


def run_ranks(size: int, transport: str, arguments: list[str]) -> dict[str, Any]:
    """What rank 0 measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GPUBRIDGE_ISLAND=ISLANDS[size])
        env.update(GPUBRIDGE_TRANSPORT=transport, GPUBRIDGE_EMULATE="", GLOO_SOCKET_IFNAME="lo")
        env["PYTHONWARNINGS"] = "ignore::FutureWarning"  # reduce_scatter_tensor has another name in newer versions
        command = [sys.executable, str(Path(__file__).resolve()), "--rank-main", *arguments]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    found: dict[str, Any] = json.loads(finish(processes, 1200).strip().splitlines()[-1])
    return found


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def compare(times: dict[str, list[list[float]]], fraction: float) -> dict[str, Any]:
    """Median over pairs of a percentile of each backend, in microseconds, and of the ratio within each pair."""
    mine = [percentile(rounds, fraction) for rounds in times["gpubridge"]]
    gloo = [percentile(rounds, fraction) for rounds in times["gloo"]]
    ratios = [a / b for a, b in zip(mine, gloo, strict=True)]
    return {
        "gpubridge_us": round(statistics.median(mine) * 1e6, 2),
        "gloo_us": round(statistics.median(gloo) * 1e6, 2),
        "time_ratio": round(statistics.median(ratios), 4),
        "time_ratios": [round(r, 4) for r in ratios],
    }


def run_transports(size: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What rank 0 measured, by transport; the transports take turns."""
    found: dict[str, dict[str, Any]] = {}
    turns = 1 if len(options.transports) == 1 else 3
    for turn in range(turns):
        pairs = options.pairs * (turn + 1) // turns - options.pairs * turn // turns
        if pairs == 0:
            continue
        for transport in options.transports:
            arguments = [*sys.argv[1:], "--pairs", str(pairs), "--first", str(turn)]
            part = run_ranks(size, transport, arguments)
            whole = found.setdefault(transport, part)
            for name, times in part.items() if whole is not part else ():
                if name != "versions":
                    for backend, rounds in times.items():
                        whole[name][backend] += rounds
    return found


def big_row(op: str, size: int, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """GB/s: bytes that each rank must at least send."""
    row = compare(times, 0.5)
    rate = (2 if op == "all_reduce" else 1) * BIG_BYTES * (size - 1) / size / 1e9
    row["gpubridge_bus_gb_s"] = round(rate / row["gpubridge_us"] * 1e6, 3)
    row["gloo_bus_gb_s"] = round(rate / row["gloo_us"] * 1e6, 3)
    return row


def results_of(size: int, transport: str, found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    common = {
        "bench": "all_reduce",
        "ranks": size,
        "islands": ISLANDS[size],
        "transport": transport,
        "dtype": "float32",
        "pairs": options.pairs,
        "emulated": False,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": options.machine,
        "versions": found["versions"],
    }
    rows: list[dict[str, Any]] = []
    for op in options.ops:
        row = {**common, "bench": op, "bytes": BIG_BYTES, "statistic": "p50", "rounds": options.big_rounds}
        rows.append({**row, **big_row(op, size, found[op])})
    for name, fraction in (("p50", 0.5), ("p99", 0.99)) if "small" in found else ():
        row = {**common, "bytes": SMALL_BYTES, "statistic": name, "rounds": options.small_rounds}
        rows.append({**row, **compare(found["small"], fraction)})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="collectives of CPU ranks against Gloo")
    parser.add_argument("--transport", default="tcp", help="tcp, shm or tcp,shm")
    parser.add_argument("--op", default="all_reduce", help="all_reduce, reduce_scatter or both, by comma")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--ranks", default="2,4", help="sizes to run: 2 and 4")
    parser.add_argument("--big-rounds", type=int, default=3)
    parser.add_argument("--small-rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = [int(word) for word in options.ranks.split(",")]
    if any(size not in ISLANDS for size in options.sizes):
        parser.error("--ranks: 2, 4 or 2,4")
    options.transports, options.ops = options.transport.split(","), options.op.split(",")
    if not set(options.transports) <= {"tcp", "shm"} or not set(options.ops) <= {"all_reduce", "reduce_scatter"}:
        parser.error("--transport: tcp, shm or tcp,shm; --op: all_reduce, reduce_scatter or both")
    return options


def main() -> int:
    options = parse()
    if options.rank_main:
        rank_main(options)
        return 0
    options.machine = machine()
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "all_reduce.jsonl"
    for size in options.sizes:
        found = run_transports(size, options)
        rows = [row for name in options.transports for row in results_of(size, name, found[name], options)]
        with open(target, "a") as file:
            for row in rows:
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row) + "\n")
    print(f"appended to {target}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
