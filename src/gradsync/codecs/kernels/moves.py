"""A block of values between memory and scratch: the steps that all passes are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.codecs.kernels.lanes import either, get, larger, magnitude_bits, put, shifted, stream
from gradsync.compiled import VECTOR_BYTES, numba


def inlined(function: Callable[..., Any]) -> Any:
    """A step that becomes part of the pass which calls it."""
    return numba.njit(function, forceinline=True)


@inlined
def load(values: Any, x: Any, count: int, gain: Any) -> None:
    """Write ``gain`` times the values of x to scratch."""
    for i in range(count):
        put(values, i, get(x, i) * gain)


@inlined
def load_sum(values: Any, x: Any, others: Any, count: int, gain: Any) -> None:
    """Write ``gain`` times the values of x, and others added, to scratch."""
    for i in range(count):
        put(values, i, get(x, i) * gain + get(others, i))


@inlined
def load_and_look(values: Any, x: Any, others: Any, count: int, gain: Any) -> Any:
    """As ``load_sum``; returns 0 if all of x is, and the bits of the largest magnitude that was written."""
    seen = magnitude_bits(get(x, 0) * gain)
    largest = magnitude_bits(get(x, 0) * gain + get(others, 0))
    for i in range(count):
        own = get(x, i) * gain
        value = own + get(others, i)
        seen = either(seen, magnitude_bits(own))
        largest = larger(largest, magnitude_bits(value))
        put(values, i, value)
    return seen, largest


@inlined
def is_nothing(x: Any, count: int, gain: Any) -> Any:
    """Whether all of x is 0. Of most blocks the first values tell."""
    seen = magnitude_bits(get(x, 0) * gain)
    for i in range(min(count, 8)):
        seen = either(seen, magnitude_bits(get(x, i) * gain))
    if seen != 0:
        return False
    for i in range(count):
        seen = either(seen, magnitude_bits(get(x, i) * gain))
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
    """Write scratch to memory, in vectors past the cache if they may be."""
    if past_cache:
        vectors = count // lanes
        for v in range(vectors):
            stream(out, values, v * lanes)
        out, values, count = shifted(out, vectors * lanes), shifted(values, vectors * lanes), count - vectors * lanes
    for i in range(count):
        put(out, i, get(values, i))


@inlined
def streamable(address: int, block_bytes: int) -> bool:
    """Whether every block of an array begins where a vector may be written past the cache."""
    return address % VECTOR_BYTES == 0 and block_bytes % VECTOR_BYTES == 0


@inlined
def largest_bits(values: Any, count: int) -> Any:
    """The bits of the largest magnitude; NaN if there is one."""
    largest = magnitude_bits(get(values, 0))
    for i in range(count):
        largest = larger(largest, magnitude_bits(get(values, i)))
    return largest
