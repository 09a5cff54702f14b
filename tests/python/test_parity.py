# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that judge codecs by training: short runs, and that their verdicts can fail."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_summary_pairs_seeds_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    parity: Any = importlib.import_module("parity")

    def run(codec: str, seed: int, loss: float, sent: float) -> tuple[tuple[str, str, int], dict[str, Any]]:
        content = {"held_out_after": loss, "bridge_sent_bytes_per_step": sent, "equal_on_all_ranks": True}
        return ("ddp", codec, seed), content

    runs = dict(
        [
            run("none", 1, 2.0, 400),
            run("none", 2, 2.1, 400),
            run("none", 3, 2.2, 400),
            run("fp8", 1, 2.009, 104),
            run("fp8", 2, 2.0902, 104),
            run("int8", 1, 2.0, 104),
            run("int8", 2, 2.111, 104),
            run("mxfp4+ef", 3, 2.5, 56),
            run("bf16", 9, 1.0, 200),
        ]
    )
    rows = {row["codec"]: row for row in parity.summarize(runs)}
    assert set(rows) == {"fp8", "int8", "mxfp4+ef"}, "a codec without a float32 run of its seed has no row"
    assert rows["fp8"]["difference_percent"] == pytest.approx([0.45, -0.46667], abs=1e-4)
    assert rows["fp8"]["ok"] and rows["fp8"]["bytes_ratio"] == pytest.approx(0.26)
    assert rows["fp8"]["seed_spread_percent"] == pytest.approx(5.0)
    assert not rows["int8"]["ok"], "0.52 % on one seed"
    assert rows["mxfp4+ef"]["ok"] and rows["mxfp4+ef"]["limit_percent"] is None
    text = parity.table(list(rows.values()))
    assert "| above the limit |" in text and "| reported |" in text


def test_runs_are_kept_and_not_repeated(tmp_path: Path) -> None:
    short = ("--seeds", "1", "--steps", "3", "--eval-batches", "2", "--out", str(tmp_path))
    arguments = ("--modes", "ddp", "--codecs", "none,fp8", *short)
    done = bench("parity", *arguments)
    assert done.returncode in (0, 1), done.stderr
    runs = {codec: json.loads((tmp_path / f"ddp_{codec}_seed1_3.json").read_text()) for codec in ("none", "fp8")}
    for run in runs.values():
        assert run["equal_on_all_ranks"] and len(run["train_loss"]) == 3 and run["parameters"] > 1_000_000
        assert run["held_out_after"] < run["held_out_before"]
    assert runs["none"]["held_out_before"] == runs["fp8"]["held_out_before"], "the same model and the same text"
    ratio = runs["fp8"]["bridge_sent_bytes_per_step"] / runs["none"]["bridge_sent_bytes_per_step"]
    assert ratio <= 0.27
    again = bench("parity", *arguments)
    assert "held-out loss" in done.stdout and "held-out loss" not in again.stdout
    assert done.stdout.strip().splitlines()[-1] == again.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"), reason="needs root, ip and tc"
)
def test_training_over_a_slow_wire(tmp_path: Path) -> None:
    if subprocess.run(["ip", "netns", "list"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    out = tmp_path / "t.json"
    small = ("--width", "96", "--layers", "2", "--rounds", "1", "--steps", "2", "--ratios", "0.3", "--out", str(out))
    done = bench("train_netns", "--codecs", "none,fp8", *small)
    if "Operation not permitted" in done.stderr:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr
    row = json.loads(out.read_text())["results"][0]["codecs"]
    assert row["fp8"]["bridge_sent_bytes"] < 0.28 * row["none"]["bridge_sent_bytes"]
    assert row["none"]["step_s"] > 0 and row["none"]["speedup"] == 1
