"""ZeroMQ sockets as ``endpoints.py`` uses them: made with TCP keepalive, sent to without copies; and their addresses.

[Note: no heartbeats] ZeroMQ has heartbeats of its own. With them libzmq 4.3.5 aborts the whole process when a peer that
has sent more than the receiver has read closes its connection ("Assertion failed: !_io_error"). So TCP keepalive is
used instead: the kernel detects a dead host in the same time, and a process that is stopped is not taken for dead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as socket_module
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gradsync.errors import GradSyncError
from gradsync.errors import Unreachable as Unreachable
from gradsync.messaging.format import CHUNK_BYTES, MAX_HEADER_BYTES, Frame

log = logging.getLogger("gradsync")

KEEPALIVE_S = 1.0  # between two TCP keepalive probes of a silent peer
SILENT_S = 10.0  # larger => a dead host is detected later, and a host that hangs for a while is not dropped
COPY_BELOW_BYTES = 1 << 16  # smaller chunks are copied: that costs less than tracking them
LINGER_MS = 500  # how long a closing socket waits for its last messages to be sent

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class ConnectionLost(GradSyncError):
    """An established connection was lost."""


class PendingSend:
    """A message that is being sent. Its tensors must not change until it is done."""

    def __init__(self, trackers: Sequence[zmq.MessageTracker]) -> None:
        self._trackers = trackers

    def done(self) -> bool:
        return all(tracker.done for tracker in self._trackers)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the tensors may be changed; False if that takes longer than ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        for tracker in self._trackers:
            try:
                tracker.wait(max(0.0, end_s - time.monotonic()))
            except zmq.NotDone:
                return False
        return True


_lock = threading.Lock()
_contexts: dict[int, Context] = {}  # by process: a forked child can't use its parent's


def client_context() -> Context:
    """The ZeroMQ context of all client connections of this process.

    They share one because each context starts threads. (A listener has its own, because of its keys.)
    """
    with _lock:
        if os.getpid() not in _contexts:
            _contexts[os.getpid()] = zmq.Context()
        return _contexts[os.getpid()]


IPC_PREFIX = "ipc://@"  # of the endpoint of an abstract Unix socket


def pick_endpoint(address: str, *, local: bool = True) -> str:
    """Choose one endpoint of a listener's address: its Unix socket if that is on this host, else TCP.

    ``local=False``: this process can't use the Unix socket.
    """
    endpoints = address.split()
    for endpoint in endpoints:
        if local and endpoint.startswith(IPC_PREFIX) and _is_own_listener(endpoint.removeprefix(IPC_PREFIX)):
            return endpoint
    for endpoint in endpoints:
        if endpoint.startswith("tcp://"):
            return endpoint
    raise Unreachable(f"an address is like 'tcp://host:port'; got {address!r}, and no such Unix socket is here.")


def _is_own_listener(abstract: str) -> bool:
    """Whether a process of this user (or root) listens at an abstract Unix address of this host and network namespace.

    Any user can bind an abstract name. Once a listener is gone, another user could take its name and collect the
    passwords of its clients.
    """
    with socket_module.socket(socket_module.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(f"\0{abstract}")
            credentials = probe.getsockopt(socket_module.SOL_SOCKET, socket_module.SO_PEERCRED, _CREDENTIALS.size)
        except (OSError, ValueError):
            return False
    return _CREDENTIALS.unpack(credentials)[1] in (os.geteuid(), 0)


_CREDENTIALS = struct.Struct("=iII")  # of the peer process: pid, uid, gid


def tcp_endpoint(host: str, port: int | None = None) -> str:
    """A TCP address for ZeroMQ; an IPv6 one in brackets.

    >>> from gradsync.messaging.sockets import tcp_endpoint
    >>> tcp_endpoint("::1", 5555), tcp_endpoint("10.0.0.5", 5555), tcp_endpoint("[::1]")
    ('tcp://[::1]:5555', 'tcp://10.0.0.5:5555', 'tcp://[::1]')
    """
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"tcp://{shown}" if port is None else f"tcp://{shown}:{port}"


def set_ip_family(socket: Socket, endpoint: str) -> None:
    """Turn IPv6 on, before binding or connecting, for an address that needs it.

    It stays off for others: with IPv6 on, ZeroMQ resolves "localhost" to ::1, not to the 127.0.0.1 of a listener.
    """
    if not endpoint.startswith("tcp://"):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0] or endpoint.removeprefix("tcp://")
    if host.startswith("[") or endpoint.endswith("]"):
        socket.ipv6 = True
        return
    with contextlib.suppress(OSError, UnicodeError):
        found = {entry[0] for entry in socket_module.getaddrinfo(host, None, type=socket_module.SOCK_STREAM)}
        socket.ipv6 = found == {socket_module.AF_INET6}


def make_socket(context: Context, kind: int, silent_s: float) -> Socket:
    """A socket that detects when the peer's host is gone."""
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.maxmsgsize = max(CHUNK_BYTES, MAX_HEADER_BYTES)  # of a frame: a peer that sends larger ones is disconnected
    # See [Note: no heartbeats]. The kernel probes once a second, from the first silent second on.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = int(KEEPALIVE_S)
    socket.tcp_keepalive_cnt = max(1, int(silent_s / KEEPALIVE_S))
    socket.tcp_maxrt = int(silent_s * 1000)
    socket.handshake_ivl = int(SILENT_S * 1000)  # for a peer that connects and sends nothing
    socket.immediate = False
    socket.sndhwm = socket.rcvhwm = 1000
    return socket


def receive_frames(socket: Socket) -> list[memoryview]:
    """The frames of the next message, in the socket's own memory. A message must be ready."""
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.buffer for frame in frames]


def send_frames(socket: Socket, frames: Sequence[Frame]) -> PendingSend:
    """Send without blocking; large frames are not copied."""
    trackers: list[zmq.MessageTracker] = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if number < last else 0)
        if memoryview(frame).nbytes < COPY_BELOW_BYTES:
            socket.send(frame, flags)
        else:
            tracker = socket.send(frame, flags, copy=False, track=True)
            assert tracker is not None
            trackers.append(tracker)
    return PendingSend(trackers)


class RateLimitedLog:
    """Logs dropped messages: the first one at once, then at most once in ``every_s``, with their number."""

    def __init__(self, where: str, *, every_s: float = 60.0) -> None:
        self._where = where
        self._every_s = every_s
        self._num_unreported = 0
        self._next_s = 0.0

    def record(self, reason: object) -> None:
        """Count one more dropped message, and log it if the last log line is old enough."""
        self._num_unreported += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            log.warning("%s: dropped %d bad message(s); the last: %.200s", self._where, self._num_unreported, reason)
            self._num_unreported = 0


def next_event(monitor: Socket) -> int:
    """The next event of a socket's monitor. One must be ready."""
    message: Any = recv_monitor_message(monitor, zmq.NOBLOCK)
    return int(message["event"])


def remaining_ms(end_s: float) -> int:
    """The time from now to ``end_s``, for a poll; not below zero."""
    return max(0, int((end_s - time.monotonic()) * 1000 + 0.999))
