# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients for DistributedDataParallel: a communication hook on the group's own codec.

    dist.init_process_group("gpubridge", pg_options={"compression": "fp8"})
    model = DistributedDataParallel(network)
    state = gpubridge.torch.ddp.compress_gradients(model)                          # biases and norms stay exact
    state = gpubridge.torch.ddp.compress_gradients(model, error_feedback=True)     # for mxfp4

Without the hook a compressed group compresses whole buckets; with it the small and the one-dimensional parameters in
them travel apart, and what a codec lost can be fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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


@dataclass
class _Plan:
    """What the hook does with one bucket, worked out once per set of parameters."""

    key: tuple[str, ...]
    ranges: list[slice]
    all_excluded: bool


class GradientCompression:
    """State of the hook; one per model.

    Attributes:
        exclusion: which parameters travel uncompressed.
        guard: looks at the norm of the reduced gradients.
        residuals: None without error feedback.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        group: GpuBridgeGroup,
        error_feedback: bool,
        exclude: Rule,
        guard_steps: int,
    ) -> None:
        self._model, self._group = model, group
        self.exclusion = Exclusion(model.module.named_parameters(), exclude)
        self.guard = Guard(group.codec, guard_steps)
        self.residuals = Residuals() if error_feedback else None
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and whose they are; every rank saves its own."""
        residuals = self.residuals.state_dict() if self.residuals is not None else None
        return {"rank": self._group.rank(), "size": self._group.size(), "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with saved residuals.

        Raises:
            ValueError: they are another rank's, or of a group of another size.
        """
        check_owner(state, self._group.rank(), self._group.size())
        if self.residuals is not None and state["residuals"] is not None:
            self.residuals.load_state_dict(state["residuals"])

    def _plan(self, bucket: dist.GradBucket) -> _Plan:
        parameters = bucket.parameters()
        identity = tuple(id(p) for p in parameters)
        plan = self._plans.get(identity)
        if plan is None:
            buffer = bucket.buffer()
            start = int(buffer.storage_offset())
            places = [(int(g.storage_offset()) - start, g.numel()) for g in bucket.gradients()]
            ranges = self.exclusion.ranges(parameters, places)
            names = tuple(self.exclusion.names.get(i, str(n)) for n, i in enumerate(identity))
            plan = _Plan(names, ranges, all(self.exclusion.holds(p) for p in parameters))
            self._plans[identity] = plan
        return plan

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook: averages the bucket over the group."""
        if getattr(self._model, "_divide_by_initial_world_size", True) is False:
            raise DistUnsupportedError(
                "compressed gradients: join(divide_by_initial_world_size=False) is not supported, because a hook "
                "cannot know how many ranks still have input; use the default, True"
            )
        if bucket.index() == 0 and not self.guard.end_step() and self.residuals is not None:
            self.residuals.drop()
        plan, flat, group = self._plan(bucket), bucket.buffer(), self._group
        if plan.all_excluded:
            return self._finish(group.reduce_gradients(flat, compress=False), flat, None, [])
        residual = None
        if self.residuals is not None:
            residual = self.residuals.get(bucket.index(), plan.key, flat)
        apart = None
        if plan.ranges:
            small = take_out(flat, plan.ranges)
            apart = (group.reduce_gradients(small, compress=False), small)
        work = group.reduce_gradients(flat, residual=residual)
        return self._finish(work, flat, apart, plan.ranges)

    def _finish(
        self, work: Any, flat: torch.Tensor, apart: tuple[Any, torch.Tensor] | None, ranges: list[slice]
    ) -> torch.futures.Future[torch.Tensor]:
        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()  # raises what the reduction raised
            if apart is not None:
                apart[0].wait()
                put_back(flat, ranges, apart[1])
            self.guard.add(flat)
            return flat

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
        return future


def _hook(state: GradientCompression, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


# DDP compares the annotations themselves, and this module's are strings.
_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def compress_gradients(
    model: DistributedDataParallel,
    *,
    error_feedback: bool = False,
    exclude: Rule = small_or_flat,
    guard_steps: int = 3,
) -> GradientCompression:
    """Registers the hook on a model whose group has a codec; call it alike on all ranks, before the first backward.

    Args:
        error_feedback: add what quantisation lost to the next step's gradients.  It costs 4 bytes per parameter.
        exclude: (name, parameter) -> True for parameters to leave uncompressed; by default those of fewer than two
            dimensions or below 4 KiB.
        guard_steps: warn when the reduced gradients were 0 or not finite so many steps in a row.

    Returns:
        The hook's state, whose state_dict belongs into checkpoints when error feedback is on.

    Raises:
        ValueError: the model's group is not of the gpubridge backend.
    """
    group: Any = model.process_group
    if not isinstance(group, GpuBridgeGroup):
        raise DistValueError(
            f"compress_gradients: the model's process group is {type(group).__name__}; make it with the gpubridge "
            "backend"
        )
    state = GradientCompression(model, group, error_feedback, exclude, guard_steps)
    model.register_comm_hook(state, _hook)
    return state
