"""``gradsync compare``: two real runs of an unchanged script, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradsync.cli.main import main
from tests.launching import launch_instead_of_starting

SCRIPT = """
import sys, torch, gradsync
model = torch.nn.Linear(300, 40)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
sync = gradsync.synchronize(model, optimizer)
torch.manual_seed(sync.rank)
while True:                                   # it would never end by itself
    x = torch.randn(8, 300)
    optimizer.zero_grad()
    (model(x) - x[:, :40]).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments], prog_name="gradsync")


def test_each_runs_as_long_and_one_that_fails_leaves_the_others(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_instead_of_starting(monkeypatch)
    output = tmp_path / "report.html"
    specs = "allreduce(codec=fp16); onebit_adam"
    result = compare("-n", "2", script, "--sync", specs, "--steps", "6", "--output", str(output), "--", "0.1")
    assert result.exit_code == 1, "one of them failed"
    assert "onebit_adam goes with Adam or AdamW; got SGD" in result.output
    assert "A loss counts as reached in the first tenth" in result.output, "what a column means is said with it"
    figures = json.loads(output.with_suffix(".json").read_text())
    good, failed = figures["runs"]
    assert good["steps"] == 6
    assert good["bytes_per_step"] == pytest.approx(2 * 300 * 40, rel=0.05)
    assert len(figures["curves"]["allreduce(codec=fp16)"]["loss"]) == 6
    assert all(loss > 0 for loss in figures["curves"]["allreduce(codec=fp16)"]["loss"])
    assert failed["failure"]
    assert "{{" not in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sync", "allreduce", "SCRIPT"], "Missing option '-n'"),
        (["-n", "2", "SCRIPT"], "Missing option '--sync'"),
        (["-n", "2", "--sync", ";", "SCRIPT"], "strategies with"),
        (["-n", "2", "--sync", "allreduce; allreduce", "SCRIPT"], "strategies that differ"),
        (["-n", "2", "--sync", "allreduce; alreduce", "SCRIPT"], "alreduce"),
        (["-n", "2", "--sync", "allreduce", "--link", "fast", "SCRIPT"], "such as 100mbit"),
        (["-n", "1", "--sync", "allreduce", "--link", "1gbit", "SCRIPT"], "at least 2 workers"),
        (["-n", "2", "--sync", "allreduce", "--steps", "1", "SCRIPT"], "1 is not in the range"),
        (["-n", "2", "--sync", "allreduce", "nowhere.py"], "there is no file 'nowhere.py'"),
        (["-n", "2", "--sync", "allreduce", "--output", "/no/where.html", "SCRIPT"], "there is no folder /no"),
    ],
)
def test_a_mistake_is_said_before_anything_runs(arguments: list[str], said: str, script: str) -> None:
    result = compare(*[script if word == "SCRIPT" else word for word in arguments])
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.output.split())


def test_a_lab_that_can_not_be_had_is_said(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.cli.compare.why_unavailable", lambda: "a lab needs root")
    result = compare("-n", "2", "--sync", "allreduce", "--link", "1gbit", script)
    assert result.exit_code == 1
    assert "a lab needs root" in result.output
