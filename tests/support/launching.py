"""Commands in processes that have imported torch already, for tests: ``Launched([*GRADSYNC, "run", ...], text=True)``.

A command such as ``gradsync run`` spends most of its time importing torch. So its process is forked from the fork
server (see ranks.py), and then runs as ``python -m MODULE`` or ``python SCRIPT`` would: with a session, streams,
a folder and an environment of its own. The processes that it starts itself are started normally.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GRADSYNC = [sys.executable, "-m", "gradsync.cli.main"]
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
        )
        with _adopting():
            self.pid = fork_server().launch(request)
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
    start = subprocess.Popen

    def popen(command: Any, *args: Any, **options: Any) -> subprocess.Popen[Any]:
        kind = Launched if command[: len(GRADSYNC)] == GRADSYNC else start
        return kind(command, *args, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)


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
        if request.command[0] == "-m":
            sys.argv = request.command[1:]
            sys.path.insert(0, request.cwd)
            sys.modules.pop(request.command[1], None)  # it may have been imported here, and must run as __main__
            runpy.run_module(request.command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = request.command
            sys.path.insert(0, str(Path(request.command[0]).parent))
            runpy.run_path(request.command[0], run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
