"""Ranks that a real mpirun starts, for tests: ``run_mpi(3, train, seed)`` calls ``train(seed)`` in three of them.

Starting them takes seconds, because each imports torch: put many checks into one call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# When a rank dies, mpirun ends the others, unless it is told that they can look after themselves.
SURVIVORS_GO_ON = ("--runtime-options", "recoverable")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "GRADSYNC_")
IMPORTING_S = 30.0
ENDING_S = 5.0  # what a process may take to end once it has been told to


def find_mpirun() -> str:
    """The path of mpirun; where there is none the test is skipped, or fails where CI=true."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        missing = "there is no mpirun; the extra [dev] brings one"
        assert os.environ.get("CI") != "true", missing
        pytest.skip(missing)
    return found


@dataclass(frozen=True)
class Ended:
    """How mpirun ended."""

    exit_code: int | None  # None: it was still running when its time was up
    output: str  # of mpirun and of all ranks


def mpirun(
    world_size: int,
    *command: str,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout_s: float = 60.0,
) -> Ended:
    """Run ``command`` in so many ranks, on however few cores; blocks until mpirun has ended."""
    started = [find_mpirun(), "--oversubscribe", *options, "-n", str(world_size), *command]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environ |= {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            started, env={**environ, **(env or {})}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):  # at the first it ends its ranks
                if process.poll() is None:
                    process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(ENDING_S)
        log.seek(0)
        return Ended(code, log.read().decode(errors="replace"))


def run_mpi(
    world_size: int,
    fn: Callable[..., Any],
    *args: object,
    timeout_s: float = 60.0,
    expect_failure: bool = False,
    options: tuple[str, ...] = SURVIVORS_GO_ON,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` in ``world_size`` processes that mpirun starts; blocks until all have ended.

    ``fn`` is a function at the top of a test module; arguments and results are pickled. If a rank fails, the
    AssertionError shows its traceback and what was printed.

    With ``expect_failure`` nothing is raised: the list holds each rank's result, the exception that it raised, or None
    for a rank that was ended before it could say anything.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-mpi-") as name:
        folder = Path(name)
        job = {
            "world_size": world_size,
            "path": sys.path,
            "fn": (fn.__module__, fn.__qualname__),
            "args": pickle.dumps(args),
        }
        (folder / "job").write_bytes(pickle.dumps(job))
        command = (sys.executable, __file__, name)
        ended = mpirun(world_size, *command, options=options, env=env, cwd=os.getcwd(), timeout_s=timeout_s)
        _see_off(folder)
        outcomes = [_read(folder / f"{rank}.pickle") for rank in range(world_size)]
    if expect_failure:
        return [outcome["result"] if outcome["error"] is None else outcome["error"] for outcome in outcomes]
    told = [f"rank {rank}: {outcome['traceback']}" for rank, outcome in enumerate(outcomes) if outcome["traceback"]]
    assert not told, "\n\n".join([*told, f"mpirun ended with {ended.exit_code} and wrote:\n{ended.output}"])
    return [outcome["result"] for outcome in outcomes]


def _see_off(folder: Path) -> None:
    """Wait for ranks that mpirun did not wait for, as it does after a failure, and end those that are stopped."""
    end_s = time.monotonic() + ENDING_S
    for file in folder.glob("*.pid"):
        while _is_rank(int(file.stem), folder):
            if time.monotonic() > end_s:
                os.kill(int(file.stem), signal.SIGKILL)
            time.sleep(0.02)


def _is_rank(pid: int, folder: Path) -> bool:
    """Whether the process is there, and is one of this folder's: its number may be another's by now."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"result": None, "error": None, "traceback": "it ended without a word"}
    told: dict[str, Any] = pickle.loads(path.read_bytes())
    return told


def _wait_for_all(folder: Path, world_size: int) -> None:
    """Begin together: importing takes some ranks seconds longer than others, and is no part of what is tested."""
    (folder / f"{os.getpid()}.ready").touch()
    end_s = time.monotonic() + IMPORTING_S
    while len(list(folder.glob("*.ready"))) < world_size and time.monotonic() < end_s:
        time.sleep(0.02)


def _be_rank(folder: Path) -> int:
    """Be one rank: do the job, and leave the result or the error in a file."""
    (folder / f"{os.getpid()}.pid").touch()
    faulthandler.enable()
    job = pickle.loads((folder / "job").read_bytes())
    sys.path[:] = job["path"]
    told: dict[str, Any] = {"result": None, "error": None, "traceback": ""}
    try:
        module, name = job["fn"]
        fn, args = getattr(importlib.import_module(module), name), pickle.loads(job["args"])
        _wait_for_all(folder, job["world_size"])
        told["result"] = fn(*args)
        body = pickle.dumps(told)
    except BaseException as error:
        told = {"result": None, "error": error, "traceback": traceback.format_exc()}
        body = pickle.dumps(told)
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    (folder / f"{rank}.new").write_bytes(body)
    (folder / f"{rank}.new").replace(folder / f"{rank}.pickle")
    return 1 if told["traceback"] else 0


if __name__ == "__main__":
    sys.exit(_be_rank(Path(sys.argv[1])))
