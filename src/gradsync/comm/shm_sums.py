"""Sums over what several ranks have put into shared memory, by address: compiled where Numba knows the dtype."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gradsync.comm.shm_kernels import NUMBA_DTYPES, reduce_kernel

CHUNK = 32 * 1024  # values that torch sums at a time, so that they stay in the cache

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def sum_rows(rows: np.ndarray, dtype: torch.dtype, first: int, end: int, op: str, *, out: int = 0) -> None:
    """Reduce values ``first`` to ``end`` of the buffers at the addresses ``rows``, in that order.

    The result goes to the same place of the buffer at ``out``, or, with ``out`` 0, of every row. Sums of 16-bit floats
    are taken in 32 bits.
    """
    if dtype in NUMBA_DTYPES:
        reduce_kernel(dtype, op)(rows, out, first, end, out == 0)
        return
    targets = [out] if out else rows.tolist()
    for begin in range(first, end, CHUNK):
        width = min(CHUNK, end - begin)
        total: Tensor | None = None
        for row in rows.tolist():
            values = _tensor_at(row, begin, width, dtype)
            wide = values.float() if dtype in (torch.float16, torch.bfloat16) else values.clone()
            total = wide if total is None else _COMBINE[op](total, wide)
        assert total is not None, "there is at least one rank"
        for target in targets:
            _tensor_at(target, begin, width, dtype).copy_(total)


def _tensor_at(address: int, begin: int, numel: int, dtype: torch.dtype) -> Tensor:
    num_bytes = numel * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(address + begin * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)
