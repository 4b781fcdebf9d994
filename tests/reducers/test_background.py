"""The driver with a background thread: it raises errors in ``backward``, and ends when a backward fails."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.reducers.background import BackgroundDriver, make_driver
from gradsync.reducers.base import Driver
from gradsync.reducers.compressed.reducer import Compressed
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
