"""The process that test ranks are forked from, so that only one process has to import torch and gradsync; see ranks.py.

Run as a script it reads jobs from stdin, forks their ranks, and tells on stdout how each of them ended. It has no
threads, or forking would not be safe; the ranks may start what they like. It starts commands too: see launching.py.

One thing is not as in processes started apart: forks share the seed of str hashes, so sets of names have one order on
all ranks here. What must not depend on it is tested through the launcher.
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
    from tests.launching import Order

_POLL_S = 0.005
_LARGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
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
    _use_large_pages()
    write_message(tell, "ready")

    from tests.launching import Order

    for asked in _messages(ask):
        if "command" in asked:
            _launch(Order(**asked), ask, tell)
            continue
        job = Job(**asked)
        sys.path[:] = job.sys_path
        _prepare((*job.preload, job.fn[0]))
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


def _launch(order: Order, ask: int, tell: int) -> None:
    """Fork a process that is nobody's child, for the test run to adopt; tell who it is, and when it can be adopted."""
    from tests.launching import be_command, open_streams

    _prepare(order.preload)
    parent = os.fork()
    if parent == 0:
        child = -1
        try:
            open_streams(order)
            child = os.fork()
            while child != 0 and os.getpgid(child) != child:
                time.sleep(0.001)  # it leads its group before anybody hears of it
        finally:
            if child != 0:
                write_message(tell, child)
                os._exit(0)
        os.setsid()
        os.close(ask)
        os.close(tell)
        random.seed()
        _leave(be_command(order))
    os.waitpid(parent, 0)
    write_message(tell, "adopt it")


def _prepare(modules: tuple[str, ...]) -> None:
    """Import once for all ranks what each would import. What fails here fails in each of them too, and is told."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        assert _num_threads() == 1, f"importing {name} has started a thread: forking would not be safe"
    for last_act in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        last_act.atexit = False  # torch's, which take it apart: half of the time that forking a rank took
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page it shares with this process


def _use_large_pages() -> None:
    """Let this process's memory be in few large pages: a fork copies the list of them, and its end walks through it.

    That is most of what forking a rank takes. Where the kernel knows no such call it is left as it is.
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
    """Those that Python knows and those that it does not."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _messages(ask: int) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield read_message(ask)
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
    _leave(1 if told["traceback"] else 0)


def _leave(code: int) -> NoReturn:
    """End this process.

    How a process leaves is part of what is tested, so threads are joined and atexit handlers run. Only the taking apart
    of torch's modules is left out: it takes a second.
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
