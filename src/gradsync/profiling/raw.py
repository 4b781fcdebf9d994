"""What one rank has noted of one step: marks in nanoseconds on its own clock, as plain lists. Lines of JSON both ways.

Nothing is worked out here: that is done when somebody asks (see parts.py), most often after the training.
"""

from __future__ import annotations

import json
from typing import Any

from gradsync.header import Told

CALL, WAIT, ENCODE, DECODE, JOIN, OTHER, MEETING = range(7)  # kinds of spans

# (kind, its collective's place in `ops` or its bucket, start, end, on the thread that trains)
RawSpan = tuple[int, int, int, int, bool]

Plan = list[tuple[int, list[str]]]  # of each bucket: its bytes, and the parameters in it


class Op:
    """A collective as this rank saw it."""

    __slots__ = ("bucket", "called", "done", "index", "name", "num_bytes", "seen")

    def __init__(
        self, index: int, bucket: int, name: str, num_bytes: int, called: int, done: int = 0, seen: bool = False
    ) -> None:
        self.index = index  # its place in the step's `ops`: the same on all ranks
        self.bucket = bucket  # -1: of no bucket
        self.name = name
        self.num_bytes = num_bytes  # that this rank sends, at the least
        self.called = called
        self.done = done  # when it was first known to be over; 0: not yet
        self.seen = seen  # somebody waited for it, so that this is when it was over


class RawStep:
    """The notes of one step."""

    __slots__ = (
        "backward",
        "end",
        "gradients",
        "has_data",
        "heard",
        "hook_ns",
        "opened",
        "ops",
        "optimizer",
        "plan",
        "ready",
        "spans",
        "staleness",
        "start",
        "step",
        "weight",
    )

    def __init__(self, start: int) -> None:
        self.step = -1
        self.start = start
        self.end = 0
        self.opened = 0
        self.backward = 0  # when autograd was done
        self.hook_ns = 0  # in the hooks of gradients, all that happens there included
        self.optimizer = (0, 0)
        self.plan = 0  # the number of the plan (`planned` calls so far)
        self.weight = 1.0
        self.has_data = True
        self.staleness: float | None = None
        self.ready: list[tuple[int, int]] = []  # (bucket, when)
        self.ops: list[Op] = []
        self.spans: list[RawSpan] = []
        self.gradients: list[tuple[str, int]] = []  # (parameter, when); only if asked for
        # What every rank said of this step one later. Not kept in files: there every rank has its own notes.
        self.heard: list[Told] | None = None

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
                "ready": self.ready,
                "ops": [[op.bucket, op.name, op.num_bytes, op.called, op.done, op.seen] for op in self.ops],
                "spans": self.spans,
                "gradients": self.gradients,
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(saved: dict[str, Any]) -> RawStep:
        """Take back what a line of ``to_json`` holds."""
        raw = RawStep(saved["start"])
        for name in ("step", "end", "opened", "backward", "hook_ns", "plan", "weight", "has_data", "staleness"):
            setattr(raw, name, saved[name])
        raw.optimizer = tuple(saved["optimizer"])
        raw.ready = [tuple(each) for each in saved["ready"]]
        raw.ops = [Op(index, *each) for index, each in enumerate(saved["ops"])]
        raw.spans = [tuple(each) for each in saved["spans"]]
        raw.gradients = [tuple(each) for each in saved["gradients"]]
        return raw
