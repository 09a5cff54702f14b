# SPDX-License-Identifier: Apache-2.0
"""Tables and PNG plots of calibration results: alarms against the budget, delays against the optimum.

python tests/calibration/plot.py [FOLDER]      (default bench/results/straggler; needs matplotlib for the plots)
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

FAMILIES = (
    "gaussian",
    "lognormal",
    "t3",
    "stalls",
    "ar0.05",
    "ar0.1",
    "ar0.3",
    "ar0.66",
    "drift",
    "wander",
    "settling",
)
OPTIMUM = {0.02: 168.9, 0.01: 606.0, 0.005: 2128.0}
WINDOW = 100


def width(value: float) -> str:
    """Of an interval; the upper end of what the clip hid is without a bound."""
    return f"{value:.4f}" if value < 1e6 else "without a bound"


def load(folder: Path, name: str) -> list[dict[str, Any]]:
    """The results of one group of tasks, oldest first."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def alarms(folder: Path, name: str) -> list[dict[str, Any]]:
    """Per family: stream-steps, budgeted and counted alarms, streams learned anew."""
    sums: dict[str, dict[str, Any]] = defaultdict(lambda: {"steps": 0.0, "budget": 0.0, "alarms": 0, "anew": 0})
    for r in load(folder, name):
        row = sums[r["family"] if name != "alarms-wander" else f"wander {r['wander_steps']:.0f}"]
        row["steps"] += r["stream_steps"]
        row["budget"] += r["expected"]
        row["alarms"] += r["alarms"]
        row["anew"] += r["learned_anew"]
    order = {f: i for i, f in enumerate(FAMILIES)}
    return [{"family": f, **sums[f]} for f in sorted(sums, key=lambda f: order.get(f, 99))]


def interval(count: int) -> tuple[float, float]:
    """Central 95 % interval of a Poisson mean, by the Wilson-Hilferty approximation."""
    low = count * (1 - 1 / (9 * count) - 1.96 / (3 * math.sqrt(count))) ** 3 if count else 0.0
    up = count + 1
    return low, up * (1 - 1 / (9 * up) + 1.96 / (3 * math.sqrt(up))) ** 3


def print_alarms(folder: Path) -> None:
    """Counts against budgets, with its 95 % interval of the ratio."""
    for name in ("alarms", "alarms-wander", "alarms-strict"):
        for row in alarms(folder, name):
            low, high = (v / row["budget"] for v in interval(row["alarms"]))
            print(
                f"{name:14} {row['family']:12} {row['steps']:.3g} stream-steps, {row['budget']:.2f} budgeted, "
                f"{row['alarms']} counted (ratio {row['alarms'] / row['budget']:.2f}, 95 % {low:.2f} to {high:.2f}), "
                f"learned anew {row['anew']}"
            )


def print_delays(folder: Path) -> None:
    """Delays with their ratio to the optimum or to the yardstick of the family."""
    best = {r["family"]: r["best"] for r in load(folder, "yardstick")}
    for name in (
        "delay-given",
        "delay-learned",
        "delay-families",
        "delay-strict",
        "delay-windows",
        "detectable",
        "gross",
    ):
        for r in load(folder, name):
            against = OPTIMUM.get(round(r["shift"], 4)) if name in ("delay-given", "delay-learned") else None
            if name == "delay-families":
                against = best.get(r["family"])
            if name == "delay-strict":
                against = 284.0
            ratio = f", {r['mean'] / against:.3f} of {against:.1f}" if against else ""
            print(
                f"{name:14} {r['family']:9} shift {r['shift']:.4f} learn {r['learn']:.0f} random {r['random_onset']} "
                f"share {r['share']}: n {r['injected']}, mean {r['mean']}{ratio}, "
                f"p50 {r['p50']} p95 {r['p95']} p99 {r['p99']}, never {r['not_found']}, "
                f"in 200 {r['within_200']:.3f}, size {r['size_coverage']:.3f} "
                f"(width {width(r['size_width_p50'])}), "
                f"onset {r['onset_coverage']:.3f} (width {r['onset_width_p50']:.0f})"
            )
            if "delays" in r:
                windows = [math.ceil(d / WINDOW) for d in r["delays"]]
                shares = ", ".join(f"{w}: {windows.count(w) / len(windows):.3f}" for w in sorted(set(windows)))
                print(f"{'':14} windows of {WINDOW} steps until found: {shares}")


def plot(folder: Path) -> None:
    """alarms.png and delays.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = alarms(folder, "alarms")
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    ratios = [r["alarms"] / r["budget"] for r in rows]
    spans = [interval(r["alarms"]) for r in rows]
    errors = [
        [x - s[0] / r["budget"] for x, s, r in zip(ratios, spans, rows, strict=True)],
        [s[1] / r["budget"] - x for x, s, r in zip(ratios, spans, rows, strict=True)],
    ]
    axes.errorbar(range(len(rows)), ratios, yerr=errors, fmt="o", capsize=4)
    axes.axhspan(0.40, 1.16, alpha=0.15, color="green")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [f"{r['family']}\n{r['alarms']} / {r['budget']:.0f}" for r in rows], fontsize=8)
    axes.set_ylabel("alarms counted / budgeted (95 %)")
    axes.set_title("False alarms on healthy noise, one budgeted per 25 million stream-steps")
    figure.tight_layout()
    figure.savefig(folder / "alarms.png", dpi=110)
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    best = {r["family"]: r["best"] for r in load(folder, "yardstick")}
    bars: list[tuple[str, float, float]] = []
    for name, limits in (
        ("delay-given", {0.02: 1.25, 0.01: 1.2, 0.005: 1.2}),
        ("delay-learned", dict.fromkeys(OPTIMUM, 1.45)),
    ):
        for r in load(folder, name):
            if r["random_onset"] == 0 and r["family"] == "lognormal":
                shift = round(r["shift"], 4)
                bars.append((f"{name[6:]}\n{shift:.1%}", r["mean"] / OPTIMUM[shift], limits[shift]))
    bars += [
        (r["family"], r["mean"] / best[r["family"]], 1.35)
        for r in load(folder, "delay-families")
        if r["family"] in best
    ]
    axes.bar(range(len(bars)), [b[1] for b in bars])
    axes.plot(range(len(bars)), [b[2] for b in bars], "_", color="red", markersize=22, label="limit")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), [b[0] for b in bars], fontsize=7)
    axes.set_ylabel("mean delay / optimum")
    axes.set_title("Detection delay; families: 2 % against their own recalibrated CUSUM")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "delays.png", dpi=110)


def main() -> int:
    """Prints the tables and writes the plots."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "bench/results/straggler")
    print_alarms(folder)
    print_delays(folder)
    try:
        plot(folder)
    except ImportError as error:
        print(f"no plots: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
