"""Bytes between ranks on TCP connections of our own: what c10d's all-to-all of CPU tensors goes through.

[Note: why not Gloo's] Its loop thread spins while another thread of the process holds a connection, as one that sends
does, and each of its messages needs a thread that blocks for it (see letters.py). Next to a backward that needs the
core itself, that was a tenth of a step. Here who calls hands the kernel what it takes at once, and a thread for all
peers does the rest; it blocks in the kernel, without Python's lock. How messages come in: see inbox.py.

[Note: one order] Messages between two ranks are only told apart by their order. All ranks start the same exchanges in
the same order, and serve their peers in one order in each: to rank + 1 first, then rank + 2. So nobody waits in a
circle.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor

from gradsync.comm.inbox import Inbox, Line
from gradsync.comm.parcels import Parcel
from gradsync.comm.watch import Call, Watch


class Wires:
    """This rank's connections to all others of its group."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], watch: Watch) -> None:
        for connection in connections.values():
            connection.settimeout(None)  # who waits for a parcel has a timeout; the threads are woken by close()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        n = len(connections) + 1
        self._to = [(peer, connections[peer]) for peer in ((rank + step) % n for step in range(1, n))]
        self._watch = watch
        self._number = 0
        self._lock = threading.Lock()
        self._unsent = 0  # exchanges that the sending thread has to see to
        self._outgoing: queue.SimpleQueue[tuple[Parcel, Iterator[None]] | None] = queue.SimpleQueue()
        self._error = ""
        self._threads = 2  # that use the connections
        self._inbox = Inbox([Line(*peer) for peer in self._to], self._fail_to_receive, self._leave)
        threading.Thread(target=self._send, name="gradsync-wires", daemon=True).start()
        _open.add(self)

    def exchange(self, tensor: Tensor, out: Tensor, used: Sequence[int] | None, call: Call) -> Parcel:
        """Send row i of ``tensor`` to rank i, and fill row j of ``out`` from rank j. The own rows are left alone.

        The rows of ``tensor`` may all be one (``expand``); each lies in one piece, and ``out`` as a whole.
        ``used``: how many bytes of each row are sent; None: all.
        """
        with self._lock:
            self._number += 1
            peers, inbox, watch = len(self._to), self._inbox, self._watch
            parcel = Parcel(self._number, tensor, out, used, num_peers=peers, reader=inbox, watch=watch, call=call)
            if self._error:
                parcel.fail(self._error)
                return parcel
            inbox.expect(parcel)
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
        self._inbox.close()
        _open.discard(self)

    def _leave(self) -> None:
        """Said by each thread at its end; the last one closes the connections."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
        with self._inbox.reading:  # who waits for something sees that they are shut down, and goes
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
            self._fail_to_send(parcel, error)
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
                self._fail_to_send(parcel, error)
            parcel.ended()
            with self._lock:
                self._unsent -= 1
        self._leave()

    # -- what goes wrong: nothing can follow, as nobody knows any more how far the others have come -----------------

    def _fail_to_send(self, parcel: Parcel, error: OSError) -> None:
        self._error = self._error or f"sending failed: {error}"
        parcel.fail(self._error)

    def _fail_to_receive(self, error: OSError) -> str:
        self._error = self._error or f"receiving failed: {error}"
        return self._error


_open: weakref.WeakSet[Wires] = weakref.WeakSet()


def _forget_connections() -> None:
    """In a forked child (a DataLoader's worker), which would hold them open after its parent is dead."""
    for wires in list(_open):
        for _, connection in wires._to:
            connection.close()


os.register_at_fork(after_in_child=_forget_connections)
