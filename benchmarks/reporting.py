"""What the benchmarks' command lines share: where they print, how far they are, and the dated files that they write."""

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

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
LOG_WIDTH = 120  # columns, where the output is no terminal


class Reporting:
    """One call of ``bench_<name>.py``, from its start: where it prints, and the file that it writes.

    arguments: of its ``main``; None: those of the process.
    """

    def __init__(self, name: str, arguments: Sequence[str] | None) -> None:
        self._name = name
        self._started = datetime.now(UTC)
        self._command = shlex.join(["python", f"benchmarks/bench_{name}.py", *(arguments or sys.argv[1:])])
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH

    @contextlib.contextmanager
    def counting(self, total: int) -> Iterator[Callable[[str], None]]:
        """A bar over so many things, for as long as the block lasts; it is told of each that begins."""
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("starting", total=total, completed=-1)
            yield lambda doing: bar.update(task, description=doing, advance=1)

    def fail(self, why: object) -> NoReturn:
        """End the process, saying which benchmark failed and why."""
        sys.exit(f"bench_{self._name}: {why}")

    def write(
        self,
        folder: Path,
        found: Mapping[str, Any],
        *,
        machine: Mapping[str, Any] | None = None,
        plot: Callable[[Path], None] | None = None,
    ) -> None:
        """Write ``<date>-<name>.json``, and beside it the plot if there is one; say where they are.

        machine: what is to be known of it beside what is always said.
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
    """Say what a reader needs to judge the figures."""
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
    """Let the user say whether and where ``files`` ("JSON", "plot") are written."""
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the files")
    parser.add_argument("--no-save", action="store_true", help=f"print only: no {files}")


def why_no_plot(options: argparse.Namespace) -> str:
    """Say what a plot that is to be saved lacks; empty if nothing. Better known before measuring than after."""
    if options.no_save or importlib.util.find_spec("matplotlib") is not None:
        return ""
    return "the plot needs matplotlib. Install it (pip install matplotlib), or say --no-save."
