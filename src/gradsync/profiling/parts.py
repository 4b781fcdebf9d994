"""From a rank's raw marks of a step to its :class:`StepRecord`: what was on the critical path, and why it stalled.

A rank stalls in a collective. Until the last rank has entered the collective, that is *waiting*; from then on it is
*wire*. So all that a rank needs to know of the others is when each of them entered each collective.

[Note: background thread] Where a background thread reduces buckets, the training thread waits for it only at the end of
backward. The cause of that stall is whatever the background thread did meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsync.profiling.raw import (
    CALL,
    DECODE,
    ENCODE,
    ENGINE_COMM,
    JOIN,
    STRATEGY_COMM,
    WAIT,
    RawSpan,
    RawStep,
    RecordedPlan,
)
from gradsync.profiling.record import Breakdown, BucketRecord, Span, StepRecord

NS = 1e-9
MIN_SHOWN_NS = 50_000  # a shorter stall is left out of timelines


def last_rank_starts(raw: RawStep, offset_ns: int) -> list[int]:
    """When the last rank entered each collective, on this rank's clock, estimated from the step headers.

    A header holds two marks: the first gradient of the step, and the start of the last bucket. How late the latest rank
    was at these two is interpolated for the collectives in between.
    """
    own = [op.called for op in raw.ops]
    if raw.timings is None:
        return own
    first_us, last_us = raw.own_timing.opened_us, raw.own_timing.begun_us
    late_first = max(0.0, raw.timings.last_opened_us - first_us) * 1e3
    late_last = max(0.0, raw.timings.last_begun_us - last_us) * 1e3
    start, width = first_us * 1e3 - offset_ns, max(1.0, (last_us - first_us) * 1e3)
    starts, seen = [], set()
    for op in raw.ops:
        if op.bucket in seen and op.bucket >= 0:  # a later stage: it follows a collective that all ranks have entered
            starts.append(op.called)
            continue
        seen.add(op.bucket)
        place = min(1.0, max(0.0, (op.called - start) / width))
        starts.append(op.called + int(late_first + (late_last - late_first) * place))
    return starts


def last_bucket_start(raw: RawStep) -> int:
    """When this rank began to reduce its last bucket."""
    last = max((op.bucket for op in raw.ops), default=-1)
    return next((op.called for op in raw.ops if op.bucket == last >= 0), raw.opened)


class _Stalls:
    """What the training thread stalled for, part by part."""

    def __init__(self, raw: RawStep, all_called: Sequence[int]) -> None:
        self._raw = raw
        self._all_called = all_called
        self.ns = {"encode": 0, "decode": 0, "waiting": 0, "wire": 0}
        self.of_bucket: dict[int, int] = {}  # waiting and wire
        self.stopped: list[tuple[str, int, int, int]] = []  # ("waiting" or "wire", bucket, start, end)
        others = [span for span in raw.spans if not span[4]]
        for span in raw.spans:
            kind, _, start, end, trains = span
            if not trains:
                continue
            if kind != JOIN:
                self._add(span, start, end)
                continue
            for other in others:  # [Note: background thread]
                since, until = max(start, other[2]), min(end, other[3])
                if since < until:
                    self._add(other, since, until)

    def _add(self, span: RawSpan, start: int, end: int) -> None:
        kind, index = span[0], span[1]
        if kind == ENCODE:
            self.ns["encode"] += end - start
        elif kind == DECODE:
            self.ns["decode"] += end - start
        elif kind in (ENGINE_COMM, STRATEGY_COMM):
            self.ns["wire"] += end - start
            self.stopped.append(("wire", -1, start, end))
        else:
            assert kind in (CALL, WAIT), "a background thread joins no other thread"
            waiting = min(max(0, self._all_called[index] - start), end - start)
            self.ns["waiting"] += waiting
            self.ns["wire"] += end - start - waiting
            bucket = self._raw.ops[index].bucket
            self.of_bucket[bucket] = self.of_bucket.get(bucket, 0) + end - start
            self.stopped += [("waiting", bucket, start, start + waiting), ("wire", bucket, start + waiting, end)]


def build_record(
    raw: RawStep, all_called: Sequence[int], plans: Sequence[RecordedPlan], *, rank: int, offset_ns: int = 0
) -> StepRecord:
    """The record of one step on one rank.

    ``all_called``: when the last rank entered each collective, on this rank's clock.
    """
    stops = _Stalls(raw, all_called)
    ns = stops.ns
    step_ns = raw.end - raw.start
    # All spans but a strategy's communication around the optimizer's step lie in gradient hooks or after the last one:
    # the rest of that time is the engine's own.
    strategy_ns = sum(end - start for kind, _, start, end, _ in raw.spans if kind == STRATEGY_COMM)
    inside_ns = raw.hook_ns + strategy_ns + (raw.end - raw.backward if raw.backward else 0)
    pack_ns = max(0, inside_ns - sum(ns.values()))
    compute_ns = max(0, step_ns - pack_ns - sum(ns.values()))
    parts = Breakdown(
        compute_s=compute_ns * NS, pack_s=pack_ns * NS, **{f"{name}_s": value * NS for name, value in ns.items()}
    )
    plan = plans[raw.plan] if 0 <= raw.plan < len(plans) else []
    sizes = [num_bytes for num_bytes, _ in plan]
    return StepRecord(
        step=raw.step,
        rank=rank,
        began_s=(raw.start + offset_ns) * NS,
        step_s=step_ns * NS,
        parts=parts,
        optimizer_s=(raw.optimizer[1] - raw.optimizer[0]) * NS,
        opened_s=(raw.opened - raw.start) * NS,
        backward_s=(raw.backward - raw.start) * NS,
        sent_bytes=raw.sent + sum(op.num_bytes for op in raw.ops),
        weight=raw.weight,
        has_data=raw.has_data,
        staleness=raw.staleness,
        buckets=_buckets(raw, all_called, sizes, stops),
        spans=_spans(raw, all_called, stops),
        gradients=tuple((name, (when - raw.start) * NS) for name, when in raw.gradients),
        discarded=raw.discarded,
        changes=tuple(raw.changes),
    )


def _buckets(raw: RawStep, all_called: Sequence[int], sizes: Sequence[int], stops: _Stalls) -> tuple[BucketRecord, ...]:
    ready = dict(raw.ready)
    work = {kind: _total_by_bucket(raw, kind) for kind in (ENCODE, DECODE)}
    ends = {span[1]: span[3] for span in raw.spans if span[0] == DECODE}
    free = _free_since(raw)
    records = []
    for index, num_bytes in enumerate(sizes):
        ops = [op for op in raw.ops if op.bucket == index]
        filled = ready.get(index, raw.backward)  # a bucket with an unused parameter is filled at the end
        called = ops[0].called if ops else filled  # a single rank sends nothing
        all_there = max(called, all_called[ops[0].index]) if ops else called
        begins = [max(op.called, all_called[op.index], free[op.index]) for op in ops]
        over = [op.done or raw.end for op in ops]
        records.append(
            BucketRecord(
                index=index,
                num_bytes=num_bytes,
                sent_bytes=sum(op.num_bytes for op in ops),
                ready_s=(min(filled, called) - raw.start) * NS,
                started_s=(called - raw.start) * NS,
                all_started_s=(all_there - raw.start) * NS,
                done_s=(max([called, *over[-1:], ends.get(index, 0)]) - raw.start) * NS,
                encode_s=work[ENCODE].get(index, 0) * NS,
                decode_s=work[DECODE].get(index, 0) * NS,
                waiting_s=sum(max(0, all_called[op.index] - op.called) for op in ops) * NS,
                wire_s=sum(max(0, end - begin) for begin, end in zip(begins, over, strict=True)) * NS,
                exposed_s=stops.of_bucket.get(index, 0) * NS,
                seen=bool(ops) and ops[-1].seen,
            )
        )
    return tuple(records)


def _free_since(raw: RawStep) -> list[int]:
    """For each collective, when the one before it ended, if that was observed: they share the wire."""
    free, before = [], 0
    for op in raw.ops:
        free.append(before)
        before = max(before, op.done if op.seen else 0)
    return free


def _total_by_bucket(raw: RawStep, kind: int) -> dict[int, int]:
    total: dict[int, int] = {}
    for span in raw.spans:
        if span[0] == kind:
            total[span[1]] = total.get(span[1], 0) + span[3] - span[2]
    return total


def _spans(raw: RawStep, all_called: Sequence[int], stops: _Stalls) -> tuple[Span, ...]:
    def span(kind: str, start: int, end: int, bucket: int = -1, name: str = "", main: bool = True) -> Span:
        return Span(kind=kind, start_s=since(start), end_s=since(end), bucket=bucket, name=name, main=main)

    def since(mark: int) -> float:
        return (mark - raw.start) * NS

    begin, end = raw.optimizer
    spans = [span("optimizer", begin, end)] if end else []
    if raw.opened:
        spans.append(span("forward", max(raw.start, end), raw.opened))
        spans.append(span("backward", raw.opened, raw.backward))
    for kind, name in ((ENCODE, "encode"), (DECODE, "decode")):
        spans += [span(name, s[2], s[3], s[1], main=s[4]) for s in raw.spans if s[0] == kind]
    long = [each for each in stops.stopped if each[3] - each[2] > MIN_SHOWN_NS]
    spans += [span("stopped", start, until, bucket, why) for why, bucket, start, until in long]
    for op in raw.ops:
        made = span("collective", op.called, op.done or raw.end, op.bucket, op.name, main=False)
        spans.append(replace(made, all_started_s=since(max(op.called, all_called[op.index]))))
    return tuple(spans)
