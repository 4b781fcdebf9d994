"""Local SGD: averaging every n-th step, the exact phase, the schedule, and the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state
from tests.strategies.periodic.runs import adamw, build, close, equal, params_of, step_once, train


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_local_sgd_with_every_1_is_exact() -> None:
    def go(comm: Communicator, strategy: str) -> dict[str, Any]:
        return train(comm, strategy, 6, make=plain_sgd, weights=lambda rank: 1.0 + rank)

    exact = run_ranks(3, lambda comm: go(comm, "allreduce"))
    local = run_ranks(3, lambda comm: go(comm, "local_sgd(every=1)"))
    for mine, expected in zip(local, exact, strict=True):
        assert all(close(a, b) for a, b in zip(mine["history"], expected["history"], strict=True))


def test_local_sgd_equals_diloco_with_a_plain_outer_step() -> None:
    texts = "local_sgd(every=3)", "diloco(every=3, outer_lr=1.0, outer_momentum=0.0)"
    ranks = run_ranks(2, lambda comm: [train(comm, text, 8) for text in texts])
    for local, outer in ranks:
        assert all(equal(a, b) for a, b in zip(local["history"], outer["history"], strict=True))


@pytest.mark.parametrize(
    "how", ["codec={'*.weight': 'topk(density=0.1)'}", "codec={'*.weight': 'sign'}", "reducer=powersgd(rank=1)"]
)
@pytest.mark.parametrize("world", [2, 3])
def test_local_sgd_keeps_the_residual_in_local_weights(how: str, world: int) -> None:
    # Gradients that do not depend on the weights: the mean of the replicas is then known, whatever was sent.
    def go(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model = build()
        before, optimizer = params_of(model), plain_sgd(model)
        with gradsync.synchronize(model, optimizer, f"local_sgd(every=1, {how})", comm=comm):
            for step in range(6):
                optimizer.zero_grad()
                seeded = torch.Generator().manual_seed(10 * step + comm.rank)
                losses = [(p * torch.randn(p.shape, generator=seeded).double()).sum() for p in model.parameters()]
                torch.stack(losses).sum().backward()
                optimizer.step()
            return before, params_of(model)

    ranks = run_ranks(world, go)
    moved = [torch.zeros_like(param) for param in ranks[0][0]]
    for rank in range(world):
        for step in range(6):
            seeded = torch.Generator().manual_seed(10 * step + rank)
            for total in moved:
                total.add_(torch.randn(total.shape, generator=seeded).double(), alpha=-0.05 / world)
    for index, (before, total) in enumerate(zip(ranks[0][0], moved, strict=True)):
        mean = sum(after[index] for _, after in ranks) / world
        assert torch.allclose(mean, before + total, rtol=1e-9, atol=1e-12)
    assert not equal(ranks[0][1], ranks[1][1])


def test_sqrt_rate_lengthens_local_steps() -> None:
    def go(comm: Communicator, rate: str) -> tuple[list[Tensor], list[float]]:
        model = build()
        optimizer = adamw(model)
        text = f"local_sgd(every=100, exact_steps=2, rate='{rate}')"
        rates = []
        with gradsync.synchronize(model, optimizer, text, comm=comm):
            for step in range(3):
                before = params_of(model)
                step_once(model, optimizer, comm.rank, step)
                rates.append(optimizer.param_groups[0]["lr"])
        return [after - old for after, old in zip(params_of(model), before, strict=True)], rates

    same = run_ranks(2, lambda comm: go(comm, "same"))
    longer = run_ranks(2, lambda comm: go(comm, "sqrt"))
    for (short, _), (long, rates) in zip(same, longer, strict=True):
        assert all(torch.allclose(b, a * 2**0.5, rtol=1e-9) for a, b in zip(short, long, strict=True))
        assert rates == [0.01] * 3


def test_sqrt_rate_refuses_sgd() -> None:
    with pytest.raises(ValueError, match="got SGD"):
        run_ranks(2, lambda comm: train(comm, "local_sgd(rate='sqrt')", 1, make=plain_sgd))


def test_local_sgd_does_nothing_in_a_world_of_one() -> None:
    local = run_ranks(1, lambda comm: train(comm, "local_sgd(every=2, exact_steps=3)", 8, settle=True))[0]
    alone = run_ranks(1, lambda comm: train(comm, "allreduce", 8))[0]
    assert equal(local["history"][-1], alone["history"][-1])
    assert local["stats"]["bytes_per_step"] == 0
    assert strategy_state(local["sync"])["exchange"] is None


def test_exact_phase_is_followed_by_periodic_averaging() -> None:
    exact = run_ranks(2, lambda comm: train(comm, "allreduce", 12))
    ranks = run_ranks(2, lambda comm: train(comm, "local_sgd(every=3, exact_steps=5)", 12))
    for step in range(12):
        one, other = ranks[0]["history"][step], ranks[1]["history"][step]
        assert equal(one, exact[0]["history"][step]) == (step < 5), step
        assert equal(one, other) == (step < 5 or (step - 4) % 3 == 0), step
    parted = run_ranks(2, lambda comm: train(comm, "local_sgd(every=3, exact_steps=5)", 6))
    for rank in parted:
        anchors = list(rank["sync"]["strategy_state"]["exchange"]["anchors"].values())
        assert equal(anchors, rank["history"][4])


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_local_sgd_resumes_bit_for_bit_around_the_exact_phase(stop: int) -> None:
    strategy = (
        "local_sgd(every=3, exact_steps=5, schedule='quadratic', optimizer_state='average', codec={'*.weight': 'int8'})"
    )

    def go(comm: Communicator) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        whole = train(comm, strategy, 14, make=adamw)
        half = train(comm, strategy, stop, make=adamw)
        return whole["history"][stop:], train(comm, strategy, 14, half, make=adamw)["history"]

    for whole, rest in run_ranks(2, go):
        assert len(whole) == len(rest)
        assert all(equal(a, b) for a, b in zip(whole, rest, strict=True))


@pytest.mark.parametrize("steps", [[3, 9], [9, 4], [5, 5], [2, 12]])
def test_join_works_around_the_end_of_the_exact_phase(steps: list[int]) -> None:
    def go(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        model = build()
        optimizer = adamw(model)
        with gradsync.synchronize(model, optimizer, "local_sgd(every=3, exact_steps=5)", comm=comm) as sync:
            with sync.join():
                for step in range(steps[comm.rank]):
                    step_once(model, optimizer, comm.rank, step)
            joined = params_of(model)
            for step in range(20, 28):
                step_once(model, optimizer, comm.rank, step)
            sync.settle()
            return joined, params_of(model)

    (joined, end), (other_joined, other_end) = run_ranks(2, go)
    assert equal(joined, other_joined)
    assert equal(end, other_end)


def train_with_falling_rate(comm: Communicator, strategy: str, steps: int) -> tuple[list[int], list[int], list[Tensor]]:
    """Train with a rate that halves after 8 steps; returns the exchanges and ``every`` after each step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.5)
    counts, everies = [], []
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, scheduler=schedule) as sync:
        for step in range(steps):
            step_once(model, optimizer, comm.rank, step)
            schedule.step()
            counts.append(sync.stats()["exchanges"])
            everies.append(sync.stats()["every"])
        return counts, everies, params_of(model)


def test_quadratic_schedule_lengthens_every_as_the_rate_falls() -> None:
    (counts, everies, one), (others, _, other) = run_ranks(
        2, lambda comm: train_with_falling_rate(comm, "local_sgd(every=2, schedule='quadratic')", 24)
    )
    met = [step + 1 for step in range(24) if counts[step] > (counts[step - 1] if step else 0)]
    assert met == [2, 4, 6, 8, 10, 18]  # the rate is halved after step 8, and again after step 16
    assert everies[0] == 2
    assert everies[10] == 8
    assert everies[-1] == 2 * 16
    assert counts == others
    assert not equal(one, other)
    bounded = run_ranks(
        2, lambda comm: train_with_falling_rate(comm, "local_sgd(every=2, schedule='quadratic', max_every=4)", 20)
    )
    assert bounded[0][1][-1] == 4


def momenta(outcome: dict[str, Any]) -> list[Tensor]:
    return [state["momentum_buffer"] for state in outcome["optimizer"]["state"].values()]


def test_optimizer_state_is_averaged_or_kept() -> None:
    def go(comm: Communicator) -> list[dict[str, Any]]:
        average = "local_sgd(every=4, optimizer_state='average')"
        return [train(comm, strategy, 4) for strategy in ("local_sgd(every=100)", "local_sgd(every=4)", average)]

    first, second = run_ranks(2, go)
    for mine in (first, second):
        assert equal(momenta(mine[0]), momenta(mine[1]))  # kept: as if there had been no exchange
        means = [(a + b) / 2 for a, b in zip(momenta(first[0]), momenta(second[0]), strict=True)]
        assert close(momenta(mine[2]), means)
    assert first[2]["stats"]["bytes_per_step"] > 1.9 * first[1]["stats"]["bytes_per_step"]


def test_average_state_skips_missing_state_and_step_counts() -> None:
    def go(comm: Communicator) -> tuple[list[float], list[Tensor | None]]:
        model = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])
        for param in model.parameters():
            nn.init.ones_(param)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "local_sgd(every=2, optimizer_state='average')", comm=comm):
            for _ in range(2):
                optimizer.zero_grad()
                used = model if comm.rank == 0 else model[:1]
                torch.stack([layer(torch.full((1, 3), 1.0 + comm.rank)).sum() for layer in used]).sum().backward()
                optimizer.step()
            states = [optimizer.state.get(param, {}) for param in model.parameters()]
            steps = [float(state["step"]) for state in states if state]
            return steps, [state["exp_avg"].clone() if state else None for state in states]

    (steps, one), (other_steps, other) = run_ranks(2, go)
    assert (steps, other_steps) == ([2.0, 2.0], [2.0])
    shared, only = one
    assert shared is not None
    assert only is not None
    assert other[0] is not None
    assert torch.equal(shared, other[0])
    assert torch.allclose(shared, torch.full((1, 3), 1.5 * (1 - 0.9**2)))
    assert torch.allclose(only, torch.full((1, 3), 1 - 0.9**2))
    assert other[1] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local_sgd(exact_steps=-1)", "exact_steps is a number of steps"),
        ("local_sgd(schedule='cubic')", "schedule must be one of fixed, quadratic"),
        ("local_sgd(every=8, max_every=4)", "max_every must be at least every"),
        ("local_sgd(optimizer_state='drop')", "optimizer_state must be one of keep, average"),
    ],
)
def test_local_sgd_refuses_invalid_options(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.parse(text)
