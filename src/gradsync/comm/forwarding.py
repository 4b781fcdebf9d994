"""``Forwarding``: a communicator that forwards every call to another one; the base class of wrappers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, HostExchange, ReduceOp, SourceSlice, Work
from gradsync.comm.failure.heartbeat import Heartbeat


class Forwarding(Communicator):
    """Forwards every call to ``inner``; ``close()`` closes it too. A wrapper overrides the calls that it changes."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world_size, timeout_s=inner.timeout_s, worker=inner.worker)
        self.forward_to(inner)

    def forward_to(self, inner: Communicator) -> None:
        """Forward every call to ``inner`` from now on, and have its attributes."""
        self.inner = inner
        self.rank, self.world_size, self.timeout_s = inner.rank, inner.world_size, inner.timeout_s
        self.transport = inner.transport
        self.why = inner.why
        self.sends_used_only = inner.sends_used_only
        self.bucket_bytes = inner.bucket_bytes
        self.num_hosts = inner.num_hosts
        self.runs_in_background = inner.runs_in_background

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return self.inner.all_reduce(tensor, op=op)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        return self.inner.all_gather(tensor, out=out)

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        return self.inner.reduce_scatter(tensor, out=out, op=op)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        return self.inner.all_to_all(tensor, out=out, own=own, used=used)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        return self.inner.broadcast(tensor, src)

    def send(self, tensor: Tensor, dst: int) -> Work:
        return self.inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Work:
        return self.inner.recv(tensor, src)

    def barrier(self) -> None:
        self.inner.barrier()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """The group as ``inner`` makes it. A wrapper whose splits are to be wrapped too overrides this."""
        return self.inner.split(ranks)

    @property
    def heartbeat(self) -> Heartbeat | None:
        return self.inner.heartbeat

    def note(self, place: str, *, step: int | None = None) -> None:
        self.inner.note(place, step=step)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    def owned_range(self, buffer: Tensor) -> tuple[int, int]:
        return self.inner.owned_range(buffer)

    def all_reduce_from(self, buffer: Tensor, sources: Sequence[SourceSlice]) -> Work:
        return self.inner.all_reduce_from(buffer, sources)

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        return self.inner.reduce_slices(buffer, sources)

    def gather_slices(self, buffer: Tensor) -> Work:
        return self.inner.gather_slices(buffer)

    def leads_host(self, index: int) -> bool:
        return self.inner.leads_host(index)

    def reduce_per_host(self, buffer: Tensor, index: int, exchange: HostExchange) -> Work:
        return self.inner.reduce_per_host(buffer, index, exchange)

    def control_group(self) -> Communicator:
        return self.inner.control_group()

    def compare(self, largest: Tensor, what: str) -> Work:
        return self.inner.compare(largest, what)

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:
        self.inner.check_call(what, tensor, op)

    def close(self) -> None:
        self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()
        self.close()  # what the wrapper itself holds

    def reconfigure_handle(self) -> str:
        return self.inner.reconfigure_handle()

    def reconfigure(self, generation: str, handles: Sequence[str], *, timeout_s: float | None = None) -> Communicator:
        """The world as ``inner`` makes it. A wrapper whose new worlds are to be wrapped too overrides this."""
        return self.inner.reconfigure(generation, handles, timeout_s=timeout_s)
