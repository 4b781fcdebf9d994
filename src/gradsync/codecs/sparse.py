"""The base of the sparse codecs, which send some of the values and leave the others in the residual.

A payload has two parts: the *index*, which says what values were kept (empty if that follows from the key), then these
values in order of position. ``Chain`` encodes the second part with another codec. The functions below the class are
shared by ``TopK`` and ``RandomK``: compensation with the residual, and the torch code for known positions.
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

from gradsync.codecs.base import COMPILED_DTYPES, Codec, Finite, Payload, Residual, all_finite, padded


class Sparse(Codec):
    """A codec that keeps some values: it chooses them (``select``) and writes them to their positions (``scatter``)."""

    momentum: float = 0.0  # momentum correction by the error feedback, before the selection: see Dgc
    clip_norm: float | None = None

    @abc.abstractmethod
    def max_kept(self, numel: int) -> int:
        """How many of ``numel`` values a payload can hold."""

    @abc.abstractmethod
    def index_bytes(self, numel: int) -> int:
        """The length of the index: a multiple of 8."""

    @abc.abstractmethod
    def num_kept(self, index: Tensor, numel: int) -> int:
        """The number of values that an index lists; on a GPU, where reading it would stall, ``max_kept``."""

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
        """Choose values of ``y = gain * x + before``; write their index and values in order; returns ``num_kept``.

        ``values`` has ``max_kept`` elements; those behind the last chosen one are set to zero. ``after`` becomes y
        minus ``values``; it may be ``before`` or, if that is None and ``gain`` is 1, ``x``.
        """

    @abc.abstractmethod
    def scatter(
        self, index: Tensor, values: Tensor, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0
    ) -> Finite:
        """Write ``gain`` times the values to their positions and zero elsewhere, or add; returns if all are finite."""

    @abc.abstractmethod
    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        """Write zero to ``out`` wherever the payload has a value; other elements are unchanged."""

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the kept values of a tensor of a dtype are sent."""
        return dtype

    # -- Codec --------------------------------------------------------------------------------------------------------

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
        payload[-8:] = 0  # the padding is sent as well
        before, after = (None, None) if residual is None else (residual.before, residual.after)
        self.select(x, index, values, gain=gain, before=before, after=after, key=key)

    def decode(self, payload: Payload, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0) -> Finite:
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
    ) -> Finite:
        if x.numel() == 0:
            return True
        # The sum needs a buffer of full size: that of the residual, or else that of the result.
        y = out if residual is None else residual.after
        compensate(x, y, gain=gain, before=None if residual is None else residual.before)
        for other in received:
            index, values = self._parts(other, x.numel(), x.dtype)
            self.scatter(index, values, y, add=True, key=key)
        index, values = self._parts(payload, x.numel(), x.dtype)
        payload[-8:] = 0
        self.select(y, index, values, after=None if residual is None else y, key=key)
        return self.scatter(index, values, out, gain=out_gain, key=key)

    def magnitudes(self, payload: Payload, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return self._parts(payload, numel, dtype)[1] if numel else None

    def _parts(self, payload: Payload, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The index and the values."""
        check_payload_size(self, payload, numel, dtype)
        index_end, num = self.index_bytes(numel), self.max_kept(numel)
        return payload[:index_end], payload[index_end:].view(self.values_dtype(dtype))[:num]


# -- shared by the sparse codecs ---------------------------------------------------------------------------------------


def check_payload_size(codec: Codec, payload: Payload, numel: int, dtype: torch.dtype) -> None:
    """Raise if a payload has another length: it was made for another dtype, another size or another codec."""
    expected = codec.encoded_bytes(numel, dtype)
    if payload.numel() != expected:
        raise ValueError(
            f"expected a payload of {expected} bytes for {numel} values of {dtype}; got {payload.numel()}. "
            f"Make it encoded_bytes({numel}, {dtype}) long, and decode to the dtype that was encoded."
        )


def kernels_support(*tensors: Tensor) -> bool:
    """Whether the compiled kernels work on these tensors: all of one compiled dtype, contiguous, on the CPU."""
    dtype = tensors[0].dtype
    return dtype in COMPILED_DTYPES and all(
        tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


@functools.cache
def kernels(name: str) -> Any:
    """A module of compiled kernels. The first call imports Numba."""
    return importlib.import_module(f"gradsync.kernels.codecs.{name}")


def compensated(x: Tensor, *, gain: float, before: Tensor | None) -> Tensor:
    """``gain * x + before``, in the residual's dtype: the residual of 16-bit values may be too small for 16 bits."""
    if before is None:
        return x * gain
    return (x.to(before.dtype) * gain).add_(before)


def compensate(x: Tensor, y: Tensor, *, gain: float, before: Tensor | None) -> None:
    """Write ``gain * x + before`` to ``y``, which may be ``before`` or, if that is None, ``x``."""
    if not kernels_support(x, y, *(() if before is None else (before,))):
        y.copy_(compensated(x, gain=gain, before=before))
        return
    if before is None:
        torch.mul(x, gain, out=y)
        return
    mode = compensation_mode(x, gain, before, y)
    kernels("sparse").compensate(x.numpy(), before.numpy(), y.numpy(), mode, as_scalar(gain, x))


def compensation_mode(x: Tensor, gain: float, before: Tensor | None, after: Tensor | None) -> int:
    """The ``mode`` argument of the kernels: where the residual is read and written."""
    run = kernels("sparse")
    if after is None:
        assert before is None, "a residual that is added must also be written back, or it is lost"
        return int(run.NO_RESIDUAL)
    if before is None:
        return int(run.IN_PLACE if after.data_ptr() == x.data_ptr() and gain == 1.0 else run.NO_RESIDUAL)
    return int(run.SAME_BUFFER if before.data_ptr() == after.data_ptr() else run.SEPARATE)


def as_scalar(gain: float, x: Tensor) -> Any:
    """``gain`` as a NumPy scalar of the dtype of ``x``: torch multiplies in that dtype, too."""
    return np.float32(gain) if x.dtype == torch.float32 else np.float64(gain)


def narrow(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to a dtype of fewer bits. Finite values stay finite: the residual keeps the excess of large ones."""
    largest = torch.finfo(dtype).max
    if y.dtype == dtype or largest >= torch.finfo(y.dtype).max:
        return y.to(dtype)
    return torch.where(y.isfinite(), y.clamp(-largest, largest), y).to(dtype)


def subtract_sent(y: Tensor, where: Tensor, values: Tensor) -> Tensor:
    """Subtract the sent ``values`` from ``y`` in place; where they are not finite, the rest is zero."""
    rest = y[where] - values.to(y.dtype)
    y[where] = torch.where(values.isfinite(), rest, torch.zeros_like(rest))
    return y


def scatter_at(
    values: Tensor, where: Tensor, out: Tensor, *, gain: float, add: bool, used: Tensor | None = None
) -> Finite:
    """``scatter`` for known positions; ``used``: which of them are in use (see [Note: fixed sizes] in topk.py)."""
    scaled = (values.to(torch.promote_types(values.dtype, out.dtype)) * gain).to(out.dtype)
    if not add:
        out.zero_()
    result = out[where] + scaled if add else scaled
    if used is None:
        out[where] = result
        return all_finite(scaled)
    write_at(out, where, result, used)
    return all_finite(torch.where(used, scaled, 0.0))


def write_at(out: Tensor, where: Tensor, result: Tensor, used: Tensor) -> None:
    """``out[where] = result`` for the entries in use. The others repeat what the first entry writes."""
    first = torch.where(used[:1], result[:1], out[where[:1]])
    out[torch.where(used, where, where[:1])] = torch.where(used, result, first)


def check_density(density: float) -> None:
    """Raise if a density, the share of values that are kept, is out of range."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1; got {density=}. Try 0.01 to keep one in a hundred.")


def num_to_keep(numel: int, density: float) -> int:
    """How many of ``numel`` values are kept: at least one."""
    return min(numel, max(1, math.ceil(density * numel)))
