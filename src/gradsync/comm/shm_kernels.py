"""The compiled part of the shared-memory transport: flags with acquire and release, and sums that read memory once.

Numba compiles these for the host's own vector units at first use. Flags are 64-bit counters that only grow, each on a
cache line of its own. A rank stores with release after it wrote its data, and the others load with acquire before they
read it: right on ARM as on x86.
"""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# What Numba compiles means other things than the Python it is written in: there is nothing here for a type checker.
numba: Any = importlib.import_module("numba")
types: Any = numba.types
ir: Any = importlib.import_module("llvmlite.ir")
intrinsic: Any = importlib.import_module("numba.extending").intrinsic

LINE_BYTES = 128  # a cache line, and the one that the prefetcher brings along
SUM, MAX, MIN = range(3)
BLOCK = 2048  # values summed at a time: of 8 ranks they still fit the first-level cache

_I64 = ir.IntType(64)


@intrinsic
def _load_acquire(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store_and_fence(typing_context: Any, address: Any, value: Any) -> Any:
    """Store with release, then a full fence: the load of sleepers that follows must not come before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _relax(typing_context: Any) -> Any:
    """Tell the core that this is a spinning loop."""
    name = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else ""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if name:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic(name, (), kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@numba.njit("b1(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def wait_all(address: int, stride_bytes: int, num_ranks: int, value: int, spins: int) -> bool:
    """Whether every rank's counter has reached ``value``, looking at most ``spins`` times at each."""
    for rank in range(num_ranks):
        looked = 0
        while _load_acquire(address + rank * stride_bytes) < value:
            looked += 1
            if looked >= spins:
                return False
            _relax()
    return True


@numba.njit("i8(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def publish(address: int, value: int, sleeping: int, stride_bytes: int, num_ranks: int) -> int:
    """Set this rank's counter; returns how many ranks sleep and must be woken."""
    _store_and_fence(address, value)
    sleepers = 0
    for rank in range(num_ranks):
        sleepers += _load_acquire(sleeping + rank * stride_bytes)
    return sleepers


@numba.njit("void(i8, i8)", nogil=True, cache=True)
def store(address: int, value: int) -> None:
    """Set a word that no sleeper waits for."""
    _store_and_fence(address, value)


@numba.njit("i8(i8)", nogil=True, cache=True)
def load(address: int) -> int:
    """Read a word, and whatever was written before it was set."""
    value: int = _load_acquire(address)
    return value


NUMBA_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


@numba.njit(inline="always")
def _combine(a: Any, b: Any, code: int) -> Any:
    if code == SUM:
        return a + b
    if code == MAX:
        return a if a > b or a != a else b  # a NaN stays, as with torch
    return a if a < b or a != a else b


@functools.cache
def reduce_kernel(dtype: torch.dtype, op: str) -> Callable[[Any, int, int, int, bool], None]:
    """Compile the kernel for a dtype: ``(addresses of inputs, out address, first, end, everywhere)``.

    It reduces values ``first`` to ``end`` of all inputs, in rank order, into ``out``, or with ``everywhere`` back into
    every input.
    """
    kind = NUMBA_DTYPES[dtype]
    code = {"sum": SUM, "max": MAX, "min": MIN}[op]  # a constant of the compiled code, which Numba can keep on disk

    def reduce(inputs: Any, out: int, first: int, end: int, everywhere: bool) -> None:
        num_ranks = len(inputs)
        if num_ranks == 2:
            a = numba.carray(_pointer(inputs[0]), end, kind)
            b = numba.carray(_pointer(inputs[1]), end, kind)
            if everywhere:
                for i in range(first, end):
                    value = _combine(a[i], b[i], code)
                    a[i] = value
                    b[i] = value
            else:
                c = numba.carray(_pointer(out), end, kind)
                for i in range(first, end):
                    c[i] = _combine(a[i], b[i], code)
            return
        total = np.empty(BLOCK, kind)
        for begin in range(first, end, BLOCK):
            width = min(BLOCK, end - begin)
            row = numba.carray(_pointer(inputs[0]), end, kind)
            for i in range(width):
                total[i] = row[begin + i]
            for rank in range(1, num_ranks):
                row = numba.carray(_pointer(inputs[rank]), end, kind)
                for i in range(width):
                    total[i] = _combine(total[i], row[begin + i], code)
            for rank in range(num_ranks if everywhere else 1):
                row = numba.carray(_pointer(inputs[rank] if everywhere else out), end, kind)
                for i in range(width):
                    row[begin + i] = total[i]

    signature = "void(i8[::1], i8, i8, i8, b1)"
    compiled: Callable[[Any, int, int, int, bool], None] = numba.njit(signature, nogil=True, cache=True)(reduce)
    return compiled
