"""The summary of a recorded run: means over its typical steps, by rank and by bucket, and a verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.profiling.record import Breakdown, BucketRecord, Change, StepRecord
from gradsync.profiling.run import Run

WORTH_NAMING = 0.05  # of a step: a smaller share of synchronization is not worth a change
STRAGGLER_MARGIN = 0.05  # a rank that is slower than the quickest by more than this is a straggler
BALANCE = "give it less of each batch, by `shard(..., balance=True)`, or see what else runs there"
MIN_RATE_BYTES = 1 << 16  # a rate is computed from at least this many bytes: fewer show the latency


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A typical step of one rank."""

    rank: int
    host: str
    step_s: float
    busy_s: float  # the time that it needed itself
    slower: float  # by what share of the quickest rank's time: 0.25 is a quarter more
    parts: Breakdown


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """A bucket in a typical step: the mean over steps and ranks."""

    index: int
    num_bytes: int
    sent_bytes: float
    ready_s: float
    encode_s: float
    waiting_s: float
    wire_s: float
    decode_s: float
    exposed_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run. Made by :func:`summarize`."""

    world_size: int
    num_hosts: int
    strategy: str
    transport: str
    num_steps: int  # recorded on every rank
    num_typical: int  # over which means are taken
    num_parameters: int
    gradient_bytes: int
    step_s: float
    parts: Breakdown  # the mean over the ranks
    efficiency: float  # the share of the ranks' time that goes into computing: 1 is perfect scaling
    sent_bytes: float  # by a rank in a step
    header_bytes: float  # of these, those that belong to no bucket
    bytes_per_s: float | None  # while data moved; None where no rank waited for data
    staleness: float | None
    straggler: int | None
    ranks: tuple[RankSummary, ...]
    buckets: tuple[BucketSummary, ...]
    changes: tuple[Change, ...] = ()  # of the members, in an elastic run

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarize(run: Run) -> RunSummary:
    """The means of the typical steps of a run. Raises ValueError if no rank has completed one."""
    steps = {rank: run.typical(rank) for rank in run.raw}
    steps = {rank: found for rank, found in steps.items() if found}
    if not steps:
        raise ValueError("no rank has completed a step, so there is nothing to sum up.")
    parts = {rank: Breakdown.mean([step.parts for step in found]) for rank, found in steps.items()}
    mean = Breakdown.mean(list(parts.values()))
    quickest_s = min(each.busy_s for each in parts.values())
    ranks = tuple(
        RankSummary(
            rank=rank,
            host=run.ranks[rank].host,
            step_s=each.step_s,
            busy_s=each.busy_s,
            slower=each.busy_s / quickest_s - 1.0 if quickest_s > 0.0 else 0.0,
            parts=each,
        )
        for rank, each in parts.items()
    )
    every = [step for found in steps.values() for step in found]
    stale = [step.staleness for step in every if step.staleness is not None]
    slowest = max(ranks, key=lambda each: each.busy_s)
    shapes = run.meta.params.values()
    return RunSummary(
        world_size=run.world_size,
        num_hosts=len({meta.host for meta in run.ranks.values()}),
        strategy=run.meta.strategy,
        transport=run.meta.transport,
        num_steps=run.num_steps,
        num_typical=min(len(found) for found in steps.values()),
        num_parameters=sum(math.prod(shape) for shape, _ in shapes),
        gradient_bytes=sum(bucket.num_bytes for bucket in every[-1].buckets),
        step_s=mean.step_s,
        parts=mean,
        efficiency=mean.compute_s / mean.step_s if mean.step_s > 0.0 else 0.0,
        sent_bytes=sum(step.sent_bytes for step in every) / len(every),
        header_bytes=sum(_of_no_bucket(step) for step in every) / len(every),
        bytes_per_s=_rate(every),
        staleness=sum(stale) / len(stale) if stale else None,
        straggler=slowest.rank if slowest.slower > STRAGGLER_MARGIN and len(ranks) > 1 else None,
        ranks=ranks,
        buckets=_buckets(run, every),
        changes=tuple(run.changes),
    )


def _of_no_bucket(step: StepRecord) -> int:
    """Bytes that are in the step's total and in no bucket; 0 where the strategy counts only the total."""
    in_buckets = sum(bucket.sent_bytes for bucket in step.buckets)
    return step.sent_bytes - in_buckets if in_buckets else 0


def verdict(summary: RunSummary, advice: dict[str, Any] | None = None) -> str:
    """The run in one sentence: what synchronization costs, the main cause, and what to do.

    ``advice``: ``Advice.as_dict()``; without it no remedy is named.
    """
    parts, step_s = summary.parts, summary.step_s
    share = parts.sync_s / step_s if step_s > 0.0 else 0.0
    if summary.world_size == 1:
        return "one worker has no peers to synchronize with: start two or more to see what that costs"
    if share < WORTH_NAMING:
        return f"your step is {100 * parts.compute_s / step_s:.0f} % compute: change nothing"
    causes = {
        "the wire": parts.wire_s,
        "the stragglers": parts.waiting_s,
        "the codec": parts.encode_s + parts.decode_s,
        "the copying into buckets": parts.pack_s,
    }
    cause, second = sorted(causes, key=lambda name: -causes[name])[:2]
    text = f"synchronization costs {100 * share:.0f} % of your step; it is {cause}"
    if causes[second] > 0.6 * causes[cause]:
        text += f" and {second}"
    elif cause == "the wire":
        text += ", not the stragglers"
    elif cause == "the stragglers":
        text += ", not the wire"
    slow = next((rank for rank in summary.ranks if rank.rank == summary.straggler), None)
    if cause == "the stragglers" and slow is not None:
        text += f": rank {slow.rank} needs {100 * slow.slower:.0f} % more time than the quickest"
        return f"{text}; {BALANCE}{_remedy(advice, also=True)}"
    return text + _remedy(advice)


def _remedy(advice: dict[str, Any] | None, *, also: bool = False) -> str:
    """What the advisor recommends. ``also``: another remedy was named already, so "no other choice" is left out."""
    if advice is None or (also and not advice["change"]):
        return ""
    if not advice["change"]:
        return "; no other choice would do much better"
    best = next(row for row in advice["rows"] if row["choice"] == advice["best"])
    risk = "" if best["exact"] else f" (risk to convergence: {best['risk']})"
    alone = "alone " if also else ""
    return f"; {alone}`{best['choice']}` would take it to about {100 * best['share']:.0f} %{risk}"


def _buckets(run: Run, steps: Sequence[StepRecord]) -> tuple[BucketSummary, ...]:
    last = max(steps, key=lambda step: step.step)
    plan = next((raw.plans[-1] for raw in run.raw.values() if raw.plans), [])
    found = []
    for index in range(len(last.buckets)):
        same: list[BucketRecord] = [
            step.buckets[index]
            for step in steps
            if len(step.buckets) == len(last.buckets) and step.buckets[index].num_bytes == last.buckets[index].num_bytes
        ]
        place = last.buckets[index].index

        def mean(name: str, records: Sequence[BucketRecord] = same) -> float:
            return sum(float(getattr(record, name)) for record in records) / len(records)

        found.append(
            BucketSummary(
                index=place,
                num_bytes=last.buckets[index].num_bytes,
                sent_bytes=mean("sent_bytes"),
                ready_s=mean("ready_s"),
                encode_s=mean("encode_s"),
                waiting_s=mean("waiting_s"),
                wire_s=mean("wire_s"),
                decode_s=mean("decode_s"),
                exposed_s=mean("exposed_s"),
                names=tuple(plan[place][1]) if place < len(plan) else (),
            )
        )
    return tuple(found)


def moving_rate(step: StepRecord) -> float | None:
    """The bytes a second that a rank sent while its data moved, a lower bound; None where no thread waited for data.

    The end of a collective is known exactly only where a thread waited for it: the others are left out.
    """
    seen = [bucket for bucket in step.buckets if bucket.seen and bucket.wire_s > 0.0]
    sent, taken_s = sum(bucket.sent_bytes for bucket in seen), sum(bucket.wire_s for bucket in seen)
    return sent / taken_s if sent >= MIN_RATE_BYTES else None


def _rate(steps: Sequence[StepRecord]) -> float | None:
    rates = sorted(rate for step in steps if (rate := moving_rate(step)) is not None)
    return rates[len(rates) // 2] if rates else None
