# SPDX-License-Identifier: Apache-2.0
"""The process group: what torch asks of a group besides its operations, and its birth and end.

A subclass of `torch.distributed.ProcessGroup`, so torch's Python calls reach these methods directly and torch's C++
through the trampoline, in every torch version.

Keep-alive: C++ may hold only the C++ half of a Work; if its Python half died, virtual calls would fall to the base
class and wait for ever.  Every group therefore keeps its last works (issue.py), and drops only finished ones.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import multiprocessing.util
import os
import re
import sys
import threading
import weakref
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpubridge import _abi
from gpubridge.torch import context as contexts
from gpubridge.torch.bootstrap import connect
from gpubridge.torch.collectives import Collectives
from gpubridge.torch.context import Context
from gpubridge.torch.errors import (
    DistGpuBridgeError,
    DistTimeoutError,
    DistUnsupportedError,
    DistValueError,
    check,
    error_of,
)
from gpubridge.torch.options import Options, nanoseconds
from gpubridge.torch.p2p import PointToPoint
from gpubridge.torch.untraced import untraced

CODECS = {
    "none": _abi.CODEC_NONE,
    "bf16": _abi.CODEC_BF16,
    "fp16": _abi.CODEC_FP16,
    "fp8_e4m3": _abi.CODEC_FP8_E4M3,
    "fp8_e5m2": _abi.CODEC_FP8_E5M2,
    "int8": _abi.CODEC_INT8,
    "mxfp4": _abi.CODEC_MXFP4,
}
"""Wire codecs by name, numbered as struct gpubridge_op names them."""

DEFAULT_TIMEOUT_NS = 30 * 60 * 1_000_000_000


def _reason() -> bytes | None:
    """Why this process leaves a group, for members that still need it: the exception that is under way, or the uncaught
    one that ended the script.
    """
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt the last error is long over
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or isinstance(error, (GeneratorExit, StopIteration)):
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"exit code {error.code}".encode()
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return " ".join(text.split()).encode()[:159]


class Lifeline:
    """Destroys a comm exactly once; holds no reference to the group, so the garbage collector can call it."""

    def __init__(self, context: Context, comm: int) -> None:
        self.context, self.comm = context, comm
        self.pid = os.getpid()
        self._lock = threading.Lock()

    def end(self) -> None:
        """Destroys the comm and gives the context back; at most 10 s each."""
        with self._lock:
            comm, self.comm = self.comm, 0
        if comm and self.pid == os.getpid():
            reason = _reason()
            self.context.lib.context_farewell(self.context.handle, reason)
            self.context.lib.comm_destroy(comm)
            if not contexts.release(self.context) and reason:
                self.context.lib.context_farewell(self.context.handle, None)

    def end_later(self) -> None:
        """The same on a thread of its own: called while garbage is collected, which must not block."""
        if self.comm and self.pid == os.getpid():
            threading.Thread(target=self.end, name="gpubridge-destroy", daemon=True).start()


# The stubs of torch know one of many torch versions.
_ProcessGroup: Any = dist.ProcessGroup


@untraced
class GpuBridgeGroup(Collectives, PointToPoint, _ProcessGroup):
    """A torch.distributed process group over gpubridge."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, group_id: str, options: Options) -> None:
        _ProcessGroup.__init__(self, rank, size)
        self._rank, self._size = rank, size
        self._store = store
        self._options = options
        self._timeout_ns = nanoseconds(timeout, DEFAULT_TIMEOUT_NS)
        context, comm, self._comm_name = connect(store, rank, size, group_id, self._timeout_ns, options)
        self._init_issue(context, comm)
        self._default_timeout_ns = self._timeout_ns
        self._name, self._desc = group_id, "undefined"
        self._splits = 0
        self._lifeline = Lifeline(context, comm)
        self._finalizer = weakref.finalize(self, self._lifeline.end_later)
        self._finalizer.atexit = False
        _live.add(self)

    # -- identity

    def getBackendName(self) -> str:
        return "gpubridge"

    def name(self) -> str:
        return "gpubridge"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        devices = [torch.device("cpu")]
        if torch.cuda.is_available():
            devices.append(torch.device("cuda"))
        return devices

    def _get_backend(self, device: torch.device | None = None) -> GpuBridgeGroup:
        return self

    def get_backend(self, device: torch.device | None = None) -> GpuBridgeGroup:
        return self

    def _get_backend_name(self) -> str:
        return "gpubridge"

    def get_group_store(self) -> Any:
        return self._store

    @property
    def options(self) -> Options:
        return self._options

    @property
    def codec(self) -> str:
        """The codec of what crosses islands in this group, e.g. "fp8_e4m3"; "none" when nothing is compressed."""
        found = re.search(r"^compression: (\S+)", self.describe(), re.MULTILINE)
        assert found is not None
        return found[1]

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_shrinking(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_time_estimate(self) -> bool:
        return False

    def supports_tensor_alloc(self, *_: Any) -> bool:
        return False

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in list(self._ring):
            work.wait()

    def _set_sequence_number_for_group(self) -> None:
        """The library numbers operations itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self.stats()["ops"]

    def eager_connect_single_device(self, device: Any = None) -> None:
        """All links exist since the group was made."""

    # -- deadlines

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ns = self._default_timeout_ns = nanoseconds(timeout, DEFAULT_TIMEOUT_NS)
        if self._comm:
            self._context.lib.comm_set_timeout(self._comm, self._timeout_ns)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Gives the next operation this much more time."""
        self._extra_timeout_ns += nanoseconds(timeout, 0)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error lists all ranks that did not come, on every rank that did.

        Args:
            timeout: None: the group's; zero: do not wait at all.
            wait_all_ranks: only words depend on it here, as all missing ranks are always named.

        Raises:
            TimeoutError: also a DistBackendError, with Gloo's words; the group is aborted.
        """
        if not self._comm:
            self._refuse()
        limit = nanoseconds(timeout, self._timeout_ns)
        if timeout is not None and not (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout):
            limit = 1
        status = self._context.lib.barrier(self._comm, limit)
        if status != _abi.OK:
            raise self._barrier_error(error_of(status), limit, wait_all_ranks)

    def _barrier_error(self, error: DistGpuBridgeError, limit: int, everybody: bool) -> DistGpuBridgeError:
        """One class and one text for the rank whose deadline passed first and for those that it told."""
        text = str(error)
        _, found, names = text.partition("not arrived there: ")
        if not found:
            return error
        missing = [int(rank) for rank in re.findall(r"rank (\d+)", names.split(" [")[0])]
        if limit == 1:
            words = f"Rank {self._rank} timed out in monitoredBarrier after 0 ms"
        else:
            first, others = (missing, []) if everybody else (missing[:1], missing[1:])
            words = f"Rank{'s'[: len(first) > 1]} {', '.join(map(str, first))} failed to pass monitoredBarrier"
            words += f" in {limit // 1_000_000} ms"
            if others:
                words += f", and so did {', '.join(map(str, others))}"
        if (self._options.global_ranks or range(self._size))[self._rank] in missing:
            words = f"Rank {self._rank} came too late: {words}"
        elif self._rank:
            words = (
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {words}"
            )
        return DistTimeoutError(f"{words} ({text})", _abi.ERR_TIMEOUT)

    # -- sub-groups

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
        **_: Any,
    ) -> GpuBridgeGroup | None:
        """A group of the given ranks of this one, or None for a rank outside; all members of this group call it
        alike.
        """
        self._splits += 1
        ranks = list(new_ranks)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{'-'.join(map(str, ranks))}"
        options = Options.of(opts) if opts is not None else Options.of(self._options)
        parent = self._options.global_ranks or list(range(self._size))
        options.global_ranks = [parent[r] for r in ranks]
        limit = timedelta(microseconds=nanoseconds(timeout, self._timeout_ns) // 1000)
        store = dist.PrefixStore(f"split/{name}", self._store)
        group = GpuBridgeGroup(store, ranks.index(self._rank), len(ranks), limit, name, options)
        group._desc = group_desc or f"{self._desc}:split:{self._splits}"
        return group

    # -- what other backends have and this one does not

    def _lacks(self, what: str, instead: str) -> NoReturn:
        raise DistUnsupportedError(f"gpubridge has no {what}: {instead}")

    def _register_on_completion_hook(self, hook: Any) -> None:
        self._lacks("completion hooks", "use the future of each operation, or stats() of the group")

    def _enable_collectives_timing(self) -> None:
        self._lacks("timing per collective", "read the times in stats() of the group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        self._lacks("merge_remote_group", "make a new group of all ranks with torch.distributed.new_group")

    def shrink(self, *_: Any, **__: Any) -> Any:
        self._lacks("shrink", "abort this group and make a new one of the ranks that are left")

    def allocate_tensor(self, *_: Any, **__: Any) -> Any:
        self._lacks("memory of its own for tensors", "any tensor will do")

    @property
    def mem_allocator(self) -> Any:
        self._lacks("allocator", "any tensor will do")

    def suspend(self) -> None:
        self._lacks("suspend", "destroy the group and make a new one later")

    def resume(self) -> None:
        self._lacks("resume", "make a new group")

    def memory_stats(self) -> dict[str, int]:
        self._lacks("memory_stats", "what it holds is bounded by GPUBRIDGE_MEM_BYTES")

    # -- what the library knows

    def stats(self) -> dict[str, int]:
        """Counters of this group since it was made; see struct gpubridge_comm_stats (bytes, ns)."""
        if not self._comm:
            self._refuse()
        stats = _abi.CommStats(struct_size=ctypes.sizeof(_abi.CommStats))
        check(self._context.lib.comm_stats(self._comm, ctypes.byref(stats)))
        return {name: getattr(stats, name) for name in (field[0] for field in stats._fields_) if name != "struct_size"}

    def codec_stats(self, kind: str = "all_reduce") -> dict[str, dict[str, float]]:
        """What operations of one kind sent from this rank to other islands, by codec; see gpubridge_codec_stats.

        Args:
            kind: all_reduce, reduce, reduce_scatter, all_gather or broadcast.

        Returns:
            For each codec that was used ("none", "fp8_e4m3", ...): its counters (bytes, values), and "snr_db", the
            ratio of signal to quantisation noise of the samples in dB (NaN without samples, infinite without noise).
        """
        if not self._comm:
            self._refuse()
        found: dict[str, dict[str, float]] = {}
        for name, codec in CODECS.items():
            stats = _abi.CodecStats(struct_size=ctypes.sizeof(_abi.CodecStats))
            check(
                self._context.lib.comm_codec_stats(self._comm, getattr(_abi, kind.upper()), codec, ctypes.byref(stats))
            )
            if not stats.ops:
                continue
            row = {field[0]: getattr(stats, field[0]) for field in stats._fields_ if field[0] != "struct_size"}
            signal, noise = row["signal"], row["noise"]
            row["snr_db"] = 10 * math.log10(signal / noise) if signal and noise else math.inf if signal else math.nan
            found[name] = row
        return found

    def describe(self) -> str:
        """Islands, links, transports and algorithms in words."""
        if not self._comm:
            self._refuse()
        length = self._context.lib.comm_describe(self._comm, None, 0)
        text = ctypes.create_string_buffer(length + 1)
        self._context.lib.comm_describe(self._comm, text, length + 1)
        return text.value.decode("utf-8", "replace")

    def error(self) -> DistGpuBridgeError | None:
        """The error that aborted this group, or None."""
        if not self._comm:
            return None
        status = self._context.lib.comm_status(self._comm)
        return None if status == _abi.OK else error_of(status)

    # -- end

    def abort(self) -> None:
        """Fails everything pending, here and on all members."""
        if self._comm:
            self._context.lib.comm_abort(self._comm, b"torch.distributed abort on rank %d" % self._rank)
            self.shutdown()

    def shutdown(self) -> None:
        """Destroys the comm; idempotent, bounded, callable from any thread."""
        self._comm = 0
        _live.discard(self)
        self._finalizer.detach()
        self._lifeline.end()
        self._deliveries.end()
        self._ring.clear()
        self._recent.clear()


_live: weakref.WeakSet[GpuBridgeGroup] = weakref.WeakSet()


def _end_all() -> None:
    """At interpreter exit: every group that nobody destroyed says goodbye, so peers need not find out by silence."""
    for group in list(_live):
        try:
            group.shutdown()
        except Exception:  # the process ends anyway, and its exit code is not ours to change
            pass


atexit.register(_end_all)
# Processes started by multiprocessing skip atexit and run these instead; the child of a fork inherits none.
multiprocessing.util.Finalize(None, _end_all, exitpriority=0)


def create(torch_options: Any, pg_options: Any = None) -> GpuBridgeGroup:
    """What torch.distributed calls to make a group (extended API).

    Raises:
        DistBackendError: of the class that fits; the text says what to do.
    """
    _refuse_mixed_backends()
    options = Options.of(pg_options)
    options.global_ranks = list(torch_options.global_ranks_in_group or [])
    rank, size = torch_options.group_rank, torch_options.group_size
    return GpuBridgeGroup(torch_options.store, rank, size, torch_options.timeout, str(torch_options.group_id), options)


def _refuse_mixed_backends() -> None:
    """torch lets a Python group replace the whole group: "cpu:gloo,cuda:gpubridge" would lose gloo without a word.

    The backend string is not among the creator's arguments; it is found in the caller's frame where that has the known
    name.
    """
    frame: Any = sys._getframe(1)
    for _ in range(3):
        config = frame.f_locals.get("backend_config") if frame is not None else None
        if config is not None:
            names = set(getattr(config, "get_device_backend_map", dict)().values())
            if names - {"gpubridge"}:
                raise DistValueError(
                    f"backend {config}: gpubridge serves cpu and cuda in one group and cannot share it with "
                    f"{sorted(names - {'gpubridge'})}; "
                    'use "gpubridge" (or "cpu:gpubridge,cuda:gpubridge") and a second new_group for the other backend'
                )
            return
        frame = frame.f_back
