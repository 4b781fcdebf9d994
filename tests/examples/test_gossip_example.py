"""The example of training without a centre: all end with one model, which has learnt."""

from __future__ import annotations

from tests.examples.test_unequal import run_example
from tests.ranks import run_processes


def test_gossip() -> None:
    zero, one = run_processes(2, run_example, "gossip.py", ["--steps", "80", "--topology", "ring"])
    losses = [float(told.split("loss ")[1].split(",")[0]) for told in (zero, one)]
    assert losses[0] == losses[1] < 0.1, "it began near 1"
    assert "living [0, 1]" in zero
