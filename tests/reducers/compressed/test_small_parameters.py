"""Small parameters: the layout is the same on all ranks, shards stay balanced, kernels and torch agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Solo
from gradsync.reducers import Compressed
from gradsync.reducers.compressed.small_parameters import SmallParameters
from gradsync.reducers.outcome import StepOutcome


def nonfinite_after_reading(small: SmallParameters, rows: list[torch.Tensor]) -> list[str]:
    """Write the sum of some rows to the bucket; returns the parameters that have NaN or inf."""
    outcome = StepOutcome()
    small.read_sum(rows, outcome)
    return outcome.nonfinite


def test_redistribute_gives_all_ranks_the_same_names() -> None:
    # Whether a parameter has a residual decides on the layout, which must be the same on all ranks.
    states = [{"steps": 3, "own": {"residuals": {"a": torch.ones(4)}}, "shared": {}} for _ in range(2)]
    loaded = [Compressed("int8").redistribute(states, rank, 3)["own"]["residuals"] for rank in range(3)]
    assert [own["a"].tolist() for own in loaded] == [[1.0] * 4, [1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("world", [3, 8])
def test_many_small_parameters_are_balanced_among_the_shards(world: int) -> None:
    shapes = [(100, 100) if index % 4 == 0 else (1500,) for index in range(40)]
    params = {str(index): nn.Parameter(torch.zeros(shape)) for index, shape in enumerate(shapes)}
    plan = BucketPlan([list(params)], [], params, Solo())

    def bytes_sent(world_size: int) -> int:
        reducer = Compressed("int4")
        reducer.attach(plan, Solo())
        return reducer.bytes_sent(plan.buckets[0], world_size)

    assert bytes_sent(world) < 1.15 * 2 * (world - 1) / world * bytes_sent(2)


def test_adjacent_slots_are_one_run_without_slots_between() -> None:
    sizes = {"a": (5,), "b": (3,), "wide": (64, 64), "c": (7,)}
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in sizes.items()}
    (bucket,) = BucketPlan([list(params)], [], params, Solo()).buckets
    small = SmallParameters(bucket, [slot for slot in bucket.slots if slot.name != "wide"], torch.float32)
    small.offset = 8
    rows = torch.zeros(2, 8 + small.num_bytes, dtype=torch.uint8)
    for value, row in zip((1.0, 10.0), rows, strict=True):
        for slot in bucket.slots:
            slot.flat.fill_(value)
        bucket.flags.fill_(1.0)
        small.write(row)
    bucket.slots[2].flat.fill_(-1.0)
    assert nonfinite_after_reading(small, list(rows)) == []
    assert [slot.flat.unique().tolist() for slot in bucket.slots] == [[11.0], [11.0], [-1.0], [11.0]]
    assert bucket.flags.tolist() == [2.0] * 4
    assert small.num_bytes < 4 * 64  # two runs, the first with the gap between a and b


def test_write_applies_the_weight_and_removes_the_loss_scale() -> None:
    params = {"a": nn.Parameter(torch.zeros(5)), "b": nn.Parameter(torch.zeros(3))}
    (bucket,) = BucketPlan([list(params)], [], params, Solo()).buckets
    small = SmallParameters(bucket, bucket.slots, torch.float32)
    bucket.factor, bucket.loss_scale = 0.5, 4.0
    bucket.slots[0].external = torch.full((5,), 8.0)
    bucket.slots[1].flat.fill_(2.0)
    row = torch.zeros(small.num_bytes, dtype=torch.uint8)
    small.write(row)
    values = row.view(torch.float32)
    assert values[:5].tolist() == [1.0] * 5  # 8 * 0.5 / 4
    assert nonfinite_after_reading(small, [row]) == []
    assert bucket.slots[0].flat.tolist() == [4.0] * 5
    assert bucket.slots[1].flat.tolist() == [2.0] * 3
    row.view(torch.float32)[0] = float("nan")
    assert nonfinite_after_reading(small, [row]) == ["a"]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_kernels_and_torch_give_the_same_bits(num_rows: int) -> None:
    sizes = {"a": (5,), "b": (300,), "wide": (64, 64), "c": (7, 3)}
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in sizes.items()}
    (bucket,) = BucketPlan([list(params)], [], params, Solo()).buckets
    bucket.factor, bucket.loss_scale = 1 / 3, 7.0
    draw = torch.Generator().manual_seed(0)

    def outcome(*, compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        draw.manual_seed(0)
        small = SmallParameters(bucket, [slot for slot in bucket.slots if slot.name != "wide"], torch.float32)
        assert small._kernels is not None
        if not compiled:
            small._kernels = None
        rows = torch.zeros(num_rows, small.num_bytes, dtype=torch.uint8)
        for row in rows:
            bucket.flags.fill_(1.0)
            bucket.flags[1] = 0.0
            for slot in bucket.slots:
                slot.flat.copy_(torch.randn(slot.flat.numel(), generator=draw))
            bucket.slots[1].external = torch.randn(300, generator=draw)
            small.write(row)
            bucket.slots[1].external = None
        bucket.slots[2].flat.zero_()
        assert nonfinite_after_reading(small, list(rows)) == []
        return rows, bucket.storage.clone()

    for one, other in zip(outcome(compiled=True), outcome(compiled=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf"), float("-inf")])
def test_read_sum_names_nonfinite_slots(nonfinite: float) -> None:
    params = {name: nn.Parameter(torch.zeros(40)) for name in "abc"}
    (bucket,) = BucketPlan([list(params)], [], params, Solo()).buckets
    small = SmallParameters(bucket, bucket.slots, torch.float32)
    row = torch.zeros(small.num_bytes, dtype=torch.uint8)
    bucket.slots[2].flat[39] = nonfinite
    small.write(row)
    bucket.storage.zero_()
    assert nonfinite_after_reading(small, [row]) == ["c"]
