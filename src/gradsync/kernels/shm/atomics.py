"""LLVM intrinsics that Numba lacks: atomics by address, memcpy, system calls, calls by address.

The shared-memory kernels use them on memory that several processes map. Numba compiles them for the host at first use
and keeps them on disk. Counters are 64-bit words that only grow, each on a cache line of its own. A rank stores with
release after it wrote its data, and the others load with acquire before they read it. That is correct on ARM as well
as on x86.
"""

from __future__ import annotations

import platform
from typing import Any

from gradsync.kernels.base import cgutils, intrinsic, ir, types
from gradsync.kernels.shm import futex

LINE_BYTES = 128  # a cache line, and the one that the prefetcher brings along

I64, _I32, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_FUTEX = futex.NUMBER or 0
_WAKE, _ALL_WAITERS = futex.WAKE, 0x7FFFFFFF


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """Read a word; everything that its writer wrote before it is visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_and_fence(typing_context: Any, address: Any, value: Any) -> Any:
    """Store with release, then a full fence: a later load of the sleeping flags must not be moved before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def increment(typing_context: Any, address: Any) -> Any:
    """Add one atomically: several ranks may add to the same word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), ir.Constant(I64, 1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def relax(typing_context: Any) -> Any:
    """Tell the core that this is a spinning loop."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if on_x86:
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), pause), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Turn an address into the pointer that ``numba.carray`` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def copy(typing_context: Any, to: Any, start: Any, num_bytes: Any) -> Any:
    """Copy memory by address; the two must not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        there, here = (builder.inttoptr(address, _BYTE.as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, there, here, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def wake(typing_context: Any, address: Any) -> Any:
    """Wake all threads that sleep on the futex at this address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64] * 7)
        syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        numbers = (_FUTEX, None, _WAKE, _ALL_WAITERS, 0, 0, 0)
        builder.call(syscall, [args[0] if number is None else ir.Constant(I64, number) for number in numbers])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def call_sum(typing_context: Any, function: Any, rows: Any, num_rows: Any, out: Any, first: Any, end: Any) -> Any:
    """Call one of the compiled sums of ``sums.py`` by its address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 5)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), generate
