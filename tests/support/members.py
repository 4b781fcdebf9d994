"""Real processes as the members of an elastic run: ``run_members(4, "shm", survive, 2)``. The store is the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from gradsync.comm import topology
from gradsync.comm.members import connect_members
from tests.support.ranks import run_processes
from tests.support.simulated import divide_cores

TRANSPORTS = ("c10d", "tcp", "shm", "hierarchical")  # that can change their members
HOSTS = "aabb"  # of the first members, for the hierarchical transport: those with the same letter are on one host


def run_members(
    size: int, transport: str, scenario: Callable[..., Any], *args: object, timeout_s: float = 20.0
) -> list[Any]:
    """Call ``scenario(comm, *args)`` in ``size`` processes; returns the results, or -9 for one that was killed."""
    # As a launcher does: the store outlives every member.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_processes(
        size, _be_member, server.port, transport, timeout_s, scenario, args, timeout_s=100, expect_failure=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def store_at(port: int) -> TCPStore:
    """A connection to the run's store."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))


def _be_member(
    port: int, transport: str, timeout_s: float, scenario: Callable[..., Any], args: tuple[object, ...]
) -> Any:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if transport == "hierarchical":
        simulate_host(HOSTS[rank])
    comm = connect_members(
        store_at(port),
        generation="first",
        rank=rank,
        world_size=size,
        transport=transport,
        timeout_s=timeout_s,
        why="a test",
    )
    return scenario(comm, *args)


def simulate_host(name: str) -> None:
    """Let this process be on a host of this name, for what chooses a transport."""
    topology.host_identity = lambda: [name]  # type: ignore[attr-defined]
    divide_cores(len(set(HOSTS)))
