"""bench_convergence: a short run of two workers, and known losses give known verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import bench_convergence
from benchmarks.bench_convergence import curves, main, summarize
from tests.examples.test_char_lm import run_example
from tests.support.launching import launch_gradsync_by_fork
from tests.support.ranks import run_processes

SPECS = ["allreduce", "allreduce(codec=int8)"]
SMALL = "--batch 4 --layers 1 --width 64 --heads 2 --context 16"


def test_bench_convergence_writes_a_table_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_gradsync_by_fork(monkeypatch)
    launch = bench_convergence.launch

    def launch_one(script: list[str], options: Any, *, sync: str) -> None:
        """The example's own strategy needs no launcher; starting its workers would take most of the time."""
        if sync == SPECS[0]:
            run_processes(options.workers, run_example, script[1:], timeout_s=180)
        else:
            launch(script, options, sync=sync)

    monkeypatch.setattr(bench_convergence, "launch", launch_one)
    text = tmp_path / "text"
    text.write_bytes(b"one two three " * 2400)
    asked = ["--specs", "; ".join(SPECS), "--steps", "3", "--seeds", "5", "--data", str(text)]
    main([*asked, "--model", SMALL, "--timeout-s", "50", "--output", str(tmp_path)])
    shown = capsys.readouterr().out
    for expected in (*SPECS, "+0.00 %", "+0.3 %", "3 steps, 2 workers"):
        assert expected in shown
    (written,) = tmp_path.glob("*-convergence.json")
    report = json.loads(written.read_text())
    exact, int8 = (report["curves"][spec] for spec in SPECS)
    assert exact["steps"] == int8["steps"] == [1, 2, 3]
    assert exact["loss"] != int8["loss"]
    assert exact["loss"] == pytest.approx(int8["loss"], rel=0.01)
    assert [len(report["losses"][spec]["5"]) for spec in SPECS] == [3, 3]
    sent = [report["summary"][spec]["sent_bytes_per_step"] for spec in SPECS]
    assert 3 < sent[0] / sent[1] < 4
    texts = [element.text for element in ElementTree.parse(written.with_suffix(".svg")).iter() if element.text]
    for expected in (*SPECS, "steps", "seconds of training", "MB sent by a worker"):
        assert expected in texts


def _log(loss: float, *, steps: int = 4, sent: int = 100) -> dict[str, Any]:
    return {
        "losses": [loss] * steps,
        "step_s": [0.5] * steps,
        "sent_bytes": [sent] * steps,
        "evals": [[2, 2 * loss], [4, loss]],
        "eval_loss": loss,
    }


@pytest.mark.parametrize(
    ("losses", "percent", "verdict"),
    [
        ([1.0, 2.0, 3.0], 0.0, "met"),
        ([0.9, 2.0, 3.0], -100 / 60, "met"),
        ([1.0, 2.0, 3.015], 0.25, "met"),
        ([1.0, 2.0, 3.03], 0.5, "missed"),
        ([1.0, 2.0, float("nan")], float("nan"), "missed"),
    ],
)
def test_bench_convergence_judges_by_the_mean_of_the_seeds(losses: list[float], percent: float, verdict: str) -> None:
    exact = {seed: _log(loss) for seed, loss in enumerate([1.0, 2.0, 3.0])}
    row = summarize({"allreduce": exact, SPECS[1]: {seed: _log(loss) for seed, loss in enumerate(losses)}})[SPECS[1]]
    assert row["percent_above_first"] == pytest.approx(percent, nan_ok=True)
    assert row["verdict"] == verdict
    assert summarize({"allreduce": exact, "other": exact})["other"]["verdict"] == ""


def test_bench_convergence_averages_curves_at_each_evaluation() -> None:
    assert curves({0: _log(1.0, sent=100), 1: _log(3.0, sent=300)}) == {
        "steps": [2, 4],
        "seconds": [1.0, 2.0],
        "bytes": [400.0, 800.0],
        "loss": [4.0, 2.0],
    }


def test_bench_convergence_resumes_a_stopped_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []

    def train(text: str, seed: int, options: Any) -> dict[str, Any]:
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((text, seed))
        return _log(1.0 + seed, steps=options.steps)

    def call(*more: str) -> list[tuple[str, int]]:
        trained.clear()
        main([*asked, *more])
        return trained

    monkeypatch.setattr(bench_convergence, "train", train)
    data = tmp_path / "text"
    data.write_text("one")
    asked = ["--specs", "; ".join(SPECS), "--seeds", "0,1", "--steps", "4", "--data", str(data), "--no-save"]
    asked += ["--runs", str(tmp_path / "runs")]
    with pytest.raises(KeyboardInterrupt):
        call()
    assert call() == [(SPECS[1], 1)], "the three that were finished are kept"
    assert call() == []
    assert call("--seeds", "0") == []
    for other in (["--steps", "8"], ["--workers", "3"], ["--model", "--width 64"], ["--eval-every", "2"]):
        assert call(*other, "--seeds", "0") == [(text, 0) for text in SPECS], "they were kept under other settings"
    assert call("--seeds", "0") == [(text, 0) for text in SPECS], "the last settings' runs took their place"
    data.write_text("two")
    assert call("--seeds", "0") == [(text, 0) for text in SPECS], "it is another text by the same name"


def test_bench_convergence_refuses_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "allreduce 0.json").write_text('{"run"')
    with pytest.raises(SystemExit, match=r"allreduce 0\.json holds no run that was kept: .* Remove it\."):
        main(["--specs", "allreduce", "--seeds", "0", "--runs", str(tmp_path), "--no-save"])


def test_bench_convergence_reports_a_failed_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails = """sh -c 'echo "$@" >&2; exit 3' sh"""  # in place of the launcher: how that fails is tested with it
    asked = ["--specs", "allreduce", "--seeds", "0", "--model", "--breadth 3", "--under", fails]
    with pytest.raises(SystemExit, match=r"allreduce, seed 0: .*code 3"):
        main([*asked, "--output", str(tmp_path)])
    assert "--sync allreduce" in (said := capfd.readouterr().err)
    assert "--breadth 3" in said
