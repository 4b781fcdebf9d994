"""Ranks on the hosts of a lab, for tests: ``call_on_hosts(lab, train, seed)`` calls ``train(seed)`` on each of them.

The processes are forked from the fork server (see support/ranks.py) and enter their host's network namespace first.
With ``lab.run`` each of them would have to import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gradsync.testing import Lab
from gradsync.testing.network import INTERFACE
from tests.support.launching import enter_network
from tests.support.ranks import run_processes
from tests.support.simulated import divide_cores

T = TypeVar("T")


def call_on_hosts(lab: Lab, fn: Callable[..., T], *args: object, per_host: int = 1, timeout_s: float) -> list[T]:
    """Call ``fn(*args)`` in ``per_host`` processes of each host; returns what each returned, host by host."""
    world = {"WORLD_SIZE": str(lab.hosts * per_host), "LOCAL_WORLD_SIZE": str(per_host)}
    namespaces = [lab.namespace(host) for host in range(lab.hosts)]
    env = {**lab.environment(0), **world}  # each process sets its own rank
    return run_processes(
        lab.hosts * per_host, _call_inside, namespaces, per_host, fn, args, env=env, timeout_s=timeout_s
    )


def _call_inside(namespaces: list[str], per_host: int, fn: Callable[..., T], args: tuple[object, ...]) -> T:
    host, local = divmod(int(os.environ["RANK"]), per_host)
    os.environ["LOCAL_RANK"] = str(local)
    enter_network(namespaces[host])
    divide_cores(len(namespaces))
    return fn(*args)


def bytes_sent() -> int:
    """How many bytes the interface of this process's host has sent, as counted by the kernel."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise AssertionError(f"this process sees no {INTERFACE}")
