# SPDX-License-Identifier: Apache-2.0
"""More than 2^31 elements and bytes (B23).  Minutes and up to 14 GiB of memory, so only with GB_TEST_NIGHTLY=1
(`make nightly`); that no 64-bit count is narrowed on the way is also checked by the compiler (tools/lint.sh).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank

pytestmark = pytest.mark.skipif(
    not os.environ.get("GB_TEST_NIGHTLY"), reason="takes minutes and gigabytes: set GB_TEST_NIGHTLY=1"
)

COUNT = 2**31 + 17
PERIOD = 1000003  # a prime, so that a displaced block cannot look right
LIMIT_S = 900.0


def pattern(rank: int, start: int = 0) -> torch.Tensor:
    """[PERIOD] bytes that repeat over a rank's elements, from element `start` on."""
    i = (torch.arange(PERIOD) + start) % PERIOD
    return ((i * 2654435761 + rank * 97) % 251).to(torch.uint8)


def filled(count: int, rank: int) -> torch.Tensor:
    t = torch.empty(count, dtype=torch.uint8)
    one = pattern(rank)
    for start in range(0, count, PERIOD):
        part = t[start : start + PERIOD]
        part.copy_(one[: len(part)])
    return t


def check(t: torch.Tensor, want: torch.Tensor) -> None:
    """t repeats `want`."""
    for start in range(0, t.numel(), PERIOD):
        part = t[start : start + PERIOD]
        if not torch.equal(part, want[: len(part)]):
            at = start + int((part != want[: len(part)]).nonzero()[0])
            raise AssertionError(f"element {at} of {t.numel()}: {t[at].item()}, want {want[at - start].item()}")


def case_all_reduce(me: Rank) -> float:
    t = filled(COUNT, me.rank)
    began = time.monotonic()
    dist.all_reduce(t)
    took = time.monotonic() - began
    check(t, sum(pattern(r) for r in range(me.size)))  # type: ignore[arg-type]
    return took


def case_broadcast(me: Rank) -> float:
    t = filled(COUNT, me.rank) if me.rank == 1 else torch.zeros(COUNT, dtype=torch.uint8)
    began = time.monotonic()
    dist.broadcast(t, 1)
    took = time.monotonic() - began
    check(t, pattern(1))
    return took


def case_all_gather(me: Rank) -> float:
    share = COUNT // me.size + 1
    got = torch.zeros(share * me.size, dtype=torch.uint8)
    assert got.numel() > 2**31
    mine = filled(share, me.rank)
    began = time.monotonic()
    dist.all_gather_into_tensor(got, mine)
    took = time.monotonic() - began
    for rank, part in enumerate(got.split(share)):
        check(part, pattern(rank))
    return took


def case_all_to_all(me: Rank) -> float:
    """Splits of which one alone is beyond 2^31."""
    sizes = [[5, COUNT], [9, 3]]  # [from][to]
    send = torch.cat([filled(n, me.rank + 2 * to) for to, n in enumerate(sizes[me.rank])])
    want = [sizes[source][me.rank] for source in range(2)]
    got = torch.zeros(sum(want), dtype=torch.uint8)
    began = time.monotonic()
    dist.all_to_all_single(got, send, want, sizes[me.rank])
    took = time.monotonic() - began
    for source, part in enumerate(got.split(want)):
        check(part, pattern(source + 2 * me.rank))
    return took


def case_send(me: Rank) -> float:
    t = filled(COUNT, 0) if me.rank == 0 else torch.zeros(COUNT, dtype=torch.uint8)
    began = time.monotonic()
    if me.rank == 0:
        dist.send(t, 1)
    else:
        dist.recv(t, 0)
        check(t, pattern(0))
    return time.monotonic() - began


def case_object(me: Rank) -> float:
    """A pickled object beyond 2 GiB."""
    blob: list[Any] = [None]
    if me.rank == 0:
        blob = [bytes(bytearray(1 << 20)) * 2048 + b"the end"]
    began = time.monotonic()
    dist.broadcast_object_list(blob, 0)
    assert len(blob[0]) == 2**31 + 7 and blob[0].endswith(b"the end")
    return time.monotonic() - began


CASES: list[tuple[Callable[[Rank], float], int]] = [
    (case_all_reduce, 7),
    (case_broadcast, 5),
    (case_all_gather, 7),
    (case_all_to_all, 10),
    (case_send, 5),
    (case_object, 14),
]


def available_gib() -> float:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 2**20


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(("case", "gib"), CASES, ids=[case.__name__.removeprefix("case_") for case, _ in CASES])
def test_b23_beyond_2_to_the_31(ranks: Callable[..., Pool], case: Callable[[Rank], float], gib: int) -> None:
    if available_gib() < gib + 1:
        pytest.skip(f"needs {gib} GiB of free memory, {available_gib():.1f} are")
    pool = ranks(Layout(("a", "b")))
    took = pool.run(case, timeout=LIMIT_S)
    print(f"\n{case.__name__}: {max(took):.1f} s, {COUNT / max(took) / 1e9:.2f} GB/s per rank")
