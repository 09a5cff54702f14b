# SPDX-License-Identifier: Apache-2.0
"""Mutation check: changes the C engine in one place at a time and demands that the differential test notices.

    python -m tests.reference.mutate --count 100 --seed 20261130

The tool draws the places itself from the seed: an operator turned round or a constant (other than zero) moved by a
thirty-second, in the files that compute. Comparisons are never only widened (> to >=): on doubles that changes nothing
that could be seen. A mutant is caught when the program no longer compiles, crashes, hangs, or gives one byte that
differs from the reference on the recorded jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from .differential import Counter, Job, frame, normal_quantile, state_dump
from .engine import Reference
from .numbers import Tables, clipped_inverse, exp, log
from .stream import Stream

ROOT = Path(__file__).resolve().parents[2]
FILES = ("bank.c", "learn.c", "peers.c", "arrivals.c", "verdict.c", "tables.c", "num.h")
# Bounds are trapped: an index past an array may find a neighbour that happens to hold the right number.
BOUNDS = ["-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]
FLAGS = ["-std=c17", "-O1", *BOUNDS, "-D_GNU_SOURCE", "-DGB_NO_CLONES", "-ffp-contract=off", "-w", f"-I{ROOT}/include"]
# Changes that no result can show, with the reason; the next place in the seeded order is taken instead.
EQUIVALENT = {
    ("learn.c", "12.0"): "ends of bins beyond every clip",
    ("peers.c", "v[i] = v[m + 1];"): "what is swapped out is never read again",
    ("peers.c", "v[i] = v[m - 1];"): "the same",
    ("verdict.c", "80.0"): "a magnitude is below 40 or infinite",
    (
        "bank.c",
        "double limit = reference * (double)h->guard[l], hit = (double)u >= limit ? 1.0 : s->alert[l];",
    ): "asks for the exact test more often, which answers the same: only time shows it",
}
_TURNS = {
    " + ": " - ",
    " - ": " + ",
    " * ": " / ",
    " / ": " * ",
    " > ": " < ",
    " < ": " > ",
    " >= ": " < ",
    " <= ": " > ",
    " += ": " -= ",
    " == ": " != ",
    " && ": " || ",
    " || ": " && ",
    " & ": " | ",
}
_NUMBER = re.compile(r"(?<![\w.\"])(\d+\.\d+(?:e-?\d+)?)(f?)(?![\w.])")


@dataclass(frozen=True)
class Mutant:
    """One change: file, line number, column, text before and after."""

    file: str
    line: int
    column: int
    old: str
    new: str


def places(file: str) -> list[Mutant]:
    """Every mutation of a file; comments, messages and sizes are left alone."""
    found, comment = [], False
    for number, text in enumerate((ROOT / "src/straggler" / file).read_text().splitlines(), 1):
        code = text
        if comment or code.lstrip().startswith("/*"):
            comment = "*/" not in code
            continue
        code = code.split("/*")[0]
        comment = "/*" in text and "*/" not in text
        if code.startswith(("#", " *")) or "GB_FAIL" in code or '"' in code or "sizeof" in code or "GB_INLINE" in code:
            continue
        for old, new in _TURNS.items():
            at = code.find(old)
            while at >= 0:
                found.append(Mutant(file, number, at, old, new))
                at = code.find(old, at + 1)
        for match in _NUMBER.finditer(code):
            value = float(match.group(1))
            if (
                value and (file, match.group(1)) not in EQUIVALENT
            ):  # a moved zero is mostly a clamp that nothing reaches
                found.append(
                    Mutant(file, number, match.start(), match.group(0), repr(value * 1.03125) + match.group(2))
                )
    return found


def scripted(
    times: Iterator[tuple[float, int]], given: bool, alarms: float, every: int, least: float = 0.0025
) -> tuple[bytes, bytes, int]:
    """Rank 0 fed with (seconds, the last rank); rank 1 has no times of its own. The state after every Nth record."""
    ref = Reference(2, 1, [0, 0], 30.0 * 86400.0 * 1.0 * 2.0 / alarms, least, 1, True, 2000)
    payload = b"GBSTRAG1" + struct.pack("<ii4d4iI", 2, 1, alarms, 30.0, 1.0, least, 1, 0, 2000, 8, 1) + bytes(16)
    records, q, count = [frame(0, payload)], normal_quantile(0.95), Counter()
    expected = [struct.pack("<i", 0) + state_dump(ref, q, count)]

    def note(record: bytes) -> None:
        if len(records) % every == 0:
            expected.append(struct.pack("<i", 0) + state_dump(ref, q, count))
        records.append(record)

    if given:
        ref.given(0, 0, 1.0, 0.05, 0.0)
        note(frame(6, struct.pack("<ii3d", 0, 0, 1.0, 0.05, 0.0)))
    for t, (seconds, last) in enumerate(times):
        ref.step(t, [seconds, 1.0], [1, 0], [last])
        note(frame(1, struct.pack("<qI2d2Bi", t, 3, seconds, 1.0, 1, 0, last)))
    return b"".join(records), b"".join(expected), every


def long_job() -> tuple[bytes, bytes, int]:
    """1,060,000 steps, past the point where sums are halved."""
    rng = random.Random(77)
    times = ((1.0 + 0.05 * rng.gauss(0, 1), 0 if rng.random() < 0.25 else 1) for _ in range(1_060_000))
    return scripted(times, False, 1e-2, 4096)


def wandering_job() -> tuple[bytes, bytes, int]:
    """60,000 steps whose level wanders, with exceedances beyond every tail, and long runs of last arrivals."""
    rng = random.Random(78)

    def times() -> Iterator[tuple[float, int]]:
        level = 0.0
        for t in range(60_000):
            level = 0.998 * level + 0.0006 * rng.gauss(0, 1)
            size = rng.choice((4.0, 8.0, 15.0)) if rng.random() < 0.02 else 1.0
            last = 0 if t // 40 % 4 == 0 else rng.choice((1, 1, -1))
            yield max(1.0 + level + 0.01 * size * rng.gauss(0, 1), 0.01), last

    return scripted(times(), False, 1.0, 64)


def small_fault_job() -> tuple[bytes, bytes, int]:
    """A fault barely worth a verdict, found by the slowest member, and the long way back."""
    rng = random.Random(84)
    times = ((1.0 + 0.05 * rng.gauss(0, 1) + (0.0033 if t < 16000 else 0.0), 1) for t in range(30_000))
    return scripted(times, True, 10.0, 16, 1e-4)


def spiky_job() -> tuple[bytes, bytes, int]:
    """Two steps in five take twice as long: a wide member can be armed on one side only."""
    rng = random.Random(81)
    spikes = (1.0 if t % 5 in (2, 4) and t < 2500 else 0.0 for t in range(4000))
    return scripted(((1.0 + 0.01 * rng.gauss(0, 1) + s, 1) for s in spikes), False, 1.0, 4)


def arrivals_job() -> tuple[bytes, bytes, int]:
    """The rank arrives last more and more often, and is slower by little: the count rule speaks first."""
    rng = random.Random(80)

    def times() -> Iterator[tuple[float, int]]:
        sticky = False
        for t in range(40_000):
            late = t % 10_000 > 7_000
            sticky = rng.random() < (0.55 if sticky else 0.45 if late else 0.1)
            yield 1.0 + 0.01 * rng.gauss(0, 1) + (0.0055 if late else 0.0), 0 if sticky else 1

    return scripted(times(), False, 1.0, 8, 1e-4)


def creeping_arrivals_job() -> tuple[bytes, bytes, int]:
    """The rank arrives last a little more often than it used to, for long: the count rule speaks after a long run."""
    rng = random.Random(82)

    def times() -> Iterator[tuple[float, int]]:
        for t in range(14_000):
            late = t > 6_000
            last = 0 if rng.random() < (0.165 if late else 0.1) else 1
            yield 1.0 + 0.05 * rng.gauss(0, 1) + (0.002 if late else 0.0), last

    return scripted(times(), True, 100.0, 1, 1e-4)


def frequent_arrivals_job() -> tuple[bytes, bytes, int]:
    """The rank is the last in 61 % of the steps: too often to judge it by that."""
    rng = random.Random(87)
    return scripted(((1.0, 0 if rng.random() < 0.61 else 1) for _ in range(3000)), True, 100.0, 1)


def gross_jobs() -> tuple[bytes, bytes, int]:
    """Short histories, each under a budget that puts the gross rule's first level just beside a refresh."""
    rng = random.Random(83)
    records, expected = b"", b""
    refresh, points = Stream.refresh, set[float]()

    def noting(stream: Stream, tables: Tables) -> None:
        points.add(stream.n)
        refresh(stream, tables)

    for _ in range(4):
        times = [(1.0 + 0.05 * rng.gauss(0, 1), 1) for _ in range(900)]
        points.clear()
        with mock.patch.object(Stream, "refresh", noting):
            scripted(iter(times), False, 30.0, 1)
        for probability in [p for n in sorted(points) for p in (3.0 / (n + 3.05), 3.05 / (n + 3.0))]:
            more = scripted(iter(times), False, 30.0 * 86400.0 * 2.0 / (0.03 / probability**3), 1)
            records, expected = records + more[0], expected + more[1]
    return records, expected, 1


def edge_job() -> tuple[bytes, bytes, int]:
    """The shortest run length between false alarms that the engine takes, and a rank that never comes back."""
    rng = random.Random(86)
    times = ((1.0 + 0.05 * rng.gauss(0, 1) + (40.0 if t > 3000 else 0.0), 1) for t in range(3300))
    return scripted(times, False, 30.0 * 86400.0 * 2.0 / 1010.0, 1)


def refused() -> tuple[bytes, None, int]:
    """A header whose run length between false alarms is too short: no engine may come of it."""
    return scripted(iter(()), False, 30.0 * 86400.0 * 2.0 / 990.0, 1)[0], None, 1


def numbers() -> tuple[bytes, bytes, int]:
    """Doubles, with exp, log and clipped inverse of each to the last bit."""
    rng = random.Random(85)
    values = [rng.choice((-1.0, 1.0)) * 10.0 ** rng.uniform(-6.0, 2.9) for _ in range(30_000)]
    values += [(n + 0.5) * 0.6931471805599453 * (1.0 + d) for n in range(-900, 900) for d in (-1e-9, 0.0, 1e-9)]
    values += [i / 4000.0 for i in range(8001)]
    want = b"".join(
        struct.pack("<3d", exp(v), log(v) if v > 0.0 else 0.0, clipped_inverse(min(max(v, 0.0), 2.0))) for v in values
    )
    return struct.pack(f"<{len(values)}d", *values), want, 0


def jobs(seed: int, number: int) -> tuple[bytes, bytes, int]:
    """Random jobs of the differential test: recording and the reference's states."""
    records, expected, q, count = [], [], normal_quantile(0.95), Counter()
    for i in range(number + 12):  # two of one large group, ten of two kinds and two groups
        large, many = number <= i < number + 2, i >= number + 2
        job = Job(
            seed * 1_000_003 + i, peers=21 + 2 * (i - number) if large else 13 if many else 0, kinds=2 if many else 0
        )
        records.append(job.header)
        expected.append(struct.pack("<i", 0) + state_dump(job.reference, q, count))
        for t in range(job.steps):
            for mark in job.marks(t):
                records.append(mark)
                expected.append(struct.pack("<i", 0) + state_dump(job.reference, q, count))
            record, status = job.step(t)
            records.append(record)
            expected.append(struct.pack("<i", status) + state_dump(job.reference, q, count))
    return b"".join(records), b"".join(expected), 1


def is_equivalent(m: Mutant) -> bool:
    """Listed above, by its old text or by its whole line."""
    line = (ROOT / "src/straggler" / m.file).read_text().splitlines()[m.line - 1].strip()
    return (m.file, m.old) in EQUIVALENT or (m.file, line) in EQUIVALENT


class Bench:
    """Builds mutants and runs them against the recordings."""

    def __init__(self, folder: Path, sets: list[tuple[bytes, bytes | None, int]]) -> None:
        self.folder, self.sets = folder, []
        for i, (recording, expected, every) in enumerate(sets):
            path = folder / f"set{i}.rec"
            path.write_bytes(recording)
            self.sets.append((path, expected, every))
        self.sources = folder / "src"
        shutil.copytree(ROOT / "src/straggler", self.sources / "straggler")
        shutil.copytree(ROOT / "src/base", self.sources / "base")
        self.units = sorted((self.sources / "straggler").glob("*.c")) + [self.sources / "base/err.c"]
        self.units.append(ROOT / "tests/reference/replay_states.c")
        for unit in self.units:
            self._compile(unit)

    def _object(self, unit: Path) -> Path:
        return self.folder / (unit.stem + ".o")

    def _compile(self, unit: Path) -> None:
        command = ["gcc", *FLAGS, f"-I{self.sources}", "-c", str(unit), "-o", str(self._object(unit))]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    def verdict(self) -> str:
        """Links and runs; "same" or how it differs."""
        program = self.folder / "mutant"
        objects = [str(self._object(u)) for u in self.units]
        subprocess.run(["gcc", *objects, "-lm", "-o", str(program)], check=True, capture_output=True, timeout=120)
        for path, expected, every in self.sets:
            try:
                done = subprocess.run(
                    [str(program), os.fspath(path), str(every)], capture_output=True, timeout=60, check=False
                )
            except subprocess.TimeoutExpired:
                return "hangs"
            if expected is None and done.returncode == 1:
                continue
            if done.returncode != 0:
                return f"exit {done.returncode}"
            if done.stdout != expected:
                return f"differs on {path.name}"
        return "same"

    def try_mutant(self, m: Mutant) -> str:
        """Compiles what the changed file touches, runs, restores."""
        path = self.sources / "straggler" / m.file
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        text = lines[m.line - 1]
        lines[m.line - 1] = text[: m.column] + m.new + text[m.column + len(m.old) :]
        path.write_text("".join(lines))
        touched = [
            u for u in self.units if u.name == m.file or (m.file == "num.h" and '"straggler/num.h"' in u.read_text())
        ]
        try:
            for unit in touched:
                self._compile(unit)
            return self.verdict()
        except subprocess.CalledProcessError:
            return "does not compile"
        finally:
            path.write_text(original)
            for unit in touched:
                self._compile(unit)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--short", action="store_true", help="without the job of a million steps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    started = time.monotonic()
    every_place = [m for f in FILES for m in places(f)]
    order = random.Random(args.seed).sample(every_place, args.count + 5)
    drawn = [m for m in order if not is_equivalent(m)][: args.count]
    sets: list[tuple[bytes, bytes | None, int]]
    sets = [numbers(), jobs(args.seed, args.jobs), small_fault_job(), spiky_job(), arrivals_job(), wandering_job()]
    sets += [creeping_arrivals_job(), gross_jobs(), edge_job(), refused(), frequent_arrivals_job()]
    if not args.short:
        sets.append(long_job())
    caught, rows = 0, []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), sets)
        if (clean := bench.verdict()) != "same":
            print(f"the unchanged engine differs from the reference: {clean}", file=sys.stderr)
            return 2
        for i, m in enumerate(drawn, 1):
            verdict = bench.try_mutant(m)
            caught += verdict != "same"
            rows.append(
                {"file": m.file, "line": m.line, "old": m.old.strip(), "new": m.new.strip(), "verdict": verdict}
            )
            print(f"{i:3} {m.file}:{m.line}: {m.old.strip()} -> {m.new.strip()}: {verdict}", flush=True)
    result = {"tool": "mutate", "seed": args.seed, "places": len(every_place), "mutants": args.count, "caught": caught,
              "seconds": round(time.monotonic() - started, 1), "mutations": rows}  # fmt: skip
    print(f"{caught} of {args.count} caught, drawn from {len(every_place)} places")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if caught == args.count else 1


if __name__ == "__main__":
    raise SystemExit(main())
