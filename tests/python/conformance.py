#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seeded random cases: op x dtype x reduce op x size x memory layout x group x island layout x blocking or not.

Every rank derives a case from (seed, number) alone, runs it, and compares its result bit for bit with the specification
(reference.py).  Cases run in chunks of one island layout; `--state FILE` remembers finished chunks, so a long run can
be stopped and resumed.  The last line is "N cases, W wrong, H hung", and the exit code 1 unless W and H are 0.

usage: conformance.py [--cases 10000] [--seed 1] [--state FILE] [--emulated] [--chunk 200] [--chunk-limit SECONDS]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pool import Layout, Pool, PoolError, Rank
from reference import COMPLEX, FLOATS, INTEGERS, difference, operations, reduced, same_bits, values

CHUNK = 200
CPU = [
    Layout(tuple(islands))
    for islands in ("ab", "aabb", "abc", "a", "aa", "aab", "abab", "aaab", "abbb", "abcd", "abbbb", "aabbc")
]
EMULATED = [
    Layout(tuple(words.split(",")), True)
    for words in ("cuda,hip", "cuda,cuda,hip,hip", "cuda,hip,hip", "cuda,hip,cuda,hip")
]
SIZES = (0, 1, 2, 3, 7, 8, 31, 127, 128, 129, 255, 1000, 1023, 1025, 4099, 20000, 65537, 300007)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)  # carried, never reduced
KINDS = (
    "all_reduce",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_into_tensor",
    "all_gather",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "scatter",
    "ring",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter")
FACTOR = 0.375


class Wrong(AssertionError):
    """A result that is not the specified one."""


class Case:
    """One random case on one rank of one group."""

    def __init__(self, me: Rank, group: Any, members: list[int], seed: int, number: int) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.group, self.members = group, members
        self.rank, self.size = members.index(me.rank), len(members)
        labels = [me.islands[member] for member in members]
        order = list(dict.fromkeys(labels))
        self.islands = [[r for r, label in enumerate(labels) if label == name] for name in order]
        self.kind = self.rng.choice(KINDS)
        self.dtype = self.rng.choice(DTYPES if self.kind in REDUCING else DTYPES + MOVED)
        self.op = self.rng.choice(operations(self.dtype))
        self.count = self.rng.choice(SIZES)
        self.root = self.rng.randrange(self.size)
        self.view = self.rng.choice(("dense", "dense", "strided", "transposed", "offset"))
        self.asynchronous = self.rng.random() < 0.5
        self.seed = number

    def __str__(self) -> str:
        how = "async" if self.asynchronous else "blocking"
        return (
            f"{self.kind} {self.op} {self.dtype} x {self.count} {self.view} {how} root {self.root} ranks {self.members}"
        )

    # -- data

    def data(self, rank: int, count: int, salt: int = 0) -> torch.Tensor:
        return values(self.dtype, count, rank, self.seed * 7 + salt, gentle=self.op == "PRODUCT")

    def uneven(self, a: int, b: int = 0) -> int:
        return (a * 31 + b * 17 + self.seed) % (self.count % 977 + 1)

    def shaped(self, content: torch.Tensor) -> torch.Tensor:
        """A tensor with the content in the memory layout of this case."""
        count = content.numel()
        if self.view == "strided":
            out = torch.zeros(2 * count, dtype=content.dtype)[::2]
        elif self.view == "transposed" and count and count % 2 == 0:
            return self._transposed(content)
        elif self.view == "offset":
            out = torch.zeros(count + 3, dtype=content.dtype)[3:]
        else:
            return content.clone()
        out.copy_(content)
        return out

    @staticmethod
    def _transposed(content: torch.Tensor) -> torch.Tensor:
        """[2, n / 2] whose memory is column-major."""
        out = torch.zeros(content.numel() // 2, 2, dtype=content.dtype).t()
        out.copy_(content.view(2, -1))
        return out

    def empty(self, count: int) -> torch.Tensor:
        return self.shaped(values(self.dtype, count, 99, 99, gentle=True))

    def finish(self, work: Any) -> None:
        if self.asynchronous:
            work.wait()

    def expect(self, got: torch.Tensor, want: torch.Tensor) -> None:
        flat = got.reshape(-1)
        if not same_bits(flat, want):
            raise Wrong(f"case {self.seed}: {self}: {difference(flat, want)}")

    # -- what runs

    def run(self) -> None:
        getattr(self, "run_" + self.kind)()

    def reduce_arguments(self) -> dict[str, Any]:
        op = dist._make_nccl_premul_sum(FACTOR) if self.op == "PREMUL_SUM" else getattr(dist.ReduceOp, self.op)
        return {"op": op, "group": self.group, "async_op": self.asynchronous}

    def total(self, count: int) -> torch.Tensor:
        return reduced([self.data(r, count) for r in range(self.size)], self.islands, self.op, FACTOR)

    def run_all_reduce(self) -> None:
        # torch shows complex tensors as pairs only for SUM-like ops; all of ours are.
        got = self.shaped(self.data(self.rank, self.count))
        self.finish(dist.all_reduce(got, **self.reduce_arguments()))
        self.expect(got, self.total(self.count))

    def run_reduce(self) -> None:
        mine = self.data(self.rank, self.count)
        got = self.shaped(mine)
        self.finish(dist.reduce(got, group_dst=self.root, **self.reduce_arguments()))
        self.expect(got, self.total(self.count) if self.rank == self.root else mine)

    def run_broadcast(self) -> None:
        got = self.shaped(self.data(self.rank, self.count))
        self.finish(dist.broadcast(got, group_src=self.root, group=self.group, async_op=self.asynchronous))
        self.expect(got, self.data(self.root, self.count))

    def run_all_gather_into_tensor(self) -> None:
        count = self.count // self.size
        got = self.empty(count * self.size)
        mine = self.shaped(self.data(self.rank, count))
        self.group.all_gather_single(got, mine).wait()
        self.expect(got, torch.cat([self.data(r, count) for r in range(self.size)]))

    def run_all_gather(self) -> None:
        counts = [self.uneven(r) for r in range(self.size)]
        got = [self.empty(n) for n in counts]
        mine = self.shaped(self.data(self.rank, counts[self.rank]))
        self.finish(dist.all_gather(got, mine, group=self.group, async_op=self.asynchronous))
        for r, part in enumerate(got):
            self.expect(part, self.data(r, counts[r]))

    def run_reduce_scatter_tensor(self) -> None:
        count = self.count // self.size
        got = self.empty(count)
        mine = self.shaped(self.data(self.rank, count * self.size))
        self.finish(dist.reduce_scatter_tensor(got, mine, **self.reduce_arguments()))
        self.expect(got, self.total(count * self.size)[self.rank * count : (self.rank + 1) * count])

    def run_reduce_scatter(self) -> None:
        counts = [self.uneven(r) for r in range(self.size)]
        got = self.empty(counts[self.rank])
        parts = [self.shaped(t) for t in self.data(self.rank, sum(counts)).split(counts)]
        self.finish(dist.reduce_scatter(got, parts, **self.reduce_arguments()))
        self.expect(got, self.total(sum(counts)).split(counts)[self.rank])

    def block(self, source: int, to: int) -> torch.Tensor:
        return self.data(source, self.uneven(source, to), salt=1 + to)

    def run_all_to_all_single(self) -> None:
        send = [self.block(self.rank, to) for to in range(self.size)]
        want = [self.block(source, self.rank) for source in range(self.size)]
        sizes = [t.numel() for t in want], [t.numel() for t in send]
        got = torch.zeros(sum(sizes[0]), dtype=self.dtype)
        arguments = {"group": self.group, "async_op": self.asynchronous}
        self.finish(dist.all_to_all_single(got, torch.cat(send), *sizes, **arguments))
        self.expect(got, torch.cat(want))

    def run_all_to_all(self) -> None:
        send = [self.shaped(self.block(self.rank, to)) for to in range(self.size)]
        got = [self.empty(self.uneven(source, self.rank)) for source in range(self.size)]
        self.finish(dist.all_to_all(got, send, group=self.group, async_op=self.asynchronous))
        for source, part in enumerate(got):
            self.expect(part, self.block(source, self.rank))

    def run_gather(self) -> None:
        got = [self.empty(self.count) for _ in range(self.size)] if self.rank == self.root else None
        mine = self.shaped(self.data(self.rank, self.count))
        arguments = {"group": self.group, "async_op": self.asynchronous}
        self.finish(dist.gather(mine, got, group_dst=self.root, **arguments))
        for r, part in enumerate(got or []):
            self.expect(part, self.data(r, self.count))

    def run_scatter(self) -> None:
        got = self.empty(self.count)
        parts = [self.shaped(self.data(r, self.count)) for r in range(self.size)] if self.rank == self.root else None
        arguments = {"group": self.group, "async_op": self.asynchronous}
        self.finish(dist.scatter(got, parts, group_src=self.root, **arguments))
        self.expect(got, self.data(self.rank, self.count))

    def run_ring(self) -> None:
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        got = self.empty(self.count)
        send: Any = dist.isend(self.shaped(self.data(self.rank, self.count)), group_dst=right, group=self.group, tag=3)
        receive: Any = dist.irecv(got, group_src=left, group=self.group, tag=3)
        receive.wait()
        send.wait()
        self.expect(got, self.data(left, self.count))


def case_chunk(me: Rank, seed: int, first: int, count: int) -> tuple[int, list[str]]:
    """Runs cases first .. first + count - 1; (run here, texts of wrong results)."""
    everybody = list(range(me.size))
    some = random.Random(f"{seed}/{first}/group").sample(everybody, max(1, me.size - 1))
    groups = [(dist.group.WORLD, everybody), (dist.new_group(sorted(some)), sorted(some))]
    done, wrong = 0, []
    for number in range(first, first + count):
        group, members = groups[random.Random(f"{seed}/{number}/which").random() < 0.3]
        if me.rank in members:
            try:
                Case(me, group, members, seed, number).run()
            except Wrong as error:
                wrong.append(str(error))
            done += 1
    if me.rank in groups[1][1]:
        dist.destroy_process_group(groups[1][0])
    return done, wrong


def read_state(path: Path | None, seed: int, layouts: int, chunk: int) -> dict[str, Any]:
    state: dict[str, Any] = {"seed": seed, "layouts": layouts, "chunk": chunk, "chunks": [], "wrong": 0, "hung": 0}
    if path is not None and path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        made_by = found["seed"], found["layouts"], found.setdefault("chunk", CHUNK)
        if made_by != (seed, layouts, chunk):
            raise SystemExit(
                f"{path} belongs to seed {made_by[0]} on {made_by[1]} layouts in chunks of {made_by[2]}: "
                "use another --state"
            )
        return found
    return state


def run_chunk(pool: Pool, seed: int, first: int, count: int, limit: float) -> list[str]:
    import conformance  # by its own name: as the main program it is not what workers can import

    results = pool.run(conformance.case_chunk, seed, first, count, timeout=limit)
    assert max(done for done, _ in results) > 0
    return [text for _, wrong in results for text in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description="seeded random conformance cases")
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--emulated", action="store_true", help="also on emulated vendors")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="cases before the next layout has its turn")
    parser.add_argument("--chunk-limit", type=float, default=600, help="seconds after which a chunk counts as hung")
    options = parser.parse_args()
    layouts = list(CPU)
    for place, layout in enumerate(EMULATED if options.emulated else []):
        layouts.insert(2 * place + 1, layout)  # a short run meets them too
    state = read_state(options.state, options.seed, len(layouts), options.chunk)
    step = options.chunk
    chunks = [(first, min(step, options.cases - first)) for first in range(0, options.cases, step)]
    start, pool = time.monotonic(), None
    # One layout after the other, so that each pool of processes is started once.
    order = sorted(range(len(chunks)), key=lambda number: number % len(layouts))
    for position, number in enumerate(order):
        layout, (first, count) = layouts[number % len(layouts)], chunks[number]
        if number in state["chunks"]:
            continue
        if pool is None or pool.broken or pool.layout != layout:
            if pool is not None and not pool.broken:
                pool.close()
            pool = Pool(layout)
        try:
            wrong = run_chunk(pool, options.seed, first, count, options.chunk_limit)
        except PoolError as error:
            state["hung"] += 1
            print(f"chunk {number} on {layout}: {error}", flush=True)
        else:
            state["wrong"] += len(wrong)
            print("\n".join(wrong), end="\n" if wrong else "", flush=True)
        state["chunks"].append(number)
        if options.state:
            options.state.write_text(json.dumps(state))
        islands = ",".join(layout.islands) + (" emulated" if layout.emulated else "")
        print(f"{position + 1}/{len(order)} {islands}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if pool is not None and not pool.broken:
        pool.close()
    cases = sum(count for number, (_, count) in enumerate(chunks) if number in state["chunks"])
    print(f"{cases} cases, {state['wrong']} wrong, {state['hung']} hung")
    return 1 if state["wrong"] or state["hung"] else 0


if __name__ == "__main__":
    sys.exit(main())
