"""Who is alive: a thin line from every rank to rank 0, beside the data, that names the dead.

Gloo tells only a dead rank's neighbours, and names nobody. Here each rank holds one TCP connection to rank 0 (the hub).
When a process dies the kernel closes its end at once, the hub tells everyone, and whoever waits in a collective raises
``PeerLost`` with the right name. A rank that stops without dying (a frozen host, SIGSTOP) misses its beats.

The messages are lines of JSON: ``beat``, ``bye`` (left in order, with how far it had come), ``lost`` (somebody's
verdict), ``ask``/``tell``/``told`` (where is everyone?, when a collective has timed out).

[Note: the first verdict stands] The first rank to time out raises and exits, so to the next one *it* looks dead. Hence
a rank spreads its verdict before it raises, and the first verdict that a rank hears is the one it reports.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

HUB = 0
MAX_LINE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 30.0


class Store(Protocol):
    """What the lifeline needs of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


@dataclass
class Whereabouts:
    """How far a rank has come: the number and name of the last collective of each group, and a word of its own."""

    groups: dict[str, list[Any]] = field(default_factory=dict)
    note: str = ""
    step: int | None = None

    def enter(self, group: str) -> list[Any]:
        """Where to write how far this rank is in a group: [number, name]. A plain list: it is written very often."""
        return self.groups.setdefault(group, [0, "no collective of this group yet"])

    def as_json(self) -> dict[str, Any]:
        return {"groups": dict(self.groups), "note": self.note, "step": self.step}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Whereabouts:
        groups = {str(key): [int(count), str(what)] for key, (count, what) in value["groups"].items()}
        return Whereabouts(groups, str(value["note"]), value["step"])


class Lifeline:
    """One rank's end of the line. A daemon thread reads and writes it; nothing here blocks the caller for long."""

    def __init__(self, rank: int, world_size: int, store: Store, *, addresses: Iterable[str], timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.here = Whereabouts()
        self.lost: dict[int, str] = {}  # rank -> reason; the first verdict's ranks come first
        self.left: dict[int, Whereabouts] = {}  # rank -> how far it had come when it left in order
        self.before_leaving: list[weakref.WeakMethod[Callable[[], None]]] = []  # called once, to set things right
        self._answers: dict[int, Whereabouts] = {}
        self._beat_s = min(timeout_s / 4, 5.0)
        self._lock = threading.Lock()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Line] = {}  # the hub: every rank; a rank: the hub
        self._listener: socket.socket | None = None
        if rank == HUB:
            token = secrets.token_hex(16)
            self._token = token
            self._listener = socket.create_server(("", 0), backlog=max(128, world_size))
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            hosts = [*addresses] or [socket.gethostname(), "127.0.0.1"]
            store.set("lifeline", json.dumps({"port": self._listener.getsockname()[1], "hosts": hosts, "token": token}))
        else:
            meet = json.loads(store.get("lifeline"))
            line = _Line(HUB, _connect(meet["hosts"], meet["port"]))
            line.send({"hello": rank, "token": meet["token"]})
            self._add(line)
        self._thread = threading.Thread(target=self._run, name="gradsync-lifeline", daemon=True)
        self._thread.start()
        # A forked child (a DataLoader worker) would hold the connection open after this process is dead.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(reference))

    # -- asked by the communicators ------------------------------------------------------------------------------

    def declare_lost(self, ranks: Iterable[int], reason: str) -> None:
        """Spread this rank's verdict; see [Note: the first verdict stands]."""
        verdict = {rank: reason for rank in ranks if rank not in self.lost}
        if verdict:
            self._hear_lost(verdict)
            self._spread({"lost": verdict})

    def ask_whereabouts(self, *, patience_s: float = 1.0) -> dict[int, Whereabouts]:
        """Where every rank is; a rank that is missing in the answer did not answer."""
        self._answers = {self.rank: self.here, **self.left}
        self._spread({"ask": self.rank})
        end = time.monotonic() + patience_s
        while len(self._answers) < self.world_size and time.monotonic() < end:
            time.sleep(0.01)
        return dict(self._answers)

    def close(self, failure: str = "") -> None:
        """Leave in order (or say why not), so that the others do not take it for a death."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for reference in self.before_leaving:
            if (tell := reference()) is not None:
                tell()
        self._spread({"bye": self.here.as_json(), "rank": self.rank, "failure": failure})
        self._selector_close()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._closed:
            try:
                events = self._selector.select(timeout=self._beat_s / 2)
            except (OSError, ValueError):  # closed under our feet by close()
                return
            for key, _ in events:
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._beat_s
                for line in list(self._peers.values()):
                    line.send({"beat": self.rank})
            for line in list(self._peers.values()):
                if now - line.heard_at > self.timeout_s:
                    self._lose(line.rank, f"no sign of life for {self.timeout_s:.0f} s (frozen, or its host is gone)")

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        self._selector.register(connection, selectors.EVENT_READ, _Line(-1, connection))

    def _read(self, line: _Line) -> None:
        messages = line.receive()
        for message in messages or ():
            if line.rank < 0:
                self._welcome(line, message)
            else:
                self._hear(line, message)
        if messages is None and not self._closed:
            if line.rank < 0:
                self._drop(line)
            else:
                self._lose(line.rank, "its process is gone")

    def _welcome(self, line: _Line, message: dict[str, Any]) -> None:
        rank, token = message.get("hello"), str(message.get("token", ""))
        if not hmac.compare_digest(token, self._token) or not isinstance(rank, int) or not 0 < rank < self.world_size:
            self._drop(line)  # a stranger: somebody scans ports
            return
        line.rank = rank
        self._peers[rank] = line
        if self.lost:
            line.send({"lost": self.lost})

    def _hear(self, line: _Line, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._hear_lost({int(rank): str(reason) for rank, reason in message["lost"].items()})
        elif "bye" in message:
            self._hear_bye(int(message["rank"]), Whereabouts.from_json(message["bye"]), str(message["failure"]))
        elif "ask" in message:
            line.send({"told": self.here.as_json(), "rank": self.rank, "to": message["ask"]})
        elif "told" in message and message["to"] == self.rank:
            self._answers[int(message["rank"])] = Whereabouts.from_json(message["told"])
        if self.rank == HUB and "beat" not in message:
            self._relay(line.rank, message)

    def _relay(self, origin: int, message: dict[str, Any]) -> None:
        if "told" in message:
            targets = [message["to"]]
        else:
            targets = [rank for rank in self._peers if rank != origin]
        for rank in targets:
            if rank in self._peers:
                self._peers[rank].send(message)

    def _hear_lost(self, verdict: dict[int, str]) -> None:
        with self._lock:
            for rank, reason in verdict.items():
                self.lost.setdefault(rank, reason)

    def _hear_bye(self, rank: int, whereabouts: Whereabouts, failure: str) -> None:
        self.left[rank] = whereabouts
        if failure:
            self._hear_lost({rank: failure})
        line = self._peers.pop(rank, None)
        if line is not None:
            self._drop(line)

    def _lose(self, rank: int, reason: str) -> None:
        line = self._peers.pop(rank, None)
        if line is not None:
            self._drop(line)
        self._hear_lost({rank: reason})
        self._spread({"lost": {rank: reason}})

    # -- the wire ------------------------------------------------------------------------------------------------

    def _spread(self, message: dict[str, Any]) -> None:
        for line in list(self._peers.values()):
            line.send(message)

    def _add(self, line: _Line) -> None:
        self._peers[line.rank] = line
        self._selector.register(line.connection, selectors.EVENT_READ, line)

    def _drop(self, line: _Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.connection.close()

    def _selector_close(self) -> None:
        for line in list(self._peers.values()):
            line.connection.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


class _Line:
    """A connection that carries lines of JSON."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank  # -1 until the other side has said who it is
        self.connection = connection
        self.heard_at = time.monotonic()
        self._pending = b""
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(1.0)  # a peer that does not read is not waited for

    def send(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # its end is found by receive(), which knows whose it is

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None at the end of the line or after nonsense."""
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
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None


def _connect(hosts: list[str], port: int) -> socket.socket:
    """Connect to the hub at the first of its addresses that answers."""
    end = time.monotonic() + CONNECT_TIMEOUT_S
    error: OSError | None = None
    while time.monotonic() < end:
        for host in dict.fromkeys(hosts):
            try:
                return socket.create_connection((host, port), timeout=5.0)
            except OSError as failed:
                error = failed
        time.sleep(0.1)
    raise ConnectionError(f"rank 0's lifeline did not answer at {hosts} port {port} in {CONNECT_TIMEOUT_S} s: {error}")


def _close_in_child(reference: weakref.ref[Lifeline]) -> None:
    lifeline = reference()
    if lifeline is not None:
        lifeline._closed = True
        lifeline._selector_close()
