"""Clock offsets between hosts: measured by exchanges, and narrowed down by the steps' own collectives."""

from __future__ import annotations

import time

import pytest

from gradsync.comm import Communicator
from gradsync.profiling.clocks import ROUNDS, ClockOffsets, clock_identity, compare_clocks, narrow_offsets, same_clock
from gradsync.testing import run_ranks
from tests.profiling.raw_records import MS, a_step

AHEAD_NS = (0, 5_000_000_000, -70_000_000_000)


class Counted:
    """A communicator of which only all_gather is used, and counted."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size, self.calls, self._comm = comm.rank, comm.world_size, 0, comm

    def all_gather(self, tensor: object, *, out: object) -> object:
        self.calls += 1
        return self._comm.all_gather(tensor, out=out)  # type: ignore[arg-type]


def test_compare_clocks_finds_the_offsets_between_hosts() -> None:
    def compare(comm: Communicator) -> ClockOffsets:
        ahead_ns = AHEAD_NS[comm.rank]
        return compare_clocks(comm, identity=f"host {comm.rank}", now=lambda: time.perf_counter_ns() + ahead_ns)

    everyone = run_ranks(3, compare)
    assert len(set(everyone)) == 1
    clocks = everyone[0]
    for rank, ahead_ns in enumerate(AHEAD_NS):
        assert abs(clocks.offset_ns(rank) + ahead_ns) <= clocks.error_ns  # the offset cancels what the clock is ahead


def test_compare_clocks_takes_one_exchange_on_one_host() -> None:
    def compare(comm: Communicator) -> tuple[ClockOffsets, int]:
        counted = Counted(comm)
        return compare_clocks(counted), counted.calls  # type: ignore[arg-type]

    assert run_ranks(2, compare) == [(same_clock(2), 1)] * 2
    assert clock_identity() == clock_identity()


def test_compare_clocks_takes_a_bounded_number_of_exchanges_between_hosts() -> None:
    def compare(comm: Communicator) -> int:
        counted = Counted(comm)
        compare_clocks(counted, identity=f"host {comm.rank}")  # type: ignore[arg-type]
        return counted.calls

    assert run_ranks(2, compare) == [ROUNDS + 2] * 2


@pytest.mark.parametrize("wrong_ms", [-500, -20, 0, 20, 500])
def test_narrow_offsets_stays_within_the_bounds_of_collectives(wrong_ms: int) -> None:
    """No rank finishes a collective before every rank has entered it: the offset ends up within these bounds."""
    steps = {
        0: {n: a_step(n, 0, late_ms=40) for n in range(5)},
        1: {n: a_step(n, 1, late_ms=40, ahead_ms=1000) for n in range(5)},
    }
    found = narrow_offsets(ClockOffsets((0, (-1000 + wrong_ms) * MS), 900 * MS), steps)
    offset_ms = found[2].offset_ns(1) / MS
    for number, raw in steps[0].items():
        for mine, theirs in zip(raw.ops, steps[1][number].ops, strict=True):
            assert theirs.done / MS + offset_ms >= mine.called / MS
            assert mine.done / MS >= theirs.called / MS + offset_ms
    if wrong_ms == 0:
        assert offset_ms == -1000


def test_narrow_offsets_leaves_one_clock_alone() -> None:
    steps = {rank: {n: a_step(n, rank) for n in range(3)} for rank in range(2)}
    assert set(narrow_offsets(same_clock(2), steps).values()) == {same_clock(2)}
