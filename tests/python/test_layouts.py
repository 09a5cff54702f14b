# SPDX-License-Identifier: Apache-2.0
"""Odd tensors: strides, expansion, conjugation, channels_last, no elements, no dimensions, aliases (B10, B11, B17)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank

LAYOUT = Layout(("a", "a", "b", "b"))


@pytest.fixture
def pool(ranks: Callable[..., Pool]) -> Pool:
    return ranks(LAYOUT)


def base(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 1000 * rank


def total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, 1),
    "column": lambda t: t[:, 1],
    "every second": lambda t: t[::2],
    "offset": lambda t: t[3:, 2:],
    "permuted": lambda t: t.view(6, 2, 4, 1).permute(2, 3, 0, 1),
    "element": lambda t: t[2, 3],
    "nothing": lambda t: t[3:3],
    "dense": lambda t: t,
}


def case_in_place_writes_through(me: Rank) -> None:
    """In-place forms write back through the strides and leave the rest of the storage alone."""
    for name, view in VIEWS.items():
        storage = base(me.rank, 6, 8)
        dist.all_reduce(view(storage))
        want = base(me.rank, 6, 8)
        view(want).copy_(total(view(base(rank, 6, 8)) for rank in range(me.size)))
        assert torch.equal(storage, want), name
        storage = base(me.rank, 6, 8)
        dist.broadcast(view(storage), 1)
        want = base(me.rank, 6, 8)
        view(want).copy_(view(base(1, 6, 8)))
        assert torch.equal(storage, want), name


def case_outputs_through_views(me: Rank) -> None:
    for name, view in VIEWS.items():
        mine = view(base(me.rank, 6, 8))
        outs = [view(torch.zeros(6, 8, dtype=torch.float64)) for _ in range(me.size)]
        dist.all_gather(outs, mine)
        for rank, out in enumerate(outs):
            assert torch.equal(out, view(base(rank, 6, 8))), (name, rank)
        got = view(torch.zeros(6, 8, dtype=torch.float64))
        dist.reduce_scatter(got, [view(base(me.rank * 10 + to, 6, 8)) for to in range(me.size)])
        assert torch.equal(got, total(view(base(r * 10 + me.rank, 6, 8)) for r in range(me.size))), name
        work = dist.all_reduce(async_view := view(base(me.rank, 6, 8)), async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(async_view, total(view(base(rank, 6, 8)) for rank in range(me.size))), name


def case_expanded(me: Rank) -> None:
    """Stride-0 gradients do arrive as inputs; as an output there is no defined result."""
    row = torch.full((1, 8), float(me.rank + 1)).expand(me.size, 8)
    got = torch.zeros(8)
    dist.reduce_scatter_tensor(got, row)
    assert got.tolist() == [me.size * (me.size + 1) / 2] * 8
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.zeros(1, 8).expand(3, 8))
    dist.all_reduce(torch.zeros(1))  # nobody sent anything: the group still works


def case_channels_last(me: Rank) -> None:
    """B11: strides may differ between ranks, results go by logical index."""
    shape = (2, 3, 4, 5)
    memory = torch.channels_last if me.rank % 2 else torch.contiguous_format
    t = base(me.rank, *shape).contiguous(memory_format=memory)
    dist.all_reduce(t)
    assert torch.equal(t, total(base(rank, *shape) for rank in range(me.size)))
    assert t.is_contiguous(memory_format=memory)


def case_conjugate_and_negative(me: Rank) -> None:
    z = torch.complex(base(me.rank, 5), base(me.rank, 5) + 1)
    outs = [torch.zeros(5, dtype=torch.complex128) for _ in range(me.size)]
    world: Any = dist.group.WORLD
    world.allgather([outs], [z.conj()]).wait()
    for rank, out in enumerate(outs):
        assert torch.equal(out, torch.complex(base(rank, 5), -base(rank, 5) - 1))
    negative = z.conj().imag
    assert negative.is_neg()
    dist.all_reduce(negative)
    assert torch.equal(negative.resolve_neg(), total(-base(rank, 5) - 1 for rank in range(me.size)))


def case_shapes_without_content(me: Rank) -> None:
    scalar = torch.tensor(float(me.rank))
    dist.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == sum(range(me.size))
    for shape in ((0,), (3, 0), (0, 4)):
        t = torch.zeros(shape)
        dist.all_reduce(t)
        dist.broadcast(t, 0)
        dist.all_gather([torch.zeros(shape) for _ in range(me.size)], t)
        dist.all_to_all_single(torch.zeros(0), torch.zeros(0))


def case_aliases(me: Rank) -> None:
    """Outputs that are parts of inputs, and lists that are runs of one storage."""
    n = 1003
    whole = base(me.rank, me.size, n)
    dist.reduce_scatter_tensor(whole[me.rank], whole)
    assert torch.equal(whole[me.rank], total(base(rank, me.size, n)[me.rank] for rank in range(me.size)))
    same = base(me.rank, me.size * n)
    dist.all_to_all_single(same, same)
    want = torch.cat([base(rank, me.size, n)[me.rank] for rank in range(me.size)])
    assert torch.equal(same, want)
    parts = list(base(me.rank, me.size, n).unbind(0))
    dist.scatter(parts[2], parts if me.rank == 1 else None, src=1)
    assert torch.equal(parts[2], base(1, me.size, n)[me.rank])
    gathered = torch.zeros(me.size, n, dtype=torch.float64)
    gathered[me.rank] = base(me.rank, n)
    dist.gather(gathered[me.rank], list(gathered.unbind(0)) if me.rank == 2 else None, dst=2)
    if me.rank == 2:
        assert torch.equal(gathered, torch.stack([base(rank, n) for rank in range(me.size)]))


def case_refusals(me: Rank) -> None:
    """What cannot be done is refused by name, before anything is sent."""
    fp8 = torch.zeros(4).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        dist.all_reduce(fp8)
    with pytest.raises(TypeError, match="sparse"):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    with pytest.raises(TypeError, match="sparse"):
        dist.all_reduce(torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX)
    with pytest.raises(TypeError, match="meta"):
        dist.all_reduce(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="AVG"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), op=dist.ReduceOp.AVG)
    with pytest.raises(TypeError):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="split"):
        dist.all_to_all_single(torch.zeros(5), torch.zeros(5), [1] * me.size, [2] * me.size)
    with pytest.raises(ValueError, match="blocks"):
        dist.all_gather_into_tensor(torch.zeros(7), torch.zeros(2))
    world: Any = dist.group.WORLD
    options = dist.GatherOptions()
    options.rootRank = me.rank
    with pytest.raises(ValueError, match="blocks"):
        world.gather_single(torch.zeros(2 * me.size), torch.zeros(2, dtype=torch.int32), options)
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == me.size


def case_sparse(me: Rank) -> None:
    """all_reduce of sparse gradients: other numbers of entries on every rank, and a rank without any."""
    for dense_shape in ((), (3,)):
        rows = torch.arange(2 * me.rank) % 5
        t = torch.sparse_coo_tensor(rows.unsqueeze(0), base(me.rank, len(rows), *dense_shape), (9, *dense_shape))
        want = total(
            torch.sparse_coo_tensor(
                (torch.arange(2 * r) % 5).unsqueeze(0), base(r, 2 * r, *dense_shape), (9, *dense_shape)
            ).to_dense()
            for r in range(me.size)
        )
        average = t.clone()
        dist.all_reduce(t)
        assert t.is_sparse and torch.equal(t.to_dense(), want)
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        assert torch.allclose(average.to_dense(), want / me.size)


CASES = (
    case_in_place_writes_through,
    case_outputs_through_views,
    case_expanded,
    case_channels_last,
    case_conjugate_and_negative,
    case_shapes_without_content,
    case_aliases,
    case_refusals,
    case_sparse,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_layouts(pool: Pool, case: Callable[[Rank], None]) -> None:
    pool.run(case)
