"""Threads that block in place of a caller: ``run_in_thread``, ``attempt``, and ``ThreadedWork``.

c10d/p2p.py uses it for Gloo's sends and receives, c10d/groups.py to connect a group, tcp/exchange.py for exchanges,
allreduce/executor.py to run an algorithm.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gradsync.comm.base import Work
from gradsync.comm.failure.guard import Call, CollectiveGuard

CHECK_INTERVAL_S = 0.05  # how often a blocked rank checks whether a peer is lost

Result = TypeVar("Result")


class _ThreadPool:
    """As many threads as there are blocking tasks at once; idle threads are kept for the next tasks."""

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
                threading.Thread(target=self._serve, name="gradsync-background", daemon=True).start()
        self._tasks.put(task)

    def _serve(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                self._idle += 1


_pool = _ThreadPool()


def run_in_thread(task: Callable[[], None]) -> None:
    """Have ``task``, which may block, called in a thread. Returns at once."""
    _pool.run(task)


def attempt(
    call: Callable[[], Result], check: Callable[[], None], *, discard: Callable[[Result], None], check_every_s: float
) -> Result:
    """Return what ``call`` returns, or raise what it raises. It runs in a thread, because it may block in C for long.

    ``check`` is called meanwhile, and raises if the result is of no use any more. What blocks in C can't be ended, so
    the call is then abandoned: it goes on in its thread, and a result that still comes is handed to ``discard`` there.
    """
    lock, ended = threading.Lock(), threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []
    is_abandoned = False

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # raised below
            errors.append(error)
        else:
            with lock:
                results.append(result)
                too_late = is_abandoned
            if too_late:
                discard(result)
        ended.set()

    run_in_thread(run)
    try:
        while not ended.wait(check_every_s):
            check()
    except BaseException:
        with lock:
            is_abandoned = True
            late = results.copy()
        for result in late:
            discard(result)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _forget_threads() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _pool
    _pool = _ThreadPool()


os.register_at_fork(after_in_child=_forget_threads)


class ThreadedWork(Work):
    """Work that threads do for a rank. It is over when all its ``parts`` are done, or the first of them has failed."""

    def __init__(self, guard: CollectiveGuard, call: Call, *, parts: int = 1) -> None:
        self._guard = guard
        self._call = call
        self._parts = parts
        self._error = ""
        self._is_over = False
        # Held until it is over. An Event would be three objects, and take three times as long to make.
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def done(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        if not self._is_over:
            self._call = dataclasses.replace(self._call, started_s=time.monotonic())  # the timeout is of the wait
            while not self._under_way.acquire(timeout=CHECK_INTERVAL_S):
                self._guard.check(self._call)
            self._under_way.release()
        if self._error:
            self._guard.raise_cause(self._call, self._error)

    def part_done(self) -> None:
        """Called by a thread when its part is done."""
        with _counting:
            self._parts -= 1
            if not self._parts:
                self._end()

    def fail(self, error: str) -> None:
        """Called by a thread whose part has failed."""
        with _counting:
            self._error = self._error or error
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._under_way.release()


_counting = threading.Lock()
