# SPDX-License-Identifier: Apache-2.0
"""The straggler engine through Python: faults are named, recordings give the same verdicts, damage is refused."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from gpubridge.cli import replay as command
from gpubridge.errors import GpuBridgeError
from gpubridge.straggler import Answer, Engine, Recorder, Rule, State, replay

RANKS = 8


def record(path: Path, steps: int = 2500, fault: int = 2000) -> list[bytes]:
    """A recording in which rank 5 becomes 4 % slower at step `fault` and rank 1 is held once; the final states."""
    rng = random.Random(4)
    with path.open("wb") as file, Engine(RANKS) as engine:
        recorder = Recorder(engine, file)
        for step in range(steps):
            seconds = [
                0.4 * (1 + 0.01 * rng.gauss(0, 1)) * (1.04 if r == 5 and step >= fault else 1.0) for r in range(RANKS)
            ]
            recorder.step(step, seconds, last=[max(range(RANKS), key=seconds.__getitem__)])
            if step in (1000, 1040):
                recorder.mark("hold" if step == 1000 else "release", 1)
        return [engine.state_bytes(r) for r in range(-1, RANKS)]


def test_fault_is_named_with_size_and_onset() -> None:
    rng = random.Random(3)
    with Engine(RANKS, days=30, steps_per_second=2) as engine:
        for step in range(2500):
            engine.step(
                step,
                [0.4 * (1 + 0.01 * rng.gauss(0, 1)) * (1.04 if r == 5 and step >= 2000 else 1.0) for r in range(RANKS)],
            )
        events = engine.events()
        report = engine.report(5)
        assert [e.rank for e in events] == [5]
        assert report.state is State.CONFIRMED and report.rule is Rule.BANK
        assert Answer.SLOWER_THAN_PAST in report.answers
        assert report.slowdown is not None and report.slowdown[1] <= 0.04 <= report.slowdown[2]
        assert report.onset is not None and report.onset[1] <= 2000 <= report.onset[2]
        healthy = engine.report(2)
        assert healthy.state is State.HEALTHY and not healthy.answers
        found = engine.detectable(2, steps=200, probability=0.95)
        assert found is not None and 0.0025 < found < 0.02


def test_bad_values_are_refused() -> None:
    with Engine(2) as engine:
        engine.step(1, [1.0, 1.0])
        before = engine.state_bytes(0)
        for number, seconds in ((1, [1.0, 1.0]), (2, [1.0, float("nan")]), (2, [0.0, 1.0])):
            with pytest.raises(GpuBridgeError):
                engine.step(number, seconds)
        with pytest.raises(ValueError):
            engine.step(2, [1.0])
        assert engine.state_bytes(0) == before
    with pytest.raises(GpuBridgeError):
        Engine(0)


def test_replay_gives_the_same_states(tmp_path: Path) -> None:
    path = tmp_path / "job.rec"
    expected = record(path)
    events = []
    for replayed, new in replay(path.read_bytes()):
        events += new
        engine = replayed
    assert [engine.state_bytes(r) for r in range(-1, RANKS)] == expected
    assert [(e.rank, e.target) for e in events] == [(5, State.CONFIRMED)]


def test_replay_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.rec"
    record(path)
    assert command.main([str(path), "--states"]) == 0
    first = capsys.readouterr().out
    assert re.search(r"step 20\d\d: rank 5, kind 0: \+\d\.\d\d% .* by bank", first)
    assert "7 of 8 streams healthy" in first
    assert command.main([str(path), "--states"]) == 0
    assert capsys.readouterr().out == first
    damaged = tmp_path / "damaged.rec"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    assert command.main([str(damaged)]) == 1
    damaged.write_bytes(bytes(path.read_bytes()[:-5]))
    assert command.main([str(damaged)]) == 1
    assert "truncated" in capsys.readouterr().err
