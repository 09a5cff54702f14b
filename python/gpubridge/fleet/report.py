# SPDX-License-Identifier: Apache-2.0
"""What `gpubridge analyze` shows of an Analysis: tables for the terminal, and the HTML page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from gpubridge.fleet.native import OWN_KINDS
from gpubridge.fleet.offline import Analysis, Verdict, place
from gpubridge.fleet.page import Page, new_figure

HEAD = ("who", "cause", "answer", "slower by", "since step", "factors", "note")


def row(v: Verdict) -> tuple[str, ...]:
    """One verdict as cells."""
    size = f"{v.slowdown:.1%}" + (f" (at least {v.low:.1%})" if v.low is not None else "")
    factors = ", ".join(f"{name} {value:.2f}" for name, value in v.factors.items())
    return v.who, v.cause, v.answer, size, "the first" if v.since is None else str(v.since), factors, v.note


def facts(a: Analysis) -> list[tuple[str, str]]:
    """The recording and what could be seen in it."""
    steps = a.table.steps
    rows = [
        ("recording", f"{len(a.table.raw):,} records, {len(steps)} steps ({steps[0]} to {steps[-1]}), "
            f"{len(a.table.ranks)} ranks, "
                      f"{len(a.classes)} classes, {len(a.table.channels)} transfer channels"),
        ("learned from", f"the first {a.learn} steps"),
    ]  # fmt: skip
    for kind, scans in a.scans.items():
        noise = float(np.median([s.noise for s in scans]))
        error = noise * np.sqrt(1 / a.learn + 1 / (len(steps) - a.learn))
        rows.append(
            (
                f"{kind}: noise",
                f"{noise:.2%} per step; a lasting change above about {scans[0].threshold * error:.2%} would be found",
            )
        )
    if a.covariate:
        slopes = "; ".join(
            f"{name}: {s[0][0]:+.2f}, curvature {s[0][1]:+.2f}" for name, s in list(a.slopes.items())[:8]
        )
        rows.append(("work covariate", f"{a.covariate}; slopes of log time on log work: {slopes}"))
    return rows


def show(a: Analysis, console: Console) -> None:
    """Verdict table and facts."""
    table = RichTable(title=f"{a.table.source}", title_justify="left")
    for column in HEAD:
        table.add_column(column, overflow="fold")
    for v in a.verdicts:
        table.add_row(*row(v))
    if a.verdicts:
        console.print(table)
    else:
        console.print(f"{a.table.source}: no rank is to blame", highlight=False)
    console.print(f"cause: {a.job}", style="bold", highlight=False)
    for reason in a.reasons:
        console.print(f"  {reason}", highlight=False)
    for name, words in facts(a):
        console.print(f"{name}: {words}", highlight=False, style="dim")


def page(a: Analysis, folder: Path) -> Path:
    """The HTML page with its figures; returns its path."""
    out = Page(f"gpubridge analyze: {Path(a.table.source).name}")
    out.text(f"Cause: {a.job}", lead=True)
    for reason in a.reasons:
        out.text(reason)
    out.heading("Verdicts")
    if a.verdicts:
        out.table(HEAD, [row(v) for v in a.verdicts])
    else:
        out.text("No rank is to blame.")
    out.heading("Computation of every rank in every step")
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(a.compute > 0, a.compute, np.nan))
        for number in range(len(a.classes)):
            members = a.class_of == number
            logs[:, members] -= np.nanmedian(logs[:, members], axis=1, keepdims=True)
    figure, axes = new_figure(9, 1.5 + 0.12 * len(a.table.ranks))
    limit = max(float(np.nanpercentile(np.abs(logs), 98)), 1e-4)
    image = axes.imshow(
        logs.T * 100, aspect="auto", cmap="RdBu_r", vmin=-100 * limit, vmax=100 * limit, interpolation="nearest"
    )
    axes.axvline(a.learn - 0.5, color="black", linewidth=1)
    axes.set_xlabel("recorded step (left of the line: learned from)")
    axes.set_ylabel("rank")
    figure.colorbar(image, label="% above the class median")
    words = " after its work is accounted for" if a.covariate else ""
    out.figure(
        "computation",
        figure,
        f"Deviation of each rank's computation from its class in the same step{words}; red is slower.",
    )
    out.heading("Where the time goes")
    figure, axes = new_figure(9, 4)
    bottom = np.zeros(len(a.table.ranks))
    for kind, name in enumerate(OWN_KINDS):
        values = a.own[:, kind].mean(axis=0)
        if values.max() > 0:
            axes.bar(range(len(values)), values, bottom=bottom, label=name)
            bottom += values
    axes.bar(range(len(bottom)), a.wait.mean(axis=0), bottom=bottom, label="waiting for others", color="#cccccc")
    axes.set_xlabel("rank")
    axes.set_ylabel("seconds per step")
    axes.legend(fontsize=8)
    out.figure(
        "time",
        figure,
        "Own work and waiting of each rank, mean over the steps. Waiting is a cost and never evidence against "
        "the waiter.",
    )
    out.heading("Most waited for")
    cost = a.charged.mean(axis=0)
    order = np.argsort(-cost)[:8]
    out.table(
        ("rank", "seconds that others waited for it, per step"),
        [(place(a.table, int(r)), f"{cost[r]:.3f}") for r in order],
    )
    out.heading("The recording")
    out.table(("", ""), facts(a))
    return out.write(folder)
