"""Synchronous gossip: after each step a member pushes values to its targets, waits for its sources' values, and mixes.

[Note: no deadlock] A member waits only for sources that are alive and behind: not for one whose message of this step
has arrived, that has begun a later step, that died, or that left. Every member sends before it waits. So one of the
members that wait is always the furthest behind, and it has nobody to wait for. This holds whatever the members believe
about the topology.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gradsync.messaging.format import Message
from gradsync.strategies.gossip.barrier import Barrier
from gradsync.strategies.gossip.membership import MembershipEpoch
from gradsync.strategies.gossip.mixing import Mixer, MixMessage
from gradsync.strategies.gossip.peer_mesh import PeerMesh
from gradsync.strategies.gossip.topology import Topology

log = logging.getLogger("gradsync")

MAX_TIMEOUTS = 3  # how many times timeout_s a member waits for sources that are waiting themselves
MAX_FROM_UNKNOWN = 64  # messages kept from newcomers that this member does not know yet


class SyncGossip:
    """One member's clock and receive queue. Used by the main thread; the mesh's receive thread fills the queue."""

    def __init__(self, mesh: PeerMesh, barrier: Barrier, topology: Topology, mixer: Mixer, *, timeout_s: float) -> None:
        self.mesh = mesh
        self.barrier = barrier
        self.topology = topology
        self.mixer = mixer
        self.timeout_s = timeout_s
        self.clock = 0  # steps mixed
        self.late = 0  # messages that this member stopped waiting for
        self.epoch = MembershipEpoch(frozenset({mesh.member_id}), frozenset())
        self._queue: list[MixMessage] = []
        mesh.on("mix", self._on_mix)

    def begin(self, clock: int) -> None:
        """Start at step ``clock``, with the current members. Some may have sent their messages for it already."""
        with self.mesh.changed:
            self.clock = self.mesh.steps_begun = clock
            self.epoch = self.mesh.membership.epoch(clock)

    def reset(self) -> None:
        """Drop what was received before a state is loaded. No member may be sending."""
        with self.mesh.changed:
            self.mesh.clocks.clear()
            self._queue.clear()

    # -- the graph ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        return self.epoch.members

    def targets(self) -> list[int]:
        """The members that this one pushes to at this step."""
        return self._neighbours(self.topology.targets)

    def sources(self) -> list[int]:
        """The members that push to this one at this step."""
        return self._neighbours(self.topology.sources)

    def _neighbours(self, places: Callable[[int, int, int], list[int]]) -> list[int]:
        members = self.members
        return [members[place] for place in places(members.index(self.mesh.member_id), len(members), self.clock)]

    # -- one step -------------------------------------------------------------------------------------------------

    def mix(self) -> None:
        """Exchange with this step's neighbours. Blocks until each has reached this step, or is known to be gone."""
        with self.mesh.changed:
            self.mesh.check()
        if self.epoch != self._current_epoch():
            self._begin_epoch()
        if len(self.members) > 1:
            self._exchange()
        self.clock += 1
        with self.mesh.changed:
            self.mesh.steps_begun = self.clock

    def _exchange(self) -> None:
        self.mixer.replica.add_local_updates()
        targets, sources = self.targets(), self.sources()
        fields, tensors = self.mixer.make_message(len(targets), self.clock)
        fields |= {"step": self.clock, "epoch": self.epoch.to_json()}
        for target in targets:
            self.mesh.send(target, Message("mix", dict(fields), tensors))
        with self.mesh.changed:
            # Only after the messages are sent: a member that receives this number has received them before it.
            self.mesh.steps_begun = self.clock + 1
            waiting = [member for member in self.members if self.barrier.has_arrived(member)]
        self.mesh.send_heartbeat(waiting)  # members at a barrier mix only as far as they know that others have come
        self._wait_for_sources(sources)
        self.mixer.mix_in(self._collect())
        self.mixer.replica.write_model()

    def _wait_for_sources(self, sources: list[int]) -> None:
        """Declare sources dead that do not reach this step in time, except those that wait themselves.

        A source that waits is not at fault: the member that it waits for is, and is found there.
        """
        for _ in range(MAX_TIMEOUTS):
            progress = self.mesh.progress()
            if self.mesh.wait(lambda: not self._awaited(sources), self.timeout_s):
                return
            with self.mesh.changed:
                awaited = self._awaited(sources)
            for member in self.mesh.stalled(awaited, progress):
                self.mesh.mark_dead(member, f"it did not come to step {self.clock} in {self.timeout_s:.0f} s")
        self.late += len(awaited)
        log.warning("gossip: ranks %s do not come to step %s; going on", awaited, self.clock)

    def _current_epoch(self) -> MembershipEpoch:
        with self.mesh.changed:
            return self.mesh.membership.epoch(self.clock)

    def _begin_epoch(self) -> None:
        """Enter a new epoch. The members receive the membership before this member's messages of that epoch."""
        self.mesh.broadcast_membership()
        self.epoch = self._current_epoch()
        self.mixer.begin_epoch(self.targets())

    def _awaited(self, sources: list[int]) -> list[int]:
        """The sources to wait for: see [Note: no deadlock]."""
        membership = self.mesh.membership
        arrived = {received.sender for received in self._queue if received.step >= self.clock}
        return [
            member
            for member in sources
            if member not in arrived
            and self.mesh.clocks.get(member, 0) <= self.clock
            and member not in membership.dead
            and membership.left.get(member, self.clock + 1) > self.clock
        ]

    def _collect(self) -> list[MixMessage]:
        """The messages for this step, and late ones for earlier steps, in an order that does not depend on arrival."""
        with self.mesh.changed:
            due = [one for one in self._queue if one.epoch == self.epoch and one.step <= self.clock]
            self._queue = [one for one in self._queue if one not in due and not one.epoch.is_before(self.epoch)]
        return sorted(due, key=lambda one: (one.step, one.sender))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _on_mix(self, sender: int, message: Message) -> None:
        epoch = MembershipEpoch.from_json(message.fields["epoch"])
        received = MixMessage(sender, message.fields["step"], epoch, message)
        if sender not in received.epoch.members:
            raise ValueError("its sender is no member of its epoch")
        self.mixer.check(received)
        with self.mesh.changed:
            from_unknown = [one for one in self._queue if one.sender not in self.mesh.membership.joined]
            if sender not in self.mesh.membership.joined and len(from_unknown) >= MAX_FROM_UNKNOWN:
                raise ValueError("too many messages came from members that are not known here")
            self._queue.append(received)
            self.mesh.note_clock(sender, received.step + 1)
