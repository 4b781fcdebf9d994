"""The send and receive buffers of one bucket: a row of bytes for each rank, which holds the payloads of one shard."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.codecs.base import Codec, Payload, compute_dtype
from gradsync.comm import hugepages
from gradsync.comm.base import Communicator
from gradsync.reducers.compressed.shards import Piece, Shards
from gradsync.reducers.compressed.zero_blocks import ZeroBlockElision
from gradsync.reducers.spikes import peak_in_table, peak_magnitude, peak_on_device, table_entry


class PayloadRows:
    """The buffers of one bucket, reused in every step.

    Views of rows and payloads are made once: a view costs a microsecond or two, and more when the caches are cold.
    """

    def __init__(self, codecs: dict[str, Codec], shards: Shards, num_rows: int, device: torch.device) -> None:
        numel = num_rows * shards.row_bytes
        send = hugepages.zeros(numel, torch.uint8, device).view(num_rows, -1)
        # A single row is all-reduced in place.
        recv = send if num_rows == 1 else hugepages.zeros(numel, torch.uint8, device).view(num_rows, -1)
        self.codecs = codecs  # of all slots but the small parameters
        self.shards = shards
        self.elisions = [ZeroBlockElision(pieces if send.is_cpu else (), shards.row_bytes) for pieces in shards.pieces]
        self.send = send  # a row for each rank; in the second stage it receives the reduced shards
        self.recv = recv
        self.reduced = torch.zeros_like(send[0])  # this rank's shard, reduced and encoded
        self.last_bytes_sent = (len(send) - 1) * shards.row_bytes  # in the last step's first stage, to all other ranks
        self.send_rows, self.recv_rows = send.unbind(), recv.unbind()
        self._magnitude_tables: dict[int, tuple[array[int], list[Piece]]] = {}  # by the row's address
        self._payloads: dict[int, list[Payload]] = {}  # by the row's address

    def payloads(self, row: Tensor, shard: int) -> list[Payload]:
        """The payloads of a shard's pieces in a row. A row always holds the same shard."""
        found = self._payloads.get(row.data_ptr())
        if found is None:
            found = self._payloads[row.data_ptr()] = [piece.payload(row) for piece in self.shards.pieces[shard]]
        return found

    def peak_magnitude(self, rows: Sequence[tuple[Tensor, int]]) -> float | Tensor | None:
        """The largest magnitude in some rows, each with its shard. See [Note: spikes] in reducers/spikes.py.

        A tensor if the rows are on a GPU; None if they have no magnitudes there.
        """
        if not self.send.is_cpu:
            pairs = [(piece, row) for row, shard in rows for piece in self.shards.pieces[shard]]
            return peak_on_device([view for pair in pairs if (view := _magnitudes(*pair)) is not None])
        peak = 0.0
        for row, shard in rows:
            fixed = self._magnitude_tables.get(row.data_ptr())
            if fixed is None:
                fixed = self._magnitude_tables[row.data_ptr()] = self._fixed_magnitudes(row, shard)
            table, others = fixed
            peak = max(peak, peak_in_table(table))
            if others:
                peak = max(
                    peak, peak_magnitude([view for piece in others if (view := _magnitudes(piece, row)) is not None])
                )
        return peak

    def _fixed_magnitudes(self, row: Tensor, shard: int) -> tuple[array[int], list[Piece]]:
        """The table of a row's magnitudes at fixed addresses, and the pieces whose magnitudes move at each step."""
        table, others = array("q"), []
        for piece in self.shards.pieces[shard]:
            if piece.codec.moves_magnitudes:
                others.append(piece)
            elif (view := _magnitudes(piece, row)) is not None:
                entry = table_entry(view)
                if entry is None:
                    others.append(piece)
                else:
                    table.extend(entry)
        return table, others

    def elide_zero_blocks(self, comm: Communicator) -> list[int] | None:
        """Remove the zero blocks of all rows to send; returns the bytes to send of each, None if always all are."""
        if not comm.sends_used_only:
            return None
        used = [0] * comm.world_size
        for rank in range(comm.world_size):
            if rank != comm.rank:
                used[rank] = self.elisions[rank % len(self.elisions)].elide(self.send_rows[rank])
        self.last_bytes_sent = sum(used)
        return used


def _magnitudes(piece: Piece, row: Tensor) -> Tensor | None:
    return piece.codec.magnitudes(piece.payload(row), piece.end - piece.first, compute_dtype(piece.flat.dtype))
