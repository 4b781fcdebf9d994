"""``ternary``: two bits per value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradsync import spec
from gradsync.codecs.blockwise import Blockwise


@spec.register("codec", "ternary")
@dataclass(frozen=True, kw_only=True)
class Ternary(Blockwise):
    """TernGrad (Wen et al., 2017): -1, 0 or 1 times the largest magnitude of the block, unbiased.

    A value is sent as its sign with a probability of ``|x| / max|x|``, else as 0. Being unbiased it needs no error
    feedback, but its variance is large: with feedback the noise of one step is corrected in the next ones.

    >>> import torch
    >>> from gradsync.codecs import Payload, Ternary
    >>> codec, x = Ternary(), torch.tensor([4.0, -2.0, 0.0])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    >>> total = torch.zeros(3)
    >>> for key in range(1000):
    ...     codec.encode(x, payload, key=key)
    ...     _ = codec.decode(payload, total, gain=1 / 1000, add=True)
    >>> torch.allclose(total, x, atol=0.2)
    True
    """

    block: int = 256  # smaller => less variance, more bytes for scales

    bits: ClassVar[int] = 2
    levels: ClassVar[int] = 1

    @property
    def stochastic(self) -> bool:
        return True
