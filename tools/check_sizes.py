#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the size limits: files at most 900 lines, functions at most 80, and prints medians.

Functions in C are found by the brace style that clang-format enforces (a body's braces stand alone in the first
column); in Python by the parser.  Exits 1 if a limit is broken.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 900
FUNCTION_LINES = 80


def c_functions(lines: list[str]) -> list[tuple[str, int, int]]:
    """(signature, line number, length in lines) of every function body in a C file."""
    found = []
    start = None
    for number, line in enumerate(lines, 1):
        if line == "{":
            start = number
        elif line.startswith("}") and start is not None:
            first = start - 1
            while first > 1 and lines[first - 2].strip() and not lines[first - 2].rstrip().endswith((";", "}", "*/")):
                first -= 1
            if not lines[first - 1].startswith(("#", "struct {", "enum {")):
                found.append((lines[first - 1].strip(), first, number - first + 1))
            start = None
    return found


def python_functions(text: str) -> list[tuple[str, int, int]]:
    """(name, line number, length in lines) of every function in a Python file."""
    return [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def report(label: str, sizes: list[int]) -> str:
    """One line: count, median, 90th percentile and largest of `sizes`."""
    if not sizes:
        return f"sizes: {label}: none"
    ordered = sorted(sizes)
    p90 = ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]
    return (
        f"sizes: {label}: {len(sizes)}, median {statistics.median(sizes):.0f}, p90 {p90}, largest {ordered[-1]} lines"
    )


def main() -> int:
    """Checks all tracked source files; returns the exit code."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    broken = 0
    sizes: dict[str, list[int]] = {"C files": [], "C functions": [], "Python files": [], "Python functions": []}
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        kind = {".c": "C", ".h": "C", ".py": "Python"}.get(path.suffix)
        if kind is None or not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        sizes[f"{kind} files"].append(len(lines))
        if len(lines) > FILE_LINES:
            broken += 1
            print(f"{name}: {len(lines)} lines, at most {FILE_LINES}")
        for what, number, length in c_functions(lines) if kind == "C" else python_functions(text):
            sizes[f"{kind} functions"].append(length)
            if length > FUNCTION_LINES:
                broken += 1
                print(f"{name}:{number}: {length} lines, at most {FUNCTION_LINES}: {what}")
    for label, values in sizes.items():
        print(report(label, values))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
