"""The workers of bench_collectives for one world size: started by mpirun, and supervised until they have ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from benchmarks.support.launch import environment
from benchmarks.workers.collectives import MEASURED, PROGRESS

END_S = 5.0  # from SIGTERM to SIGKILL
STARTING_S = 60.0  # for the processes to start and end, in addition to the time to measure
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorldFailed(RuntimeError):
    """The workers of one number of ranks failed, were late or summed wrongly."""


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def find_mpirun() -> str | None:
    """Find the mpirun of this Python's environment, or else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def version_of(mpirun: str) -> str:
    """The first line of ``mpirun --version``."""
    output = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60.0, check=False).stdout
    return output.partition("\n")[0]


def mpirun_command(mpirun: str, ranks: int) -> list[str]:
    """The command that starts this many processes on this machine."""
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
    """Run the workers of one world size, block until they have ended, and return what rank 0 wrote.

    `show` is called repeatedly with rank 0's progress.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-") as folder, open(f"{folder}/log", "w+") as log:
        arguments = ["--variants", ",".join(variants), "--sizes", ",".join(map(str, sizes)), "--rounds", str(rounds)]
        arguments += ["--timeout-s", str(timeout_s), "--folder", folder, "--reader", str(os.getpid())]
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        env |= environment()
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "benchmarks.workers.collectives", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that it can be ended as one
        )
        deadline = time.monotonic() + timeout_s + STARTING_S
        progress: dict[str, Any] = {"doing": "starting"}
        try:
            while process.poll() is None:
                if (Path(folder) / PROGRESS).exists():
                    progress = json.loads((Path(folder) / PROGRESS).read_text())
                    show(progress)
                if time.monotonic() > deadline:
                    raise WorldFailed(f"not over after {timeout_s=}, while {progress['doing']}; {_log_tail(log)}")
                time.sleep(0.1)
            written = Path(folder) / MEASURED
            if process.returncode != 0 or not written.exists():
                raise WorldFailed(f"code {process.returncode} while {progress['doing']}; {_log_tail(log)}")
        finally:
            _end(process)
        measured: dict[str, Any] = json.loads(written.read_text())
    if "wrong" in measured:
        raise WorldFailed("wrong results (expected the plain sum; of memcpy, a copy):\n" + "\n".join(measured["wrong"]))
    return measured


def _log_tail(log: TextIO) -> str:
    log.seek(0)
    return "the workers wrote:\n" + ("".join(log.readlines()[-80:]).strip() or "(nothing)")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, which ends its workers; they also end by themselves when it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)
