"""``sign``: one bit per value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradsync import spec
from gradsync.codecs.blockwise import Blockwise


@spec.register("codec", "sign")
@dataclass(frozen=True, kw_only=True)
class Sign(Blockwise):
    """The sign of each value, times the mean magnitude of its block; the sign of 0 is +1.

    Biased: without error feedback it need not converge (EF-signSGD, Karimireddy et al., 2019).

    >>> import torch
    >>> from gradsync.codecs import Payload, Sign
    >>> codec, x = Sign(), torch.tensor([1.0, -2.0, 0.0])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    >>> codec.encode(x, payload)
    >>> out = torch.empty(3)
    >>> codec.decode(payload, out), out
    (True, tensor([ 1., -1.,  1.]))
    """

    block: int = 1024  # larger => fewer bytes for scales (1024: 31 times less than float32), coarser magnitudes

    bits: ClassVar[int] = 1
    levels: ClassVar[int] = 0
