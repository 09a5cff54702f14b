# SPDX-License-Identifier: Apache-2.0
"""The collectives, under every name torch 2.6 to 2.15 calls them by.

Each method reads torch's arguments, checks them, and fills an op; issue.py does the rest.  They are plain Python
functions: the C++ trampoline ignores anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpubridge import _abi
from gpubridge.torch.errors import DistValueError
from gpubridge.torch.issue import GRADIENT, Issuer, Slot
from gpubridge.torch.sparse import all_reduce_sparse
from gpubridge.torch.tensors import (
    Copy,
    factor_of,
    flat_source,
    flat_target,
    move_code,
    reduce_code,
    same_kind,
    source,
    target,
)
from gpubridge.torch.untraced import untraced
from gpubridge.torch.work import BaseWork

Tensors = list[torch.Tensor]
_PREMUL = _abi.PREMUL_SUM


def _one(tensors: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    if len(tensors) != 1:
        raise DistValueError(
            f"{what}: one tensor per rank, got a list of {len(tensors)} (one process drives one device)"
        )
    return tensors[0]


def _apart(reads: torch.Tensor, writes: torch.Tensor) -> torch.Tensor:
    """`reads`, or a copy of it when `writes` overlaps it."""
    a, b = reads.data_ptr(), writes.data_ptr()
    if a < b + writes.numel() * writes.element_size() and b < a + reads.numel() * reads.element_size():
        return reads.clone()
    return reads


def _dense(t: torch.Tensor) -> torch.Tensor:
    """t, which must be dense memory.

    Raises:
        DistValueError: it is a strided view, or no plain memory.
    """
    if source(t) is not t:
        raise DistValueError(f"a gradient of shape {tuple(t.shape)}, strides {t.stride()} is not dense: .contiguous()")
    return t


def _even(sizes: Sequence[int]) -> bool:
    return all(size == sizes[0] for size in sizes)


@untraced
class Collectives(Issuer):
    """Mixin of the process group."""

    _rank: int
    _size: int

    # -- reductions

    def _set_reduction(self, slot: Slot, t: torch.Tensor, opts: Any, what: str) -> None:
        op = slot.op
        op.dtype = reduce_code(t, what)
        if opts is None:
            op.reduce_op = _abi.SUM
            return
        reduce_op = opts.reduceOp
        op.reduce_op = number = reduce_op.op.value
        if number == _PREMUL:
            op.factor = factor_of(reduce_op)

    def allreduce(self, tensors: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """tensors: [t], reduced in place on all ranks."""
        t = _one(tensors, "all_reduce")
        if t.layout is torch.sparse_coo:
            return all_reduce_sparse(self, t, opts)
        copies: list[Copy] = []
        dense = target(t, copies, keep_content=True)
        slot = self._slot(_abi.ALL_REDUCE)
        self._set_reduction(slot, t, opts, "all_reduce")
        op = slot.op
        op.send = op.recv = dense.data_ptr()
        op.count = dense.numel()
        return self._launch(_abi.ALL_REDUCE, slot, opts, tensors, [dense], copies, t.device)

    def reduce_gradients(
        self, t: torch.Tensor, *, compress: bool = True, residual: torch.Tensor | None = None
    ) -> BaseWork:
        """all_reduce with AVG, in place, asynchronous, with a say in compression that torch's call does not have.

        Args:
            t: dense, any float dtype.
            compress: False: never, whatever the group's settings say; equal on all ranks.
            residual: float32, as many elements as t, on its device: error feedback's memory of this rank.  What this
                rank encodes has the residual added first, which afterwards holds what the encoding lost, also that of
                results that are encoded once more (three or more islands).
        """
        slot = self._slot(GRADIENT + _abi.ALL_REDUCE)
        op = slot.op
        op.dtype, op.reduce_op = reduce_code(t, "all_reduce"), _abi.AVG
        op.send = op.recv = _dense(t).data_ptr()
        op.count = t.numel()
        slot.set_compression(compress, residual, t.numel())
        return self._launch(GRADIENT + _abi.ALL_REDUCE, slot, None, [t], [t, residual], [], t.device)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """tensors: each is reduced in place; one Work for all."""
        return self._together([self.allreduce([t], opts) for t in tensors])

    def reduce(self, tensors: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """tensors: [t]; the root's is replaced by the result, the others stay."""
        t = _one(tensors, "reduce")
        root = opts.rootRank
        copies: list[Copy] = []
        dense = target(t, copies, keep_content=True) if root == self._rank else source(t)
        slot = self._slot(_abi.REDUCE)
        self._set_reduction(slot, t, opts, "reduce")
        op = slot.op
        op.root = root
        op.send = dense.data_ptr()
        op.recv = dense.data_ptr() if root == self._rank else None
        op.count = dense.numel()
        return self._launch(_abi.REDUCE, slot, opts, tensors, [dense], copies, t.device)

    def reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None, **_: Any) -> BaseWork:
        """outputs: [out]; input_lists: [[one tensor per rank]], whose sizes may differ."""
        works = []
        for out, inputs in zip(outputs, input_lists, strict=True):
            self._check_list(inputs, out, "reduce_scatter", own=out.numel())
            copies: list[Copy] = []
            dense = target(out, copies)
            flat = _apart(flat_source(inputs), dense) if len(outputs) == 1 else flat_source(inputs)
            works.append(self._reduce_scatter(out, dense, copies, flat, [t.numel() for t in inputs], opts))
        return self._together(works)

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None, **_: Any) -> BaseWork:
        """out[n], tensor[n * size]: rank r gets the reduction of block r."""
        if tensor.numel() != out.numel() * self._size or tensor.dtype != out.dtype:
            raise DistValueError(
                f"reduce_scatter: the input must hold {self._size} blocks like the output, got {tuple(tensor.shape)} "
                f"{tensor.dtype} for an output of {tuple(out.shape)} {out.dtype}"
            )
        copies: list[Copy] = []
        dense = target(out, copies)
        return self._reduce_scatter(out, dense, copies, _apart(source(tensor), dense), [], opts)

    def _reduce_scatter(
        self,
        out: torch.Tensor,
        dense: torch.Tensor,
        copies: list[Copy],
        flat: torch.Tensor,
        sizes: list[int],
        opts: Any,
    ) -> BaseWork:
        slot = self._slot(_abi.REDUCE_SCATTER)
        self._set_reduction(slot, out, opts, "reduce_scatter")
        op = slot.op
        if _even(sizes):
            slot.set_counts(None, None)
            op.count = dense.numel()
        else:
            slot.set_counts(sizes, None)
            op.count = sum(sizes)  # what all ranks agree on
        op.send = flat.data_ptr()
        op.recv = dense.data_ptr()
        return self._launch(_abi.REDUCE_SCATTER, slot, opts, [out], [flat, dense], copies, out.device)

    def reduce_scatter_gradients(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        reduce_op: Any,
        *,
        compress: bool = True,
        residual: torch.Tensor | None = None,
    ) -> BaseWork:
        """reduce_scatter_tensor, asynchronous, with a say in compression; see reduce_gradients.

        Args:
            out: dense [n]; tensor: dense [n * size].
            reduce_op: a torch.distributed.ReduceOp.
            residual: float32, as many elements as `tensor`.
        """
        if tensor.numel() != out.numel() * self._size or tensor.dtype != out.dtype:
            raise DistValueError(
                f"reduce_scatter: the input must hold {self._size} blocks like the output, got {tuple(tensor.shape)} "
                f"{tensor.dtype} for an output of {tuple(out.shape)} {out.dtype}"
            )
        opts = torch.distributed.ReduceScatterOptions()
        opts.reduceOp = reduce_op
        slot = self._slot(GRADIENT + _abi.REDUCE_SCATTER)
        self._set_reduction(slot, out, opts, "reduce_scatter")
        slot.set_counts(None, None)
        op = slot.op
        op.send, op.recv, op.count = _dense(tensor).data_ptr(), _dense(out).data_ptr(), out.numel()
        slot.set_compression(compress, residual, tensor.numel())
        return self._launch(GRADIENT + _abi.REDUCE_SCATTER, slot, None, [out], [tensor, out, residual], [], out.device)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **_: Any
    ) -> BaseWork:
        return self._together([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    # -- movement

    def broadcast(self, tensors: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """tensors: [t], the same as the root's afterwards."""
        t = _one(tensors, "broadcast")
        root = opts.rootRank
        copies: list[Copy] = []
        dense = source(t) if root == self._rank else target(t, copies)
        slot = self._slot(_abi.BROADCAST)
        op = slot.op
        op.dtype, per = move_code(t)
        op.root = root
        op.send = dense.data_ptr() if root == self._rank else None
        op.recv = dense.data_ptr()
        op.count = dense.numel() * per
        return self._launch(_abi.BROADCAST, slot, opts, tensors, [dense], copies, t.device)

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """output_lists: one list per input, of one tensor per rank, whose sizes may differ."""
        return self._together([self._all_gather(outs, t, opts) for outs, t in zip(output_lists, inputs, strict=True)])

    def _all_gather(self, outputs: Tensors, t: torch.Tensor, opts: Any) -> BaseWork:
        self._check_list(outputs, t, "all_gather", own=t.numel())
        copies: list[Copy] = []
        flat = flat_target(outputs, copies)
        return self._gather_into(flat, copies, t, [o.numel() for o in outputs], outputs, opts)

    def _gather_into(
        self, flat: torch.Tensor, copies: list[Copy], t: torch.Tensor, sizes: list[int], results: Tensors, opts: Any
    ) -> BaseWork:
        slot = self._slot(_abi.ALL_GATHER)
        op = slot.op
        op.dtype, per = move_code(t)
        dense = source(t)
        if _even(sizes):
            slot.set_counts(None, None)
            op.count = dense.numel() * per
        else:
            slot.set_counts(None, [size * per for size in sizes])
            op.count = sum(sizes) * per  # what all ranks agree on
        op.send = dense.data_ptr()
        op.recv = flat.data_ptr()
        return self._launch(_abi.ALL_GATHER, slot, opts, results, [dense, flat], copies, t.device)

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None, **_: Any) -> BaseWork:
        """out[n * size], tensor[n]; tensor may be its own slot of out."""
        if out.numel() != tensor.numel() * self._size or tensor.dtype != out.dtype:
            raise DistValueError(
                f"all_gather: the output must hold {self._size} blocks like the input, got {tuple(out.shape)} "
                f"{out.dtype} for an input of {tuple(tensor.shape)} {tensor.dtype}"
            )
        copies: list[Copy] = []
        return self._gather_into(target(out, copies), copies, tensor, [], [out], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        return self._together([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """output_lists[rank][i] gets input i of that rank."""
        return self._together(
            [self._all_gather([outs[i] for outs in output_lists], t, opts) for i, t in enumerate(inputs)]
        )

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """output_lists: [[one tensor per rank]] on the root, [] elsewhere; inputs: [t]."""
        t = _one(inputs, "gather")
        copies: list[Copy] = []
        flat: torch.Tensor | None = None
        results: Tensors = []
        if opts.rootRank == self._rank:
            results = output_lists[0] if output_lists else []
            self._check_list(results, t, "gather", own=t.numel(), even=True)
            flat = flat_target(results, copies)
        return self._gather(flat, copies, t, results, opts)

    def gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None, **_: Any) -> BaseWork:
        """out[n * size] is used on the root only; tensor[n]."""
        copies: list[Copy] = []
        flat: torch.Tensor | None = None
        if opts.rootRank == self._rank:
            if out.numel() != tensor.numel() * self._size or out.dtype != tensor.dtype:
                raise DistValueError(
                    f"gather: the output must hold {self._size} blocks like the input, got {tuple(out.shape)} "
                    f"{out.dtype} for an input of {tuple(tensor.shape)} {tensor.dtype}"
                )
            flat = target(out, copies)
        return self._gather(flat, copies, tensor, [out] if flat is not None else [], opts)

    def _gather(
        self, flat: torch.Tensor | None, copies: list[Copy], t: torch.Tensor, results: Tensors, opts: Any
    ) -> BaseWork:
        slot = self._slot(_abi.GATHER)
        op = slot.op
        op.dtype, per = move_code(t)
        op.root = opts.rootRank
        dense = source(t) if flat is None else _apart(source(t), flat)
        op.send = dense.data_ptr()
        op.recv = flat.data_ptr() if flat is not None else None
        op.count = dense.numel() * per
        return self._launch(_abi.GATHER, slot, opts, results, [dense, flat], copies, t.device)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None, **_: Any) -> BaseWork:
        """outputs: [out]; input_lists: [[one tensor per rank]] on the root, [] elsewhere."""
        out = _one(outputs, "scatter")
        copies: list[Copy] = []
        dense = target(out, copies)
        slot = self._slot(_abi.SCATTER)
        op = slot.op
        op.dtype, per = move_code(out)
        op.root = opts.rootRank
        op.recv = dense.data_ptr()
        op.count = dense.numel() * per
        flat: torch.Tensor | None = None
        if opts.rootRank == self._rank:
            inputs = input_lists[0] if input_lists else []
            self._check_list(inputs, out, "scatter", own=out.numel(), even=True)
            flat = _apart(flat_source(inputs), dense)
        op.send = flat.data_ptr() if flat is not None else None
        return self._launch(_abi.SCATTER, slot, opts, outputs, [flat, dense], copies, out.device)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **_: Any) -> BaseWork:
        """outputs, inputs: one tensor per rank, of any sizes that match pairwise."""
        for tensors in (outputs, inputs):
            self._check_list(tensors, outputs[0], "all_to_all")
        copies: list[Copy] = []
        flat = flat_target(outputs, copies)
        sizes = [t.numel() for t in inputs], [t.numel() for t in outputs]
        return self._all_to_all(flat, copies, flat_source(inputs), *sizes, outputs, opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
        **_: Any,
    ) -> BaseWork:
        """Splits count rows of dimension 0, one per rank; none given: equal blocks."""
        if tensor.dtype != out.dtype:
            raise DistValueError(f"all_to_all: input {tensor.dtype} and output {out.dtype} differ")
        copies: list[Copy] = []
        send, recv = self._blocks(tensor, input_splits, "input"), self._blocks(out, output_splits, "output")
        return self._all_to_all(target(out, copies), copies, source(tensor), send, recv, [out], opts)

    def _blocks(self, t: torch.Tensor, splits: Sequence[int] | None, which: str) -> list[int]:
        """Elements per rank."""
        rows = t.shape[0] if t.dim() else 1
        if not splits:
            if rows % self._size:
                raise DistValueError(
                    f"all_to_all: {rows} {which} rows do not divide among {self._size} ranks: pass split sizes"
                )
            return [t.numel() // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise DistValueError(
                f"all_to_all: {which} splits {list(splits)} must be {self._size} counts that sum to its {rows} rows"
            )
        row = t.numel() // rows if rows else 0
        return [split * row for split in splits]

    def _all_to_all(
        self,
        dense: torch.Tensor,
        copies: list[Copy],
        flat: torch.Tensor,
        send: list[int],
        recv: list[int],
        results: Tensors,
        opts: Any,
    ) -> BaseWork:
        flat = _apart(flat, dense)
        slot = self._slot(_abi.ALL_TO_ALL)
        op = slot.op
        op.dtype, per = move_code(flat)
        # Always with counts, even when they are equal here: another rank's need not be.
        slot.set_counts([n * per for n in send], [n * per for n in recv])
        op.send, op.recv, op.count = flat.data_ptr(), dense.data_ptr(), 0
        return self._launch(_abi.ALL_TO_ALL, slot, opts, results, [flat, dense], copies, dense.device)

    def barrier(self, opts: Any = None, **_: Any) -> BaseWork:
        slot = self._slot(_abi.BARRIER)
        return self._launch(_abi.BARRIER, slot, opts, [], [], [], torch.device("cpu"))

    def _check_list(
        self, tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str, own: int | None = None, even: bool = False
    ) -> None:
        if len(tensors) != self._size:
            raise DistValueError(f"{what}: the list must hold one tensor per rank ({self._size}), got {len(tensors)}")
        same_kind([like, *tensors], what)
        if own is not None and tensors[self._rank].numel() != own:
            raise DistValueError(
                f"{what}: entry {self._rank} of the list has {tensors[self._rank].numel()} elements, this rank's own "
                f"tensor {own}"
            )
        if even and not _even([t.numel() for t in tensors]):
            raise DistValueError(
                f"{what}: all tensors of the list must have one size, got {[t.numel() for t in tensors]}"
            )

    # -- the older and the private names of the same operations

    def _allgather_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None, **kw: Any) -> BaseWork:
        return self.all_gather_single(out, tensor, opts)

    def _reduce_scatter_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None, **kw: Any) -> BaseWork:
        return self.reduce_scatter_single(out, tensor, opts)

    def alltoall_base(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
        **kw: Any,
    ) -> BaseWork:
        return self.all_to_all_single(out, tensor, output_splits, input_splits, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **kw: Any
    ) -> BaseWork:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, **kw: Any
    ) -> BaseWork:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def gather_into_tensor(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None, **kw: Any) -> BaseWork:
        return self.gather_single(out, tensor, opts)
