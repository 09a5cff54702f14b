# SPDX-License-Identifier: Apache-2.0
"""ctypes over straggler.h.  One Engine belongs to one thread at a time."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpubridge import _native


class State(enum.IntEnum):
    """enum gpubridge_straggler_state."""

    WARMUP = 0
    LEARN = 1
    HEALTHY = 2
    SUSPECT = 3
    CONFIRMED = 4
    RECOVERING = 5
    HOLD = 6
    UNKNOWN = 7


class Answer(enum.IntFlag):
    """enum gpubridge_straggler_answer; several may be true at once."""

    SLOWER_THAN_PAST = 1
    FASTER_THAN_PAST = 2
    SLOWER_THAN_CLASS = 4
    EVERYBODY_MOVED = 8
    CANNOT_TELL = 16


class Rule(enum.IntEnum):
    """enum gpubridge_straggler_rule."""

    NONE = 0
    BANK = 1
    GROSS = 2
    COUNT = 3


class _Config(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ranks", c_int32),
        ("kinds", c_int32),
        ("groups", POINTER(c_int32)),
        ("classes", POINTER(c_int32)),
        ("alarms", c_double),
        ("days", c_double),
        ("steps_per_second", c_double),
        ("min_slowdown", c_double),
        ("warmup_steps", c_int32),
        ("use_peers", c_int32),
        ("max_hold_steps", c_int32),
        ("window_steps", c_int32),
    ]


class _Report(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("state", c_int32),
        ("answers", c_uint32),
        ("rule", c_int32),
        ("member", c_int32),
        ("score", c_double),
        ("level_seconds", c_double),
        ("noise", c_double),
        ("learned_steps", c_double),
        ("has_peers", c_int32),
        ("armed", c_int32),
        ("slowdown", c_double),
        ("slowdown_low", c_double),
        ("slowdown_high", c_double),
        ("onset", c_int64),
        ("onset_low", c_int64),
        ("onset_high", c_int64),
        ("class_ratio", c_double),
        ("last_share", c_double),
        ("min_detectable", c_double),
        ("gross_level", c_double),
    ]


class _Event(Structure):
    _fields_ = [
        ("step", c_int64),
        ("rank", c_int32),
        ("kind", c_int32),
        ("from_state", c_int32),
        ("to_state", c_int32),
        ("rule", c_int32),
        ("member", c_int32),
        ("answers", c_uint32),
        ("reserved", c_int32),
        ("slowdown", c_double),
        ("slowdown_low", c_double),
        ("slowdown_high", c_double),
        ("onset", c_int64),
        ("onset_low", c_int64),
        ("onset_high", c_int64),
    ]


@dataclass(frozen=True)
class Report:
    """What is known about one stream; ratios are relative (0.02: 2 % slower), None where nothing can be said."""

    state: State
    answers: Answer
    rule: Rule
    score: float
    level_seconds: float
    noise: float
    learned_steps: int
    has_peers: bool
    slowdown: tuple[float, float, float] | None
    onset: tuple[int, int, int] | None
    class_ratio: float
    last_share: float
    min_detectable: float | None
    gross_level: float | None


@dataclass(frozen=True)
class Event:
    """A stream became or ceased to be CONFIRMED; slowdown and onset are (value, low, high). rank -1 - g: group g."""

    step: int
    rank: int
    kind: int
    source: State
    target: State
    rule: Rule
    answers: Answer
    slowdown: tuple[float, float, float]
    onset: tuple[int, int, int]


_E = c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "create": (POINTER(_Config), POINTER(_E)),
    "step": (_E, c_int64, POINTER(c_double), POINTER(c_uint8), POINTER(c_int32)),
    "push": (_E, c_int64, c_int32, c_int32, c_double),
    "flush": (_E,),
    "hold": (_E, c_int32, c_int32),
    "restart": (_E, c_int32),
    "clear": (_E, c_int32),
    "given": (_E, c_int32, c_int32, c_double, c_double, c_double),
    "report": (_E, c_int32, c_int32, POINTER(_Report)),
    "detectable": (_E, c_int32, c_int32, c_double, c_double, POINTER(c_double)),
    "events": (_E, POINTER(_Event), c_int32, POINTER(c_int32), POINTER(c_uint64)),
    "state_bytes": (_E, c_int32, c_int32, c_void_p, c_size_t, POINTER(c_size_t)),
    "record_header": (POINTER(_Config), c_void_p, c_size_t, POINTER(c_size_t)),
    "record_step": (
        _E,
        c_int64,
        POINTER(c_double),
        POINTER(c_uint8),
        POINTER(c_int32),
        c_void_p,
        c_size_t,
        POINTER(c_size_t),
    ),
    "record_mark": (c_int32, c_int32, c_int32, POINTER(c_double), c_void_p, c_size_t, POINTER(c_size_t)),
    "replay_open": (c_void_p, c_size_t, POINTER(_E), POINTER(c_size_t)),
    "replay_next": (_E, c_void_p, c_size_t, POINTER(c_size_t)),
}
_functions: dict[str, Any] = {}


def _call(name: str, *args: Any) -> None:
    """Calls gpubridge_straggler_<name> and raises on failure."""
    function = _functions.get(name)
    if function is None:
        function = ctypes.CDLL(_native.lib().path)["gpubridge_straggler_" + name]
        function.restype = c_int32
        function.argtypes = _SIGNATURES[name]
        _functions[name] = function
    status = function(*args)
    if status != 0:
        _native.fail(status)


def _ints(values: Sequence[int] | None) -> Any:
    return None if values is None else (c_int32 * len(values))(*values)


class Engine:
    """Judges ranks x kinds streams of step times.

    Args:
        ranks: number of ranks; kinds: sorts of time per rank (computation, input, ...).
        groups: group number per rank; ranks of one group are peers and share a common mode. None: all of one.
        classes: device class per rank, for "slower than its class".
        alarms, days, steps_per_second: the budget: so many false alarms in so many days over all ranks and kinds.
        min_slowdown: smallest relative change that matters.

    Raises:
        GpuBridgeError: an argument is out of range; the text says what is legal.
    """

    def __init__(
        self,
        ranks: int,
        kinds: int = 1,
        *,
        groups: Sequence[int] | None = None,
        classes: Sequence[int] | None = None,
        alarms: float = 1.0,
        days: float = 30.0,
        steps_per_second: float = 1.0,
        min_slowdown: float = 0.0025,
        warmup_steps: int = 50,
        use_peers: bool = True,
        max_hold_steps: int = 2000,
        window_steps: int = 8,
    ) -> None:
        for name, values in (("groups", groups), ("classes", classes)):
            if values is not None and len(values) != ranks:
                raise ValueError(f"{name} has {len(values)} entries for {ranks} ranks")
        self.ranks, self.kinds = ranks, kinds
        self.groups = max(groups) + 1 if groups else 1
        self._config = _Config(
            ctypes.sizeof(_Config),
            ranks,
            kinds,
            _ints(groups),
            _ints(classes),
            alarms,
            days,
            steps_per_second,
            min_slowdown,
            warmup_steps or -1,
            0 if use_peers else -1,
            max_hold_steps,
            window_steps,
        )
        self._handle = _E()
        _call("create", byref(self._config), byref(self._handle))

    def close(self) -> None:
        """Frees the engine; further calls are errors."""
        if self._handle:
            destroy = ctypes.CDLL(_native.lib().path)["gpubridge_straggler_destroy"]
            destroy.restype, destroy.argtypes = None, (_E,)
            destroy(self._handle)
            self._handle = _E()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _arrays(
        self, seconds: Sequence[float], present: Sequence[int] | None, last: Sequence[int] | None
    ) -> tuple[Any, Any, Any]:
        n = self.ranks * self.kinds
        if (
            len(seconds) != n
            or (present is not None and len(present) != n)
            or (last is not None and len(last) != self.groups)
        ):
            raise ValueError(f"a step has {n} seconds (and present flags) and {self.groups} last arrivals")
        return (c_double * n)(*seconds), None if present is None else (c_uint8 * n)(*present), _ints(last)

    def step(
        self,
        number: int,
        seconds: Sequence[float],
        present: Sequence[int] | None = None,
        last: Sequence[int] | None = None,
    ) -> None:
        """One step of all streams: seconds[kind * ranks + rank] > 0; present 0 marks what is missing; last[group] is
        the rank that arrived last, or -1. `number` must grow.

        Raises:
            GpuBridgeError: a bad value or an old number; nothing has changed then.
        """
        _call("step", self._handle, number, *self._arrays(seconds, present, last))

    def push(self, number: int, rank: int, seconds: float, kind: int = 0) -> None:
        """One value, in any order within window_steps."""
        _call("push", self._handle, number, rank, kind, seconds)

    def flush(self) -> None:
        """Judges the steps that still wait for values."""
        _call("flush", self._handle)

    def hold(self, rank: int = -1) -> None:
        """Freezes a rank (-1: all), for evaluation, checkpoints and the like."""
        _call("hold", self._handle, rank, 1)

    def release(self, rank: int = -1) -> None:
        """Ends a hold."""
        _call("hold", self._handle, rank, 0)

    def restart(self, rank: int = -1) -> None:
        """Forgets a rank (-1: all)."""
        _call("restart", self._handle, rank)

    def clear(self, rank: int = -1) -> None:
        """Drops scores and verdict of a rank (-1: all), keeps what was learned."""
        _call("clear", self._handle, rank)

    def report(self, rank: int, kind: int = 0) -> Report:
        """What is known about a stream; rank -1 - g is the common mode of group g."""
        r = _Report(struct_size=ctypes.sizeof(_Report))
        _call("report", self._handle, rank, kind, byref(r))
        standing = r.rule != 0
        return Report(
            State(r.state), Answer(r.answers), Rule(r.rule), r.score, r.level_seconds, r.noise, int(r.learned_steps),
            bool(r.has_peers),
            (r.slowdown, r.slowdown_low, r.slowdown_high) if standing else None,
            (r.onset, r.onset_low, r.onset_high) if standing else None,
            r.class_ratio, r.last_share, r.min_detectable if r.min_detectable >= 0 else None,
            r.gross_level if r.gross_level >= 0 else None,
        )  # fmt: skip

    def detectable(self, rank: int, steps: float = 200.0, probability: float = 0.95, kind: int = 0) -> float | None:
        """Smallest relative slowdown found within `steps` with `probability`; None: not known yet."""
        value = c_double()
        _call("detectable", self._handle, rank, kind, steps, probability, byref(value))
        return value.value if value.value >= 0 else None

    def events(self) -> list[Event]:
        """Changes to and from CONFIRMED since the last call, oldest first."""
        found: list[Event] = []
        block, count = (_Event * 64)(), c_int32()
        while True:
            _call("events", self._handle, block, 64, byref(count), None)
            for v in block[: count.value]:
                found.append(
                    Event(
                        v.step,
                        v.rank,
                        v.kind,
                        State(v.from_state),
                        State(v.to_state),
                        Rule(v.rule),
                        Answer(v.answers),
                        (v.slowdown, v.slowdown_low, v.slowdown_high),
                        (v.onset, v.onset_low, v.onset_high),
                    )
                )
            if count.value < 64:
                return found

    def state_bytes(self, rank: int, kind: int = 0) -> bytes:
        """The stream's whole state, as section 11 of the specification orders it."""
        buffer, n = ctypes.create_string_buffer(1024), c_size_t()
        _call("state_bytes", self._handle, rank, kind, buffer, len(buffer), byref(n))
        return buffer.raw[: n.value]


class Recorder:
    """An engine that writes what it is told to a file, so that `replay` can recompute its verdicts."""

    _MARKS = {"hold": 2, "release": 3, "restart": 4, "clear": 5}

    def __init__(self, engine: Engine, file: BinaryIO) -> None:
        self.engine, self._file = engine, file
        self._buffer = ctypes.create_string_buffer(4096 + engine.ranks * (8 + 13 * engine.kinds))
        self._write("record_header", byref(engine._config))

    def _write(self, name: str, *args: Any) -> None:
        n = c_size_t()
        _call(name, *args, self._buffer, len(self._buffer), byref(n))
        self._file.write(self._buffer.raw[: n.value])

    def step(
        self,
        number: int,
        seconds: Sequence[float],
        present: Sequence[int] | None = None,
        last: Sequence[int] | None = None,
    ) -> None:
        """As Engine.step; recorded once the engine has taken it."""
        self.engine.step(number, seconds, present, last)
        self._write("record_step", self.engine._handle, number, *self.engine._arrays(seconds, present, last))

    def mark(self, name: str, rank: int = -1) -> None:
        """hold, release, restart or clear."""
        getattr(self.engine, name)(rank)
        self._write("record_mark", self._MARKS[name], rank, 0, None)


def replay(data: bytes) -> Iterator[tuple[Engine, list[Event]]]:
    """Feeds a recording to a new engine; yields it with the events of each record.

    Raises:
        GpuBridgeError: the recording is truncated or damaged; everything before that place has been yielded.
    """
    buffer = ctypes.create_string_buffer(data, len(data))
    base, used, handle = ctypes.addressof(buffer), c_size_t(), _E()
    _call("replay_open", base, len(data), byref(handle), byref(used))
    engine = Engine.__new__(Engine)
    engine._handle = handle
    engine.ranks, engine.kinds = (int.from_bytes(data[at : at + 4], "little") for at in (16, 20))
    given = int.from_bytes(data[72:76], "little")
    members = [int.from_bytes(data[76 + 4 * r : 80 + 4 * r], "little") for r in range(engine.ranks)]
    engine.groups = max(members) + 1 if given & 1 else 1
    at = used.value
    while at < len(data):
        _call("replay_next", handle, base + at, len(data) - at, byref(used))
        at += used.value
        yield engine, engine.events()
