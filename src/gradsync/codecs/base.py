"""The seam for what goes on the wire: ``Codec`` turns values of one parameter into bytes and back.

A codec is pure: it keeps nothing between calls and talks to nobody. What it could not say is handed back as the
*residual*, so that nothing is lost: ``decode(encode(x)) + residual == x``.

[Note: one pass] Memory, not arithmetic, is what compression costs on a CPU. So the calls are cut such that a fused
kernel can do all there is to do with a value while it is in a register: scale, add the residual, encode, write the
residual back.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

import torch
from torch import Tensor

from gradsync import spec

# What kernels are compiled for. Each dtype takes seconds to compile, and float64 is for tests more than for training:
# it goes through torch, as do 16-bit floats and other devices.
COMPILED_DTYPES = (torch.float32,)

Payload = NewType("Payload", Tensor)  # a flat uint8 tensor that may be put on the wire


@dataclass
class Residual:
    """What was not sent: ``before`` is added to the values, ``after`` is what is then left.

    Both may be the same tensor. They differ where a step may have to be taken back: a GradScaler that meets inf.
    """

    before: Tensor
    after: Tensor


class Blocks(NamedTuple):
    """Where the whole blocks of a payload lie. While a block's scale is 0 its bytes are all 0, and say nothing."""

    num_blocks: int
    scale_bytes: int  # of a scale; the scales are the beginning of the payload
    start: int  # of the first block's bytes, which all blocks' follow
    block_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_blocks * self.block_bytes


class Codec(abc.ABC):
    """Values of one parameter, or of a part of one, to bytes and back.

    Everywhere ``x`` and ``out`` are flat and contiguous, ``payload`` is uint8 with exactly ``encoded_bytes`` of room
    and may begin at any multiple of 8 bytes. A codec allocates nothing that it could keep from the call before.

    NaN and inf are never cleaned away: where ``x`` has one, the decoded values have one as well (not always in the same
    place, nor only there), and ``decode`` says so.
    """

    sums_as: torch.dtype | None = None  # payloads, viewed as this dtype, may be added up on the way; None: they may not

    @abc.abstractmethod
    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """How long the payload of ``numel`` values is: always the same, a multiple of 8, all counted. 0 for none."""

    @abc.abstractmethod
    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        """Write the code of ``y = gain * x + residual.before``, and to ``residual.after`` what it does not say of y.

        ``key``: from it, and the position alone, comes all that is random. For a codec that ``sums_as``, it is the same
        on every rank.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> bool:
        """Write ``gain`` times the values to ``out``, or add them; say whether all of them are finite."""

    def decode_sum(self, payloads: Sequence[Payload], out: Tensor, *, gain: float = 1.0, key: int = 0) -> bool:
        """Write ``gain`` times the sum of what several payloads say, added up in their order."""
        finite = self.decode(payloads[0], out, gain=gain, key=key)
        for payload in payloads[1:]:
            finite = self.decode(payload, out, gain=gain, add=True, key=key) and finite
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
    ) -> bool:
        """Encode ``y = gain * x + residual.before + what was received``, and write what that says, times ``out_gain``.

        What the owner of a shard does with its own values and the others'. ``out`` may be ``x``. The sum is taken in
        the order: own values, residual, received in turn. Returns what ``decode`` returns. The same bits as the calls
        that it is made of here, in one pass where the codec has a kernel for it.
        """
        y = x * gain
        if residual is not None:
            y += residual.before
        for other in received:
            self.decode(other, y, add=True, key=key)
        after = None if residual is None else Residual(torch.zeros_like(y), residual.after)
        self.encode(y, payload, residual=after, key=key)
        return self.decode(payload, out, gain=out_gain, key=key)

    def blocks(self, numel: int, dtype: torch.dtype = torch.float32) -> Blocks | None:
        """The blocks of a payload of ``numel`` values that need not be sent while they are zero; None: it has none."""
        return None

    def at(self, step: int) -> Codec:
        """The codec to use at a step: itself, unless it has a warm-up."""
        return self


spec.declare("codec", Codec)


def padded(num_bytes: int) -> int:
    """The next multiple of 8: every payload begins where any dtype may."""
    return -(-num_bytes // 8) * 8
