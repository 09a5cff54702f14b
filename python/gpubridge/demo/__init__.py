# SPDX-License-Identifier: Apache-2.0
"""The demo: 2 emulated CUDA ranks and 2 emulated HIP ranks train one model across the bridge, then one process does.

Both follow the same global batches, so the losses must agree: to 1e-9 in float64, to rounding in float32.  Writes
report.json and index.html into a folder, prints a table, and returns an exit code.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from gpubridge import __version__
from gpubridge.demo.launch import JobError, run_job
from gpubridge.demo.page import render

RANKS = 4
FLOAT64_BOUND = 1e-9
HELD_OUT_DROP = 0.30
MIN_PARAMETERS = 1_000_000
LIMIT_S = 600.0


def training_script() -> Path:
    """train_lm.py: the copy installed with the package, or the one of the source tree."""
    here = Path(__file__).resolve().parent.parent
    for path in (here / "_examples" / "train_lm.py", here.parent.parent / "examples" / "python" / "train_lm.py"):
        if path.exists():
            return path
    raise JobError("train_lm.py was not found beside the package nor in the source tree; reinstall gpubridge")


def layout(vendors: str) -> tuple[str, dict[str, str]]:
    """(words for the report, environment of the bridged ranks) for "cuda,cuda,hip,hip" or, without vendors, "cpu"."""
    if vendors == "cpu":
        return "two islands of CPU ranks, TCP", {
            "GPUBRIDGE_ISLAND": "a,a,b,b",
            "GPUBRIDGE_TRANSPORT": "tcp",
            "GPUBRIDGE_EMULATE": "",
        }
    return f"emulated vendors: {vendors}", {"GPUBRIDGE_EMULATE": vendors}


def run_demo(out: Path, vendors: str, steps: int, data: Path | None) -> int:
    """Runs the four jobs and reports; returns 0 when every check holds.

    Args:
        out: folder of the report, made if needed.
        vendors: one word per rank for GPUBRIDGE_EMULATE, or "cpu".
        steps: optimizer steps of each job.
        data: text file or folder; None: the standard library's sources.
    """
    out.mkdir(parents=True, exist_ok=True)
    what, extra = layout(vendors)
    start = time.monotonic()
    runs: dict[str, dict[str, Any]] = {}
    try:
        for dtype in ("float64", "float32"):
            for name, size in (("bridged", RANKS), ("single", 1)):
                title = f"{dtype} {name}"
                print(f"== {title}: {size} rank(s)" + (f", {what}" if size > 1 else ""), flush=True)
                runs[title] = _one_run(out, dtype, size, steps, data, extra if size > 1 else {"GPUBRIDGE_EMULATE": ""})
    except JobError as error:
        print(f"demo: {error}", flush=True)
        return 1
    content = evaluate(runs, what, time.monotonic() - start)
    (out / "report.json").write_text(json.dumps(content, indent=1))
    (out / "index.html").write_text(render(content))
    return _conclude(content, out)


def _one_run(out: Path, dtype: str, size: int, steps: int, data: Path | None, extra: dict[str, str]) -> dict[str, Any]:
    path = out / f"run-{dtype}-{size}.json"
    command = [
        str(training_script()),
        "--dtype",
        dtype,
        "--steps",
        str(steps),
        "--report",
        str(path),
        "--device",
        "cpu",
    ]
    if data is not None:
        command += ["--data", str(data)]
    package = str(Path(__file__).resolve().parent.parent.parent)
    python_path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**extra, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
    run_job(command, size, env, lambda line: print("   " + line, flush=True), LIMIT_S)
    run: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return run


def evaluate(runs: dict[str, dict[str, Any]], what: str, seconds: float) -> dict[str, Any]:
    """Compares the runs; the content of report.json."""
    differences = {}
    for dtype in ("float64", "float32"):
        bridged, single = runs[f"{dtype} bridged"], runs[f"{dtype} single"]
        differences[dtype] = [abs(a - b) for a, b in zip(bridged["losses"], single["losses"], strict=True)]
    bridged = runs["float64 bridged"]
    held = bridged["held_out"]
    drop = 1 - held["after"] / held["before"]
    digests = {kind: {rank["sha256"] for rank in runs[f"{kind} bridged"]["ranks"]} for kind in differences}
    held_difference = abs(held["after"] - runs["float64 single"]["held_out"]["after"])
    float64 = max(*differences["float64"], held_difference)
    wire = {kind: _wire_bytes(runs[f"{kind} bridged"]) for kind in differences}
    checks = [
        _check(
            "float64 loss, bridged against single process",
            f"{float64:.1e}",
            f"<= {FLOAT64_BOUND:g}",
            float64 <= FLOAT64_BOUND,
        ),
        _check("float32 loss, bridged against single process", f"{max(differences['float32']):.1e}", "printed", None),
        _check(
            "held-out loss",
            f"{held['before']:.3f} -> {held['after']:.3f} (-{drop:.0%})",
            ">= 30 % down",
            drop >= HELD_OUT_DROP,
        ),
        _check(
            "parameters",
            f"{bridged['parameters']:,}",
            f">= {MIN_PARAMETERS:,}",
            bridged["parameters"] >= MIN_PARAMETERS,
        ),
        *[
            _check(f"sha256 of all parameters on {RANKS} ranks, {kind}", _digest_text(found), "equal", len(found) == 1)
            for kind, found in digests.items()
        ],
        *[
            _check(f"bytes across the bridge per step, {kind}", f"{count:,.0f}", "> 0", count > 0)
            for kind, count in wire.items()
        ],
        _check("time", f"{seconds:.0f} s", "printed", None),
    ]
    return {
        "what": what,
        "checks": checks,
        "differences": differences,
        "step_ms": {kind: _step_ms(runs[f"{kind} bridged"]) for kind in differences},
        "wire_bytes_per_step": wire,
        "torch": bridged["torch"],
        "gpubridge": __version__,
        "seconds": seconds,
        "runs": runs,
    }


def _check(check: str, value: str, demanded: str, ok: bool | None) -> dict[str, Any]:
    return {"check": check, "value": value, "demanded": demanded, "ok": ok}


def _digest_text(found: set[str]) -> str:
    return next(iter(found))[:16] if len(found) == 1 else f"{len(found)} different"


def _wire_bytes(run: dict[str, Any]) -> float:
    """Bytes that all ranks together put on links between islands, per step."""
    return sum(float(rank["comm"]["bridge_sent_bytes"]) for rank in run["ranks"]) / max(1, run["steps"])


def _step_ms(run: dict[str, Any]) -> dict[str, float]:
    """Average milliseconds of a step by where they went, mean over ranks."""
    step = 1000 * sum(run["step_s"]) / max(1, run["steps"])
    per = 1e6 * max(1, run["steps"]) * len(run["ranks"])
    parts = {
        kind: sum(rank["comm"][f"{kind}_ns"] for rank in run["ranks"]) / per for kind in ("island", "bridge", "wait")
    }
    return {"compute": max(0.0, step - sum(parts.values())), **parts}


def _conclude(content: dict[str, Any], out: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"gpubridge demo ({content['what']})")
    for column in ("check", "value", "demanded", ""):
        table.add_column(column)
    for row in content["checks"]:
        mark = "" if row["ok"] is None else "[green]ok[/]" if row["ok"] else "[red]FAILED[/]"
        table.add_row(row["check"], row["value"], row["demanded"], mark)
    console = Console()
    console.print(table)
    failed = [row["check"] for row in content["checks"] if row["ok"] is False]
    console.print(f"report: {out / 'index.html'} and {out / 'report.json'}", highlight=False)
    console.print("demo: all checks hold" if not failed else f"demo: FAILED: {', '.join(failed)}", highlight=False)
    return 1 if failed else 0
