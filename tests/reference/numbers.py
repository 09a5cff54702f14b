# SPDX-License-Identifier: Apache-2.0
"""Numbers of docs/straggler-engine.md sections 1 and 5: rounding to IEEE single, log, exp, exponents of the bank."""

from __future__ import annotations

import math
import struct

_f = struct.Struct("<f")
_d = struct.Struct("<d")
_q = struct.Struct("<q")

INF = math.inf
DELTAS = (0.1, 0.2, 0.4, 1.0, 2.0, 4.0)
SHARES = (0.40, 0.26, 0.20, 0.12, 0.05, 0.05)
CLIPS = (2.0, 2.0, 2.0, 2.0, 4.0, 6.0)
CLIPPED_MEANS = (
    0.0, 0.238060794047, 0.472697343417, 0.7003123453, 0.917066683729, 1.118986798797, 1.302261923517, 1.463676332639,
    1.601064864857, 1.713657594178, 1.802204136811, 1.86883328049, 1.916684582874, 1.949413145281, 1.970693209492,
    1.98382620642, 1.99150929754,
)  # fmt: skip
_LN2_HIGH = 0.69314718036912381649
_LN2_LOW = 1.90821492927058770002e-10
_SIGN = 0x8000000000000000


def f32(x: float) -> float:
    """Round once to IEEE single; infinities stay."""
    try:
        return _f.unpack(_f.pack(x))[0]
    except OverflowError:
        return INF if x > 0 else -INF


def log(x: float) -> float:
    """Natural logarithm of a positive normal double, section 1."""
    bits = _q.unpack(_d.pack(x))[0]
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = _d.unpack(_q.pack(bits - (e << 52)))[0]
    s = (f - 1.0) / (f + 1.0)
    q = s * s
    p = 1.0 / 19.0
    for d in (17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = p * q + 1.0 / d
    p = p * q + 1.0
    return e * 0.6931471805599453 + 2.0 * s * p


def exp(x: float) -> float:
    """Exponential, clamped to +-700, section 1."""
    x = 700.0 if x > 700.0 else -700.0 if x < -700.0 else x
    t = x * 1.4426950408889634
    n = int(t + 0.5) if t >= 0.0 else int(t - 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = 1.0 / math.factorial(13)
    for i in range(12, 1, -1):
        p = p * r + 1.0 / math.factorial(i)
    p = p * r + 1.0
    p = p * r + 1.0
    return p * 2.0**n


def clip(z: float, c: float) -> float:
    """z within [-c, c]."""
    return c if z > c else -c if z < -c else z


def clipped_inverse(mean: float) -> float:
    """Shift of a unit normal whose mean clipped at 2 is `mean`, section 7.5."""
    for i in range(16):
        low, high = CLIPPED_MEANS[i], CLIPPED_MEANS[i + 1]
        if mean < high:
            return 0.25 * (i + (mean - low) / (high - low))
    return 4.0


class Tables:
    """Constants of one engine: exponents X, references, gross probability, count threshold (section 5)."""

    def __init__(self, gamma: float, min_slowdown: float) -> None:
        self.k = [d * 0.5 for d in DELTAS]
        self.exponent: list[float] = []
        self.reference: list[float] = []
        for k, w in zip(self.k, SHARES, strict=True):
            target = 2.0 * k * k * (2.0 * gamma / w)
            x = log(target + 1.0) + 1.0
            for _ in range(60):
                x = log(target + 1.0 + x)
            self.exponent.append(x)
            reference = x / (2.0 * k) - 1.166
            self.reference.append(reference if reference > 0.5 else 0.5)
        self.gross_probability = exp(log(0.03 / gamma) / 3.0)
        self.count_threshold = log(gamma / 0.03)
        self.min_log = log(1.0 + min_slowdown)
