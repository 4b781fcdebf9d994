"""Removing the zero blocks of a row and restoring them, in one compiled call each.

The caller, reducers/compressed/zero_blocks.py, explains what for.
All lengths and offsets are multiples of 8 bytes, so a row is copied in words of 8 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import numba, without_dispatch
from gradsync.kernels.block_ops import fill, inlined
from gradsync.kernels.pointers import get, pointer, put

WORD = 8
FIELDS = 5  # of a piece: offset of its scales, number of blocks, bytes per scale, offset of its blocks, bytes per block


@inlined
def _is_zero(scales: int, index: int, item: int) -> Any:
    """Whether a scale is 0; it is never -0.0."""
    if item == 4:
        return get(pointer(scales, np.int32), index) == np.int32(0)
    return get(pointer(scales, np.int64), index) == 0


@inlined
def _copy_words(to: int, start: int, num_bytes: int) -> None:
    """Copy words in ascending order: the regions may overlap if ``to`` is before ``start``."""
    there, here = pointer(to, np.int64), pointer(start, np.int64)
    for i in range(num_bytes // WORD):
        put(there, i, get(here, i))


@numba.njit("i8(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _elide(row: int, row_bytes: int, pieces: int, num_pieces: int, min_saved_part: int) -> int:
    table, header = pointer(pieces, np.int64), pointer(row, np.int64)
    saved = 0
    for piece in range(0, num_pieces * FIELDS, FIELDS):
        scales, item, size = row + get(table, piece), get(table, piece + 2), get(table, piece + 4)
        for block in range(get(table, piece + 1)):
            saved += size if _is_zero(scales, block, item) else 0
    put(header, 0, 0)
    if saved * min_saved_part < row_bytes:
        return row_bytes
    copied = end = WORD  # how far the row is read, and written
    for piece in range(0, num_pieces * FIELDS, FIELDS):
        at, count, item = get(table, piece), get(table, piece + 1), get(table, piece + 2)
        start, size = get(table, piece + 3), get(table, piece + 4)
        scales = row + end + at - copied  # where they are copied to: their old place may be overwritten with blocks
        _copy_words(row + end, row + copied, start - copied)
        end += start - copied
        for block in range(count):
            if not _is_zero(scales, block, item):
                _copy_words(row + end, row + start + block * size, size)
                end += size
        copied = start + count * size
    _copy_words(row + end, row + copied, row_bytes - copied)
    end += row_bytes - copied
    put(header, 0, end - WORD)
    return end


@numba.njit("b1(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _restore(row: int, row_bytes: int, pieces: int, num_pieces: int, scratch: int) -> bool:
    table, length = pointer(pieces, np.int64), get(pointer(row, np.int64), 0)
    if length < 0 or length > row_bytes - WORD:
        return False
    _copy_words(scratch, row + WORD, length)
    read, copied = 0, WORD
    for piece in range(0, num_pieces * FIELDS, FIELDS):
        scales, count, item = row + get(table, piece), get(table, piece + 1), get(table, piece + 2)
        start, size = get(table, piece + 3), get(table, piece + 4)
        if read + start - copied > length:
            return False
        _copy_words(row + copied, scratch + read, start - copied)
        read += start - copied
        for block in range(count):
            if _is_zero(scales, block, item):
                fill(pointer(row + start + block * size, np.int64), 0, size // WORD)
                continue
            if read + size > length:
                return False
            _copy_words(row + start + block * size, scratch + read, size)
            read += size
        copied = start + count * size
    if length - read != row_bytes - copied:
        return False
    _copy_words(row + copied, scratch + read, length - read)
    return True


# (row, its bytes, table of pieces, their number, n: at least 1/n of the row must be saved) -> the bytes to send
elide = without_dispatch(_elide)
# (row, its bytes, table of pieces, their number, scratch for a row) -> whether the row fits its header and its scales
restore = without_dispatch(_restore)
