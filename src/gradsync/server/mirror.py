"""The second copy of a shard: its keeper's changes go to another server, and answers wait until they have arrived.

So whatever a worker has been told is known at two places, and the copy can take over with nothing lost. What had not
been applied yet, the workers still have, and send again.
"""

from __future__ import annotations

import logging

from gradsync.comm.curve import ClientKeys
from gradsync.comm.endpoints import ConnectionLost, Line
from gradsync.comm.messages import Message
from gradsync.server.keeper import Answers, Keeper
from gradsync.server.records import Record

log = logging.getLogger(__name__)

KINDS = frozenset({"mirrored", "refused"})
HELD = frozenset({"parameters", "pushed", "state", "filled", "loaded"})  # answers that tell of changes


class Mirror:
    """The line from a shard to its copy.

    Args:
        keeper: the shard's.
        address: the server that has the copy.
        num_servers: of the job.
        keys: to get into that server.
    """

    def __init__(
        self, keeper: Keeper, address: str, num_servers: int, *, keys: ClientKeys | None, timeout_s: float
    ) -> None:
        self._keeper = keeper
        self._num_servers = num_servers
        self._sent = 0  # records
        self._telling = 0  # the last that answers must wait for
        self._arrived = 0
        self._held: list[tuple[int, tuple[bytes, Message]]] = []
        self.line: Line | None = Line(address, KINDS, keys=keys, timeout_s=timeout_s)
        keeper.on_change = self.put
        if keeper.shard.filled:
            self.put(keeper.whole())

    def put(self, record: Record) -> None:
        """Send a change. Returns at once."""
        if self.line is None:
            return
        fields = {"shard": self._keeper.index, "number": self._sent + 1, "what": record.kind, "fields": record.fields}
        if record.kind == "whole":
            fields["job"] = self._keeper.job.to_json()
            fields["num_servers"] = self._num_servers
            fields["groups"] = self._keeper.shard.hyperparameters()
        elif not self._keeper.shard.filled:
            return  # there is no copy yet: the first record is the whole
        try:
            self.line.send(Message("record", fields, record.tensors))
        except ConnectionLost as error:
            self._lose(str(error))
            return
        self._sent += 1
        if record.kind != "read":
            self._telling = self._sent

    def hold(self, answers: Answers) -> Answers:
        """The answers that may go at once; the others are kept until what they tell of has arrived."""
        if self.line is None or self._telling <= self._arrived:
            return answers
        now = [answer for answer in answers if answer[1].kind not in HELD]
        self._held += [(self._telling, answer) for answer in answers if answer[1].kind in HELD]
        return now

    def hear(self) -> Answers:
        """Take what the copy says; the answers that may go now. Does not wait."""
        try:
            while self.line is not None and (message := self.line.receive(0.0)) is not None:
                if message.kind == "refused":
                    self._lose(str(message.fields.get("why")))
                elif isinstance(message.fields.get("number"), int):
                    self._arrived = max(self._arrived, message.fields["number"])
        except ConnectionLost as error:
            self._lose(str(error))
        free = [answer for number, answer in self._held if self.line is None or number <= self._arrived]
        self._held = [(number, answer) for number, answer in self._held if number > self._arrived and self.line]
        return free

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None
        self._keeper.on_change = None

    def _lose(self, why: str) -> None:
        log.warning(
            "shard %d has no second copy any more: %s. It goes on with one; if it is lost too, so are its parameters.",
            self._keeper.index,
            why,
        )
        self.close()
