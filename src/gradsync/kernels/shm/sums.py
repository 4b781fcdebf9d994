"""Sums over the buffers of several ranks in shared memory, compiled for each dtype and called by address.

A sum is a C function ``(rows, num_rows, out, first, end)``: ``rows`` is the address of an array with the addresses of
the inputs. Values ``first`` to ``end`` of all of them are reduced, in the order of the rows, into the same place of the
buffer at ``out``; with ``out`` 0 the result is written back to every input. 16-bit floats are summed in 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsync.kernels.base import VECTOR_BYTES, fence, numba, without_dispatch
from gradsync.kernels.shm.atomics import as_bits, as_float, pointer
from gradsync.kernels.streaming import stream_sum

SUM, MAX, MIN = range(3)
BLOCK = 2048  # values summed at a time: those of 8 ranks still fit the first-level cache
SIGNATURE = "void(i8, i8, i8, i8, i8)"

_OPS = {"sum": SUM, "max": MAX, "min": MIN}
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.uint16: np.uint16,
    torch.int32: np.int32,
    torch.uint32: np.uint32,
    torch.int64: np.int64,
    torch.uint64: np.uint64,
}


def sum_address(dtype: torch.dtype, op: str) -> int:
    """The address of the compiled sum (max, min) of a dtype; compiles it when it is first asked for."""
    if dtype == torch.bool:  # True + True is True
        dtype, op = torch.uint8, "max" if op == "sum" else op
    if dtype not in _DTYPES and dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"tensors of {dtype} can't be reduced. Use float, int or bool tensors, or a view as those.")
    address: int = _compiled(dtype, _OPS[op]).address
    return address


@functools.cache
def _compiled(dtype: torch.dtype, code: int) -> Any:
    if dtype in _DTYPES:
        return _compile(_native_sum(_DTYPES[dtype], code))
    return _compile(_short_sum(dtype == torch.float16, code))


def _compile(sum_rows: Callable[..., None]) -> Any:
    # Kept on disk: what the function closes over (numbers and a type) is part of the key.
    return numba.cfunc(SIGNATURE, cache=True)(sum_rows)


@numba.njit(inline="always")
def _combine(a: Any, b: Any, code: int) -> Any:
    if code == SUM:
        return a + b
    if code == MAX:
        return a if a > b or a != a else b  # a NaN stays, as with torch
    return a if a < b or a != a else b


def _native_sum(kind: Any, code: int) -> Callable[..., None]:
    item = np.dtype(kind).itemsize

    # Loops count from zero: only then does Numba know that no index is negative, and the compiler vectorizes.
    def sum_rows(rows: int, num_rows: int, out: int, first: int, end: int) -> None:
        inputs = numba.carray(pointer(rows), num_rows, np.int64)
        start, count = first * item, end - first
        if num_rows == 2:
            a = numba.carray(pointer(inputs[0] + start), count, kind)
            b = numba.carray(pointer(inputs[1] + start), count, kind)
            # A loop for each case of `out`: where arrays may alias, the compiler does not vectorize.
            if out == 0:
                for i in range(count):
                    value = _combine(a[i], b[i], code)
                    a[i] = value
                    b[i] = value
            elif out == inputs[0]:
                for i in range(count):
                    a[i] = _combine(a[i], b[i], code)
            elif out == inputs[1]:
                for i in range(count):
                    b[i] = _combine(a[i], b[i], code)
            else:
                c = numba.carray(pointer(out + start), count, kind)
                for i in range(count):
                    c[i] = _combine(a[i], b[i], code)
            return
        total = np.empty(BLOCK, kind)
        for done in range(0, count, BLOCK):
            at, width = start + done * item, min(BLOCK, count - done)
            row = numba.carray(pointer(inputs[0] + at), width, kind)
            for i in range(width):
                total[i] = row[i]
            for rank in range(1, num_rows):
                row = numba.carray(pointer(inputs[rank] + at), width, kind)
                for i in range(width):
                    total[i] = _combine(total[i], row[i], code)
            for rank in range(num_rows if out == 0 else 1):
                row = numba.carray(pointer((inputs[rank] if out == 0 else out) + at), width, kind)
                for i in range(width):
                    row[i] = total[i]

    return sum_rows


# -- sums that read this rank's values from another address ----------------------------------------------------------

SOURCE_DTYPES = {torch.float32: (np.float32, "f4"), torch.float64: (np.float64, "f8")}


@functools.cache
def source_sum(dtype: torch.dtype, *, to_all: bool) -> Callable[..., None]:
    """A compiled ``(rows, num_rows, rank, source, factor, first, end)``: sums into every input, or into row ``rank``.

    The values of row ``rank`` are read from the address ``source`` instead and multiplied by ``factor``. The result has
    the same bits as if the values had been multiplied and copied into the row first.
    """
    kind, name = SOURCE_DTYPES[dtype]
    signature = f"void(i8, i8, i8, i8, {name}, i8, i8)"
    made = _source_sum(kind) if to_all else _source_sum_to_own(kind)
    compiled: Callable[..., None] = without_dispatch(numba.njit(signature, nogil=True, cache=True)(made))
    return compiled


def _source_sum(kind: Any) -> Callable[..., None]:
    item = np.dtype(kind).itemsize
    per_vector = VECTOR_BYTES // item

    def sum_rows(rows: int, num_rows: int, rank: int, source: int, factor: float, first: int, end: int) -> None:
        inputs = numba.carray(pointer(rows), num_rows, np.int64)
        start, count = first * item, end - first
        if num_rows == 2:
            mine, other = inputs[rank] + start, inputs[1 - rank] + start
            num_vectors = count // per_vector
            for index in range(num_vectors):
                at = index * VECTOR_BYTES
                stream_sum(mine + at, other + at, source + at, factor)
            fence()
            at, rest = num_vectors * VECTOR_BYTES, count - num_vectors * per_vector
            a = numba.carray(pointer(source + at), rest, kind)
            b = numba.carray(pointer(other + at), rest, kind)
            c = numba.carray(pointer(mine + at), rest, kind)
            for i in range(rest):
                value = a[i] * factor + b[i]
                b[i] = value
                c[i] = value
            return
        total = np.empty(BLOCK, kind)
        for done in range(0, count, BLOCK):
            at, width = start + done * item, min(BLOCK, count - done)
            for peer in range(num_rows):
                row = numba.carray(pointer(source + done * item if peer == rank else inputs[peer] + at), width, kind)
                scale = factor if peer == rank else kind(1.0)
                for i in range(width):
                    total[i] = row[i] * scale if peer == 0 else total[i] + row[i] * scale
            for peer in range(num_rows):
                row = numba.carray(pointer(inputs[peer] + at), width, kind)
                for i in range(width):
                    row[i] = total[i]

    return sum_rows


def _source_sum_to_own(kind: Any) -> Callable[..., None]:
    item = np.dtype(kind).itemsize

    def sum_rows_to_own(rows: int, num_rows: int, rank: int, source: int, factor: float, first: int, end: int) -> None:
        inputs = numba.carray(pointer(rows), num_rows, np.int64)
        start, count = first * item, end - first
        total = np.empty(BLOCK, kind)
        for done in range(0, count, BLOCK):
            at, width = start + done * item, min(BLOCK, count - done)
            for peer in range(num_rows):
                row = numba.carray(pointer(source + done * item if peer == rank else inputs[peer] + at), width, kind)
                scale = factor if peer == rank else kind(1.0)
                if peer == 0:
                    for i in range(width):
                        total[i] = row[i] * scale
                else:
                    for i in range(width):
                        total[i] += row[i] * scale
            mine = numba.carray(pointer(inputs[rank] + at), width, kind)
            for i in range(width):
                mine[i] = total[i]

    return sum_rows_to_own


# -- 16-bit floats: Numba has none, so their bits are widened and narrowed here ---------------------------------------


@numba.njit(inline="always")
def _widen(short: Any, half: bool) -> Any:
    """The float32 of a float16's (``half``) or a bfloat16's bits."""
    bits = np.uint32(short)
    if not half:
        return as_float(np.uint32(bits << 16))
    rest = np.uint32(bits & 0x7FFF)
    wide = np.uint32(np.uint32(rest << 13) + np.uint32((127 - 15) << 23))
    wide = np.uint32(wide + np.uint32((128 - 16) << 23)) if rest >= 0x7C00 else wide  # inf and NaN
    # zero and subnormal numbers
    wide = as_bits(np.float32(np.int32(rest)) * np.float32(2.0**-24)) if rest < 0x0400 else wide
    return as_float(np.uint32(wide | np.uint32(np.uint32(bits & 0x8000) << 16)))


@numba.njit(inline="always")
def _narrow(value: Any, half: bool) -> Any:
    """The 16 bits nearest to a float32; ties go to the even one."""
    bits = as_bits(value)
    rest = np.uint32(bits & 0x7FFFFFFF)
    if not half:
        odd = np.uint32(np.uint32(bits >> 16) & 1)
        short = np.uint32(np.uint32(bits + np.uint32(odd + 0x7FFF)) >> 16)
        return np.uint16(np.uint32(0x7FC0) if rest > 0x7F800000 else short)
    odd = np.uint32(np.uint32(rest >> 13) & 1)
    short = np.uint32(np.uint32(rest - np.uint32(((127 - 15) << 23) - 0xFFF) + odd) >> 13)
    # Subnormal results: adding 0.5 shifts the bits to their position, and rounds.
    tiny = np.uint32(as_bits(as_float(rest) + np.float32(0.5)) - np.uint32(0x3F000000))
    short = tiny if rest < 0x38800000 else short
    short = np.uint32(0x7C00) if rest >= 0x47800000 else short  # 65536 and more
    short = np.uint32(0x7E00) if rest > 0x7F800000 else short  # NaN
    return np.uint16(short | np.uint32(np.uint32(bits >> 16) & 0x8000))


def _short_sum(half: bool, code: int) -> Callable[..., None]:
    def sum_rows(rows: int, num_rows: int, out: int, first: int, end: int) -> None:
        inputs = numba.carray(pointer(rows), num_rows, np.int64)
        total = np.empty(BLOCK, np.float32)
        for begin in range(first, end, BLOCK):
            at, width = begin * 2, min(BLOCK, end - begin)
            row = numba.carray(pointer(inputs[0] + at), width, np.uint16)
            for i in range(width):
                total[i] = _widen(row[i], half)
            for rank in range(1, num_rows):
                row = numba.carray(pointer(inputs[rank] + at), width, np.uint16)
                for i in range(width):
                    total[i] = _combine(total[i], _widen(row[i], half), code)
            for rank in range(num_rows if out == 0 else 1):
                row = numba.carray(pointer((inputs[rank] if out == 0 else out) + at), width, np.uint16)
                for i in range(width):
                    row[i] = _narrow(total[i], half)

    return sum_rows
