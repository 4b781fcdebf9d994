"""Hosted shards: the address that ranks publish, and the limit of a host's memory."""

from __future__ import annotations

import dataclasses
import mmap
import os

import pytest

from gradsync.comm.base import Solo
from gradsync.comm.rendezvous import find_launch_info
from gradsync.errors import RefusedByServer
from gradsync.strategies.parameter_server import hosting
from gradsync.strategies.parameter_server.client import Client
from gradsync.strategies.parameter_server.job import Param, hyperparameters
from gradsync.strategies.parameter_server.server.server import Server
from tests.strategies.parameter_server.trainer import Trainer, addresses_of, servers


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hosting, "own_addresses", lambda: ["192.0.2.1"])
    return monkeypatch


def test_reachable_address_accepts_ipv6_in_brackets(environ: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1]", "MASTER_PORT": "29500"}.items():
        environ.setenv(name, value)
    address = hosting._reachable_address(Solo())
    assert address == "::1"
    server = Server(0, host=address).start()
    try:
        assert "[::1]:" in server.address
    finally:
        server.close()


def test_reachable_address_needs_no_environment_of_a_launcher(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK is not"):
        find_launch_info()
    assert hosting._reachable_address(Solo()) == "192.0.2.1"
    environ.setenv("MASTER_ADDR", "127.0.0.1")
    assert hosting._reachable_address(Solo()) == "127.0.0.1"


def test_server_needs_memory_for_its_own_shard_only() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with servers(1) as started:
        trainer = Trainer(0, addresses_of(started), num_workers=1)
        groups = hyperparameters(trainer.optimizer)
        large = Param("large", (memory // 4 + 1,), "float32", 0)
        job = dataclasses.replace(trainer.job, params=(large, *trainer.job.params))
        client = Client(0, addresses_of(started), job, timeout_s=10.0)
        try:
            with pytest.raises(RefusedByServer, match=r"expected a shard that fits .* Use more servers"):
                client.join(trainer.params, groups)
        finally:
            client.close()
            trainer.client.close()
        assert started[0].malformed == 0
        service = started[0]._make_service(1, job, 2, groups)  # the large parameter is shard 0's
        assert service.index == 1
