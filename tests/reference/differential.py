# SPDX-License-Identifier: Apache-2.0
"""Differential test: random jobs through builds of the C engine and through the Python reference, all bytes compared.

    python -m tests.reference.differential --jobs 200 --seed 1 BUILD...

BUILD is a `replay_states` program, or `qemu-aarch64:PROGRAM`.  One JSON line says how much was compared; exit status 1
on a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .engine import Reference
from .stream import RUN

_MASK = (1 << 64) - 1
_QUANTILE = None
INVALID = -1


def frame(kind: int, payload: bytes) -> bytes:
    """One record: type, length, payload, FNV-1a."""
    data = struct.pack("<II", kind, len(payload)) + payload
    h = 0xCBF29CE484222325
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & _MASK
    return data + struct.pack("<Q", h)


def normal_quantile(p: float) -> float:
    """As the engine's: Abramowitz and Stegun 26.2.23 on the engine's logarithm."""
    import math

    from .numbers import log

    t = math.sqrt(-2.0 * log(1.0 - p))
    top = 2.515517 + t * (0.802853 + t * 0.010328)
    bottom = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))
    return t - top / bottom


class Job:
    """A random job: its recording, and the reference that hears the same."""

    def __init__(self, seed: int, peers: int = 0, kinds: int = 0) -> None:
        self.rng = rng = random.Random(seed)
        size = rng.random()
        if size < 0.62:
            self.ranks, self.steps = rng.choice((1, 1, 1, 2)), rng.randint(60, 170)
        elif size < 0.92:
            self.ranks, self.steps = rng.choice((1, 2, 4, 5)), rng.randint(40, 120)
        elif size < 0.99:
            self.ranks, self.steps = 1, rng.randint(300, 1000)
        elif size < 0.993:
            self.ranks, self.steps = rng.choice((17, 20, 24)), rng.randint(60, 160)
        else:
            self.ranks, self.steps = rng.choice((1, 4)), rng.randint(900, 2600)
        if peers:  # one large group
            self.ranks, self.steps = peers, 200
        self.kinds = kinds or (2 if rng.random() < 0.1 else 1)
        self.groups = [0] * self.ranks
        if self.ranks > 1 and rng.random() < 0.3 and not peers:
            self.groups = [rng.randrange(2) for _ in range(self.ranks)]
        if kinds:  # two groups, both large enough to have peers
            self.groups = [i % 2 for i in range(self.ranks)]
        self.alarms = 10.0 ** rng.uniform(-6, 2)
        self.warmup = rng.choice((-1, 1, 3, 10))
        self.peers = rng.choice((0, 0, -1)) if not peers else 0
        self.max_hold = rng.choice((20, 2000))
        self.min_slowdown = rng.choice((0.0025, 0.0001, 0.02))
        gamma = 30.0 * 86400.0 * 1.0 * (float(self.ranks) * float(self.kinds)) / self.alarms
        self.reference = Reference(
            self.ranks, self.kinds, self.groups, gamma, self.min_slowdown, self.warmup, self.peers >= 0, self.max_hold
        )
        payload = b"GBSTRAG1" + struct.pack(
            "<ii4d4iI",
            self.ranks,
            self.kinds,
            self.alarms,
            30.0,
            1.0,
            self.min_slowdown,
            self.warmup,
            self.peers,
            self.max_hold,
            8,
            1,
        )
        payload += struct.pack(f"<{self.ranks}i", *self.groups) + struct.pack(f"<{self.ranks}i", *[0] * self.ranks)
        self.header = frame(0, payload)
        self.noise = rng.choice((0.05, 0.05, 0.02, 0.004, 0.2))
        self.base = [rng.uniform(0.05, 3.0) for _ in range(self.ranks * self.kinds)]
        self.heavy = rng.random() < 0.3
        self.phi = rng.choice((0.0, 0.0, 0.3, 0.7))
        self.ar = [0.0] * len(self.base)
        self.common = rng.choice((0.0, 0.0, 1.0))
        self.faults: list[tuple[int, int, int, float]] = []
        for _ in range(rng.randrange(4)):
            start = rng.randrange(self.steps)
            self.faults.append(
                (
                    rng.randrange(len(self.base)),
                    start,
                    start + rng.randint(5, self.steps),
                    rng.choice((0.01, 0.05, 0.3, 0.8, -0.05, -0.4)),
                )
            )
        self.number = rng.randrange(1000)

    def values(self, t: int) -> list[float]:
        rng, out, shared = self.rng, [], self.rng.gauss(0, 1)
        for i, base in enumerate(self.base):
            e = rng.gauss(0, 1)
            if self.heavy and rng.random() < 0.05:
                e *= rng.choice((3.0, 8.0, 20.0))
            self.ar[i] = self.phi * self.ar[i] + e
            x = base * (1.0 + self.noise * (self.ar[i] + self.common * shared))
            for stream, start, end, size in self.faults:
                if stream == i and start <= t < end:
                    x *= 1.0 + size
            out.append(max(x, 1e-3))
        return out

    def marks(self, t: int) -> Iterator[bytes]:
        """Now and then a hold, a restart, a clear, given noise; the reference has heard each one that is yielded."""
        rng, ref = self.rng, self.reference
        if t == 0 and rng.random() < 0.5:
            for kind in range(self.kinds):
                for r in range(self.ranks):
                    v = (self.base[kind * self.ranks + r], self.noise, rng.choice((0.0, 0.0, 0.3, -0.1)))
                    ref.given(r, kind, *v)
                    yield frame(6, struct.pack("<ii3d", r, kind, *v))
        if rng.random() < 0.006:
            kind, rank = rng.choice((2, 3, 3, 4, 5)), rng.randrange(-1, self.ranks)
            if kind in (2, 3):
                ref.hold(rank, kind == 2)
            elif kind == 4:
                ref.restart(rank)
            else:
                ref.clear(rank)
            yield frame(kind, struct.pack("<ii3d", rank, 0, 0.0, 0.0, 0.0))

    def step(self, t: int) -> tuple[bytes, int]:
        rng = self.rng
        self.number += 1 if rng.random() < 0.98 else rng.randint(2, 50)
        seconds = self.values(t)
        present, last, bad = None, None, 0
        if rng.random() < 0.05 or (t // 80) % 7 == 3:
            present = [1 if rng.random() > 0.3 else 0 for _ in seconds]
        if rng.random() < 0.9:
            groups = max(self.groups) + 1
            last = [-1] * groups
            for g in range(groups):
                members = [r for r in range(self.ranks) if self.groups[r] == g]
                if members and rng.random() < 0.97:
                    last[g] = max(members, key=lambda r: seconds[r])
        number = self.number
        if rng.random() < 0.01:
            bad = INVALID
            if rng.random() < 0.5:
                number = self.reference.step_number
            else:
                seconds[rng.randrange(len(seconds))] = rng.choice((float("nan"), -1.0, 0.0, float("inf")))
                present = None
        parts = (1 if present is not None else 0) | (2 if last is not None else 0)
        payload = struct.pack(f"<qI{len(seconds)}d", max(number, -(2**63)), parts, *seconds)
        payload += bytes(present) if present is not None else b""
        payload += struct.pack(f"<{len(last)}i", *last) if last is not None else b""
        if not bad:
            self.reference.step(number, seconds, present, last)
        return frame(1, payload), bad


HORIZONS = (200.0, 15.0, 30.0, 45.0, 70.0)  # steps


class Counter:
    """What was compared."""

    def __init__(self) -> None:
        self.jobs = self.stream_steps = self.floats = self.states = self.bytes = self.events = 0


def state_dump(ref: Reference, quantile: float, count: Counter) -> bytes:
    out = []
    for kind in range(ref.kinds):
        for i in range(ref.ranks + ref.groups):
            data, stream = ref.state_bytes(kind, i), ref.streams[kind][i]
            out.append(data)
            score = stream.score_ratio()[0] if stream.phase == RUN else 0.0
            out.append(struct.pack("<dd", score, stream.slowdown()))
            out.append(struct.pack("<5d", *(ref.detectable(kind, i, h, quantile) for h in HORIZONS)))
            count.floats += (len(data) - 80) // 4 if len(data) < 300 else 42 + 41
            count.states += 1
    return b"".join(out)


def run_batch(jobs: list[Job], builds: list[str], quantile: float, count: Counter) -> list[str]:
    """Writes the recordings, collects the reference's states, compares every build's output with them."""
    recording, expected = [], []
    for job in jobs:
        recording.append(job.header)
        expected.append(struct.pack("<i", 0) + state_dump(job.reference, quantile, count))
        for t in range(job.steps):
            for mark in job.marks(t):
                recording.append(mark)
                expected.append(struct.pack("<i", 0) + state_dump(job.reference, quantile, count))
            record, status = job.step(t)
            recording.append(record)
            expected.append(struct.pack("<i", status) + state_dump(job.reference, quantile, count))
            count.stream_steps += job.ranks * job.kinds
        count.jobs += 1
        count.events += len(job.reference.events)
    want = b"".join(expected)
    count.bytes += len(want)
    differences = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.rec"
        path.write_bytes(b"".join(recording))
        for build in builds:
            command = [*shlex.split(build.replace(":", " ")), os.fspath(path)]
            done = subprocess.run(command, capture_output=True, timeout=600, check=False)
            if done.returncode != 0 or done.stdout != want:
                differences.append(describe(build, done, want, expected))
    return differences


def describe(build: str, done: subprocess.CompletedProcess[bytes], want: bytes, expected: list[bytes]) -> str:
    if done.returncode != 0:
        return f"{build}: exit {done.returncode}: {done.stderr.decode()[-300:]}"
    at = next(
        (i for i, (a, b) in enumerate(zip(done.stdout, want, strict=False)) if a != b), min(len(done.stdout), len(want))
    )
    offset = 0
    for index, e in enumerate(expected):
        if at < offset + len(e):
            return f"{build}: record {index}, byte {at - offset} of {len(e)}"
        offset += len(e)
    return f"{build}: {len(done.stdout)} bytes, expected {len(want)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("builds", nargs="+")
    args = parser.parse_args(argv)
    count, quantile, started = Counter(), normal_quantile(0.95), time.monotonic()
    different: list[str] = []
    for first in range(0, args.jobs, args.batch):
        jobs = [Job(args.seed * 1_000_003 + i) for i in range(first, min(first + args.batch, args.jobs))]
        different += run_batch(jobs, args.builds, quantile, count)
        print(
            f"\r{count.jobs} jobs, {count.stream_steps} stream-steps, {len(different)} differences",
            end="",
            file=sys.stderr,
        )
        if len(different) > 5:
            break
    print(file=sys.stderr)
    result = {
        "tool": "differential",
        "seed": args.seed,
        "jobs": count.jobs,
        "stream_steps": count.stream_steps,
        "states_compared": count.states,
        "floats_compared": count.floats,
        "bytes_compared": count.bytes,
        "verdict_events": count.events,
        "builds": args.builds,
        "differences": len(different),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result))
    for line in different[:20]:
        print(line, file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
