"""Shared memory on huge pages: its alignment, its contents, and when it is unmapped."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from gradsync.comm.hugepages import HUGE_PAGE_BYTES, map_shared, use_huge_pages


@pytest.fixture
def descriptor() -> int:
    made = os.memfd_create("huge-pages-test")
    os.ftruncate(made, 3 * HUGE_PAGE_BYTES + 4096)
    return made


def num_mappings() -> int:
    return sum("huge-pages-test" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_use_huge_pages_keeps_contents_in_all_mappings(descriptor: int) -> None:
    one, other = (
        torch.frombuffer(map_shared(descriptor, 3 * HUGE_PAGE_BYTES + 4096), dtype=torch.float32) for _ in range(2)
    )
    os.close(descriptor)
    assert one.data_ptr() % HUGE_PAGE_BYTES == other.data_ptr() % HUGE_PAGE_BYTES == 0
    values = torch.randn(one.shape)
    one.copy_(values)
    for tensor in (one, other):
        use_huge_pages(tensor.data_ptr(), tensor.nbytes)
        assert torch.equal(other, values)
    other.fill_(7.0)
    assert bool((one == 7.0).all())


def test_map_shared_unmaps_with_the_last_tensor(descriptor: int) -> None:
    tensor = torch.frombuffer(map_shared(descriptor, 3 * HUGE_PAGE_BYTES), dtype=torch.uint8)
    os.close(descriptor)
    part = tensor[5:10]
    del tensor
    gc.collect()
    assert num_mappings() == 1
    part.fill_(3)
    del part
    gc.collect()
    assert num_mappings() == 0


def test_map_shared_raises_if_it_cannot_map() -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    with pytest.raises(OSError, match="can't be mapped"):
        map_shared(-1, HUGE_PAGE_BYTES)
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1
