"""Mirroring: a shard's log records go to another server, which holds a second copy of the shard.

Replies that depend on a change are held back until the copy has acknowledged it. So all that a worker knows of is at
two servers, and the copy can take over without a loss. Pushes that were not applied yet are still at the workers, which
send them again.
"""

from __future__ import annotations

import logging

from gradsync.messaging.endpoints import ClientConnection, ConnectionLost
from gradsync.messaging.format import Message
from gradsync.messaging.keys import ClientKeys
from gradsync.strategies.parameter_server.messages import MIRROR_REPLIES
from gradsync.strategies.parameter_server.server.replication_log import LogRecord
from gradsync.strategies.parameter_server.server.shard_service import Replies, ShardService

log = logging.getLogger(__name__)

HELD_KINDS = frozenset({"parameters", "pushed", "state", "filled", "loaded"})  # replies that depend on changes


class Mirror:
    """The connection from a shard to its copy.

    Args:
        service: the shard's.
        address: of the server that holds the copy.
        num_servers: of the job.
        keys: to authenticate to that server.
    """

    def __init__(
        self, service: ShardService, address: str, num_servers: int, *, keys: ClientKeys | None, timeout_s: float
    ) -> None:
        self._service = service
        self._num_servers = num_servers
        self._last_sent = 0  # sequence numbers of records
        self._last_change = 0  # replies wait for the acknowledgement of this one
        self._last_acknowledged = 0
        self._held: list[tuple[int, tuple[bytes, Message]]] = []  # replies, with the record that each waits for
        self.connection: ClientConnection | None = ClientConnection(
            address, MIRROR_REPLIES, keys=keys, timeout_s=timeout_s
        )
        service.on_record = self.send
        if service.shard.filled:
            self.send(service.snapshot())

    def send(self, record: LogRecord) -> None:
        """Send a record. Returns at once."""
        if self.connection is None:
            return
        fields = {
            "shard": self._service.index,
            "sequence": self._last_sent + 1,
            "kind": record.kind,
            "fields": record.fields,
            "job": None,
            "num_servers": self._num_servers,
            "groups": [],
        }
        if record.kind == "snapshot":
            fields["job"] = self._service.job.to_json()
            fields["groups"] = self._service.shard.hyperparameters()
        elif not self._service.shard.filled:
            return  # there is no copy yet: its first record is a snapshot
        try:
            self.connection.send(Message("replicate", fields, record.tensors))
        except ConnectionLost as error:
            self._stop(str(error))
            return
        self._last_sent += 1
        if record.kind != "read":
            self._last_change = self._last_sent

    def hold(self, replies: Replies) -> Replies:
        """The replies that may be sent at once. The others are held until the copy has acknowledged the last change."""
        if self.connection is None or self._last_change <= self._last_acknowledged:
            return replies
        now = [reply for reply in replies if reply[1].kind not in HELD_KINDS]
        self._held += [(self._last_change, reply) for reply in replies if reply[1].kind in HELD_KINDS]
        return now

    def receive(self) -> Replies:
        """Read the copy's acknowledgements; returns the replies that may be sent now. Does not block."""
        try:
            while self.connection is not None and (message := self.connection.receive(0.0)) is not None:
                if message.kind == "refused":
                    self._stop(str(message.fields.get("reason")))
                else:
                    self._last_acknowledged = max(self._last_acknowledged, message.fields["sequence"])
        except ConnectionLost as error:
            self._stop(str(error))
        acknowledged = self._last_acknowledged
        released = [reply for number, reply in self._held if self.connection is None or number <= acknowledged]
        self._held = [(number, reply) for number, reply in self._held if number > acknowledged and self.connection]
        return released

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._service.on_record = None

    def _stop(self, reason: str) -> None:
        log.warning(
            "shard %d has no second copy any more: %s. If its only copy is lost too, so are its parameters.",
            self._service.index,
            reason,
        )
        self.close()
