# SPDX-License-Identifier: Apache-2.0
"""`gpubridge analyze FILE`: verdicts over a recorded job, as a table and one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from gpubridge.errors import GpuBridgeError


def run(file: Path, learn: int | None, alarms: float, out: Path | None, csv: Path | None) -> int:
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
        if out:
            print(f"page: {page(analysis, out)}")
    except (RecordError, ValueError, GpuBridgeError, OSError, RuntimeError) as error:
        print(f"gpubridge analyze: {error}", file=sys.stderr)
        return 1
    return 0
