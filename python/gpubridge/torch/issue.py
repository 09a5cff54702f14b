# SPDX-License-Identifier: Apache-2.0
"""How an operation gets from torch's arguments into the C library: op structs that are reused, one submit, one Work.

A *slot* is a gpubridge_op with its address, kept per kind of operation so that only the fields which change are
written. Slots are taken from and given back to a list (atomic under the GIL): two threads never share one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from gpubridge import _abi
from gpubridge.torch.delivery import Deliveries, running
from gpubridge.torch.errors import DistAbortedError, DistGpuBridgeError, DistUnsupportedError, DistValueError, error_of
from gpubridge.torch.options import UNSET_TIMEOUT, nanoseconds
from gpubridge.torch.tensors import Copy, copy_back
from gpubridge.torch.untraced import untraced
from gpubridge.torch.work import SLICE_NS, BaseWork, CompositeWork, DeferredWork, RequestWork

if TYPE_CHECKING:
    from gpubridge.torch.context import Context

RING = 4096
"""Works kept alive per group, because C++ may hold only their C++ half (see the keep-alive note in group.py)."""
GRADIENT = _abi.OP_KIND_COUNT
"""Added to an operation's kind where slots are kept: those of gradients, which carry compression's choices."""
RECENT = 16
"""Finished works that still hold large results although nobody waited for them."""


class Slot:
    """A reusable gpubridge_op and the place for its request."""

    __slots__ = ("at", "counts", "op", "request", "request_at")

    def __init__(self, kind: int) -> None:
        self.op = _abi.Op(struct_size=ctypes.sizeof(_abi.Op), kind=kind)
        self.at = ctypes.addressof(self.op)
        self.request = ctypes.c_void_p()
        self.request_at = ctypes.addressof(self.request)
        self.counts: list[Any] = []

    def set_compression(self, compress: bool, residual: torch.Tensor | None, count: int) -> None:
        """What only gradient operations say, whose slots are their own (see GRADIENT).

        Raises:
            DistValueError: the residual is not dense float32 of `count` elements.
        """
        self.op.codec = _abi.CODEC_DEFAULT if compress else _abi.CODEC_NONE
        self.op.residual = None
        if residual is None:
            return
        if residual.dtype != torch.float32 or residual.numel() != count or not residual.is_contiguous():
            raise DistValueError(
                f"a residual must be dense float32 with the input's {count} elements, got {residual.dtype} "
                f"{tuple(residual.shape)}"
            )
        self.op.residual = residual.data_ptr()

    def set_counts(self, send: Sequence[int] | None, recv: Sequence[int] | None) -> None:
        """Uneven blocks, in elements of the op's dtype; the library copies them at submit."""
        op = self.op
        self.counts = [(ctypes.c_uint64 * len(c))(*c) if c is not None else None for c in (send, recv)]
        op.send_counts, op.recv_counts = (ctypes.addressof(c) if c is not None else None for c in self.counts)


@untraced
class SyncWork(BaseWork):
    """Returned, one object per group, by operations that blocked until they were done."""

    def __init__(self) -> None:
        super().__init__([])
        self._done = True

    def wait(self, timeout: Any = None) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        self._no_results()

    def get_future(self) -> torch.futures.Future:
        self._no_results()

    @staticmethod
    def _no_results() -> NoReturn:
        raise DistGpuBridgeError(
            "a blocking operation has no future: its result is in the tensor; or set asyncOp", _abi.ERR_INVALID
        )


@untraced
class Issuer:
    """Part of the process group: slots, submission, coalescing, and the works that must stay alive."""

    _context: Context
    _comm: int

    def _init_issue(self, context: Context, comm: int) -> None:
        self._context = context
        self._comm = comm
        self._slots: list[list[Slot]] = [[] for _ in range(GRADIENT + _abi.OP_KIND_COUNT)]
        self._submit = context.lib.fast_submit
        self._wait = context.lib.fast_wait
        self._free = context.lib.fast_free
        self._run_for = context.lib.fast_run_for
        self._sync_work = SyncWork()
        self._ring: deque[BaseWork] = deque()
        self._recent: deque[RequestWork] = deque()
        self._coalescing: list[DeferredWork] | None = None
        self._deliveries = Deliveries()
        self._extra_timeout_ns = 0
        self._default_timeout_ns = 0

    def _slot(self, kind: int) -> Slot:
        try:
            return self._slots[kind].pop()
        except IndexError:
            return Slot(kind % GRADIENT)

    def _launch(
        self,
        kind: int,
        slot: Slot,
        opts: Any,
        results: list[torch.Tensor],
        keep: list[Any],
        copies: list[Copy],
        device: torch.device,
        wants_source: bool = False,
    ) -> BaseWork:
        """Submits the slot's op: blocking when torch asked for it on CPU memory, else with a Work behind it.

        Args:
            opts: torch's options: `timeout` and, where it exists, `asyncOp` are read; None: asynchronous, default
            timeout.
            results: what the Work answers.
            keep: memory the op borrows.
            copies: dense results to be copied back when done.
            device: where the tensors are.
            wants_source: a receive from anyone, whose sender the Work must know.
        """
        op = slot.op
        on_gpu = device.type == "cuda"
        if on_gpu and not self._context.gpu:
            self._refuse_gpu(device)
        op.flags = self._context.host_flag(device) if self._context.gpu else 0
        op.timeout_ns = 0
        blocking = False
        if opts is not None:
            timeout = opts.timeout
            if timeout != UNSET_TIMEOUT:
                op.timeout_ns = nanoseconds(timeout, 0)
            blocking = not getattr(opts, "asyncOp", True)
        if self._extra_timeout_ns:
            op.timeout_ns = (op.timeout_ns or self._default_timeout_ns) + self._extra_timeout_ns
            self._extra_timeout_ns = 0
        if blocking and not on_gpu and self._coalescing is None:
            self._run(slot, keep)
            if copies:
                copy_back(copies)
            self._slots[kind].append(slot)
            return self._sync_work
        if on_gpu:
            if blocking:
                op.flags = _abi.OP_URGENT
            op.stream = torch._C._cuda_getCurrentRawStream(device.index)  # a stream object costs microseconds
        work = RequestWork(self._context, results, keep, copies, device, on_gpu)
        work._wants_source = wants_source
        if kind not in (_abi.SEND, _abi.RECV):
            work._deliveries, work._parent = self._deliveries, running()
        self._start(slot, work)
        self._slots[kind].append(slot)
        if self._coalescing is not None:
            deferred = DeferredWork(work)
            self._coalescing.append(deferred)
            self._remember(deferred)
            return deferred
        if blocking:
            work.wait()
        return work

    def _run(self, slot: Slot, keep: list[Any]) -> None:
        """Submits and waits; Ctrl-C gets through between slices and leaves the op running with its buffers alive."""
        if not self._comm:
            self._refuse()
        wait = self._wait
        try:
            # Ctrl-C may come up right behind this call, before its status is even stored: hence inside the try.
            status = self._run_for(self._comm, slot.at, SLICE_NS, slot.request_at)
            if status == _abi.OK:
                return
            if status != _abi.AGAIN:
                raise error_of(status)
            request = slot.request.value
            while status == _abi.AGAIN:
                status = wait(request, SLICE_NS)
        except BaseException:
            if slot.request.value is not None:
                self._context.orphans.append((slot.request.value, keep))
            raise
        error = error_of(status) if status != _abi.OK else None
        slot.request.value = None
        self._free(request)
        if error is not None:
            raise error

    def _start(self, slot: Slot, work: RequestWork) -> None:
        if not self._comm:
            self._refuse()
        op, context = slot.op, self._context
        op.flags |= _abi.OP_NOTIFY
        number = op.user = context.number(work)
        slot.request.value = None
        with work._lock:  # a pump that is told of the completion before we have the request waits here
            try:
                # Ctrl-C may come up right behind this call, when the operation is under way: hence the finally.
                status = self._submit(self._comm, slot.at, slot.request_at)
            finally:
                work._request = slot.request.value
                if work._request is None:
                    del context.in_flight[number]
                elif work._deliveries is not None:
                    work._deliveries.add(work)
        if status != 0:
            raise error_of(status)
        self._remember(work)

    def _refuse_gpu(self, device: torch.device) -> NoReturn:
        raise DistUnsupportedError(
            f"a tensor on {device}, but this process drives an emulated vendor or no GPU: use CPU tensors, or unset "
            "GPUBRIDGE_EMULATE before the first group is made"
        )

    def _refuse(self) -> NoReturn:
        raise DistAbortedError("this process group was destroyed: make a new one", _abi.ERR_DESTROYED)

    def _remember(self, work: BaseWork) -> None:
        ring = self._ring
        ring.append(work)
        if len(ring) > RING and ring[0].is_completed():
            ring.popleft()
        if isinstance(work, RequestWork):
            recent = self._recent
            recent.append(work)
            if len(recent) > RECENT:
                oldest = recent.popleft()
                if oldest._done:
                    oldest.forget()
                else:
                    recent.append(oldest)

    def _together(self, works: list[BaseWork]) -> BaseWork:
        """One Work for several operations."""
        if len(works) == 1:
            return works[0]
        work = CompositeWork(works, [t for w in works for t in w._results])
        self._remember(work)
        return work

    # -- coalescing blocks

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        if self._coalescing is not None:
            raise DistGpuBridgeError("coalescing blocks of one group cannot be nested", _abi.ERR_INVALID)
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> BaseWork:
        """Ends the block; the Work stands for everything issued in it."""
        works, self._coalescing = self._coalescing or [], None
        for work in works:
            work._open = False
        return self._together(list(works)) if works else self._sync_work

    def start_coalescing(self, device: torch.device | None = None) -> None:
        self._start_coalescing(device)

    def end_coalescing(self, device: torch.device | None = None) -> BaseWork:
        return self._end_coalescing(device)
