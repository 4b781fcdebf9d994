"""A separate process joins a running parameter_server job, and contributes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradsync
from gradsync import spec
from gradsync.messaging.key_folder import make_key_folder, server_keys
from gradsync.strategies.parameter_server.server.server import Server
from tests.support.ranks import run_processes

PATIENCE_S = 30.0


def wait_for(folder: Path, what: str, count: int = 1) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(list(folder.glob(f"{what}*"))) < count:
        assert time.monotonic() < end_s, f"{count} x {what} did not come"
        time.sleep(0.01)


def run_two_workers_and_a_late_joiner(strategy: str, folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 are a run of two; the third process is started separately, and only knows the servers' address."""
    number, signals = int(os.environ["RANK"]), Path(folder)
    if number < 2:
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        wait_for(signals, "under-way-", 2)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = gradsync.connect(timeout_s=PATIENCE_S)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync:
        began_at = model.weight.item()
        for _ in range(5 if number < 2 else 3):
            optimizer.zero_grad()
            model.weight.sum().backward()  # the gradient is 1: the weight counts the pushes
            optimizer.step()
        (signals / f"under-way-{number}").touch()
        wait_for(signals, "under-way-", 3)
        sync.settle()
        outcome = {"began": began_at, "ends": model.weight.item(), "clocks": sync.stats()["clocks"]}
        (signals / f"looked-{number}").touch()
        wait_for(signals, "looked-", 3)  # the clocks no longer include a worker that has left
        return outcome


def test_late_joiner_gets_the_current_weights_and_contributes(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    make_key_folder(keys)
    server = Server(keys=server_keys(keys)).start()
    strategy = spec.render(gradsync.strategies.ParameterServer(staleness=None, servers=[server.address], keys=keys))
    outcomes = run_processes(3, run_two_workers_and_a_late_joiner, strategy, str(tmp_path))
    server.close()
    assert outcomes[2]["began"] == -10.0, "it begins with the current weights"
    for outcome in outcomes:
        assert outcome["ends"] == -13.0
        assert sorted(outcome["clocks"]) == [0, 1, 2]
