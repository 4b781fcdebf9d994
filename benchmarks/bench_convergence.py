"""How training goes with compressed gradients: eval loss against steps, seconds and bytes, spec by spec.

    python benchmarks/bench_convergence.py
    python benchmarks/bench_convergence.py --specs "allreduce; allreduce(codec=int4)" --seeds 0,1,2

Every run is ``gradsync run -n 2 --sync SPEC examples/char_lm.py``: the same model, data order, learning rate and
initial weights for all specs of a seed. The first spec is what the others are compared with. Seeds take turns, so
that whatever else the machine does falls on all specs alike. Seconds are those of the training steps on this machine,
where the workers share memory; evaluations are not counted. Bytes are what one worker sends. A strategy under which
workers train on their own settles once, before the evaluation at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.bench_step import describe_machine  # noqa: E402
from benchmarks.netlab import LabError, run_together  # noqa: E402
from benchmarks.paired import paired_ratio  # noqa: E402
from gradsync import spec  # noqa: E402

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
LOG_WIDTH = 120  # columns, where the output is no terminal
# Of a middle lightness: they are seen on white and on black.
COLOURS = ("#8c8c8c", "#2f80ed", "#22a06b", "#e8710a", "#c2468f", "#9b5de5", "#c79a00", "#14a3b8", "#d64545")

Runs = dict[str, dict[int, dict[str, Any]]]  # by spec and seed: what the example wrote


class RunFailed(RuntimeError):
    """A training run did not come to its end."""


# -- measuring ------------------------------------------------------------------------------------------------------


def train(text: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the example once, in workers of its own; block until it has ended; give its log."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "log.json"
        command = [*options.under, sys.executable, "-m", "gradsync.cli.main", "run", "-n", str(options.workers)]
        command += ["--sync", text, str(SCRIPT), "--steps", str(options.steps), "--seed", str(seed)]
        command += ["--eval-every", str(options.eval_every), "--threads", "1", *options.model, "--json", str(out)]
        if options.data:
            command += ["--data", str(options.data)]
        try:  # what the workers say of a failure goes to stderr
            run_together([command], envs=[{"OMP_NUM_THREADS": "1"}], timeout_s=options.timeout_s, capture=True)
        except LabError as error:
            raise RunFailed(f"{text}, seed {seed}: {error}") from error
        log: dict[str, Any] = json.loads(out.read_text())
    if not log["evals"] or log["evals"][-1][0] != options.steps:
        log["evals"].append([options.steps, log["eval_loss"]])
    return log


def measure(options: argparse.Namespace, show: Callable[[str], None]) -> Runs:
    """Train every spec with every seed."""
    runs: Runs = {text: {} for text in options.specs}
    for seed in options.seeds:
        for text in options.specs:
            show(f"seed {seed}: {text}")
            runs[text][seed] = train(text, seed, options)
    return runs


# -- what it means --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether a spec ended close enough to the first one."""

    percent: float  # more eval loss than the first spec's, means over the seeds
    within: float | None  # what it may be, if somebody has said

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
    """Lay the means out for a reader."""
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
    """Draw the loss against steps, seconds and bytes, on no background: it is seen on light and dark."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grey = "#808080"
    grey_parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {**dict.fromkeys(grey_parts, grey), "axes.spines.top": False, "axes.spines.right": False}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "gradsync", "font.size": 11}
    with mpl.rc_context(style):
        figure = Figure(figsize=(12.5, 4.6), layout="constrained")
        figure.suptitle(title)
        panels = figure.subplots(1, 3, sharey=True)
        lines = []
        for number, (text, logs) in enumerate(runs.items()):
            means = curves(logs)
            look: Any = {"color": COLOURS[number % len(COLOURS)], "linewidth": 2.4 if number == 0 else 1.6}
            look |= {"linestyle": "--" if number == 0 else "-", "marker": "o", "markersize": 3, "label": text}
            panels[0].plot(means["steps"], means["loss"], **look)
            panels[1].plot(means["seconds"], means["loss"], **look)
            lines += panels[2].semilogx([sent / 1e6 for sent in means["bytes"]], means["loss"], **look)
        for axes, label in zip(panels, ("steps", "seconds of training", "MB sent by a worker"), strict=True):
            axes.set_xlabel(label)
            axes.grid(visible=True, axis="y", color=grey, alpha=0.25, linewidth=0.6)
        panels[2].xaxis.set_major_formatter("{x:g}")
        panels[0].set_ylabel("eval loss, mean of the seeds")
        figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


# -- the command line -----------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Eval loss of examples/char_lm.py with compressed gradients.")
    parser.add_argument(
        "--specs", help=f"separated by ';', the first is what others are held against (default: {len(PERCENT)})"
    )
    parser.add_argument("--steps", type=int, default=600, help="of every run (default: 600)")
    parser.add_argument("--seeds", default="0,1,2", help="a run of every spec for each (default: 0,1,2)")
    parser.add_argument("--workers", type=int, default=2, help="of one thread each (default: 2)")
    parser.add_argument("--eval-every", type=int, default=0, help=f"steps (default: {NUM_EVALS} times in a run)")
    parser.add_argument("--data", type=Path, help="a text to learn (default: the standard library's source)")
    parser.add_argument(
        "--model", type=shlex.split, default=MODEL, help=f"the example's own options (default: {MODEL})"
    )
    parser.add_argument(
        "--under", type=shlex.split, default="", help='put before every run, such as "nice" or "flock FILE"'
    )
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="for each run (default: 3600)")
    parser.add_argument("--output", type=Path, default=PROJECT / "benchmarks" / "results", help="folder for the files")
    parser.add_argument("--no-save", action="store_true", help="print only: no JSON, no plot")
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
    try:
        options.seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds must be whole numbers, such as 0,1,2; got {options.seeds!r}.")
    if options.workers < 2:
        parser.error(f"--workers must be 2 or more: one sends nothing; got {options.workers}.")
    if options.steps < 1:
        parser.error(f"--steps must be 1 or more; got {options.steps}.")
    options.eval_every = options.eval_every or max(1, options.steps // NUM_EVALS)
    if not options.no_save and importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot needs matplotlib. Install it (pip install matplotlib), or say --no-save.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train everything, print the table, write the JSON and the plot."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    started = datetime.now(UTC)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=len(options.specs) * len(options.seeds), completed=-1)
        try:
            runs = measure(options, lambda doing: bar.update(task, description=doing, advance=1))
        except RunFailed as error:
            bar.stop()
            sys.exit(f"bench_convergence: {error}")
    summary = summarize(runs)
    seeds = "seed" if len(options.seeds) == 1 else "seeds"
    what = f"char_lm {shlex.join(options.model)}: {options.steps} steps, {options.workers} workers"
    console.print(table_of(summary, caption=f"{what}, means of {len(options.seeds)} {seeds}."))
    if options.no_save:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{started:%Y-%m-%d-%H%M}-convergence.json"
    report = {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/bench_convergence.py", *(arguments or sys.argv[1:])]),
        "machine": describe_machine(),
        "steps": options.steps,
        "workers": options.workers,
        "model": options.model,
        "summary": summary,
        "curves": {text: curves(logs) for text, logs in runs.items()},
        "losses": {text: {seed: log["losses"] for seed, log in logs.items()} for text, logs in runs.items()},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    plot(runs, path.with_suffix(".svg"), title=what)
    console.print(f"Written to {path} and {path.with_suffix('.svg').name}")


if __name__ == "__main__":
    main()
