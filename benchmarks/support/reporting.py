"""Shared by the benchmarks' command lines: the console, the progress bar, and the dated result files."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "benchmarks" / "results"
LOG_WIDTH = 120


class Reporting:
    """The output of one call of ``bench_<name>.py``: its console, and the file that it writes.

    ``arguments``: of its ``main``; None: those of the process.
    ``log_width``: columns of output that is not a terminal.
    """

    def __init__(self, name: str, arguments: Sequence[str] | None, *, log_width: int = LOG_WIDTH) -> None:
        self._name = name
        self._started = datetime.now(UTC)
        self._command = shlex.join(["python", f"benchmarks/bench_{name}.py", *(arguments or sys.argv[1:])])
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = log_width

    @contextlib.contextmanager
    def counting(self, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar of ``total`` items, for the block; the yielded function is called as each item begins."""
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("starting", total=total, completed=-1)
            yield lambda doing: bar.update(task, description=doing, advance=1)

    def fail(self, why: object) -> NoReturn:
        """End the process with the benchmark's name and the reason."""
        sys.exit(f"bench_{self._name}: {why}")

    def write(
        self,
        folder: Path,
        found: Mapping[str, Any],
        *,
        machine: Mapping[str, Any] | None = None,
        plot: Callable[[Path], None] | None = None,
    ) -> None:
        """Write ``<date>-<name>.json``, and the plot next to it if there is one; print their paths.

        ``machine``: facts about the machine in addition to those of ``describe_machine``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._started:%Y-%m-%d-%H%M}-{self._name}.json"
        report = {
            "date": self._started.isoformat(timespec="seconds"),
            "command": self._command,
            "machine": {**describe_machine(), **(machine or {})},
            **found,
        }
        path.write_text(json.dumps(report, indent=1) + "\n")
        written = str(path)
        if plot is not None:
            plot(path.with_suffix(".svg"))
            written += f" and {path.with_suffix('.svg').name}"
        self.console.print(f"Written to {written}")


def describe_machine() -> dict[str, Any]:
    """The facts about this machine that a reader needs to judge the figures."""
    models = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": models[0].partition(": ")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


# -- options that several have ----------------------------------------------------------------------------------------


def add_saving(parser: argparse.ArgumentParser, *, files: str) -> None:
    """Add the options for whether and where ``files`` ("JSON", "plot") are written."""
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the files")
    parser.add_argument("--no-save", action="store_true", help=f"print only: no {files}")


def plot_problem(options: argparse.Namespace) -> str:
    """Why a plot can't be saved; empty if it can. Checked before measuring."""
    if options.no_save or importlib.util.find_spec("matplotlib") is not None:
        return ""
    return "the plot needs matplotlib. Install it (pip install matplotlib), or give --no-save."
