"""Bit packing for blockwise codecs: values to words of codes and back, one vector of words at a time, in LLVM.

[Note: bit planes] Codes of b bits are packed into 32-bit words such that neighbours in a word are far apart in the
block: word j of w holds values j, j + w, j + 2w, ... (plane 0, 1, 2, ...). So every operation works on whole vectors of
values, no shuffle is needed, and a vector of words stays in a register until it is full.

``bits``, ``levels`` and ``stochastic`` are compile-time constants at every call: each codec gets its own instructions.
"""

from __future__ import annotations

from typing import Any

from gradsync.kernels.base import cgutils, intrinsic, ir, types
from gradsync.kernels.codecs.block_layout import WORDS

_I32 = ir.IntType(32)

# Floats of this size are one unit apart: adding it rounds to an integer, with ties to even as in torch.round, and the
# lowest bits of the sum are then that integer.
_ROUNDER = {types.float32: 1.5 * 2.0**23, types.float64: 1.5 * 2.0**52}


class _Vectors:
    """Builds LLVM instructions for vectors of ``WORDS`` elements."""

    def __init__(self, builder: Any, kind: Any) -> None:
        self.builder = builder
        self.size = 4 if kind == types.float32 else 8
        self.float = ir.VectorType(ir.FloatType() if self.size == 4 else ir.DoubleType(), WORDS)
        self.word = ir.VectorType(_I32, WORDS)
        self.wide = ir.VectorType(ir.IntType(8 * self.size), WORDS)  # as wide as the floats

    def splat(self, value: Any, vector: Any) -> Any:
        if not isinstance(value, int | float):
            filled = ir.Constant(vector, ir.Undefined)
            for lane in range(WORDS):
                filled = self.builder.insert_element(filled, value, ir.Constant(_I32, lane))
            return filled
        return ir.Constant(vector, [value] * WORDS)

    def at(self, start: Any, index: Any, vector: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(start, [index], inbounds=True), vector.as_pointer())

    def load(self, start: Any, index: Any) -> Any:
        return self.builder.load(self.at(start, index, self.float), align=self.size)

    def store(self, value: Any, start: Any, index: Any) -> None:
        self.builder.store(value, self.at(start, index, self.float), align=self.size)

    def floor(self, value: Any) -> Any:
        name = f"llvm.floor.v{WORDS}f{8 * self.size}"
        kind = ir.FunctionType(self.float, [self.float])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [value])

    def minimum(self, value: Any, bound: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", value, bound), value, bound)

    def low_words(self, value: Any) -> Any:
        bits = self.builder.bitcast(value, self.wide)
        return bits if self.size == 4 else self.builder.trunc(bits, self.word)

    def uniform(self, position: Any, key_low: Any, key_high: Any) -> Any:
        """Random numbers in [0, 1) by position and key halves: the same as ``uniform`` in codecs/random.py."""
        builder, word = self.builder, self.word
        lane = ir.Constant(word, list(range(WORDS)))
        bits = builder.add(self.splat(builder.trunc(position, _I32), word), lane)
        bits = builder.add(builder.mul(bits, self.splat(0x9E3779B1, word)), key_low)
        bits = builder.xor(bits, builder.lshr(bits, self.splat(16, word)))
        bits = builder.xor(builder.mul(bits, self.splat(0x7FEB352D, word)), key_high)
        bits = builder.xor(bits, builder.lshr(bits, self.splat(15, word)))
        bits = builder.lshr(builder.mul(bits, self.splat(0x846CA68B, word)), self.splat(8, word))
        return builder.fmul(builder.sitofp(bits, self.float), self.splat(2.0**-24, self.float))

    def signed(self, scale: Any, code: Any) -> Any:
        """The scale, negative where the lowest bit of the code is set."""
        builder = self.builder
        sign_bits = code if self.size == 4 else builder.zext(code, self.wide)
        sign_bits = builder.shl(sign_bits, self.splat(8 * self.size - 1, self.wide))
        return builder.bitcast(builder.xor(builder.bitcast(scale, self.wide), sign_bits), self.float)


@intrinsic(prefer_literal=True)
def encode_words(
    typing_context: Any,
    words: Any,
    values: Any,
    residual: Any,
    index: Any,
    width: Any,
    scale: Any,
    reciprocal: Any,
    first: Any,
    key_low: Any,
    key_high: Any,
    bits: Any,
    levels: Any,
    stochastic: Any,
) -> Any:
    """Write the words from ``index`` on, of ``width``; write the rounding error to ``residual``, maybe ``values``."""
    num_bits, num_levels, is_stochastic = bits.literal_value, levels.literal_value, bool(stochastic.literal_value)
    kind, number = values.dtype, types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = _Vectors(builder, kind)
        scales, reciprocals = (vectors.splat(value, vectors.float) for value in args[5:7])
        halves = [vectors.splat(half, vectors.word) for half in args[8:10]]
        rounder = vectors.splat(_ROUNDER[kind], vectors.float)
        packed = vectors.splat(0, vectors.word)
        at = args[3]
        for shift in range(0, 32, num_bits):
            value = vectors.load(args[1], at)
            if num_levels == 0:
                below = builder.fcmp_ordered("<", value, vectors.splat(0.0, vectors.float))
                code = builder.zext(below, vectors.word)
                decoded = vectors.signed(scales, code)
            elif is_stochastic:
                draw = vectors.uniform(builder.add(args[7], at), *halves)
                whole = vectors.floor(builder.fadd(builder.fmul(value, reciprocals), draw))
                whole = vectors.minimum(whole, vectors.splat(float(num_levels), vectors.float))
                code = vectors.low_words(builder.fadd(whole, rounder))
                decoded = builder.fmul(whole, scales)
            else:
                rounded = builder.fadd(builder.fmul(value, reciprocals), rounder)
                code = vectors.low_words(rounded)
                decoded = builder.fmul(builder.fsub(rounded, rounder), scales)
            code = builder.and_(code, vectors.splat(2**num_bits - 1, vectors.word))
            packed = builder.or_(packed, builder.shl(code, vectors.splat(shift, vectors.word)))
            vectors.store(builder.fsub(value, decoded), args[2], at)
            at = builder.add(at, args[4])
        builder.store(packed, vectors.at(args[0], args[3], vectors.word), align=4)
        return context.get_dummy_value()

    floats, halves = (kind, kind), (types.int32, types.int32)
    constants = (bits, levels, stochastic)
    return types.void(words, values, residual, number, number, *floats, number, *halves, *constants), generate


@intrinsic(prefer_literal=True)
def decode_words(
    typing_context: Any,
    words: Any,
    values: Any,
    index: Any,
    width: Any,
    scale: Any,
    add: Any,
    bits: Any,
    levels: Any,
) -> Any:
    """Write the values of the words from ``index`` on, of ``width``; or add them, if ``add`` (also a constant)."""
    num_bits, num_levels, adds = bits.literal_value, levels.literal_value, bool(add.literal_value)
    kind, number = values.dtype, types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = _Vectors(builder, kind)
        scales = vectors.splat(args[4], vectors.float)
        packed = builder.load(vectors.at(args[0], args[2], vectors.word), align=4)
        at = args[2]
        for shift in range(0, 32, num_bits):
            if num_levels == 0:
                code = builder.lshr(packed, vectors.splat(shift, vectors.word))
                value = vectors.signed(scales, code)
            else:
                code = builder.shl(packed, vectors.splat(32 - num_bits - shift, vectors.word))
                code = builder.ashr(code, vectors.splat(32 - num_bits, vectors.word))
                value = builder.fmul(builder.sitofp(code, vectors.float), scales)
            if adds:
                value = builder.fadd(vectors.load(args[1], at), value)
            vectors.store(value, args[1], at)
            at = builder.add(at, args[3])
        return context.get_dummy_value()

    return types.void(words, values, number, number, kind, add, bits, levels), generate
