"""``TcpMesh``: TCP connections between every two ranks of a group, for exchanges of CPU tensors (exchange.py).

[Note: why not Gloo] Gloo's loop thread spins while another thread of the process holds a connection, as a sending
thread does, and each Gloo message needs a thread that blocks for it (see c10d/p2p.py). Beside a backward that needs
the same core, that took a tenth of a step. Here the caller hands the kernel as much as it takes at once, and one thread
for all peers sends the rest; it blocks in the kernel, without Python's lock. receiver.py reads what arrives.

[Note: two lanes] Every call of a collective has a sequence number, the same on all ranks. Its messages go in the lane
for *calls*, in the order of the calls, and to the peers in one order: to rank + 1 first, then rank + 2. So no circle of
ranks can wait for each other. An all-reduce of several ranks has a second exchange, which each rank starts when it has
summed its slice: at no fixed place between the calls. Those messages go in a second lane, of connections and a thread
of its own, for *replies*. A peer sends a reply only after it has this rank's call, so a reply is always expected, and
can be read whatever the lane of calls waits for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradsync.comm import hugepages
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.tcp.exchange import AllToAllWork, ExchangeContext, ExchangeWork
from gradsync.comm.tcp.receiver import Connection, Receiver


class Lane:
    """A connection to every peer for one kind of messages, and the thread that sends what the kernel won't take yet."""

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], failure: Failure, name: str) -> None:
        for connection in connections.values():
            connection.settimeout(None)  # the wait for a work has a timeout; close() wakes the threads
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        n = len(connections) + 1
        self.sockets = [(peer, connections[peer]) for peer in ((rank + step) % n for step in range(1, n))]
        self.connections = [Connection(*peer) for peer in self.sockets]
        self._failure = failure
        self._lock = threading.Lock()
        self._unsent = 0  # exchanges that the thread has not finished sending
        self._outgoing: queue.SimpleQueue[tuple[ExchangeWork, Iterator[None]] | None] = queue.SimpleQueue()
        self._name = name

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the sending thread; ``on_end`` is called when it has ended, after ``close``."""
        threading.Thread(target=self._run, args=(on_end,), name=self._name, daemon=True).start()

    def send(self, work: ExchangeWork) -> None:
        """Send the messages of an exchange after those of earlier ones. Does not block."""
        with self._lock:
            sending = self._send_parts(work)
            if self._unsent or not self._send_at_once(work, sending):
                self._unsent += 1
                self._outgoing.put((work, sending))

    def close(self) -> None:
        """Shut the connections down, which wakes every thread that waits for one."""
        for _, connection in self.sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(None)

    def _send_parts(self, work: ExchangeWork) -> Iterator[None]:
        """Send to one peer after the other; yields when the kernel takes no more. When resumed, it blocks."""
        for peer, connection in self.sockets:
            rest = work.message_to(peer)
            body_bytes = len(rest[1])
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
                if len(rest) < 2:
                    work.chunk_sent(peer, body_bytes - (len(rest[0]) if rest else 0))

    def _send_at_once(self, work: ExchangeWork, sending: Iterator[None]) -> bool:
        """Send without blocking; False if the kernel did not take everything."""
        try:
            for _ in sending:
                return False
        except OSError as error:
            work.fail(self._failure.of_sending(error))
        work.all_sent()
        return True

    def _run(self, on_end: Callable[[], None]) -> None:
        while (task := self._outgoing.get()) is not None:
            work, sending = task
            try:
                if self._failure.text:
                    raise ConnectionError(self._failure.text)
                for _ in sending:
                    pass
            except OSError as error:
                work.fail(self._failure.of_sending(error))
            work.all_sent()
            with self._lock:
                self._unsent -= 1
        on_end()


class Failure:
    """The first error of a mesh. Nothing can follow: the ranks no longer agree on how far the messages have come."""

    text = ""

    def of_sending(self, error: OSError) -> str:
        """Record an error of a sending thread; returns the first error."""
        self.text = self.text or f"sending failed: {error}"
        return self.text

    def of_receiving(self, error: OSError) -> str:
        """Record an error of the receiver; returns the first error."""
        self.text = self.text or f"receiving failed: {error}"
        return self.text


class TcpMesh:
    """This rank's connections to all other ranks of its group.

    ``replies``: connections for the second exchange of collectives that have two; see [Note: two lanes].
    """

    def __init__(
        self,
        rank: int,
        calls: Mapping[int, socket.socket],
        guard: CollectiveGuard,
        *,
        replies: Mapping[int, socket.socket] | None = None,
    ) -> None:
        self.failure = Failure()
        self.calls = Lane(rank, calls, self.failure, "gradsync-sender")
        self.replies = None if replies is None else Lane(rank, replies, self.failure, "gradsync-replies")
        self.lanes = [lane for lane in (self.calls, self.replies) if lane is not None]
        self.staging = StagingPool()
        self._guard = guard
        self._number = 0
        self._lock = threading.Lock()
        self._threads = 1 + len(self.lanes)  # that use the connections
        connections = [connection for lane in self.lanes for connection in lane.connections]
        self.receiver = Receiver(connections, self.failure.of_receiving, self._thread_ended)
        for lane in self.lanes:
            lane.start(self._thread_ended)
        _open_meshes.add(self)

    def exchange(self, tensor: Tensor, out: Tensor, used: Sequence[int] | None, call: Call) -> ExchangeWork:
        """Send row i of ``tensor`` to rank i, and fill row j of ``out`` from rank j; without this rank's own rows.

        Each row of ``tensor`` is contiguous, and so is ``out`` as a whole. All rows of ``tensor`` may be the same
        memory (``expand``). ``used``: how many bytes of each row are sent; None: all.
        """
        return self.start(lambda context: AllToAllWork(context, tensor, out, used), call)

    def start(
        self,
        make: Callable[[ExchangeContext], ExchangeWork],
        call: Call,
        make_reply: Callable[[ExchangeContext], ExchangeWork] | None = None,
    ) -> ExchangeWork:
        """Start the exchange of a call. ``make_reply``: the second exchange, which the first one sends when it can.

        The messages of both are expected from now on.
        """
        with self._lock:  # the order of sending is that of the numbers
            self._number += 1
            context = ExchangeContext(self._number, len(self.calls.sockets), self.receiver, self._guard, call)
            work = make(context)
            reply = None if make_reply is None else make_reply(context)
            if self.failure.text:
                for each in (work, reply):
                    if each is not None:
                        each.fail(self.failure.text)
                return work
            if reply is not None:
                assert self.replies is not None, "a collective of two exchanges needs a lane for the second"
                self.receiver.expect(reply, self.replies.connections)
            self.receiver.expect(work, self.calls.connections)
            self.calls.send(work)
        return work

    def close(self) -> None:
        """Close the connections. Does not wait for exchanges under way. Safe to call twice."""
        for lane in self.lanes:
            lane.close()
        self.receiver.close()
        _open_meshes.discard(self)

    def _thread_ended(self) -> None:
        """Called by each thread at its end; the last one closes the connections."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
        with self.receiver.reading:  # a caller that waits in poll() sees that they are shut down, and returns
            self.close_sockets()

    def close_sockets(self) -> None:
        """Close this process's descriptors of the connections."""
        for lane in self.lanes:
            for _, connection in lane.sockets:
                connection.close()


class StagingPool:
    """Memory for messages that are summed when they arrive. Later messages reuse it, so it stays in the cache."""

    MAX_FREE = 4  # buffers that are kept
    MAX_FREE_BYTES = 64 << 20  # of each of them: the staging of a larger tensor is freed after its sum

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least so many bytes, for one message."""
        with self._lock:
            large = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
            if large:
                best = min(large, key=Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
        return hugepages.zeros(num_bytes, torch.uint8, torch.device("cpu"))

    def give_back(self, buffer: Tensor) -> None:
        """The message was summed."""
        if buffer.numel() > self.MAX_FREE_BYTES:
            return
        with self._lock:
            self._free = sorted([*self._free, buffer], key=Tensor.numel)[-self.MAX_FREE :]


_open_meshes: weakref.WeakSet[TcpMesh] = weakref.WeakSet()


def _forget_connections() -> None:
    """In a forked child (a DataLoader's worker), which would keep them open after its parent has died."""
    for mesh in list(_open_meshes):
        mesh.close_sockets()


os.register_at_fork(after_in_child=_forget_connections)
