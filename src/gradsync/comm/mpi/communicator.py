"""MPI as a transport, over mpi4py: nonblocking calls, and a heartbeat that finds lost ranks.

[Note: sums are ours] MPI only recommends that an all-reduce gives every rank the same bits. What it does with NaN and
with 16-bit floats, and in which order it adds, is each library's own. So here MPI moves bytes and gradsync adds: each
rank gets its slice of all ranks' data, sums it in rank order, and sends the result to all. That moves no more than
MPI's own all-reduce would, and the same inputs give the same bits on every rank, in every run and with every library.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, Worker, check_op
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.failure.heartbeat import Heartbeat
from gradsync.comm.mpi.bootstrap import Bootstrap, make_comms
from gradsync.comm.mpi.library import Library, load
from gradsync.comm.mpi.work import SCRATCH_POOL, ChunkedWork, MpiCalls, Queue, combine
from gradsync.comm.rendezvous import own_addresses, started_by_mpi
from gradsync.comm.shm.segment import host_identity

CHUNK_BYTES = 256 << 20  # of a row in one call: MPI counts in 32 bits, and not every library is correct near the limit
DIRECT_BYTES = 512 * 1024  # of all ranks' data: up to this every rank sums all of it, in one call instead of two
ALIGN = 64  # values: no two ranks sum into one cache line

P2P, ARRIVED, ALL_ARRIVED = 1, 2, 3  # tags

SUMMABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class Mpi(Communicator):
    """A group of MPI ranks. :func:`connect_mpi` makes the first; ``split`` and ``clone`` the others."""

    transport = "mpi"

    def __init__(
        self, library: Library, comms: tuple[Any, Any], guard: CollectiveGuard, *, why: str, worker: Worker | None
    ) -> None:
        first, second = comms
        super().__init__(first.rank, first.size, timeout_s=guard.timeout_s, worker=worker)
        self.why = why
        self._library = library
        self._first, self._second = first, second  # see [Note: the order of calls]
        self._guard = guard
        self._queue = Queue(library, guard)
        self._splits = 0
        self._closed = False
        guard.heartbeat.before_leaving.append(weakref.WeakMethod(self._retract_pending))

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_contiguous(tensor)
        flat = self._flat(tensor, op)
        if flat.nbytes == 0 or self.world_size == 1:
            return Finished()
        call = self._enter(f"all_reduce({op})")
        if self.world_size * flat.nbytes <= DIRECT_BYTES:
            return self._queue.start(call, self._sum_all(flat, op), num_bytes=self.world_size * flat.nbytes)
        return ChunkedWork(
            [
                self._queue.start(call, self._sum_slices(chunk, op), num_calls=2, num_bytes=chunk.nbytes)
                for chunk in flat.split(CHUNK_BYTES // flat.itemsize)
            ]
        )

    def _sum_all(self, flat: Tensor, op: str) -> MpiCalls:
        """Gather all ranks' data on every rank, and take the same sum everywhere."""
        with self._scratch(flat.dtype, self.world_size, flat.numel()) as rows:
            yield [self._first.Iallgather(self._whole(flat), self._whole(rows, self.world_size))]
            combine(list(rows), op, out=flat)

    def _sum_slices(self, flat: Tensor, op: str) -> MpiCalls:
        """Each rank sums its slice of all ranks' data; then the slices are gathered."""
        width = -(-flat.numel() // self.world_size // ALIGN) * ALIGN
        slices = [flat[min(flat.numel(), rank * width) :][:width] for rank in range(self.world_size)]
        mine = slices[self.rank]
        counts = [part.nbytes for part in slices]
        starts = [part.data_ptr() - flat.data_ptr() if part.nbytes else 0 for part in slices]
        byte = self._library.mpi.BYTE
        with self._scratch(flat.dtype, self.world_size, mine.numel()) as rows:
            # This rank's own part is not sent.
            sent = [0 if rank == self.rank else count for rank, count in enumerate(counts)]
            got = [0 if rank == self.rank else mine.nbytes for rank in range(self.world_size)]
            places = [rank * mine.nbytes for rank in range(self.world_size)]
            into = [self._memory(rows), got, places, byte]
            yield [self._first.Ialltoallv([self._memory(flat), sent, starts, byte], into)]
            combine([mine if rank == self.rank else row for rank, row in enumerate(rows)], op, out=mine)
        yield [self._second.Iallgatherv(self._library.mpi.IN_PLACE, [self._memory(flat), counts, starts, byte])]

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        given, into = self._flat(tensor, op), self._flat(out, op)
        if into.nbytes == 0:
            return Finished()
        call = self._enter(f"reduce_scatter({op})")
        table = given.view(self.world_size, -1)
        item = into.itemsize

        def calls(begin: int, end: int) -> MpiCalls:
            with self._scratch(into.dtype, self.world_size, (end - begin) // item) as rows:
                with self._rows(table, begin, end) as sent:
                    request = self._first.Ialltoall(sent, self._whole(rows, self.world_size))
                yield [request]
                part = into[begin // item : end // item]
                if self.world_size == 1:
                    part.copy_(rows[0])
                else:
                    combine(list(rows), op, out=part)

        return self._in_chunks(call, into.nbytes, calls, staged=self.world_size)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        self._check_device(tensor, out)
        if tensor.nbytes == 0:
            return Finished()
        flat, table = _bytes_of(tensor), _bytes_of(out).view(self.world_size, -1)
        in_place = flat.data_ptr() == table[self.rank].data_ptr()  # MPI requires IN_PLACE for that

        def calls(begin: int, end: int) -> MpiCalls:
            given = self._library.mpi.IN_PLACE if in_place else self._whole(flat[begin:end])
            with self._rows(table, begin, end) as into:
                request = self._first.Iallgather(given, into)
            yield [request]

        return self._in_chunks(self._enter("all_gather"), flat.nbytes, calls)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        self._check_device(tensor, out)
        if tensor.nbytes == 0:
            return Finished()
        given, table = (_bytes_of(whole).view(self.world_size, -1) for whole in (tensor, out))

        def calls(begin: int, end: int) -> MpiCalls:
            with self._rows(given, begin, end) as sent, self._rows(table, begin, end) as into:
                request = self._first.Ialltoall(sent, into)
            yield [request]

        return self._in_chunks(self._enter("all_to_all"), given[0].nbytes, calls)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        self._check_device(tensor)
        if tensor.nbytes == 0:
            return Finished()
        flat = _bytes_of(tensor)

        def calls(begin: int, end: int) -> MpiCalls:
            yield [self._first.Ibcast(self._whole(flat[begin:end]), src)]

        return self._in_chunks(self._enter(f"broadcast(src={src})"), flat.nbytes, calls)

    def send(self, tensor: Tensor, dst: int) -> Work:
        if self.world_size == 1:
            raise ValueError(f"a world of one has no rank to send to; got {dst=}.")
        self._check_peer(dst, "dst")
        return self._start_p2p(tensor, f"send to {dst}", lambda part: self._first.Isend(part, dst, P2P))

    def recv(self, tensor: Tensor, src: int) -> Work:
        if self.world_size == 1:
            raise ValueError(f"a world of one has no rank to receive from; got {src=}.")
        self._check_peer(src, "src")
        return self._start_p2p(tensor, f"recv from {src}", lambda part: self._first.Irecv(part, src, P2P))

    def _start_p2p(self, tensor: Tensor, what: str, start: Any) -> Work:
        check_contiguous(tensor)
        self._check_device(tensor)
        if tensor.nbytes == 0:
            return Finished()
        flat = _bytes_of(tensor)

        def calls() -> MpiCalls:
            yield [start(self._whole(part)) for part in flat.split(CHUNK_BYTES)]

        return self._queue.start(self._enter(what, p2p=True), calls(), p2p=True)

    def barrier(self) -> None:
        def calls() -> MpiCalls:
            yield [self._first.Ibarrier()]

        self._queue.start(self._enter("barrier"), calls()).wait()

    def compare(self, largest: Tensor, what: str) -> Work:
        if self.world_size == 1:
            return Finished()
        return self._queue.start(self._enter(what), self._sum_all(largest, "max"))

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:
        if self._closed:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        self._check_device(tensor)
        if op is not None:
            self._flat(tensor, op)

    # -- groups ---------------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = self._check_ranks(ranks)
        if self._closed:
            raise ValueError("this communicator is closed: split is no longer possible.")
        self._splits += 1  # every rank of this group calls split(), members or not: so they agree on the number
        if self.rank not in chosen:
            return None
        members = [self._guard.members[rank] for rank in chosen]
        name = f"{self._guard.key}/{self._splits}/{'-'.join(map(str, members))}"
        guard = CollectiveGuard(self._guard.heartbeat, members, name, self.timeout_s)
        call = guard.begin("split")
        guard.raise_if_lost(call)
        # Making a communicator blocks in MPI, so all members must be there first.
        Queue(self._library, guard).start(call, self._arrive(chosen), p2p=True).wait()
        comms = make_comms(self._library, self._first, chosen, guard, call, tag=self._splits % (1 << 15))
        return Mpi(self._library, comms, guard, why=self.why, worker=self.worker)

    def _arrive(self, chosen: list[int]) -> MpiCalls:
        """A barrier of the members of a group that does not exist yet."""
        head, nothing = chosen[0], [b"", self._library.mpi.BYTE]
        if self.rank == head:
            yield [self._first.Irecv([bytearray(0), self._library.mpi.BYTE], rank, ARRIVED) for rank in chosen[1:]]
            yield [self._first.Isend(nothing, rank, ALL_ARRIVED) for rank in chosen[1:]]
        else:
            arrived = self._first.Isend(nothing, head, ARRIVED)
            yield [arrived, self._first.Irecv([bytearray(0), self._library.mpi.BYTE], head, ALL_ARRIVED)]

    @property
    def heartbeat(self) -> Heartbeat:
        return self._guard.heartbeat

    def note(self, place: str, *, step: int | None = None) -> None:
        self.heartbeat.progress.note = place
        self.heartbeat.progress.step = step

    def _why_members_are_fixed(self) -> str:
        return (
            "the mpi transport can't change its members: MPI ends all ranks when one of them dies. "
            "Start an elastic run with `gradsync run --elastic`, over another transport."
        )

    def close(self) -> None:
        """Leave the group. MPI can't free a group with work under way or a lost peer: that one is kept until exit."""
        if self.heartbeat.lost:
            self._closed = True
            return
        with self._library.lock:
            self._library.progress()
            if not self._closed and self._queue.is_empty and not self._library.mpi.Is_finalized():
                self._first.Free()
                self._second.Free()
            self._closed = True

    def finalize(self) -> None:
        """Allow MPI_Finalize when the process exits: no peer was lost. See [Note: ending MPI]."""
        self._library.clean_exit = True

    def _retract_pending(self) -> None:
        """Tell the peers, as this rank leaves, that the work it started will not advance any more."""
        call = self._queue.first_unfinished()
        if call is not None:
            self._guard.retract(call)

    # -- tensors as MPI sees them ---------------------------------------------------------------------------------

    def _enter(self, what: str, *, p2p: bool = False) -> Call:
        if self._closed:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        call = self._guard.begin(what, p2p=p2p)
        self._guard.raise_if_lost(call)
        return call

    def _flat(self, tensor: Tensor, op: str) -> Tensor:
        """A tensor that can be reduced, flat and as real numbers."""
        check_op(op)
        self._check_device(tensor)
        if tensor.dtype not in SUMMABLE:
            raise ValueError(f"the mpi transport does not reduce {tensor.dtype}. Reduce a float or an integer dtype.")
        if tensor.is_complex() and op != "sum":
            raise ValueError(f"complex numbers have no order; got {op=} of {tensor.dtype}.")
        tensor = tensor.detach()
        return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)

    def _check_device(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"the mpi transport moves CPU tensors; got one on {tensor.device}. Use connect('c10d')."
                )

    def _in_chunks(self, call: Call, row_bytes: int, calls: Any, *, staged: int = 1) -> Work:
        """Start ``calls(begin, end)`` for each chunk of a row."""
        works = []
        for begin in range(0, row_bytes, CHUNK_BYTES):
            end = min(row_bytes, begin + CHUNK_BYTES)
            works.append(self._queue.start(call, calls(begin, end), num_bytes=staged * (end - begin)))
        return works[0] if len(works) == 1 else ChunkedWork(works)

    def _memory(self, tensor: Tensor) -> Any:
        return self._library.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _whole(self, tensor: Tensor, parts: int = 1) -> list[Any]:
        """mpi4py's description of a whole tensor, in ``parts`` equal parts."""
        return [self._memory(tensor), tensor.nbytes // parts, self._library.mpi.BYTE]

    @contextlib.contextmanager
    def _rows(self, table: Tensor, begin: int, end: int) -> Iterator[list[Any]]:
        """mpi4py's description of bytes ``begin`` to ``end`` of every row, for the start of a call."""
        row_bytes = table[0].nbytes
        if end - begin == row_bytes:
            yield self._whole(table, self.world_size)
            return
        mpi = self._library.mpi
        block = mpi.BYTE.Create_contiguous(end - begin)
        spaced = block.Create_resized(0, row_bytes).Commit()
        try:
            yield [mpi.buffer.fromaddress(table.data_ptr() + begin, table.nbytes), 1, spaced]
        finally:
            spaced.Free()  # MPI frees it when the call that uses it is complete
            block.Free()

    @contextlib.contextmanager
    def _scratch(self, dtype: torch.dtype, num_rows: int, numel: int) -> Iterator[Tensor]:
        num_bytes = num_rows * numel * dtype.itemsize
        memory = SCRATCH_POOL.take(num_bytes)
        yield memory[:num_bytes].view(dtype).view(num_rows, numel)
        SCRATCH_POOL.give_back(memory)  # not after a failure: MPI may still write into it


def connect_mpi(*, timeout_s: float) -> Mpi:
    """Join the world that the MPI launcher started; blocks until every rank has called it."""
    declared = started_by_mpi()
    library = load(timeout_s=timeout_s)
    world = library.mpi.COMM_WORLD
    if world.size == 1 and declared != 1:
        raise ValueError(_explain_world_of_one(library, declared))
    library.clean_exit = False  # until `finalize` is called
    bootstrap = Bootstrap(library, timeout_s=timeout_s)
    identities = bootstrap.check_in(repr(host_identity()))
    addresses = ["127.0.0.1"] if len(set(identities)) == 1 else [socket.gethostname(), *own_addresses()]
    heartbeat = Heartbeat(world.rank, world.size, bootstrap, addresses=addresses, timeout_s=timeout_s)
    library.lost = heartbeat.lost
    guard = CollectiveGuard(heartbeat, range(world.size), "mpi", timeout_s)
    comms = make_comms(library, world, list(range(world.size)), guard, guard.begin("connect"), tag=0)
    why = f"{world.size} rank{'s' if world.size > 1 else ''}, as {library.describe()} says"
    return Mpi(library, comms, guard, why=why, worker=None)


def _explain_world_of_one(library: Library, declared: int | None) -> str:
    if declared is None:
        return "transport='mpi' needs a launcher; no mpirun or srun is seen. Use `mpirun -n 4 python train.py`."
    return (
        f"MPI sees a world of one, though {declared} ranks were started: mpi4py has loaded {library.describe()}, and "
        "they were started by something else. Use the mpirun of that very library (or srun with its --mpi option)."
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, as bytes."""
    flat = tensor.detach().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
