#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums test results of several runners.

usage: count_tests.py FILE...     a Meson testlog.json or a JUnit .xml

Prints "PASSED FAILED SKIPPED" and exits 1 if a file is missing or holds no test: a runner that did not run is no
success.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MESON_PASSED = {"OK", "EXPECTEDFAIL"}


def count_meson(path: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a Meson test log, one JSON object per line."""
    results = [json.loads(line)["result"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    passed = sum(result in MESON_PASSED for result in results)
    skipped = sum(result == "SKIP" for result in results)
    return passed, len(results) - passed - skipped, skipped


def count_junit(path: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a JUnit file."""
    total = failed = skipped = 0
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def main() -> int:
    """Sums the named files; returns the exit code."""
    sums = [0, 0, 0]
    status = 0
    for name in sys.argv[1:]:
        path = Path(name)
        counts = (0, 0, 0)
        if path.exists():
            counts = count_junit(path) if path.suffix == ".xml" else count_meson(path)
        if sum(counts) == 0:
            print(f"{name}: no test ran", file=sys.stderr)
            status = 1
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
    print(*sums)
    return status


if __name__ == "__main__":
    sys.exit(main())
