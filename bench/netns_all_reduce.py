#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""all_reduce between two islands over a slow wire: two network namespaces joined by a veth pair whose both ends are
limited by `tc tbf`; each codec beside plain sockets with as many streams, which move the same bytes both ways, in the
same processes and taking turns with them.

Prints and keeps one JSON line per size, rate and codec: seconds (median), CPU seconds of rank 0, speed-up over no
codec, share of the plain sockets' speed, and the bytes that left the interface by the kernel's own count.  Needs root,
ip and tc; touches nothing but the namespaces that it makes.

usage: netns_all_reduce.py [--gbit 1,5] [--mib 256,1024] [--rounds 3] [--codecs none,bf16,fp8,mxfp4] [--streams 2]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import finish, machine  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
ADDRESSES = ("10.77.13.1", "10.77.13.2")
PORT, PLAIN_PORT = 29617, 29618


# ---- inside a rank ----


class Plain:
    """`streams` TCP connections to the other rank, each carrying its part of a buffer in both directions at once."""

    def __init__(self, rank: int, streams: int) -> None:
        self.sockets = []
        if rank == 0:
            with socket.create_server((ADDRESSES[0], PLAIN_PORT)) as server:
                server.settimeout(60)
                self.sockets = [server.accept()[0] for _ in range(streams)]
        else:
            for _ in range(streams):
                self.sockets.append(self._dial())

    @staticmethod
    def _dial() -> socket.socket:
        for _ in range(600):
            try:
                return socket.create_connection((ADDRESSES[0], PLAIN_PORT), timeout=60)
            except ConnectionRefusedError:
                time.sleep(0.1)
        raise SystemExit("the other rank does not listen")

    def exchange(self, out: memoryview, into: memoryview) -> None:
        share = len(out) // len(self.sockets)
        threads = []
        for i, sock in enumerate(self.sockets):
            part = slice(i * share, (i + 1) * share)
            threads.append(threading.Thread(target=sock.sendall, args=(out[part],)))
            threads.append(threading.Thread(target=self._receive, args=(sock, into[part])))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _receive(sock: socket.socket, into: memoryview) -> None:
        at = 0
        while at < len(into):
            got = sock.recv_into(into[at:])
            if got == 0:
                raise SystemExit("the other rank closed its socket")
            at += got


def interface_bytes() -> int:
    """Bytes that left through this namespace's end of the pair."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip().startswith("gbv"):
            return int(counters.split()[8])
    raise SystemExit("no veth in this namespace")


def rank_main(options: argparse.Namespace) -> None:
    import gpubridge.torch  # noqa: F401
    import torch
    import torch.distributed as dist
    from gpubridge import _native

    dist.init_process_group("gpubridge")
    groups = {
        codec: dist.new_group(backend="gpubridge", pg_options={"compression": codec}) for codec in options.codec_list
    }
    plain = Plain(dist.get_rank(), options.streams)
    found: dict[str, Any] = {"versions": {"gpubridge": _native.version(), "torch": torch.__version__}, "sizes": {}}
    for mib in options.size_list:
        count = mib << 18
        tensor = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
        spare = torch.empty_like(tensor)
        views = [t.numpy().data.cast("B") for t in (tensor, spare)]
        times: dict[str, list[float]] = {name: [] for name in ("plain", *groups)}
        cpu: dict[str, list[float]] = {name: [] for name in times}
        sent: dict[str, int] = {}
        for number in range(options.rounds + 1):  # the first warms up: connections, windows, memory
            for name in times:
                dist.barrier()
                before, busy, start = interface_bytes(), time.process_time(), time.perf_counter()
                if name == "plain":
                    plain.exchange(*views)
                else:
                    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=groups[name])
                took = time.perf_counter() - start
                if number:
                    times[name].append(took)
                    cpu[name].append(time.process_time() - busy)
                    sent[name] = interface_bytes() - before
        found["sizes"][mib] = {"times": times, "cpu": cpu, "sent": sent}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# ---- namespaces ----


def sh(*command: str) -> None:
    subprocess.run(command, check=True)


class Wire:
    """Two namespaces and the limited pair between them; gone when the block ends."""

    def __init__(self, gbit: float) -> None:
        self.gbit = gbit
        self.names = [f"gbns{os.getpid()}x{i}" for i in range(2)]

    def __enter__(self) -> Wire:
        try:
            for name in self.names:
                sh("ip", "netns", "add", name)
            sh(
                "ip",
                "link",
                "add",
                "gbv0",
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                "name",
                "gbv1",
                "netns",
                self.names[1],
            )
            for i, name in enumerate(self.names):
                run = ("ip", "netns", "exec", name)
                sh(*run, "ip", "address", "add", f"{ADDRESSES[i]}/24", "dev", f"gbv{i}")
                sh(*run, "ip", "link", "set", "lo", "up")
                sh(*run, "ip", "link", "set", f"gbv{i}", "up")
                rate = f"{int(self.gbit * 1000)}mbit"
                sh(
                    *run,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    f"gbv{i}",
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "256kb",
                    "latency",
                    "20ms",
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def run_ranks(wire: Wire, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 measured."""
    processes = []
    for rank, name in enumerate(wire.names):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=ADDRESSES[0])
        env.update(MASTER_PORT=str(PORT), OMP_NUM_THREADS="1", GPUBRIDGE_ISLAND="a" if rank == 0 else "b")
        env.update(GPUBRIDGE_TRANSPORT="tcp", GPUBRIDGE_EMULATE="", GPUBRIDGE_LANES=str(options.streams))
        env.update(GPUBRIDGE_CHECKSUM="on", GLOO_SOCKET_IFNAME=f"gbv{rank}")
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            str(Path(__file__).resolve()),
            "--rank-main",
            *sys.argv[1:],
        ]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    found: dict[str, Any] = json.loads(finish(processes, 1800).strip().splitlines()[-1])
    return found


def rows_of(gbit: float, found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for mib, result in found["sizes"].items():
        median = {name: statistics.median(times) for name, times in result["times"].items()}
        for name, seconds in median.items():
            row = {
                "bench": "netns_all_reduce",
                "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "gbit": gbit,
                "mib": int(mib),
                "dtype": "float32",
                "islands": "a,b",
                "streams": options.streams,
                "codec": name,
                "rounds": options.rounds,
                "seconds": round(seconds, 4),
                "all_seconds": [round(t, 4) for t in result["times"][name]],
                "cpu_seconds": round(statistics.median(result["cpu"][name]), 4),
                "plain_ratio": round(median["plain"] / seconds, 4),
                "interface_bytes": result["sent"][name],
                "machine": options.machine,
                "versions": found["versions"],
            }
            if "none" in median and name != "plain":
                row["speedup"] = round(median["none"] / seconds, 3)
                row["bytes_ratio"] = round(result["sent"][name] / result["sent"]["none"], 4)
            rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="all_reduce of two islands over a limited wire")
    parser.add_argument("--gbit", default="1", help="rates of the wire")
    parser.add_argument("--mib", default="256", help="sizes of the float32 tensor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", default="none,bf16,fp8,mxfp4")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rates = [float(word) for word in options.gbit.split(",")]
    options.size_list = [int(word) for word in options.mib.split(",")]
    options.codec_list = options.codecs.split(",")
    return options


def main() -> int:
    options = parse()
    if options.rank_main:
        rank_main(options)
        return 0
    options.machine = machine()
    options.out.mkdir(parents=True, exist_ok=True)
    for gbit in options.rates:
        with Wire(gbit) as wire:
            rows = rows_of(gbit, run_ranks(wire, options), options)
        with open(options.out / "netns_all_reduce.jsonl", "a") as file:
            for row in rows:
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
