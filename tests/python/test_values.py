# SPDX-License-Identifier: Apache-2.0
"""Every collective by value, bit for bit against the specified order and rounding, on every island layout.

Data depends on rank and position; outputs are filled with garbage before.  Equal bits to one specification on every
rank are also equal bits between ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank
from reference import COMPLEX, FLOATS, INTEGERS, difference, operations, reduced, same_bits, values

LAYOUTS = {
    "1+1": Layout(("a", "b")),
    "2+2": Layout(("a", "a", "b", "b")),
    "3+1": Layout(("a", "a", "a", "b")),
    "1+4": Layout(("a", "b", "b", "b", "b")),
    "ABAB": Layout(("a", "b", "a", "b")),
    "three": Layout(("a", "b", "c")),
    "emulated-2+2": Layout(("cuda", "cuda", "hip", "hip"), emulated=True),
    "emulated-ABAB": Layout(("cuda", "hip", "cuda", "hip"), emulated=True),
}
LARGE = 1000003
SIZES = (0, 1, 7, 127, 128, 129, 1000, LARGE)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
FACTOR = 0.3


@pytest.fixture(scope="module", params=LAYOUTS)  # one after the other: only one layout's ranks live at a time
def pool(request: pytest.FixtureRequest, ranks: Callable[..., Pool]) -> Pool:
    return ranks(LAYOUTS[request.param])


def reduce_op(name: str, factor: Any = FACTOR) -> Any:
    return dist._make_nccl_premul_sum(factor) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def inputs_of(me: Rank, dtype: torch.dtype, count: int, seed: int, op: str) -> list[torch.Tensor]:
    return [values(dtype, count, rank, seed, gentle=op == "PRODUCT") for rank in range(me.size)]


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert same_bits(got, want), f"{what}: {difference(got, want)}"


def assert_near(got: torch.Tensor, inputs: list[torch.Tensor], what: str) -> None:
    """The distance from a float64 sum stays below one rounding of the type plus those of the accumulator."""
    if not got.dtype.is_floating_point or not got.numel():
        return
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    scale = torch.stack([x.double().abs() for x in inputs]).sum(0)
    bound = torch.finfo(got.dtype).eps * (exact.abs() + scale) + 1e-7 * scale + torch.finfo(got.dtype).tiny
    worst = ((got.double() - exact).abs() - bound).max().item()
    assert worst <= 0, f"{what}: {worst} beyond the bound of a float64 sum"


# ---- reductions ----


def ops_and_sizes(dtype: torch.dtype) -> list[tuple[str, int]]:
    """Every op with every size, but for the large one: the sum, and of the other ops another with each dtype."""
    ops = operations(dtype)
    large = ("SUM", ops[DTYPES.index(dtype) % len(ops)]) if "GB_TEST_FULL" not in os.environ else ops
    return [(op, count) for op in ops for count in SIZES if count < LARGE or op in large]


def case_all_reduce(me: Rank, dtype: torch.dtype) -> int:
    done = 0
    for op, count in ops_and_sizes(dtype):
        inputs = inputs_of(me, dtype, count, done, op)
        got = inputs[me.rank].clone()
        dist.all_reduce(got, op=reduce_op(op))
        what = f"all_reduce {op} {dtype} x {count}"
        assert_bits(got, reduced(inputs, me.island_ranks, op, FACTOR), what)
        if op == "SUM":
            assert_near(got, inputs, what)
        done += 1
    return done


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(case_all_reduce, dtype) == [len(ops_and_sizes(dtype))] * pool.layout.size


def case_reduce(me: Rank) -> None:
    """A4: every root in every island."""
    for root in range(me.size):
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            for op in operations(dtype):
                for count in (0, 1, 129, 5000):
                    inputs = inputs_of(me, dtype, count, root, op)
                    got = inputs[me.rank].clone()
                    dist.reduce(got, root, op=reduce_op(op))
                    want = reduced(inputs, me.island_ranks, op, FACTOR) if me.rank == root else inputs[me.rank]
                    assert_bits(got, want, f"reduce to {root} {op} {dtype} x {count}")


def test_reduce(pool: Pool) -> None:
    pool.run(case_reduce)


def case_reduce_scatter(me: Rank) -> None:
    """B1, B19: tensor, list and uneven list forms, every op."""
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int64):
        for op in operations(dtype):
            for count in (0, 1, 7, 129, 40001):
                inputs = inputs_of(me, dtype, count * me.size, count, op)
                want = reduced(inputs, me.island_ranks, op, FACTOR)
                got = torch.full((count,), 77, dtype=dtype)
                dist.reduce_scatter_tensor(got, inputs[me.rank].clone(), op=reduce_op(op))
                own = want[me.rank * count : (me.rank + 1) * count]
                assert_bits(got, own, f"reduce_scatter {op} {dtype} x {count}")
            sizes = [(r * 37) % 91 for r in range(me.size)]
            inputs = inputs_of(me, dtype, sum(sizes), 5, op)
            want = reduced(inputs, me.island_ranks, op, FACTOR).split(sizes)
            got = torch.full((sizes[me.rank],), 77, dtype=dtype)
            parts = [t.clone() for t in inputs[me.rank].split(sizes)]
            dist.reduce_scatter(got, parts, op=reduce_op(op))
            assert_bits(got, want[me.rank], f"uneven reduce_scatter {op} {dtype}")


def test_reduce_scatter(pool: Pool) -> None:
    pool.run(case_reduce_scatter)


def case_premul_forms(me: Rank) -> None:
    """B26: the factor as a float and as a tensor, bf16 included; multiplied exactly once."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for factor in (0.5, 1.0 / 3, torch.tensor([0.3], dtype=torch.bfloat16), torch.tensor([0.7])):
            inputs = inputs_of(me, dtype, 1001, 9, "PREMUL_SUM")
            got = inputs[me.rank].clone()
            dist.all_reduce(got, op=reduce_op("PREMUL_SUM", factor))
            number = factor.item() if isinstance(factor, torch.Tensor) else factor
            assert_bits(got, reduced(inputs, me.island_ranks, "PREMUL_SUM", number), f"PREMUL {factor} {dtype}")


def test_premul_factor_float_and_tensor(pool: Pool) -> None:
    pool.run(case_premul_forms)


# ---- movement ----


def moved(me: Rank, dtype: torch.dtype, count: int, rank: int, seed: int) -> torch.Tensor:
    if dtype.is_floating_point and dtype not in FLOATS:
        return values(torch.uint8, count, rank, seed).view(dtype)
    return values(dtype, count, rank, seed)


def garbage(dtype: torch.dtype, count: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.ones(count, dtype=torch.bool)
    return torch.full((count * size,), 0xA5, dtype=torch.uint8).view(dtype)


def case_move(me: Rank) -> None:
    """A4 and B19: broadcast, gather and scatter for every root; all_gather and all_to_all in every form."""
    for dtype in MOVED:
        for count in (0, 1, 7, 129, 20011):
            for root in range(me.size):
                move_rooted(me, dtype, count, root)
            move_all_gather(me, dtype, count)
            move_all_to_all(me, dtype, count)


def move_rooted(me: Rank, dtype: torch.dtype, count: int, root: int) -> None:
    what = f"{dtype} x {count}, root {root}"
    everybody = [moved(me, dtype, count, rank, count) for rank in range(me.size)]
    got = everybody[root].clone() if me.rank == root else garbage(dtype, count)
    dist.broadcast(got, root)
    assert_bits(got, everybody[root], f"broadcast {what}")
    lists = [garbage(dtype, count) for _ in range(me.size)] if me.rank == root else None
    dist.gather(everybody[me.rank].clone(), lists, dst=root)
    for rank, part in enumerate(lists or []):
        assert_bits(part, everybody[rank], f"gather {what}, block {rank}")
    out = garbage(dtype, count)
    dist.scatter(out, [t.clone() for t in everybody] if me.rank == root else None, src=root)
    assert_bits(out, everybody[me.rank], f"scatter {what}")


def move_all_gather(me: Rank, dtype: torch.dtype, count: int) -> None:
    everybody = [moved(me, dtype, count, rank, 3) for rank in range(me.size)]
    got = garbage(dtype, count * me.size)
    dist.all_gather_into_tensor(got, everybody[me.rank].clone())
    assert_bits(got, torch.cat([t.view(torch.uint8) for t in everybody]).view(dtype), f"all_gather {dtype} x {count}")
    parts = [garbage(dtype, count) for _ in range(me.size)]
    dist.all_gather(parts, everybody[me.rank].clone())
    uneven = [moved(me, dtype, (rank * 53 + count) % 301, rank, 4) for rank in range(me.size)]
    holes = [garbage(dtype, t.numel()) for t in uneven]
    dist.all_gather(holes, uneven[me.rank].clone())
    for rank in range(me.size):
        assert_bits(parts[rank], everybody[rank], f"all_gather list {dtype} x {count}")
        assert_bits(holes[rank], uneven[rank], f"uneven all_gather {dtype} x {count}")
    got = garbage(dtype, count * me.size)
    own = got.narrow(0, me.rank * count, count)
    own.copy_(everybody[me.rank])
    dist.all_gather_into_tensor(got, own)
    assert_bits(got, torch.cat([t.view(torch.uint8) for t in everybody]).view(dtype), f"in-place all_gather {dtype}")


def move_all_to_all(me: Rank, dtype: torch.dtype, count: int) -> None:
    """Block (from, to) has its own seed, so a block that lands at the wrong place is seen."""

    def block(source: int, to: int, n: int) -> torch.Tensor:
        return moved(me, dtype, n, source, 100 + to)

    def cat(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in parts]).view(dtype)

    peers = range(me.size)
    got = garbage(dtype, count * me.size)
    dist.all_to_all_single(got, cat([block(me.rank, to, count) for to in peers]))
    assert_bits(got, cat([block(source, me.rank, count) for source in peers]), f"all_to_all_single {dtype} x {count}")

    def uneven(source: int, to: int) -> int:
        # B17: rank 0 sends nothing, nobody sends to the last rank.
        return 0 if source == 0 or to == me.size - 1 else (source * 31 + to * 17 + count) % 211

    send, recv = [uneven(me.rank, to) for to in peers], [uneven(source, me.rank) for source in peers]
    got = garbage(dtype, sum(recv))
    dist.all_to_all_single(got, cat([block(me.rank, to, send[to]) for to in peers]), recv, send)
    assert_bits(got, cat([block(s, me.rank, recv[s]) for s in peers]), f"all_to_all splits {dtype} x {count}")
    outs = [garbage(dtype, n) for n in recv]
    dist.all_to_all(outs, [block(me.rank, to, send[to]).clone() for to in peers])
    for source in peers:
        assert_bits(outs[source], block(source, me.rank, recv[source]), f"all_to_all list {dtype} x {count}")


def test_movement(pool: Pool) -> None:
    pool.run(case_move)


# ---- single values the promises name ----


def case_integers_wrap(me: Rank) -> None:
    """B14: modular, and no float path."""
    big = torch.tensor([2**53 + 1, 2**63 - 1], dtype=torch.int64)
    dist.all_reduce(got := big.clone() if me.rank == 0 else torch.tensor([0, 1], dtype=torch.int64))
    want = [2**53 + 1, (2**63 - 1 + me.size - 1 + 2**63) % 2**64 - 2**63]
    assert got.tolist() == want, got
    got = torch.full((3,), 127, dtype=torch.int8)
    dist.all_reduce(got)
    assert got.tolist() == [(127 * me.size + 128) % 256 - 128] * 3


def case_average_truncates(me: Rank) -> None:
    """B3: toward zero, never floored, never zero."""
    got = torch.tensor([7, -7], dtype=torch.int32) if me.rank == 0 else torch.zeros(2, dtype=torch.int32)
    dist.all_reduce(got, op=dist.ReduceOp.AVG)
    assert got.tolist() == [7 // me.size, -(7 // me.size)], got


def case_half_accumulates(me: Rank) -> None:
    """B9 and D17: float32 accumulation, one rounding."""
    half = {0: 60000.0, 1: 60000.0, 2: -60000.0}
    got = torch.tensor([half.get(me.rank, -60000.0 if me.size == 2 else 0.0)], dtype=torch.float16)
    dist.all_reduce(got)
    assert got.item() == {2: float("inf")}.get(me.size, 60000.0), got
    got = torch.tensor([256.0 if me.rank == 0 else 1.0 if me.rank < 3 else 0.0], dtype=torch.bfloat16)
    dist.all_reduce(got)
    assert got.item() == (258.0 if me.size > 2 else 256.0), got


def case_bool_is_logic(me: Rank) -> None:
    """B13: bytes are 0 or 1 whatever came in."""
    raw = torch.tensor([2, 0, 255 if me.rank == 0 else 0], dtype=torch.uint8).view(torch.bool)
    dist.all_reduce(raw)
    assert raw.view(torch.uint8).tolist() == [1, 0, 1]


def case_nan_everywhere(me: Rank) -> None:
    """MIN and MAX propagate NaN, from whichever rank it comes."""
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        for source in range(me.size):
            for dtype in (torch.float32, torch.float16, torch.float64):
                got = torch.full((200,), float(me.rank), dtype=dtype)
                if me.rank == source:
                    got[17] = float("nan")
                dist.all_reduce(got, op=op)
                assert got[17].isnan() and not got[16].isnan(), (op, source, dtype)


NAMED = (case_integers_wrap, case_average_truncates, case_half_accumulates, case_bool_is_logic, case_nan_everywhere)


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.__name__)
def test_named_values(pool: Pool, case: Callable[..., None]) -> None:
    pool.run(case)
