"""How two processes of a run prove to each other over TCP that they belong to it, before either reads a message.

``Acceptor`` is the listening side and ``connect_to`` the other one, here called the caller. The listener sends a nonce.
The caller answers with its rank, a nonce of its own, and an HMAC of both under the secret that the ranks share. The
listener answers with an HMAC of its own, and the caller confirms. Everything has a fixed length, so nothing that a
stranger sends is parsed. The nonces are new for each connection, so a recorded handshake can't be replayed.

[Note: strangers] Any process that reaches the port may connect. What it can cost is bounded: ``MAX_STRANGERS``
connections beside one for each rank, ``HELLO.size`` bytes and ``HANDSHAKE_S`` for each of them. Beyond that the
acceptor drops the oldest connection that has not proved a rank. A process that has run out of file descriptors drops
all of them, and accepts no connection for ``PAUSE_S``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence

NONCE_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
HELLO = struct.Struct(f"<I{NONCE_BYTES}s{PROOF_BYTES}s")  # the caller's rank, nonce and proof
CONFIRMED = b"!"  # the caller's last message: it has not given up meanwhile
HANDSHAKE_S = 5.0  # lower => strangers are dropped sooner, but a rank on a slow network may fail to connect
MAX_STRANGERS = 64
ACCEPTED_AT_ONCE = 64  # new connections per call of accept(), before the open ones are read
PAUSE_S = 0.2


class Refused(ConnectionError):
    """The other side does not know the secret."""


class _Stranger:
    """A connection whose handshake is not over."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.rank: int | None = None  # once it is proved
        self.received = b""
        self.ends_s = time.monotonic() + HANDSHAKE_S


class Acceptor:
    """The listening side: accepts connections, and returns those of ranks. It never raises.

    Args:
        listener: a listening socket, which it owns from now on.
        secret: known to the ranks only.
        ranks: the ranks that may connect.
    """

    def __init__(self, listener: socket.socket, secret: bytes, ranks: Sequence[int]) -> None:
        self._listener = listener
        self._secret = secret
        self._ranks = ranks
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._paused_until_s: float | None = None
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when ``accept`` has something to do."""
        return int(self._selector.fileno())  # epoll and kqueue have it

    def accept(self, timeout_s: float = 0.0) -> list[tuple[int, socket.socket]]:
        """The ranks whose handshakes have succeeded since the last call. Blocks for at most ``timeout_s``."""
        came: list[tuple[int, socket.socket]] = []
        try:
            ready = self._selector.select(timeout_s if self._paused_until_s is None else min(timeout_s, PAUSE_S))
        except (OSError, ValueError):  # it was closed
            return came
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept_strangers()
                continue
            stranger = self._strangers.get(key.data)
            if stranger is not None and self._read(stranger):
                assert stranger.rank is not None, "a confirmed connection has proved its rank"
                came.append((stranger.rank, stranger.connection))
        now_s = time.monotonic()
        for stranger in [stranger for stranger in self._strangers.values() if stranger.ends_s < now_s]:
            self._drop(stranger)
        if self._paused_until_s is not None and self._paused_until_s < now_s:
            self._paused_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        return came

    @property
    def max_idle_s(self) -> float:
        """How long ``accept`` may be left uncalled while nothing is readable."""
        if self._paused_until_s is not None:
            return PAUSE_S
        return HANDSHAKE_S / 4 if self._strangers else float("inf")

    def close(self) -> None:
        """Stop listening, and drop all connections whose handshake is not over."""
        for stranger in list(self._strangers.values()):
            stranger.connection.close()
        self._strangers.clear()
        self._listener.close()
        self._selector.close()

    def _accept_strangers(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # too many open files, most likely: see [Note: strangers]
                for stranger in list(self._strangers.values()):
                    self._drop(stranger)
                self._selector.unregister(self._listener)
                self._paused_until_s = time.monotonic() + PAUSE_S
                return
            if len(self._strangers) >= MAX_STRANGERS + len(self._ranks):
                self._drop(self._oldest_unproved())
            stranger = _Stranger(connection)
            self._strangers[connection] = stranger
            try:
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, connection)
                sent = connection.send(stranger.nonce)
            except OSError:
                sent = 0
            if sent < NONCE_BYTES:
                self._drop(stranger)

    def _oldest_unproved(self) -> _Stranger:
        """The oldest connection that has not proved a rank; if all have, the oldest."""
        unproved = (stranger for stranger in self._strangers.values() if stranger.rank is None)
        return next(unproved, None) or next(iter(self._strangers.values()))

    def _read(self, stranger: _Stranger) -> bool:
        """Read what has arrived; True when the handshake has succeeded. Drops a connection whose handshake fails."""
        wanted = HELLO.size if stranger.rank is None else len(CONFIRMED)
        try:
            data = stranger.connection.recv(wanted - len(stranger.received))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        stranger.received += data
        if data and len(stranger.received) < wanted:
            return False
        if data and stranger.rank is None and self._answer(stranger):
            return False
        if data and stranger.rank is not None and stranger.received == CONFIRMED:
            self._release(stranger)
            return True
        self._drop(stranger)
        return False

    def _answer(self, stranger: _Stranger) -> bool:
        """Check the hello, and answer it; False if it is not a rank's."""
        rank, nonce, proof = HELLO.unpack(stranger.received)
        expected = _proof(self._secret, b"caller", rank, stranger.nonce, nonce)
        if not hmac.compare_digest(proof, expected) or rank not in self._ranks:
            return False
        try:
            answer = _proof(self._secret, b"listener", rank, stranger.nonce, nonce)
            if stranger.connection.send(answer) < PROOF_BYTES:
                return False
        except OSError:
            return False
        stranger.rank, stranger.received = rank, b""
        return True

    def _release(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.connection, None)
        with contextlib.suppress(KeyError, ValueError):  # it may not be registered yet
            self._selector.unregister(stranger.connection)
        stranger.connection.close()


def connect_to(address: str, port: int, secret: bytes, rank: int, *, timeout_s: float = HANDSHAKE_S) -> socket.socket:
    """Connect to an :class:`Acceptor` as ``rank``. Blocks, at most about ``timeout_s``; raises OSError."""
    end_s = time.monotonic() + timeout_s
    connection = socket.create_connection((plain_address(address), port), timeout=timeout_s)
    try:
        theirs, ours = _receive(connection, NONCE_BYTES, end_s), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(HELLO.pack(rank, ours, _proof(secret, b"caller", rank, theirs, ours)))
        answer = _receive(connection, PROOF_BYTES, end_s)
        if not hmac.compare_digest(answer, _proof(secret, b"listener", rank, theirs, ours)):
            raise Refused(f"the process that listens at {address} port {port} does not know this run's secret")
        connection.sendall(CONFIRMED)
    except BaseException:
        connection.close()
        raise
    return connection


def new_secret() -> str:
    """A secret for one listener, as text for the store through which the ranks find each other."""
    return secrets.token_hex(32)


def listen(addresses: Sequence[str], *, backlog: int) -> socket.socket:
    """A listening TCP socket at a free port, for callers at any of ``addresses``, IPv4 or IPv6.

    If the only address is a loopback address, it listens there only, and other hosts do not reach it.
    """
    found = {_numeric(address) for address in addresses}
    only = found.pop() if len(found) == 1 else None
    if only is not None and only.is_loopback:
        family = socket.AF_INET if only.version == 4 else socket.AF_INET6
        return socket.create_server((str(only), 0), family=family, backlog=backlog)
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    except OSError:  # IPv6 is switched off on this host
        pass
    return socket.create_server(("", 0), backlog=backlog)


def plain_address(address: str) -> str:
    """An address without the brackets that a URL puts around one of IPv6.

    >>> from gradsync.comm.tcp.handshake import plain_address
    >>> plain_address("[::1]"), plain_address("node7")
    ('::1', 'node7')
    """
    return address[1:-1] if address.startswith("[") and address.endswith("]") else address


def url_address(address: str) -> str:
    """An address as it stands before a port in a URL: one of IPv6 in brackets.

    >>> from gradsync.comm.tcp.handshake import url_address
    >>> url_address("::1"), url_address("10.0.0.1")
    ('[::1]', '10.0.0.1')
    """
    plain = plain_address(address)
    return f"[{plain}]" if ":" in plain else plain


def _numeric(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(plain_address(address))
    except ValueError:
        return ipaddress.IPv4Address("127.0.0.1") if address == "localhost" else None


def _proof(secret: bytes, side: bytes, rank: int, listeners: bytes, callers: bytes) -> bytes:
    return hmac.digest(secret, side + struct.pack("<I", rank) + listeners + callers, "sha256")


def _receive(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake was not over in time")
        connection.settimeout(left_s)
        data = connection.recv(num_bytes - len(received))
        if not data:
            raise ConnectionError("the other end was closed during the handshake")
        received += data
    return received
