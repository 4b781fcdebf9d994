"""The driver with a background thread: it raises errors in ``backward``, and ends when a backward fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gradsync
from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.comm import Communicator
from gradsync.comm.base import Work
from gradsync.reducers.background import BackgroundDriver, make_driver
from gradsync.reducers.base import Driver
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.testing import run_ranks


def driver_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gradsync-driver"]


def test_make_driver_uses_a_thread_only_for_several_stages_on_a_cpu() -> None:
    def go(comm: Communicator) -> list[type[Driver]]:
        two, one = Compressed("int8"), Compressed("fp16")
        return [type(make_driver(r, comm, 1, on_cpu=cpu)) for r, cpu in ((two, True), (two, False), (one, True))]

    assert run_ranks(3, go)[0] == [BackgroundDriver, Driver, Driver]
    assert run_ranks(2, go)[0] == [Driver, Driver, Driver]


def test_driver_thread_errors_are_raised_by_backward() -> None:
    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("a planted failure")

    def go(comm: Communicator) -> None:
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = gradsync.AllReduce(codec="int8")
        strategy.reducer._finish_piece = fail  # type: ignore[attr-defined]
        sync = gradsync.synchronize(model, optimizer, strategy, comm=comm)
        with pytest.raises(RuntimeError, match="a planted failure"):
            model(torch.ones(1, 100)).sum().backward()
        sync.close()

    run_ranks(3, go)
    assert not driver_threads()


def test_driver_thread_ends_if_backward_fails() -> None:
    def go(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradsync.synchronize(model, optimizer, "allreduce(codec=int8)", comm=comm, bucket_bytes=1000)
        model[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 100)).sum().backward()
        sync.close()

    run_ranks(3, go)
    for thread in driver_threads():
        thread.join(timeout=10)
    assert not driver_threads()


class _Gate(Work):
    """A collective that is done when the test says so."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(10)

    def done(self) -> bool:
        return self.opened.is_set()


class _TwoStages(Plain):
    """Yields two collectives, and counts how far its reductions came."""

    num_stages = 2

    def __init__(self, gates: list[_Gate]) -> None:
        super().__init__()
        self.gates, self.resumed = gates, 0

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        for gate in self.gates:
            yield gate
            self.resumed += 1


@pytest.mark.parametrize("stage", [0, 1])
def test_abandoned_driver_thread_runs_no_reducer_any_more(stage: int) -> None:
    def go(comm: Communicator) -> None:
        gates = [_Gate(), _Gate()]
        reducer = _TwoStages(gates)
        param = nn.Parameter(torch.zeros(3))
        plan = BucketPlan([["p"]], [], {"p": param}, comm)
        driver = BackgroundDriver(reducer, comm, 1)
        driver.add(plan.buckets[0])
        for gate in gates[:stage]:
            gate.opened.set()
        assert gates[stage].entered.wait(10)
        driver.abandon()  # does not wait: the collective is still under way
        for gate in gates:
            gate.opened.set()
        thread = driver._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()
        assert reducer.resumed == stage

    run_ranks(1, go)
