#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes python/gpubridge/_abi.py from include/gpubridge/gpubridge.h.

Not a C parser: it reads the restricted style of our own public header (one declaration per statement, enums and structs
with names, fixed-width types, no bit fields, no unions, at most one function pointer per prototype) and stops with the
line it does not understand rather than guess.

Usage: gen_ctypes.py [HEADER] [-o OUTPUT | --check OUTPUT]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "gpubridge" / "gpubridge.h"
OUTPUT = ROOT / "python" / "gpubridge" / "_abi.py"

SCALARS = {
    "int": "c_int",
    "int8_t": "c_int8",
    "uint8_t": "c_uint8",
    "int16_t": "c_int16",
    "uint16_t": "c_uint16",
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
    "size_t": "c_size_t",
    "double": "c_double",
    "float": "c_float",
}
# Short forms of the prefix that are dropped from enum names: GPUBRIDGE_ERR_INVALID -> ERR_INVALID.
PREFIX = "GPUBRIDGE_"


class HeaderError(Exception):
    """The header uses a construct outside the style this reader knows."""


def strip(text: str) -> str:
    """Removes comments, preprocessor lines and the C++ guard; joins continued lines."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = text.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines)
    text = text.replace('extern "C" {', "")
    return re.sub(r"\bGPUBRIDGE_(API|CHECKED)\b", "", text)


def defines(text: str) -> list[tuple[str, int]]:
    """Integer #define lines in order: (name without prefix, value)."""
    found = re.findall(r"^#define\s+" + PREFIX + r"(\w+)\s+(-?\d+)\s*(?:/\*.*)?$", text, flags=re.M)
    return [(name, int(value)) for name, value in found]


def statements(text: str) -> list[str]:
    """Splits at the semicolons that are not inside braces."""
    out: list[str] = []
    depth = 0
    current: list[str] = []
    for char in text:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth < 0:  # the closing brace of extern "C"
            depth = 0
            continue
        if char == ";" and depth == 0:
            out.append(" ".join("".join(current).split()))
            current = []
        else:
            current.append(char)
    return [s for s in out if s]


def enum_values(body: str) -> list[tuple[str, int]]:
    values: list[tuple[str, int]] = []
    following = 0
    for item in filter(None, (part.strip() for part in body.split(","))):
        match = re.fullmatch(PREFIX + r"(\w+)(?:\s*=\s*(-?\d+))?", item)
        if not match:
            raise HeaderError(f"enum item {item!r}")
        if match[2] is not None:
            following = int(match[2])
        values.append((match[1], following))
        following += 1
    return values


def declarator(text: str) -> tuple[str, str, int]:
    """'const uint64_t *counts' -> ('uint64_t', 'counts', 1); array brackets are not supported."""
    match = re.fullmatch(r"((?:const |struct |enum )*)(\w+)((?:\s*\*\s*(?:const)?\s*)*)\s*(\w+)?", text.strip())
    if not match:
        raise HeaderError(f"declaration {text!r}")
    return match[2], match[4] or "", match[3].count("*")


class Writer:
    """Turns statements into the text of the module."""

    def __init__(self) -> None:
        self.structs: set[str] = set()
        self.handles: set[str] = set()
        self.enums: list[str] = []
        self.struct_text: list[str] = []
        self.functions: list[str] = []

    def type_of(self, base: str, stars: int) -> str:
        """The ctypes expression of a C type; opaque handles and data pointers are plain c_void_p."""
        if stars == 0:
            if base in SCALARS:
                return SCALARS[base]
            raise HeaderError(f"type {base!r} by value")
        if base == "char" and stars == 1:
            return "c_char_p"
        if base in ("void", *self.handles) and stars == 1:
            return "c_void_p"
        if base == "char":
            inner = "c_char_p"
        elif base in ("void", *self.handles):
            inner = "c_void_p"
        elif base in self.structs and stars == 1:
            return f"POINTER({class_name(base)})"
        elif base in SCALARS:
            inner = SCALARS[base]
            stars += 1
        else:
            raise HeaderError(f"pointer to {base!r}")
        return f"POINTER({inner})"

    def parameter(self, text: str) -> str:
        callback = re.fullmatch(r"void \(\*(\w+)\)\((.*)\)", text)
        if callback:
            args = ", ".join(self.parameter(p) for p in split_parameters(callback[2]))
            return f"CFUNCTYPE(None, {args})"
        base, _, stars = declarator(text)
        return self.type_of(base, stars)

    def add(self, statement: str) -> None:
        if match := re.fullmatch(r"enum (\w+) \{(.*)\}", statement):
            self.enums.append(f"# enum {match[1]}")
            self.enums += [f"{name} = {value}" for name, value in enum_values(match[2])]
            self.enums.append("")
        elif match := re.fullmatch(r"typedef struct (\w+) \1", statement):
            self.handles.add(match[1])
        elif match := re.fullmatch(r"struct (\w+) \{(.*)\}", statement):
            self.add_struct(match[1], match[2])
        elif match := re.fullmatch(r"((?:const )?\w+ ?\**) ?gpubridge_(\w+)\((.*)\)", statement):
            self.add_function(match[1], match[2], match[3])
        else:
            raise HeaderError(f"statement {statement!r}")

    def add_struct(self, name: str, body: str) -> None:
        fields: list[str] = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            first, *others = [part.strip() for part in line.split(",")]
            base, field, stars = declarator(first)
            # Pointers inside structs are addresses: assigning an int is the cheapest thing ctypes can do.
            kind = ("c_char_p" if base == "char" else "c_void_p") if stars else self.type_of(base, 0)
            fields += [f'        ("{n}", {kind}),' for n in [field, *others]]
        self.structs.add(name)
        self.struct_text += [
            f"class {class_name(name)}(Structure):",
            f'    """struct {name}"""',
            "",
            "    _fields_ = [",
            *fields,
            "    ]",
            "",
            "",
        ]

    def add_function(self, result: str, name: str, parameters: str) -> None:
        result = result.strip()
        if result == "void":
            restype = "None"
        else:
            base, _, stars = declarator(result + " r" if result.endswith("*") else result)
            restype = self.type_of(base, stars)
        args = [] if parameters.strip() == "void" else [self.parameter(p) for p in split_parameters(parameters)]
        self.functions.append(f'    ("{name}", {restype}, ({", ".join(args)}{"," if len(args) == 1 else ""})),')


def split_parameters(text: str) -> list[str]:
    out, depth, current = [], 0, ""
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += char
    return [re.sub(r"\s+", " ", p) for p in [*out, current.strip()] if p]


def class_name(c_name: str) -> str:
    """gpubridge_comm_config -> CommConfig"""
    return "".join(part.capitalize() for part in c_name.removeprefix("gpubridge_").split("_"))


def generate(header: str) -> str:
    """The text of _abi.py for the text of a header."""
    writer = Writer()
    for statement in statements(strip(header)):
        writer.add(statement)
    names = sorted(
        set(re.findall(r"\b(?:c_\w+|POINTER|CFUNCTYPE)\b", "\n".join(writer.struct_text + writer.functions)))
    )
    constants = [f"{name} = {value}" for name, value in defines(header)]
    return "\n".join(
        [
            "# SPDX-License-Identifier: Apache-2.0",
            '"""The C interface as ctypes.  Generated by tools/gen_ctypes.py: edit gpubridge.h instead."""',
            "",
            "from __future__ import annotations",
            "",
            "from ctypes import (",
            *[f"    {name}," for name in sorted([*names, "Structure"], key=str.lower)],
            ")",
            "from typing import Any",
            "",
            "# macros",
            *constants,
            "",
            *writer.enums,
            "",
            *writer.struct_text,
            "# (name without prefix, result, parameters)",
            "FUNCTIONS: list[tuple[str, Any, tuple[Any, ...]]] = [",
            *writer.functions,
            "]",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="generate the ctypes module from the public header")
    parser.add_argument("header", nargs="?", type=Path, default=HEADER)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("--check", action="store_true", help="compare with the output file instead of writing it")
    args = parser.parse_args()
    try:
        text = generate(args.header.read_text())
    except HeaderError as error:
        print(
            f"{args.header}: cannot read {error}; keep to the style of the header or extend gen_ctypes.py",
            file=sys.stderr,
        )
        return 1
    if args.check:
        if args.output.read_text() != text:
            print(f"{args.output} is stale: run tools/gen_ctypes.py", file=sys.stderr)
            return 1
        return 0
    args.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
