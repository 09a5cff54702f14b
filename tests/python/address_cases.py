# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_addresses.py do."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from forks import tell


def listening_ports() -> set[int]:
    """TCP ports in LISTEN state in this rank's network namespace, without the store's."""
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as file:
            for line in file.read().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A":
                    found.add(int(parts[1].rpartition(":")[2], 16))
    return found - {int(os.environ["MASTER_PORT"])}


def works() -> None:
    """One world and one more group; tells the group's links and this host's listeners."""
    dist.init_process_group("gpubridge", timeout=timedelta(seconds=40))
    group: Any = dist.group.WORLD
    pair = dist.new_group([0, 1])
    t = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(t)
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(3), group=pair)
    size = dist.get_world_size()
    tell(what="works", value=t[0].item(), want=size * (size - 1) / 2, links=group.describe())
    tell(what="listens", ports=sorted(listening_ports()))
    dist.barrier()
    dist.destroy_process_group()


def fails() -> None:
    """Making the group must fail; tells how, and how long it took."""
    began = time.monotonic()
    try:
        dist.init_process_group("gpubridge", timeout=timedelta(seconds=10))
        dist.barrier()
    except dist.DistBackendError as error:
        tell(what="failed", text=str(error), took=time.monotonic() - began)
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        del store
        time.sleep(float(os.environ.get("LINGER_S", "0")))  # the store lives in rank 0: the others still need it
    else:
        tell(what="failed", text="it worked")
    os._exit(0)
