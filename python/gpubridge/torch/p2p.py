# SPDX-License-Identifier: Apache-2.0
"""Send and receive.  Always asynchronous: torch's blocking forms wait for the Work."""

from __future__ import annotations

import torch

from gpubridge import _abi
from gpubridge.torch.errors import DistValueError
from gpubridge.torch.issue import Issuer
from gpubridge.torch.tensors import Copy, move_code, source, target
from gpubridge.torch.untraced import untraced
from gpubridge.torch.work import BaseWork, RequestWork


@untraced
class PointToPoint(Issuer):
    """Mixin of the process group."""

    _rank: int
    _size: int

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> BaseWork:
        """Sends tensors[0] to a rank of the group; matched by (tag, order)."""
        t = self._only(tensors, dst_rank, "send")
        dense = source(t)
        slot = self._slot(_abi.SEND)
        op = slot.op
        op.dtype, per = move_code(t)
        op.root, op.tag = dst_rank, tag
        op.send = dense.data_ptr()
        op.count = dense.numel() * per
        return self._launch(_abi.SEND, slot, None, tensors, [dense], [], t.device)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> BaseWork:
        """Receives into tensors[0] from a rank of the group."""
        work = self._recv(tensors, src_rank, tag)
        if isinstance(work, RequestWork):
            work._source = src_rank
        return work

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> BaseWork:
        """Receives from whoever sends first; the Work's `source_rank()` tells who."""
        return self._recv(tensors, -1, tag)

    def _recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> BaseWork:
        t = self._only(tensors, max(src_rank, 0), "recv")
        copies: list[Copy] = []
        dense = target(t, copies)
        slot = self._slot(_abi.RECV)
        op = slot.op
        op.dtype, per = move_code(t)
        op.root, op.tag = src_rank, tag
        op.recv = dense.data_ptr()
        op.count = dense.numel() * per
        return self._launch(_abi.RECV, slot, None, tensors, [dense], copies, t.device, wants_source=src_rank < 0)

    def _only(self, tensors: list[torch.Tensor], peer: int, what: str) -> torch.Tensor:
        if len(tensors) != 1:
            raise DistValueError(f"{what}: one tensor per call, got a list of {len(tensors)}")
        if not 0 <= peer < self._size:
            raise DistValueError(f"{what}: rank {peer} is not in this group of {self._size}")
        return tensors[0]
