"""Where all come together: ranks without data keep the others company, and one exact mean survives its maker."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator, run_ranks
from gradsync.comm.messages import Message
from gradsync.gossip.circle import Circle
from gradsync.gossip.meeting import Meeting
from tests.gossip.trial import Trial


@pytest.mark.parametrize("buffers", ["mean", "broadcast", "none"])
def test_settled_all_hold_the_exact_mean_and_buffers_as_asked(buffers: str) -> None:
    def run(comm: Communicator) -> tuple[float, float, float]:
        model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "gossip(topology=ring)", comm=comm, buffers=buffers) as sync:  # type: ignore[arg-type]
            with torch.no_grad():
                model[0].weight.fill_(comm.rank)
                model[1].running_mean.fill_(comm.rank)
            sync.settle()
            apart = sync.stats()["consensus"]["at_settle"]
            return float(model[0].weight.detach()[0]), float(model[1].running_mean[0]), apart

    outcomes = run_ranks(3, run)
    expected = {"mean": [1.0] * 3, "broadcast": [0.0] * 3, "none": [0.0, 1.0, 2.0]}
    assert [weight for weight, _, _ in outcomes] == [1.0] * 3
    assert [mean for _, mean, _ in outcomes] == expected[buffers]
    assert outcomes[0][2] > 0.0
    assert outcomes[1][2] == 0.0


@pytest.mark.parametrize("strategy", ["gossip", "gossip(topology=ring)", "gossip(asynchronous=True)"])
def test_ranks_with_fewer_batches_keep_the_others_company(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[float, int]:
        trial = Trial(comm, strategy, torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            for _ in range(2):
                with trial.sync.join():
                    trial.step(3 + 4 * comm.rank)
            trial.sync.settle()
            return float(trial.values), trial.stats("clocks")[comm.rank]

    outcomes = run_ranks(3, run)
    assert [value for value, _ in outcomes] == [pytest.approx(1.0, abs=1e-12)] * 3
    if "asynchronous" not in strategy:
        assert [clock for _, clock in outcomes] == [22] * 3, "all have mixed as often as the longest"


def test_a_run_with_uneven_ranks_is_the_same_bits_again() -> None:
    def run(comm: Communicator) -> Tensor:
        trial = Trial(comm, "gossip", torch.randn(3, generator=torch.Generator().manual_seed(comm.rank)).double())
        trial.optimizer.param_groups[0]["lr"] = 0.1 * comm.rank
        with trial.sync, trial.sync.join():
            trial.step(4 + 3 * comm.rank)
        return trial.values

    for one, other in zip(run_ranks(3, run), run_ranks(3, run), strict=True):
        assert torch.equal(one, other)


def test_who_has_left_a_meeting_since_still_counts_for_how_far_all_mix() -> None:
    circle = Circle(0, host="127.0.0.1", port=0, keys=None, silent_s=2.0)
    try:
        meeting = Meeting(circle, timeout_s=1)
        circle.start("run", {0: circle.address}, 1)
        for member, clock in ((1, 9), (2, 12)):
            circle.book.joined[member] = ""
            fields = {"number": 0, "what": "join", "clock": clock}
            circle._handlers["idle"](member, Message("idle", fields))
        circle.book.left[1] = 9
        circle.book.dead[2] = "killed"
        steps: list[int] = []
        assert meeting.gather("join", clock=lambda: len(steps), step=lambda: steps.append(0)) == 0
        assert len(steps) == 9
    finally:
        circle.close()


def test_a_mean_survives_the_death_of_the_one_who_made_it() -> None:
    """It told one member and died: that one gives it to the rest, though what they would make now is another."""
    circles = [Circle(me, host="127.0.0.1", port=0, keys=None, silent_s=2.0) for me in range(3)]
    meetings = [Meeting(circle, timeout_s=10) for circle in circles]
    for circle in circles:
        circle.start("run", {other.me: other.address for other in circles}, 10)
    send = circles[0].send

    def die_after_the_first(member: int, message: Message) -> Any:
        sent = send(member, message)
        if message.kind == "mean" and member == 1:
            circles[0].die()
            raise SystemExit
        return sent

    circles[0].send = die_after_the_first  # type: ignore[method-assign]
    found: dict[int, float] = {}

    def settle(me: int) -> None:
        number = meetings[me].gather("settle", clock=lambda: 0, step=None)
        with contextlib.suppress(SystemExit):
            found[me] = float(meetings[me].mean(number, 1.0, {"x0": torch.tensor([10.0**me])})["x0"])

    threads = [threading.Thread(target=settle, args=(me,), daemon=True) for me in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for circle in circles:
        circle.close()
    assert found == {1: 37.0, 2: 37.0}, "of 1, 10 and 100"
