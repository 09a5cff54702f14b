# SPDX-License-Identifier: Apache-2.0
"""A thin launcher: the ranks of one job as processes of this machine, ended together, with rank 0's lines shown live.

Not a replacement for torchrun; it exists because the demo wants one terminal line per step and the reason of the rank
that failed first.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

GRACE_S = 15.0
"""After one rank failed, the others have this long to say why and end by themselves."""


class JobError(Exception):
    """A job failed; the text is what its first failing rank said."""


@dataclass
class Rank:
    """One process and the last lines it wrote to stderr."""

    number: int
    process: subprocess.Popen[str]
    errors: list[str] = field(default_factory=list)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, size: int, port: int, extra: dict[str, str]) -> dict[str, str]:
    """What torchrun would set, plus `extra`; a single process gets none of it."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    if size > 1:
        env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
    # A busy machine: threads that spin for work would keep the ones that have some from running.
    env.setdefault("OMP_WAIT_POLICY", "passive")
    env.update(extra)
    return env


def run_job(command: list[str], size: int, extra: dict[str, str], show: Callable[[str], None], limit_s: float) -> None:
    """Runs `command` (script and arguments) as `size` ranks.

    Raises:
        JobError: a rank failed or the job took longer than `limit_s`; no process is left in any case.
    """
    port = free_port()
    ranks: list[Rank] = []
    readers: list[threading.Thread] = []
    try:
        for number in range(size):
            env = environment(number, size, port, extra)
            pipe = subprocess.PIPE
            process = subprocess.Popen([sys.executable, *command], env=env, stdout=pipe, stderr=pipe, text=True)
            ranks.append(Rank(number, process))
            readers += _read(ranks[-1], show if number == 0 else _ignore)
        _wait(ranks, time.monotonic() + limit_s)
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
        for reader in readers:
            reader.join(5)


def _ignore(line: str) -> None:
    pass


def _read(rank: Rank, show: Callable[[str], None]) -> list[threading.Thread]:
    """Threads that drain both streams of a rank."""

    def out() -> None:
        for line in rank.process.stdout or ():
            show(line.rstrip())

    def err() -> None:
        for line in rank.process.stderr or ():
            rank.errors = [*rank.errors[-19:], line.rstrip()]

    threads = [threading.Thread(target=out, daemon=True), threading.Thread(target=err, daemon=True)]
    for thread in threads:
        thread.start()
    return threads


def _wait(ranks: list[Rank], end: float) -> None:
    """Until all ranks ended well, or the first one did not."""
    failed: Rank | None = None
    while any(rank.process.poll() is None for rank in ranks):
        if failed is None:
            failed = next((rank for rank in ranks if rank.process.poll() not in (None, 0)), None)
            if failed is not None:
                end = time.monotonic() + GRACE_S
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    failed = failed or next((rank for rank in ranks if rank.process.poll() != 0), None)
    if failed is None:
        return
    code = failed.process.poll()
    if code is None:
        raise JobError(f"rank {failed.number} did not finish in time")
    said = "; ".join(line for line in failed.errors[-3:] if line) or "it said nothing"
    raise JobError(f"rank {failed.number} ended with code {code}: {said}")
