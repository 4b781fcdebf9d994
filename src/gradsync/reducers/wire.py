"""The rows of bytes that one bucket's payloads travel in."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.codecs.base import Codec, Payload
from gradsync.comm import large_pages
from gradsync.comm.base import Communicator
from gradsync.reducers.quiet import Packing
from gradsync.reducers.shards import Shards


class Wire:
    """What one bucket needs on its way, kept from step to step.

    Rows and payloads are cut once: to cut a tensor takes a microsecond or two, and several when the caches are cold.
    """

    def __init__(self, codecs: dict[str, Codec], shards: Shards, num_rows: int, device: torch.device) -> None:
        numel = num_rows * shards.row_bytes
        given = large_pages.zeros(numel, torch.uint8, device).view(num_rows, -1)
        # A single row is added up on the way, and comes back where it was.
        got = given if num_rows == 1 else large_pages.zeros(numel, torch.uint8, device).view(num_rows, -1)
        self.codecs = codecs  # of the slots that are not bundled
        self.shards = shards
        self.packings = [Packing(pieces if given.is_cpu else (), shards.row_bytes) for pieces in shards.rows]
        self.given = given  # a row for each rank: what this rank sends, and afterwards everyone's answers
        self.got = got
        self.answer = torch.zeros_like(given[0])
        self.bytes_given = (len(given) - 1) * shards.row_bytes  # at the last step, to all others together
        self.rows_given, self.rows_got = given.unbind(), got.unbind()
        self._payloads: dict[int, list[Payload]] = {}  # of the rows that it was asked about, by their address

    def payloads(self, row: Tensor, shard: int) -> list[Payload]:
        """The pieces of a shard in a row, which is always of that shard."""
        found = self._payloads.get(row.data_ptr())
        if found is None:
            found = self._payloads[row.data_ptr()] = [piece.payload(row) for piece in self.shards.rows[shard]]
        return found

    def pack(self, comm: Communicator) -> list[int] | None:
        """Make what is given as short as it can be; returns how many bytes of each row count, if not all do."""
        if not comm.sends_used_only:
            return None
        used = [0] * comm.world_size
        for rank in range(comm.world_size):
            if rank != comm.rank:
                used[rank] = self.packings[rank % len(self.packings)].pack(self.rows_given[rank])
        self.bytes_given = sum(used)
        return used
