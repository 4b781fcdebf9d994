"""Zero-block elision: blocks that are all zero are not sent. See [Note: zero-block elision] in codecs/blockwise.py.

A batch uses a few thousand rows of an embedding of 50,000 words, and the embedding's gradient is the last one of a
backward: nothing overlaps with it, so every byte less shortens the step. Payloads have the same layout on both sides.
Before a row is sent its zero blocks are removed, if that saves enough and the transport can send a part of a row; the
receiver restores them. The header of the row says whether blocks were removed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from gradsync.reducers.compressed.shards import Piece

MIN_SAVED_PART = 4  # zero blocks are removed if that saves 1/4 of the row, or more


class ZeroBlockElision:
    """Removes and restores the zero blocks of the rows of one shard.

    A row's header is the number of bytes that follow it after elision; 0 if nothing was removed.
    """

    def __init__(self, pieces: Sequence[Piece], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._table = array("q")  # see FIELDS in kernels/zero_blocks.py
        for piece in pieces:
            if (blocks := piece.blocks) is not None:
                start = piece.offset + blocks.start
                self._table.extend((piece.offset, blocks.num_blocks, blocks.scale_bytes, start, blocks.block_bytes))
        self._scratch: Tensor | None = None  # a row; allocated when the first one is restored

    def elide(self, row: Tensor) -> int:
        """Remove the zero blocks of a row in place; returns how many bytes of the row are to be sent."""
        if not self._table:
            return self._row_bytes
        from gradsync.kernels.zero_blocks import FIELDS, elide  # Numba takes a second to import

        table, size = self._table.buffer_info()
        sent: int = elide(row.data_ptr(), self._row_bytes, table, size // FIELDS, MIN_SAVED_PART)
        return sent

    def restore(self, row: Tensor) -> None:
        """Restore the zero blocks of a received row in place."""
        if not self._table or c_int64.from_address(row.data_ptr()).value == 0:
            return
        from gradsync.kernels.zero_blocks import FIELDS, restore

        if self._scratch is None:
            self._scratch = torch.empty_like(row)
        table, size = self._table.buffer_info()
        if not restore(row.data_ptr(), self._row_bytes, table, size // FIELDS, self._scratch.data_ptr()):
            raise ValueError(
                "expected a row whose length fits its header and its scales; got another. It was changed on the way."
            )
