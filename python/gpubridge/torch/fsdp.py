# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients for FSDP2 (`fully_shard`): its reduce-scatter on the group's own codec.

    dist.init_process_group("gpubridge", pg_options={"compression": "fp8"})
    ...
    fully_shard(model, mesh=mesh)
    state = gpubridge.torch.fsdp.compress_gradients(model)

Parameters are gathered uncompressed.  The all_reduce of hybrid sharding goes the group's way, without this module.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from gpubridge.torch.compression import (
    Exclusion,
    Guard,
    Residuals,
    Rule,
    check_owner,
    put_back,
    small_or_flat,
    take_out,
)
from gpubridge.torch.errors import DistUnsupportedError, DistValueError
from gpubridge.torch.group import GpuBridgeGroup


class ShardedGradientCompression:
    """Shared by the reduce-scatters of all modules of one model.

    Attributes:
        exclusion: which parameters travel uncompressed.
        guard: looks at the norm of the reduced gradients over all ranks; None until the first backward.
        residuals: None without error feedback.
    """

    def __init__(self, model: torch.nn.Module, error_feedback: bool, exclude: Rule, guard_steps: int) -> None:
        self.exclusion = Exclusion(model.named_parameters(), exclude)
        self.guard: Guard | None = None
        self.residuals = Residuals() if error_feedback else None
        self._guard_steps = guard_steps
        self._seen: set[int] = set()

    def begin(self, place: int, group: GpuBridgeGroup) -> Guard:
        """Called before each reduce-scatter: a module that comes again begins a new step, and the last one is judged.

        Every rank holds a shard of the gradients only, so the judgement takes an all_reduce of one number.
        """
        if self.guard is None:
            self.guard = Guard(group.codec, self._guard_steps)
        guard = self.guard
        if place in self._seen:
            self._seen.clear()
            square = torch.tensor([(norm := guard.local_norm()) * norm], dtype=torch.float64)
            group.allreduce([square]).wait()
            if not guard.judge(math.sqrt(square.item())) and self.residuals is not None:
                self.residuals.drop()
        self._seen.add(place)
        return guard

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and whose they are (rank and size of the job); every rank saves its own."""
        residuals = self.residuals.state_dict() if self.residuals is not None else None
        return {"rank": dist.get_rank(), "size": dist.get_world_size(), "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with saved residuals.

        Raises:
            ValueError: they are another rank's, or of a job of another size.
        """
        check_owner(state, dist.get_rank(), dist.get_world_size())
        if self.residuals is not None and state["residuals"] is not None:
            self.residuals.load_state_dict(state["residuals"])


class CompressedReduceScatter:
    """What FSDP2 calls for one module (the ReduceScatter interface of torch 2.9 and later)."""

    def __init__(self, state: ShardedGradientCompression, place: int, module: Any) -> None:
        self._state, self._place, self._module = state, place, module
        self._ranges: dict[int, list[slice]] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output_tensor[n], input_tensor[n * size]; done (GPU: in stream order) when it returns, async_op or not.

        Raises:
            ValueError: the mesh's group is not of the gpubridge backend.
        """
        if not isinstance(group, GpuBridgeGroup):
            raise DistValueError(
                f"compress_gradients: the mesh's process group is {type(group).__name__}; make it with the gpubridge "
                "backend"
            )
        state = self._state
        guard = state.begin(self._place, group)
        rows = input_tensor.view(group.size(), -1)
        ranges = self._ranges_of(rows.shape[1])
        residual = None
        if state.residuals is not None:
            residual = state.residuals.get(self._place, f"module {self._place}", input_tensor)
        if ranges == [slice(0, rows.shape[1])]:
            group.reduce_scatter_gradients(output_tensor, input_tensor, op, compress=False).wait()
        elif ranges:
            small = take_out(rows, ranges)
            got = torch.empty_like(small[0])
            apart = group.reduce_scatter_gradients(got, small, op, compress=False)
            group.reduce_scatter_gradients(output_tensor, input_tensor, op, residual=residual).wait()
            apart.wait()
            put_back(output_tensor, ranges, got)
        else:
            group.reduce_scatter_gradients(output_tensor, input_tensor, op, residual=residual).wait()
        guard.add(output_tensor)

    def _ranges_of(self, columns: int) -> list[slice]:
        """The excluded columns of the input seen as [ranks, columns], which hold each parameter's padded shard in turn.

        Parameters without a gradient are left out by FSDP2; when the sum does not fit, nothing is excluded.
        """
        known = self._ranges.get(columns)
        if known is None:
            known, at = [], 0
            parameters, places = [], []
            for p in _sharded_parameters(self._module):
                count = math.prod(p.padded_sharded_param_size)
                parameters.append(p.sharded_param)
                places.append((at, count))
                at += count
            if at == columns:
                known = self._state.exclusion.ranges(parameters, places)
            self._ranges[columns] = known
        return known


def _sharded_parameters(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [p for group in groups if group is not None for p in group.fsdp_params]


def compress_gradients(
    model: torch.nn.Module,
    *,
    error_feedback: bool = False,
    exclude: Rule = small_or_flat,
    guard_steps: int = 3,
) -> ShardedGradientCompression:
    """Replaces the reduce-scatter of every `fully_shard`ed module of `model`; call it alike on all ranks.

    Args:
        error_feedback: add what quantisation lost to the next step's gradients.  It costs 4 bytes per parameter, on
            every rank.
        exclude: (name, parameter) -> True for parameters to leave uncompressed; by default those of fewer than two
            dimensions or below 4 KiB.
        guard_steps: warn when the reduced gradients were 0 or not finite so many steps in a row.

    Returns:
        The state, whose state_dict belongs into every rank's own checkpoint when error feedback is on.

    Raises:
        ValueError: no module of the model is fully_shard'ed.
        RuntimeError: this torch's FSDP2 cannot take another reduce-scatter.
    """
    sharded = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    if not sharded:
        raise DistValueError("compress_gradients: call fully_shard on the model first")
    if not hasattr(sharded[0], "set_custom_reduce_scatter"):
        raise DistUnsupportedError(
            f"compress_gradients: FSDP2 of torch {torch.__version__} has no set_custom_reduce_scatter; use torch 2.9 "
            "or later, or set the group's compression alone, which then holds for every large gradient"
        )
    state = ShardedGradientCompression(model, error_feedback, exclude, guard_steps)
    for place, module in enumerate(sharded):
        custom: Any = module
        custom.set_custom_reduce_scatter(CompressedReduceScatter(state, place, module))
    return state
