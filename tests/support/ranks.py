"""Real processes as ranks, for tests: ``run_processes(4, train, seed)`` calls ``train(seed)`` in four of them.

Importing torch takes seconds, so the processes are forked from one fork server (forkserver.py): a process that has
imported torch, gradsync and the test modules that were asked for, and has done nothing with them. The first test that
needs it starts it, and it ends with the test run. No other process is ever ended here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from tests.support import forkserver
from tests.support.forkserver import Job, end_ranks, read_message, write_message
from tests.support.launching import LaunchRequest

T = TypeVar("T")

GRACE_S = 8.0  # for the other ranks to end by themselves once one has failed
START_S = 180.0  # importing torch on a busy machine


class RankFailed(Exception):
    """Replaces an exception that could not be pickled in its process."""


@overload
def run_processes(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout_s: float = ...,
    expect_failure: Literal[False] = ...,
    env: dict[str, str] | None = ...,
    grace_s: float = ...,
    preload: tuple[str, ...] = ...,
) -> list[T]: ...


@overload
def run_processes(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout_s: float = ...,
    expect_failure: Literal[True],
    env: dict[str, str] | None = ...,
    grace_s: float = ...,
    preload: tuple[str, ...] = ...,
) -> list[T | BaseException | int]: ...


def run_processes(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout_s: float = 180.0,
    expect_failure: bool = False,
    env: dict[str, str] | None = None,
    grace_s: float = GRACE_S,
    preload: tuple[str, ...] = (),
) -> list[T] | list[T | BaseException | int]:
    """Call ``fn(*args)`` in ``world_size`` new processes with torchrun's variables set; blocks until all have ended.

    ``fn`` is a function at the top of a test module; arguments and results are pickled. Each process has one torch
    thread. If a rank fails, the others get ``grace_s`` and the AssertionError shows every failed rank's traceback.
    ``preload`` names modules that the ranks will import: they are imported once, before the ranks are forked.

    With ``expect_failure`` nothing is raised and no rank is ended early: the list holds each rank's result, the
    exception it raised, the exit code of a process that ended without either (-9: killed), or a TimeoutError with
    the stack of a rank that was late.
    """
    with tempfile.TemporaryDirectory(prefix="gradsync-ranks-") as folder:
        job = Job(
            fn=(fn.__module__, fn.__qualname__),
            args=pickle.dumps(args),
            world_size=world_size,
            folder=folder,
            sys_path=[entry or os.getcwd() for entry in sys.path],
            cwd=os.getcwd(),
            env={**_torchrun_env(world_size), **(env or {})},
            preload=preload,
        )
        exits, late = fork_server().run(job, timeout_s=timeout_s, grace_s=None if expect_failure else grace_s)
        outcomes = [_Outcome.read(Path(folder), rank, exits[rank], rank in late) for rank in range(world_size)]
    if expect_failure:
        return [outcome.value_or_failure(timeout_s) for outcome in outcomes]
    if any(outcome.failed for outcome in outcomes):
        # The causes first: a late rank only waited for one that had failed.
        failed = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.late)
        raise AssertionError("\n\n".join(outcome.report(timeout_s) for outcome in failed))
    return [outcome.result for outcome in outcomes]


@dataclass
class _Outcome:
    """How one rank ended."""

    rank: int
    exit_code: int
    late: bool
    result: Any
    error: BaseException | None
    traceback: str
    log: str

    @classmethod
    def read(cls, folder: Path, rank: int, exit_code: int, late: bool) -> _Outcome:
        log = (folder / f"{rank}.log").read_text(errors="replace")
        path = folder / f"{rank}.pickle"
        if not path.exists():
            return cls(rank, exit_code, late, None, None, "", log)
        outcome = pickle.loads(path.read_bytes())
        return cls(rank, exit_code, late, outcome["result"], _rebuild_error(outcome), outcome["traceback"], log)

    @property
    def failed(self) -> bool:
        return self.late or self.error is not None or self.exit_code != 0

    def value_or_failure(self, timeout_s: float) -> Any:
        if self.error is not None:
            self.error.add_note(f"(raised on rank {self.rank})\n{self.traceback}")
            return self.error
        if self.late:
            return TimeoutError(self.report(timeout_s))
        return self.result if self.exit_code == 0 else self.exit_code

    def report(self, timeout_s: float) -> str:
        if self.late:
            head = f"rank {self.rank} had not ended when its time was up ({timeout_s=}, less after another's failure)"
        else:
            head = f"rank {self.rank} failed with exit code {self.exit_code}"
        log = f"\nit wrote:\n{self.log.rstrip()}" if self.log.strip() else ""
        return f"{head}\n{self.traceback.rstrip()}{log}"


def _rebuild_error(outcome: dict[str, Any]) -> BaseException | None:
    if not outcome["traceback"]:
        return None
    try:
        kind, args, state = pickle.loads(outcome["error"])
        # Not kind(*args): an exception whose __init__ takes keywords only can't be made again from its args.
        error: BaseException = kind.__new__(kind, *args)
        error.__dict__.update(state)
        return error
    except Exception:
        return RankFailed(outcome["traceback"])


def _torchrun_env(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


# -- the test run's side of the fork server -------------------------------------------------------------------------


class ForkServer:
    """The connection to the process that ranks are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one job at a time: the fork server has one thread
        self._process = subprocess.Popen(
            [sys.executable, forkserver.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        self.alive = True
        self._next(time.monotonic() + START_S)  # "ready": it has imported torch

    def run(self, job: Job, *, timeout_s: float, grace_s: float | None) -> tuple[dict[int, int], set[int]]:
        """Run a job; returns each rank's exit code, and the ranks that had to be ended."""
        with self._lock:
            write_message(self._requests, vars(job))
            pids: list[int] = self._next(time.monotonic() + START_S)
            exits: dict[int, int] = {}
            late: set[int] = set()
            try:
                deadline = time.monotonic() + timeout_s
                while len(exits) < job.world_size:
                    ended = self._next(deadline)
                    if ended is not None:
                        rank, code = ended
                        exits[rank] = code
                        if code != 0 and grace_s is not None:
                            deadline = min(deadline, time.monotonic() + grace_s)
                    elif not late:
                        late = set(range(job.world_size)) - set(exits)
                        self._dump_stacks([pids[rank] for rank in late])
                        end_ranks([pids[rank] for rank in late])
                        deadline = time.monotonic() + START_S
                    else:
                        raise RuntimeError(f"processes {pids} can't be ended; {exits=}")
            except BaseException:
                end_ranks([pid for rank, pid in enumerate(pids) if rank not in exits])
                self.close()  # it may still send messages about this job: the next call starts a new server
                raise
            return exits, late

    def launch(self, request: LaunchRequest) -> int:
        """Start a command; returns its process id. It becomes a child of this process if that adopts orphans."""
        with self._lock:
            write_message(self._requests, vars(request))
            pid: int = self._expect(START_S)
            self._expect(START_S)
        if pid == -1:
            raise RuntimeError(f"{request.streams} can't be opened by another process")
        return pid

    def close(self) -> None:
        """End the fork server, and the ranks that it still has running."""
        self.alive = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=5.0)  # closes its stdin, at which it exits
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _expect(self, within_s: float) -> Any:
        """The fork server's next message, which must come in time."""
        message = self._next(time.monotonic() + within_s)
        if message is None:
            self.close()
            raise TimeoutError(f"the process that others are forked from has not answered in {within_s} s")
        return message

    def _next(self, deadline: float) -> Any:
        """The fork server's next message, or None at the deadline."""
        ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        try:
            return read_message(self._answers)
        except EOFError:
            self.alive = False
            raise RuntimeError("the process that ranks are forked from has died; its output is above") from None

    @staticmethod
    def _dump_stacks(pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes every thread's stack into the rank's log
        time.sleep(0.3)


_fork_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """The fork server of this test run, started at the first call."""
    global _fork_server
    if _fork_server is None or not _fork_server.alive:
        _fork_server = ForkServer()
        atexit.register(_fork_server.close)
    return _fork_server
