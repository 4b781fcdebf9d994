"""Who takes part, as far as one member knows. The book only grows, so any two can be made one by adding them up.

[Note: epochs] Who is known to have joined and to be gone makes an *epoch*. Values that travel belong to the epoch of
their sender. When a member learns of a change it enters the next epoch with its own model and a weight of one, and
drops what still comes from older epochs: its sender has kept its model, and will enter as well. So the weights of the
living add up to their number, though nobody knows what the dead had, or what was on its way to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """Who had joined and who was gone; ordered as sets are, so some are neither older nor newer."""

    joined: frozenset[int]
    gone: frozenset[int]

    @property
    def members(self) -> list[int]:
        """The living, in the order of their places."""
        return sorted(self.joined - self.gone)

    def is_before(self, other: Epoch) -> bool:
        """Whether the other knows all that this one does, and more."""
        return self != other and self.joined <= other.joined and self.gone <= other.gone

    def to_json(self) -> list[list[int]]:
        return [sorted(self.joined), sorted(self.gone)]

    @staticmethod
    def from_json(value: Any) -> Epoch:
        joined, gone = value
        return Epoch(frozenset(int(who) for who in joined), frozenset(int(who) for who in gone))


@dataclass
class Book:
    """Not locked: its owner sees to that."""

    joined: dict[int, str] = field(default_factory=dict)  # each with its address
    dead: dict[int, str] = field(default_factory=dict)  # each with the reason
    left: dict[int, int] = field(default_factory=dict)  # in order: the first step that it has no part in

    def epoch(self, step: int) -> Epoch:
        """Who takes part in a step. Who left in order was there until then: so all ranks see the same at that step."""
        gone = {who for who, at in self.left.items() if at <= step and who not in self.dead}
        return Epoch(frozenset(self.joined), frozenset(gone | self.dead.keys()))

    def present(self) -> list[int]:
        """Who can still be reached."""
        return sorted(self.joined.keys() - self.dead.keys() - self.left.keys())

    def add(self, other: Book) -> bool:
        """Learn what another book knows; says whether that was news."""
        before = (len(self.joined), len(self.dead), len(self.left))
        self.joined = {**other.joined, **self.joined}
        self.dead = {**other.dead, **self.dead}
        self.left = {**other.left, **self.left}
        return before != (len(self.joined), len(self.dead), len(self.left))

    def to_json(self) -> list[list[list[Any]]]:
        return [[list(item) for item in part.items()] for part in (self.joined, self.dead, self.left)]

    @staticmethod
    def from_json(value: Any) -> Book:
        joined, dead, left = value
        return Book(
            {int(who): str(address) for who, address in joined},
            {int(who): str(reason) for who, reason in dead},
            {int(who): int(at) for who, at in left},
        )
