# SPDX-License-Identifier: Apache-2.0
"""`gpubridge simulate`: suites of simulated mixed fleets with their tables, plots and page; or one endless
recording."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpubridge.errors import GpuBridgeError


def stream(ranks: int, steps: int, seed: int, fault: str | None) -> int:
    """Writes a recording to standard output. fault: RANK:SIZE:STEP."""
    try:
        from gpubridge.fleet.stream import Fault, write_stream

        parts = fault.split(":") if fault else []
        put = Fault(int(parts[0]), float(parts[1]), int(parts[2])) if parts else None
        write_stream(sys.stdout.buffer, ranks, steps, seed, put)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 1
    except (ImportError, ValueError, IndexError, GpuBridgeError) as error:
        print(f"gpubridge simulate: {error}", file=sys.stderr)
        return 1
    return 0


def run(suites: list[str], episodes: int | None, out: Path, workers: int | None) -> int:
    """Runs suites; results, PNG plots and the page go to `out`."""
    try:
        from gpubridge.fleet.simulate import SUITES, machine, summarize
        from gpubridge.fleet.simulate import run as run_suite
        from gpubridge.fleet.simulated import page
    except ImportError as error:
        print(f"gpubridge simulate: {error}; it needs: pip install 'gpubridge[analyze]'", file=sys.stderr)
        return 1
    unknown = [s for s in suites if s not in SUITES]
    if unknown:
        print(f"gpubridge simulate: no suite {', '.join(unknown)}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 1
    console, summaries = Console(), []
    for name in suites or list(SUITES):
        summary = summarize(name, run_suite(name, episodes, out, workers))
        summaries.append(summary)
        table = Table(title=f"{name}: {summary.words}", title_justify="left")
        for column in summary.head:
            table.add_column(column)
        for row in summary.rows:
            table.add_row(*row)
        console.print(table)
        (out / f"{name}.json").write_text(json.dumps({**machine(), "suite": name, **summary.numbers}, indent=1) + "\n")
    print(f"page: {page(summaries, out)}")
    return 0
