"""The least time that a synchronous step can take: the longer of its computation and its bytes on the link."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.support.cluster import Cluster


def exact_wire_bytes(gradient_bytes: int, hosts: int) -> float:
    """The bytes that a host must send, and receive, for an exact sum over the hosts: 2(n-1)/n of the gradients.

    Ranks of one host sum in its memory, so it is the hosts that count.

    >>> exact_wire_bytes(100, 2), exact_wire_bytes(100, 4), exact_wire_bytes(100, 1)
    (100.0, 150.0, 0.0)
    """
    return 2 * (hosts - 1) / hosts * gradient_bytes


def step_bounds(compute_s: Sequence[float], wire_bytes: float, cluster: Cluster) -> list[float]:
    """The bound of each step: all communication is overlapped, and a link sends while it receives (full duplex).

    >>> step_bounds([0.1, 0.9], 62_500_000, Cluster(link="1gbit", world=2))
    [0.5, 0.9]
    """
    wire_s = wire_bytes / cluster.bytes_per_s
    return [max(compute, wire_s) for compute in compute_s]
