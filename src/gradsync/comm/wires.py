"""Bytes between ranks on TCP connections of our own: what c10d's all-to-all of CPU tensors goes through.

[Note: why not Gloo's] Its loop thread spins while another thread of the process holds a connection, as one that sends
does, and each of its messages needs a thread that blocks for it (see letters.py). Next to a backward that needs the
core itself, that was a tenth of a step. Here who calls hands the kernel what it takes at once, and two threads for all
peers do the rest; they block in the kernel, without Python's lock, until a message is through.

[Note: one order] Messages between two ranks are only told apart by their order. All ranks start the same exchanges in
the same order, and serve their peers in one order in each: to rank + 1 first, then rank + 2; from rank - 1 first. So
what one end sends next is always what the other reads next, and nobody waits in a circle.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import socket
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor

from gradsync.comm.letters import Errand
from gradsync.comm.watch import Call, Watch

HEAD = struct.Struct("<QQQ")  # before each message: the exchange's number, how long a row is, how much of it follows
GATHERED_BYTES = 4 << 20  # that the kernel keeps before it wakes who waits for them; it takes less if it has no room
SENDING, RECEIVING = "sending", "receiving"


class Parcel(Errand):
    """One exchange: what goes to each of the others, and the room for what comes from them."""

    def __init__(
        self, number: int, tensor: Tensor, out: Tensor, used: Sequence[int] | None, watch: Watch, call: Call
    ) -> None:
        super().__init__(watch, call, parts=2)
        self._number = number
        self._tensors = tensor, out  # they are read and written by address: they must not go away
        self._row_bytes = out[0].nbytes
        self._used = used

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


class Wires:
    """This rank's connections to all others of its group."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], watch: Watch) -> None:
        for connection in connections.values():
            connection.settimeout(None)  # who waits for a parcel has a timeout; the threads are woken by close()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        n = len(connections) + 1
        self._to = [(peer, connections[peer]) for peer in ((rank + step) % n for step in range(1, n))]
        self._from = self._to[::-1]
        self._watch = watch
        self._number = 0
        self._lock = threading.Lock()
        self._unsent = 0  # exchanges that the sending thread has to see to
        self._outgoing: queue.SimpleQueue[tuple[Parcel, Iterator[None]] | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._error = ""
        self._threads = 2
        for target in (self._send, self._receive):
            threading.Thread(target=target, name=f"gradsync-wires{target.__name__}", daemon=True).start()
        _open.add(self)

    def exchange(self, tensor: Tensor, out: Tensor, used: Sequence[int] | None, call: Call) -> Parcel:
        """Send row i of ``tensor`` to rank i, and fill row j of ``out`` from rank j. The own rows are left alone.

        The rows of ``tensor`` may all be one (``expand``); each lies in one piece, and ``out`` as a whole.
        ``used``: how many bytes of each row are sent; None: all.
        """
        with self._lock:
            self._number += 1
            parcel = Parcel(self._number, tensor, out, used, self._watch, call)
            if self._error:
                parcel.fail(self._error)
                return parcel
            self._incoming.put(parcel)
            sending = self._sent_parts(parcel)
            if self._unsent or not self._sent_at_once(parcel, sending):
                self._unsent += 1
                self._outgoing.put((parcel, sending))
        return parcel

    def close(self) -> None:
        """Let go of the connections. Does not wait for what is under way. Safe to call twice."""
        for _, connection in self._to:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the threads
        self._outgoing.put(None)
        self._incoming.put(None)
        _open.discard(self)

    def _leave(self) -> None:
        """Said by each thread at its end; the last one closes the connections."""
        with self._lock:
            self._threads -= 1
            if not self._threads:
                for _, connection in self._to:
                    connection.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def _sent_parts(self, parcel: Parcel) -> Iterator[None]:
        """Send to one after the other; yields whenever the kernel takes no more. The next call then blocks."""
        for peer, connection in self._to:
            rest = parcel.message_to(peer)
            flags: int = socket.MSG_DONTWAIT
            while rest:
                try:
                    sent = connection.sendmsg(rest, (), flags)
                except BlockingIOError:
                    yield
                    flags = 0
                    continue
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][sent:]

    def _sent_at_once(self, parcel: Parcel, sending: Iterator[None]) -> bool:
        try:
            for _ in sending:
                return False
        except OSError as error:
            self._fail(parcel, SENDING, error)
        parcel.ended()
        return True

    def _send(self) -> None:
        while (task := self._outgoing.get()) is not None:
            parcel, sending = task
            try:
                if self._error:
                    raise ConnectionError(self._error)
                for _ in sending:
                    pass
            except OSError as error:
                self._fail(parcel, SENDING, error)
            parcel.ended()
            with self._lock:
                self._unsent -= 1
        self._leave()

    # -- receiving ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while (parcel := self._incoming.get()) is not None:
            try:
                if self._error:
                    raise ConnectionError(self._error)
                for peer, connection in self._from:
                    self._receive_from(peer, connection, parcel)
            except OSError as error:
                self._fail(parcel, RECEIVING, error)
            parcel.ended()
        self._leave()

    def _receive_from(self, peer: int, connection: socket.socket, parcel: Parcel) -> None:
        head = bytearray(HEAD.size)
        _fill(connection, memoryview(head))
        _fill(connection, parcel.room_for(peer, head))

    def _fail(self, parcel: Parcel, what: str, error: OSError) -> None:
        """Nothing can follow: nobody knows any more how far the others have come."""
        self._error = self._error or f"{what} failed: {error}"
        parcel.fail(self._error)


def _fill(connection: socket.socket, room: memoryview) -> None:
    """Block until all the room is filled, and wake up as seldom as can be. No timeout: close() ends it.

    Whenever a thread wakes up, what the backward on this core had in its caches goes. So the kernel is told to gather
    much first: with a wake-up for each packet, a step at 1 Gbit/s took a twentieth longer.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while len(room):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(room), GATHERED_BYTES))
        poll.poll()
        try:
            got = connection.recv_into(room, len(room), socket.MSG_DONTWAIT)
        except BlockingIOError:  # a poll may be wrong
            continue
        if not got:
            raise ConnectionError("the other end is closed")
        room = room[got:]


_open: weakref.WeakSet[Wires] = weakref.WeakSet()


def _forget_connections() -> None:
    """In a forked child (a DataLoader's worker), which would hold them open after its parent is dead."""
    for wires in list(_open):
        for _, connection in wires._to:
            connection.close()


os.register_at_fork(after_in_child=_forget_connections)
