"""The recorder: always on, and cheap. It keeps the raw marks of the last steps and computes records only on request.

[Note: one step late] A rank sees itself how long it stalled. *Why* it stalled only the other ranks know: a collective
first waits for its slowest rank, and only then does data move. So each rank's step header, which is exchanged anyway,
holds the timing of that rank's previous step. A record is therefore complete one step late, and costs no collective.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from gradsync.comm.base import Communicator, Work
from gradsync.profiling.clocks import ClockOffsets, compare_clocks
from gradsync.profiling.instrumented import InstrumentedComm
from gradsync.profiling.interface import Recording
from gradsync.profiling.parts import build_record, last_bucket_start, last_rank_starts
from gradsync.profiling.raw import (
    CALL,
    DECODE,
    ENCODE,
    ENGINE_COMM,
    JOIN,
    STRATEGY_COMM,
    WAIT,
    Op,
    RawStep,
    RecordedPlan,
)
from gradsync.profiling.record import PARTS, Breakdown, Change, StepRecord
from gradsync.replicas.header import NO_TIMING, PreviousStepTiming, StepHeaders

log = logging.getLogger("gradsync")

KEEP_STEPS = 256  # more => longer means, more memory: about 10 KB a step of 20 buckets
WARM_UP_STEPS = 2  # buckets are rebuilt after the first step; neither it nor the next is typical
MIN_WAIT_NS = 20_000  # a call that takes longer has waited
POLL_INTERVAL_NS = 3_000_000  # collectives are polled for completion at most this often, as polling may read sockets

Listener = Callable[[StepRecord], None]
Sink = Callable[[RawStep], None]


class Recorder(Recording):
    """Records the last steps of one synchronizer on this rank: ``sync.record``.

    Args:
        comm: only its rank and its number of ranks are read.
        clocks: the offsets of the ranks' clocks.
        keep: how many steps are kept. More => longer means, more memory.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> for _ in range(4):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> steps = sync.record.steps()
    >>> [step.step for step in steps], steps[0].rank, steps[0].parts.wire_s < steps[0].step_s
    ([0, 1, 2, 3], 0, True)
    >>> sync.close()
    """

    def __init__(self, comm: Communicator, clocks: ClockOffsets, *, keep: int = KEEP_STEPS) -> None:
        if keep < 1:
            raise ValueError(f"expected at least 1 step to keep; got {keep=}.")
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.clocks = clocks
        self.detailed = False  # also record when each single gradient came
        self.plans: list[RecordedPlan] = []  # all bucket plans so far, by number
        self.num_steps = 0
        self.changes: list[Change] = []  # of the members of an elastic run
        self._interrupted: RawStep | None = None  # a step that is done again
        self._steps: deque[RawStep] = deque(maxlen=keep)
        self._listeners: list[Listener] = []
        self._sinks: list[Sink] = []
        self._stop_after: tuple[int, type[BaseException]] | None = None
        self._background_thread = 0  # the id of the thread that reduces buckets, if there is one
        self._pending: deque[tuple[Work, Op]] = deque()  # running collectives whose done() costs nothing
        self._polled_ns = 0  # when they were last polled
        self._reset(self.now())
        self._last_timing = NO_TIMING

    def _reset(self, start: int) -> None:
        """Begin a step."""
        self._raw = RawStep(start)
        self._bucket = -1  # the bucket that a reducer works on...
        self._run = 0  # ...since when; 0 once it has started a collective
        self._stalled_ns = 0  # time of the training thread in collectives
        self._nested_ns = 0  # of the call of a collective that has not returned yet: a reducer's work within it
        self._pending.clear()

    def ranks_changed(self, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.clocks = compare_clocks(comm)
        self._last_timing = NO_TIMING
        self._restart()

    def _restart(self) -> None:
        """Begin a step after one that came to no end. The changes before that come before this one too."""
        changes = self._raw.changes
        self._reset(self.now())
        self._raw.changes = changes

    def step_interrupted(self, step: int) -> None:
        self._interrupted = self._raw
        self._stop(self._raw, step)
        self._reset(self.now())

    def _stop(self, raw: RawStep, step: int) -> None:
        """Mark a step as one that ends here, and is done again."""
        raw.step, raw.end, raw.discarded = step, self.now(), True
        raw.plan = len(self.plans) - 1 if raw.opened else -1
        raw.opened, raw.backward = raw.opened or raw.end, raw.backward or raw.end

    def members_changed(self, change: Change) -> None:
        self.changes.append(change)
        raw, self._interrupted = self._interrupted, None
        if raw is None or not change.discarded:
            self._raw.changes = [*([] if raw is None else raw.changes), *self._raw.changes, change]
            return
        raw.changes.append(change)
        self._steps.append(raw)
        for sink in self._sinks:
            sink(raw)
        self._complete(raw)

    # -- events of the engine -------------------------------------------------------------------------------------

    now = staticmethod(time.perf_counter_ns)  # called some hundred times a step: so without a Python frame

    def grad_hook_ended(self, entered: int, name: str = "") -> None:
        left = self.now()
        raw = self._raw
        raw.hook_ns += left - entered
        if self.detailed and name:
            raw.gradients.append((name, entered))
        pending = self._pending
        if left - self._polled_ns < POLL_INTERVAL_NS:
            return
        self._polled_ns = left
        while pending and pending[0][0].done():
            op = pending.popleft()[1]
            op.done = op.done or left

    def buckets_planned(self, buckets: Sequence[Any]) -> None:
        self.plans.append([(bucket.num_bytes, [slot.name for slot in bucket.slots]) for bucket in buckets])

    def backward_started(self, step: int, *, has_data: bool) -> None:
        raw = self._raw
        raw.opened, raw.step, raw.has_data, raw.plan = self.now(), step, has_data, len(self.plans) - 1

    def bucket_ready(self, bucket: int) -> None:
        self._raw.ready.append((bucket, self.now()))

    def backward_ended(self) -> None:
        self._raw.backward = self.now()

    def optimizer_stepped(self, entered: int) -> None:
        self._raw.optimizer = (entered, self.now())

    def engine_communicated(self, entered: int) -> None:
        self._add_communication(ENGINE_COMM, entered)

    def strategy_communicated(self, entered: int) -> None:
        self._add_communication(STRATEGY_COMM, entered)

    def _add_communication(self, kind: int, entered: int) -> None:
        left = self.now()
        self._raw.spans.append((kind, -1, entered, left, True))
        self._stalled_ns += left - entered

    def set_staleness(self, steps: float) -> None:
        self._raw.staleness = steps

    # -- collectives ----------------------------------------------------------------------------------------------

    def instrument(self, comm: Communicator) -> Communicator:
        return InstrumentedComm(comm, self)

    def begin(self, name: str, num_bytes: int) -> Op:
        """A collective begins. Until now its reducer was encoding."""
        raw, called = self._raw, self.now()
        if self._run:
            raw.spans.append((ENCODE, self._bucket, self._run, called, get_ident() != self._background_thread))
            self._run = 0
        op = Op(len(raw.ops), self._bucket, name, num_bytes, called)
        raw.ops.append(op)
        return op

    def begun(self, op: Op, work: Work, *, finished: bool, may_poll: bool) -> None:
        """The call that starts a collective has returned."""
        left = self.now()
        self._add_stall(CALL, op, op.called, left)
        if finished:
            op.done, op.seen = left, True
        elif may_poll:
            self._pending.append((work, op))

    def waited(self, op: Op, entered: int) -> None:
        """A thread has waited for a collective."""
        left = self.now()
        self._add_stall(WAIT, op, entered, left)
        if not op.done:
            op.done, op.seen = left, left - entered > MIN_WAIT_NS

    def polled(self, op: Op, entered: int, *, is_done: bool) -> None:
        """A thread has polled a collective for completion."""
        left = self.now()
        if left - entered > MIN_WAIT_NS:  # polling has moved data
            self._add_stall(WAIT, op, entered, left)
        if is_done and not op.done:
            op.done = left

    def _add_stall(self, kind: int, op: Op, entered: int, left: int) -> None:
        ops = self._raw.ops
        nested, self._nested_ns = self._nested_ns, 0
        if op.index >= len(ops) or ops[op.index] is not op:
            return  # it belongs to a backward that did not complete
        entered = min(left, entered + nested)
        trains = get_ident() != self._background_thread
        self._raw.spans.append((kind, op.index, entered, left, trains))
        if trains:
            self._stalled_ns += left - entered

    def reduced_within(self, bucket: int, entered: int, *, encodes: bool) -> None:
        """A reducer has encoded or decoded in the middle of a collective, since ``entered``."""
        left = self.now()
        kind = ENCODE if encodes else DECODE
        self._raw.spans.append((kind, bucket, entered, left, get_ident() != self._background_thread))
        self._nested_ns += left - entered

    def reducer_resumed(self, bucket: int) -> None:
        self._bucket, self._run = bucket, self.now()

    def reducer_paused(self) -> None:
        if self._run:
            trains = get_ident() != self._background_thread
            self._raw.spans.append((DECODE, self._bucket, self._run, self.now(), trains))
        self._bucket, self._run = -1, 0

    def background_thread_started(self) -> None:
        self._background_thread = get_ident()

    def background_thread_joined(self, entered: int) -> None:
        left = self.now()
        spans = self._raw.spans
        for kind, _, start, end, trains in spans:
            if not trains and kind in (CALL, WAIT):
                self._stalled_ns += max(0, min(left, end) - max(entered, start))
        spans.append((JOIN, -1, entered, left, True))
        self._background_thread = 0

    # -- the end of a step ----------------------------------------------------------------------------------------

    def previous_step(self) -> PreviousStepTiming:
        return self._last_timing

    def step_ended(self, headers: StepHeaders | None, *, weight: float) -> None:
        raw, stalled_ns = self._raw, self._stalled_ns
        raw.end = self.now()
        self._reset(raw.end)
        self._finish_step(raw, headers, weight=weight, stalled_ns=stalled_ns)

    def _finish_step(self, raw: RawStep, headers: StepHeaders | None, *, weight: float, stalled_ns: int) -> None:
        """Keep a step whose marks are all known, and pass it on."""
        raw.weight = weight
        if headers is not None:
            self._take_timings(headers)
        busy_ns = raw.end - raw.start - stalled_ns
        here = self.clocks.offset_ns(self.rank)
        raw.own_timing = self._last_timing = PreviousStepTiming(
            raw.step, (raw.opened + here) / 1e3, (last_bucket_start(raw) + here) / 1e3, busy_ns / 1e3
        )
        self._steps.append(raw)
        self.num_steps += 1
        for sink in self._sinks:
            sink(raw)
        if self.world_size == 1 or headers is None:  # no other rank will send its timing
            self._complete(raw)
        if self._stop_after is not None and self.num_steps >= self._stop_after[0]:
            raise self._stop_after[1]()

    def _take_timings(self, headers: StepHeaders) -> None:
        """Complete the previous step with the timings in all ranks' headers. See [Note: one step late]."""
        timings = headers.timings
        whole = (raw for raw in reversed(self._steps) if not raw.discarded)
        last = next((raw for raw in whole if timings and raw.step == timings.step), None)
        if last is not None:
            last.timings = timings
            self._complete(last)

    def _complete(self, raw: RawStep) -> None:
        """All that the other ranks send of a step is known: call the listeners, once for each step."""
        if raw.is_complete:
            return
        raw.is_complete = True
        if not self._listeners:
            return
        record = self._record(raw)
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception:  # a dashboard that is down must not end a training
                self._listeners.remove(listener)
                log.exception("%r failed at step %d, and is called for no more steps", listener, raw.step)

    # -- queries --------------------------------------------------------------------------------------------------

    def steps(self) -> list[StepRecord]:
        """The kept steps whose records are complete, the oldest first: with several ranks, all but the last one.

        In an elastic run, a step that was rolled back and done again has a record for each attempt: see ``discarded``.
        """
        return [self._record(raw) for raw in self._steps if raw.is_complete]

    def breakdown(self) -> Breakdown:
        """The mean of the typical steps: without the first two, and without those that something else delayed."""
        return Breakdown.mean([step.parts for step in typical(self.steps())])

    def busy_s(self) -> list[float]:
        """How long each rank itself needed for a step: the mean of the kept ones; empty before all ranks are known.

        The headers of a step bring the times of up to 16 ranks, those of the next step the next 16. With 1,024 ranks
        all are known after 64 steps; with more than 16 for each kept step they never are.
        """
        first = self._first_typical()
        steps = [raw.timings.busy_us for raw in self._steps if raw.timings is not None and raw.step >= first]
        busy_us: dict[int, list[float]] = {}
        for known in steps:
            for rank, time_us in known.items():
                busy_us.setdefault(rank, []).append(time_us)
        if len(busy_us) < self.world_size:
            return []
        return [sum(busy_us[rank]) / len(busy_us[rank]) / 1e6 for rank in range(self.world_size)]

    def on_step(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(record)`` once each step's record is complete; returns a function that removes it again.

        It runs within ``backward()``, so it should be quick. A listener that raises is removed, and the log says so.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> remove = sync.record.on_step(lambda record: print("step", record.step))
        >>> model(torch.ones(1, 2)).sum().backward()
        step 0
        >>> remove()
        >>> sync.close()
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def send_to(self, sink: Sink) -> None:
        """Call ``sink(raw_step)`` at the end of every step: for files."""
        self._sinks.append(sink)

    def stop_after(self, num_steps: int, error: type[BaseException]) -> None:
        """Raise ``error()`` out of the ``backward()`` that ends step ``num_steps``, the same one on all ranks."""
        self._stop_after = (num_steps, error)

    def stats(self) -> dict[str, Any]:
        """For ``sync.stats()``."""
        parts, busy_s = self.breakdown(), self.busy_s()
        named = {f"{part}_s": getattr(parts, f"{part}_s") for part in PARTS}
        return {
            "breakdown": {"step_s": parts.step_s, **named},
            "busy_s": busy_s,
            "straggler": busy_s.index(max(busy_s)) if len(busy_s) > 1 else None,
        }

    def _first_typical(self) -> int:
        return self._steps[0].step + (WARM_UP_STEPS if self.num_steps <= len(self._steps) else 0) if self._steps else 0

    def _record(self, raw: RawStep) -> StepRecord:
        here = self.clocks.offset_ns(self.rank)
        return build_record(raw, last_rank_starts(raw, here), self.plans, rank=self.rank, offset_ns=here)


def typical(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps that show what a step costs: not the first two of a run, nor any longer than twice the median.

    (An evaluation or a checkpoint between two steps makes one of them long.)
    """
    steps = [step for step in steps if not step.discarded]
    chosen = [step for step in steps if step.step >= WARM_UP_STEPS] or steps
    if not chosen:
        return []
    median_s = sorted(step.step_s for step in chosen)[len(chosen) // 2]
    return [step for step in chosen if step.step_s <= 2.0 * median_s]
