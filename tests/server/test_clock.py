"""The table of clocks: no read breaks the bound, and nobody waits who need not."""

from __future__ import annotations

import heapq
import random

import pytest

from gradsync.server.clock import Clocks


class Model:
    """What the definition says, worked out anew from the list of all pushes each time."""

    def __init__(self, staleness: int | None, workers: range) -> None:
        self.staleness = staleness
        self.pushes: dict[int, set[int]] = {worker: set() for worker in workers}
        self.begun = dict.fromkeys(workers, 0)

    def clock(self, worker: int) -> int:
        return self.begun[worker] + len(self.pushes[worker])

    def may_read(self, worker: int) -> bool:
        if self.staleness is None:
            return True
        needed = range(self.clock(worker) - self.staleness)  # every clock below: everyone's updates of it
        return all(
            clock in self.pushes[other] or clock < self.begun[other] for other in self.pushes for clock in needed[-3:]
        )


def simulate(staleness: int | None, clocks_to_make: int, seed: int) -> tuple[int, int]:
    """Workers with random delays, and some who die and some who join; returns (reads, reads that had to wait)."""
    rng = random.Random(seed)
    workers = range(4)
    table, model = Clocks(staleness, workers), Model(staleness, workers)
    events = [(rng.random(), worker) for worker in workers]  # when each has its next push ready
    heapq.heapify(events)
    waiting: set[int] = set()
    reads = waits = newest = 0
    newest = max(workers)

    def let_read(now: float) -> None:
        nonlocal reads
        for worker in sorted(waiting):
            assert table.may_read(worker) == model.may_read(worker)  # neither too early nor too late
            if table.may_read(worker):
                assert table.awaited(worker) == []
                waiting.discard(worker)
                reads += 1
                speed = 6.0 if rng.random() < 0.1 else 1.0
                heapq.heappush(events, (now + speed * rng.expovariate(1.0), worker))
            else:
                assert table.awaited(worker)

    made = 0
    while made < clocks_to_make:
        now, worker = heapq.heappop(events)
        if worker not in model.pushes:
            continue
        clock = model.clock(worker)
        assert table.push(worker, clock)
        model.pushes[worker].add(clock)
        made += 1
        while staleness == 0 and table.complete():
            table.finish()
        if staleness is not None:
            assert max(table.of.values()) - min(table.of.values()) <= staleness + 1
        waiting.add(worker)
        waits += not table.may_read(worker)
        if rng.random() < 0.003 and len(model.pushes) > 2:  # somebody dies, and another comes
            dead = rng.choice(sorted(model.pushes))
            table.forget(dead)
            del model.pushes[dead], model.begun[dead]
            waiting.discard(dead)
            while staleness == 0 and table.complete():
                table.finish()
            newest += 1
            joined = table.join(newest)
            assert joined == min(model.clock(other) for other in model.pushes)
            model.pushes[newest], model.begun[newest] = set(), joined
            waiting.add(newest)
        let_read(now)
    return reads, waits


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_stress_of_ten_thousand_clocks(staleness: int | None) -> None:
    reads, waits = simulate(staleness, 10_000, seed=5)
    assert reads > 9_000
    assert (waits > 100) == (staleness is not None)


def test_the_more_staleness_the_less_waiting() -> None:
    waits = [simulate(staleness, 2000, seed=1)[1] for staleness in (0, 1, 3, 8, None)]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == 0


def test_a_push_counts_once() -> None:
    clocks = Clocks(2, [0, 1])
    assert clocks.push(0, 0)
    assert not clocks.push(0, 0)
    assert clocks.of[0] == 1
    assert not clocks.push(7, 0)


def test_backup_drops_the_late_and_their_clock_goes_on() -> None:
    clocks = Clocks(0, [0, 1, 2], backup=1)
    assert clocks.push(0, 0)
    assert not clocks.complete()
    assert clocks.push(2, 0)
    assert clocks.complete()
    clocks.finish()
    assert clocks.may_read(0)
    assert not clocks.push(1, 0)
    assert clocks.of[1] == 1
    assert clocks.may_read(1)


def test_an_empty_table_takes_a_newcomer_where_all_left() -> None:
    clocks = Clocks(1, [0])
    for clock in range(4):
        clocks.push(0, clock)
    clocks.forget(0)
    assert clocks.join(5) == 4


def test_saved_and_taken_back() -> None:
    clocks = Clocks(1, [0, 1])
    clocks.push(1, 0)
    other = Clocks(1)
    other.load_state_dict(clocks.state_dict())
    assert other.of == {0: 0, 1: 1}


@pytest.mark.parametrize(("staleness", "backup"), [(-1, 0), (0, -1), (2, 1), (None, 1)])
def test_refuses_what_makes_no_sense(staleness: int | None, backup: int) -> None:
    with pytest.raises(ValueError):
        Clocks(staleness, [0], backup=backup)
