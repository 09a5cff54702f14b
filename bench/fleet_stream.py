#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A simulated recording through a pipe: into `gpubridge analyze -`, and into a reader that does nothing, to compare.

usage: fleet_stream.py [--ranks N] [--steps N] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from gpubridge.cli import main; main()"]


def through(ranks: int, steps: int, *reader: str) -> dict[str, Any]:
    """One pass; seconds of the clock, and of the processor in reader and writer."""
    write = ["simulate", "--stream", "--ranks", str(ranks), "--steps", str(steps), "--fault", f"5:0.02:{steps // 2}"]
    begin = time.monotonic()
    with subprocess.Popen([*COMMAND, *write], stdout=subprocess.PIPE) as writer:
        with subprocess.Popen([*COMMAND, "analyze", "-", *reader], stdin=writer.stdout, stdout=subprocess.PIPE) as done:
            assert writer.stdout and done.stdout
            writer.stdout.close()
            text = done.stdout.read().decode()
            _, status, used = os.wait4(done.pid, 0)
            done.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - begin
    if writer.returncode or done.returncode:
        raise SystemExit(f"the writer ended with {writer.returncode}, the reader with {done.returncode}")
    lines = text.splitlines()
    return {
        "seconds": round(seconds, 2),
        "reader_cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "reader_peak_mib": round(used.ru_maxrss / 1024),
        "verdicts": [line for line in lines if line.startswith("step ")][:8],
        "last_line": lines[-1] if lines else "",
    }


def main() -> int:
    """Both passes, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    result = {"ranks": args.ranks, "steps": args.steps, "cores": os.cpu_count()}
    result["analyze"] = through(args.ranks, args.steps)
    result["read_only"] = through(args.ranks, args.steps, "--read-only")
    text = json.dumps(result, indent=1) + "\n"
    if args.output:
        args.output.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
