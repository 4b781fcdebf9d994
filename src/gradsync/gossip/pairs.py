"""Asynchronous gossip, after AD-PSGD: pairs average whenever they like, and nobody waits for anybody.

[Note: what one gives the other takes] A member sends its values a; the other computes d = (a - x) / 2, adds it to its
own x, and answers d, which the first subtracts when the answer comes. Whatever happened to the first's values in
between, the sum of the two stays what it was: no lock is held while a message travels, so there is no deadlock. If two
ask each other at the same time both would move all the way and only swap: so a member that waits for an answer itself
moves by a quarter, and two such quarters make the whole half.

The model's parameters are never touched while a backward may read them: averaging happens in a copy, the optimizer's
changes are added to it after each step, and the parameters are then made what the copy is.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.messages import Message
from gradsync.errors import PeerLost
from gradsync.gossip.circle import Circle
from gradsync.gossip.mixing import Distance
from gradsync.gossip.replica import Replica, mean_square
from gradsync.gossip.topology import Topology


class Pairs:
    """One member's values, averaged with one peer at a time by the thread that listens."""

    def __init__(self, circle: Circle, topology: Topology, replica: Replica) -> None:
        self.circle = circle
        self.topology = topology
        self.replica = replica
        self.clock = 0
        self.distance = Distance()
        self.staleness: Counter[int] = Counter()  # how many averagings a gradient did not know of
        self.unanswered = 0  # steps at which the last question was still open, so that none was asked
        self._lock = threading.Lock()  # of the replica's x
        self._base: list[Tensor] = []
        self._asked: int | None = None
        self._since_step = 0
        self._paused = False
        self.rebase()
        circle.on("ask", self._hear_ask)
        circle.on("answer", self._hear_answer)

    @torch.no_grad()
    def rebase(self) -> None:
        """The parameters are x now."""
        self._base = [part.x.to(part.dtype, copy=True) for part in self.replica.parts]

    @torch.no_grad()
    def refresh(self) -> None:
        """Add to x what the optimizer has changed, and make the parameters x."""
        with self._lock:
            for part, base in zip(self.replica.parts, self._base, strict=True):
                now = part.read(torch.empty_like(base))
                part.x.add_(now.to(part.x.dtype).sub_(base))
            self.replica.put_back()
            self.rebase()
            self.staleness[self._since_step] += 1
            self._since_step = 0

    def mix(self) -> None:
        """Take in what was averaged since the last step, and ask the next peer. Does not wait."""
        with self.circle.changed:
            self.circle.check()
        self.refresh()
        peer = self.peer()
        self.clock += 1
        with self.circle.changed:
            self.circle.begun = self.clock
            present = self.circle.book.present()
            if self._asked is not None and self._asked not in present:
                self._asked = None  # it died with the question
            if self._asked is not None:
                self.unanswered += 1
                return
            if peer is None:
                return
            self._asked = peer
        tensors = {str(at): base for at, base in enumerate(self._base)}  # replaced, not changed, at the next step
        if self.circle.send(peer, Message("ask", {"clock": self.clock}, tensors)) is None:
            self._asked = None

    def peer(self) -> int | None:
        """Whom to ask at this step."""
        with self.circle.changed:
            members = self.circle.book.present()
        if self.circle.me not in members:
            return None
        place = members.index(self.circle.me)
        found = self.topology.targets(place, len(members), self.clock)
        return members[found[self.clock % len(found)]] if found else None

    def adopt(self, replica: Replica) -> None:
        """Go on with other parameters of the same model."""
        with self._lock:
            self.replica = replica
            self.rebase()

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"values": self.replica.values(), "weight": self.replica.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.replica.load(state["values"], float(state["weight"]))
            self.rebase()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it nobody averages with this member: who asks is told to ask again."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def be_answered(self, what: str, timeout_s: float) -> None:
        """Wait until no question of this member is on its way, before it does something."""
        asked = self._asked
        if not self.circle.wait(lambda: not self._is_open(), timeout_s):
            assert asked is not None
            reason = "it lives, but has not answered this rank in time"
            raise PeerLost(rank=asked, reason=reason, after_s=timeout_s, during=what)

    def _is_open(self) -> bool:
        return self._asked is not None and self._asked in self.circle.book.present()

    # -- the thread -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _hear_ask(self, sender: int, message: Message) -> None:
        part_of = 0.25 if self._asked is not None else 0.5
        answer: dict[str, Tensor] = {}
        seen = []
        with self._lock:
            if self._paused or not self._fits(message):  # frozen or unfrozen there, and not yet here
                self.circle.answer(sender, Message("answer", {"clock": self.clock, "part": 0.0}))
                return
            for at, part in enumerate(self.replica.parts):
                theirs = message.tensors[str(at)].to(part.device)
                seen.append((*mean_square(part.x, theirs), part.x.numel()))
                given = (theirs - part.x).mul_(part_of).to(part.dtype)
                part.x.add_(given)
                answer[str(at)] = given
            self._since_step += 1
        self.distance.note(seen)
        self._note_clock(sender, message)
        self.circle.answer(sender, Message("answer", {"clock": self.clock, "part": part_of}, answer))

    @torch.no_grad()
    def _hear_answer(self, sender: int, message: Message) -> None:
        seen = []
        part_of = float(message.fields["part"])
        with self._lock:
            fits = part_of > 0 and self._fits(message)
            for at, part in enumerate(self.replica.parts if fits else []):
                given = message.tensors[str(at)].to(part.device)
                part.x.sub_(given)
                apart = mean_square(given, given)[1] / part_of**2  # it is a part of the difference
                seen.append((apart, mean_square(part.x, part.x)[1], part.x.numel()))
            self._since_step += fits
        self.distance.note(seen)
        self._note_clock(sender, message)
        with self.circle.changed:
            if self._asked == sender:
                self._asked = None

    def _fits(self, message: Message) -> bool:
        """Whether these are values of the same parameters: asked before any of them is added."""
        expected = {str(at): (part.x.shape, part.dtype) for at, part in enumerate(self.replica.parts)}
        return expected == {name: (tensor.shape, tensor.dtype) for name, tensor in message.tensors.items()}

    def _note_clock(self, sender: int, message: Message) -> None:
        with self.circle.changed:
            self.circle.clocks[sender] = max(self.circle.clocks.get(sender, 0), int(message.fields["clock"]))

    def stats(self) -> dict[str, Any]:
        """How stale the gradients were: averagings that each did not know of."""
        total = sum(self.staleness.values())
        mean = sum(late * count for late, count in self.staleness.items()) / total if total else math.nan
        return {"histogram": dict(sorted(self.staleness.items())), "mean": mean, "max": max(self.staleness, default=0)}
