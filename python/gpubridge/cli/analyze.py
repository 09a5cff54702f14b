# SPDX-License-Identifier: Apache-2.0
"""`gpubridge analyze FILE`: verdicts over a recorded job, as a table and one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gpubridge.errors import GpuBridgeError

if TYPE_CHECKING:
    from gpubridge.fleet import Analysis


def stream(compare: bool) -> int:
    """Judges a recording from standard input as it arrives, in bounded memory; `compare`: only reads it."""
    from gpubridge.cli.replay import describe, summary
    from gpubridge.fleet.stream import judge_stream, read_only

    if compare:
        size, seconds = read_only(sys.stdin.buffer)
        print(f"read {size:,} bytes in {seconds:.2f} s: {size / seconds / 1e6:.1f} MB/s")
        return 0

    def tell(records: int, size: int, seconds: float) -> None:
        print(f"\r{records:,} steps, {size / seconds / 1e6:.1f} MB/s", end="", file=sys.stderr)

    result = judge_stream(sys.stdin.buffer, tell if sys.stderr.isatty() else None)
    for event in result.events:
        print(describe(event))
    for line in summary(result.engine) if result.engine else ["no records"]:
        print(line)
    rate = result.bytes / result.seconds / 1e6 if result.seconds else 0.0
    streams = result.engine.ranks * result.engine.kinds if result.engine else 0
    per_second = result.records * streams / result.seconds if result.seconds else 0.0
    print(
        f"{result.records:,} steps x {streams:,} streams, {result.bytes:,} bytes in {result.seconds:.2f} s: "
        f"{rate:.1f} MB/s, "
        f"{per_second:,.0f} stream-steps/s, at most {result.peak_mib:.0f} MiB of memory"
    )
    if result.error:
        print(f"gpubridge analyze: after {result.records} steps: {result.error}", file=sys.stderr)
    return 1 if result.error else 0


def passports(analysis: Analysis) -> list[str]:
    """Compares devices that the file identifies with earlier jobs, and remembers this one."""
    from gpubridge.fleet.passport import Passports

    known = [(i, r) for i, r in enumerate(analysis.table.ranks) if r.device]
    if not known or "compute" not in analysis.scans:
        return []
    store, lines = Passports(), []
    if store.note:
        lines.append(store.note)
    for row, rank in known:
        ratio = analysis.scans["compute"][row].ratio
        if ratio <= 0:
            continue
        said = store.judge(rank.device, ratio)
        if said not in ("as before", "unknown device"):
            lines.append(f"device {rank.device} ({rank.model}): {said}")
        store.record(rank.device, rank.model, rank.host, ratio)
    store.save()
    return lines


def run(
    file: Path, learn: int | None, alarms: float, out: Path | None, csv: Path | None, remember: bool = False
) -> int:
    """Analyses one file or folder; returns the exit status (1: it cannot be read or judged)."""
    try:
        from gpubridge.fleet import RecordError, analyze, read
        from gpubridge.fleet.records import write_csv
        from gpubridge.fleet.report import page, show
    except ImportError as error:
        print(f"gpubridge analyze: {error}; it needs: pip install 'gpubridge[analyze]'", file=sys.stderr)
        return 1
    try:
        table = read(file)
        if csv:
            write_csv(table, csv)
        analysis = analyze(table, learn, alarms)
        show(analysis, Console())
        for line in passports(analysis) if remember else []:
            print(line)
        if out:
            print(f"page: {page(analysis, out)}")
    except (RecordError, ValueError, GpuBridgeError, OSError, RuntimeError) as error:
        print(f"gpubridge analyze: {error}", file=sys.stderr)
        return 1
    return 0
