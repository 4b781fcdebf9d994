"""What a recorded run comes to: means over its typical steps, rank by rank and bucket by bucket, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.profiling.record import Breakdown, BucketRecord, StepRecord
from gradsync.profiling.run import Run

WORTH_NAMING = 0.05  # of a step: what costs less is not where its time goes
SLOWER = 0.05  # than the others, by which a rank is called a straggler
LEAST_BYTES = 1 << 16  # that a rate is told from: less shows the latency


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """A typical step of one rank."""

    rank: int
    host: str
    step_s: float
    busy_s: float  # what it needed itself
    slower: float  # than the quickest rank, by what part of its time: 0.25 is a quarter more
    parts: Breakdown


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """A bucket in a typical step, by the mean over steps and ranks."""

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
class Summary:
    """What a run comes to. Made by :func:`summarize`."""

    world_size: int
    num_hosts: int
    strategy: str
    transport: str
    num_steps: int  # that were recorded on every rank
    num_typical: int  # that the means are of
    num_parameters: int
    gradient_bytes: int
    step_s: float
    parts: Breakdown  # the mean over the ranks
    efficiency: float  # how much of the ranks' time goes into computing: 1 is perfect scaling
    sent_bytes: float  # by a rank in a step
    bytes_per_s: float | None  # while data moved; None where nobody waited for any
    staleness: float | None
    straggler: int | None
    ranks: tuple[RankSummary, ...]
    buckets: tuple[BucketSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarize(run: Run) -> Summary:
    """The means of the typical steps of a run. ValueError if no rank has completed one."""
    steps = {rank: run.typical(rank) for rank in run.notes}
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
    return Summary(
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
        bytes_per_s=_rate(every),
        staleness=sum(stale) / len(stale) if stale else None,
        straggler=slowest.rank if slowest.slower > SLOWER and len(ranks) > 1 else None,
        ranks=ranks,
        buckets=_buckets(run, every),
    )


def verdict(summary: Summary, advice: dict[str, Any] | None = None) -> str:
    """The run in one sentence: what synchronization costs, what of it, and what to do.

    ``advice``: what the adviser said, by its ``as_dict``; without it no remedy is named.
    """
    parts, step_s = summary.parts, summary.step_s
    share = parts.sync_s / step_s if step_s > 0.0 else 0.0
    if summary.world_size == 1:
        return "one worker has nobody to synchronize with: start two or more to see what that costs"
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
    if cause == "the stragglers" and summary.straggler is not None:
        slow = next(rank for rank in summary.ranks if rank.rank == summary.straggler)
        text += f": rank {slow.rank} needs {100 * slow.slower:.0f} % more time than the quickest"
    return text + _remedy(advice)


def _remedy(advice: dict[str, Any] | None) -> str:
    if advice is None:
        return ""
    if not advice["change"]:
        return "; no other choice would do much better"
    best = next(row for row in advice["rows"] if row["choice"] == advice["best"])
    risk = "" if best["exact"] else f" (risk to convergence: {best['risk']})"
    return f"; `{best['choice']}` would take it to about {100 * best['share']:.0f} %{risk}"


def _buckets(run: Run, steps: Sequence[StepRecord]) -> tuple[BucketSummary, ...]:
    last = max(steps, key=lambda step: step.step)
    plan = next((notes.plans[-1] for notes in run.notes.values() if notes.plans), [])
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
    """Bytes a second that a rank sent while its data moved, at the least; None where nobody waited for any.

    When a collective was over is only known where somebody waited for it: the others are left out.
    """
    seen = [bucket for bucket in step.buckets if bucket.seen and bucket.wire_s > 0.0]
    sent, taken_s = sum(bucket.sent_bytes for bucket in seen), sum(bucket.wire_s for bucket in seen)
    return sent / taken_s if sent >= LEAST_BYTES else None


def _rate(steps: Sequence[StepRecord]) -> float | None:
    rates = sorted(rate for step in steps if (rate := moving_rate(step)) is not None)
    return rates[len(rates) // 2] if rates else None
