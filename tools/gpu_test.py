#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs tests/gpu and bench/gpu on this machine's GPUs and compares with the figures kept in bench/results/gpu.

    tools/gpu_test.py [--only NAME[,NAME]] [--out FOLDER] [--keep] [--quick]

A test fails by its exit code; a figure fails when it is worse than the kept one by more than its tolerance, which is
wide: a regression is a factor, not a per cent.  `--keep` copies the new results over the kept ones of this machine's
kind.  Needs a GPU, PyTorch for it, and the library (GPUBRIDGE_LIBRARY, or an installed package).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "bench" / "results" / "gpu"


@dataclass
class Job:
    """One program: how it runs, and which figures of its report count."""

    name: str
    script: str
    arguments: list[str] = field(default_factory=list)
    quick: list[str] | None = None  # other arguments for a quick run
    ranks: int = 2  # 0: not under torchrun
    env: dict[str, str] = field(default_factory=dict)
    kept: str = ""  # file below bench/results/gpu, without the machine's mark
    figures: Callable[[dict[str, Any]], Iterator[tuple[str, float]]] | None = None
    tolerance: float = 1.5
    limit_s: int = 600


def speedups(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for row in report["rows"]:
        for key, value in row.items():
            if key.endswith("speedup"):
                yield f"{row['bytes']} bytes, {key}", value


def floor(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    yield "part of the floor's speed", 1 / report["times_floor"]


def training(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, row in report["rows"].items():
        if "of_compute" in row:
            yield f"{name}, part of compute only", row["of_compute"]


TWO = {"GPUBRIDGE_ISLAND": "a,b"}
FOUR = {"GPUBRIDGE_ISLAND": "a,a,b,b"}
JOBS = [
    Job("doctor", "doctor", ranks=0),
    Job("values", "tests/gpu/values_streams.py", ["--rounds", "1000"], ["--rounds", "50"], env=TWO),
    Job("values22", "tests/gpu/values_streams.py", ["--rounds", "300"], ["--rounds", "20"], ranks=4, env=FOUR),
    Job("lifetime", "tests/gpu/lifetime.py", ["--rounds", "1000"], ["--rounds", "30"], env=TWO),
    Job(
        "lifetime-gate-off",
        "tests/gpu/lifetime.py",
        ["--rounds", "1000"],
        ["--rounds", "30"],
        env=TWO | {"GPUBRIDGE_GATE": "off"},
    ),
    Job("parallel", "tests/gpu/parallel.py", env=TWO),
    Job("mixed-vendors", "tests/gpu/mixed_vendors.py", env={"GPUBRIDGE_EMULATE": "none,hip"}),
    Job("stress", "tests/gpu/stress.py", ["--seconds", "480"], ["--seconds", "20"], env=TWO),
    Job("deadlock-table", "tests/gpu/deadlock_table.py", ranks=0),
    Job("sanitizer", "tests/gpu/sanitize.sh", ranks=0),
    Job(
        "latency",
        "bench/gpu/latency.py",
        [],
        ["--rounds", "100"],
        env=TWO,
        kept="latency",
        figures=speedups,
    ),
    Job(
        "all-reduce",
        "bench/gpu/all_reduce.py",
        [],
        ["--max-bytes", str(256 << 20)],
        env=TWO,
        kept="all_reduce",
        figures=speedups,
    ),
    Job("floor", "bench/gpu/staging.py", [], ["--bytes", str(256 << 20)], env=TWO, kept="staging", figures=floor),
    Job("training", "bench/gpu/train.py", [], ["--steps", "5"], env=TWO, kept="train", figures=training),
]


def machine() -> str:
    """The mark of result files: "h200", "h200x2"."""
    import torch

    words = torch.cuda.get_device_name().lower().split()
    name = next((w for w in words if any(c.isdigit() for c in w)), words[-1])
    count = torch.cuda.device_count()
    return name + (f"x{count}" if count > 1 else "")


def command(job: Job, out: Path, quick: bool) -> list[str]:
    arguments = job.quick if quick and job.quick is not None else job.arguments
    if job.script == "doctor":
        code = "from gpubridge.cli import main; main()"
        return [sys.executable, "-c", code, "doctor", "--device", "--out", str(out)]
    if job.script.endswith(".sh"):
        return [str(ROOT / job.script), str(out.parent)]
    script = [str(ROOT / job.script), *arguments, "--out", str(out)]
    if job.ranks == 0:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks), *script]


def compare(job: Job, report: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Figures (the larger the better) that fell by more than the tolerance."""
    assert job.figures is not None
    before = dict(job.figures(kept))
    return [
        f"{what}: {value:.2f}, was {before[what]:.2f}"
        for what, value in job.figures(report)
        if what in before and value * job.tolerance < before[what]
    ]


def run(job: Job, out: Path, mark: str, quick: bool, keep: bool) -> bool:
    begin = time.monotonic()
    log = out.with_suffix(".log")
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                command(job, out, quick),
                env=dict(os.environ, **job.env),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=job.limit_s,
                check=False,
            )
            problems = [] if done.returncode == 0 else [f"exit code {done.returncode}, see {log}"]
        except subprocess.TimeoutExpired:
            problems = [f"did not end within {job.limit_s} s, see {log}"]
    kept = KEPT / f"{job.kept}_{mark}.json"
    if job.kept and not problems and out.exists():
        if kept.exists():
            problems += compare(job, json.loads(out.read_text()), json.loads(kept.read_text()))
        else:
            print(f"{job.name}: nothing kept for this machine ({kept.name}) to compare with", flush=True)
        if keep:
            shutil.copy(out, kept)
    print(f"{job.name:18} {'FAILED' if problems else 'ok':6} {time.monotonic() - begin:6.0f} s", flush=True)
    for problem in problems:
        print("    " + problem, flush=True)
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description="hardware tests and figures")
    parser.add_argument("--only", default="", help="comma list of " + ", ".join(job.name for job in JOBS))
    parser.add_argument("--out", type=Path, default=ROOT / "build-gpu")
    parser.add_argument("--quick", action="store_true", help="minutes instead of half an hour")
    parser.add_argument("--keep", action="store_true", help="keep the new figures")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    unknown = set(names) - {job.name for job in JOBS}
    if unknown:
        parser.error("there is no " + ", ".join(sorted(unknown)))
    args.out.mkdir(parents=True, exist_ok=True)
    mark = machine()
    results = [
        run(job, args.out / f"{job.name}.json", mark, args.quick, args.keep)
        for job in JOBS
        if not names or job.name in names
    ]
    print(f"{sum(results)} of {len(results)} passed on {mark}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
