"""Gloo's sends and receives as ``Work`` that can be polled (``P2PWork``) or only waited for (``BlockingP2PWork``).

[Note: Gloo's messages can't be polled] ``is_completed()`` of a Gloo send or receive stays False until its ``wait()``
has returned, and a ``wait()`` that times out closes every connection of its group. So a thread blocks in that
``wait()``, for as long as it takes, and ``done()`` reads the thread's flag.

[Note: threads at exit] A thread that returns from C while the interpreter shuts down aborts the process. So when the
process exits, the sends and receives that threads still wait for are made to fail first: by a ``wait()`` that times
out.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from gradsync.comm.background import ThreadedWork, run_in_thread
from gradsync.comm.base import Work
from gradsync.comm.failure.guard import Call, CollectiveGuard

FOREVER = timedelta(days=365)  # the rank that waits for the work has a timeout; the thread has none
AT_ONCE = timedelta(milliseconds=1)
EXIT_S = 2.0  # how long threads may take to return from C when the process exits


_waited_for: set[dist.Work] = set()  # by a thread, in C, at this moment
_exiting = threading.Event()


def _wait_for(work: dist.Work) -> None:
    _waited_for.add(work)
    try:
        if _exiting.is_set():
            raise RuntimeError("this process is exiting")
        work.wait(FOREVER)
    finally:
        _waited_for.discard(work)


@atexit.register
def _unblock_threads() -> None:
    """See [Note: threads at exit]."""
    _exiting.set()
    end_s = time.monotonic() + EXIT_S
    while _waited_for and time.monotonic() < end_s:
        for work in list(_waited_for):
            with contextlib.suppress(RuntimeError):
                work.wait(AT_ONCE)
        time.sleep(0.001)


os.register_at_fork(after_in_child=_waited_for.clear)  # a forked child has none of its parent's threads


class P2PWork(ThreadedWork):
    """A send or a receive of Gloo's; a thread waits for it."""

    def __init__(self, work: dist.Work, guard: CollectiveGuard, call: Call) -> None:
        super().__init__(guard, call)
        self._work = work
        run_in_thread(self._block)

    def _block(self) -> None:
        try:
            _wait_for(self._work)
        except RuntimeError as failed:
            self.fail(str(failed))
        self.part_done()


class BlockingP2PWork(Work):
    """A message of one of gradsync's own collectives. Only the thread that runs the collective waits for it."""

    def __init__(self, work: dist.Work, guard: CollectiveGuard, call: Call) -> None:
        self._work = work
        self._guard = guard
        self._call = call

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            _wait_for(self._work)
        except RuntimeError as failed:
            self._guard.raise_cause(dataclasses.replace(self._call, started_s=time.monotonic()), str(failed))
