"""bench_collectives: a real run of two ranks, and its summary of known times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.bench_collectives import summarize
from benchmarks.support.sizes import KB, MB, parse_size
from benchmarks.support.yardsticks import YARDSTICKS
from benchmarks.workers.collectives import PERIOD, VARIANTS, fill, find_mistake, pattern_of
from tests.support.launching import run_launched

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_collectives.py"
MEASURED = ("memcpy", "gloo", "mpi", "bucket", "tensor")
ROUNDS = 3  # the fewest for an interval


def test_bench_collectives_writes_a_table_json_and_plot(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--sizes", "4KB,1MB", "--rounds", str(ROUNDS)]
    command += ["--variants", ",".join(MEASURED), "--output", str(tmp_path)]
    done = run_launched(command, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ("All-reduce, 2 ranks", "4 KB", "1 MB", "95 %", *(yardstick.says for yardstick in YARDSTICKS)):
        assert expected in done.stdout
    (written,) = tmp_path.glob("*-collectives.json")
    report = json.loads(written.read_text())
    for name in MEASURED:
        for size in (4 * KB, MB):
            rounds = report["measured"]["2"]["call_s"][name][str(size)]
            assert len(rounds) == ROUNDS
            assert all(0 < seconds < 10 for seconds in rounds)
            assert report["measured"]["2"]["repetitions"][name][str(size)] >= 1
    assert {line["verdict"] for line in report["yardsticks"]} <= {"met", "missed", "not measured"}
    # From 16 MB up nothing was measured, and it says so.
    assert report["yardsticks"][2]["verdict"] == "not measured"

    texts = [element.text for element in ElementTree.parse(written.with_suffix(".svg")).iter() if element.text]
    for expected in ("2 ranks", "4 KB", "1 MB", *(VARIANTS[name].title for name in MEASURED)):
        assert expected in texts


def _call_s(bucket: float, tensor: float) -> dict[str, dict[str, list[float]]]:
    """Three rounds at 1 MB on a machine that gets slower: Open MPI takes 1 ms, Gloo 4, memcpy half of one."""
    drift = (1e-3, 2e-3, 3e-3)
    takes = {"memcpy": 0.5, "gloo": 4.0, "mpi": 1.0, "bucket": bucket, "tensor": tensor}
    return {name: {str(MB): [much * second for second in drift]} for name, much in takes.items()}


def test_bench_collectives_computes_speeds_and_ratios() -> None:
    row = summarize(_call_s(bucket=0.25, tensor=2.0))[MB]
    assert row["gloo"]["median_call_s"] == pytest.approx(8e-3)
    assert row["gloo"]["gb_per_s"] == pytest.approx(MB / 1e9 / 8e-3)
    faster: dict[str, Any] = row["bucket"]["times_as_fast_as"]
    assert {peer: round(ratio["ratio"], 6) for peer, ratio in faster.items()} == {"memcpy": 2, "gloo": 16, "mpi": 4}
    assert row["tensor"]["times_as_fast_as"]["mpi"]["ratio"] == pytest.approx(0.5)
    assert "times_as_fast_as" not in row["mpi"]


def test_yardsticks_are_judged_by_size() -> None:
    def verdicts(bucket: float, tensor: float) -> list[str]:
        return [yardstick.judge(summarize(_call_s(bucket, tensor)))[0] for yardstick in YARDSTICKS]

    assert verdicts(bucket=0.6, tensor=0.9) == ["met", "met", "not measured", "met", "met"]
    assert verdicts(bucket=0.7, tensor=1.1) == ["missed", "missed", "not measured", "met", "missed"]
    assert verdicts(bucket=1.1, tensor=0.9)[3] == "missed"
    # 8 GB/s will do, even where the caches make memcpy much faster.
    fast = {name: {str(MB): [1e-4] * 3} for name in ("memcpy", "bucket")}
    fast["memcpy"][str(MB)] = [1e-6] * 3
    assert YARDSTICKS[0].judge(summarize(fast)) == (
        "met",
        "closest of 1 sizes: 1 MB: 0.01 (0.01 to 0.01), 10.5 GB/s",
    )
    assert YARDSTICKS[0].judge({}) == ("not measured", "")


@pytest.mark.parametrize("numel", [7, PERIOD, 3 * PERIOD + 5])
def test_check_finds_a_wrong_value_anywhere(numel: int) -> None:
    total = pattern_of(0) + pattern_of(1)
    tensor = torch.empty(numel)
    fill(tensor, total)
    assert find_mistake(tensor, total) == ""
    for wrong in (tensor[-1].item() + 1, float("nan")):
        tensor[-1] = wrong
        assert find_mistake(tensor, total).startswith(f"value {numel - 1} of {numel} must be")
    fill(tensor, pattern_of(0))  # as if nothing had been summed
    assert find_mistake(tensor, total)


def test_parse_sizes_accepts_common_notations() -> None:
    assert [parse_size(text) for text in ("4KB", "64 kb", "1M", "100MB", "4096")] == [
        4 * KB,
        64 * KB,
        MB,
        100 * MB,
        4096,
    ]
