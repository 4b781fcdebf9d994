"""The sum of what several payloads say, in one pass: each block is decoded in scratch and written to memory once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsync.codecs.blockwise import LARGEST_BLOCK, WORDS, scale_limit
from gradsync.codecs.kernels.blocks import KINDS, words_of
from gradsync.codecs.kernels.lanes import get, pointer, scratch
from gradsync.codecs.kernels.moves import largest_bits, store, streamable
from gradsync.codecs.kernels.words import decode_words
from gradsync.compiled import VECTOR_BYTES, fence, numba


@functools.cache
def total_of(dtype: torch.dtype, bits: int, levels: int) -> Any:
    """The compiled sum for a codec and values of a dtype."""
    kind, infinity = KINDS[dtype]
    compiled = numba.njit("b1(i8, i8, i8, i8, i8, f8, i8)", nogil=True, cache=True)
    return compiled(_total(kind, infinity, bits, levels, scale_limit(dtype, levels)))


def _total(kind: Any, infinity: int, bits: int, levels: int, limit: float) -> Callable[..., bool]:
    item = np.dtype(kind).itemsize
    lanes = VECTOR_BYTES // item

    def total(payloads: int, num_payloads: int, codes: int, out: int, count: int, gain: float, block: int) -> bool:
        values = scratch(LARGEST_BLOCK, kind)
        starts = pointer(payloads, np.int64)
        factor = kind(gain)
        words_a_block = words_of(block, bits) * 4
        past_cache = streamable(out, block * item)
        finite = True
        for index in range((count + block - 1) // block):
            size = min(block, count - index * block)
            width = words_of(size, bits)
            sure = True
            for rank in range(num_payloads):
                start = get(starts, rank)
                words = pointer(start + codes + index * words_a_block, np.int32)
                scale = get(pointer(start, kind), index) * factor
                sure = sure and abs(scale) * kind(num_payloads) <= kind(limit)
                if rank == 0:
                    for j in range(0, width, WORDS):
                        decode_words(words, values, j, width, scale, 0, bits, levels)
                else:
                    for j in range(0, width, WORDS):
                        decode_words(words, values, j, width, scale, 1, bits, levels)
            if not sure:  # the largest codes may have overflowed
                finite = largest_bits(values, size) < infinity and finite
            store(pointer(out + index * block * item, kind), values, size, lanes, past_cache)
        fence()
        return finite

    return total
