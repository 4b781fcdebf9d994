"""bench_stragglers: a real run of its workers, and known measurements give known verdicts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import bench_stragglers
from benchmarks.bench_stragglers import joint_losses, largest_difference, main, parse, run_of, seconds_to, summarize
from benchmarks.workers import stragglers
from tests.support.ranks import run_processes

TITLES = ["allreduce", "allreduce, balance=True", "asynchronous"]


def _work(plan: str, folder: str) -> None:
    sys.argv = ["stragglers.py", "--plan", plan, "--out", folder]
    stragglers.main()


def test_straggler_worker_trains_and_reports(tmp_path: Path) -> None:
    text, plan = tmp_path / "text", tmp_path / "plan"
    text.write_bytes(b"one two three " * 2900)
    options = parse(["--seconds", "0.8", "--sample-ms", "4", "--batch", "4", "--width", "8", "--context", "8"])
    options.data = text
    contestants = bench_stragglers.CASES["permanent"].contestants[:2]
    plan.write_text(json.dumps([run_of(contestant, "permanent", 0, options) for contestant in contestants]))
    run_processes(2, _work, str(plan), str(tmp_path))
    exact, measured = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert largest_difference(joint_losses(measured), joint_losses(exact)) < bench_stragglers.EXACT_WITHIN
    fast, slow = measured["steps"]
    assert abs(len(fast) - len(slow)) <= 1
    assert len(measured["compute_s"]) == 2
    assert sum(measured["parts"]) == 8
    assert all(num_fast + num_slow == 8 for (_, num_fast, _), (_, num_slow, _) in zip(fast, slow, strict=False))
    times, losses = zip(*measured["evals"], strict=True)
    assert sorted(times) == list(times)
    assert losses[-1] < losses[0]


def measured_of(rate: float, losses: list[float], *, offset: float = 0.0) -> dict[str, Any]:
    """The measurements of two ranks that share a rate, after ten seconds."""
    steps = [[second + 1.0, round(rate / 2), 2.0 + offset] for second in range(10)]
    steps.append([10.5, 1000, 2.0 + offset])  # it ended too late to count
    return {
        "steps": [steps, steps],
        "evals": [[10.0 * at / (len(losses) - 1), loss] for at, loss in enumerate(losses)],
        "parts": [1, 1],
        "compute_s": [0.01, 0.01],
        "staleness": ["null", "null"],
    }


@pytest.mark.parametrize(
    ("title", "other", "verdict"),
    [
        ("asynchronous", measured_of(440, [5.0, 3.0, 1.0]), "met"),
        ("asynchronous", measured_of(436, [5.0, 3.0, 1.0]), "missed"),  # 2.18 times
        ("asynchronous", measured_of(440, [5.0, 4.9, 4.8]), "missed"),  # faster, but it never reaches the loss
        ("allreduce, balance=True", measured_of(320, [5.0, 3.0, 1.0]), "met"),
        ("allreduce, balance=True", measured_of(320, [5.0, 3.0, 1.0], offset=0.01), "missed"),  # not the same loss
        ("gossip", measured_of(200, [5.0, 5.0]), ""),  # it has no target
    ],
)
def test_bench_stragglers_verdict(title: str, other: dict[str, Any], verdict: str) -> None:
    runs = {"allreduce": {0: measured_of(200, [5.0, 4.0, 3.0])}, title: {0: other}}
    summary = summarize("permanent", runs, 10.0)
    assert summary["allreduce"]["samples_per_s"] == pytest.approx(200)
    assert summary["allreduce"]["ratio"] == 1.0
    assert summary[title]["verdict"] == verdict


def test_bench_stragglers_finds_when_a_loss_is_reached() -> None:
    evals = [[0.0, 5.0], [1.0, 4.0], [2.0, 2.0], [3.0, 3.0]]
    assert seconds_to(evals, 3.0) == 1.5
    assert seconds_to(evals, 6.0) == 0.0
    assert seconds_to(evals, 1.0) is None
    assert largest_difference([1.0, 2.0, 3.0], [1.0, 2.5]) == pytest.approx(0.2)


def test_bench_stragglers_writes_a_table_json_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = dict(zip(TITLES, (200, 400, 600), strict=True))
    by_title = {contestant.title: contestant for contestant in bench_stragglers.CASES["permanent"].contestants}
    trained: list[str] = []

    def train(plan: list[dict[str, Any]], options: Any) -> Iterator[dict[str, Any]]:
        for run in plan:
            title = next(title for title in TITLES if run_of(by_title[title], "permanent", 0, options) == run)
            trained.append(title)
            yield measured_of(rates[title], [5.0, 4.0, 3.0 if title == "allreduce" else 2.0])

    monkeypatch.setattr(bench_stragglers, "train", train)
    asked = ["--cases", "permanent", "--only", "; ".join(TITLES), "--seconds", "10", "--output", str(tmp_path)]
    asked += ["--runs", str(tmp_path / "runs")]
    main([*asked, "--only", TITLES[0], "--no-save"])
    main(asked)
    assert trained == TITLES, "what an earlier call has kept is not run again"
    main([*asked, "--workers", "3", "--no-save"])
    assert trained == 2 * TITLES, "it was kept under other settings"
    shown = capsys.readouterr().out
    for expected in (*TITLES, "2.00", "3.00", "≥ 2.2", "met", "5 ms of sleep"):
        assert expected in shown
    (written,) = tmp_path.glob("*-stragglers.json")
    report = json.loads(written.read_text())
    assert report["summary"]["permanent"]["asynchronous"]["ratio"] == 3.0
    texts = {element.text for element in ElementTree.parse(written.with_suffix(".svg")).iter() if element.text}
    assert {*TITLES, "seconds of training", "samples a second, all workers"} <= texts
