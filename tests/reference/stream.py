# SPDX-License-Identifier: Apache-2.0
"""One stream of docs/straggler-engine.md: phases, score, bank, baseline, learning (sections 2, 4 and 6)."""

from __future__ import annotations

import math

from .numbers import CLIPS, DELTAS, INF, Tables, clip, exp, f32, log

WARMUP, LEVEL, SCALE, RUN = range(4)
NONE, CONFIRMED, RECOVERING = range(3)
NO_STEP = -(2**63)
MEMBERS = range(6)
_LEVELS = (3.0, 4.0, 6.0, 12.0)
_UP_ENDS = (3.0, 4.0, 6.0, 12.0, 12.0)
_DOWN_ENDS = (3.0, 5.0, 12.0)


def median(values: list[float]) -> float:
    """Half the sum of the two middle ones of an even number of values."""
    v = sorted(values)
    n = len(v)
    return (v[n // 2 - 1] + v[n // 2]) * 0.5


class Stream:
    """State of a stream; attribute names follow the specification."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.reset()

    def reset(self) -> None:
        """As after create or restart."""
        self.phase = WARMUP if self.warmup > 0 else LEVEL
        self.window: list[float] = []
        self.filled = 0
        self.level = 0.0
        self.inv_scale, self.centre, self.inv_omega = 1.0, 0.0, 1.0
        self.up, self.down = [0.0] * 6, [0.0] * 6
        self.up_run, self.down_run = [0.0] * 6, [0.0] * 6
        self.older_n = self.older_s = self.newer_n = self.newer_s = self.count = 0.0
        self.clear_batch()
        self.prev = 0.0
        self.guard = self.gross = INF
        self.down_older, self.frozen, self.slow = 0, False, 0
        self.gross_step, self.gross_run, self.gross_sum = NO_STEP, 0, 0.0
        self.missing = self.skip = self.verdict = self.rule = self.member = self.slower = self.unknown = 0
        self.clear_learned()

    def clear_learned(self) -> None:
        self.n = self.s1 = self.s2 = self.s11 = self.s3 = self.inside = 0.0
        self.short_n = self.short_dev = self.long_n = self.long_dev = self.long_sum = self.long_steps = 0.0
        self.tails = [0] * 8
        self.h_up, self.h_down = [-1.0] * 6, [-1.0] * 6
        self.next_refresh = self.slope = 0.0
        self.onset = self.onset_low = self.onset_high = 0
        self.magnitude = self.magnitude_low = self.magnitude_high = self.recover = self.shift = 0.0
        self.clean = 0

    def clear_batch(self) -> None:
        self.q_count = self.q1 = self.q2 = self.q11 = self.q3 = self.q_in = 0.0
        self.q_tails = [0] * 8

    # ---- section 2 ----

    def feed(self, x: float) -> None:
        """One value before RUN."""
        self.filled += 1
        if self.phase == WARMUP:
            if self.filled >= self.warmup:
                self.phase, self.filled = LEVEL, 0
            return
        self.window.append(f32(x - self.level if self.phase == SCALE else x))
        if self.phase == LEVEL:
            if self.filled == 32:
                self.level = median(self.window)
                self.phase, self.filled, self.window = SCALE, 0, []
            return
        if self.filled < 64:
            return
        m = median(self.window)
        spread = [f32(abs(w - m)) for w in self.window]
        scale = 1.4826 * median(spread)
        self.level = self.level + m
        self.inv_scale = f32(1.0 / (scale if scale > 1e-6 else 1e-6))
        self.start_run()

    def start_run(self) -> None:
        self.clear_learned()
        self.gross_sum = 0.0
        self.inv_omega = f32(1.0 / 0.9594461556733254)
        self.phase = RUN

    def given(self, t: Tables, level: float, noise: float, correlation: float) -> None:
        """Section 10, last paragraph."""
        self.reset()
        self.start_run()
        self.n = 1e9
        self.s2 = 0.920536925636323 * self.n
        self.s11 = correlation * self.s2
        self.inside = 0.9544997361036416 * self.n
        self.tails = [22750132, 1349898, 31671, 1, 0, 22750132, 1349898, 287]
        self.level = level
        self.inv_scale = f32(1.0 / noise)
        self.count = 1e9
        self.frozen = True
        self.refresh(t)

    # ---- section 4 ----

    def advance(self, t: Tables, x: float) -> bool:
        """One step of score, bank, baseline and batch.  True: section 7 must look."""
        z = (x - self.level) * self.inv_scale
        psi = clip(z, 2.0)
        c, o = self.centre, self.inv_omega
        v2, v4, v6 = (psi - c) * o, (clip(z, 4.0) - c) * o, (clip(z, 6.0) - c) * o
        alert = z > self.gross
        for j, v in enumerate((v2, v2, v2, v2, v4, v6)):
            k = t.k[j]
            a = self.up[j] + (v - k)
            b = self.down[j] + (-v - k)
            u = self.up[j] = f32(a) if a > 0.0 else 0.0
            d = self.down[j] = f32(b) if b > 0.0 else 0.0
            self.up_run[j] = self.up_run[j] + 1.0 if u > 0.0 else 0.0
            self.down_run[j] = self.down_run[j] + 1.0 if d > 0.0 else 0.0
            limit = t.reference[j] * self.guard
            if u >= limit or d >= limit:
                alert = True
        self._baseline(psi)
        self._gather(z, psi)
        return alert or self.q_count >= 200.0

    def _baseline(self, psi: float) -> None:
        j = self.slow - 1
        zero_up = self.slow == 0 or self.up[j] == 0.0
        zero_down = self.slow == 0 or self.down[j] == 0.0
        old, young = (zero_down, zero_up) if self.down_older else (zero_up, zero_down)
        d, e = self.newer_n + 1.0, f32(self.newer_s + psi)
        commit_n = commit_s = 0.0
        if old and young:
            commit_n, commit_s = self.older_n + d, self.older_s + e
            self.older_n = self.older_s = 0.0
        elif old:
            commit_n, commit_s = self.older_n, self.older_s
            self.older_n, self.older_s = d, e
            self.down_older ^= 1
        elif young:
            self.older_n, self.older_s = self.older_n + d, f32(self.older_s + e)
        if old or young:
            self.newer_n = self.newer_s = 0.0
        else:
            self.newer_n, self.newer_s = d, e
        if commit_n > 0.0 and not self.frozen:
            m = self.count + commit_n
            self.centre = f32(self.centre + (commit_s - commit_n * self.centre) / m)
            self.count = m if m < 65536.0 else 65536.0

    def _gather(self, z: float, psi: float) -> None:
        p2 = psi * psi
        self.q_count += 1.0
        self.q1 = f32(self.q1 + psi)
        self.q2 = f32(self.q2 + p2)
        self.q3 = f32(self.q3 + p2 * psi)
        self.q11 = f32(self.q11 + psi * self.prev)
        if -2.0 < z < 2.0:
            self.q_in += 1.0
        elif z > 2.0:
            for i, level in enumerate((2.0, 3.0, 4.0, 6.0, 12.0)):
                self.q_tails[i] += z > level
        elif z < -2.0:
            for i, level in enumerate((-2.0, -3.0, -5.0)):
                self.q_tails[5 + i] += z < level
        self.prev = f32(psi)

    def zero_member(self, j: int) -> None:
        self.up[j] = self.down[j] = self.up_run[j] = self.down_run[j] = 0.0

    def zero_scores(self) -> None:
        for j in MEMBERS:
            self.zero_member(j)
        self.older_n = self.older_s = self.newer_n = self.newer_s = self.prev = 0.0

    def clear(self) -> None:
        """Section 10: scores and verdict away, knowledge stays."""
        if self.phase != RUN:
            return
        self.zero_scores()
        self.verdict = self.rule = 0
        self.gross_run, self.gross_step = 0, NO_STEP

    # ---- section 6 ----

    def batch(self, t: Tables) -> None:
        """End of a batch, 6.1 and 6.2."""
        count, total = self.q_count, self.q1
        if not self.frozen and self.n >= 1000.0:
            self._blocks(count, total)
        if self.frozen or self.score_ratio()[0] >= 0.5:
            self.clear_batch()
            return
        self.n += count
        self.s1 += total
        self.s2 += self.q2
        self.s11 += self.q11
        self.s3 += self.q3
        self.inside += self.q_in
        self.tails = [a + b for a, b in zip(self.tails, self.q_tails, strict=True)]
        self.clear_batch()
        next_slower = 5 if self.slow == 0 else self.slow - 2
        if self.n >= self.next_refresh or (next_slower >= 0 and self.ripe(next_slower)):
            self.refresh(t)
            self.next_refresh = f32(self.n + (self.n * 0.25 if self.n < 25600.0 else 6400.0))
        if self.n >= 1048576.0:
            for name in ("n", "s1", "s2", "s11", "s3", "inside", "short_n", "short_dev", "long_n", "long_dev"):
                setattr(self, name, getattr(self, name) * 0.5)
            self.tails = [c // 2 for c in self.tails]
            self.next_refresh = f32(self.n + 6400.0)

    def _blocks(self, count: float, total: float) -> None:
        mean, cap = self.s1 / self.n, 9.0 / (self.inv_omega * self.inv_omega)
        d = total - count * mean
        self.short_dev += min(d * d / (1.0 + count / self.n), cap * count)
        self.short_n += 1.0
        self.long_sum += total
        self.long_steps += count
        if self.long_steps >= 3200.0:
            d = self.long_sum - self.long_steps * mean
            self.long_dev += min(d * d / (1.0 + self.long_steps / self.n), cap * self.long_steps)
            self.long_n += 1.0
            self.long_sum = self.long_steps = 0.0

    def healthy(self) -> float:
        return self.count + self.older_n + self.newer_n

    def ripe(self, j: int) -> bool:
        delta = 2.0 * (DELTAS[j] * 0.5)
        return self.healthy() * delta * delta >= 159.999

    def refresh(self, t: Tables) -> None:
        """Thresholds, 6.4."""
        n = self.n
        mean = self.s1 / n
        var = self.s2 / n - mean * mean
        if not var > 1e-6:
            var = 1e-6
        rho = (self.s11 / n - mean * mean) / var
        rho = 0.95 if rho > 0.95 else -0.3 if rho < -0.3 else rho
        ratio = (1.0 + rho) / (1.0 - rho)
        skew = (self.s3 / n - 3.0 * mean * (self.s2 / n) + 2.0 * mean * mean * mean) / (var * math.sqrt(var))
        error2 = (4.0 + 1.5 * (1.0 + rho * rho)) / ((1.0 - rho * rho) * n)
        inv_omega = 1.0 / math.sqrt(var * ratio)
        short = self._excess(self.short_n, self.short_dev, 200.0, var, rho, ratio, 0.5)
        long = self._excess(self.long_n, self.long_dev, 3200.0, var, rho, ratio, 0.0)
        most = long if long > short else short
        slowest = 5
        while slowest > 0 and self.ripe(slowest - 1):
            slowest -= 1
        rest = 2.0 if slowest >= 2 else 1.5 if slowest == 1 else 1.0
        allowed = log(rest * (1.0 + 8000.0 / self.healthy()))
        self.inv_omega = f32(inv_omega)
        self.slope = f32(self.inside / n)
        guard, slow = INF, 0
        for j in reversed(MEMBERS):
            unarmed = self.h_up[j] < 0.0 and self.h_down[j] < 0.0
            if unarmed and not self.ripe(j):
                continue
            if unarmed:
                self.zero_member(j)
            k, x = t.k[j], t.exponent[j] - allowed
            excess = 1.7 * most if j == 0 else most if j == 1 else 1.7 * short if j == 2 else short
            for side, h_side in ((1, self.h_up), (0, self.h_down)):
                if j >= 4:
                    r = self._wide_ratio(j, side, inv_omega, k)
                else:
                    r = 1.0 - (2.0 / 3.0) * k * (skew if side else -skew) + 0.18 * k * k
                    r = 0.3 if r < 0.3 else 1.5 if r > 1.5 else r
                if r <= 0.0:
                    h_side[j] = -1.0
                    continue
                h = x / (2.0 * k * r) * (1.0 + 0.5 * x * error2) * (1.0 + excess) - 1.166 / math.sqrt(ratio)
                h_side[j] = f32(h if h > 0.5 else 0.5)
                relative = h_side[j] / t.reference[j]
                if 0.0 < relative < guard:
                    guard = relative
            slow = j + 1
        self.slow = slow
        self.guard = f32(guard * 0.999)
        self.gross = self._gross_level(t, rho)

    @staticmethod
    def _excess(blocks: float, dev: float, steps: float, var: float, rho: float, ratio: float, allow: float) -> float:
        if blocks < (16.0 if steps > 200.0 else 100.0):
            return 0.0
        lag = 1.0 - rho
        expected = var * (ratio - 2.0 * rho / (lag * lag * steps))
        excess = dev / (blocks * steps * expected) - 1.0
        return excess if excess > allow * math.sqrt(2.0 / blocks) else 0.0

    def _wide_ratio(self, j: int, side: int, inv_omega: float, k: float) -> float:
        """6.5."""
        ends = _UP_ENDS if side else _DOWN_ENDS
        tails = self.tails[:5] if side else self.tails[5:]
        p, edge, total = [], [], 0.0
        for i, end in enumerate(ends):
            beyond = float(tails[i + 1]) if i + 1 < len(ends) else 0.0
            p.append((tails[i] - beyond + (0.0 if i == 0 else 1.0)) / (self.n + 1.0))
            edge.append(min(end, CLIPS[j]) * inv_omega)
            total += p[-1]
        for step in range(20, 0, -1):
            theta = 2.0 * k * 0.05 * step
            f = (1.0 - total) * exp(theta * theta * 0.5 - theta * k)
            for pi, ei in zip(p, edge, strict=True):
                f += pi * exp(theta * (ei - k))
            if f <= 1.0:
                return 0.05 * step
        return 0.0

    def _gross_level(self, t: Tables, rho: float) -> float:
        rho = rho + 2.0 / math.sqrt(self.n)
        rho = 0.0 if rho < 0.0 else 0.9 if rho > 0.9 else rho
        for i, level in enumerate(_LEVELS):
            if (self.tails[i + 1] + 3.0) / (self.n + 3.0) <= t.gross_probability:
                return f32(level / (1.0 - rho))
        return INF

    # ---- section 7.1 ----

    def slowdown(self) -> float:
        """Relative slowdown of the standing verdict, 0 without one, infinite where the clip hides it (section 9)."""
        if self.phase != RUN or not self.verdict:
            return 0.0
        return INF if self.magnitude > 80.0 else exp(self.magnitude) - 1.0

    def score_ratio(self) -> tuple[float, int, int]:
        """(ratio, member, 1 if slower)."""
        best, member, slower = 0.0, -1, 1
        for j in MEMBERS:
            for side in (1, 0):
                h = self.h_up[j] if side else self.h_down[j]
                if h < 0.0:
                    continue
                score = self.up[j] if side else self.down[j]
                run = self.up_run[j] if side else self.down_run[j]
                r = score / (h * (1.0 + run / self.count))
                if r > best:
                    best, member, slower = r, j, side
        return best, member, slower
