"""A trace for Perfetto and chrome://tracing: every rank is a process, with tracks for training, stalls and reducing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gradsync.profiling.record import PARTS, Span, StepRecord
from gradsync.profiling.run import Run

TRACKS = {1: "training", 2: "stalled by", 3: "background thread"}


def write_trace(run: Run, path: Path | str) -> None:
    """Write the trace of a run, its times on the clock of rank 0."""
    steps = [*run.records.values(), *run.discarded.values()]
    events = list(trace_events(record for of_rank in steps for record in of_rank))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n")


def trace_events(records: Iterable[StepRecord]) -> Iterator[dict[str, Any]]:
    """The events of some steps, in Chrome's trace event format. Times are in microseconds.

    >>> from gradsync.profiling import Breakdown, Span, StepRecord
    >>> from gradsync.profiling.trace import trace_events
    >>> spans = (Span(kind="forward", start_s=0.0, end_s=0.02),)
    >>> step = StepRecord(step=0, rank=0, began_s=7.0, step_s=0.1, parts=Breakdown(compute_s=0.1), spans=spans)
    >>> [event["name"] for event in trace_events([step]) if event["ph"] == "X"]
    ['step 0', 'forward']
    """
    found = list(records)
    if not found:
        return
    zero_s = min(record.began_s for record in found)
    has_changes = {record.rank for record in found if record.changes}
    for rank in sorted({record.rank for record in found}):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, name in TRACKS.items():
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        if rank in has_changes:
            yield {"ph": "M", "pid": rank, "tid": 4, "name": "thread_name", "args": {"name": "members"}}
    for record in found:
        begin_us = (record.began_s - zero_s) * 1e6
        yield from _changes(record, begin_us)
        parts = {f"{part}_ms": round(getattr(record.parts, f"{part}_s") * 1e3, 4) for part in PARTS}
        name = f"step {record.step}{' (discarded)' if record.discarded else ''}"
        yield _event(name, "step", record.rank, 1, begin_us, record.step_s * 1e6, parts)
        for number, span in enumerate(record.spans):
            name, about = _describe(span)
            start_us, taken_us = begin_us + span.start_s * 1e6, (span.end_s - span.start_s) * 1e6
            if span.kind == "collective":  # several run at once, so they can't be slices of one track
                event = {"cat": "collective", "name": name, "pid": record.rank, "tid": 0}
                event["id"] = f"{record.rank}/{record.step}/{number}"
                yield {**event, "ph": "b", "ts": round(start_us, 3), "args": about}
                yield {**event, "ph": "e", "ts": round(start_us + max(0.0, taken_us), 3)}
                continue
            track = 2 if span.kind == "stopped" else 1 if span.main else 3
            yield _event(name, span.kind, record.rank, track, start_us, taken_us, about)


def _changes(record: StepRecord, begin_us: float) -> Iterator[dict[str, Any]]:
    """The changes of the members around a step: what they took, part by part, and a flag at the end of each."""
    ends_us = {}
    until_us = begin_us
    before = record.changes[:-1] if record.discarded else record.changes
    for change in reversed(before):
        ends_us[change.epoch] = until_us
        until_us -= change.stalled_s * 1e6
    for change in record.changes[len(before) :]:
        ends_us[change.epoch] = begin_us + (record.step_s + change.stalled_s) * 1e6
    for change in record.changes:
        end_us, taken_us = ends_us[change.epoch], change.stalled_s * 1e6
        about = {**change.as_dict(), "what": change.describe()}
        yield _event(f"epoch {change.epoch}", "members", record.rank, 4, end_us - taken_us, taken_us, about)
        start_us = end_us - taken_us
        for part in ("agreeing", "connecting", "restoring", "attaching"):
            part_us = getattr(change, f"{part}_s") * 1e6
            yield _event(part, "members", record.rank, 4, start_us, part_us, {})
            start_us += part_us
        flag = {"ph": "i", "s": "p", "name": change.describe(), "cat": "members", "pid": record.rank, "tid": 4}
        yield {**flag, "ts": round(end_us, 3)}


def _describe(span: Span) -> tuple[str, dict[str, Any]]:
    of = f" of bucket {span.bucket}" if span.bucket >= 0 else ""
    name = f"{span.name or span.kind}{of}"
    return name, {"bucket": span.bucket} if span.bucket >= 0 else {}


def _event(
    name: str, kind: str, rank: int, track: int, start_us: float, taken_us: float, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": track,
        "ts": round(start_us, 3),
        "dur": round(max(0.0, taken_us), 3),
        "args": about,
    }
