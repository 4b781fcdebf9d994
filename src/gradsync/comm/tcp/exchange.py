"""Exchanges over TCP: each rank sends one message to every peer, and receives one from each; mesh.py moves them.

``ExchangeWork`` is the base: what an exchange sends, where it receives, and when it is over. ``AllToAllWork`` is the
exchange whose messages are rows of tensors. Those that add up what they receive are in reduction.py.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradsync.comm.background import ThreadedWork
from gradsync.comm.failure.guard import Call, CollectiveGuard

# Before each message: sequence number, size of a whole message in bytes, bytes of it that follow.
HEADER = struct.Struct("<QQQ")


class Reader(Protocol):
    """Reads the sockets: ``done()`` and ``wait()`` of a work call it."""

    def poll(self) -> None:
        """Read what has arrived. Does not block."""

    def read_until_received(self, work: ExchangeWork) -> None:
        """Block until all messages of a work have arrived, or it has failed. Raises what its ``check`` does."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangeContext:
    """What every exchange of one call needs: its number in the mesh, the number of peers, and who reads and guards."""

    number: int
    num_peers: int
    reader: Reader
    guard: CollectiveGuard
    call: Call


class ExchangeWork(ThreadedWork, abc.ABC):
    """One message to every peer, and one from each. It is over when all are sent and received."""

    chunk_bytes: int | None = None  # call ``chunk_received`` each time as many bytes have arrived; None: never
    is_prompt = False  # the receiving thread reads a message as soon as it is there, though no caller waits for it

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context.guard, context.call, parts=2)  # sending, and receiving
        self.number = context.number
        self._messages_to_come = context.num_peers
        self._reader = context.reader

    # -- what a kind of exchange defines --------------------------------------------------------------------------

    @abc.abstractmethod
    def outgoing(self, peer: int) -> memoryview:
        """The memory that goes to a peer."""

    @abc.abstractmethod
    def incoming(self, peer: int) -> memoryview:
        """The memory that a peer's message is received in."""

    def used(self, peer: int) -> int:
        """How many bytes of ``outgoing`` are sent."""
        return len(self.outgoing(peer))

    def chunk_received(self, peer: int, num_bytes: int) -> None:
        """So many bytes of a peer's message have arrived by now."""

    def chunk_sent(self, peer: int, num_bytes: int) -> None:
        """The kernel has taken so many bytes of the message to a peer by now."""

    # -- called by the mesh and the receiver ----------------------------------------------------------------------

    def message_to(self, peer: int) -> list[memoryview]:
        """The header and the body for a peer."""
        body, used = self.outgoing(peer), self.used(peer)
        return [memoryview(HEADER.pack(self.number, len(body), used)), body[:used]]

    def receive_buffer(self, peer: int, header: bytes | bytearray) -> memoryview:
        """The memory for a peer's message. Raises ConnectionError if the header belongs to another exchange."""
        number, size, used = HEADER.unpack(header)
        buffer = self.incoming(peer)
        if (number, size) != (self.number, len(buffer)) or used > size:
            raise ConnectionError(
                f"rank {peer} sends a message of {size:,} bytes in its exchange {number}; "
                f"here it is exchange {self.number}, with messages of {len(buffer):,} bytes"
            )
        return buffer[:used]

    def message_received(self) -> None:
        """A peer's message is complete."""
        self._messages_to_come -= 1
        if not self._messages_to_come:
            self.all_received()

    def all_received(self) -> None:
        """The messages of all peers are complete."""
        self.part_done()

    def all_sent(self) -> None:
        """The kernel has taken the messages to all peers."""
        self.part_done()

    @property
    def is_receiving(self) -> bool:
        """Whether some messages have not arrived yet."""
        return self._messages_to_come > 0 and not self._is_over

    # -- Work -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Called from time to time by a rank that waits: raise if a peer is lost, or this has taken too long."""
        self._guard.check(self._call)

    def done(self) -> bool:
        if not self._is_over:
            self._reader.poll()
        return self._is_over

    def wait(self) -> None:
        if self.is_receiving:
            self._call = dataclasses.replace(self._call, started_s=time.monotonic())  # the timeout is of the wait
            self._reader.read_until_received(self)
        super().wait()


class AllToAllWork(ExchangeWork):
    """Row i of ``tensor`` goes to rank i; row j of ``out`` receives what rank j sends. Own rows are left alone."""

    def __init__(self, context: ExchangeContext, tensor: Tensor, out: Tensor, used: Sequence[int] | None) -> None:
        super().__init__(context)
        self._tensors = tensor, out  # they are read and written by address, so they are kept alive
        self._row_bytes = out[0].nbytes
        self._used = used

    def outgoing(self, peer: int) -> memoryview:
        return self._row(self._tensors[0], peer)

    def incoming(self, peer: int) -> memoryview:
        return self._row(self._tensors[1], peer)

    def used(self, peer: int) -> int:
        return self._row_bytes if self._used is None else self._used[peer]

    def _row(self, whole: Tensor, rank: int) -> memoryview:
        return memory_at(whole.data_ptr() + rank * whole.stride(0) * whole.itemsize, self._row_bytes)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """The memory at an address, as bytes. The caller keeps it alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
