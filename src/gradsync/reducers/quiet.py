"""Leaving quiet blocks out on the wire: see [Note: patience] in codecs/blockwise.py.

Of an embedding of 50,000 words a batch uses a few thousand, and its gradient is the last of a backward: what need not
be sent of it need not be waited for. Payloads stay as they are on both sides. A row is packed when it leaves, where it
gains by that and the transport sends no more than is said, and unpacked when it is there. Its first bytes tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import Any

import numpy as np
from torch import Tensor

from gradsync.codecs.base import Blocks
from gradsync.reducers.shards import HEAD_BYTES, Piece

WORTH_IT = 4  # a row is packed if that saves the fourth part of it, or more

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Scales = np.ndarray[tuple[int], np.dtype[np.floating[Any]]]


class Packing:
    """How the rows of one shard are packed. A row's head is the length of what is packed in it; 0: nothing is."""

    def __init__(self, pieces: Sequence[Piece], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._blocks = [(piece.at, blocks) for piece in pieces if (blocks := piece.blocks) is not None]

    def pack(self, row: Tensor) -> int:
        """Leave out what is quiet; returns how many bytes of the row are to be sent."""
        if not self._blocks:
            return self._row_bytes
        from gradsync.codecs.kernels.zeros import count_zeros  # Numba takes a second to import

        start, saved = row.data_ptr(), 0
        for at, blocks in self._blocks:
            saved += count_zeros(start + at, blocks.num_blocks, blocks.scale_bytes) * blocks.block_bytes
        head = c_int64.from_address(start)
        head.value = 0
        if saved * WORTH_IT < self._row_bytes:
            return self._row_bytes
        data: Bytes = row.numpy()
        parts, done = [], HEAD_BYTES
        for at, blocks in self._blocks:
            busy = _scales(data, at, blocks) != 0
            parts += [data[done : at + blocks.start], _rows(data, at, blocks)[busy].reshape(-1)]
            done = at + blocks.end
        packed = np.concatenate([*parts, data[done:]])
        data[HEAD_BYTES : HEAD_BYTES + len(packed)] = packed
        head.value = len(packed)
        return HEAD_BYTES + len(packed)

    def unpack(self, row: Tensor) -> None:
        """Put a row that has come back into its places."""
        length = c_int64.from_address(row.data_ptr()).value if self._blocks else 0
        if length == 0:
            return
        data: Bytes = row.numpy()
        packed: Bytes = data[HEAD_BYTES : HEAD_BYTES + length].copy()
        taken, done = 0, HEAD_BYTES
        for at, blocks in self._blocks:
            between = at + blocks.start - done
            data[done : at + blocks.start] = packed[taken : taken + between]
            taken += between
            busy, rows = _scales(data, at, blocks) != 0, _rows(data, at, blocks)
            size = int(np.count_nonzero(busy)) * blocks.block_bytes
            if taken + size > length:
                break
            rows[busy] = packed[taken : taken + size].reshape(-1, blocks.block_bytes)
            rows[~busy] = 0
            taken, done = taken + size, at + blocks.end
        if length - taken != self._row_bytes - done:
            raise ValueError(f"a packed row of {length} bytes is not what its scales say it is.")
        data[done:] = packed[taken:]


def _scales(data: Bytes, at: int, blocks: Blocks) -> Scales:
    size = blocks.num_blocks * blocks.scale_bytes
    return data[at : at + size].view(np.float32 if blocks.scale_bytes == 4 else np.float64)


def _rows(data: Bytes, at: int, blocks: Blocks) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return data[at + blocks.start : at + blocks.end].reshape(-1, blocks.block_bytes)
