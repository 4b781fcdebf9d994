r"""Run several commands at once, and end all of them when one fails or the time runs out.

>>> import sys
>>> from gradsync.testing import run_commands
>>> command = [sys.executable, "-c", "import os; print(os.environ['RANK'])"]
>>> run_commands([command] * 2, envs=[{"RANK": "0"}, {"RANK": "1"}], timeout_s=60, capture=True)
['0\n', '1\n']
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

GRACE_S = 10.0  # from SIGTERM to SIGKILL, in which a launcher ends its own workers


class LabError(RuntimeError):
    """The lab could not be built, or a command in it failed or ran out of time."""


def run_commands(
    commands: Sequence[Sequence[str]],
    *,
    envs: Sequence[Mapping[str, str]],
    timeout_s: float,
    capture: bool = False,
    logs: Sequence[Path] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> list[str]:
    """Run all commands at once and block until all have ended; `envs[i]` goes on top of this process's environment.

    Returns the stdout of each (empty unless `capture`). The first failure, or the time running out, ends all of them
    and raises LabError. `logs`: files for all that each command prints, instead. `on_wait` is called repeatedly while
    the commands run; an exception that it raises ends all of them too.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        # Files and not pipes: no one reads while the commands run, and a full pipe would block them.
        if logs is None:
            outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        else:
            outputs = [stack.enter_context(log.open("w+")) for log in logs]
        started: list[subprocess.Popen[str]] = []
        stack.callback(_end_groups, started)
        for command, env, output in zip(commands, envs, outputs, strict=True):
            started.append(
                subprocess.Popen(
                    list(command),
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output if capture or logs is not None else None,
                    stderr=output if logs is not None else None,
                    text=True,
                    start_new_session=True,  # a group of its own, so that its children can be ended with it
                )
            )
        while late := [rank for rank, process in enumerate(started) if not _succeeded(process)]:
            if time.monotonic() > deadline:
                raise LabError(f"commands {late} of {len(commands)} had not ended after {timeout_s=}.")
            if on_wait is not None:
                on_wait()
            time.sleep(0.02)
        for output in outputs:
            output.seek(0)
        return [output.read() for output in outputs]


def _succeeded(process: subprocess.Popen[str]) -> bool:
    """Whether a process has exited with code 0; raises LabError if it failed.

    It is not reaped before its process group has been ended, so that its id can't be reused meanwhile.
    """
    how = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if how is not None and (how.si_code, how.si_status) != (os.CLD_EXITED, 0):
        kind = "code" if how.si_code == os.CLD_EXITED else "signal"
        raise LabError(f"{shlex.join(map(str, process.args))!r} ended with {kind} {how.si_status}.")  # type: ignore[arg-type]
    return how is not None


def _end_groups(processes: Sequence[subprocess.Popen[str]]) -> None:
    with signals_held():  # a second Ctrl-C must not leave half of them running
        for process in processes:
            os.killpg(process.pid, signal.SIGTERM)
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        wait_until(lambda: all(os.waitid(os.P_PID, p.pid, flags) for p in processes), timeout_s=GRACE_S)
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)  # also for children that a leader left behind when it obeyed SIGTERM
            process.wait(GRACE_S)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP until the end of the block."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    """Poll a condition until it is true, at most ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
