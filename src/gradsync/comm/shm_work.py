"""The kinds of work of the shared-memory transport: in place, through the slots, and by mail."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Protocol

import numpy as np
import torch

from gradsync.comm.base import Loan, Work
from gradsync.comm.shm_buffers import Rows
from gradsync.comm.shm_floor import Floor
from gradsync.comm.shm_kernels import (
    ARRIVED,
    DONE,
    EVERYWHERE,
    HAS_ARRIVED,
    HAS_SUMMED,
    IS_OVER,
    MAIL,
    MAIL_BYTES,
    NOT_YET,
    RECEIVED,
    SENT,
    STATE_WORDS,
    all_at,
    in_place,
    publish,
    ring,
    store,
    sum_everywhere,
    through_slots,
    wait_all,
)
from gradsync.comm.shm_sums import lent_sum
from gradsync.comm.watch import Call


class Mover(Protocol):
    """What a work needs of its communicator."""

    def progress(self, *, spins: int) -> None: ...
    def finish(self, work: ShmWork) -> None: ...


class ShmWork(Work):
    """A collective under way. It moves on when its communicator is asked to progress."""

    def __init__(self, mover: Mover, floor: Floor, call: Call) -> None:
        self._mover = mover
        self._floor = floor
        self.call = call
        self.over = False

    def advance(self, spins: int) -> bool:
        """Go on as far as the other ranks let it; True when it is over."""
        raise AssertionError("every kind of work has its own way")

    def done(self) -> bool:
        if not self.over:
            self._mover.progress(spins=1)
        return self.over

    def wait(self) -> None:
        if not self.over:
            self._mover.finish(self)


class InPlace(ShmWork):
    """A collective on buffers that lie in shared memory: one turn, no copy in or out.

    ``rows``: everybody's buffer. ``out``: where to fetch the lanes' values to, if that is the task.
    It uses no slot, so it may arrive before earlier ones are over.
    """

    def __init__(
        self,
        mover: Mover,
        floor: Floor,
        call: Call,
        rows: Rows,
        sum_rows: int,
        mode: int,
        lanes: int,
        out: torch.Tensor,
    ) -> None:
        super().__init__(mover, floor, call)
        self._rows, self._out = rows, out  # kept: the work writes to their addresses
        tensor = rows.tensor
        what = (rows.addresses.ctypes.data, tensor.numel(), tensor.dtype.itemsize, mode, lanes, out.data_ptr())
        self._work = (floor.address, sum_rows, *what)
        self._number = floor.reserve(1)
        self._phase = NOT_YET

    def advance(self, spins: int) -> bool:
        self._move_on(spins)
        self.over = self._phase == IS_OVER
        return self.over

    def do_own_part(self) -> bool:
        """Arrive, and if all have, do what is this rank's to do; True once that is done."""
        self._move_on(1)
        return bool(self._phase >= HAS_SUMMED)

    def _move_on(self, spins: int) -> None:
        self._phase = in_place(*self._work, self._number, self._phase, spins)


class Lent(InPlace):
    """An all-reduce of buffers in shared memory, some values of which this rank sums from where they lie."""

    def __init__(
        self,
        mover: Mover,
        floor: Floor,
        call: Call,
        rows: Rows,
        sum_rows: int,
        own: tuple[int, int],
        loans: Sequence[Loan],
    ) -> None:
        super().__init__(mover, floor, call, rows, sum_rows, EVERYWHERE, floor.world_size, rows.tensor)
        self._sum_rows = sum_rows
        self._sum_lent = lent_sum(rows.tensor.dtype)
        self._own = own
        self._loans = loans

    def _move_on(self, spins: int) -> None:
        floor = self._floor
        if self._phase == NOT_YET:
            publish(floor.address, ARRIVED, self._number)
            self._phase = HAS_ARRIVED
        if self._phase == HAS_ARRIVED and all_at(floor.address, ARRIVED, self._number, spins):
            self._sum()
            publish(floor.address, DONE, self._number)
            self._phase = HAS_SUMMED
        if self._phase >= HAS_SUMMED:
            super()._move_on(spins)

    def _sum(self) -> None:
        rows, num_rows, rank = self._rows.addresses.ctypes.data, self._floor.world_size, self._floor.rank
        done, end = self._own
        for loan in self._loans:
            stop = loan.first + loan.values.numel()
            sum_everywhere(self._sum_rows, rows, num_rows, done, loan.first)
            self._sum_lent(rows, num_rows, rank, loan.values.data_ptr(), loan.factor, loan.first, stop)
            done = stop
        sum_everywhere(self._sum_rows, rows, num_rows, done, end)
        self._loans = ()  # their owner may have the memory back


class Staged(ShmWork):
    """A collective that goes through the slots, a slotful a turn. ``words``: what its kernel reads, but zeros."""

    def __init__(
        self,
        mover: Mover,
        floor: Floor,
        call: Call,
        tensors: tuple[torch.Tensor, ...],
        sum_rows: int,
        words: dict[int, int],
    ) -> None:
        super().__init__(mover, floor, call)
        self._keep = tensors  # their addresses are in use until the work is over
        self._words = np.zeros(STATE_WORDS, np.int64)
        for word, value in words.items():
            self._words[word] = value
        self._work = (floor.address, sum_rows, self._words.ctypes.data)

    def advance(self, spins: int) -> bool:
        self.over = through_slots(*self._work, spins)
        return self.over


class Mail(ShmWork):
    """A send or a receive: a piece at a time through the sender's mailbox for the receiver."""

    def __init__(
        self, mover: Mover, floor: Floor, call: Call, tensor: torch.Tensor, mailbox: int, first: int, *, sends: bool
    ) -> None:
        super().__init__(mover, floor, call)
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
            width = min(MAIL_BYTES, num_bytes - self._at)
            here, there = start + self._at, self._mailbox + MAIL
            memmove(*((there, here) if self._sends else (here, there)), width)
            store(self._mailbox + (SENT if self._sends else RECEIVED), self._number)
            ring(self._floor.address)
            self._number += 1
            self._at += width
        self.over = True
        return True
