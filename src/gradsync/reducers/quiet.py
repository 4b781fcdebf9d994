"""Leaving quiet blocks out on the wire: see [Note: patience] in codecs/blockwise.py.

Of an embedding of 50,000 words a batch uses a few thousand, and its gradient is the last of a backward: what need not
be sent of it need not be waited for. Payloads stay as they are on both sides. A row is packed when it leaves, where it
gains by that and the transport sends no more than is said, and unpacked when it is there. Its first bytes tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradsync.codecs.base import Blocks
from gradsync.reducers.shards import HEAD_BYTES, Piece

WORTH_IT = 4  # a row is packed if that saves the fourth part of it, or more

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Packing:
    """How the rows of one shard are packed."""

    def __init__(self, pieces: Sequence[Piece], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._blocks = [(piece.at, blocks) for piece in pieces if (blocks := piece.blocks) is not None]

    def pack(self, row: Tensor) -> int:
        """Leave out what is quiet; returns how many bytes of the row are to be sent."""
        if not self._blocks:
            return self._row_bytes
        data = row.numpy()
        saved = sum(_num_quiet(data, at, blocks) * blocks.block_bytes for at, blocks in self._blocks)
        is_packed = saved * WORTH_IT >= self._row_bytes
        length = self._row_bytes - HEAD_BYTES - saved if is_packed else 0
        data[:HEAD_BYTES].view(np.int64)[0] = length
        if not is_packed:
            return self._row_bytes
        parts, done = [], HEAD_BYTES
        for at, blocks in self._blocks:
            first, end = at + blocks.start, at + blocks.end
            parts += [data[done:first], _rows(data, at, blocks)[_scales(data, at, blocks) != 0].reshape(-1)]
            done = end
        packed = np.concatenate([*parts, data[done:]])
        data[HEAD_BYTES : HEAD_BYTES + length] = packed
        return HEAD_BYTES + length

    def unpack(self, row: Tensor) -> None:
        """Put a row that has come back into its places."""
        if not self._blocks:
            return
        data = row.numpy()
        length = int(data[:HEAD_BYTES].view(np.int64)[0])
        if length == 0:
            return
        packed: Bytes = data[HEAD_BYTES : HEAD_BYTES + length].copy()
        taken, done = 0, HEAD_BYTES
        for at, blocks in self._blocks:
            first, end = at + blocks.start, at + blocks.end
            data[done:first] = packed[taken : taken + first - done]
            taken += first - done
            busy, rows = _scales(data, at, blocks) != 0, _rows(data, at, blocks)
            size = int(np.count_nonzero(busy)) * blocks.block_bytes
            if taken + size > length:
                break
            rows[busy] = packed[taken : taken + size].reshape(-1, blocks.block_bytes)
            rows[~busy] = 0
            taken, done = taken + size, end
        if length - taken != self._row_bytes - done:
            raise ValueError(f"a packed row of {length} bytes is not what its scales say it is.")
        data[done:] = packed[taken:]


def _num_quiet(data: Bytes, at: int, blocks: Blocks) -> int:
    return blocks.num_blocks - int(np.count_nonzero(_scales(data, at, blocks)))


def _scales(data: Bytes, at: int, blocks: Blocks) -> np.ndarray[tuple[int], np.dtype[np.floating]]:
    size = blocks.num_blocks * blocks.scale_bytes
    return data[at : at + size].view(np.float32 if blocks.scale_bytes == 4 else np.float64)


def _rows(data: Bytes, at: int, blocks: Blocks) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return data[at + blocks.start : at + blocks.end].reshape(-1, blocks.block_bytes)
