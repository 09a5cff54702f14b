# SPDX-License-Identifier: Apache-2.0
"""The process's one gpubridge_context, shared by all groups, and the pump threads on its completion queue.

Pump threads block in C without the GIL and finish works.  User callbacks behind futures run on them and may themselves
wait for other operations, so before a pump goes to work it makes sure that another one is waiting.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import torch

from gpubridge import _abi, _native
from gpubridge.torch.errors import DistValueError, check

if TYPE_CHECKING:
    from gpubridge.torch.options import Options
    from gpubridge.torch.work import RequestWork

log = logging.getLogger("gpubridge")

MAX_PUMPS = 32
JOIN_S = 2.0


class Context:
    """Owns a gpubridge_context; made by `acquire`, gone when the last group has called `release`."""

    def __init__(self, rank: int, local_rank: int, secret: bytes | None, options: Options) -> None:
        self.lib = _native.lib()
        self.pid = os.getpid()
        self.rank = rank
        self.settings = options.lines(of_group=False)
        kind, index = _device(local_rank, options)
        emulated = _emulated(local_rank)
        self.gpu = kind != _abi.DEVICE_CPU and not emulated
        self.gate = self.gpu and kind == _abi.DEVICE_CUDA and os.environ.get("GPUBRIDGE_GATE", "auto") != "off"
        self.blocking_wait = os.environ.get("GPUBRIDGE_BLOCKING_WAIT", "0") not in ("0", "")
        self.handle = self._create(kind, index, rank, local_rank, secret, options)
        self.in_flight: dict[int, RequestWork] = {}
        self.orphans: list[Any] = []  # requests and buffers of operations whose caller was interrupted
        self._numbers = itertools.count(1)
        self._pump_lock = threading.Lock()
        self._idle_pumps = 0
        self._pumps: list[threading.Thread] = []
        self._stopping = False
        self._side_streams: dict[int, Any] = {}

    def _create(self, kind: int, index: int, rank: int, local: int, secret: bytes | None, options: Options) -> int:
        master = os.environ.get("MASTER_ADDR")
        config = _abi.ContextConfig(
            struct_size=ctypes.sizeof(_abi.ContextConfig),
            device_kind=kind,
            device_index=index,
            global_rank=rank,
            local_rank=local,
            secret=None if secret is None else ctypes.cast(ctypes.c_char_p(secret), ctypes.c_void_p),
            secret_bytes=0 if secret is None else len(secret),
            master_addr=master.encode() if master else None,
            settings=options.lines(of_group=False),
            versions=b"torch " + ".".join(torch.__version__.split("+")[0].split(".")[:2]).encode(),
        )
        handle = ctypes.c_void_p()
        check(self.lib.context_create(ctypes.byref(config), ctypes.byref(handle)))
        assert handle.value is not None
        return handle.value

    # -- operations in flight

    def number(self, work: RequestWork) -> int:
        """Registers a work under a new number, which the completion queue will return."""
        number = next(self._numbers)
        self.in_flight[number] = work
        if not self._pumps:
            self._start_first_pump()
        return number

    def host_flag(self, device: torch.device) -> int:
        """Flag of operations on host memory although the context drives a GPU."""
        return _abi.OP_HOST_BUFFERS if self.gpu and device.type == "cpu" else 0

    def source_of(self, request: int | None) -> int:
        rank = ctypes.c_int32()
        check(self.lib.request_source(request, ctypes.byref(rank)))
        return rank.value

    def words_of(self, request: int | None) -> str:
        """What an unfinished operation waits for."""
        text = ctypes.create_string_buffer(512)
        self.lib.request_describe(request, text, len(text))
        return text.value.decode("utf-8", "replace") or "it has just finished"

    def side_stream(self, device: torch.device | None) -> Any:
        """The stream on which this layer orders copies and futures of a GPU."""
        assert device is not None
        index = device.index if device.index is not None else torch.cuda.current_device()
        stream = self._side_streams.get(index)
        if stream is None:
            stream = self._side_streams.setdefault(index, torch.cuda.Stream(index))
        return stream

    # -- pumps

    def _start_first_pump(self) -> None:
        with self._pump_lock:
            if not self._pumps and not self._stopping:
                self._start_pump()

    def _start_pump(self) -> None:
        """Called with the pump lock held."""
        self._idle_pumps += 1  # counts from now: it is as good as waiting
        thread = threading.Thread(target=self._pump, name=f"gpubridge-pump-{len(self._pumps)}", daemon=True)
        self._pumps.append(thread)
        thread.start()

    def _pump(self) -> None:
        user = (ctypes.c_uint64 * 1)()
        count = ctypes.c_int32()
        completions, where = self.lib.completions, ctypes.byref(count)
        while True:
            # One at a time: a callback may wait for the next completion, which another pump must be able to take.
            status = completions(self.handle, user, 1, -1, where)
            if status == _abi.AGAIN:
                continue
            if status != _abi.OK:
                return
            work = self.in_flight.pop(user[0], None)
            if work is not None:
                self._run(work)

    def _run(self, work: RequestWork) -> None:
        with self._pump_lock:
            self._idle_pumps -= 1
            if self._idle_pumps == 0 and not self._stopping and len(self._pumps) < MAX_PUMPS:
                self._start_pump()
        try:
            work._complete()
        except Exception:
            log.exception("gpubridge: a callback of a completed operation raised")
        finally:
            with self._pump_lock:
                self._idle_pumps += 1

    # -- end

    def _free_requests(self) -> None:
        """Gives back what nobody waits for any more: every operation is over, because its comm was destroyed.

        The library insists that no request outlives its context.
        """
        while self.orphans:
            request, _ = self.orphans.pop()
            self.lib.fast_free(request)
        while self.in_flight:
            try:
                _, work = self.in_flight.popitem()
                work._complete()
            except KeyError:  # a pump that still runs a callback took the last one
                return
            except Exception:
                log.exception("gpubridge: a callback of a completed operation raised")

    def destroy(self) -> None:
        """Stops the pumps and destroys the context; bounded by the library's 10 s plus 2 s per stuck callback
        thread.
        """
        with self._pump_lock:
            self._stopping = True
            pumps = list(self._pumps)
        self.lib.completions_stop(self.handle)
        me = threading.current_thread()
        for pump in pumps:
            if pump is not me:
                pump.join(JOIN_S)
        self._free_requests()
        handle, self.handle = self.handle, 0
        if any(pump.is_alive() for pump in pumps if pump is not me) or me in pumps:
            # A callback still runs on a pump, which will look at the queue once more: keep the context for the process.
            log.warning("gpubridge: a future's callback is still running; its context stays until the process ends")
            return
        self.lib.context_destroy(handle)


def _emulated(local_rank: int) -> bool:
    """Whether GPUBRIDGE_EMULATE names a vendor for this rank (one word, or a list by local rank)."""
    words = [word.strip() for word in os.environ.get("GPUBRIDGE_EMULATE", "").split(",")]
    if len(words) > 1 and local_rank >= len(words):
        raise DistValueError(
            f"GPUBRIDGE_EMULATE lists {len(words)} ranks, but there is a local rank {local_rank}: name one vendor per "
            "local rank, or start fewer processes"
        )
    return (words[local_rank] if len(words) > 1 else words[0]) not in ("", "none")


def _device(local_rank: int, options: Options) -> tuple[int, int]:
    """(kind, ordinal) of this process's device."""
    if not torch.cuda.is_available():
        return _abi.DEVICE_CPU, 0
    kind = _abi.DEVICE_HIP if torch.version.hip else _abi.DEVICE_CUDA
    if options.device is not None:
        return kind, options.device
    # current_device() is what torch.cuda.set_device chose; 0 when nobody chose, and then the launcher's number counts.
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return kind, current or local_rank % torch.cuda.device_count()


def host_name() -> str:
    """Names this host well enough to count the ranks on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}"
    except OSError:
        return socket.gethostname()


_lock = threading.Lock()
_context: Context | None = None
_references = 0


def acquire(rank: int, local_rank: int, secret: bytes | None, options: Options) -> Context:
    """The process's context, created when there is none; every call needs one `release`."""
    global _context, _references
    with _lock:
        if _context is None or _context.pid != os.getpid():
            _context = Context(rank, local_rank, secret, options)
            _references = 0
        elif extra := options.lines(of_group=False):
            if extra != _context.settings:
                raise DistValueError(
                    f"{extra.decode().splitlines()[0]}: a setting of the whole process, which has groups already: "
                    "give it to init_process_group or set it in the environment"
                )
        _references += 1
        return _context


def release(context: Context) -> bool:
    """Gives one reference back; the last one destroys the context.  Returns whether it is gone."""
    global _context, _references
    with _lock:
        if context is not _context or context.pid != os.getpid():
            return True
        _references -= 1
        if _references > 0:
            return False
        _context = None
    context.destroy()
    return True
