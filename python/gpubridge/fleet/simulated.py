# SPDX-License-Identifier: Apache-2.0
"""The page of `gpubridge simulate`: tables, delays, alarms against the budget, confusion matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpubridge.fleet.page import Page, new_figure
from gpubridge.fleet.simulate import CAUSES, SUITES, Summary


def page(summaries: list[Summary], folder: Path) -> Path:
    """Writes the page and its PNG files; returns the page's path."""
    out = Page("gpubridge simulate")
    for s in summaries:
        out.heading(f"{s.name}: {s.words}")
        out.table(s.head, s.rows)
        if "first_cause_named" in s.numbers:
            _matrix(out, s)
        if s.delays:
            _delays(out, s)
        if "with_a_verdict" in s.numbers:
            _budget(out, s)
    return out.write(folder)


def _matrix(out: Page, s: Summary) -> None:
    causes = s.numbers["first_cause_named"]
    columns = [c for c in CAUSES if any(c in row for row in causes.values())]
    values = np.array([[row.get(c, 0) for c in columns] for row in causes.values()], dtype=float)
    share = values / values.sum(axis=1, keepdims=True)
    figure, axes = new_figure(7, 4)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(columns)), columns, rotation=30)
    axes.set_yticks(range(len(causes)), list(causes))
    for y, x in np.ndindex(values.shape):
        if values[y, x]:
            axes.text(x, y, f"{share[y, x]:.1%}\n{int(values[y, x])}", ha="center", va="center", fontsize=7,
                      color="white" if share[y, x] > 0.5 else "black")  # fmt: skip
    axes.set_xlabel("first cause named at the end of the window")
    words = "Faults (rows) against the cause that was named first; a thermal ramp is a slowdown of computation."
    out.figure(f"{s.name}-confusion", figure, words)


def _delays(out: Page, s: Summary) -> None:
    figure, axes = new_figure()
    for name, delays in s.delays.items():
        ordered = np.sort(delays)
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=name)
    axes.set_xlabel("steps from the fault until it was named")
    axes.set_ylabel("share of those named")
    axes.legend(fontsize=8)
    out.figure(f"{s.name}-delay", figure, "Delay, looked at every 10 steps.")


def _budget(out: Page, s: Summary) -> None:
    suite = SUITES[s.name]
    per_month = float(s.numbers["alarms_in_30_days"])
    steps = int(suite.fixed["healthy_steps"])
    expected = per_month * s.numbers["episodes"] * steps / (30 * 86400.0)
    figure, axes = new_figure(6, 2.5)
    axes.barh(["budget", "seen"], [expected, s.numbers["with_a_verdict"]])
    axes.set_xlabel("episodes with a false verdict")
    out.figure(
        f"{s.name}-alarms",
        figure,
        f"{s.numbers['with_a_verdict']} of {s.numbers['episodes']} healthy episodes had a verdict; the budget of "
        f"{per_month:g} false alarms in 30 days at 1 step/s allows {expected:.2g}.",
    )
