"""DiLoCo with a rank that differs from the others: with less data, with NaN, out of step, or lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradsync
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.strategies.periodic.runs import STREAMED, adamw, build, close, equal, params_of, sgd, step_once


def train_uneven(comm: Communicator, strategy: str, steps: list[int]) -> dict[str, Any]:
    model = build()
    optimizer = adamw(model)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, timeout_s=None) as sync:
        with sync.join():
            for step in range(steps[comm.rank]):
                step_once(model, optimizer, comm.rank, step)
        after_join = params_of(model)
        for step in range(20, 33):  # all ranks train on: their clocks agree again
            step_once(model, optimizer, comm.rank, step)
        sync.settle()
        return {
            "joined": after_join,
            "end": params_of(model),
            "optimizer": optimizer.state_dict(),
            "sync": sync.stats(),
        }


@pytest.mark.parametrize("strategy", ["diloco(every=4)", STREAMED])
@pytest.mark.parametrize("steps", [[5, 13, 9], [3, 0, 3], [7, 7, 7]])
def test_join_with_uneven_ranks_ends_with_equal_state(strategy: str, steps: list[int]) -> None:
    ranks = run_ranks(3, lambda comm: train_uneven(comm, strategy, steps))
    together = len(set(steps)) > 1
    for other in ranks[1:]:
        assert equal(ranks[0]["joined"], other["joined"]) == together
        assert equal(ranks[0]["end"], other["end"])
    counts = {float(state["step"]) for rank in ranks for state in rank["optimizer"]["state"].values()}
    assert counts == {max(steps) + 13.0}


def test_join_contributes_the_last_steps_once() -> None:
    """Rank 1 stops after 6 steps: its last 2 weigh a third in the mean after step 8, and nothing after step 12."""

    def go(comm: Communicator) -> list[list[Tensor]]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        history = []
        strategy = "diloco(every=4, outer_lr=1.0, outer_momentum=0.0)"
        with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync, sync.join():
            for step in range(13 if comm.rank == 0 else 6):
                step_once(model, optimizer, comm.rank, step)
                history.append(params_of(model))
        return history

    first, second = run_ranks(2, go)
    replicas = [build(), build()]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.05) for replica in replicas]
    for step in range(13):
        for rank in range(2 if step < 6 else 1):
            step_once(replicas[rank], optimizers[rank], rank, step)
        if step in (3, 7):
            share = 4 / (8 if step == 3 else 6)
            with torch.no_grad():
                for param, other in zip(replicas[0].parameters(), replicas[1].parameters(), strict=True):
                    param.copy_(share * param + (1 - share) * other)
                    other.copy_(param)
        assert close(first[step], params_of(replicas[0])), step
    assert len(second) == 6


def test_exchange_refuses_nan_on_all_ranks_and_keeps_the_anchors() -> None:
    def go(comm: Communicator) -> tuple[str, bool]:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=2, fragments=2, overlap=1)", comm=comm) as sync:

            def train_with_nan() -> None:
                for step in range(8):
                    step_once(model, optimizer, comm.rank, step)
                    if comm.rank == 1 and step == 2:
                        with torch.no_grad():
                            next(model.parameters()).fill_(float("nan"))

            with pytest.raises(gradsync.NonFiniteGradient) as refused:
                train_with_nan()
            kept = sync._engine.strategy._exchange.anchors  # type: ignore[attr-defined]
            return str(refused.value), all(bool(value.isfinite().all()) for value in kept.values())

    for message, finite in run_ranks(2, go):
        assert "NaN or inf on some rank" in message
        assert finite


def test_exchange_headers_name_the_rank_out_of_step() -> None:
    def go(comm: Communicator) -> str:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=2)", comm=comm) as sync:
            step_once(model, optimizer, comm.rank, 0)
            with pytest.raises(gradsync.OutOfStep) as error:
                sync.settle() if comm.rank == 2 else step_once(model, optimizer, comm.rank, 1)
            return str(error.value)

    for message in run_ranks(3, go):
        assert message.startswith("rank 2 is out of step: its number of steps is 1, that of the others 2")


def test_pending_exchange_reports_a_lost_peer_in_the_next_step() -> None:
    def go(comm: Communicator) -> int | None:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=8, fragments=2, overlap=3)", comm=comm) as sync:
            for step in range(12):
                if comm.rank == 1 and step == 2:
                    return None
                try:
                    step_once(model, optimizer, comm.rank, step)
                except gradsync.PeerLost as lost:
                    return lost.rank if step == 4 else None  # before step 7, after which it would be applied
                if step == 3:
                    sync._engine.strategy._pending.abandon(10.0)  # type: ignore[attr-defined]
        return None

    assert run_ranks(2, go) == [1, None]
