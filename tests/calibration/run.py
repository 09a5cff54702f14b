# SPDX-License-Identifier: Apache-2.0
"""Runs the calibration plan: seeded, resumable, with a progress bar.

    python tests/calibration/run.py --plan PLAN.json --out bench/results/straggler [--jobs 2] [--only alarms]

Each task of the plan is one run of a program (`count`, `delay`, `member`), given as a name, a tool and `key=value`
arguments. A result is one JSON line in OUT/NAME.jsonl, with the command that made it; a task whose command is there
already is skipped, so an interrupted run goes on where it stopped. The programs are compiled for this machine with
clang where there is one; bits do not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("count", "delay", "member")


@dataclass(frozen=True)
class Task:
    """One run of one program."""

    name: str
    tool: str
    args: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join((self.tool, *self.args))


def load_plan(path: Path) -> list[Task]:
    """Expands the plan: every entry has `name`, `tool`, `args` and, for shards, a list `seeds`."""
    tasks = []
    for entry in json.loads(path.read_text()):
        for seed in entry["seeds"]:
            args = tuple(f"{k}={v}" for k, v in entry["args"].items()) + (f"seed={seed}",)
            tasks.append(Task(entry["name"], entry["tool"], args))
    return tasks


def compile_tools(folder: Path) -> dict[str, str]:
    """Builds the programs; returns compiler and version."""
    compiler = next(c for c in ("clang-19", "clang", "cc") if shutil.which(c))
    flags = "-std=c17 -O2 -march=native -D_GNU_SOURCE -DGB_NO_CLONES -ffp-contract=off -Iinclude -Isrc".split()
    if "clang" in compiler:
        flags.append("-mprefer-vector-width=512")
    sources = sorted(str(p) for p in (ROOT / "src/straggler").glob("*.c")) + [
        "src/base/err.c",
        "tests/calibration/noise.c",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        subprocess.run(
            [compiler, *flags, *sources, f"tests/calibration/{tool}.c", "-lm", "-o", str(folder / tool)],
            cwd=ROOT,
            check=True,
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {"compiler": version, "flags": " ".join(flags)}


def machine() -> dict[str, Any]:
    """Where the figures were made."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"cpu": model, "cpus": os.cpu_count(), "kernel": platform.release(), "commit": commit}


def done_commands(out: Path, names: set[str]) -> set[str]:
    """Commands whose results are on disk."""
    found = set()
    for name in names:
        path = out / f"{name}.jsonl"
        if path.exists():
            found |= {json.loads(line)["command"] for line in path.read_text().splitlines() if line.strip()}
    return found


def run_task(task: Task, binaries: Path, where: dict[str, Any]) -> dict[str, Any]:
    """Runs one program at low priority."""
    begun = time.time()
    done = subprocess.run(
        ["nice", "-n", "19", str(binaries / task.tool), *task.args], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{task.command}: exit {done.returncode}: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return {"command": task.command, **result, "wall_s": round(time.time() - begun, 1), "at": int(begun), **where}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, default=ROOT / "tests/calibration/plan.json")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/straggler")
    parser.add_argument("--binaries", type=Path, default=ROOT / "build-calibration")
    parser.add_argument("--jobs", type=int, default=max(1, min(2, os.cpu_count() or 1)))
    parser.add_argument("--only", help="tasks whose name contains this")
    args = parser.parse_args(argv)
    tasks = [t for t in load_plan(args.plan) if not args.only or args.only in t.name]
    args.out.mkdir(parents=True, exist_ok=True)
    have = done_commands(args.out, {t.name for t in tasks})
    todo = [t for t in tasks if t.command not in have]
    failed: list[str] = []
    where = {**machine(), **compile_tools(args.binaries)} if todo else {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as bar, ThreadPoolExecutor(args.jobs) as pool:
        line = bar.add_task("calibration", total=len(tasks), completed=len(tasks) - len(todo))
        pending = {pool.submit(run_task, t, args.binaries, where): t for t in todo}
        for future in as_completed(pending):
            task = pending[future]
            if error := future.exception():  # the others go on; the task is tried again by the next run
                failed.append(f"{task.command}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            with (args.out / f"{task.name}.jsonl").open("a") as f:
                f.write(json.dumps(future.result()) + "\n")
            bar.update(line, advance=1, description=task.name)
    print(f"{len(todo) - len(failed)} tasks run, {len(failed)} failed, {len(tasks)} in the plan")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
