"""A barrier of all gossip members, and an exact mean over them, without a collective: for ``join`` and ``settle``.

[Note: mixing at the barrier] A member that waits at the barrier goes on mixing, so that values which others push to it
do not pile up there, but only as far as a member with data has come. Once all have arrived, each mixes up to the
highest step that any member arrived with: the same for all.

[Note: the mean survives its leader] The member with the lowest id computes the mean and sends it to all. If it dies
half-way, some members have the mean and some have not. So each member that has it keeps it until all have confirmed
theirs, and sends it to any member that asks. The member with the next lowest id asks all before it computes anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from gradsync.errors import OutOfStep, PeerLost
from gradsync.messaging.format import Message
from gradsync.strategies.gossip.peer_mesh import SLACK_S, PeerMesh

# The first letter of a tensor's name says how it is averaged. With any other letter the first member's tensor is taken.
BY_WEIGHT = "x"  # the sum over the members, divided by the sum of their weights
BY_COUNT = "m"  # the sum over the members, divided by their number

MAX_OPEN_BARRIERS = 64  # unfinished barriers about which one member may have sent messages


class Barrier:
    """One member's part in the barriers of a run. They are numbered: all members reach the same ones, in order."""

    def __init__(self, mesh: PeerMesh, *, timeout_s: float) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self.next_number = 0
        self._arrived: dict[int, dict[int, tuple[str, int]]] = {}  # by barrier and member: the call, and its clock
        self._contributions: dict[int, dict[int, Message]] = {}  # by barrier and member
        self._means: dict[int, Message] = {}  # by barrier: received, and not returned yet
        self._finished = -1  # the last barrier whose mean this member has
        self._cached_mean: tuple[int, Message] | None = None  # see [Note: the mean survives its leader]
        self._have_mean: dict[int, set[int]] = {}  # by barrier: the members that have confirmed their mean
        for kind, handler in {
            "arrived": self._on_arrived,
            "contribution": self._on_contribution,
            "mean": self._on_mean,
            "request_mean": self._on_mean_request,
            "have_mean": self._on_have_mean,
        }.items():
            mesh.on(kind, handler)

    # -- the barrier ----------------------------------------------------------------------------------------------

    def wait_for_all(self, what: str, *, clock: Callable[[], int], step: Callable[[], None] | None) -> int:
        """Block until all members have arrived; returns the barrier's number.

        Meanwhile ``step`` mixes as far as the others come: see [Note: mixing at the barrier]. ``what`` names the call,
        which must be the same on all members.
        """
        number, self.next_number = self.next_number, self.next_number + 1
        with self.mesh.changed:
            self._arrived.setdefault(number, {})[self.mesh.member_id] = (what, clock())
        fields = {"number": number, "what": what, "clock": clock()}
        notified = {self.mesh.member_id}

        def not_notified() -> set[int]:
            return set(self.mesh.membership.active()) - notified  # all at first; then those that have joined since

        def can_proceed() -> bool:
            is_behind = step is not None and self._furthest(number) > clock()
            return bool(not_notified()) or is_behind or not self._missing(number)

        while True:
            start_s, progress = time.monotonic(), self.mesh.progress()
            if not self.mesh.wait(can_proceed, self.timeout_s):
                stalled = self.mesh.stalled(self._missing(number), progress)
                if not stalled:
                    continue  # the missing members still train
                raise PeerLost(
                    rank=tuple(stalled),
                    reason=f"it did not come to {what}() in time. All ranks that live call it.",
                    after_s=time.monotonic() - start_s,
                    during=what,
                )
            if new := not_notified():
                self.mesh.broadcast("arrived", fields, new)
                notified |= new
            elif step is not None and self._furthest(number) > clock():
                step()
            elif not self._missing(number):
                break
        self._check_same(number, what)
        with self.mesh.changed:
            self._arrived.pop(number)
        return number

    def has_arrived(self, member: int) -> bool:
        """Whether a member waits at the next barrier, which this member has not reached."""
        return member in self._arrived.get(self.next_number, {})

    def _missing(self, number: int) -> list[int]:
        arrived = self._arrived.get(number, {})
        return [member for member in self.mesh.membership.active() if member not in arrived]

    def _furthest(self, number: int) -> int:
        """The clock that all mix up to; while a member is missing, what is known of it so far.

        Once all have arrived it is the highest clock that any of them arrived with. The current clock of a member that
        has gone on to its next step does not count, or the result would depend on which member is quicker.
        """
        membership, arrived = self.mesh.membership, self._arrived.get(number, {})
        current = [self.mesh.clocks.get(member, 0) for member in membership.active() if member != self.mesh.member_id]
        # A member that has left since counts; one that is dead, or that never joined, does not.
        at_arrival = [
            clock
            for member, (_, clock) in arrived.items()
            if member in membership.joined and member not in membership.dead
        ]
        return max([*current, *at_arrival] if self._missing(number) else at_arrival, default=0)

    def _check_same(self, number: int, what: str) -> None:
        for member, (other, _) in sorted(self._arrived[number].items()):
            if other != what and member in self.mesh.membership.joined:
                raise OutOfStep(f"rank {member} is in {other}(), this rank in {what}(). All ranks call the same.")

    def _on_arrived(self, sender: int, message: Message) -> None:
        number, what = message.fields["number"], message.fields["what"]
        with self.mesh.changed:
            self._check_limit(self._arrived, number, sender)
            self._arrived.setdefault(number, {})[sender] = (what, message.fields["clock"])

    # -- the exact mean -------------------------------------------------------------------------------------------

    def mean(self, number: int, weight: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of what all active members pass in, bitwise the same on all. Blocks. ``number``: the barrier's."""
        own = Message("contribution", {"number": number, "weight": weight}, dict(tensors))
        result: Message | None = None
        last_leader = -1
        while result is None:
            with self.mesh.changed:
                leader = min(self.mesh.membership.active())
            if leader == self.mesh.member_id:
                result = self._compute_mean(number, own, ask_others=last_leader >= 0)
            else:
                if last_leader != leader:
                    self.mesh.send(leader, own)
                    last_leader = leader
                result = self._receive_mean(number, leader)
        with self.mesh.changed:
            self._cached_mean, self._finished = (number, result), number
            self._contributions.pop(number, None)
            self._means.pop(number, None)
        self.mesh.broadcast("have_mean", {"number": number})
        with self.mesh.changed:
            self._drop_mean_if_all_have_it(number)
        return result.tensors

    def _compute_mean(self, number: int, own: Message, *, ask_others: bool) -> Message:
        if ask_others:  # an earlier leader died, and may have sent the mean to some members
            self.mesh.broadcast("request_mean", {"number": number})
        me, start_s = self.mesh.member_id, time.monotonic()

        def missing() -> list[int]:
            parts = self._contributions.get(number, {})
            return [member for member in self.mesh.membership.active() if member != me and member not in parts]

        if not self.mesh.wait(lambda: number in self._means or not missing(), self.timeout_s + SLACK_S):
            raise self._timeout_error(missing(), start_s)
        with self.mesh.changed:
            if number in self._means:
                return self._means[number]
            active = self.mesh.membership.active()
            parts = {**{m: p for m, p in self._contributions.get(number, {}).items() if m in active}, me: own}
        result = Message("mean", {"number": number}, _mean([parts[member] for member in sorted(parts)]))
        for member in sorted(parts):
            self.mesh.send(member, Message("mean", {"number": number}, result.tensors))
        return result

    def _receive_mean(self, number: int, leader: int) -> Message | None:
        start_s = time.monotonic()

        def is_decided() -> bool:
            # Another member, which has the mean, may report that the leader left before the leader's mean is read here.
            is_gone = leader not in self.mesh.membership.active() and not self.mesh.is_connected(leader)
            return number in self._means or is_gone

        if not self.mesh.wait(is_decided, self.timeout_s + SLACK_S):
            raise self._timeout_error([leader], start_s)
        return self._means.get(number)

    def _timeout_error(self, members: list[int], start_s: float) -> PeerLost:
        reason = "it is alive, but has not sent its part of the mean in time"
        return PeerLost(rank=tuple(members), reason=reason, after_s=time.monotonic() - start_s, during="settle")

    def _on_contribution(self, sender: int, message: Message) -> None:
        number = message.fields["number"]
        with self.mesh.changed:
            if number > self._finished:
                self._check_limit(self._contributions, number, sender)
                self._contributions.setdefault(number, {})[sender] = message
        self._send_cached_mean(number, sender)

    def _on_mean_request(self, sender: int, message: Message) -> None:
        self._send_cached_mean(message.fields["number"], sender)

    def _send_cached_mean(self, number: int, member: int) -> None:
        cached = self._cached_mean
        if cached is not None and cached[0] == number:
            self.mesh.send(member, Message("mean", {"number": number}, cached[1].tensors))

    def _on_mean(self, sender: int, message: Message) -> None:
        number = message.fields["number"]
        with self.mesh.changed:
            if sender not in self.mesh.membership.joined or len(self._means) >= MAX_OPEN_BARRIERS:
                raise ValueError("its sender is no member, or too many means are pending")
            if number > self._finished:
                self._means.setdefault(number, message)

    def _on_have_mean(self, sender: int, message: Message) -> None:
        number = message.fields["number"]
        with self.mesh.changed:
            self._check_limit(self._have_mean, number, sender)
            self._have_mean.setdefault(number, set()).add(sender)
            self._drop_mean_if_all_have_it(number)

    def _check_limit(self, received: Mapping[int, Collection[int]], number: int, sender: int) -> None:
        """Refuse messages that would pile up. All members reach the barriers in order, so few are open at a time.

        Senders that this member does not know yet (a newcomer's message may be quicker than the new membership) share
        one limit.
        """
        known = self.mesh.membership.joined
        from_unknown = [member for senders in received.values() for member in senders if member not in known]
        same = [at for at, senders in received.items() if sender in senders] if sender in known else from_unknown
        if len(same) >= MAX_OPEN_BARRIERS and sender not in received.get(number, ()):
            raise ValueError(f"it has come to more than {MAX_OPEN_BARRIERS} barriers that have not ended")

    def _drop_mean_if_all_have_it(self, number: int) -> None:
        others = set(self.mesh.membership.active()) - {self.mesh.member_id}
        is_cached = self._cached_mean is not None and self._cached_mean[0] == number
        if is_cached and others <= self._have_mean.get(number, set()):
            self._cached_mean = None
            self._have_mean = {later: members for later, members in self._have_mean.items() if later > number}


@torch.no_grad()
def _mean(parts: list[Message]) -> dict[str, Tensor]:
    """``parts`` are in the order of the members, so that the result has the same bits whichever member computes it."""
    weight = sum(float(part.fields["weight"]) for part in parts)
    means = {}
    for name, first in parts[0].tensors.items():
        total = first.clone()
        if name[0] in (BY_WEIGHT, BY_COUNT):
            for part in parts[1:]:
                total += part.tensors[name]
            total /= weight if name[0] == BY_WEIGHT else len(parts)
        means[name] = total
    return means
