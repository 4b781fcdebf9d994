"""Servers keep the last run's weights: the next run gets them only with ``resume=True``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.strategies.parameter_server.server.server import Server
from gradsync.testing import run_ranks


def run(comm: Communicator, addresses: list[str], *, begin: float, resume: bool = False) -> tuple[float, float]:
    """The weights at the begin and end of a run of which each step subtracts 1."""
    model = nn.Linear(1, 2, bias=True).double()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(begin)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = gradsync.ParameterServer(servers=addresses, resume=resume, open=True)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm):
        began = float(model.bias.detach()[0])
        for _ in range(2):
            optimizer.zero_grad()
            sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        return began, float(model.bias.detach()[0])


@pytest.mark.parametrize("world", [1, 2])
def test_server_refuses_the_next_run_without_resume(world: int) -> None:
    serving = [Server(shard).start() for shard in range(2)]
    addresses = [server.address for server in serving]
    try:
        assert run_ranks(world, lambda comm: run(comm, addresses, begin=5.0)) == [(5.0, 3.0)] * world

        def refused(comm: Communicator) -> None:
            with pytest.raises(gradsync.RefusedByServer, match=r"an earlier run, after 2 updates.*resume=True"):
                run(comm, addresses, begin=100.0)

        run_ranks(world, refused)
        resumed = run_ranks(world, lambda comm: run(comm, addresses, begin=100.0, resume=True))
        assert resumed == [(3.0, 1.0)] * world
    finally:
        for server in serving:
            server.close()


def test_server_restored_from_a_snapshot_refuses_the_next_run(tmp_path: Path) -> None:
    server = Server(0, snapshots=tmp_path).start()
    run_ranks(1, lambda comm: run(comm, [server.address], begin=5.0))
    server.close()
    again = Server(0, snapshots=tmp_path).start()
    try:
        with pytest.raises(gradsync.RefusedByServer, match="an earlier run"):
            run_ranks(1, lambda comm: run(comm, [again.address], begin=5.0))
    finally:
        again.close()
