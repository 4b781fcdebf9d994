"""Decentralised averaging of models between neighbours. Start at strategy.py; the topologies are public."""

from gradsync.strategies.gossip.topology import Exponential, Random, Ring, Topology

__all__ = ["Exponential", "Random", "Ring", "Topology"]
