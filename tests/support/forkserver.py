"""The fork server: test ranks are forked from it, so that only one process has to import torch and gradsync.

Run as a script it reads jobs from stdin, forks their ranks, and reports on stdout how each of them ended. It has no
threads, because forking would not be safe with them; the ranks may start any. It starts commands too: see launching.py.
The test run's side of it is ``ForkServer`` in ranks.py.

Forked ranks differ from separately started processes in one way: they share the seed of str hashes, so sets of names
have the same order on all ranks. What must not depend on that is tested in tests/multiprocess/test_hash_seeds.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.support.launching import LaunchRequest

_POLL_S = 0.005
_LARGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
# What test modules import, and what gradsync imports at its first use.
_PRELOADED = (
    "hypothesis",
    "numpy",
    "pytest",
    "gradsync",
    "gradsync.comm.hierarchical.communicator",
    "gradsync.comm.shm.communicator",
)


@dataclass
class Job:
    """The ranks of one ``run_processes`` call: the function, its arguments, and their environment."""

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
    """Kill ranks, each with the processes it started: each leads a process group of its own."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _serve() -> None:
    """Serve: read jobs from stdin and report on stdout, until stdin ends."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the imports print must not look like a message

    import torch
    import torch._dynamo  # the optimizers import it at their first step, and it takes as long as torch itself
    import torch.distributed

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # it was the folder of this file
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("tests.support.compiling").compile_once()
    assert torch.get_num_threads() == 1
    _use_large_pages()
    write_message(answers, "ready")

    from tests.support.launching import LaunchRequest

    for message in _messages(requests):
        if "command" in message:
            _launch(LaunchRequest(**message), requests, answers)
            continue
        job = Job(**message)
        sys.path[:] = job.sys_path
        _prepare((*job.preload, job.fn[0]))
        pids: list[int] = []
        for rank in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                os.close(requests)
                os.close(answers)
                _run_rank(job, rank)
            pids.append(pid)
        write_message(answers, pids)
        _report_exits(pids, requests, answers)


def serve_commands(requests: int, answers: int) -> None:
    """Serve requests for commands only, until the other end of ``requests`` is closed."""
    from tests.support.launching import LaunchRequest

    for message in _messages(requests):
        _launch(LaunchRequest(**message), requests, answers)


def _launch(request: LaunchRequest, requests: int, answers: int) -> None:
    """Fork an orphaned process for the test run to adopt; report its id, and when it can be adopted."""
    from tests.support.launching import open_streams, run_command

    _prepare(request.preload)
    parent = os.fork()
    if parent == 0:
        between, child = os.getpid(), -1
        try:
            open_streams(request)
            child = os.fork()
            while child != 0 and os.getpgid(child) != child:
                time.sleep(0.001)  # it must lead its group before its id is reported
        finally:
            if child != 0:
                write_message(answers, child)
                os._exit(0)
        os.setsid()
        while os.getppid() == between:  # or a command that asks to end with its parent would end with this one
            time.sleep(0.001)
        os.close(requests)
        os.close(answers)
        random.seed()
        _exit(run_command(request))
    os.waitpid(parent, 0)
    write_message(answers, "can be adopted")


def _prepare(modules: tuple[str, ...]) -> None:
    """Import once what each rank would import. What fails here fails in each rank too, and is reported there."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        assert _num_threads() == 1, f"importing {name} has started a thread: forking would not be safe"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of torch take half of the time of a forked rank
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page it shares with this process


def _use_large_pages() -> None:
    """Put this process's memory on few huge pages: a fork copies the page table, and the child's exit walks through it.

    That is most of the cost of forking a rank. A kernel without this call leaves the memory as it is.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in maps.read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":
            begin, end = (int(address, 16) for address in span.split("-"))
            for page in range(-(-begin // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
                libc.madvise(page, _LARGE_PAGE, _MADV_COLLAPSE)


def _num_threads() -> int:
    """The threads of this process, including those that Python does not know of."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _messages(requests: int) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield read_message(requests)
        except EOFError:
            return


def _report_exits(pids: list[int], requests: int, answers: int) -> None:
    running = {pid: rank for rank, pid in enumerate(pids)}
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            write_message(answers, (running.pop(pid), os.waitstatus_to_exitcode(status)))
        # No request comes while a job runs, so readable means end of file: the test run is gone.
        elif pid == 0 and select.select([requests], [], [], _POLL_S)[0]:
            end_ranks(list(running))
            sys.exit(1)


def _run_rank(job: Job, rank: int) -> NoReturn:
    """Run one rank, in its fresh process; never returns."""
    os.setsid()
    log = os.open(f"{job.folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update({**job.env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    random.seed(rank)  # or every fork would draw the same temporary names

    outcome: dict[str, Any] = {"result": None, "error": None, "traceback": ""}
    try:
        module, name = job.fn
        outcome["result"] = getattr(importlib.import_module(module), name)(*pickle.loads(job.args))
        body = pickle.dumps(outcome)
    except BaseException as error:
        outcome.update(result=None, traceback=traceback.format_exc())
        with contextlib.suppress(Exception):
            outcome["error"] = pickle.dumps((type(error), error.args, _picklable(vars(error))))
        body = pickle.dumps(outcome)
    Path(f"{job.folder}/{rank}.tmp").write_bytes(body)
    os.replace(f"{job.folder}/{rank}.tmp", f"{job.folder}/{rank}.pickle")
    _exit(1 if outcome["traceback"] else 0)


def _exit(code: int) -> NoReturn:
    """End this process.

    How a process exits is part of what is tested, so threads are joined and atexit handlers run. Only the destruction
    of torch's modules is skipped: it takes a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _picklable(state: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in state.items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            kept[name] = value
    return kept


if __name__ == "__main__":
    _serve()
