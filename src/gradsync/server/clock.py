"""Who has come how far, and who may read: the table of clocks of a parameter server. Pure: no thread, no socket.

A worker's clock is the number of its pushes. With staleness s a worker at clock c may read once everyone who is alive
has reached clock c - s: what it reads then has in it all updates up to there. 0 is bulk-synchronous, None never waits.
"""

from __future__ import annotations

from collections.abc import Iterable


class Clocks:
    """The clocks of all workers that are alive.

    >>> from gradsync.server.clock import Clocks
    >>> clocks = Clocks(staleness=1, workers=[0, 1])
    >>> clocks.push(0, 0), clocks.may_read(0)                  # one push ahead: within the bound
    (True, True)
    >>> clocks.push(0, 1), clocks.may_read(0), clocks.awaited(0)
    (True, False, [1])
    >>> clocks.forget(1)                                       # it died: nobody waits for it
    >>> clocks.may_read(0)
    True

    Args:
        staleness: how many clocks a worker may be ahead of the slowest; None: any.
        workers: those that are awaited from the start, at clock ``start``.
        backup: bulk-synchronous steps go on without the last ``backup`` workers, whose late pushes are dropped.
    """

    def __init__(self, staleness: int | None, workers: Iterable[int] = (), *, backup: int = 0, start: int = 0) -> None:
        if staleness is not None and staleness < 0:
            raise ValueError(f"staleness must be 0 (bulk-synchronous), larger, or None (never wait); got {staleness}.")
        if backup < 0 or (backup and staleness != 0):
            raise ValueError(
                f"backup goes with bulk-synchronous steps (staleness=0) alone; got {backup=} {staleness=}."
            )
        self.staleness = staleness
        self.backup = backup
        self.of: dict[int, int] = dict.fromkeys(sorted(workers), start)
        self.floor = start  # where a newcomer to an empty table begins; bulk-synchronous: the steps that are complete

    @property
    def slowest(self) -> int:
        """The smallest clock of all, or where everyone was when the last one left."""
        return min(self.of.values(), default=self.floor)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Count a worker in, at the minimum unless it has come farther before; returns its clock."""
        if worker not in self.of or clock is not None:
            at_least = self.floor if self.staleness == 0 else self.slowest
            self.of[worker] = at_least if clock is None else max(clock, 0)
        return self.of[worker]

    def forget(self, worker: int) -> None:
        """Count a worker out: it left or died. Nobody waits for it any more."""
        left = self.slowest
        self.of.pop(worker, None)
        if self.staleness != 0 and not self.of:
            self.floor = left

    def push(self, worker: int, clock: int) -> bool:
        """A worker's push number ``clock`` is here; whether it counts, or is a double or from before.

        Bulk-synchronous, a push for a step that has gone on without it does not count; its clock advances all the same.
        """
        if worker not in self.of or clock < self.of[worker]:
            return False
        self.of[worker] = clock + 1
        return self.staleness != 0 or clock >= self.floor

    def complete(self) -> bool:
        """Bulk-synchronous: whether step ``floor`` has all the pushes that it waits for."""
        arrived = sum(clock > self.floor for clock in self.of.values())
        return arrived > 0 and arrived >= len(self.of) - self.backup

    def finish(self) -> None:
        """Bulk-synchronous: step ``floor`` has been applied."""
        self.floor += 1

    def may_read(self, worker: int) -> bool:
        """Whether all that the worker's next read must have in it is here."""
        if self.staleness is None:
            return True
        if self.staleness == 0:
            return self.floor >= self.of[worker]
        return self.slowest >= self.of[worker] - self.staleness

    def awaited(self, worker: int) -> list[int]:
        """Those whom the worker waits for."""
        if self.may_read(worker):
            return []
        assert self.staleness is not None
        return [other for other, clock in self.of.items() if clock < self.of[worker] - self.staleness]

    def state_dict(self) -> dict[str, int]:
        """The clocks by worker, as JSON has them, and where the table begins."""
        return {"floor": self.floor, **{str(worker): clock for worker, clock in self.of.items()}}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take back what ``state_dict`` gave."""
        self.floor = state["floor"]
        self.of = {int(worker): clock for worker, clock in state.items() if worker != "floor"}
