# SPDX-License-Identifier: Apache-2.0
"""Recorded jobs and mixed fleets: records, decomposition, work covariates, slow parts, passports (docs/fleet.md).

    table = read(Path("trace.parquet"))
    analysis = analyze(table)
    for verdict in analysis.verdicts: ...

Needs numpy; parquet files need pyarrow, plots matplotlib: pip install 'gpubridge[analyze]'.
"""

from gpubridge.fleet.native import Decomposer, Scan, Work, lottery, scan
from gpubridge.fleet.offline import Analysis, Verdict, analyze
from gpubridge.fleet.passport import Passports
from gpubridge.fleet.readers import read
from gpubridge.fleet.records import RecordError, Table

__all__ = [
    "Analysis",
    "Decomposer",
    "Passports",
    "RecordError",
    "Scan",
    "Table",
    "Verdict",
    "Work",
    "analyze",
    "lottery",
    "read",
    "scan",
]
