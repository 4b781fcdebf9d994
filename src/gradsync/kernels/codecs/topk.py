"""The kernels of top-k: one pass over the values that adds the residual, writes it back, and removes the largest.

[Note: streaming top-k] A threshold from a sample lets little more than k values pass. They are removed from the
residual while their line is in the cache, and collected in a buffer in order of position. When the buffer is full, and
at the end, its k largest stay and the others are put back; from then on the smallest of the k is the threshold. So the
buffer never overflows, and the result is the k largest of all values above the first threshold, however far off the
sample was: too low a threshold costs time, and only one that is too high needs a second pass.

Magnitudes are compared as integers, by the bits of the float without its sign: the order is the same, inf is above
every number and NaN above inf.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import intrinsic, ir, numba, types
from gradsync.kernels.codecs.sparse import (
    CHUNK,
    IN_PLACE,
    NO_RESIDUAL,
    SAME_BUFFER,
    SEPARATE,
    compensate,
    stratified_position,
)

SET, ADD, ZERO = range(3)  # what scatter does with a value
FINITE, NOT_FINITE, INVALID = range(3)  # what scatter returns
LANES = 32  # values tested at a time
DIGIT_BITS = 11
NUM_COUNTS = 2**DIGIT_BITS


@intrinsic
def _above(typing_context: Any, address: Any, threshold: Any) -> Any:
    """Which of the values at an address are larger than the threshold, by magnitude: a bit for each of ``LANES``."""
    number = ir.IntType(threshold.bitwidth)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(number, LANES)
        bits = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=number.width // 8)
        limits = ir.Constant(vector, ir.Undefined)
        for lane in range(LANES):
            limits = builder.insert_element(limits, args[1], ir.Constant(ir.IntType(32), lane))
        magnitudes = builder.and_(bits, ir.Constant(vector, [2 ** (number.width - 1) - 1] * LANES))
        hits = builder.bitcast(builder.icmp_signed(">", magnitudes, limits), ir.IntType(LANES))
        return builder.zext(hits, ir.IntType(64))

    return types.uint64(types.int64, threshold), generate


@intrinsic
def _lowest_set_bit(typing_context: Any, bits: Any) -> Any:
    """The index of the lowest set bit; there must be one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@numba.njit(cache=True, nogil=True, inline="always")
def _magnitude_mask(itemsize: int) -> Any:
    """All bits of a float but the sign."""
    return (np.int64(1) << np.int64(8 * itemsize - 1)) - np.int64(1)


@numba.njit(cache=True, nogil=True)
def _kth_largest(bits: Any, num: int, k: int, counts: Any) -> Any:
    """The k-th largest magnitude of ``num`` values, by radix select from the highest digit: no sort, no branches."""
    high, prefix = 8 * bits.itemsize - 1, np.int64(0)
    unsigned = _magnitude_mask(bits.itemsize)
    while high > 0:
        width = min(DIGIT_BITS, high)
        shift = high - width
        digits = (np.int64(1) << width) - 1
        for digit in range(len(counts)):
            counts[digit] = 0
        for index in range(num):
            value = bits[index] & unsigned
            if value >> high == prefix:
                counts[(value >> shift) & digits] += 1
        digit = digits
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        prefix = (prefix << width) | digit
        high = shift
    return prefix


@numba.njit(cache=True, nogil=True)
def _sample(x: Any, before: Any, mode: int, gain: Any, start: int, sample: Any, num: int) -> None:
    """Write a stratified sample of y."""
    numel = len(x)
    for index in range(num):
        where = index if num == numel else stratified_position(index, num, numel, start)
        y = gain * x[where]
        sample[index] = y + before[where] if mode in (SAME_BUFFER, SEPARATE) else y


@numba.njit(cache=True, nogil=True)
def _keep_largest(
    k: int, positions: Any, kept: Any, kept_bits: Any, num: int, counts: Any, y: Any, put_back: bool
) -> Any:
    """Keep the k largest of the collected values, the first of equal ones; returns the smallest magnitude kept."""
    unsigned = _magnitude_mask(kept.itemsize)
    limit = _kth_largest(kept_bits, num, k, counts)
    equal = k
    for index in range(num):
        equal -= (kept_bits[index] & unsigned) > limit
    done = 0
    for index in range(num):
        bits = kept_bits[index] & unsigned
        value, where = kept[index], positions[index]
        ties = bits == limit and equal > 0
        equal -= ties
        if bits > limit or ties:
            kept[done], positions[done] = value, where
            done += 1
        elif put_back:
            y[where] = value
    return limit


@numba.njit(cache=True, nogil=True)
def _collect_largest(
    x: Any, before: Any, after: Any, mode: int, gain: Any, k: int, limit: int, capacity: int,
    positions: Any, kept: Any, kept_bits: Any, chunk: Any, counts: Any,
) -> Any:  # fmt: skip
    """Compute y, and move the k largest values above the limit, in order, to the buffer; returns how many."""
    numel, item, almost_full = len(x), x.itemsize, capacity - LANES
    unsigned = _magnitude_mask(item)
    num: Any = np.int64(0)  # a plain 0 has another Numba type: functions that take it would be compiled twice
    for first in range(0, numel, CHUNK):
        width = min(CHUNK, numel - first)
        end = first + width
        y = chunk[:width] if mode == NO_RESIDUAL else after[first:end]
        compensate(x[first:end], before[first:end], y, mode, gain)
        address, bits = y.ctypes.data, y.view(kept_bits.dtype)
        for begin in range(0, width, LANES):
            hits = np.uint64(0)
            if begin + LANES <= width:
                hits = _above(address + begin * item, kept_bits.dtype.type(limit))
            else:
                for i in range(begin, width):
                    if (bits[i] & unsigned) > limit:
                        hits |= np.uint64(1) << np.uint64(i - begin)
            while hits != 0:
                i = begin + _lowest_set_bit(hits)
                hits &= hits - np.uint64(1)
                positions[num] = first + i
                kept[num] = y[i]
                y[i] = 0
                num += 1
            if num > almost_full:
                limit = _keep_largest(k, positions, kept, kept_bits, num, counts, after, mode != NO_RESIDUAL)
                num = k
    if num > k:
        _keep_largest(k, positions, kept, kept_bits, num, counts, after, mode != NO_RESIDUAL)
        num = k
    return num


@numba.njit(cache=True, nogil=True)
def _write_payload(positions: Any, kept: Any, num: int, values: Any, low: Any, low_bytes: int, high: Any) -> None:
    """Write values and positions; the unused rest is zero."""
    for word in range(len(high)):
        high[word] = 0
    for index in range(num):
        where = positions[index]
        low[index * low_bytes] = where & 0xFF
        if low_bytes == 2:
            low[index * 2 + 1] = (where >> 8) & 0xFF
        place = index + (where >> (8 * low_bytes))
        high[place >> 6] |= np.uint64(1) << np.uint64(place & 63)
        values[index] = kept[index]
    for index in range(num * low_bytes, len(low)):
        low[index] = 0
    for index in range(num, len(values)):
        values[index] = 0


@numba.njit(cache=True, nogil=True)
def select(
    x: Any, before: Any, after: Any, mode: int, gain: Any,
    sample_ranks: Any, min_kept: int, num_samples: int, capacity: int, start: int,
    sample: Any, sample_bits: Any, positions: Any, kept: Any, kept_bits: Any, chunk: Any, counts: Any,
    values: Any, low: Any, low_bytes: int, high: Any,
) -> Any:  # fmt: skip
    """Move the ``len(values)`` largest of y to the payload; returns how many.

    There are fewer than ``min_kept`` only if all other values are zero.
    ``sample_ranks``: the ranks within the sample, 1 for its largest value, of the thresholds that are tried in turn.
    """
    k: Any = len(values)
    num: Any = np.int64(0)
    _sample(x, before, mode, gain, start, sample, num_samples)
    for attempt in range(len(sample_ranks) + 1):
        threshold = np.int64(1)  # zeros need not be sent
        if attempt < len(sample_ranks):
            threshold = max(threshold, _kth_largest(sample_bits, num_samples, sample_ranks[attempt], counts))
        num = _collect_largest(
            x, before, after, mode, gain, k, threshold - 1, capacity, positions, kept, kept_bits, chunk, counts
        )
        if num >= min_kept or threshold == 1:
            break
        if mode != NO_RESIDUAL:
            for index in range(num):
                after[positions[index]] = kept[index]
            mode = IN_PLACE
    _write_payload(positions, kept, num, values, low, low_bytes, high)
    return num


@numba.njit(cache=True, nogil=True)
def count(high: Any) -> int:
    """The number of positions in an index."""
    num = 0
    for word in range(len(high)):
        bits = high[word]
        while bits != 0:
            bits &= bits - np.uint64(1)
            num += 1
    return num


@numba.njit(cache=True, nogil=True)
def scatter(low: Any, low_bytes: int, high: Any, values: Any, out: Any, gain: Any, op: int) -> int:
    """SET: write ``gain`` times the values to their positions, 0 elsewhere. ADD: add them. ZERO: write 0 there.

    The payload comes from the network: positions outside of ``out`` give ``INVALID``.
    """
    numel, capacity = len(out), len(values)
    num, cleared, finite = 0, 0, True
    for word in range(len(high)):
        bits = high[word]
        while bits != 0:
            block = (word << 6) + _lowest_set_bit(bits) - num
            bits &= bits - np.uint64(1)
            if num >= capacity:
                return INVALID
            if low_bytes == 1:
                where = (block << 8) | low[num]
            else:
                where = (block << 16) | (np.int64(low[2 * num + 1]) << 8) | low[2 * num]
            if where >= numel:
                return INVALID
            if op == ZERO:
                out[where] = 0
                num += 1
                continue
            value = gain * values[num]
            num += 1
            finite &= np.isfinite(value)
            if op == ADD:
                out[where] += value
                continue
            while cleared <= where:  # zero just ahead of the writes: the line is then in the cache
                end = min(cleared + CHUNK, numel)
                out[cleared:end] = 0
                cleared = end
            out[where] = value
    if op == SET:
        out[cleared:] = 0
    return FINITE if finite else NOT_FINITE
