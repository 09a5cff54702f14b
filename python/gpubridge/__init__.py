# SPDX-License-Identifier: Apache-2.0
"""gpubridge: one PyTorch job over GPUs of different vendors, or CPUs.

`import gpubridge.torch` registers the torch.distributed backend "gpubridge"; importing this package alone loads neither
torch nor the C library.
"""

from gpubridge.errors import (
    GpuBridgeAbortedError,
    GpuBridgeError,
    GpuBridgeLibraryError,
    GpuBridgeMismatchError,
    GpuBridgePeerError,
    GpuBridgeTimeoutError,
    GpuBridgeUnsupportedError,
    GpuBridgeValueError,
)

__version__ = "0.1.0"
__all__ = [
    "GpuBridgeAbortedError",
    "GpuBridgeError",
    "GpuBridgeLibraryError",
    "GpuBridgeMismatchError",
    "GpuBridgePeerError",
    "GpuBridgeTimeoutError",
    "GpuBridgeUnsupportedError",
    "GpuBridgeValueError",
    "__version__",
]
