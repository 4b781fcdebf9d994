"""How the ranks of a group connect with each other by TCP: each opens a door, tells the others, and calls at theirs.

A door lets in who knows its word, and nobody else: somebody may scan ports. Higher ranks call at those of lower ones.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradsync.comm.watch import Call, Watch

HELLO = struct.Struct("<32sI")  # a connection's first words: the listener's token, and who calls
WELCOME = b"!"  # said by who listens, and then by who calls: now both know that the other is there
LOOK_S = 0.2  # how often a rank that waits at its door looks whether one is lost
ANSWER_S = 5.0  # what a host may take to answer, and a caller to say who it is


@dataclass(frozen=True)
class Door:
    """Where a rank can be reached, and the word that lets one in."""

    addresses: list[str]
    port: int
    token: str


def meet(
    rank: int, share: Callable[[Door], Sequence[Door]], addresses: list[str], watch: Watch, call: Call
) -> dict[int, socket.socket]:
    """A connection to each other rank of a group; all make this call. Raises OSError if that is not possible.

    ``share``: gives every rank's door in rank order for this rank's; ``addresses``: those of this host, likely ones
    first.
    """
    with socket.create_server(("", 0), backlog=128) as listener:
        door = Door(addresses, listener.getsockname()[1], secrets.token_hex(16))
        doors = share(door)
        call = dataclasses.replace(call, started_s=time.monotonic())  # a late rank was waited for until now
        connections = {peer: _call_at(doors[peer], peer, rank, watch, call) for peer in range(rank)}
        listener.settimeout(LOOK_S)
        while len(connections) < len(doors) - 1:
            watch.check(call)
            caller = _let_in(listener, door.token, range(rank + 1, len(doors)))
            if caller is not None:
                connections[caller[0]] = caller[1]
    return connections


def _call_at(door: Door, peer: int, rank: int, watch: Watch, call: Call) -> socket.socket:
    end_s = time.monotonic() + watch.timeout_s
    error: OSError | None = None
    while time.monotonic() < end_s:
        watch.raise_if_lost(call)
        for address in door.addresses:
            try:
                return _knock(address, door, rank)
            except OSError as failed:
                error = failed
        time.sleep(0.1)
    raise ConnectionError(f"rank {peer} did not answer at {door.addresses} port {door.port}: {error}")


def _knock(address: str, door: Door, rank: int) -> socket.socket:
    connection = socket.create_connection((address, door.port), timeout=ANSWER_S)
    try:
        connection.sendall(HELLO.pack(door.token.encode(), rank))
        _fill(connection, memoryview(bytearray(1)))  # a stranger who listens at that port would not answer
        connection.sendall(WELCOME)  # one who has given up meanwhile, and knocks again, would not either
    except OSError:
        connection.close()
        raise
    return connection


def _let_in(listener: socket.socket, token: str, ranks: range) -> tuple[int, socket.socket] | None:
    """Whoever comes next, if it is one of these ranks."""
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return None
    connection.settimeout(ANSWER_S)
    hello = bytearray(HELLO.size)
    try:
        _fill(connection, memoryview(hello))
        said, peer = HELLO.unpack(hello)
        if hmac.compare_digest(said, token.encode()) and peer in ranks:
            connection.sendall(WELCOME)
            _fill(connection, memoryview(bytearray(1)))
            return peer, connection
    except OSError:
        pass
    connection.close()  # a stranger: somebody scans ports
    return None


def _fill(connection: socket.socket, room: memoryview) -> None:
    """Block until all the room is filled, for as long as the connection's timeout says."""
    while len(room):
        got = connection.recv_into(room)
        if not got:
            raise ConnectionError("the other end is closed")
        room = room[got:]
