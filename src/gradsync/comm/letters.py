"""Messages between two ranks over Gloo, as works that can be asked and waited for.

[Note: Gloo's messages can't be asked] ``is_completed()`` of a Gloo send or receive stays False until its ``wait()`` has
returned, and a ``wait()`` that times out closes every connection of its group. So a thread blocks in that ``wait()``,
for as long as it takes, and whoever wants to know looks at the thread's flag.

[Note: threads at the end] A thread that comes back from C while the interpreter is being taken down aborts the process.
So what threads still wait for when the process exits is made to fail before: by a ``wait()`` that times out.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from gradsync.comm.base import Work
from gradsync.comm.watch import Call, Watch

FOREVER = timedelta(days=365)  # who waits for a letter has a timeout; the thread has none
AT_ONCE = timedelta(milliseconds=1)
ENDING_S = 2.0  # what threads may take to come back when the process exits
LOOK_S = 0.05  # how often a blocked rank looks whether a peer is lost


class _Blockers:
    """Threads that block in the place of others: as many as there are letters under way, and kept for the next ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0  # threads that no task has been put for

    def run(self, task: Callable[[], None]) -> None:
        """Have a thread call ``task``, which may block. Returns at once."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._serve, name="gradsync-letters", daemon=True).start()
        self._tasks.put(task)

    def _serve(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                self._idle += 1


_blockers = _Blockers()


def in_a_thread(task: Callable[[], None]) -> None:
    """Have ``task``, which may block, called in a thread. Returns at once."""
    _blockers.run(task)


_waited_for: set[dist.Work] = set()  # by a thread, in C, at this moment
_exiting = threading.Event()


def _wait_for(work: dist.Work) -> None:
    _waited_for.add(work)
    try:
        if _exiting.is_set():
            raise RuntimeError("this process exits")
        work.wait(FOREVER)
    finally:
        _waited_for.discard(work)


@atexit.register
def _call_threads_back() -> None:
    """See [Note: threads at the end]."""
    _exiting.set()
    end_s = time.monotonic() + ENDING_S
    while _waited_for and time.monotonic() < end_s:
        for work in list(_waited_for):
            with contextlib.suppress(RuntimeError):
                work.wait(AT_ONCE)
        time.sleep(0.001)


def _forget_threads() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _blockers
    _blockers = _Blockers()
    _waited_for.clear()


os.register_at_fork(after_in_child=_forget_threads)


class Errand(Work):
    """What threads do for a rank. It is over when all its ``parts`` have ended, or the first of them has failed."""

    def __init__(self, watch: Watch, call: Call, *, parts: int = 1) -> None:
        self._watch = watch
        self._call = call
        self._parts = parts
        self._error = ""
        self._is_over = False
        self._under_way = threading.Lock()  # held until then. An Event would be three objects, and take as many times
        self._under_way.acquire()

    def done(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self._call = dataclasses.replace(self._call, started_s=time.monotonic())  # that is when this rank waits
            while not self._under_way.acquire(timeout=LOOK_S):
                self._watch.check(self._call)
            self._under_way.release()
        if self._error:
            self._watch.raise_cause(self._call, self._error)

    def ended(self) -> None:
        """Said by a thread when its part is done."""
        with _counting:
            self._parts -= 1
            if not self._parts:
                self._end()

    def fail(self, error: str) -> None:
        """Said by a thread whose part can't be done."""
        with _counting:
            self._error = self._error or error
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._under_way.release()


_counting = threading.Lock()


class Letter(Errand):
    """A send or a receive that Gloo has under way."""

    def __init__(self, work: dist.Work, watch: Watch, call: Call) -> None:
        super().__init__(watch, call)
        self._work = work
        in_a_thread(self._block)

    def _block(self) -> None:
        try:
            _wait_for(self._work)
        except RuntimeError as failed:
            self.fail(str(failed))
        self.ended()


class OwnLetter(Work):
    """A message of one of our own collectives: waited for in the thread that drives it, and by nobody else."""

    def __init__(self, work: dist.Work, watch: Watch, call: Call) -> None:
        self._work = work
        self._watch = watch
        self._call = call

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            _wait_for(self._work)
        except RuntimeError as failed:
            self._watch.raise_cause(dataclasses.replace(self._call, started_s=time.monotonic()), str(failed))
