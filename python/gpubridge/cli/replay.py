# SPDX-License-Identifier: Apache-2.0
"""`gpubridge replay FILE`: recomputes the verdicts of a recorded straggler stream.

The engine is deterministic, so the same file gives the same verdicts on every machine. `--states` also prints a
checksum over all states after every record, to compare two machines to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from gpubridge.errors import GpuBridgeError
from gpubridge.straggler import Engine, Event, Rule, State, replay


def _size(slowdown: tuple[float, float, float]) -> str:
    return f"{slowdown[0]:+.2%} ({slowdown[1]:+.2%} to {slowdown[2]:+.2%})"


def describe(event: Event) -> str:
    """One line: who, what, how much, since when."""
    who = f"rank {event.rank}" if event.rank >= 0 else f"group {-1 - event.rank} as a whole"
    if event.target is State.CONFIRMED:
        rule = Rule(event.rule).name.lower()
        since = f"{event.onset[0]} ({event.onset[1]} to {event.onset[2]})"
        what = f"{_size(event.slowdown)} against its own past, since step {since}, by {rule}"
    else:
        what = f"{event.source.name.lower()} -> {event.target.name.lower()}"
    return f"step {event.step}: {who}, kind {event.kind}: {what}"


def summary(engine: Engine) -> list[str]:
    """The last state of every stream, healthy ones counted only."""
    lines, healthy = [], 0
    for kind in range(engine.kinds):
        for rank in range(engine.ranks):
            r = engine.report(rank, kind)
            if r.state is State.HEALTHY and not r.answers:
                healthy += 1
                continue
            named = ", ".join(a.name.lower().replace("_", " ") for a in type(r.answers) if a in r.answers and a.name)
            size = f", {_size(r.slowdown)}" if r.slowdown else ""
            lines.append(f"rank {rank}, kind {kind}: {r.state.name.lower()}{size}{': ' + named if named else ''}")
    return [*lines, f"{healthy} of {engine.ranks * engine.kinds} streams healthy"]


def run(file: Path, states: bool = False) -> int:
    """Replays `file` and prints its verdicts; returns the exit status (1: the recording cannot be read to its end)."""
    digest, engine, records = hashlib.sha256(), None, 0
    try:
        for engine, events in replay(file.read_bytes()):
            records += 1
            for event in events:
                print(describe(event))
            if states:
                for kind in range(engine.kinds):
                    for rank in range(-engine.groups, engine.ranks):
                        digest.update(engine.state_bytes(rank, kind))
    except (GpuBridgeError, OSError) as error:
        print(f"gpubridge replay: {file}: after {records} records: {error}", file=sys.stderr)
        return 1
    for line in summary(engine) if engine else ["no records"]:
        print(line)
    if states:
        print(f"states sha256 {digest.hexdigest()}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `gpubridge replay`."""
    parser = argparse.ArgumentParser(
        prog="gpubridge replay", description="Recomputes the verdicts of a recorded straggler stream."
    )
    parser.add_argument("file", type=Path, help="recording made by gpubridge.straggler.Recorder")
    parser.add_argument("--states", action="store_true", help="also print a checksum of every state after every record")
    args = parser.parse_args(argv)
    return run(args.file, args.states)


if __name__ == "__main__":
    raise SystemExit(main())
