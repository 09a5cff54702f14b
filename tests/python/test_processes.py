# SPDX-License-Identifier: Apache-2.0
"""Whole processes: how jobs start and fail (C15, C18); test_deaths.py holds the ways to die."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pool import free_port

PRELUDE = """
import os, sys, time, threading, signal
import torch, torch.distributed as dist
import gpubridge.torch
rank = int(os.environ["RANK"]); size = int(os.environ["WORLD_SIZE"])
"""
INIT = 'dist.init_process_group("gpubridge")\n'
LIMIT_S = 150


def launch(body: str, size: int = 2, init: str = INIT, **extra: str) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    code = PRELUDE + init + textwrap.dedent(body)
    found = []
    for rank in range(size):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GPUBRIDGE_EMULATE="")
        env.update({"GPUBRIDGE_ISLAND": ",".join("ab"[r % 2] for r in range(size))} | extra)
        pipe = subprocess.PIPE
        found.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True))
    return found


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) by rank; a process that does not end is an error."""
    end = time.monotonic() + LIMIT_S
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return results


def test_c15_destroy_on_one_rank_returns() -> None:
    """C15: only rank 0 destroys; it returns within 10 s, and rank 1 learns of it."""
    body = """
    t = torch.ones(4)
    dist.all_reduce(t)
    if rank == 0:
        start = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - start < 10
        print("destroyed")
    else:
        try:
            dist.all_reduce(t)
        except dist.DistBackendError as error:
            print("told:", "rank 0" in str(error), str(error))
    """
    results = finish(launch(body))
    assert results[0][0] == 0 and "destroyed" in results[0][1], results[0]
    assert results[1][0] == 0 and "told: True" in results[1][1], results[1]


def test_new_group_after_an_abort() -> None:
    """After an abort the same processes can make a new process group."""
    body = """
    if rank == 0:
        dist.all_reduce(torch.ones(4))
        dist.group.WORLD.abort()  # may reach the others before they are through with the same operation
    else:
        try:
            while True:
                dist.all_reduce(torch.ones(4))
        except dist.DistBackendError:
            pass
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    dist.init_process_group("gpubridge")
    t = torch.ones(4)
    dist.all_reduce(t)
    assert t[0].item() == size
    dist.destroy_process_group()
    print("again")
    """
    results = finish(launch(body, SECOND_PORT=str(free_port())))
    assert all(code == 0 and "again" in out for code, out, _ in results), results


@pytest.mark.parametrize("after_s", [0.03, 1.0])
def test_interrupt_reaches_a_blocked_wait(after_s: float) -> None:
    """Ctrl-C in a blocking collective whose peer does not come raises KeyboardInterrupt at once, and the exit code
    stays the script's own; also when it comes during the very first slice of the wait.
    """
    body = """
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        t = torch.ones(4)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, AFTER)
            dist.all_reduce(t)
        except KeyboardInterrupt:
            print("interrupted")
        dist.distributed_c10d._get_default_store().set("over", "1")
    else:
        dist.distributed_c10d._get_default_store().wait(["over"])
    """
    results = finish(launch(body.replace("AFTER", str(after_s))))
    assert "interrupted" in results[0][1], results[0]
    assert [code for code, _, _ in results] == [0, 0], results  # the interrupted operation must not trip the way out


def test_c18_fork_after_init() -> None:
    """C18: children of a fork see an error, not a hang, and leave the parent's connections alone."""
    body = """
    dist.all_reduce(torch.ones(4))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            dist.all_reduce(torch.ones(4))
        except dist.DistBackendError as error:
            code = 0 if error.status == -84 else 2  # GPUBRIDGE_ERR_FORKED
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    t = torch.ones(4)
    dist.all_reduce(t)
    assert t[0].item() == size
    dist.destroy_process_group()
    print("well")
    """
    results = finish(launch(body))
    assert all(code == 0 and "well" in out for code, out, _ in results), results


def test_missing_rank_is_named_at_init() -> None:
    """A member that never comes: the timeout names it."""
    body = """
    from datetime import timedelta
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, True, wait_for_workers=False)
        try:
            dist.init_process_group("gpubridge", store=store, rank=0, world_size=2, timeout=timedelta(seconds=2))
        except dist.DistBackendError as error:
            assert isinstance(error, TimeoutError)
            print("said:", error)
    """
    results = finish(launch(body, init=""))
    assert "rank(s) [1]" in results[0][1], results[0]


def test_mixed_backends_are_refused() -> None:
    """torch would drop the other backend without a word."""
    body = """
    try:
        dist.init_process_group("cpu:gloo,cuda:gpubridge")
    except ValueError as error:
        print("refused:", error)
    """
    results = finish(launch(body, size=1, init=""))
    assert "refused" in results[0][1] and "gloo" in results[0][1], results[0]


def test_both_devices_by_name() -> None:
    body = """
    dist.init_process_group("cpu:gpubridge,cuda:gpubridge")
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t[0].item() == size
    dist.destroy_process_group()
    print("fine")
    """
    results = finish(launch(body, init=""))
    assert all("fine" in out for _, out, _ in results), results


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("GPUBRIDGE_LANES", "many", "GPUBRIDGE_LANES"),
        ("GPUBRIDGE_PORT_RANGE", "9-3", "GPUBRIDGE_PORT_RANGE"),
        ("GPUBRIDGE_EMULATE", "cuda,hip", "local rank 2"),
        ("GPUBRIDGE_SECRET_FILE", "/nowhere/secret", "/nowhere/secret"),
    ],
)
def test_bad_settings_are_one_clear_error(name: str, value: str, word: str) -> None:
    body = """
    from datetime import timedelta
    try:
        dist.init_process_group("gpubridge", timeout=timedelta(seconds=10))
    except dist.DistBackendError as error:
        print("said:", error)
        os._exit(0)  # the others wait for this rank, and their launcher would end them
    """
    processes = launch(body, size=3, init="", **{name: value})
    results = finish(processes)
    assert any(word in out for _, out, _ in results), results


def test_a13_nothing_of_a_vendor_is_linked() -> None:
    """A13."""
    from gpubridge import _native

    text = subprocess.run(["ldd", str(Path(_native.find_library()))], capture_output=True, text=True, check=True).stdout
    for word in ("cuda", "nccl", "rccl", "hip", "ibverbs", "nvidia"):
        assert word not in text.lower()
