"""The report of a comparison: one HTML file that contains its figures and loads nothing from elsewhere."""

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
SENT = {  # by whether bytes were counted at a link
    True: "Bytes are those that a worker sends, averaged over the workers, counted at its link: headers included.",
    False: "Bytes are those that a worker sends, averaged over the workers, as the strategies count them.",
}
MAX_POINTS = 600  # drawn of a curve: a screen shows no more


def render(figures: Mapping[str, Any]) -> str:
    """Render the page from the figures that ``gradsync compare`` also writes as JSON.

    >>> from gradsync.compare.page import render
    >>> page = render({"title": "train.py", "target_loss": None, "runs": [], "curves": {}, "sent": ""})
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
        "{{sent}}": figures["sent"],
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
    """A sentence or two: which strategy reaches the common loss first, or has the shortest step, and its convergence.

    A strategy that did not do what distinguishes it (``not_yet``) is not judged: it neither wins nor is compared with.
    """
    good = [run for run in runs if not run["failure"]]
    if len(good) < 2:
        return "There is nothing to compare: fewer than two runs came to their end."
    seen = [run for run in good if not run["not_yet"]]
    not_judged = "".join(f" {run['strategy']} is not judged: {run['not_yet']}." for run in good if run["not_yet"])
    if len(seen) < 2:
        return "There is nothing to compare: fewer than two runs can be judged." + not_judged
    timed = [run for run in seen if run["seconds_to_loss"] is not None]
    by = "seconds_to_loss" if target is not None and len(timed) == len(seen) else "median_step_s"
    first, base = min(seen, key=lambda run: run[by]), seen[0]
    ratio = base[by] / first[by] if first[by] else 1.0
    if by == "seconds_to_loss":
        text = f"To a loss of {target:.4g}, {first['strategy']} is {ratio:.2f} times as fast as {base['strategy']}"
        base_wins = f"{base['strategy']} is the first at a loss of {target:.4g}: nothing else here gets there sooner"
    else:
        text = f"{first['strategy']} has the shortest step: {ratio:.2f} times as fast as {base['strategy']}"
        base_wins = f"{base['strategy']} has the shortest step"
    convergence = f" ({first['convergence']})" if first["convergence"] else ""
    return (base_wins if first is base else text) + convergence + "." + not_judged


def _row(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    name = f"<th scope=row>{html.escape(run['strategy'])}</th>"
    if run["failure"]:
        return f"<tr>{name}<td colspan=7 class=failed>failed: {html.escape(run['failure'].splitlines()[0])}</td></tr>"
    seen = [each["seconds_to_loss"] for each in runs if each.get("seconds_to_loss") and not each["not_yet"]]
    best = min(seen, default=None)
    mark = " class=best" if best is not None and run["seconds_to_loss"] == best and not run["not_yet"] else ""
    cells = [
        f"<td>{run['steps']}</td>",
        f"<td>{_figure(run['median_step_s'], 1e3)}</td>",
        f"<td>{_figure(run['bytes_per_step'], 1e-6)}</td>",
        f"<td>{_figure(run['final_loss'], 1.0, 4)}</td>",
        f"<td{mark}>{_figure(run['seconds_to_loss'], 1.0)}</td>",
        f"<td>{_figure(run['bytes_to_loss'], 1e-6)}</td>",
        f"<td class=word>{html.escape(run['convergence'])}</td>",
    ]
    return f"<tr>{name}{''.join(cells)}</tr>"


def _figure(value: float | None, unit: float, digits: int = 3) -> str:
    if value is None:
        return "–"
    scaled = value * unit
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.{digits}g}"


def _thinned(curve: Mapping[str, Any]) -> dict[str, list[Any]]:
    """At most MAX_POINTS points, always with the last one. A NaN or infinite loss becomes None: JSON has no NaN."""
    steps = max(1, -(-len(curve["steps"]) // MAX_POINTS))
    thin = {name: [*curve[name][:-1:steps], *curve[name][-1:]] for name in ("steps", "seconds", "bytes")}
    for name in ("loss", "smoothed"):
        chosen = [*curve[name][:-1:steps], *curve[name][-1:]]
        thin[name] = [loss if loss is not None and math.isfinite(loss) else None for loss in chosen]
    return thin
