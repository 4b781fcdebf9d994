"""Commands whose process has imported torch already, for tests: ``Launched([*GRADSYNC, "run", ...], text=True)``.

A command that starts others spends most of its time importing torch. So its process is forked from the nursery (see
ranks.py), and goes on as ``python -m MODULE`` or ``python SCRIPT`` would: with a session, streams, a folder and an
environment of its own. What it starts itself is started from scratch, as always.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import runpy
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
# What the command imports, but for the module that runs as __main__: that one is run anew.
PRELOADED = tuple(
    f"gradsync.cli.{name}" for name in ("compare", "doctor", "info", "keys", "profile", "run", "serve", "tune")
)


@dataclass
class Order:
    """What it takes to make the process of one command."""

    command: list[str]
    cwd: str
    env: dict[str, str]
    streams: tuple[str, str]  # where stdout and stderr are opened
    preload: tuple[str, ...] = PRELOADED


class Launched(subprocess.Popen[str]):
    """A ``subprocess.Popen`` of ``[sys.executable, ...]``, but that the process is forked from the nursery.

    It always leads a session of its own, and there is nothing to read on its stdin.
    """

    def _execute_child(self, *given: Any) -> None:
        """Start it, in place of fork and exec."""
        from tests.ranks import the_nursery  # not above: the nursery reads this file too

        asked = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        streams = [own if end == -1 else end for own, end in ((1, asked["c2pwrite"]), (2, asked["errwrite"]))]
        python, *command = asked["args"]
        assert python == sys.executable, "it goes on in a process of this Python"
        order = Order(
            command=command,
            cwd=str(asked["cwd"] or os.getcwd()),
            env=dict(os.environ if asked["env"] is None else asked["env"]),
            streams=(f"/proc/{os.getpid()}/fd/{streams[0]}", f"/proc/{os.getpid()}/fd/{streams[1]}"),
        )
        with _adopting():
            self.pid = the_nursery().launch(order)
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


def launch_instead_of_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every ``gradsync`` that this process starts be :class:`Launched`, whoever starts it."""
    start = subprocess.Popen

    def popen(command: Any, *args: Any, **options: Any) -> subprocess.Popen[Any]:
        kind = Launched if command[: len(GRADSYNC)] == GRADSYNC else start
        return kind(command, *args, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Be the parent of what a process leaves behind that was started by this one, so that it can be waited for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process can't adopt others")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- the nursery's side ---------------------------------------------------------------------------------------------


def open_streams(order: Order) -> None:
    """Let stdout and stderr go where the order says."""
    for fd, path in zip((1, 2), order.streams, strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)


def be_command(order: Order) -> int:
    """Be the command, in its fresh process; returns its exit code."""
    try:
        os.environ.clear()
        os.environ.update(order.env)
        os.chdir(order.cwd)
        if order.command[0] == "-m":
            sys.argv = order.command[1:]
            sys.path.insert(0, order.cwd)
            sys.modules.pop(order.command[1], None)  # another may have imported it here, and it runs as __main__
            runpy.run_module(order.command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = order.command
            sys.path.insert(0, str(Path(order.command[0]).parent))
            runpy.run_path(order.command[0], run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
