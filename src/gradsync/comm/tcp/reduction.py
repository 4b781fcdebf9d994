"""Exchanges that make a reduction: ``ReduceWork`` sums what arrives, ``MemoryExchange`` distributes the sums.

A peer's message is received into staging memory, a chunk at a time, and each chunk is added while it is still in the
cache. The sum is compiled code, which runs without Python's lock. It adds the values in rank order, so its bits are the
same on all ranks, whichever message arrives first.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.comm.base import ReduceOp, Work
from gradsync.comm.tcp.exchange import ExchangeContext, ExchangeWork, memory_at
from gradsync.comm.tcp.mesh import StagingPool

CHUNK_BYTES = 1 << 20  # received and then summed at a time

MemoryFor = Callable[[int], memoryview]  # from a rank to the memory that goes to it, or that it fills


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What a :class:`ReduceWork` sums: this rank's values, and those that arrive in the same order from every peer."""

    rank: int
    world_size: int
    dtype: torch.dtype
    op: ReduceOp
    own: int  # the address of this rank's values
    out: int  # the address for the sums; may be that of ``own``
    num_values: int
    keep: tuple[Tensor, ...]  # the tensors at these addresses, kept alive
    overwrites_sent: bool = False  # ``out`` is also sent: values must be sent before their sum is written


class ReduceWork(ExchangeWork):
    """Sums one range of values over all ranks, in rank order.

    ``outgoing``: the values of this rank that each peer sums. ``on_reduced`` is called when all sums are written, in
    the thread that wrote the last ones; where it is given, peers wait for its result.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        context: ExchangeContext,
        reduction: Reduction,
        outgoing: MemoryFor,
        staging: StagingPool,
        on_reduced: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(context)
        self.is_prompt = on_reduced is not None
        self._reduction = reduction
        self._outgoing = outgoing
        self._on_reduced = on_reduced
        self._pool = staging
        self._staging: dict[int, Tensor] = {}  # by peer, from its first byte on
        peers = [rank for rank in range(reduction.world_size) if rank != reduction.rank]
        self._received = dict.fromkeys(peers, 0)  # bytes
        self._sent = dict.fromkeys(peers, 0)
        self._summing = threading.Lock()
        self._summed = 0  # values
        self._sum = sum_function(reduction.dtype, reduction.op)

    def outgoing(self, peer: int) -> memoryview:
        return self._outgoing(peer)

    def incoming(self, peer: int) -> memoryview:
        num_bytes = self._reduction.num_values * self._reduction.dtype.itemsize
        if peer not in self._staging:  # not before: messages come one after the other, so few are staged at once
            self._staging[peer] = self._pool.take(num_bytes)
        return memory_at(self._staging[peer].data_ptr(), num_bytes)

    def chunk_received(self, peer: int, num_bytes: int) -> None:
        self._received[peer] = num_bytes
        self._sum_ready()

    def chunk_sent(self, peer: int, num_bytes: int) -> None:
        self._sent[peer] = num_bytes

    def all_received(self) -> None:
        for peer in self._received:
            self._received[peer] = self._reduction.num_values * self._reduction.dtype.itemsize
        self._sum_ready()

    def all_sent(self) -> None:
        if self._reduction.overwrites_sent and not self._is_over:
            self._sum_ready()
        super().all_sent()

    def _sum_ready(self) -> None:
        """Sum the values that all peers have sent, as far as they may be overwritten."""
        reduction = self._reduction
        with self._summing:
            first = self._summed
            ready_bytes = min(self._received.values())
            if reduction.overwrites_sent:
                ready_bytes = min(ready_bytes, *self._sent.values())
            end = ready_bytes // reduction.dtype.itemsize
            if end <= first:
                return
            self._sum(self._rows(), reduction.world_size, reduction.out, first, end)
            self._summed = end
            if end < reduction.num_values:
                return
        for buffer in self._staging.values():
            self._pool.give_back(buffer)
        self._staging = {}
        if self._on_reduced is not None:
            self._on_reduced()
        self.part_done()

    def _rows(self) -> ctypes.Array[ctypes.c_int64]:
        reduction = self._reduction
        ranks = range(reduction.world_size)
        addresses = [reduction.own if r == reduction.rank else self._staging[r].data_ptr() for r in ranks]
        return (ctypes.c_int64 * reduction.world_size)(*addresses)


class MemoryExchange(ExchangeWork):
    """Sends some memory to each peer, and fills some memory from each. ``keep``: the tensors there, kept alive.

    ``on_received`` is called when all peers' messages are there; where it is given, peers wait for its result.
    """

    def __init__(
        self,
        context: ExchangeContext,
        outgoing: MemoryFor,
        incoming: MemoryFor,
        keep: tuple[Tensor, ...],
        on_received: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(context)
        self.is_prompt = on_received is not None
        self._outgoing = outgoing
        self._incoming = incoming
        self._keep = keep
        self._on_received = on_received

    def outgoing(self, peer: int) -> memoryview:
        return self._outgoing(peer)

    def incoming(self, peer: int) -> memoryview:
        return self._incoming(peer)

    def all_received(self) -> None:
        if self._on_received is not None:
            self._on_received()
        super().all_received()


class TwoExchanges(Work):
    """A collective of two exchanges. The first one sends the second's messages when it is done."""

    def __init__(self, first: Work, second: Work) -> None:
        self._first = first
        self._second = second

    def done(self) -> bool:
        return self._first.done() and self._second.done()

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


@functools.cache
def sum_function(dtype: torch.dtype, op: ReduceOp) -> Callable[..., None]:
    """The compiled sum (max, min) of rows of a dtype; see kernels/shm/sums.py for its arguments."""
    from gradsync.kernels.shm.sums import sum_address  # Numba takes a second to import

    # A ctypes function releases Python's lock while it runs.
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 4)
    return function(sum_address(dtype, op))
