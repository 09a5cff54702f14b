# SPDX-License-Identifier: Apache-2.0
"""Loads libgpubridge and turns its statuses into exceptions.

`lib()` gives the loaded library with one Python attribute per C function (without the `gpubridge_` prefix); the types
come from the generated `_abi` module.  Calls go through ctypes.CDLL, so the GIL is released in every one of them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

from gpubridge import _abi
from gpubridge.errors import CLASS_OF, GpuBridgeError, GpuBridgeLibraryError, status_name

LIBRARY_NAME = "libgpubridge.so.0"


class Library:
    """The functions of one loaded libgpubridge."""

    path: str
    # The functions of the data path, with untyped addresses instead of ctypes objects: half the cost per call.
    fast_submit: Any
    fast_run_for: Any
    fast_wait: Any
    fast_test: Any
    fast_free: Any

    def __init__(self, path: str) -> None:
        try:
            cdll = ctypes.CDLL(path)
        except OSError as error:
            raise GpuBridgeLibraryError(
                f"cannot load {path}: {error}; set GPUBRIDGE_LIBRARY to a libgpubridge.so that this machine can load"
            ) from None
        self.path = path
        self._check_abi(cdll)
        for name, restype, argtypes in _abi.FUNCTIONS:
            try:
                function = getattr(cdll, "gpubridge_" + name)
            except AttributeError:
                raise GpuBridgeLibraryError(
                    f"{path} has no gpubridge_{name}; it is older than this package: build or install them together"
                ) from None
            function.restype = restype
            function.argtypes = argtypes
            setattr(self, name, function)
        self.fast_submit = self._untyped(cdll, "submit", 3)
        self.fast_test = self._untyped(cdll, "request_test", 1)
        self.fast_free = self._untyped(cdll, "request_free", 1)
        self.fast_free.restype = None
        self.fast_run_for = cdll["gpubridge_run_for"]
        self.fast_run_for.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self.fast_wait = cdll["gpubridge_request_wait"]
        self.fast_wait.argtypes = (ctypes.c_void_p, ctypes.c_int64)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"gpubridge.h declares no gpubridge_{name}")

    @staticmethod
    def _untyped(cdll: ctypes.CDLL, name: str, count: int) -> Any:
        function = cdll["gpubridge_" + name]  # a fresh object each time: the typed one keeps its types
        function.argtypes = (ctypes.c_void_p,) * count
        return function

    @staticmethod
    def _check_abi(cdll: ctypes.CDLL) -> None:
        try:
            found = cdll.gpubridge_abi()
        except AttributeError:
            raise GpuBridgeLibraryError(f"{cdll._name} is not libgpubridge (no symbol gpubridge_abi)") from None
        if found != _abi.ABI:
            raise GpuBridgeLibraryError(
                f"{cdll._name} has ABI {found}, this Python package needs {_abi.ABI}: install matching versions"
            )


def find_library() -> str:
    """Path of libgpubridge: $GPUBRIDGE_LIBRARY, else the copy the wheel carries in gpubridge/_lib.

    Raises:
        GpuBridgeLibraryError: neither exists; the text says what to do.
    """
    explicit = os.environ.get("GPUBRIDGE_LIBRARY")
    if explicit:
        if not os.path.exists(explicit):
            raise GpuBridgeLibraryError(f"GPUBRIDGE_LIBRARY={explicit}: no such file")
        return explicit
    bundled = Path(__file__).resolve().parent / "_lib" / LIBRARY_NAME
    if bundled.exists():
        return str(bundled)
    raise GpuBridgeLibraryError(
        f"libgpubridge was not found (looked for {bundled}); build it with `meson setup build && ninja -C build` and "
        "set GPUBRIDGE_LIBRARY=build/src/libgpubridge.so, or install the wheel"
    )


_lock = threading.Lock()
_loaded: Library | None = None


def lib() -> Library:
    """The library, loaded at the first call.

    Raises:
        GpuBridgeLibraryError: not found, not loadable, or another ABI.
    """
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = Library(find_library())
    return _loaded


def last_error(status: int) -> str:
    """The calling thread's last error text, or the words of the status when it left none."""
    text = lib().last_error()
    if text:
        return str(text, "utf-8", "replace")
    return f"{str(lib().strerror(status), 'utf-8')} ({status_name(status)})"


def fail(status: int, classes: dict[int, type[GpuBridgeError]] = CLASS_OF) -> NoReturn:
    """Raises the exception of a status with this thread's last error text; `classes` maps statuses to exceptions."""
    raise classes.get(status, classes.get(0, GpuBridgeError))(last_error(status), status)


def check(status: int) -> None:
    """Raises unless `status` is GPUBRIDGE_OK."""
    if status != _abi.OK:
        fail(status)


def version() -> str:
    """Version of the loaded library, e.g. "0.1.0"."""
    return str(lib().version(), "ascii")


def settings() -> list[tuple[str, str, str, str]]:
    """The settings table of the library: (name, type, value now, help)."""
    rows: list[tuple[str, str, str, str]] = []
    cells = [ctypes.c_char_p() for _ in range(4)]
    while lib().setting_info(len(rows), *[ctypes.byref(cell) for cell in cells]) == _abi.OK:
        name, kind, value, text = (str(cell.value or b"", "utf-8", "replace") for cell in cells)
        rows.append((name, kind, value, text))
    return rows
