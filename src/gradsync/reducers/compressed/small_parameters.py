"""The small parameters of a bucket (biases, norms) and its flags: sent uncompressed, as one part of a row.

A model has as many small parameters as large ones. Handled one by one they would cost a compressed step more time in
Python than the large ones take to encode.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.buckets.bucket import Bucket
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import padded
from gradsync.reducers.outcome import StepOutcome

LARGEST_NUMEL = 1 << 16  # larger slots are pieces of their own, which may be cut


class _RowView(NamedTuple):
    """Views of the small parameters' part of a row."""

    values: Tensor
    gradients: Tensor  # without the flags
    runs: tuple[Tensor, ...]  # one for each run of slots, then the flags


class SmallParameters:
    """Some slots of a bucket, and its flags, with their offset in a row.

    Adjacent slots of the bucket form one *run*, including the padding between them. float32 on a CPU is copied by
    kernels, any other dtype or device by torch: both give the same bits.
    """

    def __init__(self, bucket: Bucket, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        self.slots = list(slots)
        self._bucket = bucket
        spans = _spans(self.slots)
        self._runs = [*(bucket.buffer[first:end] for first, end in spans), bucket.flags]
        self._lengths = [run.numel() for run in self._runs]
        self._names = [slot.name for slot in self.slots]
        self._ranges = _ranges(self.slots, spans)  # of the slots, among the values of a row
        self._num_flags = bucket.flags.numel()
        self._numel = sum(self._lengths)
        self._dtype = dtype
        self.offset = 0  # in a row, in bytes; set by shard_bucket
        self.num_bytes = padded(self._numel * dtype.itemsize)
        self._views: dict[int, _RowView] = {}  # by the row's address
        self._kernels = None
        if bucket.flags.is_cpu and dtype == bucket.flags.dtype == torch.float32:
            from gradsync.kernels.small_parameters import SmallParameterKernels  # Numba takes a second to import

            self._kernels = SmallParameterKernels(self._runs, [slot.flat for slot in self.slots])

    def write(self, row: Tensor) -> None:
        """Write this rank's share of the mean to a row, without the loss scale."""
        unscale = 1.0 / self._bucket.loss_scale
        if self._kernels is not None:
            sources = [(slot.source.data_ptr(), slot.external is not None) for slot in self.slots]
            self._kernels.write(sources, row.data_ptr() + self.offset, self._bucket.factor, unscale)
            return
        view = self._view(row)
        for slot in self.slots:
            slot.copy_in()
        torch._foreach_copy_(view.runs, self._runs)
        if unscale != 1.0:
            view.gradients.mul_(unscale)

    def add(self, received: Sequence[Tensor], row: Tensor) -> None:
        """Add the small parameters of received rows to those of ``row``."""
        values = self._view(row).values
        for other in received:
            values += self._view(other).values

    def read_sum(self, rows: Sequence[Tensor], outcome: StepOutcome) -> None:
        """Write the sum of some rows, in their order, to the bucket; tell ``outcome`` which slots have NaN or inf."""
        if self._kernels is None:
            self._read_sum_with_torch(rows, outcome)
        elif not self._kernels.read_sum([row.data_ptr() + self.offset for row in rows], self._bucket.loss_scale):
            outcome.add_tensors(self._names, [slot.flat for slot in self.slots])

    def _read_sum_with_torch(self, rows: Sequence[Tensor], outcome: StepOutcome) -> None:
        first, *others = (self._view(row).values for row in rows)
        total = first.clone()
        for other in others:
            total += other
        outcome.add_tensors(self._names, [total[first:end] for first, end in self._ranges], whole=total)
        if self._bucket.loss_scale != 1.0:
            total[: -self._num_flags].mul_(self._bucket.loss_scale)
        torch._foreach_copy_(self._runs, total.split(self._lengths))

    def _view(self, row: Tensor) -> _RowView:
        view = self._views.get(row.data_ptr())
        if view is None:
            values = row[self.offset : self.offset + self._numel * self._dtype.itemsize].view(self._dtype)
            view = _RowView(values, values[: -self._num_flags], values.split(self._lengths))
            self._views[row.data_ptr()] = view
        return view


def _spans(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """The ranges of a bucket's buffer that hold these slots, in their order, and none of the others."""
    spans: list[tuple[int, int]] = []
    for before, slot in zip([None, *slots], slots, strict=False):
        beside = before is not None and slot.index == before.index + 1
        first = spans.pop()[0] if beside else slot.start
        spans.append((first, slot.start + slot.flat.numel()))
    return spans


def _ranges(slots: Sequence[Slot], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The range of each slot among the values of all spans, one behind the other."""
    offsets = itertools.accumulate((end - first for first, end in spans), initial=0)
    placed = list(zip(spans, offsets, strict=False))
    ranges = []
    for slot in slots:
        numel = slot.flat.numel()
        (first, _), offset = next(one for one in placed if one[0][0] <= slot.start and slot.start + numel <= one[0][1])
        ranges.append((offset + slot.start - first, offset + slot.start - first + numel))
    return ranges
