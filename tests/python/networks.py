# SPDX-License-Identifier: Apache-2.0
"""Hosts of one machine: network namespaces on a bridge, where packets can be dropped and addresses chosen freely.

Needs root and the programs ip and nft; tests that use `hosts` are skipped where those are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Three network namespaces on one bridge: 10.77.0.1 to 10.77.0.3; packets between any two can be dropped."""
    if not shutil.which("ip") or not shutil.which("nft"):
        pytest.skip("needs the programs ip and nft (Debian packages iproute2 and nftables)")
    # 0..2: hosts; 3: holds the bridge, so that nothing appears outside.
    names = [f"gbd-{os.getpid()}-{i}" for i in range(4)]
    probe = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"network namespaces cannot be made here: {probe.stderr.strip()}")
    try:
        for name in names[1:]:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[3], "link", "add", "name", "bridge0", "type", "bridge")
        run("ip", "-n", names[3], "link", "set", "bridge0", "up")
        for i, name in enumerate(names[:3]):
            peer = ["peer", "name", f"p{i}", "netns", names[3]]
            run("ip", "-n", name, "link", "add", "name", "eth0", "type", "veth", *peer)
            run("ip", "-n", names[3], "link", "set", f"p{i}", "master", "bridge0", "up")
            run("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield names[:3]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def cut(host: str, *addresses: str) -> None:
    """Drops what `host` would receive from the addresses."""
    drop(host, *[f"ip saddr {address}" for address in addresses])


def drop(host: str, *matches: str) -> None:
    """Drops what `host` would receive and one of the matches (in nft's words) fits."""
    rules = "\n".join(f"{match} drop" for match in matches)
    chain = f"chain in {{\n type filter hook input priority 0\n {rules}\n}}"
    run("ip", "netns", "exec", host, "nft", f"table inet drops {{\n{chain}\n}}")
