"""WorkerClocks: no read breaks the staleness bound, and no worker waits longer than it must."""

from __future__ import annotations

import heapq
import random

import pytest

from gradsync.strategies.parameter_server.server.clock import WorkerClocks


class Model:
    """The definition of the bound, computed from the list of all pushes each time."""

    def __init__(self, staleness: int | None, workers: range) -> None:
        self.staleness = staleness
        self.pushes: dict[int, set[int]] = {worker: set() for worker in workers}
        self.begun = dict.fromkeys(workers, 0)

    def clock(self, worker: int) -> int:
        return self.begun[worker] + len(self.pushes[worker])

    def may_read(self, worker: int) -> bool:
        if self.staleness is None:
            return True
        needed = range(self.clock(worker) - self.staleness)  # all workers' updates of these clocks
        return all(
            clock in self.pushes[other] or clock < self.begun[other] for other in self.pushes for clock in needed[-3:]
        )


def simulate(staleness: int | None, clocks_to_make: int, seed: int) -> tuple[int, int]:
    """Workers with random delays, of which some die and some join; returns (reads, reads that had to wait)."""
    rng = random.Random(seed)
    workers = range(4)
    table, model = WorkerClocks(staleness, workers), Model(staleness, workers)
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
        while staleness == 0 and table.step_is_complete():
            table.finish_step()
        if staleness is not None:
            assert max(table.by_worker.values()) - min(table.by_worker.values()) <= staleness + 1
        waiting.add(worker)
        waits += not table.may_read(worker)
        if rng.random() < 0.003 and len(model.pushes) > 2:  # one worker dies, and another joins
            dead = rng.choice(sorted(model.pushes))
            table.remove(dead)
            del model.pushes[dead], model.begun[dead]
            waiting.discard(dead)
            while staleness == 0 and table.step_is_complete():
                table.finish_step()
            newest += 1
            joined = table.join(newest)
            assert joined == min(model.clock(other) for other in model.pushes)
            model.pushes[newest], model.begun[newest] = set(), joined
            waiting.add(newest)
        let_read(now)
    return reads, waits


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_clocks_match_the_definition_over_ten_thousand_pushes(staleness: int | None) -> None:
    reads, waits = simulate(staleness, 10_000, seed=5)
    assert reads > 9_000
    assert (waits > 100) == (staleness is not None)


def test_clocks_wait_less_with_more_staleness() -> None:
    waits = [simulate(staleness, 2000, seed=1)[1] for staleness in (0, 1, 3, 8, None)]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == 0


def test_clocks_count_a_push_once() -> None:
    clocks = WorkerClocks(2, [0, 1])
    assert clocks.push(0, 0)
    assert not clocks.push(0, 0)
    assert clocks.by_worker[0] == 1
    assert not clocks.push(7, 0)


def test_clocks_with_backup_drop_late_pushes_but_advance() -> None:
    clocks = WorkerClocks(0, [0, 1, 2], backup=1)
    assert clocks.push(0, 0)
    assert not clocks.step_is_complete()
    assert clocks.push(2, 0)
    assert clocks.step_is_complete()
    clocks.finish_step()
    assert clocks.may_read(0)
    assert not clocks.push(1, 0)
    assert clocks.by_worker[1] == 1
    assert clocks.may_read(1)


def test_clocks_without_workers_remember_the_last_clock() -> None:
    clocks = WorkerClocks(1, [0])
    for clock in range(4):
        clocks.push(0, clock)
    clocks.remove(0)
    assert clocks.join(5) == 4


def test_clocks_survive_saving_and_loading() -> None:
    clocks = WorkerClocks(1, [0, 1])
    clocks.push(1, 0)
    other = WorkerClocks(1)
    other.load_state_dict(clocks.state_dict())
    assert other.by_worker == {0: 0, 1: 1}


@pytest.mark.parametrize(("staleness", "backup"), [(-1, 0), (0, -1), (2, 1), (None, 1)])
def test_clocks_refuse_invalid_arguments(staleness: int | None, backup: int) -> None:
    with pytest.raises(ValueError):
        WorkerClocks(staleness, [0], backup=backup)
