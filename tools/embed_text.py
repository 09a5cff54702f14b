#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a C file that defines a text file's content as a constant array of char, ended by a 0.

Usage: embed_text.py NAME INPUT OUTPUT.  A string literal would be longer than C promises.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Entry point."""
    name, source, output = sys.argv[1:4]
    data = Path(source).read_bytes() + b"\0"
    rows = [", ".join(str(byte) for byte in data[at : at + 24]) for at in range(0, len(data), 24)]
    body = ",\n    ".join(rows)
    text = f"extern const char {name}[];\nconst char {name}[] = {{\n    {body}}};\n"
    Path(output).write_text(text, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
