"""Which buffers count as changed: also those of modules that came later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsync.buffers import BufferSync
from gradsync.comm.base import Solo


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())


def test_a_buffer_that_was_written_is_changed_until_it_is_synchronized(model: nn.Sequential) -> None:
    buffers = BufferSync(model, "broadcast", Solo())
    assert not buffers.changed()
    model(torch.ones(3, 2))
    assert buffers.changed()
    buffers.synchronize(1.0, 0)
    assert not buffers.changed()


def test_the_buffers_of_a_module_that_was_put_in_another_s_place_are_seen(model: nn.Sequential) -> None:
    buffers = BufferSync(model, "broadcast", Solo())
    model[1] = nn.BatchNorm1d(2)
    assert buffers.changed()
    buffers.synchronize(1.0, 0)
    assert not buffers.changed()
    model[2] = nn.Sequential(nn.ReLU())
    buffers.synchronize(1.0, 0)
    model[2].append(nn.BatchNorm1d(2))  # within a module that was not there at the beginning
    assert buffers.changed()
    buffers.synchronize(1.0, 0)
    model(torch.ones(3, 2))
    assert buffers.changed()


def test_a_buffer_that_is_registered_or_replaced_later_is_seen(model: nn.Sequential) -> None:
    buffers = BufferSync(model, "broadcast", Solo())
    model[2].register_buffer("scale", torch.ones(2))
    assert buffers.changed()
    buffers.synchronize(1.0, 0)
    model[2].scale = torch.zeros(2)
    assert buffers.changed()


def test_a_buffer_of_two_modules_counts_once(model: nn.Sequential) -> None:
    model[2].register_buffer("mean", model[1].running_mean)
    model[2].register_buffer("nothing", None)
    buffers = BufferSync(model, "mean", Solo())
    assert not buffers.changed()
    buffers.synchronize(0.5, 0)
    assert model[1].running_var.tolist() == [0.5, 0.5]
    assert not buffers.changed()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_buffers_of_a_scripted_module_are_seen(model: nn.Sequential) -> None:
    scripted = torch.jit.script(model)
    buffers = BufferSync(scripted, "broadcast", Solo())
    assert not buffers.changed()
    scripted(torch.ones(3, 2))
    assert buffers.changed()
