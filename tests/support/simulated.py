"""Simulated hosts: ranks of this machine that behave as if they were on several hosts."""

from __future__ import annotations

import os

from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.connect import connect
from gradsync.comm.hierarchical.communicator import MAX_LEADERS, Hierarchical
from gradsync.comm.shm import spin


def connect_on_hosts(hosts: str, *, timeout_s: float, leaders: int = MAX_LEADERS) -> Hierarchical:
    """Connect this process, one of ``len(hosts)``: ranks with the same letter are on one host ("aabb")."""
    divide_cores(len(set(hosts)))
    base = connect("c10d", timeout_s=timeout_s).unchecked()
    assert isinstance(base, C10d)
    assert base.world_size == len(hosts)
    return Hierarchical(base, hosts=hosts, why="simulated hosts", leaders=leaders)


def divide_cores(num_hosts: int) -> None:
    """Give this process the spin policy of a rank with its share of the cores: real hosts have cores of their own.

    Otherwise two ranks on each of two simulated hosts would spin on both cores, and keep the others from running.
    """
    spin._num_cores = lambda: len(os.sched_getaffinity(0)) // num_hosts
