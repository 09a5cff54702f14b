# SPDX-License-Identifier: Apache-2.0
"""Runs torch's distributed tests on Gloo and on gpubridge and keeps one JSON line per test and backend.

    python tests/torch_suite/run.py --results FILE [--only REGEX] [--jobs 2] [--again]

Can be stopped and started again: what FILE already has is not run again (--again REGEX: run those again).  Each test
runs in a session of its own with a time limit, after which all its processes are killed and the test has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import report

HERE = Path(__file__).resolve().parent
LIMIT_S = 240.0
TEXT = 6000


@dataclass(frozen=True)
class Column:
    """One way to run the tests: who is tested, whom the decorators take it for, and how many ranks.

    Attributes:
        only: which tests, by what the column "gloo" said: None: all; else those it skipped with such a reason.
        vendors: what GPUBRIDGE_EMULATE says.
    """

    backend: str
    asked_for: str
    world_size: int
    only: str | None = None
    vendors: str = ""


COLUMNS = {
    "gloo": Column("gloo", "gloo", 4),
    "gpubridge": Column("gpubridge", "gloo", 4),
    "gloo-8": Column("gloo", "gloo", 8, "small world size"),
    "gpubridge-8": Column("gpubridge", "gloo", 8, "small world size"),
    "gpubridge-vendors": Column("gpubridge", "gloo", 4, vendors="cuda,cuda,hip,hip"),
    # Operations that Gloo does not have on the CPU: there is nothing to compare with, but they must work.
    "gpubridge-more": Column("gpubridge", "mpi", 4, "Only MPI"),
}


# ---- a worker: one interpreter per column, which forks for every test ----


def worker(column: str) -> None:
    """Reads test names from stdin, answers one JSON line each on the original stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case = cases.load(COLUMNS[column].backend, COLUMNS[column].asked_for)
    print(json.dumps(cases.names(case)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_bounded(case, line.strip())), file=answers, flush=True)


def run_bounded(case: Any, name: str) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        verdict, log = Path(folder) / "verdict", Path(folder) / "log"

        def task() -> None:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ["TMPDIR"] = folder
            tempfile.tempdir = folder
            cases.use_folder(folder)
            verdict.write_text(json.dumps(cases.run_one(case, name)))

        pid = cases.in_own_session(task)
        in_time = wait_for(pid, LIMIT_S)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if not in_time:
            os.waitpid(pid, 0)
        text = log.read_text(errors="replace") if log.exists() else ""
        outcome, reason = json.loads(verdict.read_text()) if verdict.exists() else ("failed", "")
        if not in_time:
            outcome, reason = "failed", f"not done after {LIMIT_S:g} s"
    answer = {"test": name, "outcome": outcome, "seconds": round(time.monotonic() - start, 1), "reason": reason[-TEXT:]}
    if outcome == "failed":
        answer["log"] = text[-TEXT:]
    return answer


def wait_for(pid: int, limit: float) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.02)
    return False


# ---- the runner ----


class Worker:
    """A process running `worker`; busy while `test` is set."""

    def __init__(self, column: str) -> None:
        self.column = column
        command = [sys.executable, str(HERE / "run.py"), "--worker", column]
        env = dict(os.environ, WORLD_SIZE=str(COLUMNS[column].world_size), OMP_NUM_THREADS="1")
        env["GPUBRIDGE_EMULATE"] = COLUMNS[column].vendors
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.to, self.answers = self.process.stdin, self.process.stdout
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"the worker for {column} did not start")
        self.names: list[str] = json.loads(line)

    def start(self, test: str) -> None:
        self.to.write(test + "\n")
        self.to.flush()

    def close(self) -> None:
        self.to.close()
        self.process.wait()


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by (column, test); a later line replaces an earlier one."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["column"], row["test"]): row for row in rows if "test" in row}


def header() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def todo(column: str, names: list[str], done: dict[tuple[str, str], Any], args: argparse.Namespace) -> list[str]:
    wanted = [name for name in names if re.search(args.only, name)]
    if (reason := COLUMNS[column].only) is not None:
        wanted = [name for name in wanted if reason in done.get(("gloo", name), {}).get("reason", "")]
    again = args.again
    return [n for n in wanted if (column, n) not in done or (again is not None and re.search(again, n))]


def run_column(column: str, args: argparse.Namespace) -> None:
    done = read(args.results)
    first = Worker(column)
    queue = todo(column, first.names, done, args)
    count = len(queue)
    workers = [first] + [Worker(column) for _ in range(min(args.jobs, count) - 1)]
    selector = selectors.DefaultSelector()
    busy = 0
    for one in workers:
        if queue:
            one.start(queue.pop(0))
            busy += 1
        selector.register(one.answers, selectors.EVENT_READ, one)
    with args.results.open("a") as file:
        while busy:
            for key, _ in selector.select():
                row = {"column": column, **json.loads(key.data.answers.readline())}
                print(json.dumps(row), file=file, flush=True)
                print(f"{column:15}{row['outcome']:8}{row['seconds']:6.1f} s  {row['test']}", flush=True)
                if queue:
                    key.data.start(queue.pop(0))
                else:
                    busy -= 1
    for one in workers:
        one.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/torch-suite.jsonl"))
    parser.add_argument("--only", default="", help="regular expression: run only tests it finds")
    parser.add_argument("--again", help="regular expression: run these although there is a result")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--report", type=Path, help="write the table of all results there")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--worker", choices=list(COLUMNS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return 0
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a") as file:
        print(json.dumps(header()), file=file)
    for column in args.columns.split(","):
        run_column(column, args)
    if args.report:
        args.report.write_text(report.text(read(args.results), header()["torch"]))
    return int(bool(report.failures(read(args.results))))


if __name__ == "__main__":
    sys.exit(main())
