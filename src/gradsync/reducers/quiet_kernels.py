"""Packing a row and unpacking it, in one compiled call each: see quiet.py.

All lengths and places are multiples of 8 bytes, so a row is moved in words of 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.codecs.kernels.lanes import get, pointer, put
from gradsync.codecs.kernels.moves import fill, inlined
from gradsync.compiled import numba, quick

WORD = 8
FIELDS = 5  # of a piece with blocks: where its scales are, how many, the size of one, where its blocks are, their size


@inlined
def _is_quiet(scales: int, index: int, item: int) -> Any:
    """Whether a scale is 0; it is never -0.0."""
    if item == 4:
        return get(pointer(scales, np.int32), index) == np.int32(0)
    return get(pointer(scales, np.int64), index) == 0


@inlined
def _move(to: int, start: int, num_bytes: int) -> None:
    """Copy words, first ones first: ``to`` may lie in front of ``start`` and reach into it."""
    there, here = pointer(to, np.int64), pointer(start, np.int64)
    for i in range(num_bytes // WORD):
        put(there, i, get(here, i))


@numba.njit("i8(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _pack(row: int, row_bytes: int, pieces: int, num_pieces: int, worth_it: int) -> int:
    table, head = pointer(pieces, np.int64), pointer(row, np.int64)
    saved = 0
    for piece in range(0, num_pieces * FIELDS, FIELDS):
        scales, item, size = row + get(table, piece), get(table, piece + 2), get(table, piece + 4)
        for block in range(get(table, piece + 1)):
            saved += size if _is_quiet(scales, block, item) else 0
    put(head, 0, 0)
    if saved * worth_it < row_bytes:
        return row_bytes
    done = end = WORD  # as far as the row is read, and written
    for piece in range(0, num_pieces * FIELDS, FIELDS):
        at, count, item = get(table, piece), get(table, piece + 1), get(table, piece + 2)
        start, size = get(table, piece + 3), get(table, piece + 4)
        scales = row + end + at - done  # as they are moved: where they were, blocks may be by and by
        _move(row + end, row + done, start - done)
        end += start - done
        for block in range(count):
            if not _is_quiet(scales, block, item):
                _move(row + end, row + start + block * size, size)
                end += size
        done = start + count * size
    _move(row + end, row + done, row_bytes - done)
    end += row_bytes - done
    put(head, 0, end - WORD)
    return end


@numba.njit("b1(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _unpack(row: int, row_bytes: int, pieces: int, num_pieces: int, room: int) -> bool:
    table, length = pointer(pieces, np.int64), get(pointer(row, np.int64), 0)
    if length < 0 or length > row_bytes - WORD:
        return False
    _move(room, row + WORD, length)
    taken, done = 0, WORD
    for piece in range(0, num_pieces * FIELDS, FIELDS):
        scales, count, item = row + get(table, piece), get(table, piece + 1), get(table, piece + 2)
        start, size = get(table, piece + 3), get(table, piece + 4)
        if taken + start - done > length:
            return False
        _move(row + done, room + taken, start - done)
        taken += start - done
        for block in range(count):
            if _is_quiet(scales, block, item):
                fill(pointer(row + start + block * size, np.int64), 0, size // WORD)
                continue
            if taken + size > length:
                return False
            _move(row + start + block * size, room + taken, size)
            taken += size
        done = start + count * size
    if length - taken != row_bytes - done:
        return False
    _move(row + done, room + taken, length - taken)
    return True


# (row, its bytes, table of pieces, how many, part of the row that must be saved): how many bytes are to be sent
pack = quick(_pack)
# (row, its bytes, table of pieces, how many, room for a row): whether the row is what its head and its scales say
unpack = quick(_unpack)
