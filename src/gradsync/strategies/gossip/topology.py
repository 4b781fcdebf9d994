"""Topologies of gossip: which member pushes to which at a step.

A topology knows members by their place: a member's index among the active ones, from 0. When a member dies, the others
move up.
"""

from __future__ import annotations

import abc
import random
from dataclasses import dataclass

from gradsync import spec


class Topology(abc.ABC):
    """A graph that may change from step to step. It may be directed: push-sum makes the mean right.

    Each member divides its values into equal shares: one for each target, and one that it keeps.

    >>> from gradsync import spec
    >>> from gradsync.strategies.gossip import Topology
    >>> class Star(Topology):                                  # a graph of one's own: all push to the first
    ...     def targets(self, place: int, size: int, step: int) -> list[int]:
    ...         return [0] if place else list(range(1, size))
    >>> spec.register("topology", "star")(Star)().sources(0, 4, step=0)
    [1, 2, 3]
    """

    neighbours_stay = False  # True: the same targets at every step, and the graph is undirected

    @abc.abstractmethod
    def targets(self, place: int, size: int, step: int) -> list[int]:
        """The places that the member at ``place`` of ``size`` pushes to, never its own."""

    def sources(self, place: int, size: int, step: int) -> list[int]:
        """The places that push to the member at ``place``, sorted."""
        return [other for other in range(size) if place in self.targets(other, size, step)]


@spec.register("topology", "ring")
@dataclass(frozen=True)
class Ring(Topology):
    """Both neighbours in a ring, at every step. Fewest connections in use, slowest to mix: in about n² steps.

    >>> from gradsync.strategies.gossip import Ring
    >>> Ring().targets(0, 5, step=7), Ring().targets(0, 2, step=7), Ring().targets(0, 1, step=7)
    ([1, 4], [1], [])
    """

    neighbours_stay = True

    def targets(self, place: int, size: int, step: int) -> list[int]:
        return sorted({(place + 1) % size, (place - 1) % size} - {place})

    def sources(self, place: int, size: int, step: int) -> list[int]:
        return self.targets(place, size, step)


@spec.register("topology", "exponential")
@dataclass(frozen=True)
class Exponential(Topology):
    """One peer a step, 1, 2, 4, ... places ahead in turn. With 2^k members all agree after k steps; it is directed.

    >>> from gradsync.strategies.gossip import Exponential
    >>> [Exponential().targets(0, 8, step) for step in range(4)]
    [[1], [2], [4], [1]]
    """

    def targets(self, place: int, size: int, step: int) -> list[int]:
        return [(place + _hop(size, step)) % size] if size > 1 else []

    def sources(self, place: int, size: int, step: int) -> list[int]:
        return [(place - _hop(size, step)) % size] if size > 1 else []


def _hop(size: int, step: int) -> int:
    return 1 << step % (size - 1).bit_length()  # hops of 1, 2, 4, ... below size


@spec.register("topology", "random")
@dataclass(frozen=True, kw_only=True)
class Random(Topology):
    """Random pairs, new ones for each step and the same on all members; of an odd number one member has no partner.

    >>> from gradsync.strategies.gossip import Random
    >>> [Random(seed=1).targets(place, 4, step=0) for place in range(4)]
    [[1], [0], [3], [2]]
    """

    seed: int = 0

    def targets(self, place: int, size: int, step: int) -> list[int]:
        row = list(range(size))
        random.Random(f"{self.seed}/{step}/{size}").shuffle(row)
        at = row.index(place) ^ 1  # pairs are (0, 1), (2, 3), ... of the shuffled row
        return [row[at]] if at < size else []

    def sources(self, place: int, size: int, step: int) -> list[int]:
        return self.targets(place, size, step)


spec.declare("topology", Topology)
