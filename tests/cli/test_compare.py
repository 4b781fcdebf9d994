"""``gradsync compare``: two real runs of an unchanged script, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradsync.cli.main import main
from gradsync.compare import Curve, summarize
from gradsync.compare.page import headline
from gradsync.compare.summary import base_of
from tests.support.launching import launch_gradsync_by_fork

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


def test_compare_runs_each_strategy_and_survives_a_failure(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_gradsync_by_fork(monkeypatch)
    output = tmp_path / "report.html"
    specs = "allreduce(codec=fp16); onebit_adam"
    result = compare("-n", "2", script, "--sync", specs, "--steps", "6", "--output", str(output), "--", "0.1")
    assert result.exit_code == 1, "one of them failed"
    assert "onebit_adam requires Adam or AdamW; got SGD" in result.output
    said = " ".join(result.output.split())
    assert "A loss counts as reached in the first tenth" in said, "the table explains its columns"
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
def test_compare_refuses_bad_options_before_any_run(arguments: list[str], said: str, script: str) -> None:
    result = compare(*[script if word == "SCRIPT" else word for word in arguments])
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.output.split())


def test_compare_reports_an_unavailable_lab(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.cli.compare.lab_unavailable_reason", lambda: "a lab needs root")
    result = compare("-n", "2", "--sync", "allreduce", "--link", "1gbit", script)
    assert result.exit_code == 1
    assert "a lab needs root" in result.output


def test_compare_refuses_an_unwritable_output_before_any_run(script: str) -> None:
    result = compare("-n", "2", "--sync", "allreduce", "--output", "/proc/compare.html", script)
    assert result.exit_code == 2
    assert "/proc/compare.html can't be written" in result.output


def test_compare_prints_results_that_it_can_not_write(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "report.html"

    def run_one(*given: object, **named: object) -> Curve:
        output.mkdir()  # a folder of that name appears during the runs
        return curve([4.0, 3.0, 2.0, 1.0])

    monkeypatch.setattr("gradsync.cli.compare.run_one", run_one)
    result = compare("-n", "2", "--sync", "allreduce", "--output", str(output), script)
    assert result.exit_code == 1
    assert "loss at the end" in result.output
    assert f"{output} can't be written: Is a directory." in result.output


def curve(losses: list[float], *, pace: float = 1.0, not_yet: str = "") -> Curve:
    steps = tuple(range(1, len(losses) + 1))
    return Curve(steps, tuple(pace * at for at in steps), tuple(float(at) for at in steps), tuple(losses), not_yet)


def test_headline_names_the_winner_and_its_convergence() -> None:
    noisy = [4.0 + 0.1 * (-1) ** at for at in range(200)]
    curves = {
        "allreduce": curve(noisy),
        "allreduce(codec=int8)": curve([loss + 0.01 for loss in noisy], pace=0.5),
        "allreduce(codec=sign)": curve([loss + 0.4 for loss in noisy], pace=0.6),
        "onebit_adam": curve(noisy, pace=0.25, not_yet="still in its warm-up of 1000 steps, which are exact"),
    }
    base = base_of(curves)
    assert base[0] == "allreduce"
    rows = {text: summarize(text, each, target=None, base=base) for text, each in curves.items()}
    assert [row.convergence for row in rows.values()] == [
        "exact",
        "same loss within noise",
        "changes the training: loss 10 % above allreduce's",
        "not seen: still in its warm-up of 1000 steps, which are exact",
    ]
    runs = [row.as_dict() for row in rows.values()]
    assert headline(runs, None) == (
        "allreduce(codec=int8) has the shortest step: 2.00 times as fast as allreduce (same loss within noise). "
        "onebit_adam is not judged: still in its warm-up of 1000 steps, which are exact."
    )


def test_headline_leaves_out_runs_that_are_not_judged() -> None:
    why = "still in its warm-up of 1000 steps, which are exact"
    idle = summarize("onebit_adam", curve([4.0] * 9, not_yet=why), target=None).as_dict()
    slow = summarize("slow", curve([4.0] * 9), target=None).as_dict()
    fast = summarize("fast", curve([4.0] * 9, pace=0.5), target=None).as_dict()
    said = f"onebit_adam is not judged: {why}."
    assert headline([idle, slow, fast], None) == f"fast has the shortest step: 2.00 times as fast as slow. {said}"
    for judged in ([slow], []):
        nothing = headline([idle, *judged, idle], None)
        assert nothing.startswith("There is nothing to compare: fewer than two runs can be judged. " + said)
