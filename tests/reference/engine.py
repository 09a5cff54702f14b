# SPDX-License-Identifier: Apache-2.0
"""The engine of docs/straggler-engine.md: steps, common mode, verdicts, arrivals, state bytes (3, 7 to 11)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from .numbers import CLIPS, INF, Tables, clip, clipped_inverse, exp, f32, log
from .stream import CONFIRMED, LEVEL, NO_STEP, NONE, RECOVERING, RUN, SCALE, WARMUP, Stream

(
    STATE_WARMUP,
    STATE_LEARN,
    STATE_HEALTHY,
    STATE_SUSPECT,
    STATE_CONFIRMED,
    STATE_RECOVERING,
    STATE_HOLD,
    STATE_UNKNOWN,
) = range(8)
RULE_BANK, RULE_GROSS, RULE_COUNT = 1, 2, 3
_HOT = struct.Struct("<id3f24f14f8HI")
_LEARNED = struct.Struct("<12d8I12f2f3q6fI")
_TAIL = struct.Struct("<q4H6B")
_ARRIVALS = struct.Struct("<4d8f2Bq")


class Arrivals:
    """Section 8: last arrivals of one rank."""

    def __init__(self) -> None:
        self.steps = self.last = self.repeat = self.refresh_at = 0.0
        self.p_steps = self.p_last = self.p_repeat = self.score = self.run = 0.0
        self.weight_last = self.weight_other = self.threshold = 0.0
        self.was_last = self.armed = self.seen = 0

    def pass_over(self, gap: int, t: Tables) -> None:
        """`gap` observed steps with another rank last."""
        if gap <= 0:
            return
        s = self.score + gap * self.weight_other
        self.was_last = 0
        self.p_steps = f32(self.p_steps + gap)
        self.score = f32(s) if self.armed and s > 0.0 else 0.0
        self.run = f32(self.run + gap) if self.score > 0.0 else 0.0
        if self.score == 0.0:
            self._commit(t)

    def arrive(self, t: Tables) -> bool:
        """This rank is the last; True: alarm."""
        self.p_steps = f32(self.p_steps + 1.0)
        self.p_last = f32(self.p_last + 1.0)
        self.p_repeat = f32(self.p_repeat + self.was_last)
        self.was_last = 1
        if not self.armed:
            self._commit(t)
            return False
        self.score = f32(self.score + self.weight_last)
        self.run = f32(self.run + 1.0)
        return self.score >= self.threshold * (1.0 + self.run / self.steps)

    def _commit(self, t: Tables) -> None:
        self.steps += self.p_steps
        self.last += self.p_last
        self.repeat += self.p_repeat
        self.p_steps = self.p_last = self.p_repeat = 0.0
        if self.steps >= 1048576.0:
            self.steps, self.last, self.repeat = self.steps * 0.5, self.last * 0.5, self.repeat * 0.5
            self.refresh_at = self.steps
        if self.steps >= self.refresh_at and self.steps >= 200.0:
            self._refresh(t)

    def _refresh(self, t: Tables) -> None:
        p = self.last / self.steps
        self.refresh_at = self.steps + (self.steps * 0.125 if self.steps < 51200.0 else 6400.0)
        if self.last < 200.0 or p > 0.6:
            self.armed = 0
            return
        f = 2.0 * p if p <= 0.25 else p + (1.0 - p) / 3.0
        phi = (self.repeat / self.last - p) / (1.0 - p) + math.sqrt(p / (self.last * (1.0 - p)))
        phi = 0.0 if phi < 0.0 else 0.95 if phi > 0.95 else phi
        self.weight_last = f32(log(f / p))
        self.weight_other = f32(log((1.0 - f) / (1.0 - p)))
        self.threshold = f32(t.count_threshold * (1.0 + phi) / (1.0 - phi))
        if not self.armed:
            self.score = self.run = 0.0
        self.armed = 1


class Reference:
    """Same inputs as gpubridge_straggler_*; no checks of arguments beyond what the specification orders."""

    def __init__(
        self,
        ranks: int,
        kinds: int,
        groups: Sequence[int],
        gamma: float,
        min_slowdown: float,
        warmup: int,
        peers: bool,
        max_hold: int,
    ) -> None:
        self.ranks, self.kinds, self.warmup, self.max_hold = ranks, kinds, warmup, max_hold
        self.t = Tables(gamma, min_slowdown)
        self.group_of = list(groups)
        self.groups = max(groups) + 1
        self.members = [[r for r in range(ranks) if groups[r] == g] for g in range(self.groups)]
        self.with_peers = [peers and len(m) >= 4 for m in self.members]
        self.streams = [[Stream(warmup) for _ in range(ranks + self.groups)] for _ in range(kinds)]
        self.arrivals = [Arrivals() for _ in range(ranks)]
        self.observed = [0] * self.groups
        self.held, self.held_since = [0] * ranks, [0] * ranks
        self.step_number, self.steps = NO_STEP, 0
        self.events: list[tuple[int, int, int, int, int]] = []

    # ---- sections 3 and 10 ----

    def step(
        self, number: int, seconds: Sequence[float], present: Sequence[int] | None, last: Sequence[int] | None
    ) -> None:
        """One step; seconds[kind * ranks + rank]."""
        self.step_number, self.steps = number, self.steps + 1
        for r in range(self.ranks):
            if self.held[r]:
                self.held_since[r] += 1
                if self.held_since[r] > self.max_hold:
                    self._release(r)
        for kind in range(self.kinds):
            at = kind * self.ranks
            here = [present is None or present[at + r] != 0 for r in range(self.ranks)]
            x = [log(seconds[at + r]) if here[r] else 0.0 for r in range(self.ranks)]
            self._step_kind(kind, x + [0.0] * self.groups, here + [False] * self.groups)
        if last is not None:
            self._step_arrivals(last)

    def hold(self, rank: int, begin: bool) -> None:
        for r in range(self.ranks) if rank < 0 else (rank,):
            if begin:
                if self.held[r] == 0:
                    self.held_since[r] = 0
                    self.arrivals[r].pass_over(self.observed[self.group_of[r]] - self.arrivals[r].seen, self.t)
                self.arrivals[r].seen = self.observed[self.group_of[r]]
                self.held[r] += 1
            elif self.held[r] == 1:
                self._release(r)
            elif self.held[r] > 1:
                self.held[r] -= 1

    def _release(self, r: int) -> None:
        self.held[r] = 0
        self.arrivals[r].seen = self.observed[self.group_of[r]]
        for kind in range(self.kinds):
            self.streams[kind][r].skip = 2

    def restart(self, rank: int) -> None:
        for r in range(self.ranks) if rank < 0 else (rank,):
            self.held[r] = 0
            self.arrivals[r] = Arrivals()
            self.arrivals[r].seen = self.observed[self.group_of[r]]
            for kind in range(self.kinds):
                self.streams[kind][r].reset()
        if rank < 0:
            for kind in range(self.kinds):
                for s in self.streams[kind][self.ranks :]:
                    s.reset()

    def clear(self, rank: int) -> None:
        for r in range(self.ranks) if rank < 0 else (rank,):
            self.arrivals[r].score = self.arrivals[r].run = 0.0
            for kind in range(self.kinds):
                self.streams[kind][r].clear()
        if rank < 0:
            for kind in range(self.kinds):
                for s in self.streams[kind][self.ranks :]:
                    s.clear()

    def given(self, rank: int, kind: int, seconds: float, noise: float, correlation: float) -> None:
        self.streams[kind][rank].given(self.t, log(seconds), noise, correlation)

    def _step_kind(self, kind: int, x: list[float], here: list[bool]) -> None:
        streams = self.streams[kind]
        for g in range(self.groups):
            if self.with_peers[g]:
                self._remove_common(streams, self.members[g], self.ranks + g, x, here)
        active = [self._admit(i, s, x[i], here[i]) for i, s in enumerate(streams)]
        for i, s in enumerate(streams):
            if active[i] and s.advance(self.t, x[i]):
                self._examine(kind, i, s, x[i])
        for i, s in enumerate(streams):
            if active[i] and s.verdict == RECOVERING:
                self._recovering(kind, i, s)

    def _admit(self, i: int, s: Stream, x: float, here: bool) -> bool:
        """Section 3.1; True: section 4 takes the stream."""
        if i < self.ranks and self.held[i]:
            return False
        if s.skip:
            s.skip -= 1
            return False
        if not here:
            s.missing = min(s.missing + 1, 1000)
            if s.missing >= 64 and not s.unknown:
                s.unknown = 1
                if s.phase == RUN and s.verdict != CONFIRMED:
                    s.clear()
            return False
        if s.unknown:
            s.missing = 60 if s.missing > 64 else max(s.missing - 4, 0)
            if s.missing:
                return False
            s.unknown = 0
        s.missing = 0
        if s.phase != RUN:
            s.feed(x)
            return False
        if s.verdict == CONFIRMED:
            self._confirmed(s, x)
            return False
        return True

    # ---- section 3.2 ----

    def _remove_common(
        self, streams: list[Stream], members: list[int], pseudo: int, x: list[float], here: list[bool]
    ) -> None:
        counting = [
            r
            for r in members
            if here[r]
            and not self.held[r]
            and not streams[r].skip
            and not streams[r].unknown
            and streams[r].phase >= SCALE
            and streams[r].verdict != CONFIRMED
        ]
        n = len(counting)
        if n < 3:
            for r in members:
                if streams[r].phase >= SCALE:
                    here[r] = False
            here[pseudo] = False
            return
        residual = [x[r] - (streams[r].level + streams[r].centre / streams[r].inv_scale) for r in counting]
        bound = [2.0 / streams[r].inv_scale if streams[r].phase == RUN else 0.0 for r in counting]
        v = sorted(residual)
        m = n // 2
        lo, mid, hi = v[m - 1], v[m], v[m + 1] if m + 1 < n else v[m]
        centre = mid if n % 2 else (lo + mid) * 0.5
        sums: dict[float, float] = {}

        def total(c: float) -> float:
            if c not in sums:
                part = [0.0] * 8
                for i in range(n):
                    part[i % 8] += clip(residual[i] - c, bound[i])
                all_parts = 0.0
                for p in part:
                    all_parts += p
                sums[c] = all_parts
            return sums[c]

        place = {r: i for i, r in enumerate(counting)}
        for r in members:
            if r in place:
                own = residual[place[r]]
                if n % 2:
                    c = (mid + hi) * 0.5 if own < mid else (lo + mid) * 0.5 if own > mid else (lo + hi) * 0.5
                else:
                    c = mid if own <= lo else lo
                x[r] = x[r] - (c + (total(c) - clip(own - c, bound[place[r]])) / (n - 1))
            elif streams[r].phase >= SCALE:
                x[r] = x[r] - (centre + total(centre) / n)
        x[pseudo], here[pseudo] = centre, True

    # ---- section 7 ----

    def _event(self, kind: int, i: int, source: int, target: int) -> None:
        self.events.append((self.step_number, i if i < self.ranks else -1 - (i - self.ranks), kind, source, target))

    def _examine(self, kind: int, i: int, s: Stream, x: float) -> None:
        z = (x - s.level) * s.inv_scale
        if z > s.gross:
            follows = s.gross_step == self.steps - 1
            s.gross_run = s.gross_run + 1 if follows else 1
            s.gross_sum = f32(s.gross_sum + z if follows else z)
            s.gross_step = self.steps
            if s.gross_run >= 3:
                mean, unit = s.gross_sum / s.gross_run, 1.0 / s.inv_scale
                mid = mean * unit
                half = 3.45 * unit / math.sqrt(3.0)
                low = mid - half if mid > half else 0.0
                if low > self.t.min_log:
                    self._confirm(kind, i, s, RULE_GROSS, 0, 1, (2.0, 3.0, low, mid, mid + half))
                    return
        ratio, member, slower = s.score_ratio()
        if ratio >= 1.0:
            size = self._size(s, member, slower)
            if size[-1] > self.t.min_log:
                self._confirm(kind, i, s, RULE_BANK, member, slower, size[:-1])
                return
        if s.q_count >= 200.0:
            s.batch(self.t)

    def _size(self, s: Stream, j: int, slower: int) -> tuple[float, float, float, float, float, float]:
        """(shift, steps, low, mid, high, sure), 7.5."""
        score, n = (s.up[j], s.up_run[j]) if slower else (s.down[j], s.down_run[j])
        if not n > 0.0:
            return (0.0,) * 6
        shift = score / n + self.t.k[j]
        error = math.sqrt(1.0 / n + 1.0 / s.count)
        mid = shift * 0.9
        return (
            shift,
            n,
            self._log_shift(s, j, mid - 2.3 * error),
            self._log_shift(s, j, mid),
            self._log_shift(s, j, mid + 3.2 * error),
            self._log_shift(s, j, mid - error),
        )

    @staticmethod
    def _log_shift(s: Stream, j: int, v: float) -> float:
        if v <= 0.0:
            return 0.0
        mean = v / s.inv_omega
        if j < 4:
            mean = mean * 0.9544997361036416 / s.slope if s.slope else INF
            d = INF if mean > 1.95 else clipped_inverse(mean)
        else:
            d = INF if mean > CLIPS[j] - 0.5 else mean
        return d / s.inv_scale

    def _confirm(
        self, kind: int, i: int, s: Stream, rule: int, member: int, slower: int, size: tuple[float, ...]
    ) -> None:
        shift, steps, low, mid, high = size
        reach = 1.0 / (shift * shift)
        s.onset = self.step_number - int(steps) + 1
        s.onset_low = s.onset - int(2.0 + 20.0 * reach)
        s.onset_high = min(s.onset + int(1.0 + 16.0 * reach), self.step_number)
        sign = 1.0 if slower else -1.0
        s.magnitude = f32(sign * mid)
        s.magnitude_low = f32(sign * (low if slower else high))
        s.magnitude_high = f32(sign * (high if slower else low))
        s.shift = f32(shift if shift < 2.0 else 2.0)
        s.recover, s.clean = 0.0, 0
        s.verdict, s.rule, s.member, s.slower = CONFIRMED, rule, member, slower
        self._event(kind, i, STATE_SUSPECT, STATE_CONFIRMED)

    def _confirmed(self, s: Stream, x: float) -> None:
        z = clip((x - s.level) * s.inv_scale, 2.0)
        v = (z - s.centre) * s.inv_omega
        r = s.recover + (s.shift * 0.5 - (v if s.slower else -v))
        s.recover = f32(r) if r > 0.0 else 0.0
        if s.recover * s.shift < 10.0:
            return
        s.verdict, s.clean = RECOVERING, 0
        s.zero_scores()
        kind, i = self._find(s)
        self._event(kind, i, STATE_CONFIRMED, STATE_RECOVERING)

    def _find(self, s: Stream) -> tuple[int, int]:
        for kind, streams in enumerate(self.streams):
            for i, other in enumerate(streams):
                if other is s:
                    return kind, i
        raise AssertionError("a stream of another engine")

    def _recovering(self, kind: int, i: int, s: Stream) -> None:
        need = 16.0 / (s.shift * s.shift)
        need = 32.0 if need < 32.0 else 2000.0 if need > 2000.0 else need
        s.clean += 1
        if s.clean < need or s.score_ratio()[0] >= 0.5:
            return
        s.verdict = s.rule = NONE
        self._event(kind, i, STATE_RECOVERING, STATE_HEALTHY)

    # ---- section 8 ----

    def _step_arrivals(self, last: Sequence[int]) -> None:
        for g in range(self.groups):
            r = last[g]
            if r < 0:
                continue
            self.observed[g] += 1
            if self.held[r]:
                continue
            a = self.arrivals[r]
            a.pass_over(self.observed[g] - 1 - a.seen, self.t)
            a.seen = self.observed[g]
            if a.arrive(self.t):
                self._count_alarm(r)

    def _count_alarm(self, rank: int) -> None:
        s = self.streams[0][rank]
        if s.phase != RUN or s.verdict != NONE:
            return
        best, top = -1, 0.0
        for j in range(4):
            if s.h_up[j] < 0.0:
                continue
            r = s.up[j] / (s.h_up[j] * (1.0 + s.up_run[j] / s.count))
            if r > top:
                best, top = j, r
        if best < 0:
            return
        size = self._size(s, best, 1)
        if size[-1] > self.t.min_log:
            self._confirm(0, rank, s, RULE_COUNT, best, 1, size[:-1])
            self.arrivals[rank].score = self.arrivals[rank].run = 0.0

    # ---- sections 7.1, 7.6 and 11 ----

    def state(self, kind: int, i: int) -> int:
        s = self.streams[kind][i]
        if i < self.ranks and self.held[i]:
            return STATE_HOLD
        if s.unknown:
            return STATE_UNKNOWN
        if s.phase == WARMUP:
            return STATE_WARMUP
        if s.phase in (LEVEL, SCALE):
            return STATE_LEARN
        if s.verdict == CONFIRMED:
            return STATE_CONFIRMED
        if s.verdict == RECOVERING:
            return STATE_RECOVERING
        if s.slow == 0:
            return STATE_LEARN
        return STATE_SUSPECT if s.score_ratio()[0] >= 0.5 else STATE_HEALTHY

    def detectable(self, kind: int, i: int, steps: float, quantile: float) -> float:
        """Smallest relative slowdown, or -1."""
        s = self.streams[kind][i]
        if s.phase != RUN or not s.count > 0.0:
            return -1.0
        best, spread = -1.0, 1.0 + steps / s.count
        for j in range(6):
            if s.h_up[j] < 0.0:
                continue
            v = self.t.k[j] + s.h_up[j] * spread / steps + quantile * math.sqrt(spread / steps)
            mean = v / s.inv_omega
            if j < 4:
                mean = mean * 0.9544997361036416 / s.slope if s.slope else INF
                if mean > 1.95:
                    continue
                d = clipped_inverse(mean)
            else:
                if mean > CLIPS[j] - 1.0:
                    continue
                d = mean
            if best < 0.0 or d < best:
                best = d
        if best < 0.0:
            return -1.0
        up = best / s.inv_scale
        return exp(up if up > self.t.min_log else self.t.min_log) - 1.0

    @staticmethod
    def _learned_bytes(s: Stream) -> bytes:
        return _LEARNED.pack(
            s.n,
            s.s1,
            s.s2,
            s.s11,
            s.s3,
            s.inside,
            s.short_n,
            s.short_dev,
            s.long_n,
            s.long_dev,
            s.long_sum,
            s.long_steps,
            *s.tails,
            *s.h_up,
            *s.h_down,
            s.next_refresh,
            s.slope,
            s.onset,
            s.onset_low,
            s.onset_high,
            s.magnitude,
            s.magnitude_low,
            s.magnitude_high,
            s.recover,
            s.shift,
            s.gross_sum,
            s.clean,
        )

    @staticmethod
    def _arrival_bytes(a: Arrivals) -> bytes:
        return _ARRIVALS.pack(
            a.steps,
            a.last,
            a.repeat,
            a.refresh_at,
            a.p_steps,
            a.p_last,
            a.p_repeat,
            a.score,
            a.run,
            a.weight_last,
            a.weight_other,
            a.threshold,
            a.was_last,
            a.armed,
            a.seen,
        )

    def state_bytes(self, kind: int, i: int) -> bytes:
        s = self.streams[kind][i]
        bank: list[float] = []
        for j in range(6):
            bank += (s.up[j], s.down[j], s.up_run[j], s.down_run[j])
        flags = s.down_older | (2 if s.frozen else 0) | s.slow << 8
        out = _HOT.pack(
            self.state(kind, i),
            s.level,
            s.inv_scale,
            s.centre,
            s.inv_omega,
            *bank,
            s.older_n,
            s.older_s,
            s.newer_n,
            s.newer_s,
            s.count,
            s.q_count,
            s.q1,
            s.q2,
            s.q11,
            s.q3,
            s.q_in,
            s.prev,
            s.guard,
            s.gross,
            *s.q_tails,
            flags,
        )
        if s.phase == RUN:
            out += self._learned_bytes(s)
        else:
            out += struct.pack(f"<{len(s.window)}f", *s.window)
        out += _TAIL.pack(
            s.gross_step,
            s.gross_run,
            s.missing,
            s.filled,
            s.skip,
            s.phase,
            s.verdict,
            s.rule,
            s.member,
            s.slower,
            s.unknown,
        )
        if i < self.ranks and kind == 0:
            out += self._arrival_bytes(self.arrivals[i])
        return out
