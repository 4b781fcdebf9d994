"""What of a bucket travels whole and together: biases, norms and other small slots, and the flags.

A model has as many small parameters as large ones. One by one they would cost a compressed step more time in Python
than the large ones take to encode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.bucket import Bucket
from gradsync.codecs.base import padded
from gradsync.slot import Slot

LARGEST_NUMEL = 1 << 16  # a slot above this is worth a piece of its own, which may be cut


class _Row(NamedTuple):
    """A bundle's part of a payload."""

    values: Tensor
    gradients: Tensor  # without the flags
    runs: tuple[Tensor, ...]  # one for each run of slots, then the flags


class Bundle:
    """Some slots of a bucket, and its flags, with their place in a shard's payload.

    Slots that lie side by side in the bucket are one *run*, with the few bytes between them. float32 on a CPU is moved
    by kernels, any other dtype and device by torch: to the same bits.
    """

    def __init__(self, bucket: Bucket, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        self.slots = list(slots)
        self._bucket = bucket
        spans = _spans(self.slots)
        self._runs = [*(bucket.buffer[first:end] for first, end in spans), bucket.flags]
        self._lengths = [run.numel() for run in self._runs]
        self._num_flags = bucket.flags.numel()
        self._numel = sum(self._lengths)
        self._dtype = dtype
        self.at = 0  # its first byte in the payload
        self.num_bytes = padded(self._numel * dtype.itemsize)
        self._rows: dict[int, _Row] = {}  # that it was asked about, by their address
        self._movers = None
        if bucket.flags.is_cpu and dtype == bucket.flags.dtype == torch.float32:
            from gradsync.reducers.bundle_kernels import Movers  # Numba takes a second to import

            self._movers = Movers(self._runs, [slot.flat for slot in self.slots])

    def give(self, row: Tensor) -> None:
        """Write this rank's share of the mean, in unscaled units."""
        unscale = 1.0 / self._bucket.loss_scale
        if self._movers is not None:
            sources = [(slot.source.data_ptr(), slot.fresh is not None) for slot in self.slots]
            self._movers.give(sources, row.data_ptr() + self.at, self._bucket.factor, unscale)
            return
        mine = self._in(row)
        for slot in self.slots:
            slot.recall()
        torch._foreach_copy_(mine.runs, self._runs)
        if unscale != 1.0:
            mine.gradients.mul_(unscale)

    def add(self, received: Sequence[Tensor], row: Tensor) -> None:
        """Add what others gave to what this rank did."""
        values = self._in(row).values
        for other in received:
            values += self._in(other).values

    def take_sum(self, rows: Sequence[Tensor]) -> list[str]:
        """Put the sum of some rows, in their order, where it belongs; returns the slots that are not all numbers."""
        if self._movers is not None:
            finite = self._movers.take_sum([row.data_ptr() + self.at for row in rows], self._bucket.loss_scale)
        else:
            finite = self._take_sum_with_torch(rows)
        return [] if finite else [slot.name for slot in self.slots if not bool(slot.flat.isfinite().all())]

    def _take_sum_with_torch(self, rows: Sequence[Tensor]) -> bool:
        first, *others = (self._in(row).values for row in rows)
        total = first.clone()
        for other in others:
            total += other
        finite = math.isfinite(torch.linalg.vector_norm(total, math.inf))
        if self._bucket.loss_scale != 1.0:
            total[: -self._num_flags].mul_(self._bucket.loss_scale)
        torch._foreach_copy_(self._runs, total.split(self._lengths))
        return finite

    def _in(self, row: Tensor) -> _Row:
        found = self._rows.get(row.data_ptr())
        if found is None:
            values = row[self.at : self.at + self._numel * self._dtype.itemsize].view(self._dtype)
            found = _Row(values, values[: -self._num_flags], values.split(self._lengths))
            self._rows[row.data_ptr()] = found
        return found


def _spans(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """The parts of a bucket's buffer that hold some of its slots, in their order, and nothing of the others."""
    spans: list[tuple[int, int]] = []
    for before, slot in zip([None, *slots], slots, strict=False):
        beside = before is not None and slot.index == before.index + 1
        first = spans.pop()[0] if beside else slot.start
        spans.append((first, slot.start + slot.flat.numel()))
    return spans
