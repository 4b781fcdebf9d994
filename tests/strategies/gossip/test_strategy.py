"""Gossip as a strategy: what it refuses, and how it resumes from a saved state. How values mix is in test_mixing.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync.comm import Communicator
from gradsync.strategies import Gossip
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Trial


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int8"}, "neighbours have to stay the same"),
        ({"codec": "int8", "topology": "random"}, "topology=random"),
        ({"codec": "int8", "topology": "ring", "asynchronous": True}, "asynchronous=True"),
        ({"codec": "dgc", "topology": "ring"}, "Use topk"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"silent_s": 0.0}, "silent_s"),
        ({"port": -1}, "port must be"),
        ({"topology": "triangle"}, "triangle"),
    ],
)
def test_gossip_refuses_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gossip(**options)


def test_gossip_resumes_with_another_number_of_ranks() -> None:
    def save(comm: Communicator) -> dict[str, Any]:
        trial = Trial(comm, "gossip(topology=ring, codec={'weight': int8})", torch.full((64,), float(comm.rank)))
        with trial.sync:
            trial.step(3)
            return trial.sync.gather_state_dict()

    states = run_ranks(3, save)[0]

    def load(comm: Communicator) -> tuple[float, int]:
        trial = Trial(comm, "gossip(topology=ring, codec={'weight': int8})", torch.zeros(64))
        with trial.sync:
            trial.sync.load_state_dict(states)
            trial.step(2)
            return float(trial.values[0]), trial.stats("clocks")[comm.rank]

    outcomes = run_ranks(2, load)
    assert [clock for _, clock in outcomes] == [5, 5]
    assert all(0.0 < value < 2.0 for value, _ in outcomes)


def test_gossip_repeats_steps_bit_for_bit_from_a_state() -> None:
    def run(comm: Communicator) -> bool:
        trial = Trial(comm, "gossip", torch.randn(3, generator=torch.Generator().manual_seed(comm.rank)).double())
        with trial.sync:
            trial.step(2)
            saved = trial.sync.state_dict()
            trial.step(3)
            after = trial.values
            trial.sync.load_state_dict(saved)
            trial.step(3)
            return torch.equal(after, trial.values)

    assert run_ranks(3, run) == [True] * 3
