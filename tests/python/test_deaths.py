# SPDX-License-Identifier: Apache-2.0
"""Ways to die, as torch users meet them; the names carry the case.  death_cases.py holds what the ranks do.

Everywhere the same is asked: each survivor raises within 5 s, names who is to blame and what was under way, and ends by
itself.
"""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest
from forks import Ended, Forge, Job
from networks import cut
from pool import free_port

OPERATION = re.compile(r"\bop \d+ [A-Z_]{3,}|\b(SEND|RECV)\b.*\bmessage \d+ of ")
PEER_LOST = -40


def environments(size: int, **more: str) -> list[dict[str, str]]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    common |= {"GPUBRIDGE_EMULATE": "", "GPUBRIDGE_ISLAND": ",".join("abbb"[:size])} | more
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def start(forge: Forge, case: str, size: int = 3, limit: float = 60.0, **more: str) -> Job:
    return forge.start(f"death_cases.{case}", environments(size, **more), limit)


def told(ended: Ended, what: str) -> dict[str, Any]:
    found = [fact for fact in ended.told if fact["what"] == what]
    assert len(found) == 1, ended
    return found[0]


def check_named(fact: dict[str, Any], *words: str) -> None:
    """Raised within 5 s, with these words, the operation, and its number."""
    for word in words:
        assert word in fact["text"], fact
    assert OPERATION.search(fact["text"]), fact
    assert fact["late"] < 5, fact


# ---- C9, C10, C11: a peer is gone ----


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("killed", -9, ["without a goodbye", "see that rank's log"]),
        ("exits_at_once", 0, ["without a goodbye", "see that rank's log"]),
        ("exits", 3, ["left"]),
        ("raises", 1, ["ValueError: batch 17 is empty", "see that rank's log"]),
        ("raises_and_cleans_up", 1, ["ValueError: batch 17 is empty", "see that rank's log"]),
        ("resets", -9, ["Connection reset by peer"]),
        ("interrupted", None, ["KeyboardInterrupt"]),
    ],
)
def test_c9_c10_c11_peer(forge: Forge, case: str, code: int | None, words: list[str]) -> None:
    """Pending and later operations fail with the culprit, its host and its own reason; nothing spins afterwards."""
    more = {"GPUBRIDGE_TRANSPORT": "tcp"} if case == "resets" else {}
    check_survivors(forge.start(f"death_cases.{case}", environments(3, **more)).ended(), code, words)


@pytest.mark.parametrize(("case", "code", "words"), [("killed", -9, ["goodbye"]), ("raises", 1, ["batch 17 is empty"])])
def test_c9_c11_peer_of_an_island(forge: Forge, case: str, code: int, words: list[str]) -> None:
    """The same where the culprit shares a vendor library with one of the survivors."""
    ended = start(forge, case, GPUBRIDGE_EMULATE="cuda,cuda,hip", GPUBRIDGE_ISLAND="").ended()
    check_survivors(ended, code, words)


def check_survivors(ended: list[Ended], code: int | None, words: list[str]) -> None:
    for rank in (0, 2):
        assert ended[rank].code == 7, ended
        pending = told(ended[rank], "pending")
        check_named(pending, "rank 1 (", *words)
        assert "ConnectionError" in pending["classes"] and pending["status"] == PEER_LOST, pending
        check_named(told(ended[rank], "later"), "rank 1 (", *words)
        check_named(told(ended[rank], "later message"), "rank 1 (", *words)
        assert told(ended[rank], "idle")["cpu"] < 0.2, ended[rank]
    if code is not None:
        assert ended[1].code == code, ended[1]


def test_c10_connection_closed_below(forge: Forge) -> None:
    """The end of a connection is never read as "try again", on either side."""
    ended = start(forge, "connection_closed_below", GPUBRIDGE_TRANSPORT="tcp").ended()
    for rank in (0, 2):
        check_named(told(ended[rank], "pending"), "rank 1 (")
        check_named(told(ended[rank], "later"), "rank 1 (")
        assert told(ended[rank], "idle")["cpu"] < 0.2, ended[rank]
    assert "(" in told(ended[1], "pending")["text"] and told(ended[1], "pending")["late"] < 5, ended[1]
    assert [e.code for e in ended] == [7, 7, 7], ended


def test_c10_stopped(forge: Forge) -> None:
    """SIGSTOP is silence; after SIGCONT the stopped rank learns that the job is over."""
    job = start(forge, "cut_off")
    for rank in range(3):
        job.await_note(f"works.{rank}")
    job.signal(1, signal.SIGSTOP)
    job.note("death", repr(time.monotonic()))
    pids = [job.pid(rank) for rank in (0, 2)]
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    job.signal(1, signal.SIGCONT)
    ended = job.ended()
    for rank in (0, 2):
        check_named(told(ended[rank], "raised"), "rank 1 (", "silent")
    assert [e.code for e in ended] == [7, 7, 7], ended
    assert OPERATION.search(told(ended[1], "raised")["text"]), ended[1]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_c10_stopped_for_a_moment(forge: Forge) -> None:
    job = start(forge, "stopped_for_a_moment")
    for rank in range(3):
        job.await_note(f"works.{rank}")
    job.signal(1, signal.SIGSTOP)
    time.sleep(1.5)
    job.signal(1, signal.SIGCONT)
    job.note("resumed")
    ended = job.ended()
    assert all(e.code == 0 and e.told for e in ended), ended


def test_c11_first_reason(forge: Forge) -> None:
    """The reason of the rank that failed first reaches a rank that only knows somebody who gave up because of it."""
    ended = start(forge, "first_reason").ended()
    check_named(told(ended[1], "raised"), "rank 2 (", "OSError: no space left on device")
    assert "rank 2 (" in ended[0].err and "no space left on device" in ended[0].err and ended[0].code == 1, ended[0]
    assert ended[2].code == 1 and "no space left on device" in ended[2].err, ended[2]


def test_c9_caught_out_of_memory(forge: Forge) -> None:
    """A rank that went on after an error disagrees with the others: all are told, each with both signatures."""
    ended = start(forge, "caught_out_of_memory").ended()
    for rank in range(3):
        fact = told(ended[rank], "raised")
        check_named(fact, "rank 1", "ALL_REDUCE", "BROADCAST", "disagree")
        assert ended[rank].code == 7, ended


def test_c9_caught_out_of_memory_last(forge: Forge) -> None:
    """Nobody hangs when the operations are all alike: the end tells."""
    ended = start(forge, "caught_out_of_memory_last").ended()
    for rank in (0, 2):
        check_named(told(ended[rank], "raised"), "rank 1 (", "op 5 ALL_REDUCE")
    assert [e.code for e in ended] == [7, 0, 7], ended


# ---- C10: packets that vanish ----


def start_on_hosts(forge: Forge, hosts: list[str]) -> Job:
    ranks = environments(3, MASTER_ADDR="10.77.0.1", GPUBRIDGE_ISLAND="a,b,c")
    for env, host in zip(ranks, hosts, strict=True):
        env |= {"NETNS": host, "NCCL_HOSTID": host, "GLOO_SOCKET_IFNAME": "eth0"}
    job = forge.start("death_cases.cut_off", ranks)
    for rank in range(3):
        job.await_note(f"works.{rank}")
    return job


def test_c10_goes_silent(forge: Forge, hosts: list[str]) -> None:
    """Everything to and from one rank is dropped: no FIN, no RST.  It loses the others as they lose it."""
    job = start_on_hosts(forge, hosts)
    cut(hosts[1], "10.77.0.1", "10.77.0.3")
    cut(hosts[0], "10.77.0.2")
    cut(hosts[2], "10.77.0.2")
    job.note("death", repr(time.monotonic()))
    ended = job.ended()
    for rank in (0, 2):
        check_named(told(ended[rank], "raised"), "rank 1 (", "silent")
    assert "silent" in told(ended[1], "raised")["text"] and told(ended[1], "raised")["late"] < 5, ended[1]
    assert [e.code for e in ended] == [7, 7, 7], ended


def test_c10_two_live_ranks_lose_each_other(forge: Forge, hosts: list[str]) -> None:
    """Only the packets between ranks 1 and 2 are dropped: both are named, also to rank 0, which hears both."""
    job = start_on_hosts(forge, hosts)
    cut(hosts[1], "10.77.0.3")
    cut(hosts[2], "10.77.0.2")
    job.note("death", repr(time.monotonic()))
    ended = job.ended()
    facts = [told(e, "raised") for e in ended]
    check_named(facts[0], "rank 1 (", "rank 2 (", "silent")
    for fact in facts:
        check_named(fact, "silent")
        assert "rank 1 (" in fact["text"] or "rank 2 (" in fact["text"], fact
    assert [e.code for e in ended] == [7, 7, 7], ended


# ---- C14 and timeouts ----


@pytest.mark.parametrize("kind", ["plain", "monitored"])
def test_c14_barrier_lists_all_missing_ranks(forge: Forge, kind: str) -> None:
    """With hosts, on every rank that came; those that come later are told the same."""
    ended = start(forge, "missing_in_barrier", 4, BARRIER=kind).ended()
    for rank in range(4):
        fact = told(ended[rank], "barrier" if rank < 2 else "late")
        check_named(fact, "rank 2 (", "rank 3 (", "BARRIER", "timed out after")
        assert not re.search(r"not arrived there:.*rank [01] \(", fact["text"].split("[")[0]), fact
    assert any("TimeoutError" in told(ended[rank], "barrier")["classes"] for rank in range(2)), ended


def test_timeout_of_a_wait(forge: Forge) -> None:
    ended = start(forge, "wait_times_out", 2).ended()
    fact = told(ended[0], "wait")
    assert "TimeoutError" in fact["classes"] and "goes on" in fact["text"], fact
    check_named(fact, "op 0 ALL_REDUCE", "not arrived there: rank 1 (")
    assert told(ended[0], "value")["value"] == 2.0 and [e.code for e in ended] == [0, 0], ended


def test_timeout_of_an_operation(forge: Forge) -> None:
    ended = start(forge, "operation_times_out").ended()
    for rank in range(3):
        check_named(told(ended[rank], "operation"), "rank 1 (", "rank 2 (", "timed out after", "ALL_REDUCE")
    assert "TimeoutError" in told(ended[0], "operation")["classes"], ended[0]


def test_b21_timeout_of_a_batch_lists_what_has_no_match(forge: Forge) -> None:
    ended = start(forge, "batch_times_out").ended()
    text = told(ended[0], "batch")["text"]
    check_named(told(ended[0], "batch"), "timed out", "tag 6", "tag 7", "tag 8", "rank 1 (", "rank 2 (")
    assert "tag 5" not in text.split("[")[0], text


# ---- C15, C16: ways to leave ----


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("ends_without_destroy", [0, 0, 0]),
        ("exits_with_code", [20, 21, 22]),
        ("exits_in_thread", [40, 41, 42]),
        ("exits_while_a_thread_waits", [50, 51, 52]),
    ],
)
def test_c16_exit_keeps_the_code(forge: Forge, case: str, codes: list[int]) -> None:
    vendors = case in ("exits_with_code", "exits_while_a_thread_waits")
    emulate = "cuda,cuda,hip" if vendors else ""
    began = time.monotonic()
    islands = "" if vendors else "a,b,b"
    ended = start(forge, case, GPUBRIDGE_EMULATE=emulate, GPUBRIDGE_ISLAND=islands).ended()
    assert [e.code for e in ended] == codes, ended
    assert time.monotonic() - began < 30, "10 s, and a start"


def test_c16_interrupted_everywhere(forge: Forge) -> None:
    """Ctrl-C in a terminal: every rank ends soon, by KeyboardInterrupt or because another one did."""
    job = start(forge, "interrupted_everywhere")
    for rank in range(3):
        job.await_note(f"works.{rank}")
    began = time.monotonic()
    for rank in range(3):
        job.signal(rank, signal.SIGINT)
    ended = job.ended()
    assert time.monotonic() - began < 10
    for e in ended:
        assert e.code in (-2, 130, 1) and re.search(r"KeyboardInterrupt|rank \d", e.err), ended


# ---- C18, C19, afterwards ----


def test_c18_loader_workers(forge: Forge) -> None:
    """Children of a fork neither disturb the parent's connections nor inherit them through exec."""
    ended = start(forge, "loader_workers", 2).ended()
    for e in ended:
        assert e.code == 0, ended
        fact = told(e, "sum")
        assert fact["value"] == fact["want"], fact
        # The store's sockets are torch's own, and not closed on exec by it.
        assert told(e, "inherited")["sockets"] <= 3, e


def test_c19_two_ranks_share_a_device(forge: Forge) -> None:
    job = forge.start(
        "death_cases.shares_a_device",
        [env | {"LOCAL_RANK": "0", "GPUBRIDGE_EMULATE": "cuda", "GPUBRIDGE_ISLAND": ""} for env in environments(2)],
    )
    for e in job.ended():
        text = told(e, "init")["text"]
        assert "ranks" in text and "0" in text and "1" in text and "torch.cuda.set_device(LOCAL_RANK)" in text, e


def test_survivors_make_a_new_world(forge: Forge) -> None:
    ended = start(forge, "survivors_go_on", SECOND_PORT=str(free_port())).ended()
    for rank in (0, 2):
        check_named(told(ended[rank], "raised"), "rank 1 (")
        fact = told(ended[rank], "again")
        assert fact["value"] == 2.0 and fact["ranks"] == [0, 2] and ended[rank].code == 0, ended
