# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "gpubridge".

Importing this module registers it:

    import torch.distributed as dist
    import gpubridge.torch
    dist.init_process_group("gpubridge")          # or "cpu:gpubridge,cuda:gpubridge"

Installed packages need no import (entry points, see gpubridge._torch_ep).
"""

from __future__ import annotations

import torch.distributed as dist

from gpubridge.torch.errors import (
    DistAbortedError,
    DistGpuBridgeError,
    DistLibraryError,
    DistMismatchError,
    DistPeerError,
    DistTimeoutError,
    DistUnsupportedError,
    DistValueError,
)
from gpubridge.torch.group import GpuBridgeGroup, create
from gpubridge.torch.options import Options

__all__ = [
    "DistAbortedError",
    "DistGpuBridgeError",
    "DistLibraryError",
    "DistMismatchError",
    "DistPeerError",
    "DistTimeoutError",
    "DistUnsupportedError",
    "DistValueError",
    "GpuBridgeGroup",
    "Options",
    "create",
    "register",
]


def register() -> None:
    """Makes "gpubridge" a backend of torch.distributed; does nothing the second time."""
    if "GPUBRIDGE" not in dist.Backend._plugins:
        dist.Backend.register_backend("gpubridge", create, extended_api=True, devices=["cpu", "cuda"])


register()
