#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums test results of several runners.

usage: count_tests.py FILE...             a Meson testlog.json or a JUnit .xml
       count_tests.py --failed FILE       names of the tests that failed, one per line, as their runner takes them

Prints "PASSED FAILED SKIPPED" and exits 1 if a file is missing or holds no test: a runner that did not run is no
success.  FILE+AGAIN stands for a run and the second run of its failed tests: a test that passed the second time
counts as passed and is named on stderr.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MESON_PASSED = {"OK", "EXPECTEDFAIL"}


def meson_results(path: Path) -> dict[str, str]:
    """Result by test name ("passed", "failed", "skipped") of a Meson test log, one JSON object per line."""
    results = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            test = json.loads(line)
            word = "passed" if test["result"] in MESON_PASSED else "skipped" if test["result"] == "SKIP" else "failed"
            results[test["name"]] = word
    return results


def junit_results(path: Path) -> dict[str, str]:
    """The same of a JUnit file."""
    results = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        inside = {child.tag for child in case}
        word = "failed" if inside & {"failure", "error"} else "skipped" if "skipped" in inside else "passed"
        results[f"{case.get('classname')}::{case.get('name')}"] = word
    return results


def results_of(name: str) -> dict[str, str]:
    """Results of FILE or FILE+AGAIN."""
    first, _, again = name.partition("+")
    results: dict[str, str] = {}
    for part in filter(None, (first, again)):
        path = Path(part)
        found = (junit_results if path.suffix == ".xml" else meson_results)(path) if path.exists() else {}
        for test, word in found.items():
            if word == "passed" and results.get(test) == "failed":
                print(f"passed only on the second run: {test}", file=sys.stderr)
            results[test] = word
    return results


def main() -> int:
    """Sums the named files; returns the exit code."""
    if sys.argv[1:2] == ["--failed"]:
        failed = [test for test, word in results_of(sys.argv[2]).items() if word == "failed"]
        print(*[test.rpartition(":")[2] for test in failed], sep="\n")  # "suite - project:test"
        return 0
    sums = {"passed": 0, "failed": 0, "skipped": 0}
    status = 0
    for name in sys.argv[1:]:
        results = results_of(name)
        if not results:
            print(f"{name}: no test ran", file=sys.stderr)
            status = 1
        for word in results.values():
            sums[word] += 1
    print(*sums.values())
    return status


if __name__ == "__main__":
    sys.exit(main())
