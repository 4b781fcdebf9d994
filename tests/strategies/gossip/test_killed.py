"""Members that leave or are killed do not stop the rest, and a newcomer may take their place."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Solo
from gradsync.messaging.key_folder import make_key_folder
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Trial
from tests.support.ranks import run_processes

pytestmark = pytest.mark.alone  # it measures how late a loss is noticed


@pytest.mark.parametrize(
    "strategy", ["gossip(topology=test_lopsided)", "gossip(topology=ring, codec={'weight': int8})"]
)
def test_push_sum_weights_add_up_after_a_member_leaves(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[float, list[int], float] | None:
        trial = Trial(comm, strategy, torch.full((64,), float(comm.rank)).double())
        trial.step(3)
        if comm.rank == 1:
            trial.sync.close()
            return None
        trial.step(40)
        stats = trial.sync.stats()
        value = float(trial.values[0])
        with trial.sync.join():
            pass
        trial.sync.close()
        return stats["push_sum_weight"], stats["living"], value

    outcomes = [outcome for outcome in run_ranks(4, run) if outcome is not None]
    assert sum(weight for weight, _, _ in outcomes) == pytest.approx(3, abs=1e-12)
    assert [living for _, living, _ in outcomes] == [[0, 2, 3]] * 3
    values = [value for _, _, value in outcomes]
    assert max(values) - min(values) < 1e-3
    assert 0.5 < values[0] < 2.5


def train_until_killed(
    folder: str, victim: int, asynchronous: bool
) -> tuple[float, list[int], list[float], bool] | float:
    """Train with four processes, of which one is killed in mid-step and one joins afterwards."""
    world = gradsync.connect(timeout_s=20)
    comm = world.split([0, 1, 2])
    place = Path(folder) / "address"
    keys = Path(folder) / "keys"
    if world.rank == 0:
        make_key_folder(keys)
    world.barrier()
    strategy = f"gossip(topology=ring, asynchronous={asynchronous}, keys={str(keys)!r})"
    started = world.rank < 3
    if not started:
        end_s = time.monotonic() + 30
        while not place.exists():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        strategy = f"{strategy.removesuffix(')')}, join={place.read_text()!r})"
    model = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = gradsync.synchronize(model, optimizer, strategy, comm=comm or Solo(timeout_s=20))
    x = torch.randn(16, 200, generator=torch.Generator().manual_seed(world.rank))
    gaps, losses, last_s = [], [], time.monotonic()

    def step() -> None:
        nonlocal last_s
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        gaps.append(time.monotonic() - last_s)
        last_s = time.monotonic()

    for at in range(10 if started else 0):
        if world.rank == victim and at == 6:
            model[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        step()
    if started and world.rank == max(rank for rank in range(3) if rank != victim):
        place.with_suffix(".new").write_text(sync.stats()["address"])
        place.with_suffix(".new").rename(place)  # atomically
    end_s = time.monotonic() + 30
    while len(sync.stats()["living"]) < 3 or victim in sync.stats()["living"]:
        assert time.monotonic() < end_s, sync.stats()
        step()
    with sync.join():
        for _ in range(20):
            step()
    living = [
        member if member < 4 else 3 for member in sync.stats()["living"]
    ]  # the others wait in settle() for this rank
    sync.settle()
    weight = model[0].weight.detach()
    outcome = max(gaps), living, [float(weight.sum()), float(weight.abs().sum())], losses[-1] < losses[0]
    sync.close()
    return outcome


@pytest.mark.parametrize(("victim", "asynchronous"), [(0, False), (2, True)])
def test_gossip_continues_after_a_kill_and_admits_a_newcomer(tmp_path: Path, victim: int, asynchronous: bool) -> None:
    """Rank 0 too, at which all ranks have connected."""
    outcomes = run_processes(
        4, train_until_killed, str(tmp_path), victim, asynchronous, timeout_s=60, expect_failure=True
    )
    assert outcomes[victim] == -signal.SIGKILL
    rest = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in rest:
        assert isinstance(outcome, tuple), outcome
        longest_s, living, _, learnt = outcome
        assert longest_s < 2.0 + 1.0, "two seconds, and one more for a busy machine"
        assert living == [rank for rank in range(4) if rank != victim]
        assert learnt
    assert len({tuple(outcome[2]) for outcome in rest if isinstance(outcome, tuple)}) == 1, "settled to the same bits"
