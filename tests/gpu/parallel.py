# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 on real CUDA tensors across the bridge, against one process on the same global batches (float64).

GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 tests/gpu/parallel.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import gpubridge
import gpubridge.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
BATCH = 16


def model() -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(64, 10)).double().cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 12, 64, generator=generator, dtype=torch.float64)
    y = torch.randn(BATCH, 12, 10, generator=generator, dtype=torch.float64)
    return x.cuda(), y.cuda()


def train(net: nn.Module, rank: int, world: int, clip: bool) -> tuple[list[float], list[float]]:
    """Losses of the global batch and gradient norms, step by step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(step)
        share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = nn.functional.mse_loss(net(x[share]), y[share])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0 if clip else 1e9)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
        norms.append(float(norm))
    return losses, norms


def worst(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    rank, world = dist.get_rank(), dist.get_world_size()
    single_losses, single_norms = train(model(), 0, 1, clip=True)

    begin = time.monotonic()
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.2)
    ddp_losses, ddp_norms = train(ddp, rank, world, clip=True)
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in ddp.parameters())).hexdigest()
    digests: list[object] = [None] * world
    dist.all_gather_object(digests, digest)

    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    fsdp_losses, fsdp_norms = train(sharded, rank, world, clip=True)
    result = {
        "what": "DDP and FSDP2 against one process, float64",
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "gpubridge": gpubridge.__version__,
        "islands": os.environ.get("GPUBRIDGE_ISLAND", ""),
        "steps": STEPS,
        "seconds": round(time.monotonic() - begin, 1),
        "ddp_loss_difference": worst(ddp_losses, single_losses),
        "ddp_norm_difference": worst(ddp_norms, single_norms),
        "ddp_equal_bits": len(set(map(str, digests))) == 1,
        "fsdp2_loss_difference": worst(fsdp_losses, single_losses),
        "fsdp2_norm_difference": worst(fsdp_norms, single_norms),
    }
    good = (
        result["ddp_equal_bits"]
        and max(result["ddp_loss_difference"], result["fsdp2_loss_difference"]) < 1e-9
        and max(result["ddp_norm_difference"], result["fsdp2_norm_difference"]) < 1e-6
    )
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
