"""The step record: what one step cost, as plain data that can be saved as JSON.

All times are seconds. Points in time count from the beginning of their step; ``StepRecord.began_s`` is that beginning
on the clock of rank 0. A step lasts from the end of one synchronizing backward to the end of the next, so steps
follow each other without a gap: the optimizer's step, data, forward, backward.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

PARTS = ("compute", "pack", "encode", "decode", "waiting", "wire")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where a step's time went, on its critical path: the six parts add up to the step.

    >>> from gradsync.profiling import Breakdown
    >>> parts = Breakdown(compute_s=0.7, pack_s=0.02, encode_s=0.05, decode_s=0.03, waiting_s=0.15, wire_s=0.05)
    >>> round(parts.step_s, 3), round(parts.sync_s, 3), round(parts.share("waiting"), 3)
    (1.0, 0.3, 0.15)
    """

    compute_s: float  # the script's own work: data, forward, backward, the optimizer
    pack_s: float = 0.0  # gradients into buckets and back, and whatever else the engine does itself
    encode_s: float = 0.0  # codecs, before sending: only where the step had to wait for it
    decode_s: float = 0.0  # codecs, after receiving: likewise
    waiting_s: float = 0.0  # stalled because another rank had not entered the same collective yet
    wire_s: float = 0.0  # stalled while data moved

    @property
    def step_s(self) -> float:
        return self.compute_s + self.sync_s

    @property
    def sync_s(self) -> float:
        """By how much the step would be shorter without synchronization."""
        return self.pack_s + self.encode_s + self.decode_s + self.waiting_s + self.wire_s

    @property
    def busy_s(self) -> float:
        """The time that this rank itself needed, whatever the others did."""
        return self.compute_s + self.pack_s + self.encode_s + self.decode_s

    def share(self, part: str) -> float:
        """A part's share of the step, 0 to 1."""
        return float(getattr(self, f"{part}_s")) / self.step_s if self.step_s > 0.0 else 0.0

    @staticmethod
    def mean(parts: list[Breakdown]) -> Breakdown:
        """The mean, part by part; all zeros for an empty list."""
        total = max(1, len(parts))
        return Breakdown(**{f.name: sum(getattr(each, f.name) for each in parts) / total for f in fields(Breakdown)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRecord:
    """One bucket of one step on one rank. Time that is not exposed was hidden behind the script's own computing."""

    index: int  # in the plan: buckets are sent in this order
    num_bytes: int  # of gradients, in memory
    sent_bytes: int  # that this rank put on the wire
    ready_s: float  # when its last gradient was in, on this rank
    started_s: float  # when this rank began its first collective
    all_started_s: float  # when the last rank did
    done_s: float  # when its mean was in place here
    encode_s: float  # how long, on whichever thread it ran
    decode_s: float
    waiting_s: float  # how long its collectives waited for the slowest rank; 0 on that rank itself
    wire_s: float  # how long they took once all ranks had entered; an upper bound unless `seen`
    exposed_s: float  # for how long of waiting and wire this rank's step stalled
    seen: bool  # a thread waited for the last collective, so its end is known exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a thread did from one point in time to another: for timelines."""

    kind: str  # "optimizer", "forward", "backward", "encode", "decode", "collective", "stopped"
    start_s: float
    end_s: float
    bucket: int = -1  # -1: of no bucket
    name: str = ""  # of a collective: "all_reduce", ...; of "stopped": the cause, "waiting" or "wire"
    main: bool = True  # on the training thread; False: on another
    all_started_s: float | None = None  # of a collective: when the last rank entered it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank."""

    step: int  # synchronizing backwards before this one
    rank: int
    began_s: float  # on rank 0's clock
    step_s: float
    parts: Breakdown
    optimizer_s: float = 0.0  # how long the optimizer's step took (that of the backward before)
    opened_s: float = 0.0  # when the first gradient came
    backward_s: float = 0.0  # when autograd finished and only the end of the synchronization remained
    sent_bytes: int = 0
    weight: float = 1.0  # samples or tokens that this rank contributed
    has_data: bool = True  # False: it took part with weight 0, because its data had ended
    staleness: float | None = None  # of the parameters used, in steps; None where the strategy has none
    buckets: tuple[BucketRecord, ...] = ()
    spans: tuple[Span, ...] = ()
    gradients: tuple[tuple[str, float], ...] = ()  # (parameter, when its gradient came), if the recorder is `detailed`

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> StepRecord:
        """Restore a record from ``as_dict``, directly or from JSON."""
        return StepRecord(
            **{
                **saved,
                "parts": Breakdown(**saved["parts"]),
                "buckets": tuple(BucketRecord(**bucket) for bucket in saved["buckets"]),
                "spans": tuple(Span(**span) for span in saved["spans"]),
                "gradients": tuple((name, float(when_s)) for name, when_s in saved["gradients"]),
            }
        )
