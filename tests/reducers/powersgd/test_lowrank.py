"""The linear algebra of PowerSGD: compiled and eager agree, factors are orthonormal, NaN is propagated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Solo
from gradsync.reducers.powersgd.lowrank import (
    CompiledOps,
    EagerOps,
    FactoredResidual,
    Layout,
    LowRankOps,
    matrix_of,
    ops_for,
)
from gradsync.reducers.powersgd.reducer import PowerSGD
from tests.reducers.powersgd.harness import ReducerHarness


def make_layout(rank: int, dtype: torch.dtype) -> Layout:
    run = ReducerHarness(Solo(), PowerSGD(rank=rank), dtype=dtype, cap_bytes=10**6)
    return Layout(run.plan.buckets[0], rank, 1.0)


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_compiled_and_eager_ops_agree(rank: int, dtype: torch.dtype) -> None:
    layout = make_layout(rank, dtype)
    assert isinstance(ops_for(layout, 0), CompiledOps)
    outcomes = []
    for ops in (CompiledOps(layout, 0), EagerOps(layout, 0)):
        generator = torch.Generator().manual_seed(0)

        def random(numel: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(numel, dtype=dtype, generator=generator)

        residual = FactoredResidual(random(layout.numel), random(layout.left_numel), random(layout.right_numel))
        for matrix in layout.matrices:
            matrix.slot.flat.copy_(random(matrix.numel))
        buffer = layout.matrices[0].slot.bucket.buffer
        left, right = random(layout.left_numel), random(layout.right_numel)
        made: list[Tensor] = [torch.zeros_like(residual.matrices) for _ in range(2)]
        lefts = [torch.zeros_like(left) for _ in range(2)]
        rights = [torch.zeros_like(right) for _ in range(4)]
        ops.compensate_left(residual, right, after=made[0], out=lefts[0], gain=0.5)
        ops.compensate_right(residual, left, after=made[1], out=rights[0], gain=0.5)
        ops.project_right(made[1], left, out=rights[1])
        ops.orthonormalize(lefts[0], [m.rows for m in layout.matrices], out=lefts[1])
        ops.orthonormalize(rights[0], [m.cols for m in layout.matrices], out=rights[2], keep=right)
        rights[3].copy_(right)
        ops.orthonormalize(torch.zeros_like(right), [m.cols for m in layout.matrices], out=rights[3], keep=right)
        assert torch.equal(rights[3], right)
        residuals = ops.residuals(residual)
        ops.expand(left, right, buffer=buffer, gain=2.0)
        outcomes.append([*made, *lefts, *rights, residuals, buffer.clone()])
    tolerance = 1e4 * torch.finfo(dtype).eps
    for one, other in zip(*outcomes, strict=True):
        assert one.abs().sum() > 0
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def factors(rows: list[list[float]], size: int, dtype: torch.dtype) -> Tensor:
    """Vectors that begin with these values and go on with zeros."""
    vectors = torch.zeros(len(rows), size, dtype=dtype)
    for vector, values in zip(vectors, rows, strict=True):
        vector[: len(values)] = torch.tensor(values, dtype=dtype)
    return vectors.view(-1)


DIFFICULT_FACTORS = {
    "zeros": [[], [], []],
    "one vanishes": [[1.0, 2.0], [], [3.0]],
    "parallel": [[1.0, 2.0, 3.0], [-2.0, -4.0, -6.0], [1.0, 2.0, 3.0]],
    "nearly parallel": [[1.0, 2.0, 3.0], [1.0, 2.0, 3.000001], [1.0, 2.000001, 3.0]],
    "huge": [[3e38, 1e38], [1e38, 3e38], [-3e38, 0.0, 3e38]],
    "denormal": [[1e-44], [0.0, 1e-42], [1e-42, 1e-44, 1e-40]],
    "far apart": [[3e38, 1e-44], [1e-44, 3e38], [0.0, 0.0, 1.0]],
}


@pytest.mark.parametrize("rows", DIFFICULT_FACTORS.values(), ids=DIFFICULT_FACTORS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [CompiledOps, EagerOps])
def test_orthonormalize_handles_difficult_factors(
    kind: Callable[[Layout, int], LowRankOps], dtype: torch.dtype, rows: list[list[float]]
) -> None:
    if dtype == torch.float64:
        rows = [[value * abs(value) ** 7 for value in row] for row in rows]  # 1e38 to 1e304
    ops = kind(make_layout(3, dtype), 0)
    vectors = factors(rows, 24, dtype)
    out = torch.zeros_like(vectors)
    ops.orthonormalize(vectors, [24], out=out)
    made = out.view(3, 24).double()
    assert torch.allclose(made @ made.T, torch.eye(3, dtype=torch.float64), atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", [CompiledOps, EagerOps])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 30, 70])
def test_orthonormalize_propagates_nan(kind: Callable[[Layout, int], LowRankOps], value: float, at: int) -> None:
    ops = kind(make_layout(3, torch.float32), 0)
    vectors = torch.randn(72, generator=torch.Generator().manual_seed(0))
    vectors[at] = value
    out = torch.zeros_like(vectors)
    ops.orthonormalize(vectors, [24], out=out, keep=torch.zeros_like(vectors))
    assert out[at].isnan()


def test_matrix_of_follows_the_memory_layout() -> None:
    comm = Solo()
    params = {
        "plain": Parameter(torch.zeros(6, 2, 3, 3)),
        "channels last": Parameter(torch.zeros(6, 2, 3, 3).to(memory_format=torch.channels_last)),
        "transposed": Parameter(torch.zeros(5, 7).T),
        "within": Parameter(torch.zeros(1, 5, 7)),
        "vector": Parameter(torch.zeros(9)),
        "row": Parameter(torch.zeros(1, 9)),
        "empty": Parameter(torch.zeros(0, 4)),
        "scalar": Parameter(torch.zeros(())),
    }
    plan = BucketPlan([list(params)], [], params, comm)
    found = {slot.name: (matrix_of(slot).rows, matrix_of(slot).cols) for slot in plan.buckets[0].slots}
    assert found["plain"] == found["channels last"] == (6, 18)
    assert found["transposed"] == found["within"] == (5, 7)
    assert found["vector"] == found["row"] == (1, 9)
    assert found["scalar"] == (1, 1)
    assert found["empty"][0] * found["empty"][1] == 0
