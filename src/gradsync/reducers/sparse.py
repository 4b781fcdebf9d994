"""Sparse gradients (``Embedding(sparse=True)``): every rank gathers the rows of all ranks, and sums them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.buckets.slot import SparseSlot
from gradsync.comm.base import Communicator

UNUSED = -1  # instead of a row count: this rank has no gradient for the parameter


def sum_sparse(slots: Sequence[SparseSlot], factor: float, comm: Communicator) -> None:
    """Overwrite each ``.grad`` with the sum over ranks of ``factor * grad``; None where no rank has one. Blocks.

    All ranks sum the same rows in the same order, so they get the same bits.
    """
    if not slots:
        return
    for slot in slots:
        slot.collect()
    given = [None if slot.param.grad is None else slot.param.grad.coalesce() for slot in slots]
    counts = torch.tensor([UNUSED if grad is None else int(grad._nnz()) for grad in given])
    everyone = torch.empty(comm.world_size, len(slots), dtype=torch.int64)
    comm.all_gather(counts, out=everyone).wait()
    for slot, grad, per_rank in zip(slots, given, everyone.T.tolist(), strict=True):
        if max(per_rank) == UNUSED:
            slot.param.grad = None
            continue
        slot.param.grad = _sum_rows(slot, grad, per_rank, factor, comm)
    for slot in slots:
        slot.unstash()


def _sum_rows(slot: SparseSlot, grad: Tensor | None, per_rank: list[int], factor: float, comm: Communicator) -> Tensor:
    param = slot.param
    most = max(per_rank)
    sparse_dims = grad.sparse_dim() if grad is not None else 1
    row_shape = param.shape[sparse_dims:]
    indices = torch.zeros(sparse_dims, most, dtype=torch.int64, device=param.device)
    values = torch.zeros(most, *row_shape, dtype=param.dtype, device=param.device)
    if grad is not None and factor != 0.0:  # a rank of weight zero contributes zeros, whatever it computed
        indices[:, : grad._nnz()] = grad.indices()
        torch.mul(grad.values(), factor, out=values[: grad._nnz()])
    all_indices = torch.empty(comm.world_size, *indices.shape, dtype=torch.int64, device=param.device)
    all_values = torch.empty(comm.world_size, *values.shape, dtype=param.dtype, device=param.device)
    works = [comm.all_gather(indices, out=all_indices), comm.all_gather(values, out=all_values)]
    for work in works:
        work.wait()
    rows = [(rank, count) for rank, count in enumerate(per_rank) if count > 0]
    if not rows:
        return torch.sparse_coo_tensor(indices[:, :0], values[:0], param.shape, is_coalesced=True)
    return torch.sparse_coo_tensor(
        torch.cat([all_indices[rank][:, :count] for rank, count in rows], dim=1),
        torch.cat([all_values[rank][:count] for rank, count in rows]),
        param.shape,
        check_invariants=False,
    ).coalesce()
