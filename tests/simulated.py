"""Ranks of this machine that are told that they are on several hosts, for tests of what goes between hosts."""

from __future__ import annotations

import os

from gradsync.comm import spinning
from gradsync.comm.c10d import C10d
from gradsync.comm.connect import connect
from gradsync.comm.hierarchical import MAX_LANES, Hierarchical


def connect_on_hosts(hosts: str, *, timeout_s: float, lanes: int = MAX_LANES) -> Hierarchical:
    """Connect this process, one of ``len(hosts)``: ranks with the same letter are on one host ("aabb")."""
    share_cores(len(set(hosts)))
    base = connect("c10d", timeout_s=timeout_s)
    assert isinstance(base, C10d)
    assert base.world_size == len(hosts)
    return Hierarchical(base, hosts=hosts, why="simulated hosts", lanes=lanes)


def share_cores(num_hosts: int) -> None:
    """Let this process wait as a rank does that has its part of the cores: real hosts have cores of their own.

    Else two ranks on each of two hosts would each keep a core of two, and keep the others from it.
    """
    spinning._num_cores = lambda: len(os.sched_getaffinity(0)) // num_hosts
