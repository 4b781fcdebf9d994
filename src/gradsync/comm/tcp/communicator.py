"""``Tcp``: torch.distributed groups whose collectives of CPU tensors go over TCP connections of our own.

Between hosts Gloo needs a thread for each message and takes the cores that compute; mesh.py says how ours avoids that.
Tensors on a GPU, and ``send`` and ``recv``, go by torch.distributed as on ``C10d``.

[Note: how values are summed] Every rank sums in rank order, so all ranks have the same bits. Two ranks send each other
all values, and each sums all of them: as many bytes as any other way, and one message each. So do more ranks with small
tensors. Else rank i receives slice i from all ranks, sums it, and sends the sum to all: 2 (n - 1) / n of the bytes,
which is the minimum, in two exchanges, however many ranks there are.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, ReduceOp, SourceSlice, Work, check_op, copy_in
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.checks import check_contiguous, check_rows
from gradsync.comm.failure.guard import Call
from gradsync.comm.objects import all_gather_object
from gradsync.comm.rendezvous import gloo_addresses
from gradsync.comm.tcp.endpoint import Endpoint, connect_all
from gradsync.comm.tcp.exchange import ExchangeContext, ExchangeWork, memory_at
from gradsync.comm.tcp.mesh import TcpMesh
from gradsync.comm.tcp.reduction import MemoryExchange, MemoryFor, ReduceWork, Reduction, TwoExchanges

WHOLE_BYTES = 1 << 15  # tensors up to this size go to every rank as a whole: one exchange instead of two


class Tcp(C10d):
    """A group of torch.distributed, with exchanges of our own between CPU ranks. Made by ``connect``."""

    transport = "tcp"
    bucket_bytes: int = 4 << 20  # a link is slower than memory: it should be busy soon after backward has begun
    _mesh: TcpMesh | None
    _connecting = False

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        if not tensor.is_cpu:
            return super().all_reduce(tensor, op=op)
        values = summable(tensor, op)
        what = f"all_reduce({op})"
        self._opened(what)
        if self._is_trivial(values):
            return Finished()
        mesh, call = self._begin(what)
        address, item = values.data_ptr(), values.itemsize
        if self.world_size == 2 or values.nbytes <= WHOLE_BYTES:
            whole = memory_at(address, values.nbytes)
            reduction = self._reduction(values, op, values.numel(), own=address, overwrites_sent=True)
            return mesh.start(lambda context: ReduceWork(context, reduction, lambda peer: whole, mesh.staging), call)
        slices = _slices(address, values.numel(), item, self.world_size)
        own = address + values.numel() * self.rank // self.world_size * item
        reduction = self._reduction(values, op, len(slices(self.rank)) // item, own=own)
        return self._start_both(
            mesh,
            call,
            lambda context, reply: ReduceWork(context, reduction, slices, mesh.staging, on_reduced=reply),
            lambda context: MemoryExchange(context, lambda peer: slices(self.rank), slices, (values,)),
        )

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        if not tensor.is_cpu:
            return super().reduce_scatter(tensor, out=out, op=op)
        values, sums = summable(tensor, op), summable(out, op)
        what = f"reduce_scatter({op})"
        self._opened(what)
        if self._is_trivial(values):
            sums.copy_(values)
            return Finished()
        mesh, call = self._begin(what)
        rows = _slices(values.data_ptr(), values.numel(), values.itemsize, self.world_size)
        own = values.data_ptr() + self.rank * sums.nbytes
        reduction = self._reduction(values, op, sums.numel(), own=own, out=sums)
        return mesh.start(lambda context: ReduceWork(context, reduction, rows, mesh.staging), call)

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        if not buffer.is_cpu:
            return super().reduce_slices(buffer, sources)
        copy_in(sources, buffer)
        rows = buffer.view(self.world_size, -1)
        return self.reduce_scatter(rows, out=rows[self.rank])  # in place: no peer is sent this row

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        if not tensor.is_cpu or self._connecting:
            return super().all_gather(tensor, out=out)
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        return self._exchange("all_gather", tensor.expand(out.shape), out, own=True, used=None)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        if not tensor.is_cpu:
            return super().broadcast(tensor, src)
        what = f"broadcast(src={src})"
        self._opened(what)
        if self._is_trivial(tensor):
            return Finished()
        mesh, call = self._begin(what)
        address, nothing = tensor.data_ptr(), memoryview(b"")
        if self.world_size == 2 or tensor.nbytes <= WHOLE_BYTES:
            whole = memory_at(address, tensor.nbytes)
            sent = whole if self.rank == src else nothing
            return mesh.start(
                lambda context: MemoryExchange(
                    context, lambda peer: sent, lambda peer: whole if peer == src else nothing, (tensor,)
                ),
                call,
            )
        # Rank i receives slice i, and sends it to all: so the sender's link carries the values once.
        slices = _slices(address, tensor.nbytes, 1, self.world_size)
        own = slices(self.rank)
        return self._start_both(
            mesh,
            call,
            lambda context, reply: MemoryExchange(
                context,
                slices if self.rank == src else lambda peer: nothing,
                lambda peer: own if peer == src else nothing,
                (tensor,),
                on_received=reply,
            ),
            lambda context: MemoryExchange(
                context,
                lambda peer: nothing if peer == src else own,
                lambda peer: nothing if self.rank == src else slices(peer),
                (tensor,),
            ),
        )

    def barrier(self) -> None:
        # A new group's first barrier connects its members: later calls of two groups may come in any order.
        self.all_reduce(torch.zeros(1, dtype=torch.uint8)).wait()

    def control_group(self) -> Communicator:
        group = self.split_as(C10d, range(self.world_size))  # it compares calls one at a time: Gloo will do
        assert group is not None, "every rank is in the group of all ranks"
        return group

    def _is_trivial(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 or self.world_size == 1

    def _reduction(
        self,
        values: Tensor,
        op: ReduceOp,
        num_values: int,
        *,
        own: int,
        out: Tensor | None = None,
        overwrites_sent: bool = False,
    ) -> Reduction:
        return Reduction(
            rank=self.rank,
            world_size=self.world_size,
            dtype=values.dtype,
            op=op,
            own=own,
            out=own if out is None else out.data_ptr(),
            num_values=num_values,
            keep=(values,) if out is None else (values, out),
            overwrites_sent=overwrites_sent,
        )

    def _begin(self, what: str) -> tuple[TcpMesh, Call]:
        call = self.guard.begin(what)
        self.guard.raise_if_lost(call)
        return self._mesh_for(call), call

    def _mesh_for(self, call: Call) -> TcpMesh:
        """The connections to the other ranks. The first call makes them, and blocks: all ranks make it."""
        if self._mesh is None:
            self._connecting = True  # the ranks share their endpoints through Gloo
            try:
                calls = self._connect_peers(call)
                replies = self._connect_peers(call) if self.world_size > 2 else None
            finally:
                self._connecting = False
            self._mesh = TcpMesh(self.rank, calls, self.guard, replies=replies)
        return self._mesh

    def _connect_peers(self, call: Call) -> dict[int, socket.socket]:
        def share(own: Endpoint) -> list[Endpoint]:
            return [Endpoint(**fields) for fields in all_gather_object(self, dataclasses.asdict(own))]

        try:
            return connect_all(self.rank, share, gloo_addresses(), self.guard, call)
        except OSError as error:
            self.guard.raise_cause(call, str(error))

    def _start_both(
        self,
        mesh: TcpMesh,
        call: Call,
        make_first: Callable[[ExchangeContext, Callable[[], None]], ExchangeWork],
        make_second: Callable[[ExchangeContext], ExchangeWork],
    ) -> Work:
        """Start a collective of two exchanges; see [Note: two lanes] in mesh.py."""
        second: list[ExchangeWork] = []

        def reply() -> None:
            assert mesh.replies is not None, "the mesh of more than two ranks has this lane"
            mesh.replies.send(second[0])

        def make_reply(context: ExchangeContext) -> ExchangeWork:
            second.append(make_second(context))
            return second[0]

        first = mesh.start(lambda context: make_first(context, reply), call, make_reply)
        return TwoExchanges(first, second[0])


def summable(tensor: Tensor, op: ReduceOp) -> Tensor:
    """A tensor's values, flat, as numbers that have a compiled sum; autograd does not record what happens to them."""
    if tensor.is_complex():
        if op != "sum":
            raise ValueError(f"complex numbers have no order, so op must be sum; got {op=}.")
        tensor = torch.view_as_real(tensor)
    return tensor.detach().view(-1)


def _slices(address: int, numel: int, item_bytes: int, parts: int) -> MemoryFor:
    """The memory of slice i of nearly equal slices, as a function of i."""

    def memory(index: int) -> memoryview:
        first, end = numel * index // parts, numel * (index + 1) // parts
        return memory_at(address + first * item_bytes, (end - first) * item_bytes)

    return memory
