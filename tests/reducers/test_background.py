"""A driver with a thread of its own: it gives errors on, and ends when its backward comes to no end."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator, run_ranks
from gradsync.reducers.background import BackgroundDriver, drive
from gradsync.reducers.base import Driver
from gradsync.reducers.compressed import Compressed


def driver_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gradsync-driver"]


def test_only_several_stages_on_a_cpu_have_a_thread() -> None:
    def go(comm: Communicator) -> list[type[Driver]]:
        two, one = Compressed("int8"), Compressed("fp16")
        return [type(drive(r, comm, 1, on_cpu=cpu)) for r, cpu in ((two, True), (two, False), (one, True))]

    assert run_ranks(3, go)[0] == [BackgroundDriver, Driver, Driver]
    assert run_ranks(2, go)[0] == [Driver, Driver, Driver]


def test_what_goes_wrong_in_the_thread_is_raised_by_backward() -> None:
    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("a planted failure")

    def go(comm: Communicator) -> None:
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = gradsync.AllReduce(codec="int8")
        strategy.reducer._end = fail  # type: ignore[attr-defined]
        sync = gradsync.synchronize(model, optimizer, strategy, comm=comm)
        with pytest.raises(RuntimeError, match="a planted failure"):
            model(torch.ones(1, 100)).sum().backward()
        sync.close()

    run_ranks(3, go)
    assert not driver_threads()


def test_a_backward_that_comes_to_no_end_leaves_no_thread_behind() -> None:
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
