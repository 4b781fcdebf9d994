"""``int8`` and ``int4``: integers in place of floats, with a scale for each block of values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from gradsync import spec
from gradsync.codecs.blockwise import Blockwise

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Quantized(Blockwise):
    """The base of ``Int8`` and ``Int4``: a code is the value divided by its block's scale, rounded."""

    rounding: Literal["nearest", "stochastic"] = "nearest"  # stochastic => unbiased, twice the error

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}; got rounding={self.rounding!r}.")

    @functools.cached_property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"


@spec.register("codec", "int8")
@dataclass(frozen=True, kw_only=True)
class Int8(Quantized):
    """8 bits a value, from -127 to 127 times the block's scale, which is its largest magnitude over 127.

    With ``rounding="stochastic"`` this is QSGD (Alistarh et al., 2017) in blocks: unbiased, so that it needs no error
    feedback. QSGD's own scale is the block's L2 norm; the largest magnitude, as here, never has a larger variance.

    >>> import torch
    >>> from gradsync.codecs import Int8, Payload
    >>> codec, x = Int8(), torch.tensor([0.5, -1.0, 0.001])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    >>> codec.encode(x, payload)
    >>> out = torch.empty(3)
    >>> codec.decode(payload, out), out
    (True, tensor([ 0.5039, -1.0000,  0.0000]))
    """

    bits: ClassVar[int] = 8
    levels: ClassVar[int] = 127


@spec.register("codec", "int4")
@dataclass(frozen=True, kw_only=True)
class Int4(Quantized):
    """4 bits a value, from -7 to 7 times the block's scale, which is its largest magnitude over 7.

    With ``rounding="stochastic"`` this is QSGD with 7 levels, in blocks; see ``Int8``.

    >>> from gradsync.codecs import Int4
    >>> Int4().encoded_bytes(1_000_000), round(4_000_000 / Int4().encoded_bytes(1_000_000), 2)
    (515632, 7.76)
    """

    bits: ClassVar[int] = 4
    levels: ClassVar[int] = 7
