# SPDX-License-Identifier: Apache-2.0
"""What the DDP and the FSDP2 helper share: which parameters travel uncompressed, error feedback's residuals, the guard.

Nothing here talks to the network.  All of it is per process; what must be equal on all ranks (which parameters are
excluded) follows from names, shapes and dtypes, which are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from gpubridge.torch.errors import DistValueError

log = logging.getLogger("gpubridge")

MIN_BYTES = 4096
"""Parameters smaller than this travel uncompressed by default, as do all of fewer than two dimensions."""

Rule = Callable[[str, torch.nn.Parameter], bool]
"""(name, parameter) -> True when its gradient must travel uncompressed; must answer alike on all ranks."""


def small_or_flat(name: str, parameter: torch.nn.Parameter) -> bool:
    """The default rule: biases, norms and whatever is below 4 KiB."""
    return parameter.dim() < 2 or parameter.numel() * parameter.element_size() < MIN_BYTES


class Exclusion:
    """The parameters that a rule keeps uncompressed; says so once."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], rule: Rule) -> None:
        rows = [(name, p) for name, p in named if p.requires_grad]
        self.names = {id(p): name for name, p in rows}
        excluded = [(name, p) for name, p in rows if rule(name, p)]
        self._ids = {id(p) for _, p in excluded}
        self.excluded_names = [name for name, _ in excluded]
        numbers = sum(p.numel() for _, p in excluded), sum(p.numel() for _, p in rows)
        log.info(
            "uncompressed are %d of %d parameters, %d of %d values: %s",
            len(excluded),
            len(rows),
            *numbers,
            ", ".join(self.excluded_names) or "none",
        )

    def holds(self, parameter: Any) -> bool:
        return id(parameter) in self._ids

    def ranges(self, parameters: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[slice]:
        """Slices of a flat buffer that are excluded, neighbours joined.

        Args:
            parameters: in any order.
            places: (first element, elements) of each in the buffer.
        """
        found: list[slice] = []
        held = (place for p, place in zip(parameters, places, strict=True) if self.holds(p))
        for start, count in sorted(held):
            if found and found[-1].stop == start:
                found[-1] = slice(found[-1].start, start + count)
            else:
                found.append(slice(start, start + count))
        return found


class Residuals:
    """Error feedback's memory: what quantisation lost of each buffer so far, float32 like the buffer, own to this rank.

    A buffer is known by its key (the parameters it holds) and its size.  When a place that had one key comes with
    another (DDP rebuilds its buckets after the first step), everything is forgotten, with one line in the log: which
    rank owns which element has changed, so old residuals belong to other elements.
    """

    def __init__(self) -> None:
        self._keys: dict[Hashable, tuple[Hashable, int]] = {}
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._loaded: dict[tuple[Hashable, int], torch.Tensor] = {}
        self.resets = 0

    def get(self, place: Hashable, key: Hashable, like: torch.Tensor) -> torch.Tensor:
        """The residual of the buffer `like` (any float dtype): float32, as many elements, on its device; new: zeros.

        Args:
            place: where the buffer stands, e.g. the bucket's index.
            key: what it holds.
        """
        whole = (key, like.numel())
        before = self._keys.get(place, whole)
        if before != whole:
            log.info(
                "error feedback: buffer %s has %d elements of other parameters now (%d before): residuals start anew",
                place,
                like.numel(),
                before[1],
            )
            self._keys.clear()
            self._kept.clear()
            self.resets += 1
        self._keys[place] = whole
        kept = self._kept.get(place)
        if kept is None:
            kept = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
            saved = self._loaded.pop(whole, None)
            if saved is not None:
                kept.copy_(saved)
            self._kept[place] = kept
        return kept

    def drop(self) -> None:
        """Zeroes all residuals, e.g. after a step whose gradients were not finite; their buffers stay."""
        self._loaded.clear()
        for residual in self._kept.values():
            residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the residuals on the CPU with what they belong to; differs from rank to rank."""
        return {
            "keys": [self._keys[place][0] for place in self._kept],
            "residuals": [residual.detach().cpu().clone() for residual in self._kept.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` of the same rank gave.  A buffer gets its own when it first comes with the key
        it was saved with: with DDP, whose first step has other buckets than the later ones, that is the second step.
        """
        self._keys.clear()
        self._kept.clear()
        pairs = zip(state["keys"], state["residuals"], strict=True)
        self._loaded = {(_hashable(key), residual.numel()): residual for key, residual in pairs}


def check_owner(state: dict[str, Any], rank: int, size: int) -> None:
    """Residuals belong to one rank: `state` is what a helper's state_dict gave.

    Raises:
        ValueError: they are another rank's, or of a group of another size.
    """
    if (state["rank"], state["size"]) != (rank, size):
        raise DistValueError(
            f"residuals of rank {state['rank']} of {state['size']} do not fit rank {rank} of {size}: load what this "
            "rank saved, or leave them out, which costs a few steps of feedback"
        )


def _hashable(key: Any) -> Hashable:
    """A key as it was before a file format turned tuples into lists."""
    return tuple(_hashable(part) for part in key) if isinstance(key, (list, tuple)) else key


class Guard:
    """Warns when the reduced gradients are zero or not finite several steps in a row, and names the codec.

    Norms arrive buffer by buffer and are looked at when the next step begins, so a GPU is not waited for.
    """

    def __init__(self, codec: str, patience: int) -> None:
        if patience < 1:
            raise ValueError(f"the guard's patience is a number of steps >= 1, got {patience}")
        self.codec, self.patience = codec, patience
        self._norms: list[tuple[torch.Tensor, Any]] = []
        self.bad_steps = 0
        self.last_norm = math.nan

    def add(self, reduced: torch.Tensor) -> None:
        """Takes note of a reduced buffer (flat, any float dtype); it may be changed after this call."""
        wide = torch.float64 if reduced.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(reduced.detach(), dtype=wide)
        event = None
        if norm.is_cuda:
            pinned = torch.empty((), dtype=wide, pin_memory=True)
            norm = pinned.copy_(norm, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._norms.append((norm, event))

    def local_norm(self) -> float:
        """Norm of all buffers since the last call; nan when there were none.  Waits for a GPU's last buffer only."""
        norms, self._norms = self._norms, []
        for _, event in norms:
            if event is not None:
                event.synchronize()
        return math.hypot(*(float(norm) for norm, _ in norms)) if norms else math.nan

    def judge(self, norm: float) -> bool:
        """Takes the norm of a step's gradients; False when it is not finite.

        A float32 buffer whose sum of squares overflows counts as not finite, too: clipping and optimizers fail on it
        alike.
        """
        self.last_norm = norm
        if math.isfinite(norm) and norm > 0:
            self.bad_steps = 0
            return True
        self.bad_steps += 1
        if self.bad_steps % self.patience == 0:
            log.warning(
                "the norm of the reduced gradients was %s for %d steps in a row with codec %s: look at the loss and "
                "the learning rate first, then try compression=none",
                "0" if norm == 0 else "not finite",
                self.bad_steps,
                self.codec,
            )
        return math.isfinite(norm)

    def end_step(self) -> bool:
        """Judges the buffers that came in since the last call; False when they were not finite."""
        return self.judge(self.local_norm()) if self._norms else True


def take_out(flat: torch.Tensor, ranges: Sequence[slice]) -> torch.Tensor:
    """Copies the ranges of the last dimension into one tensor and leaves zeros behind, so that they neither cost
    precision in a block that they share nor leave a residual.
    """
    small = torch.cat([flat[..., part] for part in ranges], dim=-1).contiguous()
    for part in ranges:
        flat[..., part].zero_()
    return small


def put_back(flat: torch.Tensor, ranges: Sequence[slice], small: torch.Tensor) -> None:
    """Writes what `take_out` gave (reduced meanwhile) where it came from."""
    at = 0
    for part in ranges:
        count = part.stop - part.start
        flat[..., part].copy_(small[..., at : at + count])
        at += count
