"""What the c10d communicator adds to torch.distributed."""

from __future__ import annotations

import time
from typing import Any

import gradsync
from gradsync.comm.c10d import communicator as c10d
from tests.support.ranks import run_processes

LATE_S = 0.5


def join_late() -> tuple[float, float]:
    """When this rank had joined a new group, and when ``clone`` returned."""
    comm = gradsync.connect("c10d", timeout_s=30)
    plain, joined_s = c10d._new_group, []

    def make(*args: Any) -> Any:
        group = plain(*args)
        time.sleep(LATE_S * comm.rank)
        joined_s.append(time.monotonic())
        return group

    c10d._new_group = make
    comm.clone()
    return joined_s[0], time.monotonic()


def test_clone_returns_after_all_ranks_have_joined() -> None:
    # Rank 0 may exit right after, and with it the store through which the others find each other.
    (_, returned_s), (last_joined_s, _) = run_processes(2, join_late)
    assert returned_s >= last_joined_s
