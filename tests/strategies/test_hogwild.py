"""Hogwild: one copy of the parameters in shared memory, which every rank changes at any time."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm.base import Communicator, Solo
from gradsync.comm.connect import connect
from gradsync.replicas.buffers import BufferSync
from gradsync.replicas.training import Training
from gradsync.strategies import shared_parameters
from gradsync.strategies.hogwild import Hogwild
from gradsync.testing.threads import run_ranks
from tests.engine.saved import strategy_state, strategy_states
from tests.strategies.periodic.runs import equal, params_of
from tests.support.ranks import run_processes


def make_model() -> nn.Module:
    seeded = torch.Generator().manual_seed(0)  # not torch's own, which ranks that are threads share
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.4 * torch.randn(param.shape, generator=seeded, dtype=torch.float64))
    return model


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# -- what is shared -----------------------------------------------------------------------------------------------


def test_hogwild_in_turns_is_one_model_with_an_optimizer_per_rank() -> None:
    """Ranks that take turns make the result repeatable: parameters are shared, momentum is each rank's own."""
    model = make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for _ in range(3)]
    for step, turn in itertools.product(range(4), range(3)):
        train_step(model, optimizers[turn], batch_of(turn, step))

    def rank(comm: Communicator) -> tuple[list[Tensor], dict[str, Any]]:
        mine = make_model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.05, momentum=0.9)
        with gradsync.synchronize(mine, optimizer, "hogwild", comm=comm) as sync:
            sync.settle()
            sync._engine.strategy._settled = False  # type: ignore[attr-defined]  # no barrier: the ranks take turns
            for step, turn in itertools.product(range(4), range(3)):
                if turn == comm.rank:
                    train_step(mine, optimizer, batch_of(turn, step))
                comm.barrier()
            return params_of(mine), sync.stats()

    for rank_number, (params, stats) in enumerate(run_ranks(3, rank)):
        assert equal(params, params_of(model))
        assert stats["updates"] == [4, 4, 4]
        assert stats["bytes_per_step"] == 0
        first = {rank_number: 1} if rank_number < 2 else {}
        assert stats["staleness"]["histogram"] == {**first, 2: 4 - len(first)}, "all others stepped in between"


def test_hogwild_in_a_world_of_one_changes_nothing() -> None:
    plain, mine = make_model(), make_model()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.02)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=0.02)
    with gradsync.synchronize(mine, optimizer, "hogwild", comm=Solo()) as sync:
        for step in range(10):
            train_step(plain, expected, batch_of(0, step))
            train_step(mine, optimizer, batch_of(0, step))
            if step % 4 == 0:
                sync.settle()
    assert equal(params_of(mine), params_of(plain))


class ManyKindsOfParameters(nn.Module):
    """Channels-last, tied, frozen, empty and 16-bit parameters, and one that is not dense in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.tied = self.one = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.short = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.holes = nn.Parameter(torch.randn(4, 6)[:, ::2])


def test_shared_parameters_of_every_kind_are_private_after_close() -> None:
    first = ManyKindsOfParameters()

    def rank(comm: Communicator) -> list[list[Tensor]]:
        model = first if comm.rank == 0 else ManyKindsOfParameters()
        seen = []
        sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "hogwild", comm=comm)
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert all(param.untyped_storage().nbytes() == param.nbytes for param in model.parameters()), "saved no larger"
        for act in (None, sync.close):
            if act is not None:
                act()
            comm.barrier()
            if comm.rank == 1:
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1.0)
            comm.barrier()
            seen.append(params_of(model))
            comm.barrier()
        return seen

    before = params_of(first)
    others, changer = run_ranks(2, rank)
    assert equal(others[0], changer[0])
    assert equal(others[0], [value + 1.0 for value in before])
    assert equal(others[1], others[0]), "after close() other ranks do not see it"
    assert equal(changer[1], [value + 1.0 for value in others[0]])


def test_hogwild_sparse_gradients_touch_only_their_rows() -> None:
    """Two ranks change neighbouring rows, long ones. A rank that wrote more than its own row would undo the other's."""
    num_steps, dim = 25, 300_000

    def rank(comm: Communicator) -> Tensor:
        model = nn.Embedding(2, dim, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        mine = torch.tensor([comm.rank])
        with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(mine).sum().backward()
                optimizer.step()
            sync.settle()
            return model.weight.detach().clone()

    for weight in run_ranks(2, rank):
        assert torch.equal(weight, torch.full((2, dim), -float(num_steps)))


# -- settled ------------------------------------------------------------------------------------------------------


def test_settle_freezes_parameters_until_every_rank_steps() -> None:
    seen: list[list[Tensor]] = []
    looked = threading.Event()

    def rank(comm: Communicator) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
            for step in range(5):
                train_step(model, optimizer, batch_of(comm.rank, step))
            sync.settle()
            if comm.rank == 0:  # it saves or evaluates, while the other rank is ready to step
                seen.append(params_of(model))
                time.sleep(0.1)
                seen.append(params_of(model))
                looked.set()
            train_step(model, optimizer, batch_of(comm.rank, 6))
            assert looked.is_set()
            sync.settle()
            sync.settle()  # nothing has happened in between

    run_ranks(2, rank)
    assert equal(seen[0], seen[1])


def test_join_with_uneven_ranks_ends_with_equal_parameters() -> None:
    """By ``join``; with batch normalization, whose buffers are rank 0's then. One rank has no batch at all."""

    def rank(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model = nn.Sequential(make_model(), nn.BatchNorm1d(2).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
            with sync.join():
                for step in range(3 * comm.rank):
                    train_step(model, optimizer, batch_of(comm.rank, step))
            tensors = [value.clone() for value in model.state_dict().values()]
            loader = gradsync.shard(batch_of(7, 7), global_batch_size=4, comm=comm)  # 6 rows: then one rank has none
            for x in loader:
                train_step(model, optimizer, x.repeat(2, 1))
            return tensors, params_of(model)

    results = run_ranks(3, rank, timeout_s=20.0)
    for tensors, params in results:
        assert equal(tensors, results[0][0])
        assert equal(params, results[0][1])


def test_hogwild_does_not_count_steps_that_a_scaler_skips() -> None:
    model = make_model().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradsync.synchronize(model, optimizer, "hogwild", comm=Solo(), scaler=scaler) as sync:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sync.stats()["updates"] == [2]


# -- states -------------------------------------------------------------------------------------------------------


def test_hogwild_state_keeps_all_counts_with_fewer_ranks() -> None:
    def rank(comm: Communicator) -> dict[str, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
            for step in range(comm.rank + 2):
                train_step(model, optimizer, batch_of(comm.rank, step))
            sync.settle()
            return sync.gather_state_dict()

    states = run_ranks(3, rank)[0]
    assert [state["updates"] for state in strategy_states(states)] == [2, 3, 4]

    def resumed(comm: Communicator) -> dict[str, Any]:
        model = make_model()
        with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.05), "hogwild", comm=comm) as sync:
            sync.load_state_dict(states)
            train_step(model, sync._engine.training.optimizer, batch_of(comm.rank, 0))
            return strategy_state(sync.state_dict())

    assert [state["updates"] for state in run_ranks(3, resumed)] == [3, 4, 5]
    fewer = run_ranks(2, resumed)
    assert [state["updates"] for state in fewer] == [2 + 4 + 1, 3 + 1]
    assert sum(sum(state["staleness"].values()) for state in fewer) == 9 + 2


# -- what it refuses, and what it survives ------------------------------------------------------------------------


def test_hogwild_refuses_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    number = itertools.count()
    monkeypatch.setattr(shared_parameters, "host_identity", lambda: [f"host {next(number) % 2}"])

    def rank(comm: Communicator) -> None:
        model = make_model()
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "hogwild", comm=comm)

    with pytest.raises(ValueError, match="memory of one host; got 2 hosts x 2 ranks"):
        run_ranks(4, rank)


def test_hogwild_refuses_other_devices() -> None:
    model = nn.Linear(2, 2, device="meta")
    training = Training(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        params=dict(model.named_parameters()),
        buffers=BufferSync(model, "none", Solo()),
    )
    with pytest.raises(ValueError, match=r"weight is on meta. Train on the CPU"):
        Hogwild().setup(training)


def test_hogwild_refuses_a_model_moved_out_of_shared_memory() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer, "hogwild", comm=Solo()):
        param = next(model.parameters())
        param.data = param.data.clone()
        with pytest.raises(ValueError, match=r"0\.weight was moved out of the memory that the ranks share"):
            train_step(model, optimizer, batch_of(0, 0))


def test_settle_names_the_rank_that_does_not_arrive() -> None:
    def rank(comm: Communicator) -> str:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
            train_step(model, optimizer, batch_of(0, 0))
            if comm.rank == 1:
                time.sleep(0.4)  # longer than timeout_s
                return ""
            with pytest.raises(gradsync.PeerLost) as lost:
                sync.settle()
            return str(lost.value)

    message = run_ranks(2, rank, timeout_s=0.3)[0]
    assert "rank 1 was lost in settle()" in message
    assert "no rank made an update meanwhile" in message


def test_barrier_ignores_closed_ranks_except_in_settle() -> None:
    def rank(comm: Communicator) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
            sync.settle()
            if comm.rank == 1:
                return
            train_step(model, optimizer, batch_of(0, 0))
            with pytest.raises(gradsync.PeerLost, match="it has closed its synchronizer"):
                sync.settle()

    run_ranks(2, rank, timeout_s=20.0)


def _train_and_lose_one() -> dict[str, Any]:
    comm = connect(timeout_s=20.0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gradsync.synchronize(model, optimizer, "hogwild", comm=comm) as sync:
        losses = [train_step(model, optimizer, batch_of(comm.rank, step)) for step in range(40)]
        sync.settle()
        params = params_of(model)
        updates = sync.stats()["updates"]
        train_step(model, optimizer, batch_of(comm.rank, 40))
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range(20):  # steps do not wait for the dead rank
            train_step(model, optimizer, batch_of(comm.rank, step))
        with pytest.raises(gradsync.PeerLost, match=r"ranks? 2\b"):  # also names the other survivor if it closed first
            sync.settle()
    return {"losses": losses, "params": params, "updates": updates}


def test_hogwild_processes_continue_after_a_kill() -> None:
    outcomes = run_processes(3, _train_and_lose_one, expect_failure=True)
    assert outcomes[2] == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert isinstance(outcome, dict), outcome
        assert equal(outcome["params"], outcomes[0]["params"])  # type: ignore[index]
        assert outcome["updates"] == [40, 40, 40]
        assert sum(outcome["losses"][-5:]) < 0.7 * sum(outcome["losses"][:5])
