# SPDX-License-Identifier: Apache-2.0
"""A subset of the random cases; the whole run is `make conformance` (resumable)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "conformance.py"


def test_random_cases(tmp_path: Path) -> None:
    """Five chunks of 60 on five layouts, two of them emulated; a second call with the same state has nothing to do."""
    state = tmp_path / "state.json"
    sizes = ["--cases", "300", "--chunk", "60", "--seed", "3"]
    command = [sys.executable, str(PROGRAM), *sizes, "--emulated", "--state", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "300 cases, 0 wrong, 0 hung" in done.stdout, (
        done.stdout[-4000:] + done.stderr[-2000:]
    )
    assert sorted(json.loads(state.read_text())["chunks"]) == [0, 1, 2, 3, 4]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and again.stderr == "", again.stderr
