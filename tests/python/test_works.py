# SPDX-License-Identifier: Apache-2.0
"""Work and Future: keep-alive under garbage collection, errors that reach C++, callbacks, timeouts."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank

LAYOUT = Layout(("a", "b"))


@pytest.fixture
def pool(ranks: Callable[..., Pool]) -> Pool:
    return ranks(LAYOUT)


def case_work_answers(me: Rank) -> None:
    t = torch.ones(100000)
    work: Any = dist.all_reduce(t, async_op=True)
    assert work.wait() is True
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0].data_ptr() == t.data_ptr()
    assert work.get_future().wait()[0].data_ptr() == t.data_ptr()
    for zero in (None, timedelta(0), timedelta(milliseconds=-1)):
        work = dist.all_reduce(t, async_op=True)
        assert work.wait(zero) is True if zero is not None else work.wait() is True


def case_future_callbacks(me: Rank) -> None:
    """Callbacks run when the data is there, and may wait for other operations themselves."""
    t = torch.full((1000,), float(me.rank))
    work: Any = dist.all_reduce(t, async_op=True)
    future = work.get_future()

    def nested(done: Any) -> float:
        inner = done.value()[0].clone()
        return float(dist.all_reduce(inner, async_op=True).get_future().wait()[0][0])

    assert future.then(nested).wait() == me.size * sum(range(me.size))


def round_of_callbacks(me: Rank, turn: int, waits: bool) -> bool:
    """12 collectives whose callbacks start one more each.

    Callbacks run in the order of submission where they were attached before the operations ended.  Whether they were
    is not in our hands: the callbacks find out first, and the ranks agree (False: this round shows nothing).
    """
    main, known, valid = threading.get_ident(), threading.Event(), True

    def start_next(done: Any, i: int) -> Any:
        nonlocal valid
        if threading.get_ident() == main:
            valid = False
            return torch.zeros(0)
        while not known.wait(0.01):
            pass
        if not valid:
            return torch.zeros(0)
        box = done.value()[0][: 1 + i].clone()
        future = dist.all_reduce(box, async_op=True).get_future()
        return future.wait()[0] if waits else future

    sizes = [4000000] + [1 + 20000 * ((7 * i + turn + me.rank) % 3 == 0) for i in range(1, 13)]
    futures = []
    for i, size in enumerate(sizes):
        t = torch.full((max(size, 13),), float(i))[:13] if i else torch.zeros(size)
        future = dist.all_reduce(t, async_op=True).get_future()
        futures.append(future.then(lambda done, i=i: start_next(done, i)))
    agreed = torch.tensor([int(valid)])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=me.reference)
    valid = bool(agreed)
    known.set()
    got = [future.wait() for future in futures]
    if valid:
        sums = [one if waits else one.wait()[0] for one in got]
        assert [s.tolist() for s in sums] == [[float(i * me.size**2)] * (1 + i) for i in range(13)]
    return valid


def case_callbacks_of_one_group(me: Rank, waits: bool) -> None:
    """More callbacks that wait than there are threads at first (batched PowerSGD does this), all on one group: what
    they start must be in one order on all ranks.
    """
    shown = 0
    for turn in range(200):
        shown += round_of_callbacks(me, turn, waits)
        if shown == 10:
            return
    raise AssertionError(f"only {shown} rounds in which all callbacks came in time")


def case_callback_waits_for_a_later_operation(me: Rank) -> None:
    """What only a later collective can bring: the callback loses its turn instead of stopping the group for ever."""
    later = threading.Event()
    first = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: later.wait(30))
    second = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: later.set())
    start = time.monotonic()
    second.wait()
    assert first.wait() is True and time.monotonic() - start < 20


def case_future_is_done_after_wait(me: Rank) -> None:
    """A future taken before wait() has its value after it, whatever else is going on in the group."""
    for i in range(50):
        works = [dist.all_reduce(torch.ones(1 + 997 * (i % 3)), async_op=True) for _ in range(4)]
        futures = [work.get_future() for work in works]
        works[-1].wait()
        assert futures[-1].done() and futures[-1].value()[0][0].item() == me.size
        for work in works:
            work.wait()


def case_dropped_works(me: Rank) -> None:
    """Works, and tensors, that the user forgets at once."""
    for i in range(300):
        dist.all_reduce(torch.full((5000 + i,), 1.0), async_op=True)
        if i % 50 == 0:
            gc.collect()
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == me.size


def case_cpp_waits_under_gc(me: Rank) -> None:
    """C++ holds only the C++ half of a Work: functional collectives under constant collection."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None
    for i in range(20):
        pending = functional.all_reduce(torch.full((64,), float(i)), "sum", group)
        gc.collect()
        assert pending[0].item() == i * me.size


def case_interrupted_right_after_submit(me: Rank) -> None:
    """Ctrl-C between the submit and the first look at its request: the operation goes on, nothing is lost or leaked."""
    world: Any = dist.group.WORLD
    submit, t = world._submit, torch.full((50000,), 1.0)

    def interrupted(*arguments: Any) -> int:
        assert submit(*arguments) == 0
        raise KeyboardInterrupt

    world._submit = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(t, async_op=True)
    finally:
        world._submit = submit
    after = torch.ones(1)
    work: Any = dist.all_reduce(after, async_op=True)
    assert work.get_future().wait()[0].item() == me.size, "its turn comes after the interrupted one's"
    assert t.eq(me.size).all()
    end = time.monotonic() + 20
    while world._context.in_flight and time.monotonic() < end:
        time.sleep(0.01)
    assert not world._context.in_flight


def case_wait_times_out(me: Rank) -> None:
    """C14: an explicit wait() limit raises TimeoutError that also is a DistBackendError; the operation goes on."""
    t = torch.ones(4)
    if me.rank == 0:
        work: Any = dist.all_reduce(t, async_op=True)
        with pytest.raises(TimeoutError) as caught:
            work.wait(timedelta(milliseconds=200))
        assert isinstance(caught.value, dist.DistBackendError)
        dist.barrier(group=me.reference)
        assert work.wait() is True
    else:
        dist.barrier(group=me.reference)
        dist.all_reduce(t)
    assert t.tolist() == [float(me.size)] * 4


def case_failed_future_reaches_cpp(me: Rank) -> None:
    """Ranks disagree: the future must fail at C++ level, or DDP would go on with garbage or crash."""
    t = torch.ones(10 + me.rank)
    work: Any = dist.all_reduce(t, async_op=True)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank") as caught:
        torch.futures.collect_all([work.get_future()]).wait()[0].wait()
    assert time.monotonic() - start < 5, "a mismatch must raise within 5 s"
    assert "10" in str(caught.value) and "11" in str(caught.value), "both signatures"
    with pytest.raises(dist.DistBackendError):
        work.wait()
    assert not work.is_success() and work.exception() is not None


CASES = (
    case_work_answers,
    case_future_callbacks,
    case_callback_waits_for_a_later_operation,
    case_future_is_done_after_wait,
    case_dropped_works,
    case_cpp_waits_under_gc,
    case_interrupted_right_after_submit,
    case_wait_times_out,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_works(pool: Pool, case: Callable[[Rank], None]) -> None:
    pool.run(case)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "chaining"])
def test_callbacks_of_one_group(pool: Pool, waits: bool) -> None:
    pool.run(case_callbacks_of_one_group, waits)


def test_failed_future_reaches_cpp(pool: Pool) -> None:
    try:
        pool.run(case_failed_future_reaches_cpp)
    finally:
        pool.close()  # its group is aborted


def case_error_in_ddp(me: Rank) -> str:
    """An error inside DDP's reducer: RuntimeError with the text, no crash, no hang."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if me.rank == 1:
        world: Any = dist.group.WORLD
        world.abort()
        return ""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert time.monotonic() - start < 10
    return str(caught.value)


def test_error_in_ddp(pool: Pool) -> None:
    try:
        texts = pool.run(case_error_in_ddp)
        assert "rank 1" in texts[0], texts[0]
    finally:
        pool.close()
