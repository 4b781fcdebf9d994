"""How a newcomer gets in: it fetches the model from any member, trains a first step, and then says hello.

Nobody waits for it while it starts: only with its hello it becomes a member, at the step at which its sponsor then is.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradsync.comm.endpoints import Unreachable
from gradsync.comm.messages import Message
from gradsync.errors import GradSyncError
from gradsync.gossip.book import Book
from gradsync.gossip.circle import Circle
from gradsync.gossip.meeting import Meeting

SPONSOR = -1  # who a newcomer's first line leads to, before it knows any names
FIRST_NEWCOMER = 1_000_000  # beyond any rank


def new_name() -> int:
    """A name for a newcomer: drawn, because two may come to two members at once."""
    return FIRST_NEWCOMER + secrets.randbelow(1 << 30)


def take_over(own: Mapping[str, Tensor], values: Mapping[str, Tensor], where: str) -> None:
    """Make this model's values those of a run, or say how the models differ."""
    for name in sorted(own.keys() | values.keys()):
        mine, theirs = own.get(name), values.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            kinds = [None if t is None else (tuple(t.shape), t.dtype) for t in (mine, theirs)]
            raise ValueError(
                f"the run at {where} trains another model: {name[2:]} is {kinds[1]} there, {kinds[0]} here."
            )
    with torch.no_grad():
        for name, mine in own.items():
            mine.copy_(values[name])


class Door:
    """A member's side: who stands outside is let in by its main thread, between two steps."""

    def __init__(self, circle: Circle, meeting: Meeting, show: Callable[[], dict[str, Tensor]]) -> None:
        self.circle = circle
        self._meeting = meeting
        self._show = show
        self._outside: list[tuple[str, int, str]] = []
        for kind in ("fetch", "hello"):
            circle.on(kind, self._hear)

    def _hear(self, sender: int, message: Message) -> None:
        with self.circle.changed:
            self._outside.append((message.kind, sender, str(message.fields["address"])))

    def open(self, clock: int) -> None:
        """Give who stands outside what it asks for. Called where the model is whole and no step is under way."""
        with self.circle.changed:
            outside, self._outside = self._outside, []
        for kind, newcomer, address in outside:
            try:
                self.circle.connect(newcomer, address)
            except Unreachable:
                continue  # it has gone away
            with self.circle.changed:
                if kind == "hello":
                    self.circle.book.joined[newcomer] = address
                book = self.circle.book.to_json()
            fields = {"book": book, "clock": clock, "number": self._meeting.number}
            if kind == "hello":
                self.circle.send(newcomer, Message("welcome", fields))
                self.circle.spread_news()
            else:
                self.circle.send(newcomer, Message("state", fields, self._show()))


class Newcomer:
    """A newcomer's side."""

    def __init__(self, circle: Circle, *, timeout_s: float) -> None:
        self.circle = circle
        self.timeout_s = timeout_s
        self._heard: dict[str, Message] = {}
        for kind in ("state", "welcome"):
            circle.on(kind, self._hear)

    def _hear(self, sender: int, message: Message) -> None:
        with self.circle.changed:
            self._heard[message.kind] = message

    def fetch(self, address: str) -> dict[str, Tensor]:
        """The model of the member at an address. Blocks until that is between two steps."""
        self.circle.start("", {}, self.timeout_s)
        self.circle.connect(SPONSOR, address, self.timeout_s)
        state = self._ask(SPONSOR, "fetch", "state")
        if state is None:
            raise GradSyncError(
                f"{address} did not send its model in {self.timeout_s:.0f} s. Does that rank still train?"
            )
        self.circle.run = str(state.fields["run"])
        with self.circle.changed:
            self.circle.book.add(Book.from_json(state.fields["book"]))
        return state.tensors

    def enter(self) -> tuple[int, int]:
        """Become a member; returns the step to begin with and the number of the next meeting. Blocks."""
        for sponsor in [SPONSOR, *self.circle.book.present()]:
            if sponsor != SPONSOR:
                with contextlib.suppress(Unreachable):
                    self.circle.connect(sponsor, self.circle.book.joined[sponsor])
            welcome = self._ask(sponsor, "hello", "welcome")
            if welcome is not None:
                self._meet_all(welcome)
                return int(welcome.fields["clock"]), int(welcome.fields["number"])
        raise GradSyncError("no member of the run that this newcomer has fetched its model from is there any more.")

    def _ask(self, member: int, question: str, answer: str) -> Message | None:
        if self.circle.send(member, Message(question, {"address": self.circle.address})) is None:
            return None
        self.circle.wait(lambda: answer in self._heard or not self.circle.has_line(member), self.timeout_s)
        return self._heard.get(answer)

    def _meet_all(self, message: Message) -> None:
        self.circle.run = str(message.fields["run"])
        with self.circle.changed:
            self.circle.book.add(Book.from_json(message.fields["book"]))
            present = {member: self.circle.book.joined[member] for member in self.circle.book.present()}
        for member, address in present.items():
            if member != self.circle.me:
                self._reach(member, address)

    def _reach(self, member: int, address: str) -> None:
        """Have a line to a member, unless news comes that it is gone."""
        end_s = time.monotonic() + self.timeout_s
        while not self.circle.has_line(member):
            try:
                self.circle.connect(member, address, 1.0)
            except Unreachable:
                if member not in self.circle.book.present():
                    return
                if time.monotonic() > end_s:
                    raise
