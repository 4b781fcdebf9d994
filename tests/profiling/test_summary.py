"""The summary of a run, and its verdict in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradsync.profiling import load
from gradsync.profiling.run import RawRecords, Run
from gradsync.profiling.summary import RunSummary, summarize, verdict
from tests.profiling.raw_records import meta, write_run

ADVICE: dict[str, Any] = {
    "change": True,
    "best": "allreduce(codec=int8)",
    "rows": [
        {"choice": "allreduce", "share": 0.3, "exact": True, "risk": "none"},
        {"choice": "allreduce(codec=int8)", "share": 0.04, "exact": False, "risk": "low"},
    ],
}


def summary_of(folder: Path, **planted: int) -> RunSummary:
    return summarize(load(write_run(folder, **planted)))


def test_summary_holds_the_planted_figures(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, late_ms=40, wire_ms=30)
    assert summary.step_s == pytest.approx(0.132)
    assert summary.efficiency == pytest.approx((60 + 100) / 2 / 132)
    assert summary.straggler == 1
    assert summary.ranks[1].slower == pytest.approx(102 / 62 - 1)
    assert summary.num_steps == 12
    assert summary.num_typical == 10
    assert summary.num_parameters == 1000 * 900 + 100 + 2000 * 1000
    assert summary.gradient_bytes == 12_000_000
    assert summary.sent_bytes == 12_000_104
    assert summary.header_bytes == 104
    assert summary.bytes_per_s == pytest.approx(12_000_000 / 0.030)
    assert [bucket.names for bucket in summary.buckets] == [("head.weight", "head.bias"), ("body.weight",)]
    assert summary.buckets[0].exposed_s == pytest.approx((50 + 10) / 2 / 1e3)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"wire_ms": 1}, "your step is 95 % compute: change nothing"),
        ({"wire_ms": 30}, "synchronization costs 35 % of your step; it is the wire, not the stragglers"),
        (
            {"late_ms": 100, "wire_ms": 3},
            "synchronization costs 33 % of your step; it is the stragglers, not the wire: "
            "rank 1 needs 161 % more time than the quickest",
        ),
        ({"late_ms": 50, "wire_ms": 20}, "synchronization costs 36 % of your step; it is the stragglers and the wire"),
    ],
)
def test_verdict_names_the_cause(tmp_path: Path, planted: dict[str, int], said: str) -> None:
    text = verdict(summary_of(tmp_path, **planted))
    if planted == {"wire_ms": 1}:
        assert text == said
    else:
        assert text.startswith(said)


def test_verdict_names_the_advised_choice(tmp_path: Path) -> None:
    summary = summary_of(tmp_path)
    assert verdict(summary, ADVICE).endswith(
        "; `allreduce(codec=int8)` would take it to about 4 % (risk to convergence: low)"
    )
    assert verdict(summary, {**ADVICE, "change": False}).endswith("; no other choice would do much better")


def test_verdict_balances_a_straggler_first(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, late_ms=500, wire_ms=3)
    assert verdict(summary, {**ADVICE, "change": False}).endswith(
        "rank 1 needs 806 % more time than the quickest; give it less of each batch, by `shard(..., balance=True)`, "
        "or see what else runs there"
    )
    assert verdict(summary, ADVICE).endswith(
        "; alone `allreduce(codec=int8)` would take it to about 4 % (risk to convergence: low)"
    )


def test_verdict_of_one_worker_judges_nothing(tmp_path: Path) -> None:
    run = load(write_run(tmp_path))
    alone = Run({0: RawRecords(meta(0, world_size=1), run.raw[0].plans, run.raw[0].steps)})
    assert "one worker" in verdict(summarize(alone))


def test_summarize_refuses_a_run_without_steps() -> None:
    with pytest.raises(ValueError, match="no rank has completed a step"):
        summarize(Run({0: RawRecords(meta(0))}))
    with pytest.raises(ValueError, match="at least one rank"):
        Run({})
