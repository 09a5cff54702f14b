# SPDX-License-Identifier: Apache-2.0
"""Readers on small files whose slow rank is known, streams through a pipe, passports, and the simulator's command."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="gpubridge.fleet needs numpy")

from gpubridge.cli import simulate as simulate_command
from gpubridge.fleet import Passports, RecordError, analyze, read
from gpubridge.fleet.simulate import SUITES, run, summarize
from gpubridge.fleet.stream import Fault, judge_stream, write_stream

RANKS, STEPS, SLOW = 6, 60, 4


def compute(rng: random.Random, rank: int, step: int) -> float:
    """Seconds of one rank's computation: rank SLOW is 8 % slower from the middle on."""
    return 0.1 * (1 + 0.004 * rng.gauss(0, 1)) * (1.08 if rank == SLOW and step >= STEPS // 2 else 1.0)


def job(seed: int) -> list[list[tuple[float, float, float]]]:
    """[step][rank]: start of the step, data ready, end of the all-reduce, each on the rank's own shifted clock."""
    rng = random.Random(seed)
    shift, now, out = [rng.uniform(-5, 5) + 100 for _ in range(RANKS)], 0.0, []
    for step in range(STEPS):
        ready = [now + compute(rng, r, step) for r in range(RANKS)]
        end = max(ready) + 0.01 * (1 + 0.02 * rng.gauss(0, 1))
        out.append([(now + shift[r], ready[r] + shift[r], end + shift[r]) for r in range(RANKS)])
        now = end
    return out


def named(path: Path) -> list[tuple[int | None, str]]:
    return [(v.rank, v.cause) for v in analyze(read(path)).verdicts]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["step", "rank", "kind", "name", "start", "end", "ready", "channel", "op"])
        for step, ranks in enumerate(job(1)):
            for rank, (start, ready, end) in enumerate(ranks):
                out.writerow([step, rank, "compute", "kernels", start, ready, "", "", ""])
                out.writerow([step, rank, "collective", "all_reduce", ready, end, ready, "world", 0])
    assert named(path) == [(SLOW, "compute")]
    text = path.read_text()
    for wrong in (text.replace("compute", "baking", 1), text.replace("kind", "sort", 1), "step,rank,kind,start,end\n"):
        path.write_text(wrong)
        with pytest.raises(RecordError):
            read(path)


def test_profiler_traces(tmp_path: Path) -> None:
    for rank in range(RANKS):
        events: list[dict[str, Any]] = []
        for step, ranks in enumerate(job(2)):
            start, ready, end = (t * 1e6 for t in ranks[rank])
            half = (start + ready) / 2
            mark = {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "ts": start - 1, "dur": end - start}
            group = {"Process Group Name": "0", "In msg nelems": 1 << 20}
            kernels = [
                {"name": "ampere_sgemm_128x64", "cat": "kernel", "ts": start, "dur": half - start},
                {"name": "Cijk_Ailk_Bljk", "cat": "kernel", "ts": half, "dur": ready - half},
                {"name": "ncclDevKernel_AllReduce", "cat": "kernel", "ts": ready, "dur": end - ready, "args": group},
            ]
            events += [{"ph": "X", **e} for e in (mark, *kernels)]
        head = {"distributedInfo": {"rank": rank}, "deviceProperties": [{"name": "MI300X"}]}
        (tmp_path / f"trace{rank}.json").write_text(json.dumps({**head, "traceEvents": events}))
    table = read(tmp_path)
    assert {r.model for r in table.ranks} == {"MI300X"} and len(table.steps) == STEPS
    assert named(tmp_path) == [(SLOW, "compute")]


def test_flight_recorder_dumps(tmp_path: Path) -> None:
    for rank in range(RANKS):
        entries = []
        for step, ranks in enumerate(job(3)):
            _, ready, end = (int(t * 1e9) for t in ranks[rank])
            entries.append(
                {
                    "profiling_name": "nccl:all_reduce",
                    "process_group": ("0", "default_pg"),
                    "collective_seq_id": step + 1,
                    "input_sizes": [[1024]],
                    "time_created_ns": ready,
                    "time_discovered_started_ns": ready,
                    "time_discovered_completed_ns": end,
                    "is_p2p": False,
                }
            )
        hang = {**entries[-1], "time_discovered_completed_ns": None}
        dump = {"version": "2.9", "rank": rank, "entries": [*entries, hang]}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    assert named(tmp_path) == [(SLOW, "compute")]
    evil = tmp_path / "nccl_trace_rank_0"
    evil.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(RecordError, match="plain data"):
        read(tmp_path)


def test_inspector_output(tmp_path: Path) -> None:
    for rank in range(RANKS):
        lines = []
        for step, ranks in enumerate(job(4)):
            _, ready, end = (t * 1e6 for t in ranks[rank])
            kernels = [{"channel_id": 0, "kernel_start_ts": ready, "kernel_stop_ts": end}]
            perf = {"coll": "AllReduce", "coll_sn": step, "coll_msg_size_bytes": 4096, "coll_exec_time_us": end - ready}
            lines.append(
                {
                    "header": {"id": "0x7f8c", "rank": rank, "n_ranks": RANKS},
                    "metadata": {"dump_timestamp_us": end + 50, "hostname": f"host{rank}"},
                    "coll_perf": {**perf, "event_trace_ts": {"kernel_events": kernels}},
                }
            )
        (tmp_path / f"host{rank}.log").write_text("\n".join(json.dumps(x) for x in lines))
    assert named(tmp_path) == [(SLOW, "compute")]
    (tmp_path / "host0.log").write_text('{"something": "else"}')
    with pytest.raises(RecordError):
        read(tmp_path)


def test_stream_is_judged_from_a_pipe_in_bounded_memory() -> None:
    command = [sys.executable, "-c", "from gpubridge.cli import main; main()"]
    peaks = []
    for steps in (2500, 12500):
        arguments = ["simulate", "--stream", "--ranks", "64", "--steps", str(steps), "--fault", f"9:0.05:{steps - 400}"]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE) as writer:
            done = subprocess.run(
                [*command, "analyze", "-"], stdin=writer.stdout, capture_output=True, text=True, check=True, timeout=120
            )
        assert f"{steps:,} steps x 64 streams" in done.stdout
        verdicts = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        assert len(verdicts) == 1 and "rank 9, kind 0" in verdicts[0] and "against its own past" in verdicts[0]
        peaks.append(int(done.stdout.split("at most ")[1].split(" MiB")[0]))
    assert peaks[1] <= peaks[0] + 8


def test_damaged_streams_are_refused() -> None:
    file = io.BytesIO()
    write_stream(file, 8, 900, 1, Fault(1, 0.5, 700))
    data = file.getvalue()
    whole = judge_stream(io.BytesIO(data))
    assert whole.records == 900 and not whole.error and [e.rank for e in whole.events] == [1]
    assert "no recording" in judge_stream(io.BytesIO(b"")).error
    assert "cut short" in judge_stream(io.BytesIO(data[:-3])).error
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 4
    broken = judge_stream(io.BytesIO(bytes(damaged)))
    assert broken.error and broken.records < 900


def test_passports_know_devices_across_jobs(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "passports.json"
    store = Passports(path)
    assert store.judge("GPU-1", 1.1) == "unknown device"
    for _ in range(3):
        store.record("GPU-1", "V100", "a", 1.10)
        store.record("GPU-2", "MI50", "b", 1.00)
    store.save()
    again = Passports(path)
    assert again.judge("GPU-1", 1.11) == "slow part as before"
    assert again.judge("GPU-2", 1.01) == "as before"
    assert again.judge("GPU-2", 1.10) == "slower than in earlier jobs"
    assert again.judge("GPU-1", 1.00) == "faster than in earlier jobs"
    again.record("GPU-2", "MI50", "c", 1.04)
    assert again.devices["GPU-2"].host == "c" and again.devices["GPU-2"].jobs == 4
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    newer = Passports(path)
    assert newer.devices == {} and "version 99" in newer.note
    with pytest.raises(ValueError):
        newer.record("GPU-3", "V100", "a", float("nan"))


def test_a_suite_goes_on_where_it_stopped_and_names_faults(tmp_path: Path) -> None:
    whole = run("faults", 70, None)
    first = run("faults", 50, tmp_path)
    kept = (tmp_path / "faults.jsonl").read_text()
    (tmp_path / "faults.jsonl").write_text(kept + '{"batch": 1, "epi')  # a run that was cut short
    assert run("faults", 70, tmp_path) == whole and whole[:50] == first
    summary = summarize("faults", whole)
    assert summary.numbers["episodes"] == 70 and summary.numbers["share_right"] > 0.972
    faults = {"compute", "memory", "thermal ramp", "link", "input", "pauses", "two at once"}
    assert set(summary.numbers["by_fault"]) == faults


def test_the_command_draws_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert simulate_command.run(["faults", "healthy"], 28, tmp_path, 2) == 0
    assert "two at" in capsys.readouterr().out
    assert "Faults (rows)" in (tmp_path / "index.html").read_text()
    for name in ("faults-confusion", "faults-delay", "healthy-alarms"):
        assert (tmp_path / f"{name}.png").stat().st_size > 2000
    assert json.loads((tmp_path / "faults.json").read_text())["episodes"] == 28
    assert simulate_command.run(["nonsense"], 1, tmp_path, 1) == 1
    assert set(SUITES) == {"faults", "healthy", "fleets", "slow-part", "fastest", "pair"}
