#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The two recorded jobs in numbers: factors of the slowed worker, the uneven job's cause, and 1 % put into each of its
64 workers in turn.  Takes a few minutes.

usage: fleet_recorded.py [-o FILE]     (default: standard output)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from gpubridge.fleet import Table, analyze, read

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "recorded-jobs"
LEARN = 21


def slowed(table: Table, row: int, factor: float) -> Table:
    """The same job with one worker's computations longer from the step of index LEARN on."""
    raw = table.raw.copy()
    chosen = (raw["rank"] == row) & (raw["kind"] == 1) & (raw["step"] >= table.steps[LEARN])
    raw["end"][chosen] = raw["start"][chosen] + (raw["end"][chosen] - raw["start"][chosen]) * factor
    return dataclasses.replace(table, raw=raw)


def main() -> int:
    """Runs everything and writes one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    even, uneven = (read(DATA / f"trace-{name}.parquet") for name in ("AR", "SE"))
    found = analyze(even, LEARN)
    result: dict[str, Any] = {
        "AR": {
            "verdicts": [[v.who, v.cause, v.answer, v.factors] for v in found.verdicts],
            "step_factor": found.step_factor,
            "step_factor_peers": found.step_factor_peers,
        }
    }
    clean = analyze(uneven, LEARN)
    hits, wrong, missed = 0, 0, []
    for row, label in enumerate(uneven.labels):
        verdicts = analyze(slowed(uneven, row, 1.01), LEARN).verdicts
        hit = any(v.rank == label and v.cause == "compute" for v in verdicts)
        hits += hit
        wrong += sum(v.rank != label for v in verdicts)
        if not hit:
            missed.append(label)
        print(f"\r{row + 1} of {len(uneven.labels)}", end="", file=sys.stderr)
    result["SE"] = {
        "verdicts": [v.who for v in clean.verdicts],
        "cause": clean.job,
        "covariate": clean.covariate,
        "one_percent_found": hits,
        "of": len(uneven.labels),
        "others_named": wrong,
        "missed_ranks": missed,
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
