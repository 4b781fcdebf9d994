"""The parameter server as a text, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import spec

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
    ],
)
def test_a_spec_is_read_and_written_back(text: str) -> None:
    assert spec.render(spec.parse(text)) == text


def test_a_policy_may_be_named_in_quotes() -> None:
    made = spec.parse("parameter_server(staleness=None, staleness_policy='scale')")
    assert spec.render(made) == "parameter_server(staleness=None, staleness_policy=scale)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": -1}, "staleness is 0"),
        ({"push_every": 2}, "would break the bound"),
        ({"staleness": None, "pull_every": 0}, "are 1 or more"),
        ({"staleness_policy": "scale"}, "no gradient is late"),
        ({"staleness": 1, "backup": 1}, "backup is for staleness=0"),
        ({"mirrors": 2}, "mirrors of 0 or 1"),
        ({"clip_norm": 0.0}, "above 0"),
        ({"servers": []}, "names no server"),
        (
            {"staleness": None, "staleness_policy": lambda tau: 1.0, "servers": ["tcp://127.0.0.1:1"]},
            "functions do not go to a server",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradsync.strategies.ParameterServer(**options)


def test_what_it_can_not_serve_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(ValueError, match="weight has sparse ones"):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), BSP)
    dense = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="needs another server"):
        gradsync.synchronize(dense, torch.optim.SGD(dense.parameters(), lr=0.1), "parameter_server(mirrors=1)")
