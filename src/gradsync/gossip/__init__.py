"""Decentralised averaging: who talks to whom, and how values mix. What drives it is strategies/gossip.py."""

from gradsync.gossip.topology import Exponential, Random, Ring, Topology

__all__ = ["Exponential", "Random", "Ring", "Topology"]
