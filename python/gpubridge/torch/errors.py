# SPDX-License-Identifier: Apache-2.0
"""The exceptions of gpubridge.errors that are also `torch.distributed.DistBackendError`.

Their type survives the way through torch's C++ and back, so `except dist.DistBackendError` and `except TimeoutError`
both work around a collective, in eager code, in DDP hooks and behind futures.
"""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from gpubridge import _native, errors


class DistGpuBridgeError(errors.GpuBridgeError, dist.DistBackendError):
    """A failure with no more specific class."""


class DistValueError(errors.GpuBridgeValueError, DistGpuBridgeError):
    """An argument or setting is wrong."""


class DistUnsupportedError(errors.GpuBridgeUnsupportedError, DistGpuBridgeError):
    """This dtype or reduce op is not defined for the operation."""


class DistTimeoutError(errors.GpuBridgeTimeoutError, DistGpuBridgeError):
    """The deadline passed."""


class DistMismatchError(errors.GpuBridgeMismatchError, DistGpuBridgeError):
    """The ranks disagree on the operation."""


class DistPeerError(errors.GpuBridgePeerError, DistGpuBridgeError):
    """A peer was lost, refused us or cannot be reached."""


class DistAbortedError(errors.GpuBridgeAbortedError, DistGpuBridgeError):
    """The group was aborted or destroyed."""


class DistLibraryError(errors.GpuBridgeLibraryError, DistGpuBridgeError):
    """A library cannot be opened."""


_KIN: dict[type[errors.GpuBridgeError], type[DistGpuBridgeError]] = {
    errors.GpuBridgeValueError: DistValueError,
    errors.GpuBridgeUnsupportedError: DistUnsupportedError,
    errors.GpuBridgeTimeoutError: DistTimeoutError,
    errors.GpuBridgeMismatchError: DistMismatchError,
    errors.GpuBridgePeerError: DistPeerError,
    errors.GpuBridgeAbortedError: DistAbortedError,
    errors.GpuBridgeLibraryError: DistLibraryError,
}
CLASS_OF: dict[int, type[DistGpuBridgeError]] = {status: _KIN[cls] for status, cls in errors.CLASS_OF.items()}


def error_of(status: int) -> DistGpuBridgeError:
    """The exception for a status that the calling thread's last C call returned."""
    return CLASS_OF.get(status, DistGpuBridgeError)(_native.last_error(status), status)


def fail(status: int) -> NoReturn:
    """Raises `error_of(status)`."""
    raise error_of(status)


def check(status: int) -> None:
    """Raises unless the status is GPUBRIDGE_OK."""
    if status != 0:
        raise error_of(status)
