"""ShardService and its barriers: observers, late joiners, dead workers. No sockets."""

from __future__ import annotations

import pytest
import torch

from gradsync.messaging.format import Message
from gradsync.strategies.parameter_server.job import Job, Param
from gradsync.strategies.parameter_server.server.barrier import Arrival, WorkerBarriers, read_arrivals
from gradsync.strategies.parameter_server.server.shard_service import Replies, RequestRefused, ShardService

GROUPS = [{"lr": 1.0}]


def job(num_workers: int = 2, staleness: int | None = 0, **options: int) -> Job:
    params = (Param("w", (1,), "float32", 0),)
    return Job(params=params, optimizer="SGD", num_workers=num_workers, staleness=staleness, **options)


def service_with(*workers: int, staleness: int | None = 0) -> ShardService:
    service = ShardService(0, job(len(workers), staleness), ["w"], GROUPS)
    for worker in workers:
        service.join(peer(worker), service.job, worker, None, None)
    service.fill(peer(workers[0]), {"w": torch.zeros(1)})
    return service


def peer(worker: int) -> bytes:
    return str(worker).encode()


def push(service: ShardService, worker: int, clock: int) -> Replies:
    fields = {"clock": clock, "weight": 1.0, "groups": GROUPS, "squared_norm": None}
    return service.push(worker, fields, {"w": torch.ones(1)})


def replies_of_kind(answers: Replies, kind: str) -> dict[bytes, Message]:
    return {who: message for who, message in answers if message.kind == kind}


def test_barrier_completes_when_all_connected_workers_have_arrived() -> None:
    barriers = WorkerBarriers()
    barriers.arrive("settle", 1, Arrival(b"one", {"clock": 7}, {"mean": torch.ones(2)}))
    assert barriers.complete([0, 1]) == []
    barriers.arrive("settle", 0, Arrival(b"zero", {"clock": 9}, {}))
    answers = dict(barriers.complete([0, 1]))
    assert answers.keys() == {b"zero", b"one"}
    arrivals = read_arrivals(answers[b"zero"])
    assert {worker: each.fields["value"]["clock"] for worker, each in arrivals.items()} == {0: 9, 1: 7}
    assert torch.equal(arrivals[1].tensors["mean"], torch.ones(2))
    assert arrivals[0].tensors == {}
    assert barriers.complete([0, 1]) == []  # the next one begins empty


def test_barriers_of_other_tags_are_separate() -> None:
    barriers = WorkerBarriers()
    barriers.arrive("settle", 0, Arrival(b"zero", None, {}))
    barriers.arrive("join", 1, Arrival(b"one", None, {}))
    assert barriers.complete([0, 1]) == []


def test_barrier_ignores_dead_workers_and_their_values() -> None:
    service = service_with(0, 1, 2)
    assert service.barrier(0, "settle", 1, {}) == service.barrier(1, "settle", 2, {}) == []
    service.remove_worker(1)
    done = replies_of_kind(service.remove_worker(2), "barrier_done")
    assert done.keys() == {b"0"}
    assert done[b"0"].fields["values"] == [[0, 1]]


def test_observer_is_not_waited_for_but_reads_and_rejoins_at_the_current_step() -> None:
    service = service_with(0, 1)
    push(service, 0, 0)
    assert service.pull(0, 1) == []  # it waits for worker 1
    assert replies_of_kind(service.make_observer(1), "parameters").keys() == {b"0"}
    assert replies_of_kind(service.pull(1, 0, newest=True), "parameters")[b"1"].tensors["w"].item() == -1.0
    assert service.barrier(0, "join", None, {}) == []  # worker 1 is connected, so the barrier waits for it
    assert replies_of_kind(service.barrier(1, "join", None, {}), "barrier_done").keys() == {b"0", b"1"}
    (joined,) = replies_of_kind(service.join(peer(1), service.job, 1, None, None), "joined").values()
    assert joined.fields["clock"] == 1
    push(service, 0, 1)
    assert service.pull(0, 2) == []  # it is waited for again


def test_observer_that_rejoins_after_a_failover_is_not_waited_for() -> None:
    service = service_with(0, 1)
    service.join(peer(1), service.job, 1, 3, 0, observer=True)  # its shard has failed over while it was an observer
    assert 1 not in service.clocks.by_worker


def test_pull_of_the_newest_ignores_the_staleness_bound() -> None:
    service = service_with(0, 1, staleness=1)
    push(service, 0, 0)
    push(service, 0, 1)
    assert service.pull(0, 2) == []
    assert replies_of_kind(service.pull(0, 2, newest=True), "parameters")[b"0"].tensors["w"].item() == -1.0


def test_late_joiner_gets_a_new_number_and_need_not_know_the_number_of_workers() -> None:
    fresh = ShardService(0, job(1), ["w"], GROUPS)
    assert fresh.next_worker_id() == 0
    service = service_with(0, 1)
    service.remove_worker(1)
    assert service.next_worker_id() == 2
    service.join(b"new", job(1), 2, None, None)
    assert service.next_worker_id() == 3
    with pytest.raises(RequestRefused, match="another job: here staleness"):
        service.join(b"other", job(1, staleness=4), 3, None, None)
