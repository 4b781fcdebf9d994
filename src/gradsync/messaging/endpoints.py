"""Message endpoints over ZeroMQ: a ``Listener`` accepts many clients, a ``ClientConnection`` goes to one listener.

Both detect that the other side is gone. A killed process's connection is closed by its kernel at once; that of a host
that no longer answers is closed by the kernel on this side, after ``silent_s``. A listener finds out by sending: its
socket refuses a message to a peer without a connection. A client connection finds out from its socket's monitor.

An endpoint belongs to one thread: the one that made it or, if it was passed on, the one that has it now.

A listener has a TCP socket, which asks for CURVE keys, and a Unix socket, which asks for a password that the holders
of the secret key have: see [Note: no encryption within a host] in messaging/keys.py.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

import zmq
from torch import Tensor

from gradsync.messaging import keys as curve
from gradsync.messaging.format import Kinds, Malformed, Message, pack, schemas_of, unpack
from gradsync.messaging.keys import ClientKeys, ServerKeys
from gradsync.messaging.sockets import (
    IPC_PREFIX,
    LINGER_MS,
    SILENT_S,
    ConnectionLost,
    Context,
    PendingSend,
    RateLimitedLog,
    Socket,
    Unreachable,
    client_context,
    make_socket,
    next_event,
    pick_endpoint,
    receive_frames,
    remaining_ms,
    send_frames,
    set_ip_family,
    tcp_endpoint,
)

__all__ = [
    "SILENT_S",
    "ClientConnection",
    "ConnectionLost",
    "Listener",
    "PendingSend",
    "Unreachable",
    "pick_endpoint",
    "wait_any",
]

log = logging.getLogger("gradsync")

PING = "ping"  # ignored by the receiver; sending it shows whether the connection is up

_HANDSHAKE_ERRORS = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know this key",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "one end has keys and the other has none, or it uses another protocol",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has another key than expected, refuses this one, or died meanwhile",
}


class Listener:
    """Receives messages from all clients that connect, and answers them.

    >>> import torch
    >>> from gradsync.messaging.endpoints import ClientConnection, Listener
    >>> from gradsync.messaging.format import Message
    >>> listener = Listener({"join", "joined"})
    >>> connection = ClientConnection(listener.address, {"join", "joined"})
    >>> pending = connection.send(Message("join", {"rank": 1}))
    >>> peer, message = listener.receive(timeout_s=5.0)
    >>> listener.send(peer, Message("joined", {}, {"x": torch.ones(1)}))
    True
    >>> connection.receive(timeout_s=5.0).kind
    'joined'
    >>> connection.close()
    >>> listener.close()

    Args:
        kinds: the message kinds that it accepts, each with a schema of its fields; all else is malformed.
        host: the address of an interface: "127.0.0.1" for this host only, "0.0.0.0" for all, "::" for IPv6 too.
        port: 0 takes a free one.
        ipc: also be reachable by a Unix socket, which is a little faster on the same host.
        public_host: the name of this host for others, where ``host`` does not give it.
        keys: accept only the holders of these keys. None: accept every client, with a warning in the log.
        silent_s: larger => a dead host is detected later, and one that hangs for a while is not dropped.
    """

    def __init__(
        self,
        kinds: Kinds,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ipc: bool = True,
        public_host: str = "",
        keys: ServerKeys | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.malformed = 0
        self._kinds = schemas_of(kinds)
        self._context: Context = zmq.Context()
        self._sockets: list[Socket] = []
        self._next_socket = 0  # the index of the socket that is read next, if both are ready
        self._poller = zmq.Poller()
        self._stop_authenticator: Callable[[], None] | None = None
        try:
            if keys is not None:
                self._stop_authenticator = curve.start_authenticator(self._context, keys)
            self.port = self._bind_tcp(host, port, keys, silent_s)
            endpoints = [tcp_endpoint(public_host or host, self.port)]
            if ipc and (keys is None or keys.password):
                endpoints.append(self._bind_ipc(keys, silent_s))
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(
                f"can't listen at {tcp_endpoint(host, port)}: {error}. Is the port taken, or the host not ours?"
            ) from None
        self.address = " ".join(endpoints)
        self._drop_log = RateLimitedLog(self.address)
        if keys is None:
            log.warning("%s is open: whoever reaches it can read and change the model.", self.address)

    def _bind_tcp(self, host: str, port: int, keys: ServerKeys | None, silent_s: float) -> int:
        socket = self._add_socket(silent_s)
        set_ip_family(socket, tcp_endpoint(host))
        if keys is not None:
            curve.configure_curve_server(socket, keys)
        if not port:
            return int(socket.bind_to_random_port(tcp_endpoint(host)))
        socket.bind(tcp_endpoint(host, port))
        return port

    def _bind_ipc(self, keys: ServerKeys | None, silent_s: float) -> str:
        socket = self._add_socket(silent_s)
        if keys is not None:
            curve.configure_plain_server(socket)
        # An abstract name: it ends with this process, and is not visible in another network namespace.
        endpoint = f"{IPC_PREFIX}gradsync-{secrets.token_hex(8)}"
        socket.bind(endpoint)
        return endpoint

    def _add_socket(self, silent_s: float) -> Socket:
        socket = make_socket(self._context, zmq.ROUTER, silent_s)
        socket.router_mandatory = True  # a message to a disconnected peer is then an error
        self._sockets.append(socket)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def receive(self, timeout_s: float) -> tuple[bytes, Message] | None:
        """The next message and its sender; None if none comes in time. Malformed messages are counted and dropped."""
        end_s = time.monotonic() + timeout_s
        while ready := dict(self._poller.poll(remaining_ms(end_s))):
            number = self._next_socket if self._sockets[self._next_socket] in ready else 1 - self._next_socket
            self._next_socket = (number + 1) % len(self._sockets)  # a flooded socket does not starve the other
            frames = receive_frames(self._sockets[number])
            try:
                message = unpack(frames[1:], kinds=self._kinds)
            except Malformed as error:
                self.malformed += 1
                self._drop_log.record(error)
                if time.monotonic() > end_s:  # a flood does not keep the caller from its other work
                    return None
                continue
            return bytes([number]) + bytes(frames[0]), message
        return None

    def send(self, peer: bytes, message: Message) -> bool:
        """Send to a peer; False if it is gone. The tensors must not change until the message has been sent."""
        return self.send_tracked(peer, message) is not None

    def send_tracked(self, peer: bytes, message: Message) -> PendingSend | None:
        """Send to a peer; the result says when the tensors may change. None if the peer is gone."""
        try:
            return self._send(peer, message)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # EAGAIN: its queue is full
                return None
            raise

    def is_connected(self, peer: bytes) -> bool:
        """Whether a peer's connection is up. Sends it a ping, which the peer ignores."""
        try:
            self._send(peer, Message(PING))
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN
        return True

    def _send(self, peer: bytes, message: Message) -> PendingSend:
        return send_frames(self._sockets[peer[0]], [peer[1:], *pack(message)])

    def sockets(self) -> tuple[Socket, ...]:
        """The sockets to poll for messages."""
        return tuple(self._sockets)

    def close(self) -> None:
        """Close. Messages that are not sent within a moment are dropped."""
        if self._stop_authenticator is not None:
            self._stop_authenticator()
            self._stop_authenticator = None
        for socket in self._sockets:
            socket.close(linger=LINGER_MS)
        self._context.term()


class ClientConnection:
    """The client end of a connection to one listener. The constructor blocks until it is connected.

    Args:
        address: a listener's ``address``; its Unix socket is used if it is on this host.
        kinds: the message kinds that it accepts, each with a schema of its fields; all else is malformed.
        keys: authenticate with these, and require the listener to have its own.
        timeout_s: how long to try.
        silent_s: as for a listener.
    """

    def __init__(
        self,
        address: str,
        kinds: Kinds,
        *,
        keys: ClientKeys | None = None,
        timeout_s: float = 10.0,
        silent_s: float = SILENT_S,
    ) -> None:
        self.address = address
        self.malformed = 0
        self._kinds = {**schemas_of(kinds), PING: {}}
        self._drop_log = RateLimitedLog(address)
        self._lost_reason = ""  # why the connection was lost; empty while it is up
        self._socket = make_socket(client_context(), zmq.DEALER, silent_s)
        self._monitor: Socket = self._socket.get_monitor_socket()
        try:
            endpoint = pick_endpoint(address, local=keys is None or bool(keys.password))
            if keys is not None:
                curve.configure_client(self._socket, keys, local=endpoint.startswith(IPC_PREFIX))
            set_ip_family(self._socket, endpoint)
            self._socket.connect(endpoint)
            self._wait_connected(timeout_s)
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(f"can't connect to the address {address!r}: {error}.") from None
        except Unreachable:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """Whether the listener is gone."""
        self._read_monitor()
        return bool(self._lost_reason)

    def send(self, message: Message) -> PendingSend:
        """Send a message; returns at once. Its tensors must not change until ``PendingSend.wait`` returns."""
        self._raise_if_lost()
        try:
            return send_frames(self._socket, pack(message))
        except zmq.ZMQError as error:
            raise ConnectionLost(f"{self.address} takes no message: {error}") from None

    def receive(self, timeout_s: float, *, into: Mapping[str, Tensor] | None = None) -> Message | None:
        """The next message, its tensors in ``into`` where they fit; None if none comes in time."""
        end_s = time.monotonic() + timeout_s
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(remaining_ms(end_s)))
            if self._socket in ready:
                frames = receive_frames(self._socket)
                try:
                    message = unpack(frames, kinds=self._kinds, into=into)
                except Malformed as error:
                    self.malformed += 1
                    self._drop_log.record(error)
                    if time.monotonic() > end_s:
                        return None
                    continue
                if message.kind != PING:
                    return message
            elif self._monitor in ready:  # only after all messages that came before the loss
                self._raise_if_lost()
            elif time.monotonic() >= end_s:
                self._raise_if_lost()
                return None

    def close(self) -> None:
        """Close. Messages that are not sent within a moment are dropped."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._lost_reason else LINGER_MS)

    def sockets(self) -> tuple[Socket, ...]:
        """The sockets to poll: for messages, and for events of the connection."""
        return self._socket, self._monitor

    def _raise_if_lost(self) -> None:
        self._read_monitor()
        if self._lost_reason:
            raise ConnectionLost(f"{self.address}: {self._lost_reason}")

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = next_event(self._monitor)
            if event in (zmq.Event.DISCONNECTED, zmq.Event.CLOSED):
                self._lost_reason = self._lost_reason or "the other end is gone"

    def _wait_connected(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        refused = ""
        while self._monitor.poll(remaining_ms(end_s)):
            event = next_event(self._monitor)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return
            refused = _HANDSHAKE_ERRORS.get(event, refused)
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                break
        why = refused or f"no answer in {timeout_s:.1f} s"
        raise Unreachable(f"{self.address}: {why}. Does it run, and do the keys belong together?")


class Waitable(Protocol):
    """What ``wait_any`` can wait for."""

    def sockets(self) -> tuple[Socket, ...]:
        """The sockets to poll."""


WaitableT = TypeVar("WaitableT", bound=Waitable)


def wait_any(endpoints: Collection[WaitableT], timeout_s: float) -> list[WaitableT]:
    """The endpoints that have a message or have lost their connection; none if nothing happens in time."""
    poller = zmq.Poller()
    for endpoint in endpoints:
        for socket in endpoint.sockets():
            poller.register(socket, zmq.POLLIN)
    ready = dict(poller.poll(remaining_ms(time.monotonic() + timeout_s)))
    return [endpoint for endpoint in endpoints if any(socket in ready for socket in endpoint.sockets())]
