"""What codecs have in common that keep some of the values and leave the others to the residual.

A payload has two parts: which values were kept (the *index*, empty where the key alone says it), then these values in
order of position. ``Chain`` gives the second part to another codec.
"""

from __future__ import annotations

import abc
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsync.codecs.base import COMPILED_DTYPES, Codec, Payload, Residual, padded


class Sparse(Codec):
    """A codec that keeps some values: it chooses them (``select``) and puts them where they belong (``scatter``)."""

    momentum: float = 0.0  # what the feedback gathers before the selection: see Dgc
    clip_norm: float | None = None

    @abc.abstractmethod
    def max_kept(self, numel: int) -> int:
        """How many of ``numel`` values a payload has room for."""

    @abc.abstractmethod
    def index_bytes(self, numel: int) -> int:
        """How long the index is: a multiple of 8."""

    @abc.abstractmethod
    def num_kept(self, index: Tensor, numel: int) -> int:
        """How many values an index speaks of."""

    @abc.abstractmethod
    def select(
        self,
        x: Tensor,
        index: Tensor,
        values: Tensor,
        *,
        gain: float = 1.0,
        before: Tensor | None = None,
        after: Tensor | None = None,
        key: int = 0,
    ) -> int:
        """Choose from ``y = gain * x + before``: write which, their values in order, and say how many.

        ``values`` has room for ``max_kept`` and is zero behind the last one. ``after`` becomes y less what ``values``
        say; it may be ``before`` or, where that is None and ``gain`` is 1, ``x``.
        """

    @abc.abstractmethod
    def scatter(
        self, index: Tensor, values: Tensor, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0
    ) -> bool:
        """Write ``gain`` times the values where they belong, zero elsewhere, or add them; say if all are finite."""

    @abc.abstractmethod
    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        """Write zero to ``out`` wherever the payload has a value; the others stay."""

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the values kept of a tensor of a dtype travel as."""
        return dtype

    # -- the codec that follows ---------------------------------------------------------------------------------------

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        if numel == 0:
            return 0
        return self.index_bytes(numel) + padded(self.max_kept(numel) * self.values_dtype(dtype).itemsize)

    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        if x.numel() == 0:
            return
        index, values = self._parts(payload, x.numel(), x.dtype)
        payload[-8:] = 0  # the padding travels as well
        before, after = (None, None) if residual is None else (residual.before, residual.after)
        self.select(x, index, values, gain=gain, before=before, after=after, key=key)

    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> bool:
        if out.numel() == 0:
            return True
        index, values = self._parts(payload, out.numel(), out.dtype)
        return self.scatter(index, values, out, gain=gain, add=add, key=key)

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
        if x.numel() == 0:
            return True
        # The sum needs room of full size: where the residual will be, or else where the result will.
        y = out if residual is None else residual.after
        compensate(x, y, gain=gain, before=None if residual is None else residual.before)
        for other in received:
            index, values = self._parts(other, x.numel(), x.dtype)
            self.scatter(index, values, y, add=True, key=key)
        index, values = self._parts(payload, x.numel(), x.dtype)
        payload[-8:] = 0
        self.select(y, index, values, after=None if residual is None else y, key=key)
        return self.scatter(index, values, out, gain=out_gain, key=key)

    def _parts(self, payload: Payload, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The index and the values."""
        check_room(self, payload, numel, dtype)
        cut, num = self.index_bytes(numel), self.max_kept(numel)
        return payload[:cut], payload[cut:].view(self.values_dtype(dtype))[:num]


# -- what the sparse codecs share --------------------------------------------------------------------------------------


def check_room(codec: Codec, payload: Payload, numel: int, dtype: torch.dtype) -> None:
    """Refuse a payload of another length: it was made for another dtype, another size or another codec."""
    expected = codec.encoded_bytes(numel, dtype)
    if payload.numel() != expected:
        raise ValueError(
            f"expected a payload of {expected} bytes for {numel} values of {dtype}; got {payload.numel()}. "
            f"Make it encoded_bytes({numel}, {dtype}) long, and decode to the dtype that was encoded."
        )


def kernels_take(*tensors: Tensor) -> bool:
    """Whether the compiled kernels work on these: floats of 32 bits, all alike, on the CPU."""
    dtype = tensors[0].dtype
    return dtype in COMPILED_DTYPES and all(
        tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


@functools.cache
def kernels(name: str) -> Any:
    """A module of compiled kernels; Numba is imported when the first one is asked for."""
    return importlib.import_module(f"gradsync.codecs.kernels.{name}")


def compensated(x: Tensor, *, gain: float, before: Tensor | None) -> Tensor:
    """``gain * x + before``, in the residual's dtype: what is left of 16 bits may be too small for 16 bits."""
    if before is None:
        return x * gain
    return (x.to(before.dtype) * gain).add_(before)


def compensate(x: Tensor, y: Tensor, *, gain: float, before: Tensor | None) -> None:
    """Write ``gain * x + before`` to ``y``, which may be ``before`` or, without that, ``x``."""
    if not kernels_take(x, y, *(() if before is None else (before,))):
        y.copy_(compensated(x, gain=gain, before=before))
        return
    if before is None:
        torch.mul(x, gain, out=y)
        return
    mode = how_compensated(x, gain, before, y)
    kernels("residual").compensate(x.numpy(), before.numpy(), y.numpy(), mode, as_scalar(gain, x))


def how_compensated(x: Tensor, gain: float, before: Tensor | None, after: Tensor | None) -> int:
    """The kernels' word for where the residual lies."""
    run = kernels("residual")
    if after is None:
        assert before is None, "what was held back before, and is not kept after, would be lost"
        return int(run.ALONE)
    if before is None:
        return int(run.IN_PLACE if after.data_ptr() == x.data_ptr() and gain == 1.0 else run.ALONE)
    return int(run.SAME if before.data_ptr() == after.data_ptr() else run.APART)


def as_scalar(gain: float, x: Tensor) -> Any:
    """A number as the kernels take it: of the type of ``x``, as torch multiplies."""
    return np.float32(gain) if x.dtype == torch.float32 else np.float64(gain)


def narrowed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a dtype of fewer bits; what is finite stays so, and the residual keeps what is too large."""
    largest = torch.finfo(dtype).max
    if y.dtype == dtype or largest >= torch.finfo(y.dtype).max:
        return y.to(dtype)
    return torch.where(y.isfinite(), y.clamp(-largest, largest), y).to(dtype)


def leave(y: Tensor, where: Tensor, values: Tensor) -> Tensor:
    """Take ``values`` out of ``y`` in place; where they are not finite, nothing is left."""
    rest = y[where] - values.to(y.dtype)
    y[where] = torch.where(values.isfinite(), rest, torch.zeros_like(rest))
    return y


def put(values: Tensor, where: Tensor, out: Tensor, *, gain: float, add: bool) -> bool:
    """``scatter`` for known positions."""
    scaled = (values.to(torch.promote_types(values.dtype, out.dtype)) * gain).to(out.dtype)
    if not add:
        out.zero_()
    out[where] = out[where] + scaled if add else scaled
    return bool(scaled.isfinite().all())


def check_density(density: float) -> None:
    """A density is the share of values that are kept."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1; got {density=}. Try 0.01 to keep one in a hundred.")


def share_of(numel: int, density: float) -> int:
    """How many values of ``numel`` are kept: at least one of any."""
    return min(numel, max(1, math.ceil(density * numel)))
