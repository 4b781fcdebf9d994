"""DiLoCo resumes after a stop at any step, after a kill, and with another number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsync
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state
from tests.strategies.periodic.runs import STREAMED, adamw, anchors, build, equal, params_of, sgd, step_once, train
from tests.support.ranks import run_processes


@pytest.mark.parametrize("stop", [4, 7, 11])  # one fragment pending, the other one pending, none pending
def test_diloco_resumes_bit_for_bit_at_any_step(stop: int) -> None:
    def go(comm: Communicator) -> tuple[list[list[Tensor]], list[list[Tensor]], Any]:
        whole = train(comm, STREAMED, 16, make=adamw)
        half = train(comm, STREAMED, stop, make=adamw)
        rest = train(comm, STREAMED, 16, half, make=adamw)
        return whole["history"][stop:], rest["history"], strategy_state(half["sync"])["flight"]

    for whole, rest, pending in run_ranks(2, go):
        assert (pending is not None) == (stop in (4, 7))
        assert len(whole) == len(rest) == 16 - stop
        assert all(equal(a, b) for a, b in zip(whole, rest, strict=True))


def test_diloco_state_loads_on_another_number_of_ranks() -> None:
    saved = run_ranks(2, lambda comm: train(comm, STREAMED, 7))
    states = [outcome["sync"] for outcome in saved]

    def go(comm: Communicator) -> dict[str, Any]:
        model = build()
        with gradsync.synchronize(model, sgd(model), STREAMED, comm=comm) as sync:
            sync.load_state_dict(states)
            loaded = params_of(model)
            sync.settle()
            return {"sync": sync.state_dict(), "history": [loaded, params_of(model)]}

    ranks = run_ranks(3, go)
    for rank in range(3):
        assert equal(ranks[rank]["history"][0], saved[rank % 2]["history"][-1])
        assert equal(ranks[rank]["history"][1], ranks[0]["history"][1])
    assert strategy_state(ranks[0]["sync"])["clock"] == 7
    with pytest.raises(ValueError, match="rank 0 of 2"):
        run_ranks(1, lambda comm: train(comm, STREAMED, 8, {**saved[0], "at": 7}))


def train_until_killed(folder: str, victim: int | None, steps: int) -> dict[str, Any]:
    """Train with a checkpoint of each rank's own after step 9; resume where there is one."""
    comm = gradsync.connect(timeout_s=10)
    own = Path(folder) / f"{comm.rank}.pt"
    state = torch.load(own) if own.exists() else None
    model = build()
    optimizer = adamw(model)
    with gradsync.synchronize(model, optimizer, STREAMED) as sync:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync}
        if state is not None:
            for name, part in parts.items():
                part.load_state_dict(state[name])
        for step in range(0 if state is None else state["at"], steps):
            if victim == comm.rank and step == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            step_once(model, optimizer, comm.rank, step)
            if step == 9 and victim is not None:
                torch.save({"at": 10, **{name: part.state_dict() for name, part in parts.items()}}, own)
        return {"params": params_of(model), "anchors": anchors({"sync": sync.state_dict()})}


def test_diloco_resumes_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    fresh = tmp_path / "never"
    fresh.mkdir()
    whole = run_processes(2, train_until_killed, str(fresh), None, 18)
    lost, killed = run_processes(2, train_until_killed, str(tmp_path), 1, 18, expect_failure=True)
    assert killed == -signal.SIGKILL
    assert isinstance(lost, gradsync.PeerLost)
    resumed = run_processes(2, train_until_killed, str(tmp_path), None, 18)
    for one, other in zip(whole, resumed, strict=True):
        assert equal(one["params"], other["params"])
        assert all(torch.equal(one["anchors"][name], other["anchors"][name]) for name in one["anchors"])
