# SPDX-License-Identifier: Apache-2.0
"""The specified result of every reduction, written from the promise rather than from the C code.

Inside an island the ranks' values are folded in rank order, then the islands' partial sums in island order (islands are
numbered by their lowest rank), in an accumulator: float32 for 16-bit floats and float32, float64 for float64, the type
itself for integers (modular), logic for bool, real pairs for complex.  PREMUL_SUM multiplies each input by the factor
in the accumulator.  AVG divides once at the end, integers truncating toward zero.  One rounding to the type comes last;
MIN and MAX propagate NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
ACCUMULATOR = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def values(dtype: torch.dtype, count: int, rank: int, seed: int, gentle: bool = False) -> torch.Tensor:
    """[count] values that depend on rank, position and seed; `gentle`: near one, so that products stay finite."""
    i = torch.arange(count, dtype=torch.int64)
    mixed = (i * 2654435761 + rank * 40503 + seed * 69069 + 12345) % 1048573
    mixed = (mixed * mixed + i * 31 + rank) % 65521
    if dtype == torch.bool:
        return mixed % 3 == 0
    if dtype in COMPLEX:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        halves = values(part, 2 * count, rank, seed, gentle)
        return torch.view_as_complex(halves.view(count, 2))
    if dtype.is_floating_point:
        unit = mixed.double() / 65521.0
        x = 0.75 + unit / 2 if gentle else (unit - 0.5) * torch.pow(2.0, (i % 9 - 4).double())
        return x.to(dtype)
    if gentle:
        return (mixed % 5 + 1).to(dtype)
    return (mixed * 7919 - 200000000).to(dtype)


def reduced(inputs: list[torch.Tensor], islands: list[list[int]], op: str, factor: float = 1.0) -> torch.Tensor:
    """The exact result of reducing inputs[rank] over the islands (lists of ranks)."""
    dtype = inputs[0].dtype
    if dtype in COMPLEX:
        pairs = [torch.view_as_real(x.contiguous()) for x in inputs]
        return torch.view_as_complex(reduced(pairs, islands, op, factor).contiguous())
    acc = ACCUMULATOR.get(dtype, dtype)
    wide = [x.to(acc) for x in inputs]
    if op == "PREMUL_SUM":
        f = torch.tensor(factor, dtype=torch.float64).to(acc)
        wide = [x * f for x in wide]
    fold = folder(op, dtype)
    partials = []
    for ranks in islands:
        partial = wide[ranks[0]]
        for rank in ranks[1:]:
            partial = fold(partial, wide[rank])
        partials.append(partial)
    total = partials[0]
    for partial in partials[1:]:
        total = fold(total, partial)
    if op == "AVG":
        count = len(inputs)
        total = total / count if dtype.is_floating_point else torch.div(total, count, rounding_mode="trunc").to(acc)
    return total.to(dtype)


def folder(op: str, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The binary operation in the accumulator."""
    if dtype == torch.bool:
        return {
            "SUM": torch.logical_or,
            "MAX": torch.logical_or,
            "BOR": torch.logical_or,
            "PRODUCT": torch.logical_and,
            "MIN": torch.logical_and,
            "BAND": torch.logical_and,
            "BXOR": torch.logical_xor,
        }[op]
    functions: dict[str, Any] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PREMUL_SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    return functions[op]


def operations(dtype: torch.dtype) -> list[str]:
    """The reduce ops that are defined for a dtype."""
    if dtype == torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    if dtype in COMPLEX:
        return ["SUM", "AVG", "PREMUL_SUM"]
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"]
    return ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def dense(t: torch.Tensor) -> torch.Tensor:
    """[numel] elements in order with stride 1 (one element with a stride of 2 counts as contiguous in torch)."""
    return t.reshape(-1).clone(memory_format=torch.contiguous_format)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(dense(a).view(torch.uint8), dense(b).view(torch.uint8))


def difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where two tensors differ first, for messages."""
    g, w = dense(got), dense(want)
    if g.shape != w.shape or g.dtype != w.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    size = g.element_size()
    wrong = (g.view(torch.uint8).view(-1, size) != w.view(torch.uint8).view(-1, size)).any(1).nonzero().view(-1)
    if not len(wrong):
        return "equal"
    at = int(wrong[0])
    return f"{len(wrong)} of {len(g)} differ, first at {at}: got {g[at].item()!r}, want {w[at].item()!r}"
