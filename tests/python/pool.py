# SPDX-License-Identifier: Apache-2.0
"""Ranks as long-lived processes: the process group is made once, then many cases run inside.  They are forks of one
process that has imported torch, which is most of what starting a rank costs.

A case is a function `case(me: Rank, *args)` of an importable module; `Pool.run` calls it on all ranks at once and
returns what each returned.  A case that fails or hangs breaks its pool, and the next user gets a fresh one.  With
GPUBRIDGE_TEST_BACKEND=gloo the same cases run on Gloo, which checks the cases themselves.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BACKEND = os.environ.get("GPUBRIDGE_TEST_BACKEND", "gpubridge")
START_S = 180.0
CASE_S = 240.0
GRACE_S = 15.0


@dataclass
class Rank:
    """What a case knows about the process it runs in."""

    rank: int
    size: int
    islands: list[str]
    reference: Any = None  # a Gloo group of the same ranks

    @property
    def island_ranks(self) -> list[list[int]]:
        """Ranks by island; islands in the order of their lowest rank."""
        order = list(dict.fromkeys(self.islands))
        return [[r for r, island in enumerate(self.islands) if island == name] for name in order]


@dataclass(frozen=True)
class Layout:
    """One island label per rank, and whether the ranks drive emulated vendors (then the labels are vendors)."""

    islands: tuple[str, ...]
    emulated: bool = False

    @property
    def size(self) -> int:
        return len(self.islands)

    def environment(self) -> dict[str, str]:
        if self.emulated:
            return {"GPUBRIDGE_EMULATE": ",".join(self.islands), "GPUBRIDGE_ISLAND": ""}
        return {"GPUBRIDGE_ISLAND": ",".join(self.islands), "GPUBRIDGE_EMULATE": ""}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PoolError(AssertionError):
    """A case failed; the text holds what every rank said."""


class Seed:
    """The process that forks workers: one for all pools of this process, started by the first of them."""

    started: Seed | None = None

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-u", "-X", "faulthandler", str(HERE / "pool.py")], subprocess.PIPE
        env = dict(os.environ, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        atexit.register(self.close)

    @classmethod
    def get(cls) -> Seed:
        if cls.started is None or cls.started.process.poll() is not None:
            cls.started = Seed()
        return cls.started

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            return json.loads(answer)
        raise PoolError(f"the process that forks workers ended with code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Worker:
    """One fork of the seed."""

    def __init__(self, env: dict[str, str], log: str) -> None:
        self.seed = Seed.get()
        self.pid: int = self.seed.ask(env=env, log=log)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, as soon as there is one."""
        if self.returncode is None:
            self.returncode = self.seed.ask(poll=self.pid)
        return self.returncode

    def end(self, seconds: float) -> None:
        """Waits for the end, and brings it about after `seconds`."""
        limit = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > limit:
                os.kill(self.pid, signal.SIGKILL)  # not reaped before poll() says so: no other process has this number
            time.sleep(0.005)


@dataclass
class Pool:
    """`layout.size` worker processes."""

    layout: Layout
    extra: dict[str, str] = field(default_factory=dict)
    processes: list[Worker] = field(default_factory=list)
    links: list[Connection] = field(default_factory=list)
    broken: bool = False

    def __post_init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gpubridge-test-")
        address, key = os.path.join(self.folder.name, "pool"), secrets.token_bytes(16)
        port = str(free_port())
        with Listener(address, "AF_UNIX", authkey=key) as listener:
            for rank in range(self.layout.size):
                env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.layout.size))
                env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1", **self.layout.environment())
                env.update(POOL_ADDRESS=address, POOL_KEY=key.hex(), POOL_ISLANDS=",".join(self.layout.islands))
                env.update(self.extra)
                self.processes.append(Worker(env, self._log(rank)))
            links: dict[int, Connection] = {}
            for _ in self.processes:
                self._await_connection(listener)
                link = listener.accept()
                links[link.recv()] = link
        self.links = [links[rank] for rank in range(self.layout.size)]
        self._collect(START_S)

    def _log(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"rank{rank}.log")

    def _await_connection(self, listener: Listener) -> None:
        end = time.monotonic() + START_S
        # The listening socket has no public name; the processes must not end before they connect.
        while not wait([listener._listener._socket], 0.2):  # type: ignore[attr-defined]
            if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                self.close()
                raise PoolError("a worker did not start:\n" + self._logs())

    def _logs(self) -> str:
        texts = [Path(self._log(rank)).read_text(errors="replace")[-3000:] for rank in range(len(self.processes))]
        return "\n".join(f"--- log of rank {rank}\n{text}" for rank, text in enumerate(texts) if text.strip())

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = CASE_S) -> list[Any]:
        """Results of `case(me, *args)` by rank.

        Raises:
            PoolError: some rank raised, died, or did not answer in time.
        """
        for link in self.links:
            link.send((case.__module__, case.__qualname__, args))
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        while len(answers) < len(self.links) and time.monotonic() < end:
            ready = wait([link for r, link in enumerate(self.links) if r not in answers], 0.5)
            for link in ready:
                rank = self.links.index(link)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.links[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = (False, f"the process died (exit code {self.processes[rank].poll()})")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE_S)
        bad = {rank: text for rank, (ok, text) in answers.items() if not ok}
        missing = [rank for rank in range(len(self.links)) if rank not in answers]
        if bad or missing:
            self.broken = True
            text = "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(bad.items()))
            text += f"\n--- no answer from ranks {missing}" if missing else ""
            self.close()
            raise PoolError(f"{text}\n{self._logs()}")
        return [answers[rank][1] for rank in range(len(self.links))]

    def close(self) -> None:
        """Ends the workers: kindly where they answer, else by SIGKILL."""
        for link in self.links:
            try:
                if not self.broken:
                    link.send(None)
            except OSError:
                pass
        for process in self.processes:
            process.end(0.1 if self.broken else 20)
        for link in self.links:
            link.close()
        self.broken = True


class Pools:
    """Pools by layout, at most `keep` of them alive; broken ones are replaced."""

    def __init__(self, keep: int = 1) -> None:
        self.keep = keep
        self.pools: dict[tuple[Layout, tuple[tuple[str, str], ...]], Pool] = {}

    def get(self, layout: Layout, **extra: str) -> Pool:
        key = (layout, tuple(sorted(extra.items())))
        pool = self.pools.pop(key, None)
        if pool is None or pool.broken:
            while len(self.pools) >= self.keep:
                self.pools.pop(next(iter(self.pools))).close()
            pool = Pool(layout, extra)
        self.pools[key] = pool
        return pool

    def close(self) -> None:
        for pool in self.pools.values():
            if not pool.broken:
                pool.close()


# ---- inside a worker ----


def worker() -> None:
    rank = int(os.environ["RANK"])
    link = Client(os.environ["POOL_ADDRESS"], "AF_UNIX", authkey=bytes.fromhex(os.environ["POOL_KEY"]))
    link.send(rank)
    sys.path.insert(0, str(HERE))
    me = None
    try:
        me = join(rank)
        link.send((True, None))
    except BaseException:
        link.send((False, traceback.format_exc()))
        return
    while (message := link.recv()) is not None:
        link.send(call(me, *message))
    leave()


def join(rank: int) -> Rank:
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # `import torch.distributed` did, before the fork
    dist.init_process_group(BACKEND)
    reference = dist.new_group(backend="gloo")
    return Rank(rank, dist.get_world_size(), os.environ["POOL_ISLANDS"].split(","), reference)


def call(me: Rank, module: str, name: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    import importlib

    try:
        case: Any = importlib.import_module(module)
        for part in name.split("."):
            case = getattr(case, part)
        return True, case(me, *args)
    except BaseException:
        return False, traceback.format_exc()


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


# ---- the seed ----


def become_worker(env: dict[str, str], log: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(env)


def serve() -> bool:
    """Forks workers and tells how they ended, a line for a line.  True in a worker, False at the end of requests."""
    import torch.distributed.fsdp
    import torch.utils.data  # noqa: F401

    if BACKEND == "gpubridge":
        import gpubridge.torch  # noqa: F401
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        child = os.fork()
        if child == 0:
            become_worker(**request)
            return True
        print(json.dumps(child), flush=True)
    return False


if __name__ == "__main__":
    sys.modules["pool"] = sys.modules["__main__"]
    if serve():
        worker()
