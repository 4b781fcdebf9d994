"""Which buffers count as changed: also those of modules that came later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Solo
from gradsync.replicas.buffers import STAGED_BYTES, BufferSync
from gradsync.testing import run_ranks


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())


def test_buffer_sync_sees_a_write_until_it_synchronizes(model: nn.Sequential) -> None:
    buffers = BufferSync(model, "broadcast", Solo())
    assert not buffers.changed()
    model(torch.ones(3, 2))
    assert buffers.changed()
    buffers.synchronize(1.0, 0)
    assert not buffers.changed()


def test_buffer_sync_sees_a_replaced_module(model: nn.Sequential) -> None:
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


def test_buffer_sync_sees_buffers_registered_later(model: nn.Sequential) -> None:
    buffers = BufferSync(model, "broadcast", Solo())
    model[2].register_buffer("scale", torch.ones(2))
    assert buffers.changed()
    buffers.synchronize(1.0, 0)
    model[2].scale = torch.zeros(2)
    assert buffers.changed()


@pytest.mark.parametrize("strategy", ["allreduce", "local_sgd(every=2)", "gossip", "parameter_server", "hogwild"])
def test_buffer_sync_follows_assigned_buffers(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[bool, list[float]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync:
            before = model[1].running_mean
            model.load_state_dict({f"1.{name}": b.clone() for name, b in model[1].named_buffers()}, False, assign=True)
            for step in range(2):
                optimizer.zero_grad()
                x = torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                model(x).square().mean().backward()
                optimizer.step()
            sync.settle()
            return model[1].running_mean is before, model[1].running_mean.tolist()

    (same, first), (_, second) = run_ranks(2, run)
    assert not same
    assert first == second
    assert any(first)


def test_buffer_sync_counts_a_shared_buffer_once(model: nn.Sequential) -> None:
    model[2].register_buffer("mean", model[1].running_mean)
    model[2].register_buffer("nothing", None)
    buffers = BufferSync(model, "mean", Solo())
    assert not buffers.changed()
    buffers.synchronize(0.5, 0)
    assert model[1].running_var.tolist() == [0.5, 0.5]
    assert not buffers.changed()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_buffer_sync_sees_scripted_modules(model: nn.Sequential) -> None:
    scripted = torch.jit.script(model)
    buffers = BufferSync(scripted, "broadcast", Solo())
    assert not buffers.changed()
    scripted(torch.ones(3, 2))
    assert buffers.changed()


def test_buffer_sync_copies_small_and_large_buffers_of_every_dtype() -> None:
    def run(comm: Communicator) -> list[list[float]]:
        model = nn.Module()
        model.register_buffer("mean", torch.zeros(3))
        model.register_buffer("count", torch.tensor(0))
        model.register_buffer("strided", torch.zeros(2, 3).T)
        model.register_buffer("queue", torch.zeros(STAGED_BYTES, dtype=torch.float16))
        buffers = BufferSync(model, "broadcast", comm)
        for step in range(2):
            for buffer in model.buffers():
                buffer.fill_(10 * step + comm.rank + 1)
            buffers.synchronize(0.5, src=1)
        assert not buffers.changed()
        return [buffer.double().unique().tolist() for buffer in model.buffers()]

    assert run_ranks(2, run) == [[[12.0]] * 4] * 2


@pytest.mark.parametrize("change", ["moved", "resized"])
def test_buffer_sync_follows_the_memory_of_a_buffer(change: str) -> None:
    def run(comm: Communicator) -> list[float]:
        model = nn.Module()
        model.register_buffer("mean", torch.zeros(4).resize_(2))
        buffers = BufferSync(model, "broadcast", comm)
        buffers.synchronize(0.5, src=0)
        if change == "moved":
            model.mean.data = torch.zeros(4)
        else:
            model.mean.resize_(4)  # within its memory
        model.mean.fill_(comm.rank + 5.0)
        buffers.synchronize(0.5, src=0)
        found: list[float] = model.mean.tolist()
        return found

    assert run_ranks(2, run) == [[5.0] * 4] * 2
