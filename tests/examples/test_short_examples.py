"""The short examples: unequal workers, lock-free workers, gossip, a sharded optimizer, and the parameter server."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from examples.parameter_server import main
from tests.support.ranks import run_processes

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run_example(name: str, arguments: list[str]) -> str:
    """Run an example in this process; returns what it prints."""
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def test_balance_example_gives_a_slow_worker_less() -> None:
    printed_by_0, printed_by_1 = run_processes(2, run_example, "balance.py", ["--epochs", "1", "--nap-ms", "0.3"])
    assert "epoch 0: " in printed_by_0
    assert printed_by_1 == ""
    fast, slow = (int(part) for part in printed_by_0.split("parts (")[1].split(")")[0].split(","))
    assert fast + slow == 52
    assert fast > slow


def test_hogwild_example_learns() -> None:
    printed_by_0, printed_by_1 = run_processes(2, run_example, "hogwild.py", ["--steps", "300"])
    assert "updates [300, 300]" in printed_by_0
    assert printed_by_1 == ""
    assert float(printed_by_0.split("%")[0]) > 65.0, "half of it would be by chance"


def test_gossip_example_ends_with_one_model() -> None:
    zero, one = run_processes(2, run_example, "gossip.py", ["--steps", "80", "--topology", "ring"])
    losses = [float(printed.split("loss ")[1].split(",")[0]) for printed in (zero, one)]
    assert losses[0] == losses[1] < 0.1, "it began near 1"
    assert "living [0, 1]" in zero


def test_sharded_example_keeps_half_of_the_state() -> None:
    printed_by_0, printed_by_1 = run_processes(2, run_example, "sharded.py", ["--steps", "60"])
    assert float(printed_by_0.split("%")[0]) > 30.0, "a tenth of it would be by chance"
    assert "optimizer state: 1.2 of 2.4 MB" in printed_by_0
    assert printed_by_1 == ""


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server(staleness=None, staleness_policy=scale)"])
def test_parameter_server_example_trains_and_prints_staleness(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--strategy", strategy, "--steps", "60", "--slow-ms", "0"]
    monkeypatch.setattr(sys, "argv", ["parameter_server.py", *options])
    main()
    shown = capsys.readouterr().out
    assert float(shown.split()[1]) < 0.2
    assert "pushes of each worker: {0: 60}" in shown
