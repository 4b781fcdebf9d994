"""Ranks of a real mpirun, for tests: ``run_mpi(3, train, seed)`` calls ``train(seed)`` in three of them.

With ``run_mpi_from_scratch`` mpirun starts the ranks' own processes. That takes seconds, because each imports torch. It
is for tests of lost ranks and of how processes end, which depend on it. With ``run_mpi`` mpirun starts a proxy for each
rank. The proxy passes its environment on to a process that is forked from the fork server (see ranks.py), and sleeps
until that has ended. MPI identifies a rank by its environment and its connection, so that process is the rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
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
from typing import IO, Any

import pytest

# When a rank dies, mpirun ends the others, unless it is told that they can recover.
SURVIVORS_GO_ON = ("--runtime-options", "recoverable")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "GRADSYNC_")
IMPORTING_S = 30.0
ENDING_S = 5.0  # for a process to end after it was asked to

PROXY = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["OMPI_COMM_WORLD_RANK"]
recorded = b"\\0".join(name + b"=" + value for name, value in os.environb.items())
(folder / f"{rank}.new").write_bytes(recorded)
(folder / f"{rank}.new").replace(folder / f"{rank}.environ")
end_s = time.monotonic() + float(sys.argv[2])
while folder.exists() and not (folder / "ended").exists() and time.monotonic() < end_s:
    time.sleep(0.02)
"""


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
    timeout_s: float = 180.0,
) -> Ended:
    """Run ``command`` in ``world_size`` ranks, even on fewer cores; blocks until mpirun has ended."""
    with tempfile.TemporaryFile() as log:
        process = _start_mpirun(world_size, *command, options=options, env=env, cwd=cwd, log=log)
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        log.seek(0)
        return Ended(code, log.read().decode(errors="replace"))


def _start_mpirun(
    world_size: int,
    *command: str,
    options: tuple[str, ...],
    env: dict[str, str] | None,
    cwd: str | Path | None,
    log: IO[bytes],
) -> subprocess.Popen[bytes]:
    started = [find_mpirun(), "--oversubscribe", *options, "-n", str(world_size), *command]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environ |= {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ |= env or {}
    return subprocess.Popen(started, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # at the first mpirun ends its ranks
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)


def run_mpi(
    world_size: int,
    fn: Callable[..., Any],
    *args: object,
    timeout_s: float = 180.0,
    env: dict[str, str] | None = None,
    preload: tuple[str, ...] = (),
) -> list[Any]:
    """Call ``fn(*args)`` in ``world_size`` ranks of an mpirun; blocks until all have ended.

    ``fn`` is a function at the top of a test module; arguments and results are pickled. If a rank fails, the
    AssertionError shows every failed rank's traceback and what mpirun printed.
    """
    from tests.support.ranks import run_processes  # not above: run as a script, this file finds no package `tests` yet

    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="gradsync-mpi-") as folder:
        command = (sys.executable, "-I", "-S", "-c", PROXY, folder, str(timeout_s + IMPORTING_S))
        process = _start_mpirun(world_size, *command, options=SURVIVORS_GO_ON, env=env, cwd=os.getcwd(), log=log)
        try:
            preload = (fn.__module__, *preload)
            return run_processes(
                world_size, _run_as_proxied_rank, folder, fn, args, timeout_s=timeout_s, preload=preload
            )
        except AssertionError as error:
            log.seek(0)
            error.add_note(f"mpirun wrote:\n{log.read().decode(errors='replace')}")
            raise
        finally:
            (Path(folder) / "ended").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            _end(process)


def _run_as_proxied_rank(folder: str, fn: Callable[..., Any], args: tuple[object, ...]) -> Any:
    """Run ``fn`` as the rank whose proxy has written its environment to a file."""
    recorded = Path(folder) / f"{os.environ['RANK']}.environ"
    end_s = time.monotonic() + IMPORTING_S
    while not recorded.exists():
        assert time.monotonic() < end_s, f"mpirun has started no process in {IMPORTING_S} s"
        time.sleep(0.005)
    os.environb.clear()
    os.environb.update(entry.split(b"=", 1) for entry in recorded.read_bytes().split(b"\0"))  # type: ignore[arg-type,misc]
    return fn(*args)


def run_mpi_from_scratch(
    world_size: int,
    fn: Callable[..., Any],
    *args: object,
    timeout_s: float = 180.0,
    expect_failure: bool = False,
    options: tuple[str, ...] = SURVIVORS_GO_ON,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` in ``world_size`` processes that mpirun itself starts; blocks until all have ended.

    Otherwise as ``run_mpi``. With ``expect_failure`` nothing is raised: the list holds each rank's result, the
    exception that it raised, or None for a rank that was ended before it could say anything.
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
        _wait_for_leftover_ranks(folder)
        outcomes = [_read(folder / f"{rank}.pickle") for rank in range(world_size)]
    if expect_failure:
        return [outcome["result"] if outcome["error"] is None else outcome["error"] for outcome in outcomes]
    failures = [f"rank {rank}: {outcome['traceback']}" for rank, outcome in enumerate(outcomes) if outcome["traceback"]]
    assert not failures, "\n\n".join([*failures, f"mpirun ended with {ended.exit_code} and wrote:\n{ended.output}"])
    return [outcome["result"] for outcome in outcomes]


def _wait_for_leftover_ranks(folder: Path) -> None:
    """After a failure mpirun does not wait for its ranks: wait for them here, and end those that are stopped."""
    end_s = time.monotonic() + ENDING_S
    for file in folder.glob("*.pid"):
        while _is_rank(int(file.stem), folder):
            if time.monotonic() > end_s:
                os.kill(int(file.stem), signal.SIGKILL)
            time.sleep(0.02)


def _is_rank(pid: int, folder: Path) -> bool:
    """Whether the process exists and is a rank of this folder: its id may have been reused."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"result": None, "error": None, "traceback": "it ended without a result"}
    outcome: dict[str, Any] = pickle.loads(path.read_bytes())
    return outcome


def _wait_for_all(folder: Path, world_size: int) -> None:
    """Start all ranks at once: importing takes some ranks seconds longer, and is no part of the test."""
    (folder / f"{os.getpid()}.ready").touch()
    end_s = time.monotonic() + IMPORTING_S
    while len(list(folder.glob("*.ready"))) < world_size and time.monotonic() < end_s:
        time.sleep(0.02)


def _run_rank(folder: Path) -> int:
    """Run one rank: call the function, and write the result or the error to a file."""
    gc.disable()  # imported modules stay, and collecting them takes a second, and again at exit
    (folder / f"{os.getpid()}.pid").touch()
    faulthandler.enable()
    job = pickle.loads((folder / "job").read_bytes())
    sys.path[:] = job["path"]
    outcome: dict[str, Any] = {"result": None, "error": None, "traceback": ""}
    try:
        module, name = job["fn"]
        fn, args = getattr(importlib.import_module(module), name), pickle.loads(job["args"])
        gc.freeze()
        gc.enable()
        _wait_for_all(folder, job["world_size"])
        outcome["result"] = fn(*args)
        body = pickle.dumps(outcome)
    except BaseException as error:
        outcome = {"result": None, "error": error, "traceback": traceback.format_exc()}
        body = pickle.dumps(outcome)
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    (folder / f"{rank}.new").write_bytes(body)
    (folder / f"{rank}.new").replace(folder / f"{rank}.pickle")
    return 1 if outcome["traceback"] else 0


if __name__ == "__main__":
    sys.exit(_run_rank(Path(sys.argv[1])))
