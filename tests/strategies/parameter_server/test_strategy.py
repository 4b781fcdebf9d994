"""The parameter_server strategy through ``synchronize``: exact where it is synchronous, measured where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Solo
from gradsync.testing import run_ranks
from tests.strategies.parameter_server.model import Net, batch, loss_of

BSP = "parameter_server"
ASYNCHRONOUS = "parameter_server(staleness=None)"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "schedule": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
}


def train(comm: Communicator, strategy: str, kind: str, steps: int, **options: Any) -> dict[str, Any]:
    model = Net()
    params = list(model.named_parameters())
    groups = [
        {"params": [param for name, param in params if "first" in name], "lr": 0.02},
        {"params": [param for name, param in params if "first" not in name]},
    ]
    optimizer = OPTIMIZERS[kind](groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, scheduler=schedule, **options) as sync:
        for step in range(steps):
            optimizer.zero_grad()
            samples = 2 + comm.rank + step % 3
            sync.set_weight(samples)
            loss_of(model, batch(step, comm.rank, samples), step).backward()
            optimizer.step()
            if kind == "schedule" and sync.synchronized:
                schedule.step()
        stats = sync.stats()
        saved = optimizer.state_dict()
        comm.barrier()  # a rank that leaves is not in the stats any more
    return {"params": [param.detach().clone() for param in model.parameters()], "optimizer": saved, "stats": stats}


def assert_close(one: list[Tensor], other: list[Tensor], rtol: float = 1e-9) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


def state_tensors(state: dict[str, Any]) -> list[Tensor]:
    return [
        torch.as_tensor(value) for entry in state["state"].values() for value in entry.values() if value is not None
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_synchronous_parameter_server_equals_allreduce(kind: str) -> None:
    exact = run_ranks(3, lambda comm: train(comm, "allreduce", kind, 50))
    served = run_ranks(3, lambda comm: train(comm, BSP, kind, 50))
    for one, other in zip(exact, served, strict=True):
        assert_close(one["params"], other["params"])
        assert_close(state_tensors(one["optimizer"]), state_tensors(other["optimizer"]))  # what a user saves
        assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    first = served[0]["params"]
    assert all(torch.equal(a, b) for other in served for a, b in zip(first, other["params"], strict=True))
    assert served[1]["stats"]["clocks"] == {0: 50, 1: 50, 2: 50}


def test_synchronous_parameter_server_is_exact_with_accumulation_and_one_rank() -> None:
    for world in (1, 2):
        exact = run_ranks(world, lambda comm: train(comm, "allreduce", "adamw", 12, accumulate=3))
        served = run_ranks(world, lambda comm: train(comm, BSP, "adamw", 12, accumulate=3))
        assert_close(exact[0]["params"], served[0]["params"])
        assert served[0]["stats"]["clocks"][0] == 4


def test_clip_norm_clips_the_mean_gradient_over_all_shards() -> None:
    def clipped(comm: Communicator, strategy: str, by_user: bool) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm):
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, 3 * batch(step, comm.rank), step).backward()
                if by_user:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            return [param.detach().clone() for param in model.parameters()]

    exact = run_ranks(2, lambda comm: clipped(comm, "allreduce", True))
    served = run_ranks(2, lambda comm: clipped(comm, "parameter_server(clip_norm=0.05)", False))
    assert_close(exact[0], served[0], rtol=1e-5)  # torch adds 1e-6 to the norm that it divides by


def test_step_skipped_by_one_ranks_scaler_does_not_block_the_others() -> None:
    def scaled(comm: Communicator) -> tuple[list[float], dict[int, int]]:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with gradsync.synchronize(model, optimizer, BSP, comm=comm, scaler=scaler) as sync:
            for step in range(3):
                optimizer.zero_grad()
                value = float("inf") if step == 1 and comm.rank == 1 else 1.0
                scaler.scale((value * model.weight).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            clocks = sync.stats()["clocks"]
            comm.barrier()  # a rank that leaves is not in the stats any more
            return model.weight.flatten().tolist(), clocks

    for weight, clocks in run_ranks(2, scaled):
        assert weight == [-0.5, -0.5]  # three steps of 0.5: in the second the finite rank's gradient counts alone
        assert clocks == {0: 3, 1: 3}


def test_rank_with_weight_zero_does_not_count() -> None:
    def weighted(comm: Communicator) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gradsync.synchronize(model, optimizer, BSP, comm=comm) as sync:
            for step in range(2):
                optimizer.zero_grad()
                sync.set_weight(0 if comm.rank == step else 4)
                ((comm.rank + 1.0) * model.weight).sum().backward()
                optimizer.step()
        return model.weight.flatten().tolist()

    assert run_ranks(2, weighted) == [[-3.0, -3.0]] * 2  # rank 1's 2, then rank 0's 1


def test_join_handles_ranks_that_run_out_of_data() -> None:
    def uneven(comm: Communicator, strategy: str) -> tuple[list[Tensor], float]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm, scheduler=schedule, buffers="none") as sync:
            for epoch in range(2):
                with sync.join():
                    for step in range(3 + 2 * comm.rank):
                        optimizer.zero_grad()
                        loss_of(model, batch(10 * epoch + step, comm.rank), step).backward()
                        optimizer.step()
                        schedule.step()
        return [param.detach().clone() for param in model.parameters()], optimizer.param_groups[0]["lr"]

    exact = run_ranks(3, lambda comm: uneven(comm, "allreduce"))
    served = run_ranks(3, lambda comm: uneven(comm, BSP))
    for (one, rate), (other, served_rate) in zip(exact, served, strict=True):
        assert_close(one, other)
        assert served_rate == pytest.approx(rate)


def test_settle_gives_all_ranks_the_same_parameters_and_the_lowest_ranks_buffers() -> None:
    def apart(comm: Communicator) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with gradsync.synchronize(model, optimizer, ASYNCHRONOUS, comm=comm) as sync:
            for step in range(4 + 3 * comm.rank):
                optimizer.zero_grad()
                loss_of(model, batch(step, comm.rank), step).backward()
                optimizer.step()
            own = [buffer.clone() for buffer in model.buffers()]
            sync.settle()
            stats = sync.stats()
            comm.barrier()  # a rank that leaves is not in the stats any more
            return [value.clone() for value in model.state_dict().values()], own, stats

    outcomes = run_ranks(3, apart)
    for state, _, stats in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(state, outcomes[0][0], strict=True))
        assert stats["clocks"] == {0: 4, 1: 7, 2: 10}
        assert stats["straggler"]["worker"] == 0
        assert stats["straggler"]["behind"] == 6
        assert sum(stats["staleness"].values()) >= 21  # every push, at one shard at least
    buffers = [value for name, value in zip(Net().state_dict(), outcomes[0][0], strict=True) if "norm.r" in name]
    assert any(torch.equal(buffer, own) for buffer in buffers for own in outcomes[0][1])
    assert not torch.equal(outcomes[0][1][0], outcomes[1][1][0])


def test_push_every_and_pull_every_step_locally_in_between() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    less_often = "parameter_server(staleness=None, push_every=2, pull_every=2)"
    with gradsync.synchronize(model, optimizer, less_often) as sync:
        for _ in range(3):
            optimizer.zero_grad()
            (0.5 * model.weight.square()).sum().backward()  # the gradient is the weight
            optimizer.step()
            seen.append(model.weight.item())
        assert sync.stats()["clocks"] == {0: 1}
        sync.settle()
    # Local: 1 - 0.5. The servers apply 1 + 0.5 at once: 1 - 0.75. Local again: 0.25 - 0.125, and settled it stays.
    assert seen == [0.5, 0.25, 0.125]
    assert model.weight.item() == 0.125


def test_custom_staleness_policy_scales_the_learning_rate() -> None:
    seen: list[int] = []

    def rule(tau: int) -> float:
        seen.append(tau)
        return 0.5

    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = gradsync.strategies.ParameterServer(staleness=None, staleness_policy=rule)
    with gradsync.synchronize(model, optimizer, strategy):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 1.0
    assert model.weight.item() == 0.5
    assert seen == [0]


def test_loaded_optimizer_state_is_uploaded_to_the_servers() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        model, other = nn.Linear(2, 1, bias=False).double(), nn.Linear(2, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(1.0)
            other.weight.fill_(1.0)
        loaded = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        other.weight.sum().backward()
        loaded.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with gradsync.synchronize(model, optimizer, BSP, comm=comm):
            optimizer.load_state_dict(loaded.state_dict())
            comm.barrier()
            model.weight.sum().backward()
            optimizer.step()
            return [model.weight.detach().clone()]

    for (weight,) in run_ranks(2, run):
        assert weight.flatten().tolist() == pytest.approx([1.0 - 0.1 * 1.9] * 2)


def test_redistribute_keeps_accumulated_gradients_and_residuals_once() -> None:
    def saved(rank: int) -> dict[str, Any]:
        kept = {"w": torch.tensor([10.0**rank])}
        codec = {"residuals": kept, "velocities": {}}
        own = {"codec": codec, "owed": kept, "owed_weight": 1.0 + rank, "num_steps": 4}
        return {"clock": 4, "own": own, "server": {"versions": [4]} if rank == 0 else {}}

    states = [saved(rank) for rank in range(3)]
    strategy = gradsync.strategies.ParameterServer()
    fewer = [strategy.redistribute(states, rank, 2)["own"] for rank in range(2)]
    assert [own["owed"]["w"].item() for own in fewer] == [101.0, 10.0]
    assert [own["codec"]["residuals"]["w"].item() for own in fewer] == [101.0, 10.0]
    assert [own["owed_weight"] for own in fewer] == [4.0, 2.0]
    more = [strategy.redistribute(states, rank, 5) for rank in range(5)]
    assert [state["own"]["owed"].get("w", torch.zeros(1)).item() for state in more] == [1.0, 10.0, 100.0, 0.0, 0.0]
    assert all(state["server"] == {"versions": [4]} and state["clock"] == 4 for state in more)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_hosted_servers_refuse_strangers_by_default(transport: str) -> None:
    """The ranks make keys for the run; neither the TCP port nor the Unix socket accepts any other process."""

    def run(comm: Communicator) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, BSP, comm=comm) as sync:
            if comm.rank == 0:
                address = next(part for part in sync.stats()["servers"][1].split() if part.startswith(transport))
                stranger = Net()
                own = torch.optim.SGD(stranger.parameters(), lr=0.1)
                text = f"parameter_server(servers=[{address!r}], open=True)"
                with pytest.raises(gradsync.GradSyncError, match="do the keys belong together"):
                    gradsync.synchronize(stranger, own, text, comm=Solo(timeout_s=1))
            comm.barrier()

    run_ranks(2, run)


def test_open_servers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    for strategy, is_logged in ((BSP, False), ("parameter_server(open=True)", True)):
        caplog.clear()
        run_ranks(2, lambda comm, strategy=strategy: train(comm, strategy, "sgd", 1))
        assert ("is open: whoever reaches it can read and change the model" in caplog.text) == is_logged


def test_bytes_per_step_counts_bytes_to_other_ranks() -> None:
    def run(comm: Communicator) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "parameter_server", comm=comm) as sync:
            return sync.stats()["bytes_per_step"], sum(param.nbytes for param in model.parameters())

    outcomes = run_ranks(2, run)
    assert sum(sent for sent, _ in outcomes) == 2 * outcomes[0][1]  # 2(n-1)/n of the model for each of n ranks
