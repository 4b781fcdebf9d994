"""The heartbeat: a TCP connection from every rank to rank 0, beside the data, that finds dead and frozen ranks.

When a rank dies, Gloo fails on its neighbours only, and does not say which rank it was. Here each rank holds one TCP
connection to rank 0 (the hub). When a process dies, the kernel closes its end at once, the hub tells all ranks, and
every rank that waits in a collective raises ``PeerLost`` with the dead rank's number. A rank that stops without dying
(a frozen host, SIGSTOP) misses its beats.

The messages are lines of JSON: ``beat``; ``bye`` (this rank left in order, with its progress); ``lost`` (ranks that
some rank has given up, each with the reason); ``ask`` and ``progress`` (how far is every rank?, after a collective has
timed out). The hub relays them. A connection's messages are read only after its handshake: see handshake.py.

[Note: the first verdict stands] The first rank to time out raises and exits, so the next rank would take *it* for dead.
Hence a rank sends its verdict (which rank is lost, and why) to all others before it raises, and every rank reports the
first verdict that it receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradsync.comm.tcp.handshake import Acceptor, connect_to, listen, new_secret

HUB = 0
MAX_LINE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 30.0
END_S = 2.0  # how long close() waits for the thread, which may be sending to a rank that does not read


class Store(Protocol):
    """What the heartbeat needs of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


@dataclass
class Progress:
    """How far a rank has come: the number and name of the last collective of each group, and a note for errors."""

    groups: dict[str, list[Any]] = field(default_factory=dict)
    note: str = ""  # such as "step 12": see Communicator.note
    step: int | None = None

    def position_in(self, group: str) -> list[Any]:
        """This rank's position in a group: [number, name], for the caller to update. A list: it is updated often."""
        return self.groups.setdefault(group, [0, "no collective of this group yet"])

    def as_json(self) -> dict[str, Any]:
        return {"groups": dict(self.groups), "note": self.note, "step": self.step}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Progress:
        groups = {str(key): [int(count), str(what)] for key, (count, what) in value["groups"].items()}
        return Progress(groups, str(value["note"]), value["step"])


class Heartbeat:
    """One rank's end of the heartbeat connection. A daemon thread reads and writes it.

    The constructor blocks until rank 0 answers, at most ``connect_timeout_s``; no method blocks for longer than
    ``ask_progress`` does, about a second.

    ``loss_ends_all``: a lost rank ends the collectives of all groups, also of those that it is not in. So it is in an
    elastic run: the survivors discard the step, and none of them may wait for one that has already done so.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        addresses: Iterable[str],
        timeout_s: float,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        loss_ends_all: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.loss_ends_all = loss_ends_all
        self.progress = Progress()
        self.lost: dict[int, str] = {}  # rank -> reason; the first verdict's ranks come first
        self.left: dict[int, Progress] = {}  # rank -> its progress when it left in order
        self.before_leaving: list[weakref.WeakMethod[Callable[[], None]]] = []  # called once, by close()
        self._answers: dict[int, Progress] = {}
        self._beat_s = min(timeout_s / 4, 5.0)
        self._lock = threading.Lock()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()  # close() wakes the thread
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._peers: dict[int, _JsonConnection] = {}  # on the hub: every other rank; elsewhere: the hub
        self._acceptor: Acceptor | None = None
        if rank == HUB:
            hosts = [*addresses] or [socket.gethostname(), "127.0.0.1"]
            secret = new_secret()
            listener = listen(hosts, backlog=max(128, world_size))
            endpoint = {"port": listener.getsockname()[1], "hosts": hosts, "secret": secret}
            self._acceptor = Acceptor(listener, secret.encode(), range(1, world_size))
            self._selector.register(self._acceptor, selectors.EVENT_READ, None)
            store.set("heartbeat", json.dumps(endpoint))
        else:
            try:
                endpoint = json.loads(store.get("heartbeat"))
                self._add(_JsonConnection(HUB, _connect_to_hub(endpoint, rank, connect_timeout_s)))
            except BaseException:
                self._close_connections()
                raise
        self._thread = threading.Thread(target=self._run, name="gradsync-heartbeat", daemon=True)
        self._thread.start()
        _open_heartbeats.add(self)

    # -- called by communicators and their guards ----------------------------------------------------------------

    def declare_lost(self, ranks: Iterable[int], reason: str) -> None:
        """Tell all ranks that these are lost; see [Note: the first verdict stands]."""
        verdict = {rank: reason for rank in ranks if rank not in self.lost}
        if verdict:
            self._record_lost(verdict)
            self._send_to_all({"lost": verdict})

    def ask_progress(self, *, timeout_s: float = 1.0) -> dict[int, Progress]:
        """Every rank's progress. Blocks, at most ``timeout_s``; a rank that did not answer by then is left out."""
        self._answers = {self.rank: self.progress, **self.left}
        self._send_to_all({"ask": self.rank})
        end = time.monotonic() + timeout_s
        while len(self._answers) < self.world_size and time.monotonic() < end:
            time.sleep(0.01)
        return dict(self._answers)

    def close(self, failure: str = "") -> None:
        """Leave in order, so that the other ranks do not take this one for dead. ``failure``: why it ends early.

        Its thread has ended when this returns. In an elastic run, collectives that other threads still wait for raise.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for reference in self.before_leaving:
            if (callback := reference()) is not None:
                callback()
        self._send_to_all({"bye": self.progress.as_json(), "rank": self.rank, "failure": failure})
        if self.loss_ends_all:
            self.left[self.rank] = self.progress
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        self._close_connections()
        _open_heartbeats.discard(self)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            limit_s = self._beat_s / 2
            if self._acceptor is not None:
                limit_s = min(limit_s, self._acceptor.max_idle_s)
            try:
                events = self._selector.select(timeout=limit_s)
            except (OSError, ValueError):  # closed, in a forked child
                return
            if self._closed:
                return
            for key, _ in events:
                if key.data is not None:
                    self._read(key.data)
            if self._acceptor is not None and not self._closed:
                for rank, connection in self._acceptor.accept():
                    self._add_rank(_JsonConnection(rank, connection))
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat_s
                for peer in list(self._peers.values()):
                    peer.send({"beat": self.rank})
            for peer in list(self._peers.values()):
                if now - peer.heard_at > self.timeout_s:
                    reason = f"no sign of life for {self.timeout_s:.0f} s (frozen, or its host is gone)"
                    self._lose(peer.rank, reason)

    def _read(self, peer: _JsonConnection) -> None:
        messages = peer.receive()
        try:
            for message in messages or ():
                self._handle(peer, message)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._lose(peer.rank, "it sent a malformed message (another version of gradsync?)")
            return
        if messages is None and not self._closed and self._peers.get(peer.rank) is peer:
            self._lose(peer.rank, "its process is gone")

    def _add_rank(self, peer: _JsonConnection) -> None:
        earlier = self._peers.get(peer.rank)
        if earlier is not None:  # it has connected again, because the answer to its first attempt came too late
            self._drop(earlier)
        self._add(peer)
        if self.lost:
            peer.send({"lost": self.lost})

    def _handle(self, peer: _JsonConnection, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._record_lost({int(rank): str(reason) for rank, reason in message["lost"].items()})
        elif "bye" in message:
            self._record_left(int(message["rank"]), Progress.from_json(message["bye"]), str(message["failure"]))
        elif "ask" in message:
            peer.send({"progress": self.progress.as_json(), "rank": self.rank, "to": message["ask"]})
        elif "progress" in message and message["to"] == self.rank:
            self._answers[int(message["rank"])] = Progress.from_json(message["progress"])
        if self.rank == HUB and "beat" not in message:
            self._relay(peer.rank, message)

    def _relay(self, origin: int, message: dict[str, Any]) -> None:
        if "progress" in message:
            targets = [message["to"]]
        else:
            targets = [rank for rank in self._peers if rank != origin]
        for rank in targets:
            if rank in self._peers:
                self._peers[rank].send(message)

    def _record_lost(self, verdict: dict[int, str]) -> None:
        with self._lock:
            for rank, reason in verdict.items():
                self.lost.setdefault(rank, reason)

    def _record_left(self, rank: int, progress: Progress, failure: str) -> None:
        self.left[rank] = progress
        if failure:
            self._record_lost({rank: failure})
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._drop(peer)

    def _lose(self, rank: int, reason: str) -> None:
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._drop(peer)
        self._record_lost({rank: reason})
        self._send_to_all({"lost": {rank: reason}})

    # -- connections ---------------------------------------------------------------------------------------------

    def _send_to_all(self, message: dict[str, Any]) -> None:
        """Send to every connected peer: the hub sends to all ranks, every other rank to the hub, which relays it."""
        for peer in list(self._peers.values()):
            peer.send(message)

    def _add(self, peer: _JsonConnection) -> None:
        self._peers[peer.rank] = peer
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _drop(self, peer: _JsonConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _close_connections(self) -> None:
        for peer in list(self._peers.values()):
            peer.connection.close()
        if self._acceptor is not None:
            self._acceptor.close()
        self._selector.close()
        self._wake.close()
        self._waker.close()


class _JsonConnection:
    """A connection to one rank that carries lines of JSON."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.heard_at = time.monotonic()
        self._pending = b""
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(1.0)  # a peer that does not read must not block this thread

    def send(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # receive() finds that the connection is closed, and the reader reports it

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived; None when the connection is closed, or something else than JSON arrived."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data or len(self._pending) > MAX_LINE_BYTES:
            return None
        self.heard_at = time.monotonic()
        *lines, self._pending = (self._pending + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


def _connect_to_hub(endpoint: dict[str, Any], rank: int, timeout_s: float) -> socket.socket:
    """Connect to the hub at the first of its addresses that answers."""
    hosts, port, secret = list(dict.fromkeys(endpoint["hosts"])), endpoint["port"], endpoint["secret"].encode()
    end = time.monotonic() + timeout_s
    error: OSError | None = None
    while time.monotonic() < end:
        for host in hosts:
            try:
                return connect_to(host, port, secret, rank)
            except OSError as failed:
                error = failed
        time.sleep(0.1)
    raise ConnectionError(f"rank 0's heartbeat did not answer at {hosts} port {port} in {timeout_s} s: {error}")


_open_heartbeats: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _close_in_child() -> None:
    """In a forked child (a DataLoader's worker), which would keep the connections open after its parent has died."""
    for heartbeat in list(_open_heartbeats):
        heartbeat._closed = True
        heartbeat._close_connections()


os.register_at_fork(after_in_child=_close_in_child)
