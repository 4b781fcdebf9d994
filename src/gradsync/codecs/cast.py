"""16-bit floats on the wire: ``fp16`` and ``bf16``. Their payloads can be summed by an all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import COMPILED_DTYPES, Codec, Finite, Payload, Residual, all_finite, padded
from gradsync.codecs.scratch import scratch

_KERNELS: dict[tuple[torch.dtype, torch.dtype], tuple[Any, Any] | None] = {}  # encode and decode, once compiled


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """The base of ``Fp16`` and ``Bf16``: every value is rounded to the nearest one of the dtype ``sums_as``."""

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return padded(2 * numel)

    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        numel = self._check(x, payload)
        if numel % 4:
            payload[2 * numel :] = 0  # the padding is summed with the rest
        kernels = self._kernels(x)
        if kernels is not None:
            before = after = 0
            if residual is not None:
                assert residual.before.dtype == residual.after.dtype == x.dtype, "kernels read raw memory"
                before, after = residual.before.data_ptr(), residual.after.data_ptr()
            kernels[0](x.data_ptr(), numel, gain, before, after, payload.data_ptr())
            return
        short = self._short(payload, numel)
        y = torch.mul(x, gain, out=scratch("cast", numel, x.dtype, x.device))
        if residual is not None:
            y += residual.before
        short.copy_(y)
        if residual is not None:
            torch.sub(y, short, out=residual.after)

    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> Finite:
        numel = self._check(out, payload)
        kernels = self._kernels(out)
        if kernels is not None:
            finite: bool = kernels[1](payload.data_ptr(), out.data_ptr(), numel, gain, add)
            return finite
        values = scratch("cast", numel, out.dtype, out.device)
        values.copy_(self._short(payload, numel)).mul_(gain)
        if add:
            out += values
        else:
            out.copy_(values)
        return all_finite(values)

    def _check(self, values: Tensor, payload: Tensor) -> int:
        numel = values.numel()
        assert values.is_contiguous(), "values are flat and contiguous"
        assert payload.numel() == self.encoded_bytes(numel), (payload.numel(), numel)
        return numel

    def _short(self, payload: Payload, numel: int) -> Tensor:
        assert self.sums_as is not None
        return payload.view(self.sums_as)[:numel]

    def _kernels(self, like: Tensor) -> tuple[Any, Any] | None:
        if not like.is_cpu or like.dtype not in COMPILED_DTYPES:
            return None
        assert self.sums_as is not None
        key = like.dtype, self.sums_as
        if key not in _KERNELS:
            from gradsync.kernels.codecs import casts

            _KERNELS[key] = casts.encode_and_decode(*key) if casts.available(self.sums_as) else None
        return _KERNELS[key]


@spec.register("codec", "fp16")
@dataclass(frozen=True, kw_only=True)
class Fp16(Cast):
    """float16: 11 bits of precision, from 6e-8 to 65504. Larger values become inf, smaller ones stay in the residual.

    The values are scaled before they are cast, so the sum over all ranks does not overflow where the mean would not.

    >>> import torch
    >>> from gradsync.codecs import Fp16, Payload
    >>> codec, x = Fp16(), torch.tensor([1.0, 0.1, 1e-9])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    >>> codec.encode(x, payload)
    >>> payload.view(codec.sums_as)
    tensor([1.0000, 0.1000, 0.0000, 0.0000], dtype=torch.float16)
    """

    sums_as = torch.float16


@spec.register("codec", "bf16")
@dataclass(frozen=True, kw_only=True)
class Bf16(Cast):
    """bfloat16: 8 bits of precision, and the range of float32.

    >>> import torch
    >>> from gradsync.codecs import Bf16, Payload
    >>> codec, x = Bf16(), torch.tensor([1.0, 0.1, 1e-9])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    >>> codec.encode(x, payload)
    >>> out = torch.empty(3)
    >>> codec.decode(payload, out), out
    (True, tensor([1.0000e+00, 1.0010e-01, 9.9681e-10]))
    """

    sums_as = torch.bfloat16

    def magnitudes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return self._short(payload, numel)  # Fp16 has none: values too large for float16 are inf
