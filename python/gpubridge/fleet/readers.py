# SPDX-License-Identifier: Apache-2.0
"""Readers of recorded jobs: each turns one foreign format into a Table (docs/records.md says how each maps).

`read` looks at the file's content, not only at its name.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from gpubridge.fleet.records import Builder, RecordError, Table, read_csv

# Operations of pipeline traces: kind, and whether it is a direction between stages or a collective of the stage.
_PIPELINE = {
    "forward-compute": ("compute", ""),
    "backward-compute": ("compute", ""),
    "optimizer": ("memory", ""),
    "optimizer-clip-main-grad": ("memory", ""),
    "gc": ("host", ""),
    "forward-send": ("hop", "forward"),
    "forward-recv": ("hop", "forward"),
    "backward-send": ("hop", "backward"),
    "backward-recv": ("hop", "backward"),
    "grads-reduce-scatter": ("collective", "stage"),
    "params-all-gather": ("collective", "stage"),
    "embedding-grads-all-reduce": ("collective", "replica"),
    "layernorm-grads-all-reduce": ("collective", "rank"),
}


def read(path: Path) -> Table:
    """Any known format.

    Raises:
        RecordError: the format is not known or the file is damaged; the text says what was expected.
    """
    if not path.exists():
        raise RecordError(f"{path}: no such file")
    if path.is_dir():
        return _read_folder(path)
    head = path.open("rb").read(8)
    try:
        if head[:4] == b"PAR1":
            return read_parquet(path)
        if head[:1] == b"\x80":
            return read_flight_recorder([path])
        if head[:2] == b"\x1f\x8b" or head.lstrip()[:1] in (b"{", b"["):
            return _read_json([path])
    except (
        KeyError,
        TypeError,
        IndexError,
        EOFError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        pickle.PickleError,
    ) as error:
        raise RecordError(f"{path}: damaged or of an unknown layout ({type(error).__name__}: {error})") from None
    return read_csv(path)


def _read_folder(path: Path) -> Table:
    """One file per rank: JSON of one kind, or Flight Recorder dumps."""
    files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    if not files:
        raise RecordError(f"{path}: an empty folder")
    if all(f.open("rb").read(1) == b"\x80" for f in files):
        return read_flight_recorder(files)
    return _read_json(files)


def _load_json(path: Path) -> Any:
    data = path.read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]  # one object a line


def _read_json(files: list[Path]) -> Table:
    first = _load_json(files[0])
    if isinstance(first, dict) and "traceEvents" in first:
        return read_kineto(files)
    if isinstance(first, dict) and "entries" in first:
        return read_flight_recorder(files)
    lines = first if isinstance(first, list) else [first]
    if lines and isinstance(lines[0], dict) and ("coll_perf" in lines[0] or "header" in lines[0]):
        return read_inspector(files)
    raise RecordError(f"{files[0]}: JSON, but neither a PyTorch profiler trace (traceEvents), a Flight Recorder "
        f"dump (entries) "
                      "nor NCCL inspector output (coll_perf)")  # fmt: skip


# ---- parquet operation traces ----


def read_parquet(path: Path) -> Table:
    """Operation traces with dp_rank, stage, rank, step, optype, start_ts, duration, seq_id and mb_id columns."""
    try:
        from pyarrow import parquet  # type: ignore[import-untyped]
    except ImportError:
        raise RecordError(f"{path}: parquet needs pyarrow: pip install 'gpubridge[analyze]'") from None
    columns = parquet.read_table(path).to_pydict()
    wanted = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mb_id")
    missing = [c for c in wanted if c not in columns]
    if missing:
        raise RecordError(f"{path}: no column {', '.join(missing)}")
    builder = Builder()
    sequence: dict[tuple[Any, ...], int] = {}
    for dp, stage, rank, step, name, start, length, seq, batch in zip(*(columns[c] for c in wanted), strict=True):
        kind, scope = _PIPELINE.get(name, ("host", ""))
        builder.rank(rank, stage=stage, replica=dp)
        channel, op = "", 0
        if kind == "hop":
            # The sender of a forward transfer is the lower stage, that of a backward one the higher.
            low = stage if (name in ("forward-send", "backward-recv")) else stage - 1
            high = low + 1
            ends = f"{low} to {high}" if scope == "forward" else f"{high} to {low}"
            channel, op = f"link {dp}: stage {ends}", seq
        elif kind == "collective":
            member = {"stage": f"stage {stage}", "replica": f"replica {dp}", "rank": f"rank {rank}"}[scope]
            channel, op = f"{name} of {member}", sequence.get((step, rank, name), 0)
            sequence[step, rank, name] = op + 1
        builder.add(step, rank, kind, name, start, start + length, channel=channel, op=op, micro_batch=batch)
    return builder.table(str(path))


# ---- PyTorch profiler (Kineto) ----

_STEP = re.compile(r"ProfilerStep#(\d+)")
_GEMM = re.compile(r"gemm|cublas|cutlass|sm\d+_|Cijk|xmma|conv|flash|fmha|attention", re.I)
_TRANSFER = re.compile(r"nccl|rccl|oneccl", re.I)
_HOP = re.compile(r"send|recv", re.I)


def read_kineto(files: list[Path]) -> Table:
    """PyTorch profiler traces, one per rank: kernels by step; names of GEMM and attention kernels count as computation,
    other kernels as memory, copies to the device and loader waits as input."""
    builder = Builder()
    for number, path in enumerate(files):
        trace = _load_json(path)
        rank = int(trace.get("distributedInfo", {}).get("rank", number))
        devices = trace.get("deviceProperties") or [{}]
        builder.rank(rank, model=str(devices[0].get("name", "")), host=str(trace.get("host_name", "")))
        _kineto_rank(builder, rank, [e for e in trace["traceEvents"] if e.get("ph") == "X"])
    return builder.table(str(files[0] if len(files) == 1 else files[0].parent))


def _kineto_rank(builder: Builder, rank: int, events: list[dict[str, Any]]) -> None:
    marks = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), int(m[1]))
        for e in events
        if (m := _STEP.match(str(e.get("name", "")))) and e.get("cat") in ("user_annotation", "cpu_op", None)
    )
    starts = np.array([m[0] for m in marks])
    count: dict[tuple[int, str], int] = {}
    for e in sorted(events, key=lambda e: float(e["ts"])):
        start, length = float(e["ts"]) * 1e-6, float(e.get("dur", 0)) * 1e-6
        at = int(np.searchsorted(starts, float(e["ts"]), "right")) - 1
        if at < 0 and len(marks):
            continue  # before the first step
        step = marks[at][2] if len(marks) else 0
        category, name, args = str(e.get("cat", "")), str(e.get("name", "")), e.get("args", {})
        if category == "kernel" and _TRANSFER.search(name):
            group = str(args.get("Process Group Name", args.get("Process Group Description", "default")))
            op = count[step, group] = count.get((step, group), -1) + 1
            kind = "hop" if _HOP.search(name) else "collective"
            builder.add(step, rank, kind, name, start, start + length, channel=f"group {group}", op=op,
                        bytes_=float(args.get("In msg nelems", 0)))  # fmt: skip
        elif category == "kernel":
            builder.add(step, rank, "compute" if _GEMM.search(name) else "memory", name, start, start + length)
        elif category in ("gpu_memcpy", "gpu_memset"):
            builder.add(step, rank, "input" if "HtoD" in name else "memory", name, start, start + length)
        elif "enumerate(DataLoader)" in name or "dataloader" in name.lower():
            builder.add(step, rank, "input", "loader", start, start + length)


# ---- PyTorch Flight Recorder ----


class _Plain(pickle.Unpickler):
    """Dumps hold plain containers only; anything else in the stream is refused rather than run."""

    def find_class(self, module: str, name: str) -> Any:
        raise RecordError(f"the dump refers to {module}.{name}; Flight Recorder dumps hold plain data only")


def read_flight_recorder(files: list[Path]) -> Table:
    """torch.distributed Flight Recorder dumps, one per rank (pickle or JSON).  Only transfers are known; a step is one
    round of a rank's sequence of operations."""
    builder = Builder()
    for number, path in enumerate(files):
        head = path.open("rb").read(1)
        if head == b"\x80":
            with path.open("rb") as file:
                dump = _Plain(file).load()
        else:
            dump = _load_json(path)
        digits = re.findall(r"(\d+)", path.name)
        _flight_rank(builder, int(dump.get("rank", digits[-1] if digits else number)), dump["entries"])
    return builder.table(str(files[0] if len(files) == 1 else files[0].parent))


def _rounds(signatures: list[str]) -> list[int]:
    """Step number of each operation of a rank: the shortest period in which the sequence of operations repeats.  Where
    there is none, an operation's step is how often the same one came before."""
    n = len(signatures)
    for period in range(1, n // 2 + 1):
        same = sum(a == b for a, b in zip(signatures, signatures[period:], strict=False))
        if same >= 0.98 * (n - period):
            return [i // period for i in range(n)]
    count: dict[str, int] = {}
    out = []
    for signature in signatures:
        out.append(count.get(signature, 0))
        count[signature] = out[-1] + 1
    return out


def _flight_rank(builder: Builder, rank: int, entries: list[dict[str, Any]]) -> None:
    done = [e for e in entries if e.get("time_discovered_completed_ns") is not None]  # the rest never ended: a hang
    kinds = [f"{e['profiling_name']} {e.get('process_group')} {e.get('input_sizes')}" for e in done]
    for e, step in zip(done, _rounds(kinds), strict=True):
        created, end = float(e["time_created_ns"]) * 1e-9, float(e["time_discovered_completed_ns"]) * 1e-9
        start = e.get("time_discovered_started_ns")
        begin = float(start) * 1e-9 if start is not None else created
        if e.get("duration_ms") is not None:  # measured on the device: better than when the watchdog looked
            begin = end - float(e["duration_ms"]) * 1e-3
        group = str(e.get("process_group", ["default"])[0])
        builder.add(
            step, rank, "hop" if e.get("is_p2p") else "collective", str(e["profiling_name"]), min(begin, end), end,
            ready=created, channel=f"group {group}", op=int(e.get("collective_seq_id", e.get("seq_id", 0))),
        )  # fmt: skip


# ---- NCCL / RCCL inspector ----


def read_inspector(files: list[Path]) -> Table:
    """NCCL inspector output: one JSON object a line (or an array), each with header, metadata and coll_perf."""
    builder = Builder()
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for path in files:
        lines = _load_json(path)
        for line in lines if isinstance(lines, list) else [lines]:
            if "coll_perf" in line:
                by_rank.setdefault(int(line.get("header", {}).get("rank", 0)), []).append(line)
    for rank, lines in by_rank.items():
        _inspector_rank(builder, rank, lines)
    return builder.table(str(files[0] if len(files) == 1 else files[0].parent))


def _inspector_rank(builder: Builder, rank: int, lines: list[dict[str, Any]]) -> None:
    def size(line: dict[str, Any]) -> float:
        return float(line["coll_perf"].get("coll_msg_size_bytes", 0))

    kinds = [f"{x.get('header', {}).get('id')} {x['coll_perf'].get('coll')} {size(x)}" for x in lines]
    clock = 0.0
    for line, step in zip(lines, _rounds(kinds), strict=True):
        head, perf, meta = line.get("header", {}), line["coll_perf"], line.get("metadata", {})
        length = float(perf["coll_exec_time_us"]) * 1e-6
        kernels = perf.get("event_trace_ts", {}).get("kernel_events", [])
        if kernels:  # verbose output has the kernels' own times
            clock = max(float(k["kernel_stop_ts"]) for k in kernels) * 1e-6
            length = clock - min(float(k["kernel_start_ts"]) for k in kernels) * 1e-6
        else:
            clock = max(clock + length, float(meta.get("dump_timestamp_us", 0)) * 1e-6)
        builder.rank(rank, host=str(meta.get("hostname", "")))
        builder.add(
            step, rank, "collective", str(perf.get("coll", "collective")), clock - length, clock,
            channel=f"group {head.get('id', 'default')}", op=int(perf.get("coll_sn", step)), bytes_=size(line),
        )  # fmt: skip
