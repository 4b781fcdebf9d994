"""Specs and arguments of parameter_server: round trips, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import spec
from gradsync.comm.base import Solo
from gradsync.messaging.key_folder import make_key_folder, server_keys
from gradsync.strategies.parameter_server import strategy as parameter_server
from gradsync.strategies.parameter_server.server.server import Server

BSP = "parameter_server"


@pytest.mark.parametrize(
    "text",
    [
        "parameter_server",
        "parameter_server(staleness=3)",
        "parameter_server(staleness=None, push_every=4, pull_every=2)",
        "parameter_server(staleness=None, staleness_policy=scale)",
        "parameter_server(staleness=2, staleness_policy=drop(older_than=4))",
        "parameter_server(backup=1, clip_norm=1.0, codec=int8, mirrors=1, snapshot_every=10)",
        "parameter_server(servers=['tcp://127.0.0.1:5555'], keys='keys')",
        "parameter_server(servers=['tcp://[::1]:5555'], open=True)",
    ],
)
def test_spec_survives_the_round_trip(text: str) -> None:
    assert spec.render(spec.parse(text)) == text


def test_spec_accepts_a_policy_in_quotes() -> None:
    made = spec.parse("parameter_server(staleness=None, staleness_policy='scale')")
    assert spec.render(made) == "parameter_server(staleness=None, staleness_policy=scale)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": -1}, "staleness is 0"),
        ({"push_every": 2}, "would break the bound"),
        ({"staleness": None, "pull_every": 0}, "are 1 or more"),
        ({"staleness_policy": "scale"}, "no gradient is stale"),
        ({"staleness": 1, "backup": 1}, "backup is for staleness=0"),
        ({"mirrors": 2}, "mirrors of 0 or 1"),
        ({"clip_norm": 0.0}, "above 0"),
        ({"servers": []}, "names no server"),
        ({"servers": ["tcp://127.0.0.1:1"]}, "servers= needs the keys that the servers have"),
        ({"keys": "folder", "open": True}, "keys restrict who may connect, and open=True does not"),
        (
            {"staleness": None, "staleness_policy": lambda tau: 1.0, "servers": ["tcp://127.0.0.1:1"]},
            "functions do not go to a server",
        ),
    ],
)
def test_parameter_server_refuses_invalid_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradsync.strategies.ParameterServer(**options)


def test_synchronize_refuses_sparse_gradients_and_a_single_mirrored_server() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(ValueError, match="weight has sparse ones"):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), BSP)
    dense = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="needs another server"):
        gradsync.synchronize(dense, torch.optim.SGD(dense.parameters(), lr=0.1), "parameter_server(mirrors=1)")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_synchronize_refuses_layers_whose_forward_changes_their_weights(
    kind: type[nn.Embedding | nn.EmbeddingBag],
) -> None:
    model = nn.Sequential(kind(4, 2, max_norm=1.0))
    with pytest.raises(ValueError, match=r"'0' with max_norm=1\.0.*max_norm=None, or use allreduce"):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), BSP)
    without = nn.Sequential(kind(4, 2))
    gradsync.synchronize(without, torch.optim.SGD(without.parameters(), lr=0.1), BSP).close()


def test_default_servers_bring_their_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launchers, scripts = tmp_path / "launchers", tmp_path / "scripts"
    make_key_folder(launchers)
    make_key_folder(scripts)
    server = Server(0, keys=server_keys(launchers)).start()
    monkeypatch.setattr(parameter_server, "_default_servers", (server.address,))
    monkeypatch.setattr(parameter_server, "_default_keys", str(launchers))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        strategy = gradsync.ParameterServer(keys=str(scripts))
        with gradsync.synchronize(model, optimizer, strategy, comm=Solo(timeout_s=5)) as sync:
            assert sync.stats()["servers"] == [server.address]
    finally:
        server.close()
