# SPDX-License-Identifier: Apache-2.0
"""Values, dtypes and groups: what users hit, one test per situation (those B that no other file is about)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank
from reference import COMPLEX, FLOATS, INTEGERS
from test_values import garbage, reduce_op

ISLANDS = Layout(("a", "a", "b", "b"))
INTERLEAVED = Layout(("cuda", "hip", "cuda", "hip"), emulated=True)


def small(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    t = torch.arange(count) % 7
    return (t + 1j * (t + 1)).to(dtype) if dtype.is_complex else t.to(dtype)


def alone(group: Any, dtype: torch.dtype, count: int) -> None:
    want = small(dtype, count)
    ops = ["SUM"]
    if not dtype.is_complex:
        ops += ["PRODUCT", "MIN", "MAX"]
    if dtype != torch.bool:
        ops += ["AVG"]
    if not (dtype.is_floating_point or dtype.is_complex):
        ops += ["BAND", "BOR", "BXOR"]
    for op in ops:
        got = want.clone()
        dist.all_reduce(got, op=reduce_op(op), group=group)
        assert torch.equal(got, want), (op, dtype, count)
        scattered = garbage(dtype, count)
        dist.reduce_scatter_tensor(scattered, want.clone(), op=reduce_op(op), group=group)
        assert torch.equal(scattered, want), (op, dtype, count)
    outs = [garbage(dtype, count) for _ in range(4)]
    me = dist.get_rank()
    dist.all_gather([outs[0]], want, group=group)
    dist.all_gather_into_tensor(outs[1], want, group=group)
    dist.all_to_all_single(outs[2], want.clone(), group=group)
    dist.scatter(outs[3], [want.clone()], src=me, group=group)
    box = garbage(dtype, count)
    dist.gather(want.clone(), [box], dst=me, group=group)
    for out in (*outs, box):
        assert torch.equal(out, want), (dtype, count)
    same = want.clone()
    dist.broadcast(same, me, group=group)
    dist.reduce(same, me, group=group)
    assert torch.equal(same, want)


def case_b5(me: Rank) -> None:
    groups = [dist.new_group([rank]) for rank in range(me.size)]
    mine = groups[me.rank]
    for dtype in (*FLOATS, *INTEGERS, torch.bool, *COMPLEX):
        for count in (*range(1, 9), 15, 16, 17, 31, 32, 33, 63, 64, 65, 67):
            alone(mine, dtype, count)
    dist.barrier(group=mine)
    dist.destroy_process_group(mine)


def test_b5_group_of_one(ranks: Callable[..., Pool]) -> None:
    """All ops, all dtypes, odd sizes; outputs hold garbage before."""
    ranks(ISLANDS).run(case_b5)


def case_b15(me: Rank) -> None:
    """Complex: SUM, AVG and PREMUL_SUM also from C++, everything else is refused, and data moves."""
    import torch.distributed._functional_collectives as functional

    world: Any = dist.group.WORLD
    for dtype in COMPLEX:
        mine = (torch.arange(9) + 1j * (me.rank + 1)).to(dtype)
        total = (me.size * torch.arange(9) + 1j * sum(range(1, me.size + 1))).to(dtype)
        assert torch.equal(functional.all_reduce(mine.clone(), "sum", world) + 0, total)
        assert torch.allclose(functional.all_reduce(mine.clone(), "avg", world) + 0, total / me.size)
        scattered = functional.reduce_scatter_tensor(mine.repeat(me.size), "sum", 0, world)
        assert torch.equal(scattered + 0, total)
        for op, factor in (("SUM", 1.0), ("AVG", 1 / me.size), ("PREMUL_SUM", 0.5)):
            direct = [mine.clone()]
            options = dist.AllreduceOptions()
            options.reduceOp = reduce_op(op, 0.5)
            world.allreduce(direct, options).wait()
            assert torch.allclose(direct[0], total * factor), op
        for op in ("PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            options, scatter_options = dist.AllreduceOptions(), dist.ReduceScatterOptions()
            reduce_options = dist.ReduceOptions()
            options.reduceOp = scatter_options.reduceOp = reduce_options.reduceOp = reduce_op(op)
            with pytest.raises(TypeError):
                world.allreduce([mine.clone()], options)
            with pytest.raises(TypeError):
                world.reduce([mine.clone()], reduce_options)
            with pytest.raises(TypeError):
                world.reduce_scatter_single(mine.clone(), mine.repeat(me.size), scatter_options)
        gathered = functional.all_gather_tensor(mine, 0, world) + 0
        assert torch.equal(gathered, torch.cat([(torch.arange(9) + 1j * (r + 1)).to(dtype) for r in range(me.size)]))
        got = mine.clone()
        dist.broadcast(got, 1)
        assert torch.equal(got, (torch.arange(9) + 2j).to(dtype))


def test_b15_complex_from_cpp(ranks: Callable[..., Pool]) -> None:
    ranks(ISLANDS).run(case_b15)


# What Backend.hpp calls otherwise than Python does.
PYTHON_NAMES = {
    "supportsSplitting": "supports_splitting",
    "supportsCoalescing": "supports_coalescing",
    "supportsTimeEstimation": "supports_time_estimate",
    "supportsShrinking": "supports_shrinking",
    "supportsTensorAlloc": "supports_tensor_alloc",
    "setTimeout": "set_timeout",
    "startCoalescing": "start_coalescing",
    "endCoalescing": "end_coalescing",
    "getBackendOptions": "options",
    "allreduce_sparse": "allreduce",
    "monitoredBarrier": "monitored_barrier",
    "setSequenceNumberForGroup": "_set_sequence_number_for_group",
    "getSequenceNumberForGroup": "_get_sequence_number_for_group",
    "recvAnysource": "recv_anysource",
    "registerOnCompletionHook": "_register_on_completion_hook",
    "waitForPendingWorks": "_wait_for_pending_works",
    "enableCollectivesTiming": "_enable_collectives_timing",
    "split": "split_group",
    "merge": "merge_remote_group",
    "setGroupUid": "setGroupName",
    "eagerConnectSingleDevice": "eager_connect_single_device",
    "getError": "error",
    "getMemAllocator": "mem_allocator",
    "allocateTensor": "allocate_tensor",
    "getMemoryStats": "memory_stats",
}


def test_b25_every_method_of_backend_hpp() -> None:
    """Each is implemented, or raises by name: none is left to torch's base class, whose errors name a C++ backend."""
    import gpubridge.torch

    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Backend.hpp"
    names = re.findall(r"^  virtual [^(]*?(\w+)\(", header.read_text(), re.MULTILINE)
    assert len(names) > 40
    own: set[str] = set()
    for cls in gpubridge.torch.GpuBridgeGroup.__mro__:
        if cls is dist.ProcessGroup:
            break
        own |= set(vars(cls))
    assert [name for name in names if PYTHON_NAMES.get(name, name) not in own] == []


def case_b29(me: Rank) -> None:
    """Rows and columns of a 2 x 2 mesh, two threads that submit to them in another order on every rank."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, me.size // 2), mesh_dim_names=("rows", "columns"))
    groups = [mesh.get_group("rows"), mesh.get_group("columns")]
    members = [dist.get_process_group_ranks(group) for group in groups]
    failures: list[BaseException] = []

    def use(which: int, turn: int) -> None:
        try:
            for size in (1, 5000, 100000):
                t = torch.full((size,), float(me.rank + turn))
                dist.all_reduce(t, group=groups[which])
                assert t.eq(sum(rank + turn for rank in members[which])).all(), (which, turn, size)
        except BaseException as error:
            failures.append(error)

    for turn in range(50):
        order = (0, 1) if (me.rank + turn) % 2 else (1, 0)
        threads = [threading.Thread(target=use, args=(which, turn)) for which in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


@pytest.mark.parametrize("layout", [ISLANDS, INTERLEAVED], ids=["islands", "vendors"])
def test_b29_groups_at_once(ranks: Callable[..., Pool], layout: Layout) -> None:
    ranks(layout).run(case_b29)
