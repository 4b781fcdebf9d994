"""Work of the MPI transport: nonblocking MPI calls with sums between them, and the queue that keeps them in order.

[Note: the order of calls] MPI pairs the ranks' collectives on a communicator by their order. A work that needs two
calls makes the second when the first is complete, which is sooner on one rank than on another. So first and second
calls go over two communicators, and on each of them the works follow one after the other.

Work advances at the start of any call, in ``done()`` and in ``wait()``, and in between by the progress thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Work
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.mpi.library import Backoff, Library

STAGED_BYTES = 256 << 20  # of a group's data in flight at once: higher => more overlap, more memory beside the tensors
SPARE_BYTES = 256 << 20  # of a process's scratch memory that is kept for later calls
STUCK_S = 1.0  # no call holds the lock for longer, except making a group with a peer that was lost meanwhile
SUM_BLOCK = 256 * 1024  # values that are summed at a time, so that they stay in the cache

MpiCalls = Iterator[list[Any]]  # yields the requests of each MPI call, and is resumed when they are complete

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class MpiWork(Work):
    """One or two MPI calls. It advances when its queue does."""

    def __init__(self, queue: Queue, call: Call, calls: MpiCalls, *, num_calls: int, num_bytes: int) -> None:
        self._queue = queue
        self._calls = calls
        self._requests: list[Any] = []
        self.call = call
        self.num_bytes = num_bytes
        self.started = False
        self.second_pending = num_calls == 2
        self.completed = False
        self.error = ""

    def next_call(self) -> None:
        """Make the next call, or complete if there is none."""
        if self.started:
            self.second_pending = False
        self.started = True
        try:
            self._requests = next(self._calls)
        except StopIteration:
            self.completed = True
        except Exception as error:  # raised in `finish`, where the work is waited for
            self.fail(str(error) or type(error).__name__)

    def call_is_complete(self) -> bool:
        if self.completed:
            return False
        try:
            return bool(self._queue.library.mpi.Request.Testall(self._requests))
        except Exception as error:
            self.fail(str(error) or type(error).__name__)
            return False

    def fail(self, reason: str) -> None:
        """End without a result."""
        self.error = reason
        self.completed, self.second_pending = True, False

    def done(self) -> bool:
        if not self.completed:
            self._queue.library.progress()
        return self.completed

    def wait(self) -> None:
        self._queue.finish(self)


class ChunkedWork(Work):
    """The works of a tensor that is too large for one call."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Queue:
    """A group's work in the order of its calls; see [Note: the order of calls]."""

    def __init__(self, library: Library, guard: CollectiveGuard) -> None:
        self.library = library
        self.guard = guard
        self._works: deque[MpiWork] = deque()
        self._p2p: list[MpiWork] = []  # sends and receives: MPI itself keeps those of a pair in order
        self._failed = ""  # the first error: after it the ranks' calls would no longer pair
        self._abandoned: list[MpiWork] = []  # kept, because MPI may still write to their tensors

    @property
    def is_empty(self) -> bool:
        return not self._works and not self._p2p

    def start(self, call: Call, calls: MpiCalls, *, num_calls: int = 1, num_bytes: int = 0, p2p: bool = False) -> Work:
        """Append work to the queue, and advance everything."""
        if self._failed:
            self.guard.raise_cause(call, f"an earlier call had failed: {self._failed}")
        work = MpiWork(self, call, calls, num_calls=num_calls, num_bytes=num_bytes)
        with self.library.lock:
            (self._p2p if p2p else self._works).append(work)
            self.library.busy[self] = None
            self.library.progress()
        if not work.completed:
            self.library.progress_thread.wake()
        return work

    def advance(self) -> bool:
        """Advance it, with the library's lock held; False when no work is left."""
        staged_bytes = sum(work.num_bytes for work in self._works if work.started)
        held_back = second_pending = False  # whether an earlier work was not started, or has its second call ahead
        for work in self._works:
            if self._failed:
                work.fail(self._failed)
                continue
            fits = staged_bytes == 0 or staged_bytes + work.num_bytes <= STAGED_BYTES
            if not work.started and fits and not held_back:
                staged_bytes += work.num_bytes
                work.next_call()
            held_back = held_back or not work.started
            if work.started and not (work.second_pending and second_pending) and work.call_is_complete():
                work.next_call()
            second_pending = second_pending or work.second_pending
            self._failed = work.error
        for work in self._p2p:
            if not work.started or work.call_is_complete():
                work.next_call()
        finished = [work for work in (*self._works, *self._p2p) if work.completed]
        if finished:
            self._works = deque(work for work in self._works if not work.completed)
            self._p2p = [work for work in self._p2p if not work.completed]
            self._abandoned += [work for work in finished if work.error]
        return not self.is_empty

    def finish(self, work: MpiWork) -> None:
        """Block until a work is complete; raise its error if it failed."""
        # The timeout counts from here: backward may take any time before it waits.
        call, backoff = dataclasses.replace(work.call, started_s=time.monotonic()), Backoff()
        with self.library.progress_thread.paused():
            while not work.done():
                if backoff.pause():
                    self.guard.check(call)
        if work.error:
            self.guard.raise_cause(call, work.error)

    def first_unfinished(self) -> Call | None:
        """The earliest call in which this rank has not done its part; None if there is none or MPI itself is stuck."""
        if not self.library.lock.acquire_within(STUCK_S):
            return None
        try:
            if not self.library.lost:
                self.library.progress()
            return self._works[0].call if self._works else None
        finally:
            self.library.lock.release()


def combine(rows: Sequence[Tensor], op: str, *, out: Tensor) -> None:
    """Reduce rows in order, 16-bit floats in 32 bits. ``out`` may be one of the rows; the first row is overwritten."""
    wide = op == "sum" and out.dtype in (torch.float16, torch.bfloat16)
    function = _COMBINE[op]
    for begin in range(0, out.numel(), SUM_BLOCK):
        first, *others, last = (row[begin : begin + SUM_BLOCK] for row in rows)
        into = out[begin : begin + SUM_BLOCK]
        if wide:
            total = first.float()
            for row in (*others, last):
                total += row
            into.copy_(total)
        else:
            # Into the first row and not into `out`, which may be a row that is still to be read.
            for row in others:
                function(first, row, out=first)
            function(first, last, out=into)


class ScratchPool:
    """Receive buffers, kept from call to call: fresh pages cost as much as the sum itself."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """A flat tensor of at least ``num_bytes``: the smallest kept one that fits, or a new one."""
        fitting = [spare for spare in self._spare if num_bytes <= spare.numel() <= 2 * num_bytes]
        if not fitting:
            return torch.empty(num_bytes, dtype=torch.uint8)
        best = min(fitting, key=Tensor.numel)
        self._spare = [spare for spare in self._spare if spare is not best]
        return best

    def give_back(self, memory: Tensor) -> None:
        self._spare.append(memory)
        while sum(spare.numel() for spare in self._spare) > SPARE_BYTES:
            self._spare.pop(0)


SCRATCH_POOL = ScratchPool()  # this process's; used with the library's lock held
