"""The workers' clocks at a parameter server: how many pushes each has made, and who may read. No thread, no socket.

A worker's clock is the number of its pushes. With staleness s a worker at clock c may read once every live worker has
reached clock c - s: the parameters that it reads then include all updates up to there. Staleness 0 is bulk-synchronous;
with None nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable


class WorkerClocks:
    """The clocks of all live workers, by worker.

    >>> from gradsync.strategies.parameter_server.server.clock import WorkerClocks
    >>> clocks = WorkerClocks(staleness=1, workers=[0, 1])
    >>> clocks.push(0, 0), clocks.may_read(0)                  # one push ahead: within the bound
    (True, True)
    >>> clocks.push(0, 1), clocks.may_read(0), clocks.awaited(0)
    (True, False, [1])
    >>> clocks.remove(1)                                       # a dead worker is not waited for
    >>> clocks.may_read(0)
    True

    Args:
        staleness: how many pushes a worker may be ahead of the slowest; None: any number.
        workers: those that are expected from the start, at clock ``start``.
        backup: bulk-synchronous steps do not wait for the last ``backup`` workers, whose late pushes are dropped.
    """

    def __init__(self, staleness: int | None, workers: Iterable[int] = (), *, backup: int = 0, start: int = 0) -> None:
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness must be 0 (bulk-synchronous), larger, or None (never wait); got {staleness}.")
        if backup < 0 or (backup and staleness != 0):
            raise ValueError(f"backup requires bulk-synchronous steps (staleness=0); got {backup=} {staleness=}.")
        self.staleness = staleness
        self.backup = backup
        self.by_worker: dict[int, int] = dict.fromkeys(sorted(workers), start)
        # Bulk-synchronous: the step whose pushes are being collected. Else: the first clock of a worker that joins when
        # there is no other.
        self.current_step = start

    @property
    def slowest(self) -> int:
        """The smallest clock; without workers, the smallest clock when the last one left."""
        return min(self.by_worker.values(), default=self.current_step)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Add a worker, at the smallest clock unless it brings its own ``clock``; returns its clock."""
        if worker not in self.by_worker or clock is not None:
            at_least = self.current_step if self.staleness == 0 else self.slowest
            self.by_worker[worker] = at_least if clock is None else max(clock, 0)
        return self.by_worker[worker]

    def remove(self, worker: int) -> None:
        """Remove a worker that left or died. Nobody waits for it any more."""
        slowest = self.slowest
        self.by_worker.pop(worker, None)
        if self.staleness != 0 and not self.by_worker:
            self.current_step = slowest

    def push(self, worker: int, clock: int) -> bool:
        """Record a worker's push number ``clock``. Returns whether it counts; a duplicate does not.

        Bulk-synchronous: a push for a step that is already finished does not count, but its worker's clock advances.
        """
        if worker not in self.by_worker or clock < self.by_worker[worker]:
            return False
        self.by_worker[worker] = clock + 1
        return self.staleness != 0 or clock >= self.current_step

    def step_is_complete(self) -> bool:
        """Bulk-synchronous: whether step ``current_step`` has all the pushes that it needs."""
        arrived = sum(clock > self.current_step for clock in self.by_worker.values())
        return arrived > 0 and arrived >= len(self.by_worker) - self.backup

    def finish_step(self) -> None:
        """Bulk-synchronous: step ``current_step`` has been applied."""
        self.current_step += 1

    def may_read(self, worker: int) -> bool:
        """Whether all pushes that the worker's next read must include have arrived."""
        if self.staleness is None:
            return True
        if self.staleness == 0:
            return self.current_step >= self.by_worker[worker]
        return self.slowest >= self.by_worker[worker] - self.staleness

    def awaited(self, worker: int) -> list[int]:
        """The workers that this worker waits for."""
        if self.may_read(worker):
            return []
        assert self.staleness is not None
        return [other for other, clock in self.by_worker.items() if clock < self.by_worker[worker] - self.staleness]

    def state_dict(self) -> dict[str, int]:
        """The clock of each worker, with its number as text, and ``current_step`` under the key "floor"."""
        return {"floor": self.current_step, **{str(worker): clock for worker, clock in self.by_worker.items()}}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load what ``state_dict`` returned."""
        self.current_step = state["floor"]
        self.by_worker = {int(worker): clock for worker, clock in state.items() if worker != "floor"}
