"""A worker's lines to all servers: questions and answers by shard, wherever that shard is now.

When a server is lost its shards are asked for elsewhere: at the server that has their copy, or, where servers are
started again from snapshots, at the same address until it answers. What had been asked is then asked again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gradsync.comm.curve import ClientKeys
from gradsync.comm.endpoints import ConnectionLost, Line, Sent, Unreachable, wait_any
from gradsync.comm.messages import Message
from gradsync.errors import GradSyncError

log = logging.getLogger(__name__)

KINDS = frozenset(
    {
        "welcome",
        "refused",
        "filled",
        "pushed",
        "parameters",
        "norm",
        "state",
        "loaded",
        "stats",
        "met",
    }  # what servers say
)
AGAIN_S = 0.1  # between two tries to reach a server
TAKING_OVER_S = 15.0  # what a copy has to see, as the worker did, that the shard's own server is gone


class ServerLost(GradSyncError):
    """A server is gone, and its shard of the parameters with it."""

    def __init__(self, shard: int, address: str, names: Sequence[str], why: str) -> None:
        self.shard = shard
        self.address = address
        self.names = tuple(names)
        self.why = why
        super().__init__(shard, address, names, why)

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        return (
            f"shard {self.shard} ({len(self.names)} parameters: {shown}) was lost with its server at {self.address}: "
            f"{self.why}. With mirrors=1 a copy would have taken over; with snapshots a restarted server goes on."
        )


class RefusedByServer(GradSyncError):
    """A server does not do what it was asked."""


class Lines:
    """Asks shards.

    Args:
        addresses: of each server; server i has shard i.
        names: the parameters of each shard, for errors.
        keys: to get in.
        mirrors: every shard has a copy on the next server.
        reconnect_s: how long a lost server may take to be there again.
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
        self.host = list(range(len(addresses)))  # by shard: the server that has it
        self.on_moved: Callable[[int], list[Message]] = (
            lambda shard: []
        )  # a shard is elsewhere: what to say there first
        self.on_message: Callable[[Message], None] = lambda message: None  # is given all that comes
        self._names = names
        self._keys = keys
        self._mirrors = mirrors
        self._reconnect_s = reconnect_s
        self._lines: dict[int, Line] = {}
        self._stash: list[Message] = []  # answers that came while another question was asked
        end_s = time.monotonic() + timeout_s
        try:
            for server, address in enumerate(addresses):
                self._lines[server] = Line(address, KINDS, keys=keys, timeout_s=max(0.1, end_s - time.monotonic()))
        except Unreachable as error:
            self.close()
            raise ServerLost(server, address, names[server], str(error)) from None

    def send(self, shard: int, message: Message) -> Sent:
        """Say something to a shard; returns at once, unless its server is gone: then when it is found elsewhere."""
        while True:
            line = self._lines.get(self.host[shard])
            try:
                if line is None:
                    raise ConnectionLost("the other end is gone")
                return line.send(message)
            except ConnectionLost:
                self._find(shard)

    def ask(
        self,
        questions: Mapping[int, Message],
        answer: str,
        timeout_s: float,
        *,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[int, Message]:
        """Ask shards, and wait for the answer of each; returns those that came in time."""
        answers: dict[int, Message] = {}
        for shard, message in questions.items():
            self.send(shard, message)
        end_s = time.monotonic() + timeout_s
        while len(answers) < len(questions):
            missing = [shard for shard in questions if shard not in answers]
            for message in self.hear(missing, end_s - time.monotonic(), again=questions, into=into):
                if message.kind == answer and message.fields["shard"] in missing:
                    answers[message.fields["shard"]] = message
            if time.monotonic() >= end_s:
                break
        return answers

    def hear(
        self,
        shards: Sequence[int],
        timeout_s: float,
        *,
        again: Mapping[int, Message] | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> list[Message]:
        """Wait for what anybody says, as something is awaited of ``shards``: if one moves, it is asked ``again``."""
        for shard in shards:
            if self.host[shard] not in self._lines:
                self._find(shard)
                if again is not None:
                    self.send(shard, again[shard])
        found, self._stash = self._stash, []
        by_line = {line: server for server, line in self._lines.items()}
        for line in wait_any(list(by_line), 0.0 if found else max(0.0, timeout_s)):
            try:
                message = line.receive(0.0, into=into)
            except ConnectionLost:
                self._lose(by_line[line])
                continue
            if message is not None:
                found.append(message)
        for message in found:
            if message.kind == "refused":
                raise RefusedByServer(
                    f"the server of shard {message.fields.get('shard')} says: {message.fields.get('why')}"
                )
            self.on_message(message)
        return found

    def _lose(self, server: int) -> None:
        line = self._lines.pop(server, None)
        if line is not None:
            line.close()

    # -- a shard whose server is gone -----------------------------------------------------------------------------

    def _find(self, shard: int) -> None:
        """Have a shard's server again, or another; ``ServerLost`` if there is none."""
        lost = self.host[shard]
        self._lose(lost)
        if self._mirrors and lost == shard and len(self.addresses) > 1:
            self.host[shard] = (shard + 1) % len(self.addresses)
            self._move(shard, TAKING_OVER_S)
        elif self._reconnect_s > 0:
            self._reconnect(lost, shard)
            self._move(shard, self._reconnect_s)
        else:
            raise self._lost(shard, "its process or its host is gone")

    def _reconnect(self, server: int, shard: int) -> None:
        end_s = time.monotonic() + self._reconnect_s
        ways = " ".join(way for way in self.addresses[server].split() if way.startswith("tcp://"))
        log.warning("the server of shard %d at %s is gone; trying again for %.0f s", shard, ways, self._reconnect_s)
        while True:
            try:
                self._lines[server] = Line(ways, KINDS, keys=self._keys, timeout_s=min(2.0, self._reconnect_s))
                return
            except Unreachable as error:
                if time.monotonic() > end_s:
                    raise self._lost(shard, f"{error} (tried for {self._reconnect_s:.0f} s)") from None
                time.sleep(AGAIN_S)

    def _move(self, shard: int, timeout_s: float) -> None:
        """Introduce this worker to a shard at its new place, and say again what it may not have heard."""
        end_s = time.monotonic() + timeout_s
        hello, *again = self.on_moved(shard)
        line = self._lines.get(self.host[shard])
        welcome: Message | None = None
        while welcome is None:
            if line is None or time.monotonic() > end_s:
                raise self._lost(shard, "its copy is gone too, or does not take over")
            try:
                line.send(hello)
                welcome = self._welcome(line, shard, end_s)
            except ConnectionLost:
                self._lose(self.host[shard])
                line = None
        if welcome.fields["fill"]:
            raise self._lost(shard, "a server is there again, but it had no snapshot to begin from")
        self.on_message(welcome)
        for message in again:
            self.send(shard, message)

    def _welcome(self, line: Line, shard: int, end_s: float) -> Message | None:
        """The answer to a hello; None if the server asks to try again."""
        while (message := line.receive(max(0.0, end_s - time.monotonic()))) is not None:
            if message.fields.get("shard") != shard or message.kind not in ("welcome", "refused"):
                self._stash.append(message)
            elif message.kind == "welcome":
                return message
            elif str(message.fields.get("why")).startswith("again:"):
                time.sleep(AGAIN_S)
                return None
            else:
                raise self._lost(shard, str(message.fields.get("why")))
        return None

    def _lost(self, shard: int, why: str) -> ServerLost:
        return ServerLost(shard, self.addresses[self.host[shard]], self._names[shard], why)

    def tell(self, shard: int, message: Message) -> None:
        """Say something if there is a line, and leave it at that."""
        line = self._lines.get(self.host[shard])
        if line is not None:
            with contextlib.suppress(ConnectionLost):
                line.send(message)

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
