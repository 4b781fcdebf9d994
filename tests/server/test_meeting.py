"""Workers that meet at a server, stand aside, come anew: the keeper's side of it, with no socket."""

from __future__ import annotations

import pytest
import torch

from gradsync.comm.messages import Message
from gradsync.server.job import Job, Param
from gradsync.server.keeper import Answers, Keeper, Refused
from gradsync.server.meeting import Brought, Meetings, read_met

GROUPS = [{"lr": 1.0}]


def job(num_workers: int = 2, staleness: int | None = 0, **options: int) -> Job:
    params = (Param("w", (1,), "float32", 0),)
    return Job(params=params, optimizer="SGD", num_workers=num_workers, staleness=staleness, **options)


def keeper_of(*workers: int, staleness: int | None = 0) -> Keeper:
    keeper = Keeper(0, job(len(workers), staleness), ["w"], GROUPS)
    for worker in workers:
        keeper.hello(peer(worker), keeper.job, worker, None, None)
    keeper.fill(peer(workers[0]), {"w": torch.zeros(1)})
    return keeper


def peer(worker: int) -> bytes:
    return str(worker).encode()


def push(keeper: Keeper, worker: int, clock: int) -> Answers:
    fields = {"clock": clock, "weight": 1.0, "groups": GROUPS, "square": None}
    return keeper.push(worker, fields, {"w": torch.ones(1)})


def told(answers: Answers, kind: str) -> dict[bytes, Message]:
    return {who: message for who, message in answers if message.kind == kind}


def test_a_meeting_ends_when_all_who_are_present_have_come_and_brings_what_each_brought() -> None:
    meetings = Meetings()
    meetings.come("settle", 1, Brought(b"one", {"clock": 7}, {"mean": torch.ones(2)}))
    assert meetings.ended([0, 1]) == []
    meetings.come("settle", 0, Brought(b"zero", {"clock": 9}, {}))
    answers = dict(meetings.ended([0, 1]))
    assert answers.keys() == {b"zero", b"one"}
    met = read_met(answers[b"zero"])
    assert {worker: each.fields["brought"]["clock"] for worker, each in met.items()} == {0: 9, 1: 7}
    assert torch.equal(met[1].tensors["mean"], torch.ones(2))
    assert met[0].tensors == {}
    assert meetings.ended([0, 1]) == []  # the next one begins empty


def test_other_meetings_are_not_mixed_up_with_it() -> None:
    meetings = Meetings()
    meetings.come("settle", 0, Brought(b"zero", None, {}))
    meetings.come("join", 1, Brought(b"one", None, {}))
    assert meetings.ended([0, 1]) == []


def test_whoever_dies_is_not_waited_for_and_takes_along_what_it_brought() -> None:
    keeper = keeper_of(0, 1, 2)
    assert keeper.meet(0, "settle", 1, {}) == keeper.meet(1, "settle", 2, {}) == []
    keeper.forget(1)
    met = told(keeper.forget(2), "met")
    assert met.keys() == {b"0"}
    assert met[b"0"].fields["brought"] == [[0, 1]]


def test_one_that_stands_aside_holds_up_nobody_reads_and_meets_and_comes_back_at_the_others_step() -> None:
    keeper = keeper_of(0, 1)
    push(keeper, 0, 0)
    assert keeper.pull(0, 1) == []  # it waits for worker 1
    assert told(keeper.step_aside(1), "parameters").keys() == {b"0"}
    assert told(keeper.pull(1, 0, newest=True), "parameters")[b"1"].tensors["w"].item() == -1.0
    assert keeper.meet(0, "join", None, {}) == []  # worker 1 is present, and so waited for here
    assert told(keeper.meet(1, "join", None, {}), "met").keys() == {b"0", b"1"}
    (welcome,) = told(keeper.hello(peer(1), keeper.job, 1, None, None), "welcome").values()
    assert welcome.fields["clock"] == 1
    push(keeper, 0, 1)
    assert keeper.pull(0, 2) == []  # and is waited for again


def test_one_that_comes_back_aside_is_not_waited_for() -> None:
    keeper = keeper_of(0, 1)
    keeper.hello(peer(1), keeper.job, 1, 3, 0, aside=True)  # its shard has moved while it stood aside
    assert 1 not in keeper.clocks.of


def test_the_newest_is_read_whatever_the_bound_says() -> None:
    keeper = keeper_of(0, 1, staleness=1)
    push(keeper, 0, 0)
    push(keeper, 0, 1)
    assert keeper.pull(0, 2) == []
    assert told(keeper.pull(0, 2, newest=True), "parameters")[b"0"].tensors["w"].item() == -1.0


def test_a_newcomer_gets_a_number_that_nobody_has_had_and_need_not_know_how_many_there_were() -> None:
    fresh = Keeper(0, job(1), ["w"], GROUPS)
    assert fresh.free_number() == 0
    keeper = keeper_of(0, 1)
    keeper.forget(1)
    assert keeper.free_number() == 2
    keeper.hello(b"new", job(1), 2, None, None)
    assert keeper.free_number() == 3
    with pytest.raises(Refused, match="another job: here staleness"):
        keeper.hello(b"other", job(1, staleness=4), 3, None, None)
