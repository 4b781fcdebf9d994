"""Shared memory as a transport, for ranks on one host: an all-reduce costs what reading and writing memory costs.

Every collective is a sequence of *turns*. In a turn each rank puts something where all can see it and raises its
``arrived`` counter; when all have arrived it takes what it needs; where a second meeting is needed it raises ``done``.
Turns are counted over the whole life of the communicator and the counters only grow.

[Note: two slots suffice] What is put goes into one of two slots, by the turn's parity. A rank puts turn t only after
its turn t-1 is over. That took everyone's arrival at t-1, and they arrived there only after their turn t-2 was over.
So nobody still reads the slot of turn t-2 when turn t overwrites it.

Buckets that the engine allocated here are reduced where they lie: each rank sums its own slice of everybody's buffer
and writes it back to all of them. They use no slot, so any number of them may have arrived before the first is over.

Nothing runs in the background. Work moves on when somebody asks: at its start, in ``done()``, in ``wait()``.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from ctypes import memmove

import numpy as np
import torch
from torch import Tensor

from gradsync.comm import futex
from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, check_contiguous, check_op, check_rows
from gradsync.comm.c10d import C10d
from gradsync.comm.lifeline import Lifeline
from gradsync.comm.segment import Segment, share
from gradsync.comm.shm_kernels import LINE_BYTES, load, publish, store, wait_all
from gradsync.comm.shm_sums import sum_rows
from gradsync.comm.shm_work import MAIL, SLOT_BYTES, InPlace, Mail, Put, ShmWork, Staged, Take
from gradsync.comm.watch import Call, Watch

DIRECT_BYTES = 64 * 1024  # up to this every rank sums all of a tensor itself: one meeting instead of two
SPINS = 2000  # looks at a counter before the core is offered to somebody else
YIELDS = 50  # offers before this rank sleeps
NAP_S = 0.05  # how long it sleeps before it looks whether a peer is lost
ALIGN = 64  # values: no two ranks write to one cache line

# Where in a rank's part of the control segment things are: four counters, two slots, and a mailbox for each peer.
ARRIVED, DONE, SLEEPING, DOORBELL = (line * LINE_BYTES for line in range(4))
SLOTS = 4096
MAILBOXES = SLOTS + 2 * SLOT_BYTES
MAILBOX_BYTES = MAIL + SLOT_BYTES


_BUSY: weakref.WeakSet[Shm] = weakref.WeakSet()  # this process's communicators that have work under way


class Shm(Communicator):
    """Ranks on one host that share memory. Made on top of a torch.distributed group, through which they meet."""

    transport = "shm"

    def __init__(self, base: C10d, *, why: str) -> None:
        super().__init__(base.rank, base.world_size, timeout_s=base.timeout_s, feed=base.feed)
        self.why = why
        self._base = base
        self._watch = Watch(base.lifeline, base.watch.members, f"{base.watch.key}/shm", base.timeout_s)
        self._control: Segment | None = share(base, MAILBOXES + self.world_size * MAILBOX_BYTES)
        self._stride = self._control.bytes_per_rank
        self._parts = [self._control.address_of(rank) for rank in range(self.world_size)]
        self._here = self._parts[self.rank]
        self.slots = [np.array([part + SLOTS + parity * SLOT_BYTES for part in self._parts]) for parity in range(2)]
        self._lock = threading.RLock()
        self._reserved = 0  # turns
        self._queue: deque[ShmWork] = deque()
        self._mail: dict[tuple[int, int], deque[ShmWork]] = {}
        self._pieces: dict[tuple[int, int], int] = {}  # by (sender, receiver): pieces of mail so far
        self._allocated: dict[int, tuple[Segment, int, torch.dtype]] = {}
        base.lifeline.before_leaving.append(weakref.WeakMethod(self._give_up))

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        numel, dtype, start = tensor.numel(), tensor.dtype, tensor.data_ptr()
        if numel == 0:
            return Finished()
        call = self._enter(f"all_reduce({op})", tensor)
        allocated = self._allocated.get(start)
        if allocated is not None and allocated[1] >= numel and allocated[2] == dtype:
            rows = np.array([allocated[0].address_of(rank) for rank in range(self.world_size)])
            work = InPlace(self, call, rows, numel, dtype, op)
            work.keep = tensor
            return self._begin(work)

        item, width = dtype.itemsize, SLOT_BYTES // dtype.itemsize

        def piece(turn: int) -> tuple[int, int]:
            return start + turn * SLOT_BYTES, min(width, numel - turn * width)

        def put(turn: int, slot: int) -> None:
            address, count = piece(turn)
            memmove(slot, address, count * item)

        def take_sum(turn: int, slots: np.ndarray) -> None:
            address, count = piece(turn)
            sum_rows(slots, dtype, 0, count, op, out=address)

        def sum_slice(turn: int, slots: np.ndarray) -> None:
            sum_rows(slots, dtype, *self.slice_of(piece(turn)[1]), op)

        def take(turn: int, slots: np.ndarray) -> None:
            address, count = piece(turn)
            memmove(address, int(slots[self.rank]), count * item)

        turns = -(-numel // width)
        # Two ranks, or little data: everybody sums everything, and meets once. Else each sums its slice for all.
        if self.world_size == 2 or numel * item <= DIRECT_BYTES:
            return self._stage(call, tensor, turns, put, take_sum)
        return self._stage(call, tensor, turns, put, take, sum_slice)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        num_bytes = tensor.nbytes
        if num_bytes == 0:
            return Finished()

        def put(turn: int, slot: int) -> None:
            at = turn * SLOT_BYTES
            memmove(slot, tensor.data_ptr() + at, min(SLOT_BYTES, num_bytes - at))

        def take(turn: int, slots: np.ndarray) -> None:
            at = turn * SLOT_BYTES
            for rank, slot in enumerate(slots.tolist()):
                memmove(out.data_ptr() + rank * num_bytes + at, slot, min(SLOT_BYTES, num_bytes - at))

        return self._stage(self._enter("all_gather", tensor), tensor, -(-num_bytes // SLOT_BYTES), put, take)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        num_bytes, start = tensor.nbytes, tensor.data_ptr()
        if num_bytes == 0:
            return Finished()

        def put(turn: int, slot: int) -> None:
            at = turn * SLOT_BYTES
            if self.rank == src:
                memmove(slot, start + at, min(SLOT_BYTES, num_bytes - at))

        def take(turn: int, slots: np.ndarray) -> None:
            at = turn * SLOT_BYTES
            if self.rank != src:
                memmove(start + at, int(slots[src]), min(SLOT_BYTES, num_bytes - at))

        call = self._enter(f"broadcast(src={src})", tensor)
        return self._stage(call, tensor, -(-num_bytes // SLOT_BYTES), put, take)

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        into = torch.view_as_real(out) if out.is_complex() else out
        dtype, numel = into.dtype, into.numel()
        put, width, turns = self._put_rows(tensor, into.nbytes, dtype.itemsize)

        def take(turn: int, slots: np.ndarray) -> None:
            count = min(width, numel - turn * width)
            address = into.data_ptr() + turn * width * dtype.itemsize
            sum_rows(slots + self.rank * width * dtype.itemsize, dtype, 0, count, op, out=address)

        return self._stage(self._enter(f"reduce_scatter({op})", tensor), tensor, turns, put, take)

    def all_to_all(self, tensor: Tensor, *, out: Tensor) -> Work:
        if tensor.shape != out.shape:
            raise ValueError(f"out must have tensor's shape {tuple(tensor.shape)}; got {tuple(out.shape)}.")
        check_rows(tensor, out[0], self.world_size, ("tensor", "out[0]"))
        check_contiguous(out, "out")
        row_bytes = out[0].nbytes
        put, width, turns = self._put_rows(tensor, row_bytes, 1)

        def take(turn: int, slots: np.ndarray) -> None:
            at = turn * width
            for rank, slot in enumerate(slots.tolist()):
                there = out.data_ptr() + rank * row_bytes + at
                memmove(there, slot + self.rank * width, min(width, row_bytes - at))

        return self._stage(self._enter("all_to_all", tensor), tensor, turns, put, take)

    def _put_rows(self, tensor: Tensor, row_bytes: int, item: int) -> tuple[Put, int, int]:
        """How a tensor of a row for each rank goes through the slots: (put, values of a row a turn, turns)."""
        width = SLOT_BYTES // self.world_size // item // ALIGN * ALIGN
        start, width_bytes = tensor.data_ptr(), width * item

        def put(turn: int, slot: int) -> None:
            at = turn * width_bytes
            for rank in range(self.world_size):
                row = start + rank * row_bytes + at
                memmove(slot + rank * width_bytes, row, min(width_bytes, row_bytes - at))

        return put, width, -(-row_bytes // width_bytes)

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._post(self.rank, dst, tensor)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._post(src, self.rank, tensor)

    def _post(self, src: int, dst: int, tensor: Tensor) -> Work:
        check_contiguous(tensor)
        sends = self.rank == src
        call = self._enter(f"send to {dst}" if sends else f"recv from {src}", tensor, pair=True)
        first = self._pieces.get((src, dst), 0) + 1
        self._pieces[src, dst] = first - 1 + -(-tensor.nbytes // SLOT_BYTES)
        mailbox = self._parts[src] + MAILBOXES + dst * MAILBOX_BYTES
        work = Mail(self, call, tensor, mailbox, first, sends=sends)
        with self._lock:
            self._mail.setdefault((src, dst), deque()).append(work)
            _BUSY.add(self)
            self.progress(spins=1)
        return work

    def barrier(self) -> None:
        call = self._enter("barrier", torch.empty(0))
        self._stage(call, None, 1, lambda turn, slot: None, lambda turn, slots: None).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        base = self._base.split(ranks)
        assert base is None or isinstance(base, C10d), "a split is of the same kind"
        return None if base is None else Shm(base, why=self.why)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A bucket in shared memory, zeroed by its own rank so that its pages are near. Blocks: all ranks call it."""
        if device.type != "cpu" or numel == 0:
            return super().allocate(numel, dtype, device)
        segment = share(self._base, numel * dtype.itemsize)
        buffer = segment.view(self.rank, numel, dtype).zero_()
        key = buffer.data_ptr()
        self._allocated[key] = (segment, numel, dtype)
        weakref.finalize(buffer, self._allocated.pop, key, None)
        return buffer

    @property
    def lifeline(self) -> Lifeline:
        return self._base.lifeline

    def note(self, place: str, *, step: int | None = None) -> None:
        self._base.note(place, step=step)

    def close(self) -> None:
        """Leave. The memory is given back when the last rank has. Work under way is given up."""
        with self._lock:
            self._control = None
            self._queue.clear()
            self._mail.clear()
            _BUSY.discard(self)
        self._base.close()

    def _give_up(self) -> None:
        """As this rank leaves: work that it began moves on no more."""
        if self._queue:
            self._watch.retract(self._queue[0].call)

    # -- moving on ------------------------------------------------------------------------------------------------

    def _enter(self, what: str, tensor: Tensor, *, pair: bool = False) -> Call:
        if self._control is None:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        if tensor.device.type != "cpu":
            raise ValueError(f"the shm transport moves CPU tensors; got one on {tensor.device}. Use connect('c10d').")
        call = self._watch.enter(what, pair=pair)
        self._watch.raise_if_lost(call)
        return call

    def _stage(
        self, call: Call, tensor: Tensor | None, turns: int, put: Put, take: Take, sum_slots: Take | None = None
    ) -> Work:
        if turns == 0:
            return Finished()
        work = Staged(self, call, turns, put, take, sum_slots)
        work.keep = tensor  # its address is in use until the work is over
        return self._begin(work)

    def _begin(self, work: ShmWork) -> Work:
        with self._lock:
            self._queue.append(work)
            _BUSY.add(self)
            self.progress(spins=1)
        return work

    def progress(self, *, spins: int) -> None:
        """Move on what is under way, waiting at most ``spins`` looks at a time."""
        with self._lock:
            queue = self._queue
            while queue and queue[0].advance(spins):
                queue.popleft()
            # The first is stuck. Those behind it that need no slot may arrive, and be summed as far as all have come.
            in_place: list[InPlace] = []
            for work in queue:
                if not isinstance(work, InPlace):
                    break
                work.arrive()
                in_place.append(work)
            for work in in_place:
                if not work.sum_slice(1):
                    break
            for letters in self._mail.values():
                while letters and letters[0].advance(spins if not queue else 1):
                    letters.popleft()
            if not queue and not any(self._mail.values()):
                _BUSY.discard(self)

    def finish(self, work: ShmWork) -> None:
        """Block until a work is over: spin, then offer the core to others, then sleep until a peer rings."""
        tries = 0
        work.call = dataclasses.replace(work.call, started_s=time.monotonic())
        self.progress(spins=SPINS)
        while not work.over:
            if self._control is None:
                raise ValueError(f"this communicator was closed with {work.call.what} under way.")
            self._help_others()
            tries += 1
            if tries < YIELDS:
                os.sched_yield()
            else:
                self._nap(work)
                self._watch.check(work.call)
            self.progress(spins=SPINS)

    def _help_others(self) -> None:
        """Move on the other groups too: a peer may wait for this rank's part there before it comes here."""
        for other in list(_BUSY):
            if other is not self and other._lock.acquire(blocking=False):
                try:
                    other.progress(spins=1)
                finally:
                    other._lock.release()

    def _nap(self, work: ShmWork) -> None:
        bell = load(self._here + DOORBELL)
        store(self._here + SLEEPING, 1)
        self.progress(spins=1)  # whoever published before it could see this rank asleep did not ring
        if not work.over:
            futex.wait(self._here + DOORBELL, bell & 0xFFFFFFFF, NAP_S)
        store(self._here + SLEEPING, 0)

    # -- the meeting place: see Floor in shm_work.py ----------------------------------------------------------------

    def reserve(self, num_turns: int) -> int:
        first = self._reserved + 1
        self._reserved += num_turns
        return first

    def arrive(self, number: int) -> None:
        self._publish(ARRIVED, number)

    def declare_done(self, number: int) -> None:
        self._publish(DONE, number)

    def all_arrived(self, number: int, spins: int) -> bool:
        return bool(wait_all(self._parts[0] + ARRIVED, self._stride, self.world_size, number, spins))

    def all_done(self, number: int, spins: int) -> bool:
        return bool(wait_all(self._parts[0] + DONE, self._stride, self.world_size, number, spins))

    def slice_of(self, numel: int) -> tuple[int, int]:
        """The values that this rank sums for all."""
        share_of_each = -(-numel // self.world_size // ALIGN) * ALIGN
        first = min(numel, self.rank * share_of_each)
        return first, min(numel, first + share_of_each)

    def _publish(self, counter: int, number: int) -> None:
        if publish(self._here + counter, number, self._parts[0] + SLEEPING, self._stride, self.world_size):
            self.ring()

    def ring(self) -> None:
        """Wake the ranks that sleep."""
        for part in self._parts:
            if part != self._here and load(part + SLEEPING):
                store(part + DOORBELL, load(part + DOORBELL) + 1)
                futex.wake(part + DOORBELL)
