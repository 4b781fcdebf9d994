"""What torch.distributed leaves open, and our communicator over it does not."""

from __future__ import annotations

import time
from typing import Any

import gradsync
from gradsync.comm import c10d
from tests.ranks import run_processes

LATE_S = 0.5


def enter_late() -> tuple[float, float]:
    """When this rank had its part of a new group, and when it was told that the group stands."""
    comm = gradsync.connect("c10d", timeout_s=30)
    plain, has_it = c10d._new_group, []

    def make(*args: Any) -> Any:
        group = plain(*args)
        time.sleep(LATE_S * comm.rank)
        has_it.append(time.monotonic())
        return group

    c10d._new_group = make
    comm.clone()
    return has_it[0], time.monotonic()


def test_a_group_stands_once_all_are_in_it() -> None:
    # Rank 0 may end right after, and the store that others look each other up in ends with it.
    (_, stands), (last_has_it, _) = run_processes(2, enter_late)
    assert stands >= last_has_it
