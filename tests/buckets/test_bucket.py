"""What goes into which bucket."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from gradsync.buckets.bucket import MIB, plan_buckets


def params_of(sizes: list[int]) -> list[tuple[str, Parameter]]:
    """Parameters of these sizes in bytes."""
    return [(str(index), Parameter(torch.zeros(size // 4))) for index, size in enumerate(sizes)]


def sizes_of(layout: list[list[str]], sizes: list[int]) -> list[int]:
    return [sum(sizes[int(name)] for name in names) for names in layout]


def test_plan_buckets_first_and_last_are_smaller() -> None:
    sizes = [16] * 26
    assert sizes_of(plan_buckets(params_of(sizes), cap_bytes=64, first_cap_bytes=16), sizes) == [
        *[16, 64, 64, 64],  # while more than four full buckets remain
        *[32] * 3,  # while more than two remain
        *[16] * 7,
    ]


def test_plan_buckets_cuts_only_the_last_bytes_of_large_buckets() -> None:
    sizes = [MIB] * 96
    layout = plan_buckets(params_of(sizes), cap_bytes=32 * MIB, first_cap_bytes=32 * MIB)
    assert [size // MIB for size in sizes_of(layout, sizes)] == [32, 32, 16, 8, 8]


def test_plan_buckets_puts_a_little_with_the_next_large_parameter() -> None:
    sizes = [64, 4, 512, 4, 64, 64, 64, 64]
    assert plan_buckets(params_of(sizes), cap_bytes=64, first_cap_bytes=64)[:3] == [["0"], ["1", "2"], ["3", "4"]]


@pytest.mark.parametrize("cap", [1, 7, 100, 10_000])
def test_plan_buckets_keeps_every_parameter_once_and_in_order(cap: int) -> None:
    sizes = [4 * (1 + index * 7 % 13) for index in range(50)]
    layout = plan_buckets(params_of(sizes), cap_bytes=cap)
    assert [int(name) for names in layout for name in names] == list(range(50))


def test_plan_buckets_does_not_mix_dtypes() -> None:
    params = [
        (str(index), Parameter(torch.zeros(4, dtype=dtype)))
        for index, dtype in enumerate([torch.float32, torch.float64] * 3)
    ]
    layout = plan_buckets(params)
    assert sorted(map(sorted, layout)) == [["0", "2", "4"], ["1", "3", "5"]]
