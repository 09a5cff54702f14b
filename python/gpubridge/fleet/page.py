# SPDX-License-Identifier: Apache-2.0
"""One HTML page that needs nothing beside it: text, tables, and figures as PNG inside the page (also written
as files)."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0
1rem;color:#1d2433;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{border:1px solid #cdd3df;padding:.25rem .6rem;text-align:left;vertical-align:top}th{background:#eef1f7}
img{max-width:100%;height:auto}.lead{font-size:1.1rem;font-weight:600}
@media(prefers-color-scheme:dark){body{background:#171b24;color:#e3e7f0}th{background:#262d3b}td,th{border-color:#3a4356}img{background:#fff}}"""


class Page:
    """Collects parts in order; `write` makes the file."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []
        self._images: list[tuple[str, bytes]] = []

    def text(self, words: str, lead: bool = False) -> None:
        """A paragraph."""
        self._parts.append(f"<p{' class=lead' if lead else ''}>{html.escape(words)}</p>")

    def heading(self, words: str) -> None:
        """A section's title."""
        self._parts.append(f"<h2>{html.escape(words)}</h2>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Cells are turned to text."""
        cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
        self._parts.append(f"<table><tr>{cells}</tr>{body}</table>")

    def figure(self, name: str, figure: Any, words: str) -> None:
        """A matplotlib figure, with what it shows."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        data = buffer.getvalue()
        self._images.append((name, data))
        code = base64.b64encode(data).decode()
        self._parts.append(
            f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{code}"></p><p>{html.escape(words)}</p>'
        )

    def write(self, folder: Path, name: str = "index.html") -> Path:
        """Writes the page and its PNG files; returns the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        for image, data in self._images:
            (folder / f"{image}.png").write_bytes(data)
        path = folder / name
        path.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style><h1>{html.escape(self.title)}</h1>{''.join(self._parts)}</html>"
        )
        return path


def new_figure(width: float = 9.0, height: float = 4.0) -> tuple[Any, Any]:
    """A matplotlib figure and its axes, without a display.

    Raises:
        RuntimeError: matplotlib is not installed; the text says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("plots need matplotlib: pip install 'gpubridge[analyze]'") from None
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()
