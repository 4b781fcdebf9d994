"""Failure reports: how a failed worker tells the launcher its error, and how the launcher prints it.

The worker writes a small file (:func:`failure_report`, :class:`Attempt`), and the launcher sees the exit code. Together
they make a :class:`Failure`. The one that is printed first is the *root cause*: the earliest failure that is not itself
the consequence of another rank's end (:func:`root_cause`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gradsync.errors import PeerLost

# The errors of torch.distributed when the other end is gone. They are consequences, never the cause.
_GLOO_LOST_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# Not a process's own choice: other ranks that failed at the same time most likely did so because this rank was gone.
_FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

GIVEN_UP = "GivenUp"  # not an exception: the peers' timeout expired before this rank entered their collective


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended; ``kind`` and the fields below are empty if it wrote no report."""

    rank: int
    at_s: float  # since the epoch: when it failed, or when the launcher noticed
    exit_code: int  # as in subprocess: negative for a signal; the argument of sys.exit, if the worker called it
    kind: str = ""  # the name of the exception's class
    message: str = ""
    traceback: str = ""
    is_consequence: bool = False  # it failed because another rank had
    was_told_to_end: bool = False  # the launcher had asked it to end before it failed

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, unless it had failed by itself before."""
        return -self.exit_code if self.exit_code < 0 and not self.kind else None

    @property
    def launcher_code(self) -> int:
        """The launcher's exit code if this is the cause: the worker's own code, or 128 + the signal's number."""
        if self.kind == GIVEN_UP:
            return 1  # it was stuck: its exit code is that of the launcher's own signal
        if self.signal is not None:
            return 128 + self.signal
        return max(1, self.exit_code)

    def headline(self) -> str:
        """The first line of output for the root cause."""
        hint = " (out of memory? `dmesg` would say so)" if self.signal == signal.SIGKILL else ""
        return f"rank {self.rank} {self.predicate()}{hint}"

    def predicate(self) -> str:
        """How it ended, as a sentence without its subject: "was killed by SIGKILL", "failed: ValueError: bad"."""
        if self.kind == GIVEN_UP:
            return f"was given up by the others, while it was here: {self.message}"
        if self.kind and self.kind != "SystemExit":
            return f"failed: {self._first_line()}"
        if self.kind and not self._is_bare_code():
            return f"exited: {self.message}"
        if self.signal is None:
            return f"exited with code {self.exit_code}"
        return f"was killed by {_name_of(self.signal)}"

    def line(self) -> str:
        """The line of output for a rank that ended because of another."""
        return f"rank {self.rank}: {self.outcome()}"

    def outcome(self) -> str:
        """How it ended, in a few words."""
        if self.exit_code == 0 and not self.kind:
            return "had finished"
        if self.was_told_to_end and not self.is_consequence:
            return "ended by the launcher"
        if self.kind and self.kind != "SystemExit":
            return self._first_line()
        return f"exited with code {self.exit_code}" if self.signal is None else f"killed by {_name_of(self.signal)}"

    def _is_bare_code(self) -> bool:
        """Whether the script exited with a number and without a message."""
        try:
            return int(self.message) & 0xFF == self.exit_code
        except ValueError:
            return False

    def _first_line(self) -> str:
        first = self.message.strip().split("\n")[0]
        return f"{self.kind}: {first}" if first else self.kind


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others; None while only consequences are known.

    >>> from gradsync.cli.launch.failures import Failure, root_cause
    >>> lost = Failure(rank=0, at_s=1.0, exit_code=1, kind="PeerLost", is_consequence=True)
    >>> killed = Failure(rank=2, at_s=1.2, exit_code=-9)
    >>> root_cause([lost, killed]).headline()
    'rank 2 was killed by SIGKILL (out of memory? `dmesg` would say so)'
    """
    own = [failure for failure in failures if not failure.is_consequence and not failure.was_told_to_end]
    own = [failure for failure in own if failure.exit_code != 0]
    return min(own, key=lambda failure: (failure.signal not in _FATAL_SIGNALS, failure.at_s), default=None)


_DURATION = re.compile(r"(?<=after )\d+\.\d+(?= s)")


def group_by_outcome(failures: Iterable[Failure]) -> list[str]:
    """One line for each group of ranks that ended alike; the time that each took to notice may differ.

    >>> from gradsync.cli.launch.failures import Failure, group_by_outcome
    >>> group_by_outcome(Failure(rank=rank, at_s=0.0, exit_code=0 if rank == 3 else -9) for rank in range(1, 6))
    ['ranks 1, 2, 4, 5: killed by SIGKILL', 'rank 3: had finished']
    """
    alike: dict[str, list[Failure]] = {}
    for failure in failures:
        alike.setdefault(_DURATION.sub("", failure.outcome()), []).append(failure)
    return [_line_of(same) for same in alike.values()]


def _line_of(same: list[Failure]) -> str:
    if len(same) == 1:
        return same[0].line()
    times = sorted({match for failure in same for match in _DURATION.findall(failure.outcome())}, key=float)
    span = times[0] if len(times) == 1 else f"{times[0]} to {times[-1]}" if times else ""
    return f"ranks {format_ranks(failure.rank for failure in same)}: {_DURATION.sub(span, same[0].outcome())}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, with ranges.

    >>> from gradsync.cli.launch.failures import format_ranks
    >>> format_ranks([0, 1, 2, 3, 7, 8, 10])
    '0-3, 7, 8, 10'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


class Attempt:
    """The folder of failure reports of one start of the workers: written by the workers, read by the launcher."""

    def __init__(self, errors_dir: str | os.PathLike[str], restart_count: int) -> None:
        self._folder = Path(errors_dir) / f"attempt{restart_count}"

    def open(self) -> None:
        """Make the folder, empty. The launcher calls it before it starts the workers."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    # -- called by the launcher ----------------------------------------------------------------------------------

    def mark_failed(self) -> None:
        """Mark that the workers are about to be ended because one of them failed, and not for another reason."""
        (self._folder / "failed").touch()

    def read_failure(self, rank: int, exit_code: int, *, was_told_to_end: bool) -> Failure:
        """How a rank ended: from its report, if it wrote one, and its exit code."""
        report = self._read_report(rank)
        if was_told_to_end and not report and self._path(rank, "finished").exists():
            exit_code = 0  # it was told to end while its interpreter was shutting down
        defaults: dict[str, Any] = {"at_s": time.time(), "was_told_to_end": was_told_to_end}
        if exit_code < 0 and not report:
            defaults["traceback"] = self._read_crash(rank)
        # The report's exit code takes precedence: the report may be read before the process has ended.
        return Failure(rank=rank, **({"exit_code": exit_code} | defaults | report))

    def _read_crash(self, rank: int) -> str:
        """Python's stack at a crash in C, as faulthandler wrote it, without the launcher's own frames."""
        try:
            lines = self.crash_path(rank).read_text().splitlines(keepends=True)
        except OSError:
            return ""
        shown = [line for line in lines if not is_launcher_frame(line.partition('"')[2].partition('"')[0])]
        return "".join(line for line in shown if not line.startswith("Extension modules")).rstrip()

    def has_failure_report(self, rank: int) -> bool:
        """Whether a rank has reported a failure; its process may still be ending."""
        return bool(self._read_report(rank))

    def _read_report(self, rank: int) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads(self._path(rank, "failure").read_text())["gradsync"]
        except (OSError, ValueError, KeyError):
            return {}  # killed, or not Python: only the exit code is known
        return report

    def read_grace_s(self, rank: int) -> float:
        """For how long a rank that was told to end waits for its own error, as it has written; 0 if it has not."""
        try:
            return float(self._path(rank, "waits_s").read_text())
        except (OSError, ValueError):
            return 0.0

    # -- called by a worker --------------------------------------------------------------------------------------

    def has_failed(self) -> bool:
        """Whether the launcher has seen a worker fail."""
        return (self._folder / "failed").exists()

    def write_failure(self, rank: int, text: str) -> None:
        """Write this rank's report (made by ``failure_report``)."""
        self._write(rank, "failure", text)

    def write_finished(self, rank: int) -> None:
        """Mark that this rank's script has ended without an error; its process may take a while to end."""
        self._write(rank, "finished", "yes")

    def write_grace_s(self, rank: int, seconds: float) -> None:
        """Write for how long this rank will wait for its own error."""
        self._write(rank, "waits_s", str(seconds))

    def crash_path(self, rank: int) -> Path:
        """The file for this rank's Python stack when it crashes in C."""
        return self._path(rank, "crash")

    def _write(self, rank: int, what: str, text: str) -> None:
        unfinished = self._path(rank, f"{what}.new")
        with contextlib.suppress(OSError):  # the launcher has ended and deleted the folder: no one reads the file
            unfinished.write_text(text)
            unfinished.replace(self._path(rank, what))  # atomic, as the launcher may be reading

    def _path(self, rank: int, what: str) -> Path:
        return self._folder / f"rank{rank}.{what}"


def failure_report(error: BaseException, shown: TracebackType | None, *, rank: int, was_told_to_end: bool) -> str:
    """A worker's report of its failure, as JSON: in torchelastic's format, with gradsync's fields under their own key.

    Schedulers that know torchelastic read the former from TORCHELASTIC_ERROR_FILE.
    """
    trace = "".join(traceback.TracebackException(type(error), error, shown, compact=True).format())
    return _as_json(
        rank,
        kind=type(error).__name__,
        message=str(error),
        traceback="" if isinstance(error, SystemExit) else trace,  # the script chose to exit: the place is of no use
        is_consequence=_is_consequence(error),
        was_told_to_end=was_told_to_end,
        exit_code=requested_code(error) if isinstance(error, SystemExit) else None,
    )


def requested_code(request: SystemExit) -> int:
    """The code that the interpreter exits with: nothing is 0, a number is itself, anything else is 1.

    >>> from gradsync.cli.launch.failures import requested_code
    >>> [requested_code(SystemExit(code)) for code in (None, 3, -1, "7")]
    [0, 3, 255, 1]
    """
    if request.code is None:
        return 0
    return request.code & 0xFF if isinstance(request.code, int) else 1


def given_up_report(reason: str, stack: str, *, rank: int) -> str:
    """The report of a worker that its peers have given up: the reason, and its current stack."""
    return _as_json(rank, kind=GIVEN_UP, message=reason, traceback=stack, is_consequence=False, was_told_to_end=False)


def _as_json(
    rank: int,
    *,
    kind: str,
    message: str,
    traceback: str,
    is_consequence: bool,
    was_told_to_end: bool,
    exit_code: int | None = None,
) -> str:
    ours: dict[str, Any] = {"at_s": time.time(), "kind": kind, "message": message, "traceback": traceback}
    ours |= {"is_consequence": is_consequence, "was_told_to_end": was_told_to_end}
    if exit_code is not None:
        ours["exit_code"] = exit_code
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time())), "rank": rank, "host": socket.gethostname()}
    return json.dumps({"message": {"message": f"{kind}: {message}", "extraInfo": extra}, "gradsync": ours})


def is_launcher_frame(filename: str) -> bool:
    """Whether a frame belongs to the code that runs the script, which tells the script's author nothing."""
    return filename in (runpy.__file__, "<frozen runpy>", str(Path(__file__).with_name("worker.py")))


def _is_consequence(error: BaseException) -> bool:
    """Whether a lost peer is anywhere in the chain of causes of an error."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, PeerLost):
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _GLOO_LOST_A_PEER):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False
