"""The report of a comparison: one HTML file that asks nobody for anything, with its figures inside."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from gradsync.profiling.report import inside_script

REACHED = (  # see [Note: reached] in summary.py
    "A loss counts as reached in the first tenth of a run's length in which the averaged loss is as low at more than "
    "half of the steps, at the first of these: one lucky batch does not decide it."
)
MOST_POINTS = 600  # of a curve that are drawn: more than there are pixels for


def render(figures: Mapping[str, Any]) -> str:
    """The page for what ``gradsync compare`` writes as JSON.

    >>> from gradsync.compare.page import render
    >>> page = render({"title": "train.py", "target_loss": None, "runs": [], "curves": {}})
    >>> page.startswith("<!doctype html>"), "src=" in page
    (True, False)
    """
    template = resources.files("gradsync.compare").joinpath("page.html").read_text()
    data = {text: _thinned(curve) for text, curve in figures["curves"].items()}
    parts = {
        "{{style}}": _style(),
        "{{title}}": html.escape(str(figures["title"])),
        "{{headline}}": html.escape(headline(figures["runs"], figures["target_loss"])),
        "{{rows}}": "\n".join(_row(run, figures["runs"]) for run in figures["runs"]),
        "{{target}}": "" if figures["target_loss"] is None else f"{figures['target_loss']:.4g}",
        "{{reached}}": REACHED,
        "{{data}}": inside_script({"curves": data, "target": figures["target_loss"]}),
    }
    for place, text in parts.items():
        template = template.replace(place, text)
    return template


def _style() -> str:
    """The style of ``gradsync profile``'s report: the two are read side by side."""
    page = resources.files("gradsync.profiling").joinpath("report.html").read_text()
    return page.partition("<style>")[2].partition("</style>")[0].strip()


def headline(runs: Sequence[Mapping[str, Any]], target: float | None) -> str:
    """One sentence: who is first at the same loss, or whose step is shortest."""
    good = [run for run in runs if not run["failure"]]
    if len(good) < 2:
        return "There is nothing to compare: fewer than two runs came to their end."
    timed = [run for run in good if run["seconds_to_loss"] is not None]
    if target is not None and len(timed) == len(good):
        first, base = min(timed, key=lambda run: run["seconds_to_loss"]), good[0]
        if first is base:
            return f"{base['strategy']} is the first at a loss of {target:.4g}: nothing else here gets there sooner."
        ratio = base["seconds_to_loss"] / first["seconds_to_loss"]
        return f"To a loss of {target:.4g}, {first['strategy']} is {ratio:.2f} times as fast as {base['strategy']}."
    first, base = min(good, key=lambda run: run["median_step_s"]), good[0]
    ratio = base["median_step_s"] / first["median_step_s"]
    return f"{first['strategy']} has the shortest step: {ratio:.2f} times as fast as {base['strategy']}."


def _row(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    name = f"<th scope=row>{html.escape(run['strategy'])}</th>"
    if run["failure"]:
        return f"<tr>{name}<td colspan=6 class=failed>failed: {html.escape(run['failure'].splitlines()[0])}</td></tr>"
    sent = run["wire_bytes_per_step"] if run["wire_bytes_per_step"] is not None else run["bytes_per_step"]
    best = min((each["seconds_to_loss"] for each in runs if each.get("seconds_to_loss")), default=None)
    mark = " class=best" if best is not None and run["seconds_to_loss"] == best else ""
    cells = [
        f"<td>{run['steps']}</td>",
        f"<td>{_figure(run['median_step_s'], 1e3)}</td>",
        f"<td>{_figure(sent, 1e-6)}</td>",
        f"<td>{_figure(run['final_loss'], 1.0, 4)}</td>",
        f"<td{mark}>{_figure(run['seconds_to_loss'], 1.0)}</td>",
        f"<td>{_figure(run['bytes_to_loss'], 1e-6)}</td>",
    ]
    return f"<tr>{name}{''.join(cells)}</tr>"


def _figure(value: float | None, unit: float, digits: int = 3) -> str:
    if value is None:
        return "–"
    scaled = value * unit
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.{digits}g}"


def _thinned(curve: Mapping[str, Any]) -> dict[str, list[Any]]:
    """As many points as can be seen, the last one always; a loss that is no number is none: JSON has no NaN."""
    steps = max(1, -(-len(curve["steps"]) // MOST_POINTS))
    thin = {name: [*curve[name][:-1:steps], *curve[name][-1:]] for name in ("steps", "seconds", "bytes")}
    for name in ("loss", "smoothed"):
        chosen = [*curve[name][:-1:steps], *curve[name][-1:]]
        thin[name] = [loss if loss is not None and math.isfinite(loss) else None for loss in chosen]
    return thin
