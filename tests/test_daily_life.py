"""What happens to a synchronized model in real scripts: converted, frozen by turns, rolled back, forgotten."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.support.models import build
from tests.support.ranks import run_processes


def batch(comm: Communicator, step: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step * 10 + comm.rank))


def alike(ranks: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for params in ranks[1:] for a, b in zip(params, ranks[0], strict=True))


def test_planner_follows_swapped_frozen_parameters() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        model = build()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradsync.synchronize(model, optimizer, comm=comm)
        for step in range(4):
            if step == 2:
                model[0].requires_grad_(True)
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            model(batch(comm, step)).square().mean().backward()
            optimizer.step()
        assert sync.stats()["step"] == 4
        return [param.detach() for param in model.parameters()]

    assert alike(run_ranks(2, run))


def test_planner_follows_another_memory_format() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradsync.synchronize(model, optimizer, comm=comm)
        for step in range(4):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step * 10 + comm.rank))
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    assert alike(run_ranks(2, run))


def test_engine_refuses_another_dtype_and_can_be_closed() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        model.double()
        with pytest.raises(ValueError, match=r"was converted to torch\.float64"):
            model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()


def test_engine_rollback_in_mid_accumulation_drops_gradients() -> None:
    def run(comm: Communicator) -> list[float]:
        norms = []
        for rolls_back in (False, True):
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with gradsync.synchronize(model, optimizer, comm=comm, accumulate=2) as sync:
                saved = sync.state_dict()
                if rolls_back:
                    (1000 * model(batch(comm, 9)).square().mean()).backward()
                    sync.load_state_dict(saved)
                for step in range(2):
                    model(batch(comm, step)).square().mean().backward()
                norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        return norms

    for straight, rolled_back in run_ranks(2, run):
        assert straight == pytest.approx(rolled_back)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_gradients_that_were_zeroed_have_no_weight(set_to_none: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradsync.synchronize(model, optimizer)
    with sync.no_sync():
        (100 * model.weight).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    (3 * model.weight).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 3.0


def test_no_sync_after_freezing_a_layer() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradsync.synchronize(model, optimizer)
    model[0].requires_grad_(False)
    with sync.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None


def test_engine_is_freed_with_its_model() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsync.synchronize(model, optimizer, accumulate=2)
    model(torch.ones(2, 4)).sum().backward()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_synchronizer_need_not_be_kept_and_a_copy_is_free() -> None:
    def run(comm: Communicator) -> float:
        model = nn.Linear(1, 1, bias=False)
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        gc.collect()
        copied = copy.deepcopy(model)
        (5 * copied.weight).sum().backward()  # the copy is not synchronized
        (float(comm.rank) * model.weight).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    assert run_ranks(2, run) == [0.5, 0.5]


def groups_come_and_go(transport: str) -> list[float]:
    """Every pair of three ranks, made, used and closed, twice over; and a group that is closed with work under way."""
    comm = gradsync.connect(transport, timeout_s=20)
    sums = []
    for _ in range(2):
        for pair in ([0, 1], [0, 2], [2, 1]):
            group = comm.split(pair)
            if group is None:
                continue
            inner = group.clone()
            total = torch.tensor([float(comm.rank)])
            inner.all_reduce(total).wait()
            sums.append(total.item())
            inner.close()
            group.close()
            group.close()
    left = comm.clone()
    if comm.rank == 0:
        left.all_reduce(torch.ones(4))
    left.close()
    comm.barrier()
    return sums


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_process_groups_are_freed(transport: str) -> None:
    assert run_processes(3, groups_come_and_go, transport) == [[1, 2] * 2, [1, 3] * 2, [2, 3] * 2]
