#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills a random rank of a training job at a random time and checks what the others do.

Each run starts the ranks of a job, waits until it trains, sends SIGKILL to one of them after a random delay, and
demands:

* own launcher: every survivor names the dead rank on its own stderr within 5 s of the kill and exits with a code that
  is not 0 soon after, without help;
* `--torchrun`: torchrun (which ends the survivors itself) exits with a code that is not 0, in bounded time;
* both: no process, no listening socket and no shared memory is left.

As root every run has network, process and shared-memory namespaces of its own, so "nothing is left" is exact.

usage: kill_random.py [--runs 20] [--seed 1] [--ranks 4] [--emulate cuda,cuda,hip,hip] [--islands a,a,b,b] [--torchrun]
                      [-- COMMAND ...]       the training script and its arguments, without python

One JSON line per run, then "N of N"; exits 1 unless all runs passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = [str(ROOT / "examples" / "python" / "train_lm.py"), "--steps", "1000000", "--log-every", "1"]
NAMED_WITHIN_S = 5.0
GONE_WITHIN_S = 20.0
TORCHRUN_WITHIN_S = 60.0
START_WITHIN_S = 120.0
TRAINING = re.compile(r"\bstep\s*[=:]?\s*[1-9]")


@dataclass
class Reader:
    """Collects the lines of one stream with the time each arrived (monotonic seconds)."""

    stream: object
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for raw in iter(self.stream.readline, b""):  # type: ignore[attr-defined]
            self.lines.append((time.monotonic(), raw.decode(errors="replace").rstrip()))

    def first(self, pattern: re.Pattern[str], after: float = 0.0) -> float | None:
        """When the first line that matches arrived, at or after `after`."""
        return next((at for at, line in list(self.lines) if at >= after and pattern.search(line)), None)

    def tail(self, count: int = 12) -> list[str]:
        """The last lines."""
        return [line for _, line in self.lines[-count:]]


@dataclass
class Process:
    """One started process with its output."""

    rank: int
    popen: subprocess.Popen[bytes]
    out: Reader
    err: Reader


def start(command: list[str], env: dict[str, str], rank: int, cwd: str) -> Process:
    """Starts a process in a session of its own, both streams read by threads."""
    popen = subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return Process(rank, popen, Reader(popen.stdout), Reader(popen.stderr))


def wait_until(predicate: Callable[[], bool], seconds: float) -> bool:
    """Polls `predicate` every 20 ms for at most `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if predicate():
            return True
        time.sleep(0.02)
    return bool(predicate())


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_processes(sessions: set[int]) -> list[int]:
    """Living processes of the given sessions (zombies of others' parents do not count)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in sessions and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def listening() -> set[str]:
    """Local addresses in LISTEN or ESTABLISHED state, as /proc/net writes them, and our names of local sockets."""
    found = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] in ("0A", "01"):
                    found.add(f"{name} {parts[1]} {parts[3]}")
    local = Path("/proc/net/unix").read_text().splitlines()
    return found | {word for line in local for word in line.split() if word.startswith("@gpubridge-")}


def shared_memory() -> set[str]:
    """Names in /dev/shm and keys of System V segments."""
    names = {f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir()}
    sysv = Path("/proc/sysvipc/shm")
    if sysv.exists():
        names |= {f"sysv {line.split()[1]}" for line in sysv.read_text().splitlines()[1:]}
    return names


def base_environment(options: argparse.Namespace) -> dict[str, str]:
    """The environment of a job."""
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    env.pop("GPUBRIDGE_EMULATE", None)
    env.pop("GPUBRIDGE_ISLAND", None)
    if options.emulate:
        env["GPUBRIDGE_EMULATE"] = options.emulate
    if options.islands:
        env["GPUBRIDGE_ISLAND"] = options.islands
    return env


def start_ranks(options: argparse.Namespace, cwd: str) -> list[Process]:
    """Starts every rank without a launcher that would end survivors."""
    env = base_environment(options)
    port = str(free_port())
    return [
        start(
            [sys.executable, *options.command],
            dict(
                env,
                MASTER_PORT=port,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(options.ranks),
                LOCAL_WORLD_SIZE=str(options.ranks),
            ),
            rank,
            cwd,
        )
        for rank in range(options.ranks)
    ]


def judge_survivors(processes: list[Process], victim: int, killed_at: float) -> tuple[dict[str, float], list[str]]:
    """When each survivor named the victim, and what is wrong."""
    names = re.compile(rf"\brank {victim}\b")
    survivors = [p for p in processes if p.rank != victim]
    problems: list[str] = []
    wait_until(lambda: all(p.popen.poll() is not None for p in survivors), GONE_WITHIN_S)
    delays = {}
    for p in survivors:
        if p.popen.poll() is None:
            problems.append(f"rank {p.rank} still runs {GONE_WITHIN_S:.0f} s after the kill")
        else:
            p.err.thread.join(5)
            if p.popen.returncode == 0:
                problems.append(f"rank {p.rank} exited with code 0")
        named = p.err.first(names, killed_at)
        if named is None:
            problems.append(f"rank {p.rank} never named rank {victim}; it said: {p.err.tail()}")
        else:
            delays[str(p.rank)] = round(named - killed_at, 3)
            if named - killed_at > NAMED_WITHIN_S:
                problems.append(f"rank {p.rank} named rank {victim} only after {named - killed_at:.1f} s")
    return delays, problems


def judge_leftovers(sessions: set[int], sockets: set[str], memory: set[str]) -> list[str]:
    """What should be gone and is not, after a moment for the kernel to take sockets down."""
    wait_until(lambda: not session_processes(sessions) and listening() <= sockets and shared_memory() <= memory, 5)
    problems = []
    if left := session_processes(sessions):
        problems.append(f"processes left: {left}")
    if left_sockets := sorted(listening() - sockets):
        problems.append(f"sockets left: {left_sockets}")
    if left_memory := sorted(shared_memory() - memory):
        problems.append(f"shared memory left: {left_memory}")
    return problems


def end_all(sessions: set[int]) -> None:
    """Ends what is still alive of this run, so that one failure does not spoil the next run."""
    for pid in session_processes(sessions):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def run_ranks(options: argparse.Namespace, rng: random.Random, cwd: str) -> dict[str, object]:
    """One run under our own launcher."""
    sockets, memory = listening(), shared_memory()
    processes = start_ranks(options, cwd)
    sessions = {p.popen.pid for p in processes}
    try:
        trains = wait_until(
            lambda: (
                any(p.popen.poll() is not None for p in processes)
                or any(p.out.first(TRAINING) or p.err.first(TRAINING) for p in processes)
            ),
            START_WITHIN_S,
        )
        if not trains or any(p.popen.poll() is not None for p in processes):
            return {
                "problems": [f"the job did not train: {[(p.rank, p.popen.poll(), p.err.tail(4)) for p in processes]}"]
            }
        delay, victim = rng.uniform(0, options.spread), rng.randrange(options.ranks)
        time.sleep(delay)
        if early := [p.rank for p in processes if p.popen.poll() is not None]:
            return {"problems": [f"ranks {early} ended before the kill: {processes[early[0]].err.tail()}"]}
        killed_at = time.monotonic()
        processes[victim].popen.kill()
        processes[victim].popen.wait()
        delays, problems = judge_survivors(processes, victim, killed_at)
        problems += judge_leftovers(sessions, sockets, memory)
        return {"victim": victim, "after_s": round(delay, 3), "named_after_s": delays, "problems": problems}
    finally:
        end_all(sessions)
        for p in processes:
            p.popen.wait()


def ranks_below(session: int) -> dict[int, int]:
    """rank -> pid of the worker processes of a torchrun session; a worker is older than its own children."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            pairs = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        env = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
        if env.get(b"KILL_RANDOM_SESSION") == str(session).encode() and b"RANK" in env and b"LOCAL_RANK" in env:
            rank, pid = int(env[b"RANK"]), int(entry.name)
            found[rank] = min(pid, found.get(rank, pid))
    return found


def run_torchrun(options: argparse.Namespace, rng: random.Random, cwd: str) -> dict[str, object]:
    """One run under torchrun."""
    sockets, memory = listening(), shared_memory()
    token = rng.randrange(1 << 30)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agent = start(command + options.command, dict(base_environment(options), KILL_RANDOM_SESSION=str(token)), -1, cwd)
    sessions = {agent.popen.pid}
    try:
        trains = wait_until(
            lambda: agent.popen.poll() is not None or bool(agent.out.first(TRAINING) or agent.err.first(TRAINING)),
            START_WITHIN_S,
        )
        pids = ranks_below(token)
        if not trains or agent.popen.poll() is not None or len(pids) != options.ranks:
            return {"problems": [f"the job did not train (workers {pids}): {agent.err.tail()}"]}
        sessions |= {os.getsid(pid) for pid in pids.values()}
        delay, victim = rng.uniform(0, options.spread), rng.randrange(options.ranks)
        time.sleep(delay)
        killed_at = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        problems = []
        if not wait_until(lambda: agent.popen.poll() is not None, TORCHRUN_WITHIN_S):
            problems.append(f"torchrun still runs {TORCHRUN_WITHIN_S:.0f} s after the kill")
        elif agent.popen.returncode == 0:
            problems.append("torchrun exited with code 0")
        ended = round(time.monotonic() - killed_at, 3)
        problems += judge_leftovers(sessions, sockets, memory)
        return {"victim": victim, "after_s": round(delay, 3), "torchrun_ended_after_s": ended, "problems": problems}
    finally:
        end_all(sessions)
        agent.popen.wait()


def run_many(options: argparse.Namespace) -> int:
    """All runs; returns how many passed."""
    rng = random.Random(options.seed)
    passed = 0
    for number in range(options.runs):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kill-random-") as cwd:
            result = (run_torchrun if options.torchrun else run_ranks)(options, rng, cwd)
        ok = not result["problems"]
        passed += ok
        took = round(time.monotonic() - began, 1)
        print(
            json.dumps({"run": number, "ok": ok, "took_s": took, "emulated": bool(options.emulate), **result}),
            flush=True,
        )
    return passed


def enter_namespaces() -> None:
    """As root: runs this program again with a network, process table and shared memory of its own."""
    if os.geteuid() != 0 or os.environ.get("KILL_RANDOM_INSIDE"):
        return
    probe = ["unshare", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
    inside = "ip link set lo up && mount -t tmpfs tmpfs /dev/shm && "
    try:
        works = subprocess.run([*probe, "sh", "-c", inside + "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return
    if works:
        os.environ["KILL_RANDOM_INSIDE"] = "1"
        os.execvp(probe[0], [*probe, "sh", "-c", inside + 'exec "$@"', "sh", sys.executable, *sys.argv])


def parse(argv: list[str]) -> argparse.Namespace:
    """Command line; everything after -- is the training command."""
    parser = argparse.ArgumentParser(description="kill a random rank of a training job and check the survivors")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--emulate", default="", help="GPUBRIDGE_EMULATE of the job")
    parser.add_argument("--islands", default="", help="GPUBRIDGE_ISLAND of the job")
    parser.add_argument("--spread", type=float, default=4.0, help="longest delay before the kill, seconds")
    parser.add_argument("--torchrun", action="store_true")
    own = argv[: argv.index("--")] if "--" in argv else argv
    options = parser.parse_args(own)
    options.command = argv[argv.index("--") + 1 :] if "--" in argv else TRAIN
    return options


def main() -> int:
    """Runs and reports; returns the exit code."""
    options = parse(sys.argv[1:])
    enter_namespaces()
    passed = run_many(options)
    print(f"{passed} of {options.runs}")
    return 0 if passed == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
