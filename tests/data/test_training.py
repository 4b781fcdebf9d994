"""The loader, the engine and SyncBatchNorm together: N ranks train as one process does, to the last uneven batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradsync
from gradsync.comm.base import Communicator, Solo
from gradsync.comm.connect import connect
from gradsync.testing.threads import run_ranks
from tests.support.ranks import run_processes

GENERATOR = torch.Generator().manual_seed(8)
INPUTS = torch.randn(26, 3, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randn(26, 2, generator=GENERATOR, dtype=torch.float64)


# Made once: ranks that are threads share torch's random numbers.
PLAIN = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Tanh(), nn.Linear(4, 2)).double()
NORMALIZED = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.double() - other.double()).norm() <= 1e-9 * other.double().norm().clamp(min=1e-3), (one, other)


def train(
    comm: Communicator,
    *,
    global_batch_size: int,
    num_epochs: int,
    normalized: bool,
    stop_after: int | None = None,
    resumed: dict[str, Any] | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Train; returns the model's tensors and a checkpoint."""
    model = copy.deepcopy(NORMALIZED if normalized else PLAIN)
    gradsync.SyncBatchNorm.convert(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = gradsync.shard((INPUTS, LABELS), global_batch_size=global_batch_size, seed=5, comm=comm)
    if resumed is not None:
        model.load_state_dict(resumed["model"])
        optimizer.load_state_dict(copy.deepcopy(resumed["optimizer"]))
        loader.load_state_dict(resumed["loader"])
    steps = 0
    with gradsync.synchronize(model, optimizer, comm=comm):
        while loader.epoch < num_epochs:
            for inputs, labels in loader:
                optimizer.zero_grad()
                (model(inputs) - labels).square().mean().backward()
                optimizer.step()
                steps += 1
                if steps == stop_after:
                    break
            if steps == stop_after:
                break
    checkpoint = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "loader": loader.state_dict(),
    }
    return tensors_of(model), checkpoint


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("normalized", [False, True])
def test_shard_with_uneven_batches_trains_as_one_process(num_ranks: int, normalized: bool) -> None:
    """26 samples in steps of 8: the last has 2, fewer than ranks when there are 3 or 4."""
    options: Any = {"global_batch_size": 8, "num_epochs": 3, "normalized": normalized}
    expected, _ = train(Solo(), **options)
    results = [tensors for tensors, _ in run_ranks(num_ranks, lambda comm: train(comm, **options), timeout_s=20.0)]
    for tensors in results:
        assert_close(tensors, expected)
        assert all(torch.equal(one, other) for one, other in zip(tensors, results[0], strict=True)), "bitwise equal"


def _train_connected(options: dict[str, Any], model: nn.Module) -> list[Tensor]:
    NORMALIZED.load_state_dict(model.state_dict())  # this process made another one as it was imported
    return train(connect(timeout_s=20.0), **options)[0]


def test_shard_with_uneven_batches_in_processes() -> None:
    options: Any = {"global_batch_size": 8, "num_epochs": 2, "normalized": True}
    expected, _ = train(Solo(), **options)
    results = run_processes(3, _train_connected, options, NORMALIZED)
    for tensors in results:
        assert_close(tensors, expected)
        assert all(torch.equal(one, other) for one, other in zip(tensors, results[0], strict=True)), "bitwise equal"


@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2)])
def test_training_resumes_with_more_or_fewer_ranks(before: int, after: int) -> None:
    options: Any = {"global_batch_size": 7, "num_epochs": 2, "normalized": True}
    expected, _ = train(Solo(), **options)
    (_, checkpoint), *_ = run_ranks(before, lambda comm: train(comm, stop_after=2, **options), timeout_s=20.0)
    assert checkpoint["loader"]["position"] == 14
    for tensors, _ in run_ranks(after, lambda comm: train(comm, resumed=checkpoint, **options), timeout_s=20.0):
        assert_close(tensors, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_synchronize_works_with_torchs_distributed_sampler(num_ranks: int) -> None:
    """The sampler pads the epoch with repeated samples; training still equals one process on the joined batch."""
    dataset = TensorDataset(INPUTS, LABELS)

    def rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model = copy.deepcopy(PLAIN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=comm.world_size, rank=comm.rank)
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
        seen = []
        with gradsync.synchronize(model, optimizer, comm=comm):
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    (model(inputs) - labels).square().mean().backward()
                    optimizer.step()
                    seen.append(torch.cat([inputs, labels], dim=1))
        return tensors_of(model), seen

    results = run_ranks(num_ranks, rank)
    model = copy.deepcopy(PLAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parts in zip(*(seen for _, seen in results), strict=True):
        joined = torch.cat(parts)
        optimizer.zero_grad()
        (model(joined[:, :3]) - joined[:, 3:]).square().mean().backward()
        optimizer.step()
    for tensors, _ in results:
        assert_close(tensors, tensors_of(model))
