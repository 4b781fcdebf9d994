"""Strategies under which gradients stay with their rank: what the engine does, and leaves alone, for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator, run_ranks
from gradsync.strategies.base import Verdict
from gradsync.strategies.local import Local


@spec.register("strategy", "test_alone")
class Alone(Local):
    """Never meets anybody; notes what it is asked."""

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


def test_gradients_stay_with_their_rank_and_ranks_need_not_keep_step() -> None:
    def train(comm: Communicator) -> tuple[list[list[float]], list[str]]:
        model, optimizer = build()
        seen = []
        with gradsync.synchronize(model, optimizer, Alone(), comm=comm) as sync:
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
def test_an_accumulation_is_the_weighted_mean_of_this_ranks_backwards(
    weights: tuple[int, int], expected: float
) -> None:
    model, optimizer = build()
    with gradsync.synchronize(model, optimizer, Alone(), accumulate=2) as sync:
        for value, weight in zip((2.0, 4.0), weights, strict=True):
            sync.set_weight(weight)
            loss_of(model, value).backward()
            optimizer.step()
        assert sync.stats()["events"] == ["before 1", "after 1"]
        assert gradient(model) == [expected] * 3


def test_a_single_backward_of_weight_zero_is_zero() -> None:
    model, optimizer = build()
    with gradsync.synchronize(model, optimizer, Alone()) as sync:
        sync.set_weight(0)
        loss_of(model, 2.0).backward()
        assert gradient(model) == [0.0] * 3


def test_a_step_that_a_scaler_leaves_out_is_told() -> None:
    model, optimizer = build()
    model.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gradsync.synchronize(model, optimizer, Alone(), scaler=scaler) as sync:
        for value in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, value)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sync.stats()["events"] == ["before 1", "after 1", "after 2", "before 3", "after 3"]


def test_at_the_end_of_its_data_it_is_asked_to_join_and_its_leader_is_followed() -> None:
    def train(comm: Communicator) -> tuple[float, list[str]]:
        model, optimizer = build()
        with gradsync.synchronize(model, optimizer, Alone(), comm=comm) as sync:
            with sync.join():
                for _ in range(1 + comm.rank):
                    optimizer.zero_grad()
                    loss_of(model, 1.0).backward()
                    optimizer.step()
            sync.settle()
            return float(model.weight[0, 0].detach()), sync.stats()["events"][-2:]

    assert run_ranks(2, train) == [(pytest.approx(0.8), ["join", "settle"])] * 2
