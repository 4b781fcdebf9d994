"""The parameter_server strategy when a worker is killed: it is dropped, named in an error, or resumed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradsync
from tests.strategies.parameter_server.model import Net, batch, loss_of
from tests.support.ranks import run_processes

pytestmark = pytest.mark.alone  # it measures how long the detection of a loss takes

BSP = "parameter_server"


def killed_at_step_ten(strategy: str, victim: int, steps: int) -> tuple[float, list[float], dict[int, int]]:
    """The longest step in seconds, the weights, the clocks: of one rank of several, of which one is killed."""
    comm = gradsync.connect(timeout_s=20)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    longest_s = 0.0
    with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync:
        for step in range(steps):
            begun_s = time.monotonic()
            if comm.rank == victim and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, batch(step, comm.rank), step).backward()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - begun_s)
        clocks = sync.stats()["clocks"]
        sync.settle()
        return longest_s, model.second.bias.tolist(), clocks


def test_killed_worker_with_mirrored_shards_is_dropped() -> None:
    outcomes = run_processes(3, killed_at_step_ten, "parameter_server(mirrors=1)", 1, 30, expect_failure=True)
    assert outcomes[1] == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, tuple), outcome
        longest_s, weights, clocks = outcome
        assert longest_s < 10
        assert weights == outcomes[0][1]  # type: ignore[index]
        assert clocks.keys() == {0, 2}
        assert min(clocks.values()) >= 29


def test_killed_worker_without_mirrors_raises_server_lost() -> None:
    outcomes = run_processes(2, killed_at_step_ten, BSP, 1, 30, expect_failure=True)
    assert outcomes[1] == -signal.SIGKILL
    assert isinstance(outcomes[0], gradsync.ServerLost), outcomes[0]
    assert outcomes[0].shard == 1
    assert "shard 1" in str(outcomes[0])
    assert "mirrors=1" in str(outcomes[0])


def save_and_die(strategy: str, folder: str, steps: int) -> list[Tensor]:
    """Train to ``steps``, from a checkpoint if there is one, and save one on the way, after which rank 1 is killed."""
    comm = gradsync.connect(timeout_s=20)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    path = Path(folder) / f"{comm.rank}.pt"
    saved = torch.load(path) if path.exists() else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, buffers="none") as sync:
        if saved is not None:
            sync.load_state_dict(saved["sync"])
        for step in range(sync.stats()["step"], steps):
            optimizer.zero_grad()
            loss_of(model, batch(step, comm.rank), step).backward()
            optimizer.step()
            if step == 5 and saved is None and folder:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
                torch.save(state, path)
                comm.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        return [param.detach().clone() for param in model.parameters()]


def test_killed_run_resumes_bit_for_bit_from_its_checkpoint(tmp_path: Path) -> None:
    strategy = "parameter_server(codec={'second.*': int8})"
    whole = run_processes(2, save_and_die, strategy, "", 12)
    died = run_processes(2, save_and_die, strategy, str(tmp_path), 12, expect_failure=True)
    assert died == [-signal.SIGKILL] * 2
    resumed = run_processes(2, save_and_die, strategy, str(tmp_path), 12)
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
