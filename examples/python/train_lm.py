#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small LLaMA-style byte-level language model (RMSNorm, RoPE, SwiGLU) on any text, in DDP over gpubridge.

    torchrun --nproc-per-node 4 examples/python/train_lm.py --data DIR          # GPUs of any vendor, or CPUs
    GPUBRIDGE_EMULATE=cuda,cuda,hip,hip torchrun --nproc-per-node 4 examples/python/train_lm.py
    python examples/python/train_lm.py                                          # one process, no process group

The global batch of a step depends on the seed and the step alone, never on the number of processes, so runs of
different size follow the same path up to rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn

VOCABULARY = 256
MAX_DATA_BYTES = 16 << 20
HELD_OUT = 0.05
EVALUATION_SEED = 1_000_000_007
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UserError(Exception):
    """Something the user can put right; shown as one line."""


# ---- model ----


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults give about 1.07 million parameters."""

    width: int = 128
    layers: int = 5
    heads: int = 4
    hidden: int = 352
    context: int = 64


class RMSNorm(nn.Module):
    """Scales to unit root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotary(context: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary embedding: [context, head / 2], float64."""
    frequency = 10000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of x [batch, heads, time, head] by position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = RMSNorm(config.width), RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, time_, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, time_, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class LanguageModel(nn.Module):
    """Next-byte prediction."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        cos, sin = rotary(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = 0.02 / math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(p, std=scale)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats over tokens, targets [batch, time]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# ---- data ----


def text_files(root: Path) -> Iterator[Path]:
    """Files below root in a fixed order, without hidden ones."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f for f in folders if not f.startswith((".", "__pycache__", "site-packages", "dist-packages"))
        )
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


def read_text(path: Path | None) -> bytes:
    """All text of a file or folder, at most 16 MiB; None: the sources of this interpreter's standard library."""
    if path is not None and not path.exists():
        raise UserError(f"--data {path}: no such file or folder")
    if path is not None and path.is_file():
        files: Any = [path]
    else:
        files = text_files(path if path is not None else Path(sysconfig.get_paths()["stdlib"]))
    parts: list[bytes] = []
    size = 0
    for file in files:
        if path is None and (file.suffix != ".py" or "test" in file.parts or "tests" in file.parts):
            continue
        try:
            with open(file, "rb") as stream:
                content = stream.read(MAX_DATA_BYTES - size)
        except OSError as error:
            if path == file:
                raise UserError(f"--data {path}: {error.strerror}") from None
            continue
        if b"\0" not in content[:4096]:
            parts.append(content)
            size += len(content)
        if size >= MAX_DATA_BYTES:
            break
    return b"\n".join(parts)


class Corpus:
    """Training and held-out bytes, and the batches cut from them."""

    def __init__(self, path: Path | None, context: int) -> None:
        text = read_text(path)
        where = path if path is not None else "the standard library"
        needed = int(2 * (context + 1) / HELD_OUT)
        if len(text) < needed:
            what = "no text" if not text else f"only {len(text)} bytes of text"
            raise UserError(
                f"--data {where}: {what} found, at least {needed} are needed; name a text file or a folder of them"
            )
        self.context = context
        self.digest = hashlib.sha256(text).digest()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = int(len(text) * (1 - HELD_OUT))
        self.train, self.held_out = data[:cut], data[cut:]

    def batch(self, data: torch.Tensor, seed: int, count: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets), int64 [rows, context]: the rows `part` of the seed's batch of `count` rows."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(data) - self.context, (count,), generator=generator)[part]
        rows = torch.stack([data[s : s + self.context + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


# ---- processes ----


@dataclass
class World:
    """This process among its peers."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    def mean(self, values: list[float]) -> list[float]:
        """Mean over ranks, exact in float64 up to one rounding per rank."""
        if self.size == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, op=dist.ReduceOp.SUM)
        return [v / self.size for v in t.tolist()]


def integer_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} in the environment is not a number; start with torchrun") from None


def join_world(options: argparse.Namespace) -> World:
    """Reads the launcher's environment and makes the process group when there is more than one process."""
    size, rank = integer_from_environment("WORLD_SIZE", 1), integer_from_environment("RANK", 0)
    local_rank = integer_from_environment("LOCAL_RANK", rank)
    local_size = integer_from_environment("LOCAL_WORLD_SIZE", size)
    if options.batch % size:
        raise UserError(
            f"--batch {options.batch} rows cannot be shared equally by {size} ranks: use a multiple of {size}"
        )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    device = torch.device("cpu")
    if torch.cuda.is_available() and not os.environ.get("GPUBRIDGE_EMULATE") and options.device != "cpu":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif options.device == "cuda":
        raise UserError("--device cuda: this PyTorch sees no GPU")
    if size > 1:
        if options.backend == "gpubridge":
            import gpubridge.torch  # noqa: F401
        dist.init_process_group(options.backend)
    return World(rank, size, local_rank, device)


def check_same_data(world: World, digest: bytes) -> None:
    """Every rank must read the same text, else the batches are not what the seed says."""
    if world.size == 1:
        return
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=world.device)
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = torch.tensor([float(not torch.equal(first, mine))], device=world.device)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    if differs.item():
        raise UserError(f"rank {world.rank}: the ranks read different text; give --data the same content on every host")


class Stopper:
    """Turns the first Ctrl-C (or SIGTERM) into a flag, so that all ranks stop after one step; the second kills."""

    def __init__(self) -> None:
        self.signal = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


# ---- checkpoint ----


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes beside the target and renames: a killed run leaves the last complete file."""
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"--checkpoint {path}: cannot be written ({error})") from None


def load(path: Path, world: World) -> dict[str, Any] | None:
    """The checkpoint as rank 0 reads it, on every rank; None when there is no file."""
    found: list[Any] = [None]
    if world.rank == 0:
        with contextlib.suppress(FileNotFoundError):
            found = [path.read_bytes()]
    if world.size > 1:
        dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(found[0]), map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        raise UserError(
            f"--checkpoint {path}: not a checkpoint of this program ({type(error).__name__}); remove it"
        ) from None


# ---- training ----


@dataclass
class Record:
    """What a run measured; --report writes it as JSON."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Display:
    """Loss and speed as they come: a live line on a terminal, plain lines elsewhere; rank 0 only."""

    def __init__(self, world: World, options: argparse.Namespace, first_step: int) -> None:
        self.shows = world.rank == 0
        self.options = options
        self.progress: Any = None
        if self.shows and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

                columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
                numbers = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s")
                self.progress = Progress(*columns, numbers)
                self.task = self.progress.add_task(
                    "", total=options.steps, completed=first_step, loss=math.nan, speed=0
                )
                self.progress.start()

    def say(self, text: str) -> None:
        if self.shows:
            print(text, flush=True) if self.progress is None else self.progress.console.print(text)

    def step(self, step: int, loss: float, speed: float) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=step, loss=loss, speed=speed)
        elif self.shows and (step == 1 or step % self.options.log_every == 0 or step == self.options.steps):
            print(f"step {step}/{self.options.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s", flush=True)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


class Trainer:
    """Model, optimizer and data of one process."""

    def __init__(self, options: argparse.Namespace, world: World, corpus: Corpus, config: ModelConfig) -> None:
        self.options, self.world, self.corpus = options, world, corpus
        dtype = getattr(torch, options.dtype)
        torch.manual_seed(options.seed)
        # Made in float64 and rounded, so that runs in both types start from the same model.
        torch.set_default_dtype(torch.float64)
        self.model = LanguageModel(config).to(device=world.device, dtype=dtype)
        torch.set_default_dtype(torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.runs: nn.Module = self.model
        self.first_step = 0
        self.identity = {"width": config.width, "layers": config.layers, "seed": options.seed, "dtype": options.dtype}
        if options.resume:
            self._resume()
        if world.size > 1:
            self.runs = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=2, gradient_as_bucket_view=True)
        share = options.batch // world.size
        self.part = slice(world.rank * share, (world.rank + 1) * share)

    def _resume(self) -> None:
        state = load(self.options.checkpoint, self.world)
        if state is None:
            raise UserError(
                f"--resume: there is no checkpoint {self.options.checkpoint}; leave --resume out to begin anew"
            )
        if state.get("identity") != self.identity:
            raise UserError(
                f"--resume: {self.options.checkpoint} is of another run {state.get('identity')}, not {self.identity}"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.first_step = int(state["step"])

    def save(self, step: int) -> None:
        if self.world.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            save(self.options.checkpoint, {**state, "step": step, "identity": self.identity})

    def _batch(self, data: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = self.corpus.batch(data, seed, self.options.batch, self.part)
        return tokens.to(self.world.device), targets.to(self.world.device)

    def step(self, step: int, stop: int) -> tuple[float, int]:
        """One step; (mean loss of the global batch, the signal that some rank was sent)."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (step + 1) / self.options.warmup)
        loss = self.runs(*self._batch(self.corpus.train, self.options.seed * 1_000_003 + step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self.optimizer.step()
        mean, *asked = self.world.mean([loss.item(), *(float(stop == s) for s in STOP_SIGNALS)])
        return mean, next((int(s) for s, share in zip(STOP_SIGNALS, asked, strict=True) if share), 0)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss over the same held-out batches whenever it is asked for."""
        count = self.options.eval_batches
        sums = sum(self.model(*self._batch(self.corpus.held_out, EVALUATION_SEED + i)).item() for i in range(count))
        return self.world.mean([sums / count])[0]

    def parameter_digest(self) -> str:
        """sha256 of all parameters' bytes."""
        digest = hashlib.sha256()
        for p in self.model.parameters():
            digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def stats(self) -> dict[str, int]:
        """Counters of the default group where the backend has them."""
        group: Any = dist.group.WORLD if self.world.size > 1 else None
        return dict(group.stats()) if hasattr(group, "stats") else {}


def train(trainer: Trainer, display: Display, stopper: Stopper, record: Record) -> int:
    """Runs the steps; returns the signal that ended them early, or 0."""
    options, tokens = trainer.options, trainer.options.batch * trainer.corpus.context
    record.held_out["before"] = trainer.held_out_loss()
    before = trainer.stats()
    stopped = 0
    step = trainer.first_step
    for step in range(trainer.first_step + 1, options.steps + 1):
        start = time.perf_counter()
        loss, stopped = trainer.step(step - 1, stopper.signal)
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            raise UserError(f"the loss became {loss} at step {step}: lower --lr (now {options.lr})")
        record.losses.append(loss)
        record.step_s.append(seconds)
        display.step(step, loss, tokens / seconds)
        if stopped:
            break
        if options.checkpoint and step % options.save_every == 0:
            trainer.save(step)
    after = trainer.stats()
    record.details["comm"] = {name: after[name] - before[name] for name in after}
    record.held_out["after"] = trainer.held_out_loss()
    if options.checkpoint:
        trainer.save(step)
        display.say(f"checkpoint {options.checkpoint} holds step {step}")
    return stopped


def report(trainer: Trainer, record: Record, path: Path | None) -> None:
    """Collects what every rank knows and writes it on rank 0."""
    mine = {"rank": trainer.world.rank, "sha256": trainer.parameter_digest(), **record.details}
    ranks: list[Any] = [mine]
    if trainer.world.size > 1:
        ranks = [None] * trainer.world.size
        dist.all_gather_object(ranks, mine)
    if path is None or trainer.world.rank:
        return
    group: Any = dist.group.WORLD if trainer.world.size > 1 else None
    content = {
        "world": trainer.world.size,
        "dtype": trainer.options.dtype,
        "steps": len(record.losses),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "tokens_per_step": trainer.options.batch * trainer.corpus.context,
        "emulate": os.environ.get("GPUBRIDGE_EMULATE", ""),
        "torch": torch.__version__,
        "losses": record.losses,
        "step_s": record.step_s,
        "held_out": record.held_out,
        "ranks": ranks,
        "describe": group.describe() if hasattr(group, "describe") else "",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def run(options: argparse.Namespace, stopper: Stopper) -> int:
    """The whole program after parsing; returns the exit code."""
    config = ModelConfig()
    corpus = Corpus(options.data, config.context)
    world = join_world(options)
    check_same_data(world, corpus.digest)
    trainer = Trainer(options, world, corpus, config)
    record = Record()
    display = Display(world, options, trainer.first_step)
    count = sum(p.numel() for p in trainer.model.parameters())
    emulated = " (emulated vendors: not a measurement of speed)" if os.environ.get("GPUBRIDGE_EMULATE") else ""
    display.say(
        f"{count:,} parameters, {len(corpus.train):,} bytes of text, {world.size} rank(s), {options.dtype}{emulated}"
    )
    try:
        stopped = train(trainer, display, stopper, record)
    finally:
        display.close()
    before, after = record.held_out["before"], record.held_out["after"]
    display.say(f"held-out loss {before:.4f} -> {after:.4f} ({100 * (after / before - 1):+.1f} %)")
    report(trainer, record, options.report)
    if world.size > 1:
        dist.destroy_process_group()
    return 128 + stopped if stopped else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="train a small byte-level language model, alone or with torchrun over gpubridge"
    )
    parser.add_argument("--data", type=Path, help="text file or folder (default: the standard library's sources)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="rows of the global batch, shared by all ranks")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the full learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, help="file to save to, at the end and every --save-every steps")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--report", type=Path, help="write a JSON account of the run")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--backend", default="gpubridge", help="torch.distributed backend (gloo to compare)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    for name in ("steps", "batch", "warmup", "eval_batches", "save_every", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def first_line(error: BaseException) -> str:
    """The sentence of an exception, without what C++ layers append to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def main() -> int:
    options = parse()
    stopper = Stopper()
    rank = os.environ.get("RANK")
    who = "train_lm" if rank is None else f"train_lm: rank {rank}"
    try:
        return run(options, stopper)
    except UserError as error:
        print(f"{who}: {error}", file=sys.stderr, flush=True)
        return 2
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        print(f"{who}: {first_line(error)}", file=sys.stderr, flush=True)
        return 128 + stopper.signal if stopper.signal else 1


if __name__ == "__main__":
    sys.exit(main())
