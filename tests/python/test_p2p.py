# SPDX-License-Identifier: Apache-2.0
"""Send and receive: tags, any source, to self, batches of 300, coalescing (B17, B18, B21)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank

LAYOUT = Layout(("a", "a", "b", "b"))


@pytest.fixture
def pool(ranks: Callable[..., Pool]) -> Pool:
    return ranks(LAYOUT)


def done(work: Any, limit: float = 60) -> None:
    assert work is not None
    work.wait(timedelta(seconds=limit))


def case_every_pair(me: Rank) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2):
        for count in (0, 1, 129, 100003):
            for source in range(me.size):
                for to in range(me.size):
                    if source == to:
                        continue
                    want = ((torch.arange(count) + 7 * source + 3 * to) % 2).to(torch.float32).to(dtype)
                    if me.rank == source:
                        dist.send(want.clone(), to)
                    elif me.rank == to:
                        got = torch.ones(count).to(dtype)
                        assert dist.recv(got, source) == source
                        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (dtype, count, source, to)


def case_tags_match(me: Rank) -> None:
    """Receives are matched by tag, whatever the order of the sends."""
    peer = me.rank ^ 1
    sends = [dist.isend(torch.tensor([float(tag)]), peer, tag=tag) for tag in (5, 3, 9)]
    got = {tag: torch.zeros(1) for tag in (9, 5, 3)}
    for work in [dist.irecv(t, peer, tag=tag) for tag, t in got.items()] + sends:
        done(work)
    assert {tag: t.item() for tag, t in got.items()} == {9: 9.0, 5: 5.0, 3: 3.0}


def case_any_source(me: Rank) -> None:
    if me.rank == 0:
        seen = {}
        for _ in range(me.size - 1):
            got = torch.zeros(3)
            source = dist.recv(got)
            seen[source] = got.tolist()
        assert seen == {rank: [float(rank)] * 3 for rank in range(1, me.size)}
    else:
        dist.send(torch.full((3,), float(me.rank)), 0)


def case_to_self(me: Rank) -> None:
    got = torch.zeros(4)
    send = dist.isend(torch.full((4,), 3.0 + me.rank), me.rank)
    done(dist.irecv(got, me.rank))
    done(send)
    assert got.tolist() == [3.0 + me.rank] * 4


def case_batch_of_300(me: Rank) -> None:
    """Asymmetric: to each peer another number of messages of other sizes, in shuffled order of peers."""
    counts = {(s, t): (300 // me.size + 11 * s + 5 * t) % 120 for s in range(me.size) for t in range(me.size) if s != t}
    ops, want = [], []
    for (source, to), count in counts.items():
        for i in range(count):
            value = torch.full((i % 37,), float(1000 * source + 100 * to + i))
            if me.rank == source:
                ops.append(dist.P2POp(dist.isend, value, to))
            elif me.rank == to:
                got = torch.zeros(i % 37)
                ops.append(dist.P2POp(dist.irecv, got, source))
                want.append((got, value))
    for work in dist.batch_isend_irecv(ops):
        done(work)
    for got, value in want:
        assert torch.equal(got, value)


def case_ring_of_blocking_batches(me: Rank) -> None:
    got, mine = torch.zeros(200000), torch.full((200000,), float(me.rank))
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, got, left)]):
        done(work)
    assert got.eq(left).all()


def case_coalescing(me: Rank) -> None:
    a, b = torch.full((5,), float(me.rank)), torch.full((7,), 1.0)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert a[0].item() == sum(range(me.size)) and b[0].item() == me.size
    outs = [torch.zeros(3 * me.size), torch.zeros(2 * me.size)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outs[0], torch.full((3,), float(me.rank)))
        dist.all_gather_into_tensor(outs[1], torch.full((2,), float(me.rank)))
    manager.wait()
    assert outs[1].tolist() == [float(r) for r in range(me.size) for _ in range(2)]
    got = torch.zeros(4)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.isend(torch.full((4,), float(me.rank)), (me.rank + 1) % me.size)
        dist.recv(got, (me.rank - 1) % me.size)
    assert got[0].item() == (me.rank - 1) % me.size


def case_sizes_differ(me: Rank) -> None:
    """B18: a receive of another size than the send raises, and names both."""
    if me.rank == 0:
        dist.isend(torch.zeros(10), 1, tag=77)
    elif me.rank == 1:
        with pytest.raises(dist.DistBackendError, match="10"):
            dist.recv(torch.zeros(4), 0, tag=77)


CASES = (
    case_every_pair,
    case_tags_match,
    case_any_source,
    case_to_self,
    case_batch_of_300,
    case_ring_of_blocking_batches,
    case_coalescing,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_p2p(pool: Pool, case: Callable[[Rank], None]) -> None:
    pool.run(case)


def test_sizes_differ(pool: Pool) -> None:
    pool.run(case_sizes_differ)
    pool.close()  # whether the group survives such an error is the library's choice
