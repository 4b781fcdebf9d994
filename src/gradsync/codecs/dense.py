"""``dense``: no compression. Biases, norms and other small parameters are sent this way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Codec, Finite, Payload, Residual, all_finite, padded


@spec.register("codec", "dense")
@dataclass(frozen=True)
class Dense(Codec):
    """Sends every value uncompressed, in its own dtype: the residual is zero.

    >>> import torch
    >>> from gradsync.codecs import Dense
    >>> Dense().encoded_bytes(1000, torch.float32)
    4000
    """

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return padded(numel * dtype.itemsize)

    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        values = _values(payload, x)
        payload[x.nbytes :].zero_()
        torch.mul(x, gain, out=values)
        if residual is not None:
            values += residual.before
            residual.after.zero_()

    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> Finite:
        values = _values(payload, out)
        if add:
            out.add_(values, alpha=gain)
        else:
            torch.mul(values, gain, out=out)
        return all_finite(values)

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
        self.encode(x, payload, gain=gain, residual=residual)
        total = _values(payload, x)
        for other in received:
            total += _values(other, x)
        return self.decode(payload, out, gain=out_gain)


def _values(payload: Payload, like: Tensor) -> Tensor:
    return payload.view(like.dtype)[: like.numel()]
