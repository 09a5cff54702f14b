# SPDX-License-Identifier: Apache-2.0
"""What the C library is told about tensors: dtype codes, addresses of dense memory, and the copies that odd layouts
need.

A *source* is memory that is read, a *target* memory that is written.  A tensor that is not dense in C order
(transposed, strided, expanded, channels_last, conjugated) is copied into a dense one; targets are copied back through
the strides when the operation is done, so results go by logical index whatever the layout on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpubridge import _abi
from gpubridge.torch.errors import DistUnsupportedError, DistValueError

Copy = tuple[torch.Tensor, torch.Tensor]
"""(user's tensor, dense result): to be copied when the operation is done."""

_NUMERIC = {
    torch.int8: _abi.I8,
    torch.uint8: _abi.U8,
    torch.int16: _abi.I16,
    torch.int32: _abi.I32,
    torch.int64: _abi.I64,
    torch.float16: _abi.F16,
    torch.bfloat16: _abi.BF16,
    torch.float32: _abi.F32,
    torch.float64: _abi.F64,
    torch.bool: _abi.BOOL,
    torch.complex64: _abi.C64,
    torch.complex128: _abi.C128,
    torch.uint16: _abi.U16,
    torch.uint32: _abi.U32,
    torch.uint64: _abi.U64,
}
CODE: dict[torch.dtype, int] = dict(_NUMERIC)
"""Code of the dtypes that can be reduced."""

# Moved as opaque bytes, never reduced.
_OPAQUE_NAMES = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex32",
    "bits8",
    "bits16",
)
OPAQUE: set[torch.dtype] = {getattr(torch, name) for name in _OPAQUE_NAMES if hasattr(torch, name)}


def check(t: torch.Tensor) -> None:
    """Refuses what has no plain memory.

    Raises:
        DistUnsupportedError: a sparse, meta or quantised tensor, or a dtype that cannot be moved.
    """
    if t.layout is not torch.strided:
        raise DistUnsupportedError(f"gpubridge moves strided tensors, got layout {t.layout}: call .to_dense() first")
    if t.device.type not in ("cpu", "cuda"):
        raise DistUnsupportedError(f"gpubridge moves cpu and cuda tensors, got one on device {t.device}")
    if t.dtype not in CODE and t.dtype not in OPAQUE:
        raise DistUnsupportedError(f"gpubridge cannot move dtype {t.dtype}: view it as another dtype first")


def move_code(t: torch.Tensor) -> tuple[int, int]:
    """(dtype code, elements of that code per element of t) for an operation that only moves data."""
    code = CODE.get(t.dtype)
    if code is not None:
        return code, 1
    check(t)
    return _abi.BYTE, t.element_size()


def reduce_code(t: torch.Tensor, what: str) -> int:
    """Dtype code for a reduction.

    Raises:
        DistUnsupportedError: the dtype can be moved but not reduced (fp8 and the like), or not even moved.
    """
    code = CODE.get(t.dtype)
    if code is None:
        check(t)
        raise DistUnsupportedError(f"{what}: {t.dtype} is moved but never reduced; convert it to a wider dtype first")
    return code


def is_plain(t: torch.Tensor) -> bool:
    """True when data_ptr() .. data_ptr() + numel * element_size is the tensor's content in order."""
    return t.is_contiguous() and not t.is_neg() and not t.is_conj()


def source(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor with the content of t: t itself where that is possible."""
    if t.layout is not torch.strided or not (t.is_cpu or t.is_cuda):
        check(t)
    if is_plain(t):
        return t
    return t.detach().resolve_conj().resolve_neg().contiguous()


def target(t: torch.Tensor, copies: list[Copy], keep_content: bool = False) -> torch.Tensor:
    """A dense tensor to write into; when it is not t itself, the copy back is appended to `copies`.

    Args:
        keep_content: the operation also reads it (in-place forms).

    Raises:
        DistValueError: several elements of t share memory, so there is no defined result.
    """
    if t.layout is not torch.strided or not (t.is_cpu or t.is_cuda):
        check(t)
    if is_plain(t):
        return t
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        raise DistValueError(
            f"the output of shape {tuple(t.shape)} is an expanded view whose elements share memory: pass .contiguous()"
        )
    dense = source(t) if keep_content else torch.empty(t.shape, dtype=t.dtype, device=t.device)
    copies.append((t, dense))
    return dense


def copy_back(copies: Sequence[Copy]) -> None:
    """Runs the copies that `target` asked for."""
    with torch.no_grad():
        for user, dense in copies:
            if user.numel():
                user.detach().copy_(dense.view(user.shape))


def _run_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A flat view of all tensors when they follow each other in one storage without gaps, else None."""
    first = tensors[0]
    expected = first.data_ptr()
    if not expected:
        return None
    storage = first.untyped_storage().data_ptr()
    for t in tensors:
        if not is_plain(t) or t.data_ptr() != expected or t.untyped_storage().data_ptr() != storage:
            return None
        expected += t.numel() * t.element_size()
    return first.detach().as_strided((sum(t.numel() for t in tensors),), (1,))


def flat_source(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor at whose address the contents of all tensors lie one after the other."""
    run = _run_of(tensors)
    if run is not None:
        return run
    return torch.cat([source(t).detach().reshape(-1) for t in tensors])


def flat_target(tensors: Sequence[torch.Tensor], copies: list[Copy]) -> torch.Tensor:
    """Like `flat_source` for memory that is written; copies back into the list where it is not one run."""
    run = _run_of(tensors)
    if run is not None:
        return run
    for t in tensors:
        target(t, [])  # refuses outputs whose elements share memory
    first = tensors[0]
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=first.dtype, device=first.device)
    parts = flat.split([t.numel() for t in tensors])
    copies.extend((t, part.view(t.shape)) for t, part in zip(tensors, parts, strict=True))
    return flat


def same_kind(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raises DistValueError unless all tensors have one dtype and one device."""
    first = tensors[0]
    for t in tensors:
        if t.dtype != first.dtype or t.device != first.device:
            raise DistValueError(
                f"{what}: all tensors must have one dtype and device, got {first.dtype} on {first.device} and "
                f"{t.dtype} on {t.device}"
            )


def factor_of(reduce_op: Any) -> float:
    """The factor of a PREMUL_SUM ReduceOp, given as a float or as a one-element tensor of any float dtype."""
    factor = reduce_op.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise DistValueError(f"PREMUL_SUM takes one factor, got a tensor of shape {tuple(factor.shape)}")
        factor = factor.item()
    return float(factor)


AfterOperation = Callable[[], None]
