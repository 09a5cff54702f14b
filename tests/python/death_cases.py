# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_deaths.py do.  Each function is a whole script of every rank; `CULPRIT` is who dies."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from forks import await_note, note, tell

CULPRIT = 1


def setup(**arguments: Any) -> tuple[int, int]:
    dist.init_process_group("gpubridge", **arguments)
    return dist.get_rank(), dist.get_world_size()


def mark_death() -> None:
    """The moment from which the survivors' 5 s count."""
    note("death", repr(time.monotonic()))


def report(error: BaseException, what: str = "raised") -> None:
    late = time.monotonic() - float(await_note("death"))
    names = [cls.__name__ for cls in type(error).__mro__]
    tell(what=what, late=late, text=str(error), classes=names, status=getattr(error, "status", None))


@contextlib.contextmanager
def reported(what: str = "raised") -> Iterator[None]:
    """The block must raise; tells what."""
    try:
        yield
    except dist.DistBackendError as error:
        report(error, what)
    else:
        tell(what=what, text="nothing was raised")


def all_reduce_for_ever() -> None:
    for round_ in range(10**9):
        dist.all_reduce(torch.ones(1000))
        if round_ == 3:
            note(f"works.{dist.get_rank()}")


def own_connections() -> list[int]:
    """Descriptors of this process's connected TCP sockets, but for the store's (the master port)."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {sock.getsockname()[1], sock.getpeername()[1]}
                if sock.type == socket.SOCK_STREAM and int(os.environ["MASTER_PORT"]) not in ports:
                    found.append(fd)
    return found


# ---- C9, C10, C11: a peer is gone ----


def dies_by(death: Callable[[], None]) -> None:
    """The culprit dies after some rounds of all_reduce; everybody else tells what it sees now and later."""
    rank, size = setup()
    for _ in range(4):
        dist.all_reduce(torch.ones(1000))
    pending: Any = dist.all_reduce(torch.ones(1 << 20), async_op=True) if rank != CULPRIT else None
    note(f"pending.{rank}")
    if rank == CULPRIT:
        for other in range(size):
            await_note(f"pending.{other}")  # nobody still needs an earlier operation
        mark_death()
        death()
        return
    with reported("pending"):
        pending.wait()
    with reported("later"):
        dist.barrier()
    with reported("later message"):
        dist.recv(torch.ones(1), CULPRIT)
    before = time.process_time()
    time.sleep(0.5)
    tell(what="idle", cpu=time.process_time() - before)
    raise SystemExit(7)


def killed() -> None:
    dies_by(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits_at_once() -> None:
    dies_by(lambda: os._exit(0))


def exits() -> None:
    dies_by(lambda: sys.exit(3))


def raises() -> None:
    def death() -> None:
        raise ValueError("batch 17 is empty")

    dies_by(death)


def raises_and_cleans_up() -> None:
    def death() -> None:
        try:
            raise ValueError("batch 17 is empty")
        finally:
            dist.destroy_process_group()

    dies_by(death)


def resets() -> None:
    """Connections that end by RST instead of FIN, as of a crash with unread data."""

    def death() -> None:
        for fd in own_connections():
            with socket.socket(fileno=os.dup(fd)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        os.kill(os.getpid(), signal.SIGKILL)

    dies_by(death)


def connection_closed_below() -> None:
    """The connections end cleanly (FIN) although the process lives; it too must raise."""

    def death() -> None:
        for fd in own_connections():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        with reported("pending"):
            dist.barrier()
        raise SystemExit(7)

    dies_by(death)


def interrupted() -> None:
    """Ctrl-C on one rank, inside a collective."""

    def death() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        time.sleep(0.2)
        signal.raise_signal(signal.SIGINT)

    dies_by(death)


def cut_off() -> None:
    """Somebody outside cuts, stops or kills; everybody tells."""
    setup()
    with reported():
        all_reduce_for_ever()
    raise SystemExit(7)


def first_reason() -> None:
    """Rank 2 fails; rank 0 gives up because of it; rank 1 waits for rank 0 in a group without rank 2."""
    rank, _ = setup()
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        mark_death()
        raise OSError("no space left on device")
    if rank == 0:
        dist.all_reduce(torch.ones(4))  # uncaught: ends this rank too
    with reported():
        dist.all_reduce(torch.ones(4), group=pair)
    raise SystemExit(7)


def caught_out_of_memory() -> None:
    """A rank that catches its error goes on with its next operation, which is not what the others call."""
    rank, _ = setup()
    t = torch.ones(1000)
    dist.all_reduce(t)
    with reported():
        try:
            if rank == CULPRIT:
                raise torch.OutOfMemoryError("out of memory")
            dist.all_reduce(t)
        except torch.OutOfMemoryError:
            mark_death()
        dist.broadcast(t, 0)
        dist.barrier()
    raise SystemExit(7)


def caught_out_of_memory_last() -> None:
    """The same operation for ever: the rank that skipped one ends one operation early."""
    rank, _ = setup()
    dist.all_reduce(torch.ones(1000))
    with reported():
        for round_ in range(5):
            if rank == CULPRIT and round_ == 2:
                continue
            dist.all_reduce(torch.ones(1000))
        if rank == CULPRIT:
            mark_death()
            dist.destroy_process_group()
            tell(what="raised", text="left")
            return
    raise SystemExit(7)


# ---- C14 and timeouts ----


def missing_in_barrier() -> None:
    """Ranks 2 and 3 do not come."""
    rank, size = setup(timeout=timedelta(seconds=60))
    dist.barrier()
    if rank >= 2:
        for other in range(2):
            await_note(f"told.{other}")
        with reported("late"):
            dist.barrier()
        return
    if rank == 0:
        mark_death()
    await_note("death")
    with reported("barrier"):
        if os.environ["BARRIER"] == "monitored":
            dist.group.WORLD.monitored_barrier(timedelta(seconds=1.5), wait_all_ranks=True)  # type: ignore[union-attr]
        else:
            dist.barrier(timeout=timedelta(seconds=1.5))
    note(f"told.{rank}")


def wait_times_out() -> None:
    """wait(timeout) returns by an error while the operation goes on, and may be called again."""
    rank, _ = setup()
    if rank == 0:
        mark_death()
        t = torch.ones(4)
        work: Any = dist.all_reduce(t, async_op=True)
        with reported("wait"):
            work.wait(timedelta(milliseconds=300))
        note("waited")
        work.wait()
        tell(what="value", value=t[0].item())
    else:
        await_note("waited")
        dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def operation_times_out() -> None:
    """The group's own timeout: every rank is told who did not come."""
    rank, _ = setup(timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier(group)
    if rank == 0:
        mark_death()
        with reported("operation"):
            dist.all_reduce(torch.ones(4), group=group)
        note("over")
    else:
        await_note("over")
        with reported("operation"):
            dist.all_reduce(torch.ones(4), group=group)


def batch_times_out() -> None:
    """A batch of sends and receives of which some have no match."""
    rank, _ = setup(timeout=timedelta(seconds=60))
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    t = [torch.ones(30000) for _ in range(6)]
    dist.barrier(group)
    if rank == 0:
        mark_death()
        batch = [dist.P2POp(dist.irecv, t[0], 1, group, 5), dist.P2POp(dist.irecv, t[1], 2, group, 6)]
        batch += [dist.P2POp(dist.isend, t[2], 2, group, 7), dist.P2POp(dist.irecv, t[3], 1, group, 8)]
    elif rank == 1:
        batch = [dist.P2POp(dist.isend, t[0], 0, group, 5)]
    else:
        batch = []
    with reported("batch"):
        works: list[Any] = dist.batch_isend_irecv(batch) if batch else []
        for work in works:
            work.wait()
        if rank:
            await_note("over")
            dist.barrier(group)
    if rank == 0:
        note("over")


# ---- C15, C16: ways to leave ----


def leaves_by(leave: Callable[[], None]) -> None:
    """Work in flight on every rank, then the script ends."""
    setup()
    works = [dist.all_reduce(torch.ones(300000), async_op=True) for _ in range(8)]
    dist.barrier()
    with contextlib.suppress(IndexError):
        atexit.register(note, f"exits.{dist.get_rank()}")
    del works[:4]
    leave()


def ends_without_destroy() -> None:
    leaves_by(lambda: None)


def exits_with_code() -> None:
    leaves_by(lambda: sys.exit(20 + dist.get_rank()))


def exits_in_thread() -> None:
    """sys.exit in a thread ends that thread only."""

    def leave() -> None:
        thread = threading.Thread(target=sys.exit, args=(9,))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(4))
        sys.exit(40 + dist.get_rank())

    leaves_by(leave)


def exits_while_a_thread_waits() -> None:
    """A daemon thread sits in a collective that never ends."""

    def leave() -> None:
        if dist.get_rank() == 0:
            threading.Thread(target=dist.recv, args=(torch.ones(4), 1), daemon=True).start()
            time.sleep(0.2)
        else:
            await_note("exits.0")
        sys.exit(50 + dist.get_rank())

    leaves_by(leave)


def interrupted_everywhere() -> None:
    """Ctrl-C in a terminal reaches all ranks at once."""
    setup()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    all_reduce_for_ever()


# ---- C18 ----


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        return float(index)


def loader_workers() -> None:
    """DataLoader forks eight workers from a rank with a group; another child is killed; collectives stay right."""
    rank, size = setup()
    dist.all_reduce(torch.ones(4))
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=8, multiprocessing_context="fork")
    total = torch.zeros(1)
    for batch in loader:
        part = torch.tensor([float(batch.sum())])
        dist.all_reduce(part)
        total += part
    tell(what="sum", value=total.item(), want=size * sum(range(64)))
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(5):
        t = torch.ones(100000)
        dist.all_reduce(t)
        assert t[-1].item() == size
    listing = subprocess.run(
        ["sh", "-c", "ls -l /proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
    ).stdout
    tell(what="inherited", sockets=listing.count("socket:"))
    dist.destroy_process_group()


# ---- C19 ----


def shares_a_device() -> None:
    """Every rank says that it is local rank 0."""
    mark_death()
    with reported("init"):
        setup(timeout=timedelta(seconds=20))
    os._exit(7)


# ---- afterwards ----


def survivors_go_on() -> None:
    """After a death the survivors make a new world in the same processes."""
    rank, size = setup()
    dist.all_reduce(torch.ones(4))
    if rank == CULPRIT:
        mark_death()
        os.kill(os.getpid(), signal.SIGKILL)
    with reported():
        all_reduce_for_ever()
    dist.destroy_process_group()
    place = {0: 0, 2: 1}[rank]
    store = dist.TCPStore("127.0.0.1", int(os.environ["SECOND_PORT"]), 2, place == 0)
    dist.init_process_group("gpubridge", store=store, rank=place, world_size=2)
    t = torch.full((100000,), float(rank))
    dist.all_reduce(t)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, rank)
    tell(what="again", value=t[-1].item(), ranks=everybody)
    dist.destroy_process_group()


def stopped_for_a_moment() -> None:
    """A stop shorter than the peer timeout is no death."""
    rank, size = setup()
    dist.all_reduce(torch.ones(4))
    note(f"works.{rank}")
    await_note("resumed")
    for _ in range(50):
        t = torch.ones(1000)
        dist.all_reduce(t)
        assert t[0].item() == size
    tell(what="went on")
    dist.destroy_process_group()
