# SPDX-License-Identifier: Apache-2.0
"""all_reduce of sparse COO tensors (embeddings with sparse=True): every rank gets all entries and adds them up.

Made of dense operations of the group, one after the other; it blocks the caller until the result is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpubridge import _abi
from gpubridge.torch.errors import DistUnsupportedError
from gpubridge.torch.work import DoneWork

if TYPE_CHECKING:
    from gpubridge.torch.collectives import Collectives


def all_reduce_sparse(group: Collectives, t: torch.Tensor, opts: Any) -> DoneWork:
    """t: the same shape and number of sparse dimensions on all ranks; any number of entries.

    Entries are added in the order of ranks, so all ranks get the same bits.

    Raises:
        DistUnsupportedError: another reduce op than SUM or AVG.
    """
    kind = _abi.SUM if opts is None else opts.reduceOp.op.value
    if kind not in (_abi.SUM, _abi.AVG):
        raise DistUnsupportedError("all_reduce of sparse tensors knows SUM and AVG only: call .to_dense() first")
    mine = t.detach().coalesce()
    counts = torch.zeros(group._size, dtype=torch.int64, device=t.device)
    group.all_gather_single(counts, torch.tensor([mine._nnz()], device=t.device)).wait()
    # One row per entry, so that the ranks' rows lie one after the other.
    places, values = mine.indices().t().contiguous(), mine.values().contiguous()
    all_places = [places.new_empty((n, places.shape[1])) for n in counts.tolist()]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in counts.tolist()]
    group.allgather([all_places], [places]).wait()
    group.allgather([all_values], [values]).wait()
    total = torch.sparse_coo_tensor(torch.cat(all_places).t(), torch.cat(all_values), t.shape).coalesce()
    with torch.no_grad():
        t.copy_(total if kind == _abi.SUM else total / group._size)
    return DoneWork([t])
