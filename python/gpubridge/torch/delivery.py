# SPDX-License-Identifier: Apache-2.0
"""In which order the futures of a group's collectives complete: the order in which the collectives were submitted.

What a future's callback starts must be started in one order per group on all ranks, but operations finish in another
order on each.  So a finished collective waits for its turn: until those before it are announced and their callbacks
have returned.  A callback may itself wait for collectives that it started; these go ahead of the turn.

A callback that sleeps for something else that only a later collective can bring would stop everything; after
`PATIENCE_S` asleep it loses its turn.  Used from pump threads (context.py) and from threads inside `Work.wait()`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpubridge.torch.work import RequestWork

PATIENCE_S = 0.25
"""How long a callback may sleep while finished collectives wait for their turn."""
LOOK_S = 0.05

_thread = threading.local()


def running() -> RequestWork | None:
    """The work whose callbacks the calling thread is in, or None."""
    return getattr(_thread, "work", None)


class Turn:
    """A work whose callbacks are running."""

    __slots__ = ("asleep_since", "cpu_ns", "thread_id", "work")

    def __init__(self, work: RequestWork) -> None:
        self.work = work
        self.thread_id = threading.get_native_id()
        self.cpu_ns = -1
        self.asleep_since = time.monotonic()

    def has_slept(self) -> bool:
        """Whether its thread has used no CPU for PATIENCE_S; to be called every LOOK_S or so.

        A thread that waits for Python's lock wakes up all the time, so it does not count as asleep.
        """
        now = time.monotonic()
        cpu_ns = _cpu_ns(self.thread_id)
        if cpu_ns != self.cpu_ns:
            self.cpu_ns, self.asleep_since = cpu_ns, now
        return now - self.asleep_since > PATIENCE_S


def _cpu_ns(thread_id: int) -> int:
    """CPU time of a thread of this process; a constant where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{thread_id}/schedstat") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError, ValueError):
        return 0


class Deliveries:
    """The collectives of one group that are not announced yet, in the order of their submission."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[RequestWork] = deque()
        self._turns: list[Turn] = []
        self._watched = False
        self._over = False

    def add(self, work: RequestWork) -> None:
        """Called when `work` was submitted, before anybody can see it finish."""
        with self._changed:
            self._queue.append(work)

    def deliver(self, may_watch: bool = False) -> None:
        """Announces every finished work whose turn it is.

        Args:
            may_watch: stay where finished works must wait for a callback that runs elsewhere, and take its turn away
            if need be; one thread at a time does.
        """
        try:
            while self._deliver_one(may_watch):
                pass
        except BaseException:
            self._put_back()
            raise

    def await_turn(self, work: RequestWork) -> None:
        """Returns when the finished `work` is announced; its callbacks may run in this call.

        Inside a callback it returns at once, as the turn may be over only when that callback returns.
        """
        give_up = time.monotonic() + PATIENCE_S
        try:
            while running() is None and not self._is_announced(work, give_up):
                pass
        except BaseException:
            self._put_back()
            raise

    def end(self) -> None:
        """The group is gone, and so is the order: announces works as they finish."""
        with self._changed:
            self._over = True
        self.deliver()

    def _deliver_one(self, may_watch: bool) -> bool:
        """Whether to call it again."""
        with self._changed:
            work = self._next()
            if work is None:
                if not (may_watch and self._must_watch()):
                    return False
                self._watched = True
                try:
                    self._changed.wait(LOOK_S)
                    self._take_from_sleepers()
                finally:
                    self._watched = False
                return True
            turn = self._give(work)
        if turn is not None:
            self._announce(turn)
        return True

    def _is_announced(self, work: RequestWork, give_up: float) -> bool:
        while self._deliver_one(False):
            pass
        with self._changed:
            if work._announced:
                return True
            self._take_from_sleepers()
            if self._turns or time.monotonic() < give_up or work not in self._queue:
                self._changed.wait(LOOK_S)
                return False
            # A collective before it is not finished, and may wait for something that comes after this call.
            turn = self._give(work)
        if turn is not None:
            self._announce(turn)
        return True

    def _put_back(self) -> None:
        """Ctrl-C may come up between taking a turn and using it: the next thread does that instead."""
        me = threading.get_native_id()
        with self._changed:
            for turn in [turn for turn in self._turns if turn.thread_id == me]:
                self._turns.remove(turn)
                if turn.work not in self._queue:
                    self._queue.appendleft(turn.work)

    # -- with the lock held

    def _next(self) -> RequestWork | None:
        """The work whose turn it is, if it is finished."""
        queue = self._queue
        if not queue:
            return None
        if not self._turns and not self._over:
            return queue[0] if queue[0]._done else None
        top = None if self._over else self._turns[-1].work
        for work in queue:
            if top is None or _started_by(work, top):
                if work._done:
                    return work
                if top is not None:
                    return None
        return None

    def _give(self, work: RequestWork) -> Turn | None:
        """Takes the work from the queue; None: nobody asks, and from now on answers come at once."""
        if work._base is None and not work._listeners:
            work._announced = True
            work._parent = None
            self._take(work)
            return None
        turn = Turn(work)
        self._turns.append(turn)
        self._take(work)
        return turn

    def _take(self, work: RequestWork) -> None:
        if self._queue[0] is work:
            self._queue.popleft()
        else:
            self._queue.remove(work)

    def _must_watch(self) -> bool:
        return bool(self._turns) and not self._watched and any(work._done for work in self._queue)

    def _take_from_sleepers(self) -> None:
        if any(work._done for work in self._queue):
            self._turns = [turn for turn in self._turns if not turn.has_slept()]

    # -- without it

    def _announce(self, turn: Turn) -> None:
        before, work = running(), turn.work
        _thread.work = work
        try:
            work._announce()
        finally:
            _thread.work = before
            with self._changed:
                if turn in self._turns:
                    self._turns.remove(turn)
                work._announced = True
                work._parent = self._running_ancestor(work)
                self._changed.notify_all()

    def _running_ancestor(self, work: RequestWork) -> RequestWork | None:
        """What a finished work leaves to those it started; keeps chains of callbacks from growing for ever."""
        parent = work._parent
        while parent is not None and all(turn.work is not parent for turn in self._turns):
            parent = parent._parent
        return parent


def _started_by(work: RequestWork, ancestor: RequestWork) -> bool:
    parent = work._parent
    while parent is not None:
        if parent is ancestor:
            return True
        parent = parent._parent
    return False
