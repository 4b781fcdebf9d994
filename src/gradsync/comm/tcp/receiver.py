"""The receiving side of a ``TcpMesh``: one ``Connection`` per peer, and the ``Receiver`` that reads them all.

[Note: who reads] Each wake-up of a thread evicts what the backward on this core had in its caches: with a wake-up for
each packet, a step at 1 Gbit/s took a twentieth longer. So no thread wakes up for a message. It stays in the kernel's
receive buffer until a caller polls or waits for it; the caller then reads the socket itself. A background thread reads
only when the receive buffer fills up so far that the sender would soon have to stop.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

from gradsync.comm.background import CHECK_INTERVAL_S
from gradsync.comm.tcp.all_to_all import HEADER, AllToAllWork

WAKE_BYTES = 4 << 20  # buffered bytes that wake the thread; the kernel wakes it for less if its buffer is smaller
IDLE_S = 0.02  # after which the thread takes over when a caller has stopped waiting with messages outstanding
ROUND_S = 0.2  # after which the thread looks again which connections expect something


class Connection:
    """What arrives from one peer: messages one after the other, each a header and a body."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.connection = connection
        self.expected: deque[AllToAllWork] = deque()  # in the order in which the peer sends them
        self._peer = peer
        self._header = bytearray(HEADER.size)
        self._missing = memoryview(self._header)  # the part of a header or a body that has not arrived yet
        self._in_body = False

    def read(self) -> None:
        """Read all that has arrived and is expected. Does not block. Raises OSError."""
        while self.expected:
            while len(self._missing):
                try:
                    got = self.connection.recv_into(self._missing, len(self._missing), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                if not got:
                    raise ConnectionError("the other end is closed")
                self._missing = self._missing[got:]
            if self._in_body:
                self.expected.popleft().row_received()
                self._missing = memoryview(self._header)
            else:
                self._missing = self.expected[0].receive_buffer(self._peer, self._header)
            self._in_body = not self._in_body

    def set_low_watermark(self, num_bytes: int | None = None) -> None:
        """Wake a poll of this connection once ``num_bytes`` have arrived; None: the rest of the current message."""
        wanted = min(len(self._missing), WAKE_BYTES) if num_bytes is None else num_bytes
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)


class Receiver:
    """Reads all connections of a rank, in the caller's thread or in its own.

    ``on_failure`` is called with the error after which nothing more can be read, and returns its text for the works.
    ``on_end`` is called when the thread has ended, after ``close``.
    """

    def __init__(
        self, connections: Iterable[Connection], on_failure: Callable[[OSError], str], on_end: Callable[[], None]
    ) -> None:
        self._connections = list(connections)
        self._on_failure = on_failure
        self._on_end = on_end
        self.reading = threading.Lock()  # held by the thread that reads, or that sleeps until it can read
        self._unattended = threading.Event()  # set while no caller waits: the background thread reads
        self._closed = False
        threading.Thread(target=self._run, name="gradsync-receiver", daemon=True).start()

    def expect(self, work: AllToAllWork) -> None:
        """Append a work to what each connection expects: each peer's next message after those belongs to it."""
        for connection in self._connections:
            connection.expected.append(work)
        if not self._unattended.is_set():
            self._unattended.set()

    def close(self) -> None:
        """Let the thread end. The connections are shut down already, which wakes every poll of them."""
        self._closed = True
        self._unattended.set()

    def poll(self) -> None:
        if self.reading.acquire(blocking=False):
            try:
                self._read()
            finally:
                self.reading.release()

    def read_until_received(self, work: AllToAllWork) -> None:
        while work.is_receiving:
            if not self.reading.acquire(timeout=CHECK_INTERVAL_S):
                work.check()
                continue
            try:
                self._unattended.clear()
                self._read()
                while work.is_receiving:
                    if not self._poll_object(None).poll(CHECK_INTERVAL_S * 1e3):
                        work.check()
                    self._read()
            finally:
                self.reading.release()

    def _read(self) -> None:
        try:
            for connection in self._connections:
                connection.read()
        except OSError as error:
            reason = self._on_failure(error)
            for connection in self._connections:
                while connection.expected:
                    connection.expected.popleft().fail(reason)

    def _poll_object(self, num_bytes: int | None) -> select.poll:
        """A poll of all connections that expect a message; ``num_bytes``: see ``Connection.set_low_watermark``."""
        poll = select.poll()
        for connection in self._connections:
            if connection.expected:
                connection.set_low_watermark(num_bytes)
                poll.register(connection.connection, select.POLLIN)
        return poll

    def _expects(self) -> bool:
        return any(connection.expected for connection in self._connections)

    def _run(self) -> None:
        """See [Note: who reads]."""
        while not self._closed:
            self._unattended.wait(IDLE_S if self._expects() else None)
            if not self._expects():
                self._unattended.clear()
                if self._expects() or self._closed:  # it changed between the two
                    self._unattended.set()
                continue
            if not self.reading.acquire(blocking=False):  # a caller reads, and has set a lower watermark
                self._unattended.clear()
                continue
            try:
                poll = self._poll_object(WAKE_BYTES)
            finally:
                self.reading.release()
            if poll.poll(ROUND_S * 1e3):
                self.poll()
        self._on_end()
