"""bench_advisor: predictions compared with measured steps, from made-up parts. (Nothing runs here.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_advisor
from gradsync.advisor import Costs
from tests.advisor.steps import measurement, network


def part(exact_s: float, *, rate: float = 40e6) -> dict[str, Any]:
    """A worker's results: a step of 1 s on an unlimited link, and timed choices on a slow one."""
    links = {"unlimited": [network(1e12).as_dict()], "slow": [network(rate).as_dict()] * 3}
    return {
        "task": "exact",
        "measurement": measurement().as_dict(),
        "costs": [Costs(copy=0.0).as_dict()] * 2,
        "networks": links,
        "step_s": {
            "slow": {"allreduce": [[exact_s, exact_s + 0.2], [exact_s]], "allreduce, bucket_bytes=1 MiB": [[1.46]]}
        },
    }


def test_bench_advisor_checks_predictions_within_ten_percent() -> None:
    # 40 MB at 40 MB/s from the first bucket's last gradient on: 1.72 s in buckets of 25 MiB, 1.46 in small ones
    rows = bench_advisor.compare([part(1.7)])
    assert [row["choice"] for row in rows] == ["allreduce", "allreduce, bucket_bytes=1 MiB"]
    assert rows[0]["measured_s"] == 1.7
    assert all(row["right"] for row in rows)
    assert not bench_advisor.compare([part(2.3)])[0]["right"]


def test_bench_advisor_pools_parts() -> None:
    rows = bench_advisor.compare([part(1.0), part(2.0), part(2.0)])
    assert rows[0]["measured_s"] == 2.0
    one, other = (bench_advisor.compare([part(1.7, rate=rate)])[0]["predicted_s"] for rate in (40e6, 20e6))
    both = bench_advisor.compare([part(1.7), part(1.7, rate=20e6)])[0]["predicted_s"]
    assert both == pytest.approx((one + other) / 2)


def test_bench_advisor_compares_the_pick_with_the_measured_best() -> None:
    exact, everything = bench_advisor.picks([part(1.7)], bench_advisor.compare([part(1.7)]))
    assert (exact["allow"], everything["allow"]) == ("exact", "all")
    assert exact["measured_best"] == "allreduce, bucket_bytes=1 MiB"
    assert exact["slower_than_best"] == pytest.approx(0.0 if "1 MiB" in exact["pick"] else 1.7 / 1.46 - 1)


def test_bench_advisor_merges_parts_into_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = [tmp_path / "a.json", tmp_path / "b.json"]
    alone = {**part(1.7), "step_s": {}}  # ranks on one host
    for path, content in zip(saved, (part(1.7), alone), strict=True):
        path.write_text(json.dumps(content))
    bench_advisor.main(["--merge", *map(str, saved), "--results", str(tmp_path / "results")])
    printed = capsys.readouterr().out
    assert "2 of 2 within 10%" in printed
    assert "On one host it says: your step is 100 % compute: change nothing" in printed
    (written,) = (tmp_path / "results").iterdir()
    report = json.loads(written.read_text())
    assert report["exact"]["rows"][0]["right"]
    assert len(report["measured"]) == 2
