"""Memory that the ranks of one host share.

A segment is an anonymous file (``memfd``): it has no name in any file system, so nobody else can attach to it, and
nothing is left behind when its last process is gone, however that went. The other ranks reach it through the maker's
entry in ``/proc``, which the kernel opens to the same user only. And it does not count against a container's small
``/dev/shm``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.large_pages import map_shared, use_large_pages
from gradsync.comm.objects import broadcast_object

PAGE_BYTES = mmap.PAGESIZE
# Parts that lie a multiple of this apart confuse a core that walks them together: measured, 15 times slower.
ALIASING_BYTES = 1 << 28


def host_identity() -> list[str]:
    """What two processes have in common when they can share memory, and can talk as one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")] if boot.exists() else ["", ""]
    return [boot.read_text().strip() if boot.exists() else "", *spaces]


class Segment:
    """One part a rank, each a whole number of pages, in one mapping that all ranks have. Made by :func:`share`."""

    def __init__(self, mapping: Any, num_ranks: int, bytes_per_rank: int) -> None:
        self._mapping = mapping
        self.num_ranks = num_ranks
        self.bytes_per_rank = bytes_per_rank
        self.address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()

    def address_of(self, rank: int) -> int:
        return self.address + rank * self.bytes_per_rank

    def view(self, rank: int, numel: int, dtype: torch.dtype, *, offset_bytes: int = 0) -> Tensor:
        """A rank's part as a flat tensor. The mapping lives as long as any view of it."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        offset = rank * self.bytes_per_rank + offset_bytes
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)

    def use_large_pages(self) -> None:
        """Put it on large pages where that can be. By then all ranks have written to it, each to its own part."""
        use_large_pages(self.address, self.num_ranks * self.bytes_per_rank)

    def views(self, numel: int, dtype: torch.dtype, *, offset_bytes: int = 0) -> Sequence[Tensor]:
        return [self.view(rank, numel, dtype, offset_bytes=offset_bytes) for rank in range(self.num_ranks)]


def share(comm: Communicator, num_bytes: int) -> Segment:
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
        maker, number = broadcast_object(comm, [os.getpid(), descriptor], src=0)
        if comm.rank != 0:
            try:
                descriptor = os.open(f"/proc/{maker}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                comm.barrier()  # the maker has died meanwhile, and this says so better
                raise
        mapping = map_shared(descriptor, total)
        comm.barrier()  # the maker's descriptor must stay until all have opened it
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return Segment(mapping, comm.world_size, bytes_per_rank)
