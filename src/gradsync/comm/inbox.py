"""What comes in from the other ranks of a group: read by who needs it, and by a thread where nobody does.

[Note: who reads] Whenever a thread wakes up, what the backward on this core had in its caches goes: with a wake-up for
each packet a step at 1 Gbit/s took a twentieth longer. So nobody wakes up for a message. It stays with the kernel until
a rank asks for it or waits for it, and reads it then itself. A thread of ours sleeps beside, until so much has gathered
that the kernel would soon have no room for more and the sender would have to stop.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

from gradsync.comm.letters import LOOK_S
from gradsync.comm.parcels import HEAD, Parcel

GATHERED_BYTES = 4 << 20  # that wake the thread; the kernel wakes it for less if it has no room for so much
LEFT_ALONE_S = 0.02  # after which the thread sees to what somebody has waited for and did not take
ROUND_S = 0.2  # after which it looks again which lines there are to see to


class Line:
    """What comes from one peer: messages one after the other, each a head and a body."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.connection = connection
        self.expected: deque[Parcel] = deque()  # in the order in which the peer sends them
        self._peer = peer
        self._head = bytearray(HEAD.size)
        self._room = memoryview(self._head)  # what of a head or a body is still to come
        self._in_body = False

    def read(self) -> None:
        """Take all that is there and expected. Does not block. Raises OSError."""
        while self.expected:
            while len(self._room):
                try:
                    got = self.connection.recv_into(self._room, len(self._room), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                if not got:
                    raise ConnectionError("the other end is closed")
                self._room = self._room[got:]
            if self._in_body:
                self.expected.popleft().arrived()
                self._room = memoryview(self._head)
            else:
                self._room = self.expected[0].room_for(self._peer, self._head)
            self._in_body = not self._in_body

    def let_gather(self, num_bytes: int | None = None) -> None:
        """Have who polls woken when there is so much; None: all that is still to come of a message."""
        wanted = min(len(self._room), GATHERED_BYTES) if num_bytes is None else num_bytes
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)


class Inbox:
    """All lines of a rank, and the thread beside. ``on_failure`` is told why nothing more can come.

    ``on_end`` is called when the thread has ended, which ``close`` brings about.
    """

    def __init__(self, lines: Iterable[Line], on_failure: Callable[[OSError], str], on_end: Callable[[], None]) -> None:
        self._lines = list(lines)
        self._on_failure = on_failure
        self._on_end = on_end
        self.reading = threading.Lock()  # held by who reads, and by who sleeps until there is something to read
        self._unattended = threading.Event()  # nobody waits: the thread is on duty
        self._closed = False
        threading.Thread(target=self._keep, name="gradsync-inbox", daemon=True).start()

    def expect(self, parcel: Parcel) -> None:
        """Let each peer's next message but those expected already be this parcel's."""
        for line in self._lines:
            line.expected.append(parcel)
        if not self._unattended.is_set():
            self._unattended.set()

    def close(self) -> None:
        """The connections are shut down, so nobody sleeps on: let the thread end."""
        self._closed = True
        self._unattended.set()

    def look(self) -> None:
        if self.reading.acquire(blocking=False):
            try:
                self._read()
            finally:
                self.reading.release()

    def attend(self, parcel: Parcel) -> None:
        while parcel.is_awaited:
            if not self.reading.acquire(timeout=LOOK_S):
                parcel.check()
                continue
            try:
                self._unattended.clear()
                self._read()
                while parcel.is_awaited:
                    if not self._polling(None).poll(LOOK_S * 1e3):
                        parcel.check()
                    self._read()
            finally:
                self.reading.release()

    def _read(self) -> None:
        try:
            for line in self._lines:
                line.read()
        except OSError as error:
            said = self._on_failure(error)
            for line in self._lines:
                while line.expected:
                    line.expected.popleft().fail(said)

    def _polling(self, num_bytes: int | None) -> select.poll:
        """What blocks until a line that expects something has so much of it: see ``Line.let_gather``."""
        poll = select.poll()
        for line in self._lines:
            if line.expected:
                line.let_gather(num_bytes)
                poll.register(line.connection, select.POLLIN)
        return poll

    def _expects(self) -> bool:
        return any(line.expected for line in self._lines)

    def _keep(self) -> None:
        """See [Note: who reads]."""
        while not self._closed:
            self._unattended.wait(LEFT_ALONE_S if self._expects() else None)
            if not self._expects():
                self._unattended.clear()
                if self._expects() or self._closed:  # since it was asked
                    self._unattended.set()
                continue
            if not self.reading.acquire(blocking=False):  # somebody attends, and is to be woken for less
                self._unattended.clear()
                continue
            try:
                polling = self._polling(GATHERED_BYTES)
            finally:
                self.reading.release()
            if polling.poll(ROUND_S * 1e3):
                self.look()
        self._on_end()
