"""What a slow worker costs, strategy by strategy: samples a second, and eval loss against time.

    python benchmarks/bench_stragglers.py
    python benchmarks/bench_stragglers.py --cases random --seconds 20

Two cases, with 4 workers. ``permanent``: the last worker is always 4 times slower. ``random``: each worker's step is,
one time in ten, 6 times slower. Every run trains a small char_lm (examples/char_lm.py) for the same number of seconds
with the same learning rate and the same batch a worker. Compute is simulated by sleeping, so that 4 workers do not
disturb one another on few cores: see workers/stragglers.py. The eval loss is that of rank 0's replica, a fast one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich import box  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.support.plots import COLOURS, add_grid, figure_for, look_of  # noqa: E402
from benchmarks.support.reporting import Reporting, add_saving, plot_problem  # noqa: E402
from benchmarks.support.training import KeptRuns, RunFailed, add_training, launch  # noqa: E402
from gradsync.testing import LabError  # noqa: E402

WORKER = PROJECT / "benchmarks" / "workers" / "stragglers.py"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A strategy in the comparison: a line of the table."""

    title: str
    strategy: str
    balance: bool = False
    at_least: float | None = None  # times the first one's samples a second
    sooner: bool = False  # it must also reach the first one's last eval loss sooner
    exact: bool = False  # its losses must be those of the first one, step for step


@dataclass(frozen=True, kw_only=True)
class Case:
    """Which workers are slow, and when; and the strategies that are compared."""

    title: str
    factor: float
    chance: float = 0.0
    contestants: tuple[Contestant, ...]


ALLREDUCE = Contestant(title="allreduce", strategy="allreduce")
CASES = {
    "permanent": Case(
        title="one worker of 4 always 4 times slower",
        factor=4.0,
        contestants=(
            ALLREDUCE,
            Contestant(
                title="allreduce, balance=True",
                strategy="allreduce",
                balance=True,
                at_least=1.6,
                sooner=True,
                exact=True,
            ),
            Contestant(title="SSP, staleness 3", strategy="parameter_server(staleness=3)"),
            Contestant(title="asynchronous", strategy="parameter_server(staleness=None)", at_least=2.2, sooner=True),
            Contestant(title="gossip", strategy="gossip"),
            Contestant(title="gossip, asynchronous", strategy="gossip(asynchronous=True)"),
            Contestant(title="local SGD, every 8", strategy="local_sgd(every=8)"),
            Contestant(title="Hogwild", strategy="hogwild"),
        ),
    ),
    "random": Case(
        title="each worker, one step in ten, 6 times slower",
        factor=6.0,
        chance=0.1,
        contestants=(
            Contestant(title="BSP", strategy="parameter_server(staleness=0)"),
            Contestant(title="SSP, staleness 3", strategy="parameter_server(staleness=3)", at_least=1.3),
            ALLREDUCE,
        ),
    ),
}

Runs = dict[str, dict[int, dict[str, Any]]]  # by title and seed: what the workers wrote
EXACT_WITHIN = 1e-3  # of a loss, relative: sums in another order make two runs of float32 drift apart slowly


# -- measuring ------------------------------------------------------------------------------------------------------


def train(plan: Sequence[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Do the runs of a plan in the same workers, one after the other; yields the measurements of each. Blocks."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "plan.json"
        written.write_text(json.dumps(list(plan)))
        failure: LabError | None = None
        try:
            launch([str(WORKER), "--plan", str(written), "--out", folder], options)
        except LabError as error:
            failure = error  # the runs before it are still kept
        for number, run in enumerate(plan):
            out = Path(folder) / f"{number}.json"
            if not out.exists():
                raise RunFailed(f"{run['strategy']}, {run['case']}: {failure}")
            measured: dict[str, Any] = json.loads(out.read_text())
            yield measured


def measure(options: argparse.Namespace) -> dict[str, Runs]:
    """Train every contestant of every case with every seed.

    All contestants of a seed run before the next seed, so that other load on the machine affects them alike. Runs that
    an earlier call has kept are not repeated.
    """
    kept = KeptRuns(options.runs)
    results: dict[str, Runs] = {name: {each.title: {} for each in options.contestants(name)} for name in options.cases}
    todo = []
    for name, seed in itertools.product(options.cases, options.seeds):
        for contestant in options.contestants(name):
            run = run_of(contestant, name, seed, options)
            before = kept.get(f"{name} {contestant.title} {seed}", run)
            if before is None:
                todo.append((name, contestant.title, seed, run))
            else:
                results[name][contestant.title][seed] = before
    if not todo:
        return results
    for (name, title, seed, run), measured in zip(todo, train([each[3] for each in todo], options), strict=True):
        results[name][title][seed] = measured
        kept.put(f"{name} {title} {seed}", run, measured)
    return results


def run_of(contestant: Contestant, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run, for the workers: everything but the code that it depends on."""
    return {
        "strategy": contestant.strategy,
        "balance": contestant.balance,
        "case": name,
        "factor": CASES[name].factor,
        "chance": CASES[name].chance,
        "seed": seed,
        "workers": options.workers,
        "seconds": options.seconds,
        "sample_ms": options.sample_ms,
        "batch": options.batch,
        "width": options.width,
        "context": options.context,
        "lr": options.lr,
        "data": str(options.data) if options.data else None,
    }


# -- what it means --------------------------------------------------------------------------------------------------


def samples_per_second(measured: dict[str, Any], seconds: float) -> float:
    """The samples a second of all ranks together, in steps that ended in time."""
    return sum(num for steps in measured["steps"] for over_s, num, _ in steps if over_s <= seconds) / seconds


def seconds_to(evals: Sequence[Sequence[float]], loss: float) -> float | None:
    """When the eval loss first reached ``loss``, interpolated between snapshots; None: never."""
    for (before_s, before), (after_s, after) in itertools.pairwise(evals):
        if after <= loss:
            return before_s if before <= loss else before_s + (after_s - before_s) * (before - loss) / (before - after)
    return None


def joint_losses(measured: dict[str, Any]) -> list[float]:
    """The loss of each step over all ranks, up to the last step that all have done."""
    return [
        sum(num * loss for _, num, loss in parts) / sum(num for _, num, _ in parts)
        for parts in zip(*measured["steps"], strict=False)
    ]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference between the losses of two runs, over the steps that both have done."""
    return max((abs(a - b) / abs(b) for a, b in zip(one, other, strict=False)), default=float("nan"))


def summarize(name: str, runs: Runs, seconds: float) -> dict[str, dict[str, Any]]:
    """Compare each contestant with the first of its case, seed by seed."""
    first = next(iter(runs.values()))
    summary: dict[str, dict[str, Any]] = {}
    for contestant in CASES[name].contestants:
        if contestant.title not in runs:
            continue
        each = runs[contestant.title]
        rates = {seed: samples_per_second(measured, seconds) for seed, measured in each.items()}
        ratios = [rate / samples_per_second(first[seed], seconds) for seed, rate in rates.items()]
        targets = {seed: first[seed]["evals"][-1][1] for seed in each}
        reached = [seconds_to(measured["evals"], targets[seed]) for seed, measured in each.items()]
        differences = [
            largest_difference(joint_losses(measured), joint_losses(first[seed])) for seed, measured in each.items()
        ]
        sooner = all(
            at is not None and at < first[seed]["evals"][-1][0] for seed, at in zip(each, reached, strict=True)
        )
        met = (
            (contestant.at_least is None or min(ratios) >= contestant.at_least)
            and (not contestant.sooner or sooner)
            and (not contestant.exact or max(differences) <= EXACT_WITHIN)
        )
        asked = contestant.at_least is not None
        summary[contestant.title] = {
            "strategy": contestant.strategy + (" with balance=True" if contestant.balance else ""),
            "samples_per_s": statistics.fmean(rates.values()),
            "ratio": statistics.fmean(ratios),
            "ratios": ratios,
            "at_least": contestant.at_least,
            "eval_loss": statistics.fmean(measured["evals"][-1][1] for measured in each.values()),
            "seconds_to_target": reached,
            "target_losses": list(targets.values()),
            "largest_loss_difference": max(differences) if contestant.exact else None,
            "parts": next(iter(each.values()))["parts"],
            "steps_of_each_rank": [len(steps) for steps in next(iter(each.values()))["steps"]],
            "compute_s": next(iter(each.values()))["compute_s"],
            "staleness": next(iter(each.values()))["staleness"],
            "verdict": ("met" if met else "missed") if asked else "",
        }
    return summary


def table_of(name: str, summary: dict[str, dict[str, Any]], *, caption: str) -> Table:
    """The table of a case."""
    table = Table(title=CASES[name].title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for title in ("samples/s", "times the first", "asked", "", "eval loss", "s to the first's", "loss difference"):
        table.add_column(title, justify="right")
    for title, row in summary.items():
        colour = {"met": "green", "missed": "red"}.get(row["verdict"], "")
        reached = [f"{at:.1f}" if at is not None else "never" for at in row["seconds_to_target"]]
        table.add_row(
            title,
            f"{row['samples_per_s']:.0f}",
            f"{row['ratio']:.2f}",
            "" if row["at_least"] is None else f"≥ {row['at_least']:g}",
            f"[{colour}]{row['verdict']}[/]" if colour else "",
            f"{row['eval_loss']:.3f}",
            " ".join(reached),
            "" if row["largest_loss_difference"] is None else f"{row['largest_loss_difference']:.0e}",
        )
    return table


def plot(results: dict[str, Runs], summaries: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Draw, for each case, the loss against time and the samples a second."""
    with figure_for(path, width=12.5, height=4.6 * len(results)) as figure:
        rows = figure.subplots(len(results), 2, squeeze=False)
        for (name, runs), (curves, bars) in zip(results.items(), rows, strict=True):
            for number, (title, each) in enumerate(runs.items()):
                evals = next(iter(each.values()))["evals"]
                curves.plot([at for at, _ in evals], [loss for _, loss in evals], **look_of(number, title))
            titles = list(summaries[name])
            rates = [row["samples_per_s"] for row in summaries[name].values()]
            colours = [COLOURS[number % len(COLOURS)] for number in range(len(titles))]
            labels = [f"{row['samples_per_s']:.0f}  ({row['ratio']:.2f} x)" for row in summaries[name].values()]
            bars.bar_label(bars.barh(titles[::-1], rates[::-1], color=colours[::-1]), labels=labels[::-1], padding=4)
            bars.margins(x=0.25)
            curves.set_title(CASES[name].title)
            curves.set_xlabel("seconds of training")
            curves.set_ylabel("eval loss of rank 0")
            add_grid(curves)
            curves.legend(frameon=False)
            bars.set_xlabel("samples a second, all workers")


# -- the command line -----------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What a slow worker costs, strategy by strategy.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--only", help="titles of the contestants to run, separated by ';' (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, in every run (default: 30)")
    parser.add_argument("--sample-ms", type=float, default=5.0, help="of simulated compute a sample (default: 5)")
    parser.add_argument("--batch", type=int, default=8, help="samples of a worker in a step, while all have the same")
    parser.add_argument("--width", type=int, default=32, help="of the model, which has one layer (default: 32)")
    parser.add_argument("--context", type=int, default=32, help="bytes of a sample (default: 32)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW, for all strategies (default: 0.003)")
    add_training(parser, seeds="0", workers=4)
    add_saving(parser, files="JSON, no plot")
    options = parser.parse_args(arguments)
    options.cases = options.cases.split(",")
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"--cases must be of {', '.join(CASES)}; got {unknown[0]!r}.")
    options.only = [title.strip() for title in options.only.split(";")] if options.only else []
    known = {contestant.title for name in options.cases for contestant in CASES[name].contestants}
    if set(options.only) - known:
        parser.error(f"--only must be of {'; '.join(sorted(known))}; got {sorted(set(options.only) - known)[0]!r}.")
    options.contestants = lambda name: [
        each for each in CASES[name].contestants if not options.only or each.title in options.only
    ]
    if options.workers < 2:
        parser.error(f"--workers must be 2 or more; got {options.workers}.")
    if lack := plot_problem(options):
        parser.error(lack)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train everything, print the tables, write the JSON and the plot."""
    options = parse(arguments)
    reporting = Reporting("stragglers", arguments)
    try:
        with reporting.console.status("training"):
            results = measure(options)
    except RunFailed as error:
        reporting.fail(error)
    summaries = {name: summarize(name, runs, options.seconds) for name, runs in results.items()}
    how = (
        f"{options.workers} workers, {options.seconds:g} s; compute is simulated: {options.sample_ms:g} ms of sleep a "
        "sample, and a little real work"
    )
    for name, summary in summaries.items():
        reporting.console.print(table_of(name, summary, caption=f"{how}."))
    if options.no_save:
        return
    found = {
        "how": how,
        "seconds": options.seconds,
        "summary": summaries,
        "evals": {
            name: {title: {seed: measured["evals"] for seed, measured in each.items()} for title, each in runs.items()}
            for name, runs in results.items()
        },
    }
    reporting.write(options.output, found, plot=lambda path: plot(results, summaries, path))


if __name__ == "__main__":
    main()
