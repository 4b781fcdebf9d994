"""What both ends of a line for messages stand on: ZeroMQ sockets that see a loss, frames without copies, addresses.

[Note: no heartbeats] ZeroMQ has heartbeats of its own, and with them libzmq 4.3.5 aborts the whole process when a peer
that has sent more than the receiver read closes its connection ("Assertion failed: !_io_error"). So the kernel is told
to ask instead (TCP keepalive): a host that is gone is found in the same time, and a process that stands still is not
taken for dead.
"""

from __future__ import annotations

import os
import socket as socket_module
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gradsync.comm.messages import CHUNK_BYTES, MAX_HEADER_BYTES, Frame
from gradsync.errors import GradSyncError

BEAT_S = 1.0  # how often a silent end is asked whether it is there
SILENT_S = 10.0  # larger => a host that fell silent is found later, and a machine that hangs for a while is spared
COPIED_BYTES = 1 << 16  # smaller chunks are copied: that costs less than keeping track of them
LINGER_MS = 500  # what a closing end gives the last messages to leave

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Unreachable(GradSyncError):
    """Nobody answers at an address, or it lets this process not in."""


class ConnectionLost(GradSyncError):
    """The other end of a line was there, and is gone."""


class Sent:
    """A message on its way: until it has left, its tensors must stay as they are."""

    def __init__(self, trackers: Sequence[zmq.MessageTracker]) -> None:
        self._trackers = trackers

    def done(self) -> bool:
        return all(tracker.done for tracker in self._trackers)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the tensors may be changed; False if that takes longer."""
        end_s = time.monotonic() + timeout_s
        for tracker in self._trackers:
            try:
                tracker.wait(max(0.0, end_s - time.monotonic()))
            except zmq.NotDone:
                return False
        return True


_lock = threading.Lock()
_contexts: dict[int, Context] = {}  # by process: a forked child can't use its parent's


def lines_context() -> Context:
    """One for all lines of this process: each brings threads of its own. (A listener has its own, for its keys.)"""
    with _lock:
        if os.getpid() not in _contexts:
            _contexts[os.getpid()] = zmq.Context()
        return _contexts[os.getpid()]


def way_to(address: str) -> str:
    """Of a listener's ways in the best from here: its Unix socket if that is on this host, else TCP."""
    ways = address.split()
    for way in ways:
        if way.startswith("ipc://@") and _is_here(way.removeprefix("ipc://@")):
            return way
    for way in ways:
        if way.startswith("tcp://"):
            return way
    raise Unreachable(f"an address is like 'tcp://host:port'; got {address!r}, and no such Unix socket is here.")


def _is_here(abstract: str) -> bool:
    """Whether somebody listens at an abstract Unix address of this host (and network namespace)."""
    with socket_module.socket(socket_module.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(f"\0{abstract}")
        except (OSError, ValueError):
            return False
    return True


def make_socket(context: Context, kind: int, silent_s: float) -> Socket:
    """A socket that sees when the host at the other end is gone."""
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.maxmsgsize = max(CHUNK_BYTES, MAX_HEADER_BYTES)  # of a frame: who sends larger ones is cut off
    # See [Note: no heartbeats]. The kernel asks once a second, from the first silent second on.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = int(BEAT_S)
    socket.tcp_keepalive_cnt = max(1, int(silent_s / BEAT_S))
    socket.tcp_maxrt = int(silent_s * 1000)
    socket.handshake_ivl = int(SILENT_S * 1000)  # who connects and says nothing
    socket.immediate = False
    socket.sndhwm = socket.rcvhwm = 1000
    return socket


def receive_frames(socket: Socket) -> list[memoryview]:
    """The frames of the next message, in the socket's own memory. There must be one."""
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.buffer for frame in frames]


def send_frames(socket: Socket, frames: Sequence[Frame]) -> Sent:
    """Send without waiting; large frames without a copy."""
    trackers: list[zmq.MessageTracker] = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if number < last else 0)
        if memoryview(frame).nbytes < COPIED_BYTES:
            socket.send(frame, flags)
        else:
            tracker = socket.send(frame, flags, copy=False, track=True)
            assert tracker is not None
            trackers.append(tracker)
    return Sent(trackers)


def event_of(monitor: Socket) -> int:
    """What a monitor has to say next. There must be something."""
    told: Any = recv_monitor_message(monitor, zmq.NOBLOCK)
    return int(told["event"])


def until_ms(end_s: float) -> int:
    """From now to a time, for a poll; not below zero."""
    return max(0, int((end_s - time.monotonic()) * 1000 + 0.999))
