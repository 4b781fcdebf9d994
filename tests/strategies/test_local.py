"""How the engine drives strategies that leave gradients local to their rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator
from gradsync.strategies.base import Verdict
from gradsync.strategies.local import Local
from gradsync.testing import run_ranks


@spec.register("strategy", "test_alone")
class RecordingLocal(Local):
    """Never communicates; records the calls of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def before_step(self, step: int) -> Verdict:
        self.events.append(f"before {step}")
        return Verdict.APPLY

    def after_step(self, step: int) -> None:
        self.events.append(f"after {step}")

    def join(self) -> int | None:
        self.events.append("join")
        return 1

    def settle(self) -> None:
        self.events.append("settle")

    def stats(self) -> dict[str, Any]:
        return {"events": self.events}

    def bytes_per_step(self) -> int:
        return 0


def build() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def gradient(model: nn.Linear) -> list[float]:
    assert model.weight.grad is not None
    return model.weight.grad.flatten().tolist()


def loss_of(model: nn.Linear, value: float) -> Tensor:
    loss: Tensor = value * model.weight.sum()
    return loss


def test_local_strategy_leaves_gradients_and_steps_to_each_rank() -> None:
    def train(comm: Communicator) -> tuple[list[list[float]], list[str]]:
        model, optimizer = build()
        seen = []
        with gradsync.synchronize(model, optimizer, RecordingLocal(), comm=comm) as sync:
            for step in range(2 + comm.rank):
                optimizer.zero_grad()
                loss_of(model, 10.0 * comm.rank + step).backward()
                seen.append(gradient(model))
                optimizer.step()
            return seen, sync.stats()["events"]

    zero, one = run_ranks(2, train)
    assert zero == ([[0.0] * 3, [1.0] * 3], ["before 1", "after 1", "before 2", "after 2"])
    assert one[0] == [[10.0] * 3, [11.0] * 3, [12.0] * 3]


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), 3.0), ((1, 3), 3.5), ((0, 2), 4.0), ((0, 0), 0.0)])
def test_accumulation_is_the_weighted_mean_of_local_backwards(weights: tuple[int, int], expected: float) -> None:
    model, optimizer = build()
    with gradsync.synchronize(model, optimizer, RecordingLocal(), accumulate=2) as sync:
        for value, weight in zip((2.0, 4.0), weights, strict=True):
            sync.set_weight(weight)
            loss_of(model, value).backward()
            optimizer.step()
        assert sync.stats()["events"] == ["before 1", "after 1"]
        assert gradient(model) == [expected] * 3


def test_backward_with_weight_zero_gives_zero() -> None:
    model, optimizer = build()
    with gradsync.synchronize(model, optimizer, RecordingLocal()) as sync:
        sync.set_weight(0)
        loss_of(model, 2.0).backward()
        assert gradient(model) == [0.0] * 3


def test_local_strategy_is_told_of_steps_that_a_scaler_skips() -> None:
    model, optimizer = build()
    model.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradsync.synchronize(model, optimizer, RecordingLocal(), scaler=scaler) as sync:
        for value in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, value)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sync.stats()["events"] == ["before 1", "after 1", "after 2", "before 3", "after 3"]


def test_join_calls_the_strategy_and_copies_its_leader() -> None:
    def train(comm: Communicator) -> tuple[float, list[str]]:
        model, optimizer = build()
        with gradsync.synchronize(model, optimizer, RecordingLocal(), comm=comm) as sync:
            with sync.join():
                for _ in range(1 + comm.rank):
                    optimizer.zero_grad()
                    loss_of(model, 1.0).backward()
                    optimizer.step()
            sync.settle()
            return float(model.weight[0, 0].detach()), sync.stats()["events"][-2:]

    assert run_ranks(2, train) == [(pytest.approx(0.8), ["join", "settle"])] * 2
