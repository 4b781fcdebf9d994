"""Loops over one block of values, inlined into the kernels: load to scratch, add, find the maximum, store to memory.

A kernel copies a block to scratch on the stack, works on it there and stores it: see [Note: one scratch] in
codecs/blockwise.py. Pointers are those of pointers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.kernels.base import VECTOR_BYTES, numba
from gradsync.kernels.pointers import bit_or, get, larger_int, magnitude_bits, offset_by, put, stream


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that is always inlined into the kernel that calls it."""
    return numba.njit(function, forceinline=True)


@inlined
def load(values: Any, x: Any, count: int, gain: Any) -> None:
    """Write ``gain`` times the values of x to scratch."""
    for i in range(count):
        put(values, i, get(x, i) * gain)


@inlined
def load_sum(values: Any, x: Any, others: Any, count: int, gain: Any) -> None:
    """Write ``gain * x + others`` to scratch."""
    for i in range(count):
        put(values, i, get(x, i) * gain + get(others, i))


@inlined
def load_sum_and_max(values: Any, x: Any, others: Any, count: int, gain: Any) -> Any:
    """As ``load_sum``. Returns the OR of the bits of ``|gain * x|``, and the bits of the largest magnitude written.

    The first is 0 if and only if all of ``gain * x`` is 0.
    """
    seen = magnitude_bits(get(x, 0) * gain)
    largest = magnitude_bits(get(x, 0) * gain + get(others, 0))
    for i in range(count):
        own = get(x, i) * gain
        value = own + get(others, i)
        seen = bit_or(seen, magnitude_bits(own))
        largest = larger_int(largest, magnitude_bits(value))
        put(values, i, value)
    return seen, largest


@inlined
def is_all_zero(x: Any, count: int, gain: Any) -> Any:
    """Whether all of ``gain * x`` is 0. The first 8 values decide that for most blocks."""
    seen = magnitude_bits(get(x, 0) * gain)
    for i in range(min(count, 8)):
        seen = bit_or(seen, magnitude_bits(get(x, i) * gain))
    if seen != 0:
        return False
    for i in range(count):
        seen = bit_or(seen, magnitude_bits(get(x, i) * gain))
    return seen == 0


@inlined
def add(out: Any, values: Any, count: int) -> None:
    """Add scratch to memory."""
    for i in range(count):
        put(out, i, get(out, i) + get(values, i))


@inlined
def fill(values: Any, value: Any, count: int) -> None:
    """Write the same value everywhere."""
    for i in range(count):
        put(values, i, value)


@inlined
def store(out: Any, values: Any, count: int, lanes: int, past_cache: bool) -> None:
    """Write scratch to memory; in streaming stores, which bypass the cache, if ``past_cache``."""
    if past_cache:
        vectors = count // lanes
        for v in range(vectors):
            stream(out, values, v * lanes)
        out, values, count = (
            offset_by(out, vectors * lanes),
            offset_by(values, vectors * lanes),
            count - vectors * lanes,
        )
    for i in range(count):
        put(out, i, get(values, i))


@inlined
def streamable(address: int, block_bytes: int) -> bool:
    """Whether every block of an array is aligned for streaming stores."""
    return address % VECTOR_BYTES == 0 and block_bytes % VECTOR_BYTES == 0


@inlined
def largest_bits(values: Any, count: int) -> Any:
    """The bits of the largest magnitude; NaN if there is one."""
    largest = magnitude_bits(get(values, 0))
    for i in range(count):
        largest = larger_int(largest, magnitude_bits(get(values, i)))
    return largest
