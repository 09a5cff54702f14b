# SPDX-License-Identifier: Apache-2.0
"""`gpubridge doctor --device` on emulated models: what it finds, what it says when something fails, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpubridge._native as native
import pytest

COMMAND = [sys.executable, "-c", "from gpubridge.cli import main; main()", "doctor", "--device"]
CHECKS = ["driver", "copies", "shared", "events", "flags", "compiler", "values", "messages", "poison", "collectives"]


def doctor(out: Path, **extra: str) -> tuple[int, dict[str, Any], str]:
    env = dict(os.environ, **extra)
    done = subprocess.run([*COMMAND, "--out", str(out)], env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def failed(report: dict[str, Any]) -> list[str]:
    return [row["check"] for row in report["checks"] if not row["ok"]]


@pytest.mark.parametrize(
    ("vendor", "model", "arch"),
    [
        ("cuda", "V100", "sm_70"),
        ("cuda", "A100", "sm_80"),
        ("cuda", "H200", "sm_90"),
        ("hip", "MI50", "gfx906:sramecc+:xnack-"),
        ("hip", "MI210", "gfx90a:sramecc+:xnack-"),
        ("hip", "MI300X", "gfx942:sramecc+:xnack-"),
    ],
)
def test_models(tmp_path: Path, vendor: str, model: str, arch: str) -> None:
    extra = {"GPUBRIDGE_EMULATE": vendor, "GBEMU_PROFILE": model}
    if model == "MI50":  # ROCm 5 exports less
        here = Path(native.find_library()).resolve().parent
        library = next(
            (p for p in (here / "libgbemu_hip5.so", here.parent / "emu/libgbemu_hip5.so") if p.exists()), None
        )
        if library is None:
            pytest.skip("the ROCm 5 emulator is a test's and not installed")
        extra |= {"GPUBRIDGE_HIP_LIB": str(library), "GPUBRIDGE_RCCL_LIB": str(library)}
    code, report, text = doctor(tmp_path / "report.json", **extra)
    assert code == 0 and failed(report) == [], text
    assert [row["check"] for row in report["checks"]] == CHECKS
    assert report["device"]["arch"] == arch and report["device"]["emulated"] and model in report["device"]["name"]
    assert report["machine"]["python"] == sys.version.split()[0]
    values = next(row for row in report["checks"] if row["check"] == "values")
    assert "equal to the host's bit for bit" in values["found"]


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("hiprtcCompileProgram:0:6", ["compiler", "values", "messages", "poison"]),
        ("ncclGetUniqueId:0:3", ["collectives"]),
        ("hipMemcpyAsync:1:1", ["copies"]),
        ("hipInit:0:100", CHECKS),
    ],
)
def test_failures_are_told_apart(tmp_path: Path, fault: str, broken: list[str]) -> None:
    code, report, text = doctor(tmp_path / "report.json", GPUBRIDGE_EMULATE="hip", GBEMU_FAIL=fault)
    assert code == 1 and failed(report) == broken, text
    assert report["failed"] == len(broken)
    assert all(row["without"] for row in report["checks"] if not row["ok"])


def test_a_missing_library_is_a_report_too(tmp_path: Path) -> None:
    code, report, text = doctor(
        tmp_path / "report.json", GPUBRIDGE_EMULATE="none", GPUBRIDGE_CUDA_LIB="/nowhere/libcuda.so.1"
    )
    assert code == 1 and failed(report) == CHECKS, text
    assert "/nowhere/libcuda.so.1" in report["checks"][0]["found"] and "device" not in report
