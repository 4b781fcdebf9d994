"""Work of the MPI transport: a sequence of nonblocking MPI calls with sums between them, and the order they come in.

[Note: the order of calls] MPI pairs the ranks' collectives on a communicator by their order. A work that needs two
calls makes the second when the first is complete, which is sooner on one rank than on another. So first and second
calls go over two communicators, and on each of them the works come one after the other.

Work moves on when somebody asks, at a start, in ``done()`` and in ``wait()``, and in between by the pump.
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
from gradsync.comm.mpi_library import Library, Patience
from gradsync.comm.watch import Call, Watch

STAGED_BYTES = 256 << 20  # of a group's data on its way at once: higher => more overlap, more memory beside the tensors
SPARE_BYTES = 256 << 20  # of a process's scratch memory that is kept for later
STUCK_S = 1.0  # no call of ours takes so long, but for the making of a group with a peer that was lost meanwhile
CHUNK = 256 * 1024  # values that are summed at a time, so that they stay in the cache

Steps = Iterator[list[Any]]  # yields the requests of each call; what follows a yield is done when they are complete

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class MpiWork(Work):
    """One or two MPI calls. It moves on when its queue does."""

    def __init__(self, queue: Queue, call: Call, steps: Steps, *, calls: int, num_bytes: int) -> None:
        self._queue = queue
        self._steps = steps
        self._requests: list[Any] = []
        self.call = call
        self.num_bytes = num_bytes
        self.begun = False
        self.second_to_come = calls == 2
        self.over = False
        self.error = ""

    def go_on(self) -> None:
        """Make the next call, or end if there is none."""
        if self.begun:
            self.second_to_come = False
        self.begun = True
        try:
            self._requests = next(self._steps)
        except StopIteration:
            self.over = True
        except Exception as error:  # raised where somebody waits for this work, which need not be here
            self.fail(str(error) or type(error).__name__)

    def call_is_complete(self) -> bool:
        if self.over:
            return False
        try:
            return bool(self._queue.library.mpi.Request.Testall(self._requests))
        except Exception as error:
            self.fail(str(error) or type(error).__name__)
            return False

    def fail(self, reason: str) -> None:
        """End without a result."""
        self.error = reason
        self.over, self.second_to_come = True, False

    def done(self) -> bool:
        if not self.over:
            self._queue.library.progress()
        return self.over

    def wait(self) -> None:
        self._queue.finish(self)


class Several(Work):
    """The parts of a tensor that is too large for one call."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Queue:
    """A group's work in the order of its calls; see [Note: the order of calls]."""

    def __init__(self, library: Library, watch: Watch) -> None:
        self.library = library
        self.watch = watch
        self._works: deque[MpiWork] = deque()
        self._letters: list[MpiWork] = []  # sends and receives: MPI itself keeps those of a pair in order
        self._failed = ""  # what went wrong: from then on the ranks' calls would not pair any more
        self._given_up: list[MpiWork] = []  # kept, because MPI may still write to their tensors

    @property
    def is_empty(self) -> bool:
        return not self._works and not self._letters

    def start(self, call: Call, steps: Steps, *, calls: int = 1, num_bytes: int = 0, pair: bool = False) -> Work:
        """Put work at the end, and move everything on."""
        if self._failed:
            self.watch.raise_cause(call, f"an earlier call had failed: {self._failed}")
        work = MpiWork(self, call, steps, calls=calls, num_bytes=num_bytes)
        with self.library.lock:
            (self._letters if pair else self._works).append(work)
            self.library.busy[self] = None
            self.library.progress()
        if not work.over:
            self.library.pump.wake()
        return work

    def advance(self) -> bool:
        """Move it on, with the library's lock held; False when there is nothing left."""
        staged_bytes = sum(work.num_bytes for work in self._works if work.begun)
        held_back = second_to_come = False  # of the works before
        for work in self._works:
            if self._failed:
                work.fail(self._failed)
                continue
            fits = staged_bytes == 0 or staged_bytes + work.num_bytes <= STAGED_BYTES
            if not work.begun and fits and not held_back:
                staged_bytes += work.num_bytes
                work.go_on()
            held_back = held_back or not work.begun
            if work.begun and not (work.second_to_come and second_to_come) and work.call_is_complete():
                work.go_on()
            second_to_come = second_to_come or work.second_to_come
            self._failed = work.error
        for letter in self._letters:
            if not letter.begun or letter.call_is_complete():
                letter.go_on()
        over = [work for work in (*self._works, *self._letters) if work.over]
        if over:
            self._works = deque(work for work in self._works if not work.over)
            self._letters = [letter for letter in self._letters if not letter.over]
            self._given_up += [work for work in over if work.error]
        return not self.is_empty

    def finish(self, work: MpiWork) -> None:
        """Block until a work is over; raise what went wrong."""
        # What counts is how long this rank waits: backward may take its time before it comes here.
        call, patience = dataclasses.replace(work.call, started_s=time.monotonic()), Patience()
        with self.library.pump.resting():
            while not work.done():
                if patience.pause():
                    self.watch.check(call)
        if work.error:
            self.watch.raise_cause(call, work.error)

    def first_unfinished(self) -> Call | None:
        """The earliest call whose part this rank has not done; None if it has done all, or if MPI itself is stuck."""
        if not self.library.lock.try_for(STUCK_S):
            return None
        try:
            if not self.library.lost:
                self.library.progress()
            return self._works[0].call if self._works else None
        finally:
            self.library.lock.release()


def combine(rows: Sequence[Tensor], op: str, *, out: Tensor) -> None:
    """Reduce rows in their order; 16-bit floats are summed in 32 bits. ``out`` may be a row; the first row is spent."""
    wide = op == "sum" and out.dtype in (torch.float16, torch.bfloat16)
    function = _COMBINE[op]
    for begin in range(0, out.numel(), CHUNK):
        first, *others, last = (row[begin : begin + CHUNK] for row in rows)
        into = out[begin : begin + CHUNK]
        if wide:
            total = first.float()
            for row in (*others, last):
                total += row
            into.copy_(total)
        else:
            # Into the first row and not into `out`, which may be a row that is still to come.
            for row in others:
                function(first, row, out=first)
            function(first, last, out=into)


class Scratch:
    """Memory for what comes from peers, kept from call to call: fresh pages cost as much as the sum itself."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """At least so many bytes, as a flat tensor: the smallest that fits."""
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


SCRATCH = Scratch()  # this process's; used with the library's lock held
