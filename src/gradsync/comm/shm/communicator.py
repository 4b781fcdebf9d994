"""Shared memory as a transport, for ranks on one host: an all-reduce costs what reading and writing memory costs.

How ranks synchronize, and how data goes through the slots, is in ``kernels/shm/collectives.py``. Buckets that the
engine allocated here are reduced in place: each rank sums its own slice of all ranks' buffers and writes the result to
all of them. They use no slot, so any number of them may have arrived before the first is complete. Other tensors are
copied through slots.

Nothing runs in the background. Work advances only inside calls: at its start, in ``done()`` and in ``wait()``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, ReduceOp, SourceSlice, Work, check_op
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows, different_calls, fingerprint
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.failure.heartbeat import Heartbeat
from gradsync.comm.shm.control_block import ControlBlock
from gradsync.comm.shm.segment import SharedBuffers, SharedTensor
from gradsync.comm.shm.small import SmallAllReduce
from gradsync.comm.shm.spin import spin_policy_for
from gradsync.comm.shm.work import InPlace, InPlaceFromSources, ShmP2PWork, ShmWork, Staged
from gradsync.errors import OutOfStep
from gradsync.kernels.base import without_dispatch
from gradsync.kernels.shm.collectives import (
    ALIGN,
    BROADCAST,
    CHANNEL_DATA_BYTES,
    CHUNK_COUNT,
    COUNT,
    DIRECT,
    EXCHANGE,
    FETCH,
    FINGERPRINT,
    FIRST_SEQUENCE,
    GATHER,
    IN,
    ITEM_BYTES,
    KIND,
    NUM_CHUNKS,
    OUT,
    ROOT,
    SCATTER,
    SLICES,
    SLOT_BYTES,
    TO_ALL,
    TO_OWNERS,
    reduce_eagerly,
    slice_start,
)
from gradsync.kernels.shm.sums import SOURCE_DTYPES, sum_address

MISMATCH_POLL_S = 0.002  # how often a rank polls for the other ranks' descriptions after their calls differed
PEER_CHECK_S = 0.05  # how long a rank sleeps before it checks whether a peer is lost


FINISHED = Finished()
_reduce_eagerly = without_dispatch(reduce_eagerly)
_BUSY: weakref.WeakSet[Shm] = weakref.WeakSet()  # this process's communicators that have work under way


class Shm(Communicator):
    """Ranks on one host that share memory. Made on top of a torch.distributed group, which sets the memory up.

    ``buffers_of``: another communicator of the same ranks, whose allocated buffers this one may reduce too.
    """

    transport = "shm"
    compares_calls = True

    def __init__(self, base: C10d, *, why: str, buffers_of: Shm | None = None) -> None:
        super().__init__(base.rank, base.world_size, timeout_s=base.timeout_s, worker=base.worker)
        self.why = why
        self._base = base
        key = f"{base.guard.key}/shm{'' if buffers_of is None else '/clone'}"
        self._guard = CollectiveGuard(base.heartbeat, base.guard.members, key, base.timeout_s)
        self._control: ControlBlock | None = ControlBlock(base)
        # With two ranks, or little data, every rank sums everything after one barrier. Otherwise each sums a slice.
        self._sums_in_slices = base.world_size > 2
        self._lock = threading.RLock()
        self._queue: deque[ShmWork] = deque()
        self._p2p: dict[tuple[int, int], deque[ShmWork]] = {}
        self._p2p_chunks: dict[tuple[int, int], int] = {}  # by (sender, receiver): chunks sent so far
        self._buffers: SharedBuffers = SharedBuffers() if buffers_of is None else buffers_of._buffers
        self._sums: dict[tuple[torch.dtype, str], tuple[int, int]] = {}
        self._small: SmallAllReduce | None = None
        self._position = self._guard.position
        self.spin_policy = spin_policy_for(base.world_size)
        self._small_spins = self.spin_policy.small_spins
        self._broken: OutOfStep | None = None  # the ranks made different calls: nothing can follow
        self._lost = base.heartbeat.lost  # fills when a peer is declared lost, or this rank is by the others
        base.heartbeat.before_leaving.append(weakref.WeakMethod(self._retract_pending))
        base.groups.register(self)

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        # The fast path: if the peers have arrived too, one compiled call completes it. A loop usually reduces the same
        # tensor as before, and asking torch five questions about it would cost as much as the sum.
        small, address = self._small, tensor.data_ptr()
        if (
            small is None
            or small.tensor() is not tensor
            or small.address != address
            or small.numel != tensor.numel()
            or small.op != op
        ):
            small = self._small = self._prepare_small(tensor, op)
        control = self._control
        if small is None or self._queue or self._lost or control is None:
            return self._reduce_large(tensor, op)
        with self._lock:
            done = _reduce_eagerly(control.address, small.words_address, address, self._small_spins)
            if done == small.num_chunks:
                position = self._position
                position[0] += 1
                position[1] = "all_reduce"
                return FINISHED
            first = control.last_sequence - small.num_chunks + 1
            words = small.remaining_words(first, max(done, 0))  # if the ranks' calls differ, it finds that out again
            what = f"all_reduce({op})"
            return self._enqueue(Staged(self, control, self._guard.begin(what), (tensor,), small.sum_rows, words))

    def _prepare_small(self, tensor: Tensor, op: ReduceOp) -> SmallAllReduce | None:
        """What an all-reduce in one call must know of a tensor; None if it can't be done in one call."""
        sum_rows, item = self._find_sum(tensor.dtype, op)
        is_large = tensor.nbytes > SLOT_BYTES and self._sums_in_slices
        if is_large or not tensor.nbytes or self._buffers.is_start_of_buffer(tensor):
            return None
        self._check_open("all_reduce", tensor)
        return SmallAllReduce.prepare(tensor, op, sum_rows, item)

    def _reduce_large(self, tensor: Tensor, op: ReduceOp) -> Work:
        sum_rows, item = self._find_sum(tensor.dtype, op)
        what = f"all_reduce({op})"
        if self._buffers.is_start_of_buffer(tensor):
            return self._start_in_place(what, tensor, sum_rows, TO_ALL, op=op)
        kind = SLICES if self._sums_in_slices and tensor.nbytes > SLOT_BYTES else DIRECT
        return self._start_staged(what, kind, tensor, tensor, tensor.nbytes // item, item, sum_rows=sum_rows, op=op)

    def all_reduce_from(self, buffer: Tensor, sources: Sequence[SourceSlice]) -> Work:
        ordered = sorted((source for source in sources if source.values.numel()), key=lambda source: source.first)
        return (
            self._start_from_sources("all_reduce(sum)", buffer, ordered, TO_ALL) if ordered else self.all_reduce(buffer)
        )

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        ordered = sorted((source for source in sources if source.values.numel()), key=lambda source: source.first)
        if not self._buffers.is_start_of_buffer(buffer):
            return super().reduce_slices(buffer, sources)
        return self._start_from_sources("reduce_slice(sum)", buffer, ordered, TO_OWNERS)

    def gather_slices(self, buffer: Tensor) -> Work:
        return self.share_slice(buffer) if self._buffers.is_start_of_buffer(buffer) else super().gather_slices(buffer)

    def _start_from_sources(self, what: str, buffer: Tensor, ordered: Sequence[SourceSlice], mode: int) -> Work:
        if not ordered:
            return self.reduce_slice(buffer)
        own = self.owned_range(buffer)
        _check_sources(ordered, own)
        sum_rows = self._find_sum(buffer.dtype, "sum")[0]
        shared = self._buffers.shared_tensor(buffer, what)
        return self._enqueue_in_place(
            shared,
            what,
            lambda control, call: InPlaceFromSources(self, control, call, shared, sum_rows, own, ordered, mode),
        )

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        return self._start_staged("all_gather", GATHER, tensor, out, tensor.numel(), tensor.itemsize)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        return self._start_staged(
            f"broadcast(src={src})", BROADCAST, tensor, tensor, tensor.numel(), tensor.itemsize, root=src
        )

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        sum_rows, item = self._find_sum(tensor.dtype, op)
        return self._start_staged(
            f"reduce_scatter({op})", SCATTER, tensor, out, out.nbytes // item, item, sum_rows=sum_rows, op=op
        )

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        return self._start_staged("all_to_all", EXCHANGE, tensor, out, out[0].numel(), out.itemsize)

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._start_p2p(self.rank, dst, tensor)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._start_p2p(src, self.rank, tensor)

    def _start_p2p(self, src: int, dst: int, tensor: Tensor) -> Work:
        sends = self.rank == src
        what = f"send to {dst}" if sends else f"recv from {src}"
        control = self._check_open(what, tensor)
        call = self._guard.begin(what, p2p=True)
        self._guard.raise_if_lost(call)
        with self._lock:
            first = self._p2p_chunks.get((src, dst), 0) + 1
            self._p2p_chunks[src, dst] = first - 1 + -(-tensor.nbytes // CHANNEL_DATA_BYTES)
            work = ShmP2PWork(self, control, call, tensor, control.channel(src, dst), first, sends=sends)
            self._p2p.setdefault((src, dst), deque()).append(work)
            _BUSY.add(self)
            self.progress(spins=1)
        return work

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        self._start_staged("barrier", GATHER, token, token.new_empty(self.world_size), 1, 1, op="barrier").wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        base = self._base.split(ranks)
        assert base is None or isinstance(base, C10d), "a split is of the same kind"
        return None if base is None else Shm(base, why=self.why)

    def control_group(self) -> Communicator:
        return self._base.clone()

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:
        self._check_open(what, tensor)
        if op is not None:
            self._find_sum(tensor.dtype, op)

    def clone_sharing_buffers(self) -> Shm:
        """Another communicator of the same ranks, with the same allocated buffers. Blocks: all ranks call it."""
        return Shm(self._base, why=self.why, buffers_of=self)

    # -- buffers in shared memory ---------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A bucket in shared memory. Its rank zeroes it, so that its pages are near. Blocks: all ranks call it."""
        if device.type != "cpu" or numel == 0:
            return super().allocate(numel, dtype, device)
        buffer, segment = self._buffers.reserve(self._base, numel, dtype)
        buffer.zero_()
        self._base.barrier()
        segment.use_huge_pages()
        return buffer

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in shared memory. Its pages are allocated at the first write. Blocks: all ranks call it."""
        return self._buffers.reserve(self._base, numel, dtype)[0]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of what ``allocate`` or ``reserve`` returned."""
        return self._buffers.holds(tensor)

    def slice_of(self, numel: int) -> tuple[int, int]:
        """The range (from, to) of a buffer that this rank owns, where all ranks own a slice."""
        return slice_start(numel, self.world_size, self.rank), slice_start(numel, self.world_size, self.rank + 1)

    def reduce_slice(self, buffer: Tensor, *, op: ReduceOp = "sum", owners: range | None = None) -> Work:
        """Sum all ranks' buffers; each owner gets its slice of the sum. The rest of its buffer is left unchanged.

        ``owners``: the ranks that own a slice; by default all.
        """
        return self._start_in_place(
            f"reduce_slice({op})", buffer, self._find_sum(buffer.dtype, op)[0], TO_OWNERS, owners, op=op
        )

    def share_slice(self, buffer: Tensor, *, owners: range | None = None, out: Tensor | None = None) -> Work:
        """All-gather the owners' slices into ``out``, by default into ``buffer`` itself."""
        return self._start_in_place("share_slice", buffer, 0, FETCH, owners, out)

    def owned_range(self, buffer: Tensor) -> tuple[int, int]:
        is_bucket = self._buffers.is_start_of_buffer(buffer)
        reads_sources = is_bucket and buffer.dtype in SOURCE_DTYPES and self.world_size > 1
        return self.slice_of(buffer.numel()) if reads_sources else (0, 0)

    def _start_in_place(
        self,
        what: str,
        tensor: Tensor,
        sum_rows: int,
        mode: int,
        owners: range | None = None,
        out: Tensor | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        shared = self._buffers.shared_tensor(tensor, what)
        slices = (mode, owners or range(self.world_size), tensor if out is None else out, op)
        return self._enqueue_in_place(
            shared, what, lambda control, call: InPlace(self, control, call, shared, sum_rows, *slices)
        )

    def _enqueue_in_place(self, shared: SharedTensor, what: str, make: Callable[[ControlBlock, Call], ShmWork]) -> Work:
        control = self._check_open(what, shared.tensor)
        with self._lock:
            call = self._guard.begin(what)
            self._guard.raise_if_lost(call)
            return self._enqueue(make(control, call))

    # -- progress -------------------------------------------------------------------------------------------------

    def _find_sum(self, dtype: torch.dtype, op: str) -> tuple[int, int]:
        """The address of the compiled sum for a dtype, and the bytes of one of its values: a complex number has two."""
        check_op(op)
        key = (dtype, op)
        if key not in self._sums:
            self._sums[key] = (sum_address(dtype.to_real(), op), dtype.to_real().itemsize)
        return self._sums[key]

    def _check_open(self, what: str, tensor: Tensor) -> ControlBlock:
        if self._control is None:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        if self._broken is not None:
            raise self._broken
        if not tensor.is_cpu:
            raise ValueError(f"the shm transport moves CPU tensors; got one on {tensor.device}. Use connect('c10d').")
        check_contiguous(tensor)
        return self._control

    def _start_staged(
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
        op: str = "",
    ) -> Work:
        """Start a collective through the slots. ``count``: the values of the tensor, or of one row if it has rows."""
        control = self._check_open(what, tensor)
        room = SLOT_BYTES // item
        if kind in (SCATTER, EXCHANGE):  # a slot holds a part for each rank
            room = room // self.world_size // ALIGN * ALIGN
        with self._lock:
            call = self._guard.begin(what)
            self._guard.raise_if_lost(call)
            chunks = max(1, -(-count // room))  # one even for no data: the other ranks may have some, which is an error
            words = {KIND: kind, FIRST_SEQUENCE: control.reserve(chunks), NUM_CHUNKS: chunks}
            words |= {COUNT: count, ITEM_BYTES: item, CHUNK_COUNT: room}
            words |= {IN: tensor.data_ptr(), OUT: out.data_ptr(), ROOT: root}
            words[FINGERPRINT] = fingerprint(kind, op, tensor.dtype, count, root)
            return self._enqueue(Staged(self, control, call, (tensor, out), sum_rows, words))

    def _enqueue(self, work: ShmWork) -> Work:
        if not self._queue and work.advance(self.spin_policy.eager_spins):
            if work.is_mismatched:
                self._end_queue(work)
            return work
        self._queue.append(work)
        _BUSY.add(self)
        self.progress(spins=1)
        return work

    def progress(self, *, spins: int) -> None:
        """Advance all work under way; polls each awaited counter at most ``spins`` times."""
        with self._lock:
            queue = self._queue
            while queue and queue[0].advance(spins):
                if queue[0].is_mismatched:
                    self._end_queue(queue[0])
                    break
                queue.popleft()
            # The first work is waiting. In-place works behind it need no slot: they may arrive and be summed already.
            for work in queue:
                if not isinstance(work, InPlace) or not work.reduce_if_all_arrived():
                    break
            for pending in self._p2p.values():
                while pending and pending[0].advance(spins if not queue else 1):
                    pending.popleft()
            if not queue and not any(self._p2p.values()):
                _BUSY.discard(self)

    def _end_queue(self, work: ShmWork) -> None:
        """After the ranks' calls differed: publish what this rank asked for, and end all work under way."""
        if self._control is not None:
            self._control.publish_call(work.first_sequence, work.describe())
        for other in self._queue:
            other.end_as_mismatched(work)
        self._queue.clear()

    def raise_mismatch(self, work: ShmWork) -> NoReturn:
        """Raise the error that all ranks raise when their calls differ; waits until each has published its call."""
        work.call.started_s = time.monotonic()
        while self._broken is None:
            control = self._control
            if control is None:
                raise ValueError(f"this communicator was closed with {work.call.what} under way.")
            calls = control.read_calls(work.first_sequence)
            if calls is not None:
                self._broken = different_calls(calls)
                break
            self._progress_others()
            self._guard.check(work.call)
            time.sleep(MISMATCH_POLL_S)
        raise self._broken

    def finish(self, work: ShmWork) -> None:
        """Block until a work is complete: spin, then yield the core, then sleep until a peer wakes this rank."""
        tries, spin_policy = 0, self.spin_policy
        work.call.started_s = time.monotonic()
        self.progress(spins=spin_policy.spins)
        while not work.completed:
            if self._control is None:
                raise ValueError(f"this communicator was closed with {work.call.what} under way.")
            self._progress_others()
            tries += 1
            if tries < spin_policy.yields:
                os.sched_yield()
            else:
                self.sleep_until_woken(PEER_CHECK_S, work.done)
                self.progress(spins=1)  # a peer may have done its part just before it was lost
                if not work.completed:
                    self._guard.check(work.call)
            self.progress(spins=spin_policy.spins)

    def _progress_others(self) -> None:
        """Advance the other groups too: a peer may wait for this rank's part there before it comes here."""
        for other in list(_BUSY):
            if other is not self and other._lock.acquire(blocking=False):
                try:
                    other.progress(spins=1)
                finally:
                    other._lock.release()

    def sleep_until_woken(self, limit_s: float, is_done: Callable[[], bool]) -> None:
        """Sleep until a peer wakes this rank, at most ``limit_s``; not if ``is_done()``, which must make progress."""
        control = self._control
        if control is None:
            return
        expected = control.prepare_sleep()
        if not is_done():  # a rank that published before it could see this one asleep sent no wake-up
            control.sleep(expected, limit_s)
        control.end_sleep()

    # -- lifetime -------------------------------------------------------------------------------------------------

    @property
    def heartbeat(self) -> Heartbeat:
        return self._base.heartbeat

    def note(self, place: str, *, step: int | None = None) -> None:
        self._base.note(place, step=step)

    def close(self) -> None:
        """Leave the group and abandon work under way. The memory is freed when the last rank has left."""
        with self._lock:
            self._control = None
            self._queue.clear()
            self._p2p.clear()
            _BUSY.discard(self)
        self._base.close()

    def _retract_pending(self) -> None:
        """Tell the peers, as this rank leaves, that the work it started will not advance any more."""
        if self._queue:
            self._guard.retract(self._queue[0].call)


def _check_sources(ordered: Sequence[SourceSlice], own: tuple[int, int]) -> None:
    """Refuse sources that other ranks would have to read, or that overlap."""
    done = own[0]
    for source in ordered:
        if source.first < done or source.first + source.values.numel() > own[1]:
            raise ValueError(
                f"sources must lie in owned_range() {own}, each value once; got values from {source.first} on."
            )
        done = source.first + source.values.numel()
