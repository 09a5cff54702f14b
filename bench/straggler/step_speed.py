# SPDX-License-Identifier: Apache-2.0
"""One step of 16,384 ranks x 8 streams: the C engine, a read-modify-write of its bytes, and the same bank in NumPy.

    python bench/straggler/step_speed.py [--out FILE]

Compiles step_speed.c with -O2, runs it with and without peers, then times a NumPy version of the score and the bank (no
baseline, no statistics, no peers: less work than the engine does). Processor time of one thread; one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
STREAMS = 16384 * 8
DELTAS = (0.1, 0.2, 0.4, 1.0, 2.0, 4.0)
CLIPS = (2.0, 2.0, 2.0, 2.0, 4.0, 6.0)


def run_c(compiler: str, peers: int) -> dict[str, Any]:
    """Compiles and runs the C program."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "step_speed")
        sources = sorted(str(p) for p in (ROOT / "src/straggler").glob("*.c"))
        flags = ["-std=c17", "-O2", "-D_GNU_SOURCE", "-ffp-contract=off", f"-I{ROOT}/include", f"-I{ROOT}/src"]
        files = [*sources, str(ROOT / "src/base/err.c"), str(ROOT / "bench/straggler/step_speed.c")]
        subprocess.run([compiler, *flags, *files, "-lm", "-o", program], check=True)
        done = subprocess.run([program, str(peers)], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_numpy(steps: int = 40) -> float:
    """Median milliseconds of processor time of one step of score and bank over all streams."""
    rng = np.random.default_rng(1)
    up = np.zeros((6, STREAMS), np.float32)
    down, up_run, down_run = up.copy(), up.copy(), up.copy()
    level, centre = np.zeros(STREAMS), np.zeros(STREAMS, np.float32)
    inv_scale = np.full(STREAMS, 20.0, np.float32)
    inv_omega = np.full(STREAMS, 1.04, np.float32)
    times = []
    for _ in range(steps):
        seconds = 1.0 + 0.05 * rng.standard_normal(STREAMS)
        begun = time.process_time()
        z = (np.log(seconds) - level) * inv_scale
        alarm = np.zeros(STREAMS, bool)
        for j, (delta, clip) in enumerate(zip(DELTAS, CLIPS, strict=True)):
            v = (np.clip(z, -clip, clip) - centre) * inv_omega
            up[j] = np.maximum(0.0, up[j] + (v - delta / 2))
            down[j] = np.maximum(0.0, down[j] + (-v - delta / 2))
            up_run[j] = np.where(up[j] > 0.0, up_run[j] + 1.0, 0.0)
            down_run[j] = np.where(down[j] > 0.0, down_run[j] + 1.0, 0.0)
            alarm |= (up[j] > 200.0) | (down[j] > 200.0)
        times.append((time.process_time() - begun) * 1e3)
    return sorted(times)[len(times) // 2]


def main() -> int:
    """Prints the line, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compiler", default="gcc")
    args = parser.parse_args()
    cpu = next(
        (x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    result = {
        "tool": "step_speed",
        "cpu": cpu,
        "kernel": platform.release(),
        "numpy": np.__version__,
        "compiler": args.compiler,
        "with_peers": run_c(args.compiler, 0),
        "own_history": run_c(args.compiler, -1),
        "numpy_bank_ms_p50": round(run_numpy(), 3),
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
