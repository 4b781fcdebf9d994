"""Shared memory as a transport, for ranks on one host: an all-reduce costs what reading and writing memory costs.

How ranks meet, and how data goes through the slots, is in shm_kernels.py. Buckets that the engine allocated here are
reduced where they lie: each rank sums its own slice of everybody's buffer and writes it back to all of them. They use
no slot, so any number of them may have arrived before the first is over.

Nothing runs in the background. Work moves on when somebody asks: at its start, in ``done()``, in ``wait()``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, Loan, ReduceOp, Work, check_op
from gradsync.comm.c10d import C10d
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.lifeline import Lifeline
from gradsync.comm.shm_buffers import Buffers, Rows
from gradsync.comm.shm_floor import Floor
from gradsync.comm.shm_kernels import (
    ALIGN,
    APART,
    BROADCAST,
    COUNT,
    DIRECT,
    EVERYWHERE,
    EXCHANGE,
    FIRST,
    GATHER,
    IN,
    ITEM,
    KIND,
    MAIL_BYTES,
    NUM_TURNS,
    OUT,
    ROOT,
    SCATTER,
    SHARE,
    SLICES,
    SLOT_BYTES,
    WIDTH,
    reduce_eagerly,
    slice_start,
)
from gradsync.comm.shm_small import Small
from gradsync.comm.shm_sums import LENT, sum_address
from gradsync.comm.shm_work import InPlace, Lent, Mail, ShmWork, Staged
from gradsync.comm.spinning import spinning_of
from gradsync.comm.watch import Call, Watch
from gradsync.compiled import quick

NAP_S = 0.05  # how long a rank sleeps before it looks whether a peer is lost


FINISHED = Finished()
_reduce_eagerly = quick(reduce_eagerly)
_BUSY: weakref.WeakSet[Shm] = weakref.WeakSet()  # this process's communicators that have work under way


class Shm(Communicator):
    """Ranks on one host that share memory. Made on top of a torch.distributed group, through which they meet."""

    transport = "shm"

    def __init__(self, base: C10d, *, why: str, beside: Shm | None = None) -> None:
        super().__init__(base.rank, base.world_size, timeout_s=base.timeout_s, feed=base.feed)
        self.why = why
        self._base = base
        key = f"{base.watch.key}/shm{'' if beside is None else '/beside'}"
        self._watch = Watch(base.lifeline, base.watch.members, key, base.timeout_s)
        self._floor: Floor | None = Floor(base)
        # Two ranks, or little data: everybody sums everything, and meets once. Else each sums its slice for all.
        self._in_slices = base.world_size > 2
        self._lock = threading.RLock()
        self._queue: deque[ShmWork] = deque()
        self._mail: dict[tuple[int, int], deque[ShmWork]] = {}
        self._pieces: dict[tuple[int, int], int] = {}  # by (sender, receiver): pieces of mail so far
        self._buffers: Buffers = Buffers() if beside is None else beside._buffers
        self._sums: dict[tuple[torch.dtype, str], tuple[int, int]] = {}
        self._small: Small | None = None
        self._place = self._watch.place
        self.spinning = spinning_of(base.world_size)
        self._small_spins = self.spinning.small_spins
        self._lost = base.lifeline.lost  # fills when a peer is given up, or this rank is by the others
        base.lifeline.before_leaving.append(weakref.WeakMethod(self._give_up))

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        # As short a way as there is: where the peers are here too, it is over after one call. What a loop reduces is
        # most often the tensor of last time, and asking torch five questions about it would cost as much as the sum.
        small, address = self._small, tensor.data_ptr()
        if (
            small is None
            or small.tensor() is not tensor
            or small.address != address
            or small.numel != tensor.numel()
            or small.op != op
        ):
            small = self._small = self._look_at(tensor, op)
        floor = self._floor
        if small is None or self._queue or self._lost or floor is None:
            return self._reduce_large(tensor, op)
        with self._lock:
            taken = _reduce_eagerly(floor.address, small.where, address, self._small_spins)
            if taken == small.turns:
                place = self._place
                place[0] += 1
                place[1] = "all_reduce"
                return FINISHED
            words = small.rest(floor.turns - small.turns + 1, taken)
            return self._begin(Staged(self, floor, self._watch.enter("all_reduce"), (tensor,), small.sum_rows, words))

    def _look_at(self, tensor: Tensor, op: ReduceOp) -> Small | None:
        """What an all-reduce in one call must know of a tensor; None where it goes another way."""
        sum_rows, item = self._find_sum(tensor.dtype, op)
        is_large = tensor.nbytes > SLOT_BYTES and self._in_slices
        if is_large or not tensor.nbytes or self._buffers.begins(tensor):
            return None
        self._open_floor("all_reduce", tensor)
        return Small.of(tensor, op, sum_rows, item)

    def _reduce_large(self, tensor: Tensor, op: ReduceOp) -> Work:
        sum_rows, item = self._find_sum(tensor.dtype, op)
        what = f"all_reduce({op})"
        if self._buffers.begins(tensor):
            return self._in_place(what, tensor, sum_rows, EVERYWHERE)
        kind = SLICES if self._in_slices and tensor.nbytes > SLOT_BYTES else DIRECT
        return self._stage(what, kind, tensor, tensor, tensor.nbytes // item, item, sum_rows=sum_rows)

    def all_reduce_lent(self, buffer: Tensor, loans: Sequence[Loan]) -> Work:
        ordered = sorted((loan for loan in loans if loan.values.numel()), key=lambda loan: loan.first)
        if not ordered:
            return self.all_reduce(buffer)
        own = self.own_part(buffer)
        _check_loans(ordered, own)
        what, sum_rows = "all_reduce(sum)", self._find_sum(buffer.dtype, "sum")[0]
        rows = self._buffers.rows_of(buffer, what)
        return self._begin_on(rows, what, lambda floor, call: Lent(self, floor, call, rows, sum_rows, own, ordered))

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        return self._stage("all_gather", GATHER, tensor, out, tensor.numel(), tensor.itemsize)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        return self._stage(
            f"broadcast(src={src})", BROADCAST, tensor, tensor, tensor.numel(), tensor.itemsize, root=src
        )

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        sum_rows, item = self._find_sum(tensor.dtype, op)
        return self._stage(f"reduce_scatter({op})", SCATTER, tensor, out, out.nbytes // item, item, sum_rows=sum_rows)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        return self._stage("all_to_all", EXCHANGE, tensor, out, out[0].numel(), out.itemsize)

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._post(self.rank, dst, tensor)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._post(src, self.rank, tensor)

    def _post(self, src: int, dst: int, tensor: Tensor) -> Work:
        sends = self.rank == src
        what = f"send to {dst}" if sends else f"recv from {src}"
        floor = self._open_floor(what, tensor)
        call = self._watch.enter(what, pair=True)
        self._watch.raise_if_lost(call)
        with self._lock:
            first = self._pieces.get((src, dst), 0) + 1
            self._pieces[src, dst] = first - 1 + -(-tensor.nbytes // MAIL_BYTES)
            work = Mail(self, floor, call, tensor, floor.mailbox(src, dst), first, sends=sends)
            self._mail.setdefault((src, dst), deque()).append(work)
            _BUSY.add(self)
            self.progress(spins=1)
        return work

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        self._stage("barrier", GATHER, token, token.new_empty(self.world_size), 1, 1).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        base = self._base.split(ranks)
        assert base is None or isinstance(base, C10d), "a split is of the same kind"
        return None if base is None else Shm(base, why=self.why)

    def beside(self) -> Shm:
        """Another order of collectives for the same ranks, on the same buffers. Blocks: all ranks call it."""
        return Shm(self._base, why=self.why, beside=self)

    # -- buffers in shared memory ---------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A bucket in shared memory, zeroed by its own rank so that its pages are near. Blocks: all ranks call it."""
        if device.type != "cpu" or numel == 0:
            return super().allocate(numel, dtype, device)
        buffer, segment = self._buffers.reserve(self._base, numel, dtype)
        buffer.zero_()
        self._base.barrier()
        segment.use_large_pages()
        return buffer

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in shared memory, which takes none before it is written to. Blocks: all ranks call it."""
        return self._buffers.reserve(self._base, numel, dtype)[0]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of what ``allocate`` gave."""
        return self._buffers.holds(tensor)

    def slice_of(self, numel: int, lanes: int | None = None) -> tuple[int, int]:
        """The values of a buffer that this rank holds for all: from, to. A rank from ``lanes`` on holds none."""
        lanes = self.world_size if lanes is None else lanes
        return slice_start(numel, lanes, self.rank), slice_start(numel, lanes, self.rank + 1)

    def reduce_slice(self, buffer: Tensor, *, op: ReduceOp = "sum", lanes: int | None = None) -> Work:
        """Sum everybody's ``buffer``: this rank's slice into its own. The rest of it stays as it was."""
        return self._in_place(f"reduce_slice({op})", buffer, self._find_sum(buffer.dtype, op)[0], APART, lanes)

    def share_slice(self, buffer: Tensor, *, lanes: int | None = None, out: Tensor | None = None) -> Work:
        """Give everybody this rank's slice of its ``buffer``, and take theirs, to ``out`` if that is given."""
        return self._in_place("share_slice", buffer, 0, SHARE, lanes, out)

    def own_part(self, buffer: Tensor) -> tuple[int, int]:
        lends = self._buffers.begins(buffer) and buffer.dtype in LENT and self.world_size > 1
        return self.slice_of(buffer.numel()) if lends else (0, 0)

    def _in_place(
        self, what: str, tensor: Tensor, sum_rows: int, mode: int, lanes: int | None = None, out: Tensor | None = None
    ) -> Work:
        rows = self._buffers.rows_of(tensor, what)
        slices = (mode, lanes or self.world_size, tensor if out is None else out)
        return self._begin_on(rows, what, lambda floor, call: InPlace(self, floor, call, rows, sum_rows, *slices))

    def _begin_on(self, rows: Rows, what: str, make: Callable[[Floor, Call], ShmWork]) -> Work:
        floor = self._open_floor(what, rows.tensor)
        with self._lock:
            call = self._watch.enter(what)
            self._watch.raise_if_lost(call)
            return self._begin(make(floor, call))

    # -- moving on ------------------------------------------------------------------------------------------------

    def _find_sum(self, dtype: torch.dtype, op: str) -> tuple[int, int]:
        """The compiled sum for a dtype, and the bytes of what it sums: complex numbers are two each."""
        check_op(op)
        key = (dtype, op)
        if key not in self._sums:
            self._sums[key] = (sum_address(dtype.to_real(), op), dtype.to_real().itemsize)
        return self._sums[key]

    def _open_floor(self, what: str, tensor: Tensor) -> Floor:
        if self._floor is None:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        if not tensor.is_cpu:
            raise ValueError(f"the shm transport moves CPU tensors; got one on {tensor.device}. Use connect('c10d').")
        check_contiguous(tensor)
        return self._floor

    def _stage(
        self,
        what: str,
        kind: int,
        tensor: Tensor,
        out: Tensor,
        count: int,
        item: int,
        *,
        sum_rows: int = 0,
        root: int = 0,
    ) -> Work:
        """Begin what goes through the slots. ``count``: values of the tensor, or of a row of it where it has rows."""
        floor = self._open_floor(what, tensor)
        if count == 0:
            return FINISHED
        room = SLOT_BYTES // item
        if kind in (SCATTER, EXCHANGE):  # a slot holds a piece for each rank
            room = room // self.world_size // ALIGN * ALIGN
        with self._lock:
            call = self._watch.enter(what)
            self._watch.raise_if_lost(call)
            turns = -(-count // room)
            words = {KIND: kind, FIRST: floor.reserve(turns), NUM_TURNS: turns, COUNT: count, ITEM: item, WIDTH: room}
            words |= {IN: tensor.data_ptr(), OUT: out.data_ptr(), ROOT: root}
            return self._begin(Staged(self, floor, call, (tensor, out), sum_rows, words))

    def _begin(self, work: ShmWork) -> Work:
        if not self._queue and work.advance(self.spinning.eager_spins):
            return work
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
            for work in queue:
                if not isinstance(work, InPlace) or not work.do_own_part():
                    break
            for letters in self._mail.values():
                while letters and letters[0].advance(spins if not queue else 1):
                    letters.popleft()
            if not queue and not any(self._mail.values()):
                _BUSY.discard(self)

    def finish(self, work: ShmWork) -> None:
        """Block until a work is over: spin, then offer the core to others, then sleep until a peer rings."""
        tries, spinning = 0, self.spinning
        work.call.started_s = time.monotonic()
        self.progress(spins=spinning.spins)
        while not work.over:
            if self._floor is None:
                raise ValueError(f"this communicator was closed with {work.call.what} under way.")
            self._help_others()
            tries += 1
            if tries < spinning.yields:
                os.sched_yield()
            else:
                self.nap(NAP_S, work.done)
                self._watch.check(work.call)
            self.progress(spins=spinning.spins)

    def _help_others(self) -> None:
        """Move on the other groups too: a peer may wait for this rank's part there before it comes here."""
        for other in list(_BUSY):
            if other is not self and other._lock.acquire(blocking=False):
                try:
                    other.progress(spins=1)
                finally:
                    other._lock.release()

    def nap(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        """Sleep until a peer rings, unless what this rank waits for is over. ``is_over`` must move it on."""
        floor = self._floor
        if floor is None:
            return
        bell = floor.fall_asleep()
        if not is_over():  # whoever published before it could see this rank asleep did not ring
            floor.sleep(bell, limit_s)
        floor.wake_up()

    # -- small things ---------------------------------------------------------------------------------------------

    @property
    def lifeline(self) -> Lifeline:
        return self._base.lifeline

    def note(self, place: str, *, step: int | None = None) -> None:
        self._base.note(place, step=step)

    def close(self) -> None:
        """Leave. The memory is given back when the last rank has. Work under way is given up."""
        with self._lock:
            self._floor = None
            self._queue.clear()
            self._mail.clear()
            _BUSY.discard(self)
        self._base.close()

    def _give_up(self) -> None:
        """As this rank leaves: work that it began moves on no more."""
        if self._queue:
            self._watch.retract(self._queue[0].call)


def _check_loans(ordered: Sequence[Loan], own: tuple[int, int]) -> None:
    """Refuse loans that other ranks would have to read, or that overlap."""
    done = own[0]
    for loan in ordered:
        if loan.first < done or loan.first + loan.values.numel() > own[1]:
            raise ValueError(f"a rank lends values of its own_part() {own}, each once; got some from {loan.first} on.")
        done = loan.first + loan.values.numel()
