"""``chain``: one codec after another. The values that a sparse codec keeps are encoded by the next codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Codec, Finite, Payload, Residual
from gradsync.codecs.scratch import scratch
from gradsync.codecs.sparse import Sparse, check_payload_size, compensate


@spec.register("codec", "chain")
class Chain(Codec):
    """Encodes the values that a sparse codec keeps with the next one; the next one's error goes to the residual.

    Args:
        codecs: all but the last must be sparse (``topk``, ``randomk``, ``dgc``). A chain of one codec is that codec.

    >>> import torch
    >>> from gradsync.codecs import Chain, Int8, Payload, TopK
    >>> codec, x = Chain(TopK(density=0.5), Int8()), torch.tensor([1.0, -8.0, 2.0, 3.0])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(4), dtype=torch.uint8))
    >>> codec.encode(x, payload)
    >>> out = torch.empty(4)
    >>> codec.decode(payload, out), out
    (True, tensor([ 0.0000, -8.0000,  0.0000,  3.0236]))
    >>> round(4_000_000 / Chain(TopK(density=0.01), Int8()).encoded_bytes(1_000_000))
    182
    """

    def __new__(cls, *codecs: Codec) -> Chain:
        for codec in codecs:
            if not isinstance(codec, Codec):
                raise ValueError(f"a chain is made of codecs; got {codec!r}. Write chain(topk(density=0.01), int8).")
        for codec in codecs[:-1]:
            if not isinstance(codec, Sparse):
                raise ValueError(
                    f"only a codec that keeps some of the values can have another behind it; got {codec!r}. "
                    "Begin with topk, randomk or dgc: chain(topk(density=0.01), int8)."
                )
        if not codecs:
            raise ValueError("a chain needs at least one codec; got none. Write chain(topk(density=0.01), int8).")
        if len(codecs) == 1:
            return cast(Chain, codecs[0])  # not an instance of Chain, so __init__ is not called
        return super().__new__(cls)

    def __init__(self, *codecs: Codec) -> None:
        self.codecs = codecs
        first = codecs[0]
        assert isinstance(first, Sparse)  # checked by __new__
        self.first: Sparse = first
        self.rest: Codec = Chain(*codecs[1:])
        self.momentum, self.clip_norm = first.momentum, first.clip_norm
        self.moves_magnitudes = True  # the code of fewer values is shorter
        # If positions are sent, a sum would mix the positions of one rank with the values of another.
        self.sums_as = self.rest.sums_as if first.index_bytes(1) == 0 else None

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        if numel == 0:
            return 0
        kept = self.first.max_kept(numel)
        return self.first.index_bytes(numel) + self.rest.encoded_bytes(kept, self.first.values_dtype(dtype))

    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        if x.numel():
            before, after = (None, None) if residual is None else (residual.before, residual.after)
            self._encode(x, payload, x.dtype, gain=gain, before=before, after=after, key=key)

    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> Finite:
        if out.numel() == 0:
            return True
        return self._decode(payload, out, out.dtype, gain=gain, add=add, key=key)

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
        if x.numel() == 0:
            return True
        # The sum needs a buffer of full size: that of the residual, or else that of the result.
        y = out if residual is None else residual.after
        compensate(x, y, gain=gain, before=None if residual is None else residual.before)
        for other in received:
            self._decode(other, y, x.dtype, gain=1.0, add=True, key=key)
        self._encode(y, payload, x.dtype, gain=1.0, before=None, after=None if residual is None else y, key=key)
        return self._decode(payload, out, x.dtype, gain=out_gain, add=False, key=key)

    def magnitudes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        if numel == 0:
            return None
        index_end, kept = self.first.index_bytes(numel), self.first.values_dtype(dtype)
        num = min(self.first.num_kept(payload[:index_end], numel), self.first.max_kept(numel))
        return self.rest.magnitudes(self._rest_payload(payload, index_end, num, kept), num, kept)

    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        """Write zero to ``out`` wherever the payload has a value; other elements are unchanged."""
        if out.numel():
            self.first.erase(payload, out, key=key)

    def at(self, step: int) -> Codec:
        now = tuple(codec.at(step) for codec in self.codecs)
        return self if now == self.codecs else Chain(*now)

    # -- the two parts of a payload ----------------------------------------------------------------------------------

    def _parts(self, payload: Payload, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The index, and scratch for the values kept. A chain within this one has scratch of its own."""
        check_payload_size(self, payload, numel, dtype)
        kind = self.first.values_dtype(dtype)
        values = scratch(f"chain of {len(self.codecs)}", self.first.max_kept(numel), kind, device)
        return payload[: self.first.index_bytes(numel)], values

    def _rest_payload(self, payload: Payload, index_end: int, num: int, dtype: torch.dtype) -> Payload:
        """The part of the payload to which the next codec writes ``num`` values."""
        return Payload(payload[index_end : index_end + self.rest.encoded_bytes(num, dtype)])

    def _encode(
        self,
        x: Tensor,
        payload: Payload,
        dtype: torch.dtype,
        *,
        gain: float,
        before: Tensor | None,
        after: Tensor | None,
        key: int,
    ) -> None:
        index, values = self._parts(payload, x.numel(), dtype, x.device)
        num = self.first.select(x, index, values, gain=gain, before=before, after=after, key=key)
        rest_payload = self._rest_payload(payload, index.numel(), num, values.dtype)
        payload[index.numel() + rest_payload.numel() :] = 0
        if after is None:
            self.rest.encode(values[:num], rest_payload, key=key)
            return
        lost = scratch(f"lost in chain of {len(self.codecs)}", num, values.dtype, after.device).zero_()
        self.rest.encode(values[:num], rest_payload, residual=Residual(lost, lost), key=key)
        self.first.scatter(index, lost, after, add=True, key=key)

    def _decode(self, payload: Payload, out: Tensor, dtype: torch.dtype, *, gain: float, add: bool, key: int) -> Finite:
        index, values = self._parts(payload, out.numel(), dtype, out.device)
        num = self.first.num_kept(index, out.numel())
        rest_payload = self._rest_payload(payload, index.numel(), min(num, values.numel()), values.dtype)
        finite = self.rest.decode(rest_payload, values[:num], gain=gain, key=key)
        self.first.scatter(index, values[:num], out, add=add, key=key)
        return finite

    # -- as a value ---------------------------------------------------------------------------------------------------

    def spec_arguments(self) -> dict[str, Any]:
        """The constructor arguments, for specs."""
        return {"codecs": self.codecs}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.codecs == other.codecs

    def __hash__(self) -> int:
        return hash((Chain, self.codecs))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.codecs))})"
