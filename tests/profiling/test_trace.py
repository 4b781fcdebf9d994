"""The trace: a format that Perfetto opens, with every span on its track."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from gradsync.profiling import load
from gradsync.profiling.trace import trace_events, write_trace
from tests.profiling.raw_records import write_run


def test_trace_has_every_step_of_every_rank_on_one_clock(tmp_path: Path) -> None:
    write_trace(load(write_run(tmp_path, steps=5, late_ms=40, codec=True)), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert Counter(event["pid"] for event in steps) == {0: 5, 1: 5}
    assert min(event["ts"] for event in steps) == 0.0
    assert {event["dur"] for event in steps} == {139_000.0}
    assert steps[0]["args"]["waiting_ms"] == 40.0
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}


def test_trace_slices_never_overlap_partially(tmp_path: Path) -> None:
    """Perfetto drops slices that overlap in part: so collectives, of which several run at once, are async events."""
    events = list(trace_events(load(write_run(tmp_path, steps=2, late_ms=40, codec=True)).steps(0)))
    for track in {event["tid"] for event in events if event["ph"] == "X"}:
        slices = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track]
        for start, end in slices:
            for other_start, other_end in slices:
                assert not start + 0.01 < other_start < end - 0.01 < other_end - 0.02, (track, start, other_start)
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert len(set(begun)) == len(begun) == 2 * 3


def test_trace_of_no_steps_is_empty() -> None:
    assert list(trace_events([])) == []
