# SPDX-License-Identifier: Apache-2.0
"""Where the time of a large all_reduce goes, against the floor that the machine's own rates set.

    GPUBRIDGE_ISLAND=a,b torchrun --nproc-per-node 2 bench/gpu/staging.py [--bytes N] [--streams N] [--out FILE.json]

Measured first, by both ranks at once, as the operation uses them: pinned copies out of and into the device, each alone
and together, and loopback TCP in both directions over as many connections as the library has lanes.  A pipelined
exchange of n bytes each way cannot be faster than the slowest of them; what is left of the ratio is the library's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from pathlib import Path

import gpubridge.torch  # noqa: F401
import torch
import torch.distributed as dist
from report import header, percentile, rounded, write  # type: ignore[import-not-found]

CHUNK = 4 << 20


def timed(work: object, rounds: int) -> float:
    """Median seconds of a callable, all ranks starting together."""
    samples = []
    for _ in range(rounds + 1):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - begin)
    return percentile(samples[1:], 0.5)


def copy_rates(nbytes: int) -> dict[str, float]:
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    host_in = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    host_out = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    other = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(side):
            other.copy_(host_in, non_blocking=True)
        host_out.copy_(device, non_blocking=True)

    return {
        "copy_out_GB_per_s": nbytes / timed(lambda: host_out.copy_(device, non_blocking=True), 5) * 1e-9,
        "copy_in_GB_per_s": nbytes / timed(lambda: device.copy_(host_in, non_blocking=True), 5) * 1e-9,
        "copy_both_GB_per_s": nbytes / timed(both, 5) * 1e-9,
    }


def connections(count: int) -> list[socket.socket]:
    """`count` loopback connections between ranks 0 and 1."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
            store.set("staging-port", str(server.getsockname()[1]))
            found = [server.accept()[0] for _ in range(count)]
    else:
        port = int(store.get("staging-port"))
        found = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for s in found:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def receive(s: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    while nbytes:
        n = s.recv_into(buffer[: min(len(buffer), nbytes)])
        assert n, "the other end closed"
        nbytes -= n


def send(s: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    while nbytes:
        n = min(len(buffer), nbytes)
        s.sendall(buffer[:n])
        nbytes -= n


def wire_rate(nbytes: int, streams: int) -> float:
    """GB/s each way while both ways run."""
    share = nbytes // streams
    sockets = connections(streams)

    def exchange() -> None:
        threads = [threading.Thread(target=f, args=(s, share)) for s in sockets for f in (send, receive)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    rate = share * streams / timed(exchange, 3) * 1e-9
    for s in sockets:
        s.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description="the floor of a large all_reduce")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gpubridge")
    row = copy_rates(args.bytes)
    row["tcp_both_GB_per_s"] = wire_rate(args.bytes, args.streams)
    x = torch.randn(args.bytes // 4, device="cuda")
    taken = timed(lambda: dist.all_reduce(x), 4)
    shared = min(dist.get_world_size(), 2) if torch.cuda.device_count() == 1 else 1
    slowest = min(row["copy_both_GB_per_s"], row["tcp_both_GB_per_s"])
    row |= {
        "all_reduce_ms": taken * 1e3,
        "copies_alone_ms": args.bytes / row["copy_both_GB_per_s"] * 1e-6,
        "tcp_alone_ms": args.bytes / row["tcp_both_GB_per_s"] * 1e-6,
        "floor_ms": args.bytes / slowest * 1e-6,
        "times_floor": taken * slowest * 1e9 / args.bytes,
        "ranks_per_gpu": shared,
    }
    if dist.get_rank() == 0:
        print(json.dumps(rounded(row)), flush=True)
        write(
            args.out, header(f"floor of an all_reduce of {args.bytes} bytes") | {"streams": args.streams} | rounded(row)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
