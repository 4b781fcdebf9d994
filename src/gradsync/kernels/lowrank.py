# mypy: allow-untyped-decorators
"""The kernels of PowerSGD: each makes one pass over all matrices of a bucket. Called by reducers/powersgd/lowrank.py.

BLAS is tuned for square products: with 4 columns it stays far below the memory bandwidth, which bounds these loops. A
row is worked on while it is in the L1 cache, and written with streaming stores if it is not read again soon.

Results that must be equal on all replicas (approximations, orthonormal factors) are computed without reassociation or
contraction: the same bits on any processor. Only sums over this rank's own values, which the ranks have yet to
all-reduce, may be reassociated by the compiler.

``table`` has a row for each matrix: see ``Matrix.fields`` in reducers/powersgd/lowrank.py. A factor is ``rank``
vectors, one after another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import VECTOR_BYTES, fence, numba
from gradsync.kernels.shm.atomics import pointer
from gradsync.kernels.streaming import stream_scaled

LARGE = 1e100  # squares of larger values may overflow; squares of values below its inverse may underflow

# Loops count from zero: only then does Numba know that no index is negative, and LLVM vectorizes.
_reassociated = numba.njit(nogil=True, fastmath={"reassoc", "contract"})
_bit_exact = numba.njit(nogil=True)
_compiled = numba.njit(nogil=True, cache=True)  # for float32 or float64 when it is first called: it takes seconds


# -- on one row -----------------------------------------------------------------------------------------------------


@_bit_exact
def _expand(row: Any, left: Any, right: Any, rank: int, at: int, rows: int) -> None:
    """``row = left[:, at] @ right``."""
    cols = row.size
    fours = rank // 4
    for k in range(fours):
        first = 4 * k
        a, b = left[first * rows + at], left[(first + 1) * rows + at]
        c, d = left[(first + 2) * rows + at], left[(first + 3) * rows + at]
        w, x = right[first * cols : (first + 1) * cols], right[(first + 1) * cols : (first + 2) * cols]
        y, z = right[(first + 2) * cols : (first + 3) * cols], right[(first + 3) * cols : (first + 4) * cols]
        if k == 0:
            for j in range(cols):
                row[j] = ((a * w[j] + b * x[j]) + c * y[j]) + d * z[j]
        else:
            for j in range(cols):
                row[j] += ((a * w[j] + b * x[j]) + c * y[j]) + d * z[j]
    for rest in range(rank - 4 * fours):
        k = 4 * fours + rest
        a, w = left[k * rows + at], right[k * cols : (k + 1) * cols]
        if k == 0:
            for j in range(cols):
                row[j] = a * w[j]
        else:
            for j in range(cols):
                row[j] += a * w[j]


@_bit_exact
def _subtract_from(row: Any, before: Any) -> None:
    """``row = before - row``: the residual of a row whose low-rank approximation is in ``row``."""
    for j in range(row.size):
        row[j] = before[j] - row[j]


@_reassociated
def _project(row: Any, factor: Any, rank: int, out: Any, at: int, rows: int) -> None:
    """``out[:, at] = factor @ row``."""
    cols = row.size
    fours = rank // 4
    zero = row.dtype.type(0)
    for k in range(fours):
        first = 4 * k
        w, x = factor[first * cols : (first + 1) * cols], factor[(first + 1) * cols : (first + 2) * cols]
        y, z = factor[(first + 2) * cols : (first + 3) * cols], factor[(first + 3) * cols : (first + 4) * cols]
        a, b, c, d = zero, zero, zero, zero
        for j in range(cols):
            a += row[j] * w[j]
            b += row[j] * x[j]
            c += row[j] * y[j]
            d += row[j] * z[j]
        out[first * rows + at], out[(first + 1) * rows + at] = a, b
        out[(first + 2) * rows + at], out[(first + 3) * rows + at] = c, d
    for rest in range(rank - 4 * fours):
        k = 4 * fours + rest
        w = factor[k * cols : (k + 1) * cols]
        a = zero
        for j in range(cols):
            a += row[j] * w[j]
        out[k * rows + at] = a


@_reassociated
def _add_outer(block: Any, cols: int, count: int, left: Any, rank: int, at: int, rows: int, out: Any) -> None:
    """``out += left[:, at : at + count] @ block``: up to four rows at once, so that ``out`` is read once for them."""
    for k in range(rank):
        into = out[k * cols : (k + 1) * cols]
        if count == 4:
            base = k * rows + at
            a, b, c, d = left[base], left[base + 1], left[base + 2], left[base + 3]
            w, x, y, z = block[:cols], block[cols : 2 * cols], block[2 * cols : 3 * cols], block[3 * cols : 4 * cols]
            for j in range(cols):
                into[j] += (a * w[j] + b * x[j]) + (c * y[j] + d * z[j])
        else:
            for i in range(count):
                a, w = left[k * rows + at + i], block[i * cols : (i + 1) * cols]
                for j in range(cols):
                    into[j] += a * w[j]


@_bit_exact
def _stream_row(to: Any, row: Any) -> None:
    """Copy a row with streaming stores, if aligned: it is not read again soon. The caller ends with a ``fence``."""
    there, here, num_bytes = to.ctypes.data, row.ctypes.data, to.size * to.itemsize
    if there % VECTOR_BYTES == 0 and num_bytes % VECTOR_BYTES == 0:
        one = to.dtype.type(1)
        for vector in range(num_bytes // VECTOR_BYTES):
            stream_scaled(there + vector * VECTOR_BYTES, here + vector * VECTOR_BYTES, one)
    else:
        for j in range(to.size):
            to[j] = row[j]


@_bit_exact
def _compensate(row: Any, before: Any, values: Any, gain: Any) -> None:
    """``row = before - row + gain * values``: the residual, with the bits of ``residuals``, plus this step's values."""
    for j in range(row.size):
        row[j] = (before[j] - row[j]) + values[j] * gain


# -- on all matrices of a bucket ------------------------------------------------------------------------------------


@_compiled
def compensate_left(
    sources: Any, gains: Any, before: Any, left: Any, right: Any, factor: Any, after: Any, out: Any, rank: int,
    scratch: Any, table: Any,
) -> None:  # fmt: skip
    """``after = before - left' @ right + gain * source`` and ``out = factor @ after'``, for each matrix."""
    for matrix in range(table.shape[0]):
        _, start, lefts, rights, rows, cols = table[matrix]
        values = numba.carray(pointer(sources[matrix]), rows * cols, before.dtype)
        residual, gain = before[start : start + rows * cols], gains[matrix]
        old_p, old_q = left[lefts : lefts + rank * rows], right[rights : rights + rank * cols]
        q, p = factor[rights : rights + rank * cols], out[lefts : lefts + rank * rows]
        row = scratch[:cols]
        for i in range(rows):
            _expand(row, old_p, old_q, rank, i, rows)
            _compensate(row, residual[i * cols : (i + 1) * cols], values[i * cols : (i + 1) * cols], gain)
            _project(row, q, rank, p, i, rows)
            _stream_row(after[start + i * cols : start + (i + 1) * cols], row)
    fence()


@_compiled
def compensate_right(
    sources: Any, gains: Any, before: Any, left: Any, right: Any, factor: Any, after: Any, out: Any, rank: int,
    scratch: Any, table: Any,
) -> None:  # fmt: skip
    """``after = before - left' @ right + gain * source`` and ``out = factor @ after``, for each matrix."""
    for matrix in range(table.shape[0]):
        _, start, lefts, rights, rows, cols = table[matrix]
        values = numba.carray(pointer(sources[matrix]), rows * cols, before.dtype)
        residual, gain = before[start : start + rows * cols], gains[matrix]
        old_p, old_q = left[lefts : lefts + rank * rows], right[rights : rights + rank * cols]
        p, q = factor[lefts : lefts + rank * rows], out[rights : rights + rank * cols]
        q[:] = 0
        for four in range((rows + 3) // 4):
            i, count = 4 * four, min(4, rows - 4 * four)
            for k in range(count):
                row = scratch[k * cols : (k + 1) * cols]
                first, end = (i + k) * cols, (i + k + 1) * cols
                _expand(row, old_p, old_q, rank, i + k, rows)
                _compensate(row, residual[first:end], values[first:end], gain)
            _add_outer(scratch[: count * cols], cols, count, p, rank, i, rows, q)
            _stream_row(after[start + i * cols : start + (i + count) * cols], scratch[: count * cols])
    fence()


@_compiled
def project_right(matrices: Any, left: Any, out: Any, rank: int, table: Any) -> None:
    """``out = left @ matrix``, for each matrix."""
    for matrix in range(table.shape[0]):
        _, start, lefts, rights, rows, cols = table[matrix]
        values = matrices[start : start + rows * cols]
        p, q = left[lefts : lefts + rank * rows], out[rights : rights + rank * cols]
        q[:] = 0
        for four in range((rows + 3) // 4):
            i, count = 4 * four, min(4, rows - 4 * four)
            _add_outer(values[i * cols : (i + count) * cols], cols, count, p, rank, i, rows, q)


@_compiled
def expand(left: Any, right: Any, buffer: Any, gain: Any, rank: int, scratch: Any, table: Any) -> None:
    """``buffer = gain * left' @ right``, for each matrix."""
    for matrix in range(table.shape[0]):
        at, _, lefts, rights, rows, cols = table[matrix]
        p, q = left[lefts : lefts + rank * rows], right[rights : rights + rank * cols]
        row = scratch[:cols]
        for i in range(rows):
            _expand(row, p, q, rank, i, rows)
            if gain != 1:
                for j in range(cols):
                    row[j] *= gain
            _stream_row(buffer[at + i * cols : at + (i + 1) * cols], row)
    fence()


@_compiled
def residuals(matrices: Any, left: Any, right: Any, out: Any, rank: int, table: Any) -> None:
    """``out = matrices - left' @ right``: the same bits that ``compensate_left`` and ``_right`` add the values to."""
    for matrix in range(table.shape[0]):
        _, start, lefts, rights, rows, cols = table[matrix]
        old_p, old_q = left[lefts : lefts + rank * rows], right[rights : rights + rank * cols]
        for i in range(rows):
            row = out[start + i * cols : start + (i + 1) * cols]
            _expand(row, old_p, old_q, rank, i, rows)
            _subtract_from(row, matrices[start + i * cols : start + (i + 1) * cols])


# -- orthonormal factors --------------------------------------------------------------------------------------------


@_bit_exact
def _dot(a: Any, b: Any) -> float:
    """The dot product, in eight partial sums and a fixed order."""
    s0, s1, s2, s3, s4, s5, s6, s7 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    eights = a.size // 8
    for eight in range(eights):
        i = 8 * eight
        s0 += a[i] * b[i]
        s1 += a[i + 1] * b[i + 1]
        s2 += a[i + 2] * b[i + 2]
        s3 += a[i + 3] * b[i + 3]
        s4 += a[i + 4] * b[i + 4]
        s5 += a[i + 5] * b[i + 5]
        s6 += a[i + 6] * b[i + 6]
        s7 += a[i + 7] * b[i + 7]
    for rest in range(a.size - 8 * eights):
        i = 8 * eights + rest
        s0 += a[i] * b[i]
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@_bit_exact
def _largest(a: Any) -> float:
    """The largest magnitude; NaN if there is one."""
    largest = 0.0
    for i in range(a.size):
        size = abs(a[i])
        if size > largest or size != size:
            largest = size
    return largest


@_bit_exact
def _orthogonalize(work: Any, k: int, size: int) -> Any:
    """Orthogonalize vector k against those before it, twice because of rounding; returns its remaining norm."""
    vector = work[k * size : (k + 1) * size]
    for _ in range(2):
        for before in range(k):
            other = work[before * size : (before + 1) * size]
            along = _dot(vector, other)
            for i in range(size):
                vector[i] -= along * other[i]
    return np.sqrt(_dot(vector, vector))


@_compiled
def orthonormalize(
    vectors: Any,
    out: Any,
    fallback: Any,
    keep: Any,
    may_keep: bool,
    rank: int,
    size: int,
    min_relative_norm: float,
    work: Any,
) -> None:
    """Of one matrix; see ``LowRankOps.orthonormalize`` in reducers/powersgd/lowrank.py."""
    if may_keep and _largest(vectors) == 0.0:
        out[:] = keep
        return
    for k in range(rank):
        vector = work[k * size : (k + 1) * size]
        for i in range(size):
            vector[i] = vectors[k * size + i]
        largest = _largest(vector)
        whole, left = 0.0, 0.0
        if largest != 0.0:
            if largest > LARGE or largest < 1 / LARGE:
                for i in range(size):
                    vector[i] /= largest
            whole = np.sqrt(_dot(vector, vector))
            left = _orthogonalize(work, k, size)
        if left <= min_relative_norm * whole:  # False for NaN, which is propagated
            for i in range(size):
                vector[i] = fallback[k * size + i]
            left = _orthogonalize(work, k, size)
        left = 1.0 / left
        for i in range(size):
            vector[i] *= left
            out[k * size + i] = vector[i]
