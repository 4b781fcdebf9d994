"""LLVM intrinsics that Numba lacks for loops that vectorize: raw pointers, stack scratch, bit casts, streaming stores.

Numba's arrays can be indexed from the end, and its integers are promoted to 64 bits: both keep LLVM from vectorizing,
or from doing it well. Here a pointer is a raw pointer, and 32-bit integers stay 32 bits wide.
"""

from __future__ import annotations

from typing import Any

from gradsync.kernels.base import VECTOR_BYTES, cgutils, intrinsic, ir, types

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BITS_OF = {types.float32: types.int32, types.float64: types.int64}


# -- memory ---------------------------------------------------------------------------------------------------------


@intrinsic
def pointer(typing_context: Any, address: Any, kind: Any) -> Any:
    """A pointer to values of a type (``np.float32``), from an address."""
    element = kind.instance_type

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_data_type(element).as_pointer())

    return types.CPointer(element)(types.int64, kind), generate


@intrinsic(prefer_literal=True)
def scratch(typing_context: Any, count: Any, kind: Any) -> Any:
    """An array on the stack, of constant length, aligned to a vector. LLVM knows that no other pointer aliases it."""
    element, length = kind.instance_type, count.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = cgutils.alloca_once(builder, ir.ArrayType(context.get_data_type(element), length))
        array.align = VECTOR_BYTES
        return builder.gep(array, [ir.Constant(_I32, 0), ir.Constant(_I32, 0)], inbounds=True)

    return types.CPointer(element)(count, kind), generate


@intrinsic
def offset_by(typing_context: Any, start: Any, count: Any) -> Any:
    """The pointer ``start + count``, counted in values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]], inbounds=True)

    return start(start, types.int64), generate


@intrinsic
def get(typing_context: Any, start: Any, index: Any) -> Any:
    """The value at an index."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]], inbounds=True))

    return start.dtype(start, types.int64), generate


@intrinsic
def put(typing_context: Any, start: Any, index: Any, value: Any) -> Any:
    """Write the value at an index."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(args[0], [args[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(start, types.int64, start.dtype), generate


@intrinsic
def stream(typing_context: Any, to: Any, start: Any, index: Any) -> Any:
    """Copy the vector at an index with a streaming store, which bypasses the cache; ``to`` is aligned to a vector."""
    size = 4 if to.dtype == types.float32 else 8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(context.get_data_type(to.dtype), VECTOR_BYTES // size)
        there, here = (
            builder.bitcast(builder.gep(where, [args[2]], inbounds=True), vector.as_pointer()) for where in args[:2]
        )
        store = builder.store(builder.load(here, align=size), there, align=VECTOR_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return types.void(to, to, types.int64), generate


# -- numbers --------------------------------------------------------------------------------------------------------


@intrinsic
def magnitude_bits(typing_context: Any, value: Any) -> Any:
    """The bits of ``|value|``: ordered as the magnitudes are, with inf above every number and NaN above inf."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = 32 if value == types.float32 else 64
        bits = builder.bitcast(args[0], ir.IntType(width))
        return builder.and_(bits, ir.Constant(bits.type, 2 ** (width - 1) - 1))

    return _BITS_OF[value](value), generate


@intrinsic
def larger_int(typing_context: Any, one: Any, other: Any) -> Any:
    """The larger of two signed integers of the same width."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", args[0], args[1]), args[0], args[1])

    return one(one, one), generate


@intrinsic
def bit_or(typing_context: Any, one: Any, other: Any) -> Any:
    """The bitwise OR of two integers of the same width."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(args[0], args[1])

    return one(one, one), generate


@intrinsic
def from_bits(typing_context: Any, bits: Any) -> Any:
    """The float that has these bits."""
    kind = types.float32 if bits == types.int32 else types.float64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_data_type(kind))

    return kind(bits), generate


@intrinsic
def narrow_half(typing_context: Any, value: Any) -> Any:
    """The bits of the nearest float16. A float64 is rounded to float32 first, as torch does."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        single = args[0] if value == types.float32 else builder.fptrunc(args[0], ir.FloatType())
        return builder.bitcast(builder.fptrunc(single, ir.HalfType()), ir.IntType(16))

    return types.int16(value), generate


@intrinsic
def widen_half(typing_context: Any, short: Any, kind: Any) -> Any:
    """The float, of type ``kind``, of a float16's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.bitcast(args[0], ir.HalfType())
        return builder.fpext(half, context.get_data_type(kind.instance_type))

    return kind.instance_type(types.int16, kind), generate


@intrinsic
def narrow_bfloat(typing_context: Any, value: Any) -> Any:
    """The bits of the nearest bfloat16, ties to even. A float64 is rounded to float32 first, as torch does."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        single = args[0] if value == types.float32 else builder.fptrunc(args[0], ir.FloatType())
        bits = builder.bitcast(single, _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        rounded = builder.lshr(rounded, ir.Constant(_I32, 16))
        is_nan = builder.fcmp_unordered("uno", single, single)
        short = builder.select(is_nan, ir.Constant(_I32, 0x7FC0), rounded)
        return builder.trunc(short, ir.IntType(16))

    return types.int16(value), generate


@intrinsic
def widen_bfloat(typing_context: Any, short: Any, kind: Any) -> Any:
    """The float, of type ``kind``, of a bfloat16's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        single = builder.bitcast(bits, ir.FloatType())
        wide = context.get_data_type(kind.instance_type)
        return single if kind.instance_type == types.float32 else builder.fpext(single, wide)

    return kind.instance_type(types.int16, kind), generate
