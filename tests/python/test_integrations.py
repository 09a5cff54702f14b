# SPDX-License-Identifier: Apache-2.0
"""What stands on a process group: DDP, FSDP2, functional collectives, DTensor, objects, groups (B24, E4 to E9)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import BACKEND, Layout, Pool, Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYOUT = Layout(("a", "a", "b", "b"))


@pytest.fixture
def pool(ranks: Callable[..., Pool]) -> Pool:
    return ranks(LAYOUT)


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5)).double()


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, 12, generator=generator).double(), torch.randn(rows, 5, generator=generator).double()


def share(t: torch.Tensor, me: Rank) -> torch.Tensor:
    return t.chunk(me.size)[me.rank]


def train_alone(steps: int, rows: int) -> tuple[nn.Module, list[float]]:
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rows)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def assert_close(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9), (name, (p - q).abs().max())


def case_ddp_equals_single_process(me: Rank, options: dict[str, Any]) -> None:
    single, losses = train_alone(20, 8 * me.size)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.002, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        x, y = batch(step, 8 * me.size)
        loss = nn.functional.mse_loss(model(share(x, me)), share(y, me))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        assert abs(mean.item() - losses[step]) < 1e-9, step
    assert_close(model.module, single)


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


@pytest.mark.parametrize("options", DDP_OPTIONS.values(), ids=DDP_OPTIONS)
def test_ddp_equals_single_process(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(case_ddp_equals_single_process, options)


def case_ddp_accumulates(me: Rank) -> None:
    """E5: three micro-batches under no_sync and a fourth: one reduction per bucket and step."""
    model = DistributedDataParallel(network())
    want = network()
    x, y = batch(0, 16 * me.size)
    nn.functional.mse_loss(want(x), y).backward()
    world: Any = dist.group.WORLD
    before = world.stats()["ops"] if BACKEND == "gpubridge" else 0
    parts = list(zip(share(x, me).chunk(4), share(y, me).chunk(4), strict=True))
    with model.no_sync():
        for a, b in parts[:3]:
            (nn.functional.mse_loss(model(a), b) / 4).backward()
    if BACKEND == "gpubridge":
        assert world.stats()["ops"] == before, "no_sync must not communicate"
    a, b = parts[3]
    (nn.functional.mse_loss(model(a), b) / 4).backward()
    for p, q in zip(model.module.parameters(), want.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)


class Branches(nn.Module):
    """Three layers side by side; odd ranks run them in the opposite order, so their gradients come that way too."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(12, 5) for _ in range(3)).double()
        self.reverse = reverse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = reversed(self.branches) if self.reverse else self.branches
        return torch.stack([branch(x * (1 + i)) for i, branch in enumerate(order)]).sum(0)


def case_ddp_reversed_backward(me: Rank) -> None:
    """E9: gradients ready in another order on one rank: the buckets stay the same on all, before and after DDP
    rebuilds them in step 1.
    """
    model = DistributedDataParallel(Branches(me.rank % 2 == 1), bucket_cap_mb=0.0001)
    alone = [Branches(False), Branches(True)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, *alone)]
    for step in range(5):
        x, y = batch(step, 4 * me.size)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(share(x, me)), share(y, me)).backward()
        for rank in range(me.size):  # what each rank computes, in one process
            part = Rank(rank, me.size, me.islands)
            nn.functional.mse_loss(alone[rank % 2](share(x, part)), share(y, part)).backward()
        for p, *others in zip(model.parameters(), *(m.parameters() for m in alone), strict=True):
            want = sum(other.grad for other in others if other.grad is not None) / me.size
            assert p.grad is not None and torch.allclose(p.grad, torch.as_tensor(want), rtol=0, atol=1e-12), step
            for other in others:
                other.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def case_ddp_join(me: Rank) -> None:
    """E4: uneven inputs, both divide modes; C++ keeps the join's Work for later."""
    for by_initial_size in (True, False):
        model = DistributedDataParallel(network())
        with model.join(divide_by_initial_world_size=by_initial_size):
            for step in range(2 + me.rank):
                x, y = batch(step, 4)
                nn.functional.mse_loss(model(x), y).backward()
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        others = [torch.zeros_like(flat) for _ in range(me.size)]
        dist.all_gather(others, flat)
        assert all(torch.equal(flat, other) for other in others)


def case_ddp_hooks_and_buffers(me: Rank) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # Not the batched PowerSGD hook: torch 2.13's own raises AssertionError in _orthogonalize, on Gloo as well.
    def hooks() -> list[tuple[Any, Any]]:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return [
            (None, default_hooks.allreduce_hook),
            (None, default_hooks.fp16_compress_hook),
            (state, powerSGD_hook.powerSGD_hook),
        ]

    for state, hook in hooks():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        model = DistributedDataParallel(net)
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            generator = torch.Generator().manual_seed(step * 10 + me.rank)
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        others = [torch.zeros_like(flat) for _ in range(me.size)]
        dist.all_gather(others, flat)
        assert flat.isfinite().all() and all(torch.equal(flat, other) for other in others), hook


def case_fsdp2_equals_single_process(me: Rank) -> None:
    """E6: fully_shard on a CPU mesh; AVG in reduce_scatter; the clipped norm is the single process's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    want = network()
    alone = torch.optim.AdamW(want.parameters(), lr=1e-2)
    model = network()
    mesh = init_device_mesh("cpu", (me.size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        x, y = batch(step, 8 * me.size)
        alone.zero_grad()
        nn.functional.mse_loss(want(x), y).backward()
        norm = nn.utils.clip_grad_norm_(want.parameters(), 0.1)
        alone.step()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(share(x, me)), share(y, me)).backward()
        sharded: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert abs(sharded.full_tensor().item() - norm.item()) < 1e-9 * norm.item() + 1e-12, step
        optimizer.step()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        full: Any = p
        assert torch.allclose(full.full_tensor(), q, rtol=0, atol=1e-9)


def case_functional_collectives(me: Rank) -> None:
    import torch.distributed._functional_collectives as functional

    world: Any = dist.group.WORLD
    t = torch.arange(8.0) + me.rank
    total = torch.arange(8.0) * me.size + sum(range(me.size))
    assert torch.equal(functional.all_reduce(t, "sum", world), total)
    assert torch.equal(functional.all_reduce(t, "avg", world), total / me.size)
    gathered = functional.all_gather_tensor(t, 0, world)
    assert torch.equal(gathered, torch.cat([torch.arange(8.0) + rank for rank in range(me.size)]))
    scattered = functional.reduce_scatter_tensor(t, "sum", 0, world)
    assert torch.equal(scattered, total.chunk(me.size)[me.rank])
    swapped = functional.all_to_all_single(t, None, None, world)
    assert torch.equal(swapped, torch.cat([(torch.arange(8.0) + r).chunk(me.size)[me.rank] for r in range(me.size)]))
    assert torch.equal(functional.broadcast(t, 1, world), torch.arange(8.0) + 1)
    coalesced = functional.all_reduce_coalesced([t, t * 2], "sum", world)
    assert torch.equal(coalesced[1], 2 * total)
    x = torch.ones(4, requires_grad=True)
    functional.all_gather_tensor_autograd(x, 0, world).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), float(me.size)))


def case_dtensor(me: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, me.size // 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(48.0).view(8, 6)
    d = distribute_tensor(full.clone(), mesh, [Shard(0), Shard(1)])
    assert torch.equal(d.full_tensor(), full)
    product: Any = d @ distribute_tensor(full.t().contiguous(), mesh, [Replicate(), Shard(0)])
    assert torch.equal(product.full_tensor(), full @ full.t())


def case_objects(me: Rank) -> None:
    """B24: objects and barriers on any layout."""
    everyone: list[Any] = [None] * me.size
    dist.all_gather_object(everyone, {"rank": me.rank, "list": list(range(me.rank * 1000))})
    assert [o["rank"] for o in everyone] == list(range(me.size)) and len(everyone[-1]["list"]) == (me.size - 1) * 1000
    box: list[Any] = [("from", 2), None] if me.rank == 2 else [None, None]
    dist.broadcast_object_list(box, src=2)
    assert box == [("from", 2), None]
    gathered: list[Any] | None = [None] * me.size if me.rank == 1 else None
    dist.gather_object(me.rank**2, gathered, dst=1)
    assert gathered is None or gathered == [rank**2 for rank in range(me.size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(me.size)] if me.rank == 0 else None, src=0)
    assert mine == [f"for {me.rank}"]
    dist.barrier()


def case_groups(me: Rank) -> None:
    """Groups in any rank order, overlapping, used by their members only; group rank differs from global rank."""
    reverse = dist.new_group(list(reversed(range(me.size))))
    pairs = [dist.new_group([3, 0]), dist.new_group([1, 2])]
    t = torch.tensor([float(me.rank)])
    dist.broadcast(t, src=3, group=reverse)
    assert t.item() == 3
    mine = pairs[0] if me.rank in (0, 3) else pairs[1]
    for _ in range(3):
        t = torch.tensor([10.0**me.rank])
        dist.all_reduce(t, group=mine)
        assert t.item() == (1001 if me.rank in (0, 3) else 110)
    parts = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(parts, torch.tensor([float(me.rank)]), group=mine)
    members = dist.get_process_group_ranks(mine)
    assert [p.item() for p in parts] == [float(m) for m in members]
    dist.destroy_process_group(mine)
    dist.destroy_process_group(reverse)
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == me.size


def case_split_group(me: Rank) -> None:
    world: Any = dist.group.WORLD
    half = [0, 2] if me.rank % 2 == 0 else [1, 3]
    child = world.split_group(half)
    t = [torch.tensor([float(me.rank)])]
    child.allreduce(t).wait()
    assert t[0].item() == sum(half) and child.size() == 2 and child.rank() == half.index(me.rank)
    child.shutdown()


def case_group_facts(me: Rank) -> None:
    world: Any = dist.group.WORLD
    assert dist.get_backend() == "gpubridge" and world.getBackendName() == "gpubridge"
    assert world.group_name and world._device_types[0].type == "cpu"
    assert world.bound_device_id is None
    assert "rank" in world.describe() and world.error() is None
    before = world.stats()
    dist.all_reduce(torch.zeros(250000))
    after = world.stats()
    assert after["ops"] == before["ops"] + 1
    assert after["payload_bytes"] - before["payload_bytes"] == 1000000
    assert after["bridge_sent_bytes"] > before["bridge_sent_bytes"]
    world.set_timeout(timedelta(minutes=20))
    world.monitored_barrier(timedelta(seconds=60))
    assert copy.copy(world.options.settings) == {}


CASES = (
    case_ddp_accumulates,
    case_ddp_reversed_backward,
    case_ddp_join,
    case_ddp_hooks_and_buffers,
    case_fsdp2_equals_single_process,
    case_functional_collectives,
    case_dtensor,
    case_objects,
    case_groups,
    case_split_group,
    case_group_facts,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_integrations(pool: Pool, case: Callable[[Rank], None]) -> None:
    pool.run(case)
