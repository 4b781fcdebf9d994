"""Commands in processes that have imported torch already, for tests: ``Launched([*GRADSYNC, "run", ...], text=True)``.

A command such as ``gradsync run`` spends most of its time importing torch. So its process is forked from the fork
server (see ranks.py), and then runs as ``python -m MODULE`` or ``python SCRIPT`` would: with a session, streams,
a folder and an environment of its own. So do ``gradsync`` commands and workers of ``gradsync run`` that it starts: they
are forked from a copy that the command makes of itself when it begins. Other processes are started normally.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GRADSYNC = [sys.executable, "-m", "gradsync.cli.main"]
WORKER = ["-u", "-m", "gradsync.cli.launch.worker"]
WORKER_COMM = "gradsync-worker"  # the name of a forked worker in /proc/PID/comm
NETWORK = "GRADSYNC_TEST_NETWORK"  # in the environment of a Launched command: the network namespace that it enters
CLONE_NEWNET = 0x40000000
PR_SET_CHILD_SUBREAPER = 36
# What the command imports, except the module that runs as __main__: that one is executed again.
PRELOADED = tuple(
    f"gradsync.cli.{name}" for name in ("compare", "doctor", "info", "keys", "profile", "run", "serve", "tune")
)


@dataclass
class LaunchRequest:
    """A command to run in a forked process."""

    command: list[str]
    cwd: str
    env: dict[str, str]
    streams: tuple[str, str]  # the paths to open as stdout and stderr
    preload: tuple[str, ...] = PRELOADED
    is_worker: bool = False


class Launched(subprocess.Popen[str]):
    """A ``subprocess.Popen`` of ``[sys.executable, ...]`` whose process is forked from the fork server.

    It always leads a session of its own, and its stdin is empty.
    """

    def _execute_child(self, *given: Any) -> None:
        """Start the process, in place of fork and exec."""
        from tests.support.ranks import fork_server  # not above: the fork server imports this file too

        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        streams = [own if end == -1 else end for own, end in ((1, asked["c2pwrite"]), (2, asked["errwrite"]))]
        python, *command = asked["args"]
        assert python == sys.executable, "it runs in a process of this Python"
        request = LaunchRequest(
            command=command,
            cwd=str(asked["cwd"] or os.getcwd()),
            env=dict(os.environ if asked["env"] is None else asked["env"]),
            streams=(f"/proc/{os.getpid()}/fd/{streams[0]}", f"/proc/{os.getpid()}/fd/{streams[1]}"),
            is_worker=command[: len(WORKER)] == WORKER,
        )
        with _adopting():
            self.pid = _worker_copy.launch(request) if _worker_copy is not None else fork_server().launch(request)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[end] for end in pipes))  # type: ignore[attr-defined]


def run_launched(command: Sequence[str], *, timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Launch a command and wait for it, as ``subprocess.run(..., capture_output=True)`` does."""
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch_gradsync_by_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch ``subprocess.Popen``: every ``gradsync`` command that this process starts becomes :class:`Launched`."""
    monkeypatch.setattr(subprocess, "Popen", _forking(subprocess.Popen, GRADSYNC))


def _forking(start: Callable[..., Any], command: list[str]) -> Callable[..., Any]:
    """In place of ``subprocess.Popen``: commands that begin like ``command`` become :class:`Launched`."""

    def popen(args: Any, *more: Any, **options: Any) -> Any:
        is_forked = list(args[: len(command)]) == command
        return (Launched if is_forked else start)(args, *more, **options)

    return popen


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of orphaned descendants, so that it can wait for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process can't adopt others")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- in the forked process ------------------------------------------------------------------------------------------


def open_streams(request: LaunchRequest) -> None:
    """Redirect stdout and stderr to the paths of the request."""
    for fd, path in zip((1, 2), request.streams, strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)


def run_command(request: LaunchRequest) -> int:
    """Run the command, in its fresh process; returns its exit code."""
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        os.environ.clear()
        os.environ.update(request.env)
        os.chdir(request.cwd)
        if network := os.environ.pop(NETWORK, None):
            enter_network(network)
        command = request.command
        if request.is_worker:
            _act_as_worker()
        elif command[:2] == GRADSYNC[1:]:
            _fork_workers()
        if command[0] == "-u":
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
            command = command[1:]
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path.insert(0, request.cwd)
            sys.modules.pop(command[1], None)  # it may have been imported here, and must run as __main__
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def enter_network(namespace: str) -> None:
    """Put this process, which must have one thread only, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        if libc.setns(network.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{namespace} can't be entered")


class WorkerCopy:
    """A copy of this process, made while it had one thread, from which its workers are forked. It ends with it."""

    def __init__(self) -> None:
        from tests.support.forkserver import serve_commands

        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        if os.fork() == 0:
            os.setsid()  # signals to the command's group are not for it
            os.close(self._requests)
            os.close(self._answers)
            with contextlib.suppress(BaseException):
                serve_commands(requests, answers)
            os._exit(0)
        os.close(requests)
        os.close(answers)

    def launch(self, request: LaunchRequest) -> int:
        """Fork a worker; returns its process id. It becomes a child of this process if that adopts orphans."""
        from tests.support.forkserver import read_message, write_message

        write_message(self._requests, vars(request))
        pid: int = read_message(self._answers)
        read_message(self._answers)
        return pid


_worker_copy: WorkerCopy | None = None  # in a command that was launched


def _fork_workers() -> None:
    """Let the commands and workers that this process starts be forked from a copy of it."""
    global _worker_copy
    _worker_copy = WorkerCopy()
    worker = [sys.executable, *WORKER]
    torch_handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    subprocess_handler: Any = importlib.import_module(torch_handler)
    subprocess_handler.Popen = _forking(subprocess_handler.Popen, worker)
    subprocess.Popen = _forking(_forking(subprocess.Popen, GRADSYNC), worker)  # type: ignore[misc,assignment]


def _act_as_worker() -> None:
    """Do what torch does when it is imported, and let tests recognise this process."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    Path("/proc/self/comm").write_text(WORKER_COMM)
