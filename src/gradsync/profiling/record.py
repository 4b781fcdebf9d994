"""The step record: what one step cost, as plain data that can be saved as JSON; and what a change of members cost.

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
class Merge:
    """What became of the sides of a partition when they met.

    >>> from gradsync.profiling.record import Merge
    >>> Merge(samples={"0": 40.0, "7@node1": 20.0}, split_s=12.34, distance=0.0301, took_s=0.05).describe()
    'the sides of a partition of 12.3 s merged (samples: 0: 40, 7@node1: 20), which moved the weights by 0.0301'
    """

    samples: dict[str, float]  # that each side has trained since the split, by the name of its history
    split_s: float  # for how long they were apart
    distance: float  # by which this worker's weights have moved
    took_s: float

    def describe(self) -> str:
        """What it did, in a few words."""
        samples = ", ".join(f"{name}: {count:g}" for name, count in self.samples.items())
        return (
            f"the sides of a partition of {self.split_s:.1f} s merged (samples: {samples}), "
            f"which moved the weights by {self.distance:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the members of an elastic run, as one worker saw it. Workers are given by their slots.

    >>> from gradsync.profiling.record import Change
    >>> change = Change(epoch=3, cause="worker 1 was lost", before=(0, 1), members=(0,), lost=(1,), stalled_s=0.05)
    >>> change.num_members, Change.from_dict(change.as_dict()) == change
    (1, True)
    """

    epoch: int  # that begins with it
    cause: str
    before: tuple[int, ...] = ()  # the members until then; empty on a newcomer, which does not know them
    members: tuple[int, ...] = ()  # in rank order
    lost: tuple[int, ...] = ()  # that died, or were given up
    left: tuple[int, ...] = ()  # that left in order
    joined: tuple[int, ...] = ()
    healed: tuple[int, ...] = ()  # that have taken over another's state: newcomers, and members that were a step behind
    step: int = 0  # the synchronizing steps that are committed
    discarded: bool = False  # this worker had begun a step, which was rolled back, and is done again
    stalled_s: float = 0.0  # from the notice of the loss until training goes on. The parts of it:
    agreeing_s: float = 0.0  # on the members
    connecting_s: float = 0.0
    restoring_s: float = 0.0  # comparing the replicas, rolling back, and copying the state to those that lack it
    attaching_s: float = 0.0  # new buckets
    healed_bytes: int = 0  # of state that was copied
    over: str = ""  # what the members are connected by, such as "shm" or "tcp over eth0"
    at_s: float = 0.0  # when it was over: seconds since 1970
    history: str = "0"  # another one on a side of a partition, such as "7@node1"
    merge: Merge | None = None  # of the sides of a partition
    lost_steps: int = 0  # that lost members have trained on their own since their last exchange, at most

    @property
    def num_members(self) -> int:
        return len(self.members)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Change:
        """Restore a change from ``as_dict``, directly or from JSON."""
        slots = {name: tuple(saved[name]) for name in ("before", "members", "lost", "left", "joined", "healed")}
        merge = None if saved.get("merge") is None else Merge(**saved["merge"])
        return Change(**{**saved, **slots, "merge": merge})

    def describe(self) -> str:
        """One line: what has happened, and what it cost.

        >>> from gradsync.profiling.record import Change
        >>> change = Change(epoch=3, cause="a test", members=(0, 2), lost=(1,), stalled_s=0.0512, discarded=True)
        >>> change.describe()
        'epoch 3 with 2 workers: worker 1 lost; a step is done again; stalled 0.05 s (a test)'
        """
        events = [
            f"worker{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))} {what}"
            for slots, what in ((self.lost, "lost"), (self.left, "left"), (self.joined, "joined"))
            if slots
        ]
        if self.healed:
            taken = f"{self.healed_bytes / 1e6:.3g} MB" if self.healed_bytes >= 1e5 else f"{self.healed_bytes} bytes"
            events.append(f"{taken} of state copied over {self.over}")
        if self.merge is not None:
            events.append(self.merge.describe())
        workers = "1 worker" if self.num_members == 1 else f"{self.num_members} workers"
        side = "" if self.history == "0" else f" of history {self.history}"
        text = f"epoch {self.epoch}{side} with {workers}: {', '.join(events) or 'the same ones'}"
        result = "a step is done again" if self.discarded else "no step is lost"
        if self.lost_steps:
            result = f"at most {self.lost_steps} steps since the last exchange are lost"
        text += f"; {result}; stalled {self.stalled_s:.2f} s"
        named = {"agreeing": self.agreeing_s, "connecting": self.connecting_s}
        named |= {"restoring": self.restoring_s, "attaching": self.attaching_s}
        parts = ", ".join(f"{name} {value_s:.2f}" for name, value_s in named.items() if value_s >= 0.005)
        return f"{text}{f': {parts}' if parts else ''} ({self.cause})"


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
    # In an elastic run:
    discarded: bool = False  # it was rolled back; a record of the same step follows. Its times are until the loss
    changes: tuple[Change, ...] = ()  # since the record before; if it was discarded, the last one came after it

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
                "changes": tuple(Change.from_dict(change) for change in saved.get("changes", ())),
            }
        )
