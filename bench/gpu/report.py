# SPDX-License-Identifier: Apache-2.0
"""What every result of bench/gpu and tests/gpu says about where it was made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gpubridge
import torch


def header(what: str) -> dict[str, Any]:
    """Machine, versions and settings."""
    return {
        "what": what,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "devices": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "gpubridge": gpubridge.__version__,
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("GPUBRIDGE_") and "LIB" not in k},
    }


def rounded(row: dict[str, Any], digits: int = 3) -> dict[str, Any]:
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in row.items()}


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def percentile(samples: list[float], q: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * q))]
