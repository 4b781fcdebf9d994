"""``AllToAllWork``: one all-to-all over TCP, with its layout in memory and on the wire; mesh.py moves it."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradsync.comm.background import ThreadedWork
from gradsync.comm.failure.guard import Call, CollectiveGuard

HEADER = struct.Struct("<QQQ")  # before each message: sequence number, bytes of a row, bytes of it that follow


class Reader(Protocol):
    """Reads the sockets: ``done()`` and ``wait()`` of a work call it."""

    def poll(self) -> None:
        """Read what has arrived. Does not block."""

    def read_until_received(self, work: AllToAllWork) -> None:
        """Block until all rows of a work have arrived, or it has failed. Raises what its ``check`` does."""


class AllToAllWork(ThreadedWork):
    """One all-to-all: the rows that go to the peers, and the rows that receive theirs."""

    def __init__(
        self,
        number: int,
        tensor: Tensor,
        out: Tensor,
        used: Sequence[int] | None,
        *,
        num_peers: int,
        reader: Reader,
        guard: CollectiveGuard,
        call: Call,
    ) -> None:
        super().__init__(guard, call, parts=2)  # sending, and receiving
        self._number = number
        self._tensors = tensor, out  # they are read and written by address, so they are kept alive
        self._row_bytes = out[0].nbytes
        self._used = used
        self._rows_to_come = num_peers
        self._reader = reader

    def message_to(self, rank: int) -> list[memoryview]:
        """The header and the row for a rank."""
        used = self._row_bytes if self._used is None else self._used[rank]
        header = HEADER.pack(self._number, self._row_bytes, used)
        return [memoryview(header), self._row(self._tensors[0], rank)[:used]]

    def receive_buffer(self, rank: int, header: bytearray) -> memoryview:
        """The memory for a rank's row. Raises ConnectionError if the header belongs to another all-to-all."""
        number, row_bytes, used = HEADER.unpack(header)
        if (number, row_bytes) != (self._number, self._row_bytes) or used > row_bytes:
            raise ConnectionError(
                f"rank {rank} sends a row of {row_bytes:,} bytes in its exchange {number}; "
                f"here it is exchange {self._number}, with rows of {self._row_bytes:,} bytes"
            )
        return self._row(self._tensors[1], rank)[:used]

    def _row(self, whole: Tensor, rank: int) -> memoryview:
        address = whole.data_ptr() + rank * whole.stride(0) * whole.itemsize
        return memoryview((ctypes.c_char * self._row_bytes).from_address(address)).cast("B")

    def row_received(self) -> None:
        """Called by the reader when one peer's row is complete."""
        self._rows_to_come -= 1
        if not self._rows_to_come:
            self.part_done()

    @property
    def is_receiving(self) -> bool:
        """Whether some rows have not arrived yet."""
        return self._rows_to_come > 0 and not self._is_over

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
