# SPDX-License-Identifier: Apache-2.0
"""Work objects and futures.

A Work owns a C request and the tensors it borrows.  It is finished once, by whoever comes first: a thread in `wait()`
or a pump thread (context.py) that was told of the completion; its futures complete when it is its turn (delivery.py).
Errors reach C++ callers because the future they get is the result of a `.then` callback that raises
(Future.set_exception is invisible to C++).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from gpubridge import _abi
from gpubridge.torch.errors import DistAbortedError, DistGpuBridgeError, DistTimeoutError, error_of
from gpubridge.torch.options import nanoseconds
from gpubridge.torch.tensors import Copy, copy_back
from gpubridge.torch.untraced import untraced

if TYPE_CHECKING:
    from gpubridge.torch.context import Context
    from gpubridge.torch.delivery import Deliveries

SLICE_NS = 100_000_000
"""A blocking wait looks for signals (Ctrl-C) this often."""
KEEP_RESULT_BYTES = 65536
"""Results up to this size stay readable through a Work for as long as it lives; larger ones are let go when done."""


@untraced
class BaseWork(Work):
    """What every Work of this backend answers; `_done` is set once, after `_error` and the results."""

    def __init__(self, results: list[torch.Tensor], device: torch.device | None = None) -> None:
        super().__init__()
        self._results: list[torch.Tensor] = results
        self._device = device
        self._done = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._base: torch.futures.Future | None = None
        self._future: torch.futures.Future | None = None
        self._listeners: list[Callable[[], None]] = []

    # -- for subclasses

    def _announce(self) -> None:
        """Tells futures and composite works; called once, without the lock, after `_done` was set."""
        base = self._base
        if base is not None:
            base.set_result(None)
        for listener in self._listeners:
            listener()
        self._listeners = []

    def _when_done(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when done, at once if that is now."""
        with self._lock:
            if not self._done:
                self._listeners.append(listener)
                return
        listener()

    def _outcome(self, _: Any = None) -> list[torch.Tensor]:
        """The results, or raises the error; as a `.then` callback it makes the future fail at C++ level."""
        if self._error is not None:
            raise self._error
        return self._results

    # -- torch's interface

    def get_future(self) -> torch.futures.Future:
        """A future of the list of results; it fails with the text of the error."""
        with self._lock:
            if self._future is not None:
                return self._future
            base: torch.futures.Future = torch.futures.Future()
            self._future = base.then(self._outcome)
            if not self._done:
                self._base = base
                return self._future
        # Done already: the callback runs here, and the future carries its results or its error.
        base.set_result(None)
        return self._future

    def get_future_result(self) -> torch.futures.Future:
        return self.get_future()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors; waits for them."""
        self.wait()
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise NotImplementedError

    def source_rank(self) -> int:
        raise DistGpuBridgeError("source_rank: only receives know one", _abi.ERR_INVALID)

    def _source_rank(self) -> int:
        return self.source_rank()


@untraced
class DoneWork(BaseWork):
    """The Work of an operation that has finished already, as one shared object per group or one per call."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        super().__init__(results)
        self._done = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


@untraced
class RequestWork(BaseWork):
    """One operation in the C library."""

    def __init__(
        self,
        context: Context,
        results: list[torch.Tensor],
        keep: list[Any],
        copies: list[Copy],
        device: torch.device | None,
        on_gpu: bool,
    ) -> None:
        super().__init__(results, device)
        self._context = context
        self._request: int | None = None
        self._waiters = 0
        self._keep = keep
        self._copies = copies
        self._on_gpu = on_gpu
        self._copied: Any = None  # event after the copies back on a GPU
        self._source = -1
        self._wants_source = False
        self._deliveries: Deliveries | None = None  # None: announced as soon as finished
        self._announced = False
        self._parent: RequestWork | None = None  # in whose callback this one was started
        self._weak: list[weakref.ref[torch.Tensor]] = []

    # -- finishing

    def _finish(self) -> None:
        """Takes the outcome over if the request is complete; any thread, any number of times."""
        with self._lock:
            if self._done or self._request is None:
                return
            status = self._context.lib.fast_test(self._request)
            if status == _abi.AGAIN:
                return
            if status != _abi.OK:
                self._error = error_of(status)
            else:
                self._take_results()
            self._release()
            self._done = True
            self._free_request()
        if self._deliveries is None:
            self._announce()

    def _complete(self) -> None:
        """The library says that the operation is over: finishes it and runs the callbacks whose turn it is."""
        self._finish()
        if self._deliveries is not None:
            self._deliveries.deliver(may_watch=True)

    def _take_results(self) -> None:
        try:
            if self._copies:
                self._copy_back()
            if self._wants_source:
                self._source = self._context.source_of(self._request)
        except BaseException as error:  # a failed copy back must reach the waiters, whoever runs into it
            self._error = error

    def _copy_back(self) -> None:
        if not self._on_gpu:
            copy_back(self._copies)
            self._copies = []
        elif self._copied is None:
            with torch.cuda.stream(self._context.side_stream(self._device)):
                self._copy_on_stream()

    def _copy_on_stream(self) -> None:
        """GPU: copies on the current stream of the device, which is already ordered after the operation."""
        copy_back(self._copies)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))

    def _release(self) -> None:
        """Lets the borrowed memory go; results stay, see `forget`."""
        self._keep = []
        if not self._on_gpu:
            self._copies = []

    def forget(self) -> None:
        """Holds large results only weakly from now on: the user's own reference is the one that counts.

        Called after wait(), and by the group for works it sees pass by.  Small results stay, for get_future() calls
        that come late (DDP's join); a future holds its results itself.
        """
        if self._done and self._results and self._future is None and not self._weak:
            if sum(t.numel() * t.element_size() for t in self._results) > KEEP_RESULT_BYTES:
                self._weak = [weakref.ref(t) for t in self._results]
                self._results = []

    def _outcome(self, _: Any = None) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        if not self._weak:
            return self._results
        results = [t for t in (ref() for ref in self._weak) if t is not None]
        if len(results) < len(self._weak):
            raise DistGpuBridgeError(
                "the results of this operation were let go after wait(); keep the tensors themselves"
            )
        return results

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outcome()

    def _free_request(self) -> None:
        """Called with the lock held."""
        if self._waiters == 0 and self._request is not None:
            self._context.lib.fast_free(self._request)
            self._request = None

    # -- waiting

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks (CPU) or makes the current stream wait (GPU) for the result.

        Args:
            timeout: how long to block; None, zero and negative mean the operation's own deadline.

        Raises:
            DistBackendError: of the class that fits; TimeoutError when `timeout` passed, while the operation goes on.
        """
        if not self._done:
            limit = nanoseconds(timeout, 0)
            if self._on_gpu and not limit and not self._context.blocking_wait:
                self._wait_on_stream()
            else:
                self._wait_on_host(limit)
        elif self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        if self._deliveries is not None and self._done and not self._announced:
            if self._base is not None or self._listeners:
                self._deliveries.await_turn(self)
        if self._error is not None:
            raise self._error
        if self._results:
            self.forget()
        return True

    def _enter(self) -> int | None:
        with self._lock:
            if self._done or self._request is None:
                return None
            self._waiters += 1
            return self._request

    def _leave(self) -> None:
        with self._lock:
            self._waiters -= 1
            if self._done:
                self._free_request()

    def _wait_on_host(self, limit: int) -> None:
        request = self._enter()
        if request is None:
            return
        wait = self._context.lib.fast_wait
        end = time.monotonic_ns() + limit if limit else 0
        try:
            status = wait(request, min(SLICE_NS, limit) if limit else SLICE_NS)
            while True:
                if status != _abi.AGAIN:
                    self._finish()
                    if self._done:
                        return
                left = end - time.monotonic_ns() if limit else SLICE_NS
                if left <= 0:
                    raise DistTimeoutError(
                        f"wait: not done within {limit / 1e9:g} s: {self._context.words_of(request)}; it goes on, its "
                        "buffers stay in use"
                    )
                status = wait(request, min(SLICE_NS, left))
        finally:
            self._leave()

    def _wait_on_stream(self) -> None:
        request = self._enter()
        if request is None:
            return
        stream = torch.cuda.current_stream(self._device)
        try:
            status = self._context.lib.request_wait_stream(request, stream.cuda_stream)
            if status != _abi.OK:
                raise error_of(status)
            with self._lock:
                if self._copied is not None:
                    stream.wait_event(self._copied)
                elif self._copies:
                    self._copy_on_stream()
        finally:
            self._leave()

    def is_completed(self) -> bool:
        if not self._done:
            self._finish()
        return self._done

    def source_rank(self) -> int:
        """Rank (in the group) of the sender of a finished receive from anyone."""
        self.wait()
        return self._source

    def get_future(self) -> torch.futures.Future:
        if not self._on_gpu:
            return super().get_future()
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future(devices=[] if self._device is None else [self._device])
                enqueue_now = self._context.gate
            else:
                return self._future
        if enqueue_now:
            self._complete_gpu_future()
        else:
            self._when_done(self._complete_gpu_future)
        return self._future

    def _complete_gpu_future(self) -> None:
        """Completes the future on a stream that is ordered after the operation, as NCCL does."""
        assert self._future is not None
        with torch.cuda.stream(self._context.side_stream(self._device)):
            self.wait()
            self._future.set_result(self._results)


@untraced
class CompositeWork(BaseWork):
    """Several operations seen as one: coalesced collectives."""

    def __init__(self, works: list[BaseWork], results: list[torch.Tensor]) -> None:
        super().__init__(results)
        self._works = works
        self._left = len(works)
        if not works:
            self._done = True
        for work in works:
            work._when_done(self._one_done)

    def _one_done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left or self._done:
                return
            self._error = next((w._error for w in self._works if w._error is not None), None)
            self._done = True
        self._announce()

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = nanoseconds(timeout, 0)
        end = time.monotonic_ns() + limit
        first: BaseException | None = None
        for work in self._works:
            try:
                left = timedelta(microseconds=max(1, (end - time.monotonic_ns()) // 1000)) if limit else None
                work.wait(left)
            except (DistGpuBridgeError, DistAbortedError) as error:
                first = first or error
        if first is not None:
            raise first
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@untraced
class DeferredWork(BaseWork):
    """An operation inside a coalescing block: `wait()` returns at once until the block has ended."""

    def __init__(self, inner: BaseWork) -> None:
        super().__init__(inner._results)
        self._inner = inner
        self._open = True
        inner._when_done(self._inner_done)

    def _inner_done(self) -> None:
        self._error = self._inner._error
        with self._lock:
            self._done = True
        self._announce()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True if self._open else self._inner.wait(timeout)

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def source_rank(self) -> int:
        return self._inner.source_rank()
