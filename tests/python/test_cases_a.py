# SPDX-License-Identifier: Apache-2.0
"""Mixed vendors in one job: what users hit, one test per situation (A1 to A14; A4, A13 stand in other files)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Layout, Pool, Rank
from test_processes import finish, launch

VENDORS = Layout(("cuda", "cuda", "hip", "hip"), emulated=True)
INTERLEAVED = Layout(("cuda", "hip", "cuda", "hip"), emulated=True)


def case_a1(me: Rank) -> list[tuple[str, list[int]]]:
    dist.all_reduce(torch.ones(10))
    world: Any = dist.group.WORLD
    found = re.findall(r"^island \d+ \((\w+):.*?\): ([\d ]+)$", world.describe(), re.MULTILINE)
    return [(vendor, [int(rank) for rank in ranks.split()]) for vendor, ranks in found]


@pytest.mark.parametrize("layout", [VENDORS, INTERLEAVED], ids=["2+2", "ABAB"])
def test_a1_one_vendor_communicator_per_vendor(ranks: Callable[..., Pool], layout: Layout) -> None:
    """Two islands, each with the ranks of one vendor; the bridge is all that lies between them."""
    members: dict[str, list[int]] = {"nvidia": [], "amd": []}
    for rank, vendor in enumerate(layout.islands):
        members["nvidia" if vendor == "cuda" else "amd"].append(rank)
    for islands in ranks(layout).run(case_a1):
        assert dict(islands) == members and len(islands) == 2


def test_a2_self_test_names_the_edge() -> None:
    """A link that delivers wrong bytes, which no checksum looks at: the group is refused before any data is moved.

    Values of every op and dtype in a mixed group are compared with float64 in test_values.
    """
    body = """
    try:
        dist.all_reduce(torch.ones(1000))
        print("worked")
    except dist.DistBackendError as error:
        print("said:", error)
    """
    init = """
try:
    dist.init_process_group("gpubridge")
except dist.DistBackendError as error:
    print("said:", error)
    os._exit(0)
"""
    faults: dict[str, Any] = {
        "GPUBRIDGE_FAULT": "bulk0:corrupt@5000",
        "GPUBRIDGE_CHECKSUM": "off",
        "GPUBRIDGE_LANES": "1",
    }
    results = finish(launch(body, init=init, GPUBRIDGE_TRANSPORT="tcp", **faults))
    said = [out for _, out, _ in results]
    assert all("said:" in out for out in said), results
    assert any("self-test: the link from" in out and "rank" in out for out in said), said


def test_a3_plans_do_not_depend_on_the_machine() -> None:
    """Ranks with other vendors and other local settings agree and compute; another agreed setting is named."""
    body = """
    for count in (1, 1000, 300000):
        t = torch.arange(count, dtype=torch.float64) + rank
        dist.all_reduce(t)
        assert torch.equal(t, 2 * torch.arange(count, dtype=torch.float64) + 1)
    print("fine")
    """
    local = 'os.environ.update(GPUBRIDGE_LOG="info" if rank else "error", OMP_NUM_THREADS=str(1 + rank), LANG="C")\n'
    init = 'dist.init_process_group("gpubridge")\n'
    results = finish(launch(body, init=local + init, GPUBRIDGE_EMULATE="cuda,hip", GPUBRIDGE_ISLAND=""))
    assert all("fine" in out for _, out, _ in results), results
    agreed = 'os.environ["GPUBRIDGE_CHUNK_BYTES"] = str(65536 << rank)\n'
    refused = """
from datetime import timedelta
try:
    dist.init_process_group("gpubridge", timeout=timedelta(seconds=20))
except dist.DistBackendError as error:
    print("said:", error)
    time.sleep(1)
    os._exit(0)
"""
    results = finish(launch("print('made')", init=agreed + refused))
    assert all("said:" in out and "GPUBRIDGE_CHUNK_BYTES" in out for _, out, _ in results), results


def case_a6(me: Rank) -> float:
    """First use of a group is a message between two members; the other two do nothing meanwhile."""
    start = time.monotonic()
    group = dist.new_group([0, 1, 2, 3])
    made = time.monotonic() - start
    dist.barrier(group=me.reference)
    start = time.monotonic()
    if me.rank == 1:
        dist.send(torch.full((5,), 7.0), 2, group=group)
    elif me.rank == 2:
        got = torch.zeros(5)
        dist.recv(got, 1, group=group)
        assert got.tolist() == [7.0] * 5
    took = time.monotonic() - start
    dist.barrier(group=me.reference)  # until here ranks 0 and 3 have not touched the group
    dist.destroy_process_group(group)
    assert made < 30
    return took


@pytest.mark.parametrize("layout", [Layout(("a", "a", "b", "b")), VENDORS], ids=["islands", "vendors"])
def test_a6_first_use_is_one_message(ranks: Callable[..., Pool], layout: Layout) -> None:
    assert max(ranks(layout).run(case_a6)) < 2


def test_a8_generations_are_islands_of_their_own() -> None:
    """Ranks of one vendor but two architectures: two islands by default, one when the user says so."""
    body = """
    for count in (1, 7, 4096, 1 << 20):
        t = torch.arange(count, dtype=torch.float64) * (rank + 1)
        dist.all_reduce(t)
        assert torch.equal(t, 3 * torch.arange(count, dtype=torch.float64)), count
    text = dist.group.WORLD.describe()
    print("islands:", sum(line.startswith("island") for line in text.splitlines()))
    """
    init = 'os.environ["GBEMU_ARCH"] = ("sm_80", "sm_90")[rank]\n' + 'dist.init_process_group("gpubridge")\n'
    by_vendor: dict[str, Any] = {"GPUBRIDGE_ISLAND_BY": "vendor"}
    for extra, want in (({}, 2), (by_vendor, 1)):
        results = finish(launch(body, init=init, GPUBRIDGE_EMULATE="cuda,cuda", GPUBRIDGE_ISLAND="", **extra))
        assert all(f"islands: {want}" in out for _, out, _ in results), results


def test_a14_a_flipped_byte_is_an_error_and_names_the_peer() -> None:
    """The same wrong byte as in A2 with checksums on, late enough to hit a collective: never data."""
    body = """
    try:
        for i in range(200):
            t = torch.full((100000,), float(rank))
            dist.all_reduce(t)
            assert t.eq(1).all(), "wrong data came through"
        print("worked")
    except dist.DistBackendError as error:
        print("said:", error)
    os._exit(0)
    """
    faults: dict[str, Any] = {
        "GPUBRIDGE_FAULT": "bulk0:corrupt@5000000",
        "GPUBRIDGE_CHECKSUM": "on",
        "GPUBRIDGE_LANES": "1",
    }
    results = finish(launch(body, GPUBRIDGE_TRANSPORT="tcp", **faults))
    assert all("said:" in out and f"rank {1 - rank}" in out for rank, (_, out, _) in enumerate(results)), results
    assert any("damaged" in out for _, out, _ in results), results
