"""How the ranks of a group connect to each other by TCP: each rank listens, and shares its endpoint with the others.

Each rank connects to the ranks below it, and accepts those above it. Both sides prove that they know the endpoint's
secret before any message is read: see handshake.py.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.tcp.handshake import HANDSHAKE_S, Acceptor, connect_to, listen, new_secret

CHECK_INTERVAL_S = 0.2  # how often a rank that accepts connections checks whether a peer is lost


@dataclass(frozen=True)
class Endpoint:
    """Where a rank listens, and the secret for the handshake."""

    addresses: list[str]
    port: int
    secret: str


def connect_all(
    rank: int, share: Callable[[Endpoint], Sequence[Endpoint]], addresses: list[str], guard: CollectiveGuard, call: Call
) -> dict[int, socket.socket]:
    """A connection to every other rank of a group. Blocks: all ranks make this call. Raises OSError on failure.

    ``share``: an all-gather of the ranks' endpoints; ``addresses``: this host's, those most likely to be reachable
    first.
    """
    listener = listen(addresses, backlog=max(128, len(guard.members)))
    own = Endpoint(addresses, listener.getsockname()[1], new_secret())
    acceptor = Acceptor(listener, own.secret.encode(), range(rank + 1, len(guard.members)))
    connections: dict[int, socket.socket] = {}
    try:
        endpoints = share(own)
        call = dataclasses.replace(call, started_s=time.monotonic())  # share() has waited for late ranks until now
        for peer in range(rank):
            connections[peer] = _connect_to_peer(endpoints[peer], peer, rank, guard, call)
        while len(connections) < len(endpoints) - 1:
            guard.check(call)
            for peer, connection in acceptor.accept(CHECK_INTERVAL_S):
                if peer in connections:  # it has connected again: the answer to its first attempt came too late
                    connections[peer].close()
                connections[peer] = connection
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        acceptor.close()
    return connections


def _connect_to_peer(endpoint: Endpoint, peer: int, rank: int, guard: CollectiveGuard, call: Call) -> socket.socket:
    end_s = time.monotonic() + guard.timeout_s
    error: OSError | None = None
    while time.monotonic() < end_s:
        guard.raise_if_lost(call)
        for address in endpoint.addresses:
            try:
                return connect_to(address, endpoint.port, endpoint.secret.encode(), rank, timeout_s=HANDSHAKE_S)
            except OSError as failed:
                error = failed
        time.sleep(0.1)
    raise ConnectionError(f"rank {peer} did not answer at {endpoint.addresses} port {endpoint.port}: {error}")
