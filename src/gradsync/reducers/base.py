"""The seam for how one bucket becomes its mean: ``Reducer``, and the ``Driver`` that walks reducers in one fixed order.

[Note: one fixed sequence] Two Gloo ranks that start equal-sized all-reduces in opposite order silently get each other's
sums. So a reducer never starts a collective from a completion callback. It is a generator: each ``yield`` hands over a
collective that it has started, and the code behind the yield runs when that one is done. The driver resumes the
generators in an order that depends only on the plan: by (bucket + stage), then stage. Readiness can hold the walk up;
it can never change its order.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from gradsync import spec
from gradsync.bucket import Bucket
from gradsync.comm.base import Communicator, Work


class Reducer(abc.ABC):
    """Turns a sealed bucket into its sum over the ranks, in place. (Sealed with its weight, that is the mean.)"""

    num_stages: int = 1  # how many collectives `reduce` yields, for every bucket on every rank

    @abc.abstractmethod
    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """Overwrite ``bucket.buffer`` and ``bucket.flags`` with their sums; yield each collective once it runs."""

    @abc.abstractmethod
    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        """The bytes that this rank puts on the wire for a bucket, headers and all."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, keyed by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state; got {sorted(state)}. Was it saved by another reducer?"
            )


spec.declare("reducer", Reducer)


class Driver:
    """Walks the (bucket, stage) pairs of one backward in their fixed order, as far as it can without blocking."""

    def __init__(self, reducer: Reducer, comm: Communicator, num_buckets: int) -> None:
        self._reducer = reducer
        self._comm = comm
        pairs = [(bucket, stage) for bucket in range(num_buckets) for stage in range(reducer.num_stages)]
        self._sequence = sorted(pairs, key=lambda pair: (pair[0] + pair[1], pair[1]))
        self._next = 0
        self._running: dict[int, tuple[Iterator[Work], Work]] = {}
        self._ready: dict[int, Bucket] = {}

    def add(self, bucket: Bucket) -> None:
        """Say that a bucket is sealed; it is launched when its turn comes."""
        self._ready[bucket.index] = bucket
        self.advance()

    def advance(self) -> None:
        """Start every collective whose turn has come and whose input is there. Does not block."""
        while self._next < len(self._sequence) and self._start(block=False):
            self._next += 1

    def drain(self) -> None:
        """Start what is left and wait for everything. Every bucket must have been added."""
        while self._next < len(self._sequence):
            started = self._start(block=True)
            assert started, "drain() comes after every bucket was added"
            self._next += 1
        for generator, work in self._running.values():
            work.wait()
            rest = next(generator, None)  # what stands behind the last yield
            assert rest is None, "a reducer yields num_stages collectives"
        self._running.clear()

    def _start(self, *, block: bool) -> bool:
        index, stage = self._sequence[self._next]
        if stage == 0:
            if index not in self._ready:
                return False
            generator = self._reducer.reduce(self._ready[index], self._comm)
        else:
            generator, work = self._running[index]
            if not block and not work.done():
                return False
            work.wait()
        self._running[index] = (generator, next(generator))
        return True
