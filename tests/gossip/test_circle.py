"""What a circle's members hear of each other, and in which order: the races, one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator, run_ranks
from gradsync.comm.messages import Message
from gradsync.gossip import Ring
from gradsync.gossip.circle import Circle
from gradsync.gossip.meeting import Meeting
from gradsync.gossip.pairs import Pairs
from gradsync.gossip.replica import Replica
from gradsync.strategies import Gossip


def make_circles(members: int) -> list[Circle]:
    """Some that have not started: what they know of each other is up to the test."""
    return [Circle(me, host="127.0.0.1", port=0, keys=None, silent_s=2.0) for me in range(members)]


def wait_until(ready: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 5
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("who_tells", [0, 1])
def test_who_is_let_in_while_another_dies_hears_of_it(who_tells: int) -> None:
    """0 has told of a death before it knew the newcomer; 1 has let that in before it knew of the death."""
    zero, one, newcomer = circles = make_circles(3)
    dead = 7
    try:
        for circle in circles:
            circle.book.joined[dead] = ""
        for circle in (zero, one):
            circle.start("run", {other.me: other.address for other in (zero, one)}, 5)
        newcomer.start("run", {2: newcomer.address}, 5)
        zero.book.dead[dead] = "killed"
        one.connect(2, newcomer.address)
        one.book.joined[2] = newcomer.address
        circles[who_tells].spread_news()
        wait_until(lambda: dead in newcomer.book.dead)
    finally:
        for circle in circles:
            circle.close()


def test_a_question_of_one_who_is_not_known_yet_is_answered_later() -> None:
    """A newcomer is asked by its sponsor before it has a line to it under its name."""
    asker, asked = circles = make_circles(2)
    try:
        values = [nn.Parameter(torch.full((3,), float(circle.me))) for circle in circles]
        pairs = [Pairs(circles[me], Ring(), Replica({"w": values[me]})) for me in range(2)]
        asker.start("run", {0: asker.address, 1: asked.address}, 5)
        asked.start("run", {1: asked.address}, 5)
        pairs[0].mix()
        wait_until(lambda: float(pairs[1].replica.parts[0].x[0]) == 0.5)
        asked.connect(0, asker.address)
        pairs[0].be_answered("settle", 5)
        assert float(pairs[0].replica.parts[0].x[0]) == 0.5
    finally:
        for circle in circles:
            circle.close()


def test_a_mean_on_its_way_is_waited_for_though_another_says_that_its_maker_has_left() -> None:
    leader, member = circles = make_circles(2)
    found: list[float] = []
    followed = threading.Event()
    leader.on("part", lambda sender, message: followed.set())
    try:
        meeting = Meeting(member, timeout_s=10)
        for circle in circles:
            circle.start("run", {other.me: other.address for other in circles}, 5)
        thread = threading.Thread(
            target=lambda: found.append(float(meeting.mean(0, 1.0, {"x0": torch.tensor([5.0])})["x0"])), daemon=True
        )
        thread.start()
        assert followed.wait(5)
        with member.changed:
            member.book.left[0] = 3
            member.changed.notify_all()
        thread.join(0.2)
        leader.send(1, Message("mean", {"number": 0}, {"x0": torch.tensor([7.0])}))
        thread.join(5)
        assert found == [7.0]
    finally:
        for circle in circles:
            circle.close()


def test_nobody_trains_before_all_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that dies early is not there any more when a slow one comes to connect."""
    connect = Circle.connect

    def slowly(self: Circle, member: int, address: str, timeout_s: float = 4.0) -> None:
        time.sleep(0.3 * (self.me == 0))
        connect(self, member, address, timeout_s)

    monkeypatch.setattr(Circle, "connect", slowly)

    def run(comm: Communicator) -> list[int]:
        model, strategy = nn.Linear(2, 1), Gossip(asynchronous=True)
        sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, comm=comm)
        if comm.rank == 1:
            strategy.circle.die()
            return []
        with sync:
            wait_until(lambda: 1 in strategy.circle.book.dead)
            return strategy.circle.book.present()

    assert run_ranks(2, run, timeout_s=5) == [[0], []]
