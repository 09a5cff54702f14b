# SPDX-License-Identifier: Apache-2.0
"""Which addresses a job uses, on three hosts of one machine (C1, C2, C4, C5, C7); address_cases.py is what ranks do."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from forks import Ended, Forge
from networks import drop, run
from pool import free_port


def start(forge: Forge, case: str, hosts: list[str], **more: str) -> list[Ended]:
    master = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(hosts))}
    common = master | {"GPUBRIDGE_EMULATE": "", "GPUBRIDGE_ISLAND": "a,b,c"} | more
    ranks = [
        common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NETNS": host, "NCCL_HOSTID": host}
        for rank, host in enumerate(hosts)
    ]
    return forge.start(f"address_cases.{case}", ranks).ended()


def told(ended: Ended, what: str) -> dict[str, Any]:
    found = [fact for fact in ended.told if fact["what"] == what]
    assert len(found) == 1, ended
    return found[0]


def check_works(ended: list[Ended], address: str) -> None:
    """Every link goes to an address of this form, and the sum is right."""
    for e in ended:
        fact = told(e, "works")
        assert fact["value"] == fact["want"] and e.code == 0, ended
        links = re.findall(r"rank \d+ \(.*?\): tcp \d+ lanes (\S+)", fact["links"])
        assert len(links) == 2 and all(re.match(address, link) for link in links), fact


def test_c1_the_route_to_the_master_decides(forge: Forge, hosts: list[str]) -> None:
    """Not the host's name (which often resolves to 127.0.1.1), nor its first interface."""
    for i, host in enumerate(hosts):
        run("ip", "-n", host, "link", "add", "name", "aaa0", "type", "bridge")
        run("ip", "-n", host, "address", "add", f"192.168.{i}.1/24", "dev", "aaa0")
        run("ip", "-n", host, "link", "set", "aaa0", "up")
    check_works(start(forge, "works", hosts), r"10\.77\.0\.")


def test_c1_loopback_between_hosts(forge: Forge, hosts: list[str]) -> None:
    ended = start(forge, "fails", hosts, GPUBRIDGE_IFNAME="lo", GPUBRIDGE_CONNECT_TIMEOUT_S="2", LINGER_S="1")
    texts = [told(e, "failed")["text"] for e in ended]
    assert any("loopback" in text and "set GPUBRIDGE_IFNAME" in text for text in texts), texts
    assert all("it worked" not in text for text in texts), texts


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("GPUBRIDGE_IFNAME", "^lo,eth"),
        ("GLOO_SOCKET_IFNAME", "=bbb0"),
    ],
)
def test_c2_interface_lists(forge: Forge, hosts: list[str], names: str, variable: str) -> None:
    for i, host in enumerate(hosts):
        run("ip", "-n", host, "link", "add", "link", "eth0", "name", "bbb0", "type", "macvlan", "mode", "bridge")
        run("ip", "-n", host, "address", "add", f"10.78.0.{i + 1}/24", "dev", "bbb0")
        run("ip", "-n", host, "link", "set", "bbb0", "up")
    check_works(start(forge, "works", hosts, **{variable: names}), r"10\.78\.0\.")


def test_c2_unknown_interface(forge: Forge, hosts: list[str]) -> None:
    for rank, e in enumerate(start(forge, "fails", hosts, GPUBRIDGE_IFNAME="ib", LINGER_S="1")):
        text = told(e, "failed")["text"]
        assert "GPUBRIDGE_IFNAME=ib" in text and f"eth0 10.77.0.{rank + 1}" in text and "lo 127.0.0.1" in text, text


def test_c4_an_address_that_every_host_has(forge: Forge, hosts: list[str]) -> None:
    """172.17.0.1 is the docker bridge of every host: there a rank finds itself, and goes on to the next address."""
    for host in hosts:
        run("ip", "-n", host, "link", "add", "name", "docker0", "type", "bridge")
        run("ip", "-n", host, "address", "add", "172.17.0.1/16", "dev", "docker0")
        run("ip", "-n", host, "link", "set", "docker0", "up")
    check_works(start(forge, "works", hosts, GPUBRIDGE_IFNAME="docker,eth"), r"10\.77\.0\.")
    ended = start(
        forge,
        "fails",
        hosts,
        GPUBRIDGE_IFNAME="docker",
        GPUBRIDGE_CONNECT_TIMEOUT_S="2",
        LINGER_S="1",
        GPUBRIDGE_PORT_RANGE="40000-40000",
    )
    texts = [told(e, "failed")["text"] for e in ended]
    assert any("172.17.0.1:40000 answered as rank" in text and "(myself)" in text for text in texts), texts


def test_c5_port_range(forge: Forge, hosts: list[str]) -> None:
    """One listener per process whatever the number of groups, and inside the range."""
    for e in start(forge, "works", hosts, GPUBRIDGE_PORT_RANGE="40000-40050"):
        ports = told(e, "listens")["ports"]
        assert len(ports) == 1 and 40000 <= ports[0] <= 40050, e


def test_c5_blocked_port(forge: Forge, hosts: list[str]) -> None:
    """A firewall that drops: who cannot reach whom, where, and the likely cause."""
    for host in hosts:
        drop(host, "tcp dport 40000-40050")
    ended = start(
        forge, "fails", hosts, GPUBRIDGE_PORT_RANGE="40000-40050", GPUBRIDGE_CONNECT_TIMEOUT_S="3", LINGER_S="1"
    )
    texts = [told(e, "failed")["text"] for e in ended]
    assert all(re.search(r"rank \d \(", text) for text in texts), texts
    assert any(re.search(r"10\.77\.0\.\d:400\d\d.*firewall", text) for text in texts), texts
    assert all(told(e, "failed")["took"] < 20 for e in ended), ended


def test_c7_without_ipv6(forge: Forge, hosts: list[str]) -> None:
    for host in hosts:
        for what in ("all", "default"):
            run("ip", "netns", "exec", host, "sh", "-c", f"echo 1 > /proc/sys/net/ipv6/conf/{what}/disable_ipv6")
    check_works(start(forge, "works", hosts), r"10\.77\.0\.")


def test_c7_ipv6_only(forge: Forge, hosts: list[str]) -> None:
    for i, host in enumerate(hosts):
        run("ip", "-n", host, "address", "add", f"fd00:77::{i + 1}/64", "dev", "eth0", "nodad")
        run("ip", "-n", host, "address", "del", f"10.77.0.{i + 1}/24", "dev", "eth0")
    ping = ["ip", "netns", "exec", hosts[1], "sh", "-c", "getent ahosts fd00:77::1"]
    assert subprocess.run(ping, capture_output=True, check=False).returncode == 0
    check_works(start(forge, "works", hosts, MASTER_ADDR="fd00:77::1"), r"\[fd00:77::")
