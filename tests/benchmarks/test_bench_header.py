"""bench_header: a short run with few ranks, and known times give known medians."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.bench_header import main, num_exchanges, summarize


def test_bench_header_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interval_s = sys.getswitchinterval()
    main(["--ranks", "2,5", "--rounds", "2", "--total", "1000", "--output", str(tmp_path)])
    assert sys.getswitchinterval() == interval_s
    shown = capsys.readouterr().out
    for expected in ("reduced", "gathered", "2 ranks", "5 ranks"):
        assert expected in shown
    (written,) = tmp_path.glob("*-header.json")
    report = json.loads(written.read_text())
    for approach in ("reduced", "gathered"):
        assert {clock: len(rounds) for clock, rounds in report["measured_s"][approach]["5"].items()} == {
            "user": 2,
            "system": 2,
        }


def test_bench_header_costs_are_medians() -> None:
    two, more = (
        {"user": [1.0, 9.0, 2.0], "system": [1.0, 1.0, 1.0]},
        {"user": [3.0, 3.0, 3.0], "system": [2.0, 3.0, 4.0]},
    )
    assert summarize({"reduced": {2: two, 64: more}})["reduced"] == {
        "cpu_s": {2: 3.0, 64: 6.0},
        "user_s": {2: 2.0, 64: 3.0},
        "spread": 2.0,
        "user_spread": 1.5,
    }


def test_bench_header_gathers_less_often_in_a_larger_world() -> None:
    assert num_exchanges("reduced", 64, 8192) == 128
    assert num_exchanges("gathered", 64, 8192) == 2
    assert num_exchanges("gathered", 1024, 8192) == 1
