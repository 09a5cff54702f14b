# SPDX-License-Identifier: Apache-2.0
"""One exception class per kind of loss; every one carries the C status and the text of the place that first knew.

`except GpuBridgeError` catches all of them; the subclasses also are the builtin a Python user would expect
(`TimeoutError`, `ConnectionError`, `ValueError`).
"""

from __future__ import annotations

from gpubridge import _abi


class GpuBridgeError(RuntimeError):
    """A call of the library failed.

    Attributes:
        status: the C status, e.g. -40 (see `status_name`).
    """

    status: int = _abi.ERR_INTERNAL

    def __init__(self, message: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (self.message, self.status)

    @property
    def status_name(self) -> str:
        """The name in gpubridge.h, e.g. "GPUBRIDGE_ERR_PEER_LOST"."""
        return status_name(self.status)


class GpuBridgeValueError(GpuBridgeError, ValueError):
    """An argument or a setting is wrong."""

    status = _abi.ERR_INVALID


class GpuBridgeUnsupportedError(GpuBridgeError, TypeError):
    """Legal, but not for this dtype, reduce op, device or library version."""

    status = _abi.ERR_UNSUPPORTED


class GpuBridgeTimeoutError(GpuBridgeError, TimeoutError):
    """The deadline passed; the text names who is missing."""

    status = _abi.ERR_TIMEOUT


class GpuBridgeMismatchError(GpuBridgeError):
    """The ranks disagree on an operation; both signatures are in the text."""

    status = _abi.ERR_MISMATCH


class GpuBridgePeerError(GpuBridgeError, ConnectionError):
    """A peer died, went silent, refused, cannot be reached, or speaks another version."""

    status = _abi.ERR_PEER_LOST


class GpuBridgeAbortedError(GpuBridgeError):
    """The group was aborted or destroyed; the text carries the first cause."""

    status = _abi.ERR_ABORTED


class GpuBridgeLibraryError(GpuBridgeError, OSError):
    """libgpubridge or a vendor library cannot be opened, or has the wrong ABI."""

    status = _abi.ERR_LIBRARY


CLASS_OF: dict[int, type[GpuBridgeError]] = {
    _abi.ERR_INVALID: GpuBridgeValueError,
    _abi.ERR_SETTING: GpuBridgeValueError,
    _abi.ERR_UNSUPPORTED: GpuBridgeUnsupportedError,
    _abi.ERR_TIMEOUT: GpuBridgeTimeoutError,
    _abi.ERR_MISMATCH: GpuBridgeMismatchError,
    _abi.ERR_PEER_LOST: GpuBridgePeerError,
    _abi.ERR_REFUSED: GpuBridgePeerError,
    _abi.ERR_VERSION: GpuBridgePeerError,
    _abi.ERR_UNREACHABLE: GpuBridgePeerError,
    _abi.ERR_CANCELLED: GpuBridgeAbortedError,
    _abi.ERR_ABORTED: GpuBridgeAbortedError,
    _abi.ERR_DESTROYED: GpuBridgeAbortedError,
    _abi.ERR_LIBRARY: GpuBridgeLibraryError,
}


def status_name(status: int) -> str:
    """GPUBRIDGE_... name of a status, or "status N" for a number no header names."""
    for name, value in vars(_abi).items():
        if value == status and (name.startswith("ERR_") or name in ("OK", "AGAIN")):
            return f"GPUBRIDGE_{name}"
    return f"status {status}"
