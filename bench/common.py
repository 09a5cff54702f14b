# SPDX-License-Identifier: Apache-2.0
"""What the benches of this folder share: the machine a result was made on, the example's model, the end of a job."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    """What a result needs to be read later."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def train_lm() -> Any:
    """examples/python/train_lm.py as a module: model and data come from there."""
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "python" / "train_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module
    spec.loader.exec_module(module)
    return module


def finish(processes: list[subprocess.Popen[str]], limit_s: float) -> str:
    """Waits for all ranks and returns what rank 0 printed, "" where its stdout is not a pipe; leaves no process behind.

    Raises SystemExit when a rank failed, TimeoutExpired after limit_s.
    """
    try:
        end = time.monotonic() + limit_s
        text = processes[0].communicate(timeout=limit_s)[0] or ""
        codes = [process.wait(max(1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        raise SystemExit(f"{Path(sys.argv[0]).stem}: a rank failed: exit codes {codes}")
    return text
