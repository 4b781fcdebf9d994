"""Graphs: who pushes to whom, and that all hear of all."""

from __future__ import annotations

import pytest

from gradsync.gossip import Exponential, Random, Ring, Topology
from tests.gossip.trial import Lopsided


@pytest.mark.parametrize("topology", [Ring(), Exponential(), Random(seed=3), Lopsided()])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_sources_are_those_whose_targets_one_is_and_all_hear_of_all(topology: Topology, size: int) -> None:
    reached = {place: {place} for place in range(size)}
    for step in range(24):
        targets = {place: topology.targets(place, size, step) for place in range(size)}
        for place in range(size):
            assert place not in targets[place]
            assert topology.sources(place, size, step) == [p for p in range(size) if place in targets[p]]
        before = {place: set(who) for place, who in reached.items()}
        for place, found in targets.items():
            for target in found:
                reached[target] |= before[place]
    assert all(len(who) == size for who in reached.values())
