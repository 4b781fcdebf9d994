"""Asynchronous gossip: pairwise averaging without waiting keeps the sum."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Trial


def test_async_gossip_keeps_the_sum_and_converges() -> None:
    start = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(comm: Communicator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        trial = Trial(comm, "gossip(topology=random, asynchronous=True)", start[comm.rank])
        with trial.sync:
            for _ in range(40):
                trial.step()
                time.sleep(0.002)
            with trial.sync.join():
                pass
            ended = trial.values
            trial.sync.settle()
            return ended, trial.values, trial.sync.stats()

    outcomes = run_ranks(4, run)
    ends = torch.stack([ended for ended, _, _ in outcomes])
    torch.testing.assert_close(ends.mean(0), start.mean(0), rtol=0, atol=1e-13)
    assert float((ends - start.mean(0)).abs().max()) < 0.1 * float((start - start.mean(0)).abs().max())
    for _, settled, stats in outcomes:
        torch.testing.assert_close(settled, start.mean(0), rtol=0, atol=1e-13)
        assert torch.equal(settled, outcomes[0][1])
        assert sum(stats["staleness"]["histogram"].values()) >= 40
        assert stats["staleness"]["max"] >= 1
        assert stats["consensus"]["rms"] < 1.0


def test_async_gossip_crossing_requests_average() -> None:
    """Both requests cross on the way, every time: if each moved by a half, the two would only swap values."""

    def run(comm: Communicator) -> float:
        trial = Trial(comm, "gossip(asynchronous=True)", torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            trial.step()
            with trial.sync.join():
                pass
            return float(trial.values)

    for zero, one in (run_ranks(2, run) for _ in range(3)):
        assert zero + one == 1.0
        assert abs(zero - one) <= 0.5
