"""The process that test ranks are forked from, so that only one process has to import torch and gradsync; see ranks.py.

Run as a script it reads jobs from stdin, forks their ranks, and tells on stdout how each of them ended. It has no
threads, or forking would not be safe; the ranks may start what they like.

One thing is not as in processes started apart: forks share the seed of str hashes, so sets of names have one order on
all ranks here. What must not depend on it is tested through the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_POLL_S = 0.005
# What test modules import, and what gradsync imports when it is first used.
_PRELOADED = ("hypothesis", "numpy", "pytest", "gradsync", "gradsync.comm.hierarchical", "gradsync.comm.shm")


@dataclass
class Job:
    """What it takes to make the ranks of one call."""

    fn: tuple[str, str]
    args: bytes
    world_size: int
    folder: str
    sys_path: list[str]
    cwd: str
    env: dict[str, str]
    preload: tuple[str, ...]


def write_message(fd: int, message: object) -> None:
    """Write one object to a pipe."""
    body = pickle.dumps(message)
    left = memoryview(len(body).to_bytes(8, "big") + body)
    while left:
        left = left[os.write(fd, left) :]


def read_message(fd: int) -> Any:
    """Read one object from a pipe, and no byte more, so that select() tells whether another waits; blocks."""
    return pickle.loads(_read(fd, int.from_bytes(_read(fd, 8), "big")))


def _read(fd: int, num_bytes: int) -> bytes:
    got = bytearray()
    while len(got) < num_bytes:
        part = os.read(fd, num_bytes - len(got))
        if not part:
            raise EOFError("the other end of the pipe is gone")
        got += part
    return bytes(got)


def end_ranks(pids: list[int]) -> None:
    """Kill ranks, each with the processes it started: it leads a group of its own."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _serve() -> None:
    """Be the nursery: read jobs from stdin, tell on stdout, until stdin ends."""
    ask, tell = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the imports print must not look like a message

    import torch
    import torch._dynamo  # the optimizers import it at their first step, and it takes as long as torch itself
    import torch.distributed

    sys.path[0] = str(Path(__file__).resolve().parents[1])  # it was the folder of this file
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("tests.compiling").compile_once()
    assert torch.get_num_threads() == 1
    write_message(tell, "ready")

    for job in _jobs(ask):
        _prepare(job)
        pids: list[int] = []
        for rank in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                os.close(ask)
                os.close(tell)
                _be_rank(job, rank)
            pids.append(pid)
        write_message(tell, pids)
        _tell_exits(pids, ask, tell)


def _prepare(job: Job) -> None:
    """Import once for all ranks what each would import. What fails here fails in each of them too, and is told."""
    sys.path[:] = job.sys_path
    for name in (*job.preload, job.fn[0]):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        assert _num_threads() == 1, f"importing {name} has started a thread: forking would not be safe"
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page it shares with this process


def _num_threads() -> int:
    """Those that Python knows and those that it does not."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _jobs(ask: int) -> Iterator[Job]:
    while True:
        try:
            yield Job(**read_message(ask))
        except EOFError:
            return


def _tell_exits(pids: list[int], ask: int, tell: int) -> None:
    running = {pid: rank for rank, pid in enumerate(pids)}
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            write_message(tell, (running.pop(pid), os.waitstatus_to_exitcode(status)))
        # Nothing is asked while a job runs, so what can be read here is the end: the test run is gone.
        elif pid == 0 and select.select([ask], [], [], _POLL_S)[0]:
            end_ranks(list(running))
            sys.exit(1)


def _be_rank(job: Job, rank: int) -> NoReturn:
    """Be one rank, in its fresh process; never returns."""
    os.setsid()
    log = os.open(f"{job.folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update({**job.env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    random.seed(rank)  # else every fork would draw the same temporary names

    told: dict[str, Any] = {"result": None, "error": None, "traceback": ""}
    try:
        module, name = job.fn
        told["result"] = getattr(importlib.import_module(module), name)(*pickle.loads(job.args))
        body = pickle.dumps(told)
    except BaseException as error:
        told.update(result=None, traceback=traceback.format_exc())
        with contextlib.suppress(Exception):
            told["error"] = pickle.dumps((type(error), error.args, _picklable(vars(error))))
        body = pickle.dumps(told)
    Path(f"{job.folder}/{rank}.tmp").write_bytes(body)
    os.replace(f"{job.folder}/{rank}.tmp", f"{job.folder}/{rank}.pickle")
    # How a process leaves is part of what is tested, so threads are joined and atexit handlers run. Only the taking
    # apart of torch's modules is left out: it takes a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if told["traceback"] else 0)


def _picklable(state: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in state.items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            kept[name] = value
    return kept


if __name__ == "__main__":
    _serve()
