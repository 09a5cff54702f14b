# SPDX-License-Identifier: Apache-2.0
"""Compiled models, ZeRO and checkpoints equal one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Layout, Pool, Rank
from test_integrations import assert_close, batch, network, share, train_alone
from torch import nn

LAYOUT = Layout(("a", "a", "b", "b"))
STEPS = 5


@pytest.fixture
def pool(ranks: Callable[..., Pool]) -> Pool:
    return ranks(LAYOUT)


def train(me: Rank, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = batch(step, 8 * me.size)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(share(x, me)), share(y, me)).backward()
        optimizer.step()


def sharded(me: Rank) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = network(), init_device_mesh("cpu", (me.size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_whole(model: nn.Module, want: nn.Module) -> None:
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        shards: Any = p
        assert torch.allclose(shards.full_tensor(), q, rtol=0, atol=1e-9)


def case_compiled_ddp(me: Rank) -> None:
    """Dynamo splits the graph at DDP's buckets; the code generator has no part in that, so none runs here."""

    def wide() -> nn.Sequential:
        torch.manual_seed(9)
        return nn.Sequential(nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 5)).double()

    want, model = wide(), nn.parallel.DistributedDataParallel(wide(), bucket_cap_mb=1)
    compiled = torch.compile(model, backend="aot_eager")
    train(me, compiled, torch.optim.SGD(model.parameters(), lr=1e-2), range(STEPS))
    optimizer = torch.optim.SGD(want.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step, 8 * me.size)
        optimizer.zero_grad()
        nn.functional.mse_loss(want(x), y).backward()
        optimizer.step()
    assert_close(model.module, want)


def case_compiled_fsdp2(me: Rank) -> None:
    model = sharded(me)
    compiled = torch.compile(model, backend="aot_eager")
    train(me, compiled, torch.optim.AdamW(model.parameters(), lr=1e-2), range(STEPS))
    assert_whole(model, train_alone(STEPS, 8 * me.size)[0])


def case_compiled_collectives(me: Rank) -> None:
    """A whole graph with collectives inside."""
    import torch.distributed._functional_collectives as functional

    name: Any = "0"  # the world, by its name as graphs know it

    def step(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", name)
        return functional.all_gather_tensor(total + 1, 0, name).sum(0)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = compiled(torch.arange(6.0).view(2, 3) + me.rank)
    base = torch.arange(6.0).view(2, 3)
    total = 2 * (me.size * base + sum(range(me.size)))
    assert torch.equal(got, me.size * (total + 1).sum(0))


def case_zero(me: Rank) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2)
    train(me, model, optimizer, range(STEPS))
    assert_close(model.module, train_alone(STEPS, 8 * me.size)[0])
    optimizer.consolidate_state_dict(to=1)
    if me.rank == 1:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


CASES = (case_compiled_ddp, case_compiled_fsdp2, case_compiled_collectives, case_zero)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training(pool: Pool, case: Callable[[Rank], None]) -> None:
    pool.run(case)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def case_save(me: Rank, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint

    model = sharded(me)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(me, model, optimizer, range(3))
    checkpoint.save(state_of(model, optimizer), checkpoint_id=f"{folder}/now")
    pending: Any = checkpoint.async_save(state_of(model, optimizer), checkpoint_id=f"{folder}/later")
    pending.result()


def case_load(me: Rank, folder: str, ranks_then: int) -> None:
    """The rest of the training on another number of ranks, which see the same global batches."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model = sharded(me)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(me, model, optimizer, range(7, 8))  # other weights and moments than those in the checkpoint
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(3, STEPS):
        x, y = batch(step, 8 * ranks_then)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(share(x, me)), share(y, me)).backward()
        optimizer.step()
    assert_whole(model, train_alone(STEPS, 8 * ranks_then)[0])


def test_checkpoint_on_another_world_size(ranks: Callable[..., Pool], tmp_path: Path) -> None:
    ranks(LAYOUT).run(case_save, str(tmp_path))
    for name in ("now", "later"):
        ranks(Layout(("a", "b"))).run(case_load, str(tmp_path / name), LAYOUT.size)
