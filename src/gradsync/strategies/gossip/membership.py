"""Which members take part, as far as one member knows. A view only grows, so any two views merge by their union.

[Note: epochs] The sets of members that are known to have joined and to be gone define an *epoch*. A message with values
carries its sender's epoch. A member that learns of a change enters the next epoch with its own model and a weight of
one, and drops messages of older epochs: their senders have kept their models, and will enter the new epoch as well. So
the weights of the active members add up to their number, though nobody knows which weight the dead members had, or what
was on its way to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MembershipEpoch:
    """The members that had joined and those that were gone. Partially ordered: of two epochs neither may be older."""

    joined: frozenset[int]
    gone: frozenset[int]

    @property
    def members(self) -> list[int]:
        """The active members, sorted by id: a member's index is its place in the topology."""
        return sorted(self.joined - self.gone)

    def is_before(self, other: MembershipEpoch) -> bool:
        """Whether ``other`` includes every change of this epoch, and at least one more."""
        return self != other and self.joined <= other.joined and self.gone <= other.gone

    def to_json(self) -> list[list[int]]:
        return [sorted(self.joined), sorted(self.gone)]

    @staticmethod
    def from_json(value: Any) -> MembershipEpoch:
        joined, gone = value
        return MembershipEpoch(frozenset(int(member) for member in joined), frozenset(int(member) for member in gone))


@dataclass
class MembershipView:
    """What one member knows of the membership. Not thread-safe: the owner locks it.

    >>> from gradsync.strategies.gossip.membership import MembershipView
    >>> view = MembershipView(joined={0: "tcp://a:1", 1: "tcp://b:1"})
    >>> view.merge(MembershipView(joined={2: "tcp://c:1"}, dead={1: "killed"}))
    True
    >>> view.active()
    [0, 2]
    """

    joined: dict[int, str] = field(default_factory=dict)  # by member id: its address
    dead: dict[int, str] = field(default_factory=dict)  # by member id: the reason
    left: dict[int, int] = field(default_factory=dict)  # members that left in order: the first step without them

    def epoch(self, step: int) -> MembershipEpoch:
        """The epoch of a step. A member that left in order takes part until that step: the same step on all ranks."""
        gone = {member for member, at in self.left.items() if at <= step and member not in self.dead}
        return MembershipEpoch(frozenset(self.joined), frozenset(gone | self.dead.keys()))

    def active(self) -> list[int]:
        """The members that are neither dead nor have left, sorted."""
        return sorted(self.joined.keys() - self.dead.keys() - self.left.keys())

    def merge(self, other: MembershipView) -> bool:
        """Add what another view knows; returns whether this view changed."""
        before = (len(self.joined), len(self.dead), len(self.left))
        self.joined = {**other.joined, **self.joined}
        self.dead = {**other.dead, **self.dead}
        self.left = {**other.left, **self.left}
        return before != (len(self.joined), len(self.dead), len(self.left))

    def to_json(self) -> list[list[list[Any]]]:
        return [[list(item) for item in part.items()] for part in (self.joined, self.dead, self.left)]

    @staticmethod
    def from_json(value: Any) -> MembershipView:
        joined, dead, left = value
        return MembershipView(
            {int(member): str(address) for member, address in joined},
            {int(member): str(reason) for member, reason in dead},
            {int(member): int(at) for member, at in left},
        )
