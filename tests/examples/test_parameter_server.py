"""The example of the parameter server, in a world of one."""

from __future__ import annotations

import sys

import pytest

from examples.parameter_server import main


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server(staleness=None, staleness_policy=scale)"])
def test_it_trains_and_shows_how_stale_it_was(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--strategy", strategy, "--steps", "60", "--slow-ms", "0"]
    monkeypatch.setattr(sys, "argv", ["parameter_server.py", *options])
    main()
    shown = capsys.readouterr().out
    assert float(shown.split()[1]) < 0.2
    assert "pushes of each worker: {0: 60}" in shown
