"""One worker's process in an elastic run: how it is started, watched and ended, and what it prints."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from gradsync.cli.launch.failures import Attempt, Failure

ENDING_S = 2.0  # the time for a process to end once it was killed
OUTPUT_S = 0.5  # the time to read what an ended process has printed


class WorkerProcess:
    """A worker that was just started. It leads a process group of its own.

    Args:
        command: what to run.
        env: its environment, without the folder of its failure reports.
        slot: its place in the run, for its reports and the prefix.
        uid: its unique name.
        errors_dir: where its failure reports go, in a folder of its own.
        prefix: begin every line that it prints with its slot.
        keep_open: descriptors that it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        slot: int,
        uid: str,
        errors_dir: Path,
        prefix: bool,
        keep_open: Sequence[int] = (),
    ) -> None:
        self.slot = slot
        self.uid = uid
        self._folder = folder = errors_dir / f"worker{uid}"
        self._attempt = Attempt(folder, 0)
        self._attempt.open()
        reports = {"GRADSYNC_ERROR_DIR": str(folder), "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
        stream = subprocess.PIPE if prefix else None
        # Called by the main thread: the kernel tells a child that its parent has ended when the thread that started
        # it has.
        self._process = subprocess.Popen(
            command,
            env={**env, **reports},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            pass_fds=keep_open,
        )
        self.started_at_s = time.monotonic()
        self.pidfd = _open_pidfd(self._process.pid)  # readable once the process has ended; None: it must be polled
        self._readers = [
            threading.Thread(target=_relay, args=(source, target, f"[{slot}] ".encode()), daemon=True)
            for source, target in ((self._process.stdout, 1), (self._process.stderr, 2))
            if source is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def read_failure(self, code: int, *, was_told_to_end: bool) -> Failure:
        """How it has failed: from its report, if it wrote one, and its exit code."""
        return self._attempt.read_failure(self.slot, code, was_told_to_end=was_told_to_end)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker itself, not to its children."""
        self._process.send_signal(number)  # does nothing once it has been found to have ended

    def kill(self) -> None:
        """Kill it and its children now."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: not even SIGKILL helps
            self._process.wait(ENDING_S)

    def close(self) -> None:
        """Once it has ended: kill the children that it has left, and wait a little for what it has printed.

        Its failure report is deleted.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        shutil.rmtree(self._folder, ignore_errors=True)
        end_s = time.monotonic() + OUTPUT_S
        for reader in self._readers:
            reader.join(max(0.0, end_s - time.monotonic()))


def _open_pidfd(pid: int) -> int | None:
    """A descriptor of the process; None where the system has none, or none left."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    return None


def _relay(source: IO[bytes], target_fd: int, prefix: bytes) -> None:
    """Copy lines until the other end closes, each with the prefix."""
    with source:
        for line in source:
            left = memoryview(prefix + line.rstrip(b"\n") + b"\n")
            with contextlib.suppress(OSError):  # nobody reads the launcher's output any more
                while left:  # one call, for a line: those of several workers do not mix
                    left = left[os.write(target_fd, left) :]
