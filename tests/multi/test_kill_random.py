# SPDX-License-Identifier: Apache-2.0
"""A few runs of kill_random.py for every change; `make kills` does 20 of the first kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "kill_random.py"


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--runs", "1", "--seed", "11", "--emulate", "cuda,cuda,hip,hip"],
        ["--runs", "1", "--seed", "12", "--islands", "a,a,b,b"],
        ["--runs", "1", "--seed", "13", "--islands", "a,b,a,b", "--torchrun"],
    ],
    ids=["emulated", "cpu-islands", "torchrun"],
)
def test_survivors_name_the_dead_rank(arguments: list[str]) -> None:
    """Every survivor raises in time and names the victim; nothing is left behind."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stdout + done.stderr
