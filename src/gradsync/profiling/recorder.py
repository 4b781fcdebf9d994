"""The recorder: always on, and cheap. It keeps the notes of the last steps and works nothing out before it is asked.

[Note: one step late] How long a rank was stopped, it sees itself. *Why* it was stopped, only the others know: a
collective waits for its slowest rank first, and only then does data move. So each rank's header, which goes round
anyway, says when that rank was where in the step before: a record is complete one step late, and costs no collective.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from gradsync.comm.base import Communicator, Work
from gradsync.header import NOTHING_TOLD, Header, Told
from gradsync.profiling.clocks import Clocks
from gradsync.profiling.parts import build, last_begun, told_starts
from gradsync.profiling.raw import CALL, DECODE, ENCODE, JOIN, MEETING, OTHER, WAIT, Op, Plan, RawStep
from gradsync.profiling.record import PARTS, Breakdown, StepRecord
from gradsync.profiling.seam import Recording
from gradsync.profiling.watched import Watched

log = logging.getLogger("gradsync")

KEEP_STEPS = 256  # more => longer means, more memory: about 10 KB a step of 20 buckets
WARM_UP_STEPS = 2  # buckets are laid out anew after the first; neither it nor the next is like the others
SEEN_NS = 20_000  # a wait longer than this was one
ASK_NS = 3_000_000  # how often collectives are asked whether they are over, at the most: to ask may be to read them

Listener = Callable[[StepRecord], None]
Sink = Callable[[RawStep], None]


class Recorder(Recording):
    """Notes of the last steps of one synchronizer on this rank: ``sync.record``.

    Args:
        comm: only its rank and its number of ranks are read.
        clocks: what the other ranks' clocks say when this one's says something.
        keep: how many steps are kept.

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

    def __init__(self, comm: Communicator, clocks: Clocks, *, keep: int = KEEP_STEPS) -> None:
        if keep < 1:
            raise ValueError(f"expected at least 1 step to keep; got {keep=}.")
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.clocks = clocks
        self.detailed = False  # also note when each single gradient came
        self.plans: list[Plan] = []  # those that there were, by number
        self.num_steps = 0
        self._kept: deque[RawStep] = deque(maxlen=keep)
        self._listeners: list[Listener] = []
        self._sinks: list[Sink] = []
        self._stop_after: tuple[int, type[BaseException]] | None = None
        self._beside = 0  # the thread that reduces beside the one that trains
        self._pending: deque[tuple[Work, Op]] = deque()  # collectives that can be asked for free whether they are over
        self._asked = 0  # when they were
        self._reset(self.now())
        self._last_words = NOTHING_TOLD

    def _reset(self, start: int) -> None:
        """Begin a step."""
        self._raw = RawStep(start)
        self._bucket = -1  # that a reducer is at work on...
        self._run = 0  # ...since when, if it has not started a collective since
        self._stopped_ns = 0  # of the thread that trains, in collectives
        self._pending.clear()

    # -- what is noted --------------------------------------------------------------------------------------------

    now = staticmethod(time.perf_counter_ns)  # asked some hundred times a step: without a frame of Python's

    def hooked(self, entered: int, name: str = "") -> None:
        left = self.now()
        raw = self._raw
        raw.hook_ns += left - entered
        if self.detailed and name:
            raw.gradients.append((name, entered))
        pending = self._pending
        if left - self._asked < ASK_NS:
            return
        self._asked = left
        while pending and pending[0][0].done():
            op = pending.popleft()[1]
            op.done = op.done or left

    def planned(self, buckets: Sequence[Any]) -> None:
        self.plans.append([(bucket.num_bytes, [slot.name for slot in bucket.slots]) for bucket in buckets])

    def opened(self, step: int, *, has_data: bool) -> None:
        raw = self._raw
        raw.opened, raw.step, raw.has_data, raw.plan = self.now(), step, has_data, len(self.plans) - 1

    def ready(self, bucket: int) -> None:
        self._raw.ready.append((bucket, self.now()))

    def ended_backward(self) -> None:
        self._raw.backward = self.now()

    def optimized(self, entered: int) -> None:
        self._raw.optimizer = (entered, self.now())

    def spent(self, entered: int) -> None:
        self._spend(OTHER, entered)

    def met(self, entered: int) -> None:
        self._spend(MEETING, entered)

    def _spend(self, kind: int, entered: int) -> None:
        left = self.now()
        self._raw.spans.append((kind, -1, entered, left, True))
        self._stopped_ns += left - entered

    def stale(self, steps: float) -> None:
        self._raw.staleness = steps

    # -- collectives ----------------------------------------------------------------------------------------------

    def watch(self, comm: Communicator) -> Communicator:
        return Watched(comm, self)

    def begin(self, name: str, num_bytes: int) -> Op:
        """A collective begins; what its reducer did until now was to encode."""
        raw, called = self._raw, self.now()
        if self._run:
            raw.spans.append((ENCODE, self._bucket, self._run, called, get_ident() != self._beside))
            self._run = 0
        op = Op(len(raw.ops), self._bucket, name, num_bytes, called)
        raw.ops.append(op)
        return op

    def begun(self, op: Op, work: Work, *, finished: bool, may_ask: bool) -> None:
        """Starting a collective has returned."""
        left = self.now()
        self._stop(CALL, op, op.called, left)
        if finished:
            op.done, op.seen = left, True
        elif may_ask:
            self._pending.append((work, op))

    def waited(self, op: Op, entered: int) -> None:
        """Somebody has waited for a collective."""
        left = self.now()
        self._stop(WAIT, op, entered, left)
        if not op.done:
            op.done, op.seen = left, left - entered > SEEN_NS

    def asked(self, op: Op, entered: int, *, is_done: bool) -> None:
        """Somebody has asked whether a collective is over."""
        left = self.now()
        if left - entered > SEEN_NS:  # it was moved on
            self._stop(WAIT, op, entered, left)
        if is_done and not op.done:
            op.done = left

    def _stop(self, kind: int, op: Op, entered: int, left: int) -> None:
        ops = self._raw.ops
        if op.index >= len(ops) or ops[op.index] is not op:
            return  # of a backward that came to no end
        trains = get_ident() != self._beside
        self._raw.spans.append((kind, op.index, entered, left, trains))
        if trains:
            self._stopped_ns += left - entered

    def resume(self, bucket: int) -> None:
        self._bucket, self._run = bucket, self.now()

    def pause(self) -> None:
        if self._run:
            trains = get_ident() != self._beside
            self._raw.spans.append((DECODE, self._bucket, self._run, self.now(), trains))
        self._bucket, self._run = -1, 0

    def beside(self) -> None:
        self._beside = get_ident()

    def joined(self, entered: int) -> None:
        left = self.now()
        spans = self._raw.spans
        for kind, _, start, end, trains in spans:
            if not trains and kind in (CALL, WAIT):
                self._stopped_ns += max(0, min(left, end) - max(entered, start))
        spans.append((JOIN, -1, entered, left, True))
        self._beside = 0

    # -- the end of a step ----------------------------------------------------------------------------------------

    def told(self) -> Told:
        return self._last_words

    def ended_step(self, headers: Sequence[Header], *, weight: float) -> None:
        raw, stopped_ns = self._raw, self._stopped_ns
        raw.end = self.now()
        self._reset(raw.end)
        self._conclude(raw, headers, weight=weight, stopped_ns=stopped_ns)

    def _conclude(self, raw: RawStep, headers: Sequence[Header], *, weight: float, stopped_ns: int) -> None:
        """All marks of a step are known: keep it, and pass it on."""
        raw.weight = weight
        self._hear(headers)
        busy_ns = raw.end - raw.start - stopped_ns
        here = self.clocks.offset_ns(self.rank)
        self._last_words = Told(raw.step, (raw.opened + here) / 1e3, (last_begun(raw) + here) / 1e3, busy_ns / 1e3)
        self._kept.append(raw)
        self.num_steps += 1
        for sink in self._sinks:
            sink(raw)
        if self.world_size == 1 or not headers:  # nobody will say anything
            raw.heard = []
            self._tell(raw)
        if self._stop_after is not None and self.num_steps >= self._stop_after[0]:
            raise self._stop_after[1]()

    def _hear(self, headers: Sequence[Header]) -> None:
        """What all ranks say of the step before; see [Note: one step late]."""
        of = {header.told.step for header in headers}
        last = next((raw for raw in reversed(self._kept) if raw.step in of), None)
        if last is not None and len(of) == 1 and len(headers) == self.world_size:
            last.heard = [header.told for header in headers]
            self._tell(last)

    def _tell(self, raw: RawStep) -> None:
        if not self._listeners:
            return
        record = self._record(raw)
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception:  # a dashboard that is down must not end a training
                self._listeners.remove(listener)
                log.exception("%r failed at step %d, and is told of no more steps", listener, raw.step)

    # -- what is asked for ----------------------------------------------------------------------------------------

    def steps(self) -> list[StepRecord]:
        """The kept steps whose records are complete, the oldest first: all but the last one, with several ranks."""
        return [self._record(raw) for raw in self._kept if raw.heard is not None]

    def breakdown(self) -> Breakdown:
        """The mean of the typical steps: without the first two, and without those that something else held up."""
        return Breakdown.mean([step.parts for step in typical(self.steps())])

    def busy_s(self) -> list[float]:
        """How long each rank itself needed for a step, by the mean of the kept ones; empty before anything is known."""
        heard = [raw.heard for raw in self._kept if raw.heard and raw.step >= self._first_typical()]
        return (
            [sum(each[rank].busy_us for each in heard) / len(heard) / 1e6 for rank in range(len(heard[0]))]
            if heard
            else []
        )

    def on_step(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(record)`` once each step's record is complete; returns what takes it off again.

        It runs within ``backward()``: be quick. One that raises is taken off, and the log says so.

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
        """Hand the notes of every step over, raw and at once: to a file."""
        self._sinks.append(sink)

    def stop_after(self, num_steps: int, error: type[BaseException]) -> None:
        """Raise ``error()`` at the end of so many steps: out of ``backward()``, at the same one on all ranks."""
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
        return self._kept[0].step + (WARM_UP_STEPS if self.num_steps <= len(self._kept) else 0) if self._kept else 0

    def _record(self, raw: RawStep) -> StepRecord:
        here = self.clocks.offset_ns(self.rank)
        return build(raw, told_starts(raw, self.rank, here), self.plans, rank=self.rank, offset_ns=here)


def typical(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Those that tell what a step costs: not the first two of a run, nor any of more than twice the median.

    (An evaluation or a checkpoint between two steps makes one of them long.)
    """
    chosen = [step for step in steps if step.step >= WARM_UP_STEPS] or list(steps)
    if not chosen:
        return []
    median_s = sorted(step.step_s for step in chosen)[len(chosen) // 2]
    return [step for step in chosen if step.step_s <= 2.0 * median_s]
