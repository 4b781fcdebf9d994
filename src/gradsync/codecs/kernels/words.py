"""Values to words of packed codes and back, a vector of words at a time, written out for each codec.

[Note: planes] A code of b bits is put into words of 32 bits such that neighbours in a word are far apart in the block:
word j of w holds values j, j + w, j + 2w, ... (plane 0, 1, 2, ...). So all that is done to a vector of words is done to
whole vectors of values, nothing is ever shuffled, and a vector of words stays in a register until it is full.

``bits``, ``levels`` and ``stochastic`` are constants where these are called.
"""

from __future__ import annotations

from typing import Any

from gradsync.codecs.blockwise import WORDS
from gradsync.compiled import cgutils, intrinsic, ir, types

_I32 = ir.IntType(32)

# The whole numbers lie one unit apart up there: adding this rounds, with ties to the even one as in torch.round, and
# the lowest bits are then the whole number.
_ROUNDER = {types.float32: 1.5 * 2.0**23, types.float64: 1.5 * 2.0**52}


class _Vectors:
    """Writes instructions for vectors that are as long as a vector of words."""

    def __init__(self, builder: Any, kind: Any) -> None:
        self.builder = builder
        self.size = 4 if kind == types.float32 else 8
        self.float = ir.VectorType(ir.FloatType() if self.size == 4 else ir.DoubleType(), WORDS)
        self.word = ir.VectorType(_I32, WORDS)
        self.wide = ir.VectorType(ir.IntType(8 * self.size), WORDS)  # as wide as the floats

    def spread(self, value: Any, vector: Any) -> Any:
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

    def rounded_down(self, value: Any) -> Any:
        name = f"llvm.floor.v{WORDS}f{8 * self.size}"
        kind = ir.FunctionType(self.float, [self.float])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [value])

    def smaller(self, value: Any, bound: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", value, bound), value, bound)

    def low_words(self, value: Any) -> Any:
        bits = self.builder.bitcast(value, self.wide)
        return bits if self.size == 4 else self.builder.trunc(bits, self.word)

    def uniform(self, position: Any, one: Any, other: Any) -> Any:
        """Numbers from 0 up to 1, by position and the halves of a key: random.py has the same in torch."""
        builder, word = self.builder, self.word
        lane = ir.Constant(word, list(range(WORDS)))
        bits = builder.add(self.spread(builder.trunc(position, _I32), word), lane)
        bits = builder.add(builder.mul(bits, self.spread(0x9E3779B1, word)), one)
        bits = builder.xor(bits, builder.lshr(bits, self.spread(16, word)))
        bits = builder.xor(builder.mul(bits, self.spread(0x7FEB352D, word)), other)
        bits = builder.xor(bits, builder.lshr(bits, self.spread(15, word)))
        bits = builder.lshr(builder.mul(bits, self.spread(0x846CA68B, word)), self.spread(8, word))
        return builder.fmul(builder.sitofp(bits, self.float), self.spread(2.0**-24, self.float))

    def signed(self, scale: Any, code: Any) -> Any:
        """The scale, negative where the lowest bit of the code is set."""
        builder = self.builder
        turn = code if self.size == 4 else builder.zext(code, self.wide)
        turn = builder.shl(turn, self.spread(8 * self.size - 1, self.wide))
        return builder.bitcast(builder.xor(builder.bitcast(scale, self.wide), turn), self.float)


@intrinsic(prefer_literal=True)
def encode_words(
    typing_context: Any,
    words: Any,
    values: Any,
    left: Any,
    index: Any,
    width: Any,
    scale: Any,
    reciprocal: Any,
    first: Any,
    one: Any,
    other: Any,
    bits: Any,
    levels: Any,
    stochastic: Any,
) -> Any:
    """Write the words from ``index`` on, of ``width``; what they do not say goes to ``left``, perhaps ``values``."""
    num_bits, num_levels, by_chance = bits.literal_value, levels.literal_value, bool(stochastic.literal_value)
    kind, number = values.dtype, types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = _Vectors(builder, kind)
        scales, reciprocals = (vectors.spread(value, vectors.float) for value in args[5:7])
        halves = [vectors.spread(half, vectors.word) for half in args[8:10]]
        rounder = vectors.spread(_ROUNDER[kind], vectors.float)
        packed = vectors.spread(0, vectors.word)
        at = args[3]
        for shift in range(0, 32, num_bits):
            value = vectors.load(args[1], at)
            if num_levels == 0:
                below = builder.fcmp_ordered("<", value, vectors.spread(0.0, vectors.float))
                code = builder.zext(below, vectors.word)
                said = vectors.signed(scales, code)
            elif by_chance:
                draw = vectors.uniform(builder.add(args[7], at), *halves)
                whole = vectors.rounded_down(builder.fadd(builder.fmul(value, reciprocals), draw))
                whole = vectors.smaller(whole, vectors.spread(float(num_levels), vectors.float))
                code = vectors.low_words(builder.fadd(whole, rounder))
                said = builder.fmul(whole, scales)
            else:
                lifted = builder.fadd(builder.fmul(value, reciprocals), rounder)
                code = vectors.low_words(lifted)
                said = builder.fmul(builder.fsub(lifted, rounder), scales)
            code = builder.and_(code, vectors.spread(2**num_bits - 1, vectors.word))
            packed = builder.or_(packed, builder.shl(code, vectors.spread(shift, vectors.word)))
            vectors.store(builder.fsub(value, said), args[2], at)
            at = builder.add(at, args[4])
        builder.store(packed, vectors.at(args[0], args[3], vectors.word), align=4)
        return context.get_dummy_value()

    floats, halves = (kind, kind), (types.int32, types.int32)
    constants = (bits, levels, stochastic)
    return types.void(words, values, left, number, number, *floats, number, *halves, *constants), generate


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
    """Write the values of the words from ``index`` on, of ``width``; or add them, if ``add`` (a constant too)."""
    num_bits, num_levels, adds = bits.literal_value, levels.literal_value, bool(add.literal_value)
    kind, number = values.dtype, types.int64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = _Vectors(builder, kind)
        scales = vectors.spread(args[4], vectors.float)
        packed = builder.load(vectors.at(args[0], args[2], vectors.word), align=4)
        at = args[2]
        for shift in range(0, 32, num_bits):
            if num_levels == 0:
                code = builder.lshr(packed, vectors.spread(shift, vectors.word))
                value = vectors.signed(scales, code)
            else:
                code = builder.shl(packed, vectors.spread(32 - num_bits - shift, vectors.word))
                code = builder.ashr(code, vectors.spread(32 - num_bits, vectors.word))
                value = builder.fmul(builder.sitofp(code, vectors.float), scales)
            if adds:
                value = builder.fadd(vectors.load(args[1], at), value)
            vectors.store(value, args[1], at)
            at = builder.add(at, args[3])
        return context.get_dummy_value()

    return types.void(words, values, number, number, kind, add, bits, levels), generate
