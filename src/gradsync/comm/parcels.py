"""One exchange of rows between ranks, as it lies in memory and as it is on the wire: what wires.py moves."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradsync.comm.letters import Errand
from gradsync.comm.watch import Call, Watch

HEAD = struct.Struct("<QQQ")  # before each message: the exchange's number, how long a row is, how much of it follows


class Reader(Protocol):
    """Who brings in what has arrived; whoever asks for a parcel, or waits for it, lends it a hand."""

    def look(self) -> None:
        """Take what is there. Does not block."""

    def attend(self, parcel: Parcel) -> None:
        """Block until all of a parcel is there, or it has failed. Raises what its ``check`` does."""


class Parcel(Errand):
    """One exchange: what goes to each of the others, and the room for what comes from them."""

    def __init__(
        self,
        number: int,
        tensor: Tensor,
        out: Tensor,
        used: Sequence[int] | None,
        *,
        num_peers: int,
        reader: Reader,
        watch: Watch,
        call: Call,
    ) -> None:
        super().__init__(watch, call, parts=2)  # sending, and receiving
        self._number = number
        self._tensors = tensor, out  # they are read and written by address: they must not go away
        self._row_bytes = out[0].nbytes
        self._used = used
        self._to_come = num_peers
        self._reader = reader

    def message_to(self, rank: int) -> list[memoryview]:
        """A head and what follows it."""
        used = self._row_bytes if self._used is None else self._used[rank]
        head = HEAD.pack(self._number, self._row_bytes, used)
        return [memoryview(head), self._row(self._tensors[0], rank)[:used]]

    def room_for(self, rank: int, head: bytearray) -> memoryview:
        """Where to put what a rank sends, if that is what its head says it should be."""
        number, row_bytes, used = HEAD.unpack(head)
        if (number, row_bytes) != (self._number, self._row_bytes) or used > row_bytes:
            raise ConnectionError(
                f"rank {rank} sends a row of {row_bytes:,} bytes in its exchange {number}; "
                f"here it is exchange {self._number}, with rows of {self._row_bytes:,} bytes"
            )
        return self._row(self._tensors[1], rank)[:used]

    def _row(self, whole: Tensor, rank: int) -> memoryview:
        address = whole.data_ptr() + rank * whole.stride(0) * whole.itemsize
        return memoryview((ctypes.c_char * self._row_bytes).from_address(address)).cast("B")

    def arrived(self) -> None:
        """Said when one of the others' rows is in its room."""
        self._to_come -= 1
        if not self._to_come:
            self.ended()

    @property
    def is_awaited(self) -> bool:
        """Whether something is still to come."""
        return self._to_come > 0 and not self._is_over

    def check(self) -> None:
        """For who waits, now and then: raise if a peer is lost, or if this has taken too long."""
        self._watch.check(self._call)

    def done(self) -> bool:
        if not self._is_over:
            self._reader.look()
        return self._is_over

    def wait(self) -> None:
        if self.is_awaited:
            self._call = dataclasses.replace(self._call, started_s=time.monotonic())  # that is when this rank waits
            self._reader.attend(self)
        super().wait()
