"""The contract of worlds that change their members, on every transport that can: see ``connect_members``."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from gradsync.comm.base import Communicator
from gradsync.comm.c10d.groups import BareGroups
from gradsync.comm.following import Following
from gradsync.comm.members import connect_members
from gradsync.comm.objects import all_gather_object
from gradsync.errors import GradSyncError, PeerLost
from gradsync.testing.threads import run_ranks
from tests.support.members import TRANSPORTS, run_members, store_at
from tests.support.ranks import run_processes

PROMPT_S = 6.0  # far below the timeout of the worlds (20 s), and what a busy machine may take
LATE_S = 4.0  # the timeout of a world to which a member does not come
CPU = torch.device("cpu")


class Died(Exception):
    """How a rank that is a thread dies."""


def die_as_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_as_thread() -> None:
    raise Died


def run_as_threads(size: int, scenario: Callable[..., Any], *args: object) -> list[Any]:
    """As ``run_members``: what each rank returned, or -9 for the one that died."""
    results: dict[int, Any] = {}

    def rank_main(comm: Communicator) -> None:
        rank = comm.rank
        results[rank] = -9
        results[rank] = scenario(comm, *args)

    with contextlib.suppress(Died):
        run_ranks(size, rank_main, timeout_s=20.0)
    return [results[rank] for rank in range(size)]


def check_collectives(comm: Communicator) -> None:
    """Every collective gives what it must, with small and large tensors, and in a clone."""
    n, rank = comm.world_size, comm.rank
    for group in (comm, comm.clone()):
        for numel in (3, 70_001):
            total = torch.full((numel,), float(rank + 1))
            group.all_reduce(total).wait()
            assert torch.equal(total, torch.full((numel,), n * (n + 1) / 2))
            rows = torch.empty(n, numel)
            group.all_gather(torch.full((numel,), float(rank)), out=rows).wait()
            assert torch.equal(rows, torch.arange(float(n)).view(n, 1).expand(n, numel))
            group.all_to_all(torch.full((n, numel), float(rank)), out=rows.zero_()).wait()
            assert torch.equal(rows, torch.arange(float(n)).view(n, 1).expand(n, numel))
            given = torch.full((numel,), float(rank))
            group.broadcast(given, n - 1).wait()
            assert torch.equal(given, torch.full((numel,), n - 1.0))
            bucket = group.allocate(numel, torch.float32, CPU).fill_(rank)
            group.all_reduce(bucket).wait()
            assert torch.equal(bucket, torch.full((numel,), n * (n - 1) / 2))
        if group is not comm:
            group.close()


def lose(comm: Communicator, victim: int, die: Callable[[], None]) -> PeerLost:
    """One rank dies amid all-reduces; the others go on until they notice. Returns the error that they got."""
    deadline_s = time.monotonic() + PROMPT_S
    for step in range(100_000):
        if comm.rank == victim and step == 5:
            die()
        try:
            comm.all_reduce(torch.ones(100)).wait()
        except PeerLost as lost:
            assert time.monotonic() < deadline_s
            return lost
    raise AssertionError("nobody noticed")


def survive(comm: Communicator, victim: int, die: Callable[[], None]) -> list[tuple[int, int, str]]:
    """From four ranks to three, after a death, and then to one. Returns this rank's place in each world."""
    handles = all_gather_object(comm, comm.reconfigure_handle())
    check_collectives(comm)
    worker, places = comm.worker, [(comm.rank, comm.world_size, comm.transport)]
    lost = lose(comm, victim, die)
    assert victim in lost.ranks, lost
    comm.abandon()
    comm.abandon()  # twice is once
    survivors = [handle for rank, handle in enumerate(handles) if rank != victim]
    began_s = time.monotonic()
    comm = comm.reconfigure("second", survivors)
    assert time.monotonic() - began_s < PROMPT_S
    assert comm.worker is worker
    assert comm.reconfigure_handle() == survivors[comm.rank]
    check_collectives(comm)
    places.append((comm.rank, comm.world_size, comm.transport))
    with pytest.raises(ValueError, match="must be among the handles"):
        comm.reconfigure("third", survivors[comm.rank + 1 :])
    comm = comm.reconfigure("third", [comm.reconfigure_handle()])
    check_collectives(comm)
    places.append((comm.rank, comm.world_size, comm.transport))
    comm.close()
    return places


@pytest.mark.parametrize("transport", [*TRANSPORTS, "threads"])
@pytest.mark.parametrize("victim", [0, 2])
def test_reconfigure_goes_on_with_the_survivors_of_a_kill(transport: str, victim: int) -> None:
    if transport == "threads":
        results = run_as_threads(4, survive, victim, die_as_thread)
    else:
        results = run_members(4, transport, survive, victim, die_as_process)
    survivors = [rank for rank in range(4) if rank != victim]
    assert results[victim] == -9
    alone = "threads" if transport == "threads" else "solo"
    for rank, old_rank in enumerate(survivors):
        assert results[old_rank] == [(old_rank, 4, transport), (rank, 3, transport), (0, 1, alone)]


def leave_behind_pending_work(comm: Communicator, die: Callable[[], None]) -> float:
    """Rank 3 dies. Ranks 0 and 1 have a collective under way that rank 2, which is alive, never joins.

    Rank 0 waits for rank 1 in a group of the two, which rank 1 never comes to. Returns how long going on took.
    """
    handles = all_gather_object(comm, comm.reconfigure_handle())
    pending, pair = comm.clone(), comm.split([0, 1])
    bucket = pending.allocate(50_000, torch.float32, CPU)
    check_collectives(comm)
    if comm.rank < 2:
        works = [pending.all_reduce(bucket), pending.all_reduce(torch.ones(200_000))]
    if comm.rank == 3:
        time.sleep(0.3)
        die()
    waits_in = pair if comm.rank == 0 else comm
    assert waits_in is not None
    with pytest.raises(PeerLost) as lost:
        waits_in.all_reduce(torch.ones(3)).wait()
    assert lost.value.ranks == (3,)
    began_s = time.monotonic()
    comm = comm.reconfigure("second", handles[:3])
    took_s = time.monotonic() - began_s
    check_collectives(comm)
    if comm.rank < 2:
        assert bucket.fill_(2.0).sum().item() == 100_000.0  # the old world's memory is still there
        for work in works:
            with pytest.raises((GradSyncError, ValueError)):
                work.wait()
    comm.close()
    return took_s


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reconfigure_does_not_wait_for_pending_work(transport: str) -> None:
    results = run_members(4, transport, leave_behind_pending_work, die_as_process)
    assert results.pop() == -9
    assert max(results) < PROMPT_S


def held() -> dict[str, int]:
    """What this process holds of the system's resources."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": sum("memfd:gradsync" in line for line in maps),
        "mappings in units of 25": len(maps) // 25,
    }


def change_often(comm: Communicator, generations: int) -> tuple[dict[str, int], dict[str, int]]:
    """What this process holds after the second of many worlds, and after the last."""
    handles = all_gather_object(comm, comm.reconfigure_handle())
    after_second: dict[str, int] = {}
    for number in range(generations):
        comm = comm.reconfigure(f"number {number}", handles)
        check_collectives(comm)
        clone = comm.unchecked().clone()  # which is not closed: the end of its world releases it
        clone.all_reduce(torch.ones(10)).wait()
        if number == 1:
            del clone
            gc.collect()
            time.sleep(1.0)  # for the reaper
            after_second = held()
    del clone
    gc.collect()
    end_s = time.monotonic() + PROMPT_S
    while time.monotonic() < end_s and any(count > after_second[what] for what, count in held().items()):
        time.sleep(0.1)
    return after_second, held()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worlds_leave_nothing_behind(transport: str) -> None:
    for after_second, at_end in run_members(4, transport, change_often, 20):
        assert all(count <= after_second[what] for what, count in at_end.items()), (after_second, at_end)


def come_too_late(port: int, transport: str, dies_in: str, timeout_s: float) -> tuple[tuple[int, ...], float, bool]:
    """The last member does not come, or dies while it connects. Returns the lost ranks, the time, and what is left."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == size - 1:
        if dies_in == "absence":
            return (), 0.0, True
        make = BareGroups.make

        def die_in(self: BareGroups, *args: Any) -> Any:
            wait = self._wait_for_members

            def die(*args: Any) -> None:
                if dies_in == "Gloo":  # the others have seen it come, and block in C
                    wait(*args)
                die_as_process()

            self._wait_for_members = die  # type: ignore[method-assign]
            return make(self, *args)

        BareGroups.make = die_in  # type: ignore[method-assign]
    store = store_at(port)
    store.set(f"started/{rank}", "")
    # (Only their coming to the world is late or not, never their start.)
    store.wait([f"started/{number}" for number in range(size - (dies_in == "absence"))], timedelta(seconds=40))
    before = held()
    began_s = time.monotonic()
    try:
        connect_members(
            store, generation="x", rank=rank, world_size=size, transport=transport, timeout_s=timeout_s, why="a test"
        )
    except PeerLost as lost:
        took_s = time.monotonic() - began_s
        ranks = lost.ranks
        del lost
    gc.collect()
    time.sleep(0.5)
    after = held()
    # One connection to the store is kept, and the reaper's thread may be there.
    clean = after["descriptors"] <= before["descriptors"] + 1 and after["threads"] <= before["threads"] + 1
    return ranks, took_s, clean


@pytest.mark.parametrize(
    ("dies_in", "timeout_s"),
    # Gloo itself would give up only after a fifth of the timeout.
    [("absence", LATE_S), ("connecting", LATE_S), ("Gloo", 20 * LATE_S)],
)
def test_connect_members_names_a_member_that_does_not_come(dies_in: str, timeout_s: float) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    *others, last = run_processes(
        3, come_too_late, server.port, "shm", dies_in, timeout_s, expect_failure=True, timeout_s=60
    )
    assert last == (((), 0.0, True) if dies_in == "absence" else -9)
    for outcome in others:
        assert isinstance(outcome, tuple), outcome
        ranks, took_s, clean = outcome
        assert ranks == (2,)
        assert took_s < LATE_S + 3.0
        assert clean or dies_in == "Gloo"  # a thread stays until Gloo gives up


def join_from_alone(port: int) -> tuple[list[int], float]:
    """Three processes, each a world of one at first: two become a world, then the third joins."""
    place = int(os.environ["RANK"])
    store = store_at(port)
    following = Following()
    following.replace(
        connect_members(
            store, generation=f"alone {place}", rank=0, world_size=1, timeout_s=20, why="x", worker=following.worker
        )
    )
    store.set(f"handle/{place}", following.reconfigure_handle())
    handles = [store.get(f"handle/{number}").decode() for number in range(3)]
    sizes = [following.world_size]
    if place < 2:
        following.reconfigure("two", handles[:2])
        check_collectives(following)
        sizes.append(following.world_size)
    assert following.reconfigure("three", handles[::-1]) is following
    assert following.rank == 2 - place
    check_collectives(following)
    sizes.append(following.world_size)
    total = torch.tensor([float(place)])
    following.all_reduce(total).wait()
    following.close()
    return sizes, total.item()


def test_worlds_of_one_become_a_larger_world() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(3, join_from_alone, server.port) == [([1, 2, 3], 3.0), ([1, 2, 3], 3.0), ([1, 3], 3.0)]
