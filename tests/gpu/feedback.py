# SPDX-License-Identifier: Apache-2.0
"""Compression and error feedback on CUDA tensors: the same bits as on CPU tensors, results and residuals; then DDP and
FSDP2 with feedback, equal on all ranks.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 tests/gpu/feedback.py [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import gpubridge.torch
import torch
import torch.distributed as dist
from gpubridge.torch import ddp, fsdp
from torch import nn

CODECS = ("bf16", "fp16", "fp8", "fp8_e5m2", "int8", "mxfp4")
COUNTS = (2_000_000, 262_144, 100_001)


def group_with(codec: str) -> Any:
    return dist.new_group(pg_options=gpubridge.torch.Options({"compression": codec, "compression_min_bytes": 0}))


def equal_everywhere(t: torch.Tensor) -> bool:
    first = t.clone()
    dist.broadcast(first, src=0)
    differs = torch.tensor([float(not torch.equal(first, t))])
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    return differs.item() == 0


def compare(codec: str, count: int, dtype: torch.dtype, steps: int = 3) -> bool:
    """Some steps of all_reduce and reduce_scatter with residuals, on the device and in host memory."""
    group, size = group_with(codec), dist.get_world_size()
    count -= count % size
    generator = torch.Generator().manual_seed(dist.get_rank())
    residuals = {device: [torch.zeros(count, device=device) for _ in range(2)] for device in ("cpu", "cuda")}
    for _ in range(steps):
        x = (torch.randn(count, generator=generator) * 10 ** (torch.arange(count) % 5 - 2.0)).to(dtype)
        found = {}
        for device, (one, two) in residuals.items():
            t, out = x.to(device, copy=True), torch.empty(count // size, dtype=dtype, device=device)
            flat = t.clone()
            group.reduce_gradients(t, residual=one).wait()
            group.reduce_scatter_gradients(out, flat, dist.ReduceOp(dist.ReduceOp.AVG), residual=two).wait()
            found[device] = [v.cpu() for v in (t, out, one, two)]
        same = all(torch.equal(a, b) for a, b in zip(found["cpu"], found["cuda"], strict=True))
        if not same or not equal_everywhere(found["cuda"][0]) or not found["cuda"][2].ne(0).any():
            return False
    return True


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(512, 1024), nn.LayerNorm(1024), nn.Tanh(), nn.Linear(1024, 512)).cuda()


def train(model: nn.Module, state: Any, is_sharded: bool, steps: int = 10) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = torch.randn(32, 512, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank())).cuda()
        loss = model(x).sub(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters: list[Any] = list(model.parameters())
    flat = torch.cat([(p.full_tensor() if is_sharded else p).detach().reshape(-1) for p in parameters])
    return {
        "equal": equal_everywhere(flat.cpu()),
        "finite": bool(flat.isfinite().all()),
        "learned": losses[-1] < losses[0],
        "feedback": any(bool(r.ne(0).any()) for r in state.state_dict()["residuals"]["residuals"]),
        "guard": state.guard.bad_steps == 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for codec in CODECS:
            for count in COUNTS:
                found[f"{codec} {count} {dtype}"] = compare(codec, count, dtype)
    model = nn.parallel.DistributedDataParallel(network(), process_group=group_with("mxfp4"))
    found["ddp"] = train(model, ddp.compress_gradients(model, error_feedback=True), False)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    sharded: Any = network()
    mesh = DeviceMesh.from_group(group_with("mxfp4"), "cuda")
    fully_shard(sharded, mesh=mesh)
    found["fsdp2"] = train(sharded, fsdp.compress_gradients(sharded, error_feedback=True), True)
    flags = [v for row in found.values() for v in (row.values() if isinstance(row, dict) else [row])]
    ok = torch.tensor([float(all(flags))])
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        content = {"ok": bool(ok.item()), "device": torch.cuda.get_device_name(), "torch": torch.__version__, **found}
        print(json.dumps(content))
        if options.out:
            options.out.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()
    return 0 if ok.item() else 1


if __name__ == "__main__":
    sys.exit(main())
