# SPDX-License-Identifier: Apache-2.0
"""Simulated mixed fleets in numbers: suites of seeded episodes, run on all cores, kept batch by batch, and summed up.

An episode is a random job of NVIDIA and AMD devices watched by a monitor (src/fleet/episode.c).  The suites' seeds are
written here; a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpubridge import _fleet_abi as abi
from gpubridge.fleet.native import call

BATCH = 50
FAULTS = ("none", "compute", "memory", "thermal ramp", "link", "input", "pauses")
CAUSES = ("none", "input", "compute", "memory", "host", "pauses", "link", "slow part")
HISTORIES = ("plain", "variable length", "evaluation", "checkpoint", "restart", "rescale", "GC pauses in turn")
STRICT = 1e-4  # alarms in 30 days at 1 step/s: a budget of which 10,000 fleets use a small part


@dataclass(frozen=True)
class Suite:
    """Episodes of one kind: `fixed` goes into every config; `turns` are taken in turn."""

    words: str
    seed: int
    count: int
    fixed: dict[str, Any]
    turns: tuple[dict[str, Any], ...] = ({},)


_FAULT = {"healthy_steps": 1400, "window_steps": 400, "least": 2.0, "most": 6.0, "alarms": 0.1}
SUITES = {
    "faults": Suite(
        "one fault, or two at once, of twice to six times the stated detectable minimum",
        20_000_003,
        21_000,
        _FAULT,
        tuple({"faults": 1, "fault": f} for f in range(1, 7)) + ({"faults": 2},),
    ),
    "healthy": Suite(
        "healthy histories of 3,200 steps",
        30_000_001,
        7_000,
        {"healthy_steps": 3200, "alarms": STRICT},
        tuple({"history": h} for h in range(len(HISTORIES))),
    ),
    "fleets": Suite(
        "mixed fleets with the device lottery, 2,000 steps after arming",
        40_000_003,
        10_000,
        {"healthy_steps": 3200, "alarms": STRICT, "least_class": 4},
    ),
    "slow-part": Suite(
        "one device 15 % slower than its class from the start",
        50_000_017,
        2_000,
        {"healthy_steps": 1400, "alarms": STRICT, "least_class": 4, "slow_part": 1.15},
    ),
    "fastest": Suite(
        "2 % degradation of a device of the fastest model, within 2,000 steps",
        60_000_011,
        2_000,
        {"healthy_steps": 1400, "window_steps": 2000, "faults": 1, "fault": 1, "size": 0.02, "alarms": STRICT},
        ({"least_class": 4}, {}),
    ),
    "pair": Suite(
        "one V100 and one MI50: 2 % on either, from its own history",
        70_000_027,
        1_000,
        {"healthy_steps": 3000, "window_steps": 3000, "faults": 1, "fault": 1, "size": 0.02, "pair": 1, "alarms": 0.1},
    ),
}


def episode(seed: int, **settings: Any) -> dict[str, Any]:
    """One episode (struct gpubridge_fleet_episode) by its seed.

    Raises:
        GpuBridgeError: a setting is out of range.
    """
    config = abi.FleetEpisodeConfig(struct_size=ctypes.sizeof(abi.FleetEpisodeConfig), seed=seed, **settings)
    found = abi.FleetEpisode(struct_size=ctypes.sizeof(abi.FleetEpisode))
    call("fleet_run_episode", ctypes.byref(config), ctypes.byref(found))
    return {name: getattr(found, name) for name in (f[0] for f in abi.FleetEpisode._fields_[1:])}


def _batch(name: str, number: int, count: int) -> list[dict[str, Any]]:
    suite = SUITES[name]
    out = []
    for i in range(number * BATCH, min((number + 1) * BATCH, count)):
        settings = {**suite.fixed, **suite.turns[i % len(suite.turns)]}
        out.append({"turn": i % len(suite.turns), **episode(suite.seed + i, **settings)})
    return out


def _kept(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Batches of an earlier run; a line that was cut short is dropped."""
    done: dict[int, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        done[entry["batch"]] = entry["episodes"]
    return done


def run(name: str, count: int | None, folder: Path | None, workers: int | None = None) -> list[dict[str, Any]]:
    """All episodes of a suite, in order; with a folder, finished batches are kept there and not run again."""
    total = SUITES[name].count if count is None else count
    batches = range((total + BATCH - 1) // BATCH)
    path = None if folder is None else folder / f"{name}.jsonl"
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    done = {b: e for b, e in (_kept(path) if path else {}).items() if b in batches}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        task = progress.add_task(name, total=total, completed=sum(len(e) for e in done.values()))
        for number, episodes in _finished(pool, name, [b for b in batches if b not in done], total):
            done[number] = episodes
            if path:
                with path.open("a") as file:
                    file.write(json.dumps({"batch": number, "episodes": episodes}, separators=(",", ":")) + "\n")
            progress.advance(task, len(episodes))
    return [e for b in batches for e in done[b]][:total]


def _finished(
    pool: ThreadPoolExecutor, name: str, todo: list[int], total: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    running: dict[Future[list[dict[str, Any]]], int] = {pool.submit(_batch, name, b, total): b for b in todo}
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


@dataclass
class Summary:
    """A suite in numbers: `rows` of a table with `head`, and what was counted."""

    name: str
    words: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: dict[str, Any]
    delays: dict[str, list[int]] = field(default_factory=dict)


def right(e: dict[str, Any]) -> bool:
    """Every fault named with culprit and cause, nothing else named, nothing named before."""
    faults = 1 + (e["second_fault"] > 0)
    return bool(e["found"] == faults and e["wrong"] == 0 and e["early"] == 0)


def outcome(e: dict[str, Any]) -> str:
    """How an episode with a fault ended; anything but "right" is an error."""
    if right(e):
        return "right"
    if e["early"]:
        return "before the fault"
    if e["wrong"] > e["misread"]:
        return "wrong culprit"
    return "wrong cause" if e["misread"] else "not named"


OUTCOMES = ("right", "wrong cause", "wrong culprit", "not named", "before the fault")


def _confusion(name: str, episodes: list[dict[str, Any]]) -> Summary:
    rows: dict[str, Counter[str]] = {}
    causes: dict[str, Counter[str]] = {}
    delays: dict[str, list[int]] = {}
    for e in episodes:
        fault = "two at once" if e["second_fault"] else FAULTS[e["fault"]]
        rows.setdefault(fault, Counter())[outcome(e)] += 1
        if not e["second_fault"]:
            causes.setdefault(fault, Counter())[CAUSES[e["cause"]]] += 1
            if e["delay"] > 0:
                delays.setdefault(fault, []).append(e["delay"])
    total = sum(sum(c.values()) for c in rows.values())
    good = sum(c["right"] for c in rows.values())
    table = [
        (f, str(sum(c.values())), *(str(c[o]) for o in OUTCOMES), f"{c['right'] / sum(c.values()):.2%}")
        for f, c in rows.items()
    ]
    table.append(("all", str(total), *(str(sum(c[o] for c in rows.values())) for o in OUTCOMES), f"{good / total:.2%}"))
    numbers = {
        "episodes": total,
        "right": good,
        "share_right": good / total,
        "by_fault": {f: dict(c) for f, c in rows.items()},
        "first_cause_named": {f: dict(c) for f, c in causes.items()},
        "delay_steps_p50_p95": {f: _quantiles(d) for f, d in delays.items()},
    }
    return Summary(name, SUITES[name].words, ("fault", "episodes", *OUTCOMES, "right"), table, numbers, delays)


def _quantiles(values: list[int]) -> list[int]:
    ordered = sorted(values)
    return [ordered[len(ordered) // 2], ordered[min(len(ordered) * 95 // 100, len(ordered) - 1)]] if ordered else []


def _quiet(name: str, episodes: list[dict[str, Any]]) -> Summary:
    """Healthy suites: how many episodes had any verdict but "slow part"."""
    suite = SUITES[name]
    groups: dict[str, list[dict[str, Any]]] = {}
    for e in episodes:
        turn = suite.turns[e["turn"]]
        groups.setdefault(HISTORIES[turn.get("history", 0)], []).append(e)
    rows = []
    for group, members in groups.items():
        bad = sum(e["early"] > 0 for e in members)
        rank_steps = sum(e["ranks"] * e["steps"] for e in members)
        slow = sum(e["slow_parts"] for e in members)
        rows.append((group, str(len(members)), f"{rank_steps:,}", str(bad), str(slow)))
    numbers = {
        "episodes": len(episodes),
        "rank_steps": sum(e["ranks"] * e["steps"] for e in episodes),
        "with_a_verdict": sum(e["early"] > 0 for e in episodes),
        "by_history": {r[0]: int(r[3]) for r in rows},
        "devices": sum(e["ranks"] for e in episodes),
        "slow_parts": sum(e["slow_parts"] for e in episodes),
        "alarms_in_30_days": suite.fixed["alarms"],
    }
    return Summary(name, suite.words, ("history", "episodes", "rank-steps", "verdicts", "slow parts"), rows, numbers)


def _slow_part(name: str, episodes: list[dict[str, Any]]) -> Summary:
    found, early = sum(e["slow_part_found"] for e in episodes), sum(e["early"] > 0 for e in episodes)
    numbers = {"episodes": len(episodes), "named_slow_part": found, "called_degraded": early}
    head = ("episodes", "named slow part", "called degraded")
    return Summary(name, SUITES[name].words, head, [tuple(str(v) for v in numbers.values())], numbers)


def _pair(name: str, episodes: list[dict[str, Any]]) -> Summary:
    found = [e for e in episodes if e["found"] == 1]
    delays = [e["delay"] for e in found]
    numbers = {
        "episodes": len(episodes),
        "found": len(found),
        "said_no_peers": sum(e["peers"] == 0 for e in found),
        "other_named": sum(e["wrong"] > 0 for e in episodes),
        "before_the_fault": sum(e["early"] > 0 for e in episodes),
        "on_each_device": [sum(e["where"] == w for e in found) for w in (0, 1)],
        "delay_p50_p95": _quantiles(delays),
    }
    head = tuple(name.replace("_", " ") for name in numbers)
    return Summary(name, SUITES[name].words, head, [tuple(str(v) for v in numbers.values())], numbers, {"pair": delays})


def _fastest(name: str, episodes: list[dict[str, Any]]) -> Summary:
    rows, numbers, delays = [], {}, {}
    for turn, words in enumerate(("classes of 4 and more", "any class, single devices too")):
        members = [e for e in episodes if e["turn"] == turn]
        found = sum(e["found"] == 1 for e in members)
        delays[words] = [e["delay"] for e in members if e["delay"] > 0]
        wrong = sum(e["wrong"] > 0 for e in members)
        early = sum(e["early"] > 0 for e in members)
        rows.append((words, str(len(members)), str(found), str(wrong), str(early), str(_quantiles(delays[words]))))
        numbers[words] = {"episodes": len(members), "found": found, "others_named": wrong, "before": early}
    head = ("fleet", "episodes", "found", "others named", "before the fault", "delay p50, p95")
    return Summary(name, SUITES[name].words, head, rows, numbers, delays)


def summarize(name: str, episodes: list[dict[str, Any]]) -> Summary:
    """The numbers and the table of a suite."""
    kinds = {"faults": _confusion, "slow-part": _slow_part, "fastest": _fastest, "pair": _pair}
    return kinds.get(name, _quiet)(name, episodes)


def machine() -> dict[str, Any]:
    """Where and when a result was made."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
