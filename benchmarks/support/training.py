"""Shared by benchmarks that train under ``gradsync run``: their options, and runs kept from one call to the next."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsync.testing import run_commands

LONGEST_NAME = 200  # of a kept file, in characters: file systems take 255 bytes


class RunFailed(RuntimeError):
    """A training run failed."""


def whole_numbers(text: str) -> list[int]:
    """Read "0,1,2".

    >>> whole_numbers("0,1,2")
    [0, 1, 2]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers, such as 0,1,2; got {text!r}.") from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"expected a file to read; there is none at {text!r}.")
    return Path(text)


def add_training(parser: argparse.ArgumentParser, *, seeds: str, workers: int) -> None:
    """The options of a benchmark that trains, with its own defaults."""
    parser.add_argument("--seeds", type=whole_numbers, default=seeds, help=f"a run of all for each (default: {seeds})")
    parser.add_argument("--workers", type=int, default=workers, help=f"of one thread each (default: {workers})")
    parser.add_argument("--data", type=_file, help="a text to learn (default: the standard library's source)")
    parser.add_argument(
        "--under", type=shlex.split, default="", help='put before every run, such as "nice" or "flock FILE"'
    )
    parser.add_argument(
        "--runs",
        type=Path,
        help="keep each finished run in this folder, and take those of the same settings that are there "
        "(empty it when the code has changed)",
    )
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="for each start of workers (default: 3600)")


def launch(script: Sequence[str], options: argparse.Namespace, *, sync: str | None = None) -> None:
    """Run a script with its arguments in workers of one thread; block until they have ended. Raises LabError.

    Its output is not shown, but a failure report of the workers is: it goes to stderr.
    """
    command = [*options.under, sys.executable, "-m", "gradsync.cli.main", "run", "-n", str(options.workers)]
    command += ["--sync", sync] if sync is not None else []
    run_commands([[*command, *script]], envs=[{"OMP_NUM_THREADS": "1"}], timeout_s=options.timeout_s, capture=True)


class KeptRuns:
    """Keeps the measurements of finished runs in a folder, so that a stopped benchmark can continue; None: keeps none.

    A run is reused only if it was kept under the very same settings.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = KeptRuns(Path(folder))
    ...     kept.put("allreduce 0", {"steps": 600}, {"loss": 1.5})
    ...     kept.get("allreduce 0", {"steps": 600}), kept.get("allreduce 0", {"steps": 700})
    ({'loss': 1.5}, None)
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The measurements of the run of this name under these settings, if they were kept."""
        path = self._path(name)
        if path is None or not path.exists():
            return None
        try:
            kept = json.loads(path.read_text())
            run, measured = kept["run"], kept["measured"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunFailed(f"{path} holds no run that was kept: {error!r}. Remove it.") from error
        # JSON turns tuples into lists.
        return dict(measured) if run == json.loads(json.dumps(settings)) else None

    def put(self, name: str, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        """Keep a run's measurements, replacing those of this name. The write is atomic."""
        path = self._path(name)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"run": settings, "measured": measured}))
        os.replace(unfinished, path)

    def _path(self, name: str) -> Path | None:
        if self._folder is None:
            return None
        plain = name.replace("/", "_")
        if len(plain) > LONGEST_NAME:
            plain = f"{plain[:LONGEST_NAME]} {hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self._folder / f"{plain}.json"
