# SPDX-License-Identifier: Apache-2.0
"""A subset of torch's own distributed tests, on Gloo and here (all of them: make torch-suite)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SUBSET = (
    "DistributedDataParallelCPU",
    "accumulate_gradients_no_sync_allreduce_with_then_hook",
    "all_gather_coalesced_with_empty",
    "all_reduce_coalesced_sum",
    "all_reduce_complex_unsupported_ops",
    "all_reduce_sum_async",
    "all_to_all_single_unequal_split",
    "barrier_timeout_full_group",
    "batch_isend_irecv_gloo_tags",
    "destroy_group",
    "gather_object_subgroup",
    "get_backend",
    "get_future",
    "grads_same_across_ranks_with_no_sync",
    "isend_autograd_profiler",
    "monitored_barrier_gloo",
    "new_subgroups_with_group_param",
    "reduce_full_group_product",
    "scatter_checks",
    "scatter_object_list",
    "send_recv_any_source",
    "sparse_all_reduce_sum",
    "static_graph_api_cpu",
)


def test_subset_of_torch_suite(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    pattern = f"^test_({'|'.join(SUBSET)})$"
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--results", str(results), "--only", pattern]
    columns = ["--columns", "gloo,gpubridge,gpubridge-more"]
    done = subprocess.run([*command, *columns], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    passed = {(row["column"], row["test"]) for row in rows if row.get("outcome") == "passed"}
    gloo = {test for column, test in passed if column == "gloo"}
    assert len(gloo) >= len(SUBSET) - 4, gloo  # one of them it does not run; some it fails on a busy machine
    assert gloo <= {test for column, test in passed if column == "gpubridge"}
    assert ("gpubridge-more", "test_all_to_all_single_unequal_split") in passed
