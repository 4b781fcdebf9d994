"""The recorder for gradients on a GPU: marks are events of its stream, read when the GPU has passed them.

The host's times say little there, since the host runs ahead. An event is passed when the compute stream reaches it:
the time from the mark before a wait to the mark after it is how long the GPU was idle. Gradient hooks are not
timed: the kernels that they launch are part of computing.

Not yet run on a GPU.
"""

from __future__ import annotations

import time

import torch

from gradsync.comm.base import Communicator
from gradsync.profiling.clocks import ClockOffsets
from gradsync.profiling.raw import CALL, WAIT, Op, RawStep
from gradsync.profiling.recorder import KEEP_STEPS, Recorder
from gradsync.replicas.header import StepHeaders

MAX_UNREAD_STEPS = 8  # a GPU that is further behind than this is waited for


class GpuRecorder(Recorder):
    """As :class:`Recorder`; a mark is the number of an event until the GPU has passed all of a step's events."""

    def __init__(self, comm: Communicator, clocks: ClockOffsets, *, keep: int = KEEP_STEPS) -> None:
        self._events: list[torch.Event] = []
        self._free: list[torch.Event] = []
        self._unread: list[tuple[RawStep, list[torch.Event], StepHeaders | None, float]] = []
        self._zero = torch.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_ns = time.perf_counter_ns()
        super().__init__(comm, clocks, keep=keep)

    def now(self) -> int:
        event = self._free.pop() if self._free else torch.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        return len(self._events)  # from 1 on: 0 means that there is no mark

    def grad_hook_ended(self, entered: int, name: str = "") -> None:
        if self.detailed and name:
            self._raw.gradients.append((name, entered))

    def waited(self, op: Op, entered: int) -> None:
        left = self.now()
        self._add_stall(WAIT, op, entered, left)
        if not op.done:
            op.done, op.seen = left, True

    def polled(self, op: Op, entered: int, *, is_done: bool) -> None:
        """Do nothing: the host polls, and the stream does not wait."""

    def step_ended(self, headers: StepHeaders | None, *, weight: float) -> None:
        end = self.now()
        raw, events, last = self._raw, self._events, self._events[-1]
        raw.end = end
        self._unread.append((raw, events, headers, weight))
        self._events = []
        self._carry_over(last)
        while self._unread and (self._unread[0][1][-1].query() or len(self._unread) > MAX_UNREAD_STEPS):
            self._read(*self._unread.pop(0))

    def _restart(self) -> None:
        """As on a CPU, with events of its own: the numbers of those before mean nothing in it."""
        self._events = []
        super()._restart()

    def _stop(self, raw: RawStep, step: int) -> None:
        """As on a CPU; its times are read at once, as a change of the members takes longer than waiting for the GPU."""
        super()._stop(raw, step)
        for step_before in self._unread:
            self._read(*step_before)
        self._unread = []
        self._convert(raw, self._events)
        self._events = []

    def _carry_over(self, last: torch.Event) -> None:
        """Begin the next step where this one ends: at the same event."""
        self._events.append(last)
        self._reset(1)

    def _read(self, raw: RawStep, events: list[torch.Event], headers: StepHeaders | None, weight: float) -> None:
        """Finish a step, once the GPU has passed all of its events."""
        self._convert(raw, events)
        stopped = sum(end - start for kind, _, start, end, _ in raw.spans if kind in (CALL, WAIT))
        self._free += events[1:-1]  # the first and the last belong to the steps around too
        self._finish_step(raw, headers, weight=weight, stalled_ns=stopped)

    def _convert(self, raw: RawStep, events: list[torch.Event]) -> None:
        """Turn the numbers of events into nanoseconds. Waits for the GPU to pass them."""
        events[-1].synchronize()
        at = [0, *(self._zero_ns + int(self._zero.elapsed_time(event) * 1e6) for event in events)]
        raw.start, raw.end, raw.opened, raw.backward = at[raw.start], at[raw.end], at[raw.opened], at[raw.backward]
        raw.optimizer = (at[raw.optimizer[0]], at[raw.optimizer[1]])
        raw.ready = [(bucket, at[mark]) for bucket, mark in raw.ready]
        raw.gradients = [(name, at[mark]) for name, mark in raw.gradients]
        raw.spans = [(kind, of, at[start], at[end], trains) for kind, of, start, end, trains in raw.spans]
        for op in raw.ops:
            op.called, op.done = at[op.called], at[op.done]
