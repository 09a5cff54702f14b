#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loss parity: DDP, FSDP2 and HSDP on 2 + 2 emulated ranks against one process on the same global batches.

A small transformer learns sequences; every step clips the gradient's norm.  In float64 the losses must agree to 1e-9
and the norms on every rank to 1e-6 (relative); in float32 the largest differences are printed.  One JSON object.

usage: loss_parity.py [--steps 200] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank
from torch import nn

LAYOUT = Layout(("cuda", "cuda", "hip", "hip"), emulated=True)
KINDS = ("ddp", "fsdp2", "hsdp")
VOCABULARY, WIDTH, LENGTH, ROWS = 17, 32, 12, 16
LOSS_BOUND, NORM_BOUND = 1e-9, 1e-6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        # Not ReLU: at its kink a rounding error becomes another gradient, and float32 runs part for good.
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.head.weight.dtype)
        out: torch.Tensor = self.head(self.blocks(self.embedding(tokens), mask=mask, is_causal=True))
        return out


def batch(step: int) -> torch.Tensor:
    """Arithmetic sequences modulo the vocabulary: there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 5, (ROWS, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def steps_of(model: nn.Module, steps: int, rank: int, size: int) -> tuple[list[float], list[float]]:
    """(losses of the global batch, gradient norms) by step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step).chunk(size)[rank])
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        mean = loss.detach().clone()
        if size > 1:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    return losses, norms


def distributed(kind: str, dtype: torch.dtype, size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model().to(dtype)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    # HSDP: shards inside an island, replicas across.
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (size,))
    else:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def case_train(me: Rank, kind: str, dtype: torch.dtype, steps: int) -> tuple[list[float], list[float]]:
    return steps_of(distributed(kind, dtype, me.size), steps, me.rank, me.size)


def worst(a: list[float], b: list[float], relative: bool = False) -> float:
    return max(abs(x - y) / (abs(y) if relative else 1) for x, y in zip(a, b, strict=True))


def measure(pool: Pool, steps: int) -> dict[str, Any]:
    """The JSON object; `ok` says whether all bounds hold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"steps": steps, "torch": torch.__version__, "ranks": list(pool.layout.islands)}
    ok = True
    for dtype in (torch.float64, torch.float32):
        alone = steps_of(Model().to(dtype), steps, 0, 1)
        name = str(dtype).removeprefix("torch.")
        results[name] = {"first loss": alone[0][0], "last loss": alone[0][-1]}
        for kind in KINDS:
            ranks = pool.run(case_train, kind, dtype, steps, timeout=1800)
            row = {
                "loss difference": max(worst(losses, alone[0]) for losses, _ in ranks),
                "norm difference, relative": max(worst(norms, alone[1], True) for _, norms in ranks),
                "norms equal on all ranks": all(norms == ranks[0][1] for _, norms in ranks),
            }
            results[name][kind] = row
            if dtype == torch.float64:
                ok &= row["loss difference"] <= LOSS_BOUND and row["norm difference, relative"] <= NORM_BOUND
            ok &= bool(row["norms equal on all ranks"])
    torch.set_num_threads(threads)
    results["ok"] = ok
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pool = Pool(LAYOUT, {"GPUBRIDGE_PEER_TIMEOUT_S": "60"})  # a long run on a machine that others use too
    try:
        results = measure(pool, args.steps)
    finally:
        if not pool.broken:
            pool.close()
    text = json.dumps(results, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    import loss_parity  # ranks import the cases by the name of their module, which "__main__" is not

    sys.exit(loss_parity.main())
