# SPDX-License-Identifier: Apache-2.0
"""The main job and the demo's launcher from the outside: user errors are one line, checkpoints resume exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pool import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = str(ROOT / "examples" / "python" / "train_lm.py")
QUICK = ("--steps", "3", "--batch", "4", "--eval-batches", "1")


def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env.update(OMP_NUM_THREADS="1", GPUBRIDGE_EMULATE="", **extra)
    return subprocess.run([sys.executable, SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=200)


def run_side_by_side(*commands: tuple[str, ...]) -> list[subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda arguments: run(*arguments), commands))


def start_pair(*arguments: str, **extra: str) -> list[subprocess.Popen[str]]:
    port, found = str(free_port()), []
    for rank in range(2):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GPUBRIDGE_ISLAND="a,b", GPUBRIDGE_EMULATE="", **extra)
        pipe = subprocess.PIPE
        command = [sys.executable, "-u", SCRIPT, *arguments]
        found.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    return found


def assert_one_line(done: subprocess.CompletedProcess[str], word: str) -> None:
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and word in lines[0], done.stderr


def test_bad_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "bytes").write_bytes(b"\0" * 100000)
    words = {"missing": "no such file", "empty": "no text", "short.txt": "9 bytes", "bytes": "no text"}
    done = run_side_by_side(*(("--data", str(tmp_path / name), *QUICK) for name in words))
    for one, word in zip(done, words.values(), strict=True):
        assert_one_line(one, word)


def test_world_that_does_not_fit_is_one_line() -> None:
    done = run("--batch", "16", "--steps", "1", RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")
    assert_one_line(done, "multiple of 3")


def test_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    data = ("--data", str(ROOT / "examples" / "python"), "--dtype", "float64", "--batch", "4", "--eval-batches", "1")
    full, first, second = (tmp_path / f"{name}.json" for name in ("full", "first", "second"))
    checkpoint = str(tmp_path / "c.pt")
    whole = (*data, "--steps", "6", "--report", str(full))
    half = (*data, "--steps", "3", "--checkpoint", checkpoint, "--report", str(first))
    assert [done.returncode for done in run_side_by_side(whole, half)] == [0, 0]
    done = run(*data, "--steps", "6", "--checkpoint", checkpoint, "--resume", "--report", str(second))
    assert done.returncode == 0, done.stderr
    a, b, c = (json.loads(path.read_text()) for path in (full, first, second))
    assert b["losses"] + c["losses"] == a["losses"]
    assert c["ranks"][0]["sha256"] == a["ranks"][0]["sha256"]


def test_bad_checkpoints_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"nonsense")
    one, other = run_side_by_side(
        *((*QUICK, "--resume", "--checkpoint", str(path)) for path in (broken, tmp_path / "none.pt"))
    )
    assert_one_line(one, "not a checkpoint")
    assert_one_line(other, "no checkpoint")


@pytest.mark.parametrize("both", [True, False], ids=["both ranks", "one rank"])
def test_interrupt_saves_and_ends_cleanly(tmp_path: Path, both: bool) -> None:
    """Ctrl-C on all ranks or on one: every rank stops after the same step, the checkpoint is there, code 130."""
    checkpoint = tmp_path / "c.pt"
    ranks = start_pair("--steps", "100000", "--log-every", "1", "--batch", "4", "--checkpoint", str(checkpoint))
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("step 2/"):
                break
        for rank in ranks if both else ranks[1:]:
            rank.send_signal(signal.SIGINT)
        results = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [130, 130], results
    assert checkpoint.exists() and all("Traceback" not in err for _, err in results), results


def test_dead_peer_is_one_line_with_its_rank() -> None:
    ranks = start_pair("--steps", "100000", "--log-every", "1", "--batch", "4")
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("step 2/"):
                break
        ranks[1].kill()
        start = time.monotonic()
        _, err = ranks[0].communicate(timeout=60)
        assert time.monotonic() - start < 20
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode not in (0, None)
    mine = [line for line in err.splitlines() if line.startswith("train_lm")]
    assert len(mine) == 1 and "rank 1" in mine[0] and "Traceback" not in err, err


def test_demo_reports_a_failing_rank(tmp_path: Path) -> None:
    from gpubridge.demo.launch import JobError, run_job

    script = tmp_path / "x.py"
    script.write_text(
        "import os, sys\nif os.environ['RANK'] == '1': sys.exit('it went wrong')\nimport time; time.sleep(600)"
    )
    start = time.monotonic()
    with pytest.raises(JobError, match="rank 1 ended with code 1: it went wrong"):
        run_job([str(script)], 2, {}, print, 100)
    assert time.monotonic() - start < 60


def test_demo_evaluates_honestly() -> None:
    """Checks fail when they should: a difference of 1e-8, unequal parameters, a loss that did not fall."""
    from gpubridge.demo import evaluate
    from gpubridge.demo.page import render

    def job(offset: float, digest: str = "d", after: float = 2.0) -> dict[str, Any]:
        comm = {"bridge_sent_bytes": 400, "island_ns": 1, "bridge_ns": 2, "wait_ns": 3}
        rank = {"sha256": digest, "comm": comm}
        return {
            "losses": [5.0, 3.0 + offset],
            "step_s": [0.1, 0.1],
            "steps": 2,
            "held_out": {"before": 5.0, "after": after},
            "parameters": 1_000_000,
            "ranks": [dict(rank, sha256="d"), rank],
            "torch": "x",
            "describe": "",
        }

    def failed(**changes: Any) -> set[str]:
        runs = {"float64 bridged": job(**changes), "float64 single": job(0.0, after=changes.get("after", 2.0))}
        runs |= {"float32 bridged": job(0.0), "float32 single": job(1e-4)}
        content = evaluate(runs, "emulated vendors: test", 1.0)
        assert "emulated" in render(content)
        return {row["check"] for row in content["checks"] if row["ok"] is False}

    assert failed(offset=1e-10) == set()
    assert failed(offset=1e-8) == {"float64 loss, bridged against single process"}
    assert failed(offset=0.0, digest="e") == {"sha256 of all parameters on 4 ranks, float64"}
    assert failed(offset=0.0, after=4.0) == {"held-out loss"}
