# SPDX-License-Identifier: Apache-2.0
"""Every kind of job dies a few times for every change; `make kills` does it 100 times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "kill_matrix.py"


@pytest.mark.timeout(280)
def test_every_kind_of_job(tmp_path: Path) -> None:
    """Five jobs on CPU islands, two of them on emulated vendors; a second call has nothing left to do."""
    state = tmp_path / "kills.jsonl"
    command = [sys.executable, str(SCRIPT), "--kills", "7", "--seed", "3", "--state", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0 and done.stdout.endswith("7 of 7\n"), done.stdout + done.stderr
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    assert len({row["job"] for row in rows}) == 5, rows
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.stdout == "7 of 7\n", again.stdout + again.stderr
