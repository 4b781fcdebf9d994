"""The sum of several decoded payloads of a blockwise codec, in one pass.

Each block of all payloads is decoded and summed in scratch, and written to memory once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsync.kernels.base import VECTOR_BYTES, fence, numba
from gradsync.kernels.block_ops import largest_bits, store, streamable
from gradsync.kernels.codecs.block_layout import LARGEST_BLOCK, WORDS, scale_limit
from gradsync.kernels.codecs.blockwise import FLOAT_TYPES, num_words
from gradsync.kernels.codecs.packing import decode_words
from gradsync.kernels.pointers import get, pointer, scratch


@functools.cache
def payload_sum(dtype: torch.dtype, bits: int, levels: int) -> Any:
    """The compiled sum of payloads, for a codec and values of a dtype."""
    kind, infinity = FLOAT_TYPES[dtype]
    compiled = numba.njit("b1(i8, i8, i8, i8, i8, f8, i8)", nogil=True, cache=True)
    return compiled(_define_payload_sum(kind, infinity, bits, levels, scale_limit(dtype, levels)))


def _define_payload_sum(kind: Any, infinity: int, bits: int, levels: int, limit: float) -> Callable[..., bool]:
    item = np.dtype(kind).itemsize
    lanes = VECTOR_BYTES // item

    def sum_payloads(
        payloads: int, num_payloads: int, codes: int, out: int, count: int, gain: float, block: int
    ) -> bool:
        values = scratch(LARGEST_BLOCK, kind)
        starts = pointer(payloads, np.int64)
        factor = kind(gain)
        block_code_bytes = num_words(block, bits) * 4
        past_cache = streamable(out, block * item)
        finite = True
        for index in range((count + block - 1) // block):
            size = min(block, count - index * block)
            width = num_words(size, bits)
            cannot_overflow = True
            for rank in range(num_payloads):
                start = get(starts, rank)
                words = pointer(start + codes + index * block_code_bytes, np.int32)
                scale = get(pointer(start, kind), index) * factor
                cannot_overflow = cannot_overflow and abs(scale) * kind(num_payloads) <= kind(limit)
                if rank == 0:
                    for j in range(0, width, WORDS):
                        decode_words(words, values, j, width, scale, 0, bits, levels)
                else:
                    for j in range(0, width, WORDS):
                        decode_words(words, values, j, width, scale, 1, bits, levels)
            if not cannot_overflow:  # the largest codes may have overflowed
                finite = largest_bits(values, size) < infinity and finite
            store(pointer(out + index * block * item, kind), values, size, lanes, past_cache)
        fence()
        return finite

    return sum_payloads
