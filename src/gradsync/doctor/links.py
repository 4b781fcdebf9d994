"""Measuring between the ranks: rate, latency, all-reduces of several sizes, clocks. Blocks; every rank takes part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradsync.advisor.network import Network, measure_network
from gradsync.comm.allreduce.autotune import hosts_of
from gradsync.comm.base import Communicator
from gradsync.comm.objects import broadcast_object
from gradsync.comm.topology import ranks_by_host

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
PINGS = 8


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """The measurements between the ranks."""

    transport: str
    why: str
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host
    network: Network
    all_reduce: tuple[tuple[int, float], ...]  # (bytes, seconds)

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LinkReport:
        """Restore a report from ``as_dict``, directly or from JSON."""
        return cls(
            **{
                **data,
                "hosts": tuple(map(tuple, data["hosts"])),
                "network": Network.from_dict(data["network"]),
                "all_reduce": tuple((size, seconds) for size, seconds in data["all_reduce"]),
            }
        )


def measure_links(comm: Communicator, *, seconds: float = 3.0, sizes: Sequence[int] = SIZES) -> LinkReport:
    """Measure the links between the ranks, for about ``seconds``. Sizes that would take too long are left out."""
    network = measure_network(comm, seconds=seconds / 2)
    hosts = ranks_by_host(hosts_of(comm))
    return LinkReport(
        transport=comm.transport,
        why=comm.why,
        world_size=comm.world_size,
        hosts=tuple(map(tuple, hosts)),
        network=network,
        all_reduce=tuple(_all_reduces(comm, network, seconds / 2, sizes)),
    )


def _all_reduces(comm: Communicator, network: Network, seconds: float, sizes: Sequence[int]) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for size in sizes:
        expected_s = network.call_s + 2 * size / network.bytes_per_s
        if found and expected_s > seconds / 2:
            break
        repeats = max(2, min(50, int(seconds / len(sizes) / expected_s)))
        tensor = torch.zeros(size // 4)
        taken = []
        for _ in range(repeats):
            comm.barrier()
            start_s = time.perf_counter()
            comm.all_reduce(tensor).wait()
            taken.append(time.perf_counter() - start_s)
        slowest = torch.tensor([statistics.median(taken)], dtype=torch.float64)
        comm.all_reduce(slowest, op="max").wait()
        found.append((size, float(slowest[0])))
    return found


def clock_offsets(comm: Communicator) -> list[float]:
    """By how many seconds each rank's wall clock is ahead of rank 0's. Blocks; the same answer on all ranks.

    Rank 0 asks each rank in turn for its time, several times. The answer with the shortest round trip counts: the
    middle of that round trip is the best estimate of when it was given.
    """
    offsets = [0.0]
    for other in range(1, comm.world_size):
        best_s, offset = float("inf"), 0.0
        answer = torch.zeros(1, dtype=torch.float64)
        for _ in range(PINGS):
            if comm.rank == 0:
                asked_s = time.time()
                comm.send(answer, other).wait()
                comm.recv(answer, other).wait()
                taken_s = time.time() - asked_s
                if taken_s < best_s:
                    best_s, offset = taken_s, float(answer[0]) - (asked_s + taken_s / 2)
            elif comm.rank == other:
                comm.recv(answer, 0).wait()
                answer[0] = time.time()
                comm.send(answer, 0).wait()
        offsets.append(offset)
    agreed: list[float] = broadcast_object(comm, offsets if comm.rank == 0 else None, src=0)
    return agreed
