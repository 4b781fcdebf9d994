"""The base of ``int8``, ``int4``, ``sign`` and ``ternary``: one scale for each block, a few bits for each value.

A payload holds all scales (in the dtype of the computation), padding to a multiple of 8 bytes, then the packed codes of
all blocks, in words of 32 bits; [Note: bit planes] in kernels/codecs/packing.py gives the order within a word. The last
block may be short. float32 on a CPU goes through the fused kernels; any other dtype or device goes through the torch
code here, in float32 for 16-bit values. Both do the same operations in the same order and give the same bits.

[Note: zero-block elision] In one step most rows of an embedding have no gradient. With a fine codec the residual of
such a row is small, and stays where it is until the row has a gradient again: its blocks get the scale 0. Such zero
blocks need not be sent (see reducers/compressed/zero_blocks.py), and the optimizer does not see an update for a row
that no rank has used. With a coarse codec the residual is most of the gradient, so it is sent as soon as possible.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradsync.codecs.base import COMPILED_DTYPES, BlockLayout, Codec, Finite, Payload, Residual, all_finite, padded
from gradsync.codecs.random import key_halves, uniform
from gradsync.kernels.codecs.block_layout import ELISION_MIN_LEVELS, LARGEST_BLOCK, SUMS, WORDS, scale_limit


@dataclass(frozen=True, kw_only=True)
class Blockwise(Codec):
    """A scale for each block of values, and a code of ``bits`` bits for each value.

    A value is its code, from ``-levels`` to ``levels``, times the scale; with 0 levels the code is a sign. Subclasses
    define ``bits``, ``levels`` and ``stochastic`` and nothing else.
    """

    block: int = 256  # larger => fewer bytes for scales, more error where large and small values share a block

    bits: ClassVar[int]  # per code: 1, 2, 4 or 8
    levels: ClassVar[int]  # the largest code: the scale is the largest magnitude / levels; 0 => the mean magnitude

    @functools.cached_property
    def stochastic(self) -> bool:
        """Whether codes are rounded up or down at random, so that they are unbiased."""
        return False

    def __post_init__(self) -> None:
        step = 32 * WORDS // self.bits
        if not step <= self.block <= LARGEST_BLOCK or self.block % step:
            fix = min(max(round(self.block / step) * step, step), LARGEST_BLOCK)
            raise ValueError(
                f"block must be a multiple of {step}, up to {LARGEST_BLOCK} values; got block={self.block!r}. "
                f"Try block={fix}."
            )

    # -- Codec --------------------------------------------------------------------------------------------------------

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return _layout(numel, dtype, self.block, self.bits)[1]

    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        kernels = self._kernels(x)
        if kernels is None:
            self._merge_with_torch(x, (), payload, gain, residual, key)
        else:
            self._merge_by_kernel(kernels, x, (), payload, gain, residual, key, None, 1.0)

    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> Finite:
        kernels = self._kernels(out)
        if kernels is None:
            return self._decode_with_torch(payload, out, gain, add)
        numel, codes = out.numel(), self._codes_offset(out, payload)
        finite: bool = kernels[1](payload.data_ptr(), codes, out.data_ptr(), numel, gain, add, self.block)
        return finite

    def decode_sum(self, payloads: Sequence[Payload], out: Tensor, *, gain: float = 1.0, key: int = 0) -> Finite:
        if not out.is_cpu or out.dtype not in COMPILED_DTYPES:
            return super().decode_sum(payloads, out, gain=gain)
        sum_payloads, numel, codes = (
            _payload_sum(out.dtype, self.bits, self.levels),
            out.numel(),
            self._codes_offset(out, payloads[0]),
        )
        starts = array("q", [payload.data_ptr() for payload in payloads])
        finite: bool = sum_payloads(
            starts.buffer_info()[0], len(starts), codes, out.data_ptr(), numel, gain, self.block
        )
        return finite

    def merge(
        self,
        x: Tensor,
        received: Sequence[Payload],
        payload: Payload,
        *,
        gain: float = 1.0,
        residual: Residual | None = None,
        key: int = 0,
        out: Tensor,
        out_gain: float = 1.0,
    ) -> Finite:
        kernels = self._kernels(x)
        if kernels is None and x.dtype != _compute_dtype(x.dtype):
            return super().merge(
                x, received, payload, gain=gain, residual=residual, key=key, out=out, out_gain=out_gain
            )
        if kernels is None:
            self._merge_with_torch(x, received, payload, gain, residual, key)
            return self._decode_with_torch(payload, out, out_gain, False)
        return self._merge_by_kernel(kernels, x, received, payload, gain, residual, key, out, out_gain)

    def elidable_blocks(self, numel: int, dtype: torch.dtype = torch.float32) -> BlockLayout | None:
        if self.levels < ELISION_MIN_LEVELS or numel < self.block:
            return None
        scale_bytes = 8 if dtype == torch.float64 else 4
        codes, _ = _layout(numel, dtype, self.block, self.bits)
        return BlockLayout(numel // self.block, scale_bytes, codes, self.block * self.bits // 8)

    def magnitudes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        wide = _compute_dtype(dtype)
        return payload[: -(-numel // self.block) * wide.itemsize].view(wide)

    # -- with kernels -------------------------------------------------------------------------------------------------

    def _kernels(self, like: Tensor) -> tuple[Any, Any] | None:
        if not like.is_cpu or like.dtype not in COMPILED_DTYPES:
            return None
        return _merge_and_decode(like.dtype, self.bits, self.levels, self.stochastic)

    def _merge_by_kernel(
        self,
        kernels: tuple[Any, Any],
        x: Tensor,
        received: Sequence[Payload],
        payload: Payload,
        gain: float,
        residual: Residual | None,
        key: int,
        out: Tensor | None,
        out_gain: float,
    ) -> bool:
        codes = self._codes_offset(x, payload)
        before = after = 0
        if residual is not None:
            assert residual.before.dtype == residual.after.dtype == x.dtype, "a residual has the dtype of its values"
            before, after = residual.before.data_ptr(), residual.after.data_ptr()
        addresses = array("q", [other.data_ptr() for other in received]) if received else _NO_ADDRESSES
        key_low, key_high = key_halves(key) if self.stochastic else (0, 0)
        finite: bool = kernels[0](
            x.data_ptr(),
            x.numel(),
            gain,
            before,
            after,
            addresses.buffer_info()[0],
            len(addresses),
            payload.data_ptr(),
            codes,
            0 if out is None else out.data_ptr(),
            out_gain,
            self.block,
            key_low,
            key_high,
        )
        return finite

    def _codes_offset(self, values: Tensor, payload: Tensor) -> int:
        """The offset of the codes in a payload. Checks its length, as kernels would read or write beyond its end."""
        numel, dtype = values.numel(), values.dtype
        codes, num_bytes = _layout(numel, dtype, self.block, self.bits)
        assert values.is_contiguous(), "values are flat and contiguous"
        assert payload.numel() == num_bytes, (payload.numel(), numel, dtype)
        return codes

    # -- with torch ---------------------------------------------------------------------------------------------------

    def _merge_with_torch(
        self,
        x: Tensor,
        received: Sequence[Payload],
        payload: Payload,
        gain: float,
        residual: Residual | None,
        key: int,
    ) -> None:
        payload.zero_()
        wide = _compute_dtype(x.dtype)
        own = x.to(wide) * gain
        y = own.clone() if residual is None else own + residual.before.to(wide)
        for other in received:
            self._decode_with_torch(other, y, 1.0, True)
        received_parts = [self._parts(other, y) for other in received]
        for first, rows, width, scales, words in self._parts(payload, y):
            values = y[first : first + rows * width].view(rows, width)
            all_zero = (own[first : first + rows * width].view(rows, width) == 0).all(1)
            for _, _, _, their_scales, _ in map(next, received_parts):
                all_zero &= their_scales == 0
            scale, codes = self._quantize(values, key, first, all_zero)
            scales.copy_(scale)
            words.copy_(_pack_codes(codes, self.bits, words.shape[1]))
            if residual is not None:
                part = residual.after[first : first + rows * width].view(rows, width)
                part.copy_(values - self._dequantize(codes, scale.unsqueeze(1)))

    def _decode_with_torch(self, payload: Payload, out: Tensor, gain: float, add: bool) -> Finite:
        self._codes_offset(out, payload)
        wide = torch.empty(out.shape, dtype=_compute_dtype(out.dtype), device=out.device)
        for first, rows, width, scales, words in self._parts(payload, wide):
            codes = _unpack_codes(words, self.bits, width)
            wide[first : first + rows * width].view(rows, width).copy_(
                self._dequantize(codes, (scales * gain).unsqueeze(1))
            )
        values = wide.to(out.dtype)
        if add:
            out += values
        else:
            out.copy_(values)
        return all_finite(values)

    def _parts(self, payload: Tensor, y: Tensor) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
        """The full blocks, then the short one: first value, rows, width, their scales and their words."""
        whole, rest = divmod(y.numel(), self.block)
        codes = self._codes_offset(y, payload)
        scales, words = payload[:codes].view(y.dtype), payload[codes:].view(torch.int32)
        wide = self.block * self.bits // 32
        if whole:
            yield 0, whole, self.block, scales[:whole], words[: whole * wide].view(whole, wide)
        if rest:
            start = whole * wide
            narrow = words.numel() - start
            yield whole * self.block, 1, rest, scales[whole : whole + 1], words[start : start + narrow].view(1, narrow)

    def _quantize(self, values: Tensor, key: int, first: int, all_zero: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of each row, and the code of each value: integers in a float dtype.

        ``all_zero``: the rows for which no rank has a gradient.
        """
        numbers = torch.finfo(values.dtype)
        magnitudes = values.abs()
        largest = magnitudes.amax(1)
        finite = largest.isfinite()
        if self.levels == 0:
            scale = _mean_magnitude(magnitudes).clamp(max=numbers.max)
            codes = (values < 0).to(values.dtype).neg()
        else:
            scale = (largest / self.levels).clamp(max=scale_limit(values.dtype, self.levels))
            is_zero = scale < numbers.tiny
            if self.levels >= ELISION_MIN_LEVELS:
                is_zero |= all_zero
            scale = torch.where(is_zero, 0.0, scale)
            reciprocal = torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(1)
            if self.stochastic:
                rows, width = values.shape
                codes = (values * reciprocal + uniform(key, first, rows, width, values.device)).floor()
                codes = torch.where(reciprocal == 0, 0.0, codes.clamp(max=self.levels))
            else:
                codes = (values * reciprocal).round()
        return torch.where(finite, scale, torch.nan), torch.where(finite.unsqueeze(1), codes, 0.0)

    def _dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return torch.where(codes < 0, -scale, scale) if self.levels == 0 else codes * scale


_NO_ADDRESSES = array("q")


@functools.cache
def _merge_and_decode(dtype: torch.dtype, bits: int, levels: int, stochastic: bool) -> tuple[Any, Any]:
    """The compiled ``merge`` and ``decode``."""
    from gradsync.kernels.base import without_dispatch
    from gradsync.kernels.codecs.blockwise import merge_and_decode  # Numba takes a second to import

    merge, decode = merge_and_decode(dtype, bits, levels, stochastic)
    return without_dispatch(merge), without_dispatch(decode)


@functools.cache
def _payload_sum(dtype: torch.dtype, bits: int, levels: int) -> Any:
    """The compiled sum of several payloads."""
    from gradsync.kernels.base import without_dispatch
    from gradsync.kernels.codecs.payload_sum import payload_sum

    return without_dispatch(payload_sum(dtype, bits, levels))


@functools.cache
def _layout(numel: int, dtype: torch.dtype, block: int, bits: int) -> tuple[int, int]:
    """The offsets in a payload at which the codes begin and end."""
    codes = padded(-(-numel // block) * (8 if dtype == torch.float64 else 4))
    # A full block is a whole number of vectors of words, so only the last block is padded.
    vectors = -(-numel * bits // (32 * WORDS))
    return codes, codes + vectors * WORDS * 4


@functools.cache
def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mean_magnitude(magnitudes: Tensor) -> Tensor:
    """The mean of each row, summed in the order of the kernels: every ``SUMS``-th value, then the sums by halves."""
    rows, width = magnitudes.shape
    shares = magnitudes * (1 / torch.full((), width, dtype=magnitudes.dtype, device=magnitudes.device))
    sums = torch.zeros(rows, SUMS, dtype=magnitudes.dtype, device=magnitudes.device)
    for start in range(0, width, SUMS):
        part = shares[:, start : start + SUMS]
        sums[:, : part.shape[1]] += part
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _pack_codes(codes: Tensor, bits: int, num_words: int) -> Tensor:
    """The words that hold the codes of each row; see [Note: bit planes]."""
    rows, width = codes.shape
    planes = torch.zeros(rows, 32 // bits * num_words, dtype=torch.int64, device=codes.device)
    planes[:, :width] = codes.to(torch.int64) & (2**bits - 1)
    shifts = torch.arange(0, 32, bits, device=codes.device).view(1, -1, 1)
    return (planes.view(rows, -1, num_words) << shifts).sum(1).to(torch.int32)


def _unpack_codes(words: Tensor, bits: int, width: int) -> Tensor:
    rows = words.shape[0]
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32).view(1, -1, 1)
    planes = (words.unsqueeze(1) << (32 - bits - shifts)) >> (32 - bits)
    return planes.reshape(rows, -1)[:, :width]
