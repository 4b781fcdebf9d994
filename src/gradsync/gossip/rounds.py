"""Synchronous gossip: after its k-th step a member pushes, waits for the k-th mail of those who push to it, and mixes.

[Note: who is waited for] Only for a member that is alive and has not got as far: one whose mail of this step is here,
that has begun a later step, that died, or that left, is not waited for. A member sends before it waits, so of those
who wait one is always the furthest behind, and it waits for nobody: there is no deadlock, whatever they believe of the
graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gradsync.comm.messages import Message
from gradsync.gossip.book import Epoch
from gradsync.gossip.circle import Circle
from gradsync.gossip.meeting import Meeting
from gradsync.gossip.mixing import Mail, Mixer
from gradsync.gossip.topology import Topology

log = logging.getLogger("gradsync")


class Rounds:
    """One member's clock and mailbox."""

    def __init__(self, circle: Circle, meeting: Meeting, topology: Topology, mixer: Mixer, *, timeout_s: float) -> None:
        self.circle = circle
        self.meeting = meeting
        self.topology = topology
        self.mixer = mixer
        self.timeout_s = timeout_s
        self.clock = 0  # steps mixed
        self.late = 0  # mails that were not waited for any longer
        self.epoch = Epoch(frozenset({circle.me}), frozenset())
        self._inbox: list[Mail] = []
        circle.on("mail", self._hear)

    def begin(self, clock: int) -> None:
        """Start at a step, with the members that the book has. Some may have sent for it already."""
        with self.circle.changed:
            self.clock = self.circle.begun = clock
            self.epoch = self.circle.book.epoch(clock)

    def forget(self) -> None:
        """Drop what was heard of another past. Nobody may be sending."""
        with self.circle.changed:
            self.circle.clocks.clear()
            self._inbox.clear()

    # -- the graph ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        return self.epoch.members

    def targets(self) -> list[int]:
        """Whom this member pushes to at this step."""
        return self._at(self.topology.targets)

    def sources(self) -> list[int]:
        """Who pushes to this member at this step."""
        return self._at(self.topology.sources)

    def _at(self, ask: Callable[[int, int, int], list[int]]) -> list[int]:
        members = self.members
        return [members[place] for place in ask(members.index(self.circle.me), len(members), self.clock)]

    # -- one step -------------------------------------------------------------------------------------------------

    def mix(self) -> None:
        """Exchange once with this step's neighbours. Blocks until they have come as far, or are known not to come."""
        with self.circle.changed:
            self.circle.check()
        if self.epoch != self._known():
            self._enter()
        if len(self.members) > 1:
            self._exchange()
        self.clock += 1
        with self.circle.changed:
            self.circle.begun = self.clock

    def _exchange(self) -> None:
        self.mixer.replica.take_in()
        targets, sources = self.targets(), self.sources()
        fields, tensors = self.mixer.give(len(targets), self.clock)
        fields |= {"step": self.clock, "epoch": self.epoch.to_json()}
        for target in targets:
            self.circle.send(target, Message("mail", dict(fields), tensors))
        with self.circle.changed:
            self.circle.begun = self.clock + 1  # after the mails: whoever hears of it has them
            waiting = [member for member in self.members if self.meeting.is_waiting(member)]
        self.circle.beat(waiting)  # they mix only as far as they know that others have got
        if not self.circle.wait(lambda: not self._awaited(sources), self.timeout_s):
            self.late += len(self._awaited(sources))
            log.warning("gossip: ranks %s do not come to step %s; going on", self._awaited(sources), self.clock)
        self.mixer.take(self._collect())
        self.mixer.replica.put_back()

    def _known(self) -> Epoch:
        with self.circle.changed:
            return self.circle.book.epoch(self.clock)

    def _enter(self) -> None:
        """Begin a new epoch: all who shall hear of it do so before this member's mail."""
        self.circle.spread_news()
        self.epoch = self._known()
        self.mixer.enter(self.targets())

    def _awaited(self, sources: list[int]) -> list[int]:
        book, here = self.circle.book, {mail.sender for mail in self._inbox if mail.step >= self.clock}
        return [
            member
            for member in sources
            if member not in here
            and self.circle.clocks.get(member, 0) <= self.clock
            and member not in book.dead
            and book.left.get(member, self.clock + 1) > self.clock
        ]

    def _collect(self) -> list[Mail]:
        """What has come for this step, and what came late, in an order that does not depend on when."""
        with self.circle.changed:
            now = [mail for mail in self._inbox if mail.epoch == self.epoch and mail.step <= self.clock]
            self._inbox = [mail for mail in self._inbox if mail not in now and not mail.epoch.is_before(self.epoch)]
        return sorted(now, key=lambda mail: (mail.step, mail.sender))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _hear(self, sender: int, message: Message) -> None:
        mail = Mail(sender, int(message.fields["step"]), Epoch.from_json(message.fields["epoch"]), message)
        with self.circle.changed:
            self._inbox.append(mail)
            self.circle.clocks[sender] = max(self.circle.clocks.get(sender, 0), mail.step + 1)
