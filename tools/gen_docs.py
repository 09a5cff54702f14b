#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/settings.md and docs/operations.md from the tables of the built library.

usage: gen_docs.py [--check] [BUILD_DIR]     (default build directory: build)

With --check nothing is written; exits 1 if a file on disk differs from what would be.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Settings

<!-- Generated from src/base/config.c by tools/gen_docs.py; edit the table there. -->

Every setting is an environment variable. In the C API the same names go into the `settings` text of a context or of
one comm, one `NAME=value` per line; in Python they are fields of the process group's options. What the caller passes
wins over the environment, and an empty value means the default.

* A value that is not legal raises `GPUBRIDGE_ERR_SETTING` and names the variable, the value and what is legal. An
  unknown `GPUBRIDGE_` name in the environment is a warning with the nearest known name.
* *scope*: `process` settings hold for everything a process does; `group` settings may differ from group to group.
* *agreed*: must be equal on all ranks of a group; they are compared when the group is made, and a difference raises on
  every rank and names the setting.
* Sizes take the suffixes K, M and G (powers of 1,024). *by rank*: a comma list gives one value per local rank.
"""


OPERATIONS_HEAD = """# Reduce operations by type

<!-- Generated from src/codec/reduce.c by tools/gen_docs.py; edit the table there. -->

What is not marked raises `GPUBRIDGE_ERR_UNSUPPORTED` on the rank that asked, and nothing is sent. Types without any
mark are moved by every collective that does not reduce. Sums are made in the accumulator, in one fixed order, and
rounded once to the type (to nearest, ties to even); integers wrap modulo their size; AVG of integers truncates toward
zero.
For bool, SUM, MAX and BOR are *or*, PRODUCT, MIN and BAND are *and*, BXOR is *exclusive or*. MIN and MAX propagate NaN.
Sizes are in bytes; a complex number has one accumulator for each part.
"""


def table_rows(build: Path, table: str) -> list[list[str]]:
    """The rows that the built `doc-tables` program prints, split into fields."""
    program = build / "tools" / "doc-tables"
    if not program.exists():
        sys.exit(f"{program} does not exist: run `make build` first")
    text = subprocess.run([str(program), table], check=True, capture_output=True, text=True).stdout
    return [line.split("\t") for line in text.splitlines()]


def values(kind: str, built: int, per_rank: bool) -> str:
    """The legal values of one row, as Markdown; words this version lacks are named as such."""
    if " | " in kind:
        words = kind.split(" | ")
        ready = words[:built] if built else words
        text = " / ".join(f"`{word}`" for word in ready)
        if built and words[built:]:
            text += "; not in this version: " + ", ".join(words[built:])
    else:
        text = kind
    return text + ("; by rank" if per_rank else "")


def render_settings(rows: list[list[str]]) -> str:
    """docs/settings.md: one section per setting."""
    lines = [HEAD]
    for name, kind, default, scope, agreed, per_rank, built, text in rows:
        lines.append(f"## `{name}`\n")
        lines.append(textwrap.fill(text, 118, break_on_hyphens=False) + "\n")
        shown = f"`{default}`" if default else "unset"
        marks = f"scope {scope}" + (", agreed" if agreed == "1" else "")
        lines.append(f"* values: {values(kind, int(built), per_rank == '1')}\n* default: {shown}\n* {marks}\n")
    return "\n".join(lines)


def render_operations(rows: list[list[str]]) -> str:
    """docs/operations.md: which reduce op exists for which dtype."""
    head, *body = rows
    lines = [OPERATIONS_HEAD, "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, size, accumulator, *flags in body:
        marks = ["yes" if flag == "1" else "" for flag in flags]
        lines.append("| " + " | ".join([f"`{name}`", size, accumulator, *marks]) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks the files; returns the exit code."""
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    build = Path(arguments[0]) if arguments else ROOT / "build"
    status = 0
    for name, render in {"settings": render_settings, "operations": render_operations}.items():
        target = ROOT / "docs" / f"{name}.md"
        text = render(table_rows(build, name))
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            print(f"{target.relative_to(ROOT)} is out of date: run `make docs`")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
