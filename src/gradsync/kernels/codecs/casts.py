"""The kernels of the 16-bit casts: scale, add the residual, cast, and write the rounding error, in one pass."""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradsync.kernels.base import VECTOR_BYTES, fence, numba
from gradsync.kernels.block_ops import add, largest_bits, load, load_sum, store, streamable
from gradsync.kernels.codecs.blockwise import FLOAT_TYPES
from gradsync.kernels.pointers import (
    get,
    narrow_bfloat,
    narrow_half,
    pointer,
    put,
    scratch,
    widen_bfloat,
    widen_half,
)

BLOCK = 1024  # values at a time
ENCODE_SIGNATURE = "void(i8, i8, f8, i8, i8, i8)"
DECODE_SIGNATURE = "b1(i8, i8, i8, f8, b1)"


@functools.cache
def available(short: torch.dtype) -> bool:
    """Whether the processor has instructions to convert a dtype. Without them torch is as fast."""
    if short == torch.bfloat16 or platform.machine() in ("aarch64", "arm64"):
        return True
    features: Any = importlib.import_module("llvmlite.binding").get_host_cpu_features()
    return bool(features.get("f16c", False))


@functools.cache
def encode_and_decode(dtype: torch.dtype, short: torch.dtype) -> tuple[Any, Any]:
    """The two compiled functions of a cast, ``encode`` and ``decode``, for values of a dtype."""
    kind, infinity = FLOAT_TYPES[dtype]
    encode, decode = _define_encode_and_decode(kind, infinity, short == torch.float16)
    compiled = functools.partial(numba.njit, nogil=True, cache=True)
    return compiled(ENCODE_SIGNATURE)(encode), compiled(DECODE_SIGNATURE)(decode)


def _define_encode_and_decode(kind: Any, infinity: int, half: bool) -> tuple[Callable[..., None], Callable[..., bool]]:
    item = np.dtype(kind).itemsize
    lanes = VECTOR_BYTES // item

    def encode(x: int, count: int, gain: float, before: int, after: int, payload: int) -> None:
        values = scratch(BLOCK, kind)
        factor = kind(gain)
        past_cache = after != before and streamable(after, BLOCK * item)
        for index in range((count + BLOCK - 1) // BLOCK):
            first = index * BLOCK
            size, offset = min(BLOCK, count - first), first * item
            codes = pointer(payload + first * 2, np.int16)
            if before != 0:
                load_sum(values, pointer(x + offset, kind), pointer(before + offset, kind), size, factor)
            else:
                load(values, pointer(x + offset, kind), size, factor)
            for i in range(size):
                value = get(values, i)
                if half:
                    short = narrow_half(value)
                    put(values, i, value - widen_half(short, kind))
                else:
                    short = narrow_bfloat(value)
                    put(values, i, value - widen_bfloat(short, kind))
                put(codes, i, short)
            if after != 0:
                store(pointer(after + offset, kind), values, size, lanes, past_cache)
        fence()

    def decode(payload: int, out: int, count: int, gain: float, added: bool) -> bool:
        values = scratch(BLOCK, kind)
        factor = kind(gain)
        past_cache = streamable(out, BLOCK * item)
        finite = True
        for index in range((count + BLOCK - 1) // BLOCK):
            first = index * BLOCK
            size = min(BLOCK, count - first)
            here, codes = pointer(out + first * item, kind), pointer(payload + first * 2, np.int16)
            for i in range(size):
                if half:
                    put(values, i, widen_half(get(codes, i), kind) * factor)
                else:
                    put(values, i, widen_bfloat(get(codes, i), kind) * factor)
            finite = largest_bits(values, size) < infinity and finite
            if added:
                add(here, values, size)
            else:
                store(here, values, size, lanes, past_cache)
        fence()
        return finite

    return encode, decode
