"""What goes into which bucket."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from gradsync.bucket import MIB, plan_buckets


def params_of(sizes: list[int]) -> list[tuple[str, Parameter]]:
    """Parameters of so many bytes."""
    return [(str(index), Parameter(torch.zeros(size // 4))) for index, size in enumerate(sizes)]


def sizes_of(layout: list[list[str]], sizes: list[int]) -> list[int]:
    return [sum(sizes[int(name)] for name in names) for names in layout]


def test_the_first_bucket_is_small_and_towards_the_end_they_are_ever_smaller() -> None:
    sizes = [16] * 26
    assert sizes_of(plan_buckets(params_of(sizes), cap_bytes=64, first_cap_bytes=16), sizes) == [
        *[16, 64, 64, 64],  # more is to come than four hold
        *[32] * 3,  # more than two
        *[16] * 7,
    ]


def test_of_large_buckets_only_the_last_bytes_are_cut_up() -> None:
    sizes = [MIB] * 96
    layout = plan_buckets(params_of(sizes), cap_bytes=32 * MIB, first_cap_bytes=32 * MIB)
    assert [size // MIB for size in sizes_of(layout, sizes)] == [32, 32, 16, 8, 8]


def test_a_little_goes_with_the_large_parameter_that_follows() -> None:
    sizes = [64, 4, 512, 4, 64, 64, 64, 64]
    assert plan_buckets(params_of(sizes), cap_bytes=64, first_cap_bytes=64)[:3] == [["0"], ["1", "2"], ["3", "4"]]


@pytest.mark.parametrize("cap", [1, 7, 100, 10_000])
def test_every_parameter_is_in_one_bucket_in_its_order(cap: int) -> None:
    sizes = [4 * (1 + index * 7 % 13) for index in range(50)]
    layout = plan_buckets(params_of(sizes), cap_bytes=cap)
    assert [int(name) for names in layout for name in names] == list(range(50))


def test_dtypes_do_not_mix() -> None:
    params = [
        (str(index), Parameter(torch.zeros(4, dtype=dtype)))
        for index, dtype in enumerate([torch.float32, torch.float64] * 3)
    ]
    layout = plan_buckets(params)
    assert sorted(map(sorted, layout)) == [["0", "2", "4"], ["1", "3", "5"]]
