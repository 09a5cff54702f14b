# SPDX-License-Identifier: Apache-2.0
"""The short form of loss_parity.py: 12 steps.  (200 steps: make loss-parity.)"""

from __future__ import annotations

from collections.abc import Callable

from loss_parity import LAYOUT, measure
from pool import Pool


def test_loss_parity(ranks: Callable[..., Pool]) -> None:
    results = measure(ranks(LAYOUT), 12)
    assert results["ok"], results
    assert results["float64"]["last loss"] < results["float64"]["first loss"]
    for kind in ("ddp", "fsdp2", "hsdp"):
        assert results["float32"][kind]["loss difference"] < 1e-4, results
