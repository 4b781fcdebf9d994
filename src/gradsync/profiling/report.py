"""The report of a run: one HTML page that contains all its data and loads nothing from elsewhere."""

from __future__ import annotations

import html
import importlib.resources
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradsync.profiling.record import PARTS, StepRecord
from gradsync.profiling.run import Run
from gradsync.profiling.summary import RunSummary, moving_rate, summarize, verdict

MAX_STEPS = 400  # in the breakdown: of more, evenly chosen ones
TIMELINES = 5  # steps whose timeline is shown
MAX_RANKS = 32  # in a timeline


def write_report(
    run: Run,
    path: Path | str,
    *,
    advice: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    note: str = "",
    title: str = "",
) -> None:
    """Write the report of a run.

    Args:
        run: the recorded run.
        path: the file to write.
        advice: ``Advice.as_dict()``, or ``{"problem": "why there is none"}``.
        environment: the measured network, under the key ``network``.
        note: shown at the top of the page.
        title: of the page; default: the strategy and the number of workers.
    """
    summary = summarize(run)
    data = report_data(run, summary, advice=advice, environment=environment, note=note)
    page = importlib.resources.files("gradsync.profiling").joinpath("report.html").read_text()
    shown = title or f"{summary.strategy}, {summary.world_size} worker{'s' if summary.world_size != 1 else ''}"
    page = page.replace("{{title}}", html.escape(shown)).replace("{{data}}", inside_script(data))
    Path(path).write_text(page)


def report_data(
    run: Run,
    summary: RunSummary,
    *,
    advice: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """The data of the page. Times in it are milliseconds."""
    known = advice if advice is not None and "rows" in advice else None
    network = (environment or {}).get("network")
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "note": note,
        "verdict": verdict(summary, known),
        "summary": summary.as_dict(),
        "parts": PARTS,
        "limit_bytes_per_s": None if network is None else network["bytes_per_s"],
        "advice": known,
        "no_advice": (advice or {}).get("problem", "") if known is None else "",
        "steps": _steps(run),
        "timelines": _timelines(run),
        "versions": run.meta.versions,
        "clock_error_ms": run.clocks.error_ns / 1e6,
    }


def _steps(run: Run) -> list[dict[str, Any]]:
    """The breakdown of every step, by rank."""
    numbers = sorted({step.step for steps in run.records.values() for step in steps})
    every = max(1, -(-len(numbers) // MAX_STEPS))
    chosen = set(numbers[::every])
    return [
        {
            "rank": rank,
            "step": step.step,
            "parts": [_ms(getattr(step.parts, f"{part}_s")) for part in PARTS],
            "sent": step.sent_bytes,
            "rate": moving_rate(step),
        }
        for rank, steps in run.records.items()
        for step in steps
        if step.step in chosen
    ]


def _timelines(run: Run) -> list[dict[str, Any]]:
    """The median, shortest, longest and last of the typical steps that every rank has completed."""
    by_step: dict[int, dict[int, StepRecord]] = {}
    for rank in run.raw:
        for step in run.typical(rank):
            by_step.setdefault(step.step, {})[rank] = step
    whole = {number: ranks for number, ranks in by_step.items() if len(ranks) == len(run.raw)} or by_step
    order = sorted(whole, key=lambda number: max(step.step_s for step in whole[number].values()))
    if not order:
        return []
    middle = len(order) // 2
    named = {"median": order[middle], "quickest": order[0], "slowest": order[-1], "last": max(whole)}
    chosen: dict[int, str] = {}
    for name, number in named.items():
        chosen[number] = f"{chosen[number]}, {name}" if number in chosen else name
    return [
        {"step": number, "name": name, **_timeline(whole[number])} for number, name in list(chosen.items())[:TIMELINES]
    ]


def _timeline(ranks: dict[int, StepRecord]) -> dict[str, Any]:
    zero_s = min(step.began_s for step in ranks.values())
    shown = dict(list(ranks.items())[:MAX_RANKS])
    return {
        "length": max(_ms(step.began_s - zero_s + step.step_s) for step in ranks.values()),
        "left_out": len(ranks) - len(shown),
        "ranks": [
            {
                "rank": rank,
                "start": _ms(step.began_s - zero_s),
                "length": _ms(step.step_s),
                "parts": [_ms(getattr(step.parts, f"{part}_s")) for part in PARTS],
                "spans": [
                    [span.kind, _ms(span.start_s), _ms(span.end_s), span.bucket, span.name, span.main]
                    + ([] if span.all_started_s is None else [_ms(span.all_started_s)])
                    for span in step.spans
                ],
                "buckets": [[bucket.index, _ms(bucket.ready_s)] for bucket in step.buckets],
            }
            for rank, step in shown.items()
        ],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def inside_script(data: dict[str, Any]) -> str:
    """JSON that can't close the script element that contains it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
