"""The char_lm example: one and two workers train alike, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import GRADSYNC, run_launched
from tests.support.ranks import run_processes

PROJECT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = PROJECT / "examples/char_lm.py"
SMALL = ["--batch", "6", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--steps"]


def run_example(arguments: list[str]) -> None:
    if os.environ["WORLD_SIZE"] == "1":  # as `python examples/char_lm.py` would run it: no launcher is seen
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def train_without_launcher(out: Path, steps: int, *more: str, workers: int = 2) -> dict[str, Any]:
    """Train in workers without the launcher: starting it takes most of the time, and is tested once."""
    run_processes(workers, run_example, [*SMALL, str(steps), *more, "--json", str(out)], timeout_s=100)
    log: dict[str, Any] = json.loads(out.read_text())
    return log


def compare(one: Path, other: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "examples/compare_runs.py"), str(one), str(other)]
    return subprocess.run(command, timeout=180, capture_output=True, text=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two workers that train six steps without a stop, started by the launcher."""
    out = tmp_path_factory.mktemp("uninterrupted") / "two.json"
    command = [*GRADSYNC, "run", "-n", "2", str(EXAMPLE), *SMALL, "6", "--json", str(out)]
    done = run_launched(command, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return out


def test_char_lm_two_workers_train_like_one_process(uninterrupted: Path, tmp_path: Path) -> None:
    one, two = train_without_launcher(tmp_path / "one.json", 6, workers=1), json.loads(uninterrupted.read_text())
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-4)
    assert one["losses"][-1] < one["losses"][0]
    shown = compare(tmp_path / "one.json", uninterrupted)
    assert shown.returncode == 0, shown.stderr
    assert "2 workers" in shown.stdout


def test_char_lm_resumed_run_equals_uninterrupted_run(uninterrupted: Path, tmp_path: Path) -> None:
    train_without_launcher(tmp_path / "half.json", 3, "--checkpoint", str(tmp_path / "half.pt"))
    rest = train_without_launcher(tmp_path / "rest.json", 6, "--resume", str(tmp_path / "half.pt"))
    unstopped = json.loads(uninterrupted.read_text())
    assert rest["losses"] == unstopped["losses"][3:]
    assert rest["eval_loss"] == unstopped["eval_loss"]


@pytest.mark.parametrize("wrong", [2.5, float("nan")])
def test_compare_runs_reports_different_losses(tmp_path: Path, wrong: float) -> None:
    log = {"world_size": 1, "batch": 4, "losses": [3.0, 2.0], "step_s": [0.1, 0.1], "eval_loss": 2.0}
    (tmp_path / "one.json").write_text(json.dumps(log))
    (tmp_path / "two.json").write_text(json.dumps({**log, "losses": [3.0, wrong]}))
    assert compare(tmp_path / "one.json", tmp_path / "one.json").returncode == 0
    shown = compare(tmp_path / "one.json", tmp_path / "two.json")
    assert shown.returncode != 0
    assert "DOES NOT AGREE" in shown.stdout
