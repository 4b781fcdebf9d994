"""The raw marks that one rank records of one step: nanoseconds on its own clock, as plain lists; one line of JSON.

Nothing is computed here. ``parts.py`` computes step records from the marks on request, most often after the training.
"""

from __future__ import annotations

import json
from typing import Any

from gradsync.profiling.record import Change
from gradsync.replicas.header import NO_TIMING, PreviousStepTiming, StepTimings

CALL, WAIT, ENCODE, DECODE, JOIN, ENGINE_COMM, STRATEGY_COMM = range(7)  # kinds of spans

# (kind, its collective's index in `ops` or its bucket, start, end, on the training thread)
RawSpan = tuple[int, int, int, int, bool]

RecordedPlan = list[tuple[int, list[str]]]  # of each bucket: its bytes, and the parameters in it


class Op:
    """A collective, as this rank saw it."""

    __slots__ = ("bucket", "called", "done", "index", "name", "num_bytes", "seen")

    def __init__(
        self, index: int, bucket: int, name: str, num_bytes: int, called: int, done: int = 0, seen: bool = False
    ) -> None:
        self.index = index  # in the step's `ops`: the same on all ranks
        self.bucket = bucket  # -1: of no bucket
        self.name = name
        self.num_bytes = num_bytes  # the least that this rank sends
        self.called = called
        self.done = done  # when it was first known to have ended; 0: not yet
        self.seen = seen  # a thread waited for it, so `done` is when it ended


class RawStep:
    """The raw marks of one step. The names of the fields are those of the file format."""

    __slots__ = (
        "backward",
        "changes",
        "discarded",
        "end",
        "gradients",
        "has_data",
        "hook_ns",
        "is_complete",
        "opened",
        "ops",
        "optimizer",
        "own_timing",
        "plan",
        "ready",
        "sent",
        "spans",
        "staleness",
        "start",
        "step",
        "timings",
        "weight",
    )

    def __init__(self, start: int) -> None:
        self.step = -1
        self.start = start
        self.end = 0
        self.opened = 0  # when the first gradient came
        self.backward = 0  # when autograd finished
        self.hook_ns = 0  # spent in gradient hooks, whatever they do
        self.optimizer = (0, 0)
        self.plan = 0  # the number of the plan (`buckets_planned` calls before)
        self.weight = 1.0
        self.has_data = True
        self.staleness: float | None = None
        self.sent = 0  # bytes sent outside the collectives in `ops`, as the strategy counts them
        self.ready: list[tuple[int, int]] = []  # (bucket, when)
        self.ops: list[Op] = []
        self.spans: list[RawSpan] = []
        self.gradients: list[tuple[str, int]] = []  # (parameter, when); only where the recorder is `detailed`
        self.discarded = False  # see StepRecord
        self.changes: list[Change] = []
        # What follows is not saved: every rank saves its own steps.
        self.own_timing: PreviousStepTiming = NO_TIMING  # what this rank sends of this step, in its next header
        self.timings: StepTimings | None = None  # those of all ranks, from the headers of the next step
        self.is_complete = False  # the timings are known, or no other rank sends any

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "step": self.step,
                "start": self.start,
                "end": self.end,
                "opened": self.opened,
                "backward": self.backward,
                "hook_ns": self.hook_ns,
                "optimizer": self.optimizer,
                "plan": self.plan,
                "weight": self.weight,
                "has_data": self.has_data,
                "staleness": self.staleness,
                "sent": self.sent,
                "ready": self.ready,
                "ops": [[op.bucket, op.name, op.num_bytes, op.called, op.done, op.seen] for op in self.ops],
                "spans": self.spans,
                "gradients": self.gradients,
                **({"discarded": True} if self.discarded else {}),
                **({"changes": [change.as_dict() for change in self.changes]} if self.changes else {}),
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(saved: dict[str, Any]) -> RawStep:
        """Restore a step from a parsed line of ``to_json``."""
        raw = RawStep(saved["start"])
        for name in ("step", "end", "opened", "backward", "hook_ns", "plan", "weight", "has_data", "staleness"):
            setattr(raw, name, saved[name])
        raw.sent = saved.get("sent", 0)
        raw.optimizer = tuple(saved["optimizer"])
        raw.ready = [tuple(each) for each in saved["ready"]]
        raw.ops = [Op(index, *each) for index, each in enumerate(saved["ops"])]
        raw.spans = [tuple(each) for each in saved["spans"]]
        raw.gradients = [tuple(each) for each in saved["gradients"]]
        raw.discarded = saved.get("discarded", False)
        raw.changes = [Change.from_dict(change) for change in saved.get("changes", ())]
        return raw
