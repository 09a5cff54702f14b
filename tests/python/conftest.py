# SPDX-License-Identifier: Apache-2.0
"""Fixtures: pools of ranks that live for the session, one layout at a time; forks of whole ranks; hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))


def _use_source_tree() -> None:
    """Without an installed package: the sources and the library of build/."""
    try:
        import gpubridge  # noqa: F401
    except ImportError:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
        sys.path.insert(0, str(ROOT / "python"))
    import gpubridge._native as native

    try:
        native.find_library()
    except native.GpuBridgeLibraryError:
        os.environ["GPUBRIDGE_LIBRARY"] = str(ROOT / "build" / "src" / "libgpubridge.so.0")


_use_source_tree()
os.environ["PYTHONUNBUFFERED"] = "1"  # ranks that leave by os._exit have said what they printed

from forks import Forge  # noqa: E402
from networks import hosts  # noqa: E402, F401  a fixture
from pool import Layout, Pool, Pools  # noqa: E402


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def ranks(pools: Pools) -> Callable[..., Pool]:
    """`ranks(layout)`: a pool of that layout."""

    def get(layout: Layout, **extra: str) -> Pool:
        return pools.get(layout, **extra)

    return get


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    made = Forge()
    yield made
    made.close()
