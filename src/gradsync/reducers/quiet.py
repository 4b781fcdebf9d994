"""Leaving quiet blocks out on the wire: see [Note: patience] in codecs/blockwise.py.

Of an embedding of 50,000 words a batch uses a few thousand, and its gradient is the last of a backward: what need not
be sent of it need not be waited for. Payloads stay as they are on both sides. A row is packed when it leaves, where it
gains by that and the transport sends no more than is said, and unpacked when it is there. Its first bytes tell.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from gradsync.reducers.shards import Piece

WORTH_IT = 4  # a row is packed if that saves the fourth part of it, or more


class Packing:
    """How the rows of one shard are packed. A row's head is the length of what is packed in it; 0: nothing is."""

    def __init__(self, pieces: Sequence[Piece], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._table = array("q")  # see quiet_kernels.py
        for piece in pieces:
            if (blocks := piece.blocks) is not None:
                start = piece.at + blocks.start
                self._table.extend((piece.at, blocks.num_blocks, blocks.scale_bytes, start, blocks.block_bytes))
        self._room: Tensor | None = None  # for a row, from the first packed one on

    def pack(self, row: Tensor) -> int:
        """Leave out what is quiet; returns how many bytes of the row are to be sent."""
        if not self._table:
            return self._row_bytes
        from gradsync.reducers.quiet_kernels import FIELDS, pack  # Numba takes a second to import

        table, size = self._table.buffer_info()
        sent: int = pack(row.data_ptr(), self._row_bytes, table, size // FIELDS, WORTH_IT)
        return sent

    def unpack(self, row: Tensor) -> None:
        """Put a row that has come back into its places."""
        if not self._table or c_int64.from_address(row.data_ptr()).value == 0:
            return
        from gradsync.reducers.quiet_kernels import FIELDS, unpack

        if self._room is None:
            self._room = torch.empty_like(row)
        table, size = self._table.buffer_info()
        if not unpack(row.data_ptr(), self._row_bytes, table, size // FIELDS, self._room.data_ptr()):
            raise ValueError("a packed row is not what its head and its scales say it is.")
