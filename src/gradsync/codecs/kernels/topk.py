"""Top-k on the CPU: one pass over the values that adds the residual, writes it back, and takes out the largest.

[Note: streaming top-k] A threshold from a sample lets little more than k values through. They are taken out of the
residual while their line is in the cache, and lie in a buffer in order of their position. When it is full, and at the
end, the k largest of it stay and the others are put back; from then on only what is larger than the smallest of them
is let through. So the buffer never overflows, and what is left are the k largest of all, however badly the sample
misjudged: a threshold too low costs time, and only one too high needs a second pass.

Magnitudes are compared as whole numbers, by the bits of the float without its sign: they have the same order, inf is
above every number and NaN above inf.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.codecs.kernels.residual import ALONE, APART, CHUNK, IN_PLACE, SAME, compensate
from gradsync.codecs.kernels.strata import drawn
from gradsync.compiled import intrinsic, ir, numba, types

SET, ADD, ZERO = range(3)  # what scatter does with a value
FINITE, NOT_FINITE, BROKEN = range(3)  # what scatter says
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
def _lowest(typing_context: Any, bits: Any) -> Any:
    """The place of the lowest bit that is set; there must be one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@numba.njit(cache=True, nogil=True, inline="always")
def _magnitude(itemsize: int) -> Any:
    """All bits of a float but the sign."""
    return (np.int64(1) << np.int64(8 * itemsize - 1)) - np.int64(1)


@numba.njit(cache=True, nogil=True)
def _kth_largest(bits: Any, num: int, k: int, counts: Any) -> Any:
    """The k-th largest magnitude of ``num`` values, digit by digit from the top: no sorting, no branch to guess."""
    high, prefix = 8 * bits.itemsize - 1, np.int64(0)
    unsigned = _magnitude(bits.itemsize)
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
    """Values of y from all over it."""
    numel = len(x)
    for index in range(num):
        where = index if num == numel else drawn(index, num, numel, start)
        y = gain * x[where]
        sample[index] = y + before[where] if mode in (SAME, APART) else y


@numba.njit(cache=True, nogil=True)
def _keep_largest(k: int, at: Any, kept: Any, kept_bits: Any, num: int, counts: Any, y: Any, put_back: bool) -> Any:
    """Of what was taken, let the k largest stay, of equal ones the first; says how large the smallest of them is."""
    unsigned = _magnitude(kept.itemsize)
    limit = _kth_largest(kept_bits, num, k, counts)
    equal = k
    for index in range(num):
        equal -= (kept_bits[index] & unsigned) > limit
    done = 0
    for index in range(num):
        bits = kept_bits[index] & unsigned
        value, where = kept[index], at[index]
        ties = bits == limit and equal > 0
        equal -= ties
        if bits > limit or ties:
            kept[done], at[done] = value, where
            done += 1
        elif put_back:
            y[where] = value
    return limit


@numba.njit(cache=True, nogil=True)
def _take(
    x: Any, before: Any, after: Any, mode: int, gain: Any, k: int, limit: int, capacity: int,
    at: Any, kept: Any, kept_bits: Any, room: Any, counts: Any,
) -> Any:  # fmt: skip
    """Compute y, and take out of it, in order, the k largest of what is above the limit; says how many they are."""
    numel, item, full = len(x), x.itemsize, capacity - LANES
    unsigned = _magnitude(item)
    num: Any = np.int64(0)  # a plain 0 would be a type of its own, and compile what it is given to twice
    for first in range(0, numel, CHUNK):
        width = min(CHUNK, numel - first)
        end = first + width
        y = room[:width] if mode == ALONE else after[first:end]
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
                i = begin + _lowest(hits)
                hits &= hits - np.uint64(1)
                at[num] = first + i
                kept[num] = y[i]
                y[i] = 0
                num += 1
            if num > full:
                limit = _keep_largest(k, at, kept, kept_bits, num, counts, after, mode != ALONE)
                num = k
    if num > k:
        _keep_largest(k, at, kept, kept_bits, num, counts, after, mode != ALONE)
        num = k
    return num


@numba.njit(cache=True, nogil=True)
def _pack(at: Any, kept: Any, num: int, values: Any, low: Any, low_bytes: int, high: Any) -> None:
    """Write values and positions; what is not needed of their room is zero."""
    for word in range(len(high)):
        high[word] = 0
    for index in range(num):
        where = at[index]
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
    ranks: Any, enough: int, num_samples: int, capacity: int, start: int,
    sample: Any, sample_bits: Any, at: Any, kept: Any, kept_bits: Any, room: Any, counts: Any,
    values: Any, low: Any, low_bytes: int, high: Any,
) -> Any:  # fmt: skip
    """Take the ``len(values)`` largest of y; says how many were found: fewer than ``enough`` only if the rest is zero.

    ``ranks``: at which places of the sample, counted from the largest, the thresholds lie that are tried in turn.
    """
    k: Any = len(values)
    num: Any = np.int64(0)
    _sample(x, before, mode, gain, start, sample, num_samples)
    for turn in range(len(ranks) + 1):
        least = np.int64(1)  # zeros need not be sent
        if turn < len(ranks):
            least = max(least, _kth_largest(sample_bits, num_samples, ranks[turn], counts))
        num = _take(x, before, after, mode, gain, k, least - 1, capacity, at, kept, kept_bits, room, counts)
        if num >= enough or least == 1:
            break
        if mode != ALONE:
            for index in range(num):
                after[at[index]] = kept[index]
            mode = IN_PLACE
    _pack(at, kept, num, values, low, low_bytes, high)
    return num


@numba.njit(cache=True, nogil=True)
def count(high: Any) -> int:
    """How many positions there are."""
    num = 0
    for word in range(len(high)):
        bits = high[word]
        while bits != 0:
            bits &= bits - np.uint64(1)
            num += 1
    return num


@numba.njit(cache=True, nogil=True)
def scatter(low: Any, low_bytes: int, high: Any, values: Any, out: Any, gain: Any, how: int) -> int:
    """Write ``gain`` times the values to where they belong, and zero elsewhere; or add them; or put zeros there.

    What came over a wire is not trusted to stay within ``out``.
    """
    numel, capacity = len(out), len(values)
    num, cleared, finite = 0, 0, True
    for word in range(len(high)):
        bits = high[word]
        while bits != 0:
            block = (word << 6) + _lowest(bits) - num
            bits &= bits - np.uint64(1)
            if num >= capacity:
                return BROKEN
            if low_bytes == 1:
                where = (block << 8) | low[num]
            else:
                where = (block << 16) | (np.int64(low[2 * num + 1]) << 8) | low[2 * num]
            if where >= numel:
                return BROKEN
            if how == ZERO:
                out[where] = 0
                num += 1
                continue
            value = gain * values[num]
            num += 1
            finite &= np.isfinite(value)
            if how == ADD:
                out[where] += value
                continue
            while cleared <= where:  # just ahead of what is written: the line is then in the cache
                end = min(cleared + CHUNK, numel)
                out[cleared:end] = 0
                cleared = end
            out[where] = value
    if how == SET:
        out[cleared:] = 0
    return FINITE if finite else NOT_FINITE
