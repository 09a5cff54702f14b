# SPDX-License-Identifier: Apache-2.0
"""The one record schema that every reader produces (docs/records.md), and its CSV form.

A record is one interval on one rank, on that rank's own clock.  Readers fill a Builder; the analysis sees a Table.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubridge.fleet.native import KINDS, RECORD

COLUMNS = ("step", "rank", "kind", "name", "start", "end", "ready", "channel", "op", "micro_batch", "bytes")
OPTIONAL = ("stage", "replica", "model", "host", "device", "work1", "work2", "work3", "work4")


class RecordError(ValueError):
    """A file that cannot be read as records; the text says where and what is expected."""


@dataclass
class Rank:
    """What is known about a rank: its place in a pipeline (stage, replica) and its device."""

    stage: int = 0
    replica: int = 0
    model: str = ""
    host: str = ""
    device: str = ""


@dataclass
class Table:
    """Records of a job: `raw` for the C core (steps as numbered in the file, ranks renumbered 0 ...), and per
    record the
    index of its name, its micro-batch (-1: none) and its bytes (0: not known)."""

    raw: npt.NDArray[Any]
    name: npt.NDArray[np.int32]
    micro_batch: npt.NDArray[np.int32]
    bytes: npt.NDArray[np.float64]
    names: list[str]
    channels: list[str]
    labels: list[int]
    ranks: list[Rank]
    work: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    source: str = ""

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The step numbers, ascending."""
        return np.unique(self.raw["step"])


class Builder:
    """Collects records one at a time."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, float, float, float]] = []
        self._extra: list[tuple[int, int, float]] = []
        self._names: dict[str, int] = {}
        self._channels: dict[str, int] = {}
        self._labels: dict[int, int] = {}
        self._ranks: list[Rank] = []
        self._work: dict[tuple[int, int], tuple[float, ...]] = {}

    def rank(self, label: int, **facts: Any) -> int:
        """The row number of a rank; facts (stage, replica, model, host, device) are kept."""
        at = self._labels.get(label)
        if at is None:
            at = self._labels[label] = len(self._ranks)
            self._ranks.append(Rank())
        for name, value in facts.items():
            setattr(self._ranks[at], name, value)
        return at

    def add(
        self,
        step: int,
        rank: int,
        kind: str,
        name: str,
        start: float,
        end: float,
        *,
        ready: float = float("nan"),
        channel: str = "",
        op: int = 0,
        micro_batch: int = -1,
        bytes_: float = 0.0,
    ) -> None:
        """One interval in seconds.

        Raises:
            RecordError: the kind is unknown, the interval is backwards, or a transfer names no channel.
        """
        if kind not in KINDS:
            raise RecordError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
        if not end >= start:
            raise RecordError(f"{name} of rank {rank} in step {step} lasts from {start} to {end}")
        transfer = kind in ("collective", "hop")
        if transfer and not channel:
            raise RecordError(f"{name} of rank {rank} in step {step} is a {kind} without a channel")
        number = self._channels.setdefault(channel, len(self._channels)) if transfer else 0
        self._rows.append((step, self.rank(rank), KINDS.index(kind), number, op, start, end, ready))
        self._extra.append((self._names.setdefault(name, len(self._names)), micro_batch, bytes_))

    def work(self, step: int, rank: int, amounts: Iterable[float]) -> None:
        """Amounts of work of a rank in a step (tokens, sum of squared lengths, ...)."""
        self._work[step, self.rank(rank)] = tuple(amounts)

    def table(self, source: str) -> Table:
        """Everything collected.

        Raises:
            RecordError: there is nothing.
        """
        if not self._rows:
            raise RecordError(f"{source} has no records that the analysis can use")
        order = np.lexsort((np.array([r[5] for r in self._rows]), np.array([r[0] for r in self._rows])))
        extra = np.array(self._extra, dtype=np.float64)[order]
        return Table(
            np.array(self._rows, dtype=RECORD)[order], extra[:, 0].astype(np.int32), extra[:, 1].astype(np.int32),
            extra[:, 2], list(self._names), list(self._channels), list(self._labels), self._ranks, self._work, source,
        )  # fmt: skip


def read_csv(path: Path) -> Table:
    """The schema as text: a header with the columns of docs/records.md, times in seconds.

    Raises:
        RecordError: a column is missing or a value cannot be read; the text has the line.
    """
    builder = Builder()
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = [c for c in ("step", "rank", "kind", "start", "end") if c not in (rows.fieldnames or [])]
        if missing:
            raise RecordError(f"{path}: no column {', '.join(missing)}; docs/records.md lists them")
        for line, row in enumerate(rows, 2):
            try:
                _csv_row(builder, row)
            except (ValueError, TypeError) as error:
                raise RecordError(f"{path}:{line}: {error}") from None
    return builder.table(str(path))


def _csv_row(builder: Builder, row: dict[str, str]) -> None:
    step, rank = int(row["step"]), int(row["rank"])
    facts = {n: row[n] for n in ("model", "host", "device") if row.get(n)}
    places = {n: int(row[n]) for n in ("stage", "replica") if row.get(n)}
    builder.rank(rank, **facts, **places)
    work = tuple(float(row[f"work{i}"]) for i in range(1, 5) if row.get(f"work{i}"))
    if work:
        builder.work(step, rank, work)
    builder.add(
        step, rank, row["kind"], row.get("name") or row["kind"], float(row["start"]), float(row["end"]),
        ready=float(row.get("ready") or "nan"), channel=row.get("channel") or "", op=int(row.get("op") or 0),
        micro_batch=int(row.get("micro_batch") or -1), bytes_=float(row.get("bytes") or 0),
    )  # fmt: skip


def write_csv(table: Table, path: Path) -> None:
    """The inverse of read_csv."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*COLUMNS, *OPTIONAL])
        for raw, name, batch, size in zip(table.raw, table.name, table.micro_batch, table.bytes, strict=True):
            rank = table.ranks[raw["rank"]]
            transfer = raw["kind"] >= KINDS.index("collective")
            work = table.work.get((int(raw["step"]), int(raw["rank"])), ())
            out.writerow([
                int(raw["step"]), table.labels[raw["rank"]], KINDS[raw["kind"]], table.names[name],
                repr(float(raw["start"])), repr(float(raw["end"])),
                "" if np.isnan(raw["ready"]) else repr(float(raw["ready"])),
                table.channels[raw["channel"]] if transfer else "", int(raw["op"]), int(batch), repr(float(size)),
                rank.stage, rank.replica, rank.model, rank.host, rank.device, *work, *[""] * (4 - len(work)),
            ])  # fmt: skip
