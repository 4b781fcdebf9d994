"""How accurate is the advisor? Its predictions, from one unthrottled run and the measured links, and measured steps.

    python benchmarks/bench_advisor.py --links 100mbit,1gbit,10gbit

Two workers of one thread, in a lab, train the transformer of bench_step (16.9 M parameters, 68 MB of gradients), or the
model of bench_convergence (`--task char_lm`). First, steps of exact training are recorded on an unlimited link. Then
each link is measured by some collectives, which takes two seconds, and every choice is timed on it. The predictions are
made from the recorded steps and the measured links. With `--links ""` the ranks are on one host, over shared memory.

A long run can be split into parts: `--save part.json` for each, then `--merge part.json ...`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich.table import Table  # noqa: E402

from benchmarks.support.launch import run_in_lab, run_on_this_host  # noqa: E402
from benchmarks.support.reporting import RESULTS, Reporting  # noqa: E402
from benchmarks.workers.advisor import UNLIMITED  # noqa: E402
from gradsync.advisor import Choice, Cost, Costs, Measurement, Network, advise, calibrate, predict  # noqa: E402
from gradsync.testing import LabError  # noqa: E402

WORKERS = 2
WITHIN = 0.10  # a prediction counts as right within this of the measured step
TASKS = {
    "transformer": (
        ("allreduce", None),
        ("allreduce(codec=fp16)", None),
        ("allreduce(codec=int8)", None),
        ("allreduce(reducer=powersgd(rank=4))", None),
        ("diloco(every=10)", None),
    ),
    "exact": (("allreduce", None), ("allreduce", 4 << 20), ("allreduce", 1 << 20), ("allreduce", 100 << 20)),
    "char_lm": (
        ("allreduce", None),
        ("allreduce(codec=fp16)", None),
        ("allreduce(codec=int8)", None),
        ("allreduce(codec=int4)", None),
        ("allreduce(reducer=powersgd(rank=4))", None),
    ),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers, block until they have ended, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        task = "char_lm" if options.task == "char_lm" else "transformer"
        command = [*options.under, sys.executable, "-m", "benchmarks.workers.advisor", "--task", task]
        command += ["--links", options.links, "--choices", json.dumps(TASKS[options.task])]
        command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        command += ["--seconds", str(options.seconds), "--out", str(out)]
        if options.links:
            run_in_lab(command, workers=WORKERS, timeout_s=options.timeout_s, rate=None)
        else:
            run_on_this_host(command, workers=WORKERS, timeout_s=options.timeout_s)
        measured: dict[str, Any] = json.loads(out.read_text())
        return {"task": options.task, **measured}


# -- from what was measured to predictions -----------------------------------------------------------------------------


def median_network(found: Sequence[Mapping[str, Any]]) -> Network:
    """The median of each property over the rounds."""
    names = [field.name for field in fields(Network) if field.name in found[0]]
    return Network(**{name: _median([each[name] for each in found]) for name in names})


def median_costs(found: Iterable[Mapping[str, Any]]) -> Costs:
    """The median of each cost over the rounds."""
    costs = [Costs.from_dict(each) for each in found]
    by_strategy = {}
    for key in costs[0].by_strategy:
        each = [cost.by_strategy[key] for cost in costs]
        stages = tuple(statistics.median(parts) for parts in zip(*(cost.stages for cost in each), strict=True))
        by_strategy[key] = Cost(stages, statistics.median(cost.finish for cost in each))
    return Costs(copy=statistics.median(cost.copy for cost in costs), by_strategy=by_strategy)


def _median(values: Sequence[Any]) -> Any:
    return statistics.median(values) if isinstance(values[0], float) else values[0]


def predictions(part: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The predicted seconds of a step for each link and choice, from one part's own recorded steps."""
    measurement, costs = Measurement.from_dict(part["measurement"]), median_costs(part["costs"])
    compute = calibrate(measurement, median_network(part["networks"][UNLIMITED]), costs)
    found: dict[str, dict[str, float]] = {}
    for link in part["step_s"]:
        network = median_network(part["networks"][link])
        choices = [Choice(text, size) for text, size in TASKS[part["task"]]]
        found[link] = {
            str(choice): predict(compute, choice, network, costs, world_size=WORKERS).step_s for choice in choices
        }
    return found


def compare(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each link and choice: the measured step, the predicted step, and the error."""
    predicted = [predictions(part) for part in parts]
    rows = []
    for link in dict.fromkeys(link for part in parts for link in part["step_s"]):
        for name in dict.fromkeys(name for part in parts for name in part["step_s"].get(link, {})):
            blocks = [block for part in parts for block in part["step_s"].get(link, {}).get(name, [])]
            expected = [found[link][name] for found in predicted if link in found and name in found[link]]
            if not blocks:
                continue
            measured_s = statistics.median(seconds for block in blocks for seconds in block)
            predicted_s = statistics.median(expected)
            error = predicted_s / measured_s - 1
            rows.append(
                {
                    "link": link,
                    "choice": name,
                    "measured_s": measured_s,
                    "predicted_s": predicted_s,
                    "error": error,
                    "right": abs(error) <= WITHIN,
                }
            )
    return rows


def picks(parts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each link the advisor's pick among the timed choices, and the measured best, by time to a loss."""
    found = []
    part = parts[-1]
    measurement, costs = Measurement.from_dict(part["measurement"]), median_costs(part["costs"])
    recorded_on = median_network(part["networks"][UNLIMITED])
    for link in dict.fromkeys(row["link"] for row in rows):
        network = median_network(part["networks"][link])
        timed = {row["choice"]: row["measured_s"] for row in rows if row["link"] == link}
        choices = [choice for text, size in TASKS[part["task"]] if str(choice := Choice(text, size)) in timed]
        for allow in ("exact", "all"):
            advice = advise(measurement, network, costs=costs, allow=allow, choices=choices, recorded_on=recorded_on)
            factors = {
                str(row.choice): row.steps_factor
                for row in advice.rows
                if row.allowed and row.steps_factor is not None and str(row.choice) in timed
            }
            to_loss = {name: timed[name] * factor for name, factor in factors.items()}
            best = min(to_loss, key=lambda name: to_loss[name])
            pick = str(advice.best.choice)
            found.append(
                {
                    "link": link,
                    "allow": allow,
                    "pick": pick,
                    "measured_best": best,
                    "slower_than_best": to_loss[pick] / to_loss[best] - 1 if pick in to_loss else None,
                    "sentence": advice.sentence,
                }
            )
    return found


def same_host(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The advisor's sentence for ranks on one host."""
    found = []
    for part in parts:
        if not part["step_s"]:
            network = median_network(part["networks"][UNLIMITED])
            costs = median_costs(part["costs"])
            choices = [Choice(text, size) for text, size in TASKS[part["task"]]]
            measurement = Measurement.from_dict(part["measurement"])
            found.append(advise(measurement, network, costs=costs, choices=choices).sentence)
    return found


def tables(rows: Sequence[Mapping[str, Any]], chosen: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The tables of predictions and picks."""
    right = sum(row["right"] for row in rows)
    steps = Table(title=f"Predicted and measured: {right} of {len(rows)} within {WITHIN:.0%}")
    for column in ("link", "choice"):
        steps.add_column(column)
    for column in ("measured, ms", "predicted, ms", "off by"):
        steps.add_column(column, justify="right")
    for row in rows:
        mark = "" if row["right"] else " !"
        steps.add_row(
            row["link"],
            row["choice"],
            f"{row['measured_s'] * 1e3:.0f}",
            f"{row['predicted_s'] * 1e3:.0f}",
            f"{row['error']:+.1%}{mark}",
        )
    taken = Table(title="The advisor's pick")
    for column in ("link", "of", "pick", "measured best, by time to a loss", "slower than it"):
        taken.add_column(column)
    for pick in chosen:
        slower = "" if pick["slower_than_best"] is None else f"{pick['slower_than_best']:.1%}"
        taken.add_row(pick["link"], pick["allow"], pick["pick"], pick["measured_best"], slower)
    return [steps, taken]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="The advisor's predictions against measured steps.")
    parser.add_argument("--links", default="100mbit,1gbit,10gbit", help="rates; none: two ranks on one host")
    parser.add_argument("--task", choices=sorted(TASKS), default="transformer", help="what is trained, and by what")
    parser.add_argument("--rounds", type=int, default=3, help="of all links and choices, in turn (default: 3)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a choice in a round (default: 3)")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no round after this time (default: 600)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="end all after this time (default: 1800)")
    parser.add_argument("--under", type=shlex.split, default="", help='put before every worker, such as "nice -n -5"')
    parser.add_argument("--save", type=Path, help="only write what was measured here, for --merge")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing: files that --save wrote")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure or merge, print the tables and write the JSON."""
    options = parse(arguments)
    reporting = Reporting("advisor", arguments)
    try:
        parts = [json.loads(path.read_text()) for path in options.merge] if options.merge else [measure(options)]
    except LabError as error:
        reporting.fail(error)
    if options.save:
        options.save.write_text(json.dumps(parts[0]) + "\n")
        return
    report: dict[str, Any] = {}
    for task in dict.fromkeys(part["task"] for part in parts):
        own = [part for part in parts if part["task"] == task]
        linked = [part for part in own if part["step_s"]]
        rows = compare(linked)
        chosen = picks(linked, rows) if linked else []
        report[task] = {"rows": rows, "picks": chosen, "same_host": same_host(own)}
        if linked:
            for table in tables(rows, chosen):
                reporting.console.print(table)
        for sentence in report[task]["same_host"]:
            reporting.console.print(f"On one host it says: {sentence}")
    reporting.write(options.results, {**report, "measured": parts})


if __name__ == "__main__":
    main()
