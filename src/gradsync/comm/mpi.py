"""MPI as a transport, over mpi4py: nonblocking calls, watched over by a lifeline that names the dead.

[Note: sums are ours] MPI only recommends that an all-reduce gives every rank the same bits. What it does with NaN and
with 16-bit floats, and in which order it adds, is each library's own. So here MPI moves bytes and gradsync adds: each
rank gets its slice of everybody's data, sums it in rank order, and gives the result to all. That moves no more than
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

from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, check_op
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.feed import Feed
from gradsync.comm.lifeline import Lifeline
from gradsync.comm.mpi_library import Library, load
from gradsync.comm.mpi_meeting import Meeting, make_comms
from gradsync.comm.mpi_work import SCRATCH, Queue, Several, Steps, combine
from gradsync.comm.rendezvous import own_addresses, started_by_mpi
from gradsync.comm.segment import host_identity
from gradsync.comm.watch import Call, Watch

PIECE_BYTES = 256 << 20  # of a row in one call: MPI counts in 32 bits, and not every library is right close to the end
DIRECT_BYTES = 512 * 1024  # of everybody's data: up to this every rank sums all of it, in one call instead of two
ALIGN = 64  # values: no two ranks sum into one cache line

MAIL, ARRIVED, ALL_ARRIVED = 1, 2, 3  # tags

SUMMABLE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class Mpi(Communicator):
    """A group of MPI ranks. :func:`connect_mpi` makes the first; ``split`` and ``clone`` the others."""

    transport = "mpi"

    def __init__(self, library: Library, comms: tuple[Any, Any], watch: Watch, *, why: str, feed: Feed | None) -> None:
        first, second = comms
        super().__init__(first.rank, first.size, timeout_s=watch.timeout_s, feed=feed)
        self.why = why
        self._library = library
        self._first, self._second = first, second  # see [Note: the order of calls]
        self._watch = watch
        self._queue = Queue(library, watch)
        self._splits = 0
        self._closed = False
        watch.lifeline.before_leaving.append(weakref.WeakMethod(self._give_up))

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_contiguous(tensor)
        flat = self._flat(tensor, op)
        if flat.nbytes == 0 or self.world_size == 1:
            return Finished()
        call = self._enter(f"all_reduce({op})")
        if self.world_size * flat.nbytes <= DIRECT_BYTES:
            return self._queue.start(call, self._sum_all(flat, op), num_bytes=self.world_size * flat.nbytes)
        return Several(
            [
                self._queue.start(call, self._sum_slices(piece, op), calls=2, num_bytes=piece.nbytes)
                for piece in flat.split(PIECE_BYTES // flat.itemsize)
            ]
        )

    def _sum_all(self, flat: Tensor, op: str) -> Steps:
        """Everybody's data to everybody, and the same sum everywhere."""
        with self._scratch(flat.dtype, self.world_size, flat.numel()) as rows:
            yield [self._first.Iallgather(self._whole(flat), self._whole(rows, self.world_size))]
            combine(list(rows), op, out=flat)

    def _sum_slices(self, flat: Tensor, op: str) -> Steps:
        """Each rank sums its slice of everybody's data, and gives it to all."""
        width = -(-flat.numel() // self.world_size // ALIGN) * ALIGN
        slices = [flat[min(flat.numel(), rank * width) :][:width] for rank in range(self.world_size)]
        mine = slices[self.rank]
        counts = [part.nbytes for part in slices]
        starts = [part.data_ptr() - flat.data_ptr() if part.nbytes else 0 for part in slices]
        byte = self._library.mpi.BYTE
        with self._scratch(flat.dtype, self.world_size, mine.numel()) as rows:
            # This rank's own part stays where it is.
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

        def steps(begin: int, end: int) -> Steps:
            with self._scratch(into.dtype, self.world_size, (end - begin) // item) as rows:
                with self._rows(table, begin, end) as sent:
                    request = self._first.Ialltoall(sent, self._whole(rows, self.world_size))
                yield [request]
                part = into[begin // item : end // item]
                if self.world_size == 1:
                    part.copy_(rows[0])
                else:
                    combine(list(rows), op, out=part)

        return self._in_pieces(call, into.nbytes, steps, staged=self.world_size)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        self._check_device(tensor, out)
        if tensor.nbytes == 0:
            return Finished()
        flat, table = _bytes_of(tensor), _bytes_of(out).view(self.world_size, -1)
        in_place = flat.data_ptr() == table[self.rank].data_ptr()  # MPI allows it if it is told so

        def steps(begin: int, end: int) -> Steps:
            given = self._library.mpi.IN_PLACE if in_place else self._whole(flat[begin:end])
            with self._rows(table, begin, end) as into:
                request = self._first.Iallgather(given, into)
            yield [request]

        return self._in_pieces(self._enter("all_gather"), flat.nbytes, steps)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        self._check_device(tensor, out)
        if tensor.nbytes == 0:
            return Finished()
        given, table = (_bytes_of(whole).view(self.world_size, -1) for whole in (tensor, out))

        def steps(begin: int, end: int) -> Steps:
            with self._rows(given, begin, end) as sent, self._rows(table, begin, end) as into:
                request = self._first.Ialltoall(sent, into)
            yield [request]

        return self._in_pieces(self._enter("all_to_all"), given[0].nbytes, steps)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        self._check_device(tensor)
        if tensor.nbytes == 0:
            return Finished()
        flat = _bytes_of(tensor)

        def steps(begin: int, end: int) -> Steps:
            yield [self._first.Ibcast(self._whole(flat[begin:end]), src)]

        return self._in_pieces(self._enter(f"broadcast(src={src})"), flat.nbytes, steps)

    def send(self, tensor: Tensor, dst: int) -> Work:
        if self.world_size == 1:
            raise ValueError(f"a world of one has nobody to send to; got {dst=}.")
        self._check_peer(dst, "dst")
        return self._post(tensor, f"send to {dst}", lambda part: self._first.Isend(part, dst, MAIL))

    def recv(self, tensor: Tensor, src: int) -> Work:
        if self.world_size == 1:
            raise ValueError(f"a world of one has nobody to receive from; got {src=}.")
        self._check_peer(src, "src")
        return self._post(tensor, f"recv from {src}", lambda part: self._first.Irecv(part, src, MAIL))

    def _post(self, tensor: Tensor, what: str, start: Any) -> Work:
        check_contiguous(tensor)
        self._check_device(tensor)
        if tensor.nbytes == 0:
            return Finished()
        flat = _bytes_of(tensor)

        def steps() -> Steps:
            yield [start(self._whole(part)) for part in flat.split(PIECE_BYTES)]

        return self._queue.start(self._enter(what, pair=True), steps(), pair=True)

    def barrier(self) -> None:
        def steps() -> Steps:
            yield [self._first.Ibarrier()]

        self._queue.start(self._enter("barrier"), steps()).wait()

    # -- groups ---------------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = self._check_ranks(ranks)
        if self._closed:
            raise ValueError("this communicator is closed: split is no longer possible.")
        self._splits += 1  # every rank of this group splits it, members or not: so they agree on the number
        if self.rank not in chosen:
            return None
        members = [self._watch.members[rank] for rank in chosen]
        name = f"{self._watch.key}/{self._splits}/{'-'.join(map(str, members))}"
        watch = Watch(self._watch.lifeline, members, name, self.timeout_s)
        call = watch.enter("split")
        watch.raise_if_lost(call)
        # Making a communicator blocks in MPI, so they go there together.
        Queue(self._library, watch).start(call, self._arrive(chosen), pair=True).wait()
        comms = make_comms(self._library, self._first, chosen, watch, call, tag=self._splits % (1 << 15))
        return Mpi(self._library, comms, watch, why=self.why, feed=self.feed)

    def _arrive(self, chosen: list[int]) -> Steps:
        head, nothing = chosen[0], [b"", self._library.mpi.BYTE]
        if self.rank == head:
            yield [self._first.Irecv([bytearray(0), self._library.mpi.BYTE], rank, ARRIVED) for rank in chosen[1:]]
            yield [self._first.Isend(nothing, rank, ALL_ARRIVED) for rank in chosen[1:]]
        else:
            arrived = self._first.Isend(nothing, head, ARRIVED)
            yield [arrived, self._first.Irecv([bytearray(0), self._library.mpi.BYTE], head, ALL_ARRIVED)]

    @property
    def lifeline(self) -> Lifeline:
        return self._watch.lifeline

    def note(self, place: str, *, step: int | None = None) -> None:
        self.lifeline.here.note = place
        self.lifeline.here.step = step

    def close(self) -> None:
        """Leave the group. One with work under way, or with a lost peer, is left to the exit: MPI can't free it."""
        if self.lifeline.lost:
            self._closed = True
            return
        with self._library.lock:
            self._library.progress()
            if not self._closed and self._queue.is_empty and not self._library.mpi.Is_finalized():
                self._first.Free()
                self._second.Free()
            self._closed = True

    def leave_in_order(self) -> None:
        """Say that nothing is wrong: MPI is then finalized when the process ends, see [Note: ending MPI]."""
        self._library.left_in_order = True

    def _give_up(self) -> None:
        """As this rank leaves: work that it began moves on no more."""
        call = self._queue.first_unfinished()
        if call is not None:
            self._watch.retract(call)

    # -- tensors as MPI sees them ---------------------------------------------------------------------------------

    def _enter(self, what: str, *, pair: bool = False) -> Call:
        if self._closed:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        call = self._watch.enter(what, pair=pair)
        self._watch.raise_if_lost(call)
        return call

    def _flat(self, tensor: Tensor, op: str) -> Tensor:
        """A tensor that can be reduced, as one row of numbers."""
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

    def _in_pieces(self, call: Call, row_bytes: int, steps: Any, *, staged: int = 1) -> Work:
        """Start ``steps(begin, end)`` for each piece of a row."""
        works = []
        for begin in range(0, row_bytes, PIECE_BYTES):
            end = min(row_bytes, begin + PIECE_BYTES)
            works.append(self._queue.start(call, steps(begin, end), num_bytes=staged * (end - begin)))
        return works[0] if len(works) == 1 else Several(works)

    def _memory(self, tensor: Tensor) -> Any:
        return self._library.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _whole(self, tensor: Tensor, parts: int = 1) -> list[Any]:
        """All of a tensor, in so many equal parts, as mpi4py wants it."""
        return [self._memory(tensor), tensor.nbytes // parts, self._library.mpi.BYTE]

    @contextlib.contextmanager
    def _rows(self, table: Tensor, begin: int, end: int) -> Iterator[list[Any]]:
        """Bytes ``begin`` to ``end`` of every row of a table, for the start of a call."""
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
            spaced.Free()  # when the call that uses it is complete
            block.Free()

    @contextlib.contextmanager
    def _scratch(self, dtype: torch.dtype, num_rows: int, numel: int) -> Iterator[Tensor]:
        num_bytes = num_rows * numel * dtype.itemsize
        memory = SCRATCH.take(num_bytes)
        yield memory[:num_bytes].view(dtype).view(num_rows, numel)
        SCRATCH.give_back(memory)  # not after a failure: MPI may still write into it


def connect_mpi(*, timeout_s: float) -> Mpi:
    """Join the world that MPI's launcher started; blocks until every rank has come."""
    said = started_by_mpi()
    library = load(timeout_s=timeout_s)
    world = library.mpi.COMM_WORLD
    if world.size == 1 and said != 1:
        raise ValueError(_alone(library, said))
    library.left_in_order = False  # until it has
    meeting = Meeting(library, timeout_s=timeout_s)
    identities = meeting.check_in(repr(host_identity()))
    addresses = ["127.0.0.1"] if len(set(identities)) == 1 else [socket.gethostname(), *own_addresses()]
    lifeline = Lifeline(world.rank, world.size, meeting, addresses=addresses, timeout_s=timeout_s)
    library.lost = lifeline.lost
    watch = Watch(lifeline, range(world.size), "mpi", timeout_s)
    comms = make_comms(library, world, list(range(world.size)), watch, watch.enter("connect"), tag=0)
    why = f"{world.size} rank{'s' if world.size > 1 else ''}, as {library.describe()} says"
    return Mpi(library, comms, watch, why=why, feed=None)


def _alone(library: Library, said: int | None) -> str:
    if said is None:
        return "transport='mpi' needs a launcher; no mpirun or srun is seen. Use `mpirun -n 4 python train.py`."
    return (
        f"MPI sees a world of one, though {said} ranks were started: mpi4py has loaded {library.describe()}, and they "
        "were started by something else. Use the mpirun of that very library (or srun with its --mpi option)."
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's own memory, as bytes."""
    flat = tensor.detach().view(-1)
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
