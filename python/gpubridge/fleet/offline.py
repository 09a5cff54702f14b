# SPDX-License-Identifier: Apache-2.0
"""A recorded job judged as a whole: who is slow, in what, since when, or that nobody is to blame
(docs/fleet.md section 5).

The first half of the steps teaches levels, noise, slopes on work and common mode; the rest is compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from gpubridge.fleet.native import OWN_KINDS, Decomposer, Floats, Ints, Scan, Work, ints, makespan, scan
from gpubridge.fleet.records import Table

LEAST_LEARN = 8
WORTH = 0.8  # covariates are used where they leave at most this share of the noise
UNEVEN = 0.03  # spread of work between ranks that is worth a word
EXPLAINED = 0.8  # share of that spread that work must explain
LINK_LEAST = 0.1
LEAST_SECONDS = 1e-6  # a kind that is shorter in the median step is not judged
COMPUTE = OWN_KINDS.index("compute")


@dataclass(frozen=True)
class Verdict:
    """One culprit. `who`: a rank or a transfer channel; slowdown is relative; since: a step number, None: from
    the first."""

    who: str
    rank: int | None
    cause: str
    answer: str
    slowdown: float
    low: float | None
    since: int | None
    score: float
    factors: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass
class Analysis:
    """All that `gpubridge analyze` says about a recording.  Arrays: own[step, kind, rank], wait[step, rank],
    charged[step, rank], transfer[step, channel] in seconds; scans per kind; slopes and noise per class."""

    table: Table
    learn: int
    verdicts: list[Verdict]
    job: str
    reasons: list[str]
    classes: list[str]
    class_of: Ints
    own: Floats
    wait: Floats
    charged: Floats
    transfer: Floats
    compute: Floats
    scans: dict[str, list[Scan]]
    covariate: str
    slopes: dict[str, tuple[list[float], float]]
    step_seconds: float | None = None
    step_factor: float | None = None  # blamed ranks at the job's mean
    step_factor_peers: float | None = None  # blamed ranks as fast as their class peers


def place(table: Table, row: int) -> str:
    """A rank in words."""
    rank = table.ranks[row]
    parts = [f"rank {table.labels[row]}"]
    if any(r.stage or r.replica for r in table.ranks):
        parts.append(f"dp {rank.replica}, pp {rank.stage}")
    if rank.model:
        parts.append(rank.model)
    return f"{parts[0]} ({', '.join(parts[1:])})" if parts[1:] else parts[0]


def classes_of(table: Table) -> tuple[Ints, list[str]]:
    """Class = device model and stage: number per rank, and the names."""
    names: dict[str, int] = {}
    out = []
    for rank in table.ranks:
        name = ", ".join(filter(None, (rank.model, f"stage {rank.stage}")))
        out.append(names.setdefault(name, len(names)))
    return ints(out), list(names)


def _decompose(table: Table) -> tuple[Floats, Floats, Floats, Floats]:
    steps, ranks, channels = table.steps, len(table.ranks), max(len(table.channels), 1)
    ends = np.searchsorted(table.raw["step"], steps, "right")
    begins = np.searchsorted(table.raw["step"], steps, "left")
    decomposer = Decomposer(ranks, channels, int((ends - begins).max()))
    own, wait = np.zeros((len(steps), len(OWN_KINDS), ranks)), np.zeros((len(steps), ranks))
    charged, transfer = np.zeros_like(wait), np.zeros((len(steps), channels))
    for i, (a, b) in enumerate(zip(begins, ends, strict=True)):
        parts = decomposer.step(table.raw[a:b])
        own[i], wait[i], charged[i], transfer[i] = parts.own, parts.wait, parts.charged, parts.transfer
    return own, wait, charged, transfer


def _amounts(table: Table, compute: Floats) -> tuple[Floats | None, str]:
    """Work of each step and rank: what the file states, or the time of the other stages for the same micro-batches.
    amounts[step, covariate, rank], 0: not known."""
    steps = {int(s): i for i, s in enumerate(table.steps)}
    if table.work:
        count = max(len(w) for w in table.work.values())
        stated = np.zeros((len(steps), count, len(table.ranks)))
        for (step, rank), work in table.work.items():
            if step in steps:
                stated[steps[step], : len(work), rank] = work
        return stated, "work as stated in the file"
    replicas: dict[int, list[int]] = defaultdict(list)
    for row, facts in enumerate(table.ranks):
        replicas[facts.replica].append(row)
    if (
        max(len({table.ranks[r].stage for r in rows}) for rows in replicas.values()) < 2
        or not (table.micro_batch >= 0).any()
    ):
        return None, ""
    peer = np.zeros((len(steps), 1, len(table.ranks)))
    with np.errstate(divide="ignore"):
        logs = np.where(compute > 0, np.log(compute), np.nan)
    for rows in replicas.values():
        for row in rows:
            others = [o for o in rows if table.ranks[o].stage != table.ranks[row].stage]
            if others:
                peer[:, 0, row] = np.nan_to_num(np.exp(np.median(logs[:, others], axis=1)))
    return peer, "time of the other stages for the same micro-batches"


def _adjusted(
    compute: Floats, amounts: Floats, classes: Ints, learn: int
) -> tuple[Floats, dict[int, tuple[list[float], float]]]:
    covariates = amounts.shape[1]
    work = Work(classes, covariates, curvature=covariates < 4)
    work.fit(compute[:learn], amounts[:learn])
    nobody = np.zeros(len(classes), np.uint8)
    out = np.array([work.step(c, a, nobody) for c, a in zip(compute, amounts, strict=True)])
    return out, {int(k): work.slopes(int(k)) for k in np.unique(classes)}


def _noise(scans: list[Scan]) -> float:
    return float(np.median([s.noise for s in scans]))


def analyze(table: Table, learn: int | None = None, alarms: float = 0.01, min_slowdown: float = 0.0025) -> Analysis:
    """Judges a recording.

    Args:
        learn: how many steps teach (default: the first half).
        alarms: false verdicts per recording that are accepted.
        min_slowdown: smallest relative change that matters.

    Raises:
        ValueError: the recording has too few steps to learn from.
    """
    steps = len(table.steps)
    learn = steps // 2 if learn is None else learn
    if learn < LEAST_LEARN or steps < learn + 3:
        raise ValueError(
            f"{table.source}: {steps} steps, {learn} of them to learn from; at least {LEAST_LEARN} and 3 more "
            f"are needed"
        )
    class_of, names = classes_of(table)
    own, wait, charged, transfer = _decompose(table)
    result = Analysis(
        table, learn, [], "", [], names, class_of, own, wait, charged, transfer, own[:, COMPUTE].copy(), {}, "", {}
    )
    used = [k for k in range(len(OWN_KINDS)) if np.median(own[:, k]) > LEAST_SECONDS]
    share = alarms / max(len(used), 1)
    for kind in used:
        seconds = own[:, kind]
        found = scan(seconds, learn, class_of, share, min_slowdown)
        if kind == COMPUTE:
            amounts, words = _amounts(table, seconds)
            if amounts is not None:
                adjusted, slopes = _adjusted(seconds, amounts, class_of, learn)
                better = scan(adjusted, learn, class_of, share, min_slowdown)
                if _noise(better) < WORTH * _noise(found):
                    found, result.covariate, result.compute = better, words, adjusted
                    result.slopes = {names[k]: v for k, v in slopes.items()}
        result.scans[OWN_KINDS[kind]] = found
        _own_verdicts(result, OWN_KINDS[kind], found)
    if table.channels and (np.median(transfer, axis=0) > LEAST_SECONDS).any():
        result.scans["transfer"] = scan(transfer, learn, ints(np.arange(transfer.shape[1])), share)
        _link_verdicts(result)
    result.verdicts = _merge(result)
    _what_if(result)
    _say(result)
    return result


def _own_verdicts(result: Analysis, kind: str, scans: list[Scan]) -> None:
    table = result.table
    for row, s in enumerate(scans):
        if s.slow_part and kind in ("compute", "memory"):
            result.verdicts.append(Verdict(
                place(table, row), table.labels[row], kind, "slow against its peers", s.ratio - 1, None, None, s.score,
                factors_of(result, row), "from its first record: a slow part, not a degradation",
            ))  # fmt: skip
        if s.slower:
            note = (
                f"{s.compared} peers compared" if s.compared >= 3 else "no peers: a common change cannot be told apart"
            )
            result.verdicts.append(Verdict(
                place(table, row), table.labels[row], kind, "slower than its own past", float(np.expm1(s.shift)),
                float(np.expm1(s.low)), int(table.steps[s.onset]), s.score, {}, note,
            ))  # fmt: skip


def _link_verdicts(result: Analysis) -> None:
    """Channels have no class and wander with the network's load, so only a change above LINK_LEAST is a verdict.  A
    channel with one recorded end is not judged: its transfers cannot be told from waiting."""
    raw = result.table.raw[result.table.raw["kind"] >= len(OWN_KINDS)]
    ends = np.unique(np.stack([raw["channel"], raw["rank"]]), axis=1)[0]
    members = np.bincount(ends, minlength=len(result.scans["transfer"]))
    for channel, s in enumerate(result.scans["transfer"]):
        if members[channel] >= 2 and s.slower and s.low > np.log1p(LINK_LEAST):
            result.verdicts.append(
                Verdict(
                    result.table.channels[channel],
                    None,
                    "link",
                    "slower than its own past",
                    float(np.expm1(s.shift)),
                    float(np.expm1(s.low)),
                    int(result.table.steps[s.onset]),
                    s.score,
                )
            )


def _merge(result: Analysis) -> list[Verdict]:
    """One verdict per rank and answer: the kind that costs most seconds is the cause, the others are named in
    the note."""
    by: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for v in result.verdicts:
        by[v.who, v.answer].append(v)
    out = []
    for same in by.values():
        if same[0].rank is None:
            out += same
            continue
        cost = {v.cause: v.slowdown * float(np.median(result.own[:, OWN_KINDS.index(v.cause)])) for v in same}
        first, *others = sorted(same, key=lambda v: -cost[v.cause])
        extra = "".join(f"; {v.cause} too, by {v.slowdown:.1%}" for v in others)
        out.append(replace(first, note=first.note + extra))
    return sorted(out, key=lambda v: -v.slowdown)


def factors_of(result: Analysis, row: int) -> dict[str, float]:
    """Time of a rank over the median of its class peers, per kind of computation and in all."""
    table = result.table
    peers = [p for p in range(len(table.ranks)) if p != row and result.class_of[p] == result.class_of[row]]
    out: dict[str, float] = {}
    steps = table.steps
    for number, name in enumerate(table.names):
        chosen = (table.name == number) & (table.raw["kind"] == COMPUTE)
        if not chosen.any() or not peers:
            continue
        sums = np.zeros((len(steps), len(table.ranks)))
        raw = table.raw[chosen]
        np.add.at(sums, (np.searchsorted(steps, raw["step"]), raw["rank"]), raw["end"] - raw["start"])
        middle = np.median(sums[:, peers], axis=1)
        whole = (middle > 0) & (sums[:, row] > 0)
        if whole.any():
            out[name] = float(np.median(sums[whole, row] / middle[whole]))
    return out


# ---- what the step would take ----


@dataclass
class _Graph:
    """One step's computations with their dependencies; `row` is the rank of each node."""

    seconds: Floats
    first: Ints
    second: Ints
    delay: Floats
    row: Ints
    name: Ints
    group: Ints  # equal for nodes that do the same thing in one class


def _graph(table: Table, index: int, class_of: Ints, delays: dict[str, float]) -> _Graph | None:
    """Order on each rank as recorded; a forward follows the lower stage's, a backward the higher stage's."""
    step = table.steps[index]
    rows = np.flatnonzero((table.raw["step"] == step) & (table.raw["kind"] == COMPUTE) & (table.micro_batch >= 0))
    if not len(rows):
        return None
    raw = table.raw[rows]
    rows = rows[np.lexsort((raw["start"], raw["rank"]))]
    raw, names = table.raw[rows], table.name[rows]
    node: dict[tuple[int, int, int, int], int] = {}
    for i, (r, n, m) in enumerate(zip(raw["rank"], names, table.micro_batch[rows], strict=True)):
        rank = table.ranks[r]
        node[int(n), rank.replica, rank.stage, int(m)] = i
    first = np.where(np.r_[-1, raw["rank"][:-1]] == raw["rank"], np.arange(len(rows)) - 1, -1)
    second, delay = np.full(len(rows), -1), np.zeros(len(rows))
    for (n, replica, stage, m), i in node.items():
        backward = "backward" in table.names[n]
        other = node.get((n, replica, stage + (1 if backward else -1), m))
        if other is not None:
            second[i], delay[i] = other, delays.get("backward" if backward else "forward", 0.0)
    group = names.astype(np.int64) * (int(class_of.max()) + 1) + class_of[raw["rank"]]
    return _Graph(
        raw["end"] - raw["start"], ints(first), ints(second), delay, ints(raw["rank"]), ints(names), ints(group)
    )


def _delays(result: Analysis) -> dict[str, float]:
    """Pure transfer seconds of one micro-batch, by direction."""
    table, hop = result.table, result.table.raw["kind"] == 5
    out: dict[str, float] = {}
    for direction in ("forward", "backward"):
        names = [i for i, n in enumerate(table.names) if n.startswith(direction)]
        chosen = hop & np.isin(table.name, names)
        if chosen.any():
            raw = table.raw[chosen]
            # The shorter end of each pair, over all pairs of the recording.
            key = np.stack([raw["step"], raw["channel"], raw["op"]])
            _, pair = np.unique(key, axis=1, return_inverse=True)
            shortest = np.full(int(pair.max()) + 1, np.inf)
            np.minimum.at(shortest, pair.ravel(), raw["end"] - raw["start"])
            out[direction] = float(np.median(shortest))
    return out


def _what_if(result: Analysis) -> None:
    """Step time as recorded over what it would be without the blamed ranks' slowness, by two measures: as fast as their
    class peers, and as the mean over all ranks of the job (the measure of the what-if analyses in the literature)."""
    table = result.table
    blamed = [table.labels.index(v.rank) for v in result.verdicts if v.rank is not None and v.cause == "compute"]
    delays = _delays(result)
    spans: list[list[float]] = []
    for index in range(len(table.steps)):
        graph = _graph(table, index, result.class_of, delays)
        if graph is None:
            return
        peers, mean, even = graph.seconds.copy(), graph.seconds.copy(), graph.seconds.copy()
        guilty = np.isin(graph.row, blamed)
        for group in np.unique(graph.group):
            members = graph.group == group
            healthy = members & ~guilty
            if healthy.any():
                peers[members & guilty] = np.median(graph.seconds[healthy])
                even[members] = np.mean(graph.seconds[healthy])
        for name in np.unique(graph.name):
            same = graph.name == name
            mean[same & guilty] = np.mean(graph.seconds[same])
        outside = _outside(table, index)
        spans.append(
            [makespan(v, graph.first, graph.second, graph.delay) + outside for v in (graph.seconds, peers, mean, even)]
        )
    was, as_peers, as_mean, ideal = np.mean(spans, axis=0)
    result.step_seconds = float(was)
    if blamed:
        result.step_factor, result.step_factor_peers = float(was / as_mean), float(was / as_peers)
        result.reasons.append(f"a step takes {was:.2f} s; it would take {as_mean:.2f} s with the blamed ranks "
            f"at the job's mean (factor "
                              f"{was / as_mean:.3f}), {as_peers:.2f} s with them as fast as their peers (factor "
                                  f"{was / as_peers:.3f})")  # fmt: skip
    result.reasons.append(
        f"a step takes {was:.2f} s; with the same work on every rank of a class it would take {ideal:.2f} s"
    )


def _outside(table: Table, index: int) -> float:
    """Seconds of a step before its first and after its last computation, on the rank that waits least there."""
    raw = table.raw[table.raw["step"] == table.steps[index]]
    least = np.inf
    for row in np.unique(raw["rank"]):
        mine = raw[raw["rank"] == row]
        work = mine[mine["kind"] == COMPUTE]
        if len(work):
            around = (mine["end"].max() - mine["start"].min()) - (work["end"].max() - work["start"].min())
            least = min(least, float(around))
    return least if np.isfinite(least) else 0.0


def _say(result: Analysis) -> None:
    """The cause of the job's slowness in one phrase, with reasons."""
    culprits = result.verdicts
    raw = np.log(np.maximum(result.own[:, COMPUTE], 1e-12))
    left = np.log(np.maximum(result.compute, 1e-12))
    spread: list[float] = []
    rest: list[float] = []
    for number in range(len(result.classes)):
        members = np.flatnonzero(result.class_of == number)
        if len(members) >= 4:
            for values, out in ((raw, spread), (left, rest)):
                # Plain deviations: what varies from step to step and from rank to rank of one class.
                part = values[:, members] - np.median(values[:, members], axis=0)
                out.append(float(np.median(np.abs(part - np.median(part, axis=1, keepdims=True))) * 1.4826))
    uneven = float(np.mean(spread)) if spread else 0.0
    explained = 1 - (float(np.mean(rest)) / uneven) ** 2 if uneven > 0 else 0.0
    if culprits:
        result.job = "; ".join(dict.fromkeys(f"{v.cause} of {v.who}" for v in culprits))
    elif uneven > UNEVEN and explained > EXPLAINED:
        result.job = "work imbalance"
        result.reasons.insert(0, f"computation differs by {uneven:.1%} from rank to rank and step to step; the "
            f"work of each step explains "
                              f"{explained:.1%} of that")  # fmt: skip
    elif uneven > UNEVEN:
        result.job = "uneven steps, cause unknown"
        result.reasons.insert(
            0,
            f"computation differs by {uneven:.1%} from rank to rank and step to step, and no work covariate "
            f"explains it",
        )
    else:
        result.job = "nothing found"
