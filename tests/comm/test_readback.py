"""Values that the host reads later: copies are made once for every write, and read one step later."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm.readback import HostValue, Readback
from tests.support.fake_gpu import GPU, FakeGpu, fake_gpu


def test_readback_keeps_the_values_of_its_moment() -> None:
    tensor = torch.tensor([1.0, 2.0])
    readback = Readback(tensor)
    tensor.zero_()
    assert readback.values() == readback.values() == [1.0, 2.0]


def test_host_value_of_a_cpu_tensor_is_always_current() -> None:
    tensor, value = torch.tensor(1.0), HostValue()
    assert value.recent(tensor) == value.current(tensor) == [1.0]
    tensor.fill_(2.0)
    assert value.recent(tensor) == [2.0]
    tensor.fill_(3.0)
    assert value.current(tensor) == [3.0]
    with torch.inference_mode():
        uncounted = torch.tensor(4.0)
        assert value.current(uncounted) == [4.0]
        uncounted.fill_(5.0)
        assert value.current(uncounted) == [5.0]


def reads(gpu: FakeGpu) -> list[str]:
    taken, gpu.log[:] = gpu.log.copy(), []
    return taken


@pytest.mark.parametrize("method", ["current", "recent"])
def test_host_value_copies_once_for_each_write(method: str) -> None:
    with fake_gpu() as gpu, gpu.watching():
        tensor, value = torch.zeros((), device=GPU), HostValue()
        read = getattr(value, method)
        read(tensor)
        assert reads(gpu) == ["start to read", "read"]
        read(tensor)
        assert reads(gpu) == []
        tensor.fill_(2.0)
        read(tensor)
        assert reads(gpu) == (["start to read", "read"] if method == "current" else ["start to read"])
        read(tensor)
        assert reads(gpu) == ([] if method == "current" else ["read"])
