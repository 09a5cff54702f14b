# SPDX-License-Identifier: Apache-2.0
"""Training of a LLaMA-style model (about 125 M parameters, bf16) over the bridge: tokens per second, and what of the
bridge's time shows.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 bench/gpu/train.py [--compression none,bf16,fp8] [--out FILE.json]

Every variant trains the same model from the same seed on the same tokens: `compute` without any exchange between ranks,
`gloo` and each codec with DDP, and FSDP2.  Exposed time is a step's time less a step's time of `compute`, on the same
GPU and with the same neighbours.  Gloo has no FSDP2 column: its reduce-scatter of CUDA tensors is not there in every
release.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpubridge.torch  # noqa: F401
import torch
import torch.distributed as dist
from report import header, percentile, rounded, write  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

DIM, LAYERS, HEADS, HIDDEN, VOCABULARY = 768, 12, 12, 2048, 24576


class Block(nn.Module):
    """Attention with rotary positions, then SwiGLU, each behind an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x[batch, sequence, DIM]; cos, sin[sequence, DIM / HEADS]."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, DIM))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Model(nn.Module):
    """tokens[batch, sequence] to logits[batch, sequence, VOCABULARY]."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        half = DIM // HEADS // 2
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def build(args: argparse.Namespace) -> Model:
    torch.manual_seed(1)
    return Model(args.sequence).to(device="cuda", dtype=torch.bfloat16)


def steps(net: nn.Module, args: argparse.Namespace) -> dict[str, float]:
    """Times the steps; the tokens of a rank depend on rank and step alone."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    taken: list[float] = []
    loss = torch.zeros(())
    for step in range(args.warmup + args.steps):
        generator = torch.Generator(device="cuda").manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (args.batch, args.sequence + 1), device="cuda", generator=generator)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        logits = net(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= args.warmup:
            taken.append(time.perf_counter() - begin)
    return {"step_ms": percentile(taken, 0.5) * 1e3, "step_p90_ms": percentile(taken, 0.9) * 1e3, "loss": float(loss)}


def ddp(group: Any) -> Callable[[argparse.Namespace], nn.Module]:
    return lambda args: DistributedDataParallel(build(args), process_group=group, gradient_as_bucket_view=True)


def fsdp(group: Any) -> Callable[[argparse.Namespace], nn.Module]:
    def make(args: argparse.Namespace) -> nn.Module:
        mesh = DeviceMesh.from_group(group, "cuda")
        net = build(args)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description="LLaMA-style training over the bridge")
    parser.add_argument("--compression", default="none", help="comma list: none, bf16, fp8, ...")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip-gloo", action="store_true")
    parser.add_argument("--skip-fsdp", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("gpubridge")
    ranks = list(range(dist.get_world_size()))
    variants: dict[str, Callable[[argparse.Namespace], nn.Module]] = {"compute": build}
    if not args.skip_gloo:
        variants["ddp gloo"] = ddp(dist.new_group(ranks, backend="gloo"))
    for codec in args.compression.split(","):
        options = None if codec == "none" else {"compression": codec}
        group = dist.new_group(ranks, backend="gpubridge", pg_options=options)
        variants[f"ddp {codec}"] = ddp(group)
        if not args.skip_fsdp:
            variants[f"fsdp2 {codec}"] = fsdp(group)
    rows: dict[str, dict[str, Any]] = {}
    parameters = sum(p.numel() for p in build(args).parameters())
    for name, make in variants.items():
        dist.barrier()
        net = make(args)
        row: dict[str, Any] = steps(net, args)
        del net
        torch.cuda.empty_cache()
        tokens = args.batch * args.sequence * dist.get_world_size()
        row["tokens_per_s"] = tokens / row["step_ms"] * 1e3
        if name != "compute":
            row["of_compute"] = rows["compute"]["step_ms"] / row["step_ms"]
            row["exposed_ms"] = row["step_ms"] - rows["compute"]["step_ms"]
        if "ddp gloo" in rows and name != "ddp gloo":
            row["times_gloo"] = rows["ddp gloo"]["step_ms"] / row["step_ms"]
        rows[name] = row
        if dist.get_rank() == 0:
            print(json.dumps({"variant": name} | rounded(row)), flush=True)
    if dist.get_rank() == 0:
        shape = {"parameters": parameters, "batch": args.batch, "sequence": args.sequence, "steps": args.steps}
        write(
            args.out, header("LLaMA-style training, bf16") | shape | {"rows": {k: rounded(v) for k, v in rows.items()}}
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
