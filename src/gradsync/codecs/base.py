"""The interface of all codecs: ``Codec`` turns the values of one parameter into a ``Payload`` of bytes and back.

A codec is pure: it keeps no state between calls and does not communicate. The part of the values that a payload does
not represent is returned as the ``Residual``, so that nothing is lost: ``decode(encode(x)) + residual == x``.

[Note: one pass] On a CPU, compression is bound by memory traffic, not by arithmetic. So each method is shaped such that
one fused kernel can do everything with a value while it is in a register: scale it, add the residual, encode it, and
write the new residual.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

import torch
from torch import Tensor

from gradsync import spec

# The dtypes that kernels are compiled for. Each takes seconds to compile, and float64 is used in tests more than in
# training: it goes through torch, as do 16-bit floats and other devices.
COMPILED_DTYPES = (torch.float32,)

Payload = NewType("Payload", Tensor)  # a flat uint8 tensor that may be put on the wire

# Whether values are finite: a bool for values on the CPU. For those on a GPU a tensor there with one element, because
# reading it would stall: see [Note: read one step later] in comm/readback.py. Combine several with ``&``.
Finite = bool | Tensor


@dataclass
class Residual:
    """The error-feedback residual: ``before`` is added to the values, ``after`` receives what is left unsent.

    Both may be the same tensor. They differ where a step may have to be rolled back, because a GradScaler found inf.
    """

    before: Tensor
    after: Tensor


class BlockLayout(NamedTuple):
    """Where the full blocks are in a payload. If a block's scale is 0, its bytes are all 0 and need not be sent."""

    num_blocks: int
    scale_bytes: int  # size of one scale; the scales are the beginning of the payload
    start: int  # offset of the first block; the others follow without gaps
    block_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_blocks * self.block_bytes


class Codec(abc.ABC):
    """Values of one parameter, or of a part of one, to bytes and back.

    In all methods ``x`` and ``out`` are flat and contiguous; ``payload`` is uint8, exactly ``encoded_bytes`` long, and
    may begin at any multiple of 8 bytes. A codec reuses its scratch memory and does not allocate in every call.

    NaN and inf are never removed: where ``x`` has one, the decoded values have one as well (not always in the same
    place, nor only there), and ``decode`` returns False. No method reads a value of a GPU's tensor on the host.
    """

    moves_magnitudes: bool = False  # True => `magnitudes` may be another part of the payload in another step
    sums_as: torch.dtype | None = None  # payloads viewed as this dtype may be summed by an all-reduce; None => not

    @abc.abstractmethod
    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """The length of the payload of ``numel`` values: always the same, a multiple of 8, all included; 0 for none."""

    @abc.abstractmethod
    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        """Encode ``y = gain * x + residual.before`` to ``payload``, and write ``y - decoded`` to ``residual.after``.

        ``key`` seeds all random choices, together with the position of a value. A codec with ``sums_as`` gets the same
        key on every rank.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> Finite:
        """Write ``gain`` times the decoded values to ``out``, or add them; returns whether all of them are finite."""

    def decode_sum(self, payloads: Sequence[Payload], out: Tensor, *, gain: float = 1.0, key: int = 0) -> Finite:
        """Write ``gain`` times the sum of several decoded payloads, added in the given order."""
        finite = self.decode(payloads[0], out, gain=gain, key=key)
        for payload in payloads[1:]:
            finite = self.decode(payload, out, gain=gain, add=True, key=key) & finite
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
        """Encode ``y = gain * x + residual.before + sum(decoded received)``; write ``out_gain`` times the decoded y.

        This is what the owner of a shard does with its own values and those of the other ranks. ``out`` may be ``x``.
        The sum is taken in the order: own values, residual, received payloads. Returns what ``decode`` returns. A codec
        that overrides this to do it in one pass gives the same bits as this implementation.
        """
        y = x * gain
        if residual is not None:
            y += residual.before
        for other in received:
            self.decode(other, y, add=True, key=key)
        after = None if residual is None else Residual(torch.zeros_like(y), residual.after)
        self.encode(y, payload, residual=after, key=key)
        return self.decode(payload, out, gain=out_gain, key=key)

    def elidable_blocks(self, numel: int, dtype: torch.dtype = torch.float32) -> BlockLayout | None:
        """The blocks of a payload of ``numel`` values that need not be sent while they are zero; None if it has none.

        See [Note: zero-block elision] in blockwise.py.
        """
        return None

    def magnitudes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """A small part of a payload that grows with the magnitude of its values: the scales, or the values kept.

        Used to detect spikes (see reducers/spikes.py) after every step, so it must be cheap: a view. None for codecs
        that can't leave a large residual.
        """
        return None

    def at(self, step: int) -> Codec:
        """The codec to use at a step: itself, except for codecs with a warm-up."""
        return self


spec.declare("codec", Codec)


def all_finite(values: Tensor) -> Finite:
    """Whether all values are finite."""
    if not values.is_cpu:
        return values.isfinite().all()
    if not values.numel():
        return True
    low, high = torch.aminmax(values)  # one pass, and no temporary; NaN if there is NaN
    return math.isfinite(low) and math.isfinite(high)


def padded(num_bytes: int) -> int:
    """The next multiple of 8, so that every payload is aligned for any dtype."""
    return -(-num_bytes // 8) * 8


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are encoded and residuals kept: float32 for 16-bit values.

    The residual of a 16-bit value may be too small for 16 bits.
    """
    return torch.float32 if dtype.itemsize < 4 else dtype
