#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loss parity of the wire codecs: the same training run with float32 on the bridge and with each codec.

Two ranks in two islands train the language model of examples/python/train_lm.py (about 1.07 million parameters) on
real text, in DDP and in FSDP2, from the same seeds: a pair of runs differs in nothing but the codec.  What is compared
is the loss on held-out text after the last step.  Every run is one JSON file, and a run whose file is there is not
repeated, so an interrupted `make parity` goes on where it stopped.

usage: parity.py [--codecs none,fp8,int8,mxfp4+ef] [--modes ddp,fsdp2] [--seeds 1,2,3] [--steps 1000] [--out DIR]
       parity.py --table       only prints the table of the runs that are there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from common import ROOT, cpu_model, train_lm  # type: ignore[import-not-found]

OUT = ROOT / "bench" / "results" / "parity"
LIMIT_PERCENT = {"fp8": 0.5, "int8": 0.5}
"""What the codecs must keep: |difference of the final loss| of every pair, percent of the float32 run's loss."""
RUN_LIMIT_S = 3600.0


def split_codec(name: str) -> tuple[str, bool]:
    """ "mxfp4+ef" is the codec mxfp4 with error feedback."""
    codec, _, feedback = name.partition("+")
    if feedback not in ("", "ef"):
        raise SystemExit(f"codec {name}: only +ef may follow a codec's name")
    return codec, feedback == "ef"


# ---- inside a rank ----


class Run:
    """Model, data and optimizer of one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.options = options
        self.lm = train_lm()
        config = self.lm.ModelConfig()
        self.corpus = self.lm.Corpus(options.data, config.context)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        share = options.batch // self.size
        self.part = slice(self.rank * share, (self.rank + 1) * share)
        torch.manual_seed(options.seed)
        self.model = self.lm.LanguageModel(config).float()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.state: Any = None
        self.runs = self._sharded() if options.mode == "fsdp2" else self._replicated()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
        )

    def _replicated(self) -> Any:
        import torch

        runs = torch.nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=2, gradient_as_bucket_view=True)
        codec, feedback = split_codec(self.options.codec)
        if codec != "none":
            from gpubridge.torch import ddp

            self.state = ddp.compress_gradients(runs, error_feedback=feedback)
        return runs

    def _sharded(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        codec, feedback = split_codec(self.options.codec)
        if codec != "none":
            from gpubridge.torch import fsdp

            self.state = fsdp.compress_gradients(self.model, error_feedback=feedback)
        return self.model

    def rate(self, step: int) -> float:
        """Warm-up, then half a cosine down to a tenth: what is left of one step's noise at the end is small."""
        warm = min(1.0, (step + 1) / self.options.warmup)
        return float(self.options.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.options.steps)))

    def step(self, step: int) -> float:
        """One step; this rank's loss."""
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        data = self.corpus.batch(self.corpus.train, self.options.seed * 1_000_003 + step, self.options.batch, self.part)
        loss = self.runs(*data)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.item())

    def held_out_loss(self) -> float:
        """Mean over all ranks' rows of the same held-out batches."""
        import torch
        import torch.distributed as dist

        total = torch.zeros(1, dtype=torch.float64)
        with torch.no_grad():
            for i in range(self.options.eval_batches):
                rows = slice(16 * self.rank, 16 * (self.rank + 1))
                seed = self.lm.EVALUATION_SEED + i
                total += self.runs(*self.corpus.batch(self.corpus.held_out, seed, 16 * self.size, rows)).item()
        dist.all_reduce(total)
        return float(total.item()) / self.options.eval_batches / self.size

    def digest(self) -> str:
        """sha256 of all parameters, whole on every rank."""
        import hashlib

        digest = hashlib.sha256()
        for p in self.model.parameters():
            full: Any = p.detach()
            full = full.full_tensor() if hasattr(full, "full_tensor") else full
            digest.update(full.contiguous().numpy().tobytes())
        return digest.hexdigest()


def rank_main(options: argparse.Namespace) -> None:
    import gpubridge.torch
    import torch
    import torch.distributed as dist
    from gpubridge import _native

    torch.set_num_threads(1)
    codec, _ = split_codec(options.codec)
    settings = {"compression": codec, "compression_min_bytes": 4096}
    dist.init_process_group("gpubridge", pg_options=gpubridge.torch.Options(settings))
    run = Run(options)
    group: Any = dist.group.WORLD
    before, stats = run.held_out_loss(), group.stats()
    losses = []
    begin = time.perf_counter()
    for step in range(options.steps):
        losses.append(run.step(step))
    seconds = time.perf_counter() - begin
    sent = group.stats()["bridge_sent_bytes"] - stats["bridge_sent_bytes"]
    every = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(every)
    after, digests = run.held_out_loss(), [None] * run.size
    dist.all_gather_object(digests, run.digest())
    content = {
        "bench": "parity",
        "model": "LLaMA-style byte-level language model of examples/python/train_lm.py",
        "parameters": run.parameters,
        "mode": options.mode,
        "codec": options.codec,
        "seed": options.seed,
        "steps": options.steps,
        "tokens_per_step": options.batch * run.corpus.context,
        "learning_rate": options.lr,
        "warmup_steps": options.warmup,
        "islands": os.environ["GPUBRIDGE_ISLAND"],
        "ranks": run.size,
        "text_bytes": len(run.corpus.train) + len(run.corpus.held_out),
        "text_sha256": run.corpus.digest.hex(),
        "held_out_before": before,
        "held_out_after": after,
        "train_loss_last_100": float(every[-100:].mean() / run.size),
        "train_loss": [round(v, 6) for v in (every / run.size).tolist()],
        "bridge_sent_bytes_per_step": sent / options.steps,
        "equal_on_all_ranks": len(set(digests)) == 1,
        "sha256": digests[0],
        "seconds": round(seconds, 1),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "gpubridge": _native.version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if run.rank == 0:
        part = options.report.with_suffix(".part")
        part.write_text(json.dumps(content) + "\n")
        os.replace(part, options.report)
    dist.destroy_process_group()


# ---- launcher and table ----


def run_path(options: argparse.Namespace, mode: str, codec: str, seed: int) -> Path:
    return Path(options.out) / f"{mode}_{codec.replace('+', '_')}_seed{seed}_{options.steps}.json"


def run_one(options: argparse.Namespace, mode: str, codec: str, seed: int) -> None:
    """One training run in processes of its own.

    Raises:
        JobError: a rank failed.
    """
    from gpubridge.demo.launch import run_job

    path = run_path(options, mode, codec, seed)
    command = [str(Path(__file__).resolve()), "--rank-main", "--mode", mode, "--codec", codec]
    command += ["--seed", str(seed), "--report", str(path), "--steps", str(options.steps)]
    command += ["--eval-batches", str(options.eval_batches), "--lr", str(options.lr), "--warmup", str(options.warmup)]
    command += ["--batch", str(options.batch)] + (["--data", str(options.data)] if options.data else [])
    env = {"GPUBRIDGE_ISLAND": options.islands, "GPUBRIDGE_EMULATE": "", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    run_job(command, len(options.islands.split(",")), env, print, RUN_LIMIT_S)
    loss = json.loads(path.read_text())["held_out_after"]
    print(f"{mode} {codec} seed {seed}: held-out loss {loss:.4f} ({time.monotonic() - start:.0f} s)", flush=True)


def run_all(options: argparse.Namespace) -> None:
    """Runs what is missing, all codecs of a seed before the next seed."""
    from gpubridge.demo.launch import JobError

    options.out.mkdir(parents=True, exist_ok=True)
    cases = [(mode, codec, seed) for seed in options.seeds for codec in options.codecs for mode in options.modes]
    missing = [case for case in cases if not run_path(options, *case).exists()]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(run_one, options, *case): case for case in missing}
        failed = [(jobs[job], job.exception()) for job in as_completed(jobs) if job.exception()]
    for (mode, codec, seed), error in failed:
        print(f"parity: {mode} {codec} seed {seed}: {error}", file=sys.stderr)
        if not isinstance(error, JobError):
            raise error if error else SystemExit(1)
    if failed:
        raise SystemExit(f"parity: {len(failed)} runs failed; the others are kept")


def load_runs(options: argparse.Namespace) -> dict[tuple[str, str, int], dict[str, Any]]:
    runs = (json.loads(path.read_text()) for path in sorted(Path(options.out).glob(f"*_seed*_{options.steps}.json")))
    return {(run["mode"], run["codec"], run["seed"]): run for run in runs}


def summarize(runs: dict[tuple[str, str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per mode and codec over the seeds that both the codec and the float32 wire have."""
    rows = []
    for mode, codec in sorted({key[:2] for key in runs if key[1] != "none"}):
        seeds = sorted(s for m, c, s in runs if (m, c) == (mode, codec) and (mode, "none", s) in runs)
        if not seeds:
            continue
        base = [runs[mode, "none", s] for s in seeds]
        mine = [runs[mode, codec, s] for s in seeds]
        pairs = list(zip(mine, base, strict=True))
        percent = [100 * (a["held_out_after"] / b["held_out_after"] - 1) for a, b in pairs]
        losses = [b["held_out_after"] for b in base]
        limit = LIMIT_PERCENT.get(codec)
        rows.append(
            {
                "mode": mode,
                "codec": codec,
                "seeds": seeds,
                "loss_float32": losses,
                "loss": [a["held_out_after"] for a in mine],
                "difference_percent": percent,
                "mean_difference_percent": statistics.mean(percent),
                "seed_spread_percent": 100 * (max(losses) / min(losses) - 1),
                "bytes_ratio": statistics.mean(
                    a["bridge_sent_bytes_per_step"] / b["bridge_sent_bytes_per_step"] for a, b in pairs
                ),
                "equal_on_all_ranks": all(run["equal_on_all_ranks"] for run in mine + base),
                "limit_percent": limit,
                "ok": limit is None or max(abs(p) for p in percent) <= limit,
            }
        )
    return rows


def chance(runs: dict[tuple[str, str, int], dict[str, Any]]) -> list[float]:
    """What rounding alone does: the loss of FSDP2 against DDP, both with a float32 wire, in percent per seed.

    The two add the same numbers in the same order up to where a division stands; a codec's difference means something
    only if it stands out from this.
    """
    seeds = sorted(s for m, c, s in runs if (m, c) == ("ddp", "none") and ("fsdp2", "none", s) in runs)
    return [
        100 * (runs["fsdp2", "none", s]["held_out_after"] / runs["ddp", "none", s]["held_out_after"] - 1) for s in seeds
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| mode | codec | final loss, float32 wire | final loss, codec | difference per seed, % | mean, % | "
        "spread between seeds, % | bytes sent | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        losses = [f"{v:.4f}" for v in row["loss_float32"]], [f"{v:.4f}" for v in row["loss"]]
        percent = " ".join(f"{p:+.3f}" for p in row["difference_percent"])
        verdict = "reported" if row["limit_percent"] is None else ("ok" if row["ok"] else "above the limit")
        lines.append(
            f"| {row['mode']} | {row['codec']} | {' '.join(losses[0])} | {' '.join(losses[1])} | {percent} | "
            f"{row['mean_difference_percent']:+.3f} | {row['seed_spread_percent']:.2f} | {row['bytes_ratio']:.3f} | "
            f"{verdict} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="loss parity of the wire codecs, resumable")
    parser.add_argument("--codecs", type=lambda t: t.split(","), default=["none", "fp8", "int8", "mxfp4+ef"])
    parser.add_argument("--modes", type=lambda t: t.split(","), default=["ddp", "fsdp2"])
    parser.add_argument("--seeds", type=lambda t: [int(s) for s in t.split(",")], default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each keeps a core per rank busy")
    parser.add_argument("--islands", default="a,b", help="island of each rank")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="rows of 64 tokens per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3, help="twice as much, and rounding alone parts runs")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--eval-batches", type=int, default=32, help="of 1,024 held-out tokens per rank")
    parser.add_argument("--data", type=Path, help="text file or folder (default: the standard library's sources)")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--codec", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.rank_main:
        rank_main(options)
        return 0
    if not options.table:
        run_all(options)
    runs = load_runs(options)
    rows, by_chance = summarize(runs), chance(runs)
    print(table(rows))
    if by_chance:
        print("float32 against float32, FSDP2 against DDP: " + " ".join(f"{p:+.3f}" for p in by_chance) + " %")
    if options.steps == 1000:
        content = {"float32_fsdp2_against_ddp_percent": by_chance, "rows": rows}
        (options.out / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(row["ok"] and row["equal_on_all_ranks"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
