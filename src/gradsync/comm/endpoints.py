"""The two ends of a line for messages: a ``Listener`` that many come to, and a ``Line`` that goes to one of those.

Both ends see that the other is gone. A killed process's connection is closed by its kernel at once; that of a host
which fell silent by the kernel on this side, after ``silent_s``. A listener asks by sending: its socket refuses a
message to a peer without connection. A line is told by its socket's monitor.

An end belongs to one thread: the one that made it or, if it was handed on, the one that has it now.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

import zmq
from torch import Tensor

from gradsync.comm import curve
from gradsync.comm.curve import ClientKeys, ServerKeys
from gradsync.comm.messages import Malformed, Message, pack, unpack
from gradsync.comm.sockets import (
    LINGER_MS,
    SILENT_S,
    ConnectionLost,
    Context,
    Sent,
    Socket,
    Unreachable,
    event_of,
    lines_context,
    make_socket,
    receive_frames,
    send_frames,
    until_ms,
    way_to,
)

__all__ = ["SILENT_S", "ConnectionLost", "Line", "Listener", "Sent", "Unreachable", "wait_any", "way_to"]

PING = "ping"  # of every line: read by nobody, it only shows whether there is a connection

_REFUSALS = {
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): "it does not know this key",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "one end has keys and the other has none, or it speaks something else",
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "it has not the expected key, refuses this one, or died meanwhile",
}


class Listener:
    """Takes messages from everybody who connects, and answers them.

    >>> import torch
    >>> from gradsync.comm.endpoints import Line, Listener
    >>> from gradsync.comm.messages import Message
    >>> listener = Listener({"hello", "welcome"})
    >>> line = Line(listener.address, {"hello", "welcome"})
    >>> sent = line.send(Message("hello", {"rank": 1}))
    >>> peer, message = listener.receive(timeout_s=5.0)
    >>> listener.send(peer, Message("welcome", {}, {"x": torch.ones(1)}))
    True
    >>> line.receive(timeout_s=5.0).kind
    'welcome'
    >>> line.close()
    >>> listener.close()

    Args:
        kinds: the messages it takes; all else is malformed.
        host: the interface's address; "127.0.0.1" lets nobody from outside in, "0.0.0.0" everybody (have keys then).
        port: 0 takes a free one.
        ipc: also be reachable by a Unix socket, which is a little faster on the same host.
        public_host: the name by which others find this host, where ``host`` does not say.
        keys: let only the holders of these keys in.
        silent_s: larger => a silent host is found later, and one that hangs for a while is spared.
    """

    def __init__(
        self,
        kinds: Collection[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ipc: bool = True,
        public_host: str = "",
        keys: ServerKeys | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.malformed = 0
        self._kinds = frozenset(kinds)
        self._context: Context = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER, silent_s)
        self._socket.router_mandatory = True  # a message to somebody who is gone is an error, and so is seen
        self._unguard: Callable[[], None] | None = None
        try:
            if keys is not None:
                self._unguard = curve.guard(self._context, self._socket, keys)
            if port:
                self._socket.bind(f"tcp://{host}:{port}")
            else:
                port = self._socket.bind_to_random_port(f"tcp://{host}")
            ways = [f"tcp://{public_host or host}:{port}"]
            if ipc:
                # An abstract name: it is gone with this process, and unknown in another network namespace.
                ways.append(f"ipc://@gradsync-{secrets.token_hex(8)}")
                self._socket.bind(ways[-1])
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(
                f"can't listen at {host}:{port}: {error}. Is the port taken, or the host not ours?"
            ) from None
        self.port = port
        self.address = " ".join(ways)

    def receive(self, timeout_s: float) -> tuple[bytes, Message] | None:
        """The next message and who sent it; None if none comes. What is malformed is counted and dropped."""
        end_s = time.monotonic() + timeout_s
        while self._socket.poll(until_ms(end_s)):
            frames = receive_frames(self._socket)
            try:
                message = unpack(frames[1:], kinds=self._kinds)
            except Malformed:
                self.malformed += 1
                if time.monotonic() > end_s:  # who floods this end does not keep it from its other work
                    return None
                continue
            return bytes(frames[0]), message
        return None

    def send(self, peer: bytes, message: Message) -> bool:
        """Answer; False if the peer is gone. The tensors must stay as they are until the answer has left."""
        try:
            send_frames(self._socket, [peer, *pack(message)])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # EAGAIN: it has not read for a thousand messages
                return False
            raise
        return True

    def send_tracked(self, peer: bytes, message: Message) -> Sent | None:
        """Answer, and be told when the tensors may be changed; None if the peer is gone."""
        try:
            return send_frames(self._socket, [peer, *pack(message)])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return None
            raise

    def is_there(self, peer: bytes) -> bool:
        """Whether a peer's connection stands. (A message to it says so; the peer reads over it.)"""
        try:
            send_frames(self._socket, [peer, *pack(Message(PING))])
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN
        return True

    def sockets(self) -> tuple[Socket, ...]:
        """What to poll for messages."""
        return (self._socket,)

    def close(self) -> None:
        """Close; what has not left yet is dropped after a moment."""
        if self._unguard is not None:
            self._unguard()
            self._unguard = None
        self._socket.close(linger=LINGER_MS)
        self._context.term()


class Line:
    """A line to one listener. Making one blocks until it stands.

    Args:
        address: a listener's ``address``: its Unix socket is taken where there is one on this host.
        kinds: the messages it takes; all else is malformed.
        keys: show these, and ask the listener for its own.
        timeout_s: how long to try.
        silent_s: as for a listener.
    """

    def __init__(
        self,
        address: str,
        kinds: Collection[str],
        *,
        keys: ClientKeys | None = None,
        timeout_s: float = 10.0,
        silent_s: float = SILENT_S,
    ) -> None:
        self.address = address
        self.malformed = 0
        self._kinds = frozenset(kinds) | {PING}
        self._why = ""  # the connection was lost
        self._socket = make_socket(lines_context(), zmq.DEALER, silent_s)
        if keys is not None:
            curve.show(self._socket, keys)
        self._monitor: Socket = self._socket.get_monitor_socket()
        try:
            self._socket.connect(way_to(address))
            self._wait_connected(timeout_s)
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(f"{address!r} is no address that can be connected to: {error}.") from None
        except Unreachable:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """Whether the other end is gone."""
        self._look()
        return bool(self._why)

    def send(self, message: Message) -> Sent:
        """Hand a message over; returns at once. Its tensors must stay as they are until ``Sent.wait`` returns."""
        self._check()
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
            ready = dict(poller.poll(until_ms(end_s)))
            if self._socket in ready:
                frames = receive_frames(self._socket)
                try:
                    message = unpack(frames, kinds=self._kinds, into=into)
                except Malformed:
                    self.malformed += 1
                    continue
                if message.kind != PING:
                    return message
            elif self._monitor in ready:  # after what had come before the loss
                self._check()
            elif time.monotonic() >= end_s:
                self._check()
                return None

    def close(self) -> None:
        """Close; what has not left yet is dropped after a moment."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._why else LINGER_MS)

    def sockets(self) -> tuple[Socket, ...]:
        """What to poll: messages, and news of the connection."""
        return self._socket, self._monitor

    def _check(self) -> None:
        self._look()
        if self._why:
            raise ConnectionLost(f"{self.address}: {self._why}")

    def _look(self) -> None:
        while self._monitor.poll(0):
            event = event_of(self._monitor)
            if event in (zmq.Event.DISCONNECTED, zmq.Event.CLOSED):
                self._why = self._why or "the other end is gone"

    def _wait_connected(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        refused = ""
        while self._monitor.poll(until_ms(end_s)):
            event = event_of(self._monitor)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return
            refused = _REFUSALS.get(event, refused)
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                break
        why = refused or f"nobody answered in {timeout_s:.1f} s"
        raise Unreachable(f"{self.address}: {why}. Does it run, and do the keys belong together?")


class End(Protocol):
    """What can be waited for."""

    def sockets(self) -> tuple[Socket, ...]:
        """What to poll."""


EndT = TypeVar("EndT", bound=End)


def wait_any(ends: Collection[EndT], timeout_s: float) -> list[EndT]:
    """The ends that have something to receive, or are lost; none if nothing comes in time."""
    poller = zmq.Poller()
    for end in ends:
        for socket in end.sockets():
            poller.register(socket, zmq.POLLIN)
    ready = dict(poller.poll(until_ms(time.monotonic() + timeout_s)))
    return [end for end in ends if any(socket in ready for socket in end.sockets())]
