"""Clocks of different hosts: found apart, and held within what is possible."""

from __future__ import annotations

import time

import pytest

from gradsync.comm import Communicator, run_ranks
from gradsync.profiling.clocks import ROUNDS, Clocks, clock_identity, meet, narrowed, same_clock
from tests.profiling.notes import MS, a_step

AHEAD_NS = (0, 5_000_000_000, -70_000_000_000)


class Counted:
    """A communicator of which only all_gather is used, and counted."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size, self.calls, self._comm = comm.rank, comm.world_size, 0, comm

    def all_gather(self, tensor: object, *, out: object) -> object:
        self.calls += 1
        return self._comm.all_gather(tensor, out=out)  # type: ignore[arg-type]


def test_clocks_of_different_hosts_are_found_apart() -> None:
    def compare(comm: Communicator) -> Clocks:
        ahead_ns = AHEAD_NS[comm.rank]
        return meet(comm, identity=f"host {comm.rank}", now=lambda: time.perf_counter_ns() + ahead_ns)

    everyone = run_ranks(3, compare)
    assert len(set(everyone)) == 1
    clocks = everyone[0]
    for rank, ahead_ns in enumerate(AHEAD_NS):
        assert abs(clocks.offset_ns(rank) + ahead_ns) <= clocks.error_ns  # what is added takes back what it is ahead


def test_ranks_of_one_host_read_one_clock_and_exchange_one_message() -> None:
    def compare(comm: Communicator) -> tuple[Clocks, int]:
        counted = Counted(comm)
        return meet(counted), counted.calls  # type: ignore[arg-type]

    assert run_ranks(2, compare) == [(same_clock(2), 1)] * 2
    assert clock_identity() == clock_identity()


def test_hosts_exchange_a_bounded_number_of_messages() -> None:
    def compare(comm: Communicator) -> int:
        counted = Counted(comm)
        meet(counted, identity=f"host {comm.rank}")  # type: ignore[arg-type]
        return counted.calls

    assert run_ranks(2, compare) == [ROUNDS + 2] * 2


@pytest.mark.parametrize("wrong_ms", [-500, -20, 0, 20, 500])
def test_collectives_narrow_down_what_was_measured(wrong_ms: int) -> None:
    """Nobody is done before everybody has come: whatever was measured ends up within that."""
    steps = {
        0: {n: a_step(n, 0, late_ms=40) for n in range(5)},
        1: {n: a_step(n, 1, late_ms=40, ahead_ms=1000) for n in range(5)},
    }
    found = narrowed(Clocks((0, (-1000 + wrong_ms) * MS), 900 * MS), steps)
    offset_ms = found[2].offset_ns(1) / MS
    for number, raw in steps[0].items():
        for mine, theirs in zip(raw.ops, steps[1][number].ops, strict=True):
            assert theirs.done / MS + offset_ms >= mine.called / MS
            assert mine.done / MS >= theirs.called / MS + offset_ms
    if wrong_ms == 0:
        assert offset_ms == -1000


def test_one_clock_stays_one() -> None:
    steps = {rank: {n: a_step(n, rank) for n in range(3)} for rank in range(2)}
    assert set(narrowed(same_clock(2), steps).values()) == {same_clock(2)}
