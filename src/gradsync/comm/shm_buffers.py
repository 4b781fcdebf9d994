"""The buffers that ranks of one host have in shared memory, and where everybody's part of one is."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.segment import Segment, share


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor in shared memory: this rank's, and the addresses of everybody's."""

    tensor: Tensor
    addresses: np.ndarray


class Buffers:
    """What was reserved in shared memory and is still held by somebody, by its address."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[Segment, int]] = {}  # and the buffer's bytes

    def reserve(self, comm: Communicator, numel: int, dtype: torch.dtype) -> tuple[Tensor, Segment]:
        """A flat tensor in shared memory, which takes none before it is written to. Blocks: all ranks call it."""
        segment = share(comm, numel * dtype.itemsize)
        buffer = segment.view(comm.rank, numel, dtype)
        key = buffer.data_ptr()
        self._segments[key] = (segment, buffer.nbytes)
        weakref.finalize(buffer, self._segments.pop, key, None)
        return buffer, segment

    def begins(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of them, or the beginning of one."""
        return tensor.data_ptr() in self._segments

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of one."""
        return tensor.untyped_storage().data_ptr() in self._segments

    def rows_of(self, tensor: Tensor, what: str) -> Rows:
        """Everybody's part of a buffer that a tensor is this rank's of; ``what`` for is said if it is none."""
        start = tensor.untyped_storage().data_ptr()
        segment, num_bytes = self._segments.get(start, (None, 0))
        at = tensor.data_ptr() - start
        if segment is None or at + tensor.nbytes > num_bytes:
            raise ValueError(f"{what} takes what allocate() gave, or a part of it; got another tensor.")
        return Rows(tensor, np.array([segment.address_of(rank) + at for rank in range(segment.num_ranks)]))
