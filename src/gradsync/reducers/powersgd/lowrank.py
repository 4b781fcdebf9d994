"""The linear algebra of PowerSGD: which parameters are factored, their layout, and operations on all of a bucket.

``Layout`` decides for each slot. ``LowRankOps`` has two implementations: ``CompiledOps`` (float32 on a CPU) and
``EagerOps`` (torch). ``FactoredResidual`` is the error-feedback state.

Factors are stored by rows: the left factor of a matrix with m rows is (rank, m), the right one of n columns (rank, n),
so that ``left.T @ right`` approximates the matrix, and each vector is contiguous. All matrices of a bucket are stored
one after another in flat tensors, equal shapes side by side.

[Note: residual in factors] The residual of a step is M - left.T @ right. It is never computed explicitly: M and the two
thin factors are kept, and the next step subtracts the product while it adds its gradient. So a value is written once
and read twice in a step; storing the residual would write it again and read it once more.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsync.buckets.bucket import Bucket
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import COMPILED_DTYPES
from gradsync.comm import hugepages


@dataclass(frozen=True)
class Matrix:
    """A parameter's gradient in memory order: its outermost dimension is the rows, all others are the columns.

    For contiguous and for channels-last weights that is ``view(shape[0], -1)`` with different orders of the columns,
    which does not matter to a low-rank approximation; a transposed weight is the transposed matrix.
    """

    slot: Slot
    rows: int
    cols: int
    bucket_offset: int = 0  # in the bucket's buffer
    flat_offset: int = 0  # among the bucket's matrices
    left_offset: int = 0  # among its left factors
    right_offset: int = 0  # among its right factors

    @property
    def fields(self) -> tuple[int, ...]:
        return self.bucket_offset, self.flat_offset, self.left_offset, self.right_offset, self.rows, self.cols

    @property
    def numel(self) -> int:
        return self.rows * self.cols


def matrix_of(slot: Slot) -> Matrix:
    """A parameter as a matrix; a vector has one row."""
    dims = [(stride, size) for stride, size in zip(slot.view.stride(), slot.view.shape, strict=True) if size != 1]
    rows = max(dims)[1] if len(dims) > 1 else 1
    return Matrix(slot, rows, slot.view.numel() // rows if rows else 0)


def is_worthwhile(matrix: Matrix, rank: int, min_compression: float) -> bool:
    """Whether the two factors are more than ``min_compression`` times smaller than the matrix."""
    return (matrix.rows + matrix.cols) * rank * min_compression < matrix.numel


class Layout:
    """Which slots of a bucket are sent as factors and which uncompressed, and the offsets of the former."""

    def __init__(self, bucket: Bucket, rank: int, min_compression: float) -> None:
        chosen: list[Matrix] = []
        if bucket.dtype.is_floating_point:
            chosen = [m for m in map(matrix_of, bucket.slots) if is_worthwhile(m, rank, min_compression)]
        self.matrices: list[Matrix] = []
        self.numel = self.left_numel = self.right_numel = 0
        for matrix in sorted(chosen, key=lambda matrix: (matrix.rows, matrix.cols)):
            bucket_offset = matrix.slot.start
            self.matrices.append(
                replace(
                    matrix,
                    bucket_offset=bucket_offset,
                    flat_offset=self.numel,
                    left_offset=self.left_numel,
                    right_offset=self.right_numel,
                )
            )
            self.numel += matrix.numel
            self.left_numel += rank * matrix.rows
            self.right_numel += rank * matrix.cols
        within = {matrix.slot.name for matrix in chosen}
        self.dense = [slot for slot in bucket.slots if slot.name not in within]
        self.dense_numel = sum(slot.view.numel() for slot in self.dense)
        self.rank = rank
        # 16 bits are too few for sums over a row, and for residuals.
        self.dtype = torch.float32 if bucket.dtype.itemsize < 4 else bucket.dtype
        self.device = bucket.device


@dataclass
class FactoredResidual:
    """Matrices and their low-rank approximation; the residual is the difference. See [Note: residual in factors]."""

    matrices: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def zeros(cls, layout: Layout) -> FactoredResidual:
        sizes = (layout.numel, layout.left_numel, layout.right_numel)
        return cls(*(hugepages.zeros(size, layout.dtype, layout.device) for size in sizes))


class LowRankOps(abc.ABC):
    """Operations on all matrices of a bucket. They do not communicate, and do not allocate except where noted."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.min_relative_norm = 10 * torch.finfo(layout.dtype).eps  # a smaller rest of a vector is rounding error
        sizes = sorted({size for matrix in layout.matrices for size in (matrix.rows, matrix.cols)})
        self.fallback = {size: random_vectors(layout.rank, size, seed, "").to(layout.device) for size in sizes}

    @abc.abstractmethod
    def compensate_left(
        self, before: FactoredResidual, factor: Tensor, *, after: Tensor, out: Tensor, gain: float
    ) -> None:
        """``after = residual of before + gain * source``, and ``out = after @ factor``, for each matrix."""

    @abc.abstractmethod
    def compensate_right(
        self, before: FactoredResidual, factor: Tensor, *, after: Tensor, out: Tensor, gain: float
    ) -> None:
        """``after = residual of before + gain * source``, and ``out = after.T @ factor``, for each matrix."""

    @abc.abstractmethod
    def project_right(self, matrices: Tensor, left: Tensor, *, out: Tensor) -> None:
        """``out = matrix.T @ left``, for each matrix."""

    @abc.abstractmethod
    def expand(self, left: Tensor, right: Tensor, *, buffer: Tensor, gain: float) -> None:
        """``buffer = gain * left.T @ right``, for each matrix."""

    @abc.abstractmethod
    def residuals(self, residual: FactoredResidual) -> Tensor:
        """The residuals of all matrices: the same bits that ``compensate_*`` add the gradients to. Allocates."""

    @abc.abstractmethod
    def orthonormalize(self, vectors: Tensor, sizes: Sequence[int], *, out: Tensor, keep: Tensor | None = None) -> None:
        """Make each matrix's vectors orthonormal: Gram-Schmidt, done twice, in float64 and in a fixed order.

        Two guards. A vector that is zero, or only rounding error after it is orthogonalized against those before it, is
        replaced by a seeded random one, so that its column keeps searching; if ``keep`` is given and all vectors of a
        matrix are zero, those of ``keep`` are used instead. Each vector is divided by its largest value before it is
        squared, so that huge and tiny ones neither overflow nor underflow. NaN and inf give NaN.
        """


class CompiledOps(LowRankOps):
    """With the kernels of kernels/lowrank.py: float32 on a CPU."""

    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__(layout, seed)
        from gradsync.kernels import lowrank as lowrank_kernels

        self._kernels: Any = lowrank_kernels
        self._number = np.float32 if layout.dtype == torch.float32 else np.float64
        self._table = np.array([matrix.fields for matrix in layout.matrices], dtype=np.int64)
        self._sources = np.zeros(len(layout.matrices), dtype=np.int64)
        self._gains = np.zeros(len(layout.matrices), dtype=self._number)
        self._scratch = torch.empty(4 * max(matrix.cols for matrix in layout.matrices), dtype=layout.dtype).numpy()
        self._work = np.empty(layout.rank * max(self.fallback), dtype=np.float64)

    def compensate_left(
        self, before: FactoredResidual, factor: Tensor, *, after: Tensor, out: Tensor, gain: float
    ) -> None:
        self._compensate(self._kernels.compensate_left, before, factor, after, out, gain)

    def compensate_right(
        self, before: FactoredResidual, factor: Tensor, *, after: Tensor, out: Tensor, gain: float
    ) -> None:
        self._compensate(self._kernels.compensate_right, before, factor, after, out, gain)

    def _compensate(
        self, kernel: Any, before: FactoredResidual, factor: Tensor, after: Tensor, out: Tensor, gain: float
    ) -> None:
        for at, matrix in enumerate(self.layout.matrices):
            self._sources[at] = matrix.slot.source.data_ptr()
            self._gains[at] = matrix.slot.source_gain * gain
        tensors = (before.matrices, before.left, before.right, factor, after, out)
        arrays = (self._sources, self._gains, *map(_array, tensors))
        kernel(*arrays, self.layout.rank, self._scratch, self._table)

    def project_right(self, matrices: Tensor, left: Tensor, *, out: Tensor) -> None:
        self._kernels.project_right(*map(_array, (matrices, left, out)), self.layout.rank, self._table)

    def expand(self, left: Tensor, right: Tensor, *, buffer: Tensor, gain: float) -> None:
        arrays = map(_array, (left, right, buffer))
        self._kernels.expand(*arrays, self._number(gain), self.layout.rank, self._scratch, self._table)

    def residuals(self, residual: FactoredResidual) -> Tensor:
        out = torch.empty_like(residual.matrices)
        arrays = map(_array, (residual.matrices, residual.left, residual.right, out))
        self._kernels.residuals(*arrays, self.layout.rank, self._table)
        return out

    def orthonormalize(self, vectors: Tensor, sizes: Sequence[int], *, out: Tensor, keep: Tensor | None = None) -> None:
        rank, given, result = self.layout.rank, _array(vectors), _array(out)
        kept = given if keep is None else _array(keep)
        start = 0
        for size in sizes:
            end = start + rank * size
            self._kernels.orthonormalize(
                given[start:end],
                result[start:end],
                _array(self.fallback[size]),
                kept[start:end],
                keep is not None,
                rank,
                size,
                self.min_relative_norm,
                self._work,
            )
            start = end


class EagerOps(LowRankOps):
    """With torch: any device and dtype; matrices of equal shape are batched."""

    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__(layout, seed)
        self._groups = [list(group) for _, group in groupby(layout.matrices, lambda matrix: (matrix.rows, matrix.cols))]
        largest = max(matrix.numel for matrix in layout.matrices)
        self._scratch = torch.empty(largest, dtype=layout.dtype, device=layout.device)

    def compensate_left(
        self, before: FactoredResidual, factor: Tensor, *, after: Tensor, out: Tensor, gain: float
    ) -> None:
        self._compensate(before, after, gain)
        for group in self._groups:
            matrices, result = self._matrices(after, group), self._left(out, group)
            torch.bmm(self._right(factor, group), matrices.mT, out=result)

    def compensate_right(
        self, before: FactoredResidual, factor: Tensor, *, after: Tensor, out: Tensor, gain: float
    ) -> None:
        self._compensate(before, after, gain)
        self.project_right(after, factor, out=out)

    def _compensate(self, before: FactoredResidual, after: Tensor, gain: float) -> None:
        self._subtract_low_rank(before, out=after)
        for matrix in self.layout.matrices:
            slot = matrix.slot
            after[matrix.flat_offset : matrix.flat_offset + matrix.numel].add_(
                slot.source, alpha=slot.source_gain * gain
            )

    def _subtract_low_rank(self, residual: FactoredResidual, *, out: Tensor) -> None:
        for group in self._groups:
            left, right = self._left(residual.left, group), self._right(residual.right, group)
            whole, rest = self._matrices(residual.matrices, group), self._matrices(out, group)
            torch.baddbmm(whole, left.mT, right, alpha=-1, out=rest)

    def project_right(self, matrices: Tensor, left: Tensor, *, out: Tensor) -> None:
        for group in self._groups:
            torch.bmm(self._left(left, group), self._matrices(matrices, group), out=self._right(out, group))

    def expand(self, left: Tensor, right: Tensor, *, buffer: Tensor, gain: float) -> None:
        for group in self._groups:
            lefts, rights = self._left(left, group), self._right(right, group)
            for at, matrix in enumerate(group):
                result = self._scratch[: matrix.numel].view(matrix.rows, matrix.cols)
                torch.addmm(result, lefts[at].T, rights[at], beta=0, alpha=gain, out=result)
                buffer[matrix.bucket_offset : matrix.bucket_offset + matrix.numel].copy_(result.view(-1))

    def residuals(self, residual: FactoredResidual) -> Tensor:
        out = torch.empty_like(residual.matrices)
        self._subtract_low_rank(residual, out=out)
        return out

    def orthonormalize(self, vectors: Tensor, sizes: Sequence[int], *, out: Tensor, keep: Tensor | None = None) -> None:
        start = 0
        for size, equal in groupby(sizes):
            end = start + self.layout.rank * size * len(list(equal))
            shape = (-1, self.layout.rank, size)
            given = vectors[start:end].view(shape)
            result = gram_schmidt(given.double(), self.fallback[size], self.min_relative_norm)
            if keep is not None:
                unused = (given == 0).all(-1, keepdim=True).all(-2, keepdim=True)
                result = torch.where(unused, keep[start:end].view(shape).double(), result)
            out[start:end].view(shape).copy_(result)
            start = end

    def _matrices(self, flat: Tensor, group: list[Matrix]) -> Tensor:
        first = group[0]
        return flat[first.flat_offset : first.flat_offset + len(group) * first.numel].view(-1, first.rows, first.cols)

    def _left(self, flat: Tensor, group: list[Matrix]) -> Tensor:
        first, numel = group[0], self.layout.rank * group[0].rows
        return flat[first.left_offset : first.left_offset + len(group) * numel].view(-1, self.layout.rank, first.rows)

    def _right(self, flat: Tensor, group: list[Matrix]) -> Tensor:
        first, numel = group[0], self.layout.rank * group[0].cols
        return flat[first.right_offset : first.right_offset + len(group) * numel].view(-1, self.layout.rank, first.cols)


def ops_for(layout: Layout, seed: int) -> LowRankOps:
    """The fastest implementation for a bucket."""
    compiled = layout.device.type == "cpu" and layout.dtype in COMPILED_DTYPES and _has_one_dtype(layout)
    return CompiledOps(layout, seed) if compiled else EagerOps(layout, seed)


def _has_one_dtype(layout: Layout) -> bool:
    return all(matrix.slot.bucket.dtype == layout.dtype for matrix in layout.matrices)


def gram_schmidt(vectors: Tensor, fallback: Tensor, min_relative_norm: float) -> Tensor:
    """Orthonormal vectors of shape (matrices, rank, size) in float64, by the rules of ``LowRankOps.orthonormalize``."""
    result = torch.empty_like(vectors)
    for k in range(vectors.shape[1]):
        given = vectors[:, k]
        largest = given.abs().amax(-1, keepdim=True)
        given = given / torch.where(largest == 0, 1.0, largest)
        whole = given.norm(dim=-1, keepdim=True)
        cleared, instead = (
            _orthogonalize(given, result[:, :k]),
            _orthogonalize(fallback[k].expand_as(given), result[:, :k]),
        )
        vanished = cleared.norm(dim=-1, keepdim=True) <= min_relative_norm * whole  # False for NaN, which is propagated
        chosen = torch.where(vanished, instead, cleared)
        result[:, k] = chosen / chosen.norm(dim=-1, keepdim=True)
    return result


def _orthogonalize(vectors: Tensor, others: Tensor) -> Tensor:
    for _ in range(2):
        for k in range(others.shape[1]):
            other = others[:, k]
            vectors = vectors - (vectors * other).sum(-1, keepdim=True) * other
    return vectors


def random_vectors(rank: int, size: int, seed: int, name: str) -> Tensor:
    """Random vectors that depend only on the seed and the parameter's name: the same on every rank."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(rank, size, dtype=torch.float64, generator=generator)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).numpy()
