# SPDX-License-Identifier: Apache-2.0
"""Recorded jobs with known causes: the slowed worker is named with its factors, uneven work is blamed on nobody, and a
small slowdown put into one worker is found."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="parquet needs pyarrow")

from gpubridge.cli import analyze as command
from gpubridge.fleet import Analysis, Table, analyze, read
from gpubridge.fleet.records import read_csv, write_csv

DATA = Path(__file__).resolve().parents[1] / "data" / "recorded-jobs"
LEARN = 21


@pytest.fixture(scope="module")
def even() -> Table:
    return read(DATA / "trace-AR.parquet")


@pytest.fixture(scope="module")
def uneven() -> Table:
    return read(DATA / "trace-SE.parquet")


def slowed(table: Table, row: int, factor: float, step: int) -> Table:
    """The same job with the computations of one worker longer from the step of that index on."""
    raw = table.raw.copy()
    chosen = (raw["rank"] == row) & (raw["kind"] == 1) & (raw["step"] >= table.steps[step])
    raw["end"][chosen] = raw["start"][chosen] + (raw["end"][chosen] - raw["start"][chosen]) * factor
    return dataclasses.replace(table, raw=raw)


def test_slowed_worker_is_named_with_its_factors(even: Table) -> None:
    found = analyze(even, LEARN)
    assert [(v.rank, v.cause, v.answer) for v in found.verdicts] == [(0, "compute", "slow against its peers")]
    rank = even.ranks[even.labels.index(0)]
    assert (rank.replica, rank.stage) == (0, 0)
    factors = found.verdicts[0].factors
    assert factors["forward-compute"] == pytest.approx(2.50, rel=0.02)
    assert factors["backward-compute"] == pytest.approx(2.27, rel=0.02)
    assert found.step_factor == pytest.approx(1.97, rel=0.02)


def test_uneven_work_blames_nobody(uneven: Table) -> None:
    found = analyze(uneven, LEARN)
    assert found.verdicts == []
    assert found.job == "work imbalance"
    assert "other stages" in found.covariate


def found_in(analysis: Analysis, label: int) -> tuple[bool, int]:
    """Whether the worker is named for its computation, and how many others are."""
    return (
        any(v.rank == label and v.cause == "compute" for v in analysis.verdicts),
        sum(v.rank != label for v in analysis.verdicts),
    )


def test_one_percent_more_on_one_worker_is_found(uneven: Table) -> None:
    rows = range(len(uneven.ranks)) if os.environ.get("GB_TEST_LONG") else range(3, len(uneven.ranks), 13)
    results = [found_in(analyze(slowed(uneven, r, 1.01, LEARN), LEARN), uneven.labels[r]) for r in rows]
    assert sum(wrong for _, wrong in results) == 0
    assert sum(hit for hit, _ in results) >= len(results) * 60 // 64


def test_records_survive_csv(uneven: Table, tmp_path: Path) -> None:
    write_csv(uneven, tmp_path / "records.csv")
    again = analyze(read_csv(tmp_path / "records.csv"), LEARN)
    assert again.verdicts == [] and again.job == "work imbalance"


def test_command_prints_a_verdict_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(DATA / "trace-AR.parquet", LEARN, 0.01, tmp_path / "page", None) == 0
    assert "compute of rank 0 (dp 0, pp 0)" in capsys.readouterr().out
    page = (tmp_path / "page" / "index.html").read_text()
    assert "slow against its peers" in page and "data:image/png;base64," in page
    assert (tmp_path / "page" / "computation.png").stat().st_size > 5000
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes((DATA / "trace-AR.parquet").read_bytes()[:5000])
    assert command.run(damaged, None, 0.01, None, None) == 1
