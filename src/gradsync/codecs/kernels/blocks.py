"""The passes over all blocks of a parameter: scales, codes, residuals and what was received, in one go.

[Note: one scratch] A block is worked on in scratch on the stack, which stays in the first-level cache, and is read from
and written to memory once. The compiler knows that nothing else points to it: arrays that may be the same one (a
residual before and after) would make it do one value at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsync.codecs.blockwise import LARGEST_BLOCK, PATIENT_LEVELS, SUMS, WORDS, scale_limit
from gradsync.codecs.kernels.lanes import from_bits, get, magnitude_bits, pointer, put, scratch, shifted
from gradsync.codecs.kernels.moves import (
    add,
    fill,
    inlined,
    is_nothing,
    largest_bits,
    load,
    load_and_look,
    load_sum,
    store,
    streamable,
)
from gradsync.codecs.kernels.words import decode_words, encode_words
from gradsync.compiled import VECTOR_BYTES, fence, numba

KINDS: dict[torch.dtype, Any] = {  # with the bits of inf
    torch.float32: (np.float32, 0x7F800000),
    torch.float64: (np.float64, 0x7FF << 52),
}
MERGE = "b1(i8, i8, f8, i8, i8, i8, i8, i8, i8, i8, f8, i8, i4, i4)"
DECODE = "b1(i8, i8, i8, i8, f8, b1, i8)"


@inlined
def words_of(count: int, bits: int) -> int:
    """The words that hold so many codes, in whole vectors."""
    return (count * bits + 32 * WORDS - 1) // (32 * WORDS) * WORDS


@inlined
def mean_magnitude(values: Any, sums: Any, count: int, share: Any) -> Any:
    """The mean of ``|value|``, in as many sums as ``SUMS``: the order is the same in torch, so the bits are too."""
    fill(sums, share * 0, SUMS)
    for row in range(count // SUMS):
        add_magnitudes(sums, shifted(values, row * SUMS), SUMS, share)
    add_magnitudes(sums, shifted(values, count // SUMS * SUMS), count % SUMS, share)
    for half in (32, 16, 8, 4, 2, 1):
        upper = shifted(sums, half)
        for i in range(half):
            put(sums, i, get(sums, i) + get(upper, i))
    return get(sums, 0)


@inlined
def add_magnitudes(sums: Any, values: Any, count: int, share: Any) -> None:
    """Add ``share`` of the magnitude of each value to a sum of its own."""
    for i in range(count):
        put(sums, i, get(sums, i) + abs(get(values, i)) * share)


# -- all blocks -----------------------------------------------------------------------------------------------------


@functools.cache
def passes(dtype: torch.dtype, bits: int, levels: int, stochastic: bool) -> tuple[Any, Any]:
    """The two compiled functions of a codec, ``merge`` and ``decode``, for values of a dtype.

    ``levels``: the codes go from minus that to that, in ``bits`` bits. 0: one bit that is the sign.
    """
    kind, infinity = KINDS[dtype]
    merge, decode = _passes(kind, infinity, bits, levels, int(stochastic), scale_limit(dtype, levels))
    compiled = functools.partial(numba.njit, nogil=True, cache=True)
    # Kept on disk: what the functions close over (numbers and a type) is part of the key.
    return compiled(MERGE)(merge), compiled(DECODE)(decode)


def _passes(
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
        one: int,
        other: int,
    ) -> bool:
        values, sums = scratch(LARGEST_BLOCK, kind), scratch(SUMS, kind)
        payloads = pointer(received, np.int64)
        factor, out_factor = kind(gain), kind(out_gain)
        words_a_block = words_of(block, bits) * 4
        # A line that was just read is at hand: only a residual that goes elsewhere is better written past the cache.
        after_past_cache = after != before and streamable(after, block * item)
        out_past_cache = out != x and streamable(out, block * item)
        # What is left of a quiet block, and is where it is to be, need not even be read: see [Note: patience].
        stays = before != 0 and after == before and levels >= PATIENT_LEVELS and num_received == 0 and out == 0
        num_blocks = (count + block - 1) // block
        if num_blocks * item < codes:
            put(pointer(payload + codes - 4, np.int32), 0, np.int32(0))
        finite = True
        for index in range(num_blocks):
            first = index * block
            size, at = min(block, count - first), first * item
            words = pointer(payload + codes + index * words_a_block, np.int32)
            if stays and is_nothing(pointer(x + at, kind), size, factor):
                put(pointer(payload, kind), index, kind(0))
                fill(words, np.int32(0), words_of(size, bits))
                continue
            quiet, looked = False, magnitude_bits(factor)
            if before != 0 and levels >= PATIENT_LEVELS:
                seen, looked = load_and_look(values, pointer(x + at, kind), pointer(before + at, kind), size, factor)
                quiet = seen == 0
            elif before != 0:
                load_sum(values, pointer(x + at, kind), pointer(before + at, kind), size, factor)
            else:
                load(values, pointer(x + at, kind), size, factor)
            width = words_of(size, bits)
            for rank in range(num_received):
                start = get(payloads, rank)
                theirs, there = (
                    pointer(start + codes + index * words_a_block, np.int32),
                    get(pointer(start, kind), index),
                )
                quiet = quiet and there == kind(0)
                for j in range(0, width, WORDS):
                    decode_words(theirs, values, j, width, there, 1, bits, levels)
            fill(shifted(values, size), kind(0), width * (32 // bits) - size)  # the last words may not be full
            reciprocal = kind(0)
            if levels == 0:
                scale = mean_magnitude(values, sums, size, kind(1) / kind(size))
                if not scale <= kind(largest):  # it may have been rounded above every number
                    scale = kind(largest) if largest_bits(values, size) < infinity else kind(np.nan)
            else:
                known = before != 0 and levels >= PATIENT_LEVELS and num_received == 0
                magnitude = looked if known else largest_bits(values, size)
                scale = min(from_bits(magnitude) / kind(levels), kind(limit))
                if magnitude >= infinity:
                    scale = kind(np.nan)
                elif quiet or scale < kind(smallest):
                    scale = kind(0)  # its reciprocal could be inf: these say nothing, and stay in the residual
                else:
                    reciprocal = kind(1) / scale
            if scale != scale:
                fill(values, kind(0), size)  # then the codes are 0, and what is left is 0 - NaN
            # What is left goes to memory at once where it may: the words of a short block say more than there is.
            leave = after != 0 and not after_past_cache and size == block
            left = pointer(after + at, kind) if leave else values
            for j in range(0, width, WORDS):
                encode_words(
                    words, values, left, j, width, scale, reciprocal, first, one, other, bits, levels, stochastic
                )
            put(pointer(payload, kind), index, scale)
            if after != 0 and not leave:
                store(pointer(after + at, kind), values, size, lanes, after_past_cache)
            if out != 0:
                scale *= out_factor
                for j in range(0, width, WORDS):
                    decode_words(words, values, j, width, scale, 0, bits, levels)
                if not abs(scale) <= kind(limit):  # the largest codes may have overflowed
                    finite = largest_bits(values, size) < infinity and finite
                store(pointer(out + at, kind), values, size, lanes, out_past_cache)
        fence()
        return finite

    def decode(payload: int, codes: int, out: int, count: int, gain: float, added: bool, block: int) -> bool:
        values = scratch(LARGEST_BLOCK, kind)
        factor = kind(gain)
        words_a_block = words_of(block, bits) * 4
        past_cache = streamable(out, block * item)
        finite = True
        for index in range((count + block - 1) // block):
            size = min(block, count - index * block)
            here = pointer(out + index * block * item, kind)
            words = pointer(payload + codes + index * words_a_block, np.int32)
            scale = get(pointer(payload, kind), index) * factor
            width = words_of(size, bits)
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
