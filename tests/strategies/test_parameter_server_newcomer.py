"""A process of its own joins a parameter server's run that is under way, and contributes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradsync
from gradsync import spec
from gradsync.server.server import Server
from tests.ranks import run_processes

PATIENCE_S = 30.0


def wait_for(folder: Path, what: str, count: int = 1) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(list(folder.glob(f"{what}*"))) < count:
        assert time.monotonic() < end_s, f"{count} x {what} did not come"
        time.sleep(0.01)


def two_and_one_more(strategy: str, folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 are a run of two; the third process is started by itself, and knows but the servers' address."""
    number, signs = int(os.environ["RANK"]), Path(folder)
    if number < 2:
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        wait_for(signs, "under-way-", 2)
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
        (signs / f"under-way-{number}").touch()
        wait_for(signs, "under-way-", 3)
        sync.settle()
        outcome = {"began": began_at, "ends": model.weight.item(), "clocks": sync.stats()["clocks"]}
        (signs / f"looked-{number}").touch()
        wait_for(signs, "looked-", 3)  # who leaves is counted no more
        return outcome


def test_a_newcomer_in_a_process_of_its_own_joins_and_contributes(tmp_path: Path) -> None:
    server = Server().start()
    strategy = spec.render(gradsync.strategies.ParameterServer(staleness=None, servers=[server.address]))
    outcomes = run_processes(3, two_and_one_more, strategy, str(tmp_path))
    server.close()
    assert outcomes[2]["began"] == -10.0, "it begins with the weights of now"
    for outcome in outcomes:
        assert outcome["ends"] == -13.0
        assert sorted(outcome["clocks"]) == [0, 1, 2]
