# SPDX-License-Identifier: Apache-2.0
"""torch's own distributed tests, made to run on another backend without a change to torch.

The tests ask for Gloo by name: in decorators, which decide whether a test runs at all, and in their bodies.  Here the
decorators see "gloo", so exactly the tests that run on Gloo run; then the name the bodies see is replaced by one that
answers to both, and every process group is made with this backend.  Ranks are forked, so torch is imported once.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable
from typing import Any

NAME = "gpubridge"


class BothNames(str):
    """Is "gpubridge", and says it equals "gloo"."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(backend: str, asked_for: str) -> type[unittest.TestCase]:
    """torch's test class for a backend.

    Args:
        backend: "gloo" or "gpubridge".
        asked_for: the backend that the decorators take this one for: "gloo", or "mpi" to get the CPU tests of
            operations that Gloo does not have.
    """
    os.environ.update(BACKEND=asked_for, INIT_METHOD="file://", MASTER_ADDR="127.0.0.1")
    import torch
    import torch.multiprocessing

    torch.set_num_threads(1)
    available = torch.distributed.is_mpi_available
    torch.distributed.is_mpi_available = lambda: True  # read by decorators only
    from torch.testing._internal.distributed import distributed_test as suite

    torch.distributed.is_mpi_available = available
    if backend == NAME:
        _lift(suite)
    _suite.append(suite)

    class OnBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return OnBackend


_suite: list[Any] = []


def use_folder(folder: str) -> None:
    """Where a test may meet again after it destroyed its group (init method file://)."""
    _suite[0].INIT_METHOD = f"file://{folder}/meeting-place"


def _lift(suite: Any) -> None:
    """The name checks that stand in bodies."""
    import gpubridge.torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.common_distributed import DistTestCases

    os.environ["BACKEND"] = NAME
    suite.BACKEND = BothNames(NAME)
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add(NAME)

    new_group = c10d.new_group

    def new_group_here(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = NAME
        return new_group(*args, **kwargs)

    # torch 2.13 refuses the name before it asks the group; 2.14 asks whether the group serves the CPU.
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if c10d._rank_not_in_group(group):
            return
        (group or c10d._get_default_group()).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    for module in (dist, c10d):
        module.new_group = new_group_here
        module.monitored_barrier = monitored_barrier
    assert gpubridge.torch.GpuBridgeGroup


def names(case: type[unittest.TestCase]) -> list[str]:
    return sorted(name for name in dir(case) if name.startswith("test_"))


def run_one(case: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """("passed" | "failed" | "skipped", reason or the end of the traceback)."""
    result = unittest.TestResult()
    unittest.TestSuite([case(name)]).run(result)
    for outcome, found in (("failed", result.errors + result.failures), ("skipped", result.skipped)):
        if found:
            return outcome, found[0][1]
    return ("failed", "unexpected success") if result.unexpectedSuccesses else ("passed", "")


def in_own_session(task: Callable[[], None]) -> int:
    """Pid of a forked child that leads its own session, so that it and all its ranks can be killed at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        task()
        status = 0
    finally:
        os._exit(status)
