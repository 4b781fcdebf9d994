"""Leaving quiet blocks out on the wire: see [Note: patience] in codecs/blockwise.py.

Of an embedding of 50,000 words a batch uses a few thousand, and its gradient is the last of a backward: what need not
be sent of it need not be waited for. Payloads stay as they are on both sides. A row is packed when it leaves, where it
gains by that and the transport sends no more than is said, and unpacked when it is there. Its first bytes tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gradsync.codecs.base import Blocks
from gradsync.reducers.shards import HEAD_BYTES, Piece

WORTH_IT = 4  # a row is packed if that saves the fourth part of it, or more

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Scales = np.ndarray[tuple[int], np.dtype[np.floating[Any]]]


class _View(NamedTuple):
    """A row as numpy sees it."""

    data: Bytes
    length: np.ndarray[tuple[int], np.dtype[np.int64]]  # of what is packed; 0: nothing is
    scales: list[Scales]  # of each piece that has blocks


class Packing:
    """How the rows of one shard are packed."""

    def __init__(self, pieces: Sequence[Piece], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._blocks = [(piece.at, blocks) for piece in pieces if (blocks := piece.blocks) is not None]
        self._views: dict[int, _View] = {}  # of the rows that it was asked about, by their address

    def pack(self, row: Tensor) -> int:
        """Leave out what is quiet; returns how many bytes of the row are to be sent."""
        if not self._blocks:
            return self._row_bytes
        data, packed_length, all_scales = self._view(row)
        saved = 0
        for (_, blocks), scales in zip(self._blocks, all_scales, strict=True):
            saved += (blocks.num_blocks - int(np.count_nonzero(scales))) * blocks.block_bytes
        if saved * WORTH_IT < self._row_bytes:
            packed_length[0] = 0
            return self._row_bytes
        parts, done = [], HEAD_BYTES
        for (at, blocks), scales in zip(self._blocks, all_scales, strict=True):
            parts += [data[done : at + blocks.start], _rows(data, at, blocks)[scales != 0].reshape(-1)]
            done = at + blocks.end
        packed = np.concatenate([*parts, data[done:]])
        data[HEAD_BYTES : HEAD_BYTES + len(packed)] = packed
        packed_length[0] = len(packed)
        return HEAD_BYTES + len(packed)

    def unpack(self, row: Tensor) -> None:
        """Put a row that has come back into its places."""
        if not self._blocks:
            return
        data, packed_length, all_scales = self._view(row)
        length = int(packed_length[0])
        if length == 0:
            return
        packed: Bytes = data[HEAD_BYTES : HEAD_BYTES + length].copy()
        taken, done = 0, HEAD_BYTES
        for (at, blocks), scales in zip(self._blocks, all_scales, strict=True):
            between = at + blocks.start - done
            data[done : at + blocks.start] = packed[taken : taken + between]
            taken += between
            busy, rows = scales != 0, _rows(data, at, blocks)
            size = int(np.count_nonzero(busy)) * blocks.block_bytes
            if taken + size > length:
                break
            rows[busy] = packed[taken : taken + size].reshape(-1, blocks.block_bytes)
            rows[~busy] = 0
            taken, done = taken + size, at + blocks.end
        if length - taken != self._row_bytes - done:
            raise ValueError(f"a packed row of {length} bytes is not what its scales say it is.")
        data[done:] = packed[taken:]

    def _view(self, row: Tensor) -> _View:
        found = self._views.get(row.data_ptr())
        if found is None:
            data = row.numpy()
            scales = [_scales(data, at, blocks) for at, blocks in self._blocks]
            found = self._views[row.data_ptr()] = _View(data, data[:HEAD_BYTES].view(np.int64), scales)
        return found


def _scales(data: Bytes, at: int, blocks: Blocks) -> Scales:
    size = blocks.num_blocks * blocks.scale_bytes
    return data[at : at + size].view(np.float32 if blocks.scale_bytes == 4 else np.float64)


def _rows(data: Bytes, at: int, blocks: Blocks) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return data[at + blocks.start : at + blocks.end].reshape(-1, blocks.block_bytes)
