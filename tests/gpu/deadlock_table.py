# SPDX-License-Identifier: Apache-2.0
"""The deadlock table on a real GPU: what a training process does while an operation of this library is in flight.

Two ranks share one GPU as two single-rank islands (or use one each).  The rank under test starts a large asynchronous
all_reduce; the other rank comes `LATE_S` later, so the whole device side of the operation stands enqueued behind closed
flags.  Meanwhile the rank under test does one thing that takes locks in the driver.  Everything must finish once the
late rank has come, with the right value.  Each case runs in processes of its own, since first uses happen once a
process.

    python tests/gpu/deadlock_table.py [--out FILE.json] [--case NAME] [--gate on|off]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LATE_S = 1.5
SETTLE_S = 0.4  # the whole operation stands enqueued by then
LIMIT_S = 60
NUMEL = 32 << 20  # 128 MiB of f32


def _cases() -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist

    hold = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def free() -> None:
        nonlocal hold
        del hold
        torch.cuda.empty_cache()

    def new_comm() -> None:
        # The other rank makes it too, after it has come late.
        group = dist.new_group([0, 1])
        x = torch.full((1000,), float(dist.get_rank() + 1), device="cuda")
        dist.all_reduce(x, group=group)
        assert x[0].item() == 3.0

    return {
        "nothing": lambda: None,
        "loaded kernel": lambda: torch.zeros(1000, device="cuda").add_(1),
        "lazy kernel": lambda: torch.special.zeta(
            torch.rand(1000, device="cuda") + 2, torch.rand(1000, device="cuda") + 1
        ),
        "cudaMalloc 512 MiB": lambda: torch.empty(512 << 20, dtype=torch.uint8, device="cuda"),
        "pinned allocation": lambda: torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True),
        "cudaFree": free,
        "first matrix product": lambda: torch.rand(512, 512, device="cuda") @ torch.rand(512, 512, device="cuda"),
        "synchronize": torch.cuda.synchronize,
        "new communicator": new_comm,
    }


def rank_main(case: str, tested: int) -> None:
    import gpubridge.torch  # noqa: F401
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    warm = torch.ones(NUMEL, device="cuda")
    dist.all_reduce(warm)
    torch.cuda.synchronize()
    act = _cases()[case]
    x = torch.arange(NUMEL, device="cuda", dtype=torch.float32) % 1021 + 1000 * rank
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if rank != tested:
        time.sleep(LATE_S)
    work = dist.all_reduce(x, async_op=True)
    issued = time.monotonic() - begin
    acted = 0.0
    if rank == tested or case == "new communicator":
        time.sleep(SETTLE_S if rank == tested else 0)
        act()
        acted = time.monotonic() - begin
    work.wait()
    waited = time.monotonic() - begin
    torch.cuda.synchronize()
    done = time.monotonic() - begin
    want = (torch.arange(NUMEL, device="cuda", dtype=torch.float32) % 1021) * 2 + 1000
    right = bool(torch.equal(x, want))
    print(
        "RESULT "
        + json.dumps(
            {
                "rank": rank,
                "issued_s": round(issued, 3),
                "acted_s": round(acted, 3),
                "wait_returned_s": round(waited, 3),
                "done_s": round(done, 3),
                "right": right,
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()
    sys.exit(0 if right else 1)


def run_case(case: str, tested: int, gate: str, port: int) -> dict[str, object]:
    ranks = []
    for rank in range(2):
        env = dict(
            os.environ,
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GPUBRIDGE_ISLAND="a,b",
            GPUBRIDGE_GATE=gate,
        )
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank-case", case, "--tested", str(tested)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    end = time.monotonic() + LIMIT_S
    outputs = []
    hung = False
    for process in ranks:
        try:
            outputs.append(process.communicate(timeout=max(1.0, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            outputs.append(process.communicate()[0])
    results = [json.loads(line[7:]) for text in outputs for line in text.splitlines() if line.startswith("RESULT ")]
    ok = not hung and all(p.returncode == 0 for p in ranks) and len(results) == 2
    row: dict[str, object] = {
        "case": case,
        "tested_rank": tested,
        "gate": gate,
        "ok": ok,
        "hung": hung,
        "ranks": results,
    }
    if not ok:
        row["output"] = [text[-1500:] for text in outputs]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case")
    parser.add_argument("--gate", default="on")
    parser.add_argument("--rank-case")
    parser.add_argument("--tested", type=int, default=0)
    args = parser.parse_args()
    if args.rank_case:
        rank_main(args.rank_case, args.tested)
        return 0
    names = [
        "nothing",
        "loaded kernel",
        "lazy kernel",
        "cudaMalloc 512 MiB",
        "pinned allocation",
        "cudaFree",
        "first matrix product",
        "synchronize",
        "new communicator",
    ]
    rows = []
    for i, (name, tested) in enumerate((n, t) for n in names for t in (0, 1)):
        if args.case and name != args.case:
            continue
        row = run_case(name, tested, args.gate, 29300 + i)
        rows.append(row)
        print(json.dumps(row), flush=True)
    import torch

    report = {
        "what": "deadlock table",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "late_s": LATE_S,
        "bytes": NUMEL * 4,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    bad = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - bad} passed, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
