#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""DDP training across a slow wire: a LLaMA-style model on two ranks in two network namespaces, joined by a veth pair
that a token bucket filter holds to 1 Gbit/s in each direction.

For several amounts of computation per step (the compute-only step as a share of the time in which the uncompressed
gradients cross the wire) it measures the step with an uncompressed bridge and with codecs: forward, backward on real
text, gradient averaging, optimizer; nothing sleeps.  The codecs take turns within each round, so what else the machine
does hits all of them.  Needs root, `ip` and `tc`.

usage: train_netns.py [--codecs none,fp8,mxfp4,auto] [--ratios 0.17,0.4,1.0] [--rounds 5] [--steps 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import ROOT, finish, train_lm  # type: ignore[import-not-found]

NAMESPACES = ("gbtrain0", "gbtrain1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
CONTEXT = 16
LIMIT_S = 900


# ---- inside a rank ----


class Bench:
    """One rank: a model per codec on a group of that codec, and the same text for all."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from gpubridge.torch import Options, ddp

        self.options = options
        self.lm = train_lm()
        self.config = self.lm.ModelConfig(options.width, options.layers, 4, 8 * options.width // 3, CONTEXT)
        self.corpus = self.lm.Corpus(options.data, CONTEXT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        for codec in options.codecs:
            group = dist.new_group(pg_options=Options({"compression": codec}))
            self.groups[codec] = group
            torch.manual_seed(1)
            model = torch.nn.parallel.DistributedDataParallel(
                self.lm.LanguageModel(self.config).float(), process_group=group, gradient_as_bucket_view=True
            )
            if codec != "none":
                ddp.compress_gradients(model)
            self.models[codec] = model
            self.optimizers[codec] = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        self.parameters = sum(p.numel() for p in self.models["none"].parameters())
        self.steps_done = 0

    def step(self, codec: str, rows: int, communicates: bool = True) -> float:
        """Seconds of one step on `rows` rows of this rank."""
        self.steps_done += 1
        part = slice(self.rank * rows, (self.rank + 1) * rows)
        data = self.corpus.batch(self.corpus.train, self.steps_done, rows * self.size, part)
        model, optimizer = self.models[codec], self.optimizers[codec]
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        if communicates:
            model(*data).backward()
        else:
            with model.no_sync():
                model(*data).backward()
        optimizer.step()
        return time.perf_counter() - start

    def together(self, times: list[float]) -> float:
        """Median over steps of the slower rank, equal on all ranks."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.groups["none"])
        return statistics.median(slowest.tolist())

    def run(self, codec: str, rows: int, count: int, communicates: bool = True) -> list[float]:
        import torch.distributed as dist

        dist.barrier(group=self.groups["none"])
        return [self.step(codec, rows, communicates) for _ in range(count)]

    def wire_seconds(self) -> float:
        """In which an uncompressed all_reduce of as many float32 as there are parameters is done; median of 5."""
        import torch
        import torch.distributed as dist

        flat = torch.zeros(self.parameters)
        times = []
        for _ in range(6):
            dist.barrier(group=self.groups["none"])
            start = time.perf_counter()
            dist.all_reduce(flat, group=self.groups["none"])
            times.append(time.perf_counter() - start)
        return self.together(times[1:])

    def rows_for(self, seconds: float) -> int:
        """Rows per rank whose compute-only step comes nearest to that long, by trial: from a line through two measured
        points, then corrected by what was measured there.
        """

        def measured(rows: int) -> float:
            self.run("none", rows, 2, False)
            return self.together(self.run("none", rows, 8, False))

        low, high = measured(1), measured(1 + self.options.probe_rows)
        slope = max((high - low) / self.options.probe_rows, 1e-6)
        tried: dict[int, float] = {1: low, 1 + self.options.probe_rows: high}
        rows = max(1, round(1 + (seconds - low) / slope))
        for _ in range(4):
            if rows in tried:
                break
            tried[rows] = measured(rows)
            rows = max(1, rows + round((seconds - tried[rows]) / slope))
        return min(tried, key=lambda r: abs(tried[r] - seconds))

    def measure(self, rows: int) -> dict[str, Any]:
        """Step and bridge times of every codec with `rows` rows per rank."""
        alone: list[float] = []
        times: dict[str, list[float]] = {codec: [] for codec in self.groups}
        before = {codec: group.stats() for codec, group in self.groups.items()}
        for codec in self.groups:
            self.run(codec, rows, 2)  # buckets are rebuilt after the first backward of a model
            before[codec] = self.groups[codec].stats()
        for _ in range(self.options.rounds):
            alone += self.run("none", rows, self.options.steps, False)
            for codec in self.groups:
                times[codec] += self.run(codec, rows, self.options.steps)
        compute = self.together(alone)
        found: dict[str, Any] = {"rows_per_rank": rows, "compute_only_s": compute, "codecs": {}}
        for codec, group in self.groups.items():
            after, steps = group.stats(), len(times[codec])
            step = self.together(times[codec])
            found["codecs"][codec] = {
                "chosen": group.codec,
                "step_s": step,
                "tokens_per_s": rows * CONTEXT * self.size / step,
                "bridge_s": (after["bridge_ns"] - before[codec]["bridge_ns"]) / 1e9 / steps,
                "exposed_bridge_s": max(0.0, step - compute),
                "bridge_sent_bytes": (after["bridge_sent_bytes"] - before[codec]["bridge_sent_bytes"]) / steps,
                "step_times_s": [round(t, 5) for t in times[codec]],
            }
        return found


def rank_main(options: argparse.Namespace) -> None:
    import gpubridge.torch  # noqa: F401
    import torch
    import torch.distributed as dist
    from gpubridge import _native

    torch.set_num_threads(options.threads)
    dist.init_process_group("gpubridge")
    bench = Bench(options)
    wire = bench.wire_seconds()
    rows = []
    for ratio in options.ratios:
        found = bench.measure(bench.rows_for(ratio * wire))
        found["wanted_ratio"] = ratio
        found["compute_to_wire"] = found["compute_only_s"] / wire
        base = found["codecs"]["none"]["tokens_per_s"]
        for result in found["codecs"].values():
            result["speedup"] = result["tokens_per_s"] / base
        rows.append(found)
    if bench.rank == 0:
        config = bench.config
        content = {
            "bench": "train_netns",
            "model": "LLaMA-style byte-level language model (RMSNorm, RoPE, SwiGLU) of examples/python/train_lm.py",
            "width": config.width,
            "layers": config.layers,
            "hidden": config.hidden,
            "context": CONTEXT,
            "parameters": bench.parameters,
            "optimizer": "SGD",
            "threads_per_rank": options.threads,
            "wire": {"rate": options.rate, "burst": options.burst, "uncompressed_gradients_s": wire},
            "results": rows,
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "load_before": options.load,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"gpubridge": _native.version(), "torch": torch.__version__},
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# ---- the wire ----


def run_tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"train_netns: {' '.join(command)}: {done.stderr.strip() or done.returncode}")


def make_wire(rate: str, burst: str) -> None:
    """Two namespaces, one veth pair, a token bucket on each end's way out.

    Segmentation is left to the sender's kernel (no TSO), because a bucket smaller than a 64 KiB super-packet drops it.
    """
    for name in NAMESPACES:
        run_tool("ip", "netns", "add", name)
    ends = ("gbt0", "gbt1")
    run_tool(
        "ip", "link", "add", ends[0], "netns", NAMESPACES[0], "type", "veth", "peer", ends[1], "netns", NAMESPACES[1]
    )
    for name, end, address in zip(NAMESPACES, ends, ADDRESSES, strict=True):
        run_tool("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
        run_tool("ip", "-n", name, "link", "set", "lo", "up")
        run_tool("ip", "-n", name, "link", "set", end, "up")
        tbf = ("root", "tbf", "rate", rate, "burst", burst, "latency", "20ms")
        run_tool("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, *tbf)


def remove_wire() -> None:
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def launch(options: argparse.Namespace, arguments: list[str]) -> None:
    """One rank in each namespace, an island each."""
    processes = []
    for rank, name in enumerate(NAMESPACES):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
        env.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29650", OMP_NUM_THREADS=str(options.threads))
        env.update(GPUBRIDGE_ISLAND="ab"[rank], GPUBRIDGE_EMULATE="", GPUBRIDGE_TRANSPORT="tcp")
        command = [sys.executable, str(Path(__file__).resolve()), "--rank-main", *arguments]
        processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=env, text=True))
    finish(processes, LIMIT_S)


def table(content: dict[str, Any]) -> str:
    wire = content["wire"]["uncompressed_gradients_s"]
    lines = [
        f"{content['parameters']:,} parameters; uncompressed gradients cross {content['wire']['rate']} in {wire:.3f} s",
        "| compute-only step / wire | codec | step, ms | bridge, ms | exposed bridge, ms | tokens/s | against none |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in content["results"]:
        for codec, r in row["codecs"].items():
            name = f"auto: {r['chosen']}" if codec == "auto" else codec
            lines.append(
                f"| {row['compute_to_wire']:.3f} | {name} | {1e3 * r['step_s']:.1f} | {1e3 * r['bridge_s']:.1f} | "
                f"{1e3 * r['exposed_bridge_s']:.1f} | {r['tokens_per_s']:.0f} | {r['speedup']:.2f}x |"
            )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DDP training over a 1 Gbit/s veth pair, per codec")
    parser.add_argument("--codecs", type=lambda t: t.split(","), default=["none", "fp8", "mxfp4", "auto"])
    parser.add_argument("--ratios", type=lambda t: [float(r) for r in t.split(",")], default=[0.17, 0.4, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="per codec and round")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--probe-rows", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="of a rank's computation")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--burst", default="512kb")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "train_netns.json")
    parser.add_argument("--load", type=float, default=round(os.getloadavg()[0], 2), help=argparse.SUPPRESS)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "none" not in options.codecs:
        parser.error("--codecs must hold none, which the others are compared with")
    return options


def main() -> int:
    options = parse()
    if options.rank_main:
        rank_main(options)
        return 0
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("train_netns: needs root, ip and tc to make two network namespaces")
    remove_wire()
    try:
        make_wire(options.rate, options.burst)
        launch(options, [*sys.argv[1:], "--load", str(options.load)])
    finally:
        remove_wire()
    print(table(json.loads(options.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
