"""A stopped process keeps its connections, and must not hold up the rest: it is given up after the timeout."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.spec import parse
from gradsync.strategies import Gossip, Strategy
from gradsync.strategies.gossip.synchronous import SyncGossip
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Trial
from tests.support.ranks import run_processes

pytestmark = pytest.mark.alone  # it measures how late a loss is noticed

TIMEOUT_S = 3.0
VICTIM = 1


def shorten_timeouts(strategy: Gossip) -> None:
    """Set gossip's timeouts below the time that connecting may take on a busy machine."""
    strategy.mesh.timeout_s = strategy._barrier.timeout_s = TIMEOUT_S
    if isinstance(strategy._gossip, SyncGossip):
        strategy._gossip.timeout_s = TIMEOUT_S


def train_with_one_stopped(spec: str) -> tuple[list[int], str, bool]:
    """Train with three processes, of which one is stopped in mid-step until another finds that it is lost."""
    comm = gradsync.connect(timeout_s=60)
    pids = all_gather_object(comm, os.getpid())
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = parse(spec, "strategy")
    sync = gradsync.synchronize(model, optimizer, strategy, comm=comm)
    shorten_timeouts(strategy)
    comm.barrier()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(comm.rank))

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()

    for at in range(10):
        if comm.rank == VICTIM and at == 6:
            os.kill(os.getpid(), signal.SIGSTOP)
        step()
    end_s = time.monotonic() + 60
    while not sync.stats()["lost"]:
        assert time.monotonic() < end_s, sync.stats()
        step()
    for _ in range(5):
        step()
    sync.settle()
    stats = sync.stats()
    finite = all(bool(param.isfinite().all()) for param in model.parameters())
    sync.settle()  # the other survivor has found it too
    if comm.rank == 0:
        os.kill(pids[VICTIM], signal.SIGCONT)
    sync.close()
    return stats["living"], stats["lost"].get(VICTIM, ""), finite


@pytest.mark.parametrize(
    "strategy", ["gossip", "gossip(topology=ring, codec={'*': int8})", "gossip(asynchronous=True)"]
)
def test_stopped_member_is_given_up_and_told_so(strategy: str) -> None:
    outcomes = run_processes(3, train_with_one_stopped, strategy, timeout_s=90, expect_failure=True)
    error = outcomes.pop(VICTIM)
    assert isinstance(error, gradsync.GradSyncError), error
    assert "the others gave this rank up: " in str(error)
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        living, reason, finite = outcome
        assert living == [0, 2]
        assert "no sign of life for 3 s" in reason or "it did not come to step" in reason
        assert finite


def listen(strategy: Strategy, end_s: float) -> None:
    """Send heartbeats, and make no step, until the others give this rank up."""
    assert isinstance(strategy, Gossip)
    with strategy.mesh.changed:
        while time.monotonic() < end_s:
            strategy.mesh.changed.wait(0.1)
            strategy.mesh.check()


def test_member_that_stays_behind_is_given_up_once() -> None:
    """It is waited for once, not at each step; and members that wait for it are not given up with it."""

    def run(comm: Communicator) -> tuple[list[int], float]:
        trial = Trial(comm, "gossip(topology=ring)", torch.full((4,), float(comm.rank)).double())
        trial.step(2)
        begin_s = time.monotonic()
        if comm.rank == 2:
            with pytest.raises(gradsync.GradSyncError, match="gave this rank up: it did not come to step 2 in 1 s"):
                listen(trial.sync._engine.strategy, begin_s + 30)
            return [], 0.0
        trial.step(20)
        took_s = time.monotonic() - begin_s
        trial.sync.settle()
        living = trial.stats("living")
        trial.sync.settle()  # no rank leaves before the others have read their stats
        trial.sync.close()
        return living, took_s

    outcomes = run_ranks(5, run, timeout_s=1.0)
    del outcomes[2]
    assert [living for living, _ in outcomes] == [[0, 1, 3, 4]] * 4
    assert max(took_s for _, took_s in outcomes) < 10, "one timeout, not one for each step"
