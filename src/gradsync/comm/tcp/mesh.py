"""``TcpMesh``: a TCP connection between every two ranks of a group, for the c10d transport's all-to-all of CPU tensors.

[Note: why not Gloo] Gloo's loop thread spins while another thread of the process holds a connection, as a sending
thread does, and each Gloo message needs a thread that blocks for it (see c10d/p2p.py). Beside a backward that needs
the same core, that took a tenth of a step. Here the caller hands the kernel as much as it takes at once, and one thread
for all peers sends the rest; it blocks in the kernel, without Python's lock. receiver.py reads what arrives.

[Note: one order] Messages between two ranks are identified by their order only. All ranks start the same exchanges in
the same order, and in each exchange send to their peers in one order: to rank + 1 first, then rank + 2. So no circle of
ranks can wait for each other.
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

from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.tcp.all_to_all import AllToAllWork
from gradsync.comm.tcp.receiver import Connection, Receiver


class TcpMesh:
    """This rank's connections to all other ranks of its group."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], guard: CollectiveGuard) -> None:
        for connection in connections.values():
            connection.settimeout(None)  # the wait for a work has a timeout; close() wakes the threads
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        n = len(connections) + 1
        self._to = [(peer, connections[peer]) for peer in ((rank + step) % n for step in range(1, n))]
        self._guard = guard
        self._number = 0
        self._lock = threading.Lock()
        self._unsent = 0  # exchanges that the sending thread has not finished sending
        self._outgoing: queue.SimpleQueue[tuple[AllToAllWork, Iterator[None]] | None] = queue.SimpleQueue()
        self._error = ""
        self._threads = 2  # that use the connections
        self._receiver = Receiver([Connection(*peer) for peer in self._to], self._fail_to_receive, self._thread_ended)
        threading.Thread(target=self._send, name="gradsync-sender", daemon=True).start()
        _open_meshes.add(self)

    def exchange(self, tensor: Tensor, out: Tensor, used: Sequence[int] | None, call: Call) -> AllToAllWork:
        """Send row i of ``tensor`` to rank i, and fill row j of ``out`` from rank j; without this rank's own rows.

        Each row of ``tensor`` is contiguous, and so is ``out`` as a whole. All rows of ``tensor`` may be the same
        memory (``expand``). ``used``: how many bytes of each row are sent; None: all.
        """
        with self._lock:
            self._number += 1
            receiver = self._receiver
            work = AllToAllWork(
                self._number,
                tensor,
                out,
                used,
                num_peers=len(self._to),
                reader=receiver,
                guard=self._guard,
                call=call,
            )
            if self._error:
                work.fail(self._error)
                return work
            receiver.expect(work)
            sending = self._send_parts(work)
            if self._unsent or not self._send_at_once(work, sending):
                self._unsent += 1
                self._outgoing.put((work, sending))
        return work

    def close(self) -> None:
        """Close the connections. Does not wait for exchanges under way. Safe to call twice."""
        for _, connection in self._to:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the threads
        self._outgoing.put(None)
        self._receiver.close()
        _open_meshes.discard(self)

    def _thread_ended(self) -> None:
        """Called by each thread at its end; the last one closes the connections."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
        with self._receiver.reading:  # a caller that waits in poll() sees that they are shut down, and returns
            for _, connection in self._to:
                connection.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def _send_parts(self, work: AllToAllWork) -> Iterator[None]:
        """Send to one peer after the other; yields when the kernel takes no more. When resumed, it blocks."""
        for peer, connection in self._to:
            rest = work.message_to(peer)
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

    def _send_at_once(self, work: AllToAllWork, sending: Iterator[None]) -> bool:
        """Send without blocking; False if the kernel did not take everything."""
        try:
            for _ in sending:
                return False
        except OSError as error:
            self._fail_to_send(work, error)
        work.part_done()
        return True

    def _send(self) -> None:
        while (task := self._outgoing.get()) is not None:
            work, sending = task
            try:
                if self._error:
                    raise ConnectionError(self._error)
                for _ in sending:
                    pass
            except OSError as error:
                self._fail_to_send(work, error)
            work.part_done()
            with self._lock:
                self._unsent -= 1
        self._thread_ended()

    # -- failures: nothing can follow, as the ranks no longer agree on how far the messages have come ----------------

    def _fail_to_send(self, work: AllToAllWork, error: OSError) -> None:
        self._error = self._error or f"sending failed: {error}"
        work.fail(self._error)

    def _fail_to_receive(self, error: OSError) -> str:
        self._error = self._error or f"receiving failed: {error}"
        return self._error


_open_meshes: weakref.WeakSet[TcpMesh] = weakref.WeakSet()


def _forget_connections() -> None:
    """In a forked child (a DataLoader's worker), which would keep them open after its parent has died."""
    for mesh in list(_open_meshes):
        for _, connection in mesh._to:
            connection.close()


os.register_at_fork(after_in_child=_forget_connections)
