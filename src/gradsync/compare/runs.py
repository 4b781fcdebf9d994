"""Starting a script under one strategy after the other, on this machine or on a lab's link."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsync.compare.curve import FOLDER, Limits
from gradsync.compare.summary import Curve, load_curve
from gradsync.lab import MASTER_PORT, Lab, LabError, run_together

LOOK_S = 0.2  # how often progress is looked at
SHOWN_LINES = 12  # of a failed run's log


class RunFailed(RuntimeError):
    """A run did not come to its end; says what it printed last."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run: the same for every strategy.

    ``link``: each worker is a host of its own, on links of this rate; None: all are on this machine.
    """

    script: Sequence[str]  # its file and arguments, or "-m", the module and arguments
    workers: int
    limits: Limits
    link: str | None = None
    timeout_s: float = 3600.0

    def commands(self, strategy: str) -> list[list[str]]:
        """A launcher for each host."""
        start = [sys.executable, "-m", "gradsync.cli.main", "run", "--sync", strategy]
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
    plan: Plan, strategy: str, folder: Path, *, lab: Lab | None = None, on_progress: Callable[[int], None] | None = None
) -> tuple[Curve, float | None]:
    """Run the script under one strategy; returns its curve and the bytes that host 0's link carried. Blocks.

    ``on_progress`` is told now and then how many steps rank 0 has done. Raises :class:`RunFailed`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    commands = plan.commands(strategy)
    logs = [folder / f"log-{host}.txt" for host in range(len(commands))]
    env = {FOLDER: str(folder), **plan.limits.as_environment()}
    before = lab.bytes_sent(0) if lab is not None else 0
    failure: list[BaseException] = []

    def go() -> None:
        try:
            if lab is None:
                run_together(commands, envs=[env] * len(commands), timeout_s=plan.timeout_s, logs=logs)
            else:
                cores = max(1, len(os.sched_getaffinity(0)) // plan.workers)  # its hosts share this machine's
                lab.run(commands, timeout_s=plan.timeout_s, env={"OMP_NUM_THREADS": str(cores), **env}, logs=logs)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=go, name="gradsync-compare")
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_S)
        if on_progress is not None:
            on_progress(_steps_of(folder / "rank-0.jsonl"))
    if failure:
        if not isinstance(failure[0], LabError):
            raise failure[0]
        raise RunFailed(_tail(logs) or str(failure[0]))
    try:
        curve = load_curve(folder)
    except ValueError as error:
        raise RunFailed(f"{error}\n{_tail(logs)}".strip()) from error
    return curve, None if lab is None else float(lab.bytes_sent(0) - before)


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
