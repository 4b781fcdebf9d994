"""How training goes with compressed gradients: eval loss against steps, seconds and bytes, spec by spec.

    python benchmarks/bench_convergence.py
    python benchmarks/bench_convergence.py --specs "allreduce; allreduce(codec=int4)" --seeds 0,1,2

Every run is ``gradsync run -n 2 --sync SPEC examples/char_lm.py``: the same model, data order, learning rate and
initial weights for all specs of a seed. The first spec is what the others are compared with. All specs of a seed run
before the next seed, so that other load on the machine affects them alike. Seconds are those of the training steps on
this machine, where the workers share memory; evaluations are not counted. Bytes are what one worker sends. A strategy
under which workers train on their own settles once, before the evaluation at the end.

It takes hours: with ``--runs FOLDER``, finished runs are kept, and a later call continues from them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich import box  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.support.paired import paired_ratio  # noqa: E402
from benchmarks.support.plots import add_grid, figure_for, look_of  # noqa: E402
from benchmarks.support.reporting import Reporting, add_saving, describe_machine, plot_problem  # noqa: E402
from benchmarks.support.training import KeptRuns, RunFailed, add_training, launch  # noqa: E402
from gradsync import spec  # noqa: E402
from gradsync.testing import LabError  # noqa: E402

SCRIPT = PROJECT / "examples" / "char_lm.py"
PERCENT = {  # of exact training's eval loss: how much more a spec may end with
    "allreduce": None,
    "allreduce(codec=int8)": 0.3,
    "allreduce(codec=int4)": 2.0,
    "allreduce(codec=sign)": 2.0,
    "onebit_adam(warmup_steps=150)": 2.0,
    "allreduce(codec=topk(density=0.01))": 2.0,
    "allreduce(reducer=powersgd(rank=4))": 2.0,
    "diloco(every=50, fragments=4, codec=int4)": 2.0,
}
# A small model: what matters here is how the loss falls, and 21 runs should not take a day.
MODEL = "--layers 2 --width 128"
NUM_EVALS = 12

Runs = dict[str, dict[int, dict[str, Any]]]  # by spec and seed: what the example wrote


# -- measuring ------------------------------------------------------------------------------------------------------


def script_of(seed: int, options: argparse.Namespace) -> list[str]:
    """The example and its arguments."""
    script = [str(SCRIPT), "--steps", str(options.steps), "--seed", str(seed), "--eval-every", str(options.eval_every)]
    script += ["--threads", "1", *options.model]
    return [*script, "--data", str(options.data)] if options.data else script


def settings_of(text: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything but the code that a run's log depends on: the key under which it is kept."""
    return {
        "sync": text,
        "script": script_of(seed, options),
        "data": hashlib.sha256(options.data.read_bytes()).hexdigest() if options.data else None,
        "workers": options.workers,
        "machine": describe_machine(),  # its seconds are compared with those of other runs
    }


def train(text: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the example once, in workers of its own; blocks until it has ended; returns its log."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "log.json"
        try:
            launch([*script_of(seed, options), "--json", str(out)], options, sync=text)
        except LabError as error:
            raise RunFailed(f"{text}, seed {seed}: {error}") from error
        log: dict[str, Any] = json.loads(out.read_text())
    if not log["evals"] or log["evals"][-1][0] != options.steps:
        log["evals"].append([options.steps, log["eval_loss"]])
    return log


def measure(options: argparse.Namespace, show: Callable[[str], None]) -> Runs:
    """Train every spec with every seed, but for runs that an earlier call has kept."""
    kept = KeptRuns(options.runs)
    runs: Runs = {text: {} for text in options.specs}
    for seed in options.seeds:
        for text in options.specs:
            show(f"seed {seed}: {text}")
            name, settings = f"{text} {seed}", settings_of(text, seed, options)
            log = kept.get(name, settings)
            if log is None:
                log = train(text, seed, options)
                kept.put(name, settings, log)
            runs[text][seed] = log
    return runs


# -- what it means --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether a spec ended close enough to the first one."""

    percent: float  # more eval loss than the first spec's, means over the seeds
    within: float | None  # the allowed percentage; None: no limit is set

    def __str__(self) -> str:
        if self.within is None:
            return ""
        return "met" if self.percent <= self.within else "missed"  # NaN is a miss


def summarize(runs: Runs) -> dict[str, dict[str, Any]]:
    """Reduce the seeds of each spec to means, and to ratios to the first spec's with the same seeds."""
    first = next(iter(runs.values()))
    exact = [log["eval_loss"] for log in first.values()]
    summary: dict[str, dict[str, Any]] = {}
    for text, logs in runs.items():
        losses = [log["eval_loss"] for log in logs.values()]
        verdict = Verdict(100 * (statistics.fmean(losses) / statistics.fmean(exact) - 1), PERCENT.get(text))
        paired = len(losses) >= 3 and text != next(iter(runs)) and all(map(math.isfinite, losses))
        summary[text] = {
            "eval_loss": statistics.fmean(losses),
            "eval_losses": losses,
            "percent_above_first": verdict.percent,
            "within_percent": verdict.within,
            "verdict": str(verdict),
            "paired_ratio": paired_ratio(losses, exact).as_dict() if paired else None,
            "median_step_s": statistics.median(s for log in logs.values() for s in log["step_s"]),
            "sent_bytes_per_step": statistics.fmean(b for log in logs.values() for b in log["sent_bytes"]),
        }
    return summary


def curves(logs: dict[int, dict[str, Any]]) -> dict[str, list[float]]:
    """Means over the seeds at each evaluation: steps, seconds and bytes until then, and the loss."""
    each = list(logs.values())
    steps = [step for step, _ in each[0]["evals"]]
    until = {name: [list(accumulate(log[name])) for log in each] for name in ("step_s", "sent_bytes")}
    return {
        "steps": steps,
        "seconds": [statistics.fmean(total[step - 1] for total in until["step_s"]) for step in steps],
        "bytes": [statistics.fmean(total[step - 1] for total in until["sent_bytes"]) for step in steps],
        "loss": [
            statistics.fmean(losses) for losses in zip(*([v for _, v in log["evals"]] for log in each), strict=True)
        ],
    }


def table_of(summary: dict[str, dict[str, Any]], *, caption: str) -> Table:
    """The table of means."""
    table = Table(title="Eval loss at the end", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("spec", no_wrap=True)
    for title in (
        "eval loss",
        "of each seed",
        "against the first",
        "may be",
        "",
        "KB a step",
        "times fewer",
        "ms a step",
    ):
        table.add_column(title, justify="right")
    first = next(iter(summary.values()))
    for text, row in summary.items():
        colour = {"met": "green", "missed": "red"}.get(row["verdict"], "")
        sent = row["sent_bytes_per_step"]
        table.add_row(
            text,
            f"{row['eval_loss']:.4f}",
            " ".join(f"{loss:.3f}" for loss in row["eval_losses"]),
            f"{row['percent_above_first']:+.2f} %",
            "" if row["within_percent"] is None else f"+{row['within_percent']:g} %",
            f"[{colour}]{row['verdict']}[/]" if colour else "",
            f"{sent / 1e3:.1f}",
            f"{first['sent_bytes_per_step'] / sent:.1f}" if sent else "",
            f"{row['median_step_s'] * 1e3:.0f}",
        )
    return table


def plot(runs: Runs, path: Path, *, title: str) -> None:
    """Draw the loss against steps, seconds and bytes."""
    with figure_for(path, width=12.5, height=4.6) as figure:
        figure.suptitle(title)
        panels = figure.subplots(1, 3, sharey=True)
        lines = []
        for number, (text, logs) in enumerate(runs.items()):
            means = curves(logs)
            look = look_of(number, text) | {"marker": "o", "markersize": 3}
            panels[0].plot(means["steps"], means["loss"], **look)
            panels[1].plot(means["seconds"], means["loss"], **look)
            lines += panels[2].semilogx([sent / 1e6 for sent in means["bytes"]], means["loss"], **look)
        for axes, label in zip(panels, ("steps", "seconds of training", "MB sent by a worker"), strict=True):
            axes.set_xlabel(label)
            add_grid(axes)
        panels[2].xaxis.set_major_formatter("{x:g}")
        panels[0].set_ylabel("eval loss, mean of the seeds")
        figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False)


# -- the command line -----------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Eval loss of examples/char_lm.py with compressed gradients.")
    parser.add_argument(
        "--specs", help=f"separated by ';', the first is what others are compared with (default: {len(PERCENT)})"
    )
    parser.add_argument("--steps", type=int, default=600, help="of every run (default: 600)")
    parser.add_argument("--eval-every", type=int, default=0, help=f"steps (default: {NUM_EVALS} times in a run)")
    parser.add_argument(
        "--model", type=shlex.split, default=MODEL, help=f"the example's own options (default: {MODEL})"
    )
    add_training(parser, seeds="0,1,2", workers=2)
    add_saving(parser, files="JSON, no plot")
    options = parser.parse_args(arguments)
    texts = [text.strip() for text in options.specs.split(";")] if options.specs else list(PERCENT)
    if len(set(texts)) < len(texts):
        parser.error(f"--specs must differ from one another; got {'; '.join(texts)}.")
    for text in texts:
        try:
            spec.parse(text, kind="strategy")
        except ValueError as error:
            parser.error(f"--specs: {error}")
    options.specs = texts
    if options.workers < 2:
        parser.error(f"--workers must be 2 or more: one sends nothing; got {options.workers}.")
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more; got {options.steps}.")
    options.eval_every = options.eval_every or max(1, options.steps // NUM_EVALS)
    if lack := plot_problem(options):
        parser.error(lack)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train everything, print the table, write the JSON and the plot."""
    options = parse(arguments)
    reporting = Reporting("convergence", arguments)
    try:
        with reporting.counting(len(options.specs) * len(options.seeds)) as show:
            runs = measure(options, show)
    except RunFailed as error:
        reporting.fail(error)
    summary = summarize(runs)
    seeds = "seed" if len(options.seeds) == 1 else "seeds"
    what = f"char_lm {shlex.join(options.model)}: {options.steps} steps, {options.workers} workers"
    reporting.console.print(table_of(summary, caption=f"{what}, means of {len(options.seeds)} {seeds}."))
    if options.no_save:
        return
    found = {
        "steps": options.steps,
        "workers": options.workers,
        "model": options.model,
        "summary": summary,
        "curves": {text: curves(logs) for text, logs in runs.items()},
        "losses": {text: {seed: log["losses"] for seed, log in logs.items()} for text, logs in runs.items()},
    }
    reporting.write(options.output, found, plot=lambda path: plot(runs, path, title=what))


if __name__ == "__main__":
    main()
