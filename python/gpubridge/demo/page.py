# SPDX-License-Identifier: Apache-2.0
"""The demo's report as one HTML file without outside references: loss curves, their difference, and the step's time."""

from __future__ import annotations

import html
import math
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 64, 28
COLOURS = ("#1f5fa8", "#d1642a", "#2c8a57", "#8a4f9e", "#7a7a7a")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 720px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } td, th { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left; }
.note { background: #fff4d6; padding: .6em 1em; border-left: 4px solid #d9a400; } .bad { color: #b00020; font-weight:
600; } .ok { color: #1c7c3c; font-weight: 600; } svg text { font: 12px system-ui, sans-serif; fill: #444; } pre {
overflow-x: auto; }
"""


def polyline(points: list[tuple[float, float]], colour: str, dashed: bool) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'


def ticks(low: float, high: float) -> list[float]:
    """About five round values from low to high."""
    raw = (high - low) / 5 or 1.0
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step) + 1)]


def curves(series: dict[str, list[float]], label: str, logarithmic: bool = False) -> str:
    """An SVG line chart over steps; every second series is dashed, so equal curves stay visible."""
    values = [v for row in series.values() for v in row]
    floor = min((v for v in values if v > 0), default=1e-18)
    scale = (lambda v: math.log10(max(v, floor))) if logarithmic else (lambda v: v)
    low, high = min(map(scale, values)), max(map(scale, values))
    high = high if high > low else low + 1
    steps = max(len(row) for row in series.values())

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * step / max(1, steps - 1)

    def y(value: float) -> float:
        return 10 + (HEIGHT - BOTTOM - 10) * (high - value) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">']
    for tick in ticks(low, high):
        text = f"1e{tick:.0f}" if logarithmic else f"{tick:g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    for number, (name, row) in enumerate(series.items()):
        points = [(x(i), y(scale(v))) for i, v in enumerate(row)]
        parts.append(polyline(points, COLOURS[number % len(COLOURS)], number % 2 == 1))
        parts.append(f'<text x="{WIDTH - 14}" y="{24 + 16 * number}" text-anchor="end" style="fill:{COLOURS[number]}">')
        parts.append(f"{html.escape(name)}</text>")
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">step 1</text>')
    parts.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 8}" text-anchor="end">step {steps}</text></svg>')
    return "".join(parts)


def bars(rows: dict[str, dict[str, float]]) -> str:
    """Stacked horizontal bars in milliseconds per step."""
    names = list(next(iter(rows.values())))
    longest = max(sum(row.values()) for row in rows.values()) or 1.0
    parts = [f'<svg viewBox="0 0 {WIDTH} {40 * len(rows) + 40}" role="img" aria-label="time per step">']
    for line, (name, row) in enumerate(rows.items()):
        left = 110.0
        parts.append(f'<text x="0" y="{40 * line + 24}">{html.escape(name)}</text>')
        for number, value in enumerate(row.values()):
            width = (WIDTH - 120) * value / longest
            colour = COLOURS[number]
            parts.append(f'<rect x="{left:.1f}" y="{40 * line + 8}" width="{width:.1f}" height="24" fill="{colour}"/>')
            if width > 34:
                text = f'<text x="{left + 4:.1f}" y="{40 * line + 24}" style="fill:#fff">{value:.0f}</text>'
                parts.append(text)
            left += width
    for number, name in enumerate(names):
        at = 110 + 120 * number
        parts.append(f'<rect x="{at}" y="{40 * len(rows) + 12}" width="12" height="12" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{at + 18}" y="{40 * len(rows) + 22}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["<table><tr><th>check</th><th>value</th><th>demanded</th><th></th></tr>"]
    for row in rows:
        mark = (
            ""
            if row["ok"] is None
            else '<span class="ok">ok</span>'
            if row["ok"]
            else '<span class="bad">failed</span>'
        )
        cells = "".join(f"<td>{html.escape(str(row[key]))}</td>" for key in ("check", "value", "demanded"))
        lines.append(f"<tr>{cells}<td>{mark}</td></tr>")
    return "".join([*lines, "</table>"])


def render(content: dict[str, Any]) -> str:
    """The page for the content of report.json."""
    runs = content["runs"]
    losses = {name: run["losses"] for name, run in runs.items()}
    differences = dict(content["differences"])
    described = html.escape(runs["float64 bridged"]["describe"])
    return "".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>gpubridge demo ({content['what']})</title><style>{STYLE}</style><h1>gpubridge demo</h1>",
            f'<p class="note"><b>{content["what"]}.</b> Four ranks of this machine train one model across the bridge; '
            "the same global batches are then trained by a single process. This proves values and order, never "
            "speed: no time below is a measurement of any GPU.</p>",
            table(content["checks"]),
            "<h2>Loss</h2>",
            curves(losses, "training loss, nats per byte"),
            "<h2>Difference between bridged and single process</h2>",
            curves(differences, "absolute difference of the losses", logarithmic=True),
            f"<h2>Where the step goes, {content['what']}</h2><p>Milliseconds per step on average. <i>island</i>, "
            "<i>bridge</i> and <i>wait</i> are summed over the operations of a rank and overlap with its backward pass "
            "where they can; <i>compute</i> is the rest of the step.</p>",
            bars(content["step_ms"]),
            f"<h2>Layout</h2><pre>{described}</pre>",
            f"<p>torch {html.escape(content['torch'])}, gpubridge {html.escape(content['gpubridge'])}. The numbers "
            "are in report.json beside this page.</p></html>",
        ]
    )
