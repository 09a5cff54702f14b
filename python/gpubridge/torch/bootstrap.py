# SPDX-License-Identifier: Apache-2.0
"""How the members of a group find each other: an exchange of hellos through the torch store.

Only set, get, add, wait and check are used, so stores of different torch versions can serve each other.  All keys live
under an own prefix.  Each exchange is one generation: a ticket from `add` decides which, so the same store can make the
same group again after it was destroyed.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gpubridge import _abi
from gpubridge.torch import context as contexts
from gpubridge.torch.context import Context
from gpubridge.torch.errors import DistTimeoutError, check
from gpubridge.torch.options import Options

PREFIX = "gpubridge"
SECRET_BYTES = 32


class Exchange:
    """One generation of one group's keys in the store."""

    def __init__(self, store: Any, rank: int, size: int, timeout_ns: int) -> None:
        self.store: Any = dist.PrefixStore(PREFIX, store)
        self.rank, self.size = rank, size
        self.deadline = time.monotonic_ns() + timeout_ns
        self.timeout_ns = timeout_ns
        ticket = self.store.add("joins", 1)
        self.generation = (ticket - 1) // size

    def put(self, what: str, value: bytes) -> None:
        """Publishes this rank's value."""
        self.store.set(f"{self.generation}/{what}/{self.rank}", value)

    def get(self, what: str, rank: int) -> bytes:
        """The value that `rank` published.

        Raises:
            DistTimeoutError: it did not within the timeout; the text lists everybody who is missing.
        """
        key = f"{self.generation}/{what}/{rank}"
        left = max(1, (self.deadline - time.monotonic_ns()) // 1_000_000)
        try:
            self.store.wait([key], timedelta(milliseconds=left))
        except (dist.DistError, RuntimeError) as error:
            raise self._missing(what, error) from None
        return bytes(self.store.get(key))

    def _missing(self, what: str, error: BaseException) -> BaseException:
        try:
            missing = [r for r in range(self.size) if not self.store.check([f"{self.generation}/{what}/{r}"])]
        except (dist.DistError, RuntimeError):
            return DistTimeoutError(
                f"rank {self.rank}: the store of the job does not answer any more ({error}); is the process that "
                "serves it alive?"
            )
        return DistTimeoutError(
            f"rank {self.rank} waited {self.timeout_ns / 1e9:g} s for the {what} of group rank(s) {missing} of "
            f"{self.size}: did they start, and do they create their groups in the same order?"
        )


def job_secret(store: Any) -> bytes | None:
    """The secret all processes of the job share: None when a file holds it, else from the store.

    Whoever comes first invents it.  The store is plain text to everybody who reaches it, so this stops accidents;
    against attackers set GPUBRIDGE_SECRET_FILE.
    """
    if os.environ.get("GPUBRIDGE_SECRET_FILE"):
        return None
    shared: Any = dist.PrefixStore(PREFIX, _job_store(store))
    if shared.add("secret/owner", 1) == 1:
        shared.set("secret/value", secrets.token_bytes(SECRET_BYTES).hex())
    return bytes.fromhex(bytes(shared.get("secret/value")).decode())


def _job_store(store: Any) -> Any:
    """The store every process of the job sees alike: the world's, or the one at hand while the world is being made."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return store


def connect(
    store: Any, rank: int, size: int, group_id: str, timeout_ns: int, options: Options
) -> tuple[Context, int, str]:
    """Creates the group's comm.

    Args:
        store: the store torch made for this group.
        rank, size: this process in the group.
        group_id: torch's name of the group, shown in messages.
        timeout_ns: bound of the whole exchange, and the default deadline of operations.

    Returns:
        (context, comm handle, name of the comm).

    Raises:
        DistGpuBridgeError: who is missing, cannot be reached or was refused.
    """
    exchange = Exchange(store, rank, size, timeout_ns)
    if rank == 0:
        exchange.put("name", secrets.token_hex(8).encode())
    exchange.put("host", contexts.host_name().encode())
    local_rank = _local_rank(exchange)
    global_rank = options.global_ranks[rank] if options.global_ranks else rank
    context = contexts.acquire(global_rank, local_rank, job_secret(store), options)
    try:
        name = f"{group_id}.{exchange.get('name', 0).decode()}"
        comm = _create_comm(context, exchange, name, options)
    except BaseException:
        contexts.release(context)
        raise
    return context, comm, name


def _local_rank(exchange: Exchange) -> int:
    """LOCAL_RANK from the launcher; without one, this rank's place among the ranks that share its host."""
    given = os.environ.get("LOCAL_RANK", "")
    if given.isdigit():
        return int(given)
    mine = contexts.host_name()
    return sum(exchange.get("host", r).decode() == mine for r in range(exchange.rank))


def _create_comm(context: Context, exchange: Exchange, name: str, options: Options) -> int:
    config = _abi.CommConfig(
        struct_size=ctypes.sizeof(_abi.CommConfig),
        name=name.encode(),
        rank=exchange.rank,
        size=exchange.size,
        timeout_ns=exchange.timeout_ns,
        settings=options.lines(of_group=True),
    )
    buffer = ctypes.create_string_buffer(_abi.HELLO_BYTES)
    length = ctypes.c_size_t(_abi.HELLO_BYTES)
    check(context.lib.comm_hello(context.handle, ctypes.byref(config), buffer, ctypes.byref(length)))
    exchange.put("hello", buffer.raw[: length.value])
    hellos = [exchange.get("hello", r) for r in range(exchange.size)]
    pointers = (ctypes.c_void_p * exchange.size)(
        *[ctypes.cast(ctypes.c_char_p(h), ctypes.c_void_p).value for h in hellos]
    )
    lengths = (ctypes.c_size_t * exchange.size)(*[len(h) for h in hellos])
    comm = ctypes.c_void_p()
    check(context.lib.comm_create(context.handle, ctypes.byref(config), pointers, lengths, ctypes.byref(comm)))
    assert comm.value is not None
    return comm.value
