#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/man/gpubridge.3 from include/gpubridge/gpubridge.h: every declaration with its comments.

A comment belongs to the statement that follows it, or to the one before it on the same line.  A comment of the form
`---- words ----` starts a section.  Like gen_ctypes.py it reads the restricted style of that header only.

usage: gen_man.py [--check]      (--check: nothing is written; exits 1 when the page on disk is stale)
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include" / "gpubridge" / "gpubridge.h"
OUTPUT = ROOT / "docs" / "man" / "gpubridge.3"
WIDTH = 76

BEFORE = r"""
.SH NAME
gpubridge \- collectives over groups whose ranks sit on GPUs of different vendors, or on CPUs
.SH SYNOPSIS
.nf
.B #include <gpubridge/gpubridge.h>
.PP
.B cc program.c $(pkg\-config \-\-cflags \-\-libs gpubridge)
.fi
"""

AFTER = r"""
.SH RETURN VALUE
Functions that return
.B int
give
.B GPUBRIDGE_OK
(0) or a negative
.BR "enum gpubridge_status" ;
.BR gpubridge_last_error ()
then says who failed, at what, and what to do next, for the calling thread.
.B GPUBRIDGE_AGAIN
is no failure: call again.
.SH ENVIRONMENT
Every setting is an environment variable named
.BR GPUBRIDGE_... ;
.BR gpubridge_setting_info ()
lists them with type, default and help, and
.I docs/settings.md
is generated from the same table.
What a config struct passes wins over the environment.
.SH EXAMPLES
.I examples/c/all_reduce.c
makes one group over two islands; the members exchange their hellos through files or through
.BR MPI_Allgather (3),
and check the sum they get.
The heart of it:
.PP
.in +4n
.EX
struct gpubridge_context_config config = {.struct_size = sizeof config,
    .global_rank = rank, .local_rank = rank,
    .secret = secret, .secret_bytes = sizeof secret};
if (gpubridge_context_create(&config, &context)) fail();
struct gpubridge_comm_config world = {.struct_size = sizeof world,
    .name = "world", .rank = rank, .size = size};
size_t bytes = sizeof mine;
if (gpubridge_comm_hello(context, &world, mine, &bytes)) fail();
/* exchange: hellos[i] and hello_bytes[i] of every member, in rank order */
if (gpubridge_comm_create(context, &world, hellos, hello_bytes, &comm)) fail();
if (gpubridge_all_reduce(comm, x, x, count, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL)) fail();
gpubridge_comm_destroy(comm);
gpubridge_context_destroy(context);
.EE
.in
.SH SEE ALSO
.BR pkg\-config (1),
.BR mpirun (1)
"""


class HeaderError(Exception):
    """The header uses a construct outside the style this reader knows."""


@dataclass
class Item:
    """A comment, or a statement with the comment that follows it on its line."""

    kind: str  # "comment" or "code"
    text: str
    after: str = ""


def plain(comment: str) -> str:
    """The words of a comment, without stars; empty lines part paragraphs."""
    lines = comment.removeprefix("/*").removesuffix("*/").split("\n")
    lines = [re.sub(r"^\s*\*? ?", "", line).rstrip() for line in lines]
    return "\n".join(lines).strip()


def end_of_code(text: str, at: int, ends: str) -> int:
    """Index behind the character of `ends` that closes the statement at `at`, outside braces, brackets and comments."""
    depth = 0
    while at < len(text):
        if text.startswith("/*", at):
            at = text.index("*/", at) + 2
            continue
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(text[at], 0)
        at += 1
        if text[at - 1] in ends and depth == 0:
            return at
    return at


def items(text: str, ends: str = ";") -> Iterator[Item]:
    """Comments and statements in order."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text.startswith("/*", at):
            end = text.index("*/", at) + 2
            yield Item("comment", plain(text[at:end]))
            at = end
        else:
            end = text.index("\n", at) if text[at] == "#" else end_of_code(text, at, ends)
            code = text[at:end]
            trailing = re.compile(r"[ \t]*(/\*.*?\*/)", re.S).match(text, end)
            if "/*" in code and text[at] == "#":
                code, _, rest = code.partition("/*")
                trailing = None
                yield Item("code", code.strip(), plain("/*" + rest))
            else:
                yield Item("code", code.strip(), plain(trailing[1]) if trailing else "")
            at = trailing.end() if trailing else end


def escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def paragraph(text: str) -> list[str]:
    """Words as running text."""
    out: list[str] = []
    for part in re.split(r"\n\s*\n", text):
        for line in part.split("\n"):
            line = re.sub(r"\*(\w+)\*", r"\\fI\1\\fR", escaped(line.strip()))
            if line:
                out.append("\\&" + line if line[0] in ".'" else line)
        out.append(".PP")
    return out[:-1]


def prototype(code: str) -> list[str]:
    """A declaration in bold, as written, wrapped behind its opening parenthesis."""
    code = " ".join(re.sub(r"\bGPUBRIDGE_(API|CHECKED)\b", "", code).split())
    indent = " " * (code.find("(") + 1 if 0 < code.find("(") < 40 else 4)
    lines = textwrap.wrap(code, WIDTH, subsequent_indent=indent, break_long_words=False)
    return [".PP", ".nf", *[f"\\fB{escaped(line)}\\fR" for line in lines], ".fi"]


def members(body: str, ends: str) -> list[str]:
    """The items of an enum or struct as a list of terms."""
    out: list[str] = []
    number = 0
    for item in items(body, ends):
        if item.kind == "comment":
            out += [".PP", *paragraph(f"({item.text})")]
            continue
        name, _, last = item.text.rstrip(ends).partition("/*")  # the last item of an enum has no comma
        name, item.after = name.strip(), item.after or plain("/*" + last)
        if ends == ",":
            value = re.fullmatch(r"(\w+)(?: = (-?\d+))?", name)
            if not value:
                raise HeaderError(name)
            number = int(value[2]) if value[2] else number
            name = f"{value[1]} = {number}"
            number += 1
        out += [".TP", f"\\fB{escaped(' '.join(name.split()))}\\fR", *(paragraph(item.after) or ["\\&"])]
    return out


def declaration(item: Item, before: str) -> list[str]:
    """One statement with its comments."""
    code = item.text
    if code.startswith("#"):
        match = re.fullmatch(r"#define (GPUBRIDGE_[A-Z_]+)\s+(\d+)", code)
        if not match or match[1] in ("GPUBRIDGE_API", "GPUBRIDGE_CHECKED"):
            return []
        return [*prototype(f"#define {match[1]} {match[2]}"), *told(before, item.after)]
    if match := re.fullmatch(r"(enum|struct) (\w+) \{(.*)\};", code, re.S):
        body = members(match[3].strip() + "\n", "," if match[1] == "enum" else ";")
        return [f".SS {match[1]} {match[2]}", *paragraph("\n\n".join(filter(None, (before, item.after)))), *body]
    if re.fullmatch(r"typedef struct (\w+) \1;", code):
        return prototype(code)
    if "gpubridge_" in code and code.endswith(");"):
        return [*prototype(code), *told(before, item.after)]
    raise HeaderError(code)


def told(before: str, after: str) -> list[str]:
    text = "\n\n".join(filter(None, (before, after)))
    return [".RS 4", *paragraph(text), ".RE"] if text else []


def page(header: str, version: str) -> str:
    """The whole manual page."""
    top, _, rest = header.partition("*/")
    guard = r"(?s)#ifdef __cplusplus\n.*?#endif\n"
    code = re.sub(guard, "", rest)
    code = re.sub(r"#(include|ifndef|endif|define GPUBRIDGE_H\b|define GPUBRIDGE_(API|CHECKED)).*\n?", "", code)
    words = plain(top).partition("\n\n")[2].partition("\n\n")[2]  # behind the licence line and the summary
    out = [
        '.\\" SPDX-License-Identifier: Apache-2.0',
        '.\\" Generated by tools/gen_man.py from include/gpubridge/gpubridge.h: edit the header instead.',
        f'.TH GPUBRIDGE 3 "" "gpubridge {version}" "Library functions"',
        BEFORE.strip(),
        ".SH DESCRIPTION",
        *paragraph(words),
        ".SH STATUSES, TYPES AND OPERATIONS",
    ]
    before = ""
    for item in items(code):
        if item.kind == "comment":
            section = re.fullmatch(r"-+ (.*?) -+", item.text)
            if section:
                out.append(f".SH {section[1].upper()}")
            before = "" if section else item.text
            continue
        out += declaration(item, before)
        before = ""
    return "\n".join([*out, AFTER.strip(), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description="generate the manual page of the C interface")
    parser.add_argument("--check", action="store_true", help="compare with the page on disk instead of writing it")
    options = parser.parse_args()
    found = re.search(r"version: '([0-9.]+)'", (ROOT / "meson.build").read_text())
    try:
        text = page(HEADER.read_text(), found[1] if found else "")
    except HeaderError as error:
        print(f"{HEADER}: cannot read {error}; keep to the style of the header or extend gen_man.py", file=sys.stderr)
        return 1
    if not options.check:
        OUTPUT.write_text(text)
    elif not OUTPUT.exists() or OUTPUT.read_text() != text:
        print(f"{OUTPUT} is stale: run tools/gen_man.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
