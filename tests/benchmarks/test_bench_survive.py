"""bench_survive, made small: an elastic run stays exact while workers are killed, and the benchmark notices if not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_survive

KILLS = 8  # a case: 32 in all
AS_IT_SHOULD_BE: dict[str, Any] = {
    "kills": 10,
    "steps": 50,
    "expected_steps": 50,
    "times_begun_anew": 0,
    "samples_twice": 0,
    "samples_missing": 0,
    "discarded_attempts": 10,
    "points_below_what_kills_allow": 0.0,
    "largest_difference": 1e-15,
}


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.netns)])
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(codec=int8)"])
def test_elastic_run_goes_on_exactly_while_workers_are_killed(strategy: str, hosts: int, tmp_path: Path) -> None:
    options = ["--kills", str(KILLS), "--gap-s", "0.4", "--strategy", strategy, "--hosts", str(hosts), "--seed", "1"]
    bench_survive.main([*options, "--fork", "--step-s", "0.02", "--timeout-s", "30", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("*-survive.json")
    summary = json.loads(path.read_text())["summary"]
    assert summary["steps"] == summary["expected_steps"]
    assert summary["samples_twice"] == summary["samples_missing"] == 0
    assert summary["kills"] > KILLS / 2  # it may end before the last ones
    assert ("largest_difference" in summary) == (strategy == "allreduce")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"steps": 49}, "49 steps were committed; expected 50."),
        ({"times_begun_anew": 1}, "training began anew 1 times"),
        ({"samples_twice": 6}, "6 samples were trained twice."),
        ({"samples_missing": 6}, "6 samples are in no log"),
        ({"discarded_attempts": 11, "points_below_what_kills_allow": 1.7}, "11 attempts were discarded, in 10 kills."),
        ({"largest_difference": 1e-6}, "parameters differ by 1.00e-06"),
    ],
)
def test_bench_survive_reports_what_is_not_as_it_must_be(change: dict[str, Any], complaint: str) -> None:
    problems = bench_survive.problems(AS_IT_SHOULD_BE | change)
    assert len(problems) == bool(complaint)
    assert all(problem.startswith(complaint) for problem in problems)
