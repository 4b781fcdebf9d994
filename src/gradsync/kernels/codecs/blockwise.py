"""The kernels of blockwise codecs: ``merge`` and ``decode``, each in one pass over all blocks of a parameter.

``merge`` loads a block, adds the residual and the received payloads, finds the scale, writes codes and residual, and
decodes the result. Encoding is a merge with no payload received.

[Note: one scratch] A block is worked on in scratch on the stack, which stays in the L1 cache, and is read from and
written to memory once. LLVM knows that nothing aliases the scratch. Arrays that may be the same (a residual before and
after) would keep it from vectorizing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsync.kernels.base import VECTOR_BYTES, fence, numba
from gradsync.kernels.block_ops import (
    add,
    fill,
    inlined,
    is_all_zero,
    largest_bits,
    load,
    load_sum,
    load_sum_and_max,
    store,
    streamable,
)
from gradsync.kernels.codecs.block_layout import ELISION_MIN_LEVELS, LARGEST_BLOCK, SUMS, WORDS, scale_limit
from gradsync.kernels.codecs.packing import decode_words, encode_words
from gradsync.kernels.pointers import from_bits, get, magnitude_bits, offset_by, pointer, put, scratch

FLOAT_TYPES: dict[torch.dtype, Any] = {  # with the bits of inf
    torch.float32: (np.float32, 0x7F800000),
    torch.float64: (np.float64, 0x7FF << 52),
}
MERGE_SIGNATURE = "b1(i8, i8, f8, i8, i8, i8, i8, i8, i8, i8, f8, i8, i4, i4)"
DECODE_SIGNATURE = "b1(i8, i8, i8, i8, f8, b1, i8)"


@inlined
def num_words(count: int, bits: int) -> int:
    """The number of words that hold ``count`` codes, in whole vectors."""
    return (count * bits + 32 * WORDS - 1) // (32 * WORDS) * WORDS


@inlined
def mean_magnitude(values: Any, sums: Any, count: int, share: Any) -> Any:
    """The mean of ``|value|``, in ``SUMS`` partial sums. The torch code uses the same order, so the bits are equal."""
    fill(sums, share * 0, SUMS)
    for row in range(count // SUMS):
        add_magnitudes(sums, offset_by(values, row * SUMS), SUMS, share)
    add_magnitudes(sums, offset_by(values, count // SUMS * SUMS), count % SUMS, share)
    for half in (32, 16, 8, 4, 2, 1):
        upper = offset_by(sums, half)
        for i in range(half):
            put(sums, i, get(sums, i) + get(upper, i))
    return get(sums, 0)


@inlined
def add_magnitudes(sums: Any, values: Any, count: int, share: Any) -> None:
    """Add ``share * |value|`` to a partial sum, one for each value."""
    for i in range(count):
        put(sums, i, get(sums, i) + abs(get(values, i)) * share)


# -- all blocks -----------------------------------------------------------------------------------------------------


@functools.cache
def merge_and_decode(dtype: torch.dtype, bits: int, levels: int, stochastic: bool) -> tuple[Any, Any]:
    """The two compiled functions of a codec, ``merge`` and ``decode``, for values of a dtype.

    Codes are from ``-levels`` to ``levels``, in ``bits`` bits. With 0 levels a code is one bit, the sign.
    """
    kind, infinity = FLOAT_TYPES[dtype]
    merge, decode = _define_merge_and_decode(kind, infinity, bits, levels, int(stochastic), scale_limit(dtype, levels))
    compiled = functools.partial(numba.njit, nogil=True, cache=True)
    # Cached on disk: the closure variables (numbers and a type) are part of the cache key.
    return compiled(MERGE_SIGNATURE)(merge), compiled(DECODE_SIGNATURE)(decode)


def _define_merge_and_decode(
    kind: Any, infinity: int, bits: int, levels: int, stochastic: int, limit: float
) -> tuple[Callable[..., bool], Callable[..., bool]]:
    item = np.dtype(kind).itemsize
    lanes = VECTOR_BYTES // item
    smallest, largest = float(np.finfo(kind).tiny), float(np.finfo(kind).max)

    def merge(
        x: int,
        count: int,
        gain: float,
        before: int,
        after: int,
        received: int,
        num_received: int,
        payload: int,
        codes: int,
        out: int,
        out_gain: float,
        block: int,
        key_low: int,
        key_high: int,
    ) -> bool:
        values, sums = scratch(LARGEST_BLOCK, kind), scratch(SUMS, kind)
        payloads = pointer(received, np.int64)
        factor, out_factor = kind(gain), kind(out_gain)
        block_code_bytes = num_words(block, bits) * 4
        # A cache line that was just read is still there: only arrays that were not read are written past the cache.
        after_past_cache = after != before and streamable(after, block * item)
        out_past_cache = out != x and streamable(out, block * item)
        # The residual of a zero block that is updated in place need not be read: see [Note: zero-block elision].
        residual_unchanged = (
            before != 0 and after == before and levels >= ELISION_MIN_LEVELS and num_received == 0 and out == 0
        )
        num_blocks = (count + block - 1) // block
        if num_blocks * item < codes:
            put(pointer(payload + codes - 4, np.int32), 0, np.int32(0))
        finite = True
        for index in range(num_blocks):
            first = index * block
            size, offset = min(block, count - first), first * item
            words = pointer(payload + codes + index * block_code_bytes, np.int32)
            if residual_unchanged and is_all_zero(pointer(x + offset, kind), size, factor):
                put(pointer(payload, kind), index, kind(0))
                fill(words, np.int32(0), num_words(size, bits))
                continue
            all_zero, known_magnitude = False, magnitude_bits(factor)
            if before != 0 and levels >= ELISION_MIN_LEVELS:
                own_bits, known_magnitude = load_sum_and_max(
                    values, pointer(x + offset, kind), pointer(before + offset, kind), size, factor
                )
                all_zero = own_bits == 0
            elif before != 0:
                load_sum(values, pointer(x + offset, kind), pointer(before + offset, kind), size, factor)
            else:
                load(values, pointer(x + offset, kind), size, factor)
            width = num_words(size, bits)
            for rank in range(num_received):
                start = get(payloads, rank)
                their_words, their_scale = (
                    pointer(start + codes + index * block_code_bytes, np.int32),
                    get(pointer(start, kind), index),
                )
                all_zero = all_zero and their_scale == kind(0)
                for j in range(0, width, WORDS):
                    decode_words(their_words, values, j, width, their_scale, 1, bits, levels)
            fill(offset_by(values, size), kind(0), width * (32 // bits) - size)  # the last words may be partly used
            reciprocal = kind(0)
            if levels == 0:
                scale = mean_magnitude(values, sums, size, kind(1) / kind(size))
                if not scale <= kind(largest):  # rounding may have made it inf
                    scale = kind(largest) if largest_bits(values, size) < infinity else kind(np.nan)
            else:
                known = before != 0 and levels >= ELISION_MIN_LEVELS and num_received == 0
                magnitude = known_magnitude if known else largest_bits(values, size)
                scale = min(from_bits(magnitude) / kind(levels), kind(limit))
                if magnitude >= infinity:
                    scale = kind(np.nan)
                elif all_zero or scale < kind(smallest):
                    scale = kind(0)  # its reciprocal could be inf; the values stay in the residual
                else:
                    reciprocal = kind(1) / scale
            if scale != scale:
                fill(values, kind(0), size)  # the codes are then 0, and the residual is 0 - NaN
            # The residual is written to memory directly if possible. A short block has more codes than values.
            residual_in_place = after != 0 and not after_past_cache and size == block
            residual_out = pointer(after + offset, kind) if residual_in_place else values
            for j in range(0, width, WORDS):
                encode_words(
                    words,
                    values,
                    residual_out,
                    j,
                    width,
                    scale,
                    reciprocal,
                    first,
                    key_low,
                    key_high,
                    bits,
                    levels,
                    stochastic,
                )
            put(pointer(payload, kind), index, scale)
            if after != 0 and not residual_in_place:
                store(pointer(after + offset, kind), values, size, lanes, after_past_cache)
            if out != 0:
                scale *= out_factor
                for j in range(0, width, WORDS):
                    decode_words(words, values, j, width, scale, 0, bits, levels)
                if not abs(scale) <= kind(limit):  # the largest codes may have overflowed
                    finite = largest_bits(values, size) < infinity and finite
                store(pointer(out + offset, kind), values, size, lanes, out_past_cache)
        fence()
        return finite

    def decode(payload: int, codes: int, out: int, count: int, gain: float, added: bool, block: int) -> bool:
        values = scratch(LARGEST_BLOCK, kind)
        factor = kind(gain)
        block_code_bytes = num_words(block, bits) * 4
        past_cache = streamable(out, block * item)
        finite = True
        for index in range((count + block - 1) // block):
            size = min(block, count - index * block)
            here = pointer(out + index * block * item, kind)
            words = pointer(payload + codes + index * block_code_bytes, np.int32)
            scale = get(pointer(payload, kind), index) * factor
            width = num_words(size, bits)
            for j in range(0, width, WORDS):
                decode_words(words, values, j, width, scale, 0, bits, levels)
            if not abs(scale) <= kind(limit):  # the largest codes may have overflowed
                finite = largest_bits(values, size) < infinity and finite
            if added:
                add(here, values, size)
            else:
                store(here, values, size, lanes, past_cache)
        fence()
        return finite

    return merge, decode
