"""The seam for how one bucket becomes its mean: ``Reducer``, and the ``Driver`` that walks reducers in one fixed order.

[Note: one fixed sequence] Two Gloo ranks that start equal-sized all-reduces in opposite order silently get each other's
sums. So a reducer never starts a collective from a completion callback. It is a generator: each ``yield`` hands over a
collective that it has started, and the code behind the yield runs when that one is done. The driver resumes the
generators in an order that depends only on the plan: by (bucket + stage), then stage. Readiness can hold the walk up;
it can never change its order.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from gradsync import spec
from gradsync.bucket import BUCKET_BYTES, Bucket, BucketPlan
from gradsync.comm.base import Communicator, Work
from gradsync.profiling.seam import SILENT, Recording
from gradsync.slot import Slot


class Reducer(abc.ABC):
    """Turns a sealed bucket into its sum over the ranks, in place. (Sealed with its weight, that is the mean.)"""

    num_stages: int = 1  # how many collectives `reduce` yields, for every bucket on every rank
    bucket_bytes: int = BUCKET_BYTES  # how large it likes its buckets, unless the user says
    reads_fresh_gradients: bool = False  # by `slot.source`: the engine need not copy them into the bucket first
    reads_small_gradients: bool = False  # the small ones, too, which else are copied together

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.nonfinite: list[str] = []  # parameters whose mean came out with NaN or inf, for reducers that look

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        """Take the plan, and again after it has changed."""
        self.slots = {slot.name: slot for bucket in plan.buckets for slot in bucket.slots}

    def stages(self, world_size: int) -> int:
        """``num_stages``, for a reducer in which it depends on the number of ranks."""
        return self.num_stages

    def end_step(self, *, finite: bool) -> None:
        """All buckets of a backward are reduced: keep what it has changed, or not if the means were not finite."""
        self.nonfinite = []

    @abc.abstractmethod
    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """Overwrite ``bucket.buffer`` and ``bucket.flags`` with their sums; yield each collective once it runs."""

    @abc.abstractmethod
    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        """The bytes that this rank puts on the wire for a bucket, headers and all."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, keyed by parameter name; what is this rank's alone under the key "own"."""
        return {}

    def unsent(self) -> dict[str, Tensor]:
        """What this rank still owes the others, by parameter name and in its shape. To be read before the next step."""
        return {}

    def codecs(self) -> dict[str, str]:
        """For each parameter the codec that it travels by, as a spec; empty for a reducer that has none."""
        return {}

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """This rank's state, made of those that all ranks of a run with another number of them have saved.

        [Note: nothing is lost] What is a rank's own stands under "own" and may be added up: old rank q's goes to rank
        q mod world_size. All else is the same on every rank.
        """
        merged = dict(states[0])
        if "own" in merged:
            heirs = [state["own"] for state in states[rank::world_size]]
            merged["own"] = {kind: _added_up([own[kind] for own in heirs]) for kind in states[0]["own"]}
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state; got {sorted(state)}. Was it saved by another reducer?"
            )


spec.declare("reducer", Reducer)


def _added_up(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total


class Driver:
    """Walks the (bucket, stage) pairs of one backward in their fixed order, as far as it can without blocking."""

    def __init__(self, reducer: Reducer, comm: Communicator, num_buckets: int, recorder: Recording = SILENT) -> None:
        self._reducer = reducer
        self._comm = comm
        self._recorder = recorder
        num_stages = reducer.stages(comm.world_size)
        pairs = [(bucket, stage) for bucket in range(num_buckets) for stage in range(num_stages)]
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
        for index in list(self._running):
            self._finish(index)

    def abandon(self) -> None:
        """The backward will not come to its end: let go."""
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
        self._running[index] = (generator, self._resume(index, generator))
        return True

    def _resume(self, index: int, generator: Iterator[Work]) -> Work:
        """Let a bucket's reducer go on to its next collective."""
        self._recorder.resume(index)
        work = next(generator)
        self._recorder.pause()
        return work

    def _finish(self, index: int) -> None:
        """Wait for a bucket's last collective, and do what stands behind its last yield."""
        generator, work = self._running.pop(index)
        work.wait()
        self._recorder.resume(index)
        rest = next(generator, None)
        self._recorder.pause()
        assert rest is None, "a reducer yields num_stages collectives"
