"""The kinds of work of the shared-memory transport: in place, through the slots, and by mail. (Turns: see shm.py.)"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from typing import Protocol

import numpy as np
import torch

from gradsync.comm.base import ReduceOp, Work
from gradsync.comm.shm_kernels import LINE_BYTES, store, wait_all
from gradsync.comm.shm_sums import sum_rows
from gradsync.comm.watch import Call

SLOT_BYTES = 256 * 1024  # two of them fit a core's second-level cache
SENT, RECEIVED, MAIL = 0, LINE_BYTES, 4096  # within a mailbox: two counters, and what is sent

Put = Callable[[int, int], None]  # (turn, address of this rank's slot)
Take = Callable[[int, np.ndarray], None]  # (turn, addresses of everybody's slots)


class Floor(Protocol):
    """What a work needs of its communicator: where the ranks meet."""

    rank: int
    slots: list[np.ndarray]  # by parity: the address of each rank's slot

    def reserve(self, num_turns: int) -> int: ...
    def arrive(self, number: int) -> None: ...
    def declare_done(self, number: int) -> None: ...
    def all_arrived(self, number: int, spins: int) -> bool: ...
    def all_done(self, number: int, spins: int) -> bool: ...
    def ring(self) -> None: ...
    def slice_of(self, numel: int) -> tuple[int, int]: ...
    def progress(self, *, spins: int) -> None: ...
    def finish(self, work: ShmWork) -> None: ...


class ShmWork(Work):
    """A collective under way. It moves on when its communicator is asked to progress."""

    def __init__(self, floor: Floor, call: Call) -> None:
        self._floor = floor
        self.call = call
        self.over = False
        self.keep: torch.Tensor | None = None  # what must not be freed while its address is in use

    def advance(self, spins: int) -> bool:
        """Go on as far as the other ranks let it; True when it is over."""
        raise AssertionError("every kind of work has its own way")

    def done(self) -> bool:
        if not self.over:
            self._floor.progress(spins=1)
        return self.over

    def wait(self) -> None:
        self._floor.finish(self)


class InPlace(ShmWork):
    """The all-reduce of buffers that lie in shared memory: one turn, no copy."""

    def __init__(
        self, floor: Floor, call: Call, rows: np.ndarray, numel: int, dtype: torch.dtype, op: ReduceOp
    ) -> None:
        super().__init__(floor, call)
        self._number = floor.reserve(1)
        self._rows = rows
        self._numel = numel
        self._dtype = dtype
        self._op = op
        self._arrived = self._summed = False

    def arrive(self) -> None:
        """Let the others see this rank's buffer. May come before earlier work in place is over."""
        if not self._arrived:
            self._arrived = True
            self._floor.arrive(self._number)

    def sum_slice(self, spins: int) -> bool:
        """Do this rank's part once all are there; True when it is done. Only in the order of the turns."""
        if not self._summed and self._floor.all_arrived(self._number, spins):
            sum_rows(self._rows, self._dtype, *self._floor.slice_of(self._numel), self._op)
            self._summed = True
            self._floor.declare_done(self._number)
        return self._summed

    def advance(self, spins: int) -> bool:
        self.arrive()
        self.over = self.sum_slice(spins) and self._floor.all_done(self._number, spins)
        return self.over


class Staged(ShmWork):
    """A collective that goes through the slots, a slotful a turn.

    ``sum_slots``, if there is one, sums this rank's slice of all slots into all of them, between arrival and ``take``.
    """

    def __init__(
        self, floor: Floor, call: Call, num_turns: int, put: Put, take: Take, sum_slots: Take | None = None
    ) -> None:
        super().__init__(floor, call)
        self._next = floor.reserve(num_turns)
        self._end = self._next + num_turns
        self._put = put
        self._take = take
        self._sum_slots = sum_slots
        self._turn = 0
        self._arrived = self._summed = False

    def advance(self, spins: int) -> bool:
        floor = self._floor
        while self._next < self._end:
            slots = floor.slots[self._next % 2]
            if not self._arrived:
                self._arrived = True
                self._put(self._turn, int(slots[floor.rank]))
                floor.arrive(self._next)
            if not floor.all_arrived(self._next, spins):
                return False
            if self._sum_slots is not None:
                if not self._summed:
                    self._summed = True
                    self._sum_slots(self._turn, slots)
                    floor.declare_done(self._next)
                if not floor.all_done(self._next, spins):
                    return False
            self._take(self._turn, slots)
            self._arrived = self._summed = False
            self._turn += 1
            self._next += 1
        self.over = True
        return True


class Mail(ShmWork):
    """A send or a receive: a slotful at a time through the sender's mailbox for the receiver."""

    def __init__(
        self, floor: Floor, call: Call, tensor: torch.Tensor, mailbox: int, first: int, *, sends: bool
    ) -> None:
        super().__init__(floor, call)
        self._tensor = tensor  # kept alive: the work writes to its address
        self._mailbox = mailbox
        self._number = first  # of the piece that is next
        self._at = 0
        self._sends = sends

    def advance(self, spins: int) -> bool:
        num_bytes, start = self._tensor.nbytes, self._tensor.data_ptr()
        while self._at < num_bytes:
            # A sender waits until the piece before was taken, a receiver until the next one is there.
            awaited = (RECEIVED, self._number - 1) if self._sends else (SENT, self._number)
            if not wait_all(self._mailbox + awaited[0], 0, 1, awaited[1], spins):
                return False
            width = min(SLOT_BYTES, num_bytes - self._at)
            here, there = start + self._at, self._mailbox + MAIL
            memmove(*((there, here) if self._sends else (here, there)), width)
            store(self._mailbox + (SENT if self._sends else RECEIVED), self._number)
            self._floor.ring()
            self._number += 1
            self._at += width
        self.over = True
        return True
