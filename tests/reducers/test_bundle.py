"""What travels whole and together: where it lies is the same on all ranks, and no shard is longer for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsync.bucket import BucketPlan
from gradsync.comm.base import Solo
from gradsync.reducers import Compressed


def test_a_rank_that_inherits_nothing_knows_of_what_the_others_owe() -> None:
    # Whether something is owed of a parameter decides how it travels: on all ranks alike.
    states = [{"steps": 3, "own": {"residuals": {"a": torch.ones(4)}}, "shared": {}} for _ in range(2)]
    heirs = [Compressed("int8").redistribute(states, rank, 3)["own"]["residuals"] for rank in range(3)]
    assert [own["a"].tolist() for own in heirs] == [[1.0] * 4, [1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("world", [3, 8])
def test_many_small_parameters_are_shared_among_the_shards(world: int) -> None:
    shapes = [(100, 100) if index % 4 == 0 else (1500,) for index in range(40)]
    params = {str(index): nn.Parameter(torch.zeros(shape)) for index, shape in enumerate(shapes)}
    plan = BucketPlan([list(params)], [], params, Solo())

    def bytes_sent(world_size: int) -> int:
        reducer = Compressed("int4")
        reducer.attach(plan, Solo())
        return reducer.bytes_sent(plan.buckets[0], world_size)

    assert bytes_sent(world) < 1.15 * 2 * (world - 1) / world * bytes_sent(2)
