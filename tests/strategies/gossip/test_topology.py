"""Topologies: sources match targets, and values of every member reach every other."""

from __future__ import annotations

import pytest

from gradsync.strategies.gossip import Exponential, Random, Ring, Topology
from tests.strategies.gossip.trial import Lopsided


@pytest.mark.parametrize("topology", [Ring(), Exponential(), Random(seed=3), Lopsided()])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_topology_sources_match_targets_and_connect_all(topology: Topology, size: int) -> None:
    reached = {place: {place} for place in range(size)}
    for step in range(24):
        targets = {place: topology.targets(place, size, step) for place in range(size)}
        for place in range(size):
            assert place not in targets[place]
            assert topology.sources(place, size, step) == [p for p in range(size) if place in targets[p]]
        before = {place: set(members) for place, members in reached.items()}
        for place, found in targets.items():
            for target in found:
                reached[target] |= before[place]
    assert all(len(members) == size for members in reached.values())
