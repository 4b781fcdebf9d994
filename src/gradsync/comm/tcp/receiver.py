"""The receiving side of a ``TcpMesh``: one ``Connection`` per peer and lane, and the ``Receiver`` that reads them all.

[Note: who reads] Each wake-up of a thread evicts what the backward on this core had in its caches: with a wake-up for
each packet, a step at 1 Gbit/s took a twentieth longer. So no thread wakes up for a message. It stays in the kernel's
receive buffer until a caller polls or waits for it; the caller then reads the socket itself. A background thread reads
only when the receive buffer fills up so far that the sender would soon have to stop, or when an exchange ``is_prompt``:
the peers wait for this rank's answer to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

from gradsync.comm.background import CHECK_INTERVAL_S
from gradsync.comm.tcp.exchange import HEADER, ExchangeWork

WAKE_BYTES = 4 << 20  # buffered bytes that wake the thread; the kernel wakes it for less if its buffer is smaller
IDLE_S = 0.02  # after which the thread takes over when a caller has stopped waiting with messages outstanding
ROUND_S = 0.2  # after which the thread looks again which connections expect something


class Connection:
    """What arrives from one peer in one lane: messages one after the other, each a header and a body."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.connection = connection
        self.expected: dict[int, ExchangeWork] = {}  # by sequence number
        self._peer = peer
        self._header = bytearray(HEADER.size)
        self._missing = memoryview(self._header)  # the part of a header or a body that has not arrived yet
        self._work: ExchangeWork | None = None  # whose body arrives; None: a header arrives
        self._arrived = 0  # bytes of that body

    def read(self) -> None:
        """Read all that has arrived and is expected. Does not block. Raises OSError."""
        while self.expected:
            work = self._work
            chunk_bytes = None if work is None else work.chunk_bytes
            while len(self._missing):
                part = self._missing
                if chunk_bytes is not None:
                    part = part[: chunk_bytes - self._arrived % chunk_bytes]
                try:
                    got = self.connection.recv_into(part, len(part), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                if not got:
                    raise ConnectionError("the other end is closed")
                self._missing = self._missing[got:]
                self._arrived += got
                if work is not None and chunk_bytes is not None and got == len(part):
                    work.chunk_received(self._peer, self._arrived)
            if work is None:
                self._work = self._find_work()
                self._missing = self._work.receive_buffer(self._peer, self._header)
                self._arrived = 0
            else:
                del self.expected[work.number]
                self._missing = memoryview(self._header)
                self._work = None
                work.message_received()

    def _find_work(self) -> ExchangeWork:
        number, size, _ = HEADER.unpack(self._header)
        work = self.expected.get(number)
        if work is None:
            raise ConnectionError(
                f"rank {self._peer} sends a message of {size:,} bytes in its exchange {number}; "
                f"here exchange {min(list(self.expected))} comes next"
            )
        return work

    def set_low_watermark(self, num_bytes: int | None = None) -> None:
        """Wake a poll of this connection once ``num_bytes`` have arrived; None: what the current message can use."""
        if num_bytes is None or any(work.is_prompt for work in list(self.expected.values())):
            chunk_bytes = WAKE_BYTES if self._work is None else self._work.chunk_bytes or WAKE_BYTES
            num_bytes = max(1, min(len(self._missing), chunk_bytes))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


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
        self._wake, self._waker = os.pipe()  # a byte ends every poll: what the connections expect has changed
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        weakref.finalize(self, _close_descriptors, self._wake, self._waker).atexit = False
        threading.Thread(target=self._run, name="gradsync-receiver", daemon=True).start()

    def expect(self, work: ExchangeWork, connections: Sequence[Connection]) -> None:
        """Expect a message of a work on each of these connections."""
        for connection in connections:
            connection.expected[work.number] = work
        if not self._unattended.is_set():
            self._unattended.set()
        if work.is_prompt:
            with contextlib.suppress(BlockingIOError):  # full: it is awake soon anyway
                os.write(self._waker, b"\0")

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

    def read_until_received(self, work: ExchangeWork) -> None:
        while work.is_receiving:
            if not self.reading.acquire(timeout=CHECK_INTERVAL_S):
                work.check()
                continue
            try:
                self._unattended.clear()
                self._read()
                while work.is_receiving:
                    if not self._sleep(self._poll_object(None), CHECK_INTERVAL_S):
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
                    connection.expected.popitem()[1].fail(reason)

    def _poll_object(self, num_bytes: int | None) -> select.poll:
        """A poll of all connections that expect a message; ``num_bytes``: see ``Connection.set_low_watermark``."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for connection in self._connections:
            if connection.expected:
                connection.set_low_watermark(num_bytes)
                poll.register(connection.connection, select.POLLIN)
        return poll

    def _sleep(self, poll: select.poll, seconds: float) -> bool:
        """Sleep until a connection can be read or what they expect has changed; False: for all these seconds."""
        ready = poll.poll(seconds * 1e3)
        if any(descriptor == self._wake for descriptor, _ in ready):
            with contextlib.suppress(BlockingIOError):  # another thread has been woken by it too
                os.read(self._wake, 4096)
        return bool(ready)

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
            if self._sleep(poll, ROUND_S):
                self.poll()
        self._on_end()


def _close_descriptors(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
