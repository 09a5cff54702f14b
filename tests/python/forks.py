# SPDX-License-Identifier: Apache-2.0
"""Ranks as forks of one process that has imported torch: a job of whole processes costs milliseconds to start.

A rank runs `case()` of an importable module at the top level of a real interpreter: what it leaves uncaught, how it
exits and what runs at exit are those of a script.  `Forge.start` returns at once, so a test can stop, cut off or wait
for ranks meanwhile; ranks and the test leave each other notes as files (`note`, `await_note`).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_S = 60.0


@dataclass
class Ended:
    """How a rank ended: exit code (negative: signal) and what it said; `told` are its reports in order."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line[1:]) for line in self.out.splitlines() if line.startswith("@")]


class Job:
    """Ranks that were started together."""

    def __init__(self, forge: Forge, folder: Path, size: int) -> None:
        self.forge, self.folder, self.size = forge, folder, size

    def await_note(self, name: str, seconds: float = 30.0) -> str:
        """The content of a rank's note; the job is ended when it does not come."""
        try:
            return await_file(self.folder / name, seconds)
        except TimeoutError:
            self.forge.end_ranks()
            raise AssertionError(f"no note {name!r}:\n{self.ended()}") from None

    def note(self, name: str, text: str = "") -> None:
        put_file(self.folder / name, text)

    def pid(self, rank: int) -> int:
        return int(self.await_note(f"pid.{rank}"))

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pid(rank), number)

    def ended(self) -> list[Ended]:
        """Waits for all ranks; those that exceed the limit were killed (code -9)."""
        codes = self.forge.answer()
        texts = [[(self.folder / f"{kind}.{r}").read_text(errors="replace") for kind in ("out", "err")] for r in codes]
        return [Ended(codes[r], *texts[int(r)]) for r in codes]


class Forge:
    """The process that forks."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gpubridge-forks-")
        self.jobs = 0
        command = [sys.executable, "-X", "faulthandler", str(HERE / "forks.py")]
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True)
        self.busy = False

    def start(self, case: str, environments: list[dict[str, str]], limit: float = LIMIT_S) -> Job:
        """Forks one rank per environment, to run `case` ("module.function").  "NETNS" names a network namespace."""
        if self.busy:  # a test that failed left its ranks behind
            self.end_ranks()
            self.answer()
        assert self.process.stdin is not None
        self.jobs += 1
        folder = Path(self.folder.name) / str(self.jobs)
        folder.mkdir()
        request = {"case": case, "folder": str(folder), "ranks": environments, "limit": limit}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self.busy = True
        return Job(self, folder, len(environments))

    def answer(self) -> dict[int, int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.busy = False
        return {int(rank): code for rank, code in json.loads(line).items()}

    def end_ranks(self) -> None:
        """Ends the ranks of the running job at once."""
        self.process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        if self.busy:
            self.end_ranks()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def put_file(path: Path, text: str) -> None:
    """Appears with its content or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.rename(path)


def await_file(path: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.005)
    return path.read_text()


# ---- for cases: inside a rank ----


def folder() -> Path:
    return Path(os.environ["JOB_FOLDER"])


def note(name: str, text: str = "") -> None:
    put_file(folder() / name, text)


def await_note(name: str, seconds: float = 30.0) -> str:
    return await_file(folder() / name, seconds)


def tell(**facts: Any) -> None:
    """One report to the test."""
    print("@" + json.dumps(facts), flush=True)


# ---- the forking process ----


def enter_netns(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(fd, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), f"setns {name}")
    os.close(fd)


def become_rank(request: dict[str, Any], rank: int) -> Callable[[], None]:
    os.setsid()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['folder']}/{kind}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.closerange(3, 64)
    env = request["ranks"][rank]
    os.environ.update(env, JOB_FOLDER=request["folder"])
    if env.get("NETNS"):
        enter_netns(env["NETNS"])
    note(f"pid.{rank}", str(os.getpid()))
    module, _, name = request["case"].rpartition(".")
    case: Callable[[], None] = getattr(importlib.import_module(module), name)
    return case


def reap(pids: dict[int, int], limit: float) -> dict[int, int]:
    """Exit codes by rank; at the limit the rest is killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for rank in pids.keys() - codes.keys():
                os.kill(pids[rank], signal.SIGKILL)
            end += 60
        time.sleep(0.005)
    return dict(sorted(codes.items()))


def serve() -> Callable[[], None] | None:
    """Forks ranks on request.  In a rank: returns its case.  At the end of requests: None."""
    import gpubridge.torch  # noqa: F401
    import torch.distributed.fsdp
    import torch.utils.data  # noqa: F401

    pids: dict[int, int] = {}

    def end_ranks(*_: Any) -> None:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, end_ranks)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pids.clear()
        for rank in range(len(request["ranks"])):
            pid = os.fork()
            if pid == 0:
                return become_rank(request, rank)
            pids[rank] = pid
        print(json.dumps(reap(pids, request["limit"])), flush=True)
        pids.clear()
    return None


if __name__ == "__main__":
    sys.modules["forks"] = sys.modules["__main__"]
    main = serve()
    if main is not None:
        main()
