"""Memory that the ranks of one host share: segments, and the registry of the buffers that were reserved in them.

A segment is an anonymous file (``memfd``): it has no name in any file system, and nothing is left behind when its last
process is gone, however that process ended. The other ranks open it through the creating rank's entry in ``/proc``,
which the kernel allows to the same user only. It does not count against a container's small ``/dev/shm``.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.hugepages import map_shared, use_huge_pages
from gradsync.comm.objects import broadcast_object

PAGE_BYTES = mmap.PAGESIZE
# Reading several parts at once is 15 times slower (measured) if their addresses differ by a multiple of this.
ALIASING_BYTES = 1 << 28


def host_identity() -> list[str]:
    """Boot id, pid and net namespaces: equal in processes that can share memory and have one network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")] if boot.exists() else ["", ""]
    return [boot.read_text().strip() if boot.exists() else "", *spaces]


class Segment:
    """One mapping that all ranks have, with a part of whole pages for each rank. Made by :func:`create_segment`."""

    def __init__(self, mapping: Any, num_ranks: int, bytes_per_rank: int) -> None:
        self._mapping = mapping
        self.num_ranks = num_ranks
        self.bytes_per_rank = bytes_per_rank
        self.address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()

    def address_of(self, rank: int) -> int:
        """Where the part of ``rank`` begins in this process."""
        return self.address + rank * self.bytes_per_rank

    def view(self, rank: int, numel: int, dtype: torch.dtype, *, offset_bytes: int = 0) -> Tensor:
        """A rank's part as a flat tensor. The mapping lives as long as any view of it."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        offset = rank * self.bytes_per_rank + offset_bytes
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)

    def use_huge_pages(self) -> None:
        """Put it on huge pages where the system allows it. All ranks must have written to their own parts before."""
        use_huge_pages(self.address, self.num_ranks * self.bytes_per_rank)

    def views(self, numel: int, dtype: torch.dtype, *, offset_bytes: int = 0) -> Sequence[Tensor]:
        """All ranks' parts as flat tensors, in rank order."""
        return [self.view(rank, numel, dtype, offset_bytes=offset_bytes) for rank in range(self.num_ranks)]


def create_segment(comm: Communicator, num_bytes: int) -> Segment:
    """Make a zeroed segment with ``num_bytes`` for each rank. Blocks: every rank must call it."""
    bytes_per_rank = -(-max(1, num_bytes) // PAGE_BYTES) * PAGE_BYTES
    if bytes_per_rank % ALIASING_BYTES == 0:
        bytes_per_rank += PAGE_BYTES
    total = bytes_per_rank * comm.world_size
    descriptor = -1
    try:
        if comm.rank == 0:
            descriptor = os.memfd_create("gradsync", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, total)
        creator, number = broadcast_object(comm, [os.getpid(), descriptor], src=0)
        if comm.rank != 0:
            try:
                descriptor = os.open(f"/proc/{creator}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                comm.barrier()  # the creator has died meanwhile; the barrier raises an error that names it
                raise
        mapping = map_shared(descriptor, total)
        comm.barrier()  # the creator's descriptor must stay open until all ranks have opened it
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return Segment(mapping, comm.world_size, bytes_per_rank)


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """This rank's tensor in shared memory, and the addresses of all ranks' tensors."""

    tensor: Tensor
    addresses: np.ndarray


class SharedBuffers:
    """The buffers that were reserved in shared memory and are still referenced, by address."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[Segment, int]] = {}  # with the buffer's size in bytes

    def reserve(self, comm: Communicator, numel: int, dtype: torch.dtype) -> tuple[Tensor, Segment]:
        """A flat tensor in shared memory. Its pages are allocated at the first write. Blocks: all ranks call it."""
        segment = create_segment(comm, numel * dtype.itemsize)
        buffer = segment.view(comm.rank, numel, dtype)
        key = buffer.data_ptr()
        self._segments[key] = (segment, buffer.nbytes)
        weakref.finalize(buffer, self._segments.pop, key, None)
        return buffer, segment

    def is_start_of_buffer(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer, or begins where one begins."""
        return tensor.data_ptr() in self._segments

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of a buffer."""
        return tensor.untyped_storage().data_ptr() in self._segments

    def shared_tensor(self, tensor: Tensor, what: str) -> SharedTensor:
        """A part of a buffer, with its counterparts on all ranks. ``what``: the call, for the error."""
        start = tensor.untyped_storage().data_ptr()
        segment, num_bytes = self._segments.get(start, (None, 0))
        at = tensor.data_ptr() - start
        if segment is None or at + tensor.nbytes > num_bytes:
            raise ValueError(f"{what} takes what allocate() gave, or a part of it; got another tensor.")
        return SharedTensor(tensor, np.array([segment.address_of(rank) + at for rank in range(segment.num_ranks)]))
