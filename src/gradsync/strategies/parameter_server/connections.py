"""A worker's connections to all servers: requests and replies by shard, with failover.

When a server is lost, the worker goes to the server that holds the copy of its shard; or, where servers are restarted
from snapshots, to the same address until it answers. The pending requests are then sent again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gradsync.errors import RefusedByServer, ServerLost, Unreachable
from gradsync.messaging.endpoints import ClientConnection, ConnectionLost, PendingSend, wait_any
from gradsync.messaging.format import Message
from gradsync.messaging.keys import ClientKeys
from gradsync.strategies.parameter_server.messages import REPLIES, RETRY_PREFIX

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.1  # between two attempts to reach a server
FAILOVER_S = 15.0  # for the copy's server to detect, as the worker did, that the shard's own server is gone


class ConnectionPool:
    """Sends requests to shards, wherever they are now.

    Args:
        addresses: of each server; server i hosts shard i at first.
        names: the parameters of each shard, for errors.
        keys: to authenticate with.
        mirrors: every shard has a copy on the next server.
        reconnect_s: how long a lost server may take to restart.
        timeout_s: how long to try to reach the servers at first.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        names: Sequence[Sequence[str]],
        *,
        keys: ClientKeys | None,
        mirrors: bool,
        reconnect_s: float,
        timeout_s: float,
    ) -> None:
        self.addresses = list(addresses)
        self.server_of = list(range(len(addresses)))  # by shard: the server that hosts it
        # Returns the messages to send to a shard after a failover: a join request, and what it may not have received.
        self.on_failover: Callable[[int], list[Message]] = lambda shard: []
        self.on_message: Callable[[Message], None] = lambda message: None  # is called with every message
        self._names = names
        self._keys = keys
        self._mirrors = mirrors
        self._reconnect_s = reconnect_s
        self._connections: dict[int, ClientConnection] = {}
        self._unhandled: list[Message] = []  # replies that came while another request was waited for
        end_s = time.monotonic() + timeout_s
        try:
            for server, address in enumerate(addresses):
                self._connections[server] = ClientConnection(
                    address, REPLIES, keys=keys, timeout_s=max(0.1, end_s - time.monotonic())
                )
        except Unreachable as error:
            self.close()
            raise Unreachable(
                f"the server of shard {server} was never reached: {error} Start it with `gradsync serve --shard "
                f"{server}`, and give the address that it prints, as it is seen from this host."
            ) from None

    def send(self, shard: int, message: Message) -> PendingSend:
        """Send to a shard. Returns at once, unless its server is gone: then after the failover."""
        while True:
            connection = self._connections.get(self.server_of[shard])
            try:
                if connection is None:
                    raise ConnectionLost("the server is gone")
                return connection.send(message)
            except ConnectionLost:
                self._fail_over(shard)

    def request(
        self,
        requests: Mapping[int, Message],
        reply_kind: str,
        timeout_s: float,
        *,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[int, Message]:
        """Send a request to each shard, and wait for the replies; returns those that came in time."""
        replies: dict[int, Message] = {}
        for shard, message in requests.items():
            self.send(shard, message)
        end_s = time.monotonic() + timeout_s
        while len(replies) < len(requests):
            missing = [shard for shard in requests if shard not in replies]
            for message in self.receive(missing, end_s - time.monotonic(), pending=requests, into=into):
                if message.kind == reply_kind and message.fields["shard"] in missing:
                    replies[message.fields["shard"]] = message
            if time.monotonic() >= end_s:
                break
        return replies

    def receive(
        self,
        shards: Sequence[int],
        timeout_s: float,
        *,
        pending: Mapping[int, Message] | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> list[Message]:
        """Wait for messages of any server while replies of ``shards`` are missing.

        A shard whose server is gone fails over, and its ``pending`` request is sent again.
        """
        for shard in shards:
            if self.server_of[shard] not in self._connections:
                self._fail_over(shard)
                if pending is not None:
                    self.send(shard, pending[shard])
        found, self._unhandled = self._unhandled, []
        by_connection = {connection: server for server, connection in self._connections.items()}
        for connection in wait_any(list(by_connection), 0.0 if found else max(0.0, timeout_s)):
            try:
                message = connection.receive(0.0, into=into)
            except ConnectionLost:
                self._disconnect(by_connection[connection])
                continue
            if message is not None:
                found.append(message)
        for message in found:
            if message.kind == "refused":
                raise RefusedByServer(
                    f"the server of shard {message.fields.get('shard')} says: {message.fields.get('reason')}"
                )
            self.on_message(message)
        return found

    def _disconnect(self, server: int) -> None:
        connection = self._connections.pop(server, None)
        if connection is not None:
            connection.close()

    # -- failover -------------------------------------------------------------------------------------------------

    def _fail_over(self, shard: int) -> None:
        """Connect to a shard's server again, or to its copy's; ``ServerLost`` if neither works."""
        lost = self.server_of[shard]
        self._disconnect(lost)
        if self._mirrors and lost == shard and len(self.addresses) > 1:
            self.server_of[shard] = (shard + 1) % len(self.addresses)
            self._rejoin(shard, FAILOVER_S)
        elif self._reconnect_s > 0:
            self._reconnect(lost, shard)
            self._rejoin(shard, self._reconnect_s)
        else:
            raise self._lost(shard, "its process or its host is gone")

    def _reconnect(self, server: int, shard: int) -> None:
        end_s = time.monotonic() + self._reconnect_s
        endpoints = " ".join(part for part in self.addresses[server].split() if part.startswith("tcp://"))
        log.warning(
            "the server of shard %d at %s is gone; trying again for %.0f s", shard, endpoints, self._reconnect_s
        )
        while True:
            try:
                self._connections[server] = ClientConnection(
                    endpoints, REPLIES, keys=self._keys, timeout_s=min(2.0, self._reconnect_s)
                )
                return
            except Unreachable as error:
                if time.monotonic() > end_s:
                    raise self._lost(shard, f"{error} (tried for {self._reconnect_s:.0f} s)") from None
                time.sleep(RETRY_INTERVAL_S)

    def _rejoin(self, shard: int, timeout_s: float) -> None:
        """Join a shard at its new server, and send again the push that it may not have received."""
        end_s = time.monotonic() + timeout_s
        join, *unacknowledged = self.on_failover(shard)
        connection = self._connections.get(self.server_of[shard])
        joined: Message | None = None
        while joined is None:
            if connection is None or time.monotonic() > end_s:
                raise self._lost(shard, "its copy is gone too, or does not take over")
            try:
                connection.send(join)
                joined = self._receive_joined(connection, shard, end_s)
            except ConnectionLost:
                self._disconnect(self.server_of[shard])
                connection = None
        if joined.fields["fill"]:
            raise self._lost(shard, "its server was restarted, but had no snapshot to restore")
        self.on_message(joined)
        for message in unacknowledged:
            self.send(shard, message)

    def _receive_joined(self, connection: ClientConnection, shard: int, end_s: float) -> Message | None:
        """The reply to a join request; None if the server asks to retry."""
        while (message := connection.receive(max(0.0, end_s - time.monotonic()))) is not None:
            if message.fields.get("shard") != shard or message.kind not in ("joined", "refused"):
                self._unhandled.append(message)
            elif message.kind == "joined":
                return message
            elif str(message.fields.get("reason")).startswith(RETRY_PREFIX):
                time.sleep(RETRY_INTERVAL_S)
                return None
            else:
                raise self._lost(shard, str(message.fields.get("reason")))
        return None

    def _lost(self, shard: int, reason: str) -> ServerLost:
        return ServerLost(shard, self.addresses[self.server_of[shard]], self._names[shard], reason)

    def send_if_connected(self, shard: int, message: Message) -> None:
        """Send to a shard if its server is connected; a loss is ignored."""
        connection = self._connections.get(self.server_of[shard])
        if connection is not None:
            with contextlib.suppress(ConnectionLost):
                connection.send(message)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
