"""Shared memory on large pages: where it lies, what is in it, and when it is given back."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from gradsync.comm.large_pages import LARGE_PAGE, map_shared, use_large_pages


@pytest.fixture
def descriptor() -> int:
    made = os.memfd_create("large-pages-test")
    os.ftruncate(made, 3 * LARGE_PAGE + 4096)
    return made


def num_mappings() -> int:
    return sum("large-pages-test" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_was_written_stays_and_all_mappings_see_it(descriptor: int) -> None:
    one, other = (
        torch.frombuffer(map_shared(descriptor, 3 * LARGE_PAGE + 4096), dtype=torch.float32) for _ in range(2)
    )
    os.close(descriptor)
    assert one.data_ptr() % LARGE_PAGE == other.data_ptr() % LARGE_PAGE == 0
    values = torch.randn(one.shape)
    one.copy_(values)
    for tensor in (one, other):
        use_large_pages(tensor.data_ptr(), tensor.nbytes)
        assert torch.equal(other, values)
    other.fill_(7.0)
    assert bool((one == 7.0).all())


def test_it_is_given_back_with_the_last_tensor(descriptor: int) -> None:
    tensor = torch.frombuffer(map_shared(descriptor, 3 * LARGE_PAGE), dtype=torch.uint8)
    os.close(descriptor)
    part = tensor[5:10]
    del tensor
    gc.collect()
    assert num_mappings() == 1
    part.fill_(3)
    del part
    gc.collect()
    assert num_mappings() == 0


def test_what_can_not_be_mapped_is_said() -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    with pytest.raises(OSError, match="can't be mapped"):
        map_shared(-1, LARGE_PAGE)
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1
