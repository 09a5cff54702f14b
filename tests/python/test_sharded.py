# SPDX-License-Identifier: Apache-2.0
"""Sharded and pipelined training equals one process, on CPU islands and on emulated vendors (B25, E6).

FSDP1, FSDP2, HSDP (shards inside an island, replicas across), tensor parallelism, pipelining and SyncBatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank
from test_integrations import assert_close, batch, network, share, train_alone
from torch import nn

LAYOUTS = {
    "islands": Layout(("a", "a", "b", "b")),
    "vendors": Layout(("cuda", "cuda", "hip", "hip"), emulated=True),
}
STEPS = 6


@pytest.fixture(scope="module", params=LAYOUTS)  # one after the other: only one layout's ranks live at a time
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture
def pool(layout: Layout, ranks: Callable[..., Pool]) -> Pool:
    return ranks(layout)


def train(me: Rank, model: nn.Module, steps: int = STEPS) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, 8 * me.size)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(share(x, me)), share(y, me)).backward()
        optimizer.step()


def even_network() -> nn.Sequential:
    """Every rank has a piece of every parameter: torch has no infinity norm of an empty piece."""
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def assert_same_weights(model: nn.Module, want: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert torch.allclose(whole(p), q[1], rtol=0, atol=1e-9), name


def case_fsdp1(me: Rank, strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        network(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    train(me, model)
    want, _ = train_alone(STEPS, 8 * me.size)
    with FullyShardedDataParallel.summon_full_params(model):
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_b25_fsdp1(pool: Pool, strategy: str) -> None:
    pool.run(case_fsdp1, strategy)


def case_fsdp2(me: Rank, replicas: int) -> None:
    """replicas > 1: HSDP, each island holds one whole copy.  Gradient accumulation and clipping come along."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shards = me.size // replicas
    if replicas == 1:
        mesh = init_device_mesh("cpu", (shards,))
    else:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    want, model = even_network(), even_network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (want, model)]
    for step in range(STEPS):
        halves = [batch(2 * step + i, 4 * me.size) for i in range(2)]
        for i, (x, y) in enumerate(halves):
            (nn.functional.mse_loss(want(x), y[:, :4]) / 2).backward()
            model.set_requires_gradient_sync(i == 1)  # type: ignore[operator]
            (nn.functional.mse_loss(model(share(x, me)), share(y[:, :4], me)) / 2).backward()
        for order in (2.0, float("inf")):  # E6: both norms are the single process's, on every rank
            norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1, order)).item() for m in (want, model)]
            assert abs(norms[0] - norms[1]) <= 1e-9 * norms[0], (step, order, norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, want)


@pytest.mark.parametrize("replicas", [1, 2], ids=["fsdp2", "hsdp"])
def test_b25_e6_fsdp2(pool: Pool, replicas: int) -> None:
    pool.run(case_fsdp2, replicas)


def case_fsdp2_mixed_precision(me: Rank) -> None:
    """bf16 parameters in flight, gradients reduced in float32: all ranks end with one model, near the full one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = network().float()
    fully_shard(model, mesh=init_device_mesh("cpu", (me.size,)), mp_policy=policy)
    want = network().float()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (want, model)]
    for step in range(STEPS):
        x, y = (t.float() for t in batch(step, 8 * me.size))
        nn.functional.mse_loss(want(x), y).backward()
        nn.functional.mse_loss(model(share(x, me)).float(), share(y, me)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.allclose(whole(p), q, rtol=0, atol=2e-2)


def case_tensor_parallel(me: Rank) -> None:
    """A 2 x 2 mesh: tensor parallel across the islands, data parallel inside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, me.size // 2), mesh_dim_names=("tp", "dp"))
    torch.manual_seed(3)
    want = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (want, model)]
    for step in range(STEPS):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).double()
        losses = [m(x).square().mean() for m in (want, model)]
        assert abs(losses[0].item() - losses[1].item()) < 1e-12, step
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, want)


def case_pipeline(me: Rank) -> None:
    """One stage per rank, GPipe and 1F1B: loss and gradients of the whole model."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()).double() for _ in range(me.size)]
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(1)).double()
    y = torch.randn(8, 10, generator=torch.Generator().manual_seed(2)).double()
    whole_model = nn.Sequential(*layers)
    # The loss is a mean per micro-batch, and gradients of micro-batches are added up and scaled by their number.
    want = nn.functional.mse_loss(whole_model(x), y)
    want.backward()
    gradients = [p.grad.clone() for p in layers[me.rank].parameters() if p.grad is not None]
    for schedule_of in (ScheduleGPipe, Schedule1F1B):
        whole_model.zero_grad()
        stage = PipelineStage(layers[me.rank], me.rank, me.size, torch.device("cpu"))
        schedule: Any = schedule_of(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if me.rank == 0:
            schedule.step(x)
        elif me.rank == me.size - 1:
            schedule.step(target=y, losses=losses)
            assert abs(torch.stack(losses).mean().item() - want.item()) < 1e-12
        else:
            schedule.step()
        for p, gradient in zip(layers[me.rank].parameters(), gradients, strict=True):
            assert p.grad is not None and torch.allclose(p.grad, gradient, rtol=0, atol=1e-12), schedule_of
        dist.barrier()


def cpu_kernels() -> dict[str, Callable[..., Any]]:
    """What SyncBatchNorm computes on a GPU, for CPU tensors: torch has these five for GPUs only."""

    def stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.transpose(0, 1).reshape(x.shape[1], -1)
        return flat.mean(1), (flat.var(1, correction=0) + eps).rsqrt()

    def gather_stats(
        x: torch.Tensor,
        means: torch.Tensor,
        invstds: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (counts / counts.sum()).unsqueeze(1)
        mean = (means * weights).sum(0)
        var = ((invstds**-2 - eps + means**2) * weights).sum(0) - mean**2
        n = counts.sum()
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * n / (n - 1), momentum)
        return mean, (var + eps).rsqrt()

    def over(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return t.view(1, -1, *[1] * (x.dim() - 2))

    def apply(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: Any, invstd: Any, eps: float) -> torch.Tensor:
        return (x - over(mean, x)) * over(invstd * w, x) + over(b, x)

    def backward_reduce(dy: torch.Tensor, x: torch.Tensor, mean: Any, invstd: Any, w: Any, *_: bool) -> Any:
        axes = [d for d in range(x.dim()) if d != 1]
        products = (dy * (x - over(mean, x))).sum(axes)
        return dy.sum(axes), products, products * invstd, dy.sum(axes)

    def backward_apply(
        dy: torch.Tensor, x: torch.Tensor, mean: Any, invstd: Any, w: Any, sum_dy: Any, products: Any, counts: Any
    ) -> torch.Tensor:
        n = counts.sum()
        centred = (x - over(mean, x)) * over(invstd**2 * products / n, x)
        return (dy - over(sum_dy / n, x) - centred) * over(invstd * w, x)

    return {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": apply,
        "batch_norm_backward_reduce": backward_reduce,
        "batch_norm_backward_elemt": backward_apply,
    }


def case_sync_batch_norm(me: Rank, rows: list[int]) -> None:
    """E11: statistics, outputs and gradients of uneven, even empty, batches are those of one process with all rows."""
    from torch.nn.modules._functions import SyncBatchNorm

    x = torch.randn(sum(rows), 3, 4, generator=torch.Generator().manual_seed(4)).double()
    alone = nn.BatchNorm1d(3, momentum=0.1).double()
    synced = nn.BatchNorm1d(3, momentum=0.1).double()
    originals = {name: getattr(torch, name) for name in cpu_kernels()}
    for name, kernel in cpu_kernels().items():
        setattr(torch, name, kernel)
    try:
        for _ in range(3):
            everything = x.clone().requires_grad_()
            want = alone(everything)
            (want * x.sin()).sum().backward()
            first = sum(rows[: me.rank])
            mine = x[first : first + rows[me.rank]].clone().requires_grad_()
            got = SyncBatchNorm.apply(
                mine,
                synced.weight,
                synced.bias,
                synced.running_mean,
                synced.running_var,
                synced.eps,
                synced.momentum,
                dist.group.WORLD,
                me.size,
            )
            (got * mine.detach().sin()).sum().backward()
            assert torch.allclose(got, want[first : first + rows[me.rank]], rtol=0, atol=1e-9)
            assert everything.grad is not None and (mine.grad is not None or not rows[me.rank])
            if mine.grad is not None:
                assert torch.allclose(mine.grad, everything.grad[first : first + rows[me.rank]], rtol=0, atol=1e-9)
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
    assert synced.running_mean is not None and alone.running_mean is not None
    assert torch.allclose(synced.running_mean, alone.running_mean, rtol=0, atol=1e-12)
    assert synced.running_var is not None and alone.running_var is not None
    assert torch.allclose(synced.running_var, alone.running_var, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [[6, 2, 3, 5], [8, 0, 0, 4]], ids=["uneven", "empty"])
def test_e11_sync_batch_norm(pool: Pool, rows: list[int]) -> None:
    pool.run(case_sync_batch_norm, rows)


CASES = (case_fsdp2_mixed_precision, case_tensor_parallel, case_pipeline)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_b25_sharded(pool: Pool, case: Callable[[Rank], None]) -> None:
    pool.run(case)


def case_debug_detail(me: Rank) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: DDP with its logging and checks trains as without."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    model = nn.parallel.DistributedDataParallel(network(), find_unused_parameters=True)
    train(me, model)
    want, _ = train_alone(STEPS, 8 * me.size)
    assert_close(model.module, want)
    group = dist.new_group([0, 1])
    if me.rank < 2:
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        assert t.item() == 2
        dist.destroy_process_group(group)
    dist.barrier()


def test_b25_debug_detail(ranks: Callable[..., Pool]) -> None:
    ranks(LAYOUTS["islands"], TORCH_DISTRIBUTED_DEBUG="DETAIL").run(case_debug_detail)
