"""What a worker that fails leaves behind for the launcher, and how the launcher tells it to a person.

The worker writes a small file; the launcher knows how the process ended. Together they are a ``Failure``. The one that
counts is the *root cause*: the earliest failure that is not itself the consequence of another rank's end.
"""

from __future__ import annotations

import contextlib
import json
import os
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

# What torch.distributed raises when the other end is gone: it names nobody, so it is never the cause.
_GLOO_LOST_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# A process does not choose these: whatever raised at the same time most likely did so because this rank was gone.
_SUDDEN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

GIVEN_UP = "GivenUp"  # no exception: the rank had not come to where its peers waited for it


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended; ``kind`` and below are empty when it could not say so itself."""

    rank: int
    at_s: float  # since the epoch: when it failed, or when the launcher saw that it had
    exit_code: int  # as subprocess has it: below 0 for a signal
    kind: str = ""  # the name of the exception's class
    message: str = ""
    traceback: str = ""
    is_consequence: bool = False  # it failed because another rank had
    was_told_to_end: bool = False  # the launcher had asked it to end before it failed

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, if one did, and not its own error before."""
        return -self.exit_code if self.exit_code < 0 and not self.kind else None

    def headline(self) -> str:
        """The first line for the rank that caused the others to end."""
        if self.kind == GIVEN_UP:
            return f"rank {self.rank} was given up by the others, while it was here: {self.message}"
        if self.kind and self.kind != "SystemExit":
            return f"rank {self.rank} failed: {self._said()}"
        if self.kind and not self.message.isdigit():
            return f"rank {self.rank} exited: {self.message}"
        if self.signal is None:
            return f"rank {self.rank} exited with code {self.exit_code}"
        hint = " (out of memory? `dmesg` would say so)" if self.signal == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {_name_of(self.signal)}{hint}"

    def line(self) -> str:
        """One line for a rank that ended because of another."""
        if self.exit_code == 0 and not self.kind:
            return f"rank {self.rank}: had finished"
        if self.was_told_to_end and not self.is_consequence:
            return f"rank {self.rank}: ended by the launcher"
        if self.kind and self.kind != "SystemExit":
            return f"rank {self.rank}: {self._said()}"
        how = f"exited with code {self.exit_code}" if self.signal is None else f"killed by {_name_of(self.signal)}"
        return f"rank {self.rank}: {how}"

    def _said(self) -> str:
        first = self.message.strip().split("\n")[0]
        return f"{self.kind}: {first}" if first else self.kind


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that the others follow from; None while all that is known are consequences.

    >>> from gradsync.cli.failures import Failure, root_cause
    >>> lost = Failure(rank=0, at_s=1.0, exit_code=1, kind="PeerLost", is_consequence=True)
    >>> killed = Failure(rank=2, at_s=1.2, exit_code=-9)
    >>> root_cause([lost, killed]).headline()
    'rank 2 was killed by SIGKILL (out of memory? `dmesg` would say so)'
    """
    own = [failure for failure in failures if not failure.is_consequence and not failure.was_told_to_end]
    own = [failure for failure in own if failure.exit_code != 0]
    return min(own, key=lambda failure: (failure.signal not in _SUDDEN, failure.at_s), default=None)


class Attempt:
    """The folder in which one start of the workers leaves its word; the launcher's and the workers' view of it."""

    def __init__(self, errors_dir: str | os.PathLike[str], restart_count: int) -> None:
        self._folder = Path(errors_dir) / f"attempt{restart_count}"

    def open(self) -> None:
        """Make the folder, empty: the launcher does so before it starts the workers."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    # -- by the launcher -----------------------------------------------------------------------------------------

    def say_failed(self) -> None:
        """Tell the workers that they are about to be ended because one of them failed, and not for another reason."""
        (self._folder / "failed").touch()

    def read_failure(self, rank: int, exit_code: int, *, was_told_to_end: bool) -> Failure:
        """How a rank ended: its own word, if it left one, and its exit code."""
        word = self._read_word(rank)
        defaults: dict[str, Any] = {"at_s": time.time(), "was_told_to_end": was_told_to_end}
        if exit_code < 0 and not word:
            defaults["traceback"] = self._read_crash(rank)
        return Failure(rank=rank, exit_code=exit_code, **(defaults | word))

    def _read_crash(self, rank: int) -> str:
        """Python's stack at a crash in C, as faulthandler wrote it, without what is no news."""
        try:
            lines = self.crash_path(rank).read_text().splitlines(keepends=True)
        except OSError:
            return ""
        shown = [line for line in lines if not is_ours(line.partition('"')[2].partition('"')[0])]
        return "".join(line for line in shown if not line.startswith("Extension modules")).rstrip()

    def has_word(self, rank: int) -> bool:
        """Whether a rank has said that it failed; its process may still be ending."""
        return bool(self._read_word(rank))

    def _read_word(self, rank: int) -> dict[str, Any]:
        try:
            word: dict[str, Any] = json.loads(self._path(rank, "failure").read_text())["gradsync"]
        except (OSError, ValueError, KeyError):
            return {}  # killed, or no Python: the exit code is all there is
        return word

    def read_patience_s(self, rank: int) -> float:
        """For how long a rank that was told to end has said it will wait for its own error; 0 if it has not."""
        try:
            return float(self._path(rank, "waits_s").read_text())
        except (OSError, ValueError):
            return 0.0

    # -- by a worker ---------------------------------------------------------------------------------------------

    def has_failed(self) -> bool:
        """Whether the launcher has seen a worker fail."""
        return (self._folder / "failed").exists()

    def write_failure(self, rank: int, text: str) -> None:
        """Leave this rank's word (made by ``describe``)."""
        self._write(rank, "failure", text)

    def write_patience_s(self, rank: int, seconds: float) -> None:
        """Say for how long this rank will wait for its own error."""
        self._write(rank, "waits_s", str(seconds))

    def crash_path(self, rank: int) -> Path:
        """Where this rank's Python stack goes when it crashes in C."""
        return self._path(rank, "crash")

    def _write(self, rank: int, what: str, text: str) -> None:
        unfinished = self._path(rank, f"{what}.new")
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder with it: nobody reads
            unfinished.write_text(text)
            unfinished.replace(self._path(rank, what))  # whole or not at all: the launcher may be reading

    def _path(self, rank: int, what: str) -> Path:
        return self._folder / f"rank{rank}.{what}"


def describe(error: BaseException, shown: TracebackType | None, *, rank: int, was_told_to_end: bool) -> str:
    """A worker's word about its failure, as JSON: in torchelastic's own form, with ours beside it.

    Schedulers that know torchelastic read the first part from TORCHELASTIC_ERROR_FILE.
    """
    trace = "".join(traceback.TracebackException(type(error), error, shown, compact=True).format())
    return _as_json(
        rank,
        kind=type(error).__name__,
        message=str(error),
        traceback="" if isinstance(error, SystemExit) else trace,  # somebody chose to exit: where is not news
        is_consequence=_is_consequence(error),
        was_told_to_end=was_told_to_end,
    )


def describe_given_up(reason: str, stack: str, *, rank: int) -> str:
    """The word of a worker that its peers have stopped waiting for: why, and where it is."""
    return _as_json(rank, kind=GIVEN_UP, message=reason, traceback=stack, is_consequence=False, was_told_to_end=False)


def _as_json(rank: int, *, kind: str, message: str, traceback: str, is_consequence: bool, was_told_to_end: bool) -> str:
    ours = {"at_s": time.time(), "kind": kind, "message": message, "traceback": traceback}
    ours |= {"is_consequence": is_consequence, "was_told_to_end": was_told_to_end}
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time())), "rank": rank, "host": socket.gethostname()}
    return json.dumps({"message": {"message": f"{kind}: {message}", "extraInfo": extra}, "gradsync": ours})


def is_ours(filename: str) -> bool:
    """Whether a frame is of the machinery that runs the script, which is no news to the script's author."""
    return filename in (runpy.__file__, "<frozen runpy>", str(Path(__file__).with_name("worker.py")))


def _is_consequence(error: BaseException) -> bool:
    """Whether a lost peer stands anywhere behind the error."""
    seen: list[BaseException] = []
    behind: BaseException | None = error
    while behind is not None and behind not in seen:
        if isinstance(behind, PeerLost):
            return True
        if isinstance(behind, RuntimeError) and any(text in str(behind) for text in _GLOO_LOST_A_PEER):
            return True
        seen.append(behind)
        behind = behind.__cause__ or behind.__context__
    return False
