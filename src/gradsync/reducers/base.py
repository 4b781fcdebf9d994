"""How one bucket becomes its mean: the interface ``Reducer``, and the ``Driver`` that runs reducers in one fixed order.

[Note: one fixed sequence] Two Gloo ranks that start equal-sized all-reduces in opposite order silently get each other's
sums. So a reducer never starts a collective from a completion callback. It is a generator: it starts a collective and
yields it, and the code after the ``yield`` runs when that collective is done. The driver resumes the generators in an
order that depends only on the plan: by (bucket + stage), then stage. A bucket that is not ready yet delays the
collectives after it, but never changes their order.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import BUCKET_BYTES, Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.comm.base import Communicator, Work
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.reducers.outcome import StepOutcome


class Reducer(abc.ABC):
    """Turns a finalized bucket into its sum over the ranks, in place. (Values are weighted: the sum is the mean.)"""

    num_stages: int = 1  # how many collectives `reduce` yields, for every bucket on every rank
    bucket_bytes: int = BUCKET_BYTES  # the default size of its buckets

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.outcome = StepOutcome()  # of the step since end_step(); filled in by reducers that check

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        """Prepare for a plan. Called again after the plan has changed."""
        self.slots = {slot.name: slot for bucket in plan.buckets for slot in bucket.slots}
        self.place_gradients(plan, comm)

    def place_gradients(self, plan: BucketPlan, comm: Communicator) -> None:
        """Set ``in_place`` of every slot: the values that the engine does not copy into the bucket."""
        for bucket in plan.buckets:
            for slot in bucket.slots:
                slot.in_place = None if comm.world_size == 1 else self.in_place_range(slot, comm)

    def in_place_range(self, slot: Slot, comm: Communicator) -> tuple[int, int] | None:
        """The range (from, to) of a gradient's values that this reducer reads from ``slot.source``, autograd's tensor.

        None: the whole gradient is copied into the bucket first. Values that are read in place save the copy, and must
        be multiplied by ``slot.source_gain``.
        """
        return None

    def bucket_bytes_on(self, comm: Communicator) -> int:
        """The default size of its buckets on a transport."""
        return self.bucket_bytes

    def stages(self, world_size: int) -> int:
        """The number of stages with ``world_size`` ranks. Default: ``num_stages``."""
        return self.num_stages

    def stages_on(self, comm: Communicator) -> int:
        """The number of stages on a communicator: a transport may do several in one call."""
        return self.stages(comm.world_size)

    @property
    def nonfinite(self) -> list[str]:
        """The parameters whose mean has NaN or inf. Blocks until a GPU has passed the step."""
        return self.outcome.nonfinite

    def end_step(self, *, finite: bool) -> None:
        """Commit the state that a backward has changed, or drop the changes if its means were not finite.

        Called after all buckets of the backward are reduced, and before those of the next one.
        """
        self.outcome = StepOutcome()

    def discard(self) -> None:
        """Drop what a backward that did not end has changed. Its buckets ``may_roll_back``; no thread reduces any more.

        ``state_dict()`` is then bit for bit what it was before the backward began.
        """
        self.outcome = StepOutcome()

    def accept(self, shared: dict[str, Any], unsent: Collection[str]) -> list[str]:
        """Commit a backward that has not ended here, but on another rank. ``shared``: that rank's state without "own".

        ``unsent``: parameters of which this rank has not started all collectives. Returns those of them that had a
        residual: it is dropped.
        """
        self.discard()
        return []

    @abc.abstractmethod
    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """Overwrite ``bucket.buffer`` and ``bucket.flags`` with their sums; yield each collective after starting it."""

    @abc.abstractmethod
    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        """The bytes that this rank puts on the wire for a bucket, headers included."""

    def bytes_sent_on(self, bucket: Bucket, comm: Communicator) -> int:
        """As ``bytes_sent``, on a communicator: a transport may let one rank send for several."""
        return self.bytes_sent(bucket, comm.world_size)

    def state_dict(self) -> dict[str, Any]:
        """The state that a restart needs, by parameter name. State of this rank alone is under the key "own".

        Its keys and shapes are the same before the first step as after it: see engine/saved_state.py.
        """
        return {}

    def unsent(self) -> dict[str, Tensor]:
        """This rank's error-feedback residuals, by parameter name and shape. Valid until the next step."""
        return {}

    def codecs(self) -> dict[str, str]:
        """The codec of each parameter, as a spec, by parameter name; empty for a reducer without codecs."""
        return {}

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """This rank's state, from the saved states of all ranks of a run with another number of ranks.

        [Note: nothing is lost] State of one rank alone is under "own" and may be added up: that of old rank q goes to
        rank q mod world_size. All other state is the same on every rank.
        """
        merged = dict(states[0])
        if "own" in merged:
            heirs = [state["own"] for state in states[rank::world_size]]
            merged["own"] = {kind: _added_up([own[kind] for own in heirs]) for kind in states[0]["own"]}
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
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
    """Runs the (bucket, stage) pairs of one backward in their fixed order, as far as possible without blocking."""

    def __init__(
        self, reducer: Reducer, comm: Communicator, num_buckets: int, recorder: Recording = NOT_RECORDING
    ) -> None:
        self._reducer = reducer
        self._comm = comm
        self._recorder = recorder
        self._polls = comm.num_hosts is not None  # its works go through stages, which only calls start
        self._num_stages = reducer.stages_on(comm)
        self.sent: set[int] = set()  # the indices of the buckets of which all collectives were started
        pairs = [(bucket, stage) for bucket in range(num_buckets) for stage in range(self._num_stages)]
        self._sequence = sorted(pairs, key=lambda pair: (pair[0] + pair[1], pair[1]))
        self._next = 0
        self._running: dict[int, tuple[Iterator[Work], Work]] = {}
        self._ready: dict[int, Bucket] = {}

    def add(self, bucket: Bucket) -> None:
        """Add a finalized bucket. Its collectives start when the sequence reaches it."""
        self._ready[bucket.index] = bucket
        self.advance()

    def advance(self) -> None:
        """Start every collective that is next in the sequence and whose input is ready. Does not block."""
        while self._next < len(self._sequence) and self._start(block=False):
            self._next += 1
        if self._polls and self._running:
            next(iter(self._running.values()))[1].done()  # one poll advances all of them

    def drain(self) -> None:
        """Start the remaining collectives, and wait for all of them. Every bucket must have been added."""
        while self._next < len(self._sequence):
            started = self._start(block=True)
            assert started, "drain() comes after every bucket was added"
            self._next += 1
        for index in list(self._running):
            self._finish(index)

    def abandon(self) -> None:
        """Drop the running reducers: the backward was abandoned. When it returns, none of them runs any more."""
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
        if stage == self._num_stages - 1:
            self.sent.add(index)
        return True

    def _resume(self, index: int, generator: Iterator[Work]) -> Work:
        """Resume a bucket's reducer until it has started its next collective."""
        self._recorder.reducer_resumed(index)
        work = next(generator)
        self._recorder.reducer_paused()
        return work

    def _finish(self, index: int) -> None:
        """Wait for a bucket's last collective, and run the code after the reducer's last yield."""
        generator, work = self._running.pop(index)
        work.wait()
        self._run_to_end(index, generator)

    def _run_to_end(self, index: int, generator: Iterator[Work]) -> None:
        self._recorder.reducer_resumed(index)
        rest = next(generator, None)
        self._recorder.reducer_paused()
        assert rest is None, "a reducer yields num_stages collectives"
