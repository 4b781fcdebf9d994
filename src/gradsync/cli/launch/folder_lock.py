"""The lock of the folder of ``--resume``: two runs must not save into the same one."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

import click

from gradsync.elastic.run_folder import LOCK

NOTICE_S = 1.0  # if the folder is locked for longer, a notice is printed
POLL_S = 0.1
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class FolderLock:
    """Held by a launcher and by the workers that inherit it: a context manager.

    A launcher that is killed leaves workers behind, which still save their state. The kernel keeps the lock for as long
    as one of them lives. So a run that is started again at once waits for them, and then goes on from what they saved.

    Args:
        folder: which is there.
        wait_s: how long to wait for the processes of an earlier run to end.
    """

    def __init__(self, folder: Path, *, wait_s: float) -> None:
        self._folder = folder
        self._wait_s = wait_s
        self._descriptor: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a worker must inherit to hold the lock."""
        return () if self._descriptor is None else (self._descriptor,)

    def __enter__(self) -> FolderLock:
        """Blocks until the lock is free; raises ClickException after ``wait_s``."""
        descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        start_s, noticed = time.monotonic(), False
        try:
            while not self._try(descriptor):
                waited_s = time.monotonic() - start_s
                if waited_s > self._wait_s:
                    raise click.ClickException(
                        f"another run uses {self._folder} (its processes hold {self._folder / LOCK}, {waited_s:.0f} s "
                        "later still). Wait for its end, or give another folder to --resume."
                    )
                if waited_s > NOTICE_S and not noticed:
                    noticed = True
                    click.secho(
                        f"waiting for the processes of an earlier run in {self._folder} to end", err=True, dim=True
                    )
                time.sleep(POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _try(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            click.secho(
                f"warning: {self._folder} can't be locked ({error.strerror}): take care that no other run uses it",
                err=True,
                fg="yellow",
            )
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
