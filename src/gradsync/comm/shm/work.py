"""The kinds of work of the shared-memory transport.

``InPlace`` works on shared buffers, ``InPlaceFromSources`` also reads values that are not in them yet, ``Staged``
copies private tensors through the slots, and ``ShmP2PWork`` is a send or a receive through a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Protocol

import numpy as np
import torch

from gradsync.comm.base import SourceSlice, Work
from gradsync.comm.checks import describe_call, fingerprint
from gradsync.comm.failure.guard import Call
from gradsync.comm.shm.control_block import ControlBlock
from gradsync.comm.shm.segment import SharedTensor
from gradsync.kernels.shm.collectives import (
    ARRIVED,
    CHANNEL_DATA,
    CHANNEL_DATA_BYTES,
    COMPLETE,
    DONE,
    FIRST_SEQUENCE,
    HAS_ARRIVED,
    HAS_SUMMED,
    MISMATCH,
    NOT_ARRIVED,
    RECEIVED,
    SENT,
    STATE_WORDS,
    TO_ALL,
    all_reached,
    arrive,
    counters_reached,
    fingerprints_agree,
    in_place,
    publish,
    store,
    sum_range,
    through_slots,
    wake_sleepers,
)
from gradsync.kernels.shm.sums import source_sum

IN_PLACE = 16  # added to the mode of an in-place work, so that its fingerprint differs from that of any other kind


class WorkDriver(Protocol):
    """What a work needs of its communicator: to advance it, to wait for it, and to raise its error."""

    def progress(self, *, spins: int) -> None: ...
    def finish(self, work: ShmWork) -> None: ...
    def raise_mismatch(self, work: ShmWork) -> None: ...


class ShmWork(Work):
    """A collective under way. It advances when its communicator is asked to progress."""

    def __init__(self, driver: WorkDriver, control: ControlBlock, call: Call) -> None:
        self._driver = driver
        self._control = control
        self.call = call
        self.completed = False
        self.first_sequence = 0  # the sequence number of its first chunk
        self.is_mismatched = False  # the ranks' calls differ

    def advance(self, spins: int) -> bool:
        """Advance as far as the other ranks allow; True when it is complete or has failed."""
        raise AssertionError("every kind of work overrides this")

    def describe(self) -> str:
        """What this rank asked for, as an error names it."""
        return self.call.what

    def done(self) -> bool:
        if not self.completed:
            self._driver.progress(spins=1)
        return self.completed

    def wait(self) -> None:
        if not self.completed:
            self._driver.finish(self)
        if self.is_mismatched:
            self._driver.raise_mismatch(self)

    def end_as_mismatched(self, earlier: ShmWork) -> None:
        """End with the error of an earlier call: the ranks no longer agree on the next sequence number."""
        self.first_sequence = earlier.first_sequence
        self._end(is_mismatched=True)

    def _end(self, *, is_mismatched: bool = False) -> bool:
        self.completed, self.is_mismatched = True, is_mismatched
        return True


class InPlace(ShmWork):
    """A collective on shared buffers: a single chunk that is not copied in or out.

    ``shared``: the buffers of all ranks. ``owners``: the ranks that own a slice. ``out``: where the mode FETCH copies
    the owners' slices to.
    It uses no slot, so it may arrive before earlier collectives are complete.
    """

    def __init__(
        self,
        driver: WorkDriver,
        control: ControlBlock,
        call: Call,
        shared: SharedTensor,
        sum_rows: int,
        mode: int,
        owners: range,
        out: torch.Tensor,
        op: str,
    ) -> None:
        super().__init__(driver, control, call)
        self._shared, self._out = shared, out  # kept alive: the work writes to their addresses
        tensor = shared.tensor
        rows = (shared.addresses.ctypes.data, tensor.numel(), tensor.dtype.itemsize)
        slices = (mode, owners.start, len(owners), out.data_ptr())
        all_owners = (owners.start << 20) + len(owners)
        self._fingerprint = fingerprint(IN_PLACE + mode, op, tensor.dtype, tensor.numel(), all_owners)
        self._work = (control.address, sum_rows, *rows, *slices, self._fingerprint)
        self.first_sequence = control.reserve(1)
        self._phase = NOT_ARRIVED

    def advance(self, spins: int) -> bool:
        self._advance_phase(spins)
        if self._phase == MISMATCH:
            return self._end(is_mismatched=True)
        self.completed = self._phase == COMPLETE
        return self.completed

    def describe(self) -> str:
        return describe_call(self.call.what, self._shared.tensor.dtype, self._shared.tensor.numel())

    def reduce_if_all_arrived(self) -> bool:
        """Arrive, and do this rank's part once all ranks have arrived; True once that is done."""
        self._advance_phase(1)
        return bool(self._phase >= HAS_SUMMED)

    def _advance_phase(self, spins: int) -> None:
        self._phase = in_place(*self._work, self.first_sequence, self._phase, spins)


class InPlaceFromSources(InPlace):
    """A sum of shared buffers. This rank reads some of its own values from other tensors, the ``sources``.

    ``mode``: TO_ALL or TO_OWNERS, where every rank owns a slice.
    """

    def __init__(
        self,
        driver: WorkDriver,
        control: ControlBlock,
        call: Call,
        shared: SharedTensor,
        sum_rows: int,
        own: tuple[int, int],
        sources: Sequence[SourceSlice],
        mode: int,
    ) -> None:
        everyone = range(control.world_size)
        super().__init__(driver, control, call, shared, sum_rows, mode, everyone, shared.tensor, "sum")
        self._sum_rows = sum_rows
        self._to_all = mode == TO_ALL
        self._sum_from_source = source_sum(shared.tensor.dtype, to_all=self._to_all)
        self._own = own
        self._sources = sources

    def _advance_phase(self, spins: int) -> None:
        control = self._control
        if self._phase == NOT_ARRIVED:
            arrive(control.address, self.first_sequence, self._fingerprint)
            self._phase = HAS_ARRIVED
        if self._phase == HAS_ARRIVED and all_reached(control.address, ARRIVED, self.first_sequence, spins):
            if not fingerprints_agree(control.address, self.first_sequence, self._fingerprint):
                self._phase = MISMATCH
                return
            self._sum()
            publish(control.address, DONE, self.first_sequence)
            self._phase = HAS_SUMMED
        if self._phase >= HAS_SUMMED:
            super()._advance_phase(spins)

    def _sum(self) -> None:
        rows, num_rows, rank = self._shared.addresses.ctypes.data, self._control.world_size, self._control.rank
        out = 0 if self._to_all else self._shared.tensor.data_ptr()
        done, end = self._own
        for source in self._sources:
            stop = source.first + source.values.numel()
            sum_range(self._sum_rows, rows, num_rows, out, done, source.first)
            self._sum_from_source(rows, num_rows, rank, source.values.data_ptr(), source.factor, source.first, stop)
            done = stop
        sum_range(self._sum_rows, rows, num_rows, out, done, end)
        self._sources = ()  # their memory may be reused from here on


class Staged(ShmWork):
    """A collective on private tensors, which goes through the slots in chunks. ``words``: its nonzero state words."""

    def __init__(
        self,
        driver: WorkDriver,
        control: ControlBlock,
        call: Call,
        tensors: tuple[torch.Tensor, ...],
        sum_rows: int,
        words: dict[int, int],
    ) -> None:
        super().__init__(driver, control, call)
        self.first_sequence = words[FIRST_SEQUENCE]
        self._keep = tensors  # kept alive: their addresses are in use until the work is complete
        self._words = np.zeros(STATE_WORDS, np.int64)
        for word, value in words.items():
            self._words[word] = value
        self._work = (control.address, sum_rows, self._words.ctypes.data)

    def describe(self) -> str:
        return describe_call(self.call.what, self._keep[0].dtype, self._keep[0].numel())

    def advance(self, spins: int) -> bool:
        status = through_slots(*self._work, spins)
        if status == MISMATCH:
            return self._end(is_mismatched=True)
        self.completed = status == 1
        return self.completed


class ShmP2PWork(ShmWork):
    """A send or a receive: chunk by chunk through the channel from the sender to the receiver."""

    def __init__(
        self,
        driver: WorkDriver,
        control: ControlBlock,
        call: Call,
        tensor: torch.Tensor,
        channel: int,
        first: int,
        *,
        sends: bool,
    ) -> None:
        super().__init__(driver, control, call)
        self._tensor = tensor  # kept alive: the work writes to its address
        self._channel = channel
        self._next = first  # the number of the next chunk in this channel
        self._at = 0
        self._sends = sends

    def advance(self, spins: int) -> bool:
        num_bytes, start = self._tensor.nbytes, self._tensor.data_ptr()
        while self._at < num_bytes:
            # A sender waits until the previous chunk was received, a receiver until the next one was sent.
            counter, value = (RECEIVED, self._next - 1) if self._sends else (SENT, self._next)
            if not counters_reached(self._channel + counter, 0, 1, value, spins):
                return False
            size = min(CHANNEL_DATA_BYTES, num_bytes - self._at)
            here, there = start + self._at, self._channel + CHANNEL_DATA
            memmove(*((there, here) if self._sends else (here, there)), size)
            store(self._channel + (SENT if self._sends else RECEIVED), self._next)
            wake_sleepers(self._control.address)
            self._next += 1
            self._at += size
        self.completed = True
        return True
