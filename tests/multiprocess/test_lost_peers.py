"""Dead, frozen and late peers: every survivor raises PeerLost with the right rank, in time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from tests.support.ranks import run_processes

pytestmark = pytest.mark.alone  # it measures how late a loss is noticed

TIMEOUT_S = 2.5
LATEST_S = TIMEOUT_S + 2.0
TRANSPORTS = ("tcp", "shm")


def assert_survivors_name(outcomes: list[Any], lost: int) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == lost:
            continue
        assert isinstance(outcome, tuple), f"rank {rank}: {outcome!r}"
        ranks, _, waited_s, text = outcome
        assert ranks == (lost,), text
        assert waited_s <= LATEST_S, f"rank {rank} took {waited_s:.1f} s to say: {text}"


def train(
    transport: str, rank_to_strike: int, how: str, strike_step: int, strategy: str = "allreduce"
) -> tuple[tuple[int, ...], int | None, float, str] | None:
    """Train until a peer is lost; returns what PeerLost said, and its time since the start of the step."""
    comm = gradsync.connect(transport, timeout_s=TIMEOUT_S)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradsync.synchronize(model, optimizer, strategy, bucket_bytes=200_000, first_bucket_bytes=100_000)
    x = torch.randn(8, 200)

    def strike_in_mid_step(grad: torch.Tensor) -> None:
        sync._engine._headers(block=True)  # all ranks have begun this step: none is still in the one before
        strike(how)

    last_s = time.monotonic()
    try:
        for step in range(strike_step + 5):
            last_s = time.monotonic()
            if comm.rank == rank_to_strike and step == strike_step:
                # In mid-step: some buckets are on their way, the others will never be sent.
                model[2].weight.register_hook(strike_in_mid_step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    except gradsync.PeerLost as lost:
        return lost.ranks, lost.step, time.monotonic() - last_s, str(lost)
    return None


def strike(how: str) -> None:
    if how == "exception":
        raise RuntimeError("a planted failure")
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


KILLED = [(transport, *ranks) for transport in TRANSPORTS for ranks in ((2, 1), (3, 0), (4, 2), (4, 3))]


@pytest.mark.parametrize(("transport", "world", "victim"), [*KILLED, ("c10d", 3, 0)])
def test_every_survivor_names_a_killed_worker(transport: str, world: int, victim: int) -> None:
    outcomes = run_processes(world, train, transport, victim, "kill", 3, timeout_s=40, expect_failure=True)
    assert outcomes[victim] == -signal.SIGKILL
    assert_survivors_name(outcomes, victim)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert isinstance(outcome, tuple)
            assert outcome[1] == 3, "it says the step"


@pytest.mark.parametrize("world", [2, 3])  # in one stage, and in two
@pytest.mark.parametrize("how", ["kill", "exception"])
def test_every_survivor_names_a_lost_worker_with_compressed_gradients(world: int, how: str) -> None:
    outcomes = run_processes(world, train, "tcp", 1, how, 3, "allreduce(codec=int8)", timeout_s=40, expect_failure=True)
    assert_survivors_name(outcomes, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_survivor_names_a_worker_that_raises(transport: str) -> None:
    outcomes = run_processes(3, train, transport, 1, "exception", 2, timeout_s=40, expect_failure=True)
    assert_survivors_name(outcomes, 1)


@pytest.mark.parametrize(("transport", "victim"), [("tcp", 0), ("c10d", 2), ("shm", 1)])
def test_every_survivor_names_a_frozen_worker(transport: str, victim: int) -> None:
    outcomes = run_processes(3, train, transport, victim, "freeze", 2, timeout_s=TIMEOUT_S + 4, expect_failure=True)
    assert_survivors_name(outcomes, victim)


def be_late(transport: str, late: int) -> tuple[tuple[int, ...], int | None, float, str] | None:
    comm = gradsync.connect(transport, timeout_s=TIMEOUT_S)
    start_s = time.monotonic()
    try:
        if comm.rank == late:
            time.sleep(TIMEOUT_S + 3)
        comm.all_reduce(torch.ones(10)).wait()
    except gradsync.PeerLost as lost:
        return lost.ranks, lost.step, time.monotonic() - start_s, str(lost)
    return None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_names_a_late_worker_and_so_does_it_itself(transport: str) -> None:
    outcomes = run_processes(3, be_late, transport, 1, timeout_s=40, expect_failure=True)
    assert_survivors_name(outcomes, 1)
    assert isinstance(outcomes[1], tuple)
    assert "gave this rank up" in outcomes[1][3]


def uneven_without_join(transport: str) -> str:
    comm = gradsync.connect(transport, timeout_s=TIMEOUT_S)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradsync.synchronize(model, optimizer)
    try:
        for _ in range(5 if comm.rank == 0 else 3):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
    except gradsync.PeerLost as lost:
        return str(lost)
    return "finished"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_peer_lost_suggests_join_for_uneven_batches(transport: str) -> None:
    outcomes = run_processes(2, uneven_without_join, transport, timeout_s=40)
    assert "different numbers of batches" in outcomes[0]
    assert "sync.join()" in outcomes[0]
    assert outcomes[1] == "finished"


def different_models() -> str:
    comm = gradsync.connect(timeout_s=TIMEOUT_S)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1 if comm.rank < 2 else 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        gradsync.synchronize(model, optimizer)
    except gradsync.OutOfStep as error:
        return str(error)
    return "no error"


def test_synchronize_refuses_different_models() -> None:
    outcomes = run_processes(3, different_models, timeout_s=40)
    assert outcomes == [outcomes[0]] * 3
    assert "parameter 1.weight" in outcomes[0]
    assert "rank 2" in outcomes[0]
    assert "(2, 4)" in outcomes[0]


def skip_a_backward_on_one_rank() -> str:
    comm = gradsync.connect(timeout_s=TIMEOUT_S)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradsync.synchronize(model, optimizer)
    try:
        for step in range(4):
            optimizer.zero_grad()
            if not (comm.rank == 1 and step == 2):
                model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
        comm.barrier()
    except gradsync.GradSyncError as error:
        return str(error)
    return "no error"


def test_skipped_backward_raises_out_of_step_and_does_not_hang() -> None:
    outcomes = run_processes(2, skip_a_backward_on_one_rank, timeout_s=40)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith("rank 1 is out of step: its number of calls of optimizer.step()")
