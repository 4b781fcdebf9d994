"""What the c10d communicator adds to torch.distributed."""

from __future__ import annotations

import time
from typing import Any

import torch

import gradsync
from gradsync.comm.c10d.groups import TorchGroups
from tests.support.ranks import run_processes

LATE_S = 0.5


def join_late() -> tuple[float, float]:
    """When this rank had joined a new group, and when ``clone`` returned."""
    comm = gradsync.connect("c10d", timeout_s=30)
    plain, joined_s = TorchGroups.make, []

    def make(self: TorchGroups, *args: Any) -> Any:
        group = plain(self, *args)
        time.sleep(LATE_S * comm.rank)
        joined_s.append(time.monotonic())
        return group

    TorchGroups.make = make  # type: ignore[method-assign]
    comm.clone()
    return joined_s[0], time.monotonic()


def test_clone_returns_after_all_ranks_have_joined() -> None:
    # Rank 0 may exit right after, and with it the store through which the others find each other.
    (_, returned_s), (last_joined_s, _) = run_processes(2, join_late)
    assert returned_s >= last_joined_s


def connect_beside_other_calls() -> tuple[list[float], list[float], list[bool]]:
    """Each rank waits for another call first, while the group's first all-to-all has to connect it.

    Returns the received rows, those of an all-gather that came after it, and, of an all-to-all that only rank 1 starts,
    whether it is over before and after its group is closed.
    """
    comm = gradsync.connect("c10d", timeout_s=20).unchecked()
    exchanging, summing, closed = comm.clone(), comm.clone(), comm.clone()
    rows, total = torch.full((comm.world_size,), float(comm.rank)), torch.ones(1)
    received, gathered = torch.empty_like(rows), torch.empty_like(rows)
    if comm.rank == 0:
        summing.all_reduce(total).wait()
    work = exchanging.all_to_all(rows, out=received)
    after = exchanging.all_gather(rows[0], out=gathered)
    never = closed.all_to_all(rows, out=torch.empty_like(rows)) if comm.rank == 1 else None
    if comm.rank == 1:
        summing.all_reduce(total).wait()  # rank 0 waits for it before it comes to the all-to-all
    else:
        work.wait()
    comm.clone()  # on rank 1 it blocks in the store meanwhile
    work.wait()
    after.wait()
    over = [] if never is None else [never.done()]
    closed.close()
    over += [] if never is None else [never.done()]
    comm.barrier()
    return received.tolist(), gathered.tolist(), over


def test_first_all_to_all_waits_for_no_other_rank() -> None:
    first, second = run_processes(2, connect_beside_other_calls, timeout_s=60)
    assert first == ([0.0, 1.0], [0.0, 1.0], [])
    assert second == ([0.0, 1.0], [0.0, 1.0], [False, True])
