"""Matrices of low rank: which parameters are worth it, where they lie, and the maths on all of a bucket at once.

Factors are stored by rows: the left ones of a matrix with m rows are (rank, m), the right ones of n columns (rank, n),
so that ``left.T @ right`` approximates the matrix, and each vector is contiguous. All matrices of a bucket lie one
after another in flat tensors, equal shapes side by side.

[Note: residual in factors] What a step leaves over is M - left.T @ right. It is never written down: M and the two thin
factors stay, and the next step takes the product off while it adds its gradient. So a value is written once and read
twice in a step, where writing the residual would write it again and read it once more.
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

from gradsync.bucket import Bucket
from gradsync.codecs.base import COMPILED_DTYPES
from gradsync.comm import large_pages
from gradsync.slot import Slot


@dataclass(frozen=True)
class Matrix:
    """A parameter's gradient as it lies in memory: its outermost dimension are the rows, all others the columns.

    For plain and for channels-last weights that is ``view(shape[0], -1)`` with the columns in one order or another,
    which does not matter to an approximation of low rank; a transposed weight is the transposed matrix.
    """

    slot: Slot
    rows: int
    cols: int
    at: int = 0  # in the bucket's buffer
    start: int = 0  # among the bucket's matrices
    lefts: int = 0  # among its left factors
    rights: int = 0  # among its right factors

    @property
    def fields(self) -> tuple[int, ...]:
        return self.at, self.start, self.lefts, self.rights, self.rows, self.cols

    @property
    def numel(self) -> int:
        return self.rows * self.cols


def matrix_of(slot: Slot) -> Matrix:
    """The matrix that a parameter would be; of one row if it is a vector."""
    dims = [(stride, size) for stride, size in zip(slot.view.stride(), slot.view.shape, strict=True) if size != 1]
    rows = max(dims)[1] if len(dims) > 1 else 1
    return Matrix(slot, rows, slot.view.numel() // rows if rows else 0)


def pays(matrix: Matrix, rank: int, min_compression: float) -> bool:
    """Whether two factors are that much smaller than the matrix."""
    return (matrix.rows + matrix.cols) * rank * min_compression < matrix.numel


class Layout:
    """What of a bucket goes as factors and what as it is, and where it lies."""

    def __init__(self, bucket: Bucket, rank: int, min_compression: float) -> None:
        chosen: list[Matrix] = []
        if bucket.dtype.is_floating_point:
            chosen = [m for m in map(matrix_of, bucket.slots) if pays(m, rank, min_compression)]
        self.matrices: list[Matrix] = []
        self.numel = self.left_numel = self.right_numel = 0
        for matrix in sorted(chosen, key=lambda matrix: (matrix.rows, matrix.cols)):
            at = matrix.slot.start
            self.matrices.append(
                replace(matrix, at=at, start=self.numel, lefts=self.left_numel, rights=self.right_numel)
            )
            self.numel += matrix.numel
            self.left_numel += rank * matrix.rows
            self.right_numel += rank * matrix.cols
        within = {matrix.slot.name for matrix in chosen}
        self.dense = [slot for slot in bucket.slots if slot.name not in within]
        self.dense_numel = sum(slot.view.numel() for slot in self.dense)
        self.rank = rank
        # 16 bits are too few for sums over a row, and for what is left over.
        self.dtype = torch.float32 if bucket.dtype.itemsize < 4 else bucket.dtype
        self.device = bucket.device


@dataclass
class Frame:
    """A step's matrices with their low-rank part; the residual is the difference. See [Note: residual in factors]."""

    matrices: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def zeros(cls, layout: Layout) -> Frame:
        sizes = (layout.numel, layout.left_numel, layout.right_numel)
        return cls(*(large_pages.zeros(size, layout.dtype, layout.device) for size in sizes))


class Maths(abc.ABC):
    """What is done with all the matrices of a bucket. Nothing here communicates or allocates."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.least = 10 * torch.finfo(layout.dtype).eps  # less of a vector than this is rounding
        sizes = sorted({size for matrix in layout.matrices for size in (matrix.rows, matrix.cols)})
        self.spare = {size: random_vectors(layout.rank, size, seed, "").to(layout.device) for size in sizes}

    @abc.abstractmethod
    def gather_left(self, before: Frame, factor: Tensor, *, after: Tensor, out: Tensor, gain: float) -> None:
        """``after = residual of before + gain * source``, and ``out = after @ factor``, for each matrix."""

    @abc.abstractmethod
    def gather_right(self, before: Frame, factor: Tensor, *, after: Tensor, out: Tensor, gain: float) -> None:
        """``after = residual of before + gain * source``, and ``out = after.T @ factor``, for each matrix."""

    @abc.abstractmethod
    def project_right(self, matrices: Tensor, left: Tensor, *, out: Tensor) -> None:
        """``out = matrix.T @ left``, for each matrix."""

    @abc.abstractmethod
    def expand(self, left: Tensor, right: Tensor, *, buffer: Tensor, gain: float) -> None:
        """``buffer = gain * left.T @ right``, for each matrix."""

    @abc.abstractmethod
    def residuals(self, frame: Frame) -> Tensor:
        """The residuals of all matrices, to the bits that ``gather`` adds to. (This one allocates.)"""

    @abc.abstractmethod
    def orthonormalize(self, vectors: Tensor, sizes: Sequence[int], *, out: Tensor, keep: Tensor | None = None) -> None:
        """Make each matrix's vectors orthonormal: twice-repeated Gram-Schmidt in float64, in a fixed order.

        Two guards. A vector that vanishes, or of which but rounding is left once those before it are taken off, is
        replaced by a seeded random one, so that its column goes on searching; where ``keep`` is given and all vectors
        of a matrix are zero, those of ``keep`` are taken instead. Each vector is scaled by its largest value before any
        square is taken, so that huge and tiny ones neither overflow nor vanish. NaN and inf go through: as NaN.
        """


class Compiled(Maths):
    """On a CPU, in float32."""

    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__(layout, seed)
        from gradsync.reducers import lowrank_kernels  # Numba takes a second to import

        self._kernels: Any = lowrank_kernels
        self._number = np.float32 if layout.dtype == torch.float32 else np.float64
        self._table = np.array([matrix.fields for matrix in layout.matrices], dtype=np.int64)
        self._sources = np.zeros(len(layout.matrices), dtype=np.int64)
        self._gains = np.zeros(len(layout.matrices), dtype=self._number)
        self._scratch = torch.empty(4 * max(matrix.cols for matrix in layout.matrices), dtype=layout.dtype).numpy()
        self._work = np.empty(layout.rank * max(self.spare), dtype=np.float64)

    def gather_left(self, before: Frame, factor: Tensor, *, after: Tensor, out: Tensor, gain: float) -> None:
        self._gather(self._kernels.gather_left, before, factor, after, out, gain)

    def gather_right(self, before: Frame, factor: Tensor, *, after: Tensor, out: Tensor, gain: float) -> None:
        self._gather(self._kernels.gather_right, before, factor, after, out, gain)

    def _gather(self, kernel: Any, before: Frame, factor: Tensor, after: Tensor, out: Tensor, gain: float) -> None:
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

    def residuals(self, frame: Frame) -> Tensor:
        out = torch.empty_like(frame.matrices)
        arrays = map(_array, (frame.matrices, frame.left, frame.right, out))
        self._kernels.residuals(*arrays, self.layout.rank, self._table)
        return out

    def orthonormalize(self, vectors: Tensor, sizes: Sequence[int], *, out: Tensor, keep: Tensor | None = None) -> None:
        rank, given, made = self.layout.rank, _array(vectors), _array(out)
        kept = given if keep is None else _array(keep)
        start = 0
        for size in sizes:
            end = start + rank * size
            self._kernels.orthonormalize(
                given[start:end],
                made[start:end],
                _array(self.spare[size]),
                kept[start:end],
                keep is not None,
                rank,
                size,
                self.least,
                self._work,
            )
            start = end


class Eager(Maths):
    """On any device and in any dtype, by torch; matrices of equal shape in one call."""

    def __init__(self, layout: Layout, seed: int) -> None:
        super().__init__(layout, seed)
        self._groups = [list(group) for _, group in groupby(layout.matrices, lambda matrix: (matrix.rows, matrix.cols))]
        largest = max(matrix.numel for matrix in layout.matrices)
        self._scratch = torch.empty(largest, dtype=layout.dtype, device=layout.device)

    def gather_left(self, before: Frame, factor: Tensor, *, after: Tensor, out: Tensor, gain: float) -> None:
        self._renew(before, after, gain)
        for group in self._groups:
            matrices, made = self._matrices(after, group), self._left(out, group)
            torch.bmm(self._right(factor, group), matrices.mT, out=made)

    def gather_right(self, before: Frame, factor: Tensor, *, after: Tensor, out: Tensor, gain: float) -> None:
        self._renew(before, after, gain)
        self.project_right(after, factor, out=out)

    def _renew(self, before: Frame, after: Tensor, gain: float) -> None:
        self._subtract(before, out=after)
        for matrix in self.layout.matrices:
            slot = matrix.slot
            after[matrix.start : matrix.start + matrix.numel].add_(slot.source, alpha=slot.source_gain * gain)

    def _subtract(self, frame: Frame, *, out: Tensor) -> None:
        for group in self._groups:
            left, right = self._left(frame.left, group), self._right(frame.right, group)
            whole, rest = self._matrices(frame.matrices, group), self._matrices(out, group)
            torch.baddbmm(whole, left.mT, right, alpha=-1, out=rest)

    def project_right(self, matrices: Tensor, left: Tensor, *, out: Tensor) -> None:
        for group in self._groups:
            torch.bmm(self._left(left, group), self._matrices(matrices, group), out=self._right(out, group))

    def expand(self, left: Tensor, right: Tensor, *, buffer: Tensor, gain: float) -> None:
        for group in self._groups:
            lefts, rights = self._left(left, group), self._right(right, group)
            for at, matrix in enumerate(group):
                made = self._scratch[: matrix.numel].view(matrix.rows, matrix.cols)
                torch.addmm(made, lefts[at].T, rights[at], beta=0, alpha=gain, out=made)
                buffer[matrix.at : matrix.at + matrix.numel].copy_(made.view(-1))

    def residuals(self, frame: Frame) -> Tensor:
        out = torch.empty_like(frame.matrices)
        self._subtract(frame, out=out)
        return out

    def orthonormalize(self, vectors: Tensor, sizes: Sequence[int], *, out: Tensor, keep: Tensor | None = None) -> None:
        start = 0
        for size, equal in groupby(sizes):
            end = start + self.layout.rank * size * len(list(equal))
            shape = (-1, self.layout.rank, size)
            given = vectors[start:end].view(shape)
            made = gram_schmidt(given.double(), self.spare[size], self.least)
            if keep is not None:
                unused = (given == 0).all(-1, keepdim=True).all(-2, keepdim=True)
                made = torch.where(unused, keep[start:end].view(shape).double(), made)
            out[start:end].view(shape).copy_(made)
            start = end

    def _matrices(self, flat: Tensor, group: list[Matrix]) -> Tensor:
        first = group[0]
        return flat[first.start : first.start + len(group) * first.numel].view(-1, first.rows, first.cols)

    def _left(self, flat: Tensor, group: list[Matrix]) -> Tensor:
        first, numel = group[0], self.layout.rank * group[0].rows
        return flat[first.lefts : first.lefts + len(group) * numel].view(-1, self.layout.rank, first.rows)

    def _right(self, flat: Tensor, group: list[Matrix]) -> Tensor:
        first, numel = group[0], self.layout.rank * group[0].cols
        return flat[first.rights : first.rights + len(group) * numel].view(-1, self.layout.rank, first.cols)


def maths_for(layout: Layout, seed: int) -> Maths:
    """The fastest there is for a bucket."""
    compiled = layout.device.type == "cpu" and layout.dtype in COMPILED_DTYPES and _is_plain(layout)
    return Compiled(layout, seed) if compiled else Eager(layout, seed)


def _is_plain(layout: Layout) -> bool:
    return all(matrix.slot.bucket.dtype == layout.dtype for matrix in layout.matrices)


def gram_schmidt(vectors: Tensor, spare: Tensor, least: float) -> Tensor:
    """Orthonormal vectors, of (matrices, rank, size) in float64, by the rules of ``Maths.orthonormalize``."""
    made = torch.empty_like(vectors)
    for k in range(vectors.shape[1]):
        given = vectors[:, k]
        largest = given.abs().amax(-1, keepdim=True)
        given = given / torch.where(largest == 0, 1.0, largest)
        whole = given.norm(dim=-1, keepdim=True)
        cleared, instead = _clear_of(given, made[:, :k]), _clear_of(spare[k].expand_as(given), made[:, :k])
        vanished = cleared.norm(dim=-1, keepdim=True) <= least * whole  # never so for NaN, which goes on
        chosen = torch.where(vanished, instead, cleared)
        made[:, k] = chosen / chosen.norm(dim=-1, keepdim=True)
    return made


def _clear_of(vectors: Tensor, others: Tensor) -> Tensor:
    for _ in range(2):
        for k in range(others.shape[1]):
            other = others[:, k]
            vectors = vectors - (vectors * other).sum(-1, keepdim=True) * other
    return vectors


def random_vectors(rank: int, size: int, seed: int, name: str) -> Tensor:
    """Where a search begins: the same on every rank, by the parameter's name, whatever else there is."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(rank, size, dtype=torch.float64, generator=generator)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).numpy()
