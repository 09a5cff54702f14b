# SPDX-License-Identifier: Apache-2.0
"""fleet.h from Python, on numpy arrays.  The C objects belong to one thread at a time; docs/fleet.md says what
they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpubridge import _fleet_abi as abi
from gpubridge import _native

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

# struct gpubridge_fleet_record
RECORD = np.dtype(
    [
        ("step", "<i8"),
        ("rank", "<i4"),
        ("kind", "<i4"),
        ("channel", "<i4"),
        ("op", "<i4"),
        ("start", "<f8"),
        ("end", "<f8"),
        ("ready", "<f8"),
    ]
)
OWN_KINDS = ("input", "compute", "memory", "host")
KINDS = (*OWN_KINDS, "collective", "hop")

_functions: dict[str, Any] = {}


def call(name: str, *args: Any) -> None:
    """Calls gpubridge_<name> of fleet.h and raises on failure."""
    if not _functions:
        library = ctypes.CDLL(_native.lib().path)
        for known, result, types in abi.FUNCTIONS:
            function = library["gpubridge_" + known]
            function.restype, function.argtypes = result, types
            _functions[known] = function
    status = _functions[name](*args)
    if status:
        _native.fail(status)


def pointer(array: npt.NDArray[Any] | None, kind: Any = ctypes.c_double) -> Any:
    """The address of an array's data as a typed pointer; None stays None."""
    return None if array is None else array.ctypes.data_as(ctypes.POINTER(kind))


def floats(values: Any) -> Floats:
    """As contiguous float64."""
    return np.ascontiguousarray(values, dtype=np.float64)


def ints(values: Any) -> Ints:
    """As contiguous int32."""
    return np.ascontiguousarray(values, dtype=np.int32)


@dataclass(frozen=True)
class Parts:
    """One step taken apart, in seconds: own[kind, rank]; wait, overlap, exposed, charged per rank; transfer
    per channel."""

    own: Floats
    wait: Floats
    head: Floats
    overlap: Floats
    exposed: Floats
    charged: Floats
    transfer: Floats
    last: Ints
    ends: Ints


class Decomposer:
    """Takes steps of records apart without comparing clocks.

    Args:
        ranks, channels: how many there are; max_records: the most records of one step.
    """

    def __init__(self, ranks: int, channels: int, max_records: int) -> None:
        self._handle = ctypes.c_void_p()
        self.ranks, self.channels = ranks, channels
        call("fleet_decomposer_create", ranks, channels, max_records, ctypes.byref(self._handle))

    def step(self, records: npt.NDArray[Any]) -> Parts:
        """records: a structured array of RECORD, all of one step.

        Raises:
            GpuBridgeError: a record is out of range; the text names it.
        """
        records = np.ascontiguousarray(records, dtype=RECORD)
        n = self.ranks
        parts = Parts(
            np.zeros((len(OWN_KINDS), n)), np.zeros(n), np.zeros((2, n)), np.zeros((2, n)), np.zeros(n), np.zeros(n),
            np.zeros(self.channels), np.zeros(self.channels, np.int32), np.zeros(self.channels, np.int32),
        )  # fmt: skip
        raw = abi.FleetParts(
            ctypes.sizeof(abi.FleetParts),
            *(
                getattr(parts, n).ctypes.data
                for n in ("own", "wait", "head", "overlap", "exposed", "charged", "transfer", "last", "ends")
            ),
        )
        call(
            "fleet_decompose",
            self._handle,
            records.ctypes.data_as(ctypes.POINTER(abi.FleetRecord)),
            len(records),
            ctypes.byref(raw),
        )
        return parts

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and _functions:
            _functions["fleet_decomposer_destroy"](self._handle)


class Work:
    """Slopes of log time on log work per class.

    Args:
        classes: class number of each rank, 0 ... ranks - 1.
        covariates: amounts of work per rank and step, 1 ... 4 (3 with curvature).
        curvature: also fit the square of the first log covariate.
    """

    def __init__(self, classes: Sequence[int] | Ints, covariates: int = 1, curvature: bool = False) -> None:
        self.classes, self.covariates = ints(classes), covariates
        config = abi.FleetWorkConfig(
            ctypes.sizeof(abi.FleetWorkConfig),
            len(self.classes),
            covariates,
            int(curvature),
            self.classes.ctypes.data,
            None,
        )
        self._handle = ctypes.c_void_p()
        call("fleet_work_create", ctypes.byref(config), ctypes.byref(self._handle))

    def step(self, seconds: Floats, amounts: Floats, healthy: npt.NDArray[np.uint8] | None = None) -> Floats:
        """seconds[rank] at the class's usual work; learns from ranks that are `healthy`. amounts[covariate, rank];
        a time or amount of 0 is missing."""
        out, work = floats(seconds).copy(), floats(amounts)
        if out.shape != (len(self.classes),) or work.shape != (self.covariates, len(out)):
            raise ValueError(f"a step has {len(self.classes)} seconds and {self.covariates} amounts for each of them")
        mask = None if healthy is None else np.ascontiguousarray(healthy, np.uint8)
        call("fleet_work_step", self._handle, pointer(out), pointer(work), pointer(mask, ctypes.c_uint8))
        return out

    def fit(self, seconds: Floats, amounts: Floats) -> None:
        """Learns from recorded steps at once: seconds[step, rank], amounts[step, covariate, rank]."""
        time, work = floats(seconds), floats(amounts)
        if time.ndim != 2 or work.shape != (len(time), self.covariates, time.shape[1]):
            raise ValueError("fit takes seconds[step, rank] and amounts[step, covariate, rank]")
        call("fleet_work_fit", self._handle, len(time), pointer(time), pointer(work))

    def slopes(self, rank_class: int = 0) -> tuple[list[float], float]:
        """Slopes (and curvature) of a class, and the noise that is left."""
        slopes, noise = np.zeros(abi.FLEET_SLOPES), ctypes.c_double()
        call("fleet_work_slopes", self._handle, rank_class, pointer(slopes), ctypes.byref(noise))
        return slopes.tolist(), noise.value

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and _functions:
            _functions["fleet_work_destroy"](self._handle)


@dataclass(frozen=True)
class Scan:
    """struct gpubridge_fleet_scan: one rank of a recorded job."""

    ratio: float
    noise: float
    shift: float
    low: float
    score: float
    threshold: float
    onset: int
    slow_part: bool
    slower: bool
    compared: int


def scan(
    seconds: Floats,
    learn: int,
    classes: Sequence[int] | Ints | None = None,
    alarms: float = 0.01,
    min_slowdown: float = 0.0025,
    lottery: float = 0.04,
) -> list[Scan]:
    """Judges seconds[step, rank] (0: missing): the first `learn` steps teach. One Scan per rank."""
    time = floats(seconds)
    group = None if classes is None else ints(classes)
    config = abi.FleetScanConfig(
        ctypes.sizeof(abi.FleetScanConfig), *time.shape, learn, None if group is None else group.ctypes.data,
        alarms, min_slowdown, lottery,
    )  # fmt: skip
    found = (abi.FleetScan * time.shape[1])()
    call("fleet_scan", ctypes.byref(config), pointer(time), found)
    return [
        Scan(
            f.ratio,
            f.noise,
            f.shift,
            f.low,
            f.score,
            f.threshold,
            f.onset,
            bool(f.slow_part),
            bool(f.slower),
            f.compared,
        )
        for f in found
    ]


def lottery(levels: Floats, classes: Ints | None = None, spread: float = 0.04) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Ratio of each level to the median of its class's others, and which ranks are slow parts."""
    level = floats(levels)
    ratio, slow = np.zeros(len(level)), np.zeros(len(level), np.uint8)
    group = None if classes is None else ints(classes)
    call(
        "fleet_lottery",
        len(level),
        pointer(level),
        pointer(group, ctypes.c_int32),
        spread,
        pointer(ratio),
        pointer(slow, ctypes.c_uint8),
    )
    return ratio, slow


def makespan(seconds: Floats, first: Ints, second: Ints, delay: Floats) -> float:
    """End of the last node: node i takes seconds[i] after first[i], and after second[i] plus delay[i] (-1: none)."""
    span = ctypes.c_double()
    time, wait, a, b = floats(seconds), floats(delay), ints(first), ints(second)
    call(
        "fleet_makespan",
        len(time),
        pointer(time),
        pointer(a, ctypes.c_int32),
        pointer(b, ctypes.c_int32),
        pointer(wait),
        ctypes.byref(span),
    )
    return span.value
