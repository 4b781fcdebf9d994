"""Running a script under a strategy, on this machine or on the emulated links of a network lab."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsync.compare.curve import FOLDER, INTERFACE, Limits
from gradsync.compare.summary import Curve, load_curve
from gradsync.testing import Lab, LabError, run_commands
from gradsync.testing.network import INTERFACE as LINK
from gradsync.testing.network import MASTER_PORT

LOOK_S = 0.2  # how often progress is polled
SHOWN_LINES = 12  # of a failed run's log
SHUTDOWN_S = 5  # for a worker that is asked to end; shorter than the time that a launcher has itself
OWNER = "GRADSYNC_OWNER_PID"  # a launcher ends when the process of this id does


class RunFailed(RuntimeError):
    """A run failed; the message holds the beginning of its log."""


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """The settings that are the same for every strategy of a comparison.

    ``link``: each worker is a host of its own, on links of this rate; None: all run on this machine.
    """

    script: Sequence[str]  # the file and its arguments, or "-m", the module and its arguments
    workers: int
    limits: Limits
    link: str | None = None
    timeout_s: float = 3600.0

    def commands(self, strategy: str) -> list[list[str]]:
        """The command line of the launcher on each host."""
        start = [sys.executable, "-m", "gradsync.cli.main", "run", "--sync", strategy]
        start.append(f"--shutdown-timeout={SHUTDOWN_S}")
        if self.link is None:
            return [[*start, "-n", str(self.workers), *self.script]]
        return [
            [
                *start,
                *("-n", "1", "--nnodes", str(self.workers), "--node-rank", str(host)),
                *("--master-addr", "10.77.0.1", "--master-port", str(MASTER_PORT), *self.script),
            ]
            for host in range(self.workers)
        ]


def run_one(
    plan: ComparisonPlan,
    strategy: str,
    folder: Path,
    *,
    lab: Lab | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Curve:
    """Run the script under one strategy; returns its curve. Blocks.

    ``on_progress`` is called every LOOK_S seconds with the number of steps that rank 0 has done; an exception that it
    raises ends the run. Raises :class:`RunFailed`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = plan.commands(strategy)
    logs = [folder / f"log-{host}.txt" for host in range(len(commands))]
    env = {FOLDER: str(folder), OWNER: str(os.getpid()), **plan.limits.as_environment()}
    looked_s = 0.0

    def look() -> None:
        nonlocal looked_s
        if on_progress is not None and time.monotonic() - looked_s > LOOK_S:
            looked_s = time.monotonic()
            on_progress(_steps_of(folder / "rank-0.jsonl"))

    try:
        if lab is None:
            run_commands(commands, envs=[env] * len(commands), timeout_s=plan.timeout_s, logs=logs, on_wait=look)
        else:
            cores = max(1, len(os.sched_getaffinity(0)) // plan.workers)  # the lab's hosts share this machine's cores
            env = {"OMP_NUM_THREADS": str(cores), INTERFACE: LINK, **env}
            lab.run(commands, timeout_s=plan.timeout_s, env=env, logs=logs, on_wait=look)
    except LabError as error:
        raise RunFailed(_tail(logs) or str(error)) from error
    try:
        return load_curve(folder)
    except ValueError as error:
        raise RunFailed(f"{error}\n{_tail(logs)}".strip()) from error


def _steps_of(path: Path) -> int:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return max(0, sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 16), b"")) - 1)
    return 0


def _tail(logs: Sequence[Path]) -> str:
    for log in logs:
        with contextlib.suppress(OSError):
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return "\n".join(lines[:SHOWN_LINES])  # a launcher shows the failure that matters first
    return ""
